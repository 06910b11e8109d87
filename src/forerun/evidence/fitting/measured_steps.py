"""Measured steps with the graphs of their models, for fits and studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.base.errors import ForerunError
from forerun.cost.time.features import Point, software_era
from forerun.cost.time.rows import DistinctOps, distinct_ops
from forerun.cost.time.weights import system_key
from forerun.evidence.fitting.op_time_fit import StepSample
from forerun.evidence.records.step_record import StepRecord
from forerun.graph.graph import Graph
from forerun.question.devices import find_device
from forerun.question.devices.device import Device
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace

__all__ = [
    "Graphs",
    "Measured",
    "SkippedModel",
    "is_measured_network",
    "measured_steps",
    "run_graph",
]

Graphs = dict[tuple[ModelRequest, TrainingSetup], Graph | ForerunError]
"""Graphs of models in their setups, or why there is none; the batch size is 1 where it does not matter."""

_PARAMETER_ROUNDING = 5_000  # timm's tables give millions with two decimals
_FLOAT32_ROUNDING = 2**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured step, ready for a fit: its record, the run behind it and the distinct kernels of its model."""

    record: StepRecord
    run: Run
    ops: DistinctOps
    uses_layer_norm: bool

    @property
    def device(self) -> Device:
        """Where it ran."""
        return self.run.cluster.device

    @property
    def setup(self) -> TrainingSetup:
        """The training setup of one device."""
        return self.run.setup

    def sample(self, weight: float = 1.0) -> StepSample:
        """As a sample of the op-level fit."""
        return StepSample(
            ops=self.ops,
            point=self.point,
            step_time_s=self.record.step_time_s,
            system=self.system,
            weight=weight,
        )

    @property
    def system(self) -> str:
        """Key of the measuring system: table, device, precision, layout, compiler, software, phase."""
        record = self.record
        compiler = "compiled" if record.compile else "eager"
        return system_key(
            record.source,
            self.device.name,
            self.setup.precision,
            self.setup.layout,
            compiler,
            record.framework_version,
            record.phase,
        )

    @property
    def point(self) -> Point:
        """Point at which the op-level model is evaluated."""
        version = self.record.framework_version
        era = software_era(version) if version else 1.0
        return Point(device=self.device, setup=self.setup, uses_layer_norm=self.uses_layer_norm, era=era)


@dataclass(frozen=True, slots=True)
class SkippedModel:
    """A model of a table that this version of its library cannot build, with the reason."""

    model: str
    reason: str


def is_measured_network(record: StepRecord, graph: Graph) -> bool:
    """True if a graph has as many parameters as the source counted, to the rounding of its table.

    A name may stand for another network in a later version of a library: timm 1.0 builds
    ``ig_resnext101_32x48d`` (828 million parameters) as ``resnext101_32x8d`` (89 million). A prediction of that
    network is not a prediction of the run.

    Args:
        record: A published run; without a count of parameters the graph is accepted.
        graph: Graph of the network that its name builds today.
    """
    counted = record.num_parameters
    if counted is None:
        return True
    return abs(graph.num_parameters - counted) <= _PARAMETER_ROUNDING + counted * _FLOAT32_ROUNDING


def run_graph(run: Run, known: Graphs) -> Graph:
    """The graph of a run's step, traced once for all batch sizes where it holds for all.

    Args:
        run: The run.
        known: Graphs of earlier runs, which this one joins.

    Raises:
        FailureError: The model cannot be built or traced.
    """
    general, own = (run.model, _without_batch(run.setup)), (run.model, run.setup)
    found = known.get(general) or known.get(own)
    if found is None:
        try:
            found = trace(run.model, run.setup)
        except ForerunError as error:
            found = known[general] = error
        else:
            known[general if found.only_batch_size is None else own] = found
    if isinstance(found, ForerunError):
        raise found
    return found


def measured_steps(
    records: Sequence[StepRecord],
    requests: Sequence[ModelRequest] | None = None,
    on_graph: Callable[[StepRecord, Graph], None] | None = None,
    devices: Mapping[str, Device] | None = None,
) -> tuple[list[Measured], list[SkippedModel]]:
    """Records with the distinct kernels of their models; models that cannot be traced are listed.

    Args:
        records: Measured steps.
        requests: Their networks, if not the ones their names say.
        on_graph: Called with each record and its full graph, for studies that need more than the kernels.
        devices: Figures of devices by name, instead of the catalogue's.
    """
    found: list[Measured] = []
    skipped: dict[str, SkippedModel] = {}
    known: dict[tuple[ModelRequest, TrainingSetup], tuple[DistinctOps, bool] | None] = {}
    for index, record in enumerate(records):
        run = record.run_on((devices or {}).get(record.device) or find_device(record.device))
        run = run if requests is None else replace(run, model=requests[index])
        key = (run.model, _without_batch(run.setup))
        if key not in known:
            try:
                graph = trace(run.model, run.setup)
            except ForerunError as error:
                skipped[record.model] = SkippedModel(record.model, str(error))
                known[key] = None
                continue
            if not is_measured_network(record, graph):
                skipped[record.model] = SkippedModel(
                    record.model,
                    f"another network than the measured one: {graph.num_parameters:,} parameters, "
                    f"the table counts {record.num_parameters:,}",
                )
                known[key] = None
                continue
            kernels = (distinct_ops(graph.ops), graph.uses_layer_norm)
            if graph.only_batch_size is None:
                known[key] = kernels
            if on_graph is not None:
                on_graph(record, graph)
        elif (stored := known[key]) is not None:
            kernels = stored
        else:
            continue
        found.append(Measured(record=record, run=run, ops=kernels[0], uses_layer_norm=kernels[1]))
    return found, list(skipped.values())


def _without_batch(setup: TrainingSetup) -> TrainingSetup:
    return replace(setup, batch_size_per_device=1)
