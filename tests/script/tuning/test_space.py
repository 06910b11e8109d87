"""Spaces, configurations, budgets, metrics: what comes in, and what is refused with a clear line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import ForerunError, UsageError
from forerun.script.command_words import with_arguments
from forerun.script.profiling.launch import OutputLine
from forerun.script.tuning.configuration import (
    ScriptConfiguration,
    check_arguments,
    configure,
    read_configuration,
    scaled_learning_rate,
    write_configuration,
)
from forerun.script.tuning.options import parse_budget, time_left_s
from forerun.script.tuning.space import Metric, read_space, space_of
from forerun.script.tuning.trial import read_metric

SPACE = {
    "metric": {"name": "val_acc", "goal": "maximize", "at_least": 0.9},
    "parameters": {
        "batch_size": {"min": 8, "max": 64, "log": True, "map": "--batch-size"},
        "lr": {"scale_with": "batch_size", "rule": "auto", "map": "--lr"},
        "amp": {"values": [False, "bf16"]},
    },
}


def test_a_space_is_read_as_written():
    space = space_of(SPACE)
    assert space.parameter("batch_size").values == (8, 16, 32, 64)
    assert space.parameter("amp").values == ("off", "bf16")  # YAML reads a bare off as false
    assert space.metric.target == 0.9


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"batchsize": {"values": [1]}}, "did you mean batch_size"),
        ({"num_workers": {"values": []}}, "one value or more"),
        ({"batch_size": {"min": 64, "max": 8}}, "the range is empty"),
        ({"lr": {"min": 0, "max": 1, "log": True, "map": "--lr"}}, "above zero"),
        ({"lr": {"values": [0.1]}}, "give the script's argument"),
        ({"amp": {"values": ["fp8"]}}, "one of off, bf16, fp16"),
        ({"num_workers": {"values": [-1]}}, "0 or more"),
        ({"lr": {"scale_with": "batch_size", "map": "--lr"}}, "not in the space"),
        ({"num_workers": {"vals": [1]}}, "did you mean values"),
        ({}, "at least one parameter"),
    ],
)
def test_a_space_that_cannot_be_meant_is_refused(parameters, message):
    with pytest.raises(UsageError, match=message):
        space_of({"parameters": parameters})


def test_a_space_that_is_no_yaml_is_refused(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("parameters: [}")
    with pytest.raises(UsageError, match="expected YAML"):
        read_space(path)
    with pytest.raises(UsageError, match="expected a space"):
        read_space(tmp_path / "absent.yaml")


def test_an_argument_that_the_script_does_not_know_is_refused():
    options = ({"flags": ["--batch_size", "-b"], "name": "batch_size", "value": 8},)
    with pytest.raises(UsageError, match="did you mean --batch_size"):
        check_arguments(space_of(SPACE), options)


def test_the_learning_rate_moves_with_the_batch():
    base = {"batch_size": 8, "lr": 0.1}
    space = space_of(SPACE)
    values = {"batch_size": 32, "amp": "bf16"}
    assert configure(space, values, base, "SGD").arguments == {"--batch-size": 32, "--lr": pytest.approx(0.4)}
    assert configure(space, values, base, "AdamW").arguments["--lr"] == pytest.approx(0.2)
    assert configure(space, values, base, "SGD").hooks == {"amp": "bf16"}
    with pytest.raises(UsageError, match="give both a default"):
        configure(space, values, {}, "SGD")


@given(st.floats(1e-5, 1.0), st.integers(1, 512), st.integers(1, 512), st.sampled_from(["linear", "sqrt"]))
def test_scaling_there_and_back_is_nothing(lr, first, second, rule):
    there = scaled_learning_rate(lr, base_batch_size=first, batch_size=second, rule=rule)
    back = scaled_learning_rate(there, base_batch_size=second, batch_size=first, rule=rule)
    assert back == pytest.approx(lr)


def test_arguments_replace_those_of_the_command():
    command = ("python", "train.py", "--lr=0.1", "--batch-size", "8", "--amp")
    assert with_arguments(command, {"--lr": 0.2, "--batch-size": 16, "--amp": False}) == (
        "python",
        "train.py",
        "--lr=0.2",
        "--batch-size",
        "16",
    )


def test_a_configuration_is_read_as_written(tmp_path):
    found = ScriptConfiguration(arguments={"--lr": 0.2}, hooks={"num_workers": 2})
    write_configuration(tmp_path / "best.yaml", found, ("python", "train.py"), {"value": 1.0})
    assert read_configuration(tmp_path / "best.yaml") == found
    (tmp_path / "other.yaml").write_text("hooks: {wings: 2}")
    with pytest.raises(UsageError, match="no hook sets 'wings'"):
        read_configuration(tmp_path / "other.yaml")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("epoch 3 loss=0.31 val_acc=0.8250", [0.825]),
        ("val_acc: 82.5 %", [0.825]),
        ("{'val_loss': 1.5, 'val_acc': 0.825}", [0.825]),
        ("my_val_acc=0.9", []),
        ("val_accuracy=0.9", []),
    ],
)
def test_a_metric_is_read_from_what_is_printed(text, values):
    found = read_metric("val_acc", [OutputLine(time_s=0.0, text=text)])
    assert [reading.value for reading in found] == pytest.approx(values)


def test_budgets():
    assert parse_budget("2h").seconds(None) == 7200.0
    assert parse_budget("10usd").seconds(2.0) == 18000.0
    assert parse_budget("15min, 40 trials").num_trials == 40
    for wrong in ("0 trials", "soon", "5"):
        with pytest.raises(ForerunError):
            parse_budget(wrong)
    with pytest.raises(UsageError, match="needs the price"):
        parse_budget("10usd").seconds(None)


def test_time_left_is_never_more_than_the_budget():
    assert time_left_s([10.0, 20.0], num_left=4, budget_left_s=None) == 60.0
    assert time_left_s([10.0, 20.0], num_left=4, budget_left_s=30.0) == 30.0
    assert time_left_s([], num_left=4, budget_left_s=None) is None


def printed(text):
    return [OutputLine(time_s=0.0, text=line) for line in text.splitlines()]


YOLO = """
      Epoch    GPU_mem   box_loss   cls_loss  Instances       Size
        1/3         0G      1.153      3.255         19        640: 100%|####| 1/1 [00:03<00:00,  3.13s/it]
                 Class     Images  Instances      Box(P      mAP50  mAP50-95): 100%|####| 1/1 [00:00<00:00]
                   all          4         17      0.642      0.624      0.443
