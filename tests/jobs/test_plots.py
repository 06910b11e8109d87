"""The rows of a Gantt chart: each device at most one job at a time, and a file that is a picture."""

import itertools

import pytest

from forerun.base.errors import FailureError, UsageError
from forerun.jobs.plots import device_rows, gantt_chart
from forerun.jobs.schedule import schedule

JOBS = [
    {
        "name": f"j{i}",
        "points": "1:100 2:190 4:340",
        "batch_size": 32,
        "steps": 3000 * (i + 1),
        "arrival": 300 * i,
    }
    for i in range(5)
]


@pytest.fixture(scope="module")
def answer():
    return schedule(JOBS, cluster="2x2xt4", policies=["foresight", "srtf"])


def test_no_device_holds_two_jobs_at_once(answer):
    for outcome in answer.outcomes:
        held: dict[int, list[tuple[float, float]]] = {}
        for stretch, rows in device_rows(outcome.stretches, answer.devices_by_node):
            assert len(rows) == stretch.allocation.num_workers
            for row in rows:
                held.setdefault(row, []).append((stretch.start_s, stretch.end_s))
        assert held
        for spans in held.values():
            ordered = sorted(spans)
            assert all(end <= begin + 1e-6 for (_, end), (begin, _) in itertools.pairwise(ordered))


def test_a_job_that_stays_keeps_its_devices(answer):
    for outcome in answer.outcomes:
        rows = dict(device_rows(outcome.stretches, answer.devices_by_node))
        for stretch, devices in rows.items():
            nodes = {device // 2 for device in devices}
            assert nodes == {share.node for share in stretch.placement}


def test_a_picture_is_written(tmp_path, answer):
    path = tmp_path / "gantt.png"
    gantt_chart(path, answer)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_too_many_devices_and_a_name_that_is_no_picture(tmp_path, answer):
    with pytest.raises(UsageError):
        gantt_chart(tmp_path / "gantt.txt", answer)
    large = schedule(JOBS[:1], cluster="100x4xt4", policies=["fifo"])
    with pytest.raises(FailureError, match="at most 256 devices, the cluster has 400"):
        gantt_chart(tmp_path / "gantt.png", large)


def test_fifty_jobs_are_drawn_with_their_marks(tmp_path):
    jobs = [
        {
            "name": f"job{i}",
            "points": "1:100 2:190 4:340",
            "batch_size": 32,
            "steps": 2000 + 400 * i,
            "arrival": 60 * i,
        }
        | ({"deadline": 4000 + 900 * i} if i % 7 == 0 else {})
        for i in range(50)
    ]
    found = schedule(jobs, cluster="1x4xt4", policies=["srtf"])
    path = tmp_path / "fifty.svg"
    gantt_chart(path, found)
    text = path.read_text()
    assert all(f"<!-- {mark} -->" in text for mark in ("arrival", "deadline, missed"))
    assert sum(f"<!-- job{i} -->" in text for i in range(50)) >= 25
