"""A search: its candidates and their estimates; limits as they are written, and every way to write them wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forerun
from forerun.base.answers import fields_of
from forerun.base.errors import InvalidSetupError, UsageError
from forerun.base.units import GIB, UNITS
from forerun.prediction.models import TracedModels
from forerun.question.run import Run
from forerun.search.devices import parse_devices
from forerun.search.engine import Engine
from forerun.search.estimates import estimates
from forerun.search.search import QUANTITIES, SETTINGS, Search, parse_limits

RUN = Run.of("cnn:depth=2,base_filters=32", device="t4", batch_size=32)


def test_every_combination_is_a_candidate_and_the_last_axis_changes_fastest():
    together = [{"precision": "amp", "compile": True}, {}]
    search = Search(run=RUN, axes={SETTINGS: together, "batch_size": [16, 64]})
    assert list(search.changes()) == [
        {"precision": "amp", "compile": True, "batch_size": 16},
        {"precision": "amp", "compile": True, "batch_size": 64},
        {"batch_size": 16},
        {"batch_size": 64},
    ]
    assert [run.setup.batch_size_per_device for run in search.runs()] == [16, 64, 16, 64]
    assert [str(run.setup.precision) for run in search.runs()] == ["amp", "amp", "fp32", "fp32"]


def test_a_search_without_axes_is_the_run_itself():
    (only,) = estimates(Search(run=RUN, axes={}), TracedModels())
    assert only is not None
    assert fields_of(only.estimate) == fields_of(forerun.predict(RUN))


def test_a_change_that_the_device_does_not_allow_is_an_error_or_left_out():
    search = Search(run=RUN, axes={SETTINGS: [{"precision": "fp8"}, {"batch_size": 64}]})
    with pytest.raises(UsageError):
        list(estimates(search, TracedModels()))
    refused, found = estimates(search, TracedModels(), skips_refused=True)
    assert refused is None
    assert found is not None
    assert found.estimate.run.setup.batch_size_per_device == 64


def test_a_grid_without_a_job_knows_steps_and_memory():
    axes = {SETTINGS: [{"precision": "fp32"}], "device": parse_devices("t4,l4"), "batch_size": [32, 64]}
    table = Engine(Search(run=RUN, axes=axes), TracedModels()).all_candidates()
    assert "job_time_s" not in table.values
    for row in range(len(table)):
        run = RUN.with_(device=table.options[table.option[row]].name, batch_size=int(table.batch_size[row]))
        exact = forerun.predict(run).step_time_s
        assert table.values["step_time_s"][0, row] == pytest.approx(exact.value, rel=0.02)


def test_a_target_without_forecasters_names_the_entry_point(monkeypatch):
    monkeypatch.setattr("forerun.search.plan.plugin", lambda group, name: None)
    with pytest.raises(UsageError, match=r"entry point 'curves' of 'forerun\.targets'"):
        forerun.plan(RUN.model.model, devices="t4", target="accuracy>=0.9", dataset="cifar10")


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("time<=2h", 7200.0),
        ("time <= 90 min", 5400.0),
        ("epoch<=30s", 30.0),
        ("cost<=$20", 20.0),
        ("cost<=20usd", 20.0),
        ("memory<=24GB", 24 * GIB),
        ("energy<=1.5kWh", 5.4e6),
        ("co2<=2kg", 2000.0),
        ("throughput>=1500", 1500.0),
        ("accuracy>=92%", 0.92),
        ("TIME≤1d", 86400.0),
    ],
)
def test_a_limit_is_read_in_the_unit_used_inside(text, bound):
    (limit,) = parse_limits(text)
    assert limit.bound == pytest.approx(bound)
    assert limit.text == text.replace(" ", "")
    assert limit.is_upper == ("<" in text or "≤" in text)


def test_limits_come_as_one_text_or_as_several():
    assert parse_limits("time<=2h, cost<=20") == parse_limits(["time<=2h", "cost<=20"])
    assert parse_limits("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time", "a limit is a quantity, <= or >=, and an amount"),
        ("time<2h", "a limit needs <= or >=, got '<'"),
        ("time=2h", "a limit needs <= or >=, got '='"),
        ("tme<=2h", "unknown quantity 'tme'; did you mean time"),
        ("time<=2", "the unit is missing"),
        ("time<=2 parsecs", "unknown unit 'parsecs'"),
        ("memory<=24s", "unknown unit 's'"),
        ("time<=soon", "expected a number with a unit"),
        ("cost<=-5", "an amount must be zero or more, got '-5'"),
        ("time<=0s", "an upper limit must be above zero"),
        ("accuracy>=95", "a share is at most 1 (or 100%)"),
        ("time<=1h, time<=2h", "time is limited twice: 'time<=1h' and 'time<=2h'"),
        ("time<=1h, time>=2h", "the limits contradict each other"),
        ("cost>=30, cost<=20", "the limits contradict each other"),
    ],
)
def test_a_limit_that_cannot_be_meant_is_refused_in_one_sentence(text, words):
    with pytest.raises(InvalidSetupError) as error:
        parse_limits(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_both_ends_of_one_quantity_are_no_contradiction():
    lower, upper = parse_limits("throughput>=100, throughput<=500")
    assert lower.bound < upper.bound


@given(
    name=st.sampled_from(sorted(QUANTITIES)),
    amount=st.floats(min_value=1e-3, max_value=1.0),
    is_upper=st.booleans(),
    data=st.data(),
)
def test_every_unit_of_every_quantity_is_read_back(name, amount, is_upper, data):
    units = UNITS[QUANTITIES[name].kind]
    unit = data.draw(st.sampled_from(sorted(units)))
    (limit,) = parse_limits(f"{name}{'<=' if is_upper else '>='}{amount!r}{unit}")
    assert limit.bound == pytest.approx(amount * units[unit])
    assert limit.is_upper is is_upper
