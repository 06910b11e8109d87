"""Microbenchmarks of single kernels (matrix product, convolution, copy, launch), and of one layer, forward or training.

Subjects of kernels and their parameters (``precision`` fp32, tf32, fp16 or bf16 throughout):

- ``gemm``: ``m``, ``n``, ``k``: (m, k) times (k, n);
- ``convolution``: ``batch_size``, ``in_channels``, ``out_channels``, ``in_size``, ``kernel``, ``stride``, ``layout``;
- ``copy``: ``num_bytes``: read once and written once;
- ``launch``: ``num_calls``: additions of one element, one after the other.

A layer's subject is its kind, its parameters are those of ``layer_figures`` with ``mode`` (``forward`` or
``train_step``), ``activation``, ``optimizer``, ``precision``, ``layout``, ``seed``, ``input_gradient`` and ``copies``.

A training step is the layer's part of a step of a network: forward, backward from a gradient of its output to gradients
of its weights and of its input, update of the weights. Input and target of earlier layer benchmarks (Justus et al.
2018) were variables that their optimizer updated as well; here the input only gets a gradient, and there is no loss.
Without ``input_gradient`` it gets none, like the first layer of a network. With ``copies`` the step holds that many
equal layers, each with its own weights and input: first all forward, then all backward, then one update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.layer_figures import layer_figures
from forerun.evidence.measurement.runners.step_runner import (
    autocast_region,
    make_real_optimizer,
    num_parameters,
    tensor_bytes,
    time_first_and_rest,
)
from forerun.evidence.measurement.runners.table import runner
from forerun.evidence.measurement.runners.timing import time_repetitions
from forerun.evidence.measurement.runners.torch_device import (
    PeakMemory,
    open_device,
    set_numeric_flags,
    synchroniser,
)
from forerun.evidence.records.measured_run import choice_of, flag_of, text_of, whole_of
from forerun.evidence.records.measurement import JobKind, Scalar
from forerun.question.setup import Layout, Precision, TrainingSetup

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


MODES = ("forward", "train_step")

_LEARNING_RATE = 1e-4


@runner(JobKind.LAYER)
def run_layer(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times a layer; results are num_parameters, first_step_s and the peak memory."""
    import torch

    mode = text_of(job.parameters, "mode", "forward")
    if mode not in MODES:
        raise InvalidSetupError(f"unknown mode '{mode}' of a layer; expected {' or '.join(MODES)}")
    device = open_device(device_index)
    precision = choice_of(job.parameters, "precision", Precision, Precision.FP32)
    set_numeric_flags(precision)
    torch.manual_seed(whole_of(job.parameters, "seed", 0))
    pairs = [
        _layer_and_input(job.subject, job.parameters, precision, device)
        for _ in range(whole_of(job.parameters, "copies", 1))
    ]
    layers = torch.nn.ModuleList([layer for layer, _ in pairs])
    inputs = [given for _, given in pairs]
    memory = PeakMemory(device, tensor_bytes(layers))
    if mode == "forward":
        step = _forward_step(layers, inputs, precision, device)
    else:
        name = text_of(job.parameters, "optimizer", "none")
        optimizer = make_real_optimizer(TrainingSetup(optimizer=name), layers, _LEARNING_RATE)
        for given in inputs:
            given.requires_grad_(flag_of(job.parameters, "input_gradient", True))
        step = _train_step(layers, inputs, precision, device, optimizer)
    timed, first = time_first_and_rest(step, synchroniser(device), protocol)
    return timed.with_results(num_parameters=num_parameters(layers), **first, **memory.figures())


def _layer_and_input(
    kind: str, parameters: dict[str, Scalar], precision: Precision, device: torch.device
) -> tuple[torch.nn.Module, torch.Tensor]:
    import torch

    from forerun.evidence.measurement.layer_modules import build_layer

    storage = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
    placed: dict[str, Any] = {"device": device, "dtype": storage.get(precision, torch.float32)}
    shape = layer_figures(kind, parameters).input_shape
    with torch.device(device):
        layer = build_layer(kind, parameters).to(**placed)
    given = torch.randn(shape, device=device).to(placed["dtype"])
    is_nhwc = choice_of(parameters, "layout", Layout, Layout.NCHW) is Layout.NHWC
    if is_nhwc and given.dim() == 4:
        layer = layer.to(memory_format=torch.channels_last)
        given = given.contiguous(memory_format=torch.channels_last)
    return layer, given


def _forward_step(
    layers: torch.nn.ModuleList, inputs: Sequence[torch.Tensor], precision: Precision, device: torch.device
) -> Callable[[], None]:
    import torch

    region = autocast_region(precision, device)

    def step() -> None:
        with torch.no_grad(), region():
            for layer, given in zip(layers, inputs, strict=True):
                layer(given)

    return step


def _train_step(
    layers: torch.nn.ModuleList,
    inputs: Sequence[torch.Tensor],
    precision: Precision,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None,
) -> Callable[[], None]:
    import torch

    region = autocast_region(precision, device)

    def forward() -> list[torch.Tensor]:
        with region():
            return [layer(given) for layer, given in zip(layers, inputs, strict=True)]

    with torch.no_grad():
        gradients = [torch.randn_like(output) for output in forward()]

    def step() -> None:
        layers.zero_grad(set_to_none=True)
        for given in inputs:
            # zero_grad clears parameters only; gradients of inputs would add up, by one kernel more a step.
            given.grad = None
        torch.autograd.backward(forward(), gradients)
        if optimizer is not None:
            optimizer.step()

    return step
