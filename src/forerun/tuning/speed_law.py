"""Which configurations a cost model expects to be fast, from one profiled run of the script as it is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from forerun.profiling.advice import fed_step_time_s
from forerun.profiling.profile import Profile
from forerun.tuning.space import Space

__all__ = ["expected_rate", "first_guesses"]

_USUALLY_GOOD: Mapping[str, Any] = {
    "persistent_workers": True,
    "pin_memory": True,
    "channels_last": True,
    "optimizer_implementation": "fused",
    "cudnn_benchmark": True,
    "prefetch_factor": 4,
}
_LEAST_FIXED_SHARE = 0.25
"""Part of a step's kernels that small batches do not shrink: launches and short loops."""
_MOST_COMBINATIONS = 4096


def expected_rate(profile: Profile, values: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    """Samples a second of a configuration, by the input pipeline and a step that is affine in its batch.

    T(b) = h + k ((1 - f) b / b0 + f) beside a loader that takes c a sample: h the host's part, k the kernels', f what
    is fixed in them.

    Args:
        profile: Of the script as it is.
        values: Configuration.
        base: The script's own values.
    """
    samples = profile.batch_size or float(base.get("batch_size") or 1)
    batch = float(values.get("batch_size", samples))
    pixels = float(values.get("image_size", 1)) / float(base.get("image_size") or values.get("image_size", 1))
    own_workers = int(profile.loader.get("num_workers") or 0)
    cost_s = (
        profile.loader_wait_s / samples if own_workers == 0 else profile.step_time_s * own_workers / samples
    )
    kernels_s = profile.step_time_s - profile.loader_wait_s - profile.parts.host_s
    growth = batch / samples * pixels**2
    compute_s = profile.parts.host_s + kernels_s * ((1 - _LEAST_FIXED_SHARE) * growth + _LEAST_FIXED_SHARE)
    is_on_cpu = profile.device.startswith("cpu")
    step_s = fed_step_time_s(
        compute_s=compute_s,
        sample_cost_s=cost_s,
        num_samples=batch,
        num_workers=int(values.get("num_workers", own_workers)),
        num_cores=profile.num_usable_cores,
        core_s=batch * cost_s + (compute_s if is_on_cpu else 0.0),
    )
    return batch / step_s


def first_guesses(
    space: Space, profile: Profile, base: Mapping[str, Any], *, num_guesses: int = 4
) -> list[dict[str, Any]]:
    """Configurations worth trying first, the most promising before the others.

    The batch sizes and workers that the model expects to be fastest, with all settings that usually help and, on a
    processor, threads that leave the workers their cores; the same with these settings as the script has them; then
    half the batch size, which often trains better at nearly the speed.
    """
    modelled = [p for p in space.parameters if p.name in ("batch_size", "num_workers") and p.values]
    neutral = {p.name: _own_value(p.values, base.get(p.name)) for p in space.parameters if p.values}
    helping = {
        p.name: _USUALLY_GOOD[p.name]
        for p in space.parameters
        if p.name in _USUALLY_GOOD and _USUALLY_GOOD[p.name] in p.values
    }
    combinations = itertools.islice(itertools.product(*(p.values for p in modelled)), _MOST_COMBINATIONS)
    guesses = [dict(zip((p.name for p in modelled), values, strict=True)) for values in combinations]
    ranked = sorted(guesses, key=lambda values: -expected_rate(profile, {**neutral, **values}, base))
    if not ranked:
        return [{**neutral, **helping}] if helping else []
    best = ranked[0]
    helped = [
        {**neutral, **helping, **_fitting_threads(space, profile, values), **values} for values in ranked
    ]
    found = [helped[0], {**neutral, **best}]
    smaller = [v for v in helped if v.get("batch_size", 0) < best.get("batch_size", 0)]
    found += [*smaller[:1], *helped[1:]]
    unique: list[dict[str, Any]] = []
    for guess in found:
        if guess not in unique:
            unique.append(guess)
    return unique[:num_guesses]


def _fitting_threads(space: Space, profile: Profile, values: Mapping[str, Any]) -> dict[str, Any]:
    """Threads for a processor's kernels that leave a core to each worker: more of both only wait for each other."""
    parameter = next((p for p in space.parameters if p.name == "num_threads" and p.values), None)
    num_workers = int(values.get("num_workers", 0))
    if parameter is None or not num_workers or not profile.device.startswith("cpu"):
        return {}
    num_left = max(1.0, profile.num_usable_cores - num_workers)
    fitting = [value for value in parameter.values if value <= num_left]
    return {"num_threads": max(fitting)} if fitting else {}


def _own_value(values: tuple[Any, ...], own: Any) -> Any:
    return own if own in values else values[0]
