"""Predicted beside measured, in the files of real loggers."""

import time

import pytest

import forerun
from forerun.base.errors import UsageError
from forerun.script.callbacks import RunLogger


@pytest.fixture(scope="module")
def estimate():
    return forerun.predict("torchvision:resnet18", device="l4")


def train(log, num_steps=9):
    for _ in range(num_steps):
        time.sleep(0.002)
        log.step()


def test_tensorboard_has_both_times(estimate, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is an extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        train(RunLogger(estimate, writer, every=4))
    found = EventAccumulator(str(tmp_path)).Reload()
    measured = found.Scalars("forerun/step_time_s")
    assert [row.step for row in measured] == [4, 8]
    assert 0.001 < measured[0].value < 1
    predicted = found.Scalars("forerun/predicted_step_time_s")[0].value
    assert predicted == pytest.approx(estimate.step_time_s.value, rel=1e-6)


def test_a_lightning_logger_writes_them_to_its_csv(estimate, tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason="lightning is in the group dev")
    logger = loggers.CSVLogger(str(tmp_path))
    train(RunLogger(estimate, logger, every=4))
    logger.save()
    (file,) = tmp_path.rglob("metrics.csv")
    assert "forerun/measured_over_predicted" in file.read_text()


def test_mlflow_writes_them_to_its_folder(estimate, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is no dependency")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    with mlflow.start_run() as run:
        train(RunLogger(estimate, mlflow, every=4))
    assert mlflow.get_run(run.info.run_id).data.metrics["forerun/step_time_s"] > 0.001


def test_wandb_joins_the_next_row_of_the_script(estimate, tmp_path):
    wandb = pytest.importorskip("wandb", reason="wandb is no dependency")
    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off"))
    log = RunLogger(estimate, run, every=4)
    train(log)
    run.log({"loss": 1.0})
    assert run.summary["forerun/step_time_s"] > 0.001
    run.finish()


def test_another_object_is_refused(estimate):
    with pytest.raises(
        UsageError, match="expected a SummaryWriter, mlflow, a run of W&B or a logger of Lightning, got int"
    ):
        RunLogger(estimate, 3)
