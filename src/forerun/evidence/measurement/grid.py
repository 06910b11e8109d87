"""Jobs of a grid: every combination of sizes of a network family, batch sizes, precisions, layouts and compilation.

System A's grid is depth 2, 3, 4 x base_filters 32, 64 x batch size 32, 64, 128 of ``cnn`` on CIFAR-10: 18 jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

from forerun.evidence.measurement.datasets import dataset_size
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.measurement.settings import Grid
from forerun.evidence.records.measurement import JobKind, Scalar

__all__ = ["grid_jobs", "spread_order"]

Item = TypeVar("Item")


def grid_jobs(grid: Grid) -> list[MeasurementJob]:
    """The jobs of a grid in an order in which small and large take turns.

    Any part of the list then covers the whole range: an interrupted session is still of use, and a drift of the
    machine does not look like an effect of size.
    """
    rows: Iterable[tuple[Any, ...]] = product(
        *grid.sizes.values(), grid.batch_sizes, grid.precisions, grid.layouts, sorted(grid.compiles)
    )
    return spread_order([_job(grid, row) for row in rows])


def _job(grid: Grid, row: tuple[Any, ...]) -> MeasurementJob:
    num_sizes = len(grid.sizes)
    sizes = dict(zip(grid.sizes, row[:num_sizes], strict=True))
    batch_size, precision, layout, compile = row[num_sizes:]
    text = ",".join(f"{key}={value}" for key, value in sizes.items())
    parameters: dict[str, Scalar] = {
        **sizes,
        "batch_size": batch_size,
        "image_size": grid.image_size,
        "precision": str(precision),
        "layout": str(layout),
        "compile": compile,
        "optimizer": grid.optimizer,
        "dataset": grid.dataset,
        "dataset_size": dataset_size(grid.dataset, train=True),
        "num_epochs": grid.num_epochs,
        "num_steps": grid.num_steps,
        "num_workers": grid.num_workers,
        "seed": grid.seed,
    }
    subject = f"{grid.network}:{text}" if text else grid.network
    if grid.framework == "keras":
        # Jobs of PyTorch keep the identity they had before other frameworks were added.
        subject = f"keras:{subject}"
        if grid.num_replicas > 1:
            parameters |= {"strategy": "mirrored", "num_replicas": grid.num_replicas}
    return MeasurementJob(
        kind=JobKind.TRAINING,
        subject=subject,
        family=grid.network,
        parameters=parameters,
    )


def spread_order(items: Sequence[Item]) -> list[Item]:
    """The items in the order of van der Corput's sequence: each next one falls into the widest gap so far.

    >>> spread_order(list(range(8)))
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    num_bits = max(1, (len(items) - 1).bit_length())
    reversed_bits = (int(f"{index:0{num_bits}b}"[::-1], 2) for index in range(1 << num_bits))
    return [items[index] for index in reversed_bits if index < len(items)]
