"""``forerun.advise``: the changes that make a run faster, or let it fit, each predicted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from forerun.answers import Answer
from forerun.api.models import TracedModels
from forerun.api.predict import estimates_of, run_from
from forerun.api.ways import changes_together, half_of
from forerun.errors import ForerunError
from forerun.hardware.cluster import Cluster
from forerun.hardware.device import Device
from forerun.hardware.finder import find_device
from forerun.optime.weights import CostModel
from forerun.prediction.estimate import Estimate, Interval
from forerun.prediction.input_pipeline import loader_rate_samples_per_s, workers_needed
from forerun.run.architectures import find_architecture
from forerun.run.input_pipeline import InputPipeline
from forerun.run.options import RunOptions
from forerun.run.run import Run
from forerun.run.saving import fused_kernels_of, own_loss_of
from forerun.run.setup import OptimizerImplementation, Phase, Precision
from forerun.run.sharing import Strategy

if TYPE_CHECKING:
    import torch

__all__ = ["AdvicePlan", "Change", "advise"]

_LEAST_GAIN = 0.01
_NUM_CHANGES = 3
_OTHER_DEVICES = ("h100-sxm", "h200-sxm", "b200")
_LORA_RANK = 16
_TOGETHER = "together they make the run fit this device"
_Offer = tuple[str, str, Callable[[], Run]]
"""Options, their meaning, and the changed run, which may be refused when it is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Answer):
    """One change of a run.

    Attributes:
        settings: The options that differ, as on the command line.
        meaning: What it does, and what it costs.
        gain: Samples per second over those of the run as it is, less 1.
        gain_low, gain_high: The same at the ends of the interval of the changed run; errors that both runs share are
            left out.
        samples_per_s: Throughput after the change.
        peak_memory_bytes: Memory of a device after the change.
        fits: "yes", "no" or "close".
        run: The changed run.
    """

    settings: str
    meaning: str
    gain: float
    gain_low: float
    gain_high: float
    samples_per_s: float
    peak_memory_bytes: Interval
    fits: str | None
    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvicePlan(Answer):
    """The changes that help a run most.

    Attributes:
        run: The run as it is.
        model, device: Its model and devices.
        step_time_s: Its step.
        samples_per_s: Its throughput.
        peak_memory_bytes: Memory of a device.
        fits: "yes", "no" or "close".
        changes: At most three changes, the best first.
        num_tried: Changes that were predicted.
        notes: What a reader must know.
    """

    run: Run
    model: str
    device: str
    step_time_s: Interval
    samples_per_s: float
    peak_memory_bytes: Interval
    fits: str | None
    changes: tuple[Change, ...]
    num_tried: int
    notes: tuple[str, ...]


def advise(
    model: str | torch.nn.Module | Run,
    *,
    device: str | Device | Cluster | None = None,
    cost_model: CostModel | None = None,
    use_cache: bool = True,
    **options: Unpack[RunOptions],
) -> AdvicePlan:
    """The three changes that help a run most, each by itself, with its predicted gain and memory.

    Of a run that does not fit, several changes together that make it fit the device are tried first. Tried
    are recomputation, a larger batch, half precision, torch.compile, fused attention, optimizer and kernels, another
    strategy or layout, adapters (LoRA), workers of the loader, and other devices. A change must fit, unless
    nothing does. The global batch stays where the change says nothing else.

    Args:
        model: As in ``predict``.
        device: As in ``predict``.
        cost_model: As in ``predict``.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the run as it is, see ``forerun.RunOptions``.

    Raises:
        UsageError: The question must be changed.
        FailureError: The model could not be built or traced.
    """
    run = run_from(model, device, options)
    models = TracedModels(use_cache=use_cache)
    now = estimates_of([run], models, cost_model)[0].estimate
    tried: list[Change] = []
    changes = _changes(run)
    if run.loader is not None:
        busy = estimates_of([replace(run, loader=None)], models, cost_model)[0].estimate.step_time_s
        changes = itertools.chain(_changes_of_loader(run, run.loader, busy), changes)
    if now.fits == "no":
        changes = itertools.chain(_changes_together(run, now), changes)
    for settings, meaning, change in changes:
        if meaning == _TOGETHER and any(
            before.meaning == _TOGETHER and before.fits != "no" for before in tried
        ):
            continue  # what asks less of the user fits
        try:
            changed = change()
            found = estimates_of([changed], models, cost_model if changed.cluster == run.cluster else None)[
                0
            ].estimate
        except ForerunError:
            continue  # a change that this model or device does not allow
        tried.append(_change(settings, meaning, changed, now, found))
    helpful = [change for change in tried if change.gain > _LEAST_GAIN and change.fits == "yes"]
    if now.fits == "no":
        helpful = [change for change in tried if change.fits != "no"]
    assert now.peak_memory_bytes is not None
    return AdvicePlan(
        run=run,
        model=run.model.model,
        device=run.cluster.spec,
        step_time_s=now.step_time_s,
        samples_per_s=now.throughput_samples_per_s.value,
        peak_memory_bytes=now.peak_memory_bytes,
        fits=now.fits,
        changes=_best(helpful),
        num_tried=len(tried),
        notes=_notes(now, tried),
    )


