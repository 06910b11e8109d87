"""Curves from files, and every file that cannot be one."""

import json
import sqlite3
import struct
from contextlib import closing

import numpy as np
import pytest

from forerun.base.errors import InvalidSetupError, RecordError
from forerun.jobs.forecasting.curve import clean, parse_target
from forerun.jobs.forecasting.curve_files import find_curve_files, read_curve
from forerun.jobs.forecasting.text_logs import read_text_log


def write(tmp_path, text, name="run.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_plain_csv(tmp_path):
    path = write(tmp_path, "epoch,accuracy,lr,elapsed_s\n1,0.5,0.1,10\n2,0.6,0.1,20\n3,0.7,0.05,30\n")
    curve = read_curve(path)
    assert (curve.metric, curve.is_rising, curve.unit) == ("accuracy", True, "epoch")
    np.testing.assert_array_equal(curve.epochs, [1, 2, 3])
    np.testing.assert_array_equal(curve.learning_rates, [0.1, 0.1, 0.05])
    assert curve.epoch_time_s() == 10


def test_keras_csv_logger_counts_epochs_from_zero(tmp_path):
    path = write(
        tmp_path,
        "epoch,accuracy,loss,val_accuracy,val_loss\n0,.5,1.2,.4,1.3\n1,.6,1.0,.5,1.1\n2,.7,.9,.6,1.\n",
    )
    curve = read_curve(path, "accuracy")
    np.testing.assert_array_equal(curve.epochs, [1, 2, 3])
    np.testing.assert_array_equal(curve.values, [0.5, 0.6, 0.7])
    assert read_curve(path).metric == "val_accuracy"
    assert read_curve(path, "val_loss").is_rising is False
    named = write(tmp_path, path.read_text(encoding="utf-8"), "training.log")  # as in Keras' own examples
    np.testing.assert_array_equal(read_curve(named).values, read_curve(path).values)
    assert find_curve_files(tmp_path) == [path, named]


def test_lightning_csv_logger_has_gaps(tmp_path):
    rows = ["epoch,lr-SGD,step,train_loss,val_acc"]
    for epoch in range(5):
        rows += [f",0.1,{100 * epoch + 9},,", f"{epoch},,{100 * epoch + 49},{1 / (epoch + 1)},"]
        rows += [f"{epoch},,{100 * epoch + 99},,{0.5 + 0.05 * epoch}"]
    curve = read_curve(write(tmp_path, "\n".join(rows) + "\n"), "acc")
    np.testing.assert_array_equal(curve.epochs, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(curve.values, 0.5 + 0.05 * np.arange(5))
    np.testing.assert_allclose(curve.learning_rates, 0.1)
    np.testing.assert_array_equal(curve.steps, 100 * np.arange(5) + 99)
    np.testing.assert_allclose(curve.training_losses, 1 / np.arange(1, 6))
    assert read_curve(tmp_path / "run.csv", "train_loss").training_losses is None


def test_optimus_step_log_becomes_a_point_an_epoch_and_steps_are_no_epochs(tmp_path):
    rows = ["epoch,step,loss,acc"]
    rows += [f"{e},{s},{2 - 0.3 * e},{0.1 * e}" for e in range(5) for s in range(0, 50, 10)]
    curve = read_curve(write(tmp_path, "\n".join(rows)), "loss")
    np.testing.assert_array_equal(curve.epochs, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(curve.values, 2 - 0.3 * np.arange(5))
    assert curve.steps_per_epoch() == pytest.approx(41, rel=0.3)


def test_a_step_log_of_two_epochs_keeps_its_rows_at_fractions(tmp_path):
    rows = ["epoch,step,loss"] + [f"{s // 100},{s},{2 - s / 200}" for s in range(10, 200, 10)]
    curve = read_curve(write(tmp_path, "\n".join(rows)), "loss")
    assert len(curve) == 19
    assert 0 < curve.epochs[0] < 0.2
    assert curve.epochs[-1] == pytest.approx(1.9, abs=0.05)


def test_steps_alone_stay_steps(tmp_path):
    curve = read_curve(write(tmp_path, "step,val_loss\n0,3\n125,2\n250,1.5\n"), "val_loss")
    assert curve.unit == "step"
    np.testing.assert_array_equal(curve.epochs, [125, 250, 375])
    assert curve.steps_per_epoch() == 1


def test_a_wall_clock_is_counted_from_its_first_row(tmp_path):
    curve = read_curve(write(tmp_path, "epoch,acc,wall_time\n1,.1,1700000000\n2,.2,1700000060\n"), "acc")
    np.testing.assert_array_equal(curve.elapsed_s, [0, 60])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a header and rows"),
        ("epoch,accuracy\n", "expected a header and rows"),
        ("price\n0.1\n0.2\n", "at least two columns"),
        ("epoch,accuracy\n1,0.5\n2,good\n", "expected a number in column 'accuracy', row 3, got 'good'"),
        (
            "epoch,accuracy\n1,0.5\n3,0.6\n2,0.7\n",
            "must be above zero and rise from row to row, got 2 in row 3",
        ),
        ("epoch,step,loss\n1,10,2\n1,5,1\n2,20,1\n", "steps must rise from row to row within an epoch"),
        ("epoch,accuracy\n1,nan\n2,nan\n", "every value of 'accuracy' is NaN"),
        ("price,area\n1,0.5\n2,0.6\n", "expected a column 'epoch' or 'step'"),
        ("epoch,lr\n1,0.5\n2,0.6\n", "expected a metric beside epoch"),
    ],
)
def test_a_file_that_is_no_curve_is_one_clear_message(tmp_path, text, words):
    with pytest.raises(RecordError, match=words):
        read_curve(write(tmp_path, text))


def test_values_alone_are_one_an_epoch(tmp_path):
    curve = read_curve(write(tmp_path, "val_accuracy\n0.1\n0.2\n0.4\n"))
    assert (curve.metric, curve.epochs.tolist()) == ("val_accuracy", [1.0, 2.0, 3.0])


def test_an_unknown_metric_lists_the_known_ones(tmp_path):
    path = write(tmp_path, "epoch,val_accuracy,val_loss\n1,.1,2\n2,.2,1\n")
    with pytest.raises(InvalidSetupError, match=r"no metric 'bleu'.*the file has val_accuracy, val_loss"):
        read_curve(path, "bleu")
    with pytest.raises(InvalidSetupError, match="did you mean val_accuracy"):
        read_curve(path, "val_acuracy")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RecordError, match="cannot be read"):
        read_curve(tmp_path / "none.csv")
    with pytest.raises(RecordError, match="holds no CSV"):
        find_curve_files(tmp_path)
    with pytest.raises(RecordError, match="which is none"):
        find_curve_files(tmp_path / "none")


