"""Devices, graphs and features that tests of the regressors build on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from forerun.adapters.classics.step_features import FLAG_NAMES, WholeModelFeatures
from forerun.graph.graph import Graph, MemoryStream, OpClass, OpTable, StepPart
from forerun.question.devices.device import Device, DeviceKind, NumberFormat

NUM_CLASSES = len(OpClass)


def device(**changes: Any) -> Device:
    """A device of round figures: 10 TFLOP/s fp32, 40 half, 1 TB/s."""
    plain = Device(
        name="round-device",
        title="Round device",
        vendor="any",
        kind=DeviceKind.GPU,
        architecture="none",
        segment="datacenter",
        release="2020-01",
        num_compute_units=100,
        boost_clock_hz=1e9,
        l2_cache_bytes=1e7,
        memory_bytes=1e10,
        memory_bandwidth_bytes_per_s=1e12,
        memory_type="HBM2",
        bus="SXM",
        power_limit_w=300.0,
        peak_flops_per_s={NumberFormat.FP32: 1e13, NumberFormat.FP16: 4e13},
        aliases=(),
        sources={},
    )
    return dataclasses.replace(plain, **changes)


def graph(*rows: tuple[OpClass, float, float, float], num_parameters: int = 1000) -> Graph:
    """A graph of rows (class, count, FLOPs per sample, bytes per sample); all sizes go with the batch."""
    return Graph(
        model="made-up",
        input_shape=(3, 32, 32),
        num_parameters=num_parameters,
        num_trainable_parameters=num_parameters,
        ops=_op_table(rows),
        memory=MemoryStream(
            event=np.zeros(0, dtype=np.int64),
            block=np.zeros(0, dtype=np.int64),
            size_bytes=np.zeros((0, 2)),
            kind=np.zeros(0, dtype=np.int64),
        ),
    )


def _op_table(rows: tuple[tuple[OpClass, float, float, float], ...]) -> OpTable:
    # Columns that whole-model figures do not look at stay zero.
    columns: dict[str, Any] = {field.name: np.zeros(len(rows)) for field in dataclasses.fields(OpTable)}
    moved = np.array([[0.0, row[3]] for row in rows])
    columns |= {
        "op_class": np.array([int(row[0]) for row in rows], dtype=np.int64),
        "step_part": np.full(len(rows), int(StepPart.FORWARD), dtype=np.int64),
        "count": np.array([row[1] for row in rows], dtype=float),
        "flops": np.array([[0.0, row[2]] for row in rows]),
        "read_bytes": moved / 2,
        "write_bytes": moved / 2,
        "gemm": np.zeros((len(rows), 4, 2)),
        "elements": moved / 4,
        "joined": np.arange(len(rows)),
        "joined_bytes": moved,
        "kernel_names": ("kernel",),
        "module_names": ("",),
    }
    return OpTable(**columns)


def random_features(n: int, seed: int = 0) -> WholeModelFeatures:
    """n steps on one device: convolution work and elementwise traffic over three decades."""
    draw = np.random.default_rng(seed)
    batch = draw.choice([16.0, 32.0, 64.0, 128.0], n)
    image = draw.choice([128.0, 160.0, 224.0, 288.0], n)
    parameters = 10 ** draw.uniform(6, 8, n)
    class_flops = np.zeros((n, NUM_CLASSES))
    class_bytes = np.zeros((n, NUM_CLASSES))
    class_flops[:, OpClass.CONV] = 600 * parameters * batch * (image / 224) ** 2
    class_bytes[:, OpClass.CONV] = 20 * parameters + 4e5 * batch * (image / 224) ** 2
    class_bytes[:, OpClass.ACTIVATION] = 10 ** draw.uniform(5.5, 6.5, n) * batch
    return WholeModelFeatures(
        flops=class_flops.sum(1),
        traffic_bytes=class_bytes.sum(1),
        peak_flops_per_s=np.full(n, 4e13),
        bandwidth_bytes_per_s=np.full(n, 1e12),
        num_parameters=parameters,
        batch_size=batch,
        image_size=image,
        num_kernels=draw.integers(100, 1000, n).astype(float),
        class_flops=class_flops,
        class_bytes=class_bytes,
        flags=np.zeros((n, len(FLAG_NAMES))),
        pytorch_rule_time_s=class_flops.sum(1) / 2 / (0.75 * 4e13),
    )


def lawful_times_s(features: WholeModelFeatures) -> np.ndarray:
    """Times by a law that the sums of the features can express exactly."""
    return (
        1e-3
        + 5e-6 * features.num_kernels
        + 2.0 * features.class_flops[:, OpClass.CONV] / features.peak_flops_per_s
        + 1.5 * features.class_bytes[:, OpClass.ACTIVATION] / features.bandwidth_bytes_per_s
    )
