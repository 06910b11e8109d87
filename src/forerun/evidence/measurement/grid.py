"""Jobs of a grid: every combination of sizes of a network family, batch sizes, precisions, layouts and compilation.

System A's grid is depth 2, 3, 4 x base_filters 32, 64 x batch size 32, 64, 128 of ``cnn`` on CIFAR-10: 18 jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.datasets import dataset_size
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.records.measurement import JobKind, Scalar
from forerun.question.setup import Layout, Precision

__all__ = ["SYSTEM_A_SIZES", "Grid", "grid_jobs", "spread_order"]

Item = TypeVar("Item")

SYSTEM_A_SIZES: Mapping[str, Sequence[int]] = {"depth": (2, 3, 4), "base_filters": (32, 64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values to combine, and settings that all jobs share; the defaults are system A's.

    Attributes:
        network: Name of a network family, such as ``cnn`` or ``cifar-resnet``.
        sizes: Keys of the family with the values each takes.
        batch_sizes, precisions, layouts, compiles: Values of the other axes.
        image_size: Height and width of the images [pixels].
        optimizer: Name of the optimizer, one of ``tracing.optimizers``.
        dataset: Name of the dataset, one of ``DATASETS``.
        num_epochs: Number of epochs of each job.
        num_steps: Number of steps to which an epoch is cut; None for whole epochs.
        num_workers: Number of processes that prepare batches.
        seed: Seed of weights, order and synthetic images.
        framework: Name of the framework: ``pytorch``, or ``keras`` on TensorFlow.
        num_replicas: With Keras, number of replicas of a MirroredStrategy, each with its own batch; 1 for none.
    """

    network: str = "cnn"
    sizes: Mapping[str, Sequence[int]] = field(default_factory=lambda: dict(SYSTEM_A_SIZES))
    batch_sizes: Sequence[int] = (32, 64, 128)
    precisions: Sequence[Precision] = (Precision.FP32,)
    layouts: Sequence[Layout] = (Layout.NCHW,)
    compiles: Sequence[bool] = (False,)
    image_size: int = 32
    optimizer: str = "adam"
    dataset: str = "cifar10"
    num_epochs: int = 3
    num_steps: int | None = None
    num_workers: int = 0
    seed: int = 0
    framework: str = "pytorch"
    num_replicas: int = 1

    def __post_init__(self) -> None:
        axes = {**self.sizes, "batch size": self.batch_sizes, "precision": self.precisions}
        for name, values in {**axes, "layout": self.layouts, "compile": self.compiles}.items():
            if not values:
                raise InvalidSetupError(f"expected at least one value of {name} in the grid, got none")
            if len(set(values)) < len(values):
                raise InvalidSetupError(
                    f"expected different values of {name} in the grid, got {list(values)}; leave repeats out: "
                    "a repeat on another day needs its own occasion"
                )
        if self.framework not in ("pytorch", "keras"):
            raise InvalidSetupError(f"expected framework pytorch or keras, got {self.framework!r}")
        if self.num_replicas < 1 or (self.num_replicas > 1 and self.framework != "keras"):
            raise InvalidSetupError(
                f"expected one replica, or more with framework keras, got {self.num_replicas} with {self.framework}"
            )
        if self.num_epochs < 0 or (self.num_steps is not None and self.num_steps < 1):
            raise InvalidSetupError(
                f"expected epochs of at least 0 and steps of at least 1, got {self.num_epochs} and {self.num_steps}"
            )


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
