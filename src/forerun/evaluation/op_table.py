"""Single operators timed on their own, as one-kernel samples of the op-level fit (``neusight_ops``).

Only calls of more than 0.1 ms are taken: shorter ones show the launch, which a step hides behind other kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from forerun.hardware import find_device
from forerun.records.device_names import catalogue_device
from forerun.regressors.op_features import Point, software_era
from forerun.regressors.op_fit import StepSample
from forerun.regressors.op_rows import DistinctOps
from forerun.workload.graph import OpClass, StepPart
from forerun.workload.setup import Phase, TrainingSetup

__all__ = ["read_operator_samples"]

_MIN_TIME_MS = 0.1
_ELEMENT_BYTES = 4.0
_STREAMING = {
    "ln": (OpClass.LAYER_NORM, 5.0, 2), "softmax": (OpClass.SOFTMAX, 5.0, 2), "gelu": (OpClass.ACTIVATION, 4.0, 2),
    "relu": (OpClass.ACTIVATION, 4.0, 2), "tanh": (OpClass.ACTIVATION, 4.0, 2), "add": (OpClass.ADD, 1.0, 3),
    "mul": (OpClass.MUL, 1.0, 3), "div": (OpClass.MUL, 1.0, 3), "addu": (OpClass.ADD, 1.0, 2),
    "mulu": (OpClass.MUL, 1.0, 2), "divu": (OpClass.MUL, 1.0, 2), "powu": (OpClass.ELEMENTWISE, 1.0, 2),
}  # fmt: skip
"""Class, FLOP per element, and passes over the tensor."""


def read_operator_samples(folder: Path, rows_per_group: int = 120) -> list[StepSample]:
    """A random part of the table: equally many rows of each operator and GPU, forward in fp32.

    Args:
        folder: Folder of the public tables.
        rows_per_group: Rows of each (GPU, operator).
    """
    path = folder / "neusight_ops.parquet"
    table = pd.read_parquet(path)
    is_wanted = (table["time_ms_forward"] > _MIN_TIME_MS) & (table["dtype"] == "fp32")
    is_wanted &= table["op"].isin([*_STREAMING, "bmm", "linear", "conv"])
    groups = table[is_wanted].groupby(["gpu", "op"])
    chosen = [rows.sample(min(rows_per_group, len(rows)), random_state=0) for _, rows in groups]
    return [_sample(row, path.name) for rows in chosen for row in rows.to_dict("records")]


def _sample(row: Mapping[Any, Any], table: str) -> StepSample:
    device = find_device(catalogue_device(row["gpu"], table))
    setup = TrainingSetup(batch_size_per_device=1, phase=Phase.INFERENCE)
    return StepSample(
        ops=_one_kernel(row),
        point=Point(device=device, setup=setup, era=software_era(str(row["torch_version"]))),
        step_time_s=float(row["time_ms_forward"]) / 1e3,
        system=f"neusight_ops|{device.name}|fp32|nchw|eager|{row['torch_version']}",
        has_host=False,
    )


def _one_kernel(row: Mapping[Any, Any]) -> DistinctOps:
    op = row["op"]
    area, groups, width = 1.0, 1.0, 0.0
    sizes = (0.0, 0.0, 0.0, 0.0)
    if op in _STREAMING:
        op_class, flops_per_element, passes = _STREAMING[op]
        elements = float(row["vec_rows"]) * float(row["vec_cols"])
        flops, moved = flops_per_element * elements, passes * elements
        width = float(row["vec_cols"]) if op in ("ln", "softmax") else 0.0
    elif op == "conv":
        op_class = OpClass.CONV
        batch, size = float(row["conv_batch"]), float(row["conv_in_size"])
        channels_in, channels_out = float(row["conv_in_channels"]), float(row["conv_out_channels"])
        area, width = float(row["conv_kernel"]) ** 2, size
        sizes = (1.0, batch * size * size, channels_out, channels_in * area)
        moved = batch * size * size * (channels_in + channels_out) + area * channels_in * channels_out
        flops, elements = (
            2.0 * sizes[1] * sizes[2] * sizes[3],
            batch * size * size * max(channels_in, channels_out),
        )
    else:
        op_class = OpClass.BMM if op == "bmm" else OpClass.LINEAR
        m, n, k = float(row["gemm_m"]), float(row["gemm_n"]), float(row["gemm_k"])
        count = float(row["gemm_batch"]) if op == "bmm" else 1.0
        sizes = (count, m, n, k)
        moved, flops = count * (m * k + k * n + m * n), 2.0 * count * m * n * k
        elements = count * max(m * n, m * k, k * n)
    gemm = np.zeros((1, 4, 2))
    gemm[0, :, 0] = sizes
    return DistinctOps(
        group_of_row=np.zeros(1, dtype=np.int64),
        count=np.ones(1),
        op_class=np.array([op_class], dtype=np.int64),
        step_part=np.array([StepPart.FORWARD], dtype=np.int64),
        flops=np.array([[flops, 0.0]]),
        moved_bytes=np.array([[moved * _ELEMENT_BYTES, 0.0]]),
        gemm=gemm,
        elements=np.array([[elements, 0.0]]),
        attributes=np.array([[area, 1.0, groups, width, 1.0, 0.0, 0.0, _ELEMENT_BYTES]]),
    )
