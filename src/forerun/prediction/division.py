"""Division of a run among its devices: its axes, and the one answer that every law of a divided step gives.

A data parallel run is a layout whose tensor, context and pipeline axes are one. Devices that hold the whole state each
are replicas (``replica_step``: buckets of DDP, one host for all). What divides states (ZeRO, FSDP), the model or its
tokens divides units (``unit_step``), and so do the passes of post-training. Both read the same axes, wait for other
devices by the same law and constants, and give a ``DividedStep``.

A layout with a pipeline has stages. With m micro-steps, p stages of t_s seconds each (forward and backward) and v
groups of blocks on each device,

    1F1B, GPipe   T = (m - 1) max t_s + sum t_s
    interleaved   T = m max t_s + (sum t_s - max t_s) / v
    zero bubble   T = m max t_s + sum over the other stages of (t_s - 2 w_s)

with w_s the gradients of weights, which fill the waiting. For equal stages the bubble of 1F1B is (p - 1)/(m + p -
1) of T.
Sources: Narayanan et al. 2021, SC21 (arXiv 2104.04473), section 2.2; Qi et al. 2023 (arXiv 2401.10241), table 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import exp
from typing import TYPE_CHECKING

from forerun.base.errors import InvalidSetupError
from forerun.graph.blocks import Blocks, blocks_of
from forerun.prediction.estimate import BreakdownPart, Generation, Interval
from forerun.prediction.step import HOST_PART, PreparedModel, StepPrediction
from forerun.question.job import Batching
from forerun.question.post_training import Algorithm
from forerun.question.run import Run
from forerun.question.saving import MasterWeights
from forerun.question.setup import Precision, TrainingSetup
from forerun.question.sharing import DeviceLayout, PipelineSchedule, StageSplit, Strategy

if TYPE_CHECKING:
    from forerun.cost.communication.constants import MeasuredLayouts, StepShape
    from forerun.graph.shards import Shards

_COMPUTED = {Precision.AMP_BF16: Precision.BF16, Precision.AMP: Precision.FP16}
_WIDE_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Numbers of devices along the axes of a run; ranks count tensor, context, data, pipeline.

    Attributes:
        tensor: Devices that divide each block.
        context: Devices that divide the tokens of a sample.
        expert: Devices that divide the experts.
        whole_experts: Whether devices of tensor parallelism have whole experts.
        pipeline: Stages of blocks.
        replicated: Devices that have the same blocks: those of context and data parallelism.
        shard: Devices among which the strategy divides states; 1 where each has all of them.
        sequence_parallel: Whether devices of tensor parallelism divide the tokens between divided products.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    whole_experts: bool = False
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
            whole_experts=layout.whole_experts and layout.tensor > 1,
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
            whole_experts=self.whole_experts,
            sequence_parallel=self.sequence_parallel,
        )


def is_divided(run: Run) -> bool:
    """True if a step is more than one micro-step on one device."""
    return run.cluster.num_devices > 1 or run.sharing.num_accumulation_steps > 1


def uses_layout(run: Run) -> bool:
    """True if a run's devices divide a model or its states by units, or several passes of post-training."""
    sharing, algorithm = run.sharing, run.setup.post.algorithm
    return run.cluster.num_devices > 1 and (
        sharing.layout.divides_model or sharing.strategy.stage > 0 or algorithm is not Algorithm.SFT
    )


def compute_setup(run: Run) -> TrainingSetup:
    """Setup of the operations of a device: where units are divided, mixed precision has weights in half precision.

    Frameworks that divide states or models hold or gather weights in half precision and update those in fp32; replicas
    cast them (autocast).
    """
    if uses_layout(run):
        return with_half_weights(run.setup)
    if run.setup.generates and run.samples.batching is Batching.PADDING_FREE:
        return replace(run.setup, post=replace(run.setup.post, packs_answers=True))
    return run.setup


def with_half_weights(setup: TrainingSetup) -> TrainingSetup:
    """A setup whose weights are in half precision throughout under mixed precision."""
    return replace(setup, precision=_COMPUTED.get(setup.precision, setup.precision), keeps_gradients=False)


def wide_factor(run: Run) -> float:
    """Bytes of a weight that the optimizer updates over those of one that computes.

    Beside adapters the frozen weights stay in half precision, and the adapters are traced in fp32.
    """
    widens = run.setup.precision in _COMPUTED and run.setup.saving.lora_rank is None
    return _WIDE_BYTES / 2 if widens else 1.0


