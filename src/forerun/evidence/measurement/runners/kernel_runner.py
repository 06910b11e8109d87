"""Microbenchmarks of single kernels: matrix product, convolution, copy, launch.

Subjects and their parameters (``precision`` fp32, tf32, fp16 or bf16 throughout):

- ``gemm``: ``m``, ``n``, ``k``: (m, k) times (k, n);
- ``convolution``: ``batch_size``, ``in_channels``, ``out_channels``, ``in_size``, ``kernel``, ``stride``, ``layout``;
- ``copy``: ``num_bytes``: read once and written once;
- ``launch``: ``num_calls``: additions of one element, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.table import runner
from forerun.evidence.measurement.runners.timing import time_repetitions
from forerun.evidence.measurement.runners.torch_device import open_device, set_numeric_flags, synchroniser
from forerun.evidence.records.measured_run import choice_of, whole_of
from forerun.evidence.records.measurement import JobKind, Scalar
from forerun.question.setup import Layout, Precision

if TYPE_CHECKING:
    import torch

_Prepared = tuple[Callable[[], Any], dict[str, float]]
"""A function to call, and the work of one call: ``flops`` [FLOP], ``bytes`` [bytes] or ``calls``."""


@runner(JobKind.KERNEL)
def run_kernel(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times a kernel; results are flops_per_s, bytes_per_s or seconds_per_call of the median repetition."""
    if job.subject not in KERNELS:
        raise InvalidSetupError(
            f"unknown kernel '{job.subject}'{near_matches(job.subject, KERNELS)}; "
            f"expected one of {', '.join(KERNELS)}"
        )
    device = open_device(device_index)
    set_numeric_flags(choice_of(job.parameters, "precision", Precision, Precision.FP32))
    call, work = KERNELS[job.subject](job.parameters, device)

    def step() -> None:
        call()

    timed = time_repetitions(step, synchroniser(device), protocol)
    return timed.with_results(**_rates(work, median(timed.repetitions_s)))


def _rates(work: dict[str, float], time_s: float) -> dict[str, Scalar]:
    rates: dict[str, Scalar] = {f"{name}_per_s": work[name] / time_s for name in work if name != "calls"}
    if "calls" in work:
        rates["seconds_per_call"] = time_s / work["calls"]
    return rates


def _dtype(parameters: dict[str, Scalar]) -> torch.dtype:
    import torch

    precision = choice_of(parameters, "precision", Precision, Precision.FP32)
    known = {
        Precision.FP32: torch.float32,
        Precision.TF32: torch.float32,
        Precision.FP16: torch.float16,
        Precision.BF16: torch.bfloat16,
    }
    if precision not in known:
        raise InvalidSetupError(
            f"a kernel runs in one format, got {precision}; expected one of {', '.join(known)}"
        )
    return known[precision]


def _gemm(parameters: dict[str, Scalar], device: torch.device) -> _Prepared:
    import torch

    m, n, k = (whole_of(parameters, name) for name in "mnk")
    kind: dict[str, Any] = {"dtype": _dtype(parameters), "device": device}
    left, right, out = torch.randn(m, k, **kind), torch.randn(k, n, **kind), torch.empty(m, n, **kind)
    return lambda: torch.mm(left, right, out=out), {"flops": 2.0 * m * n * k}


def _convolution(parameters: dict[str, Scalar], device: torch.device) -> _Prepared:
    import torch
    from torch.nn import functional

    names = ("batch_size", "in_channels", "out_channels", "in_size", "kernel")
    batch, inputs, outputs, size, kernel = (whole_of(parameters, name) for name in names)
    stride = whole_of(parameters, "stride", 1)
    is_nhwc = choice_of(parameters, "layout", Layout, Layout.NCHW) is Layout.NHWC
    order = torch.channels_last if is_nhwc else torch.contiguous_format
    kind: dict[str, Any] = {"dtype": _dtype(parameters), "device": device}
    image = torch.randn(batch, inputs, size, size, **kind).contiguous(memory_format=order)
    weight = torch.randn(outputs, inputs, kernel, kernel, **kind).contiguous(memory_format=order)
    out_size = (size + 2 * (kernel // 2) - kernel) // stride + 1
    flops = 2.0 * batch * outputs * inputs * kernel**2 * out_size**2

    def call() -> torch.Tensor:
        with torch.no_grad():
            return functional.conv2d(image, weight, stride=stride, padding=kernel // 2)

    return call, {"flops": flops}


def _copy(parameters: dict[str, Scalar], device: torch.device) -> _Prepared:
    import torch

    dtype = _dtype(parameters)
    count = max(1, whole_of(parameters, "num_bytes") // dtype.itemsize)
    source = torch.randn(count, device=device).to(dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), {"bytes": 2.0 * count * dtype.itemsize}


def _launch(parameters: dict[str, Scalar], device: torch.device) -> _Prepared:
    import torch

    num_calls = whole_of(parameters, "num_calls", 100)
    value = torch.zeros(1, dtype=_dtype(parameters), device=device)

    def call() -> None:
        for _ in range(num_calls):
            value.add_(1)

    return call, {"calls": float(num_calls)}


KERNELS: dict[str, Callable[[dict[str, Scalar], torch.device], _Prepared]] = {
    "gemm": _gemm,
    "convolution": _convolution,
    "copy": _copy,
    "launch": _launch,
}
