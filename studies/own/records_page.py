"""The section of the accuracy page about forerun's own measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from forerun.fitting.compositions import Composition
from forerun.fitting.evaluation import ErrorMetrics
from studies.markdown import error_cells, markdown_table
from studies.own.records import (
    CalibrationStudy,
    GridStudy,
    calibration_study,
    composition_rows,
    grid_study,
    layer_errors,
    own_device,
    own_record_folders,
)

__all__ = ["own_records_section"]

_TITLES = {
    "op, calibrated and fitted": "**op-level model, calibrated, and offsets from the other configurations**",
    "op, calibrated": "op-level model, calibrated: no row of the grid",
    "op": "op-level model, offsets from the other configurations",
    "op, nothing measured": "op-level model, datasheet only",
    "ann": "dense network of system A",
    "linear": "line in FLOPs",
    "linear on FLOPs": "line in FLOPs",
    "boosting": "gradient boosting on whole-model sums",
}


def own_records_section(published: Sequence[Composition]) -> str:
    """Every machine whose records are shipped.

    Args:
        published: Compositions of the public tables, to stand beside our own.
    """
    parts = ["## Measured by forerun itself\n"]
    for folder in own_record_folders():
        parts += _machine(folder)
    parts.append(_compositions("P100, Keras, published (two steps of 16 give the costs of calls)", published))
    return "\n".join(parts)


def _machine(folder: Path) -> list[str]:
    device = own_device(folder)
    return [
        f"Records `studies/own/data/{folder.name}`: {device.title}. A virtual machine on a shared host: the noise "
        "beside each figure is its own.\n",
        _grid(grid_study(folder)),
        _layers(layer_errors(folder)),
        _calibration(calibration_study(folder)),
        _compositions("here, PyTorch", composition_rows(folder)),
    ]


def _grid(study: GridStudy) -> str:
    rows = [
        (
            _TITLES[name],
            *error_cells(found),
            "-" if found.r2 is None else f"{found.r2:.4f}",
            f"{1e3 * found.mae:.1f}",
            f"{1e3 * found.rmse:.1f}",
        )
        for name, found in study.metrics.items()
        if name != "linear on FLOPs"
    ]
    return (
        f"### System A's grid\n\n{study.num_configurations} configurations of the CNN family on {study.num_occasions} "
        "occasions, steps of real trainings on CIFAR-10-shaped data; each configuration is left out with all its "
        f"occasions. Median difference of two occasions: {100 * study.repeat_noise:.1f} %; R2 of one as the prediction "
        f"of the other: {study.repeat_r2:.4f}, which bounds what a model can reach. Errors of step times; "
        "MAE and RMSE in ms.\n\n"
        + markdown_table(("predictor", "rows", "MAPE", "median", "p90", "R2", "MAE", "RMSE"), rows)
    )


def _layers(found: Mapping[str, ErrorMetrics]) -> str:
    rows = [
        ("**layer network**" if name == "layers" else "line in FLOPs", *error_cells(metrics))
        for name, metrics in found.items()
    ]
    return (
        "### Layers never seen\n\nSingle layers of eleven kinds, forward and training steps, a tenth held out.\n\n"
        + markdown_table(("predictor", "rows", "MAPE", "median", "p90"), rows)
    )


def _calibration(study: CalibrationStudy) -> str:
    rows = [
        (
            f"`{name}`, {batch_size}",
            f"{1e3 * measured_s:.0f}",
            f"±{100 * noise:.0f} %",
            f"{100 * (before_s / measured_s - 1):+.0f} %",
            f"{100 * (after_s / measured_s - 1):+.0f} %",
        )
        for name, batch_size, measured_s, noise, before_s, after_s in zip(
            study.models,
            study.batch_sizes,
            study.measured_s,
            study.noise,
            study.before_s,
            study.after_s,
            strict=True,
        )
    ]
    return (
        f"### Three minutes of calibration\n\n`forerun calibrate --minutes 3` measured {study.num_measured} layers and "
        f"models; {len(set(study.models))} others were measured afterwards. MAPE "
        f"{100 * study.before.mape:.0f} % from the datasheet, **{100 * study.after.mape:.1f} %** calibrated (median "
        f"{100 * study.after.median_ape:.1f} %); median noise of the measurements "
        f"±{100 * float(np.median(study.noise)):.0f} %."
        "\n\n" + markdown_table(("model, batch", "ms", "noise", "datasheet", "calibrated"), rows)
    )


def _compositions(title: str, rows: Sequence[Composition]) -> str:
    cells = [
        (
            f"`{row.network}`, {row.batch_size}",
            str(row.num_layers),
            f"{1e3 * row.measured_s:.2f}",
            f"{100 * row.overshoot_before:+.0f} %",
            f"{100 * row.overshoot_after:+.0f} %",
        )
        for row in rows
    ]
    before, after = (
        float(np.mean([getattr(row, name) for row in rows]))
        for name in ("overshoot_before", "overshoot_after")
    )
    return (
        f"### Sum of layers against the network: {title}\n\nMean overshoot {100 * before:+.1f} % of the sum, "
        f"**{100 * after:+.1f} %** of the [composed step](methods/composition.md).\n\n"
        + markdown_table(("network, batch", "layers", "step, ms", "sum of layers", "composed"), cells)
    )
