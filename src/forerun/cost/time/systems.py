"""Measuring systems, the offsets of their steps, and the order of datasheets that offsets of boards keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.kept import Kept
from forerun.cost.time.features import (
    NEWEST_ERA,
    Point,
    half_format,
    multiplies_half,
    product_rate,
    software_era,
    sustained_share,
)
from forerun.cost.time.law import NUM_LATENTS
from forerun.question.devices.catalogue import devices_of_architecture, load_catalog, outdoes, same_die
from forerun.question.devices.device import Device
from forerun.question.setup import Precision, TrainingSetup

Floats64 = npt.NDArray[np.float64]

FARTHEST_SYSTEM = 4.0
"""Distance on a calibrated device beyond which a system's offsets say nothing."""

FARTHEST_MACHINE = 0.2
"""The same for another machine with the device, of the point's release: less than that of two releases of PyTorch."""

_NUM_KEY_PARTS = 7
_KIN_PRIOR = 0.5
"""Boards that the prior of an unmeasured device's offsets counts as: variance within kinds of boards over between."""
_LOST_BANDWIDTH = 0.5
"""Part of the log of a die's further bandwidth that its streams lose: from A100 40 to 80 GB and H100 to GH200, of one
release each, offsets of traffic rise by 0.51 to 0.92 of it. The larger board from the smaller, training of
``gpu_benchmarks``: 12.7 to 6.5 and 11.8 to 3.8 % in AMP, 11.3 to 7.3 and 7.8 to 0.8 % in TF32."""
_OF_DEVICE = slice(0, 2)
"""Offsets of compute and memory; those of the host and of the loop follow."""
_SWEEPS, _LEAST_EXCESS = 200, 1e-7
"""Most rounds in which boards that contradict their order meet, and the contradiction that may be left."""
_IN_ORDER: Kept[Mapping[str, Floats64]] = Kept(256)


@dataclass(frozen=True, slots=True)
class _System:
    """A measuring system, as far as its offsets may hold for another on the same device."""

    device: str
    precision: Precision
    layout: str
    compiler: str
    era: float
    phase: str


def system_distance(wanted: _System, known: _System) -> float:
    """Distance of two systems of a device: the sum of what each difference counts.

    Phase counts 3, half precision or not 2, compiler 2, layout 1, autocast or not 1, and 6 times the difference of the
    software's era.
    """
    return (
        3.0 * (wanted.phase != known.phase)
        + 2.0 * (wanted.precision.is_half != known.precision.is_half)
        + 2.0 * (wanted.compiler != known.compiler)
        + 1.0 * (wanted.layout != known.layout)
        + 1.0 * (wanted.precision.is_autocast != known.precision.is_autocast)
        + 6.0 * abs(wanted.era - known.era)
    )


def _asked_system(point: Point) -> _System:
    setup, precision = point.setup, point.setup.precision
    # Boards compute a format that they lack as fp32.
    lacks = precision.is_half and half_format(precision) not in point.device.peak_flops_per_s
    return _System(
        point.device.name,
        Precision.FP32 if lacks else precision,
        str(setup.layout),
        "compiled" if setup.compile else "eager",
        point.era,
        str(setup.phase),
    )


@cache
def parsed_systems(keys: tuple[str, ...]) -> Mapping[str, Mapping[int, _System]]:
    """The systems of each device by their places; a key that is none of ``system_key`` is left out."""
    found: dict[str, dict[int, _System]] = {}
    for index, key in enumerate(keys):
        parts = key.split("|")
        if len(parts) == _NUM_KEY_PARTS:
            _, device, precision, layout, compiler, version, phase = parts
            era = software_era(version) if version else NEWEST_ERA
            system = _System(device, Precision(precision), layout, compiler, era, phase)
            found.setdefault(device, {})[index] = system
    return found


