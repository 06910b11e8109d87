"""Image files for a measurement, and the loading of their batches."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measurement.datasets import ImageSet

if TYPE_CHECKING:
    import torch

__all__ = ["AUGMENTATIONS", "LoadingTimes", "image_batches", "image_files", "loader_rates", "loading_times"]


class _Images:
    """A dataset that gives whole batches at once, as an image set in memory can."""

    def __init__(self, found: ImageSet) -> None:
        import torch

        self._images = torch.from_numpy(found.images)
        self._labels = torch.from_numpy(found.labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (batch, channels, height, width) between -0.5 and 0.5, and labels (batch,)."""
        import torch

        chosen = torch.as_tensor(indices)
        return self._images[chosen].float().div_(255).sub_(0.5), self._labels[chosen]


def _as_it_is(batch: Any) -> Any:
    return batch


def image_batches(
    found: ImageSet,
    batch_size: int,
    *,
    shuffle: bool,
    num_workers: int = 0,
    pin_memory: bool = False,
    seed: int = 0,
) -> torch.utils.data.DataLoader[Any]:
    """A loader of (images, labels); the last batch may be smaller.

    Args:
        found: Images with their labels.
        batch_size: Number of images in a batch.
        shuffle: True gives every epoch its own order.
        num_workers: Number of processes that prepare batches; 0 prepares them between the steps.
        pin_memory: True puts batches into memory that a GPU reads fastest.
        seed: Seed of the order.
    """
    import torch
    from torch.utils.data import DataLoader

    images: Any = _Images(found)
    return DataLoader(
        images,
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=_as_it_is,
        persistent_workers=num_workers > 0,
        generator=torch.Generator().manual_seed(seed),
    )


Floats = npt.NDArray[np.float64]

AUGMENTATIONS = ("crop", "resize", "none")
"""``crop``: random resized crop and flip, as training does; ``resize``: resize and centre crop; ``none``: as it is."""

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_RESIZE_OVER_CROP = 256 / 224


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingTimes:
    """Times of one core for one sample each, (rounds, files) [s].

    Attributes:
        read_s, decode_s, augment_s: The three parts; the first round of reading may come from the storage.
        sample_bytes: Sizes of the files, (files,) [bytes].
    """

    read_s: Floats
    decode_s: Floats
    augment_s: Floats
    sample_bytes: Floats

    @property
    def round_costs_s(self) -> Floats:
        """Mean time of decoding and augmenting a sample in each round but the first, (rounds - 1,) [s]."""
        whole: Floats = (self.decode_s + self.augment_s).mean(axis=1)
        return whole[1:]


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
    chosen = np.unique(np.linspace(0, len(found) - 1, min(most, len(found))).astype(int))
    return [found[index] for index in chosen]


def loading_times(
    files: Sequence[Path], *, image_size: int, augmentation: str, num_rounds: int
) -> LoadingTimes:
    """Times of reading, decoding and augmenting each file in each round, in this process with one thread.

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
        rounds = [[_timed(path, augment) for path in files] for _ in range(num_rounds)]
    finally:
        torch.set_num_threads(num_threads)
    times = np.asarray(rounds)
    return LoadingTimes(
        read_s=times[:, :, 0],
        decode_s=times[:, :, 1],
        augment_s=times[:, :, 2],
        sample_bytes=times[0, :, 3],
    )


def _timed(path: Path, augment: Callable[[Any], Any]) -> tuple[float, float, float, float]:
    begin = time.perf_counter()
    content = _read(path)
    read = time.perf_counter()
    image = _decoded(content, path)
    decoded = time.perf_counter()
    augment(image)
    return read - begin, decoded - read, time.perf_counter() - decoded, float(len(content))


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
    """The files as a dataset: reads, decodes and augments one at a time."""

    def __init__(self, files: Sequence[Path], image_size: int, augmentation: str, num_passes: int) -> None:
        self._files = list(files) * num_passes
        self._augment = _augment(image_size, augmentation)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        path = self._files[index]
        return self._augment(_decoded(_read(path), path))


def loader_rates(
    files: Sequence[Path],
    num_workers: Sequence[int],
    *,
    image_size: int,
    augmentation: str,
    batch_size: int,
    seconds: float,
    cost_s: float,
) -> list[float]:
    """Rate of PyTorch's ``DataLoader`` at each number of workers, after their start [samples/s].

    Args:
        files: Image files, read as often as needed.
        num_workers: Number of worker processes of each try, 0 for none.
        image_size: Height and width after augmentation [pixels].
        augmentation: Kind of augmentation, one of ``AUGMENTATIONS``.
        batch_size: Number of samples in a batch.
        seconds: Approximate time of each try [s].
        cost_s: Expected cost of a sample on one core [s].
    """
    rates = []
    for workers in num_workers:
        wanted = max(4 * batch_size * max(1, workers), int(seconds / cost_s * max(1, workers)))
        passes = -(-wanted // len(files))
        rates.append(_rate(_Files(files, image_size, augmentation, passes), workers, batch_size))
    return rates


def _rate(images: _Files, num_workers: int, batch_size: int) -> float:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(images, batch_size=batch_size, num_workers=num_workers, drop_last=True)  # type: ignore[arg-type]
    batches = iter(loader)
    # The first batches of all workers include their start, and batches prefetched meanwhile.
    for _ in range(2 * max(1, num_workers)):
        next(batches)
    begin = time.perf_counter()
    num_samples = sum(len(batch) for batch in batches)
    return num_samples / (time.perf_counter() - begin)
