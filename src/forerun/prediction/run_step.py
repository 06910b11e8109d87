"""The step of a run: one micro-step on one device, its sharing with others, and the wait for its loader.

Every verb comes here for its step times: ``run_step`` for one run with all details, ``shared_times`` and ``fed_times``
for arrays of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.communication.buckets import gradient_buckets
from forerun.communication.data_parallel import DataParallelStep
from forerun.communication.measured_layouts import is_layouts_file
from forerun.communication.scaling_constants import load_scaling_table
from forerun.errors import InvalidSetupError
from forerun.graph.graph import AllocationKind, Graph, MemoryEvent
from forerun.kept import Kept
from forerun.optime.weights import CostModel
from forerun.prediction.cost_model import layout_table_of
from forerun.prediction.estimate import Interval
from forerun.prediction.gradients import batch_norms, gradients_of, pass_of
from forerun.prediction.input_pipeline import fed_step_s
from forerun.prediction.layouts.divided_model import DividedModel
from forerun.prediction.layouts.layout_step import LayoutStep, compute_setup, layout_step, uses_layout
from forerun.prediction.point_times import ideal_times_s
from forerun.prediction.scale import OneStep, scaled_step
from forerun.prediction.step import PreparedModel, StepPrediction, points_of, predict_steps
from forerun.run.run import Run
from forerun.run.setup import Phase, TrainingSetup

__all__ = [
    "RunStep",
    "SharedTimes",
    "fed_interval",
    "fed_times",
    "is_shared",
    "layout_activity",
    "one_steps",
    "run_step",
    "shared_times",
    "step_alone",
    "weights_bytes",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_ONE_STEPS: Kept[list[OneStep]] = Kept(512)
_SHARED: Kept[Floats] = Kept(65_536)
_MOST_NODES = 6
"""Batch sizes at which a grid looks at communication; between them its share of the step changes slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """The step of a run with its parts.

    Attributes:
        alone: One micro-step on one device.
        shared: What several devices and micro-steps make of it; None for one of each.
        one: One micro-step on one device taken apart; None where ``shared`` is.
        layout: The step of a model that the devices divide among them, in place of ``shared``.
        busy_s: The step of all devices, given that batches are there.
        step_s: The same with the wait for the loader.
    """

    alone: StepPrediction
    shared: DataParallelStep | None
    one: OneStep | None
    busy_s: Interval
    step_s: Interval
    layout: LayoutStep | None = None


def is_shared(run: Run) -> bool:
    """True if a step is more than one micro-step on one device."""
    return run.cluster.num_devices > 1 or run.sharing.num_accumulation_steps > 1


def run_step(model: PreparedModel, run: Run, weights: CostModel) -> RunStep:
    """The step of a run.

    Args:
        model: The traced step.
        run: The run.
        weights: The cost model.

    Raises:
        UnknownDeviceError: A link that is needed is not known.
    """
    if is_layouts_file(run.software.calibration) and not uses_layout(run):
        raise InvalidSetupError(
            f"{run.software.calibration} holds measured steps of layouts, and this run has none; give --parallel or "
            "--strategy fsdp, or leave --calibration out"
        )
    if not is_shared(run):
        alone = step_alone(model, run, run.setup, weights)
        return RunStep(
            alone=alone, shared=None, one=None, busy_s=alone.step_s, step_s=fed_interval(run, alone.step_s)
        )
    if uses_layout(run):
        found = layout_step(DividedModel(model=model), run, weights, layout_table_of(run))
        return RunStep(
            alone=found.alone,
            shared=None,
            one=None,
            busy_s=found.step_s,
            step_s=fed_interval(run, found.step_s),
            layout=found,
        )
    (one,) = one_steps(model, run, [run.setup.batch_size_per_device], weights)
    busy_s, shared = _share(one, run)
    return RunStep(alone=one.alone, shared=shared, one=one, busy_s=busy_s, step_s=fed_interval(run, busy_s))


def step_alone(model: PreparedModel, run: Run, setup: TrainingSetup, weights: CostModel) -> StepPrediction:
    """One micro-step on one device of a run, in another setup if wanted."""
    return predict_steps(model, run.cluster.device, [setup], weights, run.software.torch_version)[0]


def _share(one: OneStep, run: Run) -> tuple[Interval, DataParallelStep]:
    return scaled_step(one, run.cluster, run.sharing, load_scaling_table(), run.setup.batch_size_per_device)


def fed_times(run: Run, step_s: Floats, num_samples: Floats | Ints) -> Floats:
    """Steps with the wait for the loader; value, low and high (3, n), and samples on one device, (n,) [s]."""
    if run.loader is None:
        return step_s
    return fed_step_s(step_s, np.asarray(num_samples, dtype=np.float64), run.loader)


def fed_interval(run: Run, step_s: Interval, num_samples: int | None = None) -> Interval:
    """A step with the wait for the loader, of all its samples on one device or of so many."""
    samples = run.batch_size_per_device if num_samples is None else num_samples
    ends = fed_times(run, np.asarray([[step_s.value], [step_s.low], [step_s.high]]), np.asarray([samples]))
    return Interval(*(float(end[0]) for end in ends))


