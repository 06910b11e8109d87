"""A winner is shown to be better, or it is not called better."""

import numpy as np
import pytest

from forerun.base.errors import UsageError
from forerun.script.tuning.acceptance import num_reserved_runs, screened, show_winner
from forerun.script.tuning.configuration import base_values, counts_steps, fitting_space
from forerun.script.tuning.options import TuneSettings, by_steps, parse_budget, parse_objectives, value_of
from forerun.script.tuning.space import default_space, space_of
from forerun.script.tuning.study import TrialStore
from forerun.script.tuning.trial import TrialOrder, TrialResult, say_nothing
from forerun.script.tuning.tuner import Task, Tuner
from made_profiles import made_profile

NUM_STUDIES = 100
NUM_TRIALS = 28  # of a budget of 40, which keeps twelve back
NOISE = 0.2


def verdicts(gain: float) -> list[str]:
    """Studies of thirty noisy trials each; the first third of the trials has the gain."""
    found = []
    for seed in range(NUM_STUDIES):
        numbers = np.random.default_rng(seed)

        def run(trial: int, numbers: np.random.Generator = numbers) -> float:
            return (gain if 0 < trial <= NUM_TRIALS // 3 else 1.0) * float(np.exp(numbers.normal(0.0, NOISE)))

        rates = {trial: run(trial) for trial in range(NUM_TRIALS)}
        left = num_reserved_runs(40)
        best, *_ = screened(sorted(rates, key=lambda t: -rates[t]), run, left, is_rising=True)
        verdict = show_winner(
            lambda run=run: run(0),
            lambda run=run, best=best: run(best),
            num_pairs=(left - 3) // 2,
            is_rising=True,
        )
        found.append(verdict.verdict)
    return found


def test_false_wins_are_rare_where_no_setting_matters_and_true_ones_are_found():
    assert verdicts(1.0).count("better") <= 5
    assert verdicts(2.0).count("better") >= 80


def test_an_objective_that_falls_is_better_when_it_falls():
    times = iter([10.0, 5.0, 5.1, 10.2, 9.9, 5.0])
    found = show_winner(lambda: next(times), lambda: next(times), num_pairs=3, is_rising=False)
    assert found.verdict == "better"
    assert found.ratio == pytest.approx(2.0, rel=0.02)
    assert found.low <= found.ratio <= found.high
    assert "95 %" in found.words
    assert show_winner(lambda: 1.0, lambda: 2.0, num_pairs=2, is_rising=True).verdict == "not repeated"
    assert show_winner(lambda: 1.0, lambda: None, num_pairs=3, is_rising=True).verdict == "not repeated"


def test_a_budget_of_time_ends_in_time_with_room_for_repeats(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("forerun.script.tuning.tuner.time.monotonic", lambda: clock[0])
    objectives = parse_objectives("speed")
    space = space_of({"parameters": {"num_workers": {"min": 0, "max": 60}}})

    def run(order, configuration, **ignored):
        took_s = min(10.0, order.timeout_s)
        clock[0] += took_s
        return TrialResult(
            outcome="done", rate_samples_per_s=1.0, step_time_s=1.0, num_steps=9, wall_s=took_s
        )

    task = Task(
        space=space,
        order=TrialOrder(command=("python", "train.py")),
        objectives=objectives,
        budget=parse_budget("10min"),
        settings=TuneSettings(with_memory_law=False),
    )
    store = TrialStore(tmp_path / "study", objectives, {}, sampler="random", seed=0)
    tuner = Tuner(task=task, store=store, say=say_nothing, run=run, began_s=0.0)
    clock[0] = 30.0  # the profile
    assert tuner.search() == "600 s"
    # Of sixty runs of ten seconds, eighteen are kept back for repeats.
    assert clock[0] == pytest.approx(600 - 10 * 18, abs=10)
    assert 15 <= tuner.num_repeats_left() <= 18
    clock[0] = 597.0
    assert tuner.order.timeout_s == pytest.approx(3.0 + 0.05 * 600)


def test_steps_are_compared_where_samples_cannot_be_counted():
    workers = space_of({"parameters": {"num_threads": {"values": [1, 2]}}})
    batches = space_of({"parameters": {"batch_size": {"values": [4, 8], "map": "--batch_size="}}})
    assert not counts_steps(batches, made_profile("cpu"), {"batch_size": 8})
    alone = made_profile("cpu", loader={}, batch_size=35.0, has_images=False)
    assert counts_steps(workers, alone, {})
    with pytest.raises(UsageError, match="35 rows a step, and its own batch size is 20"):
        counts_steps(batches, alone, {"batch_size": 20})
    assert not counts_steps(batches, alone, {"batch_size": 7})
    (speed,) = by_steps(parse_objectives("speed"))
    assert value_of(speed, TrialResult(outcome="done", step_time_s=0.5), None, None) == 2.0
    kept = fitting_space(default_space(4, is_gpu=False), alone)
    assert [parameter.name for parameter in kept.parameters] == ["num_threads"]


def test_the_scripts_own_values_are_read_from_its_command():
    space = space_of(
        {
            "parameters": {
                "batch_size": {"values": [4, 8], "map": "--batch_size="},
                "lr": {"values": [0.1], "map": "lr="},
            }
        }
    )
    command = ("python", "train.py", "--batch_size=4", "lr=1e-3")
    assert base_values(space, None, (), command) == {"batch_size": 4, "lr": 0.001}
