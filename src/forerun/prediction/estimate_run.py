"""Puts step, memory, job, money and energy of a run together into one estimate, with all figures that follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, expm1
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from forerun.base.errors import InvalidSetupError
from forerun.base.units import format_duration_s
from forerun.cost.time.features import double_rates, peak_rates
from forerun.cost.time.power import device_power
from forerun.cost.time.rows import is_mostly_double
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Floats, Ints, expert_products
from forerun.prediction.estimate import BreakdownPart, ErrorSources, Estimate, Interval, Parallelism, Stage
from forerun.prediction.memory import RunMemory, StageMemory, run_memory
from forerun.prediction.models import other_calibration_note
from forerun.prediction.run_step import (
    LOADER_BOUND_NOTE,
    RunStep,
    activity_of,
    fed_interval,
    is_loader_bound,
    run_step,
    step_alone,
)
from forerun.prediction.step import (
    PreparedModel,
    StepPrediction,
    computed_as,
    format_note,
    is_order_of_magnitude,
    layer_times,
)
from forerun.question.devices.cluster import Cluster, example_network
from forerun.question.devices.device import Device, DeviceKind, NumberFormat
from forerun.question.job import Job
from forerun.question.post_training import PLAIN
from forerun.question.run import Run
from forerun.question.setup import Phase, Precision, TrainingSetup

if TYPE_CHECKING:
    from forerun.prediction.division import DividedStep
    from forerun.question.devices.prices import Rental

_LOADER_PART = "waiting for the data loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """The estimate of a run, and the step behind it with its parts."""

    estimate: Estimate
    step: RunStep


def estimate_run(
    model: PreparedModel,
    validation: PreparedModel | None,
    run: Run,
    weights: CostModel,
    *,
    with_largest: bool = True,
) -> RunEstimate:
    """The estimate of a run on one device or several.

    Time of a step, throughput, epoch, job, money and energy are those of all devices together, memory that of each.
    Steps of an epoch are those of the global batch. The validation pass is shared by the devices as well. A device that
    waits for others draws less, but is counted as if it worked.

    Args:
        model: The traced step.
        validation: The traced inference pass, needed if the job has validation samples.
        run: The run.
        weights: The cost model.
        with_largest: Whether the largest batch is asked for as well.

    Raises:
        UsageError: A link that is needed is not known, or an epoch has no step.
    """
    step = run_step(model, run, weights)
    use = tokens_and_use(model, run, step.step_s, step.alone.setup)
    setup, device, number = run.setup, run.cluster.device, run.cluster.num_devices
    times = _job_times(model, validation, run, step, weights)
    epochs = run.job.num_epochs if run.job else None
    duration = (times.job_time_s or times.epoch_time_s) if times else None
    price = hourly_price_usd(run, _num_writers(step)) if duration else None
    gradient_bytes = step.several.gradient_bytes if step.several else 0.0
    memory = run_memory(model, run, gradient_bytes, with_largest=with_largest)
    estimate = Estimate(
        run=run,
        model=model.graph.model,
        device=device.name,
        device_title=device.title,
        batch_size_per_device=setup.batch_size_per_device,
        num_devices=number,
        precision=Precision.FP64 if is_mostly_double(model.ops) else setup.precision,
        layout=setup.layout,
        compile=setup.compile,
        optimizer=setup.optimizer,
        phase=setup.phase,
        step_time_s=step.step_s,
        throughput_samples_per_s=step.step_s.inverse(run.batch_size_global),
        epoch_time_s=times.epoch_time_s if times else None,
        job_time_s=times.job_time_s if times else None,
        peak_memory_bytes=memory.peak,
        cost_usd=duration.scaled(price / 3600.0) if duration and price is not None else None,
        energy_j=_energy(model, run, step, duration),
        max_batch_size=memory.max_batch,
        fits=memory.verdict,
        breakdown=_breakdown(step),
        bound_by=_bound_by(run, step),
        provenance=step.alone.provenance,
        error_sources=ErrorSources(
            unknown_system=expm1(step.alone.system_log_width), cost_model=expm1(step.alone.model_log_width)
        ),
        published=step.alone.published,
        unsupported_ops=model.graph.unsupported_ops,
        top_layers=layer_times(
            step.several.model if step.several else model,
            step.alone,
            step.step_s.value,
            run.sharing.num_accumulation_steps,
        ),
        memory_parts=memory.parts,
        device_memory_bytes=memory.device_bytes,
        num_parameters=model.graph.num_parameters,
        flops_per_sample=model.graph.total_flops(setup.batch_size_per_device) / setup.batch_size_per_device,
        num_trainable_parameters=model.graph.num_trainable_parameters,
        num_steps=ceil(epochs * times.num_steps_per_epoch) if times and epochs is not None else None,
        **use,
        num_steps_per_epoch=times.num_steps_per_epoch if times else None,
        parallelism=_parallelism(run, step.several, memory.stages)
        if step.several and memory.stages
        else None,
        **_passes(model, run, step),
        shown_memory_bytes=memory.shown,
        notes=(
            *_notes_of_published(step.alone),
            *_notes(model, run, step.alone.setup, weights),
            *_missing(run, times, memory),
            *other_calibration_note(run, weights),
            *_notes_of_several(run, memory),
            *_notes_of_step(run, step),
            *([WINOGRAD_NOTE] if use["hfu"] is not None and use["hfu"].value > 1 else []),
        ),
    )
    return RunEstimate(estimate=estimate, step=step)


def _passes(model: PreparedModel, run: Run, step: RunStep) -> dict[str, Any]:
    """The passes of a composed step; nothing for plain training, whose laws need not be loaded."""
    if run.setup.post == PLAIN and run.setup.phase is not Phase.GENERATE:
        return {}
    from forerun.prediction.post_training import generation_of, passes_of

    if step.several is not None and step.several.passes:
        return {"passes": step.several.passes, "generation": step.several.generation}
    passes = passes_of(model, step.alone)
    return {"passes": passes, "generation": generation_of(model, run, step.alone, passes)}


def _job_times(
    model: PreparedModel,
    validation: PreparedModel | None,
    run: Run,
    step: RunStep,
    weights: CostModel,
) -> JobTimes | None:
    job = run.job
    if job is None:
        return None
    rest = job.num_samples % run.batch_size_global
    last_s = step.step_s
    # The last partial batch of several devices or micro-steps takes a whole step: its time is not known better.
    # A model of one batch size runs its last samples padded to that batch.
    if rest and not run.is_divided and model.graph.only_batch_size is None:
        partial = replace(run.setup, batch_size_per_device=rest)
        last_s = fed_interval(run, step_alone(model, run, partial, weights).step_s, rest)
    validation_s = None
    setup = run.validation_setup
    if validation is not None and setup is not None:
        validation_s = step_alone(validation, run, setup, weights).step_s
    return job_times(
        job,
        run.batch_size_global,
        step.step_s,
        last_s,
        validation_s,
        validation_batch_size=run.setup.batch_size_per_device * run.num_replicas,
    )


def hourly_price_usd(run: Run, num_writers: int = 0) -> float | None:
    """Price of all devices of a run: the one given, or the cheapest on demand in the table of prices [USD/h].

    Args:
        run: The run.
        num_writers: Devices besides its own that write answers.
    """
    number = run.cluster.num_devices + num_writers
    if run.price_usd_per_hour is not None:
        return number * run.price_usd_per_hour
    rental = _rental(run.cluster.device.name, number)
    return None if rental is None else rental.usd_per_hour


def _rental(device: str, number: int) -> Rental | None:
    from forerun.question.devices.prices import known_rental  # a step without a job costs nothing

    return known_rental(device, number)


def _num_writers(step: RunStep) -> int:
    return step.several.num_writers if step.several is not None else 0


def price_note(run: Run) -> str | None:
    """The price behind an amount of money with its date, or the way to give one; None where the asker gave it."""
    if run.price_usd_per_hour is not None:
        return None
    rental = _rental(run.cluster.device.name, run.cluster.num_devices)
    if rental is None:
        return "cost_usd needs the price of the device: --price 1.89/h"
    price, number = rental.price, f"{rental.num_instances} x " if rental.num_instances > 1 else ""
    return (
        f"price: ${rental.usd_per_hour:.2f}/h, {number}{price.provider} {price.instance} on demand, "
        f"read on {price.date} (--price for yours)"
    )


def _energy(model: PreparedModel, run: Run, step: RunStep, duration: Interval | None) -> Interval | None:
    several = step.several
    activity, fraction = activity_of(several.model if several else model, run, several or step.alone)
    # A device that waits for its loader draws less.
    activity *= step.busy_s.value / step.step_s.value
    found = training_energy_j(run.cluster.device, duration or step.step_s, activity, fraction)
    return None if found is None else found.scaled(run.cluster.num_devices + _num_writers(step))


def _breakdown(step: RunStep) -> tuple[BreakdownPart, ...]:
    """Parts that add up to the step, the longest first."""
    parts = step.alone.breakdown if step.several is None else step.several.parts
    waiting_s = step.step_s.value - step.busy_s.value
    if waiting_s <= 0:
        return parts
    return tuple(sorted([*parts, BreakdownPart(_LOADER_PART, waiting_s)], key=lambda part: -part.time_s))


def _parallelism(run: Run, step: DividedStep, memory: tuple[StageMemory, ...]) -> Parallelism:
    """The stages of a run with their time and memory, and what the layout costs."""
    layout = run.layout
    each = run.cluster.num_devices // layout.pipeline
    worst = max(memory, key=lambda stage: stage.peak_bytes.value)
    return Parallelism(
        tp=layout.tensor,
        cp=layout.context,
        dp=layout.data,
        pp=layout.pipeline,
        strategy=str(run.sharing.strategy),
        schedule=str(layout.schedule),
        virtual_stages=layout.virtual_stages,
        num_micro_steps=run.sharing.num_accumulation_steps,
        bubble_share=step.bubble_s / step.step_s.value,
        exposed_share=step.exposed_s / step.step_s.value,
        worst_stage=worst.stage,
        stages=tuple(
            Stage(
                stage=held.stage,
                ranks=(held.stage * each, (held.stage + 1) * each - 1),
                num_blocks=held.num_blocks,
                micro_step_s=time.total_s,
                peak_memory_bytes=held.peak_bytes,
            )
            for held, time in zip(memory, step.stages, strict=True)
        ),
    )


def _bound_by(run: Run, step: RunStep) -> str:
    waits = run.loader is not None and is_loader_bound(step.step_s.value, step.busy_s.value, run.loader)
    return "data loader" if waits else step.alone.bound_by


def _notes_of_step(run: Run, step: RunStep) -> Iterator[str]:
    if number := _num_writers(step):
        yield (
            f"{number} devices more write the answers of the next step meanwhile: a step is the longer of writing and "
            "training, and the refit; money and energy are for all"
        )
    if _bound_by(run, step) == "data loader":
        yield LOADER_BOUND_NOTE
    if step.several is not None and any(stage.blocked_s for stage in step.several.stages):
        yield (
            "the interval reaches to hosts that wait at every handover between stages (nanotron); --handover ahead, of "
            "tools whose hosts do not, leaves that out"
        )


_MOST_PUBLISHED = 3


def _notes_of_published(alone: StepPrediction) -> Iterator[str]:
    """Steps that others measured, the nearest batches first; of other boards, which these are."""
    by_source: dict[str, list[str]] = {}
    for step in alone.published[:_MOST_PUBLISHED]:
        words = f"{format_duration_s(step.at_this_batch_s)} (PyTorch {step.torch_version}, batch {step.batch_size})"
        by_source.setdefault(step.source, []).append(words)
    if named := [f"{', '.join(steps)} by {source}" for source, steps in by_source.items()]:
        yield f"measured by others, scaled to this batch: {'; '.join(named)}"
    elif alone.kin:
        boards = ", ".join(alone.kin[:_MOST_PUBLISHED]) + (" ..." if len(alone.kin) > _MOST_PUBLISHED else "")
        yield f"moved by published steps of this network on boards of the same architecture: {boards}"


_USUAL_SIZE = (3, 224, 224)


def _notes(model: PreparedModel, run: Run, computed: TrainingSetup, weights: CostModel) -> Iterator[str]:
    device, is_keras, asked = run.cluster.device, model.graph.is_keras, run.model
    if run.software.config is not None or run.software.recipe is not None:
        from forerun.question.recipes import recipe_notes

        yield from recipe_notes(run.software)
    yield from model.graph.notes
    tokens, is_told = model.graph.tokens_per_sample, asked.sequence_length or run.samples.lengths
    if run.software.config is not None and tokens is not None and not is_told:
        yield (
            f"{run.software.config} gives no length of samples: {tokens:,} tokens are assumed; --sequence-length or "
            "--lengths says otherwise"
        )
    if {"topk", "histc"} & set(model.graph.ops.kernel_names) and expert_products(model.graph.ops).any():
        load, layout = model.graph.expert_load, run.sharing.layout
        yield (
            "experts: tokens are assumed to spread evenly (--expert-load says otherwise)"
            if load is None
            else f"experts: the fullest of {layout.expert} devices that divide them has "
            f"{load.fullest(layout.expert):.2f} times the mean of their tokens"
            if layout.expert > 1
            else "experts: one device has all of them, so that unequal ones change nothing but what is dropped"
        )
    if (note := input_note(run, model.graph.input_shape)) is not None:
        yield note
    tells = not is_keras or is_mostly_double(model.ops)  # the substitutes of formats are PyTorch's
    if tells and (note := format_note(model, device, run.setup, computed)):
        yield note
    if is_order_of_magnitude(device, weights):
        what = (
            f"a {device.kind}"
            if device.kind is not DeviceKind.GPU
            else f"a GPU of this architecture ({device.architecture})"
        )
        command = f"forerun calibrate{' --framework keras' if is_keras else ''}"
        yield (
            f"the cost model was fitted without a measurement of {what}: the time is an order of magnitude; "
            f"calibrate with: {command}"
        )
    if is_keras:
        from forerun.prediction.stack import stack_notes

        yield from stack_notes(model.graph, run, weights)


def input_note(run: Run, shape: tuple[int, ...]) -> str | None:
    """The remark on images whose size nobody named: those of the dataset, or the model's own."""
    asked, own = run.model, run.job.image_size if run.job else None
    size, is_open = " x ".join(map(str, shape)), asked.image_size is None and asked.input_shape is None
    if own is not None and asked.image_size == own:
        return f"a sample is {size}, as the images of the dataset; --image-size N asks for another"
    if own is not None and is_open and len(shape) == 3 and own not in shape:
        return f"images of {own} x {own} are taken as resized to the model's {size}; --image-size N asks for another"
    if is_open and shape != _USUAL_SIZE and asked.model.startswith(("torchvision:", "timm:")):
        return f"a sample is {size}, as for the model's published weights; --image-size N asks for another"
    return None


