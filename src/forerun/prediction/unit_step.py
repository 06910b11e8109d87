"""The step of a layout: its stages with their communication, the pipeline over them, and the update.

    step = pipeline(forward_s + backward_s + exposed communication of each stage) + gradients that nothing hides +
    update

Per micro-step tensor parallelism sums tokens twice per pair of products (Megatron-LM; with sequence parallelism
it gathers and scatters them), of which the sum in the backward pass hides behind the gradients of weights; context
parallelism passes keys and values around a ring behind attention, or exchanges heads for tokens; expert parallelism
sends tokens to their experts and back in both passes, as many to each; FSDP gathers
weights and scatters gradients block by block. Gradients of replicas are reduced behind the last backward pass.
Ranks count tensor, context, data, pipeline, so that devices which talk most are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil

import numpy as np

from forerun.base.errors import InvalidSetupError
from forerun.cost.communication.collectives import Collective, Group, group_of
from forerun.cost.communication.constants import LayoutConstants, LayoutTable, StepShape
from forerun.cost.communication.data_parallel import straggler_factor
from forerun.cost.memory.units import UnitMemory
from forerun.cost.time.law import sustained_products
from forerun.cost.time.step_times import smooth_maximum
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Floats
from forerun.graph.shards import Shards
from forerun.prediction.division import (
    DividedStep,
    Overlap,
    StageTime,
    as_measured,
    check_layout,
    fully_sharded_backward,
    fully_sharded_forward,
    pipeline_s,
    reduced_backward,
)
from forerun.prediction.estimate import BreakdownPart, Interval
from forerun.prediction.replica_step import STRAGGLER_PART, drag_of
from forerun.prediction.step import HOST_PART, StepPrediction, widened
from forerun.prediction.units import DividedModel, UnitTimes
from forerun.question.run import Run
from forerun.question.sharing import (
    DEFAULT_BUCKET_BYTES,
    ContextKind,
    FsdpVersion,
    Handover,
    PipelineSchedule,
)

_COPY_SHARE = 0.82
"""Share of the bandwidth that copies reach: element-wise kernels of ``neusight_ops`` above 0.1 ms, seven devices."""

_UNIT_HOST_S = 1.7e-3
_ADAPTER_HOST_S = 0.75e-3
"""Time of the host for a unit of FSDP in both passes, in which hooks of Python gather, give back and scatter: a block
of nine tensors, and a unit of one [s].

Own measurement, 2026-11-27: PyTorch 2.15, blocks of Transformers' Mistral with tiny tensors, collectives that do
nothing: 1.6 to 1.75 ms a block by FSDP1, 1.5 to 2.2 by FSDP2, beside 2.1 ms of its own operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    tensor: Group
    context: Group
    expert: Group
    data: Group
    expert_data: Group
    shard: Group
    expert_shard: Group
    replicas: Group
    pipeline: Group


def forward_s(model: DividedModel, run: Run, weights: CostModel, table: LayoutTable, times: int = 1) -> float:
    """A pass without gradients of all micro-steps through all stages, over ``times`` their samples [s]."""
    shards, setup = run.shards, run.compute_setup
    setup = replace(setup, batch_size_per_device=times * setup.batch_size_per_device)
    (both,) = model.times(shards, run.cluster.device, [setup], weights, run.software.torch_version)
    memory, units = model.memory(shards, setup.batch_size_per_device), model.stages(run.layout)
    groups, kinds = _groups(run, table.constants), _kinds(both, memory, units)
    # A unit without a kernel takes no time, of which there is no share.
    share = both.forward_s / np.maximum(both.forward_s + both.backward_s + both.weight_gradient_s, 1e-30)
    only = replace(
        both,
        backward_s=np.zeros_like(share),
        weight_gradient_s=np.zeros_like(share),
        launch_s=both.launch_s * share,
    )
    known = {
        # Once for each kind: equal stages take equal time.
        kind: _stage(run, only, memory, groups, own, table.constants, is_forward=True).total_s
        for kind, own in zip(kinds, units, strict=True)
    }
    stage_s = [float(known[kind]) for kind in kinds]
    groups_of_blocks = run.layout.virtual_stages
    return pipeline_s(
        stage_s,
        [0.0] * len(stage_s),
        run.sharing.num_accumulation_steps,
        PipelineSchedule.INTERLEAVED if groups_of_blocks > 1 else PipelineSchedule.GPIPE,
        groups_of_blocks,
    )


