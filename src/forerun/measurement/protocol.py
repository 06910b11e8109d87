"""How a job is timed: every setting of a measurement in one frozen value that travels as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from forerun.errors import InvalidSetupError

__all__ = ["Protocol"]

_LEAST_REPETITIONS = 3  # a median of fewer says nothing about its spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Settings of a measurement; the defaults suit steps between 1 ms and a few seconds.

    Attributes:
        min_warm_up: Repetitions that always come before the timed ones.
        max_warm_up: Repetitions after which the warm-up ends although the times are not stationary.
        window: Repetitions in each of the two windows that the stationarity test compares; at least 3.
        tolerance: Relative difference of the windows' medians that always passes.
        num_repetitions: Timed repetitions; at least 3.
        max_seconds: Warm-up ends, and the timed repetitions end, after this long each, except that
            ``min_warm_up`` and three repetitions are always made [s].
        timeout_s: A child that takes longer is killed [s].
        anchor_every: Jobs between two measurements of the anchor; 0 for no anchors.
        anchor_tolerance: Relative change of the anchor beyond which the jobs between are marked unstable.
        max_relative_interval: Half width of the interval of the median, relative to the median, beyond which
            a run is marked unstable.
        num_threads: Threads of the framework; None for one per usable core.
        memory_limit_bytes: Memory a job may take on the host beyond what the loaded framework has; None for no
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
        """The protocol that ``to_json`` wrote; settings that are absent take their defaults."""
        values = json.loads(text)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InvalidSetupError(
                f"expected settings of a protocol, got unknown {', '.join(unknown)}; "
                f"known are {', '.join(sorted(known))}"
            )
        return cls(**values)
