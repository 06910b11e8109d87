"""Jobs with Gavel's speeds, and what moving them to faster devices is worth."""

import pytest

from forerun.jobs.scheduling.job import parse_cluster
from forerun.jobs.scheduling.policy import find_policy
from forerun.jobs.scheduling.simulation import simulate
from studies.schedule.workloads import (
    GAVEL_CLUSTER,
    GAVEL_ROUND_S,
    GavelSpeed,
    draw_mixed_jobs,
    read_gavel_speeds,
)
from studies.tables.public import reference_folder


def test_a_speed_knows_whether_it_is_packed():
    speed = GavelSpeed({1: 10.0, 8: 60.0}, {8: 40.0})
    assert (speed(1, 1, 32), speed(8, 2, 32), speed(8, 4, 32), speed(4, 1, 32)) == (10.0, 60.0, 40.0, 0.0)


@pytest.mark.reference
def test_moving_jobs_is_worth_more_than_an_order():
    folder = reference_folder()
    if folder is None:
        pytest.skip("the public measurement tables are absent: set FORERUN_REFERENCE_DATA to their folder")
    jobs = draw_mixed_jobs(read_gavel_speeds(folder), seed=2, num_jobs=100)
    assert jobs == sorted(jobs, key=lambda j: j.arrival_s)
    cluster = parse_cluster(GAVEL_CLUSTER)
    found = {
        p: simulate(jobs, cluster, find_policy(p), GAVEL_ROUND_S).metrics
        for p in ("foresight", "srtf", "fifo")
    }
    average = {name: m.average_completion_s for name, m in found.items()}
    assert average["foresight"] < average["srtf"]
    assert average["foresight"] < average["fifo"]
