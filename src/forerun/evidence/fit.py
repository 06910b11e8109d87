"""The cost model of a device fitted to a user's own records, and fits of regressors that other packages bring."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from forerun.base.answers import Answer
from forerun.base.errors import RecordError, UsageError, near_matches
from forerun.base.extras import plugin, plugin_names
from forerun.cost.time.weights import CostModel, load_weights, shipped_weights_path
from forerun.evidence.fitting.evaluation import (
    ErrorMetrics,
    Split,
    baselines_of,
    configuration_of,
    configuration_splits,
    cross_validated_predictions,
    errors,
)
from forerun.evidence.records.measurement import Measurement
from forerun.evidence.records.model_names import network_sizes
from forerun.evidence.records.reading import format_of, read_all
from forerun.evidence.records.step_record import StepRecord, as_step_record, step_time_of
from forerun.question.devices import find_device
from forerun.question.devices.device import Device

if TYPE_CHECKING:
    from forerun.evidence.fitting.device_calibration import CalibrationResult

Floats = npt.NDArray[np.float64]

REGRESSORS = "forerun.regressors"
"""Entry points of the fits of regressors by kind: ``(names, kind, device, choices) -> FitResult``."""

_FEWEST_CONFIGURATIONS = 3
_LINEAR = "linear on FLOPs"


class FittedModel(Protocol):
    """A fitted model of any kind, which its file holds without pickle."""

    @property
    def kind(self) -> str:
        """Name of the kind."""
        ...

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Records, rows, date, devices, shared settings, software, errors on held-out rows."""
        ...

    def save(self, path: str | Path) -> None:
        """Writes the file."""
        ...


