"""Measured steps and layers with the graphs of their models: samples for fits and studies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from forerun.base.errors import ForerunError, RecordError
from forerun.cost.time.features import NEWEST_ERA, Point, software_era
from forerun.cost.time.rows import DistinctOps, distinct_ops
from forerun.cost.time.systems import system_key
from forerun.evidence.fitting.op_time_fit import StepSample
from forerun.evidence.measurement.circumstances import PYTORCH, framework_of
from forerun.evidence.measurement.layer_figures import layer_figures
from forerun.evidence.records.measured_run import flag_of, setup_of, text_of, whole_of
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome
from forerun.evidence.records.step_record import StepRecord, repetition_s, step_time_of
from forerun.graph.graph import Graph, OpTable, StepPart
from forerun.question.devices import find_device
from forerun.question.devices.device import Device
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.setup import Phase, TrainingSetup
from forerun.tracing.trace import trace, trace_built

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
        return _system(self.record.source, self.device, self.setup, self.record.framework_version)

    @property
    def point(self) -> Point:
        """Point at which the op-level model is evaluated."""
        version = self.record.framework_version
        era = software_era(version) if version else 1.0
        return Point(device=self.device, setup=self.setup, uses_layer_norm=self.uses_layer_norm, era=era)


def _system(source: str, device: Device, setup: TrainingSetup, version: str) -> str:
    compiler = "compiled" if setup.compile else "eager"
    return system_key(source, device.name, setup.precision, setup.layout, compiler, version, setup.phase)


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
            # A model that fails would fail again, at the same cost, for each of its rows.
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
        # One trace serves all batch sizes: a table has thousands of rows and a few hundred networks.
        key = (run.model, _without_batch(run.setup))
        if key not in known:
            try:
                graph = trace(run.model, run.setup)
            except ForerunError as error:
                skipped[record.model] = SkippedModel(record.model, str(error))
                known[key] = None
                continue
            # A prediction of another network would count as an error of the cost model.
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


def only_modules(ops: OpTable) -> OpTable:
    """The rows that a module or the optimizer caused; those that make up a loss for the trace are left out."""
    has_module = np.asarray([bool(ops.module_names[i]) for i in ops.module], dtype=bool)
    keep = has_module | (ops.step_part == StepPart.OPTIMIZER)
    arrays = {
        field.name: value[keep]
        for field in fields(OpTable)
        if isinstance(value := getattr(ops, field.name), np.ndarray)
    }
    return replace(ops, **arrays)


_LEAST_SHARE_OF_OPS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One measured step or layer, ready for a fit.

    Attributes:
        measurement: What was measured.
        graph: Its graph.
        ops: Its distinct kernels.
        point: Device and configuration.
        step_time_s: Median repetition [s].
        loop_s: Part of it that a training loop takes with any model, and that no operation explains [s].
        relative_noise: Half the 95 % interval of the median over the median.
        group: Key that must not be split between fit and test: a layer is its own group, a model its family.
        is_whole_model: Whether the sample is a step of a whole model.
    """

    measurement: Measurement
    graph: Graph
    ops: DistinctOps
    point: Point
    step_time_s: float
    relative_noise: float
    group: str
    is_whole_model: bool
    loop_s: float = 0.0

    @property
    def ops_time_s(self) -> float:
        """Time of the operations [s]: the step less the loop, or a tenth of the step if the loop takes nearly all."""
        return max(self.step_time_s - self.loop_s, _LEAST_SHARE_OF_OPS * self.step_time_s)

    @property
    def system(self) -> str:
        """Key of the measuring system (``costs.op_weights.system_key``)."""
        version = self.measurement.circumstances.framework_version
        return _system("calibration", self.point.device, self.point.setup, version)

    def fit_sample(self, weight: float) -> StepSample:
        """As a sample of the op-level fit."""
        return StepSample(
            ops=self.ops, point=self.point, step_time_s=self.ops_time_s, system=self.system, weight=weight
        )


def device_samples(
    measurements: Iterable[Measurement], device: Device, *, loop_s: float = 0.0
) -> tuple[list[DeviceSample], list[str]]:
    """Finished, timed steps and layers as samples, and the reasons why others could not be used.

    Args:
        measurements: Measurements of any kind; null steps and layers, anchors, kernels and failed jobs are left
            out.
        device: Device of the measurements.
        loop_s: Time of the training loop of whole models beside their operations [s].
    """
    kept = [m for m in measurements if m.outcome is Outcome.DONE and _has_operations(m) and not m.is_anchor]
    # One process per framework traces all of its measurements: loading Keras takes longer than most traces.
    others: dict[str, Any] = {}
    for name in {m.circumstances.framework for m in kept} - {PYTORCH}:
        framework = framework_of(name)
        assert framework is not None
        others |= framework.graphs([m for m in kept if m.circumstances.framework == name], device)
    known: Graphs = {}
    ops: dict[int, DistinctOps] = {}
    samples, reasons = [], []
    for measurement in kept:
        try:
            graph, setup = _traced(measurement, device, others, known)
        except ForerunError as error:
            reasons.append(f"{measurement.subject}: {error}")
            continue
        found = ops[id(graph)] = ops.get(id(graph)) or distinct_ops(graph.ops)
        samples.append(_sample(measurement, graph, found, setup, device, loop_s))
    return samples, list(dict.fromkeys(reasons))