def gradient_factor(run: Run) -> float:
    """Bytes of a gradient that is kept and reduced over those of one that a product makes.

    Beside master weights in fp32 replicas of Megatron-LM, nanotron and DeepSpeed's ZeRO-1 sum their gradients in fp32
    too, unless they reduce them in half precision (NVIDIA/Megatron-LM: ``megatron/core/distributed``).
    """
    saving, sharing = run.setup.saving, run.sharing
    has_masters = run.setup.precision.is_half and saving.master_weights is MasterWeights.FP32
    if has_masters and saving.lora_rank is None and sharing.strategy.stage <= 1 and not sharing.reduce_half:
        return _WIDE_BYTES / 2
    return wide_factor(run)


def wide_state_factor(run: Run) -> float:
    """Bytes of the optimizer's state over those traced: states in 8 bits are as large beside fp32 weights."""
    return 1.0 if run.setup.optimizer == "adamw-8bit" else wide_factor(run)


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
        copied_s: Copies of weights and gradients from and to the buffers of FSDP, and sums of gradients.
        slowed_s: What hidden communication adds to the computation.
        waiting_s: Waiting for the host, which launches operations and collectives.
        blocked_s: Further waiting if hosts of a pipeline over nodes wait at every handover; not a part of the whole.
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
    blocked_s: float
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
        shape: What the error of a step by units depends on, before any correction; see ``shape_of``.
        passes: Passes of a step of post-training, each with its whole time; those of other devices among them.
        generation: The part that writes answers, None without one.
        num_writers: Devices besides those of the run that write answers.
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
    passes: tuple[BreakdownPart, ...] = ()
    generation: Generation | None = None
    num_writers: int = 0


def as_measured(step: DividedStep, measured: MeasuredLayouts) -> DividedStep:
    """The step with all its times corrected by measured steps of the cluster, and the interval that is left."""
    log_factor, left = measured.correction(shape_of(step))
    factor = exp(log_factor)
    value = step.step_s.value
    return replace(
        step,
        compute_s=step.compute_s * factor,
        exposed_s=step.exposed_s * factor,
        communication_s=step.communication_s * factor,
        bubble_s=step.bubble_s * factor,
        step_s=Interval(
            value * factor,
            value * factor * (step.step_s.low / value) ** left,
            value * factor * (step.step_s.high / value) ** left,
        ),
        stages=tuple(
            StageTime(**{field.name: getattr(stage, field.name) * factor for field in fields(stage)})
            for stage in step.stages
        ),
        parts=tuple(BreakdownPart(part.name, part.time_s * factor) for part in step.parts),
    )


def shape_of(step: DividedStep) -> StepShape:
    """The facts on which the error of a step depends.

    Raises:
        InvalidSetupError: The step has no backward pass, or no names of its weights.
    """
    from forerun.cost.communication.constants import StepShape

    if step.shape is not None:
        return step.shape
    blocks, step_s = blocks_of(step.model.graph), step.step_s.value
    return StepShape(
        hidden_size=blocks.hidden_size,
        block_s=step.alone.step_s.value / blocks.num_units,
        exposed_share=step.exposed_s / step_s,
        waiting_share=sum(part.time_s for part in step.parts if part.name == HOST_PART) / step_s,
    )


