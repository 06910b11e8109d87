"""Predicts steps: time with an interval, where it goes, and what bounds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.base.kept import Kept
from forerun.base.units import format_flops_per_s
from forerun.cost.time.evidence import (
    ORDER_OF_MAGNITUDE,
    REPEAT_NOISE,
    Z_90,
    operation_mix,
    shipped_evidence,
    step_covariates,
)
from forerun.cost.time.features import (
    NEWEST_ERA,
    Point,
    double_rates,
    least_times_s,
    point_arrays,
    roofline_terms_s,
    software_era,
)
from forerun.cost.time.law import CONVOLUTIONS
from forerun.cost.time.rows import DistinctOps, distinct_ops, in_double, is_mostly_double
from forerun.cost.time.step_times import StepTimes, host_spread, scaled, smooth_maximum, step_times, with_rows
from forerun.cost.time.weights import CostModel, run_kind
from forerun.graph.graph import Floats, Graph, OpClass
from forerun.prediction.estimate import BreakdownPart, Interval, LayerTime, Provenance
from forerun.prediction.published import PublishedStep, known_rows, published_rows, with_published
from forerun.question.devices.device import Device, DeviceKind, NumberFormat
from forerun.question.setup import PURE_OF, Layout, Phase, Precision, TrainingSetup

if TYPE_CHECKING:  # of another framework than PyTorch
    from forerun.prediction.stack import StackEffect

_PART_NAMES = {
    OpClass.CONV: "convolution",
    OpClass.DEPTHWISE_CONV: "convolution",
    OpClass.GROUPED_CONV: "convolution",
    OpClass.LINEAR: "linear",
    OpClass.BMM: "attention and batched products",
    OpClass.ATTENTION: "attention and batched products",
    OpClass.SOFTMAX: "attention and batched products",
    OpClass.RECURRENT: "recurrent layers",
    OpClass.BATCH_NORM: "normalisation",
    OpClass.LAYER_NORM: "normalisation",
    OpClass.GROUP_NORM: "normalisation",
    OpClass.MAX_POOL: "pooling and resizing",
    OpClass.AVG_POOL: "pooling and resizing",
    OpClass.COPY: "copies and casts",
    OpClass.CAST: "copies and casts",
    OpClass.EMBEDDING: "embedding",
    OpClass.OPTIMIZER: "optimizer",
    OpClass.UNKNOWN: "operations without a rule",
}
_OTHER_PART = "element-wise and reductions"
HOST_PART = "waiting for the host"
"""Part of a breakdown in which the device has nothing to do."""
_TRANSFER_PART = "weights and states on the host"
_TRANSFER_BOUND = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A graph with its distinct kernels, ready to be evaluated at any point.

    ``is_whole`` is False where the kernels are a part of the network's, which no published step is about. ``beside``
    has the graphs of the other passes of a step that devices divide, by their names.
    """

    graph: Graph
    ops: DistinctOps
    is_whole: bool = True
    beside: Mapping[str, PreparedModel] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """One predicted step.

    Attributes:
        setup: The setup as PyTorch computes it on the device.
        step_s: Time with its 90 % interval [s].
        breakdown: Parts that add up to ``step_s.value``.
        bound_by: "compute", "memory bandwidth", "host" or "offload".
        provenance: What the prediction rests on.
        kernel_s: Time of each distinct kernel, all launches, scaled to the step (n,) [s].
        launch_s: Time the host needs for all launches of each distinct kernel, (n,) [s].
        host_s: Time the host needs to launch it [s].
        overhead_s: Time of a step that no operation causes: copies of the input, the training loop of the stack,
            weights on the host [s].
        loop_s: Cost of the training loop of the software stack, which no operation causes [s].
        transfer_s: Wait for the host that holds weights or states, and its update [s].
        least_s: Time of the products at the peak of the device, which no step undercuts [s].
        system_log_width, model_log_width: Half-widths of the 90 % intervals of the log step that the unknown system and
            the cost model's own error have alone.
        published: Published steps of the network in the same circumstances, nearest batch first.
        kin: Other boards of the device's architecture whose published steps of the network have moved the step.
    """

    setup: TrainingSetup
    step_s: Interval
    breakdown: tuple[BreakdownPart, ...]
    bound_by: str
    provenance: Provenance
    kernel_s: Floats
    launch_s: Floats
    host_s: float
    overhead_s: float
    loop_s: float = 0.0
    transfer_s: float = 0.0
    least_s: float = 0.0
    system_log_width: float = 0.0
    model_log_width: float = 0.0
    published: tuple[PublishedStep, ...] = ()
    kin: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """Steps of p points of one model in the software stack it runs in.

    Attributes:
        setups: Setups of the points as PyTorch computes them on their devices, (p,).
        times: Times of the operations, without the training loop.
        loop_s: Cost of the training loop of the stack, (p,) [s].
        loop_names: Stack whose loop it is, (p,); empty where it costs nothing beside the operations.
        log_width: Half-width of the 90 % interval of the step in log time, (p,).
        least_s: Time of the products at the peak of the device, which no step undercuts, (p,) [s].
        transfer_s: Wait for the host that holds weights or states, and its update, (p,) [s].
        system_log_width: Part of ``log_width`` that the unknown system has alone, (p,).
        published, kin: Of each point, (p,), as in ``StepPrediction``; empty where no kernels were asked for.
    """

    setups: tuple[TrainingSetup, ...]
    times: StepTimes
    loop_s: Floats
    loop_names: tuple[str, ...]
    log_width: Floats
    least_s: Floats
    transfer_s: Floats
    system_log_width: Floats
    published: tuple[tuple[PublishedStep, ...], ...]
    kin: tuple[tuple[str, ...], ...]

    @property
    def step_s(self) -> Floats:
        """Time of a step, (p,) [s]."""
        return self.times.step_s + self.loop_s + self.transfer_s

    def bounded(self, rows: Sequence[int], other: TimedSteps, *, is_least: bool = False) -> TimedSteps:
        """The steps with those of others, one for each of some rows, where these are shorter, or longer if least."""
        # A step that waits for its launches says nothing of the kernels of another format, which may be fewer.
        is_busy = other.times.device_s >= other.times.host_s
        step_s = self.step_s[rows]
        chosen = (other.step_s > step_s) & is_busy if is_least else other.step_s < step_s
        # They are the steps of the formats asked for, whatever bounds them: the setups stay.
        return replace(with_rows(self, np.asarray(rows), other, chosen), setups=self.setups)

    def ends_s(self) -> Floats:
        """Value, low and high of the steps, (3, p) [s]."""
        return interval_ends_s(self.step_s, self.log_width, self.least_s)


