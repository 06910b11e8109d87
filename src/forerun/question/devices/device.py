"""A device: figures of its datasheet, each with its source; and the kinds of devices, links and prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from forerun.base.answers import Answer


class DeviceKind(StrEnum):
    """The sort of machine; only GPUs have measurements behind the shipped cost model."""

    GPU = "gpu"
    CPU = "cpu"
    TPU = "tpu"
    NPU = "npu"


class NumberFormat(StrEnum):
    """A number format that has its own peak rate.

    ``FP16`` is the matrix rate with fp32 accumulation, which is what training uses; consumer boards run
    twice as fast with fp16 accumulation, kept apart as ``FP16_ACC16``. ``FP16_VECTOR`` is the rate without
    matrix units. All rates are dense.
    """

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    FP16_ACC16 = "fp16_acc16"
    FP16_VECTOR = "fp16_vector"
    BF16 = "bf16"
    FP8 = "fp8"


class LinkKind(StrEnum):
    """Sort of link, as libraries of collectives distinguish them."""

    NVLINK = "nvlink"
    """NVLink and other direct links of accelerators."""
    PCIE = "pcie"
    """PCI Express, through switches or the host."""
    NETWORK = "network"
    """InfiniBand or Ethernet between machines."""
    HOST = "host"
    """Memory of one machine that its processes share."""


class PriceKind(StrEnum):
    """Way of paying for an instance; ``OWNED`` is the user's own hardware."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"
    RESERVED_1Y = "reserved-1y"
    RESERVED_3Y = "reserved-3y"
    OWNED = "owned"


# One source may cover a group; a figure named on its own overrides its group.
SOURCE_GROUPS: Mapping[str, str] = {
    "num_compute_units": "compute",
    "boost_clock_mhz": "compute",
    "l2_cache_mb": "compute",
    "memory_gb": "memory",
    "memory_bandwidth_gb_s": "memory",
    "memory_type": "memory",
    "bus": "board",
    "power_limit_w": "board",
    "release": "board",
}
SOURCE_KEYS = (*SOURCE_GROUPS, *dict.fromkeys(SOURCE_GROUPS.values()), "peak_tflops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(Answer):
    """One accelerator or CPU socket, as its datasheet describes it.

    Attributes:
        name: Catalogue name, such as ``a100-sxm4-40gb``.
        title: Name as people write it, such as ``NVIDIA A100 SXM4 40GB``.
        vendor: nvidia, amd, apple, aws, google, intel or any.
        kind: GPU, CPU, TPU or NPU.
        architecture: Name of the chip's design, such as ``ampere``.
        segment: datacenter, workstation, geforce, laptop, cloud or cpu.
        release: Year and month, ``2020-05``.
        num_compute_units: Streaming multiprocessors, compute units or cores that share the work.
        boost_clock_hz: Clock at which the peak rates hold [Hz].
        l2_cache_bytes: Last-level cache on the device [bytes].
        memory_bytes: Memory of the device, nominal [bytes].
        memory_bandwidth_bytes_per_s: Datasheet bandwidth [bytes/s].
        memory_type: Kind of memory chips, such as ``HBM2e``.
        bus: Form and link to the host, such as ``SXM4`` or ``PCIe 4.0 x16``.
        power_limit_w: Board power [W].
        peak_flops_per_s: Dense peak per number format [FLOP/s]; a format that is absent is not supported.
        aliases: Driver names and spellings in use, compared without case and punctuation.
        sources: Source of each figure by field name.
        notes: Remarks for the reader, such as "one of two GPUs of the board".
    """

    name: str
    title: str
    vendor: str
    kind: DeviceKind
    architecture: str
    segment: str
    release: str
    num_compute_units: int
    boost_clock_hz: float
    l2_cache_bytes: float
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    memory_type: str
    bus: str
    power_limit_w: float
    peak_flops_per_s: Mapping[NumberFormat, float]
    aliases: tuple[str, ...]
    sources: Mapping[str, str]
    notes: str = ""

    @property
    def has_stacked_memory(self) -> bool:
        """True for boards with high-bandwidth memory (HBM), whose dies are made for data centres."""
        return self.memory_type.startswith("HBM")

    @property
    def has_matrix_units(self) -> bool:
        """True if half precision runs on matrix units (tensor cores).

        A ratio of rates alone does not tell: an RTX 3090 with tensor cores and a P100 without both run half
        precision at twice the fp32 rate.
        """
        peaks = self.peak_flops_per_s
        if NumberFormat.TF32 in peaks or NumberFormat.FP16_ACC16 in peaks:
            return True
        half = max(peaks.get(NumberFormat.FP16, 0.0), peaks.get(NumberFormat.BF16, 0.0))
        return half > 2.5 * peaks[NumberFormat.FP32]


# Key in the file -> (field of Device, SI value of one unit). Vendors' GB of memory, MB of cache are binary.
_FIGURES: Mapping[str, tuple[str, float]] = {
    "boost_clock_mhz": ("boost_clock_hz", 1e6),
    "l2_cache_mb": ("l2_cache_bytes", 1024**2),
    "memory_gb": ("memory_bytes", 1024**3),
    "memory_bandwidth_gb_s": ("memory_bandwidth_bytes_per_s", 1e9),
    "power_limit_w": ("power_limit_w", 1.0),
}
_TEXTS = ("name", "title", "vendor", "architecture", "segment", "release", "memory_type", "bus")
PEAKS = "peak_tflops"


def device_of(table: Mapping[str, Any]) -> Device:
    """A device from a table that was checked, its figures in SI units."""
    figures: dict[str, Any] = {field: float(table[key]) * unit for key, (field, unit) in _FIGURES.items()}
    texts: dict[str, Any] = {key: table[key] for key in _TEXTS}
    return Device(
        **texts,
        **figures,
        kind=DeviceKind(table["kind"]),
        num_compute_units=table["num_compute_units"],
        peak_flops_per_s={NumberFormat(key): float(rate) * 1e12 for key, rate in table[PEAKS].items()},
        aliases=tuple(table.get("aliases", ())),
        sources=_sources(table["sources"]),
        notes=table.get("notes", ""),
    )


def _sources(given: Mapping[str, Any]) -> dict[str, str]:
    found = {
        _FIGURES[key][0] if key in _FIGURES else key: given[key if key in given else group]
        for key, group in SOURCE_GROUPS.items()
    }
    rates = given[PEAKS]
    field = "peak_flops_per_s"
    if isinstance(rates, str):
        return found | {field: rates}
    return found | {f"{field}.{rate}": rates[rate] for rate in sorted(rates)}
