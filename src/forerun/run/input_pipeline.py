"""The data loader of a training process, as plain numbers; ``prediction.input_pipeline`` computes its throughput."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.errors import InvalidSetupError

__all__ = ["InputPipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPipeline:
    """A data loader of one training process.

    Attributes:
        sample_cost_s: Time of one core to decode and augment a sample [s].
        num_workers: Worker processes; 0 loads in the training process.
        num_cores: Processor cores that the workers share, None for one per worker.
        sample_bytes: Size of a stored sample [bytes].
        storage_bytes_per_s: Reading bandwidth of the storage, None for no limit [bytes/s].
        network_bytes_per_s: Bandwidth of the network to the storage, None for no limit [bytes/s].
    """

    sample_cost_s: float
    num_workers: int
    num_cores: float | None = None
    sample_bytes: float = 0.0
    storage_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sample_cost_s < math.inf:
            raise InvalidSetupError(
                f"cost of a sample must be zero or more seconds, got {self.sample_cost_s}"
            )
        if self.num_workers < 0:
            raise InvalidSetupError(f"number of workers must be zero or more, got {self.num_workers}")
        if not 0 <= self.sample_bytes < math.inf:
            raise InvalidSetupError(f"size of a sample must be zero or more bytes, got {self.sample_bytes}")
        limits = {
            "number of cores": self.num_cores,
            "storage bandwidth": self.storage_bytes_per_s,
            "network bandwidth": self.network_bytes_per_s,
        }
        for name, value in limits.items():
            if value is not None and not value > 0:
                raise InvalidSetupError(f"{name} must be above zero, got {value}")
