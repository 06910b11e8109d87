"""The section of the accuracy page about forerun's own measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from forerun.adapters.classics.composition import Composition
from forerun.adapters.classics.regressor_fit import WHOLE_NETWORKS
from forerun.evidence.fitting.evaluation import ErrorMetrics
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

_TITLES = {
    "op, calibrated and fitted": "**op-level model, calibrated, and offsets from the other configurations**",
    "op, calibrated": "op-level model, calibrated: no row of the grid",
    "op": "op-level model, offsets from the other configurations",
    "op, nothing measured": "op-level model, datasheet only",
    "grey-box": "grey box: op-level model, datasheet only, with three terms fitted to the other configurations",
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
    compositions = {}
    for folder in own_record_folders():
        parts += _machine(folder)
        compositions[f"{own_device(folder).title}, PyTorch"] = composition_rows(folder)
    parts.append(_compositions({**compositions, "P100, Keras, published": published}))
    return "\n".join(parts)


def _machine(folder: Path) -> list[str]:
    device = own_device(folder)
    return [
        f"{device.title} ([records](../studies/own/data/{folder.name})).\n",
        _grid(grid_study(folder)),
        _layers(layer_errors(folder)),
        _calibration(calibration_study(folder)),
    ]


def _grid(study: GridStudy) -> str:
    rows = [
        (
            _title(name),
            *error_cells(found),
            "-" if found.r2 is None else f"{found.r2:.4f}",
            f"{1e3 * found.mae:.1f}",
            f"{1e3 * found.rmse:.1f}",
        )
        for name, found in study.metrics.items()
        if not name.startswith("linear on FLOPs")
    ]
    return (
        "### System A's grid\n\n"
        f"Two occasions differ by {100 * study.repeat_noise:.1f} % (R2 {study.repeat_r2:.4f}); MAE and RMSE in ms.\n\n"
        + markdown_table(("predictor", "rows", "MAPE", "median", "p90", "R2", "MAE", "RMSE"), rows)
    )


def _title(name: str) -> str:
    kind = name.removesuffix(WHOLE_NETWORKS)
    return _TITLES[kind] if kind == name else f"{_TITLES[kind]}{WHOLE_NETWORKS}"


def _layers(found: Mapping[str, ErrorMetrics]) -> str:
    rows = [
        ("**layer network**" if name == "layers" else "line in FLOPs", *error_cells(metrics))
        for name, metrics in found.items()
    ]
    return "### Layers never seen\n\nA tenth held out.\n\n" + markdown_table(
        ("predictor", "rows", "MAPE", "median", "p90"), rows
    )


def _calibration(study: CalibrationStudy) -> str:
    return (
        f"### Three minutes of calibration\n\n{len(set(study.models))} models measured afterwards: MAPE "
        f"{100 * study.before.mape:.0f} % from the datasheet, **{100 * study.after.mape:.1f} %** calibrated.\n"
    )


def _compositions(found: Mapping[str, Sequence[Composition]]) -> str:
    rows = []
    for title, compositions in found.items():
        means = (
            float(np.mean([getattr(row, name) for row in compositions]))
            for name in ("overshoot_before", "overshoot_after")
        )
        rows.append((title, str(len(compositions)), *(f"{100 * mean:+.1f} %" for mean in means)))
    return (
        "### Sum of layers against the network\n\nMean overshoot ([why](methods/composition.md)).\n\n"
        + markdown_table(("networks of", "steps", "sum of layers", "composed"), rows)
    )
