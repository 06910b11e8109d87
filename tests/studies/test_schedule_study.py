"""The studies of scheduling: laws without tables, and the published order on the public ones."""

import json

import numpy as np
import pytest

from forerun.base.errors import RecordError
from forerun.jobs.scheduling.job import DataParallelTraining, ScheduledJob, parse_cluster
from forerun.jobs.scheduling.policy import find_policy
from forerun.jobs.scheduling.simulation import simulate
from forerun.jobs.scheduling.speed import MeasuredSpeed, StepPoint
from studies.schedule.applications import NoiseEfficiency, RecordedEfficiency, planned_points
from studies.schedule.comparison import comparison_section, read_rows
from studies.schedule.optimus_study import placement_study, ratios, server_study
from studies.schedule.study import allocation_time, error_plot
from studies.schedule.workloads import ForecastError, draw_workload, read_philly
from studies.tables.public import reference_folder

reference = pytest.mark.reference


@pytest.fixture
def folder():
    found = reference_folder()
    if found is None:
        pytest.skip("the public measurement tables are absent: set FORERUN_REFERENCE_DATA to their folder")
    return found


def test_recorded_worth_is_read_between_batches_and_by_phase():
    worth = RecordedEfficiency(log_batches=tuple(np.log([64.0, 256.0])), worth=((1.0, 1.0), (0.5, 0.9)))
    assert worth(64.0, 0.0) == worth(64.0, 1.0) == 1.0
    assert worth(128.0, 0.2) == pytest.approx(0.75)
    assert worth(256.0, 0.7) == pytest.approx(0.9)


def test_noise_makes_larger_batches_worth_more_where_it_is_larger():
    worth = NoiseEfficiency(noise_scales=(100.0, 1000.0), base_batch_size=64.0)
    assert worth(64.0, 0.0) == worth(64.0, 0.9) == 1.0
    assert worth(512.0, 0.0) < worth(512.0, 0.9) < 1.0


def test_eleven_steps_are_planned():
    points = [
        StepPoint(num_devices=n, num_nodes=-(-n // 4), batch_size_per_device=b, step_time_s=1.0)
        for n in (1, 2, 3, 4, 8, 16)
        for b in (8.0, 16.0, 32.0, 64.0)
    ]
    chosen = planned_points(points, 4)
    assert len(chosen) == 11
    assert {(p.num_devices, p.batch_size_per_device) for p in chosen if p.num_devices == 1} == {
        (1, 8.0),
        (1, 32.0),
        (1, 64.0),
    }
    assert {p.num_devices for p in chosen} == {1, 2, 4, 8, 16}


def test_the_theorem_and_the_blocks_do_better_than_what_they_replace():
    found = placement_study()
    best, first = (found.transfer_s[name] for name in ("fewest nodes, even spread", "first fit"))
    assert best < 0.7 * first
    ours, theirs = found.blocks["balanced (Optimus)"], found.blocks["threshold (MXNet)"]
    assert ours.size_gap < theirs.size_gap
    assert ours.num_requests < theirs.num_requests


def test_large_decisions_give_every_job_its_tasks():
    rows = allocation_time(num_jobs=40, num_nodes=250)
    assert [(row.num_jobs, row.num_tasks) for row in rows] == [(40, 1000)] * 4


@reference
def test_a_workload_is_the_same_for_the_same_seed(folder):
    from studies.schedule.applications import read_applications

    philly = read_philly(folder)
    applications = read_applications(folder, {"t4": "aws"})

    def draw(seed):
        return draw_workload(philly, applications, seed, kind="t4", devices_per_node=4, num_jobs=40)

    first, again, other = draw(0), draw(0), draw(1)
    assert list(first.actual) == list(again.actual) == list(first.forecast)
    assert list(first.actual) != list(other.actual)
    arrivals = [job.arrival_s for job in first.actual.values()]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    # What a scheduler is told is not the truth, and both end.
    jobs = list(first.forecast.values())
    outcome = simulate(jobs, parse_cluster("4x4xt4"), find_policy("foresight"), actual=first.actual)
    assert all(found.start_s < found.end_s < float("inf") for found in outcome.outcomes)


def test_an_error_changes_what_is_served_first_and_not_what_is_true():
    jobs = [
        ScheduledJob(
            name=f"j{i}",
            training=DataParallelTraining(speeds={"t4": MeasuredSpeed({1: 1.0, 4: 3.0})}, batch_size=64.0),
            work_samples=1e5 * (1 + i / 10),
            num_workers=4,
        )
        for i in range(6)
    ]
    actual = {job.name: job for job in jobs}

    def ends(error):
        told = error.told(jobs, seed=2)
        return simulate(told, parse_cluster("1x4xt4"), find_policy("srtf"), actual=actual).outcomes

    right, wrong = ([o.end_s for o in ends(e)] for e in (ForecastError(), ForecastError(work=1.0)))
    assert right == sorted(right) != wrong
    assert max(wrong) == pytest.approx(max(right))
    small, large = (ForecastError(work=s).told(jobs, 1)[2].forecast(0.0) for s in (0.1, 0.2))
    assert large / jobs[2].work_samples == pytest.approx((small / jobs[2].work_samples) ** 2)


@reference
def test_optimus_is_ahead_of_tetris_and_drf_in_its_own_setting(folder):
    found = ratios(server_study(folder, num_nodes=30, num_draws=2))
    assert 1.0 < found["tetris"][0] < found["drf"][0]
    assert found["drf"][0] > 1.3


def test_the_plot_of_errors_is_written(tmp_path):
    path = tmp_path / "errors.png"
    error_plot(path, {"srtf": {"speed": {0.0: 3600.0, 0.2: 3700.0}, "work": {0.0: 3600.0, 0.2: 4000.0}}})
    assert path.read_bytes().startswith(b"\x89PNG")


def test_compared_schedules_are_summed_up_over_the_draws_that_all_have(tmp_path):
    figures = {
        "average_completion_s": 3600.0,
        "p95_completion_s": 7200.0,
        "makespan_s": 9000.0,
        "restarts_per_job": 1.0,
        "utilisation": 0.5,
        "deadlines_met": 0.25,
        "worst_fairness": 4.0,
    }

    def row(policy, seed, factor):
        metrics = {**figures, "average_completion_s": 3600.0 * factor}
        return json.dumps({"workload": "philly", "seed": seed, "policy": policy, "metrics": metrics})

    kept = tmp_path / "rows.jsonl"
    lines = [row("foresight", s, 1) for s in (1, 2)] + [row("fifo", s, 4) for s in (1, 2)]
    lines += [row("pollux:raw", s, 2 + s) for s in (1, 2)] + [row("pollux", s, 1.25) for s in (1, 2)]
    # A policy that was stopped would be compared over other draws.
    lines.append(row("sia:raw", 1, 0.1))
    kept.write_text("\n".join(lines), encoding="utf-8")
    page = comparison_section(read_rows(kept))
    assert (
        "| philly | 2 | 1.000 | pollux:raw | 0.292 +- 0.529 | pollux | 0.800 +- 0.000 | 0.250 +- 0.000 | 4.0 |"
        in page
    )
    assert "sia:raw" not in page
    assert read_rows(tmp_path / "none.jsonl") == []
    kept.write_text("[]", encoding="utf-8")
    with pytest.raises(RecordError, match=r"rows.jsonl, line 1: expected a schedule of this study"):
        read_rows(kept)
