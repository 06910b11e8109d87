"""Figures of a whole training step, the input of simple regressors, and its shortest possible times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import RecordError
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.graph.graph import Graph, OpClass, at_batch
from forerun.prediction.estimate_run import peak_of_precision
from forerun.prediction.step import prepare, timed_steps
from forerun.question.devices.device import Device, NumberFormat
from forerun.question.setup import Layout, Phase, Precision, TrainingSetup

# The classes PyTorch's FLOP registry has formulas for; all others are charged by their traffic.
_COUNTED_CLASSES = (
    OpClass.CONV,
    OpClass.DEPTHWISE_CONV,
    OpClass.GROUPED_CONV,
    OpClass.LINEAR,
    OpClass.BMM,
    OpClass.ATTENTION,
)

_PYTORCH_EFFICIENCY = 0.75


def peak_flops_per_s(device: Device, precision: Precision) -> float:
    """Dense peak rate of matrix products in a precision [FLOP/s].

    Where half precision is slower than fp32 (Pascal boards run it at 1/64), libraries store in half and
    compute in fp32, so the faster of the two counts.
    """
    return max(peak_of_precision(device, precision) or 0.0, device.peak_flops_per_s[NumberFormat.FP32])


def pytorch_rule_time_s(graph: Graph, device: Device, setup: TrainingSetup) -> float:
    """Step time by the rule of PyTorch's own runtime estimation [s].

    Sum over operations of max(FLOPs / 2 / (0.75 P), bytes / B). The rule divides FLOPs by two because it
    compares multiply-adds with a peak in FLOP/s; that halves compute and is kept, since this is a baseline.
    Only convolutions, matrix products and attention have FLOPs there. Launches are free.

    Source: PyTorch 2.15, torch/utils/_runtime_estimation.py.
    """
    ops, batch = graph.ops, setup.batch_size_per_device
    is_counted = np.isin(ops.op_class, [int(kind) for kind in _COUNTED_CLASSES])
    flops = np.where(is_counted, at_batch(ops.flops, batch), 0.0)
    moved = at_batch(_moved(graph), batch)
    compute_s = flops / 2 / (_PYTORCH_EFFICIENCY * peak_flops_per_s(device, setup.precision))
    transfer_s = moved / device.memory_bandwidth_bytes_per_s
    return float(np.maximum(compute_s, transfer_s) @ ops.count)


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
        op_time_s: Time by the cost model of operations, nothing measured [s], (n,); None where nobody asked for it, as
            it takes milliseconds a step.
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
    op_time_s: Floats | None = None

    def __post_init__(self) -> None:
        for column in fields(self):
            values = getattr(self, column.name)
            if values is None:
                continue
            assert len(values) == len(self.flops), column.name
            if not np.all(np.isfinite(values)):
                raise RecordError(f"features: '{column.name}' holds NaN or infinity; drop those rows")
            if np.any(values < 0):
                raise RecordError(f"features: '{column.name}' holds values below zero; drop those rows")

    def __len__(self) -> int:
        return len(self.flops)

    @property
    def compute_s(self) -> Floats:
        """Work at the peak rate [s], (n,)."""
        return self.flops / self.peak_flops_per_s

    @property
    def transfer_s(self) -> Floats:
        """Traffic at the bandwidth of the memory [s], (n,)."""
        return self.traffic_bytes / self.bandwidth_bytes_per_s

    @property
    def class_times_s(self) -> Floats:
        """``compute_s``, then ``transfer_s``, of each op class [s], (n, 2 classes)."""
        compute_s = self.class_flops / self.peak_flops_per_s[:, None]
        return np.column_stack([compute_s, self.class_bytes / self.bandwidth_bytes_per_s[:, None]])

    def take(self, rows: npt.NDArray[np.int64]) -> WholeModelFeatures:
        """The rows with these indices, in their order."""
        known = {column.name: getattr(self, column.name) for column in fields(self)}
        taken: dict[str, Any] = {name: v if v is None else v[rows] for name, v in known.items()}
        return WholeModelFeatures(**taken)


def whole_model_features(cases: Sequence[Case], *, with_op_times: bool = False) -> WholeModelFeatures:
    """Features of steps given as (graph, device, setup), with the times of their operations if asked for."""
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
        class_flops=np.array([_by_class(graph, graph.ops.flops, setup) for graph, _, setup in cases]),
        class_bytes=np.array([_by_class(graph, _moved(graph), setup) for graph, _, setup in cases]),
        flags=np.array([_flags(graph, setup) for graph, _, setup in cases], dtype=float),
        pytorch_rule_time_s=_column(cases, pytorch_rule_time_s),
        op_time_s=_column(cases, _op_time_s) if with_op_times else None,
    )


def _op_time_s(graph: Graph, device: Device, setup: TrainingSetup) -> float:
    weights = load_weights(shipped_weights_path())
    return float(timed_steps(prepare(graph), [device], [setup], weights).step_s[0])


def _column(cases: Sequence[Case], figure: Callable[[Graph, Device, TrainingSetup], float]) -> Floats:
    return np.array([figure(*case) for case in cases], dtype=float)


def _moved(graph: Graph) -> Floats:
    return graph.ops.read_bytes + graph.ops.write_bytes


def _by_class(graph: Graph, column: Floats, setup: TrainingSetup) -> Floats:
    """Sum of a column of operations per op class, (classes,)."""
    values = at_batch(column, setup.batch_size_per_device) * graph.ops.count
    return np.bincount(graph.ops.op_class, weights=values, minlength=len(OpClass)).astype(float)


def _flags(graph: Graph, setup: TrainingSetup) -> tuple[bool, ...]:
    """Flags of a setup in the order of ``FLAG_NAMES``."""
    return (
        setup.layout is Layout.NHWC,
        setup.precision.is_autocast,
        setup.compile,
        setup.phase is not Phase.TRAIN,
        graph.uses_layer_norm,
    )
