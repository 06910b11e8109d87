"""Ways in which several devices share the work of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forerun.errors import InvalidSetupError

__all__ = ["DEFAULT_BUCKET_BYTES", "Algorithm", "Sharing", "Strategy"]

DEFAULT_BUCKET_BYTES = 25 * 1024**2
"""Default capacity of a gradient bucket of DDP (PyTorch, ``bucket_cap_mb=25``)."""


class Algorithm(StrEnum):
    """Algorithm of an all-reduce."""

    AUTO = "auto"
    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


class Strategy(StrEnum):
    """Strategy that shares the work among devices."""

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
    """Sharing of the work among devices.

    Attributes:
        strategy: See ``Strategy``.
        algorithm: Forced all-reduce algorithm, or the fastest.
        bucket_bytes: Capacity of a gradient bucket [bytes].
        num_accumulation_steps: Micro-steps of one step.
        sync_batch_norm: Whether statistics of batch norms are synchronised.
        coefficient_of_variation: Scatter of the step time between devices; None for that measured in training.
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
