"""The head of a Ray cluster killed under ``measure grid --ray`` and ``tune --ray``."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from forerun.base.isolation import patched_environment
from studies.faults.commands import GRID, keys_of, running, trials_of, write_study

_LONGEST_S = 300.0
_LOOK_S = 0.2
"""Time between two looks at a command and its records [s]."""
_STORE_BYTES = 80 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledHead:
    """What a command did whose cluster lost its head.

    Attributes:
        status: Exit status.
        last_line: Last line on stderr.
        time_s: Time from the kill to the end of the command [s].
        num_acknowledged: Records or trials that were finished before the kill.
        num_lost: Those among them that were gone afterwards.
        is_finished: True if the same command did the rest on a new cluster.
    """

    status: int | None
    last_line: str
    time_s: float
    num_acknowledged: int
    num_lost: int
    is_finished: bool


def killed_heads(what: Literal["grid", "tune"], folder: Path) -> KilledHead:
    """Kills the head, with all its processes, after the first records of a command; runs it again on a new cluster."""
    store = str(folder / "records.sqlite")
    words: tuple[str, ...] = (*GRID, "--records", store)
    finished: Callable[[], Any] = partial(keys_of, store)
    if what == "tune":
        words = (*write_study(folder)[:-1], str(folder / "train.py"))
        finished = partial(trials_of, folder)
    with _cluster() as cluster, running(_on(words, cluster), folder) as command:
        for _ in command.moments(_LONGEST_S, _LOOK_S):
            if len(finished()) >= 2:
                break
        before, killed_s = finished(), time.monotonic()
        cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        for _ in command.moments(command.age_s + _LONGEST_S, _LOOK_S):
            pass
        time_s, status = time.monotonic() - killed_s, command.process.poll()
        command.read_to_end()
        last_line = (command.lines or [""])[-1].strip()
    after = finished()
    with _cluster() as cluster, running(_on(words, cluster), folder) as command:
        for _ in command.moments(_LONGEST_S, _LOOK_S):
            pass
        again = command.process.poll()
    last = finished()
    return KilledHead(
        status=status,
        last_line=last_line,
        time_s=time_s,
        num_acknowledged=len(before),
        num_lost=sum(after.get(key) != was or key not in last for key, was in before.items()),
        is_finished=again == 0,
    )


def _on(words: tuple[str, ...], cluster: Any) -> tuple[str, ...]:
    """The command with the address of a cluster, before a script's own words."""
    place = words.index("--") if "--" in words else len(words)
    return (*words[:place], "--ray", cluster.address, *words[place:])


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """A head that runs no task and a node, in folders of their own."""
    from ray.cluster_utils import Cluster

    # Ray's sockets lie below it, and the path of a socket is at most 107 characters long.
    folder = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    variables = {
        "TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)]),
    }
    with patched_environment(variables):
        head = {"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
        cluster.wait_for_nodes()
        yield cluster
        with contextlib.suppress(Exception):  # its head may be gone
            cluster.shutdown()  # type: ignore[no-untyped-call]
    shutil.rmtree(folder, ignore_errors=True)
