"""Forecasts from tables of finished runs: ``forecast batches``, and ``networks`` for networks never trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import InvalidSetupError, RecordError, near_matches
from forerun.base.tables import csv_cells
from forerun.jobs.forecasting.convergence import (
    BatchScaling,
    NetworkPrediction,
    NetworkRuns,
    fit_batch_scaling,
    predict_network,
)
from forerun.jobs.forecasting.curve import Floats

_DOUBLINGS = 3
_BATCH = "batch_size"


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
        points: Batch sizes measured, asked for, and some doublings of the largest, ascending.
    """

    law: BatchScaling
    points: tuple[BatchPoint, ...]

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
    found = _Table(Path(table), (_BATCH,))
    sizes = [found.number(row, _BATCH) for row in found.rows]
    if "steps" in found.columns:
        steps = [found.number(row, "steps") for row in found.rows]
    elif "epochs" in found.columns and dataset_size is not None:
        epochs = [found.number(row, "epochs") for row in found.rows]
        # The fit refuses sizes of zero, in words; here they must only not divide.
        steps = [each * dataset_size / max(size, 1e-12) for each, size in zip(epochs, sizes, strict=True)]
    else:
        raise found.lacks("a column 'steps', or 'epochs' and --dataset-size")
    law = fit_batch_scaling(sizes, steps)
    whole = {round(size) for size in sizes}
    wanted = sorted(
        whole | {int(b) for b in batch_sizes} | {max(whole) << n for n in range(1, _DOUBLINGS + 1)}
    )
    seen = {size: [s for s, b in zip(steps, sizes, strict=True) if round(b) == size] for size in whole}
    points = [
        BatchPoint(
            batch_size=size,
            steps=count,
            epochs=None if dataset_size is None else count * size / dataset_size,
            measured_steps=sum(seen[size]) / len(seen[size]) if size in seen else None,
        )
        for size, count in zip(wanted, law.steps(wanted).tolist(), strict=True)
    ]
    return BatchForecast(law=law, points=tuple(points))


class _Table:
    """A CSV whose columns are the user's own; an empty cell is "".

    Raises:
        RecordError: The file cannot be read, has no row, or lacks a needed column.
    """

    def __init__(self, path: Path, needed: Sequence[str] = ()) -> None:
        cells = list(csv_cells(path).values())
        self.path = path
        self.columns = list(dict.fromkeys(name for row in cells for name in row))
        missing = [name for name in needed if name not in self.columns]
        if not self.columns or missing:
            wanted = f"the column '{missing[0]}'" if missing else "a header"
            raise RecordError(f"{path}: expected {wanted} and a row or more below it, got none; add them")
        self.rows = [{name: row.get(name, "") for name in self.columns} for row in cells]

    def lacks(self, wanted: str, advice: str = "") -> RecordError:
        """The refusal of a table without a column that is needed."""
        then = f"; {advice}" if advice else ""
        return RecordError(f"{self.path}: expected {wanted}, got {', '.join(self.columns)}{then}")

    def number(self, row: Mapping[str, str], name: str) -> float:
        """A cell as a number that is finite."""
        try:
            value = float(row[name])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise RecordError(f"{self.path}: expected a number in column '{name}', got '{row[name]}'")
        return value


