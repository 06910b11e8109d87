"""The run behind a measured step: parameters and circumstances as the question that ``predict`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forerun.errors import UsageError
from forerun.hardware import find_device
from forerun.hardware.cluster import Cluster, cluster_of
from forerun.hardware.device import Device
from forerun.hardware.here import describe_host
from forerun.hardware.this_device import cpu_device
from forerun.records.job_parameters import flag_of, input_options_of, setup_of, text_of, whole_of
from forerun.run.job import Job
from forerun.run.model import ModelRequest
from forerun.run.run import Run, Software, parse_release
from forerun.run.setup import OptimizerImplementation, TrainingSetup
from forerun.run.sharing import Sharing, Strategy

__all__ = [
    "default_optimizer_implementation",
    "framework_release",
    "is_pytorch_2",
    "measured_device",
    "measured_request",
    "measured_run",
    "measured_setup",
    "software_of",
]

_PYTORCH = "pytorch"
_CPU = "cpu"

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


def measured_request(model: str, **inputs: Any) -> ModelRequest:
    """The network of a record under the name that builds it today."""
    return ModelRequest(model=_OTHER_NAMES.get(model, model), **inputs)


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
    if name == _CPU:
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
        model=measured_request(model, **input_options_of(parameters)),
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
