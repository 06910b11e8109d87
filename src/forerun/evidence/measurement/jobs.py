"""Jobs: small frozen descriptions of runs that travel to a child process, or to another host, as JSON.

A job does not depend on its timing (``protocol``) or its runner (``runners``). Its parameters are plain scalars, so
that one dictionary is its JSON form, its identity, and the ``parameters`` of its measurement.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forerun.base.answers import fields_of
from forerun.base.errors import InvalidSetupError
from forerun.question.settings import setting

if TYPE_CHECKING:
    from forerun.evidence.records.measurement import JobKind, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementJob:
    """One job to run.

    Attributes:
        kind: Kind of the job, which selects the runner.
        subject: Model as ``predict`` names it, or name of a layer.
        family: Group that must not be split between fit and test.
        parameters: All settings for the runner: batch_size, precision, layout, compile, optimizer, phase,
            image_size, num_epochs, sizes of the layer ... Scalars only.
    """

    kind: JobKind
    subject: str
    family: str
    parameters: dict[str, Scalar] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON with sorted keys."""
        return json.dumps(fields_of(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MeasurementJob:
        """The job from the output of ``to_json``."""
        from forerun.evidence.records.measurement import JobKind

        values = json.loads(text)
        return cls(**{**values, "kind": JobKind(values["kind"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a runner on the device.

    Attributes:
        warm_up_s: Repetitions before the step time was stationary [s].
        repetitions_s: Timed repetitions, in order [s].
        returned_s: Time until the call of the step returned, for each timed repetition; the device may still be at
            work [s].
        results: Figures beside time; see ``Measurement.results``.
        is_stationary: True if the times had settled before the timed repetitions, or during them.
    """

    repetitions_s: tuple[float, ...]
    warm_up_s: tuple[float, ...] = ()
    returned_s: tuple[float, ...] = ()
    results: dict[str, Scalar] = field(default_factory=dict)
    is_stationary: bool = True

    def with_results(self, **results: Scalar) -> RunResult:
        """The same times with figures beside them."""
        return replace(self, results=self.results | results)


def job_key(job: MeasurementJob, *, device: str, framework_version: str, occasion: str) -> str:
    """Identity of a job on a device with a framework on an occasion: 32 hexadecimal digits.

    All repetitions on one occasion share the key; the protocol's settings are not part of it.
    """
    text = "\n".join([job.to_json(), device, framework_version, occasion])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_LEAST_REPETITIONS = 3  # a median of fewer repetitions says nothing about its spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Settings of a measurement; the defaults suit steps between 1 ms and a few seconds.

    Attributes:
        min_warm_up: Number of repetitions that always come before the timed ones.
        max_warm_up: Number of repetitions after which the warm-up ends even if the times are not stationary.
        window: Number of repetitions in each of the two windows of the stationarity test; at least 3.
        tolerance: Relative difference of the windows' medians that always passes.
        anchor_every: Number of jobs between two measurements of the anchor; 0 for no anchors.
        anchor_tolerance: Relative change of the anchor beyond which the jobs between are marked unstable.
        max_relative_interval: Half width of the interval of the median, relative to the median, beyond which
            a run is marked unstable.
        telemetry_every_s: Time between two readings of the sensors [s].
    """

    min_warm_up: int = 3
    max_warm_up: int = 60
    window: int = 5
    tolerance: float = 0.02
    num_repetitions: int = setting(
        20,
        help="Timed repetitions of a step; at least 3.",
        group="timing",
        default="20; of layers 50, of compositions 30",
        flag="repetitions",
    )
    # However short it is, ``min_warm_up`` and three timed repetitions are made.
    max_seconds: float = setting(
        30.0,
        help="Most time of warm-up, and of repetitions, of one job [s].",
        group="timing",
        default="30; of layers and compositions 5",
    )
    timeout_s: float = setting(
        900.0,
        help="A job that takes longer is ended [s].",
        group="timing",
        default="900; of grids 3600, of layers and links 300",
    )
    anchor_every: int = 10
    anchor_tolerance: float = 0.05
    max_relative_interval: float = 0.10
    num_threads: int | None = setting(
        None, help="Threads of a processor.", group="timing", default="one for each core", flag="threads"
    )
    telemetry_every_s: float = 0.5

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "min_warm_up": 0,
            "max_warm_up": self.min_warm_up,
            "window": _LEAST_REPETITIONS,
            "tolerance": 0,
            "num_repetitions": _LEAST_REPETITIONS,
            "max_seconds": 0,
            "anchor_every": 0,
            "anchor_tolerance": 0,
            "max_relative_interval": 0,
            "num_threads": 1,
        }
        for name, bound in least.items():
            value = getattr(self, name)
            # Written so that "not a number" is refused too.
            if value is not None and not value >= bound:
                raise InvalidSetupError(
                    f"expected {name} of at least {bound:g}, got {value}; give a larger one"
                )
        for name in ("timeout_s", "telemetry_every_s"):
            if not getattr(self, name) > 0:
                raise InvalidSetupError(
                    f"expected {name} above zero, got {getattr(self, name)}; give a positive one"
                )
