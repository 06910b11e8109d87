"""Measured steps of stores and files, those in formats of other programs among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.base.errors import RecordError, UsageError
from forerun.base.plugins import plugin, plugin_names
from forerun.evidence.records.files import import_measurements
from forerun.evidence.records.measurement import JobKind, Measurement
from forerun.evidence.records.record_store import RecordStore, is_store
from forerun.evidence.records.step_record import StepRecord, step_records
from forerun.question.devices.device import Device

__all__ = [
    "FORMATS",
    "RecordFormat",
    "format_of",
    "read_all",
    "read_measured_steps",
    "read_steps",
    "record_format",
]

FORMATS = "forerun.record_formats"
"""Entry points of formats of files that another program fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """A format of files that another program fixed.

    Attributes:
        write: Writes the measurements that have a row there; returns their number.
        is_file: True if a file has this format.
        read: The measurements of a file on a device; None where files are only written.
        is_of_epochs: True if a row is the time of an epoch.
    """

    write: Callable[[Iterable[Measurement], Path], int]
    is_file: Callable[[Path], bool] = lambda _: False
    read: Callable[[Path, Device | None], Iterable[Measurement]] | None = None
    is_of_epochs: bool = False


def record_format(kind: str) -> RecordFormat:
    """The format of a name.

    Raises:
        UsageError: No installed package has it.
    """
    found: RecordFormat | None = plugin(FORMATS, kind)
    if found is None:
        raise UsageError(
            f"unknown format {kind!r}; expected one of {', '.join(plugin_names(FORMATS)) or 'none'}"
        )
    return found


def format_of(name: str | Path) -> RecordFormat | None:
    """The format of another program that a file has; None for a store and for forerun's own formats."""
    if is_store(name):
        return None
    return next((one for one in map(record_format, plugin_names(FORMATS)) if one.is_file(Path(name))), None)


def read_all(
    names: Sequence[str | Path], device: Device | None, kind: JobKind | None = None
) -> Iterator[Measurement]:
    """Measurements of all files and stores, one after the other.

    Args:
        names: Files, or SQLAlchemy URLs.
        device: Device of the rows of a format that does not name it.
        kind: Only kind to read, where the source can choose.

    Raises:
        RecordError: A source is missing, damaged, of another version, or holds impossible values.
        UsageError: A file of a format that does not name its device is given without one.
    """
    for name in names:
        if is_store(name):
            with RecordStore.open(name, create=False) as store:
                yield from store.measurements(kind=kind)
        elif (found := format_of(name)) is not None and found.read is not None:
            yield from found.read(Path(name), device)
        else:
            yield from import_measurements(name)


def read_measured_steps(names: Sequence[str | Path], device: Device | None = None) -> list[StepRecord]:
    """Finished steps of whole models of all files and stores.

    Raises:
        RecordError: A source cannot be used, or none of them holds a step.
    """
    found = list(step_records(read_all(names, device)))
    if not found:
        raise RecordError(
            "expected finished steps of whole models among the records, got none; "
            "measure some with: forerun measure grid, or fit layers with --model layers"
        )
    return found


def read_steps(path_or_url: str | Path) -> list[StepRecord]:
    """Measured steps of a store, or of a ``.csv`` or ``.parquet`` file.

    Raises:
        RecordError: The store or file is missing, damaged, of another version, or holds impossible values.
    """
    if is_store(path_or_url):
        with RecordStore.open(path_or_url, create=False) as store:
            return list(step_records(store.measurements()))
    return list(step_records(import_measurements(path_or_url)))
