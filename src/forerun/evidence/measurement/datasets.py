"""Images of a training and their batches: CIFAR-10, MNIST, PatchCamelyon, synthetic ones, or scikit-learn's digits.

CIFAR-10, MNIST and PatchCamelyon (``pcam``, which needs the package h5py) are read by torchvision from the folder in
``FORERUN_DATASETS``, or one in the user's cache, and downloaded if they are missing. Synthetic images hold a faint
pattern of their class under noise: a network can learn them, but an accuracy on them says nothing about real images.
The digits are 1,797 real scans of 8x8 pixels that come with scikit-learn; they are enlarged by repeating pixels, every
fifth is held out, and they need no network.

Source of the sizes: Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images, chapter 3; LeCun, Cortes
and Burges 1998; Veeling et al. 2018.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError, MeasurementError, near_matches
from forerun.base.extras import needing

if TYPE_CHECKING:
    import torch

DATASETS = ("cifar10", "mnist", "pcam", "synthetic", "digits")
NUM_TRAINING_IMAGES = 50_000
NUM_TEST_IMAGES = 10_000
NUM_CLASSES = 10
_IMAGE_SIZE = 32


@dataclass(frozen=True, slots=True)
class _Published:
    """A dataset that torchvision downloads.

    Attributes:
        title: Its name in messages and in ``torchvision.datasets``.
        image_size: Height and width [pixels].
        num_classes: Classes.
        num_training, num_test: Images of each part.
    """

    title: str
    image_size: int
    num_classes: int
    num_training: int
    num_test: int


_PUBLISHED = {
    "cifar10": _Published("CIFAR10", 32, 10, NUM_TRAINING_IMAGES, NUM_TEST_IMAGES),
    "mnist": _Published("MNIST", 28, 10, 60_000, 10_000),
    "pcam": _Published("PCAM", 96, 2, 262_144, 32_768),
}
_PCAM_FILE = "pcam/camelyonpatch_level_2_split_{}_{}.h5"

_NUM_DIGITS = 1797
_DIGIT_SIZE = 8
_DIGIT_TOP = 16
_HELD_OUT_DIGITS = 5  # every fifth

_PATTERN_CELLS = 4
_PATTERN_STRENGTH = 24  # of 255, under noise of standard deviation 67: some hundred steps to learn
_CHUNK = 4096
_DOWNLOAD_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSet:
    """Images in memory.

    Attributes:
        images: (images, channels, height, width), 0 to 255.
        labels: Class of each image, (images,).
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


def dataset_folder() -> Path:
    """Folder of datasets: ``FORERUN_DATASETS``, or the user's cache folder."""
    if chosen := os.environ.get("FORERUN_DATASETS"):
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("forerun")) / "datasets"


