"""Advice for a real Ray, through its dashboard."""

import os
import subprocess
import sys

import pytest

from forerun.base.errors import FailureError
from forerun.jobs.schedule_live import schedule_live

pytest.importorskip("ray", reason="needs the extra 'ray'")
for module in ("aiohttp_cors", "opencensus", "colorful"):
    pytest.importorskip(module, reason="needs Ray's dashboard: pip install 'ray[default]'")

# Ray takes its way of authentication from the environment when it is imported: it runs in a process of its own.
CLUSTER = """
import sys, time, ray
from ray.experimental.internal_kv import _internal_kv_get
from ray._private import services
from ray.job_submission import JobSubmissionClient
def until(ask, what):
    end_s = time.monotonic() + 300
    while not (found := ask()):
        if time.monotonic() > end_s:
            sys.exit(f"Ray has no {what} after 300 s")
        time.sleep(0.5)
    return found
# Ray itself, by a constant, gives a node 30 s to come up.
ask = services.get_node
def node_of(*where):
    try:
        return ask(*where)
    except RuntimeError:
        return None
services.get_node = lambda *where: until(lambda: node_of(*where), "node")
context = ray.init(num_cpus=2, num_gpus=2, include_dashboard=True, dashboard_port=0, log_to_driver=False)
url = "http://" + context.dashboard_url
def client_of():
    try:
        return JobSubmissionClient(url)
    # Every refusal of a dashboard that is still starting: no connection, a timeout, 404 or 503.
    except (OSError, RuntimeError):
        return None
client = until(client_of, "dashboard that answers")
# The agent of a node, which takes jobs, enters its address here when it listens; a job sent before is refused.
agent = "DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX:" + ray.nodes()[0]["NodeID"]
until(lambda: _internal_kv_get(agent, namespace="dashboard"), "agent that takes jobs")
def submit(name, seconds, number, points, steps):
    fields = {"points": points, "batch_size": 10, "steps": steps, "num_devices": number}
    client.submit_job(
        entrypoint=f"python -c 'import time; time.sleep({seconds})'", submission_id=name, entrypoint_num_gpus=number,
        metadata={f"forerun.{key}": str(value) for key, value in fields.items()},
    )
submit("long", 3600, 2, "2:100", 900_000)
def started():
    state = client.get_job_status("long")
    # A job that failed to start, as its supervisor may on a busy machine, is told here rather than by the advice.
    if state in ("FAILED", "STOPPED", "SUCCEEDED"):
        sys.exit(f"the long job is {state}: {client.get_job_info('long').message}")
    return state == "RUNNING"
until(started, "room for the long job")
submit("short", 5, 1, "1:100", 3000)
print("AT", url, flush=True)
sys.stdin.read()
client.stop_job("long")
ray.shutdown()
"""


@pytest.fixture
def dashboard(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    # Ray starts workers with the least priority, and gives up one that has not come within a minute.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    for wait in ("RAY_worker_register_timeout_seconds", "RAY_DASHBOARD_STARTUP_TIMEOUT_S"):
        monkeypatch.setenv(wait, "300")
    log = tmp_path / "cluster.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=dict(os.environ),
        ) as cluster,
    ):
        assert cluster.stdout is not None
        address = next((line.split()[1] for line in cluster.stdout if line.startswith("AT ")), None)
        assert address, log.read_text()
        yield address
        cluster.communicate(timeout=300)


def test_a_real_ray_is_read_and_advised(dashboard, monkeypatch):
    monkeypatch.setattr("forerun.adapters.clusters.ray._PATIENCE_S", 300.0)
    advice = schedule_live(f"ray:{dashboard}")
    assert (advice.system, advice.cluster) == ("ray", "1x2xgpu")
    assert {item.job: str(item.action.kind) for item in advice.jobs} == {"long": "stop", "short": "start"}
    # Ray starts the short one by itself.
    assert advice.commands == ("ray job stop long",)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another" * 9)
    with pytest.raises(FailureError, match=r"refused /api/jobs/ .*set RAY_AUTH_TOKEN"):
        schedule_live(f"ray:{dashboard}")
