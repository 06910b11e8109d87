"""Figures of a whole training step, the input of simple regressors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from forerun.errors import RecordError
from forerun.fitting.ideal_time import peak_flops_per_s, pytorch_rule_time_s
from forerun.graph.graph import Graph, OpClass, at_batch
from forerun.hardware.device import Device
from forerun.run.setup import Layout, Phase, TrainingSetup

__all__ = ["FLAG_NAMES", "Case", "WholeModelFeatures", "whole_model_features"]

Floats = npt.NDArray[np.float64]
Case = tuple[Graph, Device, TrainingSetup]

FLAG_NAMES = ("nhwc", "autocast", "compile", "inference", "layer_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModelFeatures:
    """One row per step, n rows.

    Attributes:
        flops: Work of the step [FLOP], (n,).
        traffic_bytes: Traffic if every operand moves once [bytes], (n,).
        peak_flops_per_s: Peak rate of the device in the precision of the step [FLOP/s], (n,).
        bandwidth_bytes_per_s: Memory bandwidth of the device [bytes/s], (n,).
        num_parameters: Parameters of the model, (n,).
        batch_size: Samples per device and step, (n,).
        image_size: Innermost size of a sample (image width or sequence length), (n,).
        num_kernels: Kernels launched, (n,).
        class_flops: Work per ``OpClass`` [FLOP], (n, classes).
        class_bytes: Traffic per ``OpClass`` [bytes], (n, classes).
        flags: Columns named by ``FLAG_NAMES``, 0 or 1, (n, flags).
        pytorch_rule_time_s: Time by PyTorch's own rule [s], (n,).
    """

    flops: Floats
    traffic_bytes: Floats
    peak_flops_per_s: Floats
    bandwidth_bytes_per_s: Floats
    num_parameters: Floats
    batch_size: Floats
    image_size: Floats
    num_kernels: Floats
    class_flops: Floats
    class_bytes: Floats
    flags: Floats
    pytorch_rule_time_s: Floats

    def __post_init__(self) -> None:
        for column in fields(self):
            values = getattr(self, column.name)
            if len(values) != len(self.flops):
                raise RecordError(
                    f"features: expected {len(self.flops)} rows in '{column.name}', got {len(values)}"
                )
            if not np.all(np.isfinite(values)):
                raise RecordError(f"features: '{column.name}' holds NaN or infinity; drop those rows")
            if np.any(values < 0):
                raise RecordError(f"features: '{column.name}' holds values below zero; drop those rows")

    def __len__(self) -> int:
        return len(self.flops)

    def take(self, rows: npt.NDArray[np.int64]) -> WholeModelFeatures:
        """The rows with these indices, in their order."""
        return WholeModelFeatures(
            **{column.name: getattr(self, column.name)[rows] for column in fields(self)}
        )


def whole_model_features(cases: Sequence[Case]) -> WholeModelFeatures:
    """Features of steps given as (graph, device, setup)."""
    if not cases:
        raise RecordError("expected at least one step to compute features of, got none")
    return WholeModelFeatures(
        flops=_column(cases, lambda graph, _, setup: graph.total_flops(setup.batch_size_per_device)),
        traffic_bytes=_column(cases, lambda graph, _, setup: graph.total_bytes(setup.batch_size_per_device)),
        peak_flops_per_s=_column(cases, lambda _, device, setup: peak_flops_per_s(device, setup.precision)),
        bandwidth_bytes_per_s=_column(cases, lambda _, device, __: device.memory_bandwidth_bytes_per_s),
        num_parameters=_column(cases, lambda graph, _, __: graph.num_parameters),
        batch_size=_column(cases, lambda _, __, setup: setup.batch_size_per_device),
        image_size=_column(cases, lambda graph, _, __: graph.input_shape[-1] if graph.input_shape else 1),
        num_kernels=_column(cases, lambda graph, _, __: float(graph.ops.count.sum())),
        class_flops=np.array([_class_sums(graph, setup)[0] for graph, _, setup in cases]),
        class_bytes=np.array([_class_sums(graph, setup)[1] for graph, _, setup in cases]),
        flags=np.array([_flags(graph, setup) for graph, _, setup in cases], dtype=float),
        pytorch_rule_time_s=_column(cases, pytorch_rule_time_s),
    )


def _column(cases: Sequence[Case], figure: Callable[[Graph, Device, TrainingSetup], float]) -> Floats:
    return np.array([figure(*case) for case in cases], dtype=float)


def _class_sums(graph: Graph, setup: TrainingSetup) -> tuple[Floats, Floats]:
    """FLOPs and bytes of the step per op class, (classes,) each."""
    ops, batch = graph.ops, setup.batch_size_per_device
    flops = at_batch(ops.flops, batch) * ops.count
    moved = at_batch(ops.read_bytes + ops.write_bytes, batch) * ops.count
    return _sum_by_class(ops.op_class, flops), _sum_by_class(ops.op_class, moved)


def _sum_by_class(op_class: npt.NDArray[np.int64], values: Floats) -> Floats:
    sums = np.zeros(len(OpClass))
    np.add.at(sums, op_class, values)
    return sums


def _flags(graph: Graph, setup: TrainingSetup) -> tuple[bool, ...]:
    """Flags of a setup in the order of ``FLAG_NAMES``."""
    return (
        setup.layout is Layout.NHWC,
        setup.precision.is_autocast,
        setup.compile,
        setup.phase is not Phase.TRAIN,
        graph.uses_layer_norm,
    )
