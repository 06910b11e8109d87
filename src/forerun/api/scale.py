"""How a job scales: more devices, more workers and servers, or from measured points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from forerun.api.predict import _device, _job, _prepared, _request, _setup, _weights, _whole
from forerun.communication.scaling_constants import load_scaling_table
from forerun.errors import InvalidSetupError
from forerun.hardware.cluster import Cluster, check_num_devices, parse_cluster
from forerun.hardware.link import LinkKind
from forerun.prediction.estimate import Interval
from forerun.prediction.one_device import one_device
from forerun.prediction.predictor import Question
from forerun.prediction.scale import (
    OneDevice,
    ScalePoint,
    scaled_memory_bytes,
    scaled_step,
    steps_per_epoch,
    stops_paying_at,
)
from forerun.prediction.software_stack import stack_name
from forerun.prediction.step import PreparedModel
from forerun.run.job import Job
from forerun.run.model import own_layout
from forerun.run.setup import TrainingSetup, choice
from forerun.run.sharing import Algorithm, Sharing, Strategy

if TYPE_CHECKING:
    import torch

__all__ = ["ScaleCurve", "scale"]

SCALINGS = ("weak", "strong", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCurve:
    """Answer of ``forerun.scale``.

    Attributes:
        model: The model as it was named.
        device: Catalogue name of the device.
        strategy: How the work is shared.
        precision: Precision of the step.
        intra_link: Link between devices of a node; None where there is none.
        inter_link: Link between nodes; None where there is none.
        points: The sizes, weak scaling first.
        stops_paying_at: First number of devices whose added devices each bring less than half of what the first does,
            by
            scaling; None where all pay.
        notes: What a reader must know.
    """

    model: str
    device: str
    strategy: str
    precision: str
    intra_link: str | None
    inter_link: str | None
    points: tuple[ScalePoint, ...]
    stops_paying_at: Mapping[str, int | None]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return {
            **found,
            "points": [point.as_dict() for point in self.points],
            "stops_paying_at": dict(self.stops_paying_at),
            "notes": list(self.notes),
        }


def scale(
    model: str | torch.nn.Module,
    *,
    device: str,
    num_devices: Sequence[int] = (1, 2, 4, 8),
    num_nodes: int | None = None,
    batch_size: int = 32,
    scaling: str = "weak",
    strategy: str = "ddp",
    intra: str | None = None,
    inter: str | None = None,
    algorithm: str = "auto",
    bucket_mb: float = 25.0,
    num_accumulation_steps: int = 1,
    sync_batch_norm: bool = False,
    coefficient_of_variation: float | None = None,
    precision: str = "fp32",
    layout: str | None = None,
    compile: bool = False,
    optimizer: str = "sgd",
    optimizer_implementation: str = "foreach",
    image_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    sequence_length: int | None = None,
    dataset: str | None = None,
    dataset_size: int | None = None,
    epochs: float | None = None,
    price_usd_per_hour: float | None = None,
    torch_version: str | None = None,
    use_cache: bool = True,
) -> ScaleCurve:
    """Step time, throughput and efficiency of a model on several numbers of devices, without the devices.

    Args:
        model: An ``nn.Module`` or a specification such as ``torchvision:resnet50``.
        device: A device, ``4x8xh100-sxm`` (nodes x devices x name), or a TOML file of either. With a device alone,
            all devices
            are in one node.
        num_devices: Numbers of devices.
        num_nodes: Nodes they are on; None for as few as hold them.
        batch_size: Samples of one device and micro-step; of strong scaling, those of the first number of devices.
        scaling: weak (the batch of a device stays), strong (the global batch stays), or both.
        strategy: ddp, zero1, zero2, fsdp or mirrored.
        intra: Link inside a node, where the board's form does not say it or a bridge is there.
        inter: Link between nodes, such as ``infiniband-hdr`` or ``8xinfiniband-hdr``.
        algorithm: ring, tree, hierarchical, or auto for the fastest.
        bucket_mb: Capacity of a gradient bucket [1024^2 bytes].
        num_accumulation_steps: Micro-steps of a step.
        sync_batch_norm: Whether statistics of batch norms are synchronised.
        coefficient_of_variation: Scatter of steps between devices; None for what training was seen to have.
        precision: As in ``predict``, like the next seven.
        layout: nchw or nhwc; the framework's own if None, which is nhwc for Keras.
        compile: Whether the step runs under torch.compile.
        optimizer: sgd, adam, adamw, ... or none.
        optimizer_implementation: foreach, for-loop or fused.
        image_size: Height and width of images [pixels].
        input_shape: Shape of one sample.
        sequence_length: Tokens of one sample.
        dataset: Name of a known dataset; steps of an epoch are those of the global batch.
        dataset_size: Samples of an epoch, instead of ``dataset``.
        epochs: Epochs to the target.
        price_usd_per_hour: Price of one device [USD/h].
        torch_version: PyTorch version of the run.
        use_cache: Whether to use the cache of traced graphs.

    Raises:
        UsageError: The question must be changed, or a link must be named.
        FailureError: The model could not be built or traced, or fitted files could not be read.

    Example:
        >>> import forerun
        >>> curve = forerun.scale("torchvision:resnet18", device="1x8xv100-sxm2-16gb", num_devices=[1, 8])
        >>> 4 < curve.points[1].speedup <= 8
        True
    """
    numbers = _numbers(num_devices)
    _check_price(price_usd_per_hour)
    if scaling not in SCALINGS:
        raise InvalidSetupError(f"unknown scaling '{scaling}'; expected one of {', '.join(SCALINGS)}")
    settings = Sharing(
        strategy=choice(Strategy, strategy, "strategy"),
        algorithm=choice(Algorithm, algorithm, "algorithm"),
        bucket_bytes=bucket_mb * 1024**2,
        num_accumulation_steps=_whole("accumulation steps", num_accumulation_steps),
        sync_batch_norm=sync_batch_norm,
        coefficient_of_variation=coefficient_of_variation,
    )
    cluster = parse_cluster(device, intra=intra, inter=inter)
    if cluster.num_devices == 1:
        cluster = replace(cluster, num_devices_per_node=max(numbers))
    setup = _setup(
        batch_size,
        precision,
        layout or own_layout(model),
        compile,
        optimizer,
        "train",
        optimizer_implementation,
        True,
    )
    curve = _Curve(
        prepared=_prepared(
            model, _request(model, image_size, input_shape, sequence_length), setup, use_cache
        ),
        cluster=cluster,
        settings=settings,
        setup=setup,
        job=_job(dataset, dataset_size, epochs, None, False, 0.0, 0.0),
        price_usd_per_hour=price_usd_per_hour,
        torch_version=torch_version,
        weights_of=device,
    )
    points = []
    for kind in ("weak", "strong") if scaling == "both" else (scaling,):
        points += [curve.point(kind, number, num_nodes, batch_size * numbers[0]) for number in numbers]
    return _answer(curve, points, numbers)


def _numbers(num_devices: Sequence[int]) -> list[int]:
    numbers = sorted({_whole("the number of devices", number) for number in num_devices})
    if not numbers:
        raise InvalidSetupError(
            "expected at least one number of devices, got none; give some, such as 1,2,4,8"
        )
    for number in numbers:
        check_num_devices(number)
    return numbers


def _check_price(price_usd_per_hour: float | None) -> None:
    if price_usd_per_hour is not None and not (price_usd_per_hour >= 0 and isfinite(price_usd_per_hour)):
        raise InvalidSetupError(f"a price must be zero or more US dollars per hour, got {price_usd_per_hour}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """Everything the points of a curve share."""

    prepared: PreparedModel
    cluster: Cluster
    settings: Sharing
    setup: TrainingSetup
    job: Job | None
    price_usd_per_hour: float | None
    torch_version: str | None
    weights_of: str
    _ones: dict[int, OneDevice] = field(default_factory=dict)

    def one(self, batch_size: int) -> OneDevice:
        """One device at a batch size, worked out once."""
        if batch_size not in self._ones:
            self._ones[batch_size] = self._worked_out(batch_size)
        return self._ones[batch_size]

    def _worked_out(self, batch_size: int) -> OneDevice:
        graph = self.prepared.graph
        if graph.only_batch_size not in (None, batch_size):
            raise InvalidSetupError(
                f"{graph.model} runs at batch size {graph.only_batch_size} only, got {batch_size}; use weak scaling"
            )
        found = _device(self.cluster.device)
        question = Question(
            device=found,
            setup=replace(self.setup, batch_size_per_device=batch_size),
            torch_version=self.torch_version,
            weights=_weights(
                self.weights_of if self.weights_of.strip().lower() == "here" else found,
                found,
                stack=stack_name(graph),
            ),
        )
        return one_device(self.prepared, question, self.settings.bucket_bytes)

    def point(self, kind: str, num_devices: int, num_nodes: int | None, batch_size_global: int) -> ScalePoint:
        """One size of the curve."""
        batch_size = self.setup.batch_size_per_device
        if kind == "strong":
            if batch_size_global % num_devices:
                raise InvalidSetupError(
                    f"a global batch of {batch_size_global} cannot be shared by {num_devices} devices; "
                    f"choose a batch size that is a multiple of {num_devices}, or weak scaling"
                )
            batch_size = batch_size_global // num_devices
        cluster = self.cluster.with_devices(num_devices, num_nodes)
        one = self.one(batch_size)
        step_s, parts = scaled_step(one, cluster, self.settings, load_scaling_table(), batch_size)
        samples = num_devices * batch_size * self.settings.num_accumulation_steps
        alone = self._alone_rate(kind, batch_size_global, one)
        speedup = samples / step_s.value / alone
        return ScalePoint(
            scaling=kind,
            num_devices=num_devices,
            num_nodes=cluster.num_nodes,
            batch_size_per_device=batch_size,
            batch_size_global=samples,
            step_time_s=step_s,
            throughput_samples_per_s=step_s.inverse(samples),
            speedup=speedup,
            efficiency=speedup / num_devices,
            communication_s=parts.communication_s,
            exposed_s=parts.exposed_s,
            peak_memory_bytes=scaled_memory_bytes(one, self.settings, num_devices),
            **self._times(step_s, samples, num_devices),
        )

    def _alone_rate(self, kind: str, batch_size_global: int, one: OneDevice) -> float:
        """Samples per second of one device with the same work: the same batch, or the whole global batch."""
        accumulation = self.settings.num_accumulation_steps
        batch_size = batch_size_global if kind == "strong" else self.setup.batch_size_per_device
        alone = self.one(batch_size) if kind == "strong" else one
        step_s, _ = scaled_step(
            alone, self.cluster.with_devices(1), self.settings, load_scaling_table(), batch_size
        )
        return batch_size * accumulation / step_s.value

    def _times(self, step_s: Interval, batch_size_global: int, num_devices: int) -> dict[str, Any]:
        if self.job is None:
            return {}
        steps = steps_per_epoch(self.job.num_samples, batch_size_global)
        epoch_s, epochs = step_s.scaled(steps), self.job.num_epochs
        price = self.price_usd_per_hour
        return {
            "num_steps_per_epoch": steps,
            "num_steps": None if epochs is None else round(steps * epochs),
            "epoch_time_s": epoch_s,
            "job_time_s": None if epochs is None else epoch_s.scaled(epochs),
            "cost_usd_per_epoch": None if price is None else price * num_devices * epoch_s.value / 3600,
        }


def _answer(curve: _Curve, points: list[ScalePoint], numbers: Sequence[int]) -> ScaleCurve:
    cluster = curve.cluster
    several_nodes = any(point.num_nodes > 1 for point in points)
    kinds = dict.fromkeys(point.scaling for point in points)
    return ScaleCurve(
        model=curve.prepared.graph.model,
        device=cluster.device.name,
        strategy=str(curve.settings.strategy),
        precision=str(curve.setup.precision),
        intra_link=cluster.intra_link.name if cluster.intra_link and max(numbers) > 1 else None,
        inter_link=cluster.inter_link.name if cluster.inter_link and several_nodes else None,
        points=tuple(points),
        stops_paying_at={
            kind: stops_paying_at([point for point in points if point.scaling == kind]) for kind in kinds
        },
        notes=tuple(_notes(curve, several_nodes)),
    )


def _notes(curve: _Curve, several_nodes: bool) -> list[str]:
    notes = list(curve.prepared.graph.notes)
    if not several_nodes:
        notes.append(
            "all devices are taken to be in one node; name several as --on NxMxDEVICE with --inter LINK"
        )
    if curve.cluster.intra_link is not None and curve.cluster.intra_link.kind is LinkKind.HOST:
        notes.append("each process is taken to have a processor of its own; processes of one share its cores")
    if curve.settings.strategy.stage or curve.settings.strategy is Strategy.MIRRORED:
        notes.append(f"no measured run with strategy {curve.settings.strategy} stands behind the interval")
    if curve.job is None:
        notes.append("epochs and cost need a dataset: --dataset NAME or --dataset-size N")
    return notes
