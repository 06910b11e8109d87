"""The step of a run: one micro-step on one device, its sharing with others, and the wait for its loader.

Every verb comes here for its step times: ``run_step`` for one run with all details, ``shared_times`` and ``fed_times``
for arrays of them. The laws of several devices are loaded when a run has several.

A data loader may deliver its samples too late. A worker needs a fixed time per sample to decode and augment it;
storage and network carry so many bytes a second:

    rate = min(workers used / cost per sample, storage / bytes per sample, network / bytes per sample)
    workers used = min(workers, cores)

With workers the loader runs beside the device and hides behind it as long as it is faster, given that batches are
prefetched: step = max(device, batch / rate). Without workers the training process loads itself, and nothing overlaps:
step = device + batch / rate. Start-up of the workers at each epoch, and the copy to the device, are left out.

A worker also joins samples to batches and hands them over, and shares the caches of its processor: what it needs lies
within ``LOADER_RANGE`` of the cost of its samples, which is the interval of the loading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from forerun.base.errors import InvalidSetupError
from forerun.base.kept import Kept
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Floats, Ints
from forerun.prediction.estimate import Interval
from forerun.prediction.step import (
    PreparedModel,
    StepPrediction,
    ideal_times_s,
    points_of,
    predict_steps,
)
from forerun.question.job import MOST_WORKERS, InputPipeline
from forerun.question.run import Run
from forerun.question.setup import Phase, TrainingSetup

if TYPE_CHECKING:  # of several devices, which most runs do not have
    from forerun.prediction.division import DividedStep

_SHARED: Kept[Floats] = Kept(65_536)
_ALONE = (np.nan, np.nan)
"""Activity of replicas, which is that of one device alone."""
_MOST_NODES = 6
"""Batch sizes at which a grid looks at communication; between them its share of the step changes slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """The step of a run with its parts.

    Attributes:
        alone: One micro-step on one device.
        several: What several devices and micro-steps make of it; None for one of each.
        busy_s: The step of all devices, given that batches are there.
        step_s: The same with the wait for the loader.
    """

    alone: StepPrediction
    several: DividedStep | None
    busy_s: Interval
    step_s: Interval


def run_step(model: PreparedModel, run: Run, weights: CostModel) -> RunStep:
    """The step of a run.

    Args:
        model: The traced step.
        run: The run.
        weights: The cost model.

    Raises:
        UnknownDeviceError: A link that is needed is not known.
    """
    if run.software.calibration is not None and run.cluster.num_devices == 1:
        _refuse_measured_layouts(run.software.calibration)
    several = None
    if run.is_divided:
        (several,) = divided_steps(model, run, [run.setup.batch_size_per_device], weights)
    alone = step_alone(model, run, run.setup, weights) if several is None else several.alone
    busy_s = alone.step_s if several is None else several.step_s
    return RunStep(alone=alone, several=several, busy_s=busy_s, step_s=fed_interval(run, busy_s))


def _refuse_measured_layouts(calibration: str) -> None:
    from forerun.cost.communication.constants import is_layouts_file

    if is_layouts_file(calibration):
        raise InvalidSetupError(
            f"a file such as {calibration} holds measured steps of several devices, and this run has one "
            "device; give more, or leave --calibration out"
        )


def divided_steps(
    model: PreparedModel, run: Run, batch_sizes: Sequence[int], weights: CostModel
) -> list[DividedStep]:
    """Steps of several devices and micro-steps at several batch sizes of a micro-step; every verb asks here.

    Replicas reduce gradients bucket by bucket, units exchange what they divide one by one; each was fitted on the
    public measurements of its own kind of run.

    Raises:
        UsageError: The model cannot be divided so, or a link is not known.
    """
    from forerun.prediction.models import layout_table_of

    table = layout_table_of(run)
    if run.uses_layout:
        # Loaded where it is needed: other steps are answered sooner without it.
        from forerun.prediction.layout_passes import whole_step
        from forerun.prediction.units import DividedModel

        units = DividedModel.of(model)
        return [whole_step(units, _at(run, size), weights, table) for size in batch_sizes]
    from forerun.prediction.replica_step import one_steps, replica_step

    ones = one_steps(model, run, batch_sizes, weights)
    found = [replica_step(model, _at(run, size), one) for one, size in zip(ones, batch_sizes, strict=True)]
    if table.measured is None:
        return found
    from forerun.prediction.division import as_measured

    return [as_measured(step, table.measured) for step in found]


