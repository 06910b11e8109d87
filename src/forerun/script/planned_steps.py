"""Predicts the steps of a script's model in every configuration of a space, by one call of the planner."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.cost.time.correction import find_calibration
from forerun.prediction.estimate import Provenance
from forerun.prediction.models import TracedModels
from forerun.question.devices import find_device
from forerun.question.devices.catalogue import device_at
from forerun.question.devices.cluster import Cluster, cluster_of
from forerun.question.devices.device import Device, DeviceKind
from forerun.question.devices.local import gpu_index
from forerun.question.model import is_keras
from forerun.question.options import RunOptions
from forerun.question.run import HERE, Run
from forerun.question.setup import Layout, Precision
from forerun.script.profiling.profile import Profile
from forerun.script.tuning.laws import DevicePoint, DeviceSteps, device_points, script_point
from forerun.script.tuning.space import Space
from forerun.search.choice import HIGH
from forerun.search.devices import DeviceOption
from forerun.search.engine import Engine
from forerun.search.search import SETTINGS, Search

_PRECISIONS: Mapping[str, Precision] = {
    "off": Precision.FP32,
    "bf16": Precision.AMP_BF16,
    "fp16": Precision.AMP,
}
_LAYOUTS = {False: Layout.NCHW, True: Layout.NHWC}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptModel:
    """The model that a script trains, as the user names it.

    Attributes:
        model: A specification as in ``predict``, of PyTorch.
        image_size: Height and width of the images, if the script's arguments do not say it [pixels].
        input_shape: Shape of one sample, instead of ``image_size``.
        sequence_length: Tokens of one sample of a text model.
    """

    model: str
    image_size: int | None = None
    input_shape: tuple[int, ...] | None = None
    sequence_length: int | None = None

    def check(self, space: Space) -> None:
        """Traces the model once, before anything runs.

        Raises:
            UsageError: There is no such model, it is one of Keras, or its input does not fit the space.
            FailureError: It cannot be built or traced.
        """
        if is_keras(self.model):
            raise UsageError(
                f"expected a model of PyTorch, got '{self.model}' of Keras: hooks reach PyTorch scripts only"
            )
        varied = space.parameter("image_size")
        if self.input_shape is not None and varied is not None:
            raise UsageError(
                "the space varies image_size, which an input shape fixes; leave --input-shape out, the script's own "
                "size is read from its arguments or given as --image-size"
            )
        size = self.image_size or (varied.values[0] if varied is not None and varied.values else None)
        # Tracing needs no particular device.
        TracedModels().of(self.run(cluster_of(find_device("cpu"), 1, 1), image_size=size))

    def sized(self, image_size: int | None) -> ScriptModel:
        """This model with images of a size [pixels], unless the user gave a shape or a size."""
        is_given = self.image_size is not None or self.input_shape is not None
        return self if is_given else replace(self, image_size=image_size)

    def run(self, cluster: Cluster, **options: Unpack[RunOptions]) -> Run:
        """A run of this model."""
        options["input_shape"], options["sequence_length"] = self.input_shape, self.sequence_length
        return Run.of(self.model, device=cluster, **options)


def predictable_device(device_index: str) -> Device:
    """The device of the trials on this machine, whose steps can be predicted.

    A GPU needs an entry in the catalogue, a processor a calibration, because datasheets of processors say too little.

    Raises:
        ForerunError: They cannot; the message is the reason.
    """
    device = device_at(gpu_index(device_index))
    if device.kind is DeviceKind.GPU or find_calibration(device) is not None:
        return device
    raise InvalidSetupError("this processor has no calibration; make one with: forerun calibrate")


def planned_steps(
    model: ScriptModel,
    device: Device,
    space: Space,
    base: Mapping[str, Any],
    profile: Profile,
    *,
    memory_bytes: float | None,
) -> DeviceSteps:
    """Predicted steps and memory at every combination of batch size, precision, memory order and image size.

    Args:
        model: Model that the script trains.
        device: From ``predictable_device``.
        space: Settings that may be changed.
        base: The script's own values.
        profile: Profile of the unchanged script.
        memory_bytes: Memory of a GPU; None for no limit [bytes].

    Raises:
        InvalidSetupError: The batch size of the script is unknown, or its precision was never calibrated.
        UsageError, FailureError: The model cannot be built or traced at one of the image sizes.
    """
    own = script_point(profile, base, model.image_size)
    if own is None:
        raise InvalidSetupError(
            "nothing tells the samples of a step; map batch_size to the script's argument"
        )
    axes = device_points(space, own)
    words = tuple(itertools.product(axes["image_size"], axes["channels_last"], axes["amp"]))
    cluster = cluster_of(device, 1, 1)
    run = model.run(cluster, optimizer=_optimizer(profile))
    search = Search(
        run=run,
        axes={
            SETTINGS: [
                {"precision": _PRECISIONS[amp], "layout": _LAYOUTS[last]}
                | ({} if size is None else {"image_size": size})
                for size, last, amp in words
            ],
            "device": [DeviceOption(cluster=cluster, name=HERE)],
            "batch_size": sorted({round(size) for size in axes["batch_size"]}),
        },
    )
    table = Engine(search, TracedModels()).all_candidates()
    points = [
        DevicePoint(batch_size=int(size), amp=amp, channels_last=last, image_size=pixels)
        for (pixels, last, amp), size in zip(
            (words[index] for index in table.configuration), table.batch_size, strict=True
        )
    ]
    # Without instructions for it, half precision is slower than single precision, so a processor is believed only in a
    # precision that its calibration measured; the GPUs behind the cost model all have such instructions.
    known = (table.provenance == Provenance.CALIBRATED.value) | (device.kind is DeviceKind.GPU)
    if not known[points.index(own)]:
        raise InvalidSetupError(
            f"the calibration of this processor says nothing of {own.amp}, in which the script runs"
        )
    steps_s = table.batch_size / table.values["device_samples_per_s"][0]
    # The high end of the interval: a trial that may run out of memory costs the study a trial.
    peaks = table.values["peak_memory_bytes"][HIGH]
    tiers = ", ".join(dict.fromkeys(table.provenance[known].tolist()))
    return DeviceSteps(
        source=f"{model.model} on {device.title} ({tiers})",
        own=own,
        step_s={
            point: float(s) for point, s, is_known in zip(points, steps_s, known, strict=True) if is_known
        },
        peak_bytes={point: float(peak) for point, peak in zip(points, peaks, strict=True)},
        memory_bytes=memory_bytes if device.kind is DeviceKind.GPU else None,
    )


def _optimizer(profile: Profile) -> str:
    """The script's optimizer if the tracer knows it, else one with a typical amount of work."""
    from forerun.tracing.optimizers import OPTIMIZERS

    name = str(profile.optimizer.get("name") or "").lower()
    return name if name in OPTIMIZERS else "adam"
