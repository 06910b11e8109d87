"""The six jobs of the Pollux artifact as training with speeds, worth of batches and curves; true and as forecast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from forerun.jobs.scheduling.job import DataParallelTraining
from forerun.jobs.scheduling.running_job import NUM_PHASES, epochs_to_loss
from forerun.jobs.scheduling.speed import DataParallelSpeed, StepPoint, fit_data_parallel
from studies.tables.public import public_table

Floats = npt.NDArray[np.float64]

RESTART_S = {
    "cifar10": 50.0,
    "deepspeech2": 25.0,
    "bert": 120.0,
    "yolov3": 80.0,
    "imagenet": 250.0,
    "ncf": 15.0,
}
"""Checkpoint and restart of each job [s].

Source: siasosp23/artifacts, sia-simulator/applications.py, ``rescale_time``.
"""

STATED_OVER_NEEDED = 1.5
"""Ratio of the epochs that owners state to those needed; the forecasts start from it."""

_LOSS = {
    "validation accuracy (fraction)": lambda v: 1 - v,
    "validation top-1 accuracy (fraction)": lambda v: 1 - v,
    "F1 %": lambda v: 1 - v / 100,
    "word error rate %": lambda v: v / 100,
    "hit rate@10": lambda v: 1 - v,
    "validation loss (lower is better)": lambda v: v,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveForecast:
    """Remaining work of a job that runs until a target, as a callable of the work done.

    Attributes:
        samples_per_epoch: Work of an epoch.
        epochs_by_epoch: Forecast of all epochs after 0, 1, 2 ... of them.
    """

    samples_per_epoch: float
    epochs_by_epoch: tuple[float, ...]

    @classmethod
    def from_curve(
        cls, losses: Sequence[float], target: float, stated_epochs: float, samples_per_epoch: float
    ) -> CurveForecast:
        """The forecasts that each stage of a curve gives rise to; see ``epochs_to_loss``."""
        stages = [losses[:done] for done in range(len(losses) + 1)]
        found = tuple(epochs_to_loss(seen, target, stated_epochs) for seen in stages)
        return cls(samples_per_epoch=samples_per_epoch, epochs_by_epoch=found)

    def __call__(self, done_samples: float) -> float:
        """Samples left."""
        done = done_samples / self.samples_per_epoch
        # Samples add up in floats: three whole epochs may be 2.9999999.
        known = self.epochs_by_epoch[min(int(done + 1e-9), len(self.epochs_by_epoch) - 1)]
        return max(0.1, known - done) * self.samples_per_epoch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedEfficiency:
    """Worth of a sample by batch and progress, from recorded runs: log-linear between recorded batches.

    Attributes:
        log_batches: Logarithms of the recorded batches, ascending, (batches,).
        worth: Progress of a sample relative to the smallest batch, (batches, phases).
    """

    log_batches: tuple[float, ...]
    worth: tuple[tuple[float, ...], ...]

    def __call__(self, batch_size: float, progress: float) -> float:
        """Progress of a sample."""
        phase = min(int(progress * len(self.worth[0])), len(self.worth[0]) - 1)
        column = [row[phase] for row in self.worth]
        return float(np.interp(np.log(batch_size), self.log_batches, column))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseEfficiency:
    """Worth of a sample by the gradient noise that an earlier run at the base batch logged: history of a recurring job.

    Attributes:
        noise_scales: phi by phase of the run.
        base_batch_size: Batch in whose samples work is counted.
    """

    noise_scales: tuple[float, ...]
    base_batch_size: float

    def __call__(self, batch_size: float, progress: float) -> float:
        """Progress of a sample."""
        phases = len(self.noise_scales)
        phi = self.noise_scales[min(int(progress * phases + 1e-9), phases - 1)]
        return (phi + self.base_batch_size) / (phi + batch_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Application:
    """One of the jobs.

    Attributes:
        name: Its name in the tables.
        base_batch_size: Smallest recorded batch, in whose samples work is counted.
        max_batch_size: Largest recorded batch.
        work_samples: Samples of the base batch to the end of the recorded run.
        actual: True training: fitted to all steps, worth of batches as recorded.
        forecast_speeds: Fitted to eleven planned steps, by kind of device.
        forecast_efficiency: Worth of batches from the gradients of an earlier run at the base batch.
        forecast: Left work from the recorded curve so far.
    """

    name: str
    base_batch_size: float
    max_batch_size: float
    work_samples: float
    actual: DataParallelTraining
    forecast_speeds: Mapping[str, DataParallelSpeed]
    forecast_efficiency: NoiseEfficiency
    forecast: CurveForecast

    def forecast_training(self, batch_size: float) -> DataParallelTraining:
        """The knowledge of a scheduler: speeds from eleven measured steps, worth of batches from an earlier run."""
        return replace(
            self.actual_training(batch_size), speeds=self.forecast_speeds, efficiency=self.forecast_efficiency
        )

    def actual_training(self, batch_size: float) -> DataParallelTraining:
        """The true training at a batch asked for."""
        return replace(self.actual, batch_size=batch_size)


def planned_points(points: Sequence[StepPoint], devices_per_node: int) -> list[StepPoint]:
    """Eleven steps that someone would measure: corners of the batch and of the devices, packed on nodes.

    Three batches on one device; two on a full node and on two devices of one; two on the most devices and on the fewest
    that need several nodes.
    """
    packed = [p for p in points if p.num_nodes == -(-p.num_devices // devices_per_node)]
    packed.sort(key=lambda p: p.batch_size_per_device)
    alone = [p for p in packed if p.num_devices == 1]
    near = [p for p in packed if p.num_devices > 1 and p.num_nodes == 1]
    far = [p for p in packed if p.num_nodes > 1]
    chosen = [alone[0], alone[-1], alone[len(alone) // 2]]
    for group in (near, far):
        for number in (max(p.num_devices for p in group), min(p.num_devices for p in group)):
            found = [p for p in group if p.num_devices == number]
            chosen += [found[0], found[-1]]
    return chosen


def read_applications(folder: Path, clusters: Mapping[str, str]) -> dict[str, Application]:
    """The six jobs.

    Args:
        folder: Folder of the public tables.
        clusters: Measured cluster of each kind of device, such as ``{"t4": "aws"}``.

    Raises:
        RecordError: A table is missing or lacks a column.
    """
    columns = [
        "application", "cluster", "n_nodes", "n_gpus", "gpus_per_node_available", "batch_size_per_gpu",
        "step_time_s", "sync_time_s",
    ]  # fmt: skip
    steps = public_table(folder, "adaptdl_step_times", columns)
    columns = ["application", "global_batch_size", "epoch", "cumulative_iterations", "metric_name"]
    curves = public_table(folder, "adaptdl_validation_curves", columns)
    return {
        name: _application(
            name, steps[steps.application == name], curves[curves.application == name], clusters
        )
        for name in RESTART_S
    }


def _application(
    name: str, steps: pd.DataFrame, curves: pd.DataFrame, clusters: Mapping[str, str]
) -> Application:
    of_kind = {kind: steps[steps.cluster == cluster] for kind, cluster in clusters.items()}
    points = {kind: _points(rows) for kind, rows in of_kind.items()}
    nodes = {kind: int(rows.gpus_per_node_available.iloc[0]) for kind, rows in of_kind.items()}
    limits = {kind: max(p.batch_size_per_device for p in found) for kind, found in points.items()}
    batches = sorted(curves.global_batch_size.unique().tolist())
    efficiency = _efficiency(curves, batches)
    base = float(batches[0])
    first = curves[curves.global_batch_size == base].sort_values("epoch")
    work = base * float(first.progress_iterations_at_base_batch.iloc[-1])
    losses = _LOSS[first.metric_name.iloc[0]](first.validation_metric.to_numpy(dtype=float))
    return Application(
        name=name,
        base_batch_size=base,
        max_batch_size=float(batches[-1]),
        work_samples=work,
        actual=DataParallelTraining(
            speeds={kind: fit_data_parallel(found, limits[kind]) for kind, found in points.items()},
            batch_size=base,
            batch_range=(base, float(batches[-1])),
            efficiency=efficiency,
        ),
        forecast_speeds={
            kind: fit_data_parallel(planned_points(found, nodes[kind]), limits[kind])
            for kind, found in points.items()
        },
        forecast_efficiency=_noise_efficiency(first, base),
        forecast=CurveForecast.from_curve(
            losses.tolist(),
            target=float(np.minimum.accumulate(losses)[-1]),
            stated_epochs=STATED_OVER_NEEDED * len(first),
            samples_per_epoch=work / len(first),
        ),
    )


def _points(steps: pd.DataFrame) -> tuple[StepPoint, ...]:
    return tuple(
        StepPoint(
            num_devices=int(row["n_gpus"]),
            num_nodes=int(row["n_nodes"]),
            batch_size_per_device=float(row["batch_size_per_gpu"]),
            step_time_s=row["step_time_s"],
            sync_time_s=row["sync_time_s"],
        )
        for row in steps.to_dict("records")
    )


def _efficiency(curves: pd.DataFrame, batches: list[int]) -> RecordedEfficiency:
    """Progress of a sample in each tenth of the run, by batch."""
    phases = np.linspace(0, 1, 11)
    worth = []
    for batch in batches:
        run = curves[curves.global_batch_size == batch].sort_values("epoch")
        progress = np.concatenate([[0.0], run.progress_iterations_at_base_batch.to_numpy(dtype=float)])
        iterations = np.concatenate([[0.0], run.cumulative_iterations.to_numpy(dtype=float)])
        at = np.interp(phases, progress / progress[-1], iterations)
        gained = np.diff(phases) * progress[-1] * batches[0]
        worth.append(tuple((gained / (np.diff(at) * batch)).tolist()))
    return RecordedEfficiency(log_batches=tuple(np.log(batches).tolist()), worth=tuple(worth))


def _noise_efficiency(run: pd.DataFrame, base_batch_size: float) -> NoiseEfficiency:
    """Noise scale phi = M0 * variance / squared norm of the gradient, by epoch; geometric mean of a phase."""
    variance, sqnorm = (run[name].to_numpy(dtype=float) for name in ("gradient_variance", "gradient_sqnorm"))
    # A norm below the noise is logged as zero: the noise is then all there is.
    ratio = variance / np.maximum(sqnorm, 1e-9 * variance)
    edges = np.linspace(0, 1, NUM_PHASES + 1)
    epochs = np.arange(len(run)) / len(run)
    known = np.log(base_batch_size * ratio)
    middles = np.interp(edges, [*epochs, 1.0], np.concatenate([[0.0], np.cumsum(known)]) / len(run))
    scales = np.exp(np.diff(middles) * NUM_PHASES)
    return NoiseEfficiency(noise_scales=tuple(scales.tolist()), base_batch_size=base_batch_size)
