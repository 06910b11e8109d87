"""The run behind a measurement: its parameters, with the defaults that a source leaves out, as a question."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.question.devices import find_device
from forerun.question.devices.catalogue import cpu_device
from forerun.question.devices.cluster import Cluster, cluster_of
from forerun.question.devices.device import Device
from forerun.question.devices.here import describe_host
from forerun.question.job import Job
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.setup import (
    Layout,
    OptimizerImplementation,
    Phase,
    Precision,
    Software,
    TrainingSetup,
    parse_release,
)
from forerun.question.sharing import Sharing, Strategy

Parameters = Mapping[str, str | int | float | bool | None]
_Choice = TypeVar("_Choice", bound=StrEnum)


def whole_of(parameters: Parameters, name: str, default: int | None = None) -> int:
    """A whole number; an absent one or None takes the default, and without a default raises an error."""
    value = parameters.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not float(value).is_integer():
        raise InvalidSetupError(f"expected a whole number as {name} of the job, got {value!r}; give one")
    return int(value)


def number_of(parameters: Parameters, name: str, default: float) -> float:
    """A number among the parameters."""
    value = parameters.get(name)
    if value is None:
        return default
    if isinstance(value, (bool, str)):
        raise InvalidSetupError(f"expected a number as {name} of the job, got {value!r}; give one")
    return float(value)


def flag_of(parameters: Parameters, name: str, default: bool = False) -> bool:
    """A flag among the parameters, True or False."""
    value = parameters.get(name)
    if value is None:
        return default
    if value not in (True, False):
        raise InvalidSetupError(f"expected true or false as {name} of the job, got {value!r}; give one")
    return bool(value)


def text_of(parameters: Parameters, name: str, default: str) -> str:
    """A text among the parameters."""
    value = parameters.get(name)
    return default if value is None else str(value)


def choice_of(parameters: Parameters, name: str, kind: type[_Choice], default: _Choice) -> _Choice:
    """A parameter that is a member of a ``StrEnum``."""
    word = text_of(parameters, name, default)
    try:
        return kind(word)
    except ValueError:
        raise InvalidSetupError(
            f"unknown {name} '{word}' of the job; expected one of {', '.join(kind)}"
        ) from None


def setup_of(parameters: Parameters) -> TrainingSetup:
    """The training setup of a job; a missing parameter takes the default of ``TrainingSetup``.

    Only a training step has an optimizer, and only if the job names one.
    """
    phase = choice_of(parameters, "phase", Phase, Phase.TRAIN)
    optimizer = text_of(parameters, "optimizer", "none") if phase is Phase.TRAIN else "none"
    return TrainingSetup(
        batch_size_per_device=whole_of(parameters, "batch_size", 32),
        precision=choice_of(parameters, "precision", Precision, Precision.FP32),
        convolution_precision=(
            choice_of(parameters, "convolution_precision", Precision, Precision.FP32)
            if parameters.get("convolution_precision")
            else None
        ),
        layout=choice_of(parameters, "layout", Layout, Layout.NCHW),
        compile=flag_of(parameters, "compile"),
        optimizer=optimizer,
        optimizer_implementation=choice_of(
            parameters, "optimizer_implementation", OptimizerImplementation, OptimizerImplementation.FOREACH
        ),
        phase=phase,
        fused_attention=flag_of(parameters, "fused_attention", True),
    )


def input_options_of(parameters: Parameters) -> dict[str, Any]:
    """Keywords of ``build_model`` about inputs and head."""
    options: dict[str, Any] = {
        name: whole_of(parameters, name)
        for name in ("image_size", "sequence_length", "num_classes")
        if parameters.get(name) is not None
    }
    if (shape := parameters.get("input_shape")) is not None:
        options["input_shape"] = _shape(str(shape))
    return options


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in re.split("[x,]", text))
    except ValueError:
        raise InvalidSetupError(
            f"expected input_shape of the job such as 3x224x224, got '{text}'; leave the batch out"
        ) from None


_PYTORCH = "pytorch"

_OTHER_NAMES = {
    "timm:ig_resnext101_32x16d": "timm:resnext101_32x16d",
    "timm:ig_resnext101_32x32d": "timm:resnext101_32x32d",
}
"""Networks that timm 1.0 builds under another name; under the old one it builds ``resnext101_32x8d``."""


def framework_release(version: str) -> tuple[int, int] | None:
    """Major and minor release of a version text such as ``2.5.0a0+b465a58``; None if there is none."""
    parts = version.split(".")
    if len(parts) < 2 or not parts[0].isdigit():
        return None
    minor = parts[1][: len(parts[1]) - len(parts[1].lstrip("0123456789"))]
    return (int(parts[0]), int(minor)) if minor else None


def is_pytorch_2(version: str) -> bool:
    """True if a PyTorch version is 2.0 or newer; an unknown one counts as new."""
    release = framework_release(version)
    return release is None or release >= (2, 0)


def default_optimizer_implementation(version: str) -> OptimizerImplementation:
    """Kernels of PyTorch's optimizers unless told otherwise: multi-tensor since 2.0."""
    return OptimizerImplementation.FOREACH if is_pytorch_2(version) else OptimizerImplementation.FOR_LOOP