def _missing(run: Run, times: JobTimes | None, memory: RunMemory) -> Iterator[str]:
    if times is None:
        yield "the times of an epoch and of the job, and the cost, need a dataset: --dataset NAME or --dataset-size N"
        yield "the energy is for one step"
    else:
        if times.job_time_s is None:
            yield "the time of the job needs the number of epochs: --epochs E"
        if (price := price_note(run)) is not None:
            yield price
        if times.job_time_s is None:
            yield "energy and cost are for one epoch"
    if memory.max_batch is None and memory.max_batch_reason:
        yield f"largest batch: {memory.max_batch_reason}"


# DGX-2 and HGX A100 join 16 boards, GB200 NVL72 the 72 of a rack.
_MOST_IN_A_NODE, _MOST_IN_A_RACK = 16, 72


def _notes_of_several(run: Run, memory: RunMemory) -> Iterator[str]:
    cluster, accumulation = run.cluster, run.sharing.num_accumulation_steps
    if accumulation > 1:
        yield (
            f"a step is {accumulation} micro-steps of {run.setup.batch_size_per_device} samples a device and one update"
        )
    if cluster.num_devices == 1:
        return
    links = [link.title for link in (cluster.intra_link, cluster.inter_link) if link is not None]
    where = f"{cluster.num_nodes} x {cluster.num_devices_per_node} devices over {' and '.join(links)}"
    copies = run.has_masters and run.setup.saving.master_weights is None
    yield (
        f"{where}, strategy {run.sharing.strategy}{', which updates fp32 copies of the weights' * copies}: "
        "the batch size is for one device; cost, energy and steps are for all devices"
    )
    if memory.max_batch is not None and not memory.stages:
        yield "the largest batch is for one device alone"
    if (note := node_note(cluster)) is not None:
        yield note