# TensorBoard: files made byte by byte as its writer makes them.


def varint(value):
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def field(number, kind, content):
    return varint(number << 3 | kind) + (varint(len(content)) + content if kind == 2 else content)


def event(step, tag, value, as_tensor=False):
    if as_tensor:
        tensor = field(1, 0, b"\x01") + field(5, 2, struct.pack("<f", value))
        inside = field(1, 2, tag.encode()) + field(8, 2, tensor)
    else:
        inside = field(1, 2, tag.encode()) + field(2, 5, struct.pack("<f", value))
    clock = field(1, 1, struct.pack("<d", 1.7e9 + 60 * step))
    message = clock + field(2, 0, varint(step)) + field(5, 2, field(1, 2, inside))
    return struct.pack("<Q", len(message)) + b"\0" * 4 + message + b"\0" * 4


def test_tensorboard_events_of_both_kinds_of_writer(tmp_path):
    content = b"".join(event(s, "val/acc", 0.1 * s, as_tensor=s % 2 == 0) for s in range(1, 6))
    path = tmp_path / "events.out.tfevents.1.host"
    path.write_bytes(content + event(6, "val/acc", 0.6)[:20])  # the last record is still being written
    curve = read_curve(path, "acc", is_rising=True)
    assert curve.unit == "step"
    np.testing.assert_allclose(curve.values, 0.1 * np.arange(1, 6), rtol=1e-6)
    assert curve.epoch_time_s() == pytest.approx(60)
    assert len(read_curve(tmp_path, "val/acc")) == 5


def test_torchs_own_writer_is_read(tmp_path):
    pytest.importorskip("tensorboard.compat")
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(tmp_path)
    for step in range(1, 5):
        writer.add_scalar("loss", 1 / step, step)
    writer.close()
    np.testing.assert_allclose(read_curve(tmp_path, "loss").values, [1, 1 / 2, 1 / 3, 1 / 4], rtol=1e-6)


def test_a_damaged_event_file_is_said_to_be_one(tmp_path):
    path = tmp_path / "events.out.tfevents.2"
    path.write_bytes(struct.pack("<Q", 4) + b"\0" * 4 + b"\xff\xff\xff\xff" + b"\0" * 4)
    with pytest.raises(RecordError, match="damaged record"):
        read_curve(path, "loss")
    path.write_bytes(b"")
    with pytest.raises(RecordError, match="holds no scalar"):
        read_curve(path, "loss")


@pytest.mark.parametrize("text", ["accuracy", "speed=0.9", ">=0.9", "accuracy>=x", "accuracy>=0.9.2"])
def test_a_target_that_is_none(text):
    with pytest.raises(InvalidSetupError, match="compare a metric with a number"):
        parse_target(text)


def test_targets_know_their_sense():
    assert parse_target("val_acc > 92%").value == pytest.approx(0.92)
    assert parse_target("loss<=1.5").is_rising is False
    assert parse_target("accuracy=0.9") == parse_target("accuracy>=0.9")
    assert parse_target("val_loss = 1.5") == parse_target("val_loss<=1.5")
    assert parse_target("loss<=1.5").is_reached_by(1.4)
    assert not parse_target("accuracy>=0.9").is_reached_by(0.89)


# Logs as trainers write them.

TRAINER_STATE = {
    "epoch": 1.5,
    "global_step": 150,
    "max_steps": 300,
    "num_train_epochs": 3,
    "log_history": [
        {"epoch": 0.5, "grad_norm": 1.1, "learning_rate": 2e-05, "loss": 1.4, "step": 50},
        {"epoch": 0.5, "eval_accuracy": 0.6, "eval_loss": 1.2, "eval_runtime": 3.2, "step": 50},
        {"epoch": 1.0, "grad_norm": 1.0, "learning_rate": 1.5e-05, "loss": 1.0, "step": 100},
        {"epoch": 1.0, "eval_accuracy": 0.7, "eval_loss": 1.0, "eval_runtime": 3.2, "step": 100},
        {"epoch": 1.5, "grad_norm": 1.0, "learning_rate": 1e-05, "loss": 0.8, "step": 150},
        {"epoch": 1.5, "eval_accuracy": 0.75, "eval_loss": 0.9, "eval_runtime": 3.2, "step": 150},
        {"epoch": 1.5, "train_runtime": 100.0, "total_flos": 1e12, "train_loss": 1.07, "step": 150},
    ],
}


