"""Sharded data parallelism (ZeRO, FSDP): bytes that a step sends, and bytes that each device holds."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import InvalidSetupError

__all__ = ["ShardedMemory", "check_stage", "communication_bytes", "sharded_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedMemory:
    """State of the model on one device [bytes]."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """Sum of all parts [bytes]."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def check_stage(stage: int) -> None:
    """Refuses a stage that does not exist."""
    if stage not in (0, 1, 2, 3):
        raise InvalidSetupError(f"a ZeRO stage must be 0 (replicated), 1, 2 or 3 (FSDP), got {stage}")


def communication_bytes(model_bytes: float, num_devices: int, stage: int) -> float:
    """Bytes that each device sends in one step [bytes].

    An all-reduce sends 2 S (n-1)/n; stages 1 and 2 reduce-scatter gradients and all-gather weights, the same amount;
    stage 3
    gathers the weights twice, for forward and backward, and scatters gradients: 3 S (n-1)/n.

    Args:
        model_bytes: Weights or gradients as they are sent, S [bytes].
        num_devices: Devices, n.
        stage: 0 for replicas, 1, 2, 3.

    Source: Rajbhandari et al. 2020, SC20, "ZeRO", section 7.
    """
    check_stage(stage)
    if num_devices < 1:
        raise InvalidSetupError(
            f"the number of devices must be at least 1, got {num_devices}; give a positive number"
        )
    passes = 3 if stage == 3 else 2
    return passes * model_bytes * (num_devices - 1) / num_devices


def sharded_memory(
    weights_bytes: float, gradients_bytes: float, optimizer_bytes: float, num_devices: int, stage: int
) -> ShardedMemory:
    """Weights, gradients and optimizer state that each device holds.

    Stage 1 divides the optimizer state by n, stage 2 the gradients as well, stage 3 the weights as well. Left out:
    buffers of the collectives, and in stage 3 the weights of the layer that is running.

    Source: Rajbhandari et al. 2020, SC20, "ZeRO", figure 1.
    """
    check_stage(stage)
    if num_devices < 1:
        raise InvalidSetupError(
            f"the number of devices must be at least 1, got {num_devices}; give a positive number"
        )
    return ShardedMemory(
        weights_bytes=weights_bytes / (num_devices if stage >= 3 else 1),
        gradients_bytes=gradients_bytes / (num_devices if stage >= 2 else 1),
        optimizer_bytes=optimizer_bytes / (num_devices if stage >= 1 else 1),
    )
