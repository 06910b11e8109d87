"""A device by a name, a file or ``here``: the first visible GPU of this machine, or its CPU.

Looking at the machine needs libraries that naming a device does not: they are loaded when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.base.errors import UnknownDeviceError, UsageError, near_matches
from forerun.base.stages import LOGGER
from forerun.question.devices.catalogue import load_catalog, matching_devices, normalise_name
from forerun.question.devices.device import Device, NumberFormat

if TYPE_CHECKING:
    from forerun.question.devices.here import Host, HostCpu, HostGpu

_GENERIC_CPU = "cpu"
# Error correction takes up to 1/16 of the memory, reserved areas a little more; with less, it is another board.
_MEMORY_TOLERANCE = 0.10
# A few cores draw more than their share of the socket's bandwidth; one memory channel is the least assumed.
_LEAST_BANDWIDTH_BYTES_PER_S = 25.6e9


def find_device(name: str, *, prefer_sxm: bool = False) -> Device:
    """The device with this name.

    Args:
        name: A catalogue name (``a100-sxm4-40gb``), a driver's name (``NVIDIA A100-SXM4-40GB``), another
            spelling in use (``A100 SXM 40GB``; case, punctuation and vendor words do not matter), the path of
            a TOML file with one device, or ``here`` for the first GPU of this machine, or its CPU if it has
            none.
        prefer_sxm: Whether the SXM board is taken, with a warning, where it is the only one of several matches;
            tables of measurements are never guessed about.

    Raises:
        UnknownDeviceError: No device or several match the name; the message lists similar names.
        CatalogError: The file is not a usable device description.

    >>> find_device("NVIDIA GeForce RTX 3090").name
    'rtx-3090'
    """
    if name.strip().lower() == "here":
        return this_device()
    if name.strip().lower().endswith(".toml"):
        from forerun.question.devices.rows import load_device_file  # with its library of schemas

        path = Path(name.strip()).expanduser()
        if not path.is_file():
            raise UnknownDeviceError(
                f"expected a hardware file at '{name.strip()}', but there is none; check the path"
            )
        return load_device_file(path)
    found = matching_devices(name)
    if len(found) == 1:
        return found[0]
    boards = [device for device in found if device.bus.upper().startswith("SXM")]
    if prefer_sxm and len(boards) == 1:
        others = ", ".join(device.name for device in found if device is not boards[0])
        LOGGER.warning("'%s' is taken as %s, the SXM board; also known: %s", name, boards[0].name, others)
        return boards[0]
    raise UnknownDeviceError(_many_message(name, found) if found else _none_message(name))


def _many_message(name: str, found: Iterable[Device]) -> str:
    return f"'{name}' matches more than one device; name one of: {', '.join(device.name for device in found)}"


def _none_message(name: str) -> str:
    near = near_matches(normalise_name(name), load_catalog())
    return (
        f"expected a device of the catalogue, a hardware file or 'here', got '{name}'{near}"
        f"{'' if near else '; the catalogue lists all names'}"
    )


def this_device() -> Device:
    """The first GPU a CUDA program would see on this machine; without a GPU, its CPU."""
    from forerun.question.devices.here import describe_host, visible_gpus

    host = describe_host()
    gpus = visible_gpus(host.gpus)
    return gpu_device(gpus[0]) if gpus else cpu_device(host)


def device_at(gpu_index: int | None) -> Device:
    """One of this machine's devices.

    Args:
        gpu_index: Index of the GPU as a CUDA program would see it; None for the processor.

    Raises:
        UsageError: There is no such GPU.
        UnknownDeviceError: The device is not in the catalogue.
    """
    from forerun.question.devices.here import describe_host, visible_gpus

    host = describe_host()
    if gpu_index is None:
        return cpu_device(host)
    gpus = visible_gpus(host.gpus)
    if gpu_index >= len(gpus):
        raise UsageError(f"expected one of this machine's {len(gpus)} GPUs, got cuda:{gpu_index}")
    return gpu_device(gpus[gpu_index])


def gpu_device(gpu: HostGpu) -> Device:
    """The catalogue's entry for a GPU of this machine, with the memory that the driver reports.

    If the driver gives several boards the same name, the board with the nearest memory is taken.
    """
    found = matching_devices(gpu.name)
    if not found:
        raise UnknownDeviceError(
            f"expected this machine's GPU in the catalogue, got '{gpu.name}', which has no entry; "
            "describe it in a TOML file and pass its path"
        )
    device = min(found, key=lambda candidate: abs(candidate.memory_bytes - gpu.memory_bytes))
    if abs(device.memory_bytes - gpu.memory_bytes) <= _MEMORY_TOLERANCE * device.memory_bytes:
        return device
    return replace(
        device,
        memory_bytes=float(gpu.memory_bytes),
        sources={**device.sources, "memory_bytes": "total memory the driver reports on this machine"},
        notes=f"{device.notes} Memory as the driver reports it, unlike the catalogue's entry.".strip(),
    )


def cpu_device(host: Host) -> Device:
    """The CPU of a machine as a device: the generic class scaled to the cores this process may use.

    peak = cores x FLOP per clock and core x clock. Bandwidth and power are the class's share per core, which
    no operating system reports; expect a factor of two either way.
    """
    generic = load_catalog()[_GENERIC_CPU]
    num_cores = _num_usable_physical_cores(host)
    share = min(1.0, num_cores / generic.num_compute_units)
    clock_hz = host.cpu.clock_hz or generic.boost_clock_hz
    bandwidth = max(_LEAST_BANDWIDTH_BYTES_PER_S, share * generic.memory_bandwidth_bytes_per_s)
    per_clock = cpu_flops_per_clock(host.cpu)
    return replace(
        generic,
        title=f"{host.cpu.model} (this machine)",
        num_compute_units=num_cores,
        boost_clock_hz=clock_hz,
        l2_cache_bytes=host.cpu.last_level_cache_bytes or generic.l2_cache_bytes,
        memory_bytes=float(host.memory_usable_bytes),
        memory_bandwidth_bytes_per_s=bandwidth,
        power_limit_w=max(1.0, share * generic.power_limit_w),
        peak_flops_per_s={peak: num_cores * rate * clock_hz for peak, rate in per_clock.items()},
        aliases=(),
        sources=_cpu_sources(generic, host.cpu),
        notes="Bandwidth and power are assumed from the number of cores; measure where they matter.",
    )


def _num_usable_physical_cores(host: Host) -> int:
    """Threads of one core share its vector units, so a core counts once."""
    threads_per_core = max(1.0, host.cpu.num_logical_cores / host.cpu.num_physical_cores)
    return max(1, min(host.cpu.num_physical_cores, round(host.num_usable_cores / threads_per_core)))


def cpu_flops_per_clock(cpu: HostCpu) -> Mapping[NumberFormat, float]:
    """FLOP per clock and core by number format, from the vector extensions of a processor.

    Two fused multiply-add units are assumed with AVX2, AVX-512 and 128-bit ARM vectors; AMD's cores
    before Zen 5 split AVX-512 in halves and keep the rate of AVX2, so all AMD cores are counted like that.
    """
    features = set(cpu.features)
    if "avx512f" in features and "AMD" not in cpu.model:
        fp32 = 64.0
    elif {"avx2", "fma"} <= features:
        fp32 = 32.0
    else:
        fp32 = 16.0
    rates = {NumberFormat.FP64: fp32 / 2, NumberFormat.FP32: fp32}
    if "amx_bf16" in features:
        rates[NumberFormat.BF16] = 2048.0
    elif "avx512_bf16" in features:
        rates[NumberFormat.BF16] = 2 * fp32
    return rates


def _cpu_sources(generic: Device, cpu: HostCpu) -> dict[str, str]:
    seen = "as the operating system of this machine reports"
    assumed = "share of the generic server CPU per core"
    unknown = "not reported by the operating system; value of the generic server CPU"
    return {
        **generic.sources,
        "num_compute_units": f"{seen}, after affinity and container quota",
        "boost_clock_hz": seen if cpu.clock_hz else unknown,
        "l2_cache_bytes": seen if cpu.last_level_cache_bytes else unknown,
        "memory_bytes": f"{seen}, or the limit of the container",
        "memory_bandwidth_bytes_per_s": assumed,
        "power_limit_w": assumed,
        "peak_flops_per_s": "cores x FLOP per clock of the vector extensions x clock",
    }
