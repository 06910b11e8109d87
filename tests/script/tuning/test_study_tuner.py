"""A study never runs a configuration twice, and ends when there is nothing new."""

from pathlib import Path

import pytest

from forerun.script.tuning.options import parse_budget, parse_objectives
from forerun.script.tuning.space import configuration_key, num_configurations, space_of, untried_neighbour
from forerun.script.tuning.study import TrialStore
from forerun.script.tuning.trial import TrialOrder, TrialResult, say_nothing
from forerun.script.tuning.tuner import Task, Tuner

SPACE = space_of(
    {
        "parameters": {
            "num_workers": {"values": [0, 1, 2]},
            "channels_last": {"values": [False, True]},
            "prefetch_factor": {"min": 2, "max": 4},
        }
    }
)
BASE = {"num_workers": 0, "channels_last": False, "prefetch_factor": 2}


def search(folder: Path, budget: str) -> tuple[str, list[dict]]:
    """A study whose every trial is as fast as the others, so that the sampler has no reason to move."""
    objectives = parse_objectives("speed")
    task = Task(
        space=SPACE,
        order=TrialOrder(command=("train.py",)),
        objectives=objectives,
        budget=parse_budget(budget),
        base=BASE,
    )

    def run(order, configuration, **ignored):
        return TrialResult(outcome="done", rate_samples_per_s=1.0, num_steps=2)

    store = TrialStore(folder, objectives, {}, seed=0)
    tuner = Tuner(task=task, store=store, say=say_nothing, run=run)
    tuner.seed(None)
    reason = tuner.search()
    return reason, [trial.user_attrs["record"]["values"] for trial in store.trials()]


def test_every_configuration_runs_once_and_then_the_study_ends(tmp_path):
    reason, tried = search(tmp_path, "100 trials")
    assert reason == "the space: every configuration has been tried"
    assert len(tried) == len({configuration_key(values) for values in tried}) == 18
    # A rerun finds nothing to do.
    assert search(tmp_path, "100 trials") == (reason, tried)


def test_a_neighbour_is_one_parameter_away_while_there_is_one():
    tried = {configuration_key(BASE)}
    for number in range(5):
        found = untried_neighbour(SPACE, BASE, tried, seed=number)
        assert sum(found[name] != BASE[name] for name in BASE) == 1
        tried.add(configuration_key(found))
    # Two of each three-valued parameter and one of the other are used up.
    found = untried_neighbour(SPACE, BASE, tried, seed=9)
    assert sum(found[name] != BASE[name] for name in BASE) == 2


@pytest.mark.parametrize(
    ("parameters", "count"),
    [
        ({"num_workers": {"values": [0, 1]}, "lr": {"min": 0.1, "max": 1.0, "map": "--lr"}}, None),
        ({"prefetch_factor": {"min": 2, "max": 5}, "num_workers": {"values": [1]}}, 4),
    ],
)
def test_a_range_of_fractions_has_no_end(parameters, count):
    assert num_configurations(space_of({"parameters": parameters})) == count
