"""The calls a user makes; wires the parts together and picks the defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forerun.api.clusters import ClusterRequest, estimate_of_cluster
from forerun.api.models import is_fixed, prepared_model
from forerun.errors import InvalidSetupError
from forerun.hardware import find_device
from forerun.hardware.device import Device
from forerun.memory.constants import visible_memory
from forerun.memory.stream import live_peak_bytes
from forerun.optime.correction_files import calibration_path, find_calibration, load_calibration
from forerun.optime.weights import DEFAULT_STACK, OpTimeWeights, load_weights, shipped_weights_path
from forerun.prediction.estimate import Estimate
from forerun.prediction.grid import predict_grid
from forerun.prediction.predictor import Question, estimate, memory_constants_of
from forerun.prediction.step import PreparedModel, prepare
from forerun.run.job import Job, find_dataset
from forerun.run.model import ModelRequest, own_layout, own_stack
from forerun.run.setup import Layout, OptimizerImplementation, Phase, Precision, TrainingSetup, choice
from forerun.tracing.trace import trace

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__all__ = ["Sweep", "predict", "sweep"]


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Predictions of one model over devices, batch sizes and precisions; arrays are (devices, precisions, batches).

    Attributes:
        devices, precisions, batch_sizes: The axes.
        step_time_s, step_time_low_s, step_time_high_s: Step time and its 90 % interval [s].
        throughput_samples_per_s: Batch size over step time.
        throughput_low_samples_per_s, throughput_high_samples_per_s: Its interval.
        peak_memory_bytes: Peak memory by live bytes, without the allocator's replay [bytes].
        device_memory_bytes: Memory a process finds on each device, (devices,) [bytes].
    """

    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    step_time_s: Floats
    step_time_low_s: Floats
    step_time_high_s: Floats
    peak_memory_bytes: Floats
    device_memory_bytes: Floats

    @property
    def throughput_samples_per_s(self) -> Floats:
        """Samples per second."""
        return np.asarray(self.batch_sizes) / self.step_time_s

    @property
    def throughput_low_samples_per_s(self) -> Floats:
        """Lower end of the 90 % interval."""
        return np.asarray(self.batch_sizes) / self.step_time_high_s

    @property
    def throughput_high_samples_per_s(self) -> Floats:
        """Upper end of the 90 % interval."""
        return np.asarray(self.batch_sizes) / self.step_time_low_s


def _setup(
    batch_size: int,
    precision: str,
    layout: str,
    compile: bool,
    optimizer: str,
    phase: str,
    optimizer_implementation: str,
    fused_attention: bool,
) -> TrainingSetup:
    chosen_phase = choice(Phase, phase, "phase")
    return TrainingSetup(
        batch_size_per_device=_whole("batch size", batch_size),
        precision=choice(Precision, precision, "precision"),
        layout=choice(Layout, layout, "layout"),
        compile=compile,
        optimizer=optimizer.lower() if chosen_phase is Phase.TRAIN else "none",
        optimizer_implementation=choice(
            OptimizerImplementation, optimizer_implementation, "optimizer implementation"
        ),
        phase=chosen_phase,
        fused_attention=fused_attention,
    )


def _whole(name: str, value: Any) -> int:
    try:
        whole = None if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or whole != value:
        raise InvalidSetupError(f"{name} must be a whole number, got {value!r}")
    return whole


def _prepared(
    model: str | torch.nn.Module, request: ModelRequest, setup: TrainingSetup, use_cache: bool
) -> PreparedModel:
    module = None if isinstance(model, str) else model
    if module is None and use_cache and is_fixed(request.model):
        # A graph that holds for any batch size is kept under one of them.
        kept = prepared_model(request, replace(setup, batch_size_per_device=32))
        if kept.graph.only_batch_size is None:
            return kept
    graph = trace(request, setup, module, use_cache=use_cache)
    if graph.only_batch_size not in (None, setup.batch_size_per_device):
        raise InvalidSetupError(
            f"{graph.model} runs at batch size {graph.only_batch_size} only, got {setup.batch_size_per_device}; "
            "ask for that batch size, or export the model with a free batch axis"
        )
    return prepare(graph)


