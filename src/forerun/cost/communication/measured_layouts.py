"""Correction of predicted steps of several devices by steps that were measured: of the logarithm of a step.

The errors of predicted layouts (log of measured over predicted) are taken for a Gaussian process over the shape of a
step: near shapes err alike. With measured errors y at shapes X, a new shape x has

    mean = k (K + s^2 I)^-1 y,   variance = k(x, x) - k (K + s^2 I)^-1 k^T,   k(x, z) = a^2 + b^2 exp(-|x - z|)

where |x - z| is the distance of shapes in lengths that were fitted with a, b and s on public steps
(``studies/layouts/few_steps.py``). So a shape that was measured is predicted as it was measured, a like one nearly so,
and an unlike one as before.

Source: Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, equations 2.25 and 2.26.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.base.answers import from_plain
from forerun.base.errors import CostModelError
from forerun.base.received import DAMAGE, check_array, check_name, in_a_line, read_json

__all__ = ["ErrorLaw", "MeasuredLayouts", "StepShape", "is_layouts_file", "load_measured_layouts"]

Floats = npt.NDArray[np.float64]

_KIND = "forerun layouts measured"
_LEAST_S = 1e-6
_MOST_STEPS = 1000
"""The correction inverts a matrix of as many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Figures of a step that its error depends on.

    Attributes:
        hidden_size: Width of a token.
        block_s: Predicted micro-step of the slowest stage over its blocks [s].
        exposed_share: Share of the step that is communication which nothing hides.
        waiting_share: Share of the step that waits for the host.
    """

    hidden_size: float
    block_s: float
    exposed_share: float
    waiting_share: float

    @property
    def coordinates(self) -> tuple[float, float, float, float]:
        """Sizes by their logarithms, shares as they are."""
        return (
            log(max(1.0, self.hidden_size)),
            log(max(_LEAST_S, self.block_s)),
            self.exposed_share,
            self.waiting_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLaw:
    """Scatter of the logarithms of errors, and the lengths over which shapes err alike.

    Attributes:
        common: Standard deviation of what all steps of a cluster have in common.
        shape: That of what depends on the shape.
        noise: That of repeats of one shape.
        lengths: Lengths of the four coordinates of a shape.

    The figures are the likeliest on eight sources of public steps, at most 60 of each
    (``studies/layouts/few_steps.py``).
    """

    common: float = 0.030
    shape: float = 0.127
    noise: float = 0.025
    lengths: tuple[float, float, float, float] = (0.41, 0.19, 0.035, 0.11)

    def alike(self, one: Floats, other: Floats) -> Floats:
        """Covariances of errors at shapes, (n, m)."""
        distance = np.linalg.norm((one[:, None] - other[None]) / np.asarray(self.lengths), axis=-1)
        found: Floats = self.common**2 + self.shape**2 * np.exp(-distance)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayouts:
    """Measured steps of one kind of device.

    Attributes:
        device: Name of the device.
        shapes: Shapes of the steps.
        logs: Logarithms of measured over predicted steps.
        law: Scatter of errors.
    """

    device: str
    shapes: tuple[StepShape, ...]
    logs: tuple[float, ...]
    law: ErrorLaw = ErrorLaw()

    def correction(self, shape: StepShape) -> tuple[float, float]:
        """Mean of the logarithm of measured over predicted at a shape, and what is left of its standard deviation."""
        known = np.asarray([one.coordinates for one in self.shapes])
        here = np.asarray([shape.coordinates])
        law = self.law
        covariance = law.alike(known, known) + law.noise**2 * np.eye(len(known))
        near = law.alike(here, known)[0]
        weights = np.linalg.solve(covariance, near)
        before = law.common**2 + law.shape**2
        left = max(0.0, before - float(weights @ near))
        return float(weights @ np.asarray(self.logs)), float(
            np.sqrt((left + law.noise**2) / (before + law.noise**2))
        )

    def without(self, index: int) -> MeasuredLayouts | None:
        """The others of the steps; None if there are none."""
        if len(self.logs) == 1:
            return None
        kept = [number for number in range(len(self.logs)) if number != index]
        return MeasuredLayouts(
            device=self.device,
            shapes=tuple(self.shapes[number] for number in kept),
            logs=tuple(self.logs[number] for number in kept),
            law=self.law,
        )

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps({"kind": _KIND, **asdict(self)}, indent=1) + "\n"


def is_layouts_file(name: str | None) -> bool:
    """True for the name of a file of measured layouts, other than one of a calibrated device."""
    return name is not None and name.lower().endswith(".json")


def load_measured_layouts(path: Path, device: str) -> MeasuredLayouts:
    """The measured steps of a file.

    Raises:
        CostModelError: The file is missing, damaged, or of another device.
    """
    try:
        document = read_json(path)
        if not isinstance(document, dict) or document.pop("kind", None) != _KIND:
            raise ValueError("it is another kind of file")
        found: MeasuredLayouts = from_plain(MeasuredLayouts, document, least=-np.inf)
        _check_numbers(found)
    except DAMAGE as error:
        raise CostModelError(
            f"expected measured steps of layouts in {path.name}, but {in_a_line(error)}; make them with: "
            "forerun calibrate --from steps.csv --out FILE.json"
        ) from error
    if found.device != device:
        raise CostModelError(
            f"{path.name} holds steps measured on {found.device}, not on {device}; leave --calibration out"
        )
    return found


def _check_numbers(found: MeasuredLayouts) -> None:
    check_name("device", found.device)
    if not found.logs or len(found.logs) != len(found.shapes):
        raise ValueError(f"it has {len(found.logs)} logs of {len(found.shapes)} shapes")
    if len(found.logs) > _MOST_STEPS:
        raise ValueError(f"it has {len(found.logs):,} steps, more than {_MOST_STEPS:,}")
    ranges: dict[str, tuple[float, float]] = {
        "hidden_size": (0, 1e9),
        "block_s": (0, 1e9),
        "exposed_share": (0, 1),
        "waiting_share": (0, 1),
    }
    columns: dict[str, Sequence[float]] = {
        name: [getattr(shape, name) for shape in found.shapes] for name in ranges
    }
    law = asdict(found.law)
    columns |= {name: value if name == "lengths" else (value,) for name, value in law.items()}
    ranges |= {"common": (0, 10), "shape": (0, 10), "noise": (1e-4, 10), "lengths": (1e-4, 1e4)}
    for name, (low, high) in {**ranges, "logs": (-10, 10)}.items():
        values = np.asarray(columns.get(name, found.logs), dtype=np.float64)
        check_array(name, values, "float64", values.shape, low, high)
