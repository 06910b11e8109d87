"""Measured layers and steps of one device as samples of the op-level model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from forerun.costs.op_weights import system_key
from forerun.errors import ForerunError
from forerun.evaluation.corpus import request_of
from forerun.hardware.device import Device
from forerun.measurement.job_parameters import flag_of, setup_of, text_of, whole_of
from forerun.measurement.layer_figures import layer_figures
from forerun.records.measurement import JobKind, Measurement, Outcome
from forerun.records.step_view import as_step_record
from forerun.regressors.op_features import NEWEST_ERA, Point, software_era
from forerun.regressors.op_fit import StepSample
from forerun.regressors.op_rows import DistinctOps, distinct_ops
from forerun.tracing.trace import trace, trace_built
from forerun.workload.graph import Graph, OpTable
from forerun.workload.setup import Phase, TrainingSetup

__all__ = ["DeviceSample", "device_samples", "layer_graph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One measured step or layer, ready for a fit.

    Attributes:
        measurement: What was measured.
        ops: Its distinct kernels.
        point: Device and configuration.
        step_time_s: Median repetition [s].
        relative_noise: Half the 95 % interval of the median over the median.
        group: What must not be split between fit and test: a layer is its own group, a model its family.
        is_whole_model: Whether it is a step of a whole model.
    """

    measurement: Measurement
    ops: DistinctOps
    point: Point
    step_time_s: float
    relative_noise: float
    group: str
    is_whole_model: bool

    @property
    def system(self) -> str:
        """Key of the measuring system (``costs.op_weights.system_key``)."""
        setup = self.point.setup
        compiler = "compiled" if setup.compile else "eager"
        version = self.measurement.circumstances.framework_version
        return system_key(
            "calibration", self.point.device.name, setup.precision, setup.layout, compiler, version
        )

    def fit_sample(self, weight: float) -> StepSample:
        """As a sample of the op-level fit."""
        return StepSample(
            ops=self.ops, point=self.point, step_time_s=self.step_time_s, system=self.system, weight=weight
        )


def device_samples(
    measurements: Iterable[Measurement], device: Device
) -> tuple[list[DeviceSample], list[str]]:
    """Finished, timed steps and layers as samples, and why others could not be used.

    Args:
        measurements: Of any kind; null steps, anchors, kernels and jobs that did not end well are passed over.
        device: Where they were measured.
    """
    samples, reasons = [], []
    for measurement in measurements:
        is_sample = measurement.outcome is Outcome.DONE and measurement.kind in _GRAPHS
        if not is_sample or measurement.is_anchor:
            continue
        try:
            graph, setup, family = _GRAPHS[measurement.kind](measurement)
        except ForerunError as error:
            reasons.append(f"{measurement.subject}: {error}")
            continue
        samples.append(_sample(measurement, graph, setup, family, device))
    return samples, reasons


def _sample(
    measurement: Measurement, graph: Graph, setup: TrainingSetup, group: str, device: Device
) -> DeviceSample:
    version = measurement.circumstances.framework_version
    summary = measurement.summary
    median_s = float(np.median(measurement.repetitions_s)) if summary is None else summary.median_s
    noise = 0.0 if summary is None else 0.5 * (summary.high_s - summary.low_s) / median_s
    return DeviceSample(
        measurement=measurement,
        ops=distinct_ops(graph.ops),
        point=Point(
            device=device,
            setup=setup,
            uses_layer_norm=graph.uses_layer_norm,
            era=software_era(version) if version else NEWEST_ERA,
        ),
        step_time_s=median_s,
        relative_noise=noise,
        group=group,
        is_whole_model=measurement.kind is JobKind.STEP,
    )


def _step_graph(measurement: Measurement) -> tuple[Graph, TrainingSetup, str]:
    record = as_step_record(measurement)
    assert record is not None
    setup = record.training_setup()
    return trace(request_of(record), setup), setup, measurement.family


def _layer_graph(measurement: Measurement) -> tuple[Graph, TrainingSetup, str]:
    graph, setup = layer_graph(measurement.subject, measurement.parameters)
    return graph, setup, f"layer {measurement.key}"


_GRAPHS: dict[JobKind, Any] = {JobKind.STEP: _step_graph, JobKind.LAYER: _layer_graph}


def layer_graph(kind: str, parameters: dict[str, Any]) -> tuple[Graph, TrainingSetup]:
    """Graph of a layer, or of its copies, as ``measurement.layer_runner`` runs it, and its setup.

    A gradient of the output is handed over there; the trace gets it from a product with a constant, whose own
    operations are left out again.
    """
    import torch

    from forerun.measurement.layer_modules import build_layer, copies_of
    from forerun.tracing.built_model import BuiltModel

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
    return replace(graph, ops=_of_modules(graph.ops)), setup


def _of_modules(ops: OpTable) -> OpTable:
    """The rows that a module or the optimizer caused."""
    from forerun.workload.graph import StepPart

    has_module = np.asarray([bool(ops.module_names[i]) for i in ops.module], dtype=bool)
    keep = has_module | (ops.step_part == StepPart.OPTIMIZER)
    arrays = {
        field.name: value[keep]
        for field in fields(OpTable)
        if isinstance(value := getattr(ops, field.name), np.ndarray)
    }
    return replace(ops, **arrays)


def sampling_weights(samples: Sequence[DeviceSample], whole_share: float = 0.5) -> np.ndarray:
    """Weights of samples: whole models together ``whole_share``, layers the rest, noisy ones less, (n,)."""
    whole = np.asarray([sample.is_whole_model for sample in samples])
    raw = 1.0 / (0.02 + np.asarray([sample.relative_noise for sample in samples]))
    weights = np.zeros(len(samples))
    for chosen, share in ((whole, whole_share), (~whole, 1.0 - whole_share)):
        if chosen.any():
            weights[chosen] = share * raw[chosen] / raw[chosen].sum()
    normal: np.ndarray = weights / weights.sum()
    return normal