def stage_units(
    num_blocks: int, num_stages: int, head_blocks: float | None = None, *, counts_ends: bool = False
) -> list[range]:
    """Units of each stage: the blocks spread evenly, earlier stages take the rest; input and head at the ends.

    Args:
        num_blocks: Blocks of the model.
        num_stages: Stages of the pipeline.
        head_blocks: Blocks that the head is worth, by its weights: the last stage has as many fewer as make the
            heaviest stage lightest; None for evenly.
        counts_ends: Whether input and head count as one block each.

    >>> [len(units) for units in stage_units(8, 2, head_blocks=2.0)]
    [6, 4]
    """
    own = num_blocks // num_stages
    if counts_ends and num_stages > 1:
        # Input and head are counted as blocks and then taken away from the first and the last stage.
        others = _even(num_blocks + 2, num_stages)
        others[0], others[-1] = others[0] - 1, others[-1] - 1
    elif head_blocks is not None and num_stages > 1:
        own = min(
            range(own, -1, -1), key=lambda k: max(k + head_blocks, -(-(num_blocks - k) // (num_stages - 1)))
        )
        others = [*_even(num_blocks - own, num_stages - 1), own]
    else:
        others = _even(num_blocks, num_stages)
    ends = [1, *(1 + end for end in itertools.accumulate(others))]
    ranges = [range(begin, end) for begin, end in itertools.pairwise(ends)]
    ranges[0] = range(ranges[0].stop)
    ranges[-1] = range(ranges[-1].start, num_blocks + 2)
    return ranges


def _even(num_blocks: int, num_stages: int) -> list[int]:
    each, rest = divmod(num_blocks, num_stages)
    return [each + (stage < rest) for stage in range(num_stages)]


def pipeline_s(
    stage_s: Sequence[float],
    weight_gradient_s: Sequence[float],
    num_micro_steps: int,
    schedule: PipelineSchedule,
    virtual_stages: int = 1,
) -> float:
    """Time of all micro-steps through all stages [s].

    Args:
        stage_s: Forward and backward pass of one micro-step on each stage [s].
        weight_gradient_s: Part of it that makes gradients of weights [s].
        num_micro_steps: Micro-steps of a step.
        schedule: Their order.
        virtual_stages: Groups of blocks on each device in the interleaved schedule.

    >>> pipeline_s([3.0] * 4, [1.0] * 4, 8, PipelineSchedule.ONE_FORWARD_ONE_BACKWARD)
    33.0
    """
    slowest = max(range(len(stage_s)), key=lambda stage: stage_s[stage])
    others = [stage for stage in range(len(stage_s)) if stage != slowest]
    busy_s = num_micro_steps * stage_s[slowest]
    waiting = sum(stage_s[stage] for stage in others)
    if schedule is PipelineSchedule.INTERLEAVED:
        # Groups of blocks are smaller than stages by their number, and so is the way through all of them.
        return busy_s + waiting / virtual_stages
    if schedule is PipelineSchedule.ZERO_BUBBLE:
        # Gradients of weights wait for nobody: they fill the way down and the way up.
        return busy_s + sum(max(0.0, stage_s[stage] - 2 * weight_gradient_s[stage]) for stage in others)
    return busy_s + waiting


def in_flight(layout: DeviceLayout, stage: int, num_micro_steps: int) -> float:
    """Micro-steps whose activations a stage holds at its peak, each of all its blocks.

    1F1B: min(m, p - s). GPipe: m. Interleaved: the warm-up of 2(p - s - 1) + (v - 1)p + 1 groups of blocks, each 1/v of
    the stage (Megatron-LM, ``schedules.py``).
    """
    stages, groups = layout.pipeline, layout.virtual_stages
    if stages == 1:
        return 1.0
    if layout.schedule is PipelineSchedule.GPIPE:
        return float(num_micro_steps)
    if layout.schedule is PipelineSchedule.INTERLEAVED:
        held = 2 * (stages - stage - 1) + (groups - 1) * stages + 1
        return min(num_micro_steps * groups, held) / groups
    return float(min(num_micro_steps, stages - stage))


def check_layout(
    layout: DeviceLayout, blocks: Blocks, num_blocks: int, model: str, num_micro_steps: int
) -> None:
    """Refuses a layout that the model cannot have, with one that it can.

    Raises:
        InvalidSetupError: Heads or blocks cannot be divided so, or the micro-steps do not fit the schedule.
    """
    number, heads = num_blocks, blocks.num_heads
    if layout.tensor > 1:
        if not blocks.can_be_divided:
            raise InvalidSetupError(
                f"tp={layout.tensor} divides pairs of linear layers in repeated blocks, which {model} does not have; "
                "give --strategy fsdp, or leave tp out"
            )
        if heads is not None and heads % layout.tensor:
            raise InvalidSetupError(
                f"tp={layout.tensor} does not divide the {heads} heads of attention; give "
                f"tp={_divisor(heads, layout.tensor)}"
            )
    if layout.context > 1 and heads is None:
        raise InvalidSetupError(
            f"cp={layout.context} divides the tokens of attention, which was not found in {model}; leave cp out"
        )
    if layout.expert > 1:
        if blocks.num_experts is None:
            raise InvalidSetupError(
                f"ep={layout.expert} divides experts that are held as one tensor, and {model} has none; leave ep out"
            )
        if blocks.num_experts % layout.expert:
            raise InvalidSetupError(
                f"ep={layout.expert} does not divide the {blocks.num_experts} experts; give "
                f"ep={_divisor(blocks.num_experts, layout.expert)}"
            )
    if layout.pipeline > 1:
        # With this split embedding and head take the place of a block each.
        is_counted = layout.stage_split is StageSplit.ENDS
        most = (number + 2 * is_counted) // layout.virtual_stages
        if layout.pipeline > most:
            groups = f" in {layout.virtual_stages} groups each" if layout.virtual_stages > 1 else ""
            raise InvalidSetupError(
                f"pp={layout.pipeline} needs at least as many blocks{groups}, but {model} has {number}; "
                f"give pp={max(1, most)} "
                "or less"
            )
        if layout.schedule is PipelineSchedule.INTERLEAVED and num_micro_steps % layout.pipeline:
            better = -(-num_micro_steps // layout.pipeline) * layout.pipeline
            raise InvalidSetupError(
                f"the interleaved schedule takes micro-steps in multiples of the {layout.pipeline} stages, got "
                f"{num_micro_steps}; give --accumulation {better}"
            )


def _divisor(number: int, near: int) -> int:
    """The largest divisor of a number that is not above another."""
    return max(k for k in range(1, min(number, near) + 1) if number % k == 0)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Outcome of doing collectives beside computation.

    Attributes:
        exposed_s: Time that the computation waits [s].
        busy_s: Sum of the collectives [s].
    """

    exposed_s: float
    busy_s: float


def fully_sharded_forward(
    compute_s: Sequence[float], gather_s: Sequence[float], *, prefetch: bool
) -> Overlap:
    """Forward pass of blocks whose weights are gathered before use.

    The weights of a block are gathered while the block before computes, at most two blocks ahead; without
    prefetch a block waits for its own gathering.

    Args:
        compute_s: Forward pass of each block [s].
        gather_s: Gathering of its weights [s].
        prefetch: Whether weights are gathered ahead.
    """
    link_s = end_s = 0.0
    # Two blocks may be whole at once: a gathering waits for the end of the block before the last.
    ends = [0.0, 0.0]
    for own_s, gathering_s in zip(compute_s, gather_s, strict=True):
        begin_s = max(link_s, ends[-2] if prefetch else ends[-1])
        link_s = begin_s + gathering_s
        end_s = max(end_s, link_s) + own_s
        ends.append(end_s)
    return Overlap(end_s - sum(compute_s), sum(gather_s))


def fully_sharded_backward(
    compute_s: Sequence[float], gather_s: Sequence[float], scatter_s: Sequence[float], *, prefetch: bool
) -> Overlap:
    """Backward pass: weights are gathered again, gradients scattered behind each block; the last scatter is exposed.

    Args:
        compute_s: Backward pass of each block, the last block first [s].
        gather_s: Gathering of its weights; zero if they were kept [s].
        scatter_s: Scattering of its gradients [s].
        prefetch: Whether weights are gathered ahead.
    """
    link_s = end_s = 0.0
    waiting_s = 0.0  # scattering of the block before, sent after the next gathering
    for own_s, gathering_s, scattering_s in zip(compute_s, gather_s, scatter_s, strict=True):
        begin_s = max(link_s, 0.0 if prefetch else end_s)
        link_s = begin_s + gathering_s
        end_s = max(end_s, link_s) + own_s
        # A scattering is queued behind the gathering that the next block waits for.
        if waiting_s:
            link_s += waiting_s
        waiting_s = scattering_s
    # The first block of the model has nothing behind it that would hide its scattering.
    link_s = max(link_s, end_s) + waiting_s
    return Overlap(max(end_s, link_s) - sum(compute_s), sum(gather_s) + sum(scatter_s))


def reduced_backward(
    compute_s: Sequence[float], reduce_s: Sequence[float], num_buckets: Sequence[int]
) -> Overlap:
    """Backward pass whose gradients are reduced in buckets beside it; the last reduction is exposed.

    The n equal buckets of a unit of T seconds are ready after T/n, 2 T/n, ..., T and take r/n each, so that the link is
    busy until max(before + r, begin + T/n + r, begin + T + r/n): the end of ``bucket_schedule``.

    Args:
        compute_s: Backward pass of each unit, the last unit first [s].
        reduce_s: Reduction of its gradients [s].
        num_buckets: Buckets of its gradients.
    """
    link_s = end_s = 0.0
    for own_s, reducing_s, number in zip(compute_s, reduce_s, num_buckets, strict=True):
        first_s, last_s = end_s + own_s / number + reducing_s, end_s + own_s + reducing_s / number
        link_s = max(link_s + reducing_s, first_s, last_s)
        end_s += own_s
    return Overlap(max(0.0, link_s - end_s), sum(reduce_s))
