"""Curves from files, and every file that cannot be one."""

import json
import struct
import sys
from types import ModuleType

import numpy as np
import pytest

from forerun.base.errors import InvalidSetupError, RecordError
from forerun.jobs.forecasting.curve import parse_target
from forerun.jobs.forecasting.curve_files import find_curve_files, read_curve, read_target_curve


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
        ("accuracy\n0.1\n0.2\n", "at least two columns"),
        ("epoch,accuracy\n1,0.5\n2,good\n", "expected a number in column 'accuracy', row 3, got 'good'"),
        (
            "epoch,accuracy\n1,0.5\n3,0.6\n2,0.7\n",
            "must be above zero and rise from row to row, got 2 in row 3",
        ),
        ("epoch,step,loss\n1,10,2\n1,5,1\n2,20,1\n", "steps must rise from row to row within an epoch"),
        ("epoch,accuracy\n1,nan\n2,nan\n", "every value of 'accuracy' is NaN"),
        ("loss,accuracy\n1,0.5\n2,0.6\n", "expected a column 'epoch' or 'step'"),
        ("epoch,lr\n1,0.5\n2,0.6\n", "expected a metric beside epoch"),
    ],
)
def test_a_file_that_is_no_curve_is_one_clear_message(tmp_path, text, words):
    with pytest.raises(RecordError, match=words):
        read_curve(write(tmp_path, text))


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


def test_torchs_own_writer_is_read(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard.compat")
    # With this module TensorBoard does without TensorFlow, whose LLVM cannot share a process with Triton's.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
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
    with pytest.raises(RecordError, match=r"log history is empty|expected the state of a Hugging Face"):
        read_curve(write(tmp_path, text, "trainer_state.json"))


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
    assert (
        read_target_curve(tmp_path / "results.csv", parse_target("mAP50>=0.9")).metric == "metrics/mAP50(B)"
    )


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
