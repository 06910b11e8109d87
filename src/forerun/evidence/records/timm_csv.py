"""Importer for the CSV of timm's ``benchmark.py``: anyone can measure a card with that script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.errors import RecordError
from forerun.base.tables import (
    check_columns,
    check_positive,
    check_unique,
    read_table,
)
from forerun.evidence.records.measured_run import default_optimizer_implementation, is_pytorch_2
from forerun.evidence.records.model_names import model_family
from forerun.evidence.records.step_record import StepRecord
from forerun.question.setup import Layout, Phase, Precision

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["read_timm_csv"]

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
    common = {
        "source": path.name,
        "device": device,
        "precision": precision,
        "layout": layout,
        "compile": compile,
        "framework_version": framework_version,
    }
    return [record for mode in modes for record in _timm_mode(frame, path.name, mode, common)]


def _timm_mode(frame: pd.DataFrame, table: str, mode: str, common: Mapping[str, Any]) -> Iterable[StepRecord]:
    columns = [f"{mode}_{name}" for name in _TIMM_REQUIRED]
    was_run = (frame[columns] != "").any(axis=1)
    rows = frame[was_run].copy()
    check_positive(rows, table, columns)
    check_unique(rows, table, ["model", f"{mode}_img_size", f"{mode}_batch_size"])
    rows.columns = rows.columns.str.removeprefix(f"{mode}_")
    _check_timm_units(rows, table, mode)
    for row in rows.to_dict("records"):
        yield _timm_record(row, _TIMM_PHASES[mode], common)


def _check_timm_units(rows: pd.DataFrame, table: str, mode: str) -> None:
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


def _timm_record(row: Mapping[Any, Any], phase: Phase, common: Mapping[str, Any]) -> StepRecord:
    version = str(common["framework_version"])
    is_train = phase is Phase.TRAIN
    batch, image, parameters = int(row["batch_size"]), int(row["img_size"]), row.get("param_count", "")
    return StepRecord(
        row_id=f"{row['model']} {phase} {image}px batch {batch}",
        model=f"timm:{row['model']}",
        family=model_family(str(row["model"])),
        batch_size_per_device=batch,
        image_size=image,
        step_time_s=row["step_time"] / 1e3,
        phase=phase,
        optimizer="nesterov" if is_train else "none",
        optimizer_implementation=default_optimizer_implementation(version),
        includes_optimizer=is_train,
        fused_attention=is_pytorch_2(version),
        autocast_backward=is_train and common["precision"].is_autocast,
        num_parameters=round(float(parameters) * 1e6) if parameters != "" else None,
        **common,
    )
