"""The estimate of several devices from that of one."""

from __future__ import annotations

from dataclasses import replace

from forerun.communication.data_parallel import DataParallelStep
from forerun.hardware.cluster import Cluster
from forerun.prediction.estimate import BreakdownPart, Estimate, Interval, MemoryShare
from forerun.prediction.job_times import JobTimes, job_times
from forerun.prediction.scale import OneDevice, held_state, scaled_memory_bytes
from forerun.run.job import Job
from forerun.run.sharing import Sharing

__all__ = ["scaled_estimate"]

_PARTS = (
    ("exposed_s", "gradient synchronisation"),
    ("contention_s", "slowed by communication"),
    ("straggler_s", "waiting for other devices"),
    ("overhead_s", "work of several devices"),
)


def scaled_estimate(
    alone: Estimate,
    one: OneDevice,
    step_s: Interval,
    parts: DataParallelStep,
    cluster: Cluster,
    settings: Sharing,
    job: Job | None,
    *,
    validation_step_s: Interval | None = None,
) -> Estimate:
    """The estimate of all devices of a cluster.

    Time of a step, throughput, epoch, job, money, energy and memory are those of all devices together, memory that of
    each. Steps per epoch are those of the global batch. The validation pass is shared by the devices as well.

    Args:
        alone: The estimate of one device with the same batch.
        one: Its step taken apart.
        step_s: Step of all devices.
        parts: What it is made of.
        cluster: The devices.
        settings: How the work is shared.
        job: Dataset and epochs of the question.
        validation_step_s: Forward time of a validation batch of one device, None without validation.
    """
    number, ratio = cluster.num_devices, step_s.value / alone.step_time_s.value
    times = _times(alone, job, step_s, number, validation_step_s)
    duration = (times.job_time_s or times.epoch_time_s) if times else None
    alone_duration = alone.job_time_s or alone.epoch_time_s
    # A device that waits draws less, but is paid for: both are counted as if it worked.
    stretch = number * (duration.value / alone_duration.value if duration and alone_duration else ratio)
    grown = scaled_memory_bytes(one, settings, number) - one.peak_memory_bytes
    memory = alone.peak_memory_bytes
    return replace(
        alone,
        num_devices=number,
        step_time_s=step_s,
        throughput_samples_per_s=step_s.inverse(number * alone.batch_size_per_device),
        epoch_time_s=times.epoch_time_s if times else None,
        job_time_s=times.job_time_s if times else None,
        num_steps_per_epoch=times.num_steps_per_epoch if times else None,
        cost_usd=_stretched(alone.cost_usd, stretch, step_s, alone.step_time_s),
        energy_j=_stretched(alone.energy_j, stretch, step_s, alone.step_time_s),
        peak_memory_bytes=memory.shifted(grown) if memory else None,
        memory_parts=_memory_parts(alone, one, settings, number, grown),
        fits=_fits(memory, grown, alone),
        breakdown=_breakdown(alone, parts),
        notes=(*alone.notes, *_notes(cluster, settings)),
    )


def _stretched(own: Interval | None, stretch: float, step_s: Interval, alone_s: Interval) -> Interval | None:
    """A quantity that goes with time, on all devices: its interval grows as that of the step does."""
    if own is None:
        return None
    low = min(1.0, step_s.low / step_s.value * alone_s.value / alone_s.low)
    high = max(1.0, step_s.high / step_s.value * alone_s.value / alone_s.high)
    return Interval(own.value * stretch, own.low * stretch * low, own.high * stretch * high)


def _times(
    alone: Estimate,
    job: Job | None,
    step_s: Interval,
    num_devices: int,
    validation_step_s: Interval | None,
) -> JobTimes | None:
    if job is None or alone.epoch_time_s is None:
        return None
    # The last partial batch takes a whole step: its time is not known better.
    return job_times(job, num_devices * alone.batch_size_per_device, step_s, step_s, validation_step_s)


def _memory_parts(
    alone: Estimate, one: OneDevice, settings: Sharing, num_devices: int, grown: float
) -> tuple[MemoryShare, ...]:
    """What the memory of a device holds; the parts add up to its peak."""
    if not alone.memory_parts:
        return ()
    held = held_state(one, settings, num_devices)
    saved = {
        "weights": one.weight_bytes - held.weights_bytes,
        "gradients": one.held_gradient_bytes - held.gradients_bytes,
        "optimizer state": one.state_bytes - held.optimizer_bytes,
    }
    parts = [MemoryShare(p.name, p.size_bytes - saved.get(p.name, 0.0)) for p in alone.memory_parts]
    buffers = grown + sum(saved.get(p.name, 0.0) for p in alone.memory_parts)
    return (*parts, MemoryShare("gradient buckets", buffers)) if buffers > 0 else tuple(parts)


def _fits(memory: Interval | None, grown: float, alone: Estimate) -> str | None:
    if memory is None or alone.fits is None:
        return alone.fits
    if memory.low + grown > alone.device_memory_bytes:
        return "no"
    return "yes" if memory.high + grown <= alone.device_memory_bytes else "close"


def _breakdown(alone: Estimate, parts: DataParallelStep) -> tuple[BreakdownPart, ...]:
    shrink = parts.compute_s / alone.step_time_s.value
    own = [BreakdownPart(part.name, part.time_s * shrink) for part in alone.breakdown]
    added = [BreakdownPart(name, getattr(parts, key)) for key, name in _PARTS if getattr(parts, key) > 0]
    return tuple(sorted([*own, *added], key=lambda part: -part.time_s))


def _notes(cluster: Cluster, settings: Sharing) -> list[str]:
    links = [link.title for link in (cluster.intra_link, cluster.inter_link) if link is not None]
    where = f"{cluster.num_nodes} x {cluster.num_devices_per_node} devices over {' and '.join(links)}"
    return [
        f"{where}, strategy {settings.strategy}: the batch size is that of one device; "
        "cost, energy and steps are those of all",
        "the largest batch is that of one device alone",
    ]