def dataset_size(name: str, *, train: bool) -> int:
    """Number of images in a part of a dataset."""
    if name == "digits":
        num_held_out = -(-_NUM_DIGITS // _HELD_OUT_DIGITS)
        return _NUM_DIGITS - num_held_out if train else num_held_out
    found = _PUBLISHED.get(name, _PUBLISHED["cifar10"])  # synthetic images are as many as those of CIFAR-10
    return found.num_training if train else found.num_test


def own_image_size(name: str) -> int:
    """Height and width of the images of a dataset, where nobody asks for others [pixels]."""
    return _PUBLISHED[name].image_size if name in _PUBLISHED else _IMAGE_SIZE


def class_count(name: str) -> int:
    """Classes of a dataset."""
    return _PUBLISHED[name].num_classes if name in _PUBLISHED else NUM_CLASSES


def check_dataset(name: str, image_size: int = _IMAGE_SIZE) -> None:
    """Makes sure that a dataset can be read; downloads a missing one.

    Raises:
        InvalidSetupError: There is no such dataset, or it has no images of this size.
        MeasurementError: The dataset is missing and cannot be downloaded.
    """
    if name not in DATASETS:
        raise InvalidSetupError(
            f"unknown dataset '{name}'{near_matches(name, DATASETS)}; expected {', '.join(DATASETS)}"
        )
    if name == "digits" and image_size % _DIGIT_SIZE:
        raise InvalidSetupError(
            f"digits can be enlarged to multiples of {_DIGIT_SIZE} pixels, got image size {image_size}; use 32"
        )
    if name in _PUBLISHED:
        if image_size != own_image_size(name):
            raise InvalidSetupError(
                f"{name} has images of {own_image_size(name)} pixels, got image size {image_size}; "
                "use --dataset synthetic for another size"
            )
        _published(name, train=True)


def load_images(
    name: str,
    *,
    train: bool,
    num_images: int | None = None,
    image_size: int = _IMAGE_SIZE,
    num_classes: int = NUM_CLASSES,
    num_channels: int = 3,
    seed: int = 0,
) -> ImageSet:
    """The training or the held-out part of a dataset.

    Args:
        name: Name of the dataset, one of ``DATASETS``.
        train: True for the training part, False for the held-out part.
        num_images: Number of images, taken from the start; None for all.
        image_size: Height and width of synthetic images [pixels].
        num_classes: Number of classes of synthetic images.
        num_channels: Number of channels of synthetic images; grey images are repeated in as many.
        seed: Seed of synthetic images.
    """
    full = dataset_size(name, train=train)
    wanted = min(full, num_images or full)
    if name == "synthetic":
        shape = (num_channels, image_size, image_size)
        return synthetic_images(
            wanted, shape=shape, num_classes=num_classes, seed=seed, part=0 if train else 1
        )
    check_dataset(name, image_size)
    if name == "digits":
        return _digits(train=train, wanted=wanted, image_size=image_size, num_channels=num_channels)
    if name == "pcam":
        _published(name, train=train)
        return _pcam(train=train, wanted=wanted)
    found = _published(name, train=train)
    images, labels = np.asarray(found.data[:wanted]), np.asarray(found.targets[:wanted], dtype=np.int64)
    if images.ndim == 3:  # grey
        shape = (len(images), num_channels, *images.shape[1:])
        images = np.broadcast_to(images[:, None], shape)
    else:
        images = images.transpose(0, 3, 1, 2)
    return ImageSet(images=np.ascontiguousarray(images), labels=labels)


def synthetic_images(
    num_images: int,
    *,
    shape: tuple[int, int, int],
    num_classes: int = NUM_CLASSES,
    seed: int = 0,
    part: int = 0,
) -> ImageSet:
    """Noise with a faint pattern of coarse squares that belongs to the class.

    Args:
        num_images: Number of images.
        shape: Shape of an image, (channels, height, width).
        num_classes: Number of classes, all equally likely.
        seed: Seed of patterns and images.
        part: Part of the dataset, with the same patterns in other images: 0 to train, 1 to test.
    """
    channels, height, width = shape
    cells = np.random.default_rng(seed).choice(
        np.asarray([0, _PATTERN_STRENGTH], dtype=np.uint8),
        size=(num_classes, channels, _PATTERN_CELLS, _PATTERN_CELLS),
    )
    rows = np.arange(height) * _PATTERN_CELLS // height
    columns = np.arange(width) * _PATTERN_CELLS // width
    patterns = cells[:, :, rows][:, :, :, columns]
    # Training and test parts share the patterns of their classes, and nothing else.
    rng = np.random.default_rng([seed, part])
    labels = rng.integers(num_classes, size=num_images)
    images = np.empty((num_images, *shape), dtype=np.uint8)
    # In pieces: noise of a whole ImageNet would need its size in memory a second time.
    for begin in range(0, num_images, _CHUNK):
        part_of = slice(begin, begin + _CHUNK)
        noise = rng.integers(256 - _PATTERN_STRENGTH, size=images[part_of].shape, dtype=np.uint8)
        np.add(noise, patterns[labels[part_of]], out=images[part_of])
    return ImageSet(images=images, labels=labels)


def _digits(*, train: bool, wanted: int, image_size: int, num_channels: int) -> ImageSet:
    with needing("the dataset digits"):
        from sklearn.datasets import load_digits

    found = load_digits()
    is_held_out = np.arange(_NUM_DIGITS) % _HELD_OUT_DIGITS == 0
    chosen = np.flatnonzero(~is_held_out if train else is_held_out)[:wanted]
    grey = np.round(found.images[chosen] * (255 / _DIGIT_TOP)).astype(np.uint8)
    factor = image_size // _DIGIT_SIZE
    enlarged = grey.repeat(factor, axis=1).repeat(factor, axis=2)[:, None]
    images = np.ascontiguousarray(
        np.broadcast_to(enlarged, (len(chosen), num_channels, image_size, image_size))
    )
    return ImageSet(images=images, labels=found.target[chosen].astype(np.int64))


def _pcam(*, train: bool, wanted: int) -> ImageSet:
    """PatchCamelyon, read as far as it is wanted: the whole takes 7 GB of memory."""
    import h5py

    part = "train" if train else "test"
    parts = {}
    for name in ("x", "y"):
        with h5py.File(dataset_folder() / _PCAM_FILE.format(part, name)) as file:
            parts[name] = np.asarray(file[name][:wanted])
    images = np.ascontiguousarray(parts["x"].transpose(0, 3, 1, 2))
    return ImageSet(images=images, labels=parts["y"].reshape(-1).astype(np.int64))


def _published(name: str, *, train: bool) -> Any:
    """A dataset of torchvision, downloaded if it is missing."""
    with needing(f"the dataset {name}"):
        from torchvision import datasets

    title = _PUBLISHED[name].title
    part = {"split": "train" if train else "test"} if name == "pcam" else {"train": train}
    folder = dataset_folder()
    try:
        return getattr(datasets, title)(root=str(folder), download=False, **part)
    except RuntimeError as error:
        if "h5py" in str(error):
            raise MeasurementError(
                "PatchCamelyon is read with h5py, which is not installed; install it: pip install h5py"
            ) from error
    before_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_S)
    try:
        return getattr(datasets, title)(root=str(folder), download=True, **part)
    except (OSError, RuntimeError, ImportError) as error:  # no network, no space, a damaged file
        shown = "CIFAR-10" if name == "cifar10" else title
        raise MeasurementError(
            f"expected {shown} in {folder}, or a network to download it from, got: {error}; "
            "use --dataset synthetic (same shapes and sizes), or put the dataset there and name the folder in "
            "FORERUN_DATASETS"
        ) from error
    finally:
        socket.setdefaulttimeout(before_s)


def _centred(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (batch, channels, height, width) between -0.5 and 0.5, and labels (batch,)."""
    images, labels = batch
    return images.float().div_(255).sub_(0.5), labels


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
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

    images = TensorDataset(torch.from_numpy(found.images), torch.from_numpy(found.labels))
    generator = torch.Generator().manual_seed(seed)
    order = RandomSampler(images, generator=generator) if shuffle else SequentialSampler(images)
    centred: Any = _centred  # PyTorch declares it for lists of samples, which a batch at once is not
    # Images in memory are taken a batch at a time: one by one, they would cost more than the step of a small network.
    return DataLoader(
        images,
        batch_size=None,
        sampler=BatchSampler(order, batch_size, drop_last=False),
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate_fn=centred,
        persistent_workers=num_workers > 0,
        generator=generator,
    )