def test_trainer_state_of_hugging_face(tmp_path):
    write(tmp_path, json.dumps(TRAINER_STATE), "trainer_state.json")
    curve = read_curve(tmp_path)
    assert (curve.metric, curve.is_rising, curve.unit) == ("eval_accuracy", True, "epoch")
    np.testing.assert_allclose(curve.epochs, [0.5, 1.0, 1.5])
    np.testing.assert_allclose(curve.learning_rates, [2e-5, 1.5e-5, 1e-5])
    np.testing.assert_array_equal(curve.steps, [50, 100, 150])
    assert curve.planned_end == pytest.approx(3.0)
    loss = read_curve(tmp_path / "trainer_state.json", "loss")
    np.testing.assert_allclose(loss.values, [1.4, 1.0, 0.8])
    assert loss.notes == ("4 rows without a value of loss were skipped",)
    assert read_curve(tmp_path, "accuracy").metric == "eval_accuracy"
    assert find_curve_files(tmp_path) == [tmp_path / "trainer_state.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"log_history": []}', '{"log_history": 3}'])
def test_a_trainer_state_without_history_is_refused(tmp_path, text):
    with pytest.raises(
        RecordError, match=r"log history is empty|expected the state of a Hugging Face"
    ) as refused:
        read_curve(write(tmp_path, text, "trainer_state.json"))
    assert "Error" not in str(refused.value)


def test_cells_in_per_cent_are_shares(tmp_path):
    curve = read_curve(write(tmp_path, "epoch,val_accuracy\n1,10%\n2,20.5 %\n"))
    np.testing.assert_allclose(curve.values, [0.1, 0.205])


def test_results_of_yolo(tmp_path):
    header = (
        "                  epoch,             time,       train/box_loss,  metrics/precision(B),     metrics/recall(B),"
        "      metrics/mAP50(B),   metrics/mAP50-95(B),          val/box_loss,                lr/pg0"
    )
    rows = [
        f"{e},{60 * e},{2 - 0.1 * e},0.5,0.5,{0.1 * e},{0.05 * e},1.5,{0.01 - 0.001 * e}" for e in range(1, 6)
    ]
    curve = read_curve(write(tmp_path, "\n".join([header, *rows]), "results.csv"))
    assert curve.metric == "metrics/mAP50-95(B)"
    np.testing.assert_allclose(curve.values, 0.05 * np.arange(1, 6))
    np.testing.assert_allclose(curve.learning_rates, 0.01 - 0.001 * np.arange(1, 6))
    assert curve.epoch_time_s() == 60
    assert read_curve(tmp_path / "results.csv", "mAP50", True).metric == "metrics/mAP50(B)"


def test_results_of_yolov5_have_the_rate_of_its_weights_not_of_its_biases(tmp_path):
    header = "epoch, metrics/mAP_0.5, metrics/mAP_0.5:0.95, val/box_loss, x/lr0, x/lr1"
    rows = [f"{e},{0.1 * e},{0.05 * e},1.5,{0.1 / (e + 1)},{0.01 - 0.001 * e}" for e in range(5)]
    curve = read_curve(write(tmp_path, "\n".join([header, *rows]), "results.csv"))
    assert curve.metric == "metrics/mAP_0.5:0.95"
    np.testing.assert_allclose(curve.learning_rates, 0.01 - 0.001 * np.arange(5))


def test_rows_of_a_history_without_epochs_are_epochs(tmp_path):
    rows = [f"{i},{1 / (i + 1)},{0.1 * i}" for i in range(5)]
    curve = read_curve(
        write(tmp_path, "\n".join([",loss,val_accuracy", *rows]))
    )  # as pandas writes Keras' history
    assert (curve.metric, curve.unit, curve.epochs.tolist()) == ("val_accuracy", "epoch", [1, 2, 3, 4, 5])
    assert curve.notes == ("no column of epochs or steps: each row is taken as an epoch",)


@pytest.mark.parametrize(
    ("header", "row", "metric"),
    [
        ("epoch,train_loss,valid_loss,accuracy,time", "{i},1.{i},1.{i},0.{i},4", "accuracy"),  # fastai's
        (
            "epoch,loss,accuracy,val_loss,val_time",
            "{i},1.{i},0.{i},1.{i},4",
            "val_loss",
        ),  # accuracy of training
        ("epoch,eval_loss,eval_wer", "{i},1.{i},0.{i}", "eval_wer"),
        (
            "epoch,train/box_loss,metrics/mAP50(B),val/box_loss",
            "{i},1.{i},0,0",
            "train/box_loss",
        ),  # switched off
    ],
)
def test_the_metric_of_validation_is_taken_that_users_compare(tmp_path, header, row, metric):
    rows = [row.format(i=i) for i in range(1, 6)]
    assert read_curve(write(tmp_path, "\n".join([header, *rows]))).metric == metric


def test_rates_of_rows_between_those_that_log_them_lie_on_the_line(tmp_path):
    rows = ["epoch,step,lr,loss,eval_loss"]
    for step in range(30, 700, 30):
        rows += [f"{step / 100},{step},{1 - step / 1000},2,"]
        rows += [f"{step // 100},{step // 100 * 100},,,1.{9 - step // 100}"] if step % 100 < 30 else []
    curve = read_curve(write(tmp_path, "\n".join(rows)), "eval_loss")
    np.testing.assert_allclose(curve.learning_rates, 1 - curve.steps / 1000)


def test_a_log_of_modded_nanogpt(tmp_path):
    lines = [
        "import os",
        "s:0 what a script prints of itself",
        "step:0/500 val_loss:10.8258 train_time:0ms step_avg:nanms",
    ]
    for step in range(125, 501, 125):
        lines.append(f"step:{step - 1}/500 train_time:{step * 180}ms step_avg:180.2ms")
        lines.append(
            f"step:{step}/500 val_loss:{6 - step / 250:.4f} train_time:{step * 183}ms step_avg:183.00ms"
        )
    curve = read_curve(write(tmp_path, "\n".join(lines), "log.txt"))
    assert (curve.metric, curve.unit, curve.planned_end) == ("val_loss", "step", 500)
    np.testing.assert_array_equal(curve.epochs, [125, 250, 375, 500])
    np.testing.assert_allclose(curve.values, [5.5, 5.0, 4.5, 4.0])
    np.testing.assert_allclose(curve.elapsed_s, 0.183 * np.arange(125, 501, 125))
    assert find_curve_files(tmp_path) == [tmp_path / "log.txt"]


def test_logs_of_llm_c_and_build_nanogpt(tmp_path):
    lines = [
        "s:0 tel:11.0",
        "s:250 tel:6.1557",
        "s:251 trl:6.1 lr:0.0006 norm:0.5",
        "s:500 tel:5.5",
        "s:500 eval:0.3",
    ]
    curve = read_curve(write(tmp_path, "\n".join(lines), "main.log"), "val_loss")
    np.testing.assert_allclose(curve.values, [6.1557, 5.5])
    plain = [
        "0 val 10.95",
        "0 train 10.95",
        "250 val 5.9650",
        "251 train 5.9",
        "500 val 5.2",
        "500 hella 0.28",
    ]
    curve = read_curve(write(tmp_path, "\n".join(plain), "log.txt"))
    np.testing.assert_array_equal(curve.epochs, [250, 500])
    np.testing.assert_allclose(curve.values, [5.965, 5.2])


def loss_at(place):
    return 3 + 10 / (place + 1)


PRINTED = {
    "nanogpt": (
        lambda e: (
            f"step {e}: train loss 9.9, val loss {loss_at(e):.4f}\niter {e}: loss 9.8, time 251.02ms, mfu 51.2%"
        ),
        ("val_loss", "step", None),
    ),
    "megatron": (
        lambda e: (
            f" [2024-05-01 10:00:10] iteration {e:8d}/    5000 | consumed samples: 2560 | elapsed time per iteration "
            f"(ms): 2412.5 | learning rate: 1.5E-05 | lm loss: {loss_at(e):.6E} | loss scale: 1.0 | grad norm: 1.2 |"
        ),
        ("lm_loss", "step", 5000),
    ),
    "torchtitan": (
        lambda e: (
            f"[rank0]:\x1b[31mstep: {e:2d}  \x1b[32mloss: {loss_at(e):7.4f}  \x1b[33mmemory: 47.65GiB(50.16%)  "
            "tps: 5,512\n - INFO - Training starts at step 1, total steps 1000 (warmup 200)"
        ),
        ("loss", "step", 1000),
    ),
    "fairseq": (
        lambda e: (
            f'2023-01-01 10:00:00 | INFO | valid | {{"epoch": {e}, "valid_loss": "{loss_at(e):.4f}", '
            f'"valid_num_updates": "{100 * e}", "valid_best_loss": "1"}}'
        ),
        ("valid_loss", "epoch", None),
    ),
    "trainer": (
        lambda e: (
            f"{{'loss': 9.0, 'learning_rate': 2e-05, 'epoch': {e}}}\n{{'eval_loss': {loss_at(e):.4f}, 'epoch': {e}}}"
        ),
        ("eval_loss", "epoch", None),
    ),
    "trainer with bars": (
        lambda e: (
            f"\r {e}%|###      | {500 * e}/15000 [01:00<02:20,  5.00it/s]\r 50%|##  | 5/10 [00:01<00:01]\n"
            f"{{'eval_loss': {loss_at(e):.4f}, 'epoch': {e}}}"
        ),
        ("eval_loss", "epoch", 30),
    ),
    "tqdm": (
        lambda e: f"\r {e}%|###      | {e}/300 [01:00<02:20,  5.00it/s, loss={loss_at(e):.4f}]",
        ("loss", "step", 300),
    ),
    "detectron2": (
        lambda e: (
            f"[07/29 15:05:20 d2.utils.events]:  eta: 1 day, 0:59:{59 - e:02d}  iter: {e}  "
            f"total_loss: {loss_at(e):.4f}  loss_cls: 4.3  time: 1.0  data_time: 0.01  lr: 1.6e-05  max_mem: 2443M"
        ),
        ("total_loss", "step", 90000),
    ),
    "keras": (
        lambda e: f"Epoch {e}/50\n100/100 - 5s - loss: 9.0 - acc: 0.5 - val_loss: {loss_at(e):.4f}",
        ("val_loss", "epoch", 50),
    ),
    "examples": (
        lambda e: (
            f"Epoch: [{e}][ 100/5005]\tTime  0.310 ( 0.350)\tLoss 1.2e+00 (1.3e+00)\tAcc@1  65.23 ( 64.10)\n"
            f" * Acc@1 {loss_at(e):.4f} Acc@5 90.000"
        ),
        ("val_acc@1", "epoch", None),
    ),
    "openmmlab": (
        lambda e: (
            f"2023/05/05 10:00:{e:02d} - mmengine - INFO - Epoch(train)  [{e}][ 50/7330]  lr: 2.0e-02  loss: 9.0\n"
            f"2023/05/05 10:01:{e:02d} - mmengine - INFO - Epoch(val) [{e}][625/625]    pascal/mAP: {loss_at(e):.4f}"
        ),
        ("val_pascal/map", "epoch", None),
    ),
    "espnet": (
        lambda e: (
            f"(trainer:334) INFO: {e}epoch results: [train] loss_ctc=9.0, acc=0.9, loss=9.5, time=1 hour, "
            f"[valid] loss_ctc=9.1, wer=0.3, acc={loss_at(e):.4f}, loss=9.6, time=2 minutes"
        ),
        ("val_acc", "epoch", None),
    ),
    "fastai": (
        lambda e: f"epoch     train_loss  valid_loss  time\n{e:<10}9.000000    {loss_at(e):.6f}    00:15",
        ("valid_loss", "epoch", None),
    ),
    "yolo": (
        lambda e: (
            "      Epoch    GPU_mem   box_loss   cls_loss  Instances       Size\n"
            f"       {e}/25     0.721G      1.222      1.679          5        512: 100% ━━━━ 94/94 2:04\n"
            "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100% ━━ 94/94\n"
            f"                   all       1500       1699      0.823      0.739       0.82 {loss_at(e):.4f}"
        ),
        ("metrics/map50-95", "epoch", 25),
    ),
    "stable-baselines3": (
        lambda e: (
            f"{'-' * 31}\n| rollout/           |          |\n|    ep_rew_mean     | {loss_at(e):.4f} |\n"
            f"| time/              |          |\n|    time_elapsed    | {e}        |\n|    total_timesteps | {e} |\n"
            "| train/             |          |\n|    loss            | 82.3     |"
        ),
        ("rollout/ep_rew_mean", "step", None),
    ),
    "marian": (
        lambda e: f"[2019-02-01 00:00:03] Ep. 1 : Up. {e} : Sen. 7,000 : Cost {loss_at(e):.8f} : Time 14.53s",
        ("cost", "step", None),
    ),
    "xgboost": (
        lambda e: (
            f"[{e - 1}]\tvalidation_0-logloss:{loss_at(e) / 2:.4f}\tvalidation_1-logloss:{loss_at(e):.4f}"
        ),
        ("validation_1-logloss", "step", None),
    ),
    "litgpt": (
        lambda e: (
            f"Epoch 1 | iter {4 * e} step {e} | loss train: {loss_at(e):.4f}, val: n/a | iter time: 230.11 ms"
        ),
        ("train_loss", "step", None),
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_scripts_print_is_read(tmp_path, name):
    line, (metric, unit, planned) = PRINTED[name]
    places = np.arange(1, 7)
    path = write(tmp_path, "\n".join(["using world size: 8", *map(line, places.tolist())]), f"{name}.log")
    curve = read_curve(path, None if name == "examples" else "val_loss" if name == "keras" else None)
    assert (curve.metric, curve.unit, curve.planned_end) == (metric, unit, planned)
    np.testing.assert_array_equal(curve.epochs, places)
    np.testing.assert_allclose(curve.values, loss_at(places), atol=1e-4)
    if name == "keras":  # the line has both losses
        np.testing.assert_allclose(curve.training_losses, 9.0)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_columns_of_words_are_left_out_and_other_separators_read(tmp_path, mark):
    rows = [mark.join(["2024-05-01 10:00:00", str(e), str(1 / e), "fit"]) for e in range(1, 6)]
    path = write(tmp_path, "\n".join([mark.join(["timestamp", "epoch", "val_loss", "phase"]), *rows]))
    np.testing.assert_allclose(read_curve(path).values, 1 / np.arange(1, 6))
    if mark != ",":
        written = write(tmp_path, path.read_text(encoding="utf-8").replace(".", ","))
        np.testing.assert_allclose(read_curve(written).values, 1 / np.arange(1, 6))


def test_a_split_behind_a_metric_is_that_of_the_metric(tmp_path):
    lines = [f"Step {s} | Loss/train: {9 / s} | Loss/val: {10 / s} | LR 3.0e-4" for s in range(1, 6)]
    curve = read_curve(write(tmp_path, "\n".join(lines), "run.log"))
    assert (curve.metric, curve.values[1]) == ("val_loss", 5.0)


def test_the_table_of_spacy_is_read_by_its_header(tmp_path):
    rows = "".join(f"  {k // 4}    {200 * k}    28{k}.0   1{k}.5   0.{k + 1}\n" for k in range(8))
    file = tmp_path / "train.log"
    file.write_text(
        "E    #       LOSS TOK2VEC  LOSS NER  SCORE \n---  ------  ------  ------  -----\n" + rows
    )
    curve = read_curve(file)
    assert (curve.metric, curve.unit, curve.is_rising) == ("score", "step", True)
    assert curve.epochs.tolist() == [200.0 * k for k in range(1, 8)]


def test_a_table_in_markdown_is_read_by_its_header(tmp_path):
    rows = [
        "| 1 | 0.268 | 95.5% | 49 min |",
        "| 2 | .136 | 95.1% | 51 min |",
        "| **3** | **0.102** | 97.4% ✓ | |",
    ]
    text = [
        "# Model",
        "",
        "| Epoch | Val loss | Val accuracy | Time |",
        "|---:|:---|---|---|",
        *rows,
        "",
        "Done.",
    ]
    curve = read_curve(write(tmp_path, "\n".join(text), "README.md"))
    assert (curve.metric, curve.unit, curve.values.tolist()) == ("val_accuracy", "epoch", [95.5, 95.1, 97.4])
    curve = read_curve(write(tmp_path, "\n".join(text), "README.md"), "val_loss")
    assert curve.values.tolist() == [0.268, 0.136, 0.102]
    with pytest.raises(RecordError, match="holds no CSV"):
        find_curve_files(tmp_path)  # most notes beside logs are none
    card = """- num_epochs: 4
    | Training Loss | Epoch | Step | Validation Loss |
    | No log | 1.0 | 50 | 0.7 |
    | .6 | 2.0 | 100 | 0.5 |
    | .5 | 3.0 | 150 | 0.4 |
    | Model | Epoch | Step | Validation Loss |
    | base | 9 | 450 | 0.1 |"""
    curve = read_curve(write(tmp_path, card, "card.md"))  # of Transformers' Trainer
    assert (curve.metric, curve.planned_end, curve.values.tolist()) == ("validation_loss", 4, [0.7, 0.5, 0.4])
    words = "| Training Loss | Step | Validation Loss | Wer |\n" + "".join(
        f"| 1,{k}5 | {k}000 | 0,{9 - k}1 | 0,{8 - k}00 |\n" for k in range(1, 6)
    )
    curve = read_curve(write(tmp_path, words, "words.md"))  # its commas are points
    assert (curve.metric, curve.values.tolist()) == ("wer", [0.7, 0.6, 0.5, 0.4, 0.3])
    headed = "- Best Accuracy: 0.8 (Epoch 4)\n" + "".join(
        f"## Epoch no. = {k}\n- Accuracy: 0.{k + 3}\n- Validation Loss: 1.{9 - k}\n" for k in range(1, 6)
    )
    assert read_curve(write(tmp_path, headed, "headed.md")).epochs.tolist() == [1, 2, 3, 4, 5]


def test_streamed_data_whose_epochs_begin_anew_stand_at_their_steps(tmp_path):
    places = [(1, 0.01), (2, 0.02), (3, 0.03), (4, 0.01), (5, 0.02), (6, 0.03), (7, 0.04)]
    history = [{"step": 1000 * s, "epoch": e, "eval_wer": 60 - s} for s, e in places]
    state = json.dumps({"log_history": history, "max_steps": 100_000})
    curve = read_curve(write(tmp_path, state, "trainer_state.json"))
    assert (curve.unit, curve.planned_end) == ("step", 100_000)
    assert curve.epochs.tolist() == [1000.0 * s for s, _ in places]
    assert "begin anew" in curve.notes[0]


def test_rates_of_two_optimizers_are_no_metric(tmp_path):
    text = "epoch,g_lr,d_lr,g_loss\n" + "\n".join(f"{e},0.0002,{0.001 / e},{5 / e}" for e in range(1, 6))
    curve = read_curve(write(tmp_path, text))
    assert curve.metric == "g_loss"
    assert curve.learning_rates is not None


def test_tokens_are_a_place_and_no_metric(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text(
        "micro_step,tokens,loss_avg,lr\n" + "".join(f"{8 * k},{k}e6,{3 / k},0.1\n" for k in range(1, 7))
    )
    assert read_curve(file).metric == "loss_avg"
    file.write_text("tokens_seen,loss\n" + "".join(f"{k}e6,{3 / k}\n" for k in range(1, 7)))
    curve = read_curve(file)
    assert (curve.unit, curve.epochs[-1]) == ("step", 6e6)
    assert any("counted in tokens_seen" in note for note in curve.notes)


def test_columns_of_json_beside_other_facts_are_read(tmp_path):
    file = tmp_path / "training_history.json"
    losses = [3 / k for k in range(1, 8)]
    file.write_text(
        json.dumps({"epochs": [*range(1, 8)], "train_loss": losses, "data": {"total": 830}, "best": 0.4})
    )
    curve = read_curve(file)
    assert (curve.metric, curve.unit, curve.values.tolist()) == ("train_loss", "epoch", losses)


def test_rows_of_json_are_read_whatever_the_file_is_called(tmp_path):
    rows = [{"env_info": "linux", "seed": 0}]
    for epoch in range(1, 6):
        rows += [{"epoch": epoch, "iter": i, "data_time": 0.1, "acc": 92.0, "loss": 1.0} for i in (50, 100)]
        rows.append({"epoch": epoch, "iter": 20, "bbox_mAP": 0.1 * epoch})
    curve = read_curve(write(tmp_path, "".join(f"{json.dumps(row)}\n" for row in rows), "run.log.json"))
    assert curve.metric == "bbox_mAP"
    np.testing.assert_allclose(curve.values, 0.1 * np.arange(1, 6))


def test_a_last_row_without_its_end_counts_if_it_is_whole(tmp_path):
    rows = "\n".join(json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 6))
    assert len(read_curve(write(tmp_path, rows, "whole.jsonl"))) == 5
    assert len(read_curve(write(tmp_path, rows[:-4], "cut.jsonl"))) == 4


def test_a_folder_of_checkpoints_is_its_last_state(tmp_path):
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"log_history": [{"step": s, "loss": 1.0} for s in range(100, step + 1, 100)]}
        write(tmp_path / f"checkpoint-{step}", json.dumps(state), "trainer_state.json")
    assert len(read_curve(tmp_path)) == 10


def test_a_metric_of_three_values_is_not_taken_by_itself(tmp_path):
    rows = [f"{s},{10 / s},{9 / s if s % 4 == 0 else ''}" for s in range(1, 13)]
    assert read_curve(write(tmp_path, "\n".join(["step,loss,val_loss", *rows]))).metric == "loss"


def test_the_metric_of_a_cut_is_that_of_a_log_that_ends_there(tmp_path):
    rows = [f"{s},{10 / s},{9 / s if s % 4 == 0 else ''}" for s in range(1, 25)]
    path = write(tmp_path, "\n".join(["step,loss,val_loss", *rows]))
    assert [read_curve(path, seen=share).metric for share in (0.1, 0.5, 0.7, 1.0)] == ["loss"] * 2 + [
        "val_loss"
    ] * 2


def test_episodes_and_progress_of_stable_baselines3(tmp_path):
    episodes = [
        '#{"t_start": 1708701891.7, "env_id": "Hopper"}',
        "r,l,t",
        "9.5,11,1.0",
        "8.0,22,1.1",
        "24.1,20,1.2",
    ]
    curve = read_curve(write(tmp_path, "\n".join(episodes), "monitor.csv"))
    assert (curve.metric, curve.is_rising, curve.unit) == ("reward", True, "step")
    np.testing.assert_array_equal(curve.epochs, [11, 33, 53])
    header = "time/iterations,time/time_elapsed,rollout/ep_rew_mean,time/total_timesteps,train/loss"
    rows = [header, *(f"{i},{2 * i},{-200 / i},{2048 * i},0.5" for i in range(1, 6))]
    curve = read_curve(write(tmp_path, "\n".join(rows), "progress.csv"))
    assert (curve.metric, curve.is_rising, curve.training_losses) == ("rollout/ep_rew_mean", True, None)
    np.testing.assert_array_equal(curve.epochs, 2048 * np.arange(1, 6))
    np.testing.assert_array_equal(curve.elapsed_s, 2 * np.arange(1, 6))


def test_a_text_without_such_lines_is_refused_and_no_curve_of_a_folder(tmp_path):
    path = write(tmp_path, "hello\nworld\n", "notes.txt")
    with pytest.raises(RecordError, match="expected lines such as"):
        read_curve(path)
    with pytest.raises(RecordError, match="holds no CSV"):
        find_curve_files(tmp_path)


def test_rows_of_an_epoch_that_come_twice_are_averaged_and_said(tmp_path):
    rows = "\n".join(
        f"{e},{v}" for e, v in [(1, 0.2), (2, 0.4), (2, 0.6), (3, 0.6), (4, 0.7), (5, 0.8), (5, 0.9)]
    )
    curve = read_curve(write(tmp_path, "epoch,val_accuracy\n" + rows))
    np.testing.assert_array_equal(curve.epochs, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(curve.values, [0.2, 0.5, 0.6, 0.7, 0.85])
    assert curve.notes == ("7 rows became 5 points: the rows of an epoch are one point, their mean",)


def test_a_column_of_rates_may_be_named(tmp_path):
    path = write(tmp_path, "epoch,acc,eta\n1,.1,.5\n2,.2,.4\n3,.3,.3\n")
    np.testing.assert_allclose(read_curve(path, "acc", rate="eta").learning_rates, [0.5, 0.4, 0.3])
    with pytest.raises(InvalidSetupError, match="no column 'rate' with the learning rate"):
        read_curve(path, "acc", rate="rate")


def test_a_column_that_stands_twice_is_refused(tmp_path):
    path = write(tmp_path, "epoch,acc,acc\n1,.1,.5\n2,.2,.4\n")
    with pytest.raises(RecordError, match="a name of its own for each column, got 'acc' 2 times"):
        read_curve(path, "acc")


# Trackers: W&B and MLflow, in the forms that their own packages write.

_OF_EXPORT = [f"{run} - val/loss{end}" for run in ("sun-1", "a - b") for end in ("", "__MIN", "__MAX")]
EXPORT = ",".join(f'"{name}"' for name in ["Step", *_OF_EXPORT])
EXPORT += """
"10","2.0","1.9","2.1","","",""
"15","","","","3","3","3"
"20","1.5","1.4","1.6","","",""
"30","1.2","1.2","1.2","2.5","2.5","2.5"
"""


def test_each_run_of_an_export_of_wandb_is_a_curve_of_its_own(tmp_path):
    path = write(tmp_path, EXPORT, "export.csv")
    assert find_curve_files(tmp_path) == [path / "sun-1", path / "a - b"]
    curve = read_curve(path / "sun-1", "loss")
    assert (curve.name, curve.metric, curve.unit) == ("sun-1", "val/loss", "step")
    np.testing.assert_array_equal(curve.epochs, [10, 20, 30])
    np.testing.assert_array_equal(read_curve(path / "a - b").values, [3, 2.5])
    with pytest.raises(InvalidSetupError, match=r"such as 'export.csv/sun-1', got ''.*it holds sun-1, a - b"):
        read_curve(path)
    with pytest.raises(InvalidSetupError, match="did you mean sun-1"):
        read_curve(path / "sun-2")
    single = write(tmp_path, "\n".join(",".join(r.split(",")[:4]) for r in EXPORT.splitlines()), "one.csv")
    np.testing.assert_array_equal(read_curve(single, "val/loss").values, [2, 1.5, 1.2])


HISTORY = [
    {"_step": 0, "_runtime": 5.0, "train/global_step": 100, "eval/loss": 2.0, "gradients/w": {"bins": [1]}},
    {"_step": 1, "_runtime": 6.0, "train/global_step": 150, "train/loss": 2.4},
    {"_step": 2, "_runtime": 10.0, "train/global_step": 200, "eval/loss": 1.5},
    {"_step": 3, "_runtime": 15.0, "train/global_step": 300, "eval/loss": 1.2},
]


def rows_of_history():
    columns = {
        name: {str(i): row.get(name) for i, row in enumerate(HISTORY)} for row in HISTORY for name in row
    }
    lines = "".join(json.dumps(row) + "\n" for row in HISTORY)
    return {
        "wandb-history.jsonl": lines + '{"_step": 4, "eval/l',  # the last row is still being written
        "history.json": json.dumps(HISTORY),
        "of_pandas.json": json.dumps(columns),
    }


@pytest.mark.parametrize(("name", "text"), rows_of_history().items())
def test_a_history_of_wandb_counts_the_steps_of_the_trainer(tmp_path, name, text):
    curve = read_curve(write(tmp_path, text, name))
    assert curve.metric == "eval/loss"
    np.testing.assert_array_equal(curve.epochs, [100, 200, 300])
    np.testing.assert_array_equal(curve.values, [2.0, 1.5, 1.2])
    assert curve.epoch_time_s() == pytest.approx(0.05)


@pytest.mark.parametrize("text", ["", "3\n", "[1]\n", "{}\n", '"hello"\n'])
def test_a_history_without_rows_is_refused(tmp_path, text):
    with pytest.raises(RecordError, match="expected") as refused:
        read_curve(write(tmp_path, text, "wandb-history.jsonl"))
    assert "dictionary update" not in str(refused.value)


def wandb_run(rows):
    def item(name, value):
        return field(1, 2, field(2, 2, name.encode()) + field(16, 2, json.dumps(value).encode()))

    content = b":W&B\xe1\xbe\0"
    for row in rows:
        left = field(2, 2, b"".join(item(name, value) for name, value in row.items()))
        kind = 1
        while True:
            room = 32768 - len(content) % 32768
            if room < 7:
                content += b"\0" * room
                continue
            part, left = left[: room - 7], left[room - 7 :]
            kind = {(1, False): 1, (1, True): 2, (3, True): 3, (3, False): 4}[kind, bool(left)]
            content += b"\0" * 4 + struct.pack("<HB", len(part), kind) + part
            if not left:
                break
            kind = 3
    return content


def test_a_wandb_file_is_read_over_its_blocks_and_to_its_torn_end(tmp_path):
    rows = [{"_step": s, "val_loss": 1 / (s + 1), "note": "x" * 50} for s in range(2000)]
    path = tmp_path / "run-1a2b.wandb"
    path.write_bytes(wandb_run(rows))
    curve = read_curve(tmp_path)
    assert curve.metric == "val_loss"
    np.testing.assert_allclose(curve.values, 1 / np.arange(1.0, 2001))
    path.write_bytes(wandb_run(rows)[:-5])
    assert len(read_curve(path)) == 1999
    path.write_bytes(b"nothing")
    with pytest.raises(RecordError, match="begins with ':W&B'"):
        read_curve(path)


def test_a_folder_of_mlflow_holds_a_run_with_its_length(tmp_path):
    run = tmp_path / "mlruns" / "1" / "0a1b"
    for name, values in {"val/loss": (2.0, 1.5, 1.2), "train_loss": (2.4, 1.6, 1.1)}.items():
        file = run / "metrics" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "".join(f"{1700000000000 + 5000 * i} {v} {10 * i + 10}\n" for i, v in enumerate(values))
        )
    (run / "meta.yaml").write_text("run_name: sun")
    (run / "params").mkdir()
    (run / "params" / "max_steps").write_text("200")
    assert find_curve_files(tmp_path) == [run]
    curve = read_curve(run)
    assert (curve.metric, curve.planned_end) == ("val/loss", 200)
    np.testing.assert_array_equal(curve.epochs, [10, 20, 30])
    np.testing.assert_array_equal(read_curve(run, "train_loss").values, [2.4, 1.6, 1.1])
    assert curve.epoch_time_s() == pytest.approx(0.5)
    (run / "metrics" / "train_loss").write_text("1700000000000 good 1")
    with pytest.raises(RecordError, match="expected a timestamp, a value and a step in line 1"):
        read_curve(run)


def test_the_store_of_mlflow_holds_several_runs(tmp_path):
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(path)) as store:
        store.executescript(
            "create table runs (run_uuid, name, lifecycle_stage, start_time);"
            "create table metrics (key, value, timestamp, run_uuid, step, is_nan);"
            "create table params (key, value, run_uuid);"
            "insert into runs values ('u1', 'sun', 'active', 1), ('u2', 'sun', 'active', 2),"
            " ('u3', 'moon', 'active', 3);"
            "insert into metrics values ('loss', 2, 1000, 'u3', 1, 0), ('loss', 1, 2000, 'u3', 2, 0),"
            " ('loss', 0, 3000, 'u3', 3, 1), ('loss', 9, 1000, 'u1', 1, 0);"
            "insert into params values ('max_steps', '-1', 'u3');"
        )
    assert find_curve_files(tmp_path) == [path / "u1", path / "u2", path / "moon"]
    curve = read_curve(path / "moon")
    np.testing.assert_array_equal(curve.values, [2, 1, np.nan])
    assert curve.planned_end is None
    with pytest.raises(RecordError, match="holds no metric"):
        read_curve(path / "u2")
    path.write_bytes(b"nothing that SQLite knows, of some length")
    with pytest.raises(RecordError, match="expected the SQLite store of MLflow"):
        read_curve(path / "moon")


def test_lines_with_a_date_say_how_long_the_run_took(tmp_path):
    lines = [
        f"2025-06-04 17:{30 + 2 * e}:05,500 - INFO - Epoch {e}/35, Test Acc: {60 + e}%" for e in range(1, 6)
    ]
    curve = read_curve(write(tmp_path, "\n".join(lines), "cifar.log"))
    assert (curve.epoch_time_s(), curve.planned_end) == (120, 35)


@pytest.mark.parametrize("name", ["run.log", "run.csv"])
def test_what_powershell_redirects_is_utf_16(tmp_path, name):
    rows = ["epoch,val_acc", *(f"{e},0.{50 + e}" for e in range(1, 6))]
    (tmp_path / name).write_text("\r\n".join(rows), encoding="utf-16")
    np.testing.assert_allclose(read_curve(tmp_path / name).values, [0.51, 0.52, 0.53, 0.54, 0.55])


def test_what_is_evaluated_comes_before_what_each_step_prints(tmp_path):
    rows = [
        f"Epoch: [{e}/50] Iter:[{i}/40], Loss: 1.4, Acc:0.7{e}" for e in range(5) for i in range(0, 40, 10)
    ]
    for e in reversed(range(5)):
        rows.insert(4 * (e + 1), f"Loss: 0.9, MeanIU:  0.4{e}, Best_mIoU:  0.52")
    assert read_curve(write(tmp_path, "\n".join(rows), "seg.log")).metric == "meaniu"


def test_a_run_whose_training_loss_is_lost_has_diverged_between_two_evaluations(tmp_path):
    rows = []
    for i in range(10, 560, 10):
        rows += [f"iter {i}: loss {'nan' if i > 520 else 4 - i / 500}, time 1440.31ms, mfu 0.01%"]
        rows += [f"step {i}: train loss {4 - i / 500}, val loss {4 - i / 500}"] * (i % 100 == 0)
    assert clean(read_curve(write(tmp_path, "\n".join(rows), "nano.log"), "val_loss")).has_diverged
    assert not clean(read_curve(write(tmp_path, "\n".join(rows[:-6]), "nano.log"), "val_loss")).has_diverged


@pytest.mark.parametrize(
    "line", ["a1" * 500_000, "{" * 1_000_000, "a" + " " * 1_000_000, ("b" * 2_000 + " ") * 500]
)
def test_a_line_of_a_megabyte_is_read_once(tmp_path, line):
    # Searched anew from each character it would take hours.
    (tmp_path / "run.log").write_text(f"step 1 loss 2.0\n{line}\nstep 2 loss 1.8\n", encoding="utf-8")
    assert list(read_text_log(tmp_path / "run.log").columns["loss"]) == [2.0, 1.8]


def test_a_log_that_began_anew_is_its_last_pass(tmp_path):
    def line(epoch):
        return f"epoch {epoch} | val_acc: {1 - 0.5 / epoch:.4f}"

    file = tmp_path / "run.log"
    file.write_text("\n".join(line(e) for e in (1, 2, 3, 1, 2, 3, 4, 5, 6)))
    curve = read_curve(file)
    assert curve.epochs.tolist() == [1, 2, 3, 4, 5, 6]
    assert curve.notes == ("the run began anew: 3 rows of earlier passes are left out",)
    # Keras' CSVLogger(append=True) holds several runs.
    text = "epoch,val_loss\n" + "".join(f"{e},{3 / (e + 1)}\n" for e in (*range(9), *range(5)))
    assert read_curve(write(tmp_path, text, "run.csv")).epochs.tolist() == [1, 2, 3, 4, 5]
    # Too few rows since: which run is meant is not known.
    file.write_text("\n".join(line(e) for e in (1, 2, 3, 1, 2, 3)))
    with pytest.raises(RecordError, match="keep the rows of one run"):
        read_curve(file)
