"""Measured steps of several devices, in a table that a person writes: any settings of ``predict``, and the step.

model,device,parallel,strategy,batch_size,accumulation,precision,sequence_length,step_time_s
llama-3.1-8b,8xh100-sxm,"tp=2,dp=4",zero1,1,16,amp-bf16,4096,9.41
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.base.errors import RecordError, UsageError, near_matches
from forerun.cost.communication.constants import StepShape, load_layout_table
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.evidence.records.tables import above_zero, yes_or_no
from forerun.prediction.division import uses_layout
from forerun.prediction.models import TracedModels
from forerun.prediction.unit_step import layout_step
from forerun.question.devices.device import Device
from forerun.question.options import RunOptions
from forerun.question.run import Run
from forerun.question.settings import Declared, declared

__all__ = ["LayoutMeasurement", "has_layouts", "read_layout_steps"]

_NEEDED = ("model", "device", "batch_size", "step_time_s")
_OF_LAYOUTS = {"parallel", "strategy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMeasurement:
    """One measured step of several devices with its prediction.

    Attributes:
        run: The question.
        measured_s: Measured step [s].
        predicted_s: Predicted step [s].
        shape: What the error of the prediction depends on.
    """

    run: Run
    measured_s: float
    predicted_s: float
    shape: StepShape


def has_layouts(path: Path) -> bool:
    """True if a file is a table of steps with a column of layouts."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    with path.open(newline="", encoding="utf-8-sig") as file:
        columns = {name.strip() for name in next(csv.reader(file), [])}
    return "step_time_s" in columns and bool(_OF_LAYOUTS & columns) and "row_id" not in columns


def read_layout_steps(path: Path, device: Device) -> list[LayoutMeasurement]:
    """The steps of a table, each predicted with the shipped cost model.

    Args:
        path: A ``.csv`` file: model, device (such as ``2x8xh100-sxm``), batch size, step time, and settings by name.
        device: The device that all steps were measured on.

    Raises:
        RecordError: A column is unknown, a cell is damaged or impossible, or a step is of another device.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [{str(k).strip(): (v or "").strip() for k, v in row.items()} for row in csv.DictReader(file)]
    if not rows:
        raise RecordError(
            f"{path.name}: expected measured steps below the columns, got none; add a row for each step"
        )
    known = declared(RunOptions)
    unknown = sorted(set(rows[0]) - {*known, *_NEEDED})
    if unknown:
        raise RecordError(
            f"{path.name}: unknown column '{unknown[0]}'{near_matches(unknown[0], [*known, *_NEEDED])}; expected "
            "model, device, batch_size, step_time_s and settings of predict, such as parallel, strategy or accumulation"
        )
    missing = [name for name in _NEEDED if name not in rows[0]]
    if missing:
        raise RecordError(f"{path.name}: expected a column '{missing[0]}', got none; add it")
    models, found = TracedModels(use_cache=True), []
    weights, table = load_weights(shipped_weights_path()), load_layout_table()
    for number, row in enumerate(rows, start=1):
        place = f"{path.name}, row {number}"
        try:
            run = _run(row, known, place)
            if run.cluster.device.name != device.name:
                raise RecordError(
                    f"{place}: a step of {run.cluster.device.name}, but the device is {device.name}; give --device "
                    f"{run.cluster.device.name}, and a table for each device"
                )
            if not uses_layout(run):
                raise RecordError(
                    f"{place}: expected a step of several devices that divide the model; fill parallel or strategy "
                    "(fsdp), or put it into a table without these columns"
                )
            step = layout_step(models.divided(run), run, weights, table)
        except RecordError:
            raise
        except UsageError as error:
            raise RecordError(f"{place}: {error}") from error
        assert step.shape is not None  # every step by units has one
        found.append(
            LayoutMeasurement(
                run=run,
                measured_s=_seconds(row["step_time_s"], place),
                predicted_s=step.step_s.value,
                shape=step.shape,
            )
        )
    return found


def _run(row: Mapping[str, str], known: Mapping[str, Declared], place: str) -> Run:
    given: dict[str, Any] = {}
    for name, cell in row.items():
        if cell and name not in ("model", "device", "step_time_s"):
            given[name] = _value(name, cell, known[name], place)
    for name in ("model", "device"):
        if not row[name]:
            raise RecordError(f"{place}: '{name}' is empty; fill it in")
    return Run.of(row["model"], device=row["device"], **given)


def _value(name: str, cell: str, item: Declared, place: str) -> Any:
    if item.kind is bool:
        return yes_or_no(cell, name, place)
    if item.kind not in (int, float):
        return cell
    try:
        return item.kind(cell)
    except ValueError:
        raise RecordError(f"{place}: expected a number in '{name}', got '{cell}'") from None


def _seconds(cell: str, place: str) -> float:
    value = above_zero(cell)
    if value is None:
        raise RecordError(f"{place}: expected seconds above zero in 'step_time_s', got '{cell}'")
    return value
