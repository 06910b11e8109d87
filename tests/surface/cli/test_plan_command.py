"""``forerun plan`` and ``forerun report`` as a user runs them."""

import csv
import json
import re

import pytest
import yaml
from command_line import invoke, run

from forerun.search.plan_answer import Plan

QUESTION = ("plan", "cnn:depth=2,base_filters=32", "--on", "t4,l4", "--batch-size", "64:128")
JOB = ("--dataset", "cifar10", "--epochs", "3")


@pytest.fixture(scope="module")
def answer():
    result = invoke(*QUESTION, *JOB, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def answer_file(answer, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(answer))
    return path


def test_json_has_every_attribute_of_the_plan(answer):
    assert set(answer) == {*Plan.__slots__, "ways_to_save"}
    assert answer["num_candidates"] == 8
    assert answer["chosen"]["price_source"]


def test_the_page_has_the_choice_the_front_and_what_was_left_out():
    result = invoke(*QUESTION, *JOB, "--within", "cost<=0.05,memory<=800MB")
    assert result.exit_code == 0, result.stderr
    for words in (
        "Plan for 3 epochs of 50,000 samples of cifar10",
        "Choose cnn",
        "Best candidates",
        "Left out: memory<=800MB",
    ):
        assert words in result.stdout


def test_a_budget_nobody_meets_is_answered_with_the_nearest_miss():
    result = invoke(*QUESTION, *JOB, "--within", "time<=1s")
    assert result.exit_code == 0
    assert "Nothing keeps all limits. Nearest: cnn" in result.stdout
    assert re.search(r"it breaks time<=1s [\d.]+ times", result.stdout)
    assert "Also worth trying with the nearest one\n  -  --layout nhwc" in result.stdout


def test_a_picture_is_written(tmp_path):
    path = tmp_path / "front.svg"
    result = invoke(*QUESTION, *JOB, "--plot", str(path))
    assert result.exit_code == 0, result.stderr
    assert path.read_text().startswith("<?xml")
    assert str(path) in result.stderr


def test_prices_and_accuracies_come_from_files(tmp_path):
    prices, accuracies = tmp_path / "own.toml", tmp_path / "accuracies.csv"
    prices.write_text(
        '[[owned]]\ndevice = "t4"\npurchase_usd = 900\nyears = 3\nutilisation = 0.5\nusd_per_kwh = 0.3\n'
    )
    accuracies.write_text('model,accuracy\n"cnn:depth=2,base_filters=32",0.75\n')
    words = ("--prices", str(prices), "--accuracies", str(accuracies), "--within", "accuracy>=70%", "--json")
    found = json.loads(invoke(*QUESTION, *JOB, *words).stdout)
    (t4,) = [point for point in found["best_by_device"] if point["device"] == "t4"]
    assert t4["price_usd_per_hour"] == pytest.approx(900 / (3 * 8766 * 0.5) + 0.07 * 0.3)
    assert found["chosen"]["accuracy"] == 0.75


def test_slurm_gets_a_time_with_margin(answer):
    result = invoke(*QUESTION, *JOB, "--format", "slurm-time")
    days, hours, minutes, seconds = re.fullmatch(
        r"--time=(\d)-(\d\d):(\d\d):(\d\d)\n", result.stdout
    ).groups()
    limit_s = ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
    high = answer["chosen"]["job_time_s"]["high"]
    assert high * 1.15 + 300 <= limit_s < high * 1.15 + 360


def test_a_scheduler_gets_the_job_as_one_object(answer):
    found = json.loads(invoke(*QUESTION, *JOB, "--format", "job").stdout)
    assert found["device"] == answer["chosen"]["device"]
    assert found["time_limit_s"] > found["job_time_s"]["high"]
    assert f"--time={found['slurm_time']}\n" == invoke(*QUESTION, *JOB, "--format", "slurm-time").stdout


def test_every_scheduler_gets_its_words_of_the_same_job(answer):
    limit_s = json.loads(invoke(*QUESTION, *JOB, "--format", "job").stdout)["time_limit_s"]
    words = {
        name: invoke(*QUESTION, *JOB, "--format", name).stdout for name in ("sbatch", "dstack", "ray", "sky")
    }
    minutes = limit_s // 60
    assert words["sbatch"] == f"#SBATCH --nodes=1 --gres=gpu:1 --time={minutes}\n"
    assert yaml.safe_load(words["dstack"])["max_duration"] == f"{minutes}m"
    assert words["ray"] == f"ray job submit --entrypoint-num-gpus 1 -- timeout {limit_s}\n"
    assert yaml.safe_load(words["sky"])["num_nodes"] == 1


def test_without_a_choice_there_is_no_job_to_schedule():
    result = invoke(*QUESTION, *JOB, "--within", "time<=1s", "--format", "slurm-time")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no candidate keeps the limits" in result.stderr


def without(words, *usual):
    """The usual words but the options that are asked otherwise."""
    left = [i for i, word in enumerate(usual) if word in words]
    return [word for i, word in enumerate(usual) if i not in left and i - 1 not in left]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "t4", "--on", "l4"), "--on takes one value, got t4 and l4; give one, or ask forerun plan"),
        (("--within", "time<=2"), "the unit is missing"),
        (("--within", "time<=2h,time>=3h"), "the limits contradict each other"),
        (("--within", "speed<=2"), "unknown quantity 'speed'"),
        (("--price", "-1/h"), "a price must be an amount per hour, zero or more"),
        (("--batch-size", "1:9000000:1"), "9,000,000 are too many"),
        (("--batch-size", "1:99999999999"), "99,999,999,999 are too many"),
        (("--batch-size", ""), "expected at least one batch size"),
        (("--on", "cpu", "--within", "energy<=2kWh"), "energy is known for GPUs only, not for cpu"),
        (("--on", "t4x999999"), "at most 100,000, got 999,999"),
        (("--precision", ","), "at least one precision"),
        (
            ("--format", "yaml"),
            "one of table, json, csv, markdown, dstack, job, ray, sbatch, sky, slurm-time, got 'yaml'",
        ),
        (("--plot", "nowhere/front.png"), "nowhere"),
        (("--accuracies", "none.csv"), "cannot be read"),
        (("--prices", "none.toml"), "expected a readable price file"),
        (("--workers", "-1", "--loader-ms", "1"), "number of workers must be zero or more"),
        (("--storage-mb-s", "100"), "the input pipeline needs --loader-ms as well"),
        (("--minimize", "fun"), "a plan minimises one of"),
        (("--co2", "-5", "--minimize", "co2"), "carbon intensity"),
    ],
)
def test_errors_are_one_line_on_stderr(words, message):
    result = invoke(*without(words, *QUESTION, *JOB), *words)
    assert result.exit_code == (1 if "--prices" in words else 2)
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model,score\na,0.5\n", "line 2: 'accuracy' must be a fraction of 0 to 1, got None"),
        ("model,accuracy\na,95\n", "line 2: 'accuracy' must be a fraction of 0 to 1, got '95'"),
        ("model,accuracy\n", "expected a row or more below the header"),
    ],
)
def test_accuracies_that_cannot_be_meant_are_refused_with_their_line(tmp_path, text, words):
    path = tmp_path / "accuracies.csv"
    path.write_text(text)
    result = invoke(*QUESTION, *JOB, "--accuracies", str(path))
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_child_process_prints_json_and_nothing_else():
    done = run(*QUESTION, *JOB, "--json")
    assert json.loads(done.stdout)["chosen"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("html", ("<!doctype html>", "<svg", "Choice")),
        ("md", ("# Plan: cnn:depth=2,base_filters=32", "## Choice", "| device | batch |")),
        ("json", ('"chosen"',)),
    ],
)
def test_a_report_is_one_file(answer_file, tmp_path, ending, words):
    out = tmp_path / f"report.{ending}"
    result = invoke("report", str(answer_file), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    text = out.read_text()
    assert all(word in text for word in words)
    # Nothing is loaded from anywhere: every address is the name of an XML vocabulary.
    loaded = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)([^"')\s>]+)""", text)
    assert loaded == []


def test_a_report_of_json_is_the_answer_again(answer, answer_file):
    result = invoke("report", str(answer_file), "--format", "json")
    assert json.loads(result.stdout) == answer


def test_a_report_of_a_prediction(tmp_path):
    path = tmp_path / "estimate.json"
    path.write_text(invoke("predict", "cnn:depth=2", "--on", "t4", *JOB, "--json").stdout)
    text = invoke("report", str(path)).stdout
    assert "## What it takes" in text
    assert invoke("report", str(path), "--format", "slurm-time").stdout.startswith("--time=0-00:")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("{", (), "but it is not JSON"),
        ("[1]", (), "got other JSON"),
        ('{"chosen": 1}', (), "got other JSON"),
        (None, (), "expected a readable file of JSON"),
        ("{}", ("--format", "pdf"), "the format of a report must be one of html, markdown, json"),
        ("{}", ("--out", "nowhere/report.html"), "does not exist"),
        ("{}", ("--out", "report.docx"), "the format of a report must be one of html, markdown, json"),
    ],
)
def test_a_report_of_something_else_is_refused(tmp_path, text, words, message):
    path = tmp_path / "answer.json"
    if text is not None:
        path.write_text(text)
    result = invoke("report", str(path), *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_damaged_answer_is_refused(answer, tmp_path):
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps({**answer, "points": [{"model": 3}]}))
    result = invoke("report", str(path))
    assert result.exit_code == 2
    assert "the JSON is damaged" in result.stderr


def test_rejected_candidates_are_as_many_as_asked_for():
    limits = ("--within", "time<=1s", "--within", "memory<=24GB")
    found = json.loads(invoke(*QUESTION, *JOB, *limits, "--rejected", "2", "--json").stdout)
    assert found["limits"] == ["time<=1s", "memory<=24GB"]
    assert len(found["rejected"]) == 2
    assert found["num_rejected_by_limit"][0]["num_rejected"] == 8


def test_rows_of_accuracies_are_csv_as_others_write_it(tmp_path):
    path = tmp_path / "accuracies.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("model", "accuracy"), ("cnn:depth=2,base_filters=32", 0.9)])
    result = invoke(*QUESTION, *JOB, "--accuracies", str(path), "--within", "accuracy>=85%", "--json")
    assert json.loads(result.stdout)["num_feasible"] == 8


def test_ways_to_save_are_found_where_the_plan_assumed_the_dataset():
    assert json.loads(invoke(*QUESTION, "--epochs", "3", "--json").stdout)["ways_to_save"]