def node_note(cluster: Cluster) -> str | None:
    """The remark on more devices than one node has, where none other is named."""
    most = _MOST_IN_A_RACK if cluster.device.bus == "NVLink-C2C" else _MOST_IN_A_NODE
    if cluster.num_nodes > 1 or cluster.num_devices <= most:
        return None
    name = example_network(cluster.device) or " LINK"
    return f"all devices are assumed to be in one node; name several as --on NxMxDEVICE with --inter{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """Times of an epoch and of the job, and the steps of an epoch."""

    num_steps_per_epoch: int
    epoch_time_s: Interval
    job_time_s: Interval | None


def epoch_time_s(
    job: Job,
    batch_size_global: int | Ints,
    step_s: Floats,
    last_step_s: Floats,
    validation_step_s: Floats | float,
    *,
    validation_batch_size: int | Ints | None = None,
) -> Floats:
    """Times of an epoch [s], of the ends of one run or of arrays of runs whose last axis is that of the batch sizes.

    epoch = full steps * step + last partial step + validation steps * forward + checkpoint

    Args:
        job: The job.
        batch_size_global: Samples of one step of all devices.
        step_s: Time of a full step [s].
        last_step_s: Time of the step with the samples that are left over [s].
        validation_step_s: Forward time of a validation batch, 0 without validation [s].
        validation_batch_size: Samples of a validation batch of all devices, where it is another.
    """
    num_full = job.num_samples // batch_size_global
    # Products in place of branches: the sizes may be arrays.
    has_last = (job.num_samples % batch_size_global > 0) * (not job.drop_last)
    validated = batch_size_global if validation_batch_size is None else validation_batch_size
    num_validation = np.ceil(job.num_validation_samples / validated)
    steps_s: Any = num_full * step_s + has_last * last_step_s
    total: Floats = steps_s + num_validation * validation_step_s + job.checkpoint_s
    return total


def job_times(
    job: Job,
    batch_size_global: int,
    step_s: Interval,
    last_step_s: Interval,
    validation_step_s: Interval | None,
    *,
    validation_batch_size: int | None = None,
) -> JobTimes:
    """Epoch and job from the times of single steps, with intervals; arguments as of ``epoch_time_s``.

    job = start-up + epochs * epoch

    The interval of a step is one unknown factor, the same in every step, so it scales with the sum.

    Raises:
        InvalidSetupError: An epoch has no step.
    """
    num_full, rest = divmod(job.num_samples, batch_size_global)
    has_last = rest > 0 and not job.drop_last
    if not num_full and not has_last:
        raise InvalidSetupError(
            f"an epoch has no step: {job.num_samples} samples at a global batch of {batch_size_global} "
            "with the last partial batch dropped; choose a smaller batch"
        )

    ends_s = epoch_time_s(
        job,
        batch_size_global,
        np.asarray(step_s.ends),
        np.asarray(last_step_s.ends),
        0.0 if validation_step_s is None else np.asarray(validation_step_s.ends),
        validation_batch_size=validation_batch_size,
    )
    epoch = Interval(*ends_s.tolist())
    whole = epoch.scaled(job.num_epochs).shifted(job.startup_s) if job.num_epochs is not None else None
    return JobTimes(num_steps_per_epoch=num_full + has_last, epoch_time_s=epoch, job_time_s=whole)


_FORMATS = {
    Precision.FP32: NumberFormat.FP32,
    Precision.TF32: NumberFormat.TF32,
    Precision.AMP: NumberFormat.FP16,
    Precision.FP16: NumberFormat.FP16,
    Precision.AMP_BF16: NumberFormat.BF16,
    Precision.BF16: NumberFormat.BF16,
    Precision.FP8: NumberFormat.FP8,
    Precision.FP64: NumberFormat.FP64,
}


WINOGRAD_NOTE = (
    "use of the peak above 100 %: convolutions count as direct ones, and Winograd's do up to 2.5 times less"
)


class TokenFigures(TypedDict):
    """Figures of a step that depend on its work and its tokens; names as in ``Estimate``."""

    tokens_per_s: Interval | None
    tokens_per_s_per_device: Interval | None
    mfu: Interval | None
    hfu: Interval | None


def peak_of_precision(device: Device, precision: Precision) -> float | None:
    """Dense datasheet peak of the format in which a precision multiplies, None if the device has none [FLOP/s].

    In fp32 that of the matrix units where they have one (AMD's from MI100).
    """
    if precision is Precision.FP32:
        return peak_rates(device, precision)[1]
    return device.peak_flops_per_s.get(_FORMATS[precision])


def tokens_and_use(model: PreparedModel, run: Run, step_s: Interval, computed: TrainingSetup) -> TokenFigures:
    """Tokens per second and the use of the peak of a step.

    MFU = work of the products that training needs / (step time x devices x peak of the precision, in fp32 that of the
    larger part of the work); HFU counts what is computed again as well. The work is that of the traced products, so
    adapters count what they compute, and attention counts in full, without halving it for a causal mask (Chowdhery et
    al. 2022, appendix B). Convolutions count as direct ones: Winograd's do up to 2.5 times less, and may exceed one.

    Args:
        model: The traced step.
        run: The run.
        step_s: Time of its step, all micro-steps together [s].
        computed: The setup as PyTorch computes it on the device.
    """
    graph, device, precision = model.graph, run.cluster.device, run.setup.precision
    if precision is Precision.FP32:
        _, (known,) = computed_as(model, [computed])
        precision = known.precision
    number = run.cluster.num_devices
    tokens = None
    if graph.tokens_per_sample is not None:
        tokens = step_s.inverse(graph.tokens_per_sample * run.batch_size_global)
    batch = run.setup.batch_size_per_device
    passes_per_device = run.batch_size_global / batch / number  # below one where devices share a model
    useful, again = (
        passes_per_device * (constant + slope * batch)
        for constant, slope in (graph.model_flops, graph.recomputed_flops)
    )
    peak = peak_of_precision(device, precision)
    if is_mostly_double(model.ops):
        peak = (double_rates(device) or (None,))[0]
    is_known = peak is not None and useful > 0
    return TokenFigures(
        tokens_per_s=tokens,
        tokens_per_s_per_device=None if tokens is None else tokens.scaled(1 / number),
        mfu=step_s.inverse(useful / peak) if is_known and peak else None,
        hfu=step_s.inverse((useful + again) / peak) if is_known and peak else None,
    )


def training_energy_j(
    device: Device, duration_s: Interval, activity: float, compute_fraction: float
) -> Interval | None:
    """Energy of the device over a duration [J]; None if the cost model has no power figures.

    energy = power * duration, with the power of ``cost.time.power`` at this activity. The two intervals are taken as
    independent: relative half-widths add in squares. Host, cooling and network are left out.

    Args:
        device: The device.
        duration_s: How long it works.
        activity: Ideal time of the step's work and traffic over the time of the step.
        compute_fraction: Share of the work in that ideal time.
    """
    power = device_power(device, np.asarray([activity]), np.asarray([compute_fraction]))
    if power is None:
        return None
    watts, low_w, high_w = (float(end[0]) for end in (power.value_w, power.low_w, power.high_w))
    value = watts * duration_s.value

    def spread(share: float, duration: float) -> float:
        return float((share**2 + duration**2) ** 0.5)

    # Power and time are predicted apart, so their relative errors add as squares.
    below = spread(1 - low_w / watts, 1 - duration_s.low / duration_s.value)
    above = spread(high_w / watts - 1, duration_s.high / duration_s.value - 1)
    return Interval(value, value * max(0.0, 1 - below), value * (1 + above))
