"""Times of the units of a step on one device of a layout, from the cost model's times of its true operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from forerun.base.kept import Kept
from forerun.cost.memory.units import UnitMemory, unit_memory
from forerun.cost.time.step_times import smooth_maximum
from forerun.cost.time.weights import CostModel
from forerun.graph.blocks import Blocks, Division, Phase, blocks_of
from forerun.graph.graph import Bools, Floats, Ints, OpClass, OpTable, StepPart, at_batch
from forerun.graph.shards import Shards, sharded_ops
from forerun.prediction.division import stage_units
from forerun.prediction.step import PreparedModel, StepPrediction, predict_steps, prepare
from forerun.question.devices.device import Device
from forerun.question.setup import TrainingSetup
from forerun.question.sharing import DeviceLayout, StageSplit

_SHARDED: Kept[PreparedModel] = Kept(64)
_TIMES: Kept[UnitTimes] = Kept(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """One micro-step of one device by unit, without communication.

    Attributes:
        model: The operations of the device, all units.
        alone: Prediction of the micro-step of all units, as if one device had them.
        forward_s: Forward passes, (units,) [s].
        backward_s: Backward passes without the gradients of weights, with what is recomputed, (units,) [s].
        weight_gradient_s: Products that make gradients of weights, (units,) [s].
        attention_s: Attention of the forward and of the backward passes, (2, units) [s].
        launch_s: Time the host needs to launch both passes, (units,) [s].
        optimizer_s: Update of all weights [s].
        host_s: Time of the host that no unit causes: launches of the update, and once a step [s].
        update_launch_s: Launches of the update [s].
        overhead_s: Time of a step beside its operations [s].
        message_bytes: Tokens that tensor parallelism exchanges after a pair of products [bytes].
        key_value_bytes: Keys and values of a block that fused attention reads; 0 where its products are apart [bytes].
        num_pairs: Pairs of divided products in the forward pass, (units,).
        num_recomputed_pairs: Pairs whose forward pass is repeated in the backward pass, (units,).
        routed_bytes: Tokens that go to experts and come back in a forward pass, (units,) [bytes].
        num_routes: Their number, tokens times the experts of each, (units,).
        num_recomputed_routes: Share of them that the backward pass sends again, (units,).
    """

    model: PreparedModel
    alone: StepPrediction
    forward_s: Floats
    backward_s: Floats
    weight_gradient_s: Floats
    attention_s: Floats
    launch_s: Floats
    optimizer_s: float
    host_s: float
    update_launch_s: float
    overhead_s: float
    message_bytes: float
    key_value_bytes: float
    num_pairs: Floats
    num_recomputed_pairs: Floats
    routed_bytes: Floats
    num_routes: Floats
    num_recomputed_routes: Floats


def _unit_times(
    model: PreparedModel,
    blocks: Blocks,
    shards: Shards,
    device: Device,
    setups: Sequence[TrainingSetup],
    weights: CostModel,
    torch_version: str | None,
    copies: Ints | None,
) -> list[UnitTimes]:
    """Times of micro-steps of several setups; remembered.

    Args:
        model: The traced step.
        blocks: Its units.
        shards: Devices that share a sequence.
        device: The device.
        setups: Batch size of a micro-step and precision.
        weights: The cost model.
        torch_version: PyTorch version.
        copies: Units of the model that each unit's operations count for, (units,); None for one each.
    """
    parts = (model, device, weights)
    found = [_TIMES.find(parts, (shards, setup, torch_version)) for setup in setups]
    missing = [index for index, times in enumerate(found) if times is None]
    if missing:
        sharded = _SHARDED.get((model,), (shards,), lambda: _sharded(model, blocks, shards))
        # All at once: what the kernels have in common is worked out once per call.
        steps = predict_steps(sharded, device, [setups[index] for index in missing], weights, torch_version)
        for index, step in zip(missing, steps, strict=True):
            times = _by_unit(sharded, blocks, shards, step, setups[index].batch_size_per_device, copies)
            _TIMES.keep(parts, (shards, setups[index], torch_version), times)
            found[index] = times
    return [times for times in found if times is not None]


def _sharded(model: PreparedModel, blocks: Blocks, shards: Shards) -> PreparedModel:
    ops = sharded_ops(model.graph, blocks, shards)
    if ops is model.graph.ops:
        return model
    return replace(prepare(replace(model.graph, ops=ops)), is_whole=False)


def _by_unit(
    model: PreparedModel,
    blocks: Blocks,
    shards: Shards,
    step: StepPrediction,
    batch_size: int,
    copies: Ints | None,
) -> UnitTimes:
    ops, units = model.graph.ops, blocks.num_units
    row_s, launch_s = (
        (found / model.ops.count)[model.ops.group_of_row] * ops.count
        for found in (step.kernel_s, step.launch_s)
    )
    # Members of the ensemble are averaged by the logarithms of their steps.
    scale = (step.step_s.value - step.overhead_s) / _slower(float(row_s.sum()), step.host_s)
    row_s, launch_s, host_s = row_s * scale, launch_s * scale, step.host_s * scale
    host_s -= float(launch_s[blocks.unit >= 0].sum())
    if copies is not None:
        own = np.where(blocks.unit >= 0, copies[blocks.unit], 1)
        row_s, launch_s = row_s / own, launch_s / own
    is_gradient = ops.step_part == StepPart.WEIGHT_GRADIENT
    is_attention = np.isin(ops.op_class, (OpClass.ATTENTION, OpClass.BMM, OpClass.SOFTMAX))
    is_attention &= ~blocks.expert_product

    def sums(chosen: Bools, values: Floats = row_s) -> Floats:
        chosen = chosen & (blocks.unit >= 0)
        return np.bincount(blocks.unit[chosen], weights=values[chosen], minlength=units).astype(float)

    forward, backward = blocks.phase == Phase.FORWARD, blocks.phase == Phase.BACKWARD
    last = blocks.division == Division.ROWS
    # Whole experts need no sum over the devices of tensor parallelism.
    closes = last & ~(shards.whole_experts & blocks.expert_product)
    ones = np.ones(len(ops))
    pairs = sums(closes & forward, ones)
    in_backward = sums(closes & backward & ~is_gradient, ones)
    groups, rows, width, _ = at_batch(ops.gemm, batch_size).T
    # The last product of the experts has their tokens as its result, once for each expert that a token goes to.
    routed = np.where(blocks.expert_product & last, groups * rows * width * ops.element_bytes, 0.0)
    sent = sums(forward, routed)
    again = sums(backward & ~is_gradient, np.where(routed > 0, ones, 0.0))
    routes = sums(forward, np.where(routed > 0, ones, 0.0))
    return UnitTimes(
        model=model,
        alone=step,
        forward_s=sums(forward),
        backward_s=sums(backward & ~is_gradient),
        weight_gradient_s=sums(backward & is_gradient),
        attention_s=np.stack([sums(is_attention & forward), sums(is_attention & backward)]),
        launch_s=sums(blocks.unit >= 0, launch_s),
        optimizer_s=float(row_s[blocks.unit < 0].sum()),
        host_s=host_s,
        update_launch_s=float(launch_s[blocks.unit < 0].sum()),
        overhead_s=step.overhead_s,
        # Tokens times width, the result of the first product that closes a pair.
        message_bytes=float((rows * width * ops.element_bytes)[closes & forward][:1].sum()),
        key_value_bytes=_key_value_bytes(ops, blocks.unit, forward, batch_size),
        num_pairs=pairs,
        num_recomputed_pairs=np.maximum(0.0, in_backward - pairs),
        routed_bytes=sent,
        num_routes=sums(forward, np.where(routed > 0, groups * rows, 0.0)),
        num_recomputed_routes=np.maximum(0.0, again - routes) / np.maximum(routes, 1.0),
    )


def with_host(times: UnitTimes) -> UnitTimes:
    """Times of units that wait for the host's launches, as the step of all units does.

    Host and device work at the same time: t = (T^6 + H^6)^(1/6) of the sums, spread over all operations.
    """
    device_s = float((times.forward_s + times.backward_s + times.weight_gradient_s).sum()) + times.optimizer_s
    factor = _slower(device_s, float(times.launch_s.sum()) + times.host_s) / device_s
    return replace(
        times,
        forward_s=times.forward_s * factor,
        backward_s=times.backward_s * factor,
        weight_gradient_s=times.weight_gradient_s * factor,
        attention_s=times.attention_s * factor,
        optimizer_s=times.optimizer_s * factor,
    )


def _slower(device_s: float, host_s: float) -> float:
    return float(smooth_maximum(np.asarray(device_s), np.asarray(host_s)))


def _key_value_bytes(ops: OpTable, unit: Ints, forward: Bools, batch_size: int) -> float:
    """Keys and values of the first fused attention [bytes].

    They are its operands less queries as large as its result, but no more than what the products of the block before
    it made beside those queries: heads that share keys and values read them repeated, and devices exchange them once.
    """
    rows = np.flatnonzero(forward & (unit > 0) & (ops.op_class == OpClass.ATTENTION))[:1]
    if not len(rows):
        return 0.0
    result = float(at_batch(ops.write_bytes[rows], batch_size).sum())
    before = (
        forward[: rows[0]] & (unit[: rows[0]] == unit[rows[0]]) & (ops.op_class[: rows[0]] == OpClass.LINEAR)
    )
    made = float(at_batch(ops.write_bytes[: rows[0]][before], batch_size).sum())
    read = float(at_batch(ops.read_bytes[rows], batch_size).sum())
    return min(read, made if made > result else read) - result


_Units = TypeVar("_Units", UnitTimes, UnitMemory)


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedModel:
    """Units of a model.

    Attributes:
        model: The traced step.
        order: Traced unit of each unit of the model; blocks that were left out of the trace repeat the one that stands
            for them.
    """

    model: PreparedModel
    order: Ints

    @classmethod
    def of(cls, model: PreparedModel) -> DividedModel:
        """Units of a traced model."""
        traced, named = blocks_of(model.graph).names, model.graph.blocks
        names = traced if len(set(named)) == len(named) else named
        place = {name: 1 + index for index, name in enumerate(traced)}
        return cls(
            model=model,
            order=np.asarray([0, *(place[name] for name in names if name in place), 1 + len(traced)]),
        )

    @property
    def traced(self) -> Blocks:
        """Units of the traced step."""
        return blocks_of(self.model.graph)

    @property
    def blocks(self) -> Blocks:
        """Units of the model; only their names and what can be divided hold for repeated blocks."""
        found = self.traced
        return replace(found, names=tuple(found.names[unit - 1] for unit in self.order[1:-1]))

    @property
    def can_be_divided(self) -> bool:
        """True if tensor parallelism can divide every block."""
        return self.traced.can_be_divided

    @property
    def _repeats(self) -> bool:
        return len(self.order) > self.traced.num_units

    def stages(self, layout: DeviceLayout) -> list[range]:
        """Units of each stage of a pipeline."""
        memory = self.memory(Shards(), 1)
        head = max(float(memory.weights[-1]), memory.tied)
        is_balanced = layout.stage_split is StageSplit.BALANCED
        return stage_units(
            len(self.blocks.names),
            layout.pipeline,
            head / max(float(memory.weights[1:-1].mean()), 1.0) if is_balanced else None,
            counts_ends=layout.stage_split is StageSplit.ENDS,
        )

    def times(
        self,
        shards: Shards,
        device: Device,
        setups: Sequence[TrainingSetup],
        weights: CostModel,
        torch_version: str | None = None,
    ) -> list[UnitTimes]:
        """Times of the units of micro-steps; see ``_unit_times``."""
        copies = np.bincount(self.order) if self._repeats else None
        found = _unit_times(self.model, self.traced, shards, device, setups, weights, torch_version, copies)
        if not self._repeats:
            return [with_host(times) for times in found]
        all_blocks, few = self.memory(Shards(), 1), unit_memory(self.model.graph, self.traced, Shards(), 1)
        growth = float(all_blocks.gradients.sum()) / max(1.0, few.gradients.sum())
        added = float(all_blocks.num_gradients.sum()) / max(1.0, few.num_gradients.sum()) - 1.0
        return [
            with_host(
                replace(
                    self._repeated(times),
                    optimizer_s=times.optimizer_s * growth,
                    host_s=times.host_s + added * times.update_launch_s,
                )
            )
            for times in found
        ]

    def memory(self, shards: Shards, batch_size: int) -> UnitMemory:
        """Memory of the units; see ``unit_memory``."""
        found = unit_memory(self.model.graph, self.traced, shards, batch_size)
        return self._repeated(found)

    def gathered_bytes(self, shards: Shards, batch_size: int) -> Floats:
        """Tokens that sequence parallelism gathers for products, less a device's own, (units,) [bytes]."""
        graph, blocks = self.model.graph, self.traced
        closes = (blocks.division == Division.ROWS) & (blocks.phase == Phase.FORWARD)
        closes &= ~(shards.whole_experts & blocks.expert_product)
        sizes = at_batch(graph.ops.gemm, batch_size)
        tokens = sizes[:, 1] * sizes[:, 2] * graph.ops.element_bytes
        found = np.bincount(blocks.unit[closes], weights=tokens[closes], minlength=blocks.num_units)
        own: Floats = found.astype(float) * (1 - 1 / shards.tensor) / shards.context
        return own[self.order]

    def _repeated(self, units: _Units) -> _Units:
        if not self._repeats:
            return units
        arrays: dict[str, Any] = {
            field.name: value[..., self.order]
            for field in fields(units)
            if isinstance(value := getattr(units, field.name), np.ndarray)
        }
        return replace(units, **arrays)
