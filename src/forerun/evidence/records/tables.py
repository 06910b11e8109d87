"""Tables of measured steps: one row per step, in forerun's own columns, in those of a person, or in those of timm.

Each reader makes the flat record of a step of each row; ``step_record.as_measurement`` makes a measurement of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from forerun.base.errors import RecordError, near_matches
from forerun.base.tables import check_columns, check_positive, check_unique, csv_cells, read_table
from forerun.evidence.records.measured_run import default_optimizer_implementation, is_pytorch_2
from forerun.evidence.records.model_names import model_family, subject_family
from forerun.evidence.records.step_record import SCHEMA_VERSION, StepRecord
from forerun.question.devices import find_device
from forerun.question.setup import Layout, Phase, Precision

if TYPE_CHECKING:
    import pandas as pd

_REQUIRED_COLUMNS = tuple(
    field.name for field in dataclasses.fields(StepRecord) if field.default is dataclasses.MISSING
)


def _alone(hint: Any) -> Any:
    """A type without None."""
    parts = get_args(hint)
    return next(part for part in parts if part is not NoneType) if NoneType in parts else hint


# The hints of the fields say how a cell is read, so that a field cannot be added without its column.
_KINDS = {name: _alone(hint) for name, hint in get_type_hints(StepRecord).items()}


def read_records(path: str | Path) -> list[StepRecord]:
    """Records of a file in forerun's own format: the columns are the fields of ``StepRecord``.

    Optional columns may be left out or empty. Shapes are written ``3x224x224``.

    Raises:
        RecordError: Columns or values are missing or impossible.
    """
    path = Path(path)
    frame = read_table(path)
    check_columns(frame, path.name, ["schema_version", *_REQUIRED_COLUMNS], list(_KINDS))
    check_unique(frame, path.name, ["source", "row_id"])
    check_positive(frame, path.name, ["step_time_s"])
    return [_from_cells(row, path.name, index + 1) for index, row in enumerate(frame.to_dict("records"))]


def _from_cells(row: Mapping[Any, Any], table: str, number: int) -> StepRecord:
    import pandas as pd

    if str(row["schema_version"]) != str(SCHEMA_VERSION):
        raise RecordError(
            f"{table}, row {number}: expected schema_version {SCHEMA_VERSION}, got {row['schema_version']}; "
            "write the file again with this version of forerun"
        )
    values: dict[str, Any] = {}
    for name, cell in row.items():
        # An empty cell means the default of its field.
        if name == "schema_version" or pd.isna(cell) or cell == "":
            continue
        try:
            values[name] = _parsed(_KINDS[name], cell)
        except ValueError as error:
            raise RecordError(
                f"{table}, column '{name}', row {number}: '{cell}' cannot be read: {error}"
            ) from error
    missing = [name for name in _REQUIRED_COLUMNS if name not in values]
    if missing:
        raise RecordError(
            f"{table}, column '{missing[0]}', row {number}: expected a value, got an empty cell"
        )
    return StepRecord(**values)


_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def _parsed(kind: Any, cell: object) -> Any:
    """The value of a cell; ``ValueError`` says what was expected."""
    text = str(cell)
    if kind is float:
        return float(text)
    if kind is int:
        value = float(text)
        if value != int(value):
            raise ValueError("expected a whole number")
        return int(value)
    if kind is bool:
        if text.lower() not in _FLAGS:
            raise ValueError("expected True or False")
        return _FLAGS[text.lower()]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if text.lower() not in list(kind):
            raise ValueError(f"expected one of {', '.join(kind)}{near_matches(text.lower(), list(kind))}")
        return kind(text.lower())
    return text if kind is str else tuple(_parsed(int, size) for size in text.split("x"))


_NEEDED = ("model", "device", "batch_size")
_TIMES = ("step_time_s", "images_per_s")
_DEFAULTS = {"precision": "fp32", "phase": "train", "layout": "nchw", "optimizer": "sgd"}
_WHOLE_NUMBERS = ("image_size", "sequence_length")
SHORT_COLUMNS = (
    *_NEEDED,
    *_TIMES,
    *_DEFAULTS,
    "convolution_precision",
    "compile",
    *_WHOLE_NUMBERS,
    "torch_version",
)
"""Columns of a table that a person writes: the first three and a time or a speed are needed."""

_YES, _NO = ("true", "yes", "1"), ("", "false", "no", "0")


def is_short_table(columns: tuple[str, ...]) -> bool:
    """True if a table with these columns is one of steps that a person wrote."""
    return set(_NEEDED) <= set(columns) and "row_id" not in columns and bool(set(_TIMES) & set(columns))


def read_short_steps(path: Path, columns: Iterable[str]) -> Iterator[StepRecord]:
    """Measured steps of a short table; a training step is fp32 with SGD unless a column says otherwise.

    Args:
        path: A ``.csv`` file with some of ``SHORT_COLUMNS``.
        columns: Its columns.

    Raises:
        RecordError: A column is unknown, or a cell is damaged or impossible.
    """
    unknown = sorted(set(columns) - set(SHORT_COLUMNS))
    if unknown:
        raise RecordError(
            f"{path.name}: unknown column '{unknown[0]}'; the columns are {', '.join(SHORT_COLUMNS)}"
        )
    for number, cells in enumerate(csv_cells(path).values(), start=1):
        yield _short_record(cells, path.name, number)


def _short_record(cells: Mapping[str, str], table: str, number: int) -> StepRecord:
    place = f"{table}, row {number}"
    for name in _NEEDED:
        if name not in cells:
            raise RecordError(f"{place}: '{name}' is empty; fill it in")
    numbers = {
        name: _positive(cells[name], name, place)
        for name in ("batch_size", *_TIMES, *_WHOLE_NUMBERS)
        if name in cells
    }
    # Two times of one step could disagree, and nothing says which of them holds.
    given = [name for name in _TIMES if name in numbers]
    if len(given) != 1:
        raise RecordError(
            f"{place}: expected either step_time_s or images_per_s, got {' and '.join(given) or 'neither'}"
        )
    words = {name: cells.get(name, default).lower() for name, default in _DEFAULTS.items()}
    version, is_train = cells.get("torch_version", ""), words["phase"] == "train"
    batch_size = int(numbers["batch_size"])
    try:
        settings: dict[str, Any] = {name: _parsed(_KINDS[name], word) for name, word in words.items()}
        if word := cells.get("convolution_precision"):
            settings["convolution_precision"] = _parsed(Precision, word.lower())
    except ValueError as error:
        raise RecordError(f"{place}: {error}") from None
    settings |= {name: int(numbers[name]) for name in _WHOLE_NUMBERS if name in numbers}
    return StepRecord(
        source=table,
        row_id=str(number),
        model=cells["model"],
        family=subject_family(cells["model"]),
        device=find_device(cells["device"]).name,
        batch_size_per_device=batch_size,
        step_time_s=numbers.get("step_time_s") or batch_size / numbers["images_per_s"],
        compile=yes_or_no(cells.get("compile", ""), "compile", place),
        includes_optimizer=is_train,
        optimizer_implementation=default_optimizer_implementation(version),
        framework_version=version,
        **{**settings, "optimizer": words["optimizer"] if is_train else "none"},
    )


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
    """The flag that a cell holds; an empty one is False.

    Raises:
        RecordError: It says neither.
    """
    if text.lower() not in (*_YES, *_NO):
        raise RecordError(f"{place}: expected yes or no in '{name}', got '{text}'")
    return text.lower() in _YES


# Column names of timm's benchmark.py without the prefix of the mode; the last five depend on its options.
_TIMM_REQUIRED = ("samples_per_sec", "step_time", "batch_size", "img_size")
_TIMM_OPTIONAL = ("gmacs", "macts", "fwd_time", "bwd_time", "opt_time")
_TIMM_PHASES = {"train": Phase.TRAIN, "infer": Phase.INFERENCE}

# step_time is the mean of synchronised steps, samples_per_sec also counts the time between steps (zero_grad):
# their product stays between 0.95 and 1.07 batches over 36,000 published rows. Seconds instead of
# milliseconds would give 1/1000.
_UNIT_TOLERANCE = 2.0


def read_timm_csv(
    path: str | Path,
    device: str,
    *,
    precision: Precision = Precision.AMP,
    layout: Layout = Layout.NCHW,
    compile: bool = False,
    framework_version: str = "",
) -> list[StepRecord]:
    """Records of a CSV written by ``benchmark.py`` of timm, training, inference or both.

    The file names neither the device nor the options of the script, so the caller names them. Times in the
    file are milliseconds. A mode whose cells are all empty in a row was not run and gives no record.

    Args:
        path: The CSV file.
        device: Catalogue name of the device that ran the benchmark.
        precision: Precision of the run, from its ``--amp`` or ``--precision``.
        layout: Memory order of images; NHWC for ``--channels-last``.
        compile: True if the run had ``--torchcompile``.
        framework_version: PyTorch version of the run; empty counts as 2.0 or newer.

    Source: github.com/huggingface/pytorch-image-models, benchmark.py (columns, units, SGD with Nesterov
    momentum, autocast around forward and backward).
    """
    path = Path(path)
    frame = read_table(path)
    modes = [mode for mode in _TIMM_PHASES if any(str(name).startswith(f"{mode}_") for name in frame.columns)]
    if not modes:
        raise RecordError(
            f"{path.name}: expected columns of timm's benchmark.py (train_step_time or infer_step_time ...), "
            f"got {', '.join(map(str, frame.columns[:6]))}; run it with --bench train or --bench inference"
        )
    required = ["model", *(f"{mode}_{name}" for mode in modes for name in _TIMM_REQUIRED)]
    optional = ["param_count", "error", *(f"{mode}_{name}" for mode in modes for name in _TIMM_OPTIONAL)]
    check_columns(frame, path.name, required, optional)
    common = {"source": path.name, "device": device, "layout": layout, "compile": compile}
    return [
        record
        for mode in modes
        for record in _timm_mode(
            frame,
            path.name,
            mode,
            {**common, **timm_settings(_TIMM_PHASES[mode], precision, framework_version)},
        )
    ]


def _timm_mode(frame: pd.DataFrame, table: str, mode: str, common: Mapping[str, Any]) -> Iterable[StepRecord]:
    columns = [f"{mode}_{name}" for name in _TIMM_REQUIRED]
    was_run = (frame[columns] != "").any(axis=1)
    rows = frame[was_run].copy()
    check_positive(rows, table, columns)
    check_unique(rows, table, ["model", f"{mode}_img_size", f"{mode}_batch_size"])
    rows.columns = rows.columns.str.removeprefix(f"{mode}_")
    _check_timm_units(rows, table, mode)
    for row in rows.to_dict("records"):
        yield _timm_record(row, common)


def _check_timm_units(rows: pd.DataFrame, table: str, mode: str) -> None:
    # Rate, time and batch say the same thing twice: where they differ by a thousand, the units do.
    batches = rows["samples_per_sec"] * rows["step_time"] / 1e3 / rows["batch_size"]
    mixed = rows[(batches > _UNIT_TOLERANCE) | (batches < 1 / _UNIT_TOLERANCE)]
    if len(mixed):
        row = mixed.iloc[0]
        expected_ms = 1e3 * row["batch_size"] / row["samples_per_sec"]
        raise RecordError(
            f"{table}, column '{mode}_step_time', row {mixed.index[0] + 1}: {row['step_time']} contradicts "
            f"{mode}_samples_per_sec, which says {expected_ms:.4g} ms ({len(mixed)} such row(s)); "
            "step times must be in milliseconds throughout, not mixed with seconds"
        )


def timm_settings(phase: Phase, precision: Precision, version: str) -> dict[str, Any]:
    """Settings of a step that ``benchmark.py`` of timm does not write, for they are the same in each of its runs."""
    is_train = phase is Phase.TRAIN
    return {
        "phase": phase,
        "precision": precision,
        "optimizer": "nesterov" if is_train else "none",
        "optimizer_implementation": default_optimizer_implementation(version),
        "includes_optimizer": is_train,
        "fused_attention": is_pytorch_2(version),
        "autocast_backward": is_train and precision.is_autocast,
        "framework_version": version,
    }


def _timm_record(row: Mapping[Any, Any], common: Mapping[str, Any]) -> StepRecord:
    batch, image, parameters = int(row["batch_size"]), int(row["img_size"]), row.get("param_count", "")
    return StepRecord(
        row_id=f"{row['model']} {common['phase']} {image}px batch {batch}",
        model=f"timm:{row['model']}",
        family=model_family(str(row["model"])),
        batch_size_per_device=batch,
        image_size=image,
        # timm writes milliseconds, and parameters in millions.
        step_time_s=row["step_time"] / 1e3,
        num_parameters=round(float(parameters) * 1e6) if parameters != "" else None,
        **common,
    )
