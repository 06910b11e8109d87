"""Real gloo processes: the group, the probe of the link, and data parallel steps."""

import os

import pytest
from real_jobs import QUICK, TINY_CNN

from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measurement.circumstances import describe_circumstances
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.measurement.runners.data_parallel_runner import (
    PROBE_SIZES,
    check_strategy,
    fit_ring,
    run_data_parallel,
    run_in_group,
    run_link_probe,
    write_measured_link,
)
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome, Summary
from forerun.question.devices.cluster import find_link


def ranks(rank, num_processes, device, argument):
    import torch
    import torch.distributed as dist

    total = torch.tensor([rank + argument])
    dist.all_reduce(total)
    return rank, num_processes, int(total.item()), device


def second_fails(rank, num_processes, device, argument):
    if rank == 1:
        raise ValueError("layers must be positive\nmore")
    return rank


def second_dies(rank, num_processes, device, argument):
    if rank == 1:
        os._exit(3)
    return rank


def in_two(work, argument=0):
    return run_in_group(work, argument, num_processes=2, device_index="cpu", num_threads=1)


def test_two_processes_meet_and_rank_0_answers():
    assert in_two(ranks, 10) == (0, 2, 21, "cpu")


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (second_fails, r"process 1 of 2: ValueError: layers must be positive$"),
        (second_dies, r"process \d of 2"),
    ],
)
def test_the_failure_of_one_ends_all(work, message):
    with pytest.raises(MeasurementError, match=message):
        in_two(work)


def test_a_ring_is_found_again_from_its_times():
    times = [2 * 3 * 1e-4 + 2 * 3 / 4 * size / 2e9 for size in PROBE_SIZES]
    assert fit_ring(PROBE_SIZES, times, 4) == pytest.approx((1e-4, 2e9))


def test_times_that_do_not_grow_are_refused():
    with pytest.raises(MeasurementError, match="do not grow with their sizes"):
        fit_ring(PROBE_SIZES, [1e-3 / (i + 1) ** 3 for i in range(5)], 2)


@pytest.fixture(scope="module")
def probe():
    job = MeasurementJob(
        kind=JobKind.LINK, subject="all-reduce", family="link", parameters={"num_devices": 2}
    )
    return run_link_probe(job, "cpu", QUICK)


def test_a_probe_measures_five_sizes_a_latency_and_a_bandwidth(probe):
    found = probe.results
    assert [found[f"size_{i}_bytes"] for i in range(1, 6)] == list(PROBE_SIZES)
    assert found["time_5_s"] > found["time_1_s"] > 0
    assert 1e6 < found["bandwidth_bytes_per_s"] < 1e12
    assert found["latency_s"] >= 0
    assert found["sharing_slowdown"] > 0
    assert found["world_size"] == 2


def test_a_probe_becomes_a_link_that_scale_takes(probe, tmp_path):
    measurement = Measurement(
        key="0" * 32,
        kind=JobKind.LINK,
        subject="all-reduce",
        family="link",
        parameters={"num_devices": 2},
        outcome=Outcome.DONE,
        repetitions_s=probe.repetitions_s,
        summary=Summary(median_s=1.0, low_s=1.0, high_s=1.0, is_stable=True),
        results=probe.results,
        circumstances=describe_circumstances("cpu"),
    )
    write_measured_link(measurement, tmp_path / "link.toml")
    link = find_link(str(tmp_path / "link.toml"))
    assert link.kind == "host"
    assert link.usable_bytes_per_s == pytest.approx(probe.results["bandwidth_bytes_per_s"], rel=1e-4)


def test_two_processes_train_and_tell_what_their_all_reduces_cost():
    job = MeasurementJob(
        kind=JobKind.DATA_PARALLEL,
        subject=TINY_CNN,
        family="cnn",
        parameters={"batch_size": 2, "num_devices": 2, "strategy": "ddp"},
    )
    found = run_data_parallel(job, "cpu", QUICK)
    assert len(found.repetitions_s) >= 3
    assert found.results["world_size"] == 2
    assert found.results["gradient_bytes"] == 4 * found.results["num_parameters"]
    assert 0 <= found.results["synchronisation_s"] < max(found.repetitions_s)
    assert found.results["step_without_synchronisation_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mirrored", 2, "train"), "expected a strategy of ddp, got 'mirrored'"),
        (("ddp", 0, "train"), "devices must be at least 1, got 0"),
        (("ddp", -2, "train"), "got -2"),
        (("ddp", 2, "inference"), "measured in training only, got phase inference"),
    ],
)
def test_what_cannot_be_run(arguments, message):
    with pytest.raises(InvalidSetupError, match=message):
        check_strategy(*arguments)


def test_a_link_has_two_ends():
    job = MeasurementJob(
        kind=JobKind.LINK, subject="all-reduce", family="link", parameters={"num_devices": 1}
    )
    with pytest.raises(MeasurementError, match="two ends or more"):
        run_link_probe(job, "cpu", QUICK)
