"""Trials that are judged by the values they print: here, and on the nodes of a cluster, of which some die."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from study_commands import BY_HAND, environment, write_study

from forerun.adapters.clusters.ray import ray_runner
from forerun.script.callbacks.pruner import TrialPruner
from forerun.script.tuning.configuration import ScriptConfiguration
from forerun.script.tuning.options import OBJECTIVES, TuneSettings, parse_budget, parse_objectives, value_of
from forerun.script.tuning.space import Metric, space_of
from forerun.script.tuning.study import TrialStore, suggest
from forerun.script.tuning.trial import TrialOrder, TrialResult, say_nothing
from forerun.script.tuning.tuner import Task, Tuner
from small_clusters import PATIENCE_S, node_of, raylet_pid, small_cluster

NUM_ROUNDS = 16
CEILINGS = [0.9, 0.8, 0.7, 0.6, 0.2]
WINNING = 1.5
SPACE = space_of({"parameters": {"ceiling": {"values": CEILINGS, "map": "--ceiling"}}})
METRIC = Metric.named("val_acc")
ACCURACY = parse_objectives("accuracy")
# Prints its values, then waits to be ended where it is told to: no test depends on who is faster.
SCRIPT = """
import argparse, os, time
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--ceiling", type=float, default=0.9)
parser.add_argument("--values", type=int, default=4)
parser.add_argument("--then-wait", action="store_true")
parser.add_argument("--first-run-waits-after", type=int)
args = parser.parse_args()
with open({started!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
is_first_run = len(open({started!r}).readlines()) == 1
model = torch.nn.Linear(2, 2)
for number in range(1, args.values + 1):
    for images in torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2):
        model(images).sum().backward()
        {by_hand}
    print(f"val_acc={{args.ceiling * (1 - 0.6 ** number):.4f}}", flush=True)
    if is_first_run and number == args.first_run_waits_after:
        time.sleep(600)
if args.then_wait:
    time.sleep(600)
"""


def curve(ceiling: float, num_values: int = NUM_ROUNDS) -> list[float]:
    return [round(ceiling * (1 - 0.6**number), 4) for number in range(1, num_values + 1)]


@pytest.fixture
def store(tmp_path):
    """A study in which four whole trials have finished."""
    found = TrialStore(tmp_path / "study", ACCURACY, {}, sampler="random", seed=0)
    for ceiling in CEILINGS[:4]:
        values = curve(ceiling)
        found.enqueue({"ceiling": ceiling}, "sampler")
        trial = found.ask()
        suggest(trial, SPACE)
        for number, value in enumerate(values, start=1):
            trial.report(value, number)
        result = TrialResult(outcome="done", num_steps=9, curve=tuple((0.0, value) for value in values))
        record = {"values": {"ceiling": ceiling}, "result": result.as_dict(), "is_feasible": True}
        found.tell(trial, [max(values)], {**record, "source": "sampler"})
    return found


def order(tmp_path, *words, **changes) -> TrialOrder:
    (tmp_path / "train.py").write_text(SCRIPT.format(started=str(tmp_path / "started"), by_hand=BY_HAND))
    command = (sys.executable, str(tmp_path / "train.py"), *words)
    return TrialOrder(command=command, is_short=False, timeout_s=PATIENCE_S, **{"metric": METRIC, **changes})


def test_a_value_told_twice_changes_nothing(store, recwarn):
    trial = store.ask()
    judge = TrialPruner(store.study, trial, NUM_ROUNDS, is_rising=True)
    told = curve(WINNING)
    # Two runs of one trial, the first of which died after its sixth value.
    assert not any(judge(number, value) for number, value in enumerate(told[:6], start=1))
    assert not any(judge(number, value + 0.01) for number, value in enumerate(told[:6], start=1))
    assert not any(judge(number, told[number - 1]) for number in range(7, NUM_ROUNDS + 1))
    assert store.study.get_trials()[trial.number].intermediate_values == dict(enumerate(told, start=1))
    assert not [warning for warning in recwarn if "already reported" in str(warning.message)]


def test_a_lost_trial_stays_lost_when_it_is_run_again(store):
    judge = TrialPruner(store.study, store.ask(), NUM_ROUNDS, is_rising=True)
    ends = [judge(number, value) for number, value in enumerate(curve(0.2, 12), start=1)]
    assert True in ends
    assert judge(1, curve(0.2)[0])


def test_the_last_value_ends_nothing_and_a_falling_metric_is_turned(store):
    trial = store.ask()
    judge = TrialPruner(store.study, trial, 2, is_rising=False)
    assert not judge(1, 3.0)
    assert not judge(2, 2.0)
    assert store.study.get_trials()[trial.number].intermediate_values == {1: -3.0, 2: -2.0}


@pytest.fixture(scope="module")
def cluster():
    with small_cluster(environment()) as found:
        import ray

        yield found
        ray.shutdown()


def test_a_losing_trial_is_ended_on_its_node(cluster, store, tmp_path):
    task = Task(
        space=SPACE,
        order=order(tmp_path, "--values", "12", "--then-wait"),
        objectives=ACCURACY,
        budget=parse_budget("5 trials"),
        base={"ceiling": 0.9},
        settings=TuneSettings(with_pruning=True),
        num_rounds=NUM_ROUNDS,
    )
    store.enqueue({"ceiling": 0.2}, "sampler")
    with ray_runner(cluster.address) as runner:
        tuner = Tuner(task=task, store=store, say=say_nothing, run=runner)
        assert tuner.search() == "5 trials"
    trial = store.trials()[-1]
    assert trial.state.name == "PRUNED"
    result = trial.user_attrs["record"]["result"]
    assert result["outcome"] == "pruned"
    # It was waiting to be ended, and every value that was judged is one that it printed.
    told = trial.intermediate_values
    assert 4 <= len(told) <= 12
    assert told == dict(enumerate(curve(0.2)[: len(told)], start=1))


def test_a_trial_on_a_node_ends_at_its_target(cluster, tmp_path):
    metric = Metric(name="val_acc", target=0.5)
    wanted = order(tmp_path, "--then-wait", metric=metric, stop_at_target=True)
    with ray_runner(cluster.address) as run:
        result = run(wanted, ScriptConfiguration(arguments={}, hooks={}))
    assert result.outcome == "done"
    reached_s = value_of(OBJECTIVES["time-to-target"], result, metric, None)
    assert next(time_s for time_s, value in result.curve if value >= 0.5) == reached_s


def test_what_is_printed_while_ray_is_connected_is_no_answer(cluster, capsys):
    with ray_runner(cluster.address):
        print("a node has died")
    print("the answer")
    out, err = capsys.readouterr()
    assert out == "the answer\n"
    assert "a node has died" in err


def test_a_trial_that_nobody_can_judge_any_more_runs_to_its_end(cluster, tmp_path):
    told = []

    def on_value(number, value):
        told.append(number)
        raylet = psutil.Process(raylet_pid(cluster.head_node))
        (mailbox,) = [child for child in raylet.children() if child.cmdline()[0].startswith("ray::_Mailbox")]
        mailbox.kill()
        mailbox.wait(PATIENCE_S)
        return False

    with ray_runner(cluster.address) as run:
        result = run(order(tmp_path), ScriptConfiguration(arguments={}, hooks={}), on_value=on_value)
    assert told == [1]
    assert (result.outcome, len(result.curve)) == ("done", 4)


def test_a_trial_whose_node_dies_is_judged_again_from_its_first_value(cluster, store, tmp_path):
    trial = store.ask()
    judge = TrialPruner(store.study, trial, NUM_ROUNDS, is_rising=True)
    told = []

    def on_value(number, value):
        told.append((number, value))
        if len(told) == 2:
            process = psutil.Process(int((tmp_path / "started").read_text()))
            cluster.remove_node(node_of(cluster, process.pid), allow_graceful=False)
            # The answer finds nobody: whoever asked has died before its script.
            process.wait(PATIENCE_S)
        return judge(number, value)

    # Its last values must not be on their way yet when the node goes, however slow the one who reads them is.
    wanted = order(tmp_path, "--ceiling", str(WINNING), "--first-run-waits-after", "2")
    with ray_runner(cluster.address) as run:
        result = run(wanted, ScriptConfiguration(arguments={}, hooks={}), on_value=on_value)
    values = list(enumerate(curve(WINNING, 4), start=1))
    assert told == [*values[:2], *values]
    assert (result.outcome, len(result.curve)) == ("done", 4)
    assert store.study.get_trials()[trial.number].intermediate_values == dict(values)
    assert len((tmp_path / "started").read_text().splitlines()) == 2


def test_a_node_killed_in_the_middle_of_a_trial_loses_no_trial(cluster, tmp_path):
    # Of three nodes one has died in the test before, one is killed here, and one is left.
    cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    # No trial ends while its node is being killed.
    command = [
        *write_study(tmp_path, pause_s=0.2, start_s=3.0),
        "--ray",
        cluster.address,
        "--budget",
        "2 trials",
    ]
    # Nodes do not share the folder that the command is started in.
    command += ["--", sys.executable, str(tmp_path / "train.py")]
    with (tmp_path / "said").open("w") as said:
        study = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=tmp_path)
        # The first is the profile, here; the second a trial, on a node.
        pid = wait_for_start(tmp_path / "started", 2, study, tmp_path / "said")
        cluster.remove_node(node_of(cluster, pid), allow_graceful=False)
        output, _ = study.communicate(timeout=400)
    assert study.returncode == 0, (tmp_path / "said").read_text()
    answer = json.loads(output)
    assert [trial["outcome"] for trial in answer["trials"]] == ["done"] * 2
    # The profile, two trials, and the one that died with its node, whose process died too.
    assert len((tmp_path / "started").read_text().splitlines()) == 4
    assert not psutil.pid_exists(pid)


def wait_for_start(started: Path, number: int, study: subprocess.Popen[str], said: Path) -> int:
    deadline_s = time.monotonic() + 400
    while time.monotonic() < deadline_s and study.poll() is None:
        lines = started.read_text().splitlines() if started.exists() else []
        if len(lines) >= number:
            return int(lines[number - 1])
        time.sleep(0.05)
    raise AssertionError(f"no trial was begun: {said.read_text()}")
