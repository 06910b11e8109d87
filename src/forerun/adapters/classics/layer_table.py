"""Single layers on a device as rows of a layer regressor: own measurements, and the public tables of 2018 and 2020."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.adapters import words_of
from forerun.adapters.classics.step_features import peak_flops_per_s
from forerun.base.errors import InvalidSetupError, RecordError, UsageError
from forerun.base.extras import needing
from forerun.evidence.fitting.evaluation import Floats
from forerun.evidence.measurement.layer_figures import layer_figures
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome, Scalar
from forerun.evidence.records.reading import columns_of, read_all
from forerun.evidence.records.step_record import repetition_s
from forerun.question.devices import find_device
from forerun.question.devices.device import Device
from forerun.question.setup import Precision

if TYPE_CHECKING:
    import pandas as pd

LAYER_SIZES = (
    "batch_size", "in_size", "in_features", "out_features", "kernel", "stride", "groups", "sequence_length",
    "num_heads",
)  # fmt: skip
LAYER_WORK = ("flops", "input_bytes", "output_bytes", "weight_bytes")
LAYER_DEVICE = ("peak_flops_per_s", "bandwidth_bytes_per_s", "memory_bytes", "num_compute_units")

LAYER_NUMBERS = (*LAYER_SIZES, *LAYER_WORK, *LAYER_DEVICE)
"""Numbers of a layer, in the order of their columns; a size that a kind of layer does not have is zero."""

LAYER_WORDS = (
    "layer",
    "mode",
    "padding",
    "use_bias",
    "activation",
    "optimizer",
    "precision",
    "layout",
    "framework",
)
"""Choices of a layer, in the order of their columns."""


class LayerCase(NamedTuple):
    """One layer on one device.

    Attributes:
        numbers: Its numbers in the order of ``LAYER_NUMBERS``.
        words: Its choices in the order of ``LAYER_WORDS``; "none" for one that it does not have.
        device: Device of the layer.
    """

    numbers: list[float]
    words: list[str]
    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFeatures:
    """One row per layer, n rows.

    Attributes:
        numbers: Columns ``LAYER_NUMBERS``, (n, numbers).
        words: Columns ``LAYER_WORDS``, text, (n, words).
    """

    numbers: Floats
    words: npt.NDArray[np.str_]

    def __post_init__(self) -> None:
        # Whatever a file holds: cases have these columns.
        assert self.numbers.shape == (len(self), len(LAYER_NUMBERS)), self.numbers.shape
        assert self.words.shape == (len(self), len(LAYER_WORDS)), self.words.shape
        if not np.all(np.isfinite(self.numbers) & (self.numbers >= 0)):
            row, column = np.argwhere(~(np.isfinite(self.numbers) & (self.numbers >= 0)))[0]
            raise RecordError(
                f"layer features: '{LAYER_NUMBERS[column]}' of row {row + 1} must be zero or more, "
                f"got {self.numbers[row, column]}; drop the row"
            )

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: npt.NDArray[np.int64]) -> LayerFeatures:
        """The rows with these indices, in their order."""
        return LayerFeatures(numbers=self.numbers[rows], words=self.words[rows])

    def number(self, name: str) -> Floats:
        """A column of ``LAYER_NUMBERS``, (n,)."""
        return np.asarray(self.numbers[:, LAYER_NUMBERS.index(name)], dtype=float)

    @property
    def flops(self) -> Floats:
        """Work of the forward pass [FLOP], (n,)."""
        return self.number("flops")

    @property
    def compute_s(self) -> Floats:
        """Work at the peak rate [s], (n,)."""
        return self.flops / self.number("peak_flops_per_s")

    @property
    def moved_bytes(self) -> Floats:
        """Traffic of the forward pass if every element moves once [bytes], (n,)."""
        return self.number("input_bytes") + self.number("output_bytes") + self.number("weight_bytes")


def layer_features(cases: Sequence[LayerCase]) -> LayerFeatures:
    """Features of layers; the work is that of the forward pass, the word ``mode`` names the measured part."""
    if not cases:
        raise RecordError("expected at least one layer to compute features of, got none")
    words = np.array([case.words for case in cases], dtype=np.str_)
    return LayerFeatures(numbers=np.array([case.numbers for case in cases], dtype=float), words=words)


_DEFAULT_WORDS = {
    "mode": "forward",
    "activation": "none",
    "optimizer": "none",
    "precision": str(Precision.FP32),
    "layout": "nchw",
}


def layer_case(
    kind: str, parameters: Mapping[str, Scalar], device: Device, framework: str = "pytorch"
) -> LayerCase:
    """One layer on a device.

    Args:
        kind: Kind of layer, as in ``measurement.layers.figures``.
        parameters: Sizes and choices of the layer under the names of the public layer tables.
        device: Device of the layer.
        framework: Framework of the layer; at equal sizes, times differ between frameworks.

    Raises:
        InvalidSetupError: No such kind, a size is missing, or sizes contradict each other.
    """
    figures = layer_figures(kind, parameters)
    words = {name: str(parameters.get(name) or default) for name, default in _DEFAULT_WORDS.items()}
    words |= {
        "layer": kind,
        "framework": framework,
        "use_bias": str(bool(parameters.get("use_bias"))).lower(),
    }
    # A layer without a window has no padding: a word of its own would split equal layers in two.
    if parameters.get("kernel") is not None:
        words["padding"] = str(parameters.get("padding") or "same")
    if words["mode"] == "forward" or not figures.num_parameters:  # nothing is updated
        words["optimizer"] = "none"
    values = {name: parameters.get(name) for name in LAYER_SIZES}
    sizes = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
    if "kernel" in sizes:
        sizes.setdefault("stride", 1.0)
    precision = Precision(words["precision"])
    element_bytes = 2.0 if precision.is_half else 4.0
    elements = (figures.num_inputs, figures.num_outputs, figures.num_parameters)
    numbers = [
        *(sizes.get(name, 0.0) for name in LAYER_SIZES),
        figures.flops,
        *(element_bytes * count for count in elements),
        peak_flops_per_s(device, precision),
        device.memory_bandwidth_bytes_per_s,
        device.memory_bytes,
        float(device.num_compute_units),
    ]
    return LayerCase(numbers, [words.get(name, "none") for name in LAYER_WORDS], device)


_DEVICES: dict[str, str] = words_of("layers")["devices"]
_SIZES = ("batch_size", "in_size", "kernel", "stride", "in_features", "out_features")
_CHOICES = ("padding", "use_bias", "activation", "optimizer", "mode")
_COLUMNS = {"gpu", "layer", "time_ms_median", *_SIZES, *_CHOICES}
_FRAMEWORK = "tensorflow"
# Rows of the table of 2020 that hold something other than the time of a layer on one GPU.
_NOT_A_LAYER_TIME = ("failed", "input_pipeline_bound", "suspect")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """Measured layers, n rows.

    Attributes:
        features: Figures of the layers.
        time_s: Measured times [s], (n,).
        configurations: Key that must stay on one side of a split: a layer with its sizes, on any device.
        devices: Device of each row.
        software: Frameworks with their versions.
        skipped: Number of rows left out, with the reason.
    """

    features: LayerFeatures
    time_s: Floats
    configurations: tuple[str, ...]
    devices: tuple[str, ...]
    software: tuple[str, ...]
    skipped: tuple[str, ...]


def measured_layer_table(measurements: Iterable[Measurement], device: Device | None = None) -> LayerTable:
    """Finished layer measurements.

    Args:
        measurements: Measurements of any kind; only timed layers are used.
        device: Device of the layers, if not the one that their device names mean.

    Raises:
        RecordError: There is no layer among the measurements.
    """
    rows: list[tuple[LayerCase, float, str]] = []
    software: dict[str, None] = {}
    reasons: dict[str, int] = {}
    for m in measurements:
        if m.kind is not JobKind.LAYER or m.outcome is not Outcome.DONE or not m.repetitions_s:
            continue
        around = m.circumstances
        place = device or find_device(around.device)
        try:
            case = layer_case(m.subject, m.parameters, place, around.framework)
        except InvalidSetupError as error:
            reasons[str(error)] = reasons.get(str(error), 0) + 1
            continue
        rows.append((case, repetition_s(m), _configuration(m.subject, m.parameters)))
        software[f"{around.framework} {around.framework_version}".strip()] = None
    if not rows:
        raise RecordError(
            "expected timed layers among the records, got none; measure some with: forerun measure layers"
        )
    return _table(rows, tuple(software), tuple(f"left out, {n} layers: {r}" for r, n in reasons.items()))


def _configuration(kind: str, parameters: Mapping[str, Scalar]) -> str:
    return " ".join([kind, *(f"{name}={parameters[name]}" for name in sorted(parameters) if name != "seed")])


def _table(
    rows: list[tuple[LayerCase, float, str]], software: tuple[str, ...], skipped: tuple[str, ...]
) -> LayerTable:
    return LayerTable(
        features=layer_features([case for case, _, _ in rows]),
        time_s=np.array([time_s for _, time_s, _ in rows], dtype=float),
        configurations=tuple(configuration for _, _, configuration in rows),
        devices=tuple(case.device.name for case, _, _ in rows),
        software=software,
        skipped=skipped,
    )


def is_public_layer_table(path: Path) -> bool:
    """True if a file is ``justus_layers`` or ``iit_layers``, or has their columns."""
    return path.suffix == ".parquet" and columns_of(path) >= _COLUMNS


def public_layer_table(path: Path, most_rows: int) -> LayerTable:
    """Layers of a public table (TensorFlow, fp32); sources in the notes beside those tables.

    Args:
        path: ``justus_layers`` or ``iit_layers``, Parquet.
        most_rows: Of more rows, a random sample of so many.

    Raises:
        RecordError: A device is not known, or no usable row is left.
    """
    with needing("a table of layers"):
        import pandas as pd

    frame: pd.DataFrame = pd.read_parquet(path)
    usable = _usable(frame)
    chosen = frame[usable]
    if chosen.empty:
        raise RecordError(f"{path.name}: expected rows with a time of one layer on one GPU, got none")
    if len(chosen) > most_rows:
        # At random, for the tables are sorted by device: the first rows would be of one GPU.
        chosen = chosen.sample(most_rows, random_state=0)
    unknown = sorted(set(chosen["gpu"]) - set(_DEVICES))
    if unknown:
        raise RecordError(
            f"{path.name}, column 'gpu': expected one of {', '.join(_DEVICES)}; got {unknown[0]}"
        )
    rows, num_impossible = _public_rows(chosen)
    if not rows:
        raise RecordError(f"{path.name}: no row describes a layer with an output; check its sizes")
    skipped = [f"left out, {int((~usable).sum())} rows that are no time of one layer on one GPU"]
    if num_impossible:
        skipped.append(f"left out, {num_impossible} rows whose sizes have no output")
    return _table(rows, (_FRAMEWORK,), tuple(skipped))


def _usable(frame: pd.DataFrame) -> pd.Series[bool]:
    times = frame["time_ms_median"]
    usable = times.notna() & (times > 0)
    for name in _NOT_A_LAYER_TIME:
        if name in frame:
            usable &= ~frame[name].fillna(False).astype(bool)
    if "n_gpus" in frame:  # a layer under a strategy also holds the strategy's synchronisation
        usable &= frame["n_gpus"] == 1
    return usable


def _public_rows(frame: pd.DataFrame) -> tuple[list[tuple[LayerCase, float, str]], int]:
    """Rows, and the number of rows without an output."""
    rows: list[tuple[LayerCase, float, str]] = []
    num_impossible = 0
    for row in frame.to_dict("records"):
        parameters = _parameters(row)
        kind = str(row["layer"])
        try:
            case = layer_case(kind, parameters, find_device(_DEVICES[str(row["gpu"])]), _FRAMEWORK)
        except InvalidSetupError:
            num_impossible += 1
            continue
        rows.append((case, float(row["time_ms_median"]) / 1e3, _configuration(kind, parameters)))
    return rows, num_impossible


def _parameters(row: Mapping[Any, Any]) -> dict[str, Scalar]:
    # An empty cell is NaN, which is not equal to itself.
    sizes = {name: int(row[name]) for name in _SIZES if row[name] == row[name] and row[name] is not None}
    choices = {name: row[name] for name in _CHOICES if row[name] == row[name] and row[name] is not None}
    return {**sizes, **choices, "use_bias": bool(row["use_bias"])}


MOST_PUBLIC_LAYERS = 30_000
"""Size of the random sample of a public layer table; more rows make the fit longer and hardly better."""


def read_layers(names: Sequence[str | Path], device: Device | None = None) -> LayerTable:
    """Layers of own records, or of one public layer table.

    Raises:
        RecordError: A source cannot be used, or holds no layer.
        UsageError: A public table is mixed with other records.
    """
    public = [name for name in names if is_public_layer_table(Path(name))]
    if not public:
        return measured_layer_table(read_all(names, device, JobKind.LAYER), device)
    if len(names) > 1:
        raise UsageError(
            f"the layers of {Path(public[0]).name} were measured with another framework than other records; "
            "fit each on its own"
        )
    return public_layer_table(Path(public[0]), MOST_PUBLIC_LAYERS)
