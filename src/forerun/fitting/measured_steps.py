"""Measured steps with the graphs of their models, for fits and studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.errors import ForerunError
from forerun.graph.graph import Graph
from forerun.hardware import find_device
from forerun.hardware.device import Device
from forerun.optime.features import Point, software_era
from forerun.optime.fit import StepSample
from forerun.optime.rows import DistinctOps, distinct_ops
from forerun.optime.weights import system_key
from forerun.records.step_record import StepRecord
from forerun.run.model import ModelRequest
from forerun.run.setup import TrainingSetup
from forerun.tracing.trace import trace

__all__ = [
    "Measured",
    "SkippedModel",
    "is_measured_network",
    "measured_steps",
    "request_of",
]


_OTHER_NAMES = {
    "timm:ig_resnext101_32x16d": "timm:resnext101_32x16d",
    "timm:ig_resnext101_32x32d": "timm:resnext101_32x32d",
}
"""Networks that timm 1.0 builds under another name; under the old one it builds ``resnext101_32x8d``."""

_PARAMETER_ROUNDING = 5_000  # timm's tables give millions with two decimals
_FLOAT32_ROUNDING = 2**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured step, ready for a fit: its record, its device and the distinct kernels of its model."""

    record: StepRecord
    device: Device
    setup: TrainingSetup
    ops: DistinctOps
    uses_layer_norm: bool

    def sample(self, weight: float = 1.0) -> StepSample:
        """As a sample of the op-level fit."""
        return StepSample(
            ops=self.ops,
            point=self.point(),
            step_time_s=self.record.step_time_s,
            system=self.system,
            weight=weight,
        )

    @property
    def system(self) -> str:
        """Key of the measuring system: table, device, precision, layout, compiler, software."""
        record = self.record
        compiler = "compiled" if record.compile else "eager"
        return system_key(
            record.source,
            self.device.name,
            self.setup.precision,
            self.setup.layout,
            compiler,
            record.framework_version,
        )

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


def request_of(record: StepRecord) -> ModelRequest:
    """The trace that a record needs."""
    return ModelRequest(
        model=_OTHER_NAMES.get(record.model, record.model),
        image_size=record.image_size,
        input_shape=record.input_shape,
        sequence_length=record.sequence_length,
    )


def is_measured_network(record: StepRecord, graph: Graph) -> bool:
    """Whether a graph has as many parameters as the source counted, to the rounding of its table.

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


def measured_steps(
    records: Sequence[StepRecord],
    requests: Sequence[ModelRequest] | None = None,
    on_graph: Callable[[StepRecord, Graph], None] | None = None,
    devices: Mapping[str, Device] | None = None,
) -> tuple[list[Measured], list[SkippedModel]]:
    """Records with the distinct kernels of their models; models that cannot be traced are listed.

    Args:
        records: Measured steps.
        requests: The traces that they need, if not those of their names.
        on_graph: Called with each record and its full graph, for studies that need more than the kernels.
        devices: Figures of devices by name, instead of the catalogue's.
    """
    found: list[Measured] = []
    skipped: dict[str, SkippedModel] = {}
    known: dict[tuple[ModelRequest, TrainingSetup], tuple[DistinctOps, bool] | None] = {}
    for record, request in zip(records, requests or [request_of(r) for r in records], strict=True):
        setup = record.training_setup()
        key = (request, _without_batch(setup))
        if key not in known:
            try:
                graph = trace(request, setup)
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
        device = (devices or {}).get(record.device) or find_device(record.device)
        found.append(
            Measured(record=record, device=device, setup=setup, ops=kernels[0], uses_layer_norm=kernels[1])
        )
    return found, list(skipped.values())


def _without_batch(setup: TrainingSetup) -> TrainingSetup:
    return replace(setup, batch_size_per_device=1)