def interval_ends_s(step_s: Floats, log_width: Floats, least_s: Floats) -> Floats:
    """Value, low and high of steps, (3, ...) [s].

    Args:
        step_s: The values [s].
        log_width: Half-widths of the intervals in log time.
        least_s: Times that no step undercuts; where a calibration found less, its value is the low end [s].
    """
    factor = np.exp(log_width)
    return np.stack([step_s, np.maximum(step_s / factor, np.minimum(step_s, least_s)), step_s * factor])


def widened(step_s: float, own: Interval, log_spread: float, least_s: float) -> Interval:
    """The interval of a step that follows from another one and scatters more.

    Args:
        step_s: The step [s].
        own: The one it follows from, whose relative width to above it has [s].
        log_spread: Standard deviation of the logarithm of the ratio of the two.
        least_s: Time that no such step undercuts [s].
    """
    width = np.hypot(np.log(own.high / own.value), Z_90 * log_spread)
    value, low, high = interval_ends_s(np.asarray(step_s), width, np.asarray(least_s)).tolist()
    return Interval(value, low, high)


def prepare(graph: Graph) -> PreparedModel:
    """Finds the distinct kernels of a graph."""
    return PreparedModel(graph=graph, ops=distinct_ops(graph.ops))


def ideal_times_s(model: PreparedModel, points: Sequence[Point]) -> tuple[Floats, Floats]:
    """Time of a step's work at the peak rates, and of its traffic at full bandwidth, (p,) each [s]."""
    compute_s, memory_s = roofline_terms_s(model.ops, point_arrays(points))
    return compute_s @ model.ops.count, memory_s @ model.ops.count


