"""A session of real trainings in a process of its own, to be killed by a test."""

import sys

from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.measurement.layer_design import grid_jobs
from forerun.evidence.measurement.session import run_jobs
from forerun.evidence.measurement.settings import Grid
from forerun.evidence.records.record_store import RecordStore

GRID = Grid(
    sizes={"depth": (1, 2), "base_filters": (2, 4)},
    batch_sizes=(8,),
    image_size=8,
    dataset="synthetic",
    num_epochs=1,
    num_steps=3,
)
QUICK = Protocol(
    num_repetitions=3, min_warm_up=1, max_warm_up=3, window=3, max_seconds=0.2, anchor_every=0, num_threads=1
)


def measure(records: str, **options):
    from forerun.evidence.measure import measure_grid

    return measure_grid(GRID, records=records, protocol=QUICK, **options)


if __name__ == "__main__":
    # Without forerun's own checks and predictions, for which this process would load a framework.
    with RecordStore.open(sys.argv[1]) as store:
        run_jobs(grid_jobs(GRID), store, protocol=QUICK)
