"""Speed and memory of a configuration before it runs: from a profiled run and a cost model, and from earlier trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.base.numerics import relative_coefficients
from forerun.script.diagnosis.causes import fed_step_time_s
from forerun.script.profiling.profile import Profile
from forerun.script.tuning.space import KNOBS, Space

_LEAST_FIXED_SHARE = 0.25
"""Share of a step's kernels that does not shrink with the batch: launches and short loops."""
_MOST_COMBINATIONS = 4096
_SAME_RATE = 0.02
"""Predicted rates that differ by less count as equal: all devices are equal if the step waits for the loader."""


def expected_rate(
    profile: Profile, values: Mapping[str, Any], base: Mapping[str, Any], steps: DeviceSteps | None = None
) -> float:
    """Samples per second of a configuration, from the input pipeline beside the device's part of a step.

    The loader takes c per sample. The device's part is T(b) = h + k ((1 - f) b / b0 + f), affine in the batch: h is the
    host's part, k the kernels' part, f the fixed share of the kernels. With a prediction it is T0 times the predicted
    step over the predicted step of the script as it is, with T0 the profiled step without its wait for the loader.

    Args:
        profile: Profile of the script as it is.
        values: Values of the configuration.
        base: The script's own values.
        steps: Predicted steps of the script's model; a configuration they lack takes the affine law.
    """
    samples = profile.batch_size or float(base.get("batch_size") or 1)
    # A step may hold several batches of the loader; all of them grow with the knob.
    own_batch = float(base.get("batch_size") or samples)
    growth = float(values.get("batch_size", own_batch)) / own_batch
    batch = samples * growth
    own_workers = int(profile.loader.get("num_workers") or 0)
    num_workers = int(values.get("num_workers", own_workers))
    # Workers that run already hide what a sample costs: it is at most their whole time, and too much is told.
    cost_s = (
        profile.loader_wait_s / samples if own_workers == 0 else profile.step_time_s * own_workers / samples
    )
    relative = None if steps is None else steps.relative_time(values)
    compute_s = (
        _affine_s(profile, growth * _ratio("image_size", values, base) ** 2)
        if relative is None
        else relative * _device_s(profile, num_workers)
    )
    is_on_cpu = profile.device.startswith("cpu")
    step_s = fed_step_time_s(
        compute_s=compute_s,
        sample_cost_s=cost_s,
        num_samples=batch,
        num_workers=num_workers,
        num_cores=profile.num_usable_cores,
        core_s=batch * cost_s + (compute_s if is_on_cpu else 0.0),
    )
    return batch / step_s