def _best(changes: list[Change]) -> tuple[Change, ...]:
    """The changes that help most; of several together that make a run fit, always the first."""
    ordered = sorted(changes, key=lambda change: -change.gain)
    together = [change for change in ordered if change.meaning == _TOGETHER]
    others = [change for change in ordered if change.meaning != _TOGETHER]
    return (*together, *others)[:_NUM_CHANGES]


def _change(settings: str, meaning: str, run: Run, now: Estimate, found: Estimate) -> Change:
    before, after = now.throughput_samples_per_s.value, found.throughput_samples_per_s
    assert found.peak_memory_bytes is not None
    gain = after.value / before - 1
    own = (found.step_time_s.high / found.step_time_s.low) / (now.step_time_s.high / now.step_time_s.low)
    # Both predictions rest on the same cost model: the gain is uncertain by what the change adds, and a tenth of
    # itself.
    spread = max(0.1 * abs(gain), abs(own**0.5 - 1))
    return Change(
        settings=settings,
        meaning=meaning,
        gain=gain,
        gain_low=gain - spread,
        gain_high=gain + spread,
        samples_per_s=after.value,
        peak_memory_bytes=found.peak_memory_bytes,
        fits=found.fits,
        run=run,
    )


def _changes_together(run: Run, now: Estimate) -> Iterator[_Offer]:
    """Several changes that make a run fit the device that it is asked for."""
    fields = run.json_fields()
    model = run.module if run.module is not None else fields["model"]
    settings = {
        name: value for name, value in fields.items() if name not in ("model", "device", "intra", "inter")
    }
    for words, change in changes_together(settings, now):
        changed = partial(Run.of, model, device=run.cluster, **{**settings, **change})
        yield words.removeprefix("together "), _TOGETHER, changed


def _changes(run: Run) -> Iterator[_Offer]:
    """Changes with their options and their meaning."""
    yield from _changes_of_setup(run)
    yield from _changes_of_batch(run)
    if run.cluster.num_devices > 1 and run.stack != "keras":  # TensorFlow has MirroredStrategy alone
        yield from _changes_of_sharing(run)
    for name in _OTHER_DEVICES:
        try:
            device = find_device(name)
        except ForerunError:
            continue
        if device != run.cluster.device and run.cluster.num_devices == 1:
            yield (
                f"--on {name}",
                f"{device.title} in place of the present device",
                partial(replace, run, cluster=replace(run.cluster, device=device)),
            )


def _set(run: Run, **fields: Any) -> Run:
    return replace(run, setup=replace(run.setup, **fields))


def _save(run: Run, **fields: Any) -> Run:
    return _set(run, saving=replace(run.setup.saving, **fields))


