"""``forerun.scale``: the same run on more and more devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Unpack

from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Graph
from forerun.prediction.estimate import Interval
from forerun.prediction.estimate_run import RunEstimate, hourly_price_usd, input_note, node_note, price_note
from forerun.prediction.models import TracedModels
from forerun.question.devices.cluster import Cluster, check_num_devices
from forerun.question.devices.device import Device, LinkKind
from forerun.question.model import captured_facts
from forerun.question.options import ScaleOptions, with_common_settings
from forerun.question.recipes import recipe_notes
from forerun.question.run import Run, cluster_from
from forerun.question.settings import checked
from forerun.question.sharing import Strategy
from forerun.search.estimates import estimates, run_from
from forerun.search.search import SETTINGS, Search
from forerun.tracing.trace import full_name

if TYPE_CHECKING:
    import torch

_DEFAULT_NUMBERS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint(Answer):
    """One size of a scaling curve.

    Attributes:
        scaling: "weak" (the batch of a device stays) or "strong" (the global batch stays).
        num_devices, num_nodes: Devices and nodes.
        batch_size_per_device: Samples of one device and micro-step.
        batch_size_global: Samples of one step of all.
        step_time_s: One step of all devices.
        throughput_samples_per_s: Samples of all devices per second.
        speedup: Throughput over that of one device.
        efficiency: Speed-up over the number of devices.
        communication_s: All collectives of a step, hidden or not [s].
        exposed_s: What of it nothing hides [s].
        peak_memory_bytes: Memory of each device [bytes].
        fits: "yes", "no" or "close"; None where the memory of the device says nothing.
        num_steps_per_epoch: Steps of an epoch of the global batch; None without a dataset.
        epoch_time_s: One epoch; None without a dataset.
        job_time_s: All epochs; None without a number of epochs.
        cost_usd_per_epoch: Money of one epoch; None without a price.
    """

    scaling: str
    num_devices: int
    num_nodes: int
    batch_size_per_device: int
    batch_size_global: int
    step_time_s: Interval
    throughput_samples_per_s: Interval
    speedup: float
    efficiency: float
    communication_s: float
    exposed_s: float
    peak_memory_bytes: float
    fits: str | None = None
    num_steps_per_epoch: int | None = None
    num_steps: int | None = None
    epoch_time_s: Interval | None = None
    job_time_s: Interval | None = None
    cost_usd_per_epoch: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCurve(Answer):
    """Answer of ``forerun.scale``.

    Attributes:
        run: Run on the largest number of devices; None in an answer that is read back where its device is not known.
        model: The model as it was named.
        device: Catalogue name of the device.
        strategy: Strategy that shares the work.
        precision: Precision of the step.
        intra_link: Link between devices of a node; None where there is none.
        inter_link: Link between nodes; None where there is none.
        points: One point per number of devices, weak scaling first.
        stops_paying_at: By kind of scaling, the first number of devices at which each added device brings less than
            half of the throughput of the first; None where all pay.
        notes: Remarks for the reader.
    """

    run: Run | None
    model: str
    device: str
    strategy: str
    precision: str
    intra_link: str | None
    inter_link: str | None
    points: tuple[ScalePoint, ...]
    stops_paying_at: Mapping[str, int | None]
    notes: tuple[str, ...]


_ALONE: Mapping[str, Any] = {"num_devices": 1, "num_nodes": 1, "parallel": None}
"""Changes that leave one device, which has no one to share a layout with."""


@with_common_settings(ScaleOptions)
def scale(
    model: str | torch.nn.Module | Run,
    *,
    device: str | Device | Cluster | None = None,
    cost_model: CostModel | None = None,
    use_cache: bool = True,
    **options: Unpack[ScaleOptions],
) -> ScaleCurve:
    """Step time, throughput and efficiency of a model on several numbers of devices, without the devices.

    Every point is a whole prediction, as ``predict`` makes it for that number of devices.

    Args:
        model: As in ``predict``; of a ``Run`` the number of devices is replaced.
        device: A device, ``4x8xh100-sxm`` (nodes x devices x name), or a TOML file of either. With a device alone, all
            devices are in one node. None with a ``Run``.
        cost_model: As in ``predict``.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the run and ``num_devices``, a list, and ``scaling``; see ``forerun.ScaleOptions``. In
            strong scaling the batch size is that of one device of the first number.

    Raises:
        UsageError: The question must be changed, or a link must be named.
        FailureError: The model could not be built or traced, or fitted files could not be read.

    Examples:
        >>> import forerun
        >>> curve = forerun.scale("torchvision:resnet18", device="1x8xv100-sxm2-16gb", num_devices=[1, 8])
        >>> 4 < curve.points[1].speedup <= 8
        True
    """
    largest, numbers, num_nodes = _largest_run(model, device, checked(options, ScaleOptions))
    scaling = options.get("scaling") or "weak"
    models = TracedModels(use_cache=use_cache)
    kinds = ("weak", "strong") if scaling == "both" else (scaling,)
    points = []
    for kind in kinds:
        changes = [
            {"num_devices": number, "num_nodes": num_nodes, "batch_size": size}
            for number, size in _batch_sizes(kind, largest.setup.batch_size_per_device, numbers)
        ]
        found = _found(largest, changes, models, cost_model)
        alone = _alone_rate(kind, largest, numbers, models, cost_model)
        points += [_point(kind, each, alone) for each in found]
    return _answer(largest, points, models.of(largest).graph)


def _batch_sizes(kind: str, batch_size: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Each number of devices with the batch size of one of them; strong scaling divides that of the first number."""
    if kind == "weak":
        return [(number, batch_size) for number in numbers]
    total = batch_size * numbers[0]
    for number in numbers:
        if total % number:
            raise InvalidSetupError(
                f"a global batch of {total} cannot be shared by {number} devices; "
                f"choose a batch size that is a multiple of {number}, or weak scaling"
            )
    return [(number, total // number) for number in numbers]


def _found(
    run: Run, changes: Sequence[Mapping[str, Any]], models: TracedModels, cost_model: CostModel | None
) -> list[RunEstimate]:
    answers = estimates(Search(run=run, axes={SETTINGS: changes}), models, cost_model)
    return [found for found in answers if found is not None]


def _alone_rate(
    kind: str, run: Run, numbers: Sequence[int], models: TracedModels, cost_model: CostModel | None
) -> float:
    """Throughput of one device that takes the batch alone [samples/s]."""
    size = run.setup.batch_size_per_device * (numbers[0] if kind == "strong" else 1)
    (found,) = _found(run, [{**_ALONE, "batch_size": size}], models, cost_model)
    return found.estimate.run.batch_size_global / found.estimate.step_time_s.value


def _usual_numbers(model: Any, device: str | Device | Cluster | None) -> Sequence[int]:
    """Default numbers of devices: up to eight or those of a captured script, or up to all of the named machines."""
    named = (
        model.cluster if isinstance(model, Run) else cluster_from(device, {}) if device is not None else None
    )
    facts = captured_facts(model)
    usual = max(_DEFAULT_NUMBERS[-1], facts.world_size) if facts is not None else _DEFAULT_NUMBERS[-1]
    most = named.num_devices if named is not None and named.num_devices > 1 else usual
    # Powers of two, and the machine as it is: 24 devices are asked about as well.
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most] + [most]


def sizes_of(numbers: Sequence[int]) -> list[int]:
    """Numbers of devices, ascending and each once.

    Raises:
        InvalidSetupError: The list is empty, or a value is not a number of devices.
    """
    found = sorted(set(numbers))
    if not found:
        raise InvalidSetupError(
            "expected at least one number of devices, got none; give some, such as 1,2,4,8"
        )
    for number in found:
        check_num_devices(number)
    return found


def runs_to_trace(model: Any, device: str | Device | Cluster | None, given: Mapping[str, Any]) -> list[Run]:
    """One run of a curve for each trace that it needs: that on all machines, and that on a single device.

    Args:
        model: As in ``scale``.
        device: As in ``scale``.
        given: Its settings, checked.
    """
    largest, _, _ = _largest_run(model, device, given)
    return [largest, largest.with_(**_ALONE)]


def _largest_run(
    model: Any, device: str | Device | Cluster | None, options: Mapping[str, Any]
) -> tuple[Run, Sequence[int], int | None]:
    """The run on all machines, of which the points use some devices; their numbers; and the number of machines."""
    given = {
        name: value for name, value in options.items() if name not in ("scaling", "num_devices", "num_nodes")
    }
    numbers = sizes_of(options["num_devices"] if "num_devices" in options else _usual_numbers(model, device))
    num_nodes = options.get("num_nodes")
    named = None if device is None or isinstance(model, Run) else cluster_from(device, {})
    if named is not None and named.num_devices == 1:
        given |= {"num_devices": max(numbers), "num_nodes": num_nodes}
    elif named is not None and num_nodes is not None:
        device = replace(named, num_nodes=num_nodes, num_devices_per_node=-(-max(numbers) // num_nodes))
    run = run_from(model, device, given)
    # One device says nothing of machines: all are put into one of them.
    if isinstance(model, Run) and run.cluster.num_devices == 1:
        run = replace(run, cluster=run.cluster.with_devices(max(numbers), 1))
    return run, numbers, num_nodes


def _point(kind: str, found: RunEstimate, alone_rate: float) -> ScalePoint:
    estimate, shared = found.estimate, found.step.several
    run = estimate.run
    number, epochs = run.cluster.num_devices, run.job.num_epochs if run.job else None
    speedup = estimate.throughput_samples_per_s.value / alone_rate
    steps, price = estimate.num_steps_per_epoch, hourly_price_usd(run)
    epoch_s = estimate.epoch_time_s
    assert estimate.peak_memory_bytes is not None
    return ScalePoint(
        scaling=kind,
        num_devices=number,
        num_nodes=run.cluster.num_nodes,
        batch_size_per_device=run.setup.batch_size_per_device,
        batch_size_global=run.batch_size_global,
        step_time_s=estimate.step_time_s,
        throughput_samples_per_s=estimate.throughput_samples_per_s,
        speedup=speedup,
        efficiency=speedup / number,
        communication_s=shared.communication_s if shared else 0.0,
        exposed_s=shared.exposed_s if shared else 0.0,
        peak_memory_bytes=estimate.peak_memory_bytes.value,
        fits=estimate.fits,
        num_steps_per_epoch=steps,
        num_steps=None if steps is None or epochs is None else round(steps * epochs),
        epoch_time_s=epoch_s,
        job_time_s=estimate.job_time_s,
        cost_usd_per_epoch=(None if price is None or epoch_s is None else price * epoch_s.value / 3600),
    )


def _answer(run: Run, points: list[ScalePoint], graph: Graph) -> ScaleCurve:
    cluster, is_shared = run.cluster, any(point.num_devices > 1 for point in points)
    several_nodes = any(point.num_nodes > 1 for point in points)
    kinds = dict.fromkeys(point.scaling for point in points)
    return ScaleCurve(
        run=run,
        model=full_name(run.model.model),
        device=cluster.device.name,
        strategy=str(run.sharing.strategy),
        precision=str(run.setup.precision),
        intra_link=cluster.intra_link.name if cluster.intra_link and is_shared else None,
        inter_link=cluster.inter_link.name if cluster.inter_link and several_nodes else None,
        points=tuple(points),
        stops_paying_at={
            kind: stops_paying_at([point for point in points if point.scaling == kind]) for kind in kinds
        },
        notes=(*graph.notes, *_notes(run, graph, points, several_nodes)),
    )


def _notes(run: Run, graph: Graph, points: Sequence[ScalePoint], several_nodes: bool) -> list[str]:
    notes = [*recipe_notes(run.software)]
    notes += filter(
        None, [input_note(run, graph.input_shape), None if several_nodes else node_note(run.cluster)]
    )
    if run.cluster.intra_link is not None and run.cluster.intra_link.kind is LinkKind.HOST:
        notes.append("each process is assumed to have a processor of its own")
    if run.sharing.strategy.stage or run.sharing.strategy is Strategy.MIRRORED:
        notes.append(
            f"the interval was not checked against measured runs with strategy {run.sharing.strategy}"
        )
    full = [point.num_devices for point in points if point.fits == "no"]
    if full:
        sizes = ", ".join(map(str, dict.fromkeys(full)))
        ways = ["a smaller batch"] if run.setup.batch_size_per_device > 1 else []
        if run.sharing.strategy.stage < 3 and run.stack == "pytorch":
            ways += ["--strategy fsdp", "--recompute full"]
        notes.append(
            f"does not fit in the memory of a device on {sizes} devices; try {' or '.join(ways) or 'larger devices'}"
        )
    if run.job is None:
        notes.append("epochs and cost need a dataset: --dataset NAME or --dataset-size N")
    else:
        clusters = [(point.num_devices, point.num_nodes) for point in points]
        prices = {of: price_note(replace(run, cluster=run.cluster.with_devices(*of))) for of in clusters}
        for words in dict.fromkeys(filter(None, prices.values())):
            of = ", ".join(str(number) for (number, _), price in prices.items() if price == words)
            whose = f"price of {of} device{'' if of == '1' else 's'}"
            notes.append(words.replace("price", whose, 1) if len(set(prices.values())) > 1 else words)
    return notes


def stops_paying_at(points: Sequence[ScalePoint], least_gain: float = 0.5) -> int | None:
    """The first number of devices at which each added device brings less than half of what the first one does.

    gain = (throughput_k - throughput_(k-1)) / (n_k - n_(k-1)) / throughput_1; None if all pay.

    Args:
        points: One curve, by growing number of devices.
        least_gain: Gain of a device, relative to the first, below which it does not pay.
    """
    rates: Mapping[int, float] = {p.num_devices: p.throughput_samples_per_s.value for p in points}
    numbers = sorted(rates)
    if len(numbers) < 2:
        return None
    # Every point knows its speed-up over one device, which need not be a point itself.
    alone = next(p.throughput_samples_per_s.value / p.speedup for p in points)
    for before, now in pairwise(numbers):
        if (rates[now] - rates[before]) / (now - before) / alone < least_gain:
            return now
    return None