def system_key(
    source: str, device: str, precision: str, layout: str, compiler: str, version: str, phase: str
) -> str:
    """Key of a measuring system: who measured, on what, how."""
    return "|".join((source, device, precision, layout, compiler, version, phase))


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOffsets(ABC):
    """Offsets of measuring systems, and what they say about others; fields as in ``CostModel``, which has them."""

    networks: tuple[Any, ...]
    systems: tuple[str, ...]

    @property
    @abstractmethod
    def is_of_one_machine(self) -> bool:
        """True if they were fitted to one machine, whose name is written last."""

    def offsets_of_point(self, point: Point) -> Floats64:
        """Log offsets of compute, memory, host and loop that measuring systems like a point's have, (members, 4).

        Phase, number format, compiler, layout and version of the software decide what is alike (``system_distance``).
        Those of other machines hold for equal settings alone, their mean where several are alike, of compute and memory
        alone: of the point's release, or of all where none has it, since releases differ less than machines. Boards
        of one die speak for each other where nobody measured one of them so. A board that nobody measured has

            z = n / (n + 1/2) * mean of the offsets of its n kin,

        the measured boards of its architecture, and of its kind of memory for the offset of traffic: a prior around
        zero, from which kinds of boards differ twice as much as boards of a kind. Where a board outdoes another, the
        rates s e^(-z) that it reaches of its peak and bandwidth s are no smaller: measured boards that say otherwise
        meet half-way, and one that nobody measured yields. Half precision has no larger ones than single where kin were
        measured in it. Those of a calibration are the machine's, and the nearest one holds.

        Evidence: devices left out of the fit, 32 groups of steps: 17.8 to 17.2 %; sources, 58 groups: 18.2 %.
        """
        wanted, device = _asked_system(point), point.device
        found: Floats64 = np.zeros((len(self.networks), NUM_LATENTS))
        if self.is_of_one_machine:
            own = self._offsets_of_system(wanted)
            return found if own is None else own
        settings = replace(wanted, device=device.architecture)
        measured = self._measured(settings)
        for name in (device.name, *same_die(device)):
            if name in measured:
                return measured[name]
        boards = [board for board in devices_of_architecture(device.architecture) if board.name in measured]
        known = [board for board in boards if board.name in parsed_systems(self.systems)]
        # Boards with other memory compute alike, but say nothing of its bandwidth: B200's streams are half as quick as
        # its datasheet promises.
        like = [board for board in known if board.has_stacked_memory is device.has_stacked_memory]
        for column, kin in enumerate((known, like)):
            found[:, column] = sum(measured[board.name][:, column] for board in kin) / (len(kin) + _KIN_PRIOR)
        single = self._measured(replace(settings, precision=Precision.FP32))
        is_bounded = any(board.name in single for board in like)  # zeros of kin without a row bound nothing
        if is_bounded and wanted.precision.is_half and multiplies_half(device, wanted.precision):
            # Half precision is never slower; kin measured in one of the two formats alone may say otherwise.
            asked = point.setup
            setup = TrainingSetup(
                batch_size_per_device=1, layout=asked.layout, compile=asked.compile, phase=asked.phase
            )
            theirs = self.offsets_of_point(replace(point, setup=setup, known_as=None))
            found[:, _OF_DEVICE] = np.minimum(found, theirs)[:, _OF_DEVICE]
        for board in boards:
            own, precision = measured[board.name], wanted.precision
            found[:, _OF_DEVICE] -= _excess(found, own, _gained(device, board, precision))
            found[:, _OF_DEVICE] += _excess(own, found, _gained(board, device, precision))
        return found

    def knows_settings(self, point: Point) -> bool:
        """True if a machine with the point's settings was measured on its device or another board of its die."""
        return self._offsets_of_die(_asked_system(point), point.device) is not None

    def knows_die(self, device: Device) -> bool:
        """True if a board of a device's architecture and kind of memory was measured."""
        measured = parsed_systems(self.systems)
        boards = devices_of_architecture(device.architecture)
        return any(b.name in measured and b.has_stacked_memory is device.has_stacked_memory for b in boards)

    def _offsets_of_die(self, wanted: _System, board: Device) -> Floats64 | None:
        """Offsets of a board, or of the one of its die that was measured and has the most similar memory.

        Streams gain the square root of what the board's bandwidth B has over that one's: e^(-z) B ~ B^(1/2).
        """
        names = (board.name, *(() if self.is_of_one_machine else same_die(board)))
        for name in names:
            found = self._offsets_of_system(replace(wanted, device=name))
            if found is not None:
                own, measured = board.memory_bandwidth_bytes_per_s, load_catalog().get(name, board)
                found[:, 1] += _LOST_BANDWIDTH * max(0.0, np.log(own / measured.memory_bandwidth_bytes_per_s))
                return found
        return None

    def _measured(self, settings: _System) -> Mapping[str, Floats64]:
        return _IN_ORDER.get((self,), (settings,), lambda: self._offsets_in_order(settings))

    def _offsets_in_order(self, settings: _System) -> Mapping[str, Floats64]:
        """Offsets of the measured dies of an architecture, which is the device of the settings, by names of boards."""
        boards: dict[str, Device] = {}
        for board in devices_of_architecture(settings.device):
            memory = board.memory_bytes, board.memory_bandwidth_bytes_per_s
            alike = [boards[name] for name in same_die(board) if name in boards]
            # One that differs by its links alone, as an A800 from an A100, would double the other's weight.
            if memory not in [(each.memory_bytes, each.memory_bandwidth_bytes_per_s) for each in alike]:
                boards[board.name] = board
        asked = {name: self._offsets_of_die(settings, board) for name, board in boards.items()}
        found = {name: own for name, own in asked.items() if own is not None}
        asked_of = {
            (better, lesser): _gained(boards[better], boards[lesser], settings.precision)
            for better, lesser in permutations(found, 2)
        }
        gained = {pair: gain for pair, gain in asked_of.items() if np.isfinite(gain).all()}
        for _ in range(_SWEEPS):
            largest = 0.0
            for (better, lesser), gain in gained.items():
                half = 0.5 * _excess(found[better], found[lesser], gain)
                found[better][:, _OF_DEVICE] -= half
                found[lesser][:, _OF_DEVICE] += half
                largest = max(largest, float(half.max()))
            if largest < _LEAST_EXCESS:
                break
        return found

    def _offsets_of_system(self, wanted: _System) -> Floats64 | None:
        known = parsed_systems(self.systems).get(wanted.device, {})
        distances = {index: system_distance(wanted, system) for index, system in known.items()}
        if self.is_of_one_machine:
            chosen = sorted(distances, key=lambda i: distances[i])[:1]
            chosen = [index for index in chosen if distances[index] <= FARTHEST_SYSTEM]
        else:
            equal = [i for i in known if system_distance(wanted, replace(known[i], era=wanted.era)) == 0]
            chosen = [index for index in equal if distances[index] <= FARTHEST_MACHINE] or equal
        if not chosen:
            return None
        latents = np.stack([network.latents[chosen] for network in self.networks], axis=1)
        found: Floats64 = latents.astype(np.float64).mean(axis=0)
        if not self.is_of_one_machine:
            # Host and loop are those of who measured: one laptop with an RTX 2060 Max-Q loses 4 ms in every step.
            found[:, _OF_DEVICE.stop :] = 0.0
        return found


def _gained(board: Device, other: Device, precision: Precision) -> Floats64:
    """Log of the peak and bandwidth of a board over those of another, infinite unless it outdoes that one, (2,)."""
    if not outdoes(board, other):
        return np.full(2, np.inf)
    peak, theirs = (
        product_rate(each, precision) * sustained_share(each, precision) for each in (board, other)
    )
    bandwidth = board.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s
    return np.log([peak / theirs, bandwidth])


def _excess(offsets: Floats64, theirs: Floats64, gained: Floats64) -> Floats64:
    """Logs by which offsets undo more than a board gains over another, (2,)."""
    found: Floats64 = np.maximum((offsets - theirs)[:, _OF_DEVICE].mean(axis=0) - gained, 0.0)
    return found
