"""Tables of measured steps: one row per step, in forerun's own columns, in those of a person, or in those of timm.

Each reader makes the flat record of a step of each row; ``step_record.as_measurement`` makes a measurement of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from forerun.base.errors import RecordError
from forerun.base.tables import check_columns, check_positive, check_unique, read_rows, read_table
from forerun.evidence.records.measured_run import default_optimizer_implementation, is_pytorch_2
from forerun.evidence.records.model_names import model_family, subject_family
from forerun.evidence.records.step_record import SCHEMA_VERSION, StepRecord
from forerun.question.devices import find_device
from forerun.question.setup import Layout, Phase, Precision

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = [field.name for field in dataclasses.fields(StepRecord)]
_REQUIRED_COLUMNS = [f.name for f in dataclasses.fields(StepRecord) if f.default is dataclasses.MISSING]


@cache
def _reader() -> TypeAdapter[StepRecord]:
    return TypeAdapter(StepRecord)


def read_records(path: str | Path) -> list[StepRecord]:
    """Records of a file in forerun's own format: the columns are the fields of ``StepRecord``.

    Optional columns may be left out or empty. Shapes are written ``3x224x224``.

    Raises:
        RecordError: Columns or values are missing or impossible.
    """
    path = Path(path)
    frame = read_table(path)
    check_columns(frame.columns, path.name, ["schema_version", *_REQUIRED_COLUMNS], _COLUMNS)
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
    # An empty cell means the default of its field. As text, in which a number of Parquet and one of CSV read alike.
    cells = {name: row[name] for name in _COLUMNS if name in row and not pd.isna(row[name])}
    values: dict[str, Any] = {name: str(cell) for name, cell in cells.items() if cell != ""}
    if "input_shape" in values:
        values["input_shape"] = values["input_shape"].split("x")
    try:
        return _reader().validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = first["msg"].replace("Input should be", "expected")
        got = "an empty cell" if first["type"] == "missing" else repr(row[first["loc"][0]])
        raise RecordError(f"{table}, column '{first['loc'][0]}', row {number}: {said}, got {got}") from None


Count = Annotated[int, BeforeValidator(float), Field(gt=0)]
"""Whole number above zero in a cell, also where a spreadsheet wrote 5E4 or 64.0."""
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Finite number above zero in a cell."""
_WHOLE, _POSITIVE = "a whole number above zero", "a number above zero"
_TIMES = ("step_time_s", "images_per_s")


class _ShortRow(BaseModel):
    """A step as a person writes it; it is a training step in fp32 with SGD unless a column says otherwise."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="a model, as in predict")
    device: str = Field(description="a device, as in predict")
    batch_size: Count = Field(description=_WHOLE)
    step_time_s: Amount | None = Field(default=None, description=_POSITIVE)
    images_per_s: Amount | None = Field(default=None, description=_POSITIVE)
    precision: Precision = Field(default=Precision.FP32, description=f"one of {', '.join(Precision)}")
    phase: Phase = Field(default=Phase.TRAIN, description=f"one of {', '.join(Phase)}")
    layout: Layout = Field(default=Layout.NCHW, description=f"one of {', '.join(Layout)}")
    optimizer: str = "sgd"
    convolution_precision: Precision | None = Field(default=None, description="fp32 or tf32")
    compile: bool = Field(default=False, description="yes or no")
    image_size: Count | None = Field(default=None, description=_WHOLE)
    sequence_length: Count | None = Field(default=None, description=_WHOLE)
    torch_version: str = ""

    @field_validator("precision", "phase", "layout", "optimizer", "convolution_precision", mode="before")
    @classmethod
    def _in_small_letters(cls, word: str) -> str:
        return word.lower()


def is_short_table(columns: Collection[str]) -> bool:
    """True if a table with these columns is one of steps that a person wrote."""
    has_time = bool(set(_TIMES) & set(columns))
    return {"model", "device", "batch_size"} <= set(columns) and "row_id" not in columns and has_time


def read_short_steps(path: Path) -> Iterator[StepRecord]:
    """Measured steps of a table that a person wrote: a model, device, batch size, and a time or a speed in each row.

    Raises:
        RecordError: A column is unknown, or a cell is damaged or impossible.
    """
    for number, (line, row) in enumerate(read_rows(path, _ShortRow), start=1):
        # Two times of one step could disagree, and nothing says which of them holds.
        given = [name for name in _TIMES if getattr(row, name) is not None]
        if len(given) != 1:
            raise RecordError(
                f"{path.name}, line {line}: expected either step_time_s or images_per_s, got "
                f"{' and '.join(given) or 'neither'}"
            )
        is_train, version = row.phase is Phase.TRAIN, row.torch_version
        yield StepRecord(
            source=path.name,
            row_id=str(number),
            model=row.model,
            family=subject_family(row.model),
            device=find_device(row.device).name,
            batch_size_per_device=row.batch_size,
            step_time_s=row.step_time_s or row.batch_size / (row.images_per_s or 1.0),
            precision=row.precision,
            phase=row.phase,
            layout=row.layout,
            convolution_precision=row.convolution_precision,
            compile=row.compile,
            image_size=row.image_size,
            sequence_length=row.sequence_length,
            optimizer=row.optimizer if is_train else "none",
            includes_optimizer=is_train,
            optimizer_implementation=default_optimizer_implementation(version),
            framework_version=version,
        )


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
    check_columns(frame.columns, path.name, required, optional)
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
