"""The scenarios of system D, run to their end on generated images, and what they leave behind."""

import contextlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun.base.errors import UsageError
from forerun.cost.time.correction import CALIBRATIONS_VARIABLE, calibration_path
from forerun.cost.time.weights import save_weights
from forerun.question.devices import describe_host
from forerun.question.devices.catalogue import device_at
from forerun.script.profiling.launch import TreeSample
from forerun.script.tuning.space import space_of
from made_calibrations import made_calibration
from studies.__main__ import app
from studies.scenarios.study import chosen_scenarios, training_command, usage_rows, write_plots
from studies.scenarios.training import CLASSES, generate_images

WORDS = (
    "scenarios", "--scenario", "all", "--data", "images", "--generate", "12", "--weights", "none",
    "--epochs", "2", "--budget", "2 trials", "--trial-time", "0.3s", "--out", "study", "--seed", "3",
    "--device", "cpu", "--json",
)  # fmt: skip
SCENARIOS = ("baseline", "resolution", "hyperparameters", "hardware")
PLOTS = ("training_loss_comparison.png", "training_accuracy_comparison.png", "utilisation.png")
ROOT = Path(__file__).parents[2]


def environment():
    """This checkout on the import path; one thread, so that two cores are enough."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run(folder, *words):
    """The command in this process; the scripts that it starts have theirs."""
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        return CliRunner().invoke(app, words)


def last_line(done):
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module", autouse=True)
def _calibrated(folder):
    here = device_at(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CALIBRATIONS_VARIABLE, str(folder))
        save_weights(made_calibration(here), calibration_path(here))
        yield


@pytest.fixture(scope="module")
def done(folder):
    found = run(folder, *WORDS)
    assert found.exit_code == 0, found.stderr
    return found


@pytest.fixture(scope="module")
def tables(done):
    return {table["scenario"]: table for table in json.loads(done.stdout)["scenarios"]}


def test_all_files_appear(folder, tables):
    assert tuple(tables) == SCENARIOS
    assert json.loads((folder / "study" / "scenarios.json").read_text())["scenarios"] == list(tables.values())
    for name in PLOTS:
        content = (folder / "study" / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000
    for name in SCENARIOS:
        assert {"metrics.json", "model.safetensors", "scenario.json"} <= {
            path.name for path in (folder / "study" / name).iterdir()
        }


def test_the_table_is_that_of_the_runs(tables):
    for table in tables.values():
        last = table["history"][-1]
        assert len(table["history"]) == int(table["arguments"].get("--epochs", 2))
        assert (table["test_accuracy"], table["train_loss"]) == (last["test_acc"], last["train_loss"])
        assert 0.0 <= table["train_accuracy"] <= 1.0
        # Six classes: a network that knows nothing is at ln 6; what was trained on them is not far above.
        assert 0.0 < table["test_loss"] < 2 * math.log(6)
        assert (
            table["images_per_s"] * table["step_time_s"]
            <= int(table["arguments"].get("--batch-size", 32)) + 0.1
        )
        assert 0.0 < table["cpu_utilisation"] < 1.5
        assert table["cpu_time_s"] > 0.5
        assert 1e8 < table["peak_memory_bytes"] < 2e10
        assert table["wall_s"] > sum(row["train_s"] for row in table["history"])
        rows = table["utilisation"]
        assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
        assert max(row["memory_bytes"] for row in rows) <= 1.01 * table["peak_memory_bytes"]


def test_what_cannot_be_had_is_none_with_its_reason(tables):
    for table in tables.values():
        unknown = {name for name, value in table.items() if value is None and name != "study"}
        assert set(table["reasons"]) == unknown
    if not describe_host().gpus:
        assert unknown == {"gpu_utilisation", "energy_j"}


def test_each_scenario_starts_from_those_before_it(tables):
    assert tables["baseline"]["arguments"] == {}
    assert tables["baseline"]["study"] is None
    assert tables["resolution"]["image_size"] in (144, 160, 176, 192)
    before: dict[str, object] = {}
    for name in SCENARIOS[1:]:
        table = tables[name]
        assert table["study"]["num_trials"] == 2
        assert set(before) <= set(table["arguments"])
        assert table["image_size"] == tables["resolution"]["image_size"]
        before = table["arguments"]
    assert before["--cosine"] is True
    assert tables["hyperparameters"]["hooks"] == {}
    assert "optimizer_implementation" in tables["hardware"]["hooks"]


def test_first_trials_are_planned_from_the_network_where_it_can_be_predicted(folder, done):
    assert "first trials by the predicted steps of torchvision:squeezenet1_1" in done.stderr
    for name in SCENARIOS[1:]:
        study = json.loads((folder / "study" / name / "study" / "result.json").read_text())
        assert {trial["source"] for trial in study["trials"]} == {"script", "plan"}


def test_a_saved_model_loads_again_and_is_the_one_that_was_tested(folder, tables):
    import torch
    from safetensors import safe_open
    from torchvision import transforms
    from torchvision.datasets import ImageFolder
    from torchvision.models import squeezenet1_1

    with safe_open(folder / "study" / "resolution" / "model.safetensors", framework="pt") as file:
        about, weights = file.metadata(), {name: file.get_tensor(name) for name in file.offset_keys()}
    size = int(about["image_size"])
    assert tuple(json.loads(about["classes"])) == CLASSES
    assert size == tables["resolution"]["image_size"]
    model = squeezenet1_1(num_classes=len(CLASSES))
    model.load_state_dict(weights)
    model.eval()
    steps = [
        transforms.Resize((size, size)),
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    images = ImageFolder(str(folder / "images" / "seg_test"), transforms.Compose(steps))
    pixels, labels = torch.stack([image for image, _ in images]), torch.tensor(images.targets)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(pixels), labels).item()
    assert loss == pytest.approx(tables["resolution"]["test_loss"], rel=1e-3)


def test_events_are_those_of_the_epochs(folder, tables):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name, table in tables.items():
        events = EventAccumulator(str(folder / "study" / name / "events"))
        events.Reload()
        for scalar in ("train_loss", "test_acc"):
            written = [(event.step, event.value) for event in events.Scalars(scalar)]
            assert written == [
                (row["epoch"], pytest.approx(row[scalar], rel=1e-5)) for row in table["history"]
            ]


def test_a_second_call_does_nothing_again(folder, done):
    before = {path: path.stat().st_mtime_ns for path in (folder / "study").rglob("model.safetensors")}
    again = run(folder, *WORDS)
    assert again.exit_code == 0, again.stderr
    assert again.stderr.count("done before") == len(SCENARIOS)
    assert again.stdout == done.stdout
    assert {path: path.stat().st_mtime_ns for path in before} == before
    page = run(folder, *WORDS[:-1])
    for words in ("test accuracy", "CPU utilisation", "images/s", "resolution", "hardware: --"):
        assert words in page.stdout


def test_a_scenario_of_another_device_is_done_anew_a_corrupt_image_named_and_nothing_lost(folder, done):
    shutil.copytree(folder / "study" / "baseline", folder / "other" / "baseline")
    path = folder / "other" / "baseline" / "scenario.json"
    kept = json.loads(path.read_text())
    assert kept["asked"]["device"] == "cpu"
    words = ["baseline" if word == "all" else "other" if word == "study" else word for word in WORDS]
    assert "done before" in run(folder, *words).stderr
    path.write_text(json.dumps({**kept, "asked": {**kept["asked"], "device": "cuda:0"}}))
    victim = folder / "images" / "seg_train" / "sea" / "00004.jpg"
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 3])
    try:
        failed = run(folder, *words)
    finally:
        victim.write_bytes(whole)
    assert failed.exit_code == 1
    assert "done before" not in failed.stderr
    assert last_line(failed).startswith("error: scenario baseline crashed")
    assert "truncated" in last_line(failed)
    assert run(folder, *WORDS).stdout == done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "missing option '--data'"),
        (("--data", "nowhere"), "expected a folder per class in 'nowhere/seg_train'"),
        (("--scenario", "hardwear", "--data", "nowhere"), "did you mean hardware"),
        (("--data", ".", "--", "python", "train.py"), "unexpected extra argument"),
        (("--data", ".", "--device", "cuda:99"), "expected cpu or one of this machine's"),
        (("--data", ".", "--device", "gpu"), "expected device cpu or cuda:N, got 'gpu'"),
        (("--data", ".", "--epochs", "0"), "greater than or equal to 1"),
    ],
)
def test_a_request_that_cannot_be_meant_is_one_line(tmp_path, words, message):
    done = run(tmp_path, "scenarios", *words)
    assert done.exit_code == 2
    assert message in last_line(done)
    assert len(done.stderr.strip().splitlines()) == 1


def test_images_are_even_over_the_classes_and_always_the_same(tmp_path):
    generate_images(tmp_path / "a", num_images=15, size=(40, 30), seed=1)
    generate_images(tmp_path / "b", num_images=15, size=(40, 30), seed=1)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.jpg"))
    counts = [sum(path.parts[:2] == ("seg_train", name) for path in files) for name in CLASSES]
    assert counts == [3, 3, 3, 2, 2, 2]
    assert sum(path.parts[0] == "seg_test" for path in files) == len(CLASSES)
    assert all((tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes() for path in files)
    with pytest.raises(UsageError, match="expected no images"):
        generate_images(tmp_path / "a", num_images=15)
    with pytest.raises(UsageError, match="6 images or more"):
        generate_images(tmp_path / "c", num_images=5)
    assert training_command(tmp_path / "a", epochs=1, weights="none")[-1] == "none"
    with pytest.raises(UsageError, match="imagenet or none"):
        training_command(tmp_path / "a", epochs=1, weights="coco")


def test_a_gpu_has_other_knobs_than_a_processor():
    def names(*, is_gpu):
        (_, hardware) = chosen_scenarios("hardware", num_cores=4, epochs=3, is_gpu=is_gpu)
        return {
            parameter.name: parameter.values
            for parameter in space_of({"parameters": hardware.parameters}).parameters
        }

    assert "num_threads" in names(is_gpu=False)
    assert names(is_gpu=False)["amp"] == ("off", "bf16")
    assert "cudnn_benchmark" in names(is_gpu=True)
    assert names(is_gpu=True)["amp"] == ("off", "bf16", "fp16")
    assert names(is_gpu=True)["num_workers"] == (0, 1, 2, 4)


def test_usage_over_time_has_the_gpu_beside_it(tmp_path):
    samples = [TreeSample(time_s=10.0 + i, memory_bytes=100 * i, cpu_s=1.5 * i) for i in range(4)]
    rows = usage_rows(samples, [(10.9, 0.2), (12.9, 0.8)], begin_s=10.0, num_cores=2)
    assert [row["time_s"] for row in rows] == [1.0, 2.0, 3.0]
    assert [row["cpu"] for row in rows] == [0.75] * 3
    assert [row["gpu"] for row in rows] == [0.2, 0.8, 0.8]
    assert usage_rows(samples, [], begin_s=10.0, num_cores=2)[0]["gpu"] is None
    assert usage_rows(samples[:1], [], begin_s=10.0, num_cores=2) == []
    # A loss that was lost is a gap in the picture, not an error.
    history = [
        {"epoch": 1, "train_loss": None, "test_loss": 2.0, "train_acc": 0.1, "test_acc": 0.2},
        {"epoch": 2, "train_loss": 1.0, "test_loss": None, "train_acc": 0.1, "test_acc": 0.2},
    ]
    write_plots(tmp_path, [{"scenario": "made", "history": history, "utilisation": rows}])
    assert all((tmp_path / name).stat().st_size > 5_000 for name in PLOTS)
