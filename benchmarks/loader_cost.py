"""Processor time of the workers of real data loaders, beside the cost of their samples.

    python benchmarks/loader_cost.py

Images of three sizes are made, decoded and augmented in seven ways: 64 in a loop, which is what
``forerun measure loader`` calls the cost of a sample, then all by a ``DataLoader`` of one or two workers with batches
of 32 and 128, three rounds of each. Processor time is compared, so that other programs on the machine change little.
``LOADER_RANGE`` of ``forerun.prediction.run_step`` is from here.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

_WAYS = (
    (64, "resize", 32, 1024),
    (64, "crop", 64, 1024),
    (300, "crop", 224, 384),
    (300, "resize", 224, 384),
    (800, "crop", 224, 128),
    (800, "resize", 224, 128),
    (800, "crop", 384, 128),
)
"""Side of the images [pixels], augmentation, side of its result [pixels], samples of a loader."""
_LOADERS = ((1, 32), (2, 32), (2, 128))
_NUM_FILES = 64
_ROUNDS = 3


class _Images(Dataset):
    def __init__(self, folder: Path, transform: transforms.Compose, number: int) -> None:
        self.files = sorted(folder.iterdir())
        self.transform, self.number = transform, number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.files[index % len(self.files)]) as image:
            return self.transform(image.convert("RGB"))


def _make_images(folder: Path, side: int) -> Path:
    rng = np.random.default_rng(side)
    folder.mkdir()
    for number in range(_NUM_FILES):
        height, width = (int(side * rng.uniform(0.7, 1.3)) for _ in range(2))
        coarse = rng.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        smooth.save(folder / f"{number}.jpg", quality=90)
    return folder


def _augmentation(kind: str, size: int) -> transforms.Compose:
    crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    resize = [transforms.Resize(size), transforms.CenterCrop(size)]
    ends = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
    return transforms.Compose([*(crop if kind == "crop" else resize), *ends])


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Prints the ratio of each loader and their range."""
    torch.set_num_threads(1)
    ratios = []
    with tempfile.TemporaryDirectory() as root:
        folders = {side: _make_images(Path(root) / str(side), side) for side in {way[0] for way in _WAYS}}
        for _ in range(_ROUNDS):
            for side, kind, size, number in _WAYS:
                images = _Images(folders[side], _augmentation(kind, size), number)
                for index in range(16):
                    images[index]
                begin = time.process_time()
                for index in range(_NUM_FILES):
                    images[index]
                cost_s = (time.process_time() - begin) / _NUM_FILES
                for num_workers, batch_size in _LOADERS:
                    before_s = _children_s()
                    for _batch in DataLoader(
                        images, batch_size=min(batch_size, number // 2), num_workers=num_workers
                    ):
                        pass
                    ratio = (_children_s() - before_s) / number / cost_s
                    ratios.append(ratio)
                    print(
                        f"{side:4} {kind:6} {size:4}  {num_workers} workers, batch {batch_size:3}: {ratio:.2f}",
                        flush=True,
                    )
    low, median, high = np.quantile(ratios, (0.05, 0.5, 0.95))
    print(
        f"{len(ratios)} loaders: median {median:.2f}, 90 % from {low:.2f} to {high:.2f}, "
        f"all {min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