def computed_as(
    model: PreparedModel, setups: Sequence[TrainingSetup]
) -> tuple[list[TrainingSetup], list[TrainingSetup]]:
    """Setups of a step as the cost model knows them, and those under which others measured such steps.

    The trace holds products in fp8 as smaller ones in bf16. A model without convolutions has the usual memory order
    alone. Others measured in one format: where products and convolutions have two, in that of the larger part of the
    work.
    """
    has_order = bool(np.isin(model.ops.op_class, CONVOLUTIONS).any())
    known, measured = [], []
    for setup in setups:
        if setup.precision is Precision.FP8:
            setup = replace(setup, precision=Precision.BF16, saving=replace(setup.saving, fp8_recipe=None))
        elif setup.precision is Precision.FP64:  # told by the sizes of its operands
            setup = replace(setup, precision=Precision.FP32)
        if setup.layout is not Layout.NCHW and not has_order:
            setup = replace(setup, layout=Layout.NCHW)
        known.append(setup)
        own = setup.convolution_precision
        if own is not None:
            is_theirs = not setup.precision.is_half and run_kind(model.ops, setup).endswith("convolutions")
            precision = own if is_theirs else setup.precision
            setup = replace(setup, precision=precision, convolution_precision=None)
        measured.append(setup)
    return known, measured


def provenance_of(device: Device, setup: TrainingSetup, weights: CostModel, ops: DistinctOps) -> Provenance:
    """Tier of the knowledge about steps like this one.

    Calibrated: steps of this number format were measured on this very device. Interpolated: networks of about the same
    mix of operations were measured on such a device in the same phase, number format and compiler; none was in fp64.
    """
    if is_mostly_double(ops):
        return Provenance.DATASHEET_ONLY
    if weights.calibrated_device is not None:
        measured: Mapping[str, Sequence[str]] = weights.provenance["measured_devices"]
        formats = {kind.split()[0] for kind in measured.get(device.name, ())}
        if run_kind(ops, setup).split()[0] in formats:
            return Provenance.CALIBRATED
    is_near = shipped_evidence().is_near(device, setup, operation_mix(ops))
    return Provenance.INTERPOLATED if is_near else Provenance.DATASHEET_ONLY


def tier_of(model: PreparedModel, device: Device, setup: TrainingSetup, weights: CostModel) -> Provenance:
    """Tier of a step of a traced model: as ``provenance_of``, or published where others measured this very network."""
    setup = _in_known_formats(model, device, setup, weights)
    found = provenance_of(device, setup, weights, model.ops)
    _, (measured,) = computed_as(model, [setup])
    is_own = known_rows(model, device, measured, weights) and published_rows(model.graph, device, measured)
    return Provenance.PUBLISHED if is_own else found


def half_widths(
    weights: CostModel,
    ops: DistinctOps,
    points: Sequence[Point],
    tiers: Sequence[Provenance],
    times: StepTimes,
) -> Floats:
    """Half-widths of the 90 % intervals of the log step times of one model at p points, (p,).

    A calibration has a law of its own, quantile times (base + slope * spread of the ensemble). Otherwise they follow
    from the step itself (``cost.time.evidence``) and its host, and are at least an order of magnitude on architectures
    that nobody measured, and in fp64.
    """
    is_double = is_mostly_double(ops)
    is_measured = [weights.knows_die(point.device) for point in points]
    widths = shipped_evidence().log_widths(step_covariates(operation_mix(ops), times.spread, is_measured))
    widths = np.hypot(widths, Z_90 * host_spread(times))
    for index, (point, tier) in enumerate(zip(points, tiers, strict=True)):
        if tier is Provenance.CALIBRATED:
            law: Mapping[str, Any] = weights.provenance["intervals"][str(tier)]
            widths[index] = law["quantile"] * (law["base"] + law["slope"] * times.spread[index])
            continue
        if is_double or is_order_of_magnitude(point.device, weights):
            widths[index] = max(widths[index], ORDER_OF_MAGNITUDE)
    return widths


