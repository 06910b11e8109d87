"""The devices shipped with the package, and a search for them by a name, a file or ``here``.

``here`` is the first visible GPU of this machine, or its CPU. Looking at the machine needs libraries that naming a
device does not: they are loaded when it is asked for. Beside the devices stands the share of its boost clock that a
board can sustain under its power limit.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.base.errors import CatalogError, UnknownDeviceError, UsageError, near_matches
from forerun.base.stages import LOGGER
from forerun.question.devices.device import Device, DeviceKind, NumberFormat, device_of

if TYPE_CHECKING:
    from forerun.question.devices.here import Host, HostCpu, HostGpu

# Words that drivers and people add or leave out at will; none of them tells two devices apart.
_FILLER_WORDS = frozenset({"nvidia", "geforce", "tesla", "gpu", "amd", "instinct", "1x"})
_WATTAGE = re.compile(r"\(\s*\d+\s*w\s*\)")
_MEMORY = re.compile(r"(?<![a-z0-9])(\d+)\s*g(?:i?b)?(?![a-z0-9])")
# Letters of any alphabet: a Cyrillic name is another name, not the digits that are left of it.
_WORD = re.compile(r"[^\W_]+")


def name_tokens(name: str) -> tuple[str, ...]:
    """The words of a name that matter, in lower case.

    Vendor words and a power limit in parentheses are left out, and a size of memory is one word:

    >>> name_tokens("NVIDIA A100-SXM4-40 GB (400W)")
    ('a100', 'sxm4', '40gb')
    """
    words = _WORD.findall(_MEMORY.sub(r"\1gb", _WATTAGE.sub(" ", name.lower())))
    return tuple(word for word in words if word not in _FILLER_WORDS)


def normalise_name(name: str) -> str:
    """Words of a name that matter, joined by hyphens; normalising twice changes nothing.

    >>> normalise_name("NVIDIA GeForce RTX 3090")
    'rtx-3090'
    """
    return "-".join(name_tokens(name))


def name_key(name: str) -> str:
    """Key that all spellings of one name share: the words that matter, without separators.

    >>> name_key("RTX3090") == name_key("NVIDIA GeForce RTX 3090")
    True
    """
    return "".join(name_tokens(name))


_CATALOG_FOLDER = Path(__file__).parent / "catalog"
_NAME = re.compile(r'^name = "(.*)"$', re.MULTILINE)
_TITLE = re.compile(r'^title = "(.*)"$', re.MULTILINE)
_ALIASES = re.compile(r"^aliases = \[(.*?)\]$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r'"([^"]*)"')

# Words that a name may lack and still mean the one device that has it: series, size of the memory, and form of the
# board. Any other word, such as "super" or "laptop", makes another device.
_MAY_LACK = re.compile(
    r"rtx|gtx|rx|radeon|quadro|tpu|apple|xeon|core|\d+gb|sxm\d*|pcie|hbm\d?e?|graphics|edition"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A device of the catalogue whose figures are not read yet.

    Attributes:
        text: Its part of the file.
        name: Catalogue name.
        spellings: All names of it.
    """

    text: str
    name: str
    spellings: tuple[str, ...]


