"""Circumstances of a job (place, time, software) and frameworks beside PyTorch, without loading one."""

from __future__ import annotations

import platform
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from forerun.base.errors import ForerunError, InvalidSetupError, MeasurementError, UnknownDeviceError
from forerun.base.extras import installed_version, plugin, plugin_names
from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.measurement.settings import StepSettings
from forerun.evidence.measurement.telemetry import load_per_core
from forerun.evidence.records.measurement import Circumstances, Measurement, Scalar
from forerun.question.devices.catalogue import gpu_device
from forerun.question.devices.device import Device
from forerun.question.devices.here import Host, HostGpu, describe_host, visible_gpus
from forerun.question.devices.local import gpu_index
from forerun.question.setup import Precision, TrainingSetup

if TYPE_CHECKING:
    from forerun.graph.graph import Graph


_DISTRIBUTIONS = {"pytorch": ("torch",), "keras": ("keras", "tensorflow", "tensorflow-cpu")}


def describe_circumstances(
    device_index: str = "cpu",
    *,
    protocol: Protocol | None = None,
    occasion: str = "",
    framework: str = "pytorch",
) -> Circumstances:
    """Circumstances of all jobs of a session; ``at_job_start`` adds those of one job.

    Args:
        device_index: ``cpu``, ``cuda`` or ``cuda:N`` among the visible GPUs.
        protocol: Settings of the measurement, for the number of threads.
        occasion: Label of the session.
        framework: Name of the framework, ``pytorch`` or ``keras``.
    """
    index = gpu_index(device_index)
    host = describe_host()
    shared = Circumstances(
        device="cpu",
        device_title=host.cpu.model,
        device_index=device_index,
        host=platform.node(),
        num_cores=max(1, int(host.num_usable_cores)),
        num_threads=num_threads_of(protocol or Protocol(), host),
        memory_bytes=float(host.memory_usable_bytes),
        operating_system=host.operating_system,
        python_version=host.python_version,
        framework=framework,
        framework_version=software_version(framework),
        forerun_version=installed_version("forerun") or "",
        occasion=occasion,
    )
    if index is None:
        return shared
    gpu = _gpu(index, host)
    return replace(
        shared,
        device=_gpu_name(gpu),
        device_title=gpu.name,
        memory_bytes=float(gpu.memory_bytes),
        accelerator_software=_accelerator_software(gpu),
    )


def at_job_start(circumstances: Circumstances) -> Circumstances:
    """The circumstances of a job that begins now: the time in UTC and the load of the machine."""
    return replace(
        circumstances,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        load_before=load_per_core(),
    )


def num_threads_of(protocol: Protocol, host: Host | None = None) -> int:
    """Number of threads for the framework: that of the protocol, else one per core the job may use."""
    if protocol.num_threads is not None:
        return protocol.num_threads
    return max(1, int((host or describe_host()).num_usable_cores))


def software_version(framework: str) -> str:
    """Versions of a framework and of its backend, from the packages' own metadata.

    Raises:
        MeasurementError: The framework is not installed.
    """
    if framework not in _DISTRIBUTIONS:
        raise InvalidSetupError(f"expected framework {' or '.join(_DISTRIBUTIONS)}, got '{framework}'")
    # From the metadata: to import a framework for its version takes seconds, and TensorFlow would take the GPU.
    main, *others = _DISTRIBUTIONS[framework]
    version = installed_version(main)
    if version is None:
        raise MeasurementError(
            f"expected {main} to be installed, found none; install it with: pip install {main}"
        )
    found = {name: other for name in others if (other := installed_version(name))}
    return ", ".join([version, *(f"{name} {other}" for name, other in found.items())])


def _gpu(index: int, host: Host) -> HostGpu:
    gpus = visible_gpus(host.gpus)
    if index >= len(gpus):
        raise MeasurementError(
            f"expected an NVIDIA GPU as cuda:{index}, but this process sees {len(gpus)}; "
            "choose another device, or check the driver and CUDA_VISIBLE_DEVICES"
        )
    return gpus[index]


def _gpu_name(gpu: HostGpu) -> str:
    """Catalogue name of a GPU; one without an entry is measured under its own name."""
    try:
        return gpu_device(gpu).name
    except UnknownDeviceError:
        return re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")


def _accelerator_software(gpu: HostGpu) -> str:
    known = {"driver": gpu.driver_version, "CUDA": gpu.cuda_version}
    return ", ".join(f"{name} {version}" for name, version in known.items() if version)


FRAMEWORKS = "forerun.frameworks"
"""Entry points of frameworks by name."""

PYTORCH = "pytorch"


class Framework(typing.Protocol):
    """A framework that has a runner of its own, as measuring and fitting see it."""

    @property
    def run(self) -> str:
        """Function that runs a job in a child, as ``module:function``."""
        ...

    @property
    def preloaded(self) -> Sequence[str]:
        """Modules that the server of the children imports once."""
        ...

    def check_installed(self, purpose: str) -> None:
        """Refuses a machine without the framework."""
        ...

    def check_grid(self, network: str, optimizer: str) -> None:
        """Refuses a grid whose networks or optimizer it does not have."""
        ...

    def check_layers(self, optimizers: Sequence[str], precision: Precision) -> None:
        """Refuses layers with optimizers or a precision that it does not have."""
        ...

    def check_steps(self, settings: StepSettings) -> None:
        """Refuses steps of a model that it cannot run."""
        ...

    def check_model(self, model: str, setup: TrainingSetup) -> None:
        """Refuses a misspelt model or an impossible setup without loading the framework."""
        ...

    def server_parameters(self, settings: StepSettings, optimizer: str, device: str) -> Mapping[str, Scalar]:
        """Parameters of a job under parameter servers, checked."""
        ...

    def graphs(
        self, measurements: Sequence[Measurement], device: Device
    ) -> dict[str, tuple[Graph, TrainingSetup] | ForerunError]:
        """Graph and setup of each measured step or layer by its key, or why there is none."""
        ...


def framework_of(name: str) -> Framework | None:
    """The framework of a name; None for PyTorch, whose runners are those of this room.

    Raises:
        InvalidSetupError: No installed package brings it.
    """
    if name == PYTORCH:
        return None
    found: Any = plugin(FRAMEWORKS, name)
    if found is None:
        raise InvalidSetupError(
            f"expected framework {' or '.join([PYTORCH, *plugin_names(FRAMEWORKS)])}, got {name!r}"
        )
    chosen: Framework = found
    return chosen


def preloaded_by(run: str) -> list[str]:
    """Modules that the server of the children imports for a function that runs jobs; unknown ones bring their own."""
    # A runner is a text that travels to the child, so the framework is found by it and not the other way round.
    for found in (plugin(FRAMEWORKS, name) for name in plugin_names(FRAMEWORKS)):
        if found.run == run:
            return list(found.preloaded)
    return []
