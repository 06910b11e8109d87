"""The devices shipped with the package, and a search for them by the words of a name.

Beside them: the share of its boost clock that a board can sustain under its power limit.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from forerun.base.errors import CatalogError
from forerun.question.devices.device import Device, DeviceKind, NumberFormat, device_of

# Words that drivers and people add or leave out at will; none of them tells two devices apart.
_FILLER_WORDS = frozenset({"nvidia", "geforce", "tesla", "gpu", "amd", "instinct", "1x"})
_WATTAGE = re.compile(r"\(\s*\d+\s*w\s*\)")
_WORD = re.compile(r"[a-z0-9]+")


def name_tokens(name: str) -> tuple[str, ...]:
    """The words of a name that matter, in lower case.

    Vendor words and a power limit in parentheses are left out:

    >>> name_tokens("NVIDIA A100-SXM4-40GB (400W)")
    ('a100', 'sxm4', '40gb')
    """
    words = _WORD.findall(_WATTAGE.sub(" ", name.lower()))
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
    """Catalogue names by the key of every spelling; two devices that share one are an error."""
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

    One device alone must have no further word that tells it apart: an RTX 2080 Max-Q is not the RTX 2080 Super Max-Q.
    """
    catalogue = _catalogue()
    exact = name if name in catalogue else _names_by_key().get(name_key(name))
    if exact is not None:
        return (catalogue[exact],)
    words = frozenset(name_tokens(name))
    found = {
        known: lacking
        for known, spellings in _words_of_names().items()
        if words and (lacking := [spelling - words for spelling in spellings if words <= spelling])
    }
    lacked = [each for lacking in found.values() for each in lacking]
    if len(found) == 1 and not any(all(map(_MAY_LACK.fullmatch, each)) for each in lacked):
        return ()
    return tuple(catalogue[known] for known in found)


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

    >>> from forerun.question.devices.finder import find_device
    >>> same_die(find_device("h200-sxm"))
    ('gh200', 'gh200-144gb', 'h100-sxm')
    """
    boards = (board for board in devices_of_architecture(device.architecture) if board.kind is DeviceKind.GPU)
    names = sorted(board.name for board in boards if _computing(board) == _computing(device))
    return tuple(name for name in names if name != device.name)


def _computing(device: Device) -> tuple[object, ...]:
    return (*_die(device), device.num_compute_units, device.boost_clock_hz, device.power_limit_w)


def _die(device: Device) -> tuple[str, str, bool]:
    return device.vendor, device.architecture, device.memory_type.startswith("HBM")


def _watts_per_flop(device: Device) -> float | None:
    peak = device.peak_flops_per_s.get(NumberFormat.FP32)
    return device.power_limit_w / peak if peak and device.power_limit_w else None


@cache
def _usual_watts_per_flop(die: tuple[str, str, bool]) -> float | None:
    """The median over the boards of a die; None where none has both figures."""
    boards = [board for board in devices_of_architecture(die[1]) if board.kind is DeviceKind.GPU]
    values = sorted(value for board in boards if _die(board) == die and (value := _watts_per_flop(board)))
    middle = len(values) // 2
    return (values[middle] + values[~middle]) / 2 if values else None
