"""Kubernetes' documents."""

import copy
import json
import shlex

import pytest

from forerun.adapters.clusters.kubernetes import KUBERNETES, kubernetes_cluster
from forerun.base.errors import RecordError
from forerun.jobs.scheduling.live import LiveJob, action_of, commands_for, configured_cluster
from live_documents import KUBECTL, NOW_S


def test_jobs_and_nodes():
    found = kubernetes_cluster(KUBECTL, NOW_S)
    assert [(n.name, n.device, n.num_devices) for n in found.nodes] == [("k1", "tesla-t4", 2)]
    long, short = found.jobs
    assert (long.name, long.is_running, long.nodes) == ("ml/long", True, (("k1", 2),))
    assert long.ran_s > 0
    assert (short.is_running, short.num_devices, short.details["queue"]) == (False, 1, "team")
    assert short.fields == {"points": "1:100 2:190 4:340", "batch_size": "32", "steps": "9000"}
    assert found.notes == ("job ml/cpu asks for no nvidia.com/gpu: left alone",)


def test_devices_of_pods_of_no_job_are_not_given_away():
    other = copy.deepcopy(next(item for item in KUBECTL["items"] if item["kind"] == "Pod"))
    other["metadata"]["labels"] = {"training.kubeflow.org/job-name": "long"}
    other["spec"]["containers"] = [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    found = kubernetes_cluster({"items": [*KUBECTL["items"], other]}, NOW_S)
    assert [node.num_devices for node in found.nodes] == [1]
    assert found.notes[0] == "1 of the GPUs of k1 are those of pods of no Job: left alone"


def test_the_jobs_of_a_jobset_are_its_own():
    items = copy.deepcopy(KUBECTL["items"])
    for item in items:
        if item["kind"] == "Job":
            owner = {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "name": "train",
                "controller": True,
            }
            item["metadata"]["ownerReferences"] = [owner]
    found = kubernetes_cluster({"items": items}, NOW_S)
    assert (found.nodes, found.jobs) == ((), ())
    assert "job ml/short is part of JobSet train, which alone may change it: left alone" in found.notes
    assert "2 of the GPUs of k1 are those of pods of no Job: left alone" in found.notes


def test_a_job_of_volcano():
    task = {
        "name": "worker",
        "replicas": 2,
        "template": {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 1}}}]}},
    }
    job = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": "v", "namespace": "ml"},
        "spec": {"tasks": [task]},
        "status": {"state": {"phase": "Pending"}},
    }
    found = kubernetes_cluster({"items": [job, *KUBECTL["items"][-2:]]}, NOW_S)
    (only,) = found.jobs
    assert (only.num_devices, only.is_running, only.details["task"]) == (2, False, "worker")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda items: items[:4],
            "expected nodes with nvidia.com/gpu among the items, got Job; ask for jobs,pods,nodes",
        ),
        (lambda items: [*items[:4], *items[5:]], "job ml/long runs, but none of its pods is among the items"),
        (
            lambda items: [{**items[1], "metadata": {}}, items[-2]],
            "expected a name in the metadata of every job",
        ),
        (
            lambda items: [{**items[1], "spec": {}}, items[-2]],
            "job short: expected a pod template in its spec, got none",
        ),
    ],
)
def test_documents_that_cannot_be_meant(change, message):
    items = change(copy.deepcopy(KUBECTL["items"]))
    with pytest.raises(RecordError, match=message):
        kubernetes_cluster({"items": items}, NOW_S)


def test_kubernetes_suspends_resumes_and_lets_kueue_start():
    long, short = kubernetes_cluster(KUBECTL, NOW_S).jobs
    lines = commands_for(KUBERNETES, [action_of(short, "tesla-t4", [("k1", 1)]), action_of(long, "", [])])
    manifest = json.loads(shlex.split(lines[0])[1])
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("WorkloadPriorityClass", "forerun-now")
    patches = [json.loads(shlex.split(line)[-1]) for line in lines[1:3]]
    assert patches == [{"spec": {"suspend": True}}, {"spec": {"parallelism": 1}}]
    assert lines[3].endswith("label job short --overwrite kueue.x-k8s.io/priority-class=forerun-now")


def test_volcano_starts_and_stops_whole_jobs():
    details = {"api": "batch.volcano.sh/v1alpha1", "per_pod": "1"}
    job = LiveJob(name="ml/v", title="v", is_running=False, num_devices=2, details=details)
    (line,) = commands_for(KUBERNETES, [action_of(job, "t4", [("k1", 2)])])
    words = shlex.split(line)
    manifest = json.loads(words[1])
    assert (manifest["action"], manifest["target"]["name"]) == ("ResumeJob", "v")
    assert words[2:] == ["|", "kubectl", "--namespace", "ml", "create", "--filename", "-"]


KUEUE = """
kind: ResourceFlavor
metadata: {name: big}
spec: {nodeLabels: {cloud.google.com/gke-accelerator: nvidia-tesla-a100}}
---
kind: ClusterQueue
spec: {resourceGroups: [{flavors: [{name: big, resources: [{name: nvidia.com/gpu, nominalQuota: 12}]}]}]}
"""


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        (KUEUE, "1x8xa100-sxm4-40gb+1x4xa100-sxm4-40gb"),
        ("{type: fleet, nodes: 2, resources: {gpu: 'A100:80GB:8'}}", "2x8xa100-pcie-80gb"),
        ("{type: fleet, nodes: 0..4, resources: {gpu: {name: [H100, H200], count: 4..8}}}", "4x8xh100-sxm"),
        ("{type: fleet, instance_types: [p4d.24xlarge]}", "1x8xa100-sxm4-40gb"),
        ("{resources: {accelerators: {V100: 4}}, num_nodes: 2}", "2x4xv100-sxm2-16gb"),
        (KUEUE.replace("gke-accelerator", "other"), "flavor big .* does not name them; add nodeLabels"),
        ("{type: fleet, resources: {gpu: '80GB:8'}}", "have no name: expected gpu: A100:80GB:8, got 80GB:8"),
        ("{type: fleet, ssh_config: {hosts: [a]}}", "dstack itself finds the GPUs"),
    ],
)
def test_a_cluster_in_the_words_of_kueue_dstack_and_skypilot(tmp_path, text, cluster):
    # Fields of Kueue's and dstack's own examples, clusters/aws/fleet and alignment-handbook/fleet-distrib.
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    if " " not in cluster:
        assert str(configured_cluster(path)) == cluster
        return
    with pytest.raises(RecordError, match=cluster):
        configured_cluster(path)