def _has_operations(measurement: Measurement) -> bool:
    """True if it is a step or a layer, and not the layer that does nothing."""
    if measurement.kind is JobKind.LAYER:
        return measurement.subject != "null"
    return step_time_of(measurement) is not None


def _traced(
    measurement: Measurement, device: Device, others: Mapping[str, Any], known: Graphs
) -> tuple[Graph, TrainingSetup]:
    if measurement.key not in others:
        if measurement.kind is JobKind.LAYER:
            return layer_graph(measurement.subject, measurement.parameters)
        run = measurement.run_on(device)
        assert run is not None
        if run.cluster.num_devices > 1:
            raise RecordError(f"a step of {run.cluster.num_devices} devices says nothing of one alone")
        return run_graph(run, known), run.setup
    answer = others[measurement.key]
    if isinstance(answer, ForerunError):
        raise answer
    graph, setup = answer
    return graph, setup


def _sample(
    measurement: Measurement,
    graph: Graph,
    ops: DistinctOps,
    setup: TrainingSetup,
    device: Device,
    loop_s: float,
) -> DeviceSample:
    is_whole_model = measurement.kind is not JobKind.LAYER
    framework, version = measurement.circumstances.framework, measurement.circumstances.framework_version
    summary = measurement.summary
    median_s = step_time_of(measurement) or repetition_s(measurement)
    noise = 0.0 if summary is None else 0.5 * (summary.high_s - summary.low_s) / summary.median_s
    return DeviceSample(
        measurement=measurement,
        graph=graph,
        ops=ops,
        point=Point(
            device=device,
            setup=setup,
            uses_layer_norm=graph.uses_layer_norm,
            # Other stacks have no era and count as the newest.
            era=software_era(version) if version and framework == PYTORCH else NEWEST_ERA,
        ),
        step_time_s=median_s,
        relative_noise=noise,
        group=measurement.family if is_whole_model else f"layer {measurement.key}",
        is_whole_model=is_whole_model,
        loop_s=loop_s if is_whole_model else 0.0,
    )


def layer_graph(kind: str, parameters: dict[str, Any]) -> tuple[Graph, TrainingSetup]:
    """Graph of a layer, or of its copies, as ``measurement.runners.step_runner`` runs it, and its setup.

    A gradient of the output is handed over there; the trace gets it from a product with a constant, whose own
    operations are left out again.
    """
    import torch

    from forerun.evidence.measurement.layer_modules import build_layer, copies_of
    from forerun.tracing.models.built_model import BuiltModel

    trains = text_of(parameters, "mode", "forward") == "train_step"
    asked = {**parameters, "phase": str(Phase.TRAIN if trains else Phase.INFERENCE)}
    setup = setup_of(asked)
    shape = layer_figures(kind, parameters).input_shape[1:]
    num_copies = whole_of(parameters, "copies", 1)
    with torch.device("meta"):
        module = copies_of(lambda: build_layer(kind, parameters), num_copies)
    needs_gradient = trains and flag_of(parameters, "input_gradient", True)

    def make_batch(batch_size: int) -> dict[str, Any]:
        sizes = (batch_size, *shape)
        return {
            "args": tuple(
                torch.empty(sizes, device="meta", requires_grad=needs_gradient) for _ in range(num_copies)
            )
        }

    def loss(outputs: list[torch.Tensor], _: Any) -> torch.Tensor:
        return torch.stack([(output * torch.empty_like(output)).sum() for output in outputs]).sum()

    built = BuiltModel(
        name=f"layer:{kind}", module=module, input_shape=shape, make_batch=make_batch, loss=loss
    )
    graph = trace_built(built, setup)
    return replace(graph, ops=only_modules(graph.ops)), setup


def sampling_weights(samples: Sequence[DeviceSample]) -> np.ndarray:
    """Weights of samples: whole models together half, layers the rest, noisy ones less, (n,)."""
    whole = np.asarray([sample.is_whole_model for sample in samples])
    # Two per cent is what repeats on another day differ by: no step is trusted more than that.
    raw = 1.0 / (0.02 + np.asarray([sample.relative_noise for sample in samples]))
    weights = np.zeros(len(samples))
    for chosen in (whole, ~whole):
        if chosen.any():
            weights[chosen] = 0.5 * raw[chosen] / raw[chosen].sum()
    normal: np.ndarray = weights / weights.sum()
    return normal
