"""Errors put on forecasts on purpose, to see what they cost a policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.errors import InvalidSetupError

__all__ = ["NO_ERROR", "ForecastError", "JobErrors"]

_SERVER_TABLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastError:
    """Spread of lognormal factors on what a policy is told.

    Attributes:
        speed: Standard deviation of the logarithm of the speed's factor. Half of its variance is one draw per job,
            the other half a draw for each number of devices, so that both the level and the gains are wrong.
        work: The same for the remaining work, one draw per job that stays to its end.
    """

    speed: float = 0.0
    work: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.speed < np.inf and 0 <= self.work < np.inf):
            raise InvalidSetupError(
                f"the spread of a forecast error must be zero or more, got "
                f"{self.speed} for speed and {self.work} for work"
            )

    def draw(self, seed: int, number: int) -> JobErrors:
        """Factors of one job; the same for the same seed and number, whatever the spread."""
        chance = np.random.default_rng([seed, number])
        work, level = chance.standard_normal(2)
        return JobErrors(
            work_factor=float(np.exp(self.work * work)),
            speed_level=float(self.speed * level / np.sqrt(2)),
            speed_spread=float(self.speed / np.sqrt(2)),
            seed=(seed, number),
        )


NO_ERROR = ForecastError()
"""Policies are told the truth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobErrors:
    """The drawn factors of one job.

    Attributes:
        work_factor: On the remaining work.
        speed_level: Logarithm of the factor on all speeds.
        speed_spread: Standard deviation of the further factor of each number of devices, in logarithm.
        seed: Of the further factors.
    """

    work_factor: float
    speed_level: float
    speed_spread: float
    seed: tuple[int, int]

    @property
    def has_speed_error(self) -> bool:
        """True if any speed is changed."""
        return self.speed_spread > 0

    def speed_factors(self, kind: int, max_devices: int) -> npt.NDArray[np.float64]:
        """Factor by number of devices of the kind with this number, (max_devices + 1,)."""
        chance = np.random.default_rng([*self.seed, 1 + kind])
        return np.exp(self.speed_level + self.speed_spread * chance.standard_normal(max_devices + 1))

    def server_table(self) -> npt.NDArray[np.float64]:
        """Factor by workers and servers, both modulo the size of the table."""
        chance = np.random.default_rng([*self.seed, 0])
        shape = (_SERVER_TABLE, _SERVER_TABLE)
        return np.exp(self.speed_level + self.speed_spread * chance.standard_normal(shape))