def is_order_of_magnitude(device: Device, weights: CostModel) -> bool:
    """True if the cost model was fitted without a device of this architecture."""
    return weights.calibrated_device is None and not shipped_evidence().knows_architecture(device)


def points_of(
    model: PreparedModel,
    devices: Sequence[Device],
    setups: Sequence[TrainingSetup],
    torch_version: str | None,
) -> list[Point]:
    """One point per pair of device and setup."""
    era = NEWEST_ERA if torch_version is None else software_era(torch_version)
    return [
        Point(device=device, setup=setup, uses_layer_norm=model.graph.uses_layer_norm, era=era)
        for device, setup in zip(devices, setups, strict=True)
    ]


def _of_systems(
    points: Sequence[Point], weights: CostModel, ops: DistinctOps
) -> tuple[Floats, list[Provenance]]:
    """Offsets of the measured system that speaks for each point, (members, p, 4), and the tiers of the points.

    They are found once per configuration.
    """
    known: dict[tuple[object, ...], tuple[Floats, Provenance]] = {}
    found = []
    for point in points:
        device, setup = point.device, point.setup
        # The batch is left out: no measuring system is told by it, and a sweep asks about many batches.
        key = (device.name, setup.precision, setup.layout, setup.compile, setup.phase)
        if key not in known:
            known[key] = weights.offsets_of_point(point), provenance_of(device, setup, weights, ops)
        found.append(known[key])
    return np.stack([offsets for offsets, _ in found], axis=1), [tier for _, tier in found]


def timed_steps(
    model: PreparedModel,
    devices: Sequence[Device],
    setups: Sequence[TrainingSetup],
    weights: CostModel,
    torch_version: str | None = None,
    *,
    with_kernels: bool = False,
) -> TimedSteps:
    """Steps of one model at p pairs of device and setup: the one place where the cost model is asked for them.

    In the software stack of the model, step = factor * step in PyTorch + cost of the training loop. The half-widths of
    the intervals of step and stack add in squares, in the logarithm. Published steps of the very network on the device
    move the value and narrow the interval (``prediction.published``); measurements of one's own outrank them.
    """
    setups = [_in_known_formats(model, *each, weights) for each in zip(devices, setups, strict=True)]
    found = _measured_steps(model, devices, setups, weights, torch_version, with_kernels=with_kernels)
    found = _as_long_as_pure_half(found, model, devices, setups, weights, torch_version)
    for rows, others, is_least in _bounds_of_formats(model, devices, setups, weights, torch_version):
        chosen = [devices[row] for row in rows]
        asked = _measured_steps if is_least else timed_steps  # which autocast is itself held to
        known = _without_casts(model) if is_least and others[0].precision.is_half else model
        bound = asked(known, chosen, others, weights, torch_version, with_kernels=with_kernels)
        found = found.bounded(rows, bound, is_least=is_least)
    return found


def _measured_steps(
    model: PreparedModel,
    devices: Sequence[Device],
    setups: Sequence[TrainingSetup],
    weights: CostModel,
    torch_version: str | None,
    *,
    with_kernels: bool,
) -> TimedSteps:
    """Steps by the cost model and published ones."""
    found = _steps_of_model(model, devices, setups, weights, torch_version, with_kernels=with_kernels)
    _, measured = computed_as(model, setups)

    def steps_of(
        devices: Sequence[Device], setups: Sequence[TrainingSetup], release: str | None
    ) -> StepTimes:
        return _steps_of_model(model, devices, setups, weights, release).times

    return with_published(found, model, devices, measured, weights, steps_of, with_steps=with_kernels)