def _changes_of_setup(run: Run) -> Iterator[_Offer]:
    setup = run.setup
    if not setup.precision.is_half:
        half = half_of(run.cluster.device)
        yield (
            f"--precision {half}",
            "products in bf16 with fp32 weights; the range of fp32 is kept"
            if half == Precision.AMP_BF16
            else "products in fp16 with fp32 weights; losses are scaled (GradScaler)",
            partial(_set, run, precision=Precision(half)),
        )
    if not setup.compile:
        yield (
            "--compile",
            "XLA joins small operations (jit_compile=True); the first step takes longer"
            if run.stack == "keras"
            else "torch.compile joins small operations; the first step takes minutes",
            partial(_set, run, compile=True),
        )
    if not setup.fused_attention:
        yield (
            "--fused-attention",
            "attention as one kernel, which keeps no matrix of scores",
            partial(_set, run, fused_attention=True),
        )
    if setup.phase is not Phase.TRAIN:
        return
    has_fused = setup.optimizer != "none" and run.stack != "keras"  # Keras 3 has no such kernels
    if has_fused and setup.optimizer_implementation is not OptimizerImplementation.FUSED:
        yield (
            "--optimizer-implementation fused",
            "the update as one kernel; the same arithmetic",
            partial(_set, run, optimizer_implementation=OptimizerImplementation.FUSED),
        )
    if not setup.saving.fused_kernels and _may_have_fused_parts(run):
        library = "liger" if setup.saving.lora_rank is None else "unsloth"
        yield (
            f"--fused-kernels {library}",
            "norms, rotary embeddings, MLPs and the loss as one kernel each; the same arithmetic",
            partial(_save, run, fused_kernels=fused_kernels_of(library), loss=own_loss_of(library)),
        )
    recompute = setup.saving.recompute
    if recompute != "none":
        yield (
            "--recompute none",
            "nothing is computed twice; needs the memory of all activations",
            partial(_save, run, recompute="none"),
        )
    if recompute not in ("none", "selective"):
        yield (
            "--recompute selective",
            "products and attention are kept, the rest is computed again",
            partial(_save, run, recompute="selective"),
        )
    if recompute != "full":
        yield (
            "--recompute full",
            "activations are computed again: slower, and far less memory",
            partial(_save, run, recompute="full"),
        )
    if setup.saving.lora_rank is None and setup.precision.is_half and run.sharing.layout is None:
        yield (
            f"--lora {_LORA_RANK}",
            "trains adapters only: another training, for fine-tuning",
            partial(_save, run, lora_rank=_LORA_RANK),
        )


def _may_have_fused_parts(run: Run) -> bool:
    """True for a model that may be one of Transformers; building it tells."""
    known = find_architecture(run.model.model)
    if known is not None:
        return known.is_language_model
    return run.model.model.startswith("hf:") or (run.module is not None and run.stack != "keras")


def _changes_of_loader(run: Run, loader: InputPipeline, busy_s: Interval) -> Iterator[_Offer]:
    """As many workers as keep a device busy, each with a core, if storage and network allow it."""
    own = replace(loader, num_cores=None)
    rate = run.batch_size_per_device / busy_s.value
    needed = workers_needed(own, rate)
    if needed is None or (loader.num_workers and loader_rate_samples_per_s(loader) >= rate):
        return
    cores = None if loader.num_cores is None else float(needed)
    words = f"--loader-workers {needed}" + (f" --loader-cores {needed}" if cores is not None else "")
    yield (
        words,
        "batches are ready when the device asks for them; each worker keeps a core busy",
        partial(replace, run, loader=replace(loader, num_workers=needed, num_cores=cores)),
    )


def _changes_of_batch(run: Run) -> Iterator[_Offer]:
    size, steps = run.setup.batch_size_per_device, run.sharing.num_accumulation_steps
    if run.setup.phase is not Phase.TRAIN:
        return
    if steps % 2 == 0:
        yield (
            f"--batch-size {2 * size} --accumulation {steps // 2}",
            "fewer, larger micro-steps of the same step",
            partial(
                replace,
                run,
                setup=replace(run.setup, batch_size_per_device=2 * size, keeps_gradients=steps > 2),
                sharing=replace(run.sharing, num_accumulation_steps=steps // 2),
            ),
        )
    else:
        yield (
            f"--batch-size {2 * size}",
            "a larger batch: check the learning rate",
            partial(_set, run, batch_size_per_device=2 * size),
        )


def _changes_of_sharing(run: Run) -> Iterator[_Offer]:
    meanings = {
        Strategy.DDP: "every device holds all weights and state",
        Strategy.ZERO1: "the state of the optimizer is divided",
        Strategy.FSDP: "weights, gradients and state are divided",
        Strategy.HSDP: "FSDP inside nodes, replicas between them",
        Strategy.AUTO: "the layout that forerun layouts finds for this global batch",
    }
    for strategy, meaning in meanings.items():
        if strategy is run.sharing.strategy or (strategy is Strategy.HSDP and run.cluster.num_nodes == 1):
            continue
        layout = None if strategy in (Strategy.AUTO, Strategy.HSDP) else run.sharing.layout
        yield (
            f"--strategy {strategy}",
            meaning,
            partial(replace, run, sharing=replace(run.sharing, strategy=strategy, layout=layout)),
        )


def _notes(now: Estimate, tried: list[Change]) -> tuple[str, ...]:
    notes = [f"{len(tried)} changes were predicted; gains of several do not add up"]
    if now.fits == "no":
        notes.append("the run does not fit as it is: changes that fit are shown, whatever they cost")
    else:
        full = [change for change in tried if change.gain > _LEAST_GAIN and change.fits != "yes"]
        notes += [
            f"{change.settings} would be {100 * change.gain:.0f} % faster, but does not surely fit"
            for change in full[:3]
        ]
    return tuple(notes)
