"""Slurm's documents, of two layouts."""

from math import inf

import pytest

from forerun.adapters.clusters.slurm import SLURM, expand_host_list, slurm_cluster
from forerun.base.errors import RecordError
from forerun.jobs.scheduling.live import LiveJob, action_of, commands_for, configured_cluster
from live_documents import NEWER_SINFO, NEWER_SQUEUE, NOW_S, SINFO, SQUEUE


def test_jobs_and_nodes_of_an_older_slurm():
    found = slurm_cluster(SQUEUE, SINFO, NOW_S)
    assert [(n.name, n.device, n.num_devices) for n in found.nodes] == [("n1", "t4", 2), ("n2", "t4", 4)]
    long, waits = found.jobs
    assert (long.name, long.is_running, long.nodes, long.num_devices) == ("7", True, (("n1", 2),), 2)
    # It asked for GPUs of no kind.
    assert (long.device, long.ran_s, long.limit_s) == ("", 3600.0, 36_000.0)
    assert long.fields["points"] == "1:100 2:190"
    assert (waits.is_running, waits.device, waits.num_devices, waits.can_restart) == (False, "t4", 1, False)
    assert (waits.fields, waits.details) == ({}, {"way": "TresPerNode", "held": "yes"})
    assert any("idle/drain: n3" in note for note in found.notes)
    assert "job 9 asks for no GPU: left alone" in found.notes


def test_jobs_and_nodes_of_a_newer_slurm():
    found = slurm_cluster(NEWER_SQUEUE, NEWER_SINFO, NOW_S)
    assert [(n.name, n.num_devices) for n in found.nodes] == [("n1", 8), ("n2", 8)]
    (job,) = found.jobs
    assert (job.name, job.num_devices, job.nodes) == ("69_3", 16, (("n1", 8), ("n2", 8)))
    assert (job.ran_s, job.limit_s) == (60.0, inf)


def test_a_job_on_a_node_that_takes_no_jobs_is_left_alone():
    elsewhere = {"jobs": [{**SQUEUE["jobs"][0], "nodes": "n3"}]}
    found = slurm_cluster(elsewhere, SINFO, NOW_S)
    assert not found.jobs
    assert "job 7 runs on n3, which takes no new jobs: left alone" in found.notes


@pytest.mark.parametrize(
    ("squeue", "message"),
    [
        ({}, "squeue --json: expected a list of objects under 'jobs', got nothing"),
        ([], "expected a list of objects under 'jobs', got list"),
        ({"jobs": [{"name": "a"}]}, "expected job_id and job_state of every job, got name"),
        (
            {"jobs": [{**SQUEUE["jobs"][0], "comment": "forerun model"}]},
            "job 7: expected name=value in its comment, got 'model'",
        ),
        ({"jobs": [{**SQUEUE["jobs"][0], "comment": "forerun a='b"}]}, "job 7: its comment cannot be read"),
    ],
)
def test_documents_that_cannot_be_meant(squeue, message):
    with pytest.raises(RecordError, match=message):
        slurm_cluster(squeue, SINFO, NOW_S)


def test_host_lists():
    assert expand_host_list("a[1-3]b,c") == ["a1b", "a2b", "a3b", "c"]
    assert expand_host_list("") == []


def test_slurm_holds_before_it_frees_and_frees_before_it_starts():
    long, waits = slurm_cluster(SQUEUE, SINFO, NOW_S).jobs
    new = LiveJob(name="new", title="new", is_running=False, num_devices=2)
    assert commands_for(
        SLURM,
        [
            action_of(waits, "t4", [("n1", 1)]),
            action_of(long, "", []),
            action_of(new, "t4", [("n2", 2)], "python train.py"),
        ],
    ) == [
        "scontrol requeuehold 7",
        "scontrol update JobId=8 NumNodes=1 TresPerNode=gres:gpu:t4:1 ReqNodeList=n1",
        "scontrol release 8",
        "sbatch --job-name=new --nodes=1 --gres=gpu:t4:2 --nodelist=n2 --wrap 'python train.py'",
    ]
    changed = commands_for(SLURM, [action_of(long, "t4", [("n2", 4)])])
    assert changed[1] == "scontrol update JobId=7 NumNodes=1 TresPerNode=gres:gpu:4 ReqNodeList=n2"
    assert commands_for(SLURM, [action_of(long, "t4", [("n1", 2)])]) == []
    # It is held already.
    assert commands_for(SLURM, [action_of(waits, "", [])]) == []


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"state_reason": "Dependency"}, "other jobs"),
        ({"state_reason": "JobArrayTaskLimit", "array_task_string": "3-9%2"}, "the tasks of its array"),
        ({"state_reason": "Priority", "array_task_string": "3-9"}, "the tasks of its array"),
        ({"state_reason": "QOSMaxGRESPerUser"}, "a limit of its quality of service"),
        ({"state_reason": "Reservation"}, "its reservation"),
        ({"state_reason": "PartitionTimeLimit"}, "its partition"),
        ({"state_reason": "Licenses"}, "licenses"),
        ({"state_reason": "InvalidAccount"}, "what Slurm calls InvalidAccount"),
        (
            {"het_job_id": {"set": True, "infinite": False, "number": 8}},
            "the other parts of its heterogeneous job",
        ),
    ],
)
def test_a_job_that_waits_for_more_than_devices_is_left_alone(more, why):
    waits = {**SQUEUE["jobs"][1], **more}
    found = slurm_cluster({"jobs": [waits]}, SINFO, NOW_S)
    assert not found.jobs
    assert f"job {waits['job_id']} waits for {why}: left alone" in found.notes