def _ratio(name: str, values: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """A value relative to the script's own; 1 where that is not known."""
    own = base.get(name)
    return float(values.get(name, own)) / float(own) if own else 1.0


def _affine_s(profile: Profile, growth: float) -> float:
    kernels_s = profile.step_time_s - profile.loader_wait_s - profile.parts.host_s
    return profile.parts.host_s + kernels_s * ((1 - _LEAST_FIXED_SHARE) * growth + _LEAST_FIXED_SHARE)


def _device_s(profile: Profile, num_workers: int) -> float:
    """The profiled step without its wait for the loader [s]."""
    waited_for_s = profile.step_time_s - profile.loader_wait_s
    if num_workers == 0:
        return waited_for_s
    # A GPU works off its queue while the script waits for the loader; with workers only that wait is seen.
    return max(waited_for_s, profile.parts.kernels_s + profile.parts.copy_s)


def first_guesses(
    space: Space,
    profile: Profile,
    base: Mapping[str, Any],
    steps: DeviceSteps | None = None,
    *,
    num_guesses: int = 4,
) -> list[dict[str, Any]]:
    """Configurations worth trying first, the most promising before the others.

    The workers and batch sizes, with a prediction also precisions, memory orders and image sizes, that are expected to
    be fastest, with all other settings that usually help and, on a processor, threads that leave the workers their
    cores; the same workers and batch sizes with the other settings as in the script; then a smaller batch, which often
    trains better at nearly the same speed. Configurations without a prediction, or predicted not to fit in the device's
    memory, are left out.
    """
    names = ("num_workers", "batch_size") if steps is None else ("num_workers", *PREDICTED_KNOBS)
    neutral = _script_values(space, base)
    known = {p: KNOBS[p.name].helpful for p in space.parameters if p.name in KNOBS and p.name not in names}
    helping = {p.name: value for p, value in known.items() if value is not None and p.holds(value)}
    ranked = _ranked(space, profile, base, steps, names)
    if not ranked:
        return [{**neutral, **helping}] if helping else []
    best = ranked[0]
    helped = [
        {**neutral, **helping, **_fitting_threads(space, profile, values), **values} for values in ranked
    ]
    found = [helped[0], {**neutral, **best}]
    # The second guess is of another batch size: if memory or accuracy refuse the first, all like it fail with
    # it.
    smaller = [v for v in helped if v.get("batch_size", 0) < best.get("batch_size", 0)]
    found += [*smaller[:1], *helped[1:]]
    unique: list[dict[str, Any]] = []
    for guess in found:
        if guess not in unique:
            unique.append(guess)
    return unique[:num_guesses]


def _ranked(
    space: Space,
    profile: Profile,
    base: Mapping[str, Any],
    steps: DeviceSteps | None,
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """Combinations of the modelled parameters, the fastest first."""
    modelled = [p for p in space.parameters if p.name in names and p.candidates]
    if not modelled:
        return []
    neutral = _script_values(space, base)
    combinations = itertools.islice(itertools.product(*(p.candidates for p in modelled)), _MOST_COMBINATIONS)
    guesses = [dict(zip((p.name for p in modelled), values, strict=True)) for values in combinations]
    if steps is None:
        return sorted(guesses, key=lambda values: -expected_rate(profile, {**neutral, **values}, base))
    whole = [{**neutral, **values} for values in guesses]
    rates = [expected_rate(profile, values, base, steps) for values in whole]
    usable = [
        index
        for index, values in enumerate(whole)
        if steps.relative_time(values) is not None and steps.fits(values)
    ]

    # Among equally fast configurations, the one with fewest changes comes first: it best keeps the script's accuracy.
    def order(index: int) -> tuple[int, int, float]:
        place = round(math.log(rates[index]) / _SAME_RATE)
        point = device_point(whole[index], steps.own)
        num_changes = sum(getattr(point, name) != getattr(steps.own, name) for name in PREDICTED_KNOBS)
        return -place, num_changes, -rates[index]

    return [guesses[index] for index in sorted(usable, key=order)]


def _script_values(space: Space, base: Mapping[str, Any]) -> dict[str, Any]:
    """The script's own value of each parameter, the first candidate if that is not in the space."""
    return {
        p.name: own if p.holds(own := base.get(p.name)) else p.candidates[0]
        for p in space.parameters
        if p.candidates
    }


def _fitting_threads(space: Space, profile: Profile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Threads for a processor's kernels that leave a core to each worker: more would only wait for each other."""
    parameter = next((p for p in space.parameters if p.name == "num_threads" and p.candidates), None)
    num_workers = int(values.get("num_workers", 0))
    if parameter is None or not num_workers or not profile.device.startswith("cpu"):
        return {}
    num_left = max(1.0, profile.num_usable_cores - num_workers)
    fitting = [value for value in parameter.candidates if value <= num_left]
    return {"num_threads": max(fitting)} if fitting else {}


_WORKER_BYTES = 200e6
"""Memory assumed for a forked worker before one has run: it copies the pages of its parent that it touches."""

_MARGIN = 1.10
_NEAR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Memory of a trial.

    Attributes:
        values: Values of the trial's parameters.
        start_bytes: Memory before the first step [bytes].
        peak_bytes: Peak memory; for a trial that the limit ended, the limit [bytes].
    """

    values: Mapping[str, Any]
    start_bytes: float
    peak_bytes: float


def predicted_memory_bytes(
    points: Sequence[MemoryPoint], values: Mapping[str, Any], base: Mapping[str, Any]
) -> float | None:
    """Upper estimate of the peak of a configuration [bytes]; None before any trial has run.

    peak = start + a x + w n + v n x, with x the pixels of a batch relative to the script's own and n the workers.
    Tensors of a step grow with its batch, each worker has a process and prefetched batches. With a single
    batch size seen, all memory after the start is taken to grow with the batch, which is too much rather than too
    little; with two or more the terms are fitted by non-negative least squares on relative errors. The margin is a
    tenth, and grows with the square root of the batch over the largest batch that ran.
    """
    if not points:
        return None
    sizes = np.array([_relative_batch(point.values, base) for point in points])
    workers = np.array([float(point.values.get("num_workers", 0)) for point in points])
    peaks = np.array([point.peak_bytes for point in points])
    start = float(np.median([point.start_bytes for point in points]))
    size, num_workers = _relative_batch(values, base), float(values.get("num_workers", 0))
    worker_bytes = 0.0 if np.any(workers) else _WORKER_BYTES
    if len(set(sizes)) < 2:
        growth = float(np.max((peaks - start - _WORKER_BYTES * workers) / sizes))
        return _MARGIN * (start + max(0.0, growth) * size + _WORKER_BYTES * num_workers)
    design = np.column_stack([np.ones_like(sizes), sizes, workers, workers * sizes])
    weights = relative_coefficients(design, peaks)
    expected = float(np.array([1.0, size, num_workers, num_workers * size]) @ weights)
    expected += worker_bytes * num_workers
    # A configuration that ran is a floor for one that is larger in every respect.
    below = (sizes <= size) & (workers <= num_workers)
    floor = float(peaks[below].max()) if below.any() else 0.0
    beyond = max(1.0, size / (_NEAR * float(sizes.max())))
    return float(max(expected * (1 + (_MARGIN - 1) * beyond**0.5), floor))


def _relative_batch(values: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """Pixels of a batch relative to the script's own."""
    return _ratio("batch_size", values, base) * _ratio("image_size", values, base) ** 2


PREDICTED_KNOBS = ("batch_size", "amp", "channels_last", "image_size")
"""Knobs that change the device's work in a step and that the cost model knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePoint:
    """Settings on which the device's part of a step depends; the fields are knobs.

    Attributes:
        batch_size: Number of samples of a step on one device.
        amp: Mixed precision: ``off``, ``bf16`` or ``fp16``.
        channels_last: True if images are in the memory order channels_last.
        image_size: Height and width of images; None for the model's own size [pixels].
    """

    batch_size: int
    amp: str = "off"
    channels_last: bool = False
    image_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSteps:
    """Predicted steps of a model, over the points of a space.

    Attributes:
        source: Name of the model that predicts the steps, in a few words.
        own: Point of the script as it is.
        step_s: Step time by point [s]; a point without an entry is not known.
        peak_bytes: Upper end of the peak memory by point [bytes].
        memory_bytes: Memory of the device; None to reject nothing by memory [bytes].
    """

    source: str
    own: DevicePoint
    step_s: Mapping[DevicePoint, float]
    peak_bytes: Mapping[DevicePoint, float]
    memory_bytes: float | None = None

    def relative_time(self, values: Mapping[str, Any]) -> float | None:
        """Time of a step over that of the script as it is, T(values) / T(own); None if it is not known."""
        step_s = self.step_s.get(device_point(values, self.own))
        return None if step_s is None else step_s / self.step_s[self.own]

    def fits(self, values: Mapping[str, Any]) -> bool:
        """True if the upper end of the predicted peak fits in the device's memory, or the point is the script's own."""
        point = device_point(values, self.own)
        peak_bytes = self.peak_bytes.get(point)
        if point == self.own or peak_bytes is None or self.memory_bytes is None:
            return True
        return peak_bytes <= self.memory_bytes


def device_point(values: Mapping[str, Any], own: DevicePoint) -> DevicePoint:
    """The point of a configuration; a knob it does not set keeps the script's value."""
    return replace(own, **{name: values[name] for name in PREDICTED_KNOBS if name in values})


def script_point(profile: Profile, base: Mapping[str, Any], image_size: int | None) -> DevicePoint | None:
    """The point of the script as it is; None if its batch size is not known.

    Args:
        profile: Profile of the script as it is.
        base: The script's own values that are known.
        image_size: Height and width of the script's images, if the base lacks them; None for the model's own size
            [pixels].
    """
    batch_size = base.get("batch_size") or profile.loader.get("batch_size") or profile.batch_size
    if not batch_size:
        return None
    amp = base.get("amp", "off")
    return DevicePoint(
        batch_size=round(batch_size),
        amp=amp if amp in KNOBS["amp"].choices else "off",
        channels_last=base.get("channels_last") is True,
        image_size=base.get("image_size") or image_size,
    )


def device_points(space: Space, own: DevicePoint) -> dict[str, tuple[Any, ...]]:
    """The values of each knob of a point, in order: the candidates of the space, and the script's own."""
    axes = {}
    for name in PREDICTED_KNOBS:
        parameter = space.parameter(name)
        listed = () if parameter is None else parameter.candidates
        axes[name] = tuple(dict.fromkeys((*listed, getattr(own, name))))
    return axes
