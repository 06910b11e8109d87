"""Step times that follow from datasheet figures alone, with nothing fitted."""

from __future__ import annotations

import numpy as np

from forerun.graph.graph import Graph, OpClass, at_batch
from forerun.hardware.device import Device, NumberFormat
from forerun.run.setup import Precision, TrainingSetup

__all__ = ["peak_flops_per_s", "pytorch_rule_time_s", "roofline_time_s"]

# Formats whose rate a precision can use, best first; a device that lacks one uses the next.
_FORMATS = {
    Precision.FP32: (NumberFormat.FP32,),
    Precision.TF32: (NumberFormat.TF32, NumberFormat.FP32),
    Precision.AMP: (NumberFormat.FP16, NumberFormat.FP32),
    Precision.FP16: (NumberFormat.FP16, NumberFormat.FP32),
    Precision.AMP_BF16: (NumberFormat.BF16, NumberFormat.FP32),
    Precision.BF16: (NumberFormat.BF16, NumberFormat.FP32),
}

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
    rates = [device.peak_flops_per_s[kind] for kind in _FORMATS[precision] if kind in device.peak_flops_per_s]
    return max(rates)


def roofline_time_s(
    flops: float, traffic_bytes: float, peak_flops_per_s: float, bandwidth_bytes_per_s: float
) -> float:
    """The longer of computing and moving [s]: max(F / P, D / B).

    Source: Williams, Waterman and Patterson 2009, Communications of the ACM 52(4).
    """
    return max(flops / peak_flops_per_s, traffic_bytes / bandwidth_bytes_per_s)


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
    moved = at_batch(ops.read_bytes + ops.write_bytes, batch)
    compute_s = flops / 2 / (_PYTORCH_EFFICIENCY * peak_flops_per_s(device, setup.precision))
    transfer_s = moved / device.memory_bandwidth_bytes_per_s
    return float(np.maximum(compute_s, transfer_s) @ ops.count)
