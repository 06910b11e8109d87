"""Ways in which several devices share the work of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forerun.errors import InvalidSetupError
from forerun.run.parallel import DeviceLayout

__all__ = ["DEFAULT_BUCKET_BYTES", "Algorithm", "FsdpVersion", "Sharing", "Strategy"]

DEFAULT_BUCKET_BYTES = 25 * 1024**2
"""Default capacity of a gradient bucket of DDP (PyTorch, ``bucket_cap_mb=25``)."""


class Algorithm(StrEnum):
    """Algorithm of an all-reduce."""

    AUTO = "auto"
    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


class FsdpVersion(StrEnum):
    """Implementation of fully sharded weights, by the copies it makes of them and of their gradients."""

    FSDP1 = "fsdp1"
    """PyTorch's FullyShardedDataParallel: gradients are joined, converted and divided before they are scattered."""
    FSDP2 = "fsdp2"
    """PyTorch's fully_shard: gathered weights are copied out of their buffer, gradients into one."""
    ZERO_COPY = "zero-copy"
    """Weights and gradients live in the buffers of the collectives (Megatron-FSDP)."""


class Strategy(StrEnum):
    """Strategy that shares the work among devices."""

    DDP = "ddp"
    """Replicas that average gradients while the backward pass goes on (PyTorch DistributedDataParallel, Horovod)."""
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"
    """Weights, gradients and optimizer state divided (ZeRO-3), block by block."""
    HSDP = "hsdp"
    """FSDP inside groups of devices, usually nodes, that are replicas of each other."""
    MIRRORED = "mirrored"
    """TensorFlow's MirroredStrategy: one host process for all replicas of a node."""
    AUTO = "auto"
    """The layout that forerun predicts to be the fastest of those that fit."""

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}.get(self.value, 0)


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
        layout: Division of the model, the samples and the tokens; None if only samples are divided. Its number of data
            groups follows from the devices.
        shard_size: Devices of a group that divides the weights (HSDP); None for the devices of a node.
        reshard: Whether gathered weights are given back between forward and backward pass.
        prefetch: Whether the weights of the next block are gathered while a block computes.
        gather_half: Whether weights are gathered in the half precision of the computation.
        reduce_half: Whether gradients are reduced in that precision.
        fsdp_version: Implementation of fully sharded weights.
        overlap_tensor: Whether collectives of tensor parallelism run in pieces beside the products they belong to.
        overlap_update: Whether ZeRO gathers updated weights behind the next forward pass.
    """

    strategy: Strategy = Strategy.DDP
    algorithm: Algorithm = Algorithm.AUTO
    bucket_bytes: float = DEFAULT_BUCKET_BYTES
    num_accumulation_steps: int = 1
    sync_batch_norm: bool = False
    coefficient_of_variation: float | None = None
    layout: DeviceLayout | None = None
    shard_size: int | None = None
    reshard: bool = True
    prefetch: bool = True
    gather_half: bool = True
    reduce_half: bool = False
    fsdp_version: FsdpVersion = FsdpVersion.FSDP2
    overlap_tensor: bool = False
    overlap_update: bool = False

    def __post_init__(self) -> None:
        if self.num_accumulation_steps < 1:
            raise InvalidSetupError(
                f"accumulation steps must be at least 1, got {self.num_accumulation_steps}; give a positive number"
            )
        if not self.bucket_bytes > 0:
            raise InvalidSetupError(f"a bucket must hold more than zero bytes, got {self.bucket_bytes}")
