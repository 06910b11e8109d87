"""Pages of devices, of this machine, and of prices."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from forerun.base.units import GIB, format_bytes, format_flops_per_s
from forerun.question.devices import Device, Host, HostGpu
from forerun.question.devices.prices import OLD_PRICE_DAYS, InstancePrice
from forerun.surface.report.tables import Columns, facts, table, table_of

_MISSING = "not reported"


def device_table(devices: Iterable[Device]) -> RenderableType:
    """The catalogue, one line per device; on a narrow terminal only the title is shortened."""
    words = ("name", "since", "what it is")
    figures = ("memory\n[GiB]", "bandwidth\n[GB/s]", "fp32\n[TFLOP/s]", "fp16\n[TFLOP/s]")
    titles = (words[0], *figures, *words[1:])
    return table(titles, map(_device_cells, devices), left=words, fold=words[-1:])


def _device_cells(device: Device) -> tuple[str, ...]:
    peaks: Mapping[str, float] = {str(peak): rate for peak, rate in device.peak_flops_per_s.items()}
    rates = (_short(peaks[name] / 1e12) if name in peaks else "-" for name in ("fp32", "fp16"))
    memory, bandwidth = _short(device.memory_bytes / GIB), f"{device.memory_bandwidth_bytes_per_s / 1e9:,.0f}"
    return (device.name, memory, bandwidth, *rates, device.release, device.title)


def _short(figure: float) -> str:
    return f"{figure:,.1f}" if figure < 100 else f"{figure:,.0f}"


def device_page(device: Device) -> RenderableType:
    """One device: each figure with its source."""
    rows, above = [], ""
    for name, value, field in _device_figures(device):
        source = device.sources.get(field) or device.sources.get(field.partition(".")[0], "")
        rows.append((name, value, "as above" if source == above else source))
        above = source
    lines: list[RenderableType] = [
        Text(f"{device.title} ({device.name})", style="bold"),
        Text(f"{device.vendor} {device.kind}, {device.architecture}, {device.segment}"),
        Text(""),
        table(("figure", "value", "source"), rows, left=("figure", "source"), fold=("source",)),
    ]
    if device.aliases:
        lines += [Text(""), Text(f"Also found as: {', '.join(device.aliases)}")]
    return Group(*lines, *([Text(""), Text(f"Note: {device.notes}")] if device.notes else []))


def _device_figures(device: Device) -> Iterable[tuple[str, str, str]]:
    yield "compute units", f"{device.num_compute_units:,}", "num_compute_units"
    yield "boost clock", f"{device.boost_clock_hz / 1e6:,.0f} MHz", "boost_clock_hz"
    yield "last-level cache", format_bytes(device.l2_cache_bytes), "l2_cache_bytes"
    yield f"memory ({device.memory_type})", format_bytes(device.memory_bytes), "memory_bytes"
    yield (
        "bandwidth",
        f"{device.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s",
        "memory_bandwidth_bytes_per_s",
    )
    yield "bus", device.bus, "bus"
    yield "board power", f"{device.power_limit_w:,.0f} W", "power_limit_w"
    yield "release", device.release, "release"
    for number_format, rate in device.peak_flops_per_s.items():
        yield f"peak {number_format}", format_flops_per_s(rate), f"peak_flops_per_s.{number_format}"


def host_page(host: Host) -> RenderableType:
    """This machine."""
    parts: list[RenderableType] = [
        Text("This machine", style="bold"),
        Padding(facts(_host_figures(host)), (0, 0, 0, 2), expand=False),
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


_PRICE_COLUMNS: Columns[InstancePrice] = {
    "device": lambda price: price.device,
    "provider": lambda price: price.provider,
    "instance": lambda price: price.instance,
    "way of paying": lambda price: str(price.kind),
    "region": lambda price: price.region,
    "read on": lambda price: f"{price.date}{' old' if _is_old(price) else ''}",
    "USD/h of one device": lambda price: f"{price.usd_per_hour / price.num_devices:.3f}",
    "of the instance": lambda price: f"{price.usd_per_hour:.3f}",
}


def _is_old(price: InstancePrice) -> bool:
    return (datetime.date.today() - price.date).days > OLD_PRICE_DAYS


def price_table(prices: Sequence[InstancePrice]) -> RenderableType:
    """One line per price; the date of an old one is marked."""
    made = table_of(prices, _PRICE_COLUMNS, left=[*_PRICE_COLUMNS][:6])
    return Group(made, Text(f"old: read more than {OLD_PRICE_DAYS} days ago", style="italic"))