def model_kinds() -> tuple[str, ...]:
    """Every kind of model that ``forerun fit RECORDS`` makes."""
    return (*plugin_names(REGRESSORS), CostModel.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """Dataset of each row, and whether the rows are times of epochs.

    Attributes:
        dataset_sizes: Samples of an epoch by row, of the rows that name them.
        are_target: True for CSV files of the CNN grid, whose column is the time of an epoch: a model fitted to them
            is judged in that.
    """

    dataset_sizes: Mapping[str, int] = field(default_factory=dict)
    are_target: bool = False

    @property
    def target(self) -> str:
        """``epoch`` or ``step``."""
        return "epoch" if self.are_target else "step"

    def num_steps(self, records: Sequence[StepRecord]) -> Floats:
        """Steps of the target of each row, (n,): of an epoch all, the last one with what is left; else one."""
        if not self.are_target:
            return np.ones(len(records))
        sizes = [self.dataset_sizes[record.row_id] for record in records]
        return np.ceil(np.asarray(sizes) / [record.batch_size_per_device for record in records])

    def shared_size(self, records: Sequence[StepRecord]) -> int | None:
        """Dataset size that all rows have in common."""
        sizes = {self.dataset_sizes.get(record.row_id) for record in records}
        return sizes.pop() if len(sizes) == 1 else None


def read_epochs(names: Sequence[str | Path], device: Device | None) -> Epochs:
    """Epochs behind the records of files and stores; arguments and errors are those of ``read_all``."""
    found = {m.key: m.parameters.get("dataset_size") for m in read_all(names, device)}
    formats = [format_of(name) for name in names]
    return Epochs(
        dataset_sizes={key: int(size) for key, size in found.items() if isinstance(size, (int, float))},
        are_target=all(one is not None and one.is_of_epochs for one in formats),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult(Answer):
    """A fitted model and its errors on configurations that it had not seen.

    Attributes:
        model: Model fitted to all rows.
        split: Way of holding rows out, in words.
        metrics: Errors of the model and of the baselines on the held-out rows.
        predicted_s, actual_s: Held-out rows, times of ``target`` [s], (m,).
        groups: Device of each held-out row.
        notes: Rows that were left out, with the reason.
        target: ``step``, ``epoch`` (rows of a CSV of the CNN grid, whose target is the time of an epoch) or ``layer``;
            metrics and rows are times of it.
        summary: Layers of a fitted network as Keras prints them; empty for other kinds.
    """

    model: FittedModel
    split: str
    metrics: Mapping[str, ErrorMetrics]
    predicted_s: Floats
    actual_s: Floats
    groups: tuple[str, ...]
    notes: tuple[str, ...]
    target: str = "step"
    summary: str = ""

    def json_fields(self) -> dict[str, Any]:
        """Errors and provenance, without the rows."""
        return {
            "kind": self.model.kind,
            "target": self.target,
            "split": self.split,
            "metrics": self.metrics,
            "provenance": self.model.provenance,
            "notes": self.notes,
        }


def fit(
    records: Measurement | str | Path | Iterable[Measurement | str | Path], *, device: str | None = None
) -> CostModel:
    """The cost model of one device, from what was measured on it.

    Args:
        records: Records of ``forerun.measure``, stores (a file or an SQLAlchemy URL), or tables; one or several.
        device: Where they were measured, instead of what they say.

    Raises:
        RecordError: No finished step is among them, or they are of several devices or frameworks.
        UsageError: The device is not known.

    Examples:
        >>> run = forerun.Run.of("mnist-cnn", device="here", batch_size=64)  # doctest: +SKIP
        >>> model = forerun.fit(forerun.measure(run))  # doctest: +SKIP
        >>> forerun.predict(run, cost_model=model).provenance  # doctest: +SKIP
        'calibrated'
    """
    several = [records] if isinstance(records, (Measurement, str, Path)) else list(records)
    found = _fitted(several, None if device is None else find_device(device)).model
    assert isinstance(found, CostModel)
    return found


def _fitted(records: Sequence[Measurement | str | Path], place: Device | None) -> FitResult:
    from forerun.evidence.calibrate import fit_device

    names = [item for item in records if not isinstance(item, Measurement)]
    own = [item for item in records if isinstance(item, Measurement)]
    measured = [*own, *read_all(names, place)]
    steps = [m for m in measured if step_time_of(m) is not None]
    if not steps:
        raise RecordError(
            "expected finished steps of whole models among the records, got none; "
            "measure some with: forerun measure model MODEL, or fit layers with --model layers"
        )
    stacks = sorted({m.circumstances.framework for m in steps})
    if len(stacks) > 1:
        raise RecordError(
            f"a cost model is that of one framework, but the records are of {' and '.join(stacks)}; give those of one"
        )
    titles = {found.title: found for found in ([place] if place else [m.device for m in steps])}
    if len(titles) > 1:
        raise RecordError(
            f"a cost model is that of one device, but the records are of {', '.join(sorted(titles))}; give those of "
            "one, or say where all were measured with --on DEVICE"
        )
    [found] = titles.values()
    result, notes = fit_device(measured, found)
    shown = [Path(str(name)).name for name in names] or ["records in memory"]
    epochs = None if own else read_epochs(names, place)
    return cost_model_result(result, load_weights(shipped_weights_path()), shown, notes, epochs)


def fit_regressor(
    records: str | Path | Sequence[str | Path],
    kind: str,
    *,
    device: str | None = None,
    hidden_sizes: Sequence[int] | None = None,
    loss: str | None = None,
    seeds: Sequence[int] | None = None,
    max_epochs: int | None = None,
) -> FitResult:
    """Fits a regressor to measured steps or layers; errors are those on configurations left out.

    Args:
        records: Stores (a file or an SQLAlchemy URL), tables of forerun (``.csv``, ``.parquet``), files with the
            columns of the CNN grid (these need ``device``), or for ``layers`` a public layer table.
        kind: ``ann``, ``grey-box``, ``linear``, ``boosting``, ``op`` or ``layers``.
        device: Device that the records were measured on, if not the one they name.
        hidden_sizes: Units of the hidden layers of a network.
        loss: ``mse`` or ``mae``, on the logarithm of the time.
        seeds: One network per seed.
        max_epochs: Largest number of passes of a network over the rows.

    Raises:
        UsageError: The kind, the device or a setting is not known.
        RecordError: The records cannot be used, or hold too few configurations.
    """
    names = [records] if isinstance(records, (str, Path)) else list(records)
    if not names:
        raise UsageError("expected at least one file or store of records, got none")
    place = None if device is None else find_device(device)
    settings = {"hidden_sizes": hidden_sizes, "loss": loss, "seeds": seeds, "max_epochs": max_epochs}
    given = {name: value for name, value in settings.items() if value is not None}
    if kind == CostModel.kind:
        if given:
            raise UsageError(f"a model of kind op takes no {', '.join(given)}; leave them out")
        return _fitted(names, place)
    if (made := plugin(REGRESSORS, kind)) is None:
        raise UsageError(
            f"unknown model '{kind}'{near_matches(kind, model_kinds())}; expected one of {', '.join(model_kinds())}"
        )
    result: FitResult = made(names, kind, place, given)
    return result


def cost_model_result(
    result: CalibrationResult,
    start: CostModel,
    sources: Sequence[str],
    notes: Sequence[str],
    epochs: Epochs | None = None,
) -> FitResult:
    """A calibration with the errors that its way of fitting leaves on configurations left out.

    Offsets are fitted again without each configuration; a refined model has its errors on families left out.

    Args:
        result: The calibration.
        start: What it started from.
        sources: Names of the record files, for the provenance.
        notes: What could not be used, and why.
        epochs: Epochs behind the records; where they are the target, errors are those of epochs.
    """
    from forerun.evidence.fitting.device_calibration import corrected_predictions

    steps = result.samples
    actual = np.asarray([step.step_time_s for step in steps])
    found = [as_step_record(step.measurement) for step in steps]
    records = [record for record in found if record is not None]
    epochs = epochs or Epochs()
    num_steps = epochs.num_steps(records)
    configurations = [configuration_of(record) for record in records]
    metrics: dict[str, ErrorMetrics] = {}
    predicted, split = actual * np.exp(-result.log_after), "families of models left out"
    # Offsets are cheap enough to be fitted again without each configuration; networks are not.
    if result.method == "offset" and len(set(configurations)) >= _FEWEST_CONFIGURATIONS:
        splits = configuration_splits(configurations)
        ops_s = np.asarray([step.ops_time_s for step in steps])
        predicted, split = corrected_predictions(steps, ops_s, start, splits), split_name(splits)
        predicted += [step.loop_s for step in steps]
        known = baselines_of([(s.graph, s.point.device, s.point.setup) for s in steps])
        for line in (one for one in known if one.name == _LINEAR):
            linear = cross_validated_predictions(line.make, line.rows, actual, splits)
            metrics[_LINEAR] = errors(num_steps * linear, num_steps * actual)
    predicted, before_s, actual = (
        num_steps * t for t in (predicted, actual * np.exp(-result.log_before), actual)
    )
    before = errors(before_s, actual)
    metrics = {CostModel.kind: errors(predicted, actual), "op, nothing measured": before, **metrics}
    devices = [step.point.device for step in steps]
    facts = {
        **step_provenance(records, devices, sources, metrics, split),
        "dataset_size": epochs.shared_size(records),
    }
    # What the calibration says of itself wins: answers are made with it.
    model = replace(result.weights, provenance={**facts, **result.weights.provenance})
    return FitResult(
        model=model,
        split=split,
        metrics=metrics,
        predicted_s=predicted,
        actual_s=actual,
        groups=tuple(device.title for device in devices),
        notes=tuple(notes),
        target=epochs.target,
    )


def check_configurations(configurations: Sequence[str]) -> None:
    """Refuses rows of fewer configurations than a fit with some held out needs."""
    if len(set(configurations)) < _FEWEST_CONFIGURATIONS:
        raise RecordError(
            f"expected records of at least {_FEWEST_CONFIGURATIONS} configurations, so that some can be held out, "
            f"got {len(set(configurations))}; measure more, such as with: forerun measure grid"
        )


def split_name(splits: Sequence[Split]) -> str:
    """Way of holding rows out, in words."""
    tested = max(len(split.test) for split in splits)
    if splits[0].name.startswith("fold"):
        return f"{len(splits)} folds by configuration"
    rows = "" if tested == 1 else f", up to {tested} repetitions of it together"
    return f"leave one of {len(splits)} configurations out{rows}"


def fit_provenance(
    sources: Sequence[str],
    configurations: Sequence[str],
    devices: Sequence[str],
    software: Sequence[str],
    metrics: Mapping[str, ErrorMetrics],
    split: str,
) -> dict[str, Any]:
    """Origin of a fit, for the file of the model: records, rows, date, devices, software and errors."""
    from importlib.metadata import version

    return {
        "records": list(sources),
        "num_rows": len(configurations),
        "num_configurations": len(set(configurations)),
        "date": datetime.date.today().isoformat(),
        "devices": list(devices),
        "software": list(software),
        "forerun": version("forerun"),
        "split": split,
        "held_out_errors": {name: asdict(found) for name, found in metrics.items()},
    }


def step_provenance(
    records: Sequence[StepRecord],
    places: Sequence[Device],
    sources: Sequence[str],
    metrics: Mapping[str, ErrorMetrics],
    split: str,
) -> dict[str, Any]:
    """Origin of a fit to steps: also the sizes and settings that a question to the model falls back on."""
    software = sorted({f"{r.framework} {r.framework_version}".strip() for r in records})
    devices = sorted({device.name for device in places})
    configurations = [configuration_of(record) for record in records]
    facts = fit_provenance(sources, configurations, devices, software, metrics, split)
    return {
        **facts,
        "families": sorted({r.family for r in records}),
        "ranges": _ranges(records),
        "shared": shared_settings(
            [
                {
                    "precision": str(r.precision),
                    "layout": str(r.layout),
                    "compile": r.compile,
                    "phase": str(r.phase),
                    "optimizer": r.training_setup().optimizer,
                    "image_size": r.image_size,
                    "framework_version": r.framework_version,
                    "device": device.name,
                }
                for r, device in zip(records, places, strict=True)
            ]
        ),
    }


def _ranges(records: Sequence[StepRecord]) -> dict[str, list[float]]:
    """Least and largest batch size, and size of the network where all are of one family with the same sizes."""
    sizes = [network_sizes(record.model) for record in records]
    common = [name for name in sizes[0] if all(name in found for found in sizes)] if _one(records) else []
    columns = {name: [found[name] for found in sizes] for name in common}
    columns["batch_size"] = [float(record.batch_size_per_device) for record in records]
    return {name: [min(values), max(values)] for name, values in columns.items()}


def _one(records: Sequence[StepRecord]) -> bool:
    return len({record.family for record in records}) == 1


def shared_settings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that all rows have in common; they are the defaults of a question to the model."""
    return {
        name: value
        for name, value in rows[0].items()
        if value is not None and all(row[name] == value for row in rows)
    }