def _prepared_for_each(
    model: str | torch.nn.Module, request: ModelRequest, setups: Sequence[TrainingSetup], use_cache: bool
) -> Iterator[tuple[PreparedModel, slice]]:
    """The traced model and the setups it holds for: all of them, or one if it depends on the batch size."""
    first = _prepared(model, request, setups[0], use_cache)
    if first.graph.only_batch_size is None:
        yield first, slice(None)
        return
    for index, setup in enumerate(setups):
        yield _prepared(model, request, setup, use_cache), slice(index, index + 1)


def _request(
    model: str | torch.nn.Module,
    image_size: int | None,
    input_shape: Sequence[int] | None,
    sequence_length: int | None,
) -> ModelRequest:
    return ModelRequest(
        model=model if isinstance(model, str) else type(model).__name__,
        image_size=image_size,
        input_shape=tuple(input_shape) if input_shape is not None else None,
        sequence_length=sequence_length,
    )


def _job(
    dataset: str | None,
    dataset_size: int | None,
    epochs: float | None,
    validation_size: int | None,
    validate: bool,
    startup_s: float,
    checkpoint_s: float,
) -> Job | None:
    if dataset is not None and dataset_size is not None:
        raise InvalidSetupError("give either a dataset or a dataset size, not both")
    if dataset is None and dataset_size is None:
        needing = {
            "epochs": epochs,
            "validation size": validation_size,
            "validate": validate,
            "start-up time": startup_s,
            "checkpoint time": checkpoint_s,
        }
        given = [name for name, value in needing.items() if value]
        if given:
            raise InvalidSetupError(
                f"{', '.join(given)}: expected a dataset as well; give --dataset NAME or --dataset-size N"
            )
        return None
    known = find_dataset(dataset) if dataset is not None else None
    if validate and validation_size is None:
        if known is None or not known.num_validation_samples:
            whose = f"the dataset {known.name} has" if known else "a dataset size alone has"
            raise InvalidSetupError(f"{whose} no validation split to evaluate; give --validation-size N")
        validation_size = known.num_validation_samples
    return Job(
        num_samples=_whole("dataset size", known.num_training_samples if known else dataset_size),
        num_epochs=epochs,
        num_validation_samples=validation_size or 0,
        startup_s=startup_s,
        checkpoint_s=checkpoint_s,
    )


def _weights(
    device: str | Device, found: Device, calibration: str | Path | None = None, stack: str = DEFAULT_STACK
) -> OpTimeWeights:
    """The calibration that is named, or that of this machine for ``here``, or else the shipped weights.

    A calibration is taken for models of the framework it was made with only.
    """
    if calibration is not None:
        return load_calibration(Path(calibration), found, stack)
    own = find_calibration(found, stack) if device == "here" else None
    return own or load_weights(shipped_weights_path())


def _other_calibration_note(device: str | Device, question: Question, stack: str) -> tuple[str, ...]:
    """What to tell where this machine was calibrated, but with another framework."""
    other = "keras" if stack == DEFAULT_STACK else DEFAULT_STACK
    if device != "here" or question.weights.calibrated_device is not None:
        return ()
    if not calibration_path(question.device, other).exists():
        return ()
    return (
        f"this machine has a calibration of {other}, which says little of {stack}: it was not used; make one with: "
        f"forerun calibrate --framework {stack}",
    )


def _device(device: str | Device) -> Device:
    return device if isinstance(device, Device) else find_device(device)


