"""Advice about a profiled run: the first of its causes, as one change with its expected gain."""

from __future__ import annotations

import math

from forerun.script.diagnosis.causes import Cause, busy_device, causes_of
from forerun.script.diagnosis.observation import of_profile
from forerun.script.profiling.profile import Advice, Profile

_NOTABLE = 0.15
_LARGE_HOST = 0.3
_UNCERTAINTY = 0.25  # uncertain share of a saving: workers compete with the step for memory and caches


def advise(profile: Profile) -> Advice:
    """Advice about the most expensive part of the step that a change can shorten."""
    seen = of_profile(profile)
    first = next(
        (cause for cause in causes_of(seen) if cause.share >= _least_share(cause, profile)), busy_device(seen)
    )
    return Advice(
        bottleneck=first.bottleneck,
        reason=first.evidence,
        change=first.knobs,
        words=first.change,
        **({} if first.after_s is None else _gain(profile.step_time_s, first.after_s)),
    )


def _least_share(cause: Cause, profile: Profile) -> float:
    """Share of a step from which on a cause is worth a change: a large batch leaves some host time to any step."""
    is_large = (profile.batch_size or math.inf) > 16
    return _LARGE_HOST if cause.bottleneck == "host" and is_large else _NOTABLE


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