def one_steps(
    model: PreparedModel, run: Run, batch_sizes: Sequence[int], weights: CostModel
) -> list[OneStep]:
    """Micro-steps of one device at several batch sizes, taken apart; remembered, for they are often asked again.

    Args:
        model: The traced step.
        run: Setup, device, software and buckets; its batch size is not looked at.
        batch_sizes: Samples of a micro-step.
        weights: The cost model.
    """
    general = replace(run.setup, batch_size_per_device=1)
    bucket_bytes, version = run.sharing.bucket_bytes, run.software.torch_version
    return _ONE_STEPS.get(
        (model, run.cluster.device, weights),
        (general, tuple(batch_sizes), version, bucket_bytes),
        lambda: _taken_apart(model, run, batch_sizes, weights),
    )


def _taken_apart(
    model: PreparedModel, run: Run, batch_sizes: Sequence[int], weights: CostModel
) -> list[OneStep]:
    setups = [replace(run.setup, batch_size_per_device=size) for size in batch_sizes]
    steps = predict_steps(model, run.cluster.device, setups, weights, run.software.torch_version)
    number, statistics = batch_norms(model.graph)
    weight_bytes = weights_bytes(model.graph)
    found = []
    for step in steps:
        gradients = gradients_of(model, step)
        found.append(
            OneStep(
                alone=step,
                parts=pass_of(model, step),
                gradient_bytes=sum(gradient.size_bytes for gradient in gradients),
                weight_bytes=weight_bytes,
                buckets=gradient_buckets(gradients, run.sharing.bucket_bytes),
                num_batch_norms=number,
                batch_norm_bytes=statistics,
            )
        )
    return found


def weights_bytes(graph: Graph) -> float:
    """All weights of a model [bytes]."""
    stream = graph.memory
    is_weight = (stream.kind == AllocationKind.WEIGHT) & (stream.event == MemoryEvent.ALLOCATE)
    return float(stream.size_bytes[is_weight, 0].sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTimes:
    """Steps of all devices of a run at n batch sizes.

    Attributes:
        step_s: Value, low and high of the step of all micro-steps and devices, (3, n) [s].
        gradient_bytes: All gradients, which replicas hold once more in their buckets, (n,) [bytes].
        activity: Activity of a device of a layout, see ``layout_activity``; nan without a layout, (n,).
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
        model: The step traced in ``compute_setup``.
        run: The run; its batch size is not looked at.
        batch_sizes: Samples of a micro-step, ascending unless ``exact``, (n,).
        alone_s: Micro-steps of that setup on one device, (3, n) [s].
        weights: The cost model.
        exact: Whether every batch size is worked out, or interpolated between six.

    Raises:
        UnknownDeviceError: A link that is needed is not known.
    """
    if not is_shared(run) or run.setup.phase is not Phase.TRAIN:
        none = np.zeros(len(batch_sizes))
        return SharedTimes(
            step_s=alone_s, gradient_bytes=none, activity=none + np.nan, compute_fraction=none + np.nan
        )
    nodes = batch_sizes
    if not exact and len(batch_sizes) > _MOST_NODES:
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
    parts = (model, weights, run.cluster.device)
    general = replace(run.setup, batch_size_per_device=1)
    cluster = run.cluster
    links = tuple(link.name if link else "" for link in (cluster.intra_link, cluster.inter_link))
    sizes_of_cluster = (cluster.num_nodes, cluster.num_devices_per_node, cluster.num_inter_links)
    measured = layout_table_of(run).measured if uses_layout(run) else None
    key = (general, run.sharing, run.software.torch_version, links, sizes_of_cluster, measured)
    columns = {size: _SHARED.find(parts, (*key, size)) for size in sizes}
    missing = [size for size, column in columns.items() if column is None]
    if missing and uses_layout(run):
        for size in missing:
            columns[size] = ratio = _layout_ratio(model, _at(run, size), weights)
            _SHARED.keep(parts, (*key, size), ratio)
    elif missing:
        for one, size in zip(one_steps(model, run, missing, weights), missing, strict=True):
            step_s, _ = _share(one, _at(run, size))
            ends = [getattr(step_s, end) / getattr(one.step_s, end) for end in ("value", "low", "high")]
            column = np.asarray([*ends, one.gradient_bytes, np.nan, np.nan])
            _SHARED.keep(parts, (*key, size), column)
            columns[size] = column
    return np.stack([found for size in sizes if (found := columns[size]) is not None], axis=1)


def _layout_ratio(model: PreparedModel, run: Run, weights: CostModel) -> Floats:
    """A column of ``_ratios`` of a layout, whose gradients are part of its memory."""
    alone_s = step_alone(model, run, compute_setup(run), weights).step_s
    found = layout_step(DividedModel(model=model), run, weights, layout_table_of(run))
    ends = [getattr(found.step_s, end) / getattr(alone_s, end) for end in ("value", "low", "high")]
    return np.asarray([*ends, 0.0, *layout_activity(model, run, found)])


def layout_activity(model: PreparedModel, run: Run, found: LayoutStep) -> tuple[float, float]:
    """Ideal time of a device's work and traffic over the step of a layout, and the share of the work in it.

    A device that waits for other stages draws less.
    """
    points = points_of(model, [run.cluster.device], [compute_setup(run)], run.software.torch_version)
    compute_s, memory_s = (float(part[0]) for part in ideal_times_s(found.model, points))
    ideal_s = compute_s + memory_s
    activity = ideal_s / found.alone.step_s.value * found.compute_s / found.step_s.value
    return activity, compute_s / ideal_s if ideal_s else 0.0


def _at(run: Run, batch_size: int) -> Run:
    return replace(run, setup=replace(run.setup, batch_size_per_device=batch_size))
