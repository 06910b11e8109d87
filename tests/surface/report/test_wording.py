import pytest
from estimate_cases import changed

from forerun.base.units import format_bytes, format_duration_s
from forerun.prediction.estimate import Interval, Provenance
from forerun.surface.report.wording import (
    bound_sentence,
    fit_sentence,
    format_flops,
    format_percent,
    format_usd,
    provenance_sentence,
    range_words,
    setup_words,
)


def test_a_unit_that_both_ends_share_is_named_once():
    assert range_words(Interval(0.0452, 0.0391, 0.052), format_duration_s) == "39.1 to 52.0 ms"
    assert range_words(Interval(1.0, 0.9, 1.1), format_duration_s) == "0.900 to 1.10 s"
    assert range_words(Interval(90.0, 80.0, 99.0), format_usd) == "$80.00 to $99.00"
    assert range_words(Interval(2.0**30, 2.0**29, 2.0**31), format_bytes) == "0.500 to 2.00 GiB"


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (0, "$0.00"),
        (0.8, "$0.800"),
        (0.01234, "$0.0123"),
        (4.2, "$4.20"),
        (999.5, "$999.50"),
        (12345.6, "$12,346"),
    ],
)
def test_money(amount, words):
    assert format_usd(amount) == words


def test_shares_and_work():
    assert [format_percent(share) for share in (0.0684, 0.0996, 0.61, 1.0)] == [
        "6.8 %",
        "10 %",
        "61 %",
        "100 %",
    ]
    assert (format_flops(24.5e9), format_flops(12.0)) == ("24.5 GFLOP", "12.0 FLOP")


def test_setup_names_everything_that_matters_for_the_step():
    words = setup_words(changed(num_devices=4, compile=True, precision="amp", batch_size_per_device=1024))
    assert words == "batch 1,024 a device, amp, nchw, compiled, training step, sgd"
    assert "sgd" not in setup_words(changed(phase="inference"))
    assert "no optimizer" in setup_words(changed(optimizer="none"))


@pytest.mark.parametrize("provenance", Provenance)
def test_every_provenance_is_explained(provenance):
    name, _, explanation = provenance_sentence(changed(provenance=provenance)).partition(": ")
    assert name == str(provenance)
    assert "unknown machine +15 %, cost model +20 %" in explanation


def test_verdicts_and_bounds_differ():
    assert len({fit_sentence(fits) for fits in ("yes", "no", "close", None)}) == 4
    assert len({bound_sentence(bound) for bound in ("compute", "memory bandwidth", "host")}) == 3
    assert "network" in bound_sentence("network")
