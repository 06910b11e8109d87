"""Advice for clusters that run: recorded documents, and a real Slurm."""

import contextlib
import getpass
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forerun.base.errors import FailureError, InvalidSetupError, RecordError, UsageError
from forerun.jobs.schedule_live import apply_commands, schedule_live
from live_documents import KUBECTL, NOW_S, RAY_JOBS, RAY_NODES, SINFO, SQUEUE
from small_slurm import slurm, small_slurm, wait_for


def document(tmp_path, content):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def recorded_slurm(*, squeue=SQUEUE, sinfo=SINFO):
    return {"squeue": squeue, "sinfo": sinfo, "read_at_s": NOW_S}


def actions(advice):
    return {item.job: str(item.action.kind) for item in advice.jobs}


def test_a_recorded_slurm(tmp_path):
    advice = schedule_live(document(tmp_path, recorded_slurm()))
    assert (advice.system, advice.cluster) == ("slurm", "1x4xt4+1x2xt4")
    # There is room for both; the running one keeps its devices.
    assert actions(advice) == {"7": "keep", "8": "start"}
    assert advice.commands[-1] == "scontrol release 8"
    ends = {item.job: item.finish_s for item in advice.jobs}
    # 3,000,000 samples at 190 a second, an hour less its restart done.
    assert ends["7"].value == pytest.approx(3_000_000 / 190 - 3590, abs=1)
    assert ends["8"].value == pytest.approx(1860)
    assert ends["8"].low < ends["8"].value < ends["8"].high
    assert any("by its time limit" in note and note.endswith(": 8") for note in advice.notes)


def test_an_elastic_job_may_be_given_more(tmp_path):
    jobs = json.loads(json.dumps(SQUEUE))
    jobs["jobs"][0]["comment"] += " elastic=true max_devices=4"
    jobs["jobs"][0]["comment"] = jobs["jobs"][0]["comment"].replace("2:190", "2:190 4:370")
    advice = schedule_live(document(tmp_path, recorded_slurm(squeue=jobs)))
    (long,) = (item for item in advice.jobs if item.job == "7")
    assert (str(long.action.kind), long.action.nodes) == ("change", (("n2", 4),))


def test_what_may_not_be_requeued_keeps_its_devices(tmp_path):
    running = {**SQUEUE["jobs"][0], "requeue": False}
    short = {**SQUEUE["jobs"][1], "tres_per_node": "gres:gpu:t4:2"}
    only = {"nodes": SINFO["nodes"][:1]}
    kept = schedule_live(document(tmp_path, recorded_slurm(squeue={"jobs": [running, short]}, sinfo=only)))
    assert actions(kept) == {"7": "keep", "8": "wait"}
    free = schedule_live(
        document(tmp_path, recorded_slurm(squeue={"jobs": [{**running, "requeue": True}, short]}, sinfo=only))
    )
    assert actions(free) == {"7": "stop", "8": "start"}


def test_further_jobs_are_submitted(tmp_path):
    new = {"name": "new", "points": "1:100", "batch_size": 10, "steps": 600, "script": "python a.py"}
    advice = schedule_live(document(tmp_path, recorded_slurm()), [new])
    assert actions(advice) == {"7": "keep", "8": "start", "new": "submit"}
    assert advice.commands[-1].startswith("sbatch --job-name=new --nodes=1 --gres=gpu:t4:1")


