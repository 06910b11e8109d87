"""A user's own code is built and traced in a process that may end, hang or print without harm to the one that asks."""

from __future__ import annotations

import psutil
import pytest
import torch

from forerun.base.errors import InvalidSetupError, IsolationError
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.source import trace_limits
from forerun.tracing.trace import trace

CODE = """
import ctypes, os, subprocess, threading, time
import torch
def net():
    return {"module": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10)), "input_shape": (3, 8, 8)}
def exits():
    os._exit(0)
def crashes():
    ctypes.string_at(0)
def hangs():
    while True: pass
def closes():
    os.closerange(0, 256)
    return net()
def quits():
    raise KeyboardInterrupt
def fills():
    return bytearray(1 << 46)
def prints():
    os.write(1, b"not an answer")
    threading.Thread(target=time.sleep, args=(997,)).start()
    subprocess.Popen(["sleep", "997"], start_new_session=True)
    return net()
def forks():
    os.fork()
    return net()
"""


_ = (
    torch.__name__
)  # where the framework is loaded, the process comes from a server that has loaded it as well


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "own.py"
    path.write_text(CODE)
    return path


def traced(code, name):
    return trace(ModelRequest(model=f"{code}:{name}"), TrainingSetup())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exits", "exit status 0"),
        ("crashes", "SIGSEGV"),
        ("closes", "the process"),
        ("quits", "KeyboardInterrupt"),
        ("fills", "MemoryError|needs more memory"),
    ],
)
def test_code_that_ends_its_process_is_one_error(code, name, message):
    with pytest.raises(Exception, match=message) as found:
        traced(code, name)
    assert "\n" not in str(found.value)


def test_an_endless_loop_meets_the_time_limit(code):
    traced(code, "net")  # the process is warm
    with trace_limits(timeout_s=0.5), pytest.raises(IsolationError, match=r"longer than 0.5 s"):
        traced(code, "hangs")


def test_output_threads_and_copies_of_the_process_do_no_harm(code, capfd):
    graph = traced(code, "net")
    for name in ("prints", "forks"):
        assert traced(code, name).num_parameters == graph.num_parameters
    assert "not an answer" not in capfd.readouterr().out


def test_nothing_that_the_code_started_is_left(code):
    from forerun.tracing import source

    traced(code, "prints")
    source._worker.close()
    left = [
        process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "997"]
    ]
    assert left == []


def test_a_path_is_one_of_the_folder_of_the_question(code, tmp_path, monkeypatch):
    kept = traced(code, "net")
    (tmp_path / "later.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    assert traced("later.py", "net").num_parameters == kept.num_parameters


def test_the_limits_are_checked():
    with pytest.raises(InvalidSetupError, match="above 0 s"), trace_limits(timeout_s=0.0):
        pass
