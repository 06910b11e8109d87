"""ShuffleNet v2 for images of 32x32 as the energy table measured it: no pooling in the stem, separate first units.

Layers of github.com/weiaicunzai/pytorch-cifar100, whose networks the authors of the table trained; sizes of Ma et al.
2018, table 5, width 1x.
"""

from __future__ import annotations

import torch
from torch import nn


class _Unit(nn.Module):
    """A unit: two branches, joined and shuffled; the first of a stage halves the image and sees all channels."""

    def __init__(self, num_in: int, num_out: int, *, is_first: bool) -> None:
        super().__init__()
        self._is_first = is_first
        if is_first:
            self.left: nn.Module = nn.Sequential(_depthwise(num_in, 2), *_pointwise(num_in, num_out // 2))
            self.right = nn.Sequential(
                *_pointwise(num_in, num_in), _depthwise(num_in, 2), *_pointwise(num_in, num_out // 2)
            )
        else:
            half = num_in // 2
            self.left = nn.Identity()
            self.right = nn.Sequential(*_pointwise(half, half), _depthwise(half, 1), *_pointwise(half, half))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        left, right = (images, images) if self._is_first else images.chunk(2, dim=1)
        joined = torch.cat([self.left(left), self.right(right)], dim=1)
        size, channels, height, width = joined.shape
        shuffled = joined.view(size, 2, channels // 2, height, width).transpose(1, 2)
        return shuffled.reshape(size, channels, height, width)


def _pointwise(num_in: int, num_out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(num_in, num_out, 1), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)


def _depthwise(channels: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, groups=channels)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels))


def _stage(num_in: int, num_out: int, num_units: int) -> nn.Sequential:
    rest = [_Unit(num_out, num_out, is_first=False) for _ in range(num_units)]
    return nn.Sequential(_Unit(num_in, num_out, is_first=True), *rest)


def shufflenet_v2() -> nn.Module:
    """The network, for 100 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(inplace=True),
        _stage(24, 116, 3),
        _stage(116, 232, 7),
        _stage(232, 464, 3),
        *_pointwise(464, 1024),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, 100),
    )
