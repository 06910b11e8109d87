"""Division of a run among its devices: its axes, and the one answer that every law of a divided step gives.

A data parallel run is a layout whose tensor, context and pipeline axes are one. Two laws say what communication costs:
that of replicas (``replica_step``: buckets of DDP, ZeRO, one host for all) and that of units (``unit_step``: tensor,
context, expert, pipeline and fully sharded). Both read the same axes and give a ``DividedStep``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forerun.prediction.estimate import BreakdownPart, Interval
from forerun.prediction.step import PreparedModel, StepPrediction
from forerun.question.run import Run
from forerun.question.setup import Precision, TrainingSetup
from forerun.question.sharing import Strategy

if TYPE_CHECKING:  # of several devices, which most runs do not have
    from forerun.cost.communication.measured_layouts import StepShape
    from forerun.graph.shards import Shards

__all__ = [
    "Axes",
    "DividedStep",
    "StageTime",
    "compute_setup",
    "is_divided",
    "uses_layout",
    "wide_factor",
]

_COMPUTED = {Precision.AMP_BF16: Precision.BF16, Precision.AMP: Precision.FP16}
_WIDE_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Numbers of devices along the axes of a run; ranks count tensor, context, data, pipeline.

    Attributes:
        tensor: Devices that divide each block.
        context: Devices that divide the tokens of a sample.
        expert: Devices that divide the experts.
        pipeline: Stages of blocks.
        replicated: Devices that have the same blocks: those of context and data parallelism.
        shard: Devices among which the strategy divides states; 1 where each has all of them.
        sequence_parallel: Whether devices of tensor parallelism divide the tokens between divided products.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    replicated: int = 1
    shard: int = 1
    sequence_parallel: bool = False

    @classmethod
    def of(cls, run: Run) -> Axes:
        """The axes of a run, whatever divides its work."""
        layout, sharing = run.layout, run.sharing
        replicated = layout.context * layout.data
        shard = replicated if sharing.strategy.stage else 1
        if sharing.strategy is Strategy.HSDP:
            # A node of its own for each copy of the state, or the most devices of one that divide the replicas evenly.
            usual = max(1, min(replicated, run.cluster.num_devices_per_node // layout.tensor))
            shard = sharing.shard_size or max(k for k in range(1, usual + 1) if replicated % k == 0)
        return cls(
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
            pipeline=layout.pipeline,
            replicated=replicated,
            shard=shard,
            sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        )

    @property
    def shards(self) -> Shards:
        """Devices that divide the operations of a step."""
        from forerun.graph.shards import Shards

        return Shards(
            tensor=self.tensor,
            context=self.context,
            expert=self.expert,
            sequence_parallel=self.sequence_parallel,
        )


def is_divided(run: Run) -> bool:
    """True if a step is more than one micro-step on one device."""
    return run.cluster.num_devices > 1 or run.sharing.num_accumulation_steps > 1


def uses_layout(run: Run) -> bool:
    """True if a run's devices divide a model by blocks: with ``--parallel``, or fully sharded."""
    sharing = run.sharing
    return run.cluster.num_devices > 1 and (sharing.layout is not None or sharing.strategy.stage == 3)


def compute_setup(run: Run) -> TrainingSetup:
    """Setup of the operations of a layout: under mixed precision weights are used in half precision throughout.

    Frameworks of layouts hold or gather weights in half precision and update those in fp32, where autocast would
    cast them.
    """
    setup = run.setup
    if not uses_layout(run):
        return setup
    return replace(setup, precision=_COMPUTED.get(setup.precision, setup.precision), keeps_gradients=False)


def wide_factor(run: Run) -> float:
    """Bytes of a weight that the optimizer updates over those of one that computes.

    Beside adapters the frozen weights stay in half precision, and the adapters are traced in fp32.
    """
    widens = run.setup.precision in _COMPUTED and run.setup.saving.lora_rank is None
    return _WIDE_BYTES / 2 if widens else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One micro-step on one stage [s].

    Attributes:
        compute_s: Forward and backward pass.
        weight_gradient_s: Part of it that makes gradients of weights.
        tensor_s: Exposed communication of tensor parallelism.
        context_s: Exposed communication of context parallelism.
        expert_s: Exposed communication of expert parallelism.
        gather_s: Exposed gathering and scattering of FSDP.
        copied_s: Copies of weights and gradients from and to the buffers of FSDP.
        slowed_s: What hidden communication adds to the computation.
        waiting_s: Waiting for the host, which launches operations and collectives.
        handover_s: Handing tokens to the next stage and gradients back.
        communication_s: Sum of all collectives, hidden or not.
    """

    compute_s: float
    weight_gradient_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    gather_s: float
    copied_s: float
    slowed_s: float
    waiting_s: float
    handover_s: float
    communication_s: float

    @property
    def total_s(self) -> float:
        """The whole micro-step [s]."""
        exposed_s = self.tensor_s + self.context_s + self.expert_s + self.gather_s + self.handover_s
        return self.compute_s + exposed_s + self.copied_s + self.slowed_s + self.waiting_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedStep:
    """The step of all devices and micro-steps of a run.

    Attributes:
        step_s: Time with its 90 % interval [s].
        model: The operations of one device, all blocks.
        alone: Prediction of these operations, as if one device had them in one micro-step.
        parts: Parts that add up to the step, the longest first; of a pipeline those of the slowest stage.
        compute_s: What a device computes: forward and backward passes and its update [s].
        exposed_s: Communication that nothing hides [s].
        communication_s: Sum of all collectives, hidden or not [s].
        busy_share: Share of the step in which a device draws what it draws alone; replicas count as if they worked
            while they wait.
        gradient_bytes: Gradients that replicas hold once more in their buckets, counted apart from the peak of one
            device [bytes].
        bubble_s: Waiting of the slowest stage for the others [s].
        stages: Micro-step of each stage; empty where every device has the whole model.
        shape: What the error of a step by units depends on, before any correction.
    """

    step_s: Interval
    model: PreparedModel
    alone: StepPrediction
    parts: tuple[BreakdownPart, ...]
    compute_s: float
    exposed_s: float
    communication_s: float
    busy_share: float = 1.0
    gradient_bytes: float = 0.0
    bubble_s: float = 0.0
    stages: tuple[StageTime, ...] = ()
    shape: StepShape | None = None
