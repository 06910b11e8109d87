"""Reads the records that the hooks wrote, and writes files of answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import FailureError
from forerun.base.kept import write_whole, writes
from forerun.script.profiling.step_hooks import LoaderSpan

Floats = npt.NDArray[np.float64]
Spans = np.recarray[Any, Any]
"""Stretches of time with the fields of ``LoaderSpan``, (n,)."""

_SPAN = np.dtype([(each.name, float) for each in fields(LoaderSpan)])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One watched process.

    Attributes:
        pid: Number of the process.
        rank: Rank in a distributed job; None outside such a job.
        begin_s: Time at which the hooks were installed, monotonic clock [s].
        was_stopped: True if the hooks stopped it after the requested steps.
        steps: Training steps.
        rest: Stretches without training.
        thread: Clock, processor time of the training thread and its wait for a free core so far (-1 if that is not
            known), (n, 3) [s].
        own: Begin and end of the times that the hooks took, (n, 2) [s].
        loaders: Data loaders in the order of their first use.
        optimizers: Optimizers in the order of their first step.
        options: Arguments that the script's parsers know: ``flags``, ``name``, ``value``.
        hooks: Changes made by hooks: ``knob``, ``what``.
        device_peak_bytes: Peak memory of the process on its own CUDA device; None without such a device [bytes].
        device_whole_bytes: All memory of that device [bytes].
        job: ``num_steps``, ``num_epochs`` and ``steps_per_epoch`` of a framework's trainer; empty without one.
        batch_shapes: Shapes of the tensors of the first batch.
    """

    pid: int
    rank: int | None
    begin_s: float
    was_stopped: bool
    steps: Spans
    rest: Spans
    thread: Floats
    own: Floats
    loaders: tuple[dict[str, Any], ...]
    optimizers: tuple[dict[str, Any], ...]
    options: tuple[dict[str, Any], ...]
    hooks: tuple[dict[str, Any], ...]
    device_peak_bytes: int | None
    device_whole_bytes: int | None = None
    job: dict[str, Any] = field(default_factory=dict)
    batch_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def traced_steps(self) -> Floats:
        """Begin and end of the steps that were traced, (n, 2) [s]."""
        traced = self.steps[self.steps.is_traced > 0]
        return np.stack([traced.begin_s, traced.end_s], axis=1)


def read_processes(folder: Path) -> tuple[ProcessRecord, ...]:
    """All watched processes of a run, in order of their start."""
    found = (_read_process(path) for path in folder.glob("process-*.jsonl"))
    return tuple(sorted((each for each in found if each is not None), key=lambda process: process.begin_s))


def training_process(processes: tuple[ProcessRecord, ...]) -> ProcessRecord | None:
    """The process whose steps represent the run: the lowest rank that trains, else the process with most steps."""
    training = [process for process in processes if len(process.steps)]
    return min(training, key=lambda process: (process.rank or 0, -len(process.steps)), default=None)


def _read_process(path: Path) -> ProcessRecord | None:
    """One process, without a last line that its death cut off; None if that was its first line."""
    records: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            records.setdefault(record["kind"], []).append(record)
    if "process" not in records:
        return None
    start = records["process"][0]
    memory = records.get("device_memory", [{}])[-1]
    return ProcessRecord(
        pid=start["pid"],
        rank=None if start["rank"] is None else int(start["rank"]),
        begin_s=start["time_s"],
        was_stopped="stopped" in records,
        steps=_spans(records.get("steps", [])),
        rest=_spans(records.get("rest", [])),
        thread=_table(records.get("thread", []), 3),
        own=_table(records.get("own", []), 2),
        loaders=tuple(records.get("loader", [])),
        optimizers=tuple(records.get("optimizer", [])),
        options=_options(records),
        hooks=tuple({"knob": record["knob"], "what": record["what"]} for record in records.get("hook", [])),
        device_peak_bytes=memory.get("peak_bytes"),
        device_whole_bytes=memory.get("whole_bytes"),
        job={name: value for name, value in records.get("job", [{}])[0].items() if name != "kind"},
        batch_shapes=tuple(tuple(shape) for shape in records.get("batch", [{"shapes": []}])[0]["shapes"]),
    )


def _options(records: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, Any], ...]:
    """Options of all parsers of the process; values as parsed, or defaults if parsing failed."""
    by_name: dict[str, dict[str, Any]] = {}
    for record in (*records.get("options", []), *records.get("arguments", [])):
        by_name.update({option["name"]: option for option in record["options"]})
    return tuple(by_name.values())


def _spans(records: list[dict[str, Any]]) -> Spans:
    rows = [tuple(row) for record in records for row in record["rows"]]
    return np.array(rows, dtype=_SPAN).view(np.recarray)


def _table(records: list[dict[str, Any]], num_columns: int) -> Floats:
    rows = [row for record in records for row in record["rows"]]
    return np.asarray(rows, dtype=float).reshape(-1, num_columns)


def write_json(path: Path, answer: Mapping[str, Any]) -> None:
    """Writes one JSON object.

    Raises:
        FailureError: The file cannot be written.
    """
    write_text(path, json.dumps(answer, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file, and makes its folder; the file is whole or as it was, also on a full disk.

    Raises:
        FailureError: The file or its folder cannot be written.
    """
    with writes(path, FailureError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
