"""Step time of a network from the times of its single layers.

A layer timed alone is a network of one layer: each repetition holds, beside the layer's work, the fixed cost c of a
step (the loop, the start of backward, the optimizer's call). A network pays c once, so a sum of n layers is too large
by (n - 1) c. A layer alone also finds its weights and activations in the cache, and free memory in the allocator,
which a network has filled with other layers; so a sum may also be too small.

A processor computes and launches in one thread. There, K equal layers in one step are timed beside a single one:

    m = (T_K - T_1) / (K - 1)         cost of one more layer in the same step [s]
    c = T_1 - m of a layer that has next to no work
    step = c + sum of m_i

A device works beside its host, so the host's calls hide behind the device's work, or the work behind the calls. With
a the time of a layer without work, timed alone, w_i = max(0, t_i - a) the work of layer i, and h the time the host
needs for the calls of a layer:

    step = sqrt((c + n h)^2 + (sum of w_i)^2)

None of c, h, a needs the network that is predicted. Comparison with measurements: docs/methods/composition.md.

The jobs are the network's own step, each of its layers alone and together with copies of itself, and jobs without
work: one layer, its copies, and two chains of layers of width 1, which give the costs of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Any

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measure import MeasurementRun, measure_jobs
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.layer_design import LAYERS_WITHOUT_WEIGHTS, layer_job, step_job
from forerun.evidence.measurement.measured_job import job_of
from forerun.evidence.measurement.session import Event
from forerun.evidence.records.measurement import Measurement, Outcome, Scalar
from forerun.evidence.records.step_record import repetition_s
from forerun.question.devices.local import gpu_index
from forerun.question.model import ModelRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Time that calls cost the host of a device which works beside it.

    Attributes:
        alone_s: a, time of a layer without work, timed alone [s].
        per_step_s: c, cost paid once per step [s].
        per_layer_s: h, cost paid for each layer of a step [s].
    """

    alone_s: float
    per_step_s: float
    per_layer_s: float


def host_costs(alone_s: float, num_layers: tuple[int, int], step_times_s: tuple[float, float]) -> HostCosts:
    """Costs of calls from a layer and two networks without work.

    With the steps of networks of n1 < n2 layers, h = (T2 - T1) / (n2 - n1) and c = T1 - n1 h; noise that would make
    one of them negative makes it zero.

    Args:
        alone_s: Time of a layer without work [s].
        num_layers: Number of layers of the two networks, the smaller number first.
        step_times_s: Step times of the two networks [s].
    """
    few, many = num_layers
    assert few < many, num_layers
    per_layer_s = max(0.0, (step_times_s[1] - step_times_s[0]) / (many - few))
    per_step_s = max(0.0, step_times_s[0] - few * per_layer_s)
    return HostCosts(alone_s=alone_s, per_step_s=per_step_s, per_layer_s=per_layer_s)


def marginal_time_s(alone_s: float, together_s: float, num_copies: int) -> float:
    """M = (T_K - T_1) / (K - 1), the cost of one more equal layer in a step; not below zero [s].

    Args:
        alone_s: T_1, a step of one layer [s].
        together_s: T_K, a step of K equal layers each with its own weights and inputs [s].
        num_copies: K, number of equal layers, at least 2.
    """
    assert num_copies > 1, num_copies
    return max(0.0, (together_s - alone_s) / (num_copies - 1))


def serial_step_time_s(marginal_times_s: Sequence[float], per_step_s: float) -> float:
    """Step time of a network on a processor: c plus the marginal time of each layer [s].

    Args:
        marginal_times_s: ``marginal_time_s`` of each layer, as often as it is called [s].
        per_step_s: c [s].
    """
    return per_step_s + sum(marginal_times_s)


def overlapped_step_time_s(alone_times_s: Sequence[float], costs: HostCosts) -> float:
    """Step time of a network on a device that works beside its host [s].

    The root of squares lies between the larger of calls and work and their sum; the power 2 fits published P100 runs
    better than 1.5, 3, 4 or 8.

    Args:
        alone_times_s: Time of each layer alone, as often as it is called [s].
        costs: Costs of the calls for the host.
    """
    calls_s = costs.per_step_s + len(alone_times_s) * costs.per_layer_s
    work_s = sum(max(0.0, time_s - costs.alone_s) for time_s in alone_times_s)
    return hypot(calls_s, work_s)


_MOST_COPIES = 8
_MOST_BYTES = 1.5e9
_ADAM_COPIES = 4  # weights, gradients, two moments
_ACTIVATION_COPIES = 2  # activations and their gradients

