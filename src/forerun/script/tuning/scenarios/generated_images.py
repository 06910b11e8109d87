"""A generated folder of images in the layout of Intel's: six classes that a small network can learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.base.errors import UsageError

__all__ = ["CLASSES", "generate_images"]

CLASSES = ("buildings", "forest", "glacier", "mountain", "sea", "street")

_NOISE = 22.0
_QUALITY = 88
_TEST_SHARE = 6  # training images per test image


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Appearance of the images of a class: two colours, and waves over them.

    Attributes:
        upper: Colour of the upper part (red, green, blue).
        lower: Colour of the lower part.
        across: Number of waves over the width.
        down: Number of waves over the height.
    """

    upper: tuple[int, int, int]
    lower: tuple[int, int, int]
    across: float
    down: float


# Neighbours share a colour or a texture, so neither alone identifies a class; a mirrored image keeps its class.
_LOOKS = {
    "buildings": _Look(upper=(150, 165, 185), lower=(125, 120, 115), across=7, down=5),
    "forest": _Look(upper=(95, 125, 90), lower=(80, 105, 70), across=10, down=0),
    "glacier": _Look(upper=(165, 185, 205), lower=(185, 200, 210), across=2, down=3),
    "mountain": _Look(upper=(155, 175, 200), lower=(110, 115, 100), across=3, down=0),
    "sea": _Look(upper=(160, 180, 205), lower=(85, 115, 140), across=0, down=9),
    "street": _Look(upper=(145, 150, 160), lower=(105, 105, 105), across=4, down=0),
}


def generate_images(
    folder: Path, *, num_images: int, size: tuple[int, int] = (150, 150), seed: int = 0
) -> None:
    """Writes JPEGs to ``seg_train`` and, a sixth as many, to ``seg_test``, evenly over six classes.

    Each picture has its class's colours above and below a horizon and its waves, in random place, phase, strength and
    brightness, under noise. The pictures need the time and memory of photographs, but are easier to learn.

    Args:
        folder: Folder for the images, which must not hold any yet.
        num_images: Number of training images, six or more.
        size: Width and height of an image, 150 for Intel's [pixels].
        seed: Seed of the random pictures.

    Raises:
        UsageError: The folder has images, or there are fewer images than classes.
    """
    if num_images < len(CLASSES):
        raise UsageError(f"expected {len(CLASSES)} images or more, one per class, got {num_images}")
    if any((folder / part).exists() for part in ("seg_train", "seg_test")):
        raise UsageError(
            f"expected no images in '{folder}' yet, got seg_train or seg_test; give another folder"
        )
    from PIL import Image

    numbers = np.random.default_rng(seed)
    num_test = max(len(CLASSES), num_images // _TEST_SHARE)
    for part, count in (("seg_train", num_images), ("seg_test", num_test)):
        for index in range(count):
            name = CLASSES[index % len(CLASSES)]
            path = folder / part / name / f"{index:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(_picture(numbers, _LOOKS[name], size)).save(path, quality=_QUALITY)


def _picture(numbers: np.random.Generator, look: _Look, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """One picture as an array, (height, width, 3)."""
    width, height = size
    y, x = (grid[..., None] for grid in np.mgrid[0:height, 0:width] / max(width, height))
    colours = _colour(look.upper), _colour(look.lower)
    picture: npt.NDArray[np.float64] = np.where(y < numbers.uniform(0.3, 0.6), *colours)
    for position, waves in ((x, look.across), (y, look.down)):
        if waves:
            phase, stretch = numbers.uniform(0, 2 * np.pi), numbers.normal(1.0, 0.1)
            picture = picture + numbers.uniform(15, 45) * np.sin(
                2 * np.pi * waves * stretch * position + phase
            )
    picture = picture * numbers.uniform(0.7, 1.2) + numbers.normal(0, _NOISE, (height, width, 3))
    return np.clip(picture, 0, 255).astype(np.uint8)


def _colour(values: tuple[int, int, int]) -> npt.NDArray[np.float64]:
    return np.asarray(values, dtype=float)