"""
LIGHTNING = """
┃        Test metric        ┃       DataLoader 0        ┃
│          val_acc          │    0.8461538553237915     │
"""


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("loss", "{'loss': '6.311', 'grad_norm': '1.2', 'epoch': '0.5'}", [6.311]),
        ("Accuracy", "Test set: Average loss: 0.05, Accuracy: 985/1000 (98%)", [0.985]),
        ("acc", "epoch 3 acc 84.6 %", [0.846]),
        ("val loss", "step 0: train loss 4.2, val loss 4.1", [4.1]),
        ("val_acc", LIGHTNING, [0.8461538553237915]),
        ("box_loss", YOLO, [1.153]),
        ("mAP50", YOLO, [0.624]),
        ("mAP50-95", YOLO, [0.443]),
        ("Acc@1", " * Acc@1 71.250 Acc@5 90.5", [71.25]),
    ],
)
def test_metrics_are_read_as_frameworks_print_them(name, text, values):
    assert [reading.value for reading in read_metric(name, printed(text))] == pytest.approx(values)


def test_a_margin_is_on_the_scale_of_its_metric():
    assert Metric.named("val_acc").margin(0.01, 0.9) == pytest.approx(0.01)
    assert Metric.named("Acc@1").margin(0.01, 90.0) == pytest.approx(1.0)
    assert Metric.named("eval_loss").margin(0.01, 6.0) == pytest.approx(0.06)
    assert not Metric.named("perplexity").is_rising


def test_ranges_have_candidates_to_rank_beforehand():
    space = space_of(
        {
            "parameters": {
                "num_workers": {"min": 0, "max": 4},
                "prefetch_factor": {"min": 1, "max": 64},
                "lr": {"min": 0.001, "max": 0.1, "log": True, "map": "lr="},
            }
        }
    )
    workers, prefetch, rate = (parameter.candidates for parameter in space.parameters)
    assert workers == (0, 1, 2, 3, 4)
    assert (prefetch[0], prefetch[-1], len(prefetch)) == (1, 64, 9)
    assert rate[4] == pytest.approx(0.01)