def step_alone(model: PreparedModel, run: Run, setup: TrainingSetup, weights: CostModel) -> StepPrediction:
    """One micro-step on one device of a run, in another setup if wanted."""
    return predict_steps(model, run.cluster.device, [setup], weights, run.software.torch_version)[0]


def fed_times(run: Run, step_s: Floats, num_samples: Floats | Ints) -> Floats:
    """Steps with the wait for the loader; value, low and high (3, n), and samples on one device, (n,) [s]."""
    if run.loader is None:
        return step_s
    return fed_step_s(step_s, np.asarray(num_samples, dtype=np.float64), run.loader)


def fed_interval(run: Run, step_s: Interval, num_samples: int | None = None) -> Interval:
    """A step with the wait for the loader, of all its samples on one device or of so many."""
    if run.loader is None:
        return step_s
    samples = run.batch_size_per_device if num_samples is None else num_samples
    return Interval(*fed_times(run, np.asarray([step_s.ends]).T, np.asarray([samples]))[:, 0].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTimes:
    """Steps of all devices of a run at n batch sizes.

    Attributes:
        step_s: Value, low and high of the step of all micro-steps and devices, (3, n) [s].
        gradient_bytes: All gradients, which replicas hold once more in their buckets, (n,) [bytes].
        activity: Activity of a device of a layout, see ``activity_of``; nan without a layout, (n,).
        compute_fraction: Share of arithmetic in it; nan without a layout, (n,).
    """

    step_s: Floats
    gradient_bytes: Floats
    activity: Floats
    compute_fraction: Floats


def shared_times(
    model: PreparedModel,
    run: Run,
    batch_sizes: Ints,
    alone_s: Floats,
    weights: CostModel,
    *,
    exact: bool,
) -> SharedTimes:
    """Steps of several devices and micro-steps from micro-steps on one device; the equation of ``run_step`` for arrays.

    Args:
        model: The step traced in the run's ``compute_setup``.
        run: The run; its batch size is not looked at.
        batch_sizes: Samples of a micro-step, ascending unless ``exact``, (n,).
        alone_s: Micro-steps of that setup on one device, (3, n) [s].
        weights: The cost model.
        exact: Whether every batch size is worked out, or interpolated between six.

    Raises:
        UnknownDeviceError: A link that is needed is not known.
    """
    if not run.is_divided or run.setup.phase is not Phase.TRAIN:
        none = np.zeros(len(batch_sizes))
        return SharedTimes(
            step_s=alone_s, gradient_bytes=none, activity=none + np.nan, compute_fraction=none + np.nan
        )
    nodes = batch_sizes
    if not exact and len(batch_sizes) > _MOST_NODES:
        # A plan asks for hundreds of batch sizes; the ratio to one device is smooth in their logarithm.
        nodes = batch_sizes[np.linspace(0, len(batch_sizes) - 1, _MOST_NODES).round().astype(int)]
    found = _ratios(model, run, [int(size) for size in nodes], weights)
    if nodes is not batch_sizes:
        found = np.stack([np.interp(np.log(batch_sizes), np.log(nodes), row) for row in found])
    return SharedTimes(
        step_s=alone_s * found[:3], gradient_bytes=found[3], activity=found[4], compute_fraction=found[5]
    )


def _ratios(model: PreparedModel, run: Run, sizes: Sequence[int], weights: CostModel) -> Floats:
    """Ratios of value, low and high to those of one device alone, gradients [bytes], and of layouts their activity.

    The shape is (6, n).
    """
    from forerun.prediction.models import layout_table_of

    parts = (model, weights, run.cluster.device)
    general = replace(run.setup, batch_size_per_device=1)
    cluster = run.cluster
    links = tuple(link.name if link else "" for link in (cluster.intra_link, cluster.inter_link))
    sizes_of_cluster = (cluster.num_nodes, cluster.num_devices_per_node, cluster.num_inter_links)
    measured = layout_table_of(run).measured
    key = (general, run.sharing, run.software.torch_version, links, sizes_of_cluster, measured)
    columns = {size: _SHARED.find(parts, (*key, size)) for size in sizes}
    missing = [size for size, column in columns.items() if column is None]
    if missing:
        for size, step in zip(missing, divided_steps(model, run, missing, weights), strict=True):
            columns[size] = column = _ratio(model, _at(run, size), step, weights)
            _SHARED.keep(parts, (*key, size), column)
    return np.stack([found for size in sizes if (found := columns[size]) is not None], axis=1)


def _ratio(model: PreparedModel, run: Run, found: DividedStep, weights: CostModel) -> Floats:
    """A column of ``_ratios``."""
    # Where the operations are those of the whole model, its step alone is known already.
    alone = found.alone if found.model is model else step_alone(model, run, run.compute_setup, weights)
    ends = np.divide(found.step_s.ends, alone.step_s.ends)
    return np.asarray(
        [*ends, found.gradient_bytes, *(activity_of(found.model, run, found) if found.stages else _ALONE)]
    )


def activity_of(model: PreparedModel, run: Run, step: StepPrediction | DividedStep) -> tuple[float, float]:
    """Ideal time of a device's work and traffic over the step, and the share of the work in it.

    A device that waits for other stages draws less.

    Args:
        model: The operations of the device.
        run: The run.
        step: The step of one device or of several.
    """
    alone, share = (step, 1.0) if isinstance(step, StepPrediction) else (step.alone, step.busy_share)
    points = points_of(model, [run.cluster.device], [alone.setup], run.software.torch_version)
    compute_s, memory_s = (float(part[0]) for part in ideal_times_s(model, points))
    ideal_s = compute_s + memory_s
    return ideal_s / alone.step_s.value * share, compute_s / ideal_s if ideal_s else 0.0


def _at(run: Run, batch_size: int) -> Run:
    return replace(run, setup=replace(run.setup, batch_size_per_device=batch_size))


LOADER_RANGE = (0.95, 1.65)
"""Least and most time of a worker, in the cost of its samples: docs/methods/planning.md has the loaders measured."""

LOADER_BOUND_NOTE = (
    "loader-bound: the device waits for its batches; a worker is assumed to need 0.95 to 1.65 times the cost of "
    "its samples, as measured in real loaders"
)


def loader_rate_samples_per_s(pipeline: InputPipeline) -> float:
    """Samples a second that the loader can deliver; infinite where nothing limits it.

    >>> loader_rate_samples_per_s(InputPipeline(sample_cost_s=0.01, num_workers=8, num_cores=4))
    400.0
    """
    used: float = max(1, pipeline.num_workers)
    if pipeline.num_cores is not None:
        used = min(used, pipeline.num_cores)
    rates = [used / pipeline.sample_cost_s if pipeline.sample_cost_s else math.inf]
    bandwidths = (pipeline.storage_bytes_per_s, pipeline.network_bytes_per_s)
    if pipeline.sample_bytes:
        rates += [bandwidth / pipeline.sample_bytes for bandwidth in bandwidths if bandwidth is not None]
    return min(rates)


def fed_step_s(step_s: Floats, num_samples: Floats, pipeline: InputPipeline) -> Floats:
    """Time of a step with its loader [s].

    Args:
        step_s: Time of the device with its low and high ends, (3, n) [s].
        num_samples: Samples of the step on one device, (n,).
        pipeline: The loader.
    """
    loading_s = np.asarray([[1.0], [LOADER_RANGE[0]], [LOADER_RANGE[1]]]) * (
        num_samples / loader_rate_samples_per_s(pipeline)
    )
    if pipeline.num_workers:
        return np.maximum(step_s, loading_s)
    # One after the other: their errors are independent.
    value = step_s[0] + loading_s[0]
    low, high = np.hypot(step_s[1:] - step_s[0], loading_s[1:] - loading_s[0])
    return np.stack([value, value - low, value + high])


def is_loader_bound(step_s: float, busy_s: float, pipeline: InputPipeline) -> bool:
    """True if the wait for the loader bounds a step.

    Without workers every batch is waited for, which bounds the step only where it takes longer than the device.

    Args:
        step_s: Time of the step with its loader [s].
        busy_s: Time of the device alone [s].
        pipeline: The loader.
    """
    return step_s > (1 + 1e-9 if pipeline.num_workers else 2.0) * busy_s


def workers_needed(pipeline: InputPipeline, device_samples_per_s: float) -> int | None:
    """Fewest workers that keep a device busy; None where cores, storage or network forbid it.

    >>> workers_needed(InputPipeline(sample_cost_s=0.01, num_workers=1), 250.0)
    3
    """
    # 100 samples of 0.07 s are 7.000000000000001 s in floats, and need seven workers.
    needed = max(1, math.ceil(device_samples_per_s * pipeline.sample_cost_s - 1e-9))
    with_them = replace(pipeline, num_workers=min(needed, MOST_WORKERS))
    return needed if loader_rate_samples_per_s(with_them) >= device_samples_per_s * (1 - 1e-9) else None
