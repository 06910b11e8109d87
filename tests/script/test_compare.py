"""Paired statistics of two configurations."""

import pytest

from forerun.base.errors import UsageError
from forerun.script.compare import non_inferiority, paired_ratio


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