_WITHOUT_CASTS: Kept[DistinctOps] = Kept(64)


def _without_casts(model: PreparedModel) -> PreparedModel:
    count = np.where(model.ops.op_class == OpClass.CAST, 0, model.ops.count)
    return replace(model, ops=_WITHOUT_CASTS.get((model.ops,), (), lambda: replace(model.ops, count=count)))


_AUTOCAST_OF = {pure: autocast for autocast, pure in PURE_OF.items()}
_MANY_SAMPLES = 64
"""Samples of a training step from which on formats are compared by their kernels."""
_MOST_IN_PURE_HALF = 12
"""Samples up to which inference in half precision throughout was measured; under autocast it was from 256 on."""


def _is_known(
    model: PreparedModel, device: Device, setup: TrainingSetup, weights: CostModel, torch_version: str | None
) -> bool:
    (point,) = points_of(model, [device], [setup], torch_version)
    return weights.knows_settings(point)


def _has_convolutions(model: PreparedModel, weights: CostModel) -> bool:
    """True for steps whose formats bound each other: of a device that was not measured for this answer."""
    return weights.calibrated_device is None and bool(np.isin(model.ops.op_class, CONVOLUTIONS).any())


def _as_long_as_pure_half(
    found: TimedSteps,
    model: PreparedModel,
    devices: Sequence[Device],
    setups: Sequence[TrainingSetup],
    weights: CostModel,
    torch_version: str | None,
) -> TimedSteps:
    """Steps of training under autocast, not measured on the device, whose kernels take max(1, pure / autocast) times.

    Convolutions in half precision are the same under autocast, with more casts: Lambda's ResNet-50 trains as long in
    both on 16 boards (PyTorch 1.4 to 1.10, ratios of 0.94 to 1.08, median 1.00), and more systems measured half
    precision throughout. With few samples hosts decide, which differ by more than formats: the ratio is the least of
    the samples asked and 64. Sources left out 19.3 to 16.2 %, devices 17.9 to 16.6 %. Channels last, half precision
    throughout was measured nowhere, and MLPerf's steps on A100 and H100 speak against it.
    """
    if not _has_convolutions(model, weights) or not run_kind(model.ops, setups[0]).endswith("convolutions"):
        return found
    rows = [
        row
        for row, (device, setup) in enumerate(zip(devices, setups, strict=True))
        if setup.precision in PURE_OF and setup.phase is Phase.TRAIN and setup.layout is Layout.NCHW
        and not found.published[row]
        and not _is_known(model, device, setup, weights, torch_version)
    ]  # fmt: skip
    if not rows:
        return found
    chosen = [devices[row] for row in rows]
    autocast = [setups[row] for row in rows]
    sizes = [max(_MANY_SAMPLES, setup.batch_size_per_device) for setup in autocast]
    many = [replace(setup, batch_size_per_device=size) for setup, size in zip(autocast, sizes, strict=True)]
    ratio = np.full(len(rows), np.inf)
    for asked in [autocast] if many == autocast else [autocast, many]:
        cast = _steps_of_model(model, chosen, asked, weights, torch_version).times
        halves = [replace(setup, precision=PURE_OF[setup.precision]) for setup in asked]
        pure = _steps_of_model(_without_casts(model), chosen, halves, weights, torch_version).times
        # A step that waits for its launches says nothing of its kernels.
        ratio = np.minimum(ratio, np.where(pure.device_s >= pure.host_s, pure.device_s / cast.device_s, 1.0))
    factor = np.ones(len(setups))
    factor[rows] = np.maximum(1.0, ratio)
    own, longer = found.times, scaled(found.times, factor)
    stretch = smooth_maximum(longer.device_s, own.host_s) / smooth_maximum(own.device_s, own.host_s)
    # Kernels take longer; launches do not.
    longer = replace(longer, step_s=stretch * own.step_s, host_s=own.host_s, launch_s=own.launch_s)
    return replace(found, times=longer)


