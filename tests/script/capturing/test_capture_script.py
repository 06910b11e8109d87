"""Captures of small scripts, each in a process of its own; the costly starts are shared by a fixture."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from scripts_captured import (
    ACCUMULATING,
    BY_HAND,
    CARRIED,
    CHANGING,
    DETECTING,
    FUNCTIONAL,
    GAN,
    GIVEN_AWAY,
    HANDED_OVER,
    KERAS_STEP,
    LABELLED,
    MANY_HABITS,
    MANY_MICRO_STEPS,
    MOMENTUM,
    PAUSING,
    ROUNDS,
    SHARDED,
    SHARPNESS,
    SPAWNING,
    STEPPING,
    TICKING,
    TIED,
    TRAINER,
    TURNS,
    WHOLE,
    WITH_GRADIENTS,
)

import forerun
from forerun.base.errors import (
    FailureError,
    ForerunError,
    InvalidSetupError,
    ScriptError,
    TraceError,
    UsageError,
)
from forerun.graph.captured import CapturedPause, read_capture
from forerun.graph.graph import AllocationKind, MemoryEvent, OpClass
from forerun.script import profiling
from forerun.script.capture_script import ScriptServer, capture, captured_by
from forerun.script.capturing.pretend import ValueNeededError
from forerun.script.capturing.source import enclosing_loops
from forerun.script.command_words import parse_command
from forerun.script.patching import CaptureState, begin_capture, capture_state
from forerun.script.profiling.messages import CAPTURE_HOOKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("captured")


@contextlib.contextmanager
def capturing(folder, scratch, files="view"):
    """A function that captures the text of a script; all scripts share one start of Python and PyTorch."""
    script = folder / "script.py"
    script.write_text("", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        command = parse_command([sys.executable, str(script)])
        with ScriptServer(command, scratch, 240, files) as server:

            def capture(text):
                script.write_text(text, encoding="utf-8")
                return captured_by(command, server)

            yield capture


@pytest.fixture(scope="module")
def captured(folder, tmp_path_factory):
    with capturing(folder, tmp_path_factory.mktemp("scratch")) as capture:
        yield capture


def briefly(text):
    """A script that goes on for a second of the processor, not four, to see what ends an epoch: it has no epochs."""
    return f"import forerun.script.capturing.pauses as pauses; pauses._CPU_S = 1.0\n{text.lstrip()}"


@pytest.fixture(scope="module")
def tied(captured):
    return captured(TIED)


def test_micro_steps_precision_and_tied_weights_are_those_of_the_script(tied):
    facts = tied.facts
    assert (facts.way, facts.batch_size, facts.num_micro_steps, facts.samples_per_step) == (
        "pretended",
        8,
        3,
        24,
    )
    assert (facts.precision, facts.optimizer, facts.optimizer_implementation) == ("amp", "adamw", "fused")
    assert tied.graph.num_parameters == 50 * 16
    assert (facts.clips, facts.averages) == (True, False)


def test_nothing_the_script_writes_is_written(tied, folder):
    assert sorted(path.name for path in folder.iterdir()) == ["script.py"]


def contents(folder):
    return {
        path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


def make_files(folder):
    for name in ("ckpt/last.pt", "logs/events", "notes.txt", "runs.db"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("a week of training" if "ckpt" in name else "", encoding="utf-8")


def test_files_that_the_script_replaces_and_removes_are_kept(captured, folder):
    make_files(folder)
    (folder / "script.py").write_text(CHANGING, encoding="utf-8")
    before = contents(folder)
    facts = None
    with contextlib.suppress(FailureError):  # without a view
        facts = captured(CHANGING).facts
    assert facts is None or facts.batch_size == 16
    del before[folder / "script.py"]
    after = contents(folder)
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 1


def running(script):
    found = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [line for line in found if str(script) in line]


def test_without_a_view_a_change_is_refused_and_a_script_ends_with_what_started_it(
    tmp_path, tmp_path_factory
):
    make_files(tmp_path)
    before = contents(tmp_path)
    with capturing(tmp_path, tmp_path_factory.mktemp("scratch"), "guard") as capture:
        with pytest.raises(FailureError, match=r"may not change .*last.pt .*--unsafe-files"):
            capture(CHANGING)
        found = capture(TIED)
        with pytest.raises(ForerunError):
            capture("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)\n")
        script = tmp_path / "script.py"
        deadline_s = time.monotonic() + 30  # what is killed ends when the machine has time for it
        while running(script) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert not running(script)
    assert any("no copy-on-write view" in note for note in found.facts.notes())
    script.unlink()
    assert contents(tmp_path) == before


def test_an_error_of_the_script_names_its_line(captured):
    text = "import torch\nx = torch.ones(2, device='cuda')\ntorch.load('absent.pt', map_location='cuda')\n"
    with pytest.raises(FailureError, match=r"absent\.pt.*\(script\.py, line 3\)"):
        captured(text)


def test_the_state_of_the_optimizer_is_in_the_memory_stream(tied):
    stream = tied.graph.memory
    is_state = (stream.kind == AllocationKind.OPTIMIZER_STATE) & (stream.event == MemoryEvent.ALLOCATE)
    assert stream.size_bytes[is_state, 0].sum() == 2 * 4 * 50 * 16


def test_a_file_answers_without_the_script(tied, tmp_path):
    path = tied.save(tmp_path / "graph.forerun")
    estimate = forerun.predict(f"capture:{path}", device="a100-sxm4-40gb", use_cache=False)
    assert (estimate.precision, estimate.batch_size_per_device) == ("amp", 8)
    assert estimate.run.sharing.num_accumulation_steps == 3
    assert any("GradScaler" in note or "micro-steps" in note for note in estimate.notes)
    again = read_capture(path)
    assert again.facts == tied.facts
    np.testing.assert_array_equal(again.graph.ops.flops, tied.graph.ops.flops)


def test_settings_that_contradict_the_script_are_refused(tied, tmp_path):
    model = f"capture:{tied.save(tmp_path / 'graph.forerun')}"
    for setting in ({"precision": "fp32"}, {"optimizer": "sgd"}, {"image_size": 224}, {"phase": "inference"}):
        with pytest.raises(InvalidSetupError, match="captured script keeps its"):
            forerun.predict(model, device="t4", **setting)
    assert forerun.predict(model, device="t4", precision="amp-bf16").precision == "amp-bf16"


def test_the_world_of_the_script_is_the_number_of_devices(tied, tmp_path):
    parallel = replace(tied, facts=replace(tied.facts, world_size=4, strategy="ddp"))
    model = f"capture:{parallel.save(tmp_path / 'graph.forerun')}"
    assert forerun.predict(model, device="a100-sxm4-40gb").num_devices == 4
    assert forerun.predict(model, device="a100-sxm4-40gb", num_devices=1).num_devices == 1


def test_a_plan_of_a_script_has_the_epochs_of_the_script(tied, tmp_path):
    of_epochs = replace(tied, facts=replace(tied.facts, epochs=3.0, dataset_size=64))
    model = f"capture:{of_epochs.save(tmp_path / 'graph.forerun')}"
    own = forerun.predict(model, device="t4")
    found = forerun.plan(model, devices="t4", batch_sizes=[8])
    assert found.chosen.job_time_s.value == pytest.approx(own.job_time_s.value)
    assert own.job_time_s.value == pytest.approx(3 * own.epoch_time_s.value)
    (point,) = forerun.plan(model, devices="t4", batch_sizes=[8], epochs=1).points
    assert point.job_time_s.value == pytest.approx(own.epoch_time_s.value)
    # A validation of as many samples takes their forward passes.
    pause = CapturedPause(unit="epochs", num_samples=64)
    validated = replace(of_epochs, facts=replace(of_epochs.facts, validation=pause))
    model = f"capture:{validated.save(tmp_path / 'validated.forerun')}"
    longer = forerun.predict(model, device="t4", use_cache=False)
    assert own.epoch_time_s.value < longer.epoch_time_s.value < 2 * own.epoch_time_s.value
    (point,) = forerun.plan(model, devices="t4", batch_sizes=[8]).points
    assert point.job_time_s.value == pytest.approx(longer.job_time_s.value, rel=1e-3)


def test_two_optimizers_are_one_step_and_a_loader_less_batch_is_not_varied(captured, tmp_path):
    found = captured(GAN)
    assert [part.num_uses for part in found.facts.optimizers] == [1, 1]
    assert (found.facts.batch_size, found.facts.num_micro_steps) == (16, 1)
    assert found.facts.num_reads == 2
    assert any("other batch sizes than 16" in note for note in found.facts.not_captured)
    file = found.save(tmp_path / "gan.forerun")
    with pytest.raises(
        InvalidSetupError, match="16 only, got 32: its batch size has no argument and no loader; cap"
    ):
        forerun.predict(f"capture:{file}", device="l4", batch_size=32)


def test_weights_changed_by_hand_on_the_processor_are_recorded_there(captured):
    found = captured(BY_HAND)
    assert (found.facts.way, found.facts.optimizers, found.facts.batch_size) == ("recorded", (), 8)
    assert len(found.graph.ops) > 4


def test_habits_of_scripts_are_followed(captured, folder):
    found = captured(MANY_HABITS)
    facts = found.facts
    assert (facts.way, facts.batch_size, facts.epochs, facts.dataset_size) == ("pretended", 8, 3, 64)
    assert (facts.averages, facts.optimizer_implementation) == (True, "fused")
    assert not found.graph.unsupported_ops
    ops = found.graph.ops
    is_recurrent = ops.op_class == OpClass.RECURRENT
    assert is_recurrent.sum() == 2  # one kernel for all packed sequences, forward and backward
    assert set(ops.serial_steps[is_recurrent]) == {5}
    assert not (folder / "runs").exists()


def test_what_follows_an_epoch_is_seen_and_its_conditions_are_read(captured, folder):
    facts = captured(PAUSING).facts
    assert facts.validation == CapturedPause(unit="epochs", every=1, num_samples=40)
    assert facts.checkpoints == CapturedPause(unit="epochs", every=3)
    assert (facts.precision, facts.convolution_precision) == ("tf32", "fp32")
    assert (facts.epochs, facts.steps_per_epoch, facts.settings()["validation_size"]) == (6, 12, 40)
    assert not list(folder.glob("*.pt"))


def test_what_comes_every_so_many_steps_is_read_from_the_loop(captured):
    facts = captured(briefly(STEPPING)).facts
    assert facts.validation == CapturedPause(unit="steps", every=200)
    assert facts.checkpoints == CapturedPause(unit="steps", every=500)
    assert (facts.max_steps, facts.precision, facts.convolution_precision) == (2000, "fp32", "tf32")


def test_a_momentum_encoder_is_an_average_and_nested_conditions_hold_together(captured):
    facts = captured(briefly(MOMENTUM)).facts
    assert (facts.way, facts.averages, facts.max_steps) == ("pretended", True, 1000)
    assert facts.checkpoints == CapturedPause(unit="steps", every=200)


def test_several_optimizers_accumulate_and_a_counter_of_samples_says_how_often(captured):
    facts = captured(ACCUMULATING).facts
    assert (facts.batch_size, facts.num_micro_steps, facts.max_steps) == (4, 5, 50)
    assert [part.num_uses for part in facts.optimizers] == [1, 1]
    assert facts.validation == CapturedPause(unit="steps", every=10, num_samples=None)
    assert facts.checkpoints == CapturedPause(unit="job")


def test_ticks_of_many_steps_are_read_by_the_mark_that_they_leave(captured):
    facts = captured(briefly(TICKING)).facts
    assert (facts.way, facts.max_steps, facts.compile) == ("pretended", 12_500, False)
    assert facts.checkpoints == CapturedPause(unit="steps", every=500)


def test_a_counter_that_another_function_raises_is_counted_by_whole_rounds(captured):
    facts = captured(ROUNDS).facts
    assert (facts.max_steps, facts.validation) == (110, None)  # 11 rounds of 10 steps


def test_labels_that_are_no_padding_are_all_and_what_follows_the_loop_of_a_main_block_is_seen(captured):
    facts = captured(LABELLED).facts
    assert (facts.way, facts.max_steps) == ("pretended", 200)
    assert facts.checkpoints == CapturedPause(unit="job")


def test_a_refusal_that_the_script_catches_is_still_the_reason(captured):
    with pytest.raises(ScriptError, match="size of its result depends on values"):
        captured(LABELLED.replace('if "foreground" in sys.argv', "if True"))


def test_captures_in_one_process_do_not_see_each_other():
    states = []
    for _ in range(2):
        states.append(begin_capture())
        for _ in range(1):
            (loop,) = enclosing_loops(sys._getframe())[1:]  # one is not hidden by the capture before
            capture_state().within_steps.add((__file__, loop.lineno))
            assert len(enclosing_loops(sys._getframe())) == 1
        ValueNeededError("a size depends on values")
    assert states[0] is not states[1]
    assert [state.refusals for state in states] == [["a size depends on values"]] * 2
    assert begin_capture() == CaptureState()


def test_a_process_that_trains_a_network_of_its_own_is_ended(captured):
    with pytest.raises(TraceError, match="trains in a process that it starts itself"):
        captured(SPAWNING)


def test_a_round_is_a_step_though_only_some_update_the_actor_and_targets_are_no_average(captured):
    found = captured(briefly(TURNS))
    facts = found.facts
    assert (facts.max_steps, facts.batch_size, facts.num_micro_steps, facts.averages) == (899, 32, 1, False)
    assert [part.num_uses for part in facts.optimizers] == [1, 1]
    assert set(found.graph.ops.count) == {0.5}  # of two rounds, one with both updates
    saved = TURNS + 'torch.save(target.state_dict(), "target.pt")\n'
    assert captured(briefly(saved)).facts.averages


def test_micro_steps_go_on_over_the_end_of_an_epoch_and_previews_are_none(captured):
    facts = captured(CARRIED).facts
    assert (facts.num_micro_steps, facts.batch_size, facts.averages) == (4, 2, True)
    assert (facts.steps_per_epoch, facts.max_steps, facts.epochs) == (5, 16, 3)  # of 22 and 66 micro-steps
    assert facts.settings()["epochs"] == 16 / 5
    assert facts.validation == CapturedPause(unit="steps", every=5)


def test_batches_of_an_evaluation_with_gradients_are_none_of_a_step(captured):
    facts = captured(WITH_GRADIENTS).facts
    assert (facts.batch_size, facts.steps_per_epoch, facts.epochs, facts.dataset_size) == (8, 2, 9, 13)
    assert replace(facts.validation, num_samples=None) == CapturedPause(unit="epochs")


def test_equal_micro_steps_are_not_all_run(captured):
    facts = captured(briefly(MANY_MICRO_STEPS)).facts
    assert (facts.way, facts.batch_size, facts.num_micro_steps, facts.max_steps) == ("pretended", 4, 16, 30)


def test_the_loops_of_a_library_that_trains_count_where_the_script_has_none(captured, folder):
    (folder / "site" / "trainer-1.0.dist-info").mkdir(parents=True)
    (folder / "site" / "trainer.py").write_text(TRAINER, encoding="utf-8")
    facts = captured(HANDED_OVER).facts
    assert (facts.batch_size, facts.steps_per_epoch, facts.epochs) == (
        8,
        3,
        7,
    )  # the last batch has four samples
    assert facts.validation == CapturedPause(unit="epochs", num_samples=16)
    assert facts.checkpoints == CapturedPause(unit="steps", every=50)


def test_an_epoch_may_be_one_step_of_all_data_and_a_batch_any_structure(captured):
    facts = captured(WHOLE).facts
    assert (facts.batch_size, facts.steps_per_epoch, facts.epochs, facts.job_notes) == (64, 1, 20, ())
    assert facts.validation == CapturedPause(unit="epochs")
    assert facts.averages


def test_a_list_of_samples_on_the_host_is_a_batch_and_an_early_end_hides_no_pause(captured):
    facts = captured(DETECTING).facts
    assert (facts.batch_size, facts.max_steps or facts.steps_per_epoch, facts.compile) == (8, 500, False)
    assert [part.name for part in facts.models] == ["Network"]
    assert facts.validation == CapturedPause(unit="steps", every=20)
    assert facts.checkpoints == CapturedPause(unit="steps", every=50)


def test_a_training_step_of_the_users_own_keras_model_is_one(captured):
    facts = captured(KERAS_STEP).facts  # of a script on TensorFlow
    assert any("recorded on Keras' PyTorch backend" in note for note in facts.not_captured)
    assert [part.name for part in facts.models] == ["Network"]
    assert (facts.batch_size, facts.num_micro_steps, facts.steps_per_epoch, facts.epochs) == (20, 1, 5, 3)
    assert [(part.name, part.num_uses) for part in facts.optimizers] == [("Adam", 1)]


def test_gradients_without_an_optimizer_end_steps_and_loops_count_them(captured):
    facts = captured(FUNCTIONAL).facts
    assert (facts.way, facts.batch_size, facts.max_steps, facts.optimizers) == ("pretended", 16, 40, ())


def test_a_second_look_at_a_batch_with_other_weights_is_no_micro_step(captured):
    facts = captured(SHARPNESS).facts
    assert (facts.num_micro_steps, facts.samples_per_step, facts.averages) == (1, 16, False)


def test_a_sharded_script_is_handed_to_the_layouts(captured, tmp_path):
    found = captured(SHARDED)
    assert (found.facts.strategy, found.facts.world_size, found.facts.precision) == ("fsdp", 4, "amp-bf16")
    assert len(found.graph.parameter_names) == 2 * 12
    model = f"capture:{found.save(tmp_path / 'graph.forerun')}"
    estimate = forerun.predict(model, device="a100-sxm4-40gb")
    assert (estimate.num_devices, estimate.run.sharing.strategy.value) == (4, "fsdp")
    shares = {part.name: part.size_bytes for part in estimate.memory_parts}
    alone = forerun.predict(model, device="a100-sxm4-40gb", num_devices=1, strategy="ddp").memory_parts
    assert shares["optimizer state"] < {part.name: part.size_bytes for part in alone}["optimizer state"]


FAILURES = {
    "it ended after 2 steps": GAN.replace("range(5)", "range(2)"),
    "ValueError: of the script": "raise ValueError('of the script')",
    "os._exit(3)": "import os; os._exit(3)",
    "waits for input": "input('name? ')",
    "optional extra 'torch'": "raise ModuleNotFoundError(\"No module named 'torch'\")",
    "custom C++ or CUDA extension": "from torch.utils.cpp_extension import load\nload('own', ['own.cu'])",
    "gives its network to a process that it starts itself (script.py, line 16)": GIVEN_AWAY,
    "depends on values": "import torch\nx = torch.nn.Linear(4, 4).cuda()(torch.randn(8, 4).cuda())\nprint(x[x > 0])",
}


@pytest.mark.parametrize("words", FAILURES)
def test_what_cannot_be_captured_is_said_in_one_line_(words, captured):
    with pytest.raises((FailureError, UsageError), match=re.escape(words)) as error:
        captured(FAILURES[words])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "expected a command"),
        (["ls", "-l"], "runs Python"),
        (["no-such-program"], "no program 'no-such-program'"),
        ([sys.executable, "missing.py"], "no file 'missing.py'"),
    ],
)
def test_a_command_that_is_no_python_is_a_wrong_question(command, words):
    with pytest.raises((UsageError, ScriptError), match=words):
        capture(command)


def test_a_program_that_runs_python_is_taken_off_or_its_python_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for file in (python, tmp_path / "train.py", tmp_path / "train.sh"):
        file.touch(mode=0o755)
    assert parse_command(["uv", "run", "train.py", "--lr", "1"]).words == (
        str(python),
        "train.py",
        "--lr",
        "1",
    )
    found = parse_command(["env", "SEED=1", "deepspeed", "--include", "localhost:0,1", "train.py"])
    assert (found.world_size, found.variables) == (2, {"SEED": "1"})
    text = "mixed_precision: bf16\nnum_machines: 2\nnum_processes: 8\ndynamo_config: {dynamo_backend: INDUCTOR}\n"
    (tmp_path / "accelerate.yaml").write_text(text, encoding="utf-8")
    words = ["accelerate", "launch", "--config_file", "accelerate.yaml", "--mixed_precision=fp16", "train.py"]
    found = parse_command(words)
    assert (found.world_size, found.devices_per_node) == (8, 4)
    # What is said counts before what the file holds.
    assert found.variables == {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    (tmp_path / "accelerate.yaml").write_text("[1]", encoding="utf-8")
    with pytest.raises(UsageError, match=r"options of accelerate in .*, got list"):
        parse_command(words)
    (tmp_path / "train.sh").write_text("set -e\npython train.py --lr 1\n", encoding="utf-8")
    with pytest.raises(ScriptError, match=r"python train.py --lr 1 \(train.sh, line 2\)"):
        parse_command(["sh", "train.sh"])


def test_a_process_that_the_script_forks_ends_with_the_capture(tmp_path, monkeypatch):
    script = tmp_path / "forking.py"
    script.write_text("import os, time\nif not os.fork(): time.sleep(600)\n", encoding="utf-8")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(TraceError, match="starts itself"):
        capture([sys.executable, str(script)], timeout_s=240)
    assert not running(script)
    assert not list((tmp_path / "tmp").iterdir())


def test_a_file_of_another_version_is_refused(tmp_path):
    import json
    import zipfile

    path = tmp_path / "old.forerun"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("capture.json", json.dumps({"format_version": 999, "facts": {}}))
    with pytest.raises(UsageError, match="version 999"):
        forerun.predict(f"capture:{path}", device="t4")
    path.write_text("no archive", encoding="utf-8")
    with pytest.raises(UsageError, match="no file of forerun capture"):
        forerun.predict(f"capture:{path}", device="t4")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked on Linux alone")
def test_a_process_whose_caller_is_gone_before_it_has_started_ends(tmp_path):
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as gone:
        pass
    startup = str(Path(profiling.__file__).parent / "startup")
    hooks = {"PYTHONPATH": startup, "FORERUN_HOOKS": CAPTURE_HOOKS, "FORERUN_STARTUP": str(tmp_path / "none")}
    own = os.environ | hooks | {"FORERUN_CAPTURED_FOR": str(gone.pid)}
    assert subprocess.run([sys.executable, "-c", ""], env=own, timeout=60).returncode == -signal.SIGKILL
