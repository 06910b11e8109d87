"""The data loader of a training process, as plain numbers; ``prediction.run_step`` computes its throughput."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from forerun.base.errors import InvalidSetupError
from forerun.question.settings import flags, from_settings, names_needing, setting

_input = partial(setting, group="input")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPipeline:
    """A data loader of one training process; a bandwidth that is None is no limit."""

    sample_cost_s: float = _input(
        name="loader_ms",
        unit=1e-3,
        help="Time that one processor core takes to decode and augment a sample [ms].",
        words="time of a sample [ms]",
        low=0,
        high=1e6,
    )
    num_workers: int = _input(
        8,
        name="loader_workers",
        help="Worker processes of each device's data loader.",
        words="number of workers",
        low=0,
        high=10_000,
        needs="loader",
    )
    num_cores: float | None = _input(
        None,
        name="loader_cores",
        help="Processor cores that the workers of the data loader share.",
        words="number of cores",
        default="one per worker",
        above=0,
        high=1e6,
        needs="loader",
    )
    sample_bytes: float = _input(
        0.0,
        name="sample_kb",
        unit=1e3,
        help="Size of a stored sample [kB].",
        words="size of a sample [kB]",
        low=0,
        high=1e9,
        needs="loader",
        only_changed=True,
    )
    storage_bytes_per_s: float | None = _input(
        None,
        name="storage_mb_s",
        unit=1e6,
        help="Reading bandwidth of the storage [MB/s].",
        words="storage bandwidth [MB/s]",
        above=0,
        high=1e9,
        needs="loader",
    )
    network_bytes_per_s: float | None = _input(
        None,
        name="network_mb_s",
        unit=1e6,
        help="Bandwidth of the network to the storage [MB/s].",
        words="network bandwidth [MB/s]",
        above=0,
        high=1e9,
        needs="loader",
    )

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


class LoaderOptions(TypedDict, total=False):
    """Settings of the data loader by name."""

    loader_ms: float | None
    loader_workers: int | None
    loader_cores: float | None
    sample_kb: float | None
    storage_mb_s: float | None
    network_mb_s: float | None


def loader_from(given: Mapping[str, Any]) -> InputPipeline | None:
    """The data loader from settings by name; None if batches are always ready.

    Raises:
        InvalidSetupError: A setting has no meaning without the time of a sample.
    """
    if "loader_ms" in given:
        return InputPipeline(**from_settings(InputPipeline, given))
    named = [name for name in names_needing(InputPipeline, "loader") if name in given]
    if named:
        raise InvalidSetupError(
            f"{flags(named)}: the input pipeline needs --loader-ms as well; give the time of a sample"
        )
    return None
