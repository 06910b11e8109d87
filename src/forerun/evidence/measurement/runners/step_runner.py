"""Steps on one device: of a whole model, and of one layer, forward or training.

The subject of a layer's job is its kind, its parameters are those of ``layer_figures`` with ``mode`` (``forward`` or
``train_step``), ``activation``, ``optimizer``, ``precision``, ``layout``, ``seed``, ``input_gradient`` and ``copies``.

A training step is the layer's part of a step of a network: forward, backward from a gradient of its output to gradients
of its weights and of its input, update of the weights. Input and target of earlier layer benchmarks (Justus et al.
2018) were variables that their optimizer updated as well; here the input only gets a gradient, and there is no loss.
Without ``input_gradient`` it gets none, like the first layer of a network. With ``copies`` the step holds that many
equal layers, each with its own weights and input: first all forward, then all backward, then one update.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.layer_figures import layer_figures
from forerun.evidence.measurement.runners.table import runner
from forerun.evidence.measurement.runners.timing import time_repetitions
from forerun.evidence.measurement.runners.torch_device import (
    PeakMemory,
    open_device,
    set_numeric_flags,
    set_step_flags,
    synchroniser,
)
from forerun.evidence.measurement.telemetry import open_energy_counter
from forerun.evidence.records.measured_run import (
    choice_of,
    flag_of,
    input_options_of,
    setup_of,
    text_of,
    whole_of,
)
from forerun.evidence.records.measurement import JobKind, Scalar
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision, TrainingSetup

if TYPE_CHECKING:
    import torch

    from forerun.tracing.models.built_model import BuiltModel

Batch = Mapping[str, Any]


def make_step(
    built: BuiltModel,
    setup: TrainingSetup,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    network: Callable[..., Any] | None = None,
) -> Callable[[], None]:
    """The step as a function without arguments; it may return before the device has finished.

    Training: gradients freed, forward and loss under autocast, backward, optimizer. Forward: with gradients, without
    a loss. Inference: without gradients. Gradients are not scaled in half precision, as in the trace.

    Args:
        built: The model on the device.
        setup: Setup for which the model was prepared.
        batch: A batch on the device.
        optimizer: Optimizer of the step, or None.
        device: Device of the model and the batch.
        network: What is called in place of the model, such as the model under DistributedDataParallel.
    """
    network = compiled(built.module, setup) if network is None else network
    if setup.phase is Phase.TRAIN:
        run = _training(built, network, setup, batch, optimizer, device)
    else:
        run = _forward(network, setup, batch, device)
    return run if setup.fused_attention else _with_plain_attention(run)


def _training(
    built: BuiltModel,
    network: Callable[..., Any],
    setup: TrainingSetup,
    batch: Batch,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
) -> Callable[[], None]:
    region = autocast_region(setup.precision, device)

    def step() -> None:
        built.module.zero_grad(set_to_none=setup.zero_grad_to_none)
        with region():
            loss = built.loss(network(*batch.get("args", ()), **batch.get("kwargs", {})), batch)
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def _forward(
    network: Callable[..., Any], setup: TrainingSetup, batch: Batch, device: torch.device
) -> Callable[[], None]:
    import torch

    gradients = torch.no_grad if setup.phase is Phase.INFERENCE else torch.enable_grad
    region = autocast_region(setup.precision, device)

    def step() -> None:
        with gradients(), region():
            network(*batch.get("args", ()), **batch.get("kwargs", {}))

    return step


def autocast_region(
    precision: Precision, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A maker of the autocast region of a precision, to be called in each step; an empty region without autocast."""
    import torch

    from forerun.tracing.saving.prepare import AUTOCAST_DTYPE

    if not precision.is_autocast:
        return contextlib.nullcontext
    return partial(torch.autocast, device.type, dtype=AUTOCAST_DTYPE[precision])