def test_recorded_kubernetes_and_ray(tmp_path):
    kube = schedule_live(document(tmp_path, {**KUBECTL, "read_at_s": NOW_S}))
    # A short job of Kueue's queue takes the place of one of days.
    assert actions(kube) == {"ml/long": "stop", "ml/short": "start"}
    assert (kube.cluster, kube.jobs[0].action.device) == ("1x2xt4", "tesla-t4")
    ray = schedule_live(
        document(tmp_path, {"ray_jobs": RAY_JOBS, "ray_nodes": RAY_NODES, "read_at_s": NOW_S})
    )
    assert actions(ray) == {"run": "stop", "next": "start"}
    assert ray.commands[0] == "ray job stop run"


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (
            recorded_slurm(
                squeue={
                    "jobs": [{**SQUEUE["jobs"][0], "comment": "forerun points=1:100 batch_size=1 stps=5"}]
                }
            ),
            InvalidSetupError,
            "slurm, job 7: unknown column 'stps'; did you mean .*steps",
        ),
        (
            recorded_slurm(sinfo={"nodes": SINFO["nodes"][2:]}),
            RecordError,
            "expected nodes with GPUs that take jobs",
        ),
        ({"jobs": []}, RecordError, "expected an object with .* or squeue and sinfo"),
    ],
)
def test_what_cannot_be_weighed_is_one_clear_line(tmp_path, content, error, message):
    with pytest.raises(error, match=message) as caught:
        schedule_live(document(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_jobs_that_cannot_be_weighed_are_left_alone_with_their_devices(tmp_path):
    runs, waits = SQUEUE["jobs"][:2]
    unknown = {**runs, "comment": "", "time_limit": None}
    large = {**waits, "job_id": 10, "tres_per_node": "", "tres_per_job": "gres/gpu:600"}
    split = {**waits, "job_id": 11, "tres_per_node": "gres:gpu:3"}
    both = {**runs, "job_id": 12, "nodes": "n2", "gres_detail": ["gpu:t4:1(IDX:0),gpu:v100:1(IDX:4)"]}
    nodes = [SINFO["nodes"][0], {**SINFO["nodes"][1], "gres": "gpu:t4:3,gpu:v100:2"}]
    jobs = {"jobs": [unknown, large, split, both]}
    advice = schedule_live(document(tmp_path, recorded_slurm(squeue=jobs, sinfo={"nodes": nodes})))
    assert (advice.cluster, advice.jobs) == ("1x2xt4+1x1xv100", ())
    for note in (
        "job 12 is on devices of several kinds, t4, v100: left alone",
        "job 7 says neither how fast it is nor how long it may run: left alone; a time limit, or a comment such as",
        "job 10 asks for 600 devices where 2 may come free: left alone",
        "job 11 asks for 3 devices, 3 on a node, where 0 may come free: left alone",
        "no job is left to decide about",
    ):
        assert any(said.startswith(note) for said in advice.notes), note


def test_a_file_that_is_cut_off_or_not_there(tmp_path):
    path = Path(document(tmp_path, recorded_slurm()))
    path.write_text(path.read_text(encoding="utf-8")[:300], encoding="utf-8")
    with pytest.raises(
        RecordError, match=r"cluster\.json is no whole JSON document: it ends after 300 characters"
    ):
        schedule_live(str(path))
    with pytest.raises(UsageError, match=r"expected .*slurm, ray:URL or a file"):
        schedule_live("slrum")
    row = {"name": "new", "points": "1:100", "batch_size": 10, "steps": 600}
    with pytest.raises(UsageError, match="needs an image"):
        schedule_live(document(tmp_path, KUBECTL), [row])


def test_a_system_that_is_not_there(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FailureError, match="'squeue' is not installed here; run this where it is, or save"):
        schedule_live("slurm")
    with pytest.raises(FailureError, match=r"Ray's dashboard at http://127\.0\.0\.1:9 does not answer"):
        schedule_live("ray:http://127.0.0.1:9")


FIELDS = "forerun batch_size=10 restart=1s"


def submit(folder, name, minutes, devices, points):
    words = ("sbatch", "--chdir", str(folder), "-J", name, "-t", minutes, f"--gres={devices}", "--comment")
    slurm(*words, f"{FIELDS} {points}", "--wrap", "sleep 3600")


def running_jobs():
    return sorted(slurm("squeue", "-h", "-t", "R", "-o", "%j").split())


def submit_a_long_job_and_two_short_ones(folder):
    submit(folder, "long", "600", "gpu:2", "points=2:100 steps=300000")
    wait_for(lambda: running_jobs() == ["long"], "the long job")
    submit(folder, "short", "30", "gpu:1", "points=1:100 steps=3000")
    submit(folder, "typed", "30", "gpu:t4:1", "points=1:100 steps=3000")


def cancel_all():
    slurm(
        "scancel", "--user", getpass.getuser()
    )  # by numbers, the parts of a job that is gone would be refused
    wait_for(lambda: not slurm("squeue", "-h", "-o", "%i").split(), "an empty queue")


def test_a_real_slurm_is_read_advised_and_changed(tmp_path):
    with small_slurm(tmp_path):
        submit_a_long_job_and_two_short_ones(tmp_path)
        advice = schedule_live("slurm")
        assert {item.title: str(item.action.kind) for item in advice.jobs} == {
            "long": "stop",
            "short": "start",
            "typed": "start",
        }
        # Nothing was run for that.
        assert running_jobs() == ["long"]
        apply_commands(advice)
        wait_for(lambda: running_jobs() == ["short", "typed"], "the others")
        settled = schedule_live("slurm")
        assert {item.title: str(item.action.kind) for item in settled.jobs} == {
            "long": "wait",
            "short": "keep",
            "typed": "keep",
        }
        assert settled.commands == ()
        cancel_all()
        # Slurm refuses to change the devices of a job in another way than it asked by.
        ways = {"job": ["--gpus=1"], "task": ["--ntasks=1", "--gpus-per-task=1"]}
        for name, words in ways.items():
            where = f"--chdir={tmp_path}"
            slurm("sbatch", "--hold", where, "-J", name, "-t", "30", *words, "--wrap", "sleep 3600")
        apply_commands(schedule_live("slurm"))
        wait_for(lambda: running_jobs() == ["job", "task"], "the jobs that ask by job and by task")
        cancel_all()


def test_a_real_slurm_keeps_its_dependencies_arrays_partitions_and_reservations(tmp_path):
    closed = "PartitionName=closed Nodes={host} State=DOWN\n"
    with small_slurm(tmp_path, kinds={"t4": 2, "v100": 1}, more=closed):
        submit(tmp_path, "long", "600", "gpu:t4:2", "points=2:100 steps=300000")
        wait_for(lambda: running_jobs() == ["long"], "the long job")
        (first,) = slurm("squeue", "-h", "-o", "%i").split()
        slurm("scontrol", "create", "reservation", "ReservationName=later", "user=root", "start=now+9hours",
              "duration=60", "nodes=ALL", "flags=ignore_jobs")  # fmt: skip
        theirs = {
            "after": [f"--dependency=afterok:{first}"],
            "tasks": ["--array=0-3%1", "--gres=gpu:v100:1"],
            "closed": ["--partition=closed"],
            "later": ["--reservation=later"],
        }
        for name, words in theirs.items():
            where = f"--chdir={tmp_path}"
            slurm("sbatch", where, "-J", name, "-t", "30", "--gres=gpu:t4:1", *words, "--wrap", "sleep 3600")
        submit(tmp_path, "short", "30", "gpu:t4:1", "points=1:100 steps=3000")
        # Held, or Slurm, which puts a released job last, would keep the devices of the short job for it.
        parts = ["--hold", "--gres=gpu:t4:1", ":", "--gres=gpu:t4:1"]
        slurm("sbatch", f"--chdir={tmp_path}", "-J", "parts", "-t", "30", *parts, "--wrap", "sleep 3600")
        wait_for(lambda: running_jobs() == ["long", "tasks"], "a task of the array")
        before = slurm("squeue", "-h", "-t", "PD", "-o", "%i %j %r").splitlines()
        advice = schedule_live("slurm")
        found = {item.title: str(item.action.kind) for item in advice.jobs}
        # The task keeps its device, which the next one would take.
        assert found == {"long": "stop", "short": "start", "tasks": "keep"}
        whole = "the other parts of its heterogeneous job"
        for why in ("other jobs", "the tasks of its array", "its partition", "its reservation", whole):
            assert any(note.endswith(f"waits for {why}: left alone") for note in advice.notes)
        # What is printed is legal there: Slurm does it all, and starts what it should.
        apply_commands(advice)
        wait_for(lambda: running_jobs() == ["short", "tasks"], "the others")
        still = [line for line in before if line.split()[1] in ("after", "tasks", "closed", "later")]
        assert set(still) <= set(slurm("squeue", "-h", "-t", "PD", "-o", "%i %j %r").splitlines())
        cancel_all()


def test_a_job_gets_nodes_of_its_own_partition(tmp_path):
    nodes = [
        {"name": "n1", "gres": "gpu:t4:2", "state": "idle", "partitions": ["day"]},
        {"name": "n2", "gres": "gpu:t4:4", "state": "idle", "partitions": ["day", "night"]},
        {"name": "n3", "gres": "gpu:t4:8", "state": "idle", "partitions": ["other"]},
    ]
    waits = SQUEUE["jobs"][1]
    jobs = [
        {**waits, "job_id": 20 + i, "partition": partition, **more}
        for i, (partition, more) in enumerate(
            [("night", {}), ("day", {"excluded_nodes": "n2"}), ("day,night", {}), ("gone", {})]
        )
    ]
    new = {"name": "new", "points": "8:100", "num_devices": 8, "batch_size": 8, "steps": 600, "script": "./a"}
    where = document(tmp_path, recorded_slurm(squeue={"jobs": jobs}, sinfo={"nodes": nodes}))
    advice = schedule_live(where, [new])
    assert advice.cluster == "1x8xt4+1x4xt4+1x2xt4"
    given = {item.job: {node for node, _ in item.action.nodes} for item in advice.jobs}
    assert given["20"] == {"n2"}
    assert given["21"] == {"n1"}
    assert given["22"] <= {"n1", "n2"}
    assert given["new"] == {"n3"}
    assert "--partition=other" in advice.commands[-1]
    assert "job 23: no node of its partition and features takes jobs: left alone" in advice.notes
    both = {**SQUEUE["jobs"][0], "nodes": "n1,n2", "gres_detail": ["gpu:t4:1", "gpu:t4:1"], "node_count": 2}
    where = document(tmp_path, recorded_slurm(squeue={"jobs": [both, jobs[0]]}, sinfo={"nodes": nodes}))
    divided = schedule_live(where)
    assert actions(divided) == {"20": "start"}
    assert divided.cluster == "1x8xt4+1x3xt4+1x1xt4"
    assert "job 7 runs on nodes that are open to different jobs: it keeps them" in divided.notes


def killed_schedules(folder, number):
    """Kills commands that change a cluster at random moments, and runs them again until one has ended."""
    dice, kills, longest_s = random.Random(34), 0, 8.0
    command = [sys.executable, "-m", "forerun", "schedule", "live", "slurm", "--apply"]
    while kills < number:
        submit_a_long_job_and_two_short_ones(folder)
        is_done = False
        while not is_done:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            begin_s = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                is_done = process.wait(dice.uniform(0.0, longest_s) if kills < number else 300) == 0
                longest_s = max(1.0, min(longest_s, 1.2 * (time.monotonic() - begin_s)))
            kills += process.poll() is None
            process.kill()
            process.wait()
            assert sorted(slurm("squeue", "-h", "-o", "%j").split()) == ["long", "short", "typed"]
        wait_for(lambda: running_jobs() == ["short", "typed"], "the others")
        cancel_all()


def test_a_killed_command_loses_no_job_and_the_next_one_ends_its_work(tmp_path):
    with small_slurm(tmp_path):
        killed_schedules(tmp_path, 3)