EMPTY_NETWORK_LAYERS = (2, 17)
"""Number of layers of the two chains without work, the output layer included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerJobs:
    """One layer: alone, and together with copies of itself.

    Attributes:
        alone: Step with one layer.
        together: Step with ``num_copies`` equal layers; None if two would not fit in memory.
        num_copies: Number of equal layers in that step.
    """

    alone: MeasurementJob
    together: MeasurementJob | None
    num_copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositionJobs:
    """The jobs of one network at one batch size.

    Attributes:
        whole: Training step of the network.
        layers: Jobs of each layer, in the order of the forward pass; equal layers have equal jobs.
        empty_layer: A layer without work.
        empty_networks: Chains of ``EMPTY_NETWORK_LAYERS`` layers without work.
        left_out: Kinds of modules that no layer benchmark knows.
    """

    whole: MeasurementJob
    layers: tuple[LayerJobs, ...]
    empty_layer: LayerJobs
    empty_networks: tuple[MeasurementJob, MeasurementJob]
    left_out: tuple[str, ...]

    @property
    def jobs(self) -> list[MeasurementJob]:
        """All jobs, without repeats."""
        found = [self.whole, *self.empty_networks]
        for layer in (self.empty_layer, *self.layers):
            found += [layer.alone, *([layer.together] if layer.together else [])]
        return list({job.to_json(): job for job in found}.values())


def composition_jobs(
    request: ModelRequest, batch_size: int, *, optimizer: str = "adam", precision: str = "fp32"
) -> CompositionJobs:
    """The jobs of a network.

    Nothing needs a gradient of the network's input, so the first layer is measured without one.

    Args:
        request: The network, with the size of its inputs.
        batch_size: Number of samples in a step.
        optimizer: Optimizer, as in ``predict``.
        precision: Precision, as in ``predict``.

    Raises:
        UsageError, ModelBuildError, TraceError: The network cannot be built, or has no layer of a known kind.
    """
    from forerun.evidence.measurement.layer_modules import model_layers

    found = model_layers(request, batch_size)
    if not found.layers:
        raise InvalidSetupError(
            f"{request.model} has no layer of a kind that benchmarks know (found {', '.join(found.left_out)}); "
            "name a network of convolutions, dense layers, normalisations and pooling"
        )
    shared: dict[str, Scalar] = {"optimizer": optimizer, "precision": precision}
    # Equal layers give equal jobs, of which one is measured.
    layers = [
        _layer(kind, {**sizes, **shared}, is_first=not index)
        for index, (kind, sizes) in enumerate(found.layers)
    ]
    empty: dict[str, Scalar] = {"batch_size": 1, "in_features": 1, "out_features": 1, "use_bias": True}
    # Two lengths: their difference is the cost of a layer, and what is left that of a step.
    nothing = {"batch_size": 1, "input_shape": (1, 1, 1), "num_classes": 2, **shared}
    few, many = (step_job(f"mlp:depth={n - 1},width=1", nothing) for n in EMPTY_NETWORK_LAYERS)
    inputs = {name: getattr(request, name) for name in ("image_size", "input_shape", "num_classes")}
    return CompositionJobs(
        whole=step_job(request.model, {"batch_size": batch_size, **inputs, **shared}),
        layers=tuple(layers),
        empty_layer=_layer("dense", {**empty, "activation": "none", **shared}),
        empty_networks=(few, many),
        left_out=found.left_out,
    )


def _layer(kind: str, sizes: Mapping[str, Scalar], *, is_first: bool = False) -> LayerJobs:
    asked, precision = {**sizes, "mode": "train_step"}, str(sizes["precision"])
    if kind in LAYERS_WITHOUT_WEIGHTS:
        asked["optimizer"] = "none"
    elif is_first:
        asked["input_gradient"] = False
    alone = layer_job(kind, asked, precision=precision, layout="nchw")
    # Copies must fit beside each other, and more than eight say nothing new of the cost of one more.
    num_copies = int(min(_MOST_COPIES, _MOST_BYTES // _held_bytes(alone)))
    if num_copies < 2:
        return LayerJobs(alone=alone, together=None, num_copies=1)
    together = layer_job(kind, {**asked, "copies": num_copies}, precision=precision, layout="nchw")
    return LayerJobs(alone=alone, together=together, num_copies=num_copies)


def _held_bytes(job: MeasurementJob) -> float:
    """Approximate memory that a training step of a layer holds [bytes]."""
    weights, given, made = (
        float(str(job.parameters[name])) for name in ("weight_bytes", "input_bytes", "output_bytes")
    )
    return _ADAM_COPIES * weights + _ACTIVATION_COPIES * (given + made)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition(Answer):
    """A network compared with the sum of its layers.

    Attributes:
        network: Name of the network.
        batch_size: Batch size of the step.
        num_layers: Calls of layers, repeated ones included.
        sum_of_layers_s: Sum of the layers timed alone [s].
        composed_s: Step composed from the layers [s].
        measured_s: Measured step [s].
        relative_noise: Half the 95 % interval of the measured step over it; None if not known.
        left_out: Kinds of modules that are in the step but not in the sum.
    """

    network: str
    batch_size: int
    num_layers: int
    sum_of_layers_s: float
    composed_s: float
    measured_s: float
    relative_noise: float | None = None
    left_out: tuple[str, ...] = ()

    @property
    def overshoot_before(self) -> float:
        """Sum of layers over the step, less one."""
        return self.sum_of_layers_s / self.measured_s - 1

    @property
    def overshoot_after(self) -> float:
        """Composed step over the step, less one."""
        return self.composed_s / self.measured_s - 1

    def json_fields(self) -> dict[str, Any]:
        """The fields, and the overshoots as fractions."""
        overshoots = {name: getattr(self, name) for name in ("overshoot_before", "overshoot_after")}
        return {**fields_of(self), **overshoots}


def measured_compositions(
    networks: Sequence[CompositionJobs], measurements: Iterable[Measurement], *, overlaps: bool
) -> list[Composition]:
    """Compares each network with its layers; costs of calls come from measurements without work.

    Args:
        networks: Jobs of the networks.
        measurements: Measurements that include those of the jobs.
        overlaps: Whether the device works beside its host.

    Raises:
        MeasurementError: A job has no finished measurement.
    """
    found = {job_of(m).to_json(): m for m in measurements if m.outcome is Outcome.DONE}
    return [_composition(jobs, found, overlaps=overlaps) for jobs in networks]


def _composition(jobs: CompositionJobs, found: Mapping[str, Measurement], *, overlaps: bool) -> Composition:
    def measurement(job: MeasurementJob) -> Measurement:
        if (one := found.get(job.to_json())) is None:
            raise MeasurementError(
                f"{job.subject} of {jobs.whole.subject} has no finished measurement; run the same command again, or "
                "look for its reason with: forerun records list"
            )
        return one

    def marginal_s(layer: LayerJobs) -> float:
        alone_s = repetition_s(measurement(layer.alone))
        if layer.together is None:  # so large that neither calls nor caches matter
            return alone_s
        return marginal_time_s(alone_s, repetition_s(measurement(layer.together)), layer.num_copies)

    alone_s = [repetition_s(measurement(layer.alone)) for layer in jobs.layers]
    empty_s = repetition_s(measurement(jobs.empty_layer.alone))
    if overlaps:
        few, many = (repetition_s(measurement(job)) for job in jobs.empty_networks)
        costs = host_costs(empty_s, EMPTY_NETWORK_LAYERS, (few, many))
        composed_s = overlapped_step_time_s(alone_s, costs)
    else:
        per_step_s = max(0.0, empty_s - marginal_s(jobs.empty_layer))
        composed_s = serial_step_time_s([marginal_s(layer) for layer in jobs.layers], per_step_s)
    whole = measurement(jobs.whole)
    measured_s = repetition_s(whole)
    noise = None if whole.summary is None else (whole.summary.high_s - whole.summary.low_s) / measured_s / 2
    return Composition(
        network=jobs.whole.subject,
        batch_size=int(float(str(jobs.whole.parameters["batch_size"]))),
        num_layers=len(jobs.layers),
        sum_of_layers_s=sum(alone_s),
        composed_s=composed_s,
        measured_s=measured_s,
        relative_noise=noise,
        left_out=jobs.left_out,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositionRun(Answer):
    """Networks compared with their layers.

    Attributes:
        run: The measurements.
        compositions: One comparison per network and batch size.
    """

    run: MeasurementRun
    compositions: tuple[Composition, ...]

    def json_fields(self) -> dict[str, Any]:
        """The fields of the run, and the compositions."""
        return {**self.run.json_fields(), "compositions": self.compositions}


def measure_composition(
    models: Sequence[str],
    *,
    batch_sizes: Sequence[int] = (32,),
    image_size: int | None = None,
    optimizer: str = "adam",
    precision: str = "fp32",
    device: str = "cpu",
    records: str | Path | None = None,
    occasion: str = "",
    protocol: Protocol | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> CompositionRun:
    """Measures networks, each of their layers alone, and empty calls; compares the step with the sums.

    Args:
        models: Networks as ``predict`` names them.
        batch_sizes: Batch sizes of one device; every network is measured at each.
        image_size: Height and width of square images, None for the networks' own [pixels].
        optimizer: As in ``predict``.
        precision: As in ``predict``.
        device: ``cpu`` or ``cuda:N``.
        records: Store of the records; the default store if None.
        occasion: Label of the session; the same label resumes it.
        protocol: Rules of timing.
        on_event: Receives an event for every job.

    Raises:
        UsageError: A network, the device or the setup is not possible.
        MeasurementError: The device is busy, or a part of a network could not be measured.
        RecordError: The store cannot be used.
    """
    networks = [
        composition_jobs(
            ModelRequest(model=model, image_size=image_size),
            batch_size,
            optimizer=optimizer,
            precision=precision,
        )
        for model in models
        for batch_size in batch_sizes
    ]
    jobs = list({job.to_json(): job for network in networks for job in network.jobs}.values())
    run = measure_jobs(jobs, device, records, occasion, protocol, None, on_event)
    overlaps = gpu_index(device) is not None
    rows = measured_compositions(networks, run.measurements, overlaps=overlaps)
    return CompositionRun(run=run, compositions=tuple(rows))
