"""The comparison of a suite finds what was planted."""

import json
from dataclasses import replace

import pytest
from suite_cases import measured, predicted, repeated

from forerun.adapters.classics.baselines import baseline_names
from forerun.base.errors import RecordError
from forerun.cost.time.correction import PriorScales
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.records.measurement import JobKind, Outcome
from forerun.question.devices import find_device
from made_measurements import measurement
from studies.suite.comparison import compare, tried_batches
from studies.suite.run import suite_baselines

SCALES = PriorScales()


@pytest.fixture(scope="module")
def predictions():
    return predicted()


def steps_of(predictions):
    return [(p, MeasurementJob.from_json(p.job)) for p in predictions if not p.is_search]


def run_of(predictions, factor=2.0, **results):
    """A device that takes ``factor`` times what was predicted."""
    return [
        measured(job, factor * p.step_time_s, number, **{k: v(p) for k, v in results.items()})
        for number, (p, job) in enumerate(steps_of(predictions))
    ]


def test_a_device_twice_as_slow_is_half_wrong_until_one_step_is_measured(predictions):
    found = compare(predictions, run_of(predictions), SCALES)
    assert found.step_time.n == found.num_planned == 6
    assert found.step_time.mape == pytest.approx(0.5)
    assert {name: m.n for name, m in found.groups.items() if name.startswith("class")} == {
        "class CIFAR ResNet": 2,
        "class small CNN": 4,
    }
    assert sum(m.n for name, m in found.groups.items() if name.startswith("precision")) == 6
    assert set(found.groups) >= {
        "layout nchw",
        "layout nhwc",
        "batch up to 64",
        "batch up to 512",
        "compiled no",
    }
    by_k = {row.num_steps: row for row in found.few_shot}
    assert list(by_k) == [0, 1, 3, 5]
    assert by_k[0].metrics.mape == pytest.approx(0.5)
    assert by_k[1].metrics.mape < 0.25
    assert by_k[5].metrics.mape < 0.1
    assert by_k[3].metrics.n == 3
    assert len(by_k[3].used) == 3
    assert len(found.surprises()) == 5
    json.dumps(found.as_dict(), allow_nan=False)


def test_whether_predictions_came_first_is_told(predictions):
    runs = run_of(predictions)
    assert compare(predictions, runs, SCALES).is_predicted_before
    old = [replace(m, circumstances=replace(m.circumstances, started_at="2000-01-01")) for m in runs[:1]]
    assert not compare(predictions, [*old, *runs[1:]], SCALES).is_predicted_before


def test_memory_and_energy_are_compared_where_they_were_measured(predictions):
    runs = run_of(
        predictions,
        peak_memory_bytes=lambda p: p.live_peak_bytes / 1.1,
        peak_reserved_bytes=lambda p: p.allocator_bytes,
        step_energy_j=lambda p: p.energy_j / 2,
    )
    found = compare(predictions, runs, SCALES)
    assert found.allocated.mape == pytest.approx(0.1)
    assert found.reserved.mape == pytest.approx(0.0, abs=1e-9)
    assert found.energy.mape == pytest.approx(1.0)
    assert found.resident is None
    assert compare(predictions, run_of(predictions), SCALES).allocated is None


def test_steps_bound_by_the_host_are_those_that_launching_takes_up(predictions):
    first = predictions[0].job
    runs = run_of(predictions, launched_s=lambda p: 2 * p.step_time_s * (0.95 if p.job == first else 0.2))
    found = compare(predictions, runs, SCALES)
    predicted_ones = [p for p, _ in steps_of(predictions) if p.bound_by == "host"]
    assert found.host_bound["measured_share"] == pytest.approx(1 / 6)
    assert found.host_bound["predicted_share"] == pytest.approx(len(predicted_ones) / 6)
    assert compare(predictions, run_of(predictions), SCALES).host_bound == {}


def test_verdicts_count_runs_and_searches(predictions):
    (search,) = [p for p in predictions if p.is_search]
    job, largest = MeasurementJob.from_json(search.job), int(search.max_batch_size)
    sizes = {largest: True, largest + 1: False, 2 * largest: False, largest // 2: False}
    runs = [
        measured(replace(job, parameters={**job.parameters, "batch_size": size}), 0.1, 100 + size,
                 Outcome.DONE if fits else Outcome.OUT_OF_MEMORY)
        for size, fits in sizes.items()
    ]  # fmt: skip
    step, step_job = steps_of(predictions)[0]
    full = measured(step_job, 1.0, 99, Outcome.OUT_OF_MEMORY)
    found = compare(predictions, [*run_of(predictions)[1:], full, *runs], SCALES)
    # Of the six steps one did not fit; of the search all but the half as large one did what was said.
    assert found.verdicts["n"] == 10
    assert found.verdicts["right"] == 8
    (batch,) = found.largest_batches
    assert (batch.fitted, batch.failed, batch.num_tried) == (largest, largest // 2, 4)
    assert tried_batches(job, runs) == sizes
    assert any("out-of-memory" in failure for failure in found.failures)
    assert step.fits == "yes"


def test_the_error_of_a_search_is_that_to_the_middle_of_its_bracket(predictions):
    (search,) = [p for p in predictions if p.is_search]
    job = MeasurementJob.from_json(search.job)
    ends = {100: Outcome.DONE, 105: Outcome.OUT_OF_MEMORY}
    runs = [
        measured(replace(job, parameters={**job.parameters, "batch_size": size}), 0.1, size, outcome)
        for size, outcome in ends.items()
    ]
    guess = replace(search, max_batch_size=204.0)
    others = [p for p in predictions if not p.is_search]
    (batch,) = compare([*others, guess], [*run_of(predictions), *runs], SCALES).largest_batches
    assert batch.relative_error == pytest.approx(1.0)


def test_noise_is_the_change_from_start_to_end_and_of_the_anchor(predictions):
    _, job = steps_of(predictions)[0]
    both = [measured(repeated(job, "start"), 1.0, 200), measured(repeated(job, "end"), 1.05, 201)]
    anchor = replace(
        measured(repeated(job, "start"), 1.0, 202), parameters={}, results={"anchor_drift": -0.02}
    )
    found = compare(predictions, [*run_of(predictions), *both, anchor], SCALES)
    (repeat,) = found.repeats
    assert repeat.change == pytest.approx(0.05)
    assert found.anchor_drifts == (-0.02,)
    assert found.step_time.n == 6  # repeats are no rows


def test_kernels_are_listed_with_their_rates(predictions):
    kernel = measurement(
        300, kind=JobKind.KERNEL, subject="gemm", parameters={"m": 8}, results={"flops_per_s": 1e12}
    )
    (row,) = compare(predictions, [*run_of(predictions), kernel], SCALES).kernels
    assert row == {"subject": "gemm", "parameters": {"m": 8}, "flops_per_s": 1e12}


def test_nothing_measured_is_an_error(predictions):
    with pytest.raises(RecordError, match="measure first"):
        compare(predictions, [], SCALES)


def test_baselines_are_those_of_every_evaluation(predictions):
    found = compare(
        predictions, run_of(predictions), SCALES, lambda rows: suite_baselines(rows, find_device("rtx-4070"))
    )
    assert set(found.baselines) == set(baseline_names())
    assert found.baselines["roofline"].mape > 0.5
    assert found.baselines["ann"] is None  # six rows are too few to fit one
