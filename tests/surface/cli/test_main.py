import os
import signal
import subprocess
import sys

import pytest
import typer
from command_line import child_environment, invoke, run

from forerun.base.errors import FailureError, MissingExtraError, TraceError, UnknownModelError, UsageError
from forerun.surface.cli.main import error_line, exit_status


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UnknownModelError("no model 'x'"), 2, "error: no model 'x'"),
        (MissingExtraError("onnx:x", "onnx"), 2, "pip install 'forerun[onnx]'"),
        (TraceError("cannot\n  be traced"), 1, "error: cannot be traced"),
        (FailureError("broken"), 1, "error: broken"),
        (typer.BadParameter("must be a number"), 2, "must be a number; see 'forerun --help'"),
        (
            ValueError("surprise\n"),
            1,
            "internal error: ValueError: surprise; rerun with --debug for the traceback",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (typer.Abort(), 130, "interrupted"),
    ],
)
def test_every_failure_has_a_status_and_one_line(error, status, line):
    assert exit_status(error) == status
    assert line in error_line(error)
    assert "\n" not in error_line(error)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bogus"], "no such command 'bogus'; see 'forerun --help'"),
        (["predict"], "see 'forerun predict --help'"),
        (["predict", "cnn:depth=2"], "missing option '--on'"),
        (["predict", "cnn:depth=2", "--on", "t4", "--batchsize", "3"], "--batch-size"),
        (["predict", "cnn:depth=2", "--on", "t4", "--batch-size", "many"], "--batch-size"),
        (["hardware", "list", "--colour"], "see 'forerun hardware list --help'"),
        (["hardware", "show"], "see 'forerun hardware show --help'"),
    ],
)
def test_wrong_options_are_one_line_with_a_hint_and_status_2(words, expected):
    result = invoke(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr


def test_an_unexpected_exception_shows_no_traceback_unless_asked(monkeypatch):
    import forerun.question.devices

    def fail():
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(forerun.question.devices, "load_catalog", fail, raising=False)
    quiet = invoke("hardware", "list", "--json")
    assert (quiet.exit_code, quiet.stdout) == (1, "")
    assert (
        quiet.stderr == "internal error: RuntimeError: disk on fire; rerun with --debug for the traceback\n"
    )
    loud = invoke("hardware", "list", "--json", "--debug")
    assert loud.exit_code == 1
    assert "Traceback" in loud.stderr
    assert 'raise RuntimeError("disk on fire")' in loud.stderr
    assert "Traceback" in invoke("--debug", "hardware", "list").stderr


def test_debug_shows_where_an_error_on_purpose_came_from():
    result = invoke("hardware", "show", "rtx9090", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.skipif(os.name == "nt", reason="signals of this kind exist on POSIX only")
@pytest.mark.parametrize(
    ("sent", "status", "line"),
    [
        (signal.SIGINT, 130, "interrupted\n"),
        (signal.SIGTERM, 143, "ended by SIGTERM\n"),
        (signal.SIGHUP, 129, "ended by SIGHUP\n"),
    ],
)
def test_a_signal_ends_with_its_status_and_one_line(tmp_path, sent, status, line):
    model = tmp_path / "slow.py"
    model.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\nmake = None\n")
    command = [sys.executable, "-m", "forerun", "predict", f"{model}:make", "--on", "t4", "--json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        # A background shell and nohup start their children with signals ignored, and they hand that on.
        preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(sent)
        out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err) == (status, "", line)


@pytest.mark.skipif(os.name == "nt", reason="shell pipe")
def test_a_reader_that_stops_early_causes_no_traceback():
    command = f"{sys.executable} -m forerun hardware list | head -n 1"
    done = subprocess.run(  # noqa: S602
        command, shell=True, capture_output=True, text=True, env=child_environment()
    )
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.skipif(os.name == "nt", reason="shell")
def test_a_closed_output_is_told_in_one_line():
    command = f"{sys.executable} -m forerun --version >&-"
    done = subprocess.run(  # noqa: S602
        command, shell=True, capture_output=True, text=True, env=child_environment()
    )
    assert done.returncode == 1
    assert done.stderr == "error: the output is closed; name a place for it, such as > FILE\n"


def test_a_terminal_without_the_signs_shows_substitutes():
    done = run("hardware", "show", "t4", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stderr == ""


def test_an_option_of_another_verb_is_named_with_that_verb():
    done = run("predict", "torchvision:resnet18", "--on", "l4", "--co2", "380")
    assert done.returncode == 2
    assert "no such option: --co2" in done.stderr
    assert "--co2 is an option of forerun plan; see 'forerun predict --help'" in done.stderr
    assert "is an option of" not in run("predict", "torchvision:resnet18", "--bogus").stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--spot", "--price-kind spot"),
        ("--gradient-checkpointing", "--recompute full"),
        ("--per_device_train_batch_size", "--batch-size 8"),
    ],
)
def test_words_of_other_tools_are_told_the_option_that_is_meant(words, meant):
    result = invoke("predict", "cnn", "--on", "l4", words)
    assert result.exit_code == 2
    assert f"for {words} write {meant}" in result.stderr


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("hardware", "h100"), "its questions: list, show, here"),
        (("hardware", "list", "h100"), "questions beside it: list, show, here"),
        (("prices", "h100"), "as --on NAME"),
        (("compare", "a", "b", "--on", "t4"), "forerun plan 'MODEL;MODEL' --on NAME"),
        (("calibrate", "--on", "t4"), "--device cuda:0"),
        (("evaluate",), "'RECORDS': table or store of measured steps"),
        (("predict", "cnn", "--on", "t4", "--lora", "--compile"), "as --lora RANK"),
        (("predict", "cnn", "--on", "t4", "--dataset-size", "1.5"), "must be a whole number"),
        (("predict", "a.py:Net(width=3)", "--on", "t4"), "a.py:Net is called without arguments"),
    ],
)
def test_a_word_without_a_place_leads_to_one(words, place):
    assert place in invoke(*words).stderr


def test_an_answer_that_a_full_disk_cuts_is_an_error_also_without_buffers(tmp_path):
    """PYTHONUNBUFFERED, as containers set it, drops what one call of the kernel did not take."""
    import resource

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    command = [sys.executable, "-B", "-m", "forerun", "hardware", "list", "--json"]
    with (tmp_path / "out").open("wb") as out:
        ended = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, text=True, preexec_fn=limit, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr == "error: output: File too large; name another place, or make room there\n"


def test_a_message_shows_no_signs_that_move_a_terminals_cursor():
    assert error_line(UsageError("no file 'a\x1b[2J\0\ud800'")) == r"error: no file 'a\x1b[2J\x00\ud800'"
