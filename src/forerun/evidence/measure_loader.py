"""Measures an input pipeline on a real folder, and the number of workers it needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError
from forerun.base.extras import require
from forerun.evidence.measurement.image_loading import image_files, loader_rates, loading_times
from forerun.prediction.estimate import Interval
from forerun.prediction.run_step import loader_rate_samples_per_s, workers_needed
from forerun.question.devices.here import container_limits
from forerun.question.input_pipeline import InputPipeline

__all__ = ["LoaderRate", "LoaderRun", "measure_loader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRate:
    """Rate of a real loader, and the rate that the cost of a sample predicts [samples/s]."""

    num_workers: int
    measured_samples_per_s: float
    predicted_samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRun(Answer):
    """Cost of loading a folder of images.

    Attributes:
        folder: Folder of the images.
        num_files: Number of images read.
        sample_bytes: Mean size of an image [bytes].
        sample_cost_s: Mean time of a core to decode and augment an image, with the least and largest round [s].
        decode_s, augment_s: The two parts of ``sample_cost_s`` [s].
        read_s: Mean time of reading an image again, when it is in memory [s].
        first_read_bytes_per_s: Bandwidth of the first round of reading; that of the storage if nothing was in memory.
        num_cores: Cores this process may use.
        rates: Measured and predicted rates of real loaders.
        wanted_samples_per_s: Throughput of the device in the question, None if not asked.
        workers_needed: Number of workers that keep the device busy; None if not asked or for lack of cores.
    """

    folder: str
    num_files: int
    sample_bytes: float
    sample_cost_s: Interval
    decode_s: float
    augment_s: float
    read_s: float
    first_read_bytes_per_s: float
    num_cores: float
    rates: tuple[LoaderRate, ...]
    wanted_samples_per_s: float | None
    workers_needed: int | None


def measure_loader(
    folder: str | Path,
    *,
    image_size: int = 224,
    augmentation: str = "crop",
    workers: Sequence[int] = (),
    batch_size: int = 32,
    most_files: int = 256,
    num_rounds: int = 4,
    seconds: float = 3.0,
    samples_per_s: float | None = None,
) -> LoaderRun:
    """Measures the time to read, decode and augment the images of a folder.

    Args:
        folder: A folder with images, at any depth.
        image_size: Height and width after augmentation [pixels].
        augmentation: crop (random resized crop and flip), resize or none.
        workers: Numbers of workers of a real ``DataLoader`` to check the prediction with; none if empty.
        batch_size: Batch size of one device.
        most_files: Largest number of files to read, spread evenly over the folder.
        num_rounds: Rounds over the files; the first one is warm-up.
        seconds: Time that each real loader runs, roughly [s].
        samples_per_s: Throughput of a device, to find the number of workers it needs.

    Raises:
        InvalidSetupError: An argument has an impossible value, or the folder has no images.
        MeasurementError: A file cannot be read or is not an image.
    """
    require("measuring a loader", "torch", "torchvision")
    _check(workers, batch_size, most_files, seconds, samples_per_s)
    files = image_files(Path(folder), most_files)
    times = loading_times(files, image_size=image_size, augmentation=augmentation, num_rounds=num_rounds)
    costs = times.round_costs_s
    cost = Interval(float(costs.mean()), float(costs.min()), float(costs.max()))
    num_cores = _num_cores()
    measured = loader_rates(
        files,
        workers,
        image_size=image_size,
        augmentation=augmentation,
        batch_size=batch_size,
        seconds=seconds,
        cost_s=cost.value,
    )
    mean_bytes, read_s = float(times.sample_bytes.mean()), float(times.read_s[1:].mean())

    def pipeline(num_workers: int) -> InputPipeline:
        # Reading a file again is part of the worker's time too.
        return InputPipeline(sample_cost_s=cost.value + read_s, num_workers=num_workers, num_cores=num_cores)

    rates = tuple(
        LoaderRate(
            num_workers=count,
            measured_samples_per_s=rate,
            predicted_samples_per_s=loader_rate_samples_per_s(pipeline(count)),
        )
        for count, rate in zip(workers, measured, strict=True)
    )
    return LoaderRun(
        folder=str(folder),
        num_files=len(files),
        sample_bytes=mean_bytes,
        sample_cost_s=cost,
        decode_s=float(times.decode_s[1:].mean()),
        augment_s=float(times.augment_s[1:].mean()),
        read_s=read_s,
        first_read_bytes_per_s=float(times.sample_bytes.sum() / max(times.read_s[0].sum(), 1e-9)),
        num_cores=num_cores,
        rates=rates,
        wanted_samples_per_s=samples_per_s,
        workers_needed=None if samples_per_s is None else workers_needed(pipeline(1), samples_per_s),
    )


def _num_cores() -> float:
    limit = container_limits().num_cores
    usable = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return usable if limit is None else min(limit, usable)


def _check(
    workers: Sequence[int], batch_size: int, most_files: int, seconds: float, samples_per_s: float | None
) -> None:
    if any(count < 0 for count in workers):
        raise InvalidSetupError(f"numbers of workers must be zero or more, got {min(workers)}")
    for name, value in {"batch size": batch_size, "number of files": most_files}.items():
        if value < 1:
            raise InvalidSetupError(f"{name} must be at least 1, got {value}")
    for name, amount in {"seconds of a try": seconds, "samples per second": samples_per_s}.items():
        if amount is not None and not 0 < amount < np.inf:
            raise InvalidSetupError(f"{name} must be above zero and finite, got {amount}")