def _bounds_of_formats(
    model: PreparedModel,
    devices: Sequence[Device],
    setups: Sequence[TrainingSetup],
    weights: CostModel,
    torch_version: str | None,
) -> Iterator[tuple[list[int], list[TrainingSetup], bool]]:
    """Rows of steps, the setups in other formats whose steps bound them, and whether from below.

    Products in fp32 beside convolutions in TF32, PyTorch's own default, are no quicker than all in TF32, which was
    measured on most devices. Half precision throughout is no slower than autocast, and inference under autocast no
    quicker than a dozen samples in half precision throughout, which more systems measured.
    """
    if not _has_convolutions(model, weights):
        return
    in_both = Precision.FP32, Precision.TF32
    mixed = [i for i, setup in enumerate(setups) if (setup.precision, setup.convolution_precision) == in_both]
    if mixed:
        tf32 = [replace(setups[row], precision=Precision.TF32, convolution_precision=None) for row in mixed]
        yield mixed, tf32, True
    unknown = [
        row
        for row, setup in enumerate(setups)
        if (setup.precision in PURE_OF and setup.phase is not Phase.TRAIN) or setup.precision in _AUTOCAST_OF
        if not _is_known(model, devices[row], setup, weights, torch_version)
    ]
    # Autocast first: half precision throughout is bounded by what it is then.
    least = [row for row in unknown if setups[row].precision in PURE_OF]
    if least and run_kind(model.ops, setups[0]).endswith("convolutions"):
        yield least, [_in_pure_half(setups[row]) for row in least], True
    most = [row for row in unknown if setups[row].precision in _AUTOCAST_OF]
    if most:
        yield (
            most,
            [replace(setups[row], precision=_AUTOCAST_OF[setups[row].precision]) for row in most],
            False,
        )


def _in_pure_half(setup: TrainingSetup) -> TrainingSetup:
    size = min(setup.batch_size_per_device, _MOST_IN_PURE_HALF)
    return replace(setup, precision=PURE_OF[setup.precision], batch_size_per_device=size)


def _in_known_formats(
    model: PreparedModel, device: Device, setup: TrainingSetup, weights: CostModel
) -> TrainingSetup:
    """The setup as PyTorch computes it on the device: convolutions of a step in fp32 in TF32, unless said otherwise.

    All is in fp32 where the device has no TF32; calibrations are measured so where nothing is said.
    """
    if NumberFormat.TF32 in device.peak_flops_per_s:
        is_open = setup.precision is Precision.FP32 and setup.convolution_precision is None
        if weights.calibrated_device is not None or device.kind is not DeviceKind.GPU:
            return setup
        # Those in fp64 stay what they are.
        has_convolutions = (np.isin(model.ops.op_class, CONVOLUTIONS) & ~in_double(model.ops)).any()
        if not is_open or model.graph.is_keras or not has_convolutions:
            return setup
        return replace(setup, convolution_precision=Precision.TF32)
    if setup.of_convolutions is not Precision.TF32:
        return setup
    precision = Precision.FP32 if setup.precision is Precision.TF32 else setup.precision
    return replace(setup, precision=precision, convolution_precision=None)


