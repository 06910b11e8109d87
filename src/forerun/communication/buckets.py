"""Gradient buckets of PyTorch's DDP: their sizes, and the times when they are ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import InvalidSetupError
from forerun.run.sharing import DEFAULT_BUCKET_BYTES

__all__ = [
    "FIRST_BUCKET_BYTES",
    "Bucket",
    "Gradient",
    "gradient_buckets",
    "uniform_gradients",
]

FIRST_BUCKET_BYTES = 1024**2
"""PyTorch, torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one parameter.

    Attributes:
        size_bytes: Size of the gradient as it is sent [bytes].
        ready_share: Share of the backward pass after which the gradient is ready, in [0, 1].
    """

    size_bytes: float
    ready_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        size_bytes: Sum of their sizes [bytes].
        ready_share: Share of the backward pass after which the last of them is ready.
    """

    size_bytes: float
    ready_share: float


def gradient_buckets(
    gradients: Sequence[Gradient],
    bucket_bytes: float = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: float = FIRST_BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """Buckets in the order in which they are sent.

    A bucket is closed as soon as it holds its capacity, so it may exceed it by its last gradient, as in DDP.

    Args:
        gradients: Gradients in the order in which the backward pass makes them.
        bucket_bytes: Capacity of all buckets but the first, ``bucket_cap_mb`` [bytes].
        first_bucket_bytes: Capacity of the first [bytes].

    Raises:
        InvalidSetupError: A capacity is not above zero.
    """
    if not (bucket_bytes > 0 and first_bucket_bytes > 0):
        raise InvalidSetupError(
            f"a bucket must hold more than zero bytes, got {min(bucket_bytes, first_bucket_bytes)}"
        )
    buckets: list[Bucket] = []
    size, ready = 0.0, 0.0
    for gradient in gradients:
        size, ready = size + gradient.size_bytes, max(ready, gradient.ready_share)
        if size >= (bucket_bytes if buckets else min(first_bucket_bytes, bucket_bytes)):
            buckets.append(Bucket(size_bytes=size, ready_share=ready))
            size = 0.0
    if size:
        buckets.append(Bucket(size_bytes=size, ready_share=ready))
    return tuple(buckets)


def uniform_gradients(total_bytes: float, num_gradients: int = 100) -> tuple[Gradient, ...]:
    """Equal gradients at equal distances, for models of which only the number of parameters is known."""
    return tuple(
        Gradient(size_bytes=total_bytes / num_gradients, ready_share=(i + 1) / num_gradients)
        for i in range(num_gradients)
    )