def layout_step(model: DividedModel, run: Run, weights: CostModel, table: LayoutTable) -> DividedStep:
    """The forward and backward pass of all micro-steps, and the update, of a run with a layout.

    Args:
        model: The step traced in the run's ``compute_setup``.
        run: The run.
        weights: The cost model.
        table: Constants of collectives.

    Raises:
        UsageError: The model cannot be divided so, or a link is not known.
    """
    blocks, only = model.blocks, model.model.graph.only_batch_size
    layout, micro_steps = run.layout, run.sharing.num_accumulation_steps
    if layout.divides_model and only is not None:
        raise InvalidSetupError(
            f"{model.model.graph.model} was traced for batch size {only} only, so its work cannot be divided; "
            "leave --parallel out, or give a model whose sizes grow with the batch"
        )
    check_layout(layout, model.traced, len(blocks.names), model.model.graph.model, micro_steps)
    shards, setup = run.shards, run.compute_setup
    (times,) = model.times(shards, run.cluster.device, [setup], weights, run.software.torch_version)
    memory = model.memory(shards, setup.batch_size_per_device)
    # What is divided among all replicas is a part of all experts, however these are divided.
    every = model.memory(replace(shards, expert=1, whole_experts=False), setup.batch_size_per_device)
    whole_bytes = float(model.memory(Shards(), setup.batch_size_per_device).gradients.sum())
    groups = _groups(run, table.constants)
    units = model.stages(layout)
    kind_of = _kinds(times, memory, units)
    known = {
        kind: _stage(run, times, memory, groups, units[index], table.constants)
        for index, kind in enumerate(kind_of)
        if kind not in kind_of[:index]
    }
    stages = [known[kind] for kind in kind_of]
    through_s, blocked_s = (
        pipeline_s(
            [stage.total_s + share * stage.blocked_s for stage in stages],
            [stage.weight_gradient_s for stage in stages],
            micro_steps,
            layout.schedule,
            layout.virtual_stages,
        )
        for share in (0, 1)
    )
    if layout.handover is Handover.BLOCKING and groups.pipeline.num_nodes > 1:
        exchanges = (micro_steps + layout.pipeline - 1) * min(4, 2 * layout.pipeline - 2)
        blocked_s += exchanges * table.constants.stall_s
        if run.cluster.num_nodes >= table.constants.stall_nodes:
            through_s = blocked_s
    reduced = {kind: _synchronised(run, times, memory, groups, units[kind_of.index(kind)]) for kind in known}
    synchronised = [reduced[kind] for kind in kind_of]
    held = every if run.sharing.strategy.stage else memory
    # A stage updates its share of the weights, of which one device holds the state of a part.
    shares = [float(held.gradients[list(own)].sum()) / max(whole_bytes, 1.0) for own in units]
    updates = [times.optimizer_s * share / run.num_shards * run.wide_factor for share in shares]
    slowest = max(range(len(stages)), key=lambda k: stages[k].total_s)
    last = max(range(len(stages)), key=lambda k: synchronised[k].exposed_s + updates[k])
    hidden_s = synchronised[last].busy_s - synchronised[last].exposed_s
    slowed_s = table.constants.slowdown * max(0.0, hidden_s)
    stage = stages[slowest]
    compute_s = micro_steps * stage.compute_s + updates[last]
    straggler_s = compute_s * (straggler_factor(run.cluster.num_devices, drag_of(run)) - 1)
    rest_s = slowed_s + straggler_s + times.overhead_s
    step_s = through_s + synchronised[last].exposed_s + updates[last] + rest_s
    bubble_s = through_s - micro_steps * stage.total_s
    parts = _parts(
        times.alone,
        stage,
        micro_steps,
        {
            "optimizer": updates[last],
            "pipeline bubble": bubble_s,
            "gradient synchronisation": synchronised[last].exposed_s,
            STRAGGLER_PART: straggler_s,
            "copies of FSDP" if run.sharing.strategy.stage == 3 else "sums of gradients": (
                micro_steps * stage.copied_s
            ),
        },
        slowed_s,
    )
    least_s = micro_steps * times.alone.least_s / layout.pipeline
    interval, slow = (
        _interval(run, model, step_s + more_s, times.alone.step_s, table.log_spread, least_s)
        for more_s in (0.0, blocked_s - through_s)
    )
    found = DividedStep(
        step_s=replace(interval, high=slow.high),
        model=times.model,
        alone=times.alone,
        stages=tuple(stages),
        parts=parts,
        compute_s=compute_s,
        busy_share=compute_s / step_s,
        exposed_s=sum(part.time_s for part in parts if part.name in _COMMUNICATION),
        communication_s=micro_steps * stage.communication_s + synchronised[last].busy_s,
        bubble_s=bubble_s,
        shape=StepShape(
            hidden_size=blocks.hidden_size,
            block_s=stage.total_s / max(1, len(units[slowest])),
            exposed_share=sum(part.time_s for part in parts if part.name in _COMMUNICATION) / step_s,
            waiting_share=sum(part.time_s for part in parts if part.name == HOST_PART) / step_s,
        ),
    )
    return found if table.measured is None else as_measured(found, table.measured)


