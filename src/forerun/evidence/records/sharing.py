"""Measured against predicted steps without anything that tells who measured them: the file of ``records share``.

A row holds the names of a public model and of a catalogued device, the settings, the times and the month. Models of
one's own, paths, hosts, users, days and telemetry never leave the store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.base.errors import ForerunError, RecordError
from forerun.base.kept import write_whole, writes
from forerun.evidence.records.measurement import Measurement, Outcome
from forerun.question.devices import load_catalog
from forerun.question.run import Run
from forerun.search.predict import predict

SHARED_FORMAT = 1
"""Version of the file; docs/board.md describes it."""

_OWN = re.compile(r"[/\\]|\.(py|json|onnx|keras|forerun)\b|^(hf|onnx|capture|mlpredict):")
"""Names of models that hold a path or a name of one's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRow:
    """One measured step beside its prediction.

    Attributes:
        model, device: Public names of the catalogue.
        num_devices: Number of devices.
        batch_size: Batch size of one device.
        precision, layout, optimizer: Settings of the step.
        framework: Framework and its version, such as "pytorch 2.9".
        month: Month of the measurement.
        measured_s: Median of the measured steps [s].
        predicted_s, low_s, high_s: The prediction with its 90 % interval [s].
    """

    model: str
    device: str
    num_devices: int
    batch_size: int
    precision: str
    layout: str
    optimizer: str
    framework: str
    month: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float


def shared_rows(records: Iterable[Measurement]) -> list[SharedRow]:
    """The rows of finished, stable measurements of public models on catalogued devices."""
    found = (
        _row(record) for record in records if record.outcome is Outcome.DONE and record.summary is not None
    )
    return [row for row in found if row is not None]


def _row(record: Measurement) -> SharedRow | None:
    run = record.run
    if run is None or not _is_public(run) or record.summary is None or not record.summary.is_stable:
        return None
    try:
        step = predict(run).step_time_s
    except ForerunError:
        return None
    around = record.circumstances
    version = ".".join(around.framework_version.split(".")[:2])
    return SharedRow(
        model=str(run.model.model),
        device=run.cluster.device.name,
        num_devices=run.cluster.num_devices,
        batch_size=run.setup.batch_size_per_device,
        precision=str(run.setup.precision),
        layout=str(run.setup.layout),
        optimizer=run.setup.optimizer,
        framework=f"{around.framework} {version}".strip(),
        month=around.started_at[:7],
        # Four digits say all that a time can, and do not tell one run from all others.
        measured_s=float(f"{record.summary.median_s:.4g}"),
        predicted_s=float(f"{step.value:.4g}"),
        low_s=float(f"{step.low:.4g}"),
        high_s=float(f"{step.high:.4g}"),
    )


def _is_public(run: Run) -> bool:
    model = run.model.model
    return isinstance(model, str) and not _OWN.search(model) and run.cluster.device.name in load_catalog()


def write_shared(rows: Iterable[SharedRow], file: Path) -> None:
    """Writes rows as JSON, one a line.

    Raises:
        RecordError: The file cannot be written.
    """
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    with writes(file, RecordError):
        write_whole(file, f'{{"format": {SHARED_FORMAT}, "rows": [\n{lines}\n]}}\n'.encode())


def read_shared(file: Path) -> list[SharedRow]:
    """The rows of a file.

    Raises:
        RecordError: The file is no such file, or a row has other fields.
    """
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
        if document["format"] != SHARED_FORMAT:
            raise ValueError(f"format {document['format']} instead of {SHARED_FORMAT}")
        return [SharedRow(**row) for row in document["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"expected a file of 'forerun records share' at '{file}', got: {error}; make it again"
        ) from error
