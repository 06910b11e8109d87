"""Changes of a run that may make it faster or let it fit: settings, their meaning, and the runs that they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from forerun.base.errors import ForerunError
from forerun.base.units import format_bytes
from forerun.prediction.estimate import Estimate, Interval
from forerun.prediction.run_step import loader_rate_samples_per_s, workers_needed
from forerun.question.devices.catalogue import find_device, load_catalog
from forerun.question.devices.device import Device, NumberFormat
from forerun.question.devices.prices import cheapest_rental, load_prices
from forerun.question.model import find_architecture
from forerun.question.run import Run
from forerun.question.saving import own_loss_of
from forerun.question.setup import Layout, Phase, Precision
from forerun.question.sharing import Strategy

_OTHER_DEVICES = ("h100-sxm", "h200-sxm", "b200")
_NUMBERS = (2, 4, 8)
"""Devices of one machine."""
_LIGHT = (Precision.FP32, Precision.TF32)
_STATE = {"weights", "gradients", "optimizer state"}
_LORA_RANK = 16
_HALF_BYTES, _FULL_BYTES, _NF4_BYTES = 2.0, 4.0, 0.5
_UNSAID = ("loss", "parallel")
"""Settings that follow from others on the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A change that may help a run.

    Attributes:
        change: Settings to change, by their flat names.
        meaning: What the change does, and what it costs.
    """

    change: Mapping[str, Any]
    meaning: str = ""

    @property
    def options(self) -> str:
        """The change as on the command line.

        >>> Offer(change={"batch_size": 64, "compile": True}).options
        '--batch-size 64 --compile'
        """
        said = ((name, value) for name, value in self.change.items() if name not in _UNSAID)
        return " ".join(_flag(name) if value is True else f"{_flag(name)} {value}" for name, value in said)


def _flag(name: str) -> str:
    return "--on" if name == "device" else f"--{name.replace('_', '-')}"


def _trains(run: Run) -> bool:
    return run.setup.phase is Phase.TRAIN


def _halves_in(precision: str) -> Callable[[Run], bool]:
    return lambda run: _may_halve(run) and half_of(run.cluster.device) == precision


def _may_halve(run: Run) -> bool:
    """True where autocast would be faster: of single precision, and of bf16 on a device that only emulates it."""
    is_emulated = "bf16" in run.setup.precision and half_of(run.cluster.device) == "amp"
    return run.setup.precision in _LIGHT or is_emulated


def _is_of(stack: str) -> Callable[[Run], bool]:
    return lambda run: run.stack == stack


def _is_nchw(run: Run) -> bool:
    known = find_architecture(run.model.model)
    speaks = known is not None and known.is_language_model
    return run.stack == "pytorch" and run.setup.layout is Layout.NCHW and not speaks


def _updates_on_pytorch(run: Run) -> bool:
    return _trains(run) and run.setup.optimizer != "none" and run.stack == "pytorch"


def _takes_kernels_of(library: str) -> Callable[[Run], bool]:
    def when(run: Run) -> bool:
        saving = run.setup.saving
        own = "liger" if saving.lora_rank is None else "unsloth"
        return _trains(run) and not saving.fused_kernels and own == library and _may_have_fused_parts(run)

    return when


def _may_have_fused_parts(run: Run) -> bool:
    """True for a model that may be one of Transformers; building it tells."""
    known = find_architecture(run.model.model)
    if known is not None:
        return known.is_language_model
    return run.model.model.startswith("hf:") or (run.module is not None and run.stack == "pytorch")


def _takes_adapters(run: Run) -> bool:
    is_open = run.setup.saving.lora_rank is None and not run.sharing.layout.divides_model
    return _trains(run) and is_open and run.setup.precision.is_half


def _kernels(library: str) -> dict[str, Any]:
    return {"fused_kernels": library, "loss": str(own_loss_of(library))}


_FUSED = "norms, rotary embeddings, MLPs and the loss as one kernel each; the same arithmetic"

_OF_SETUP: tuple[tuple[Mapping[str, Any], str, Callable[[Run], bool]], ...] = (
    (
        {"precision": "amp-bf16"},
        "products in bf16 with fp32 weights; the range of fp32 is kept",
        _halves_in("amp-bf16"),
    ),
    (
        {"precision": "amp"},
        "products in fp16 with fp32 weights; losses are scaled (GradScaler)",
        _halves_in("amp"),
    ),
    (
        {"compile": True},
        "XLA joins small operations (jit_compile=True); the first step takes longer",
        _is_of("keras"),
    ),
    (
        {"compile": True},
        "torch.compile joins small operations; the first step takes minutes",
        _is_of("pytorch"),
    ),
    ({"layout": "nhwc"}, "model.to(memory_format=torch.channels_last); the same arithmetic", _is_nchw),
    ({"fused_attention": True}, "attention as one kernel, which keeps no matrix of scores", lambda run: True),
    (
        {"optimizer_implementation": "fused"},
        "the update as one kernel; the same arithmetic",
        _updates_on_pytorch,
    ),
    (_kernels("liger"), _FUSED, _takes_kernels_of("liger")),
    (_kernels("unsloth"), _FUSED, _takes_kernels_of("unsloth")),
    ({"recompute": "none"}, "nothing is computed twice; needs the memory of all activations", _trains),
    (
        {"recompute": "selective"},
        "products and attention are kept, the rest is computed again",
        lambda run: _trains(run) and run.setup.saving.recompute != "none",
    ),
    ({"recompute": "full"}, "activations are computed again: slower, and far less memory", _trains),
    ({"lora": _LORA_RANK}, "trains adapters only: another training, for fine-tuning", _takes_adapters),
)
"""Settings, their meaning, and the runs that they are offered for, unless they have them already."""

_STRATEGIES = {
    Strategy.DDP: "every device holds all weights and state",
    Strategy.ZERO1: "the state of the optimizer is divided",
    Strategy.FSDP: "weights, gradients and state are divided",
    Strategy.HSDP: "FSDP inside nodes, replicas between them",
    Strategy.AUTO: "the layout that forerun layouts finds for this global batch",
}


def faster(run: Run) -> Iterator[Offer]:
    """Single changes that may make a run faster, or smaller."""
    table = (Offer(change=change, meaning=meaning) for change, meaning, when in _OF_SETUP if when(run))
    offers = chain(table, _of_batch(run), _of_sharing(run), _of_devices(run))
    return (offer for offer in offers if _differs(run, offer))


def _differs(run: Run, offer: Offer) -> bool:
    """True for a change that gives a different run; one that is refused says why when it is predicted."""
    try:
        return run.with_(**offer.change) != run
    except ForerunError:
        return True


def _of_batch(run: Run) -> Iterator[Offer]:
    size, steps = run.setup.batch_size_per_device, run.sharing.num_accumulation_steps
    if _trains(run) and steps % 2 == 0:
        change = {"batch_size": 2 * size, "accumulation": steps // 2}
        yield Offer(change=change, meaning="fewer, larger micro-steps of the same step")
    elif _trains(run):
        yield Offer(change={"batch_size": 2 * size}, meaning="a larger batch: check the learning rate")


def _of_sharing(run: Run) -> Iterator[Offer]:
    if run.cluster.num_devices == 1 or run.stack == "keras":  # TensorFlow has MirroredStrategy alone
        return
    for strategy, meaning in _STRATEGIES.items():
        if strategy is run.sharing.strategy or (strategy is Strategy.HSDP and run.cluster.num_nodes == 1):
            continue  # a layout of the user's own stays with its strategy
        # These two find the groups of devices themselves.
        free: dict[str, Any] = {"parallel": None} if strategy in (Strategy.AUTO, Strategy.HSDP) else {}
        yield Offer(change={"strategy": str(strategy), **free}, meaning=meaning)


def _of_devices(run: Run) -> Iterator[Offer]:
    for name in _OTHER_DEVICES:
        try:
            device = find_device(name)
        except ForerunError:  # a user's own catalogue may lack it
            continue
        if run.cluster.num_devices == 1 and device != run.cluster.device:
            meaning = f"{device.title} in place of the present device"
            yield Offer(change={"device": name}, meaning=meaning)


def with_workers(run: Run, busy_s: Interval) -> Iterator[Offer]:
    """As many workers as keep a device busy, each with a core, if storage and network allow it.

    Args:
        run: The run.
        busy_s: Its step where batches are always ready.
    """
    loader = run.loader
    assert loader is not None
    rate = run.batch_size_per_device / busy_s.value
    needed = workers_needed(replace(loader, num_cores=None), rate)
    if needed is None or (loader.num_workers and loader_rate_samples_per_s(loader) >= rate):
        return
    cores = {} if loader.num_cores is None else {"loader_cores": needed}
    yield Offer(
        change={"loader_workers": needed, **cores},
        meaning="batches are ready when the device asks for them; each worker keeps a core busy",
    )


def forgotten(estimate: Estimate) -> Iterator[Offer]:
    """Changes that cost a line of code and are often forgotten."""
    run = estimate.run
    setup, device = run.setup, run.cluster.device
    if device.kind != "gpu" or not _trains(run):
        return
    if _may_halve(run):
        yield Offer(change={"precision": half_of(device)}, meaning=", which changes the arithmetic")
    if setup.layout is Layout.NCHW and any(part.name == "convolution" for part in estimate.breakdown):
        yield Offer(change={"layout": "nhwc"}, meaning=": model.to(memory_format=torch.channels_last)")
    if not setup.compile:
        yield Offer(change={"compile": True}, meaning=": torch.compile(model)")


def smaller(estimate: Estimate) -> Iterator[Offer]:
    """Single changes that need less memory."""
    run, largest = estimate.run, _largest_batch(estimate)
    if largest:
        instead = f" instead of {run.setup.batch_size_per_device}"
        yield Offer(change={"batch_size": largest}, meaning=instead)
        change = _micro_steps(run, largest)
        if change:
            yield Offer(change=change, meaning=", the same batch in micro-steps")
    # Recomputation leaves the weights and what belongs to them.
    if run.setup.saving.recompute == "none" and _state_bytes(estimate) < estimate.device_memory_bytes:
        yield Offer(
            change={"recompute": "full"}, meaning=", which computes activations again in the backward pass"
        )
    if run.setup.precision in _LIGHT:
        half = half_of(run.cluster.device)
        words = f" instead of {run.setup.precision}, which changes the arithmetic"
        yield Offer(change={"precision": half}, meaning=words)


def together(estimate: Estimate) -> Iterator[Offer]:
    """Changes of a training that save memory together, those that ask least of the user first.

    Micro-steps that fit, where a sample fits; else single samples, recomputation and autocast; then weights in half
    precision; then adapters; then nf4 weights under them. Left out is what cannot fit by its weights, gradients and
    optimizer state alone.
    """
    run, largest = estimate.run, _largest_batch(estimate)
    if not _trains(run):
        return
    change = _micro_steps(run, largest or 1)
    if change and largest:
        yield Offer(change=change)
        return
    if run.setup.saving.recompute == "none":
        change["recompute"] = "full"
    divides = run.sharing.strategy is not Strategy.DDP or run.sharing.layout.divides_model
    shards = run.cluster.num_devices if divides else 1
    for added, bytes_per_parameter in _rungs(run, saves=bool(change)):
        change = change | added
        if bytes_per_parameter * estimate.num_parameters / shards < estimate.device_memory_bytes:
            adapters = ", where only the adapters learn" if "lora" in change else ""
            yield Offer(change=change, meaning=adapters)


def divided(estimate: Estimate) -> Iterator[Offer]:
    """FSDP over the devices that a run has, each with the whole state; then with recomputation and single samples."""
    run = estimate.run
    is_open = run.sharing.strategy in (Strategy.DDP, Strategy.ZERO1) and not run.sharing.layout.divides_model
    if run.cluster.num_devices == 1 or not (_trains(run) and is_open) or run.stack != "pytorch":
        return
    change: dict[str, Any] = {"strategy": str(Strategy.FSDP)}
    words = f", where {_STRATEGIES[Strategy.FSDP]}"
    yield Offer(change=change, meaning=words)
    for added in (
        {"recompute": "full"} if run.setup.saving.recompute == "none" else {},
        _micro_steps(run, 1),
    ):
        if added:
            change = change | added
            yield Offer(change=change, meaning=words)


def _rungs(run: Run, *, saves: bool) -> Iterator[tuple[dict[str, Any], float]]:
    """Changes beside the batch and recomputation, one after the other, with the bytes of a parameter."""
    setup, half = run.setup, half_of(run.cluster.device)
    pure = "bf16" if half == "amp-bf16" else "fp16"
    has_lora = setup.saving.lora_rank is not None
    is_pure = setup.precision in (Precision.BF16, Precision.FP16)
    # A trained weight has a gradient and the moments of Adam, a frozen one neither.
    copies = 1 if has_lora else 2 + 2 * ("adam" in setup.optimizer)
    if setup.precision in _LIGHT:
        yield {"precision": half}, _FULL_BYTES * copies
    elif saves:
        yield {}, (_HALF_BYTES if is_pure else _FULL_BYTES) * copies
    # A device without bf16 emulates it.
    if not is_pure or (setup.precision is Precision.BF16 and pure == "fp16"):
        yield {"precision": pure}, _HALF_BYTES * copies
    if not has_lora:
        yield {"lora": _LORA_RANK}, _HALF_BYTES
    if setup.saving.quantize is None:
        yield {"quantize": "nf4"}, _NF4_BYTES


def shared(estimate: Estimate) -> Iterator[Offer]:
    """Several devices of the kind that divide weights, gradients and optimizer state, where these take most memory."""
    run, state, memory = estimate.run, _state_bytes(estimate), estimate.device_memory_bytes
    if run.cluster.num_devices > 1 or not _trains(run) or state < memory / 2:
        return
    for number in _NUMBERS:
        if state / number < memory:
            words = f"--on {number}x{run.cluster.device.name} --strategy fsdp"
            change = {"num_devices": number, "strategy": "fsdp"}
            yield Offer(change=change, meaning=f"{words}, where {_STRATEGIES[Strategy.FSDP]}")
            if run.setup.saving.recompute == "none":
                yield Offer(change={**change, "recompute": "full"}, meaning=f"{words} --recompute full")


def larger_devices(estimate: Estimate) -> Iterator[Offer]:
    """Devices with more memory and a price, the lowest price first."""
    present, peak = estimate.run.cluster.device, estimate.peak_memory_bytes
    needed = max(present.memory_bytes, 0.0 if peak is None else peak.low)
    prices = load_prices()
    found = []
    for device in load_catalog().values():
        if device.kind == "gpu" and device.memory_bytes > needed:
            rental = cheapest_rental(prices, device.name, 1)
            if rental is not None:
                found.append((rental.usd_per_hour / rental.price.num_devices, device))
    for usd_per_hour, device in sorted(found, key=lambda pair: pair[0]):
        size = format_bytes(device.memory_bytes)
        words = f" with {size}, from ${usd_per_hour:.2f}/h"
        yield Offer(change={"device": device.name}, meaning=words)


def half_of(device: Device) -> str:
    """The mixed precision of a device: in bf16, or in fp16 where it has no bf16."""
    return "amp-bf16" if NumberFormat.BF16 in device.peak_flops_per_s else "amp"


def _micro_steps(run: Run, largest: int) -> dict[str, Any]:
    """The same batch in micro-steps of at most so many samples; empty if they are no larger."""
    steps, batch = run.sharing.num_accumulation_steps, run.setup.batch_size_per_device
    if batch <= largest:
        return {}
    # There is always one: single samples divide every batch.
    parts = next(parts for parts in range(2, batch + 1) if batch % parts == 0 and batch // parts <= largest)
    return {"batch_size": batch // parts, "accumulation": steps * parts}


def _largest_batch(estimate: Estimate) -> int:
    """Samples that surely fit on a device; 0 if not one does, or if nobody looked."""
    return 0 if estimate.max_batch_size is None else int(estimate.max_batch_size.low)


def _state_bytes(estimate: Estimate) -> float:
    """Weights, gradients and optimizer state of a device at the peak [bytes]."""
    return sum(part.size_bytes for part in estimate.memory_parts if part.name in _STATE)