def predict(
    model: str | torch.nn.Module,
    *,
    device: str | Device,
    batch_size: int = 32,
    precision: str = "fp32",
    layout: str | None = None,
    compile: bool = False,
    optimizer: str = "sgd",
    optimizer_implementation: str = "foreach",
    phase: str = "train",
    fused_attention: bool = True,
    image_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    sequence_length: int | None = None,
    dataset: str | None = None,
    dataset_size: int | None = None,
    epochs: float | None = None,
    validation_size: int | None = None,
    validate: bool = False,
    startup_s: float = 0.0,
    checkpoint_s: float = 0.0,
    price_usd_per_hour: float | None = None,
    memory_overhead_bytes: float | None = None,
    torch_version: str | None = None,
    calibration: str | Path | None = None,
    num_devices: int | None = None,
    num_nodes: int | None = None,
    strategy: str = "ddp",
    intra: str | None = None,
    inter: str | None = None,
    use_cache: bool = True,
) -> Estimate:
    """Time, memory, energy and cost of training a model on one device or several, without them.

    Args:
        model: An ``nn.Module`` or a specification such as ``torchvision:resnet50``; see docs/models.md.
        device: Catalogue name, driver name, TOML file, ``here``, a ``Device``, or ``4x8xh100-sxm``: nodes x devices x
            name.
        batch_size: Samples per step of one device.
        precision: fp32, tf32, amp, amp-bf16, bf16 or fp16.
        layout: nchw or nhwc; the framework's own if None, which is nhwc for Keras.
        compile: Whether the step runs under torch.compile.
        optimizer: sgd, adam, adamw, ... or none.
        optimizer_implementation: foreach, for-loop or fused.
        phase: train, forward or inference.
        fused_attention: Whether scaled_dot_product_attention runs as one kernel.
        image_size: Height and width of images [pixels].
        input_shape: Shape of one sample.
        sequence_length: Tokens of one sample.
        dataset: Name of a known dataset.
        dataset_size: Samples of an epoch, instead of ``dataset``.
        epochs: Epochs of the job.
        validation_size: Samples evaluated after each epoch.
        validate: Whether the validation split of the named dataset is evaluated after each epoch.
        startup_s: Time before the first step [s].
        checkpoint_s: Time of a checkpoint after each epoch [s].
        price_usd_per_hour: Price of the device [USD/h].
        memory_overhead_bytes: Memory of an idle process on the device [bytes].
        torch_version: PyTorch version of the run, such as "2.4".
        calibration: File of a calibration of the device; that of this machine is taken for ``here`` by itself.
        num_devices: Devices, where the name of the device does not say; time, money and energy are those of all.
        num_nodes: Machines they are in; one if None.
        strategy: How several devices share the work: ddp, zero1, zero2, fsdp or mirrored.
        intra: Link between devices of a node, where the board's form does not say it.
        inter: Link between nodes, such as ``infiniband-hdr`` or ``8xinfiniband-hdr``.
        use_cache: Whether to use the cache of traced graphs.

    Raises:
        UsageError: The question must be changed.
        FailureError: The model could not be built or traced, or the cost model could not be read.

    Example:
        >>> import forerun
        >>> forerun.predict("torchvision:resnet18", device="a100-sxm4-40gb").fits
        'yes'
    """
    if price_usd_per_hour is not None and not (price_usd_per_hour >= 0 and isfinite(price_usd_per_hour)):
        raise InvalidSetupError(f"a price must be zero or more US dollars per hour, got {price_usd_per_hour}")
    job = _job(dataset, dataset_size, epochs, validation_size, validate, startup_s, checkpoint_s)
    setup = _setup(
        batch_size,
        precision,
        layout or own_layout(model),
        compile,
        optimizer,
        phase,
        optimizer_implementation,
        fused_attention,
    )
    request = _request(model, image_size, input_shape, sequence_length)
    stack = own_stack(model)
    asked = ClusterRequest(
        device=device,
        num_devices=None if num_devices is None else _whole("the number of devices", num_devices),
        num_nodes=None if num_nodes is None else _whole("the number of nodes", num_nodes),
        strategy=strategy,
        intra=intra,
        inter=inter,
    )
    cluster = asked.cluster()
    found = cluster.device
    settings = asked.settings(setup.phase) if cluster.num_devices > 1 else None
    question = Question(
        device=found,
        setup=setup,
        job=job,
        price_usd_per_hour=price_usd_per_hour,
        memory_overhead_bytes=memory_overhead_bytes,
        torch_version=torch_version,
        weights=_weights(device, found, calibration, stack),
    )
    prepared = _prepared(model, request, setup, use_cache)
    validation = None
    if job is not None and job.num_validation_samples:
        inference = replace(setup, phase=Phase.INFERENCE, optimizer="none")
        validation = _prepared(model, request, inference, use_cache)
    alone = estimate(prepared, validation, question)
    alone = replace(alone, notes=(*alone.notes, *_other_calibration_note(device, question, stack)))
    if settings is None:
        return alone
    return estimate_of_cluster(alone, prepared, validation, question, cluster, settings)


