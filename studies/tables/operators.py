"""Operators timed alone, from the public tables, as samples of the op-level fit.

What a table says of one device and number format is one ``OperatorSample``; every group of (table, device, operator)
weighs alike. Rows that take less than 60 us measure the launch more than the kernel and are left out. The products of
``llm/gemm`` ran in short bursts at clocks that nobody sustains: their times are multiplied by the best rate of the
table over the best sustained rate of ``llm/matmul_peaks`` where both are known. Tables of TensorFlow have offsets of
their own on each device, so that what that framework does otherwise is not taken for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from forerun.base.errors import ForerunError
from forerun.cost.time.features import NEWEST_ERA, Point, software_era
from forerun.cost.time.rows import DistinctOps
from forerun.evidence.fitting.op_time_fit import NO_SYSTEM, OperatorSample
from forerun.graph.graph import OpClass, StepPart
from forerun.question.devices import find_device
from forerun.question.devices.device import Device
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.op_rules.products import NUM_GATES
from studies.tables.public import public_table

Floats = npt.NDArray[np.float64]

LEAST_TIME_S = 60e-6
_MOST_ROWS = {"bmm": 300, "linear": 300, "conv": 300, "attention": 400}
_MOST_ROWS_OTHERWISE = 120
_SEED = 0

_DEVICES = {"V100-SXM2": "v100-sxm2-16gb", "V100": "v100-sxm2-16gb", "P100": "p100-pcie-16gb"}
"""Names that fit more than one entry of the catalogue, which agree in all that a kernel feels."""

_BURST_OVER_SUSTAINED = {"A100-SXM4-80GB": 1.10, "H100-SXM-80GB": 1.18, "GB200": 1.15, "B300-SXM": 1.26}
"""Best rate of ``llm/gemm`` over the best of ``llm/matmul_peaks``, by device."""

_ELEMENT_WISE = {
    "add": (OpClass.ADD, 3, 1.0),
    "addu": (OpClass.ADD, 2, 1.0),
    "mul": (OpClass.MUL, 3, 1.0),
    "mulu": (OpClass.MUL, 2, 1.0),
    "div": (OpClass.MUL, 3, 1.0),
    "divu": (OpClass.MUL, 2, 1.0),
    "pow": (OpClass.ELEMENTWISE, 3, 1.0),
    "powu": (OpClass.ELEMENTWISE, 2, 1.0),
    "relu": (OpClass.ACTIVATION, 2, 4.0),
    "gelu": (OpClass.ACTIVATION, 2, 4.0),
    "tanh": (OpClass.ACTIVATION, 2, 4.0),
    "ln": (OpClass.LAYER_NORM, 2, 5.0),
    "softmax": (OpClass.SOFTMAX, 2, 5.0),
}
"""Class, tensors moved and FLOP per element of the operators of ``neusight_ops``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTable:
    """Operators of one table on one device in one number format, n of them.

    Attributes:
        source: The table.
        device: The device.
        operators: Name of each operator, (n,).
        sample: As the fit takes them.
    """

    source: str
    device: Device
    operators: tuple[str, ...]
    sample: OperatorSample


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Kernels of a table: columns of equal length, missing ones are zero (or one kernel of one part)."""

    source: str
    gpu: str
    precision: Precision
    version: str
    operator: str
    op_class: OpClass
    time_s: Floats
    flops: Floats
    moved_bytes: Floats
    sizes: Sequence[Any] = (0, 0, 0, 0)
    elements: Any = 0
    part: StepPart = StepPart.FORWARD
    kernel_area: Any = 1
    stride: Any = 1
    width: Any = 0
    serial_steps: Any = 1


def read_operator_tables(folder: Path) -> list[OperatorTable]:
    """All operators of the public tables whose device is in the catalogue.

    Args:
        folder: Where the public tables are.
    """
    readers = (
        _neusight,
        _gemm,
        _attention,
        _deepbench_gemm,
        _deepbench_conv,
        _deepbench_rnn,
        _tensorflow_conv,
    )
    return _tables(folder, readers)


def read_amd_convolutions(folder: Path) -> list[OperatorTable]:
    """Convolutions of MIOpen on AMD devices, which only the offsets of their architectures are fitted on.

    In the fit of the networks they cost more on other devices than they give (docs/decisions/0096).
    """
    return _tables(folder, (_miopen_conv,))


def _tables(folder: Path, readers: Sequence[Callable[[Path], Iterator[_Rows]]]) -> list[OperatorTable]:
    random = np.random.default_rng(_SEED)
    grouped: dict[tuple[str, str, Precision, str], list[_Rows]] = {}
    for read in readers:
        for rows in read(folder):
            chosen = _sampled(rows, random)
            if chosen is not None:
                key = (rows.source, rows.gpu, rows.precision, rows.version)
                grouped.setdefault(key, []).append(chosen)
    found = []
    for (source, gpu, precision, version), parts in grouped.items():
        device = _device(gpu)
        if device is not None:
            found.append(_table(source, device, precision, version, parts))
    return found


def _device(gpu: str) -> Device | None:
    try:
        return find_device(_DEVICES.get(gpu, gpu))
    except ForerunError:
        return None


def _sampled(rows: _Rows, random: np.random.Generator) -> _Rows | None:
    limit = _MOST_ROWS.get(rows.operator, _MOST_ROWS_OTHERWISE)
    good = np.flatnonzero((rows.time_s >= LEAST_TIME_S) & np.isfinite(rows.time_s))
    if not len(good):
        return None
    chosen = np.sort(random.choice(good, size=min(limit, len(good)), replace=False))
    number = len(rows.time_s)

    def some(value: Any) -> Any:
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (number,))[chosen]

    return _Rows(
        source=rows.source,
        gpu=rows.gpu,
        precision=rows.precision,
        version=rows.version,
        operator=rows.operator,
        op_class=rows.op_class,
        part=rows.part,
        sizes=[some(size) for size in rows.sizes],
        **{name: some(getattr(rows, name)) for name in _COLUMNS},
    )


_COLUMNS = ("time_s", "flops", "moved_bytes", "elements", "kernel_area", "stride", "width", "serial_steps")


def _table(
    source: str, device: Device, precision: Precision, version: str, parts: Sequence[_Rows]
) -> OperatorTable:
    setup = TrainingSetup(precision=precision, phase=Phase.INFERENCE, batch_size_per_device=1)
    era = software_era(version) if version else NEWEST_ERA
    ops = _kernels(parts, 2.0 if precision.is_half else 4.0)
    weight = np.concatenate([np.full(len(part.time_s), 1.0 / len(part.time_s)) for part in parts])
    return OperatorTable(
        source=source,
        device=device,
        operators=tuple(part.operator for part in parts for _ in part.time_s),
        sample=OperatorSample(
            ops=ops,
            point=Point(device=device, setup=setup, era=era),
            time_s=np.concatenate([part.time_s for part in parts]),
            weight=weight,
            system=f"{source}|{device.name}" if source in _LAYER_TABLES else NO_SYSTEM,
        ),
    )


def _kernels(parts: Sequence[_Rows], element_bytes: float) -> DistinctOps:
    """Operators as distinct kernels; their sizes do not depend on a batch."""

    def column(make: Callable[[_Rows], Any]) -> Floats:
        return np.concatenate([np.broadcast_to(make(part), (len(part.time_s),)) for part in parts]).astype(
            float
        )

    def constant(values: Floats) -> Floats:
        return np.stack([values, np.zeros_like(values)], axis=-1)

    number = sum(len(part.time_s) for part in parts)
    ones, zeros = np.ones(number), np.zeros(number)
    columns = [column(lambda part, name=name: getattr(part, name)) for name in ("kernel_area", "stride")]  # type: ignore[misc]
    columns += [ones, column(lambda part: part.width), column(lambda part: part.serial_steps)]
    columns += [zeros, zeros, np.full(number, element_bytes)]
    sizes = np.stack([column(lambda part, axis=axis: part.sizes[axis]) for axis in range(4)], axis=1)  # type: ignore[misc]
    flops, moved = (constant(column(lambda part, n=n: getattr(part, n))) for n in ("flops", "moved_bytes"))  # type: ignore[misc]
    return DistinctOps(
        group_of_row=np.arange(number),
        count=ones,
        op_class=column(lambda part: int(part.op_class)).astype(np.int64),
        step_part=column(lambda part: int(part.part)).astype(np.int64),
        flops=flops,
        moved_bytes=moved,
        gemm=constant(sizes),
        elements=constant(column(lambda part: part.elements)),
        attributes=np.stack(columns, axis=1),
        law_size=ones,
        joined_count=ones,
        joined_flops=flops,
        joined_bytes=moved,
    )


def _product(groups: Any, m: Any, n: Any, k: Any, element_bytes: float) -> Mapping[str, Any]:
    operands = groups * (m * k + k * n + m * n)
    return {
        "flops": 2.0 * groups * m * n * k,
        "moved_bytes": element_bytes * operands,
        "elements": operands,
        "sizes": (groups, m, n, k),
    }


def _columns(table: pd.DataFrame, *names: str) -> list[Floats]:
    return [table[name].to_numpy(dtype=np.float64) for name in names]


def _neusight(folder: Path) -> Iterator[_Rows]:
    table = public_table(folder, "neusight_ops")
    table = table[table["dtype"] == "fp32"]
    for (gpu, operator), rows in table.groupby(["gpu", "op"]):
        (milliseconds,) = _columns(rows, "time_ms_forward")
        about: dict[str, Any] = {
            "source": "neusight_ops",
            "gpu": str(gpu),
            "precision": Precision.FP32,
            "version": str(rows["torch_version"].iloc[0]),
            "operator": str(operator),
            "time_s": milliseconds * 1e-3,
        }
        if operator in ("bmm", "linear"):
            m, n, k = _columns(rows, "gemm_m", "gemm_n", "gemm_k")
            groups = (
                rows["gemm_batch"].fillna(1).to_numpy(dtype=np.float64)
                if operator == "bmm"
                else np.ones(len(m))
            )
            kind = OpClass.BMM if operator == "bmm" else OpClass.LINEAR
            yield _Rows(op_class=kind, **_product(groups, m, n, k, 4.0), **about)
        elif operator == "conv":
            batch, inputs, outputs, size = _columns(
                rows, "conv_batch", "conv_in_channels", "conv_out_channels", "conv_in_size"
            )
            window = {"kernel_w": 3.0, "kernel_h": 3.0, "stride": 1.0, "out_w": size, "out_h": size}
            yield from _convolution(about, batch, inputs, outputs, size, size, window, 4.0, StepPart.FORWARD)
        else:
            op_class, num_tensors, per_element = _ELEMENT_WISE[str(operator)]
            rows_, columns = _columns(rows, "vec_rows", "vec_cols")
            elements = rows_ * columns
            is_norm = op_class in (OpClass.LAYER_NORM, OpClass.SOFTMAX)
            yield _Rows(
                op_class=op_class,
                flops=per_element * elements,
                moved_bytes=4.0 * num_tensors * elements,
                elements=elements,
                width=columns if is_norm else 0.0,
                **about,
            )


def _convolution(
    about: Mapping[str, Any],
    batch: Any,
    inputs: Any,
    outputs: Any,
    width: Any,
    height: Any,
    window: Mapping[str, Any],
    element_bytes: float,
    part: StepPart,
) -> Iterator[_Rows]:
    area = window["kernel_w"] * window["kernel_h"]
    in_pixels, out_pixels = batch * width * height, batch * window["out_w"] * window["out_h"]
    sizes = {
        StepPart.FORWARD: (1.0, out_pixels, outputs, inputs * area),
        StepPart.BACKWARD: (1.0, in_pixels, inputs, outputs * area),
        StepPart.WEIGHT_GRADIENT: (1.0, outputs, inputs * area, out_pixels),
    }[part]
    elements = in_pixels * inputs + out_pixels * outputs + inputs * outputs * area
    yield _Rows(
        op_class=OpClass.CONV,
        part=part,
        flops=2.0 * out_pixels * outputs * inputs * area,
        moved_bytes=element_bytes * elements,
        sizes=sizes,
        elements=elements,
        kernel_area=area,
        stride=window["stride"],
        width=window["out_w"],
        **about,
    )


def _gemm(folder: Path) -> Iterator[_Rows]:
    table = public_table(folder, "llm/gemm")
    table = table[table["dtype"] == "bfloat16"]
    for gpu, rows in table.groupby("gpu"):
        m, n, k, milliseconds = _columns(rows, "m", "n", "k", "time_ms")
        yield _Rows(
            source="llm/gemm",
            gpu=str(gpu),
            precision=Precision.BF16,
            version="",
            operator="linear",
            op_class=OpClass.LINEAR,
            time_s=milliseconds * 1e-3 * _BURST_OVER_SUSTAINED.get(str(gpu), 1.0),
            **_product(np.ones(len(m)), m, n, k, 2.0),
        )


def _attention(folder: Path) -> Iterator[_Rows]:
    """Causal attention: half of the pairs of tokens."""
    table = public_table(folder, "llm/attention")
    for gpu, rows in table.groupby("gpu"):
        batch, length, heads, shared, size, milliseconds = _columns(
            rows, "batch", "seq_len", "heads", "kv_heads", "head_dim", "time_ms_forward"
        )
        yield _Rows(
            source="llm/attention",
            gpu=str(gpu),
            precision=Precision.BF16,
            version="",
            operator="attention",
            op_class=OpClass.ATTENTION,
            time_s=milliseconds * 1e-3,
            flops=2.0 * batch * heads * length**2 * size,
            moved_bytes=2.0 * batch * length * size * 2.0 * (heads + shared),
            sizes=(batch * heads, length, length, size),
            elements=batch * length * size * 2.0 * (heads + shared),
            width=length,
        )


_DEEPBENCH_PRECISIONS = {"fp32": Precision.FP32, "fp16_matrix_units": Precision.FP16}
_DEEPBENCH_ERAS = {"10.1.243": "1.2", "8.0": "0.4", "7.5": "0.4"}
"""PyTorch versions of the time of a CUDA version."""


def _deepbench(folder: Path, name: str) -> Iterator[tuple[Mapping[str, Any], float, pd.DataFrame]]:
    table = public_table(folder, name)
    for (gpu, dtype), rows in table.groupby(["gpu", "dtype"]):
        precision = _DEEPBENCH_PRECISIONS.get(str(dtype))
        if precision is not None:
            about = {
                "source": name,
                "gpu": str(gpu),
                "precision": precision,
                "version": _DEEPBENCH_ERAS.get(str(rows["cuda_version"].iloc[0]), "0.4"),
            }
            yield about, 2.0 if precision.is_half else 4.0, rows


def _deepbench_gemm(folder: Path) -> Iterator[_Rows]:
    for about, element_bytes, rows in _deepbench(folder, "deepbench_gemm"):
        m, n, k, milliseconds = _columns(rows, "m", "n", "k", "time_ms")
        product = _product(np.ones(len(m)), m, n, k, element_bytes)
        yield _Rows(
            operator="linear", op_class=OpClass.LINEAR, time_s=milliseconds * 1e-3, **product, **about
        )


_CONVOLUTION_TIMES = {
    "time_ms_forward": StepPart.FORWARD,
    "time_ms_backward_inputs": StepPart.BACKWARD,
    "time_ms_backward_weights": StepPart.WEIGHT_GRADIENT,
}


def _deepbench_conv(folder: Path) -> Iterator[_Rows]:
    for about, element_bytes, rows in _deepbench(folder, "deepbench_conv"):
        batch, inputs, outputs, width, height = _columns(
            rows, "batch", "in_channels", "out_channels", "width", "height"
        )
        window: dict[str, Any] = {}
        for axis, size in (("w", width), ("h", height)):
            kernel, padding, stride = _columns(rows, f"kernel_{axis}", f"pad_{axis}", f"stride_{axis}")
            window[f"kernel_{axis}"] = kernel
            window[f"out_{axis}"] = np.floor((size + 2 * padding - kernel) / stride) + 1
            window["stride"] = np.maximum(stride, window.get("stride", 1.0))
        for column, part in _CONVOLUTION_TIMES.items():
            timed = {"operator": "conv", "time_s": rows[column].to_numpy(dtype=np.float64) * 1e-3}
            yield from _convolution(
                {**about, **timed}, batch, inputs, outputs, width, height, window, element_bytes, part
            )


_CALL_S = 0.2e-3
"""What one call of TensorFlow costs in the tables of layers, whatever the layer (least 0.14 to 0.24 ms, by device)."""

_LAYER_TABLES = {"justus_layers": "0.4", "iit_layers": "1.5"}
"""PyTorch versions of the time of each table."""


def _tensorflow_conv(folder: Path) -> Iterator[_Rows]:
    """Forward passes of square convolutions; those of less than 1 ms measure the call."""
    for name, version in _LAYER_TABLES.items():
        table = public_table(folder, name)
        table = table[
            table["layer"].eq("conv2d") & table["mode"].eq("forward") & table["time_ms_median"].ge(1.0)
        ]
        if "n_gpus" in table:
            table = table[table["n_gpus"].eq(1) & table["model_layer"].isna()]
        for gpu, rows in table.groupby("gpu"):
            batch, size, kernel, stride, inputs, outputs, milliseconds = _columns(
                rows,
                "batch_size",
                "in_size",
                "kernel",
                "stride",
                "in_features",
                "out_features",
                "time_ms_median",
            )
            valid = np.ceil((size - kernel + 1) / stride)
            out = np.where(rows["padding"].eq("same"), np.ceil(size / stride), valid)
            window = {"kernel_w": kernel, "kernel_h": kernel, "stride": stride, "out_w": out, "out_h": out}
            about = {"source": name, "gpu": str(gpu), "precision": Precision.FP32, "version": version}
            timed = {"operator": "conv", "time_s": milliseconds * 1e-3 - _CALL_S}
            yield from _convolution(
                {**about, **timed}, batch, inputs, outputs, size, size, window, 4.0, StepPart.FORWARD
            )


_DIRECTIONS = {"F": StepPart.FORWARD, "B": StepPart.BACKWARD, "W": StepPart.WEIGHT_GRADIENT}


def _miopen_conv(folder: Path) -> Iterator[_Rows]:
    """Convolutions of MIOpen's tuning database on AMD devices; grouped and dilated ones are left out."""
    table = public_table(folder, "kernels/conv_miopen")
    plain = table["layout"].eq("NCHW") & table["groups"].eq(1) & table["dilation_h"].eq(1)
    table = table[plain & table["n_solvers"].gt(1)]
    for (gpu, dtype, direction), rows in table.groupby(["gpu", "dtype", "direction"]):
        batch, inputs, outputs, width, height, milliseconds = _columns(
            rows, "batch", "c_in", "c_out", "w_in", "h_in", "time_ms"
        )
        names = ("kernel_w", "kernel_h", "w_out", "h_out")
        window = dict(zip(("kernel_w", "kernel_h", "out_w", "out_h"), _columns(rows, *names), strict=True))
        window["stride"] = rows[["stride_h", "stride_w"]].max(axis=1).to_numpy(dtype=np.float64)
        precision = Precision(str(dtype))
        about = {"source": "conv_miopen", "gpu": str(gpu), "precision": precision, "version": ""}
        timed = {"operator": "conv", "time_s": milliseconds * 1e-3}
        yield from _convolution(
            {**about, **timed},
            *(batch, inputs, outputs, width, height, window, 2.0 if precision.is_half else 4.0),
            _DIRECTIONS[str(direction)],
        )


def _deepbench_rnn(folder: Path) -> Iterator[_Rows]:
    gates_of = {"vanilla": NUM_GATES["rnn"], "lstm": NUM_GATES["lstm"], "gru": NUM_GATES["gru"]}
    for about, element_bytes, rows in _deepbench(folder, "deepbench_rnn"):
        hidden, batch, steps, milliseconds = _columns(rows, "hidden", "batch", "timesteps", "time_ms_forward")
        gates = rows["cell"].map(lambda cell: gates_of[str(cell).lower()]).to_numpy(dtype=np.float64)
        # DeepBench leaves the product of the input out (CUDNN_SKIP_INPUT).
        elements = steps * batch * hidden * 2.0 + gates * hidden**2
        yield _Rows(
            operator="recurrent",
            op_class=OpClass.RECURRENT,
            time_s=milliseconds * 1e-3,
            flops=2.0 * steps * batch * gates * hidden**2,
            moved_bytes=element_bytes * elements,
            sizes=(1.0, batch, gates * hidden, hidden),
            elements=elements,
            width=hidden,
            serial_steps=steps,
            **about,
        )