def _steps_of_model(
    model: PreparedModel,
    devices: Sequence[Device],
    setups: Sequence[TrainingSetup],
    weights: CostModel,
    torch_version: str | None,
    *,
    with_kernels: bool = False,
) -> TimedSteps:
    """Steps by the cost model alone."""
    asked = tuple(setups)
    setups, measured = computed_as(model, setups)
    known = points_of(model, devices, measured, torch_version)
    points = [
        replace(same, setup=setup, known_as=same.setup.precision)
        for same, setup in zip(known, setups, strict=True)
    ]
    offsets, tiers = _of_systems(known, weights, model.ops)
    times = step_times(model.ops, points, weights, offsets, with_kernels=with_kernels)
    width = half_widths(weights, model.ops, points, tiers, times)
    nearness, _ = weights.nearness_to_runs(model.ops, setups)
    # What is known of the run itself needs no law: only repeats of it differ.
    width = np.hypot(width * np.sqrt(1.0 - nearness**2), Z_90 * REPEAT_NOISE * nearness)
    effects: list[StackEffect | None] = [None] * len(devices)
    # The cost model was measured in PyTorch, with models that the device holds: all else is beside it.
    if model.graph.is_keras:
        from forerun.prediction.stack import stack_of

        effects = [stack_of(model.graph, device, weights) for device in devices]
    loops = [
        effect if setup.phase is Phase.TRAIN else None for effect, setup in zip(effects, setups, strict=True)
    ]
    transfer_s = np.zeros(len(devices))
    if (traffic := model.graph.host_traffic) is not None:
        from forerun.prediction.stack import host_wait_s

        timed = zip(devices, times.step_s, strict=True)
        transfer_s = np.asarray([host_wait_s(traffic, device, float(step_s)) for device, step_s in timed])
    return TimedSteps(
        setups=asked,
        times=times,
        transfer_s=transfer_s,
        loop_s=np.asarray([loop.step_cost_s if loop else 0.0 for loop in loops]),
        loop_names=tuple(loop.name if loop and loop.step_cost_s else "" for loop in loops),
        log_width=np.hypot(width, [effect.log_spread if effect else 0.0 for effect in effects]),
        least_s=least_times_s(model.ops, points),
        published=((),) * len(points),
        kin=((),) * len(points),
        system_log_width=np.where(
            [tier is Provenance.CALIBRATED for tier in tiers],
            0.0,
            np.minimum(np.hypot(Z_90 * shipped_evidence().spreads.system, Z_90 * host_spread(times)), width),
        ),
    )


def predict_steps(
    model: PreparedModel,
    device: Device,
    setups: Sequence[TrainingSetup],
    weights: CostModel,
    torch_version: str | None = None,
) -> list[StepPrediction]:
    """Predicted steps of one model on one device, with breakdown."""
    found = timed_steps(model, [device] * len(setups), setups, weights, torch_version, with_kernels=True)
    ends = [Interval(*(float(end) for end in column)) for column in found.ends_s().T]
    return [
        _prediction(model, found, i, ends[i], tier_of(model, device, setup, weights))
        for i, setup in enumerate(setups)
    ]


def _prediction(
    model: PreparedModel, steps: TimedSteps, index: int, step_s: Interval, tier: Provenance
) -> StepPrediction:
    times = steps.times
    assert times.kernel_s is not None
    assert times.launch_s is not None
    busy_s = float(times.step_s[index])
    # The step is a soft maximum of device and host, above both: what it exceeds the device by is waiting.
    waiting = max(0.0, busy_s - float(times.device_s[index]))
    kernel_s = times.kernel_s[index] * (busy_s - waiting) / float(times.device_s[index])
    transfer_s = float(steps.transfer_s[index])
    loop_s, loop_name = float(steps.loop_s[index]), steps.loop_names[index]
    return StepPrediction(
        setup=steps.setups[index],
        step_s=step_s,
        breakdown=_breakdown(
            model.ops,
            kernel_s,
            {HOST_PART: waiting, f"training loop of {loop_name}": loop_s, _TRANSFER_PART: transfer_s},
        ),
        bound_by=_TRANSFER_BOUND if 2 * transfer_s > step_s.value else _bound_by(times, index),
        provenance=tier,
        kernel_s=kernel_s,
        launch_s=times.launch_s[index],
        host_s=float(times.host_s[index]),
        overhead_s=float(times.loop_s[index]) + loop_s + transfer_s,
        loop_s=loop_s,
        transfer_s=transfer_s,
        least_s=float(steps.least_s[index]),
        system_log_width=float(steps.system_log_width[index]),
        model_log_width=float(
            np.sqrt(np.maximum(steps.log_width[index] ** 2 - steps.system_log_width[index] ** 2, 0.0))
        ),
        published=steps.published[index],
        kin=steps.kin[index],
    )


