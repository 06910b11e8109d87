"""Predictions beside measured steps: the errors of forerun, and of baselines fitted to the table itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import InvalidSetupError, RecordError
from forerun.cost.time.correction import load_calibration
from forerun.cost.time.weights import CostModel, load_weights, shipped_weights_path
from forerun.evidence.fitting.device_calibration import corrected_predictions
from forerun.evidence.fitting.evaluation import (
    Baseline,
    ErrorMetrics,
    Split,
    baselines_of,
    configuration_of,
    configuration_splits,
    cross_validated_predictions,
    errors,
    family_folds,
    grouped_errors,
)
from forerun.evidence.fitting.measured_steps import Measured, measured_steps
from forerun.evidence.records.reading import columns_of, read_measured_steps
from forerun.evidence.records.record_store import is_store
from forerun.evidence.records.step_record import StepRecord
from forerun.evidence.records.tables import read_timm_csv
from forerun.graph.graph import Graph
from forerun.prediction.step import PreparedModel, provenance_of, timed_steps
from forerun.question.devices import find_device
from forerun.question.devices.device import Device
from forerun.question.model import own_stack
from forerun.question.setup import Layout, Precision, choice, parse_release
from forerun.tracing.trace import trace

Floats = npt.NDArray[np.float64]

_MIN_FITTED_ROWS = 10
_CALIBRATED = "forerun, fitted to this table"
_OPTIONS = {
    "precision": "--precision",
    "layout": "--layout",
    "compile": "--compile",
    "framework_version": "--torch-version",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Answer):
    """Comparison of predicted and measured steps.

    Attributes:
        metrics: Errors of forerun over all rows.
        groups: Errors of forerun by device, precision, layout, phase and family.
        baselines: Errors of each baseline; None where it could not be fitted, with a reason in ``notes``.
        predicted_s, low_s, high_s, actual_s: Per row [s], (n,).
        row_groups: Device of each row, for plots.
        notes: Models that could not be traced, and the basis of the figures.
        table: Name of the table or store.
    """

    metrics: ErrorMetrics
    groups: Mapping[str, ErrorMetrics]
    baselines: Mapping[str, ErrorMetrics | None]
    predicted_s: Floats
    low_s: Floats
    high_s: Floats
    actual_s: Floats
    row_groups: tuple[str, ...]
    notes: tuple[str, ...]
    table: str = ""

    def json_fields(self) -> dict[str, Any]:
        """The errors, without the rows."""
        kept = {name: getattr(self, name) for name in ("groups", "baselines", "notes")}
        return {**fields_of(self.metrics), **kept}


def read_steps(
    path: str | Path, file_format: str, devices: Sequence[str], run: Mapping[str, Any]
) -> list[StepRecord]:
    """Records of a file or store.

    Args:
        path: The table; for forerun's own format also a store, a file or a URL.
        file_format: "timm" for the CSV of timm's benchmark script, "forerun" for the own format, "auto" to decide by
            its columns.
        devices: For timm the measured device; for forerun the devices to keep, all if empty.
        run: For timm the options of its benchmark script that the file does not hold, as ``read_timm_csv`` takes them.

    Raises:
        UsageError: The format or a device is not known, or an option is given that each row of the table has.
        RecordError: The table cannot be used, or no row is left.
    """
    if file_format == "auto":
        columns = set() if is_store(path) else columns_of(Path(path))
        is_timm = any(name.endswith(("_samples_per_sec", "_step_time")) for name in columns)
        file_format = "timm" if is_timm else "forerun"
    if file_format == "timm":
        if len(devices) != 1:
            raise InvalidSetupError(
                f"a timm table does not name its device: give exactly one with --on DEVICE, got {len(devices)}"
            )
        return read_timm_csv(path, find_device(devices[0]).name, **run)
    if file_format != "forerun":
        raise InvalidSetupError(f"unknown format '{file_format}'; expected auto, timm or forerun")
    if run:
        options = ", ".join(_OPTIONS[name] for name in run)
        raise InvalidSetupError(
            f"every row of {Path(path).name} says how it was measured, and {options} would only say it of a timm "
            "table; leave it out"
        )
    records = read_measured_steps([path])
    if devices:
        wanted = {find_device(name).name for name in devices}
        records = [record for record in records if find_device(record.device).name in wanted]
    if not records:
        raise RecordError(f"{path}: no row is left after keeping {', '.join(devices) or 'all devices'}")
    return records


def evaluate_records(
    records: Sequence[StepRecord], weights: CostModel, devices: Mapping[str, Device] | None = None
) -> Evaluation:
    """Errors of forerun and of the baselines on measured steps.

    Baselines that must be fitted are fitted to the table itself, with the families of the tested rows left
    out; forerun's model has seen none of the table unless it is one of its reference tables.

    Args:
        records: The steps.
        weights: The cost model.
        devices: Figures of devices by name, instead of the catalogue's: of ``cpu``, say, those of this machine.

    Raises:
        RecordError: No model of the table could be traced.
    """
    graphs: dict[int, Graph] = {}
    steps, skipped = measured_steps(records, devices=devices)
    if not steps:
        reasons = "; ".join(f"{s.model}: {s.reason}" for s in skipped[:3])
        raise RecordError(f"no model of the table could be traced: {reasons}")
    cases = []
    for step in steps:
        key = id(step.ops)
        if key not in graphs:
            graphs[key] = trace(step.run.model, step.setup)
        cases.append((graphs[key], step.device, step.setup))
    intervals = _predictions(steps, cases, weights)
    actual = np.asarray([step.record.step_time_s for step in steps])
    splits, split_name = _splits(steps)
    baselines, notes = _baselines(baselines_of(cases), actual, splits, split_name)
    if splits is not None:
        # Offsets to the shipped model, for a calibration may have seen the rows.
        shipped = load_weights(shipped_weights_path())
        baselines[_CALIBRATED] = errors(corrected_predictions(steps, actual, shipped, splits), actual)
    value, low, high = intervals
    left_out = (f"left out, {item.model}: {item.reason}" for item in skipped)
    return Evaluation(
        metrics=errors(value, actual, (low, high)),
        groups=_groups(steps, value, actual, (low, high)),
        baselines=baselines,
        predicted_s=value,
        low_s=low,
        high_s=high,
        actual_s=actual,
        row_groups=tuple(step.device.title for step in steps),
        notes=(*notes, *_provenance_notes(steps, weights), *left_out),
    )


def _predictions(
    steps: Sequence[Measured], cases: Sequence[tuple[Graph, Any, Any]], weights: CostModel
) -> Floats:
    rows = np.empty((3, len(steps)))
    for index, (step, (graph, device, setup)) in enumerate(zip(steps, cases, strict=True)):
        model = PreparedModel(graph=graph, ops=step.ops)
        # The era of the software is part of the law, so each row is predicted with its own version.
        version = step.record.framework_version or None
        rows[:, index] = timed_steps(model, [device], [setup], weights, version).ends_s()[:, 0]
    return rows


def _groups(
    steps: Sequence[Measured], value: Floats, actual: Floats, intervals: tuple[Floats, Floats]
) -> dict[str, ErrorMetrics]:
    keys = {
        "device": [step.device.name for step in steps],
        "precision": [str(step.setup.precision) for step in steps],
        "layout": [str(step.setup.layout) for step in steps],
        "phase": [str(step.setup.phase) for step in steps],
        "family": [step.record.family for step in steps],
    }
    return {
        f"{kind} {name}": group
        for kind, names in keys.items()
        for name, group in grouped_errors(value, actual, names, intervals).items()
    }


def _splits(steps: Sequence[Measured]) -> tuple[tuple[Split, ...] | None, str]:
    """Splits for fits to the table, and their name: families, or configurations where all models are relatives."""
    records = [step.record for step in steps]
    num_families = len({record.family for record in records})
    configurations = [configuration_of(record) for record in records]
    if min(len(records), len(set(configurations))) < _MIN_FITTED_ROWS:
        return None, ""
    if num_families > 1:
        folds = family_folds(records, min(5, num_families))
        return folds, f"{len(folds)}-fold by model family"
    splits = configuration_splits(configurations)
    if len(splits) == len(set(configurations)):
        return splits, f"leaving out one of {len(splits)} configurations"
    return splits, f"{len(splits)}-fold by configuration"


def _baselines(
    known: Sequence[Baseline], actual: Floats, splits: Sequence[Split] | None, split_name: str
) -> tuple[dict[str, ErrorMetrics | None], list[str]]:
    found: dict[str, ErrorMetrics | None] = {}
    for name, make, rows, is_fitted in known:
        if not is_fitted:
            found[name] = errors(make().predict(rows), actual)
        # A fitted baseline without held-out rows would be scored on what it was fitted to.
        elif splits is None:
            found[name] = None
        else:
            found[name] = errors(cross_validated_predictions(make, rows, actual, splits), actual)
    if splits is None:
        note = (
            f"fitted baselines need at least {_MIN_FITTED_ROWS} rows of as many configurations, "
            f"got {len(actual)} rows; they are left out"
        )
        return found, [note]
    return found, [f"fitted to this table: {split_name}"]


def _provenance_notes(steps: Sequence[Measured], weights: CostModel) -> list[str]:
    tiers = sorted({str(provenance_of(step.device, step.setup, weights, step.ops)) for step in steps})
    notes = [f"predictions rest on: {', '.join(tiers)}"]
    seen = sorted({step.record.model for step in steps} & set(weights.provenance.get("models", ())))
    if seen:
        notes.append(f"the calibration was fitted to these models too: {', '.join(seen)}")
    # A calibration has no rows of public tables itself; those it began from have.
    tables = weights.provenance.get("rows") or weights.provenance["started_from"]["rows"]
    if {step.record.source for step in steps} & {name.partition("/")[0] for name in tables}:
        notes.append(
            "rows of this table were used to fit the shipped model: the errors are not those of new rows"
        )
    return notes


def evaluate(
    records: str | Path,
    *,
    format: str = "auto",
    devices: Sequence[str] = (),
    precision: str | None = None,
    layout: str | None = None,
    compile: bool = False,
    torch_version: str | None = None,
    calibration: str | Path | None = None,
) -> Evaluation:
    """Compares predictions with measured steps, and with simple baselines.

    A timm table does not name precision, layout, compiler and PyTorch version, so they are arguments; every row of
    forerun's own format names them, so they are refused there.

    Args:
        records: A table of measured steps.
        format: "timm" for the CSV of timm's benchmark script, "forerun" for the own format, "auto" to decide by
            the columns.
        devices: The device of a timm table; for the own format the devices to keep. ``here`` keeps the rows of this
            kind of device and takes the figures of this machine, because records call every processor ``cpu``.
        precision: Precision of a timm table; amp if None, as in timm's published tables.
        layout: Layout of a timm table; nchw if None.
        compile: Whether a timm table was measured under torch.compile.
        torch_version: PyTorch version of a timm table, such as "2.4"; None counts as the newest.
        calibration: File of a calibration of the one device that was measured; it predicts instead of the shipped
            weights.

    Raises:
        RecordError: The table has missing columns, impossible values, or no model that can be traced.
        UsageError: A device, format or option is not known, or cannot be used with this table.
        CostModelError: The calibration is damaged.
    """
    parse_release(torch_version)  # refuses a text that is not a version
    run = {
        "precision": None if precision is None else choice(Precision, precision, "precision"),
        "layout": None if layout is None else choice(Layout, layout, "layout"),
        "compile": compile or None,
        "framework_version": torch_version,
    }
    given = {name: value for name, value in run.items() if value is not None}
    steps = read_steps(str(records), format, devices, given)
    named = {device.name: device for device in map(find_device, devices)}
    found = evaluate_records(steps, _weights(calibration, steps, named), named)
    return replace(found, table=Path(records).name)


def _weights(
    calibration: str | Path | None, steps: Sequence[StepRecord], named: Mapping[str, Device]
) -> CostModel:
    """The cost model of the predictions: a calibration that belongs to all the rows, or the shipped weights."""
    if calibration is None:
        return load_weights(shipped_weights_path())
    places = {
        device.title: device for device in (named.get(s.device) or find_device(s.device) for s in steps)
    }
    if len(places) > 1:
        raise InvalidSetupError(
            f"a calibration is for one device, but the table has rows of {', '.join(sorted(places))}; keep those "
            "of one device with --on DEVICE, or leave --calibration out"
        )
    stacks = sorted({own_stack(step.model) for step in steps})
    if len(stacks) > 1:
        raise InvalidSetupError(
            f"a calibration is for one framework, but the table has rows of {' and '.join(stacks)}; give a table "
            "of one, or leave --calibration out"
        )
    [device], [stack] = places.values(), stacks
    return load_calibration(Path(calibration), device, stack)
