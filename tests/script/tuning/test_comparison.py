"""Laws of the memory model of trials, and paired statistics."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forerun.base.errors import UsageError
from forerun.script.tuning.comparison import non_inferiority, paired_ratio
from forerun.script.tuning.laws import MemoryPoint, predicted_memory_bytes

MB = 1e6
BASE = {"batch_size": 8}


def point(batch: int, workers: int = 0) -> MemoryPoint:
    return MemoryPoint(
        values={"batch_size": batch, "num_workers": workers},
        start_bytes=400 * MB,
        peak_bytes=(450 + 3 * batch + 120 * workers) * MB,
    )


@settings(deadline=None)
@given(
    st.integers(8, 4096),
    st.integers(0, 4),
    st.lists(st.sampled_from([8, 16, 32, 64]), min_size=1, max_size=5),
)
def test_what_would_not_fit_is_never_called_small(batch, workers, seen):
    # One size does not tell what grows with the batch; to smaller ones than it the law does not hold, and need not.
    assume(len(set(seen)) > 1 or batch >= min(seen))
    points = [point(size) for size in seen]
    actual = (450 + 3 * batch + 120 * workers) * MB
    expected = predicted_memory_bytes(points, {"batch_size": batch, "num_workers": workers}, BASE)
    assert expected >= actual


@settings(deadline=None)
@given(st.integers(8, 2048), st.integers(0, 3))
def test_a_larger_batch_never_needs_less(batch, workers):
    points = [point(8), point(32), point(64, 1)]

    def expected(size: int) -> float:
        return predicted_memory_bytes(points, {"batch_size": size, "num_workers": workers}, BASE)

    assert expected(batch) <= expected(2 * batch)


def test_before_any_trial_nothing_is_known():
    assert predicted_memory_bytes([], {"batch_size": 8}, BASE) is None


def test_pairs_cancel_a_drift():
    drift = [1.0, 1.5, 2.0, 3.0]
    found = paired_ratio(drift, [2.0 * value for value in drift])
    assert found.ratio == pytest.approx(2.0)
    assert found.low == pytest.approx(2.0)
    with pytest.raises(UsageError):
        paired_ratio([1.0], [0.0])


def test_a_loss_beyond_the_margin_is_inferior():
    before = [0.90, 0.91, 0.89]
    assert non_inferiority(before, [0.899, 0.909, 0.889], margin=0.01).is_not_inferior
    assert not non_inferiority(before, [0.87, 0.88, 0.86], margin=0.01).is_not_inferior
    assert not non_inferiority([0.5], [0.6], margin=0.01, is_rising=False).is_not_inferior
