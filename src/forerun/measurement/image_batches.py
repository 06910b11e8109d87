"""Batches of images for a training run, by PyTorch's own loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.measurement.datasets import ImageSet

if TYPE_CHECKING:
    import torch

__all__ = ["image_batches"]


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