class _Catalogue(Mapping[str, Device]):
    """Devices by catalogue name; the figures of one are read when it is asked for.

    A question names one or two of some 170 devices, and reading them all takes longer than to answer it.
    """

    def __init__(self, entries: Iterable[_Entry]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self._devices: dict[str, Device] = {}

    def __getitem__(self, name: str) -> Device:
        if name not in self._devices:
            entry = self.entries[name]
            (table,) = tomllib.loads(entry.text)["device"]
            self._devices[name] = device_of(table)
        return self._devices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def load_catalog() -> Mapping[str, Device]:
    """All devices shipped with the package by catalogue name, in the order of the files.

    The mapping is shared; each device is read when it is first asked for.
    """
    return _catalogue()


@cache
def _catalogue() -> _Catalogue:
    found = _Catalogue(entry for path in sorted(_CATALOG_FOLDER.glob("*.toml")) for entry in _entries(path))
    if not found:
        raise CatalogError("the hardware catalogue is missing from this installation; reinstall forerun")
    return found


def _entries(path: Path) -> Iterator[_Entry]:
    """The devices of a file of the catalogue, found by the lines that name them."""
    heading = "[[device]]"
    for part in path.read_text(encoding="utf-8").split(f"\n{heading}\n")[1:]:
        name, title = _NAME.search(part), _TITLE.search(part)
        if name is None or title is None:
            raise CatalogError(
                f"{path}: expected 'name' and 'title' of every device, each on a line of its own"
            )
        aliases = _ALIASES.search(part)
        others = _QUOTED.findall(aliases[1]) if aliases else ()
        yield _Entry(text=f"{heading}\n{part}", name=name[1], spellings=(name[1], title[1], *others))


@cache
def devices_of_architecture(architecture: str) -> tuple[Device, ...]:
    """The devices of one architecture; no other is read."""
    line = f'\narchitecture = "{architecture}"\n'
    catalogue = _catalogue()
    return tuple(catalogue[name] for name, entry in catalogue.entries.items() if line in entry.text)


def index_by_key(spellings: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Catalogue names by the key of every spelling; two devices or links that share one are an error."""
    index: dict[str, str] = {}
    for name, words in spellings.items():
        for spelling in words:
            other = index.setdefault(name_key(spelling), name)
            if other != name:
                raise CatalogError(
                    f"'{spelling}' names both {other} and {name}; remove it from one of the two"
                )
    return index


@cache
def _names_by_key() -> dict[str, str]:
    return index_by_key({name: entry.spellings for name, entry in _catalogue().entries.items()})


@lru_cache(maxsize=4096)
def matching_devices(name: str) -> tuple[Device, ...]:
    """The device with this name; without one, every device with a name that contains all its words.

    A size of memory need not be in the device's name, but must be the device's. One device alone must have no further
    word that tells it apart: an RTX 2080 Max-Q is not the RTX 2080 Super Max-Q.
    """
    catalogue = _catalogue()
    exact = name if name in catalogue else _names_by_key().get(name_key(name))
    if exact is not None:
        return (catalogue[exact],)
    # Every word of the name must occur, in any order; words that it lacks may be numbers of memory and forms,
    # not another model.
    words = frozenset(name_tokens(name))
    if all(len(word) == 1 for word in words):
        return ()  # the 4 of a TPU v4 names no device
    sizes = frozenset(filter(_MEMORY.fullmatch, words))
    found = {
        known: lacking
        for known, spellings in _words_of_names().items()
        if (
            lacking := [
                spelling - words
                for spelling in spellings
                if words - sizes <= spelling and (sizes <= spelling or _has_memory(catalogue[known], sizes))
            ]
        )
    }
    lacked = [each for lacking in found.values() for each in lacking]
    if len(found) == 1 and not any(all(map(_MAY_LACK.fullmatch, each)) for each in lacked):
        return ()
    return tuple(catalogue[known] for known in found)


def _has_memory(device: Device, sizes: frozenset[str]) -> bool:
    """True if each size, such as 24gb, is that of the device's memory."""
    return all(
        abs(int(size.removesuffix("gb")) * 2**30 / device.memory_bytes - 1) <= _MEMORY_TOLERANCE
        for size in sizes
    )


@cache
def _words_of_names() -> Mapping[str, tuple[frozenset[str], ...]]:
    """The words of every spelling of every device, but of titles, in the order of the catalogue."""
    return {
        name: tuple(frozenset(name_tokens(spelling)) for spelling in (name, *entry.spellings[2:]))
        for name, entry in _catalogue().entries.items()
    }


POWER_EXPONENT = 0.8
"""Exponent of the clock over power: 1 at the lowest voltage (P ~ f), 1/3 far above it (P ~ f V^2, V ~ f).

Matrix products of ``neusight_ops`` (NeuSight, ASPLOS 2025) reach 0.8 to 0.9 of the FP32 peak on boards with a power
share of one (A100, V100) and 0.44, 0.52 and 0.22 on T4, P4 and L4, with shares of 0.46, 0.60 and 0.41:
exponents of 0.8 to 1.3.
"""


def power_share(device: Device) -> float:
    """Watts per FP32 FLOP/s, relative to the median GPU of the same architecture and kind of memory in the catalogue.

    One architecture may have two dies, made in two processes: with stacked memory (HBM) for data centres, without for
    the rest (Blackwell's B200 and RTX 5090, Ampere's A100 and RTX 3090). Boards of one die need about the same energy
    for a FLOP at full clock; one with a lower limit per peak FLOP/s, such as a 70 W inference card or a "Max-Q" part,
    cannot hold the boost clock that its peak is computed from. One for CPUs and for dies with a single entry.
    """
    own = _watts_per_flop(device)
    if device.kind is not DeviceKind.GPU or own is None:
        return 1.0
    usual = _usual_watts_per_flop(_die(device))
    return 1.0 if usual is None else own / usual


def sustained_clock_share(device: Device) -> float:
    """Share of the boost clock that compute-bound work sustains: min(1, power share)^0.8."""
    share: float = min(1.0, power_share(device)) ** POWER_EXPONENT
    return share


def same_die(device: Device) -> tuple[str, ...]:
    """Names of the other boards that compute like a device: units of one architecture, their number, clock and power.

    Those with the most similar bandwidth come first.

    >>> from forerun.question.devices.catalogue import find_device
    >>> same_die(find_device("h200-sxm"))
    ('gh200-144gb', 'gh200', 'h100-sxm', 'h800-sxm')
    """
    boards = (board for board in devices_of_architecture(device.architecture) if board.kind is DeviceKind.GPU)
    found = [
        board for board in boards if _computing(board) == _computing(device) and board.name != device.name
    ]
    own = device.memory_bandwidth_bytes_per_s
    found.sort(key=lambda board: (abs(math.log(board.memory_bandwidth_bytes_per_s / own)), board.name))
    return tuple(board.name for board in found)


def outdoes(device: Device, other: Device) -> bool:
    """True if another device of the vendor has no more of anything that a step in half or single precision uses.

    >>> from forerun.question.devices.catalogue import find_device
    >>> outdoes(find_device("h200-sxm"), find_device("h100-nvl"))
    True
    """
    peaks = (
        (device.peak_flops_per_s.get(kind, 0.0), peak)
        for kind, peak in other.peak_flops_per_s.items()
        if kind is not NumberFormat.FP64
    )
    figures = (
        "memory_bandwidth_bytes_per_s",
        "l2_cache_bytes",
        "num_compute_units",
        "power_limit_w",
    )
    pairs = (*peaks, *((getattr(device, name), getattr(other, name)) for name in figures))
    # Datasheets round.
    return device.vendor == other.vendor and all(1.001 * own >= theirs for own, theirs in pairs)


def _computing(device: Device) -> tuple[object, ...]:
    return (*_die(device), device.num_compute_units, device.boost_clock_hz, device.power_limit_w)


def _die(device: Device) -> tuple[str, str, bool]:
    return device.vendor, device.architecture, device.has_stacked_memory


def _watts_per_flop(device: Device) -> float | None:
    peak = device.peak_flops_per_s.get(NumberFormat.FP32)
    return device.power_limit_w / peak if peak and device.power_limit_w else None


@cache
def _usual_watts_per_flop(die: tuple[str, str, bool]) -> float | None:
    """The median over the boards of a die; None where none has both figures."""
    boards = [board for board in devices_of_architecture(die[1]) if board.kind is DeviceKind.GPU]
    values = sorted(value for board in boards if _die(board) == die and (value := _watts_per_flop(board)))
    middle = len(values) // 2
    # By hand, for ``statistics`` takes 6 ms to load.
    return (values[middle] + values[~middle]) / 2 if values else None


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
    if found:
        names = ", ".join(device.name for device in found)
        raise UnknownDeviceError(f"'{name}' matches more than one device; name one of: {names}")
    raise UnknownDeviceError(_none_message(name))


_SLICE = re.compile(r"\bmig\b|\b\dg\.\d+gb\b", re.IGNORECASE)
"""A part of a GPU, such as 3g.20gb."""


def _none_message(name: str) -> str:
    if _SLICE.search(name):
        return (
            f"'{name}' is a part of a GPU (MIG), which the catalogue does not list; write its cores, memory, bandwidth "
            "and peaks into a TOML file and give that (docs/hardware.md)"
        )
    if "," in name:
        return f"expected one device, got '{name}'; name one, or compare several with 'forerun plan'"
    near = near_matches(normalise_name(name), load_catalog()) or "; 'forerun hardware list' shows all names"
    return f"expected a device of the catalogue, a hardware file or 'here', got '{name}'{near}"


def this_device() -> Device:
    """The first GPU a CUDA program would see on this machine; without a GPU, its CPU."""
    from forerun.question.devices.here import visible_gpus

    return device_at(0 if visible_gpus() else None)


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
        raise UsageError(
            f"expected one of this machine's {len(gpus)} GPUs, got cuda:{gpu_index}; 'forerun hardware here' lists them"
        )
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
