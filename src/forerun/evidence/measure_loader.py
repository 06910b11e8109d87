"""Measures an input pipeline on a real folder, and the number of workers it needs."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.base.extras import require
from forerun.prediction.estimate import Interval
from forerun.prediction.run_step import loader_rate_samples_per_s, workers_needed
from forerun.question.devices.here import container_limits
from forerun.question.job import InputPipeline


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
    times_s = loading_times(files, image_size=image_size, augmentation=augmentation, num_rounds=num_rounds)
    # The first round warms up: its files may come from the storage.
    read_s, decode_s, augment_s = times_s[1:].mean(axis=(0, 1)).tolist()
    costs_s = times_s[1:, :, 1:].sum(axis=2).mean(axis=1)
    cost = Interval(float(costs_s.mean()), float(costs_s.min()), float(costs_s.max()))
    sizes_bytes = np.asarray([path.stat().st_size for path in files], dtype=float)
    num_cores = _num_cores()

    def pipeline(num_workers: int) -> InputPipeline:
        # Reading a file again is part of the worker's time too.
        return InputPipeline(sample_cost_s=cost.value + read_s, num_workers=num_workers, num_cores=num_cores)

    def rate(num_workers: int) -> LoaderRate:
        wanted = max(1, num_workers) * max(4 * batch_size, int(seconds / cost.value))
        images = _Files(files, _augment(image_size, augmentation), num_passes=-(-wanted // len(files)))
        return LoaderRate(
            num_workers=num_workers,
            measured_samples_per_s=_loader_rate(images, num_workers, batch_size),
            predicted_samples_per_s=loader_rate_samples_per_s(pipeline(num_workers)),
        )

    return LoaderRun(
        folder=str(folder),
        num_files=len(files),
        sample_bytes=float(sizes_bytes.mean()),
        sample_cost_s=cost,
        decode_s=decode_s,
        augment_s=augment_s,
        read_s=read_s,
        first_read_bytes_per_s=float(sizes_bytes.sum() / max(times_s[0, :, 0].sum(), 1e-9)),
        num_cores=num_cores,
        rates=tuple(map(rate, workers)),
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


Floats = npt.NDArray[np.float64]

AUGMENTATIONS = ("crop", "resize", "none")
"""``crop``: random resized crop and flip, as training does; ``resize``: resize and centre crop; ``none``: as it is."""

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_RESIZE_OVER_CROP = 256 / 224


def image_files(folder: Path, most: int) -> list[Path]:
    """Image files below a folder; of more than ``most`` files, evenly spaced ones.

    Raises:
        InvalidSetupError: The folder is missing, or has no image in it.
    """
    if not folder.is_dir():
        raise InvalidSetupError(f"expected a folder of images, got '{folder}', which is none; check the path")
    found = sorted(
        Path(parent) / name
        for parent, _, names in os.walk(folder)
        for name in names
        if Path(name).suffix.lower() in _SUFFIXES
    )
    if not found:
        raise InvalidSetupError(
            f"expected images ({', '.join(sorted(_SUFFIXES))}) in or below '{folder}', found none"
        )
    # Spread over the folder: the files of one class are often alike in size.
    chosen = np.unique(np.linspace(0, len(found) - 1, min(most, len(found))).astype(int))
    return [found[index] for index in chosen]


def loading_times(files: Sequence[Path], *, image_size: int, augmentation: str, num_rounds: int) -> Floats:
    """Times of reading, decoding and augmenting each file, by one thread of this process, (rounds, files, 3) [s].

    Args:
        files: Image files.
        image_size: Height and width after augmentation [pixels].
        augmentation: Kind of augmentation, one of ``AUGMENTATIONS``.
        num_rounds: Number of rounds over the files, at least 2; the first one warms up.

    Raises:
        InvalidSetupError: An argument is out of its range.
        MeasurementError: A file is not an image, or cannot be read.
    """
    if num_rounds < 2:
        raise InvalidSetupError(f"rounds must be at least 2, the first warms up, got {num_rounds}")
    augment = _augment(image_size, augmentation)
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a worker of a loader has one thread
    try:
        return np.asarray([[_timed(path, augment) for path in files] for _ in range(num_rounds)])
    finally:
        torch.set_num_threads(num_threads)


def _timed(path: Path, augment: Callable[[Any], Any]) -> tuple[float, float, float]:
    begin = time.perf_counter()
    content = _read(path)
    read = time.perf_counter()
    image = _decoded(content, path)
    decoded = time.perf_counter()
    augment(image)
    return read - begin, decoded - read, time.perf_counter() - decoded


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MeasurementError(f"'{path}' cannot be read: {error.strerror or error}") from error


def _decoded(content: bytes, path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content)).convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise MeasurementError(f"'{path}' is not an image that can be decoded: {error}; remove it") from error


def _augment(image_size: int, name: str) -> Callable[[Any], Any]:
    if image_size < 1:
        raise InvalidSetupError(f"an image size must be at least 1 pixel, got {image_size}")
    from torchvision import transforms

    end = [transforms.ToTensor(), transforms.Normalize(_MEAN, _DEVIATION)]
    steps: dict[str, list[Any]] = {
        "crop": [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()],
        "resize": [
            transforms.Resize(round(image_size * _RESIZE_OVER_CROP)),
            transforms.CenterCrop(image_size),
        ],
        "none": [transforms.Resize((image_size, image_size))],
    }
    if name not in steps:
        raise InvalidSetupError(f"an augmentation is one of {', '.join(AUGMENTATIONS)}, got '{name}'")
    composed: Callable[[Any], Any] = transforms.Compose([*steps[name], *end])
    return composed


class _Files:
    """The files, some times over, as a dataset: reads, decodes and augments one at a time."""

    def __init__(self, files: Sequence[Path], augment: Callable[[Any], Any], num_passes: int) -> None:
        self._files = list(files) * num_passes
        self._augment = augment

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        path = self._files[index]
        return self._augment(_decoded(_read(path), path))


def _loader_rate(images: _Files, num_workers: int, batch_size: int) -> float:
    """Rate of PyTorch's ``DataLoader`` after its start [samples/s]."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(images, batch_size=batch_size, num_workers=num_workers, drop_last=True)  # type: ignore[arg-type]
    batches = iter(loader)
    # The first batches of all workers include their start, and batches prefetched meanwhile.
    for _ in range(2 * max(1, num_workers)):
        next(batches)
    begin = time.perf_counter()
    num_samples = sum(len(batch) for batch in batches)
    return num_samples / (time.perf_counter() - begin)
