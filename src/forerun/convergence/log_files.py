"""Logs that trainers write by themselves, as columns of numbers.

    trainer_state.json      Trainer of Hugging Face: its log history, one row an entry
    *.log, *.txt            training scripts of the nanoGPT family:

        step:125/1390 val_loss:5.9012 train_time:22981ms step_avg:183.85ms      modded-nanogpt
        s:250 tel:6.1557                                                        llm.c (tel and trl: test and train loss)
        250 val 5.9650                                                          build-nanogpt

Rows at step 0 of the latter say what an untrained model does, and are left out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.convergence.curve import Floats
from forerun.errors import RecordError

__all__ = ["TRAINER_STATE", "LogColumns", "is_text_log", "read_text_log", "read_trainer_state"]

TRAINER_STATE = "trainer_state.json"

_NOT_METRICS = re.compile(r"runtime|per_second|flos|tokens_seen|grad_norm|memory")
_STEP = r"(?:step|s):(?P<step>\d+)(?:/(?P<last>\d+))?\s"
_NAMED_VALUE = re.compile(
    r"(?P<name>[a-z_]+)\s*:\s*(?P<value>[-+.\deE]+|nan|inf)(?P<unit>ms)?", re.IGNORECASE
)
_PLAIN = re.compile(r"(?P<step>\d+) (?P<name>val|train|hella) (?P<value>[-+.\deE]+|nan)\s*")
_NAMES = {"tel": "val_loss", "trl": "train_loss", "val": "val_loss", "train": "train_loss", "eval": "hella"}
_HEAD_BYTES = 1_000_000
_FEWEST_LINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LogColumns:
    """Columns of a log.

    Attributes:
        columns: Numbers by name, NaN where a row has none, (rows,) each.
        planned_end: Length that the run was set up for, in ``planned_unit``; None where the log does not say.
        planned_unit: "epoch" or "step".
    """

    columns: dict[str, Floats]
    planned_end: float | None = None
    planned_unit: str = "epoch"


def read_trainer_state(file: Path) -> LogColumns:
    """The log history of a ``trainer_state.json``.

    Raises:
        RecordError: The file cannot be read, or has no log history.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        history = [row for row in document["log_history"] if "step" in row]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{file}: expected the state of a Hugging Face Trainer with its 'log_history', got "
            f"{type(error).__name__}: {error}"
        ) from error
    if not history:
        raise RecordError(
            f"{file}: the log history is empty; set logging_steps or evaluate in the course of the run"
        )
    columns = _as_columns([{k: v for k, v in row.items() if not _NOT_METRICS.search(k)} for row in history])
    last = history[-1]
    steps, end = document.get("max_steps"), None
    has_epochs = "epoch" in columns and bool(np.all(np.isfinite(columns["epoch"])))
    if isinstance(steps, (int, float)) and steps > 0 and last["step"] > 0:
        end = float(steps) * (float(last["epoch"]) / float(last["step"]) if has_epochs else 1.0)
    return LogColumns(columns=columns, planned_end=end, planned_unit="epoch" if has_epochs else "step")


def is_text_log(file: Path) -> bool:
    """True if a text file has lines of one of the known forms."""
    if file.suffix not in (".log", ".txt"):
        return False
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return False
    return len(_rows(head)[0]) >= _FEWEST_LINES


def read_text_log(file: Path) -> LogColumns:
    """The losses in a log of a script of the nanoGPT family.

    Raises:
        RecordError: The file cannot be read, or has no such line.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RecordError(f"{file}: the log cannot be read: {error.strerror or error}") from error
    rows, last = _rows(text)
    if not rows:
        raise RecordError(
            f"{file}: expected lines such as 'step:125/1390 val_loss:5.9', 's:250 tel:6.1' or '250 val 5.9', got none; "
            "write the curve as a CSV with the columns step and val_loss"
        )
    return LogColumns(columns=_as_columns(rows), planned_end=last, planned_unit="step")


def _rows(text: str) -> tuple[list[dict[str, Any]], float | None]:
    """Rows of the lines that hold a loss, and the last step that they name."""
    rows, last = [], None
    for line in text.splitlines():
        plain = _PLAIN.fullmatch(line)
        named = None if plain else re.match(_STEP, line)
        if plain:
            found: dict[str, Any] = {_NAMES.get(plain["name"], plain["name"]): float(plain["value"])}
        elif named:
            found = _named_values(line[named.end() :])
            last = float(named["last"]) if named["last"] else last
        else:
            continue
        step = int((plain or named)["step"])  # type: ignore[index]  # one of them matched
        if step > 0 and found:
            rows.append({"step": step, **found})
    return rows, last


def _named_values(text: str) -> dict[str, float]:
    found = {}
    for match in _NAMED_VALUE.finditer(text):
        name = _NAMES.get(match["name"].lower(), match["name"].lower())
        if name == "train_time" and match["unit"]:
            found["elapsed_s"] = float(match["value"]) / 1000
        elif name in ("val_loss", "train_loss", "lr", "hella"):
            found[name] = float(match["value"])
    return found if any(name not in ("lr", "elapsed_s") for name in found) else {}


def _as_columns(rows: list[dict[str, Any]]) -> dict[str, Floats]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.asarray([_number(row.get(name)) for row in rows], dtype=float) for name in names}
    return {name: column for name, column in columns.items() if np.isfinite(column).any()}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float("nan")
    return float(value)