def _interval(
    run: Run, model: DividedModel, step_s: float, alone: Interval, log_spread: float, least_s: float
) -> Interval:
    """The 90 % interval of a step of several devices.

    The spread is that of whole steps of language models on sources left out of every fit, on dies that these sources
    have: there it holds what is unknown of one device as well. Of other models and dies both are unknown.
    """
    is_known = model.model.graph.tokens_per_sample is not None and sustained_products(run.cluster.device)
    own = Interval(step_s, step_s, step_s) if is_known else alone
    return widened(step_s, own, log_spread, least_s)


def _kinds(times: UnitTimes, memory: UnitMemory, stages: Sequence[range]) -> list[bytes]:
    """Stages of equal units have one key: most stages of a pipeline are alike and need not be worked out again."""
    last = len(memory.weights) - 1
    # The ends of a model exchange other messages than its blocks, whatever they take.
    columns = [np.isin(np.arange(last + 1), (0, last))]
    values = (getattr(table, field.name) for table in (times, memory) for field in fields(table))
    columns += [value for value in values if isinstance(value, np.ndarray) and value.ndim == 1]
    columns += list(times.attention_s)
    found = np.stack(columns)
    return [found[:, units.start : units.stop].tobytes() for units in stages]


_COMMUNICATION = (
    "tensor parallelism",
    "context parallelism",
    "expert parallelism",
    "gathering of weights",
    "handover of stages",
    "gradient synchronisation",
)


