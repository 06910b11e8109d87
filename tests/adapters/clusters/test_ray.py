"""The documents of Ray's dashboard."""

import json
import shlex

import pytest

from forerun.adapters.clusters.ray import RAY, ray_cluster
from forerun.base.errors import RecordError
from forerun.jobs.scheduling.live import action_of, commands_for, configured_cluster
from live_documents import NOW_S, RAY_JOBS, RAY_NODES


def test_jobs_and_nodes():
    found = ray_cluster(RAY_JOBS, RAY_NODES, NOW_S)
    assert [(n.name, n.device, n.num_devices) for n in found.nodes] == [("10.0.0.1", "t4", 2)]
    run, following = found.jobs
    assert (run.name, run.is_running, run.nodes, run.ran_s) == ("run", True, (("10.0.0.1", 2),), 600.0)
    assert (following.name, following.is_running, following.num_devices) == ("next", False, 1)
    assert found.notes == ("job 01000000 was started by a driver, not submitted: left alone",)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ({"detail": "x"}, "expected a list of objects under 'jobs'"),
        ([{"submission_id": "a"}], "expected the status of every job, got submission_id"),
        (
            [{**RAY_JOBS[1], "metadata": {"forerun.num_devices": "two"}}],
            "job next: expected a whole number in its metadata forerun.num_devices, got 'two'",
        ),
    ],
)
def test_documents_that_cannot_be_meant(jobs, message):
    with pytest.raises(RecordError, match=message):
        ray_cluster(jobs, RAY_NODES, NOW_S)


def test_ray_stops_and_submits_again_with_what_the_job_said():
    run, following = ray_cluster(RAY_JOBS, RAY_NODES, NOW_S).jobs
    stop, submit = commands_for(RAY, [action_of(run, "t4", [("10.0.0.1", 1)])])
    assert stop == "ray job stop run"
    words = shlex.split(submit)
    assert words[:6] == ["ray", "job", "submit", "--no-wait", "--submission-id", "run-try2"]
    assert words[words.index("--") + 1 :] == ["python", "train.py", "--lr", "0.1"]
    metadata = json.loads(words[words.index("--metadata-json") + 1])
    assert (metadata["forerun.points"], metadata["forerun.num_devices"]) == ("1:100 2:190", "1")
    assert commands_for(RAY, [action_of(following, "", [])]) == []


# As python/ray/autoscaler/gcp/example-gpu-docker.yaml of Ray has it, and with instances of clouds.
NODE_TYPES = """
max_workers: 3
head_node_type: head
available_node_types:
  head:
    resources: {CPU: 6, GPU: 1}
    node_config: {guestAccelerators: [{acceleratorType: projects/p/nvidia-tesla-t4, acceleratorCount: 1}]}
  small: {max_workers: 9, resources: {GPU: 2, "accelerator_type:L4": 1}}
  large: {max_workers: 2, node_config: {InstanceType: g5.12xlarge}}
  cpu: {node_config: {InstanceType: m5.large}}
"""


def test_the_yaml_of_a_cluster_is_a_cluster(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(NODE_TYPES)
    assert str(configured_cluster(path)) == "1x1xt4+3x2xl4+2x4xa10g"
    path.write_text(NODE_TYPES.replace("g5.12xlarge", "p2.xlarge"))
    with pytest.raises(
        RecordError, match=r"node type large \(p2.xlarge\) does not say its GPUs; add resources"
    ):
        configured_cluster(path)
