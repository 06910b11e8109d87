"""Measured steps with the graphs of their models, to fit regressors of whole steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.errors import ForerunError, RecordError
from forerun.fitting.evaluation import configuration_of
from forerun.fitting.interface import Floats
from forerun.fitting.measured_steps import Graphs, run_graph
from forerun.fitting.step_features import WholeModelFeatures, whole_model_features
from forerun.graph.graph import Graph
from forerun.hardware import find_device
from forerun.hardware.device import Device
from forerun.records.step_record import StepRecord
from forerun.run.run import Run

__all__ = ["StepTable", "step_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Measured steps, n rows.

    Attributes:
        records: The measured steps.
        runs: The run behind each.
        graphs: Its graph.
        skipped: Models that could not be traced, and why.
    """

    records: tuple[StepRecord, ...]
    runs: tuple[Run, ...]
    graphs: tuple[Graph, ...]
    skipped: tuple[str, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """Device of each step."""
        return tuple(run.cluster.device for run in self.runs)

    @property
    def features(self) -> WholeModelFeatures:
        """Features of the whole steps, (n,) each."""
        return whole_model_features(
            [
                (graph, run.cluster.device, run.setup)
                for run, graph in zip(self.runs, self.graphs, strict=True)
            ]
        )

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
    known: Graphs = {}
    rows: list[tuple[StepRecord, Run, Graph]] = []
    skipped: dict[str, str] = {}
    for record in records:
        run = record.run_on(device or find_device(record.device))
        try:
            rows.append((record, run, run_graph(run, known)))
        except ForerunError as error:
            skipped[record.model] = f"left out, {record.model}: {error}"
    if not rows:
        reasons = "; ".join(list(skipped.values())[:3])
        raise RecordError(f"no model of the records could be traced: {reasons}")
    kept, runs, graphs = zip(*rows, strict=True)
    return StepTable(records=kept, runs=runs, graphs=graphs, skipped=tuple(skipped.values()))
