"""The layouts that a model may have on a cluster, each predicted, and the choice among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError, UsageError
from forerun.base.units import format_bytes
from forerun.cost.memory.peak import MemoryConstants, fits, visible_memory_bytes
from forerun.cost.time.weights import CostModel
from forerun.graph.shards import Shards
from forerun.prediction.estimate import Interval
from forerun.prediction.memory import StageMemory, memory_constants_of, worst_memory
from forerun.prediction.models import TracedModels, cost_model_of
from forerun.prediction.run_step import divided_steps
from forerun.prediction.uneven_samples import UnevenEpoch, has_lengths
from forerun.prediction.units import DividedModel
from forerun.question.run import Run
from forerun.question.sharing import DeviceLayout, Strategy
from forerun.search.choice import pareto_front
from forerun.search.search import SETTINGS, Search

_MOST_MICRO_BATCH, _MOST_TOKENS = 64, 2**16
_LONG_TOKENS = 8192
_VIRTUAL_STAGES = 2
_WORTH_A_LOOK = 1.3
"""Step of a layout over the best that fits up to which its variants are tried: none gains more."""
_MOST_REFINED = 40
"""Layouts of one kind of recomputation whose variants are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """Properties of a model that limit its layouts.

    Attributes:
        num_blocks: Blocks.
        num_heads: Heads of attention; None if it has none.
        can_be_divided: Whether tensor parallelism divides its blocks.
        num_tokens: Tokens of a sample; None for models without tokens.
        global_batch: Samples of one step of all devices.
        num_experts: Experts of a block; None without experts.
        replicas_fit: False if a device cannot hold the weights, gradients and states of the whole model.
    """

    num_blocks: int
    num_heads: int | None
    can_be_divided: bool
    num_tokens: int | None
    global_batch: int
    num_experts: int | None = None
    replicas_fit: bool = True

    @classmethod
    def of(cls, model: DividedModel, global_batch: int, visible_bytes: float = float("inf")) -> LayoutSpace:
        """The space of a model on devices of so much memory."""
        blocks, memory = model.blocks, model.memory(Shards(), 1)
        state = memory.weights.sum() + (1.0 + memory.state_ratio) * memory.gradients.sum()
        return cls(
            num_blocks=len(blocks.names),
            num_heads=blocks.num_heads,
            can_be_divided=model.can_be_divided,
            num_tokens=model.model.graph.tokens_per_sample,
            global_batch=global_batch,
            num_experts=blocks.num_experts,
            replicas_fit=bool(state <= visible_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPoint(Answer):
    """One layout with what it is predicted to take.

    Attributes:
        run: The run, whole.
        parallel: Devices along each axis, as ``--parallel`` takes them.
        strategy: Strategy of the data groups.
        batch_size: Samples of a micro-step of a data group.
        accumulation: Micro-steps of a step.
        recompute: Activations computed again.
        schedule: Order of the micro-steps on the stages, with the groups of blocks of each.
        step_time_s: Step of all devices.
        throughput_samples_per_s: Samples of all devices per second.
        peak_memory_bytes: Memory of the devices that need most.
        worst_stage: Their stage.
        fits: "yes", "no" or "close".
        room_bytes: Memory of a device that is free even at the upper end of the peak; below zero it may run out.
        failure: Where a layout that is not sure to fit would fail, and by how much at most.
        bubble_share: Share of the step in which the slowest stage waits.
        exposed_share: Share of the step in which communication is waited for.
        reason: Where the step's time goes besides computation.
    """

    run: Run
    parallel: str
    strategy: str
    batch_size: int
    accumulation: int
    recompute: str
    schedule: str
    step_time_s: Interval
    throughput_samples_per_s: Interval
    peak_memory_bytes: Interval
    worst_stage: int
    fits: str
    room_bytes: float
    failure: str
    bubble_share: float
    exposed_share: float
    reason: str


def layout_changes(run: Run, space: LayoutSpace) -> Iterator[dict[str, Any]]:
    """The changes of a run to every layout and micro-batch, all of one global batch.

    Tensor and expert parallelism stay inside a node, context parallelism is tried for long samples only; ``variants``
    adds what is worth trying beside the good ones.
    """
    total, node = run.cluster.num_devices, run.cluster.num_devices_per_node
    heads = space.num_heads
    # A tensor group sums activations in every block, which only links inside a node are fast enough for.
    tensors = [
        t for t in _powers(node) if t == 1 or (space.can_be_divided and heads is not None and heads % t == 0)
    ]
    contexts = [1]
    if heads is not None and space.num_tokens is not None and space.num_tokens >= _LONG_TOKENS:
        contexts = _powers(min(total, space.num_tokens // 2048))
    for tensor, context in product(tensors, contexts):
        for pipeline in range(1, max(1, space.num_blocks) + 1):
            data, rest = divmod(total, tensor * context * pipeline)
            if rest or space.global_batch % data:
                continue
            axes = DeviceLayout(tensor=tensor, context=context, pipeline=pipeline, data=data)
            for expert in _experts(axes, node, space.num_experts):
                yield from _with_micro_batches(node, replace(axes, expert=expert), space)


def _experts(axes: DeviceLayout, node: int, num_experts: int | None) -> list[int]:
    """Numbers of devices that may divide the experts, all of one node."""
    if num_experts is None:
        return [1]
    most = min(node // axes.tensor, axes.data * axes.context, num_experts)
    return [e for e in _powers(most) if num_experts % e == 0 and axes.data * axes.context % e == 0]


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


def _with_micro_batches(node: int, axes: DeviceLayout, space: LayoutSpace) -> Iterator[dict[str, Any]]:
    own = space.global_batch // axes.data
    # Images and short texts fill a device with hundreds of samples; all of a device's at once is what most runs do.
    most = min(own, max(_MOST_MICRO_BATCH, _MOST_TOKENS // (space.num_tokens or 1)))
    for micro in sorted({b for b in (*_powers(most), own) if b <= most and own % b == 0}):
        steps = own // micro
        for way in _ways(node, axes, steps, space):
            yield {"parallel": axes.text, "batch_size": micro, "accumulation": steps, **way}


def _ways(node: int, axes: DeviceLayout, steps: int, space: LayoutSpace) -> Iterator[dict[str, Any]]:
    """Strategies of the data groups, and schedules of the pipeline."""
    several = axes.data * axes.context > 1
    usual = {"strategy": "zero1" if several else "ddp"}
    yield usual
    if axes.pipeline == 1:
        if several:
            # Replicas are traced whole, which takes long for the models that no device can hold.
            if axes.divides_model or space.replicas_fit:
                yield {"strategy": "ddp"}
            yield {"strategy": "fsdp"}
        # Shards inside a node need several nodes, and more than one device of a node beside its tensor group.
        if axes.data * axes.context * axes.tensor > node > axes.tensor:
            yield {"strategy": "hsdp"}
    elif steps % axes.pipeline == 0 and space.num_blocks % (axes.pipeline * _VIRTUAL_STAGES) == 0:
        yield {**usual, "pipeline_schedule": "interleaved", "virtual_stages": _VIRTUAL_STAGES}


def variants(run: Run, space: LayoutSpace) -> Iterator[dict[str, Any]]:
    """Other orders, exchanges and divisions of the same devices, for a layout that is worth a closer look.

    Pipelines take other schedules, groups of any depth, and FSDP in place of ZeRO-1; context parallelism exchanges
    heads for tokens (Ulysses); experts spread over nodes.
    """
    layout, steps = run.layout, run.sharing.num_accumulation_steps
    if layout.pipeline > 1 and layout.virtual_stages == 1:
        own = space.num_blocks // layout.pipeline
        yield {"pipeline_schedule": "zero-bubble"}
        # Interleaving takes micro-steps in whole rounds of the stages.
        if steps % layout.pipeline == 0 and space.num_blocks % layout.pipeline == 0:
            for groups in range(_VIRTUAL_STAGES + 1, own + 1):
                if own % groups == 0:
                    yield {"pipeline_schedule": "interleaved", "virtual_stages": groups}
        if layout.data * layout.context > 1:
            yield {"strategy": "fsdp"}
    if layout.context > 1 and (space.num_heads or 0) % (layout.tensor * layout.context) == 0:
        yield {"context_parallel": "ulysses"}
    if layout.expert > 1 and space.num_experts is not None:
        most = min(space.num_experts, layout.data * layout.context)
        for expert in _powers(most):
            # Within a node they are among the layouts already; over nodes their exchange is slow, and only
            # the best are tried.
            if expert * layout.tensor > run.cluster.num_devices_per_node and space.num_experts % expert == 0:
                yield {"parallel": replace(layout, expert=expert).text}


def layout_point(
    models: TracedModels,
    run: Run,
    weights: CostModel,
    constants: MemoryConstants,
    visible_bytes: float,
    epoch: UnevenEpoch | None = None,
) -> LayoutPoint | None:
    """A layout with its step and memory, those of ``predict``; None if the model cannot have it.

    Of samples of unequal length the step is the mean of an epoch.
    """
    equal = [run] if epoch is None else epoch.runs(run)
    model_of, size = [models.of(each) for each in equal], run.setup.batch_size_per_device
    try:
        steps = [divided_steps(*each, [size], weights)[0] for each in zip(model_of, equal, strict=True)]
    except InvalidSetupError:
        return None
    step, step_s, samples = steps[-1], steps[-1].step_s, float(run.batch_size_global)
    if epoch is not None and len(equal) > 1:
        mean = epoch.mean_step(run, np.asarray([each.step_s.ends for each in steps]))
        step_s, samples = mean.time_s, mean.samples
    worst = worst_memory(model_of[-1], equal[-1], step.gradient_bytes, constants)
    peak, layout = worst.peak_bytes, run.layout
    if epoch is not None:
        peak = epoch.peak(run, peak, visible_bytes)
    schedule = str(layout.schedule) if layout.pipeline > 1 else "none"
    if layout.virtual_stages > 1:
        schedule += f" x {layout.virtual_stages}"
    parts = {part.name: part.time_s / step.step_s.value for part in step.parts}
    return LayoutPoint(
        run=run,
        parallel=layout.text,
        strategy=str(run.sharing.strategy),
        batch_size=run.setup.batch_size_per_device,
        accumulation=run.sharing.num_accumulation_steps,
        recompute=run.setup.saving.recompute,
        schedule=schedule,
        step_time_s=step_s,
        throughput_samples_per_s=step_s.inverse(samples),
        peak_memory_bytes=peak,
        worst_stage=worst.stage,
        fits=fits(peak.low, peak.high, visible_bytes),
        room_bytes=visible_bytes - peak.high,
        failure=_failure(worst, run.layout.pipeline, visible_bytes),
        bubble_share=step.bubble_s / step.step_s.value,
        exposed_share=step.exposed_s / step.step_s.value,
        reason=reason_of(parts),
    )


def _failure(worst: StageMemory, num_stages: int, visible_bytes: float) -> str:
    """Where a layout runs out of memory, by how much at its upper end, and what fills it; empty if it fits for sure."""
    missing = worst.peak_bytes.high - visible_bytes
    if missing <= 0:
        return ""
    where = f"stage {worst.stage} of {num_stages}" if num_stages > 1 else "every device"
    largest = max(worst.parts, key=lambda part: part.size_bytes)
    word = "runs" if worst.peak_bytes.low > visible_bytes else "may run"
    return (
        f"{where} {word} out of memory by up to {format_bytes(missing)}, with {format_bytes(largest.size_bytes)} of "
        f"{largest.name}"
    )


_LOST = (
    "pipeline bubble",
    "tensor parallelism",
    "context parallelism",
    "expert parallelism",
    "gathering of weights",
    "gradient synchronisation",
    "handover of stages",
    "slowed by communication",
    "optimizer",
)
_LEAST_SHARE = 0.01


def reason_of(shares: dict[str, float]) -> str:
    """Losses of a layout beside computation, the largest first.

    >>> reason_of({"linear": 0.8, "pipeline bubble": 0.15, "optimizer": 0.05})
    'computes 80 % of the step; pipeline bubble 15 %, optimizer 5 %'
    """
    lost = sorted(((shares.get(name, 0.0), name) for name in _LOST), reverse=True)
    computes = 1 - sum(share for share, _ in lost)
    named = [f"{name} {share:.0%}".replace("%", " %") for share, name in lost if share >= _LEAST_SHARE]
    head = f"computes {computes:.0%}".replace("%", " %") + " of the step"
    return f"{head}; {', '.join(named)}" if named else head


def chosen_points(
    points: Sequence[LayoutPoint], most: int
) -> tuple[tuple[LayoutPoint, ...], tuple[LayoutPoint, ...]]:
    """The fastest layouts that fit, those that are sure to fit first, and the front of time against memory of all.

    Raises:
        UsageError: None fits.
    """
    fitting = [point for point in points if point.fits != "no"]
    if not fitting:
        if not points:
            raise UsageError(
                "no layout divides this model and batch so; give another global batch or cluster"
            )
        least = min(points, key=lambda point: point.peak_memory_bytes.value)
        raise UsageError(
            f"none of {len(points):,} layouts fits: the least memory is "
            f"{least.peak_memory_bytes.value / 1024**3:.1f} GiB a device, by --parallel {least.parallel} "
            f"--strategy {least.strategy} --recompute {least.recompute}; give more devices, a shorter sequence or "
            "adapters (--lora 16)"
        )
    # A run that ends out of memory after an hour in the queue costs more than a slower step: what is sure comes first.
    sure = {"yes": 0, "close": 1}
    ordered = sorted(fitting, key=lambda point: (sure[point.fits], point.step_time_s.value))
    by_time = sorted(fitting, key=lambda point: point.step_time_s.value)
    costs = np.asarray([[point.step_time_s.value, point.peak_memory_bytes.value] for point in by_time])
    front = tuple(point for point, is_on in zip(by_time, pareto_front(costs), strict=True) if is_on)
    return tuple(ordered[:most]), front


def resolved(run: Run, models: TracedModels, cost_model: CostModel | None) -> Run:
    """The run with the fastest layout that fits in place of ``--strategy auto``."""
    if run.sharing.layout.divides_model:
        raise InvalidSetupError(
            "--strategy auto finds the layout itself; leave --parallel out, or name a strategy"
        )
    points: list[LayoutPoint] = []
    if run.cluster.num_devices > 1:
        points, _ = search_layouts(run, models, cost_model, None, (run.setup.saving.recompute,))
    if not points:  # one device, or a batch that cannot be divided: the devices have copies of the model
        return replace(run, sharing=replace(run.sharing, strategy=Strategy.DDP))
    best, _ = chosen_points(points, 1)
    return best[0].run


def search_layouts(
    run: Run,
    models: TracedModels,
    cost_model: CostModel | None,
    global_batch: int | None,
    recomputed: Sequence[str],
) -> tuple[list[LayoutPoint], int]:
    """Predicted layouts of a run, and its global batch."""
    # A plain run of copies: every change then says the whole layout, and nothing of the user's own remains.
    plain = replace(run, sharing=replace(run.sharing, strategy=Strategy.ZERO1, layout=DeviceLayout()))
    total = global_batch or run.cluster.num_devices * run.batch_size_per_device
    weights, constants = cost_model or cost_model_of(run), memory_constants_of(run.cluster.device, run)
    visible = visible_memory_bytes(run.cluster.device)
    epoch = UnevenEpoch.of(run) if has_lengths(run) else None
    found: list[LayoutPoint] = []

    def add(candidates: Iterator[Run]) -> list[LayoutPoint]:
        points = (layout_point(models, one, weights, constants, visible, epoch) for one in candidates)
        new = [point for point in points if point is not None]
        found.extend(new)
        return new

    by_model = []
    for asked in Search(run=plain, axes={"recompute": recomputed}).runs():
        longest = asked if epoch is None else epoch.runs(asked)[-1]
        model = models.of(longest)
        space = LayoutSpace.of(DividedModel.of(model), total, visible)
        changes = tuple(layout_changes(asked, space))
        by_model.append((space, add(Search(run=asked, axes={SETTINGS: changes}).runs())))
        if not model.graph.blocks:
            break  # there is nothing that could be computed again
    fitting = [point.step_time_s.value for point in found if point.fits == "yes"]
    most_s = _WORTH_A_LOOK * min(fitting, default=float("inf"))
    for space, points in by_model:
        for point in sorted(points, key=lambda point: point.step_time_s.value)[:_MOST_REFINED]:
            if point.step_time_s.value <= most_s:
                changes = tuple(variants(point.run, space))
                add(Search(run=point.run, axes={SETTINGS: changes}).runs())
    return found, total
