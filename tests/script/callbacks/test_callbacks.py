"""Curves written and runs stopped from inside a training loop."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from forerun.base.errors import InvalidSetupError, RecordError, UsageError
from forerun.evidence.records.record_store import RecordStore
from forerun.jobs.forecasting.curve_files import read_curve
from forerun.script.callbacks import (
    CurveCallback,
    CurveLog,
    LoopTimer,
    keras_callback,
    lightning_callback,
    lightning_timer,
)

SOURCE = Path(__file__).parents[3] / "src"


def child_environment():
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def accuracies(num, floor=0.05, seed=0):
    epochs = np.arange(1.0, num + 1)
    return 1 - floor - 0.6 * epochs**-0.7 + np.random.default_rng(seed).normal(0, 0.002, num)


def stopped_at(callback, values, **more):
    for epoch, value in enumerate(values, start=1):
        if callback.log(epoch, val_accuracy=value, **more):
            return epoch
    return None


def test_a_curve_is_on_disk_after_each_row_and_can_be_read(tmp_path):
    log = CurveLog(tmp_path / "run.csv")
    for epoch in (1, 2, 3):
        log.append(epoch=epoch, loss=1 / epoch, val_accuracy=None if epoch == 2 else 0.1 * epoch)
        assert len((tmp_path / "run.csv").read_text().splitlines()) == epoch + 1
    np.testing.assert_allclose(read_curve(tmp_path / "run.csv", "val_accuracy").values, [0.1, np.nan, 0.3])
    assert read_curve(tmp_path / "run.csv", "loss").elapsed_s is not None


def test_rows_that_are_none(tmp_path):
    log = CurveLog(tmp_path / "run.csv")
    with pytest.raises(InvalidSetupError, match="needs epoch or step"):
        log.append(loss=1.0)
    log.append(epoch=1, loss=1.0)
    with pytest.raises(InvalidSetupError, match="got also accuracy"):
        log.append(epoch=2, accuracy=1.0)
    with pytest.raises(RecordError, match="does not exist"):
        CurveLog(tmp_path / "none" / "run.csv")


def test_a_run_ends_when_its_target_is_reached(tmp_path):
    values = accuracies(100)
    callback = CurveCallback(tmp_path / "run.csv", target="val_accuracy>=0.9", num_epochs=100)
    epoch = stopped_at(callback, values)
    assert epoch == int(np.argmax(values >= 0.9)) + 1
    assert callback.reason == f"val_accuracy >= 0.9 was reached at epoch {epoch}"
    at_once = CurveCallback(tmp_path / "short.csv", target="val_accuracy>=0.9", num_epochs=100)
    assert stopped_at(at_once, [0.8, 0.95, 0.96]) == 2  # too few points for a forecast
    assert at_once.reason == "val_accuracy >= 0.9 was reached at epoch 2"


def test_a_hopeless_run_ends_early_and_says_why(tmp_path):
    callback = CurveCallback(tmp_path / "run.csv", target="val_accuracy>=0.9999", schedule="cosine:epochs=60")
    epoch = stopped_at(callback, accuracies(60, floor=0.2))
    assert 4 < epoch < 60
    assert "probability" in callback.reason
    patient = CurveCallback(
        tmp_path / "other.csv", target="val_accuracy>=0.9999", num_epochs=60, stop_when_hopeless=False
    )
    assert stopped_at(patient, accuracies(60, floor=0.2)) is None
    assert patient.forecast.progress == 1


def test_without_a_target_or_with_a_changing_rate_the_run_goes_on(tmp_path):
    assert stopped_at(CurveCallback(tmp_path / "a.csv"), accuracies(10)) is None
    callback = CurveCallback(tmp_path / "b.csv", target="val_accuracy>=0.99", num_epochs=20)
    for epoch, value in enumerate(accuracies(20), start=1):
        callback.log(epoch, val_accuracy=value, learning_rate=0.9**epoch)
    assert callback.forecast is not None


def test_logged_rates_that_follow_a_cosine_are_the_schedule(tmp_path):
    callback = CurveCallback(tmp_path / "run.csv", target="val_accuracy>=0.99", num_epochs=30)
    for epoch, value in enumerate(accuracies(15), start=1):
        callback.log(epoch, val_accuracy=value, learning_rate=0.05 * (1 + np.cos(np.pi * epoch / 30)))
    assert callback.forecast.tier == "schedule"


def test_a_schedule_object_needs_a_length(tmp_path):
    with pytest.raises(InvalidSetupError, match="num_epochs"):
        CurveCallback(tmp_path / "a.csv", target="loss<=1", schedule=lambda step: 0.1)
    CurveCallback(tmp_path / "a.csv", target="loss<=1", schedule=lambda step: 0.1, num_epochs=10)


def test_a_plain_torch_loop_with_its_own_scheduler(tmp_path):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    callback = CurveCallback(
        tmp_path / "run.csv", target="val_accuracy>=0.93", schedule=scheduler, num_epochs=30
    )
    for epoch, value in enumerate(accuracies(12), start=1):
        callback.log(epoch, val_accuracy=value, learning_rate=scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert callback.forecast.tier == "schedule"
    assert read_curve(tmp_path / "run.csv", "val_accuracy").learning_rates[0] == pytest.approx(0.1)


def test_the_history_of_a_callback_is_used(tmp_path):
    (tmp_path / "history").mkdir()
    log = CurveLog(tmp_path / "history" / "one.csv")
    for epoch, value in enumerate(accuracies(40, seed=1), start=1):
        log.append(epoch=epoch, val_accuracy=value)
    callback = CurveCallback(
        tmp_path / "run.csv",
        target="val_accuracy>=0.97",
        history=tmp_path / "history",
        stop_when_hopeless=False,
    )
    stopped_at(callback, accuracies(10))
    assert callback.forecast.tier == "history"
    assert callback.forecast.end_epoch == 40


def test_callbacks_of_frameworks_name_what_is_missing(tmp_path):
    for make, package in ((keras_callback, "keras"), (lightning_callback, "lightning")):
        if find_spec(package) is None:
            with pytest.raises(UsageError, match=package):
                make(tmp_path / "run.csv")


def test_keras_fit_writes_the_curve_and_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # which is loaded already
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    images, labels = np.random.default_rng(0).normal(size=(32, 4)), np.arange(32) % 2
    callback = keras_callback(tmp_path / "run.csv", target="loss<=99", num_epochs=8)
    found = model.fit(images, labels, epochs=8, verbose=0, callbacks=[callback])
    assert "loss <= 99 was reached at epoch 1" in callback.curve.reason or len(found.epoch) < 8
    assert read_curve(tmp_path / "run.csv", "loss").learning_rates is not None


def test_lightning_writes_the_curve_and_is_stopped(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    import torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch, index):
            self.log("val_loss", 1.0 / (1 + self.current_epoch))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)), batch_size=4)
    callback = lightning_callback(tmp_path / "run.csv", target="val_loss<=0.15", num_epochs=20)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    lightning.Trainer(max_epochs=20, callbacks=[callback], **quiet).fit(Module(), data, data)
    assert "was reached" in callback.curve.reason
    # 1 / 7 is the first below 0.15.
    assert len(read_curve(tmp_path / "run.csv", "val_loss")) == 7


def test_a_plain_loop_is_timed_and_its_record_has_a_run(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = LoopTimer(tmp_path / "r.sqlite", subject="mnist-cnn", model=model)
    for _ in range(2):
        with timer.epoch():
            for _ in range(5):
                model(torch.randn(16, 4)).sum().backward()
                optimizer.step()
                timer.step(16)
    written = timer.finish(val_accuracy_2=0.5)
    assert (len(timer.step_times_s), len(timer.warm_up_s)) == (8, 2)
    with RecordStore.open(tmp_path / "r.sqlite", create=False) as store:
        (read,) = store.measurements()
    assert read == written
    assert read.parameters["batch_size"] == 16
    assert read.parameters["dataset_size"] == 80
    assert read.results["num_parameters"] == 10
    run = read.run
    assert (run.setup.batch_size_per_device, run.model.model) == (16, "mnist-cnn")
    unknown = LoopTimer(tmp_path / "r.sqlite", subject="mnist-cnn")
    unknown.step()
    unknown.step()
    with pytest.raises(InvalidSetupError, match="samples of a step are not known"):
        unknown.finish()
    assert LoopTimer(tmp_path / "none.sqlite", subject="mnist-cnn").finish() is None


def test_lightning_is_timed_step_by_step(tmp_path):
    torch = pytest.importorskip("torch")
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch, index):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = lightning_timer(tmp_path / "r.sqlite", subject="mnist-cnn")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    data = torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=3)
    lightning.Trainer(max_epochs=2, callbacks=[callback], **quiet).fit(Module(), data)
    found = callback.timer.measurement
    assert found.parameters["batch_size"] == 3
    assert found.results["steps_per_epoch"] == 4
    assert len(callback.timer.epoch_times_s) == 2


TRAINER = """
import sys, torch, transformers
from forerun.script.callbacks import trainer_callback
shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
arguments = transformers.TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
    eval_strategy="epoch", report_to=[], save_strategy="no", disable_tqdm=True,
)
own = trainer_callback("run.csv", records="r.sqlite", subject="hf:config.json")
trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[own])
trainer.train()
print(own.timer.measurement.parameters["batch_size"], len(own.timer.epoch_times_s))
"""


def test_the_trainer_writes_a_curve_and_a_record(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(TRAINER)
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path, env=child_environment()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "8 3"
    curve = read_curve(tmp_path / "run.csv", "eval_loss")
    np.testing.assert_allclose(curve.epochs, [1, 2, 3])


WATCHED = """
import argparse, time, torch, forerun
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
live = forerun.watch(model, every_s=0.2)
other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
for epoch in range(args.epochs):
    for images in torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=4):
        model(images).sum().backward()
        optimizer.step()
        other.step()
        time.sleep(0.005)
    if epoch == 1: print(live.num_done, live.num_steps, *live.time_left_s())