def _groups(run: Run, constants: LayoutConstants) -> _Groups:
    layout, shard = run.layout, run.num_shards
    # Devices that divide the experts have different ones: an expert's replicas are as far apart as these are many.
    expert, distance = layout.expert, 1 if layout.whole_experts else layout.tensor
    spread = layout.tensor // distance

    def group(number: int, distance: int) -> Group:
        return group_of(run.cluster, number, distance, constants)

    return _Groups(
        tensor=group(layout.tensor, 1),
        context=group(layout.context, layout.tensor),
        expert=group(expert, distance),
        data=group(layout.replicated, layout.tensor),
        expert_data=group(max(1, spread * layout.replicated // expert), distance * expert),
        shard=group(shard, layout.tensor),
        expert_shard=group(max(1, spread * shard // expert), distance * expert),
        replicas=group(layout.replicated // shard, layout.tensor * shard),
        pipeline=group(layout.pipeline, layout.tensor * layout.replicated),
    )


def _stage(
    run: Run,
    times: UnitTimes,
    memory: UnitMemory,
    groups: _Groups,
    units: range,
    constants: LayoutConstants,
    *,
    is_forward: bool = False,
) -> StageTime:
    """One micro-step of a stage, or its forward pass alone."""
    own = list(units)
    forward, backward = times.forward_s[own], times.backward_s[own] + times.weight_gradient_s[own]
    tensor = _tensor(run, times, groups.tensor, own)
    context = _context(run, times, groups.context, own)
    *expert, beside_s = _expert(run, times, groups.expert, own)
    copies = _copies(run, memory, groups, own)
    if is_forward:
        none = np.zeros(len(own))
        tensor, context, expert = (tensor[0], none, none), (context[0], none, none), [expert[0], none]
        copies = copies * np.asarray([[1.0], [0.0]])
    forward = forward + tensor[0] + context[0] + expert[0]
    backward = backward + tensor[1] + context[1] + expert[1]
    forward, backward = forward + copies[0], backward + copies[1]
    gather = _gathering(run, memory, groups, own, forward, None if is_forward else backward)
    passes_s = float(forward.sum() + backward.sum())
    handover = _handover(run, times, groups.pipeline, constants, passes_s, 1 if is_forward else 2)
    hidden_s = sum(one.busy_s - one.exposed_s for one in (gather, handover))
    hidden_s += float(tensor[2].sum() + context[2].sum() + beside_s.sum())
    exposed = [float(part[0].sum() + part[1].sum()) for part in (tensor, context, expert)]
    compute_s = float((times.forward_s + times.backward_s + times.weight_gradient_s)[own].sum())
    copied_s = float(copies.sum())
    # Communication that hides takes multiprocessors and bandwidth from what it hides behind.
    slowed_s = constants.slowdown * max(0.0, hidden_s)
    device_s = compute_s + copied_s + sum(exposed) + gather.exposed_s + slowed_s + handover.exposed_s
    share = 0.5 if is_forward else 1.0
    of_tensor = _num_tensor_collectives(run, times, own)
    launched_s = share * (of_tensor + _num_other_collectives(run, times, own)) * constants.launch_s
    launched_s += share * run.setup.host_slowdown * _sharded_host_s(run, memory, groups, own)
    waiting_s = blocked_s = 0.0
    if launched_s:
        host_s = float(times.launch_s[own].sum()) + launched_s
        # Small blocks of many collectives end before the host has launched the next ones.
        waiting_s = float(smooth_maximum(np.asarray(device_s), np.asarray(host_s))) - device_s
        if groups.pipeline.num_nodes > 1 and run.layout.handover is not Handover.AHEAD:
            host_s += share * of_tensor * run.layout.tensor * constants.blocked_s
            host_s += share * of_tensor * (groups.tensor.num_nodes - 1) * constants.blocked_crossing_s
            blocked_s = float(smooth_maximum(np.asarray(device_s), np.asarray(host_s))) - device_s - waiting_s
    if run.layout.handover is Handover.BLOCKING:
        waiting_s, blocked_s = waiting_s + blocked_s, 0.0
    return StageTime(
        compute_s=compute_s,
        weight_gradient_s=float(times.weight_gradient_s[own].sum()),
        tensor_s=exposed[0],
        context_s=exposed[1],
        expert_s=exposed[2],
        gather_s=gather.exposed_s,
        copied_s=copied_s,
        slowed_s=slowed_s,
        waiting_s=waiting_s,
        blocked_s=blocked_s,
        handover_s=handover.exposed_s,
        communication_s=sum(exposed) + gather.exposed_s + hidden_s + handover.exposed_s,
    )


def _handover(
    run: Run, times: UnitTimes, group: Group, constants: LayoutConstants, passes_s: float, num_passes: int
) -> Overlap:
    """Handing tokens to the next stage and gradients back in one micro-step.

    In the interleaved schedule a group of blocks is handed over beside the computation of the next one (Megatron-LM,
    ``megatron/training/arguments.py``, which ``--no-overlap-p2p-communication`` turns off); else it is waited for.
    """
    layout = run.layout
    if layout.pipeline == 1:
        return Overlap(0.0, 0.0)
    crossings = num_passes * layout.virtual_stages
    # With sequence parallelism a device hands over its own tokens; without, each its part, which are gathered.
    busy_s = crossings * (group.send_s(times.message_bytes / layout.tensor) + constants.stage_s)
    beside_s = passes_s if layout.schedule is PipelineSchedule.INTERLEAVED else 0.0
    return Overlap(max(0.0, busy_s - beside_s), busy_s)


def _sharded_host_s(run: Run, memory: UnitMemory, groups: _Groups, own: Sequence[int]) -> float:
    """Time of the host for the units of FSDP in one micro-step of a stage [s]."""
    if run.sharing.strategy.stage < 3 or groups.data.num_devices == 1:
        return 0.0
    is_wrapped = run.sharing.wrap_adapters and run.setup.saving.lora_rank is not None
    adapters = float(memory.num_gradients[list(own)].sum()) if is_wrapped else 0.0
    return len(own) * _UNIT_HOST_S + adapters * _ADAPTER_HOST_S


def _num_tensor_collectives(run: Run, times: UnitTimes, own: Sequence[int]) -> float:
    """Collectives of tensor parallelism in one micro-step of a stage.

    Without sequence parallelism one sum around a pair of products in each pass. With it tokens are gathered before the
    pair and scattered behind it in each pass; the gradients of weights need the tokens of the forward pass again,
    unless they were kept.
    """
    layout = run.layout
    pairs, again = float(times.num_pairs[own].sum()), float(times.num_recomputed_pairs[own].sum())
    if not layout.sequence_parallel:
        return (layout.tensor > 1) * (2.0 * pairs + again)
    return (layout.tensor > 1) * ((4.0 if layout.keep_gathered else 5.0) * pairs + 2.0 * again)


def _num_other_collectives(run: Run, times: UnitTimes, own: Sequence[int]) -> float:
    """Collectives of context and expert parallelism in one micro-step of a stage."""
    layout = run.layout
    blocks = float((times.attention_s[0, own] > 0).sum())
    # Keys and values go around a ring of g devices in g - 1 sends, in the forward and again in the backward pass;
    # Ulysses exchanges queries, keys, values and the result in each pass.
    of_context = 2 * 4.0 if layout.context_kind is ContextKind.ULYSSES else 2 * (layout.context - 1.0)
    # Tokens go to their experts and come back in each pass, and in each forward pass that is repeated.
    routes = float(((times.routed_bytes[own] > 0) * (2 * 2.0 + 2.0 * times.num_recomputed_routes[own])).sum())
    return (layout.context > 1) * of_context * blocks + (layout.expert > 1) * routes


def _tensor(run: Run, times: UnitTimes, group: Group, own: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """Exposed communication of tensor parallelism forward and backward, and what is hidden, (units,) each [s].

    In pieces (``overlap_tensor``) a collective of g devices goes on beside its product, one of g pieces ahead: what
    is exposed is c / g, and what of (g - 1) c / g the product is too short for.
    """
    sequence_parallel = run.layout.sequence_parallel
    zero = np.zeros(len(own))
    if group.num_devices == 1:
        return zero, zero, zero
    crossing_s = group.constants.crossing_s * (group.num_nodes - 1)
    sum_s, gather_s, scatter_s = (
        group.time_s(kind, times.message_bytes) + crossing_s
        for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    # The embedding sums its tokens once, the head its gradients.
    pairs = times.num_pairs[list(own)].copy()
    last = len(times.num_pairs) - 1
    for place, unit in enumerate(own):
        if unit in (0, last):
            pairs[place] = 1.0
    forward_s = (gather_s + scatter_s) if sequence_parallel else sum_s
    hideable = times.weight_gradient_s[list(own)] / np.maximum(pairs, 1.0)
    again_s = 0.0 if run.layout.keep_gathered else gather_s
    behind_s = (scatter_s + again_s) if sequence_parallel else sum_s
    hidden = np.minimum(behind_s, hideable)
    # With sequence parallelism the gradients of a pair's result are gathered before anything can be computed.
    backward = pairs * ((gather_s if sequence_parallel else 0.0) + behind_s - hidden)
    again = times.num_recomputed_pairs[list(own)] * forward_s
    forward = pairs * forward_s
    if not run.sharing.overlap_tensor:
        return forward, backward + again, pairs * hidden
    # Products of the forward pass take as long as the gradients of their weights, and half of the backward pass.
    beside = times.weight_gradient_s[list(own)]
    shown = [_in_pieces(whole, beside, group.num_devices) for whole in (forward, backward + again)]
    return shown[0], shown[1], pairs * hidden + forward + backward + again - shown[0] - shown[1]


def _in_pieces(whole_s: Floats, beside_s: Floats, number: int) -> Floats:
    """Exposed part of collectives in pieces beside their products, (units,) [s]."""
    later = whole_s * (number - 1) / number
    found: Floats = whole_s / number + np.maximum(0.0, later - beside_s * (number - 1) / number)
    return found


def _context(run: Run, times: UnitTimes, group: Group, own: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """Exposed communication of context parallelism forward and backward, and what is hidden, (units,) each [s]."""
    zero = np.zeros(len(own))
    number = group.num_devices
    attention = times.attention_s[:, list(own)]
    has = attention[0] > 0
    if number == 1 or not has.any():
        return zero, zero, zero
    tokens = times.message_bytes / run.layout.tensor
    pair = times.key_value_bytes or 2 * tokens
    if run.layout.context_kind == "ulysses":
        # Queries and the result back, keys and values.
        each_s = 2 * sum(group.time_s(Collective.ALL_TO_ALL, bytes_) for bytes_ in (tokens, pair / 2))
        return has * each_s, has * each_s, zero
    forward_s = (number - 1) * group.send_s(pair)
    backward_s = (number - 1) * group.send_s(2 * pair)  # and their gradients
    covered = attention * (number - 1) / number
    exposed = [
        has * np.maximum(0.0, one_s - cover)
        for one_s, cover in zip((forward_s, backward_s), covered, strict=True)
    ]
    return exposed[0], exposed[1], has * (forward_s + backward_s) - exposed[0] - exposed[1]


def _expert(run: Run, times: UnitTimes, group: Group, own: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """Exposed communication of expert parallelism forward and backward, and what is hidden, (units,) each [s].

    Tokens go to the devices of their experts and come back: two exchanges of all with all in each pass. DeepEP sends a
    token once to each device and node that has some of its experts. Of k micro-steps whose exchanges go on beside
    another one's computation (``overlap_experts``) one has nothing beside it.
    """
    if group.num_devices == 1:
        return np.zeros(len(own)), np.zeros(len(own)), np.zeros(len(own))
    # Devices of tp have each their part of the tokens that go to experts.
    parts = 1 if run.layout.whole_experts else run.layout.tensor
    routed = times.routed_bytes[list(own)] / parts
    if run.layout.merge_routes:
        num_tokens = run.setup.batch_size_per_device * float(times.model.graph.tokens_per_sample or 1)
        copies = times.num_routes[list(own)] * run.layout.context * run.layout.tensor / parts / num_tokens
        both_s = np.asarray([2 * group.dispatch_s(*each) for each in zip(routed, copies, strict=True)])
    else:
        both_s = np.asarray([2 * group.time_s(Collective.ALL_TO_ALL, float(bytes_)) for bytes_ in routed])
    backward_s = both_s * (1.0 + times.num_recomputed_routes[list(own)])
    shown = 1.0 / run.sharing.num_accumulation_steps if run.sharing.overlap_experts else 1.0
    return shown * both_s, shown * backward_s, (1.0 - shown) * (both_s + backward_s)


def _gathering(
    run: Run,
    memory: UnitMemory,
    groups: _Groups,
    own: Sequence[int],
    forward: Floats,
    backward: Floats | None,
) -> Overlap:
    """Exposed and whole communication of FSDP in one micro-step, or without a backward pass."""
    sharing = run.sharing
    if sharing.strategy.stage < 3 or groups.data.num_devices == 1:
        return Overlap(0.0, 0.0)
    wide = run.wide_factor
    last = len(memory.weights) - 1
    blocks = [unit for unit in own if unit not in (0, last)]
    ends = [unit for unit in own if unit in (0, last)]
    place = {unit: index for index, unit in enumerate(own)}

    def exchanged_s(kind: Collective, sizes: Floats, units: int | list[int], factor: float) -> float:
        """Time of units, whose experts are of the devices that have the same ones."""
        experts = factor * float((sizes * memory.expert_share)[units].sum())
        parts = ((groups.shard, factor * float(sizes[units].sum()) - experts), (groups.expert_shard, experts))
        is_sum = kind is Collective.REDUCE_SCATTER
        return sum(
            group.time_s(kind, size)
            + is_sum * groups.replicas.time_s(Collective.ALL_REDUCE, size / group.num_devices)
            for group, size in parts
        )

    def gather_s(units: int | list[int]) -> float:
        return exchanged_s(Collective.ALL_GATHER, memory.weights, units, 1.0 if sharing.gather_half else wide)

    def scatter_s(units: int | list[int]) -> float:
        factor = _reduced_share(run) * (1.0 if sharing.reduce_half else wide)
        return exchanged_s(Collective.REDUCE_SCATTER, memory.gradients, units, factor)

    gathers = [gather_s(unit) for unit in blocks]
    scatters = [scatter_s(unit) for unit in blocks]
    ahead = fully_sharded_forward(
        [forward[place[unit]] for unit in blocks], gathers, prefetch=sharing.prefetch
    )
    root_s = gather_s(ends) if ends else 0.0
    if backward is None:
        return Overlap(ahead.exposed_s + root_s, ahead.busy_s + root_s)
    behind = fully_sharded_backward(
        [backward[place[unit]] for unit in reversed(blocks)],
        gathers[::-1] if sharing.reshard else [0.0] * len(blocks),
        scatters[::-1],
        prefetch=sharing.prefetch,
    )
    # Input and head are one group of weights: gathered first, kept, and scattered last.
    root_s += scatter_s(ends) if ends else 0.0
    return Overlap(ahead.exposed_s + behind.exposed_s + root_s, ahead.busy_s + behind.busy_s + root_s)


def _reduced_share(run: Run) -> float:
    """Share of the micro-steps that reduce gradients: only the last one if gradients are kept whole until then."""
    return 1.0 / run.sharing.num_accumulation_steps if run.sharing.reduce_once else 1.0


def _copies(run: Run, memory: UnitMemory, groups: _Groups, own: Sequence[int]) -> Floats:
    """Copies of FSDP and sums of gradients in the forward and the backward pass of one micro-step, (2, units) [s].

    With w bytes of weights and g of their gradients in half precision, and r of those that are reduced: FSDP2 copies
    gathered weights out of their buffer (2 w in each pass) and gradients into one (g + r); FSDP1, whose weights are
    views, joins the gradients of a block (2 g), converts them (g + r, if that changes them) and divides them (2 r).
    Gradients that are kept whole are summed (3 g) in all micro-steps but one, and reduced in that one alone.
    """
    sharing = run.sharing
    moved = np.stack([np.zeros(len(own)), _summed_bytes(run, memory, own)])
    if (
        sharing.strategy.stage == 3
        and groups.shard.num_devices > 1
        and sharing.fsdp_version is not FsdpVersion.ZERO_COPY
    ):
        wide = run.wide_factor
        weights, gradients = memory.weights[list(own)], memory.gradients[list(own)]
        reduced = gradients * (1.0 if sharing.reduce_half else wide)
        gathered = weights * (1.0 if sharing.gather_half else wide)
        share = _reduced_share(run)
        if sharing.fsdp_version is FsdpVersion.FSDP1:
            converted = np.where(reduced == gradients, 0.0, gradients + reduced)
            moved[1] += 2 * gradients + share * (converted + 2 * reduced)
        else:
            again = 1.0 if sharing.reshard else 0.0
            moved += np.stack([2 * gathered, again * 2 * gathered + share * (gradients + reduced)])
    found: Floats = moved / (_COPY_SHARE * run.cluster.device.memory_bandwidth_bytes_per_s)
    return found


def _summed_bytes(run: Run, memory: UnitMemory, own: Sequence[int]) -> Floats:
    """Traffic of the sums of gradients, which all micro-steps but the first have, in the mean of all, (units,) [bytes].

    A sum reads the gradient in half precision, and reads and writes the one it is added to: whole, or the part of a
    device. Where the model is divided, products of weight gradients add to it themselves, as Megatron-LM's do
    (``gradient_accumulation_fusion``, ``megatron/core/tensor_parallel/layers.py``).
    """
    sharing, gradients = run.sharing, memory.gradients[list(own)]
    if sharing.strategy.stage < 3 and run.layout.divides_model:
        return np.zeros(len(own))
    later = 1.0 - 1.0 / sharing.num_accumulation_steps
    if sharing.strategy.stage == 3 and sharing.reduce_once:
        return 3.0 * later * gradients  # whole, in half precision
    number = run.num_shards if sharing.strategy.stage >= 2 else 1
    found: Floats = later * gradients * (1.0 + 2.0 * run.gradient_factor) / number
    return found


def _synchronised(run: Run, times: UnitTimes, memory: UnitMemory, groups: _Groups, units: range) -> Overlap:
    """Reduction of the gradients of replicas behind the last backward pass, and gathering of updated weights (ZeRO).

    Those of experts that eight devices of a node divide go from each to one of every node, over its own link alone.
    """
    stage = run.sharing.strategy.stage
    if stage == 3 or groups.data.num_devices == 1:
        return Overlap(0.0, 0.0)
    wide = 1.0 if run.sharing.reduce_half else run.gradient_factor
    kind = Collective.REDUCE_SCATTER if stage else Collective.ALL_REDUCE
    own = list(units)[::-1]
    # A group of blocks is done while the others have as many passes left as there are stages (Megatron-LM,
    # ``megatron/core/pipeline_parallel/schedules.py``: grad_sync_func and param_sync_func).
    span = run.layout.pipeline if run.layout.virtual_stages > 1 else 1

    def beside(compute_s: Floats, kind: Collective, factor: float) -> Overlap:
        capacity = bucket_capacity_bytes(run, groups.data.num_devices, factor)
        every = factor * memory.gradients[own]
        # Units that one bucket holds are reduced together.
        starts = np.unique((np.cumsum(every) - every) // capacity, return_index=True)[1]
        buckets, times_s = [0] * len(starts), [0.0] * len(starts)
        experts = every * memory.expert_share[own]
        for group, sizes in ((groups.data, every - experts), (groups.expert_data, experts)):
            for place, size in enumerate(np.add.reduceat(sizes, starts).tolist()):
                number = max(1, ceil(size / capacity))
                buckets[place] += number if size > 0 else 0
                times_s[place] += number * group.time_s(kind, size / number)
        passes_s = (span * np.add.reduceat(compute_s[own], starts)).tolist()
        return reduced_backward(passes_s, times_s, [max(1, number) for number in buckets])

    found = beside(times.backward_s + times.weight_gradient_s, kind, wide)
    if stage:
        # With overlap the next forward pass starts as soon as its first unit has its weights.
        gathered = beside(times.forward_s, Collective.ALL_GATHER, 1.0)  # of what is trained
        shown_s = gathered.exposed_s if run.sharing.overlap_update else gathered.busy_s
        sliced_s = (
            float(memory.num_gradients[own].sum()) * groups.data.num_devices * run.sharing.slice_tensors
        )
        sliced_s *= groups.data.constants.slice_s
        return Overlap(found.exposed_s + shown_s + sliced_s, found.busy_s + gathered.busy_s + sliced_s)
    return found


def bucket_capacity_bytes(run: Run, num_replicas: int, factor: float) -> float:
    """Capacity of a bucket of gradients; those of ZeRO grow with the replicas, over which a message is cut [bytes].

    Source: NVIDIA/Megatron-LM, ``megatron/core/distributed/distributed_data_parallel.py``: max(40 million, 1 million
    for each replica) elements, where no size is given.
    """
    sharing = run.sharing
    if sharing.bucket_bytes is not None or not sharing.strategy.stage or sharing.slice_tensors:
        return sharing.bucket_bytes or DEFAULT_BUCKET_BYTES
    return max(40e6, 1e6 * num_replicas) * factor * (2 if run.setup.precision.is_half else 4)


def _parts(
    alone: StepPrediction,
    stage: StageTime,
    micro_steps: int,
    of_step: Mapping[str, float],
    slowed_s: float,
) -> tuple[BreakdownPart, ...]:
    """Parts of the step, the longest first; computation by what the operations do."""
    shares = {part.name: part.time_s for part in alone.breakdown if part.name != "optimizer"}
    # What every step costs once is not repeated in its micro-steps.
    shares[HOST_PART] = max(0.0, shares.get(HOST_PART, 0.0) - alone.overhead_s)
    scale = micro_steps * stage.compute_s / max(sum(shares.values()), 1e-30)
    waiting_s = shares.pop(HOST_PART) * scale + micro_steps * stage.waiting_s + alone.overhead_s
    found = [BreakdownPart(name, time_s * scale) for name, time_s in shares.items()]
    found += [
        *(BreakdownPart(name, time_s) for name, time_s in of_step.items()),
        BreakdownPart(HOST_PART, waiting_s),
        BreakdownPart("tensor parallelism", micro_steps * stage.tensor_s),
        BreakdownPart("context parallelism", micro_steps * stage.context_s),
        BreakdownPart("expert parallelism", micro_steps * stage.expert_s),
        BreakdownPart("gathering of weights", micro_steps * stage.gather_s),
        BreakdownPart("handover of stages", micro_steps * stage.handover_s),
        BreakdownPart("slowed by communication", micro_steps * stage.slowed_s + slowed_s),
    ]
    return tuple(sorted((part for part in found if part.time_s > 0), key=lambda part: -part.time_s))
