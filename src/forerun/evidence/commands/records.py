"""``forerun records list | show KEY | check | import FILE | export FILE | share FILE``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.base.errors import UsageError
from forerun.surface.cli.settings import RecordsOption
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.evidence.records.measurement import Measurement

_PAGES = "forerun.evidence.pages.measurement_page"

DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Only records of this device, such as rtx-3090.")
]
FamilyOption = Annotated[
    str | None, typer.Option("--family", help="Only records of this model family, such as cnn.")
]

_COUNTED = ("device", "kind", "family", "occasion", "outcome")


def _listed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Records of a store, or their numbers by group, as plain data."""
    from forerun.evidence.records.measurement import measurement_document

    if "records" in found:
        return {**found, "records": [measurement_document(record) for record in found["records"]]}
    groups = (dict(zip(_COUNTED, of, strict=True)) | {"num_records": n} for of, n in found["groups"])
    return {**found, "groups": list(groups)}


def _list_page(found: Mapping[str, Any]) -> Any:
    from forerun.evidence.pages.measurement_page import counts_table, records_table

    if "records" in found:
        return records_table(found["records"])
    return counts_table(found["store"], _COUNTED, found["groups"])


def _tell_of_more(found: Mapping[str, Any]) -> None:
    num_shown = len(found.get("records", ()))
    if num_shown < found.get("num_records", 0):
        shown = f"the first {num_shown} of {found['num_records']}"
        typer.echo(f"{shown}; --limit shows more, export writes all", err=True)


@verb(page=_list_page, as_dict=_listed, after=_tell_of_more)
def list_records(
    store: RecordsOption = None,
    device: DeviceOption = None,
    family: FamilyOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of records to list.")] = 100,
) -> dict[str, Any]:
    """Count the measurements of each kind; with --device or --family, list them."""
    from forerun.evidence.records.record_store import RecordStore

    with RecordStore.open(store, create=False) as opened:
        if device is None and family is None:
            return {"store": opened.name, "groups": opened.counts(*_COUNTED)}
        found = list(islice(opened.measurements(device=device, family=family), limit))
        count = opened.count(device=device, family=family)
        return {"store": opened.name, "num_records": count, "records": found}


@verb(page=f"{_PAGES}:record_page", as_dict="forerun.evidence.records.measurement:measurement_document")
def show_record(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of a record, or the beginning of it.")],
    store: RecordsOption = None,
) -> Measurement:
    """Show one record whole: repetitions, results and circumstances."""
    from forerun.evidence.records.record_store import RecordStore

    with RecordStore.open(store, create=False) as opened:
        return opened.find(key)


def _check_page(found: Mapping[str, Any]) -> str:
    whole = f"{found['store']}: {found['num_records']} records, all as they were written"
    return "\n".join(found["damage"]) or whole


def _fail_if_damaged(found: Mapping[str, Any]) -> None:
    if found["damage"]:
        raise typer.Exit(1)


@verb(page=_check_page, as_dict=dict, after=_fail_if_damaged)
def check_records(store: RecordsOption = None) -> dict[str, Any]:
    """Read every record of the store and tell which are damaged; exit status 1 if any is."""
    from forerun.evidence.records.record_store import RecordStore

    with RecordStore.open(store, create=False) as opened:
        damage = opened.check()
        return {"store": opened.name, "num_records": opened.count(), "damage": list(damage)}


@verb(
    page=lambda found: (
        f"{found['num_written']} measurements written to {found['store']}, "
        f"{found['num_read'] - found['num_written']} were there already"
    ),
    as_dict=dict,
)
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .csv or .parquet file of measurements.")],
    store: RecordsOption = None,
    cnn_grid: Annotated[
        bool, typer.Option("--cnn-grid", help="Read a CSV with the columns of the CNN grid; needs --on.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            "--on",
            "--device",
            metavar="DEVICE",
            help="With --cnn-grid: device that FILE was measured on, as in predict --on.",
        ),
    ] = None,
) -> dict[str, Any]:
    """Add the measurements of a file to the store; measurements that it has already stay as they are."""
    from forerun.evidence.records.record_store import RecordStore

    if cnn_grid != (device is not None):
        raise UsageError(
            "--cnn-grid and --on belong together: a CSV of the CNN grid does not name its device, other files do"
        )
    with RecordStore.open(store) as opened:
        numbers = count()
        # The numbers come second: none is taken for a measurement that there is not.
        found = (measurement for measurement, _ in zip(_measurements_of(file, device), numbers, strict=False))
        num_written = opened.add_many(found)
        return {"store": opened.name, "num_written": num_written, "num_read": next(numbers)}


def _measurements_of(file: Path, device: str | None) -> Iterable[Measurement]:
    from forerun.evidence.records.reading import import_measurements
    from forerun.question.devices import find_device

    if device is None:
        return import_measurements(file)
    from forerun.evidence.records.reading import record_format

    read = record_format("cnn-grid").read
    assert read is not None
    return read(file, find_device(device))


@verb(
    page=lambda found: f"{found['num_written']} measurements from {found['store']} to {found['file']}",
    as_dict=dict,
)
def export_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .csv or .parquet file to write.")],
    store: RecordsOption = None,
    device: DeviceOption = None,
    family: FamilyOption = None,
    cnn_grid: Annotated[
        bool,
        typer.Option(
            "--cnn-grid", help="Write a CSV with the columns of the CNN grid, one row per trained CNN."
        ),
    ] = False,
) -> dict[str, Any]:
    """Write the measurements of the store to a file."""
    from forerun.evidence.records.reading import export_measurements, record_format
    from forerun.evidence.records.record_store import RecordStore

    write = record_format("cnn-grid").write if cnn_grid else export_measurements
    with RecordStore.open(store, create=False) as opened:
        num_written = write(opened.measurements(device=device, family=family), file)
        return {"store": opened.name, "file": str(file), "num_written": num_written}


@verb(
    page=lambda found: f"{found['num_rows']} rows in {found['file']}: read it, then attach it to an issue",
    as_dict=dict,
)
def share_records(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .json file to write.")],
    store: RecordsOption = None,
    device: DeviceOption = None,
) -> dict[str, Any]:
    """Write measured against predicted steps without paths and names; nothing is sent."""
    from forerun.evidence.records.record_store import RecordStore
    from forerun.evidence.records.sharing import shared_rows, write_shared

    with RecordStore.open(store, create=False) as opened:
        rows = shared_rows(opened.measurements(device=device))
    if not rows:
        raise UsageError(
            "expected stable measured steps of public models on catalogued devices, got none; make some with: "
            "forerun measure model torchvision:resnet18 --batch-sizes 8,32"
        )
    write_shared(rows, file)
    return {"file": str(file), "num_rows": len(rows)}


records = Verbs(
    "List, show, check, import, export and share the measurements in the record store.",
    {
        "list": list_records,
        "show": show_record,
        "check": check_records,
        "import": import_file,
        "export": export_file,
        "share": share_records,
    },
)
