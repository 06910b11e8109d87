"""A traced model as a row of units, whose times and memory are asked for by the way its devices divide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from forerun.graph.blocks import Blocks, Division, Phase, blocks_of
from forerun.graph.graph import at_batch
from forerun.graph.shards import Shards
from forerun.hardware.device import Device
from forerun.memory.units import UnitMemory, unit_memory
from forerun.optime.weights import CostModel
from forerun.prediction.layouts.stages import stage_units
from forerun.prediction.layouts.unit_times import UnitTimes, unit_times, with_host
from forerun.prediction.step import PreparedModel
from forerun.run.parallel import DeviceLayout, StageSplit
from forerun.run.setup import TrainingSetup

__all__ = ["DividedModel"]

_Units = TypeVar("_Units", UnitTimes, UnitMemory)


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedModel:
    """Units of a model.

    Attributes:
        model: The traced step.
        num_blocks: Blocks of the model, if it has more equal ones than were traced: the middle block stands for the
            others. None for those traced.
    """

    model: PreparedModel
    num_blocks: int | None = None

    @classmethod
    def of(cls, model: PreparedModel) -> DividedModel:
        """Units of a traced model; those of blocks that were left out of its trace repeat the middle one."""
        graph = model.graph
        last = f"{graph.blocks[-1]}." if graph.blocks else ""
        is_whole = any(name.startswith(last) for name in graph.parameter_names)
        return cls(model=model, num_blocks=None if is_whole or not last else len(graph.blocks))

    @property
    def traced(self) -> Blocks:
        """Units of the traced step."""
        return blocks_of(self.model.graph)

    @property
    def blocks(self) -> Blocks:
        """Units of the model; only their names and what can be divided hold for repeated blocks."""
        found = self.traced
        if self._added == 0:
            return found
        middle = len(found.names) // 2
        names = found.names[:middle] + (found.names[middle],) * (self._added + 1) + found.names[middle + 1 :]
        return replace(found, names=names)

    @property
    def can_be_divided(self) -> bool:
        """True if tensor parallelism can divide every block."""
        return self.traced.can_be_divided

    @property
    def _added(self) -> int:
        return 0 if self.num_blocks is None else self.num_blocks - len(self.traced.names)

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
        """Times of the units of micro-steps; see ``unit_times``."""
        found = unit_times(self.model, self.traced, shards, device, setups, weights, torch_version)
        if not self._added:
            return [with_host(times) for times in found]
        growth = float(self.memory(Shards(), 1).gradients.sum()) / max(
            1.0, unit_memory(self.model.graph, self.traced, Shards(), 1).gradients.sum()
        )
        return [
            with_host(replace(self._repeated(times), optimizer_s=times.optimizer_s * growth))
            for times in found
        ]

    def memory(self, shards: Shards, batch_size: int) -> UnitMemory:
        """Memory of the units; see ``unit_memory``."""
        found = unit_memory(self.model.graph, self.traced, shards, batch_size)
        return self._repeated(found) if self._added else found

    def gathered_bytes(self, shards: Shards, batch_size: int) -> npt.NDArray[np.float64]:
        """Tokens that sequence parallelism gathers for products, less a device's own, (units,) [bytes]."""
        graph, blocks = self.model.graph, self.traced
        closes = (blocks.division == Division.ROWS) & (blocks.phase == Phase.FORWARD)
        sizes = at_batch(graph.ops.gemm, batch_size)
        tokens = sizes[:, 1] * sizes[:, 2] * graph.ops.element_bytes
        found = np.bincount(blocks.unit[closes], weights=tokens[closes], minlength=blocks.num_units)
        own: npt.NDArray[np.float64] = found.astype(float) * (1 - 1 / shards.tensor) / shards.context
        return np.repeat(own, self._counts()) if self._added else own

    def _counts(self) -> npt.NDArray[np.int64]:
        """Units of the model that each traced one stands for."""
        counts = np.ones(self.traced.num_units, dtype=np.int64)
        counts[1 + len(self.traced.names) // 2] += self._added
        return counts

    def _repeated(self, units: _Units) -> _Units:
        counts = self._counts()
        arrays: dict[str, Any] = {
            field.name: np.repeat(value, counts, axis=-1)
            for field in fields(units)
            if isinstance(value := getattr(units, field.name), np.ndarray)
        }
        return replace(units, **arrays)