def measured_setup(parameters: Mapping[str, Any], framework: str, version: str) -> TrainingSetup:
    """The training setup of a measured step; what its parameters leave out is what the framework does by itself.

    Gradients are freed between steps by default since PyTorch 2.0; an unknown version counts as new.

    Raises:
        InvalidSetupError: A parameter has a value that is none of it.
    """
    asked = dict(parameters)
    if asked.get("optimizer_implementation") is None:
        asked["optimizer_implementation"] = str(default_optimizer_implementation(version))
    if not flag_of(asked, "includes_optimizer", True):
        asked["optimizer"] = "none"
    return replace(
        setup_of(asked),
        # Other frameworks keep no gradients between steps at all.
        zero_grad_to_none=framework != _PYTORCH or is_pytorch_2(version),
        autocast_backward=flag_of(asked, "autocast_backward"),
    )


def software_of(framework: str, version: str) -> Software:
    """Software of a measured step; a version that is none of PyTorch's counts as not known."""
    try:
        parse_release(version or None)
    except UsageError:
        return Software()
    return Software(torch_version=version or None) if framework == _PYTORCH else Software()


def measured_device(name: str, title: str, num_cores: int) -> Device:
    """The device of a record; a processor of this machine's kind and cores has the figures of this machine.

    Raises:
        UnknownDeviceError: The catalogue does not know the name.
    """
    if name == "cpu":
        host = describe_host()
        if (title, num_cores) == (host.cpu.model, max(1, int(host.num_usable_cores))):
            return cpu_device(host)
    return find_device(name)


def measured_run(
    model: str, parameters: Mapping[str, Any], device: Device, framework: str, version: str
) -> Run:
    """The run whose steps were measured.

    Args:
        model: The model as ``predict`` names it.
        parameters: What its job was asked.
        device: Where it ran; several of them where the parameters say so.
        framework: pytorch or keras.
        version: Version of the framework; empty if it is not known.

    Raises:
        UsageError: A parameter has a value that is none of it.
    """
    setup = measured_setup(parameters, framework, version)
    return Run(
        model=ModelRequest(model=_OTHER_NAMES.get(model, model), **input_options_of(parameters)),
        setup=setup,
        cluster=_cluster(parameters, device),
        sharing=_sharing(parameters),
        job=_job(parameters),
        software=software_of(framework, version),
    )


def _cluster(parameters: Mapping[str, Any], device: Device) -> Cluster:
    count = whole_of(parameters, "num_devices", whole_of(parameters, "num_replicas", 1))
    return cluster_of(device, 1, count)


def _sharing(parameters: Mapping[str, Any]) -> Sharing:
    word = text_of(parameters, "strategy", Strategy.DDP)
    return Sharing(strategy=Strategy(word)) if word in list(Strategy) else Sharing()


def _job(parameters: Mapping[str, Any]) -> Job | None:
    size = parameters.get("dataset_size")
    if size is None:
        return None
    epochs = whole_of(parameters, "num_epochs", 0)
    return Job(num_samples=whole_of(parameters, "dataset_size"), num_epochs=epochs or None)