def _bound_by(times: StepTimes, index: int) -> str:
    if times.host_s[index] > times.device_s[index]:
        return "host"
    return "memory bandwidth" if 2 * times.memory_bound_s[index] > times.device_s[index] else "compute"


def _breakdown(
    ops: DistinctOps, kernel_s: Floats, others_s: Mapping[str, float]
) -> tuple[BreakdownPart, ...]:
    """Parts of the step, longest first: the kernels by what they do, and the others that take time."""
    # The loss of a classifier is a softmax too: without a product of attention it is one more reduction.
    attends = bool({OpClass.BMM, OpClass.ATTENTION} & {*ops.op_class.tolist()})
    names = _PART_NAMES if attends else {**_PART_NAMES, OpClass.SOFTMAX: _OTHER_PART}
    sums: dict[str, float] = {}
    for op_class, time_s in zip(ops.op_class, kernel_s, strict=True):
        name = names.get(OpClass(op_class), _OTHER_PART)
        sums[name] = sums.get(name, 0.0) + float(time_s)
    sums |= {name: time_s for name, time_s in others_s.items() if time_s > 0}
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return tuple(BreakdownPart(name, time_s) for name, time_s in ordered)


def layer_times(
    model: PreparedModel, prediction: StepPrediction, step_s: float, num_micro_steps: int, limit: int = 3
) -> tuple[LayerTime, ...]:
    """The modules that cause most device time, forward, backward and weight gradients of all micro-steps together.

    A row's share of its distinct kernel is its share of the launches; that of a module is one of ``step_s``, the whole
    step [s]. Equal blocks that were traced once are summed.
    """
    ops, graph_ops = model.ops, model.graph.ops
    per_launch = prediction.kernel_s / ops.count
    row_s = num_micro_steps * per_launch[ops.group_of_row] * graph_ops.count
    sums = np.bincount(graph_ops.module, weights=row_s, minlength=len(graph_ops.module_names))
    order = [i for i in np.argsort(-sums) if graph_ops.module_names[i]][:limit]
    alike = Counter(model.graph.blocks)

    def name(module: str) -> str:
        others = next((n - 1 for block, n in alike.items() if f"{module}.".startswith(f"{block}.")), 0)
        return f"{module} and {others} alike" if others else module

    return tuple(
        LayerTime(name(graph_ops.module_names[i]), float(sums[i]), float(sums[i] / step_s)) for i in order
    )


def format_note(
    model: PreparedModel, device: Device, setup: TrainingSetup, computed: TrainingSetup
) -> str | None:
    """Note on formats that the device has no arithmetic for, or in which it computes otherwise than asked."""
    if is_mostly_double(model.ops):
        rates = double_rates(device)
        if rates is None:
            return (
                f"the model computes in fp64, for which {device.title} has no known rate: the step is timed at its "
                "fp32 rate and may be far slower, or not run at all"
            )
        return (
            f"the model computes in fp64: products at {format_flops_per_s(rates[0])}, "
            "eight bytes a number; no step in fp64 was measured"
        )
    if device.kind is not DeviceKind.GPU:
        return None
    peaks, precision = device.peak_flops_per_s, setup.precision
    if Precision.TF32 in (precision, setup.of_convolutions) and NumberFormat.TF32 not in peaks:
        return f"{device.title} has no TF32; the step runs in fp32 instead"
    if precision in (Precision.BF16, Precision.AMP_BF16) and NumberFormat.BF16 not in peaks:
        return f"{device.title} has no bf16 arithmetic; PyTorch emulates it at fp32 speed, fp16 (amp) would be faster"
    if NumberFormat.TF32 not in peaks or not np.isin(model.ops.op_class, CONVOLUTIONS).any():
        return None
    if setup.convolution_precision is not None:
        return f"convolutions are computed in {setup.convolution_precision}, products in {precision}"
    if computed.convolution_precision is not None:
        return "convolutions are computed in TF32, PyTorch's own default; --convolution-precision fp32 turns it off"
    return None
