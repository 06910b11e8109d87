"""A real Slurm on this machine for a test: one node with two GPUs that are files, gone afterwards."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scontrol")

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=500 Gres={gres} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE OverSubscribe=YES:8 State=UP
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(is_so: Callable[[], bool], what: str, patience_s: float = 300.0) -> None:
    end_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end_s, f"{what} did not come within {patience_s:.0f} s"
        time.sleep(0.2)


def slurm(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout


@contextmanager
def small_slurm(folder: Path, *, kinds: Mapping[str, int] = {"t4": 2}, more: str = "") -> Iterator[str]:
    """Daemons as root, without systemd; SLURM_CONF names them as long as they run. Gives the name of the node.

    Args:
        folder: Their files.
        kinds: GPUs of the node by kind.
        more: Further lines of the configuration, with {host} for the node.
    """
    missing = [
        name for name in _PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if missing:
        pytest.skip(f"needs Slurm: apt-get install slurm-wlm munge ({', '.join(missing)} is not installed)")
    if os.geteuid() != 0:
        pytest.skip("needs root, as the daemons of Slurm do")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = []
    for kind, number in kinds.items():
        for i in range(number):
            (folder / f"{kind}-{i}").touch()
        files.append(f"Name=gpu Type={kind} File={folder}/{kind}-[0-{number - 1}]\n")
    host = socket.gethostname().partition(".")[0]
    ports = {"controller_port": free_port(), "node_port": free_port()}
    gres = ",".join(f"gpu:{kind}:{number}" for kind, number in kinds.items())
    text = (_CONFIGURATION + more).format(host=host, folder=folder, cores=os.cpu_count(), gres=gres, **ports)
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    (folder / "gres.conf").write_text("".join(files), encoding="utf-8")
    socket_path = folder / "munge.socket"
    munge = ["munged", "--foreground", "--force", f"--socket={socket_path}", f"--key-file={key}"]
    munge += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin"
    daemons: list[subprocess.Popen[bytes]] = []
    log = (folder / "daemons.log").open("wb")
    try:
        for command in (munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
            daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
            if command is munge:
                wait_for(socket_path.exists, "munge")
        wait_for(lambda: "idle" in _states(), "an idle node of Slurm")
        yield host
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=60)
            except subprocess.TimeoutExpired:
                daemon.kill()
        log.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _states() -> str:
    found = subprocess.run(
        ["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, check=False, timeout=300
    )
    return found.stdout