def _with_plain_attention(run: Callable[[], None]) -> Callable[[], None]:
    """The step with attention taken apart into products and a softmax."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def step() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            run()

    return step


def compiled(module: torch.nn.Module, setup: TrainingSetup) -> Callable[..., Any]:
    """The module, under ``torch.compile`` if the setup says so; it compiles in its first call."""
    if not setup.compile:
        return module
    import torch

    torch.compiler.config.force_disable_caches = True  # with a warm cache there would be no compile time
    network: Callable[..., Any] = torch.compile(module)
    return network


def check_measured_optimizer(name: str) -> None:
    """Raises ``InvalidSetupError`` for an optimizer that is predicted only."""
    from forerun.tracing.optimizers import OPTIMIZERS, STAND_INS

    if name in STAND_INS:
        known = ", ".join(known for known in OPTIMIZERS if known not in STAND_INS)
        raise InvalidSetupError(
            f"{name} is predicted but not measured: expected an optimizer of none, {known}, got {name}"
        )


def make_real_optimizer(
    setup: TrainingSetup, module: torch.nn.Module, learning_rate: float | None = None
) -> torch.optim.Optimizer | None:
    """The optimizer of a setup over the trained weights.

    Args:
        setup: Setup with the optimizer's name and implementation.
        module: Network to train.
        learning_rate: Learning rate; None for the optimizer's own.

    Raises:
        InvalidSetupError: The optimizer is not known, is predicted only, or has no fused form.
    """
    from forerun.tracing.optimizers import make_optimizer

    check_measured_optimizer(setup.optimizer)
    optimizer = make_optimizer(setup, [p for p in module.parameters() if p.requires_grad])
    if optimizer is None:
        return None
    is_fused = setup.optimizer_implementation is OptimizerImplementation.FUSED
    for group in optimizer.param_groups:
        if learning_rate is not None:
            group["lr"] = learning_rate
        if is_fused:
            if "fused" not in group:
                raise InvalidSetupError(
                    f"{setup.optimizer} has no fused form in PyTorch; use optimizer_implementation foreach"
                )
            # PyTorch refuses both at once.
            group.update(foreach=False, fused=True)
    return optimizer


def num_parameters(module: torch.nn.Module) -> int:
    """Number of parameters of a module, with shared ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def tensor_bytes(module: torch.nn.Module) -> int:
    """Size of a module's weights and buffers [bytes]."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


LEARNING_RATE = 1e-4
"""Learning rate, small so that weights stay finite over hundreds of steps on one batch of noise, because denormal
numbers are slow on processors. The time of the optimizer does not depend on it."""

_SHORTEST_ENERGY_SPAN_S = 0.5  # the driver's counter moves in steps of some 100 ms


def built_for(job: MeasurementJob, setup: TrainingSetup, device: torch.device) -> BuiltModel:
    """The model of a job on its device, with the numeric flags and the seed of the job set."""
    import torch

    from forerun.tracing.models.sources import build_model

    set_step_flags(setup, job.parameters)
    torch.manual_seed(whole_of(job.parameters, "seed", 0))
    return build_model(
        job.subject,
        training=setup.phase is not Phase.INFERENCE,
        device=str(device),
        **input_options_of(job.parameters),
    )


@runner(JobKind.STEP)
def run_step(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times steps of a model.

    Results are num_parameters, first_step_s, compile_time_s and the peak memory; on a GPU also launched_s, the time
    until the host had launched a step, and step_energy_j.
    """
    from forerun.tracing.step import prepared_batch

    setup = setup_of(job.parameters)
    device = open_device(device_index)
    built = built_for(job, setup, device)
    if built.only_batch_size not in (None, setup.batch_size_per_device):
        raise InvalidSetupError(
            f"{built.name} runs at batch size {built.only_batch_size} only, got "
            f"{setup.batch_size_per_device}; ask for that one"
        )
    memory = PeakMemory(device, tensor_bytes(built.module))
    batch = prepared_batch(built, setup, setup.batch_size_per_device)
    optimizer = make_real_optimizer(setup, built.module, LEARNING_RATE)
    step = make_step(built, setup, batch, optimizer, device)
    energy_j: list[float | None] = []
    with open_energy_counter(device_index) as read_energy_j:
        timed, first = time_first_and_rest(
            step,
            synchroniser(device),
            protocol,
            is_compiled=setup.compile,
            at_both_ends=lambda: energy_j.append(read_energy_j()),
        )
    host = {"launched_s": median(timed.returned_s)} if device.type == "cuda" else {}
    return timed.with_results(
        num_parameters=num_parameters(built.module),
        **first,
        **host,
        **step_energy(energy_j, timed.repetitions_s),
        **memory.figures(),
    )


def step_energy(readings_j: Sequence[float | None], repetitions_s: Sequence[float]) -> dict[str, Scalar]:
    """``step_energy_j``, the mean energy of the timed repetitions [J]; empty if the energy is not known.

    Args:
        readings_j: Counter before the first and after the last repetition [J]; None without a counter.
        repetitions_s: The repetitions, one after the other [s].
    """
    before_j, after_j = readings_j
    if before_j is None or after_j is None or sum(repetitions_s) < _SHORTEST_ENERGY_SPAN_S:
        return {}
    return {"step_energy_j": (after_j - before_j) / len(repetitions_s)}


def time_first_and_rest(
    step: Callable[[], None],
    synchronise: Callable[[], None],
    protocol: Protocol,
    *,
    is_compiled: bool = False,
    at_both_ends: Callable[[], None] | None = None,
) -> tuple[RunResult, dict[str, Scalar]]:
    """Times of the first step, which loads and compiles, and of the other steps.

    ``compile_time_s`` is the time of the first step less a later one; without compilation that difference is the start
    of libraries, and only ``first_step_s`` is given.
    """
    synchronise()
    began_s = time.perf_counter()
    step()
    synchronise()
    first_s = time.perf_counter() - began_s
    timed = time_repetitions(step, synchronise, protocol, at_both_ends=at_both_ends)
    figures: dict[str, Scalar] = {"first_step_s": first_s}
    if is_compiled:
        figures["compile_time_s"] = max(0.0, first_s - median(timed.repetitions_s))
    return timed, figures


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
