"""A trial whose forecast cannot win is ended; one that was at its end anyhow is a whole trial."""

from pathlib import Path

import pytest

from forerun.script.tuning.options import TuneSettings, parse_budget, parse_objectives
from forerun.script.tuning.space import Metric, space_of
from forerun.script.tuning.study import TrialStore
from forerun.script.tuning.trial import TrialOrder, TrialResult, say_nothing
from forerun.script.tuning.tuner import Task, Tuner

CEILINGS = [0.9, 0.2, 0.22, 0.24, 0.26, 0.28]
METRIC = Metric.named("val_acc")


def study(folder: Path, *, epochs: list[int], is_late: bool) -> list[tuple[dict, TrialResult]]:
    """A study of a script that prints ``ceiling (1 - 0.6^epoch)``; a late one prints all before any is judged."""
    results: list[tuple[dict, TrialResult]] = []
    space = {"ceiling": {"values": CEILINGS, "map": "--ceiling"}}
    if len(epochs) > 1:
        space["epochs"] = {"values": epochs, "map": "--epochs"}

    def run(order, configuration, *, on_value, say):
        words = configuration.arguments
        whole = int(words.get("--epochs", epochs[0]))
        curve = [(float(n), float(words["--ceiling"]) * (1 - 0.6**n)) for n in range(1, whole + 1)]
        for number, (_, value) in enumerate(curve, start=1):
            if on_value(number, value):
                seen = whole if is_late else number
                return TrialResult(outcome="pruned", num_steps=9, metric="val_acc", curve=tuple(curve[:seen]))
        return TrialResult(outcome="done", num_steps=9, metric="val_acc", curve=tuple(curve))

    objectives = parse_objectives("accuracy")
    task = Task(
        space=space_of({"parameters": space}),
        order=TrialOrder(command=("train.py",), metric=METRIC, is_short=False),
        objectives=objectives,
        budget=parse_budget("8 trials"),
        base={"ceiling": 0.9, "epochs": epochs[0]},
        settings=TuneSettings(with_pruning=True),
        num_rounds=epochs[0],
    )
    store = TrialStore(folder, objectives, {}, sampler="random", seed=0)
    Tuner(task=task, store=store, say=say_nothing, run=run).search()
    for trial in store.trials():
        record = trial.user_attrs["record"]
        results.append((record["values"], record["result"]))
    return results


def test_a_losing_trial_is_ended_before_its_last_value(tmp_path):
    found = study(tmp_path, epochs=[16], is_late=False)
    assert len(found) == len(CEILINGS)
    assert [result["outcome"] for _, result in found[:4]] == ["done"] * 4
    pruned = [result for values, result in found[4:] if values["ceiling"] < 0.5]
    assert pruned
    for result in pruned:
        assert result["outcome"] == "pruned"
        assert len(result["curve"]) < 16


def test_a_trial_that_had_printed_its_last_value_is_whole(tmp_path):
    found = study(tmp_path, epochs=[16], is_late=True)
    assert {result["outcome"] for _, result in found} == {"done"}
    assert {result["reason"] for _, result in found} == {""}


@pytest.mark.parametrize("epochs", [[16, 8]])
def test_a_tuned_number_of_epochs_is_that_of_the_trial(tmp_path, epochs):
    found = study(tmp_path, epochs=epochs, is_late=False)
    for values, result in found:
        assert (result["outcome"] == "pruned") == (len(result["curve"]) < values["epochs"])
    assert "pruned" in {result["outcome"] for _, result in found}
