"""Steps of one layer, forward or training.

A job's subject is its kind, its parameters are those of ``layer_figures`` with ``mode`` (``forward`` or
``train_step``), ``activation``, ``optimizer``, ``precision``, ``layout``, ``seed``, ``input_gradient`` and ``copies``.

A training step is the layer's part of a step of a network: forward, backward from a gradient of its output to gradients
of its weights and of its input, update of the weights. Input and target of earlier layer benchmarks (Justus et al.
2018) were variables that their optimizer updated as well; here the input only gets a gradient, and there is no loss.
Without ``input_gradient`` it gets none, like the first layer of a network. With ``copies`` the step holds that many
equal layers, each with its own weights and input: first all forward, then all backward, then one update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.layer_figures import layer_figures
from forerun.evidence.measurement.runners.step_runner import (
    LEARNING_RATE,
    autocast_region,
    make_real_optimizer,
    num_parameters,
    tensor_bytes,
    time_first_and_rest,
)
from forerun.evidence.measurement.runners.table import runner
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

MODES = ("forward", "train_step")


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
        optimizer = make_real_optimizer(TrainingSetup(optimizer=name), layers, LEARNING_RATE)
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
