"""Measured steps with the graphs of their models, to fit regressors of whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.errors import ForerunError, RecordError
from forerun.fitting.evaluation import configuration_of
from forerun.fitting.interface import Floats
from forerun.fitting.measured_steps import request_of
from forerun.fitting.trained_models import StepCase
from forerun.graph.graph import Graph
from forerun.hardware import find_device
from forerun.hardware.device import Device
from forerun.records.step_record import StepRecord
from forerun.run.model import ModelRequest
from forerun.run.setup import TrainingSetup
from forerun.tracing.trace import trace

__all__ = ["StepTable", "step_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Measured steps, n rows.

    Attributes:
        records: The measured steps.
        cases: Graph, device, setup and framework version of each.
        skipped: Models that could not be traced, with the reason.
    """

    records: tuple[StepRecord, ...]
    cases: tuple[StepCase, ...]
    skipped: tuple[str, ...]

    @property
    def time_s(self) -> Floats:
        """Measured step times [s], (n,)."""
        return np.array([record.step_time_s for record in self.records], dtype=float)

    @property
    def configurations(self) -> tuple[str, ...]:
        """Keys that must stay on one side of a split: all fields but repetition and occasion."""
        return tuple(configuration_of(record) for record in self.records)


def step_table(records: Sequence[StepRecord], device: Device | None = None) -> StepTable:
    """Traces the models of measured steps, each once for all batch sizes and repetitions.

    Args:
        records: Measured steps.
        device: Device of the steps, if not the one that their device names mean; for the device of this machine.

    Raises:
        RecordError: There is no record, or no model of them could be traced.
    """
    if not records:
        raise RecordError("expected measured steps of whole models among the records, got none")
    graphs: dict[tuple[ModelRequest, TrainingSetup], Graph | str] = {}
    rows: list[tuple[StepRecord, StepCase]] = []
    skipped: dict[str, str] = {}
    for record in records:
        setup = record.training_setup()
        graph = _graph(record, setup, graphs)
        if isinstance(graph, str):
            skipped[record.model] = f"left out, {record.model}: {graph}"
            continue
        place = device or find_device(record.device)
        rows.append((record, (graph, place, setup, record.framework_version)))
    if not rows:
        reasons = "; ".join(list(skipped.values())[:3])
        raise RecordError(f"no model of the records could be traced: {reasons}")
    return StepTable(
        records=tuple(record for record, _ in rows),
        cases=tuple(case for _, case in rows),
        skipped=tuple(skipped.values()),
    )


def _graph(
    record: StepRecord, setup: TrainingSetup, known: dict[tuple[ModelRequest, TrainingSetup], Graph | str]
) -> Graph | str:
    """The graph of a record's model, or the reason why there is none."""
    request = request_of(record)
    for key in ((request, replace(setup, batch_size_per_device=1)), (request, setup)):
        if key in known:
            return known[key]
    try:
        graph = trace(request, setup)
    except ForerunError as error:
        known[request, replace(setup, batch_size_per_device=1)] = str(error)
        return str(error)
    is_general = graph.only_batch_size is None
    known[request, replace(setup, batch_size_per_device=1) if is_general else setup] = graph
    return graph
