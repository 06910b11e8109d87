"""The public timm measurements as records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.errors import RecordError
from forerun.base.tables import check_positive, check_unique
from forerun.evidence.records.step_record import StepRecord
from forerun.evidence.records.tables import timm_settings
from forerun.question.devices import find_device
from forerun.question.setup import Layout, Phase, Precision
from studies.tables.public import integer_or_none, public_table

if TYPE_CHECKING:
    import pandas as pd

_TIMM_PRECISIONS = {"amp_fp16": Precision.AMP, "amp_bf16": Precision.AMP_BF16, "bf16": Precision.BF16}
_TIMM_COLUMNS = (
    "model", "family", "dtype", "layout", "compiler", "torch_version", "batch_size", "img_size",
    "time_ms_step", "param_count_millions",
)  # fmt: skip


def read_timm_train(folder: Path) -> list[StepRecord]:
    """AMP training steps of 626 vision models on an RTX 3090, PyTorch 1.12, both layouts."""
    return _read_timm(
        folder / "timm_train.parquet",
        extra=("gpu", "next_larger_batch_failed"),
        phase=Phase.TRAIN,
    )


def read_timm_infer(folder: Path) -> list[StepRecord]:
    """Inference steps on four GPUs; the CPU rows are left out (batch 1, number of threads unknown)."""
    return _read_timm(
        folder / "timm_infer.parquet",
        extra=("device", "device_type"),
        keep=lambda frame: frame["device_type"] == "gpu",
        phase=Phase.INFERENCE,
    )


def _read_timm(
    path: Path,
    extra: tuple[str, ...],
    phase: Phase,
    keep: Callable[[pd.DataFrame], pd.Series[bool]] | None = None,
) -> list[StepRecord]:
    frame = public_table(path.parent, path.stem, (*_TIMM_COLUMNS, *extra))
    if keep is not None:
        frame = frame[keep(frame)].reset_index(drop=True)
    check_positive(frame, path.name, ["time_ms_step", "batch_size", "img_size", "param_count_millions"])
    device = "device" if "device" in frame.columns else "gpu"
    key = ["model", device, "dtype", "layout", "compiler", "torch_version", "img_size"]
    if "committed" in frame.columns:
        key.append("committed")
    check_unique(frame, path.name, key)
    return [
        _timm_record(row, path, device, " ".join(str(row[name]) for name in key), phase)
        for row in frame.to_dict("records")
    ]


def _timm_record(row: Mapping[Any, Any], path: Path, device: str, row_id: str, phase: Phase) -> StepRecord:
    precision = _TIMM_PRECISIONS.get(row["dtype"])
    if precision is None:
        known = ", ".join(_TIMM_PRECISIONS)
        raise RecordError(f"{path.name}, column 'dtype': expected one of {known}, got '{row['dtype']}'")
    return StepRecord(
        source=path.stem,
        row_id=row_id,
        model=f"timm:{row['model']}",
        family=row["family"],
        device=find_device(row[device]).name,
        batch_size_per_device=int(row["batch_size"]),
        image_size=int(row["img_size"]),
        step_time_s=float(row["time_ms_step"]) / 1e3,
        layout=Layout(row["layout"].lower()),
        compile=row["compiler"] != "eager",
        num_parameters=round(float(row["param_count_millions"]) * 1e6),
        next_larger_batch_failed=integer_or_none(row.get("next_larger_batch_failed")),
        **timm_settings(phase, precision, str(row["torch_version"])),
    )
