"""Jobs, clusters and random sets of them that several tests use."""

from __future__ import annotations

from hypothesis import strategies as st

from forerun.jobs.scheduling.job import (
    DataParallelTraining,
    ScheduledJob,
    SharedCluster,
    parse_cluster,
)
from forerun.jobs.scheduling.policy import JobView
from forerun.jobs.scheduling.speed import (
    BatchEfficiency,
    DataParallelSpeed,
    offered_sizes,
    rate_curve,
)

KINDS = ("t4", "v100")


def speed(sample_s: float = 0.01, sync_s: float = 0.05, overhead_s: float = 0.02) -> DataParallelSpeed:
    return DataParallelSpeed(
        gradient_s=overhead_s,
        gradient_per_sample_s=sample_s,
        local_sync_s=sync_s,
        node_sync_s=4 * sync_s,
        overlap=1.5,
        max_batch_per_device=256,
    )


def job(name: str = "a", *, work: float = 1e5, kinds: tuple[str, ...] = ("t4",), **given) -> ScheduledJob:
    """A job with speeds of its own; 'sample_s', 'sync_s', 'batch', 'most' shape its training."""
    batch, most = given.pop("batch", 64.0), given.pop("most", None)
    one = speed(given.pop("sample_s", 0.01), given.pop("sync_s", 0.05))
    training = DataParallelTraining(
        speeds=dict.fromkeys(kinds, one),
        batch_size=batch,
        batch_range=None if most is None else (batch, most),
        efficiency=None if most is None else BatchEfficiency(noise_scale=500.0, base_batch_size=batch),
    )
    return ScheduledJob(name=name, training=training, work_samples=work, **given)


def view(of: ScheduledJob, cluster: SharedCluster, order: int = 0, **given) -> JobView:
    """What a policy would be told about a job that has not run."""
    training = of.training
    fixed = (training.batch_size, training.batch_size)
    curves = {
        g.device: rate_curve(
            training.speeds[g.device],
            training.efficiency,
            training.batch_range or fixed,
            g.devices_per_node,
            offered_sizes(
                g.devices_per_node,
                min(g.num_devices, of.max_workers if of.is_elastic else of.num_workers),
                of.num_workers,
            ),
            0.0,
        )
        for g in cluster.groups
        if g.device in training.speeds
    }
    return JobView(job=of, order=order, remaining_samples=of.work_samples, curves=curves, **given)


@st.composite
def clusters(draw) -> SharedCluster:
    first = f"{draw(st.integers(1, 4))}x{draw(st.integers(1, 4))}x{KINDS[0]}"
    if draw(st.booleans()):
        return parse_cluster(first)
    return parse_cluster(f"{first}+{draw(st.integers(1, 2))}x{draw(st.integers(1, 4))}x{KINDS[1]}")


@st.composite
def job_sets(draw, cluster: SharedCluster) -> list[ScheduledJob]:
    """One to seven jobs that fit the cluster, some of one size only, some with a range of batches."""
    found = []
    for number in range(draw(st.integers(1, 7))):
        kinds = cluster.kinds if draw(st.booleans()) else cluster.kinds[:1]
        most = max(cluster.group(kind).num_devices for kind in kinds)
        found.append(
            job(
                f"job-{number}",
                work=draw(st.floats(1e3, 1e5)),
                kinds=kinds,
                sample_s=draw(st.floats(1e-3, 0.05)),
                sync_s=draw(st.floats(0.0, 0.5)),
                most=draw(st.sampled_from([None, 512.0])),
                num_workers=draw(st.integers(1, min(most, 4))),
                is_elastic=draw(st.booleans()),
                arrival_s=draw(st.floats(0, 2e4)),
                deadline_s=draw(st.sampled_from([float("inf"), 3e4])),
                weight=draw(st.sampled_from([1.0, 2.0])),
                restart_s=draw(st.sampled_from([0.0, 30.0])),
            )
        )
    return found
