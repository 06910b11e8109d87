"""Advice from the parts of a step: one change with its expected gain."""

from __future__ import annotations

import math
from typing import Any

from forerun.script.profiling.profile import Advice, Profile

__all__ = ["advise", "fed_step_time_s"]

_NOTABLE = 0.15
_LARGE_HOST = 0.3
_UNCERTAINTY = 0.25  # uncertain share of a saving: workers compete with the step for memory and caches


def fed_step_time_s(
    *,
    compute_s: float,
    sample_cost_s: float,
    num_samples: float,
    num_workers: int,
    num_cores: float,
    core_s: float,
) -> float:
    """Time of a step while workers prepare its samples in parallel [s].

    T = max(compute, n c / W, core / C): the largest of the step itself, the workers, and all work over all cores.
    Without workers T = compute + n c.

    Args:
        compute_s: Time of the step without its input [s].
        sample_cost_s: c, time one core needs to prepare a sample [s].
        num_samples: n, number of samples in a step.
        num_workers: W, number of workers.
        num_cores: C, number of cores that workers and, on a processor, the step share.
        core_s: CPU time of the step and of its input together [s].

    >>> fed_step_time_s(
    ...     compute_s=1.0, sample_cost_s=0.5, num_samples=4, num_workers=2, num_cores=4, core_s=3.0)
    1.0
    """
    if num_workers == 0:
        return compute_s + num_samples * sample_cost_s
    return max(compute_s, num_samples * sample_cost_s / num_workers, core_s / num_cores)


def advise(profile: Profile) -> Advice:
    """Advice about the largest part of the step that a change can shorten."""
    parts, step_s = profile.parts, profile.step_time_s
    shares = {
        "input": parts.input_wait_s / step_s,
        "copy": parts.copy_s / step_s,
        "host": parts.host_s / step_s,
        "kernels": parts.kernels_s / step_s,
    }
    if (profile.busy_machine_fraction or 0.0) >= _NOTABLE:
        return _quiet_machine(profile, profile.busy_machine_fraction or 0.0)
    if shares["input"] >= _NOTABLE:
        return _more_workers(profile, shares["input"])
    if shares["copy"] >= _NOTABLE:
        return _pinned_memory(profile, shares["copy"])
    if shares["host"] >= _LARGE_HOST or (
        (profile.batch_size or math.inf) <= 16 and shares["host"] >= _NOTABLE
    ):
        return _larger_batch(profile, shares["host"])
    return _faster_kernels(profile, shares["kernels"])


def _more_workers(profile: Profile, share: float) -> Advice:
    num_workers = int(profile.loader.get("num_workers") or 0)
    samples = profile.batch_size or 1.0
    reason = f"{100 * share:.0f} % of a step is waiting for the loader, which has {num_workers} workers"
    cores = max(1, math.floor(profile.num_usable_cores))
    if num_workers >= cores:
        return Advice(
            bottleneck="input",
            reason=reason,
            change={},
            words=(
                f"all {cores} usable cores are at work on the input: make a sample cheaper (smaller stored images, a "
                "faster decoder, fewer transforms), or keep prepared samples"
            ),
        )
    compute_s = profile.step_time_s - profile.loader_wait_s
    # Workers that run already prepare a step's samples in at most their whole time.
    cost_s = (
        profile.loader_wait_s / samples if num_workers == 0 else profile.step_time_s * num_workers / samples
    )
    is_on_cpu = profile.device.startswith("cpu")
    core_s = profile.cpu_s_per_step if is_on_cpu else samples * cost_s

    def predicted_s(workers: int) -> float:
        return fed_step_time_s(
            compute_s=compute_s,
            sample_cost_s=cost_s,
            num_samples=samples,
            num_workers=workers,
            num_cores=profile.num_usable_cores,
            core_s=core_s,
        )

    best_s = min(predicted_s(workers) for workers in range(1, cores + 1))
    chosen = next(workers for workers in range(1, cores + 1) if predicted_s(workers) <= 1.02 * best_s)
    change: dict[str, Any] = {"num_workers": chosen, "persistent_workers": True}
    if not is_on_cpu:
        change["pin_memory"] = True
    return Advice(
        bottleneck="input",
        reason=reason,
        change=change,
        words=f"prepare samples in {chosen} worker process{'es' if chosen > 1 else ''} beside the step",
        **_gain(profile.step_time_s, predicted_s(chosen)),
    )


def _pinned_memory(profile: Profile, share: float) -> Advice:
    return Advice(
        bottleneck="copy",
        reason=f"{100 * share:.0f} % of a step is copying batches to the device with nothing else running",
        change={"pin_memory": True},
        words="pin the loader's memory, and copy with non_blocking=True, so that copies run beside kernels",
        **_gain(profile.step_time_s, profile.step_time_s - profile.parts.copy_s),
    )


def _quiet_machine(profile: Profile, share: float) -> Advice:
    return Advice(
        bottleneck="machine",
        reason=(
            "the machine is busy with other work: the script was ready to run and had no core in "
            f"{100 * share:.0f} % of its steps"
        ),
        change={},
        words=(
            "end the other work or wait for it, then profile again: no part of the step can be judged before; cores "
            "that are reserved (taskset, a container's quota) help as well"
        ),
    )


def _larger_batch(profile: Profile, share: float) -> Advice:
    batch, per_step = profile.samples_per_batch, profile.batches_per_step or 1.0
    reason = f"{100 * share:.0f} % of a step is neither kernels nor input: Python, launches, synchronising"
    if batch is None:
        return Advice(bottleneck="host", reason=reason, change={}, words="take more samples in a step")
    factor = 4
    # Host work is per batch: four times the samples share it.
    after_s = (factor * (profile.step_time_s - profile.parts.host_s) + profile.parts.host_s) / factor
    larger, rate = round(factor * batch), "with the learning rate scaled with it (forerun tune does both)"
    if per_step >= factor:
        rate = (
            f"and accumulate {per_step / factor:.3g} batches instead of {per_step:.3g}: a step keeps its samples and "
            "its learning rate"
        )
    elif per_step > 1.5:
        rate = f"of {per_step:.3g} batches a step, {rate}"
    return Advice(
        bottleneck="host",
        reason=reason,
        change={"batch_size": larger},
        words=f"use batch size {larger}, {rate}",
        **_gain(profile.step_time_s, after_s),
    )


def _faster_kernels(profile: Profile, share: float) -> Advice:
    reason = f"{100 * share:.0f} % of a step is computing: the device is used"
    on_gpu, has_images = profile.device.startswith("cuda"), bool(profile.has_images)
    change: dict[str, Any] = {"amp": "bf16"} if on_gpu else {}
    if has_images:
        change["channels_last"] = True
    tried = [*(["mixed precision"] if on_gpu else []), *(["channels_last memory"] if has_images else [])]
    gain = (
        "; 'forerun predict --precision amp' tells the gain"
        if on_gpu
        else "; what that gains on this processor must be measured"
    )
    return Advice(
        bottleneck="kernels",
        reason=reason,
        change=change,
        words=f"try {', then '.join([*tried, *([] if on_gpu else ['a larger batch'])])}{gain}",
    )


def _gain(before_s: float, after_s: float) -> dict[str, float]:
    """Expected ratio of speeds, and the ratio if a quarter less or more is saved."""
    saved_s = before_s - after_s

    def ratio(factor: float) -> float:
        return before_s / max(before_s - factor * saved_s, 1e-3 * before_s)

    return {
        "speedup": ratio(1.0),
        "speedup_low": ratio(1 - _UNCERTAINTY),
        "speedup_high": ratio(1 + _UNCERTAINTY),
    }
