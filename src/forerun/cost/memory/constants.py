"""Constants of the memory model: memory a program holds beside its tensors, memory the driver keeps back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.base.errors import InvalidSetupError
from forerun.base.units import GIB
from forerun.question.devices.device import Device, DeviceKind

_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """Constants that turn bytes of tensors into bytes of a device.

    Attributes:
        overhead_bytes: Context, loaded kernels and library handles of the process [bytes].
        live_factor: Smallest limit of the allocator over live bytes, used without a replay.
        workspace_factor: Workspace of a convolution over its input plus output bytes, half precision in NCHW.
        uses_caching_allocator: True if PyTorch's caching allocator is at work; otherwise live bytes count.
        source: Origin of the figures.
    """

    overhead_bytes: float
    live_factor: float
    workspace_factor: float
    uses_caching_allocator: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleMemory:
    """Memory of a device that a program can have.

    Attributes:
        value_bytes: Total that the driver reports to the program [bytes].
        source: Origin of the figure.
    """

    value_bytes: float
    source: str


_EAGER_LOADING = MemoryConstants(
    overhead_bytes=(24_268 - 22_550) * _MIB,
    live_factor=1.018,
    workspace_factor=1.0,
    uses_caching_allocator=True,
    source=(
        "overhead 1.68 GiB: fitted on 569 AMP training runs of timm models on an RTX 3090, PyTorch 1.12 with "
        "CUDA 11.3, which loads all kernels at start"
    ),
)

_LAZY_LOADING = MemoryConstants(
    overhead_bytes=0.7 * GIB,
    live_factor=1.018,
    workspace_factor=1.0,
    uses_caching_allocator=True,
    source=(
        "overhead 0.7 GiB: default for lazily loaded kernels (CUDA 11.7 and later); 0.5 to 1.0 GiB agree "
        "with 104 out-of-memory verdicts of transformers on nine GPUs under PyTorch 2.1; replace it by what "
        "nvidia-smi shows for an idle process after one convolution"
    ),
)

_PROCESS_ONLY = MemoryConstants(
    overhead_bytes=0.5 * GIB,
    live_factor=1.0,
    workspace_factor=0.0,
    uses_caching_allocator=False,
    source="live bytes plus 0.5 GiB assumed for the process; no caching allocator of CUDA is at work here",
)


def memory_constants(
    device: Device,
    *,
    torch_version: tuple[int, int] | None = None,
    overhead_bytes: float | None = None,
) -> MemoryConstants:
    """Constants for a device and a PyTorch version.

    Args:
        device: Device that runs the step; only GPUs of NVIDIA have measurements behind their constants.
        torch_version: Major and minor version of PyTorch; None for a current one. Before 1.13 the CUDA builds
            (up to 11.6) load every kernel at start.
        overhead_bytes: Overhead of the process if it is known, such as from ``nvidia-smi`` [bytes].
    """
    if device.kind is not DeviceKind.GPU:
        constants = _PROCESS_ONLY
    elif torch_version is not None and torch_version < (1, 13):
        constants = _EAGER_LOADING
    else:
        constants = _LAZY_LOADING
    if device.kind is DeviceKind.GPU and device.vendor != "nvidia":
        constants = replace(constants, source=f"{constants.source}; not measured on {device.vendor} devices")
    if overhead_bytes is None:
        return constants
    if not 0 <= overhead_bytes < float("inf"):
        raise InvalidSetupError(f"memory overhead must be zero or more bytes, got {overhead_bytes}")
    return replace(constants, overhead_bytes=overhead_bytes, source="overhead as given by the user")


_VISIBLE_FRACTION = 24_268 / 24_576  # GeForce RTX 3090: total_memory of PyTorch over the nominal 24 GiB
_INLINE_ECC_FRACTION = 15 / 16


def visible_memory(device: Device) -> VisibleMemory:
    """Memory that a program finds on a device [bytes].

    nominal * 0.9875 for GPUs, and * 15/16 more where ECC bits live in the same GDDR chips, which is the
    default on data-centre boards (nvidia-smi: T4 15,360 of 16,384 MiB, L4 23,034, A10 23,028, L40S 46,068).
    HBM keeps the ECC bits apart.

    Sources: 24,268 MiB visible of an RTX 3090's 24,576; NVIDIA CUDA C++ Best Practices Guide (GDDR with ECC
    has 6.25 % less memory); totals as listed in github.com/modal-labs/modal-client/pull/2797.
    """
    if device.kind is not DeviceKind.GPU:
        return VisibleMemory(value_bytes=device.memory_bytes, source="nominal memory")
    value_bytes = device.memory_bytes * _VISIBLE_FRACTION
    source = "nominal memory less 1.25 % that the driver keeps, as on an RTX 3090"
    if (
        device.vendor == "nvidia"
        and device.segment == "datacenter"
        and device.memory_type.upper().startswith("GDDR")
    ):
        value_bytes *= _INLINE_ECC_FRACTION
        source += ", less 1/16 for inline ECC"
    return VisibleMemory(value_bytes=value_bytes, source=source)
