"""``forerun forecast --batches`` and ``--networks`` as functions: laws over runs instead of along one."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.answers import Answer
from forerun.convergence.batch_scaling import BatchScaling, fit_batch_scaling
from forerun.convergence.network_regression import NetworkPrediction, NetworkRuns, predict_network
from forerun.errors import InvalidSetupError, RecordError, near_matches

__all__ = ["BatchForecast", "BatchPoint", "NetworkForecast", "forecast_batches", "forecast_networks"]

_DOUBLINGS = 3
_BATCH = "batch_size"
_NETWORK = "network"
_DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """Steps and epochs that training needs at one batch size.

    Attributes:
        batch_size: Samples of a step.
        steps: Steps to the target by the law.
        epochs: Epochs of them, None without the size of the dataset.
        measured_steps: Mean of what was measured, None where nothing was.
    """

    batch_size: int
    steps: float
    epochs: float | None
    measured_steps: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast(Answer):
    """Steps to a target at other batch sizes.

    Attributes:
        law: The law, fitted.
        batch_sizes: Those measured, those asked for, and some doublings of the largest, ascending.
        measured: Mean steps at each, None where it was not measured.
        dataset_size: Samples of an epoch, or None.
    """

    law: BatchScaling
    batch_sizes: tuple[int, ...]
    measured: tuple[float | None, ...]
    dataset_size: int | None

    @property
    def points(self) -> tuple[BatchPoint, ...]:
        """Forecasts by batch size."""
        counts = map(float, self.law.steps(self.batch_sizes))
        return tuple(
            BatchPoint(
                batch_size=size,
                steps=count,
                epochs=None if self.dataset_size is None else count * size / self.dataset_size,
                measured_steps=seen,
            )
            for size, count, seen in zip(self.batch_sizes, counts, self.measured, strict=True)
        )

    def json_fields(self) -> dict[str, Any]:
        """The law, and a row per batch size; an endless critical batch size is None."""
        names = ("least_steps", "least_samples", "critical_batch_size", "worst_error")
        return {**{name: getattr(self.law, name) for name in names}, "points": self.points}


def forecast_batches(
    table: str | Path, *, batch_sizes: Sequence[int] = (), dataset_size: int | None = None
) -> BatchForecast:
    """Steps to a target against the batch size, from runs at two or more batch sizes.

    Args:
        table: A CSV with the columns batch_size and steps, or epochs with ``dataset_size`` given.
        batch_sizes: Further batch sizes to answer.
        dataset_size: Samples of an epoch.

    Raises:
        RecordError: The table cannot be read, or lacks a column.
        InvalidSetupError: Fewer than two batch sizes, or numbers that are not above zero.
    """
    path = Path(table)
    rows = _read_rows(path, (_BATCH,))
    sizes = [_number(row, _BATCH, path) for row in rows]
    if "steps" in rows[0]:
        steps = [_number(row, "steps", path) for row in rows]
    elif "epochs" in rows[0] and dataset_size is not None:
        steps = [
            _number(row, "epochs", path) * dataset_size / max(size, 1e-12)
            for row, size in zip(rows, sizes, strict=True)
        ]
    else:
        raise RecordError(
            f"{path}: expected a column 'steps', or 'epochs' and --dataset-size, got {', '.join(rows[0])}"
        )
    law = fit_batch_scaling(sizes, steps)
    whole = {round(size) for size in sizes}
    wanted = sorted(
        whole | {int(b) for b in batch_sizes} | {max(whole) << n for n in range(1, _DOUBLINGS + 1)}
    )
    seen = {size: [s for s, b in zip(steps, sizes, strict=True) if round(b) == size] for size in whole}
    return BatchForecast(
        law=law,
        batch_sizes=tuple(wanted),
        measured=tuple(sum(seen[b]) / len(seen[b]) if b in seen else None for b in wanted),
        dataset_size=dataset_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkForecast(Answer):
    """Epochs that networks need which were never trained.

    Attributes:
        value_name: The column that is predicted.
        features: The columns it is predicted from.
        predictions: By network.
    """

    value_name: str
    features: tuple[str, ...]
    predictions: Mapping[str, NetworkPrediction]

    def json_fields(self) -> dict[str, Any]:
        """A row per network, with what each form of the regression says."""
        return {
            "value": self.value_name,
            "features": self.features,
            "networks": [
                {
                    "network": name,
                    "value": found.value,
                    "low": found.low,
                    "high": found.high,
                    "forms": [
                        {"name": c.name, "value": c.value, "weight": c.weight} for c in found.candidates
                    ],
                }
                for name, found in self.predictions.items()
            ],
        }


def forecast_networks(table: str | Path, *, value: str = "epochs") -> NetworkForecast:
    """Networks whose value is empty, from those whose value is known.

    Rows of one network are repetitions, on whatever device: a column ``device`` is read over, because the steps that
    training needs do not depend on it.

    Args:
        table: A CSV with the columns network, the value, and features of the network such as depth and parameters.
        value: Column to predict: epochs, or b0, b1, b2 of Optimus' model.

    Raises:
        RecordError: The table cannot be read, or lacks a column.
        InvalidSetupError: Fewer than three networks with a value, none without, or numbers not above zero.
    """
    path = Path(table)
    rows = _read_rows(path, (_NETWORK,))
    if value not in rows[0]:
        raise RecordError(
            f"{path}: expected a column '{value}' to predict{near_matches(value, list(rows[0]))}, "
            f"got {', '.join(rows[0])}; name it with --metric"
        )
    features = tuple(name for name in rows[0] if name not in (_NETWORK, _DEVICE, value))
    known = [
        NetworkRuns(
            name=name,
            features={f: _number(group[0], f, path) for f in features},
            values=tuple(_number(row, value, path) for row in group),
        )
        for name, group in _grouped(row for row in rows if row[value])
    ]
    asked = dict(_grouped(row for row in rows if not row[value]))
    if not asked:
        raise InvalidSetupError(f"{path}: leave '{value}' empty in the row of the network to predict")
    predictions = {
        name: predict_network(known, {f: _number(group[0], f, path) for f in features})
        for name, group in asked.items()
    }
    return NetworkForecast(value_name=value, features=features, predictions=predictions)


def _grouped(rows: Any) -> list[tuple[str, list[dict[str, str]]]]:
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(row[_NETWORK], []).append(row)
    return list(groups.items())


def _read_rows(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [
                {k.strip(): (v or "").strip() for k, v in row.items() if k} for row in csv.DictReader(file)
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{path}: expected a CSV, and it cannot be read: {error}") from error
    missing = [name for name in needed if not rows or name not in rows[0]]
    if missing:
        raise RecordError(f"{path}: expected a column '{missing[0]}' and a row or more; add them")
    return rows


def _number(row: Mapping[str, str], name: str, path: Path) -> float:
    try:
        return float(row[name])
    except ValueError:
        raise RecordError(f"{path}: expected a number in column '{name}', got '{row[name]}'") from None