@pytest.mark.parametrize(
    "row",
    [
        {"job_state": "SUSPENDED"},
        {"job_state": "CONFIGURING"},
        {"job_state": ["RUNNING", "CONFIGURING"]},
        {"job_state": ["RUNNING"], "het_job_id": {"set": True, "infinite": False, "number": 7}},
        # Fields of Slurm 24.05 and later where only the allocation names the devices, as public dashboards keep them.
        {
            "job_state": ["RUNNING"],
            "requeue": False,
            "gres_detail": [],
            "tres_per_node": "",
            "tres_req_str": "cpu=2,mem=4G,node=1,billing=2",
            "tres_alloc_str": "cpu=2,mem=4G,node=1,billing=2,gres/gpu=2,gres/gpu:t4=2,gres/tmpsize=10737418240",
        },
    ],
)
def test_a_job_that_holds_devices_keeps_them(row):
    holds = {**SQUEUE["jobs"][0], **row}
    (found,) = slurm_cluster({"jobs": [holds]}, SINFO, NOW_S).jobs
    assert (found.is_running, found.can_restart, found.num_devices, found.nodes) == (
        True,
        False,
        2,
        (("n1", 2),),
    )


@pytest.mark.parametrize("state", ["FUTURE", "UNKNOWN", "REBOOT_ISSUED", "POWERED_DOWN"])
def test_a_node_that_takes_no_jobs_is_left_out(state):
    rows = [{"name": "n1", "gres": "gpu:t4:2", "state": ["IDLE", state]}]
    assert slurm_cluster(SQUEUE, {"nodes": rows}, NOW_S).nodes == ()


def test_a_node_that_a_job_without_gpus_has_whole_is_left_out():
    alone = {
        "job_id": 5,
        "job_state": ["RUNNING"],
        "nodes": "n2",
        "shared": ["none"],
        "tres_alloc_str": "cpu=22,node=1",
    }
    found = slurm_cluster({"jobs": [*SQUEUE["jobs"], alone]}, SINFO, NOW_S)
    assert [node.name for node in found.nodes] == ["n1"]
    assert "left out, as a job without GPUs has it whole: n2" in found.notes


def test_a_configuration_is_a_cluster(tmp_path):
    path = tmp_path / "slurm.conf"
    path.write_text(
        "GresTypes=gpu # NodeName=no Gres=gpu:9\n"
        "NodeName=DEFAULT CPUs=64 \\\n  Gres=gpu:tesla_t4:4,npu:Ascend910:4\n"
        "NodeName=gpu[01-02] State=UNKNOWN\nNodeName=gpu03 Gres=gpu:nvidia_a30:2(S:0-1) State=IDLE\n"
        "NodeName=gpu04 State=DOWN\nNodeName=login Gres=gpu:2\nnodename=cpu Gres=craynetwork:1\n"
        "PartitionName=a Nodes=gpu[01-02] State=UP\nPartitionName=b Nodes=gpu03,gpu04,cpu\n"
    )
    assert str(configured_cluster(path)) == "2x4xt4+1x2xa30"
    path.write_text(path.read_text() + "PartitionName=all Nodes=ALL\n")
    assert str(configured_cluster(path)) == "2x4xt4+1x2xa30+1x2xgpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            b"PartitionName=a Nodes=ALL\nInclude nodes.conf\n",
            "expected nodes with GPUs, as slurm.conf .* got none",
        ),
        (
            b"NodeName=x[1-999999999] Gres=gpu:8",
            "a range of at most 100,000 nodes such as 01-16, got '1-999999999'",
        ),
        (b"\xff\xfe\x00", "expected the configuration of a cluster"),
        (b"available_node_types: {a: 3}", "got none; give NxMxDEVICE"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path, text, message):
    (tmp_path / "c").write_bytes(text)
    with pytest.raises(RecordError, match=message):
        configured_cluster(tmp_path / "c")