def sweep(
    model: str | torch.nn.Module,
    *,
    devices: Sequence[str | Device],
    batch_sizes: Sequence[int],
    precisions: Sequence[str] = ("fp32",),
    layout: str | None = None,
    compile: bool = False,
    optimizer: str = "sgd",
    optimizer_implementation: str = "foreach",
    phase: str = "train",
    fused_attention: bool = True,
    image_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    sequence_length: int | None = None,
    torch_version: str | None = None,
    calibration: str | Path | None = None,
    use_cache: bool = True,
) -> Sweep:
    """Step time and memory of one model over every combination of devices, precisions and batch sizes.

    The model is traced once per kind of precision, whatever the number of points; arguments as in ``predict``.

    Raises:
        UsageError: The question must be changed.
        FailureError: The model could not be built or traced, or the cost model could not be read.
    """
    if not devices or not batch_sizes or not precisions:
        raise InvalidSetupError("a sweep needs at least one device, one batch size and one precision")
    found = [_device(device) for device in devices]
    stack = own_stack(model)
    weights = [_weights(*pair, calibration, stack) for pair in zip(devices, found, strict=True)]
    shape = (len(found), len(precisions), len(batch_sizes))
    step, low, high, memory = (np.empty(shape) for _ in range(4))
    request = _request(model, image_size, input_shape, sequence_length)
    first = _setup(
        batch_sizes[0],
        precisions[0],
        layout or own_layout(model),
        compile,
        optimizer,
        phase,
        optimizer_implementation,
        fused_attention,
    )
    sizes = [_whole("batch size", size) for size in batch_sizes]
    for j, precision in enumerate(precisions):
        kind = choice(Precision, precision, "precision")
        setups = [replace(first, precision=kind, batch_size_per_device=size) for size in sizes]
        for prepared, part in _prepared_for_each(model, request, setups, use_cache):
            chosen = setups[part]
            for model_weights, rows in _by_weights(weights):
                asked = [found[row] for row in rows]
                grids = predict_grid(prepared, asked, sizes[part], chosen[0], model_weights, torch_version)
                for target, grid in zip((step, low, high), grids, strict=True):
                    target[rows, j, part] = grid
            memory[:, j, part] = _live_memory(prepared, found, chosen, weights[0], torch_version)
    return Sweep(
        devices=tuple(device.name for device in found),
        precisions=tuple(precisions),
        batch_sizes=tuple(batch_sizes),
        step_time_s=step,
        step_time_low_s=low,
        step_time_high_s=high,
        peak_memory_bytes=memory,
        device_memory_bytes=np.asarray([visible_memory(device).value_bytes for device in found]),
    )


def _by_weights(weights: Sequence[OpTimeWeights]) -> list[tuple[OpTimeWeights, list[int]]]:
    """Each cost model with the devices it is for."""
    distinct = {id(model): model for model in weights}
    return [(model, [i for i, own in enumerate(weights) if own is model]) for model in distinct.values()]


def _live_memory(
    prepared: PreparedModel,
    devices: Sequence[Device],
    setups: Sequence[TrainingSetup],
    weights: OpTimeWeights,
    torch_version: str | None,
) -> Floats:
    """Peak memory by live bytes, (devices, setups) [bytes]."""
    live = np.asarray([live_peak_bytes(prepared.graph.memory, s.batch_size_per_device) for s in setups])
    questions = [
        Question(device=device, setup=setups[0], torch_version=torch_version, weights=weights)
        for device in devices
    ]
    constants = [memory_constants_of(question) for question in questions]
    return np.stack([live * c.live_factor + c.overhead_bytes for c in constants])
