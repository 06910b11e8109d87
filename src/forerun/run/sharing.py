"""Ways in which several devices share the work of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forerun.errors import InvalidSetupError

__all__ = ["DEFAULT_BUCKET_BYTES", "Algorithm", "Sharing", "Strategy"]

DEFAULT_BUCKET_BYTES = 25 * 1024**2
"""What DDP sends together (PyTorch, ``bucket_cap_mb=25``)."""


class Algorithm(StrEnum):
    """How an all-reduce runs."""

    AUTO = "auto"
    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


class Strategy(StrEnum):
    """How several devices share the work."""

    DDP = "ddp"
    """Replicas that average gradients while the backward pass goes on (PyTorch DistributedDataParallel, Horovod)."""
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"
    """Weights, gradients and optimizer state divided (ZeRO-3)."""
    MIRRORED = "mirrored"
    """TensorFlow's MirroredStrategy: one host process for all replicas of a node."""

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return {"zero1": 1, "zero2": 2, "fsdp": 3}.get(self.value, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How the work is shared.

    Attributes:
        strategy: See ``Strategy``.
        algorithm: Forced all-reduce algorithm, or the fastest.
        bucket_bytes: Capacity of a gradient bucket [bytes].
        num_accumulation_steps: Micro-steps of a step.
        sync_batch_norm: Whether statistics of batch norms are synchronised.
        coefficient_of_variation: Scatter of steps between devices; None for what training was seen to have.
    """

    strategy: Strategy = Strategy.DDP
    algorithm: Algorithm = Algorithm.AUTO
    bucket_bytes: float = DEFAULT_BUCKET_BYTES
    num_accumulation_steps: int = 1
    sync_batch_norm: bool = False
    coefficient_of_variation: float | None = None

    def __post_init__(self) -> None:
        if self.num_accumulation_steps < 1:
            raise InvalidSetupError(
                f"accumulation steps must be at least 1, got {self.num_accumulation_steps}; give a positive number"
            )
        if not self.bucket_bytes > 0:
            raise InvalidSetupError(f"a bucket must hold more than zero bytes, got {self.bucket_bytes}")
