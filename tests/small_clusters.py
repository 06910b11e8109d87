"""A Ray cluster of two nodes with a core each, all on this machine."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

PATIENCE_S = 300.0
"""Time that a busy machine has for what an idle one does in seconds; only a fault lasts longer."""


@contextlib.contextmanager
def small_cluster(environment: Mapping[str, str]) -> Iterator[Any]:
    """The cluster; its head runs no task. Skips the test where Ray is not installed.

    The nodes, their workers and this process have the environment meanwhile, and a folder of their own in ``TMPDIR``.
    """
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    from ray._private import services
    from ray.cluster_utils import Cluster

    # Ray's sockets lie below it, and the path of a socket is at most 107 characters long.
    folder = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    # Ray starts workers with the least priority: beside other tests they would hardly run.
    own = {"TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, **own}.items():
            patch.setenv(name, value)
        patch.setattr(services, "get_node", _patient(services.get_node))
        store_bytes = 80 * 2**20
        head = {"num_cpus": 0, "object_store_memory": store_bytes, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=store_bytes)
        cluster.wait_for_nodes(timeout=PATIENCE_S)
        yield cluster
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _patient(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Asks for a node that is still coming again: Ray itself, by a constant, gives it 30 s."""

    def asked(*where: Any) -> Any:
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            with contextlib.suppress(RuntimeError):
                return ask(*where)
            time.sleep(0.5)
        return ask(*where)

    return asked


def node_of(cluster: Any, pid: int) -> Any:
    """The node that runs a process."""
    raylet_pids = {parent.pid for parent in psutil.Process(pid).parents()}
    return next(node for node in cluster.worker_nodes if raylet_pid(node) in raylet_pids)


def raylet_pid(node: Any) -> int:
    """Of the process whose children run the node's tasks and actors."""
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)
