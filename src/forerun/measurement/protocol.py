"""Settings of a measurement in one frozen value that travels as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from forerun.errors import InvalidSetupError

__all__ = ["Protocol"]

_LEAST_REPETITIONS = 3  # a median of fewer repetitions says nothing about its spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Settings of a measurement; the defaults suit steps between 1 ms and a few seconds.

    Attributes:
        min_warm_up: Number of repetitions that always come before the timed ones.
        max_warm_up: Number of repetitions after which the warm-up ends even if the times are not stationary.
        window: Number of repetitions in each of the two windows of the stationarity test; at least 3.
        tolerance: Relative difference of the windows' medians that always passes.
        num_repetitions: Number of timed repetitions; at least 3.
        max_seconds: Longest time of the warm-up, and of the timed repetitions; ``min_warm_up`` and three timed
            repetitions are always made [s].
        timeout_s: Longest time of a child, after which it is killed [s].
        anchor_every: Number of jobs between two measurements of the anchor; 0 for no anchors.
        anchor_tolerance: Relative change of the anchor beyond which the jobs between are marked unstable.
        max_relative_interval: Half width of the interval of the median, relative to the median, beyond which
            a run is marked unstable.
        num_threads: Number of threads of the framework; None for one per usable core.
        memory_limit_bytes: Memory a job may take on the host beyond that of the loaded framework; None for no
            limit [bytes].
        telemetry_every_s: Time between two readings of the sensors [s].
    """

    min_warm_up: int = 3
    max_warm_up: int = 60
    window: int = 5
    tolerance: float = 0.02
    num_repetitions: int = 20
    max_seconds: float = 30.0
    timeout_s: float = 900.0
    anchor_every: int = 10
    anchor_tolerance: float = 0.05
    max_relative_interval: float = 0.10
    num_threads: int | None = None
    memory_limit_bytes: int | None = None
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
            "memory_limit_bytes": 1,
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

    def to_json(self) -> str:
        """One line of JSON with every setting, keys sorted."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Protocol:
        """The protocol from the output of ``to_json``; absent settings take their defaults."""
        values = json.loads(text)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InvalidSetupError(
                f"expected settings of a protocol, got unknown {', '.join(unknown)}; "
                f"known are {', '.join(sorted(known))}"
            )
        return cls(**values)
