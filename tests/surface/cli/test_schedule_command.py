"""``forerun schedule``: the page, the object, the chart, and one line for everything that cannot be meant."""

import json
import shlex

import pytest
from command_line import invoke, run

JOBS = """\
name,points,batch_size,steps,num_devices,arrival,deadline,script
a,1:100 2:190 4:340,32,20000,2,,,train.py --name 'run a'
b,1:50 2:95 4:180,64,4000,4,,2h,
c,1:400 2:700,128,9000,1,10min,,
"""


@pytest.fixture
def jobs(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS, encoding="utf-8")
    return path


def object_of(*words):
    result = invoke("schedule", *map(str, words), "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_object_holds_allocation_ends_and_figures(jobs):
    found = object_of(jobs, "--cluster", "1x4xt4", "--policy", "optimus,srtf")
    assert [outcome["policy"] for outcome in found["policies"]] == ["optimus", "srtf"]
    assert (found["cluster"], found["num_devices"]) == ("1x4xt4", 4)
    for outcome in found["policies"]:
        # c has not come yet; the two others share four devices without overlap.
        assert [plan["job"] for plan in outcome["allocation"]] == ["a", "b"]
        used = [d for plan in outcome["allocation"] for node in plan["nodes"] for d in node["devices"]]
        assert len(used) == len(set(used)) <= 4
        for job in outcome["jobs"]:
            end = job["finish_s"]
            assert job["arrival_s"] <= job["start_s"] < end["low"] <= end["value"] <= end["high"]
        ends = [job["finish_s"]["value"] for job in outcome["jobs"]]
        assert outcome["metrics"]["makespan_s"] == pytest.approx(max(ends))
        assert 0 <= outcome["jobs"][1]["deadline_share"] <= 1
        assert outcome["jobs"][0]["deadline_s"] is None


def test_a_plan_is_a_line_that_can_be_run_as_it_is(jobs):
    (outcome,) = object_of(jobs, "--cluster", "1x4xt4", "--policy", "srtf")["policies"]
    started = {plan["job"]: plan["commands"] for plan in outcome["allocation"] if plan["num_devices"]}
    assert started
    for commands in started.values():
        words = shlex.split(commands[0])
        devices = words[0].removeprefix("CUDA_VISIBLE_DEVICES=").split(",")
        assert words[1] == "torchrun"
        assert f"--nproc-per-node={len(devices)}" in words


def test_the_same_seed_gives_the_same_answer_and_another_other_intervals(jobs):
    def ends(seed):
        (outcome,) = object_of(jobs, "--cluster", "1x4xt4", "--policy", "foresight", "--seed", seed)[
            "policies"
        ]
        return [job["finish_s"] for job in outcome["jobs"]]

    assert ends(1) == ends(1)
    assert [end["value"] for end in ends(1)] == [end["value"] for end in ends(2)]
    assert ends(1) != ends(2)


def test_the_page_has_the_allocation_the_comparison_and_whole_commands(jobs, tmp_path):
    plot = tmp_path / "gantt.png"
    result = invoke(
        "schedule", str(jobs), "--cluster", "1x4xt4", "--policy", "foresight,fifo", "--plot", str(plot)
    )
    assert result.exit_code == 0, result.output
    for word in ("Now on 1x4xt4, policy foresight", "90 % interval", "Policies", "nothing was run"):
        assert word in result.output
    assert any(line.startswith("CUDA_VISIBLE_DEVICES=") for line in result.stdout.splitlines())
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_replayed(tmp_path):
    trace = tmp_path / "philly.csv"
    trace.write_text("job,submit_time,num_gpus,duration\na,0,4,100\nb,10,4,10\nc,20,1,5\n", encoding="utf-8")
    found = object_of("trace", trace, "--cluster", "1x4xt4")
    by_policy = {outcome["policy"]: outcome["metrics"] for outcome in found["policies"]}
    assert list(by_policy) == ["fifo", "srtf", "las"]
    # In order: a ends at 100 s, b at 110 s, c at 115 s.
    assert by_policy["fifo"]["average_completion_s"] == pytest.approx((100 + 100 + 95) / 3)
    # b and c pass a, which ends at 115 s.
    assert by_policy["srtf"]["average_completion_s"] == pytest.approx((115 + 10 + 5) / 3)


@pytest.mark.parametrize(
    ("changed", "words", "message"),
    [
        (("a,1", "b,1"), (), "two jobs are called 'b'"),
        (("10min", "-5"), (), "job 3 ('c'): 'arrival'"),
        ((",32,20000,2,", ",32,20000,8,"), (), "job 'a' asks for 8 devices of one kind, the cluster has 4"),
        ((JOBS[JOBS.index("\n") + 1 :], ""), (), "expected at least one job, got none"),
        (None, ("--policy", "optimos"), "unknown policy 'optimos'; did you mean optimus?"),
        (None, ("--policy", "fifo,fifo"), "policy 'fifo' was asked for twice"),
        (None, ("--policy", ","), "expected at least one policy, got none"),
        (None, ("--cluster", "0x4xt4"), "at least one node and one device a node"),
        (None, ("--cluster", "four"), "a cluster must be nodes x devices a node x kind"),
        (None, ("--round", "soon"), "--round: expected a duration"),
        (None, ("--plot", "gantt.txt"), "gantt.txt"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_status_2(jobs, changed, words, message):
    if changed is not None:
        jobs.write_text(JOBS.replace(*changed), encoding="utf-8")
    cluster = () if "--cluster" in words else ("--cluster", "1x4xt4")
    result = invoke("schedule", str(jobs), *cluster, *words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_trace_with_holes_a_trace_job_too_large_and_a_policy_that_needs_more(tmp_path):
    trace = tmp_path / "philly.csv"
    for row, words, message in (
        ("a,0,,100", (), "expected jobs that had GPUs and ended, got none of 1"),
        ("a,0,four,100", (), "column 'num_gpus', row 1: expected a number, got 'four'"),
        ("a,0,8,100", (), "job 'a' of the trace asks for 8 devices, the cluster has 4"),
        ("a,0,1,100", ("--policy", "optimus"), "of a trace choose among fifo, srtf, las"),
    ):
        trace.write_text(f"job,submit_time,num_gpus,duration\n{row}\n", encoding="utf-8")
        result = invoke("schedule", "trace", str(trace), "--cluster", "1x4xt4", *words)
        assert result.exit_code in (1, 2), result.output
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_process_of_its_own_prints_one_object_and_nothing_else(jobs):
    # A tenth of the work: the solver is asked in each round of every draw.
    jobs.write_text(JOBS.replace("000,", "00,"), encoding="utf-8")
    found = run("schedule", str(jobs), "--cluster", "1x2xt4+1x4xv100-sxm2-16gb", "--policy", "sia", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["num_devices"] == 6
    assert found.stderr == ""
