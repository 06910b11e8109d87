"""Pages of devices and of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forerun.hardware import Device, Host, HostGpu
from forerun.units import GIB, format_bytes, format_flops_per_s

__all__ = ["device_page", "device_table", "host_page"]

_MISSING = "not reported"


def device_table(devices: Iterable[Device]) -> RenderableType:
    """The catalogue, one line per device; on a narrow terminal only the title is shortened."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("name", no_wrap=True)
    for title in ("memory\n[GiB]", "bandwidth\n[GB/s]", "fp32\n[TFLOP/s]", "fp16\n[TFLOP/s]"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("since", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for device in devices:
        table.add_row(*(Text(cell) for cell in _device_cells(device)))
    return table


def _device_cells(device: Device) -> tuple[str, ...]:
    peaks: Mapping[str, float] = {str(peak): rate for peak, rate in device.peak_flops_per_s.items()}
    rates = (_short(peaks[name] / 1e12) if name in peaks else "-" for name in ("fp32", "fp16"))
    memory, bandwidth = _short(device.memory_bytes / GIB), f"{device.memory_bandwidth_bytes_per_s / 1e9:,.0f}"
    return (device.name, memory, bandwidth, *rates, device.release, device.title)


def _short(figure: float) -> str:
    return f"{figure:,.1f}" if figure < 100 else f"{figure:,.0f}"


def _bandwidth(bandwidth_bytes_per_s: float) -> str:
    return f"{bandwidth_bytes_per_s / 1e9:,.0f} GB/s"


def device_page(device: Device) -> RenderableType:
    """One device: each figure with its source."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    above = ""
    for name, value, field in _device_figures(device):
        source = device.sources.get(field) or device.sources.get(field.partition(".")[0], "")
        table.add_row(Text(name), Text(value), Text("as above" if source == above else source))
        above = source
    lines: list[RenderableType] = [
        Text(f"{device.title} ({device.name})", style="bold"),
        Text(f"{device.vendor} {device.kind}, {device.architecture}, {device.segment}"),
        Text(""),
        table,
    ]
    if device.aliases:
        lines += [Text(""), Text(f"Also found as: {', '.join(device.aliases)}")]
    return Group(*lines, *([Text(""), Text(f"Note: {device.notes}")] if device.notes else []))


def _device_figures(device: Device) -> Iterable[tuple[str, str, str]]:
    yield "compute units", f"{device.num_compute_units:,}", "num_compute_units"
    yield "boost clock", f"{device.boost_clock_hz / 1e6:,.0f} MHz", "boost_clock_hz"
    yield "last-level cache", format_bytes(device.l2_cache_bytes), "l2_cache_bytes"
    yield f"memory ({device.memory_type})", format_bytes(device.memory_bytes), "memory_bytes"
    yield "bandwidth", _bandwidth(device.memory_bandwidth_bytes_per_s), "memory_bandwidth_bytes_per_s"
    yield "bus", device.bus, "bus"
    yield "board power", f"{device.power_limit_w:,.0f} W", "power_limit_w"
    yield "release", device.release, "release"
    for number_format, rate in device.peak_flops_per_s.items():
        yield f"peak {number_format}", format_flops_per_s(rate), f"peak_flops_per_s.{number_format}"


def host_page(host: Host) -> RenderableType:
    """This machine."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _host_figures(host):
        table.add_row(Text(name), Text(value))
    parts: list[RenderableType] = [
        Text("This machine", style="bold"),
        Padding(table, (0, 0, 0, 2), expand=False),
        Text(""),
    ]
    if not host.gpus:
        return Group(*parts, Text("No NVIDIA GPU was found; '--on here' means the processor."))
    return Group(*parts, Text("GPUs", style="bold"), *(_gpu_line(gpu) for gpu in host.gpus))


def _host_figures(host: Host) -> Iterable[tuple[str, str]]:
    cpu = host.cpu
    yield "processor", cpu.model
    clock = _MISSING if cpu.clock_hz is None else f"{cpu.clock_hz / 1e9:.2f} GHz"
    yield "cores", f"{cpu.num_physical_cores} ({cpu.num_logical_cores} threads), {clock}"
    yield "usable here", f"{host.num_usable_cores:g} threads"
    yield "vector units", ", ".join(cpu.features) or _MISSING
    available = format_bytes(host.memory_available_bytes)
    yield "memory", f"{format_bytes(host.memory_usable_bytes)} usable, {available} available now"
    yield "swap", format_bytes(host.swap_total_bytes)
    yield "disk", f"{format_bytes(host.disk_free_bytes)} free"
    yield "system", host.operating_system
    yield "Python", host.python_version
    yield "PyTorch", host.torch_version or "not installed"


def _gpu_line(gpu: HostGpu) -> RenderableType:
    details = [
        f"{format_bytes(gpu.memory_bytes)} ({format_bytes(gpu.memory_used_bytes)} in use)",
        f"driver {gpu.driver_version or _MISSING}",
        f"CUDA {gpu.cuda_version or _MISSING}",
        f"power limit {_MISSING if gpu.power_limit_w is None else f'{gpu.power_limit_w:.0f} W'}",
    ]
    return Padding(Text(f"{gpu.index}: {gpu.name}, {', '.join(details)}"), (0, 0, 0, 2), expand=False)
