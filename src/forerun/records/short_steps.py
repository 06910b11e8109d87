"""Steps in a table that a person writes: model, device, batch size and a time or a speed, the rest as far as known.

model,device,batch_size,images_per_s,precision
timm:resnet50,rtx-3090,128,412,amp
timm:vit_base_patch16_224,rtx-3090,64,231,amp
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from forerun.errors import RecordError
from forerun.hardware import find_device
from forerun.records.importers.model_names import subject_family
from forerun.records.measurement import Circumstances, JobKind, Measurement, Outcome, Scalar

__all__ = ["SHORT_COLUMNS", "above_zero", "is_short_table", "read_short_steps", "yes_or_no"]

_NEEDED = ("model", "device", "batch_size")
_TIMES = ("step_time_s", "images_per_s")
_WORDS = ("precision", "phase", "layout", "optimizer")
_WHOLE_NUMBERS = ("image_size", "sequence_length")
SHORT_COLUMNS = (*_NEEDED, *_TIMES, *_WORDS, "compile", *_WHOLE_NUMBERS, "torch_version")
"""Columns such a table may have: the first three and a time or a speed are needed."""

_YES, _NO = ("true", "yes", "1"), ("", "false", "no", "0")
_DEFAULTS: dict[str, Scalar] = {"precision": "fp32", "phase": "train", "layout": "nchw", "optimizer": "sgd"}


def is_short_table(columns: tuple[str, ...]) -> bool:
    """True if a table with these columns is one of steps that a person wrote."""
    return set(_NEEDED) <= set(columns) and "row_id" not in columns and bool(set(_TIMES) & set(columns))


def read_short_steps(path: Path) -> Iterator[Measurement]:
    """Measured steps of a short table; a training step is fp32 with SGD unless a column says otherwise.

    Args:
        path: A ``.csv`` file with some of ``SHORT_COLUMNS``.

    Raises:
        RecordError: A column is unknown, or a cell is damaged or impossible.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        unknown = sorted(set(reader.fieldnames or ()) - set(SHORT_COLUMNS))
        if unknown:
            raise RecordError(
                f"{path.name}: unknown column '{unknown[0]}'; the columns are {', '.join(SHORT_COLUMNS)}"
            )
        for number, row in enumerate(reader, start=1):
            cells = {name: (row.get(name) or "").strip() for name in SHORT_COLUMNS}
            yield _measurement(cells, number, f"{path.name}, row {number}")


def _measurement(cells: Mapping[str, str], number: int, place: str) -> Measurement:
    for name in _NEEDED:
        if not cells[name]:
            raise RecordError(f"{place}: '{name}' is empty; fill it in")
    device = find_device(cells["device"])
    batch_size = int(_positive(cells["batch_size"], "batch_size", place))
    parameters: dict[str, Scalar] = {
        "batch_size": batch_size,
        "compile": yes_or_no(cells["compile"], "compile", place),
    }
    for name in _WORDS:
        parameters[name] = cells[name].lower() or _DEFAULTS[name]
    if parameters["phase"] != "train":
        parameters["optimizer"] = "none"
    for name in _WHOLE_NUMBERS:
        if cells[name]:
            parameters[name] = int(_positive(cells[name], name, place))
    return Measurement(
        key=f"row {number}",
        kind=JobKind.STEP,
        subject=cells["model"],
        family=subject_family(cells["model"]),
        parameters=parameters,
        outcome=Outcome.DONE,
        repetitions_s=(_step_time_s(cells, batch_size, place),),
        circumstances=Circumstances(
            device=device.name, device_title=device.title, framework_version=cells["torch_version"]
        ),
    )


def _step_time_s(cells: Mapping[str, str], batch_size: int, place: str) -> float:
    given = [name for name in _TIMES if cells[name]]
    if len(given) != 1:
        raise RecordError(
            f"{place}: expected either step_time_s or images_per_s, got {' and '.join(given) or 'neither'}"
        )
    value = _positive(cells[given[0]], given[0], place)
    return value if given[0] == "step_time_s" else batch_size / value


def _positive(text: str, name: str, place: str) -> float:
    value = above_zero(text)
    if value is None:
        raise RecordError(f"{place}: expected a positive number in '{name}', got '{text}'")
    return value


def above_zero(text: str) -> float | None:
    """A finite number above zero; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def yes_or_no(text: str, name: str, place: str) -> bool:
    """The flag that a cell holds; an empty one says no.

    Raises:
        RecordError: It says neither.
    """
    if text.lower() not in (*_YES, *_NO):
        raise RecordError(f"{place}: expected yes or no in '{name}', got '{text}'")
    return text.lower() in _YES