"""


def test_a_watched_job_says_when_it_ends(tmp_path):
    (tmp_path / "train.py").write_text(WATCHED)
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path, env=child_environment()
    )
    assert done.returncode == 0, done.stderr
    num_done, num_steps, left_s, low_s, high_s = map(float, done.stdout.split())
    assert (num_done, num_steps) == (40, 60)
    assert 20 * 0.005 <= low_s <= left_s <= high_s
    first = done.stderr.splitlines()[0]
    assert first.startswith("forerun: step 11 of 60, ")
    assert ": the job ends at " in first


SLOW = """
import sys, time, torch, forerun
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.randn(64)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
estimate = forerun.predict("mlp", device="a100-sxm4-40gb", batch_size=4)
live = forerun.watch(model, num_steps=30, every_s=60, stream=sys.stdout, predicted=estimate)
for images in torch.utils.data.DataLoader(Slow(), batch_size=4):
    model(images).sum().backward()
    optimizer.step()
    if live.num_done == 30: break
"""


def test_a_watched_job_traces_slow_steps_once_and_names_their_causes(tmp_path):
    (tmp_path / "train.py").write_text(SLOW)
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path, env=child_environment()
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "waiting for the next batch" in first
    assert "times the prediction; data loader: " in second


def trials(pruner, finals, num_steps=30, direction="maximize", num_trials=None):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction=direction, pruner=pruner)
    sign = 1.0 if direction == "maximize" else -1.0

    def objective(trial):
        values = accuracies(num_steps, floor=finals[trial.number], seed=trial.number)
        if direction == "minimize":
            values = 1 - values
        for step, value in enumerate(values):
            trial.report(float(value), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return float(sign * max(sign * values))

    study.optimize(objective, n_trials=len(finals))
    return study


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_trials_that_cannot_win_are_pruned_and_winners_are_not(direction):
    pytest.importorskip("optuna")
    from forerun.script.callbacks import ForecastPruner

    finals = [0.1, 0.12, 0.08, 0.1, 0.35, 0.02]
    study = trials(ForecastPruner(30), finals, direction=direction)
    states = [trial.state.name for trial in study.trials]
    # The fourth ends behind the third by a quarter: it is seen later than the fifth, which is far off.
    assert states == ["COMPLETE"] * 3 + ["PRUNED"] * 2 + ["COMPLETE"]
    assert len(study.trials[3].intermediate_values) > len(study.trials[4].intermediate_values)
    assert 4 <= len(study.trials[4].intermediate_values) < 30


def test_a_pruner_waits_for_finished_trials_and_refuses_too_few_steps():
    pytest.importorskip("optuna")
    from forerun.script.callbacks import ForecastPruner

    study = trials(ForecastPruner(30, num_startup_trials=10), [0.05, 0.4, 0.4])
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    with pytest.raises(InvalidSetupError, match="two or more steps"):
        ForecastPruner(1)


def test_ray_tune_stops_a_trial_that_cannot_win_and_no_other():
    pytest.importorskip("ray.tune")
    from types import SimpleNamespace

    from forerun.script.callbacks import ray_scheduler

    scheduler = ray_scheduler(30)
    assert scheduler.set_search_properties("score", "max")
    ended = {}
    for number, floor in enumerate([0.1, 0.12, 0.08, 0.1, 0.35, 0.02]):
        trial = SimpleNamespace(trial_id=str(number))
        for step, value in enumerate(accuracies(30, floor=floor, seed=number).tolist(), start=1):
            result = {"training_iteration": step, "score": value}
            if step == 30:
                scheduler.on_trial_complete(None, trial, result)
            elif scheduler.on_trial_result(None, trial, result) == scheduler.STOP:
                ended[number] = step
                break
    assert set(ended) == {3, 4}  # of those that end behind an earlier one
    assert 4 <= ended[4] < ended[3] < 30


def test_ray_tune_pauses_a_trial_for_a_better_one_and_runs_all_in_the_end():
    pytest.importorskip("ray.tune")
    from types import SimpleNamespace

    from forerun.script.callbacks import ray_scheduler

    with pytest.raises(InvalidSetupError, match="stops no trial; leave out hopeless"):
        ray_scheduler(30, pauses=True, hopeless=0.1)
    scheduler = ray_scheduler(30, pauses=True)
    assert scheduler.set_search_properties("score", "max")
    floors = [0.3, 0.1, 0.4, 0.25]
    trials = [SimpleNamespace(trial_id=str(i), status="PENDING", done=0) for i in range(len(floors))]
    tuner, ended = SimpleNamespace(get_trials=lambda: trials), []
    while (trial := scheduler.choose_trial_to_run(tuner)) is not None:
        trial.status = "RUNNING"
        values = accuracies(30, floor=floors[int(trial.trial_id)], seed=int(trial.trial_id))
        while trial.status == "RUNNING":
            trial.done += 1
            result = {"training_iteration": trial.done, "score": float(values[trial.done - 1])}
            if trial.done == 30:
                scheduler.on_trial_complete(tuner, trial, result)
                trial.status = "TERMINATED"
                ended.append(trial.trial_id)
            elif scheduler.on_trial_result(tuner, trial, result) == scheduler.PAUSE:
                trial.status = "PAUSED"
    assert ended[0] == "1"
    assert sorted(ended) == ["0", "1", "2", "3"]


def test_importing_callbacks_loads_no_framework():
    code = (
        "import forerun.script.callbacks, sys; "
        "print([m for m in ('torch', 'keras', 'optuna', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