_NETWORK = "network"
_DEVICES = ("device", "gpu")
_COEFFICIENTS = ("b0", "b1", "b2")
_RATES = {"b0": "", "b0_per_step": "steps", "b0_per_epoch": "epochs"}
"""Columns of Optimus' b0 with what they count; the loss is 1 / (b0 k + b1) + b2 after k of them."""
_EPOCHS, _EPOCHS_TO = "epochs", "epochs_to_"
_ASYMPTOTE = "b2"
"""The loss that a curve falls to: near zero a relative error of it says nothing."""
_OF_EPOCH = ("steps_per_epoch", "batch_size", "dataset_size")
_DEFAULT_EPOCHS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkValue:
    """One predicted column of one network.

    Attributes:
        name: The column.
        predicted: By the other networks.
        actual: Mean over the runs of the network, None for one that was never trained.
        lowest, highest: Smallest and largest of those runs.
        neighbours: Networks next below and above in the only feature, with their means; empty with several features.
    """

    name: str
    predicted: NetworkPrediction
    actual: float | None
    lowest: float | None
    highest: float | None
    neighbours: tuple[tuple[str, float], ...]

    @property
    def error(self) -> float | None:
        """|predicted - actual| / actual; None without an actual value above zero, and for b2."""
        if not self.actual or self.name == _ASYMPTOTE:
            return None
        return abs(self.predicted.value - self.actual) / self.actual

    @property
    def error_in_loss(self) -> float | None:
        """|predicted - actual| of b2, the loss that the curve falls to; None for other columns."""
        if self.actual is None or self.name != _ASYMPTOTE:
            return None
        return abs(self.predicted.value - self.actual)

    @property
    def note(self) -> str | None:
        """Why no smooth law of the only feature can meet the actual value; None where one could."""
        if self.actual is None or len(self.neighbours) < 2:
            return None
        (below, first), (above, second) = self.neighbours
        if min(first, second) <= self.actual <= max(first, second):
            return None
        return (
            f"{self.name}: the actual {self.actual:.4g} lies outside of its neighbours {below} ({first:.4g}) and "
            f"{above} ({second:.4g}), so no law that rises or falls throughout meets it; add a feature that tells "
            "the networks apart, such as a column parameters"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A point of the curve of a network.

    Attributes:
        k: Steps or epochs, whichever b0 counts.
        predicted: Loss by the predicted coefficients.
        actual: Mean loss of the network's own coefficients over its runs, None for one that was never trained.
    """

    k: int
    predicted: float
    actual: float | None

    @property
    def error(self) -> float | None:
        """|predicted - actual| / actual."""
        return None if not self.actual else abs(self.predicted - self.actual) / self.actual


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkForecast(Answer):
    """Values of networks that were never trained, or were left out.

    Attributes:
        value_name: The column that was asked for, or the first.
        features: The columns they are predicted from.
        left_out: Whether the networks have values of their own, which took no part.
        networks: Values by network.
        curves: Points of each network whose three coefficients are predicted.
        actual_curves: Losses of each run of such a network by label, at the points of its curve.
        unit: What the curves count, ``steps`` or ``epochs``; None without curves.
    """

    value_name: str
    features: tuple[str, ...]
    left_out: bool
    networks: Mapping[str, tuple[NetworkValue, ...]]
    curves: Mapping[str, tuple[CurvePoint, ...]]
    actual_curves: Mapping[str, Mapping[str, Floats]]
    unit: str | None = None

    def value_of(self, network: str, name: str) -> NetworkValue:
        """One column of one network."""
        return next(value for value in self.networks[network] if value.name == name)

    def json_fields(self) -> dict[str, Any]:
        """A row per network, with what each form of the regression says."""
        return {
            "value": self.value_name,
            "features": self.features,
            **({"unit": self.unit} if self.unit else {}),
            "networks": [self._row(name, values) for name, values in self.networks.items()],
        }

    def _row(self, name: str, values: Sequence[NetworkValue]) -> dict[str, Any]:
        first = self.value_of(name, self.value_name)
        row: dict[str, Any] = {"network": name, **_value_fields(first)}
        if others := [value for value in values if value.name != self.value_name]:
            row["others"] = [{"name": value.name, **_value_fields(value)} for value in others]
        if name in self.curves:
            row["curve"] = [{**fields_of(point), "error": point.error} for point in self.curves[name]]
        return row


def _value_fields(value: NetworkValue) -> dict[str, Any]:
    found = value.predicted
    fields: dict[str, Any] = {"value": found.value, "low": found.low, "high": found.high}
    fields["forms"] = [{"name": c.name, "value": c.value, "weight": c.weight} for c in found.candidates]
    if value.actual is not None:
        fields |= {"actual": value.actual, "error": value.error, "note": value.note}
        fields |= {} if value.error_in_loss is None else {"error_in_loss": value.error_in_loss}
    return fields


def forecast_networks(
    table: str | Path, *, value: str | None = None, leave_out: str | None = None, unit: str | None = None
) -> NetworkForecast:
    """Networks whose values are empty, or left out, from those whose values are known.

    Rows of one network are repetitions, on whatever device: a column ``device`` or ``gpu`` is read over, because the
    steps that training needs do not depend on it. The printed table of the earlier study, ``depth, gpu, b0_per_step,
    b1, b2, epochs_to_92_accuracy, steps_per_epoch``, is taken as it is: a network is its depth.

    Args:
        table: A CSV with a column network or depth, values (``epochs`` or ``epochs_to_...``, Optimus' ``b0_per_step``
            or ``b0_per_epoch``, ``b1`` and ``b2``, or ``value``), and features of the network such as depth and
            parameters. Curves per step need ``steps_per_epoch``, or ``batch_size`` and ``dataset_size``.
        value: Column to predict alone; all of the epochs, ``b0``, ``b1`` and ``b2`` that are there if None.
        leave_out: Network to predict from the others although its values are known; if None, the networks with an empty
            value are predicted, and where there are none each network in turn.
        unit: What a column that is called ``b0`` alone counts, ``steps`` or ``epochs``.

    Raises:
        RecordError: The table cannot be read, or lacks a column or the unit of b0.
        InvalidSetupError: Fewer than three networks with a value, an unknown network, or impossible numbers.
    """
    rows = _Networks(Path(table), value)
    asked, is_left_out = rows.asked(leave_out)
    networks = {name: tuple(rows.predicted(column, name) for column in rows.values) for name in asked}
    rate = next((name for name in _RATES if name in rows.values), None)
    curves: dict[str, tuple[CurvePoint, ...]] = {}
    actual: dict[str, dict[str, Floats]] = {}
    counted = None
    if rate is not None and {"b1", "b2"} <= set(rows.values):
        counted = rows.unit_of(rate, unit)
        per_epoch = {name: rows.steps_per_epoch(group[0], counted) for name, group in rows.groups.items()}
        for name, values in networks.items():
            by_name = {value.name: value for value in values}
            k = np.arange(1, _length(by_name) + 1) * per_epoch[name]
            actual[name] = rows.losses(name, (rate, "b1", "b2"), k)
            curves[name] = _curve(k, [by_name[c].predicted.value for c in (rate, "b1", "b2")], actual[name])
    return NetworkForecast(
        value_name=rows.values[0],
        features=rows.features,
        left_out=is_left_out,
        networks=networks,
        curves=curves,
        actual_curves=actual,
        unit=counted,
    )


def _is_epochs(column: str) -> bool:
    return column == _EPOCHS or column.startswith(_EPOCHS_TO)


class _Networks(_Table):
    """Runs of networks: each network with its rows, the columns to predict, and the features to predict from."""

    def __init__(self, path: Path, value: str | None) -> None:
        super().__init__(path)
        if _NETWORK not in self.columns:
            if "depth" not in self.columns:
                raise self.lacks("a column 'network' or 'depth'", "add one")
            self.rows = [{_NETWORK: f"depth {self.number(row, 'depth'):g}", **row} for row in self.rows]
        self.groups: dict[str, list[dict[str, str]]] = {}
        for row in self.rows:
            self.groups.setdefault(row[_NETWORK], []).append(row)
        self.values = self._values(value)
        others = {_NETWORK, *_DEVICES, *self.values, *_RATES, *_COEFFICIENTS, *_OF_EPOCH}
        self.features = tuple(n for n in self.columns if n not in others and not _is_epochs(n))
        if not self.features:
            raise self.lacks("a feature of the networks, such as a column 'depth' or 'parameters'")

    def _values(self, value: str | None) -> tuple[str, ...]:
        """The column that is asked for, or all of the epochs, ``b0``, ``b1`` and ``b2`` that are there."""
        epochs = next((name for name in self.columns if _is_epochs(name)), _EPOCHS)
        rate = next((name for name in ("b0_per_step", "b0_per_epoch") if name in self.columns), "b0")
        wanted = (epochs, rate, "b1", "b2") if value is None else (value,)
        found = tuple(name for name in wanted if name in self.columns)
        if not found:
            near = near_matches(wanted[0], self.columns)
            raise self.lacks(f"a column '{wanted[0]}' to predict{near}", "name it with --metric")
        return found

    def asked(self, leave_out: str | None) -> tuple[list[str], bool]:
        """Networks to predict, and whether they have values of their own."""
        if leave_out is None:
            empty = [
                n for n, group in self.groups.items() if any(not row[v] for row in group for v in self.values)
            ]
            return (empty, False) if empty else (list(self.groups), True)
        wanted = leave_out.lower()
        matching = [name for name in self.groups if wanted in (name.lower(), name.lower().split()[-1])]
        if not matching:
            raise InvalidSetupError(
                f"{self.path}: no network '{leave_out}' to leave out{near_matches(leave_out, self.groups)}; the table "
                f"has {', '.join(self.groups)}"
            )
        return matching[:1], True

    def predicted(self, column: str, name: str) -> NetworkValue:
        """One column of one network, by the others."""
        measured = self._measured(column, name)
        runs = [
            NetworkRuns(name=other, features=self._features(other), values=tuple(values))
            for other in self.groups
            if other != name and (values := self._measured(column, other))
        ]
        own = self._features(name)
        return NetworkValue(
            name=column,
            predicted=predict_network(runs, own),
            actual=float(np.mean(measured)) if measured else None,
            lowest=min(measured, default=None),
            highest=max(measured, default=None),
            neighbours=_neighbours(runs, own, self.features[0]) if len(self.features) == 1 else (),
        )

    def _features(self, name: str) -> dict[str, float]:
        return {feature: self.number(self.groups[name][0], feature) for feature in self.features}

    def _measured(self, column: str, name: str) -> list[float]:
        return [self.number(row, column) for row in self.groups[name] if row[column]]

    def unit_of(self, rate: str, unit: str | None) -> str:
        """The unit of b0: steps or epochs.

        Raises:
            RecordError: The table and the option say nothing, or two things.
        """
        known = _RATES[rate]
        if unit not in (None, "steps", "epochs"):
            raise InvalidSetupError(f"expected the unit of b0 to be steps or epochs, got '{unit}'")
        if known and unit not in (None, known):
            raise RecordError(
                f"{self.path}: the column {rate} is of {known}, got --unit {unit}; leave it out"
            )
        if not (known or unit):
            raise RecordError(
                f"{self.path}: expected b0 per step or per epoch, and the column 'b0' says neither: call it "
                "b0_per_step or b0_per_epoch, or give --unit steps or --unit epochs"
            )
        return known or str(unit)

    def steps_per_epoch(self, row: Mapping[str, str], unit: str) -> int:
        """Of what b0 counts, the number of an epoch: its steps, or 1 for epochs.

        Raises:
            RecordError: Steps are counted, and the table does not say how many an epoch has.
        """
        if unit == "epochs":
            return 1
        steps, batch, samples = _OF_EPOCH
        if row.get(steps):
            found = self.number(row, steps)
        elif row.get(batch) and row.get(samples):
            found = math.ceil(self.number(row, samples) / max(self.number(row, batch), 1e-9))
        else:
            raise RecordError(
                f"{self.path}: b0 is of steps; expected a column 'steps_per_epoch', or 'batch_size' and "
                "'dataset_size', to draw the curve over the run, got neither; add it"
            )
        if found < 1:
            raise RecordError(
                f"{self.path}: expected an epoch of one step or more, got {found:g}; correct the column {steps}"
            )
        return round(found)

    def losses(self, name: str, coefficients: Sequence[str], k: Any) -> dict[str, Floats]:
        """Losses of each run of a network by its own coefficients, by device or number."""
        rows = [row for row in self.groups[name] if all(row[c] for c in coefficients)]
        return {
            next((row[device] for device in _DEVICES if row.get(device)), f"run {number}"): _losses(
                k, [self.number(row, c) for c in coefficients]
            )
            for number, row in enumerate(rows, start=1)
        }


def _neighbours(
    runs: Sequence[NetworkRuns], own: Mapping[str, float], feature: str
) -> tuple[tuple[str, float], ...]:
    """The networks next below and above in a feature, with their means."""
    ordered = sorted(runs, key=lambda run: run.features[feature])
    below = [run for run in ordered if run.features[feature] < own[feature]][-1:]
    above = [run for run in ordered if run.features[feature] > own[feature]][:1]
    return tuple((run.name, run.mean) for run in (*below, *above))


def _curve(k: Any, coefficients: Sequence[float], actual: Mapping[str, Floats]) -> tuple[CurvePoint, ...]:
    """The curve of a network by its predicted coefficients, beside the mean of its runs."""
    means = np.mean(list(actual.values()), axis=0).tolist() if actual else [None] * len(k)
    return tuple(
        CurvePoint(k=place, predicted=loss, actual=mean)
        for place, loss, mean in zip(k.tolist(), _losses(k, coefficients).tolist(), means, strict=True)
    )


def _length(found: Mapping[str, NetworkValue]) -> int:
    """Epochs of a curve: those that the runs took, else those predicted, else sixty."""
    epochs = next((value for name, value in found.items() if _is_epochs(name)), None)
    if epochs is None:
        return _DEFAULT_EPOCHS
    return max(2, round(epochs.highest or epochs.predicted.value))


def _losses(k: Any, coefficients: Sequence[float]) -> Floats:
    b0, b1, b2 = coefficients
    return np.asarray(1.0 / np.maximum(b0 * k + b1, 1e-12) + b2, dtype=float)
