"""Processes end with the command that started them, also if it is killed while they start."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

STARTS = """
import sys, time
from multiprocessing import forkserver
from forerun.base.isolation import fork_server
context = fork_server([sys.argv[1]])
if sys.argv[1] == "slow_to_end":
    process = context.Process(target=time.time)
    process.start()
    process.join()
print(forkserver._forkserver._forkserver_pid, flush=True)
time.sleep(60)
"""


def started(folder, module):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-c", STARTS, module]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_server_that_loads_libraries_does_not_outlive_a_killed_command(tmp_path):
    loads = tmp_path / "loads"
    (tmp_path / "slow_to_load.py").write_text(f"import time; open({str(loads)!r}, 'w'); time.sleep(60)")
    with started(tmp_path, "slow_to_load") as starter:
        server = psutil.Process(int(starter.stdout.readline()))
        while not loads.exists():
            time.sleep(0.01)
        assert server.is_running()
        starter.kill()
    assert psutil.wait_procs([server], timeout=20)[0] == [server]


def test_a_server_does_not_take_its_libraries_apart_after_its_command(tmp_path):
    module = "class Slow:\n    def __del__(self, sleep=__import__('time').sleep):\n        sleep(60)\nslow = Slow()\n"
    (tmp_path / "slow_to_end.py").write_text(module)
    with started(tmp_path, "slow_to_end") as starter:
        server = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    assert psutil.wait_procs([server], timeout=20)[0] == [server]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_script_whose_command_was_killed_before_it_could_follow_it_ends_at_once():
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    script = f"from forerun.base.process_control import die_with_parent; die_with_parent({dead.pid})"
    found = subprocess.run([sys.executable, "-c", script], check=False)
    assert found.returncode == -signal.SIGKILL
