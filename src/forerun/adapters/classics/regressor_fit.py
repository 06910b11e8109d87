"""Fits a regressor to measured steps or layers, and computes its errors on configurations that it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.adapters.classics.baselines import STORABLE_KINDS, BoostedTrees, GreyBox, LinearOnFlops
from forerun.adapters.classics.layer_table import LAYER_WORDS, LayerTable, read_layers
from forerun.adapters.classics.model_file import StorableRegressor, TrainedModel
from forerun.adapters.classics.network_regressors import (
    AnnSettings,
    LayerNetSettings,
    LayerNetwork,
    NeuralNetwork,
)
from forerun.adapters.classics.step_features import WholeModelFeatures, whole_model_features
from forerun.base.errors import ForerunError, RecordError, UsageError, near_matches
from forerun.evidence.fit import (
    Epochs,
    FitResult,
    check_configurations,
    fit_provenance,
    model_kinds,
    read_epochs,
    shared_settings,
    split_name,
    step_provenance,
)
from forerun.evidence.fitting.evaluation import (
    ErrorMetrics,
    Floats,
    configuration_of,
    configuration_splits,
    cross_validated_predictions,
    errors,
    hold_out_groups,
)
from forerun.evidence.fitting.measured_steps import Graphs, run_graph
from forerun.evidence.records.reading import read_measured_steps
from forerun.evidence.records.step_record import StepRecord
from forerun.graph.graph import Graph
from forerun.question.devices import find_device
from forerun.question.devices.device import Device
from forerun.question.run import Run

WHOLE_NETWORKS = ", whole networks left out"
"""Ending of the names of errors on networks of which no row was fitted to."""

_FEWEST_NETWORKS = 3
_TEST_SHARE = 0.1
_LINEAR = "linear on FLOPs"
# Cost of a step on any device, then the device; on one device only the first three vary.
_ANN_COLUMNS = ("flops", "num_parameters", "batch_size", "peak_flops_per_s", "bandwidth_bytes_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Measured steps, n rows.

    Attributes:
        records: The measured steps.
        runs: The run behind each.
        graphs: Its graph.
        skipped: Models that could not be traced, and why.
    """

    records: tuple[StepRecord, ...]
    runs: tuple[Run, ...]
    graphs: tuple[Graph, ...]
    skipped: tuple[str, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """Device of each step."""
        return tuple(run.cluster.device for run in self.runs)

    def features(self, *, with_op_times: bool = False) -> WholeModelFeatures:
        """Features of the whole steps, (n,) each."""
        cases = [
            (graph, run.cluster.device, run.setup) for run, graph in zip(self.runs, self.graphs, strict=True)
        ]
        return whole_model_features(cases, with_op_times=with_op_times)

    @property
    def time_s(self) -> Floats:
        """Measured step times [s], (n,)."""
        return np.array([record.step_time_s for record in self.records], dtype=float)

    @property
    def configurations(self) -> tuple[str, ...]:
        """Keys that must stay on one side of a split: all fields but repetition and occasion."""
        return tuple(configuration_of(record) for record in self.records)


def step_table(records: Sequence[StepRecord], device: Device | None = None) -> StepTable:
    """Traces the models of measured steps, each once for all batch sizes and repetitions.

    Args:
        records: Measured steps.
        device: Device of the steps, if not the one that their device names mean; for the device of this machine.

    Raises:
        RecordError: There is no record, or no model of them could be traced.
    """
    if not records:
        raise RecordError("expected measured steps of whole models among the records, got none")
    known: Graphs = {}
    rows: list[tuple[StepRecord, Run, Graph]] = []
    skipped: dict[str, str] = {}
    for record in records:
        run = record.run_on(device or find_device(record.device))
        try:
            rows.append((record, run, run_graph(run, known)))
        except ForerunError as error:
            skipped[record.model] = f"left out, {record.model}: {error}"
    if not rows:
        reasons = "; ".join(list(skipped.values())[:3])
        raise RecordError(f"no model of the records could be traced: {reasons}")
    kept, runs, graphs = zip(*rows, strict=True)
    return StepTable(records=kept, runs=runs, graphs=graphs, skipped=tuple(skipped.values()))


def fit_kind(
    names: Sequence[str | Path], kind: str, device: Device | None, choices: Mapping[str, Any]
) -> FitResult:
    """Fits a regressor to the records of files and stores: the entry points of ``forerun.regressors``.

    Args:
        names: Files, or SQLAlchemy URLs.
        kind: ``ann``, ``grey-box``, ``linear``, ``boosting`` or ``layers``.
        device: Device that the records were measured on, if not the one they name.
        choices: Settings of ``DenseSettings`` that are given: hidden_sizes, loss, seeds, max_epochs.

    Raises:
        UsageError: The kind does not take such settings.
        RecordError: The records cannot be used, or hold too few configurations.
    """
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in choices.items()}
    chosen = {name: value for name, value in values.items() if value is not None}
    shown = [Path(str(name)).name for name in names]  # without folders and passwords
    if kind == LayerNetwork.kind:
        return fit_layer_regressor(read_layers(names, device), shown, chosen)
    table = step_table(read_measured_steps(names, device), device)
    return fit_step_regressor(kind, table, shown, chosen, read_epochs(names, device))


def fit_step_regressor(
    kind: str,
    table: StepTable,
    sources: Sequence[str],
    choices: Mapping[str, Any] | None = None,
    epochs: Epochs | None = None,
) -> FitResult:
    """Fits a regressor of whole steps; errors by leaving configurations out.

    Args:
        kind: ``ann``, ``grey-box``, ``linear`` or ``boosting``.
        table: Measured steps with their graphs.
        sources: Names of the record files, for the provenance.
        choices: Settings of the fit.
        epochs: Epochs behind the records; where they are the target, errors are those of epochs.

    Raises:
        UsageError: The kind is not known or does not take such settings.
        RecordError: There are too few configurations to hold one out.
    """
    make = _maker(kind, choices or {})
    check_configurations(table.configurations)
    splits = configuration_splits(table.configurations)
    rows, actual = table.features(with_op_times=kind == GreyBox.kind), table.time_s
    epochs = epochs or Epochs()
    steps = epochs.num_steps(table.records)
    networks = [run.model.model for run in table.runs]
    makers = {kind: make} if kind == LinearOnFlops.kind else {kind: make, _LINEAR: LinearOnFlops}
    metrics: dict[str, ErrorMetrics] = {}
    held_out: dict[str, Floats] = {}
    for name, one in makers.items():
        # A step is fitted and an epoch judged: its steps are known, and the last of them may be short.
        held_out[name] = steps * cross_validated_predictions(one, rows, actual, splits)
        metrics[name] = errors(held_out[name], steps * actual)
        # The same network at another batch size says much; a network of which there is no row asks for more.
        if len(set(networks)) >= _FEWEST_NETWORKS:
            apart = cross_validated_predictions(one, rows, actual, configuration_splits(networks))
            metrics[f"{name}{WHOLE_NETWORKS}"] = errors(steps * apart, steps * actual)
    # The errors are of fits without the row; the returned model has seen all of them.
    regressor = make()
    regressor.fit(rows, actual)
    facts = {
        **step_provenance(table.records, table.devices, sources, metrics, split_name(splits)),
        "dataset_size": epochs.shared_size(table.records),
    }
    return FitResult(
        model=TrainedModel(regressor=regressor, provenance=facts),
        split=split_name(splits),
        metrics=metrics,
        predicted_s=held_out[kind],
        actual_s=steps * actual,
        target=epochs.target,
        summary=regressor.summary() if isinstance(regressor, NeuralNetwork) else "",
        groups=tuple(device.title for device in table.devices),
        notes=table.skipped,
    )


def fit_layer_regressor(
    table: LayerTable, sources: Sequence[str], choices: Mapping[str, Any] | None = None
) -> FitResult:
    """Fits the layer network: a tenth of the layers is held out, a tenth decides when to stop (80:10:10).

    The errors are those of the returned network, which has not seen the held-out layers.

    Raises:
        RecordError: There are too few layers to hold any out.
    """
    check_configurations(table.configurations)
    split = hold_out_groups(table.configurations, _TEST_SHARE)
    fit_rows, test_rows = table.features.take(split.fit), table.features.take(split.test)
    fit_time_s, actual = table.time_s[split.fit], table.time_s[split.test]
    network = LayerNetwork(LayerNetSettings(**(choices or {})))
    network.fit(fit_rows, fit_time_s)
    # The line sees the same rows as the network, or its error would say nothing beside the other.
    linear = LinearOnFlops()
    linear.fit(fit_rows, fit_time_s)
    predicted = network.predict(test_rows)
    metrics = {network.kind: errors(predicted, actual), _LINEAR: errors(linear.predict(test_rows), actual)}
    name = "80:10:10 of layers: fit, stop, test"
    facts = fit_provenance(
        sources, table.configurations, sorted(set(table.devices)), table.software, metrics, name
    )
    return FitResult(
        model=TrainedModel(regressor=network, provenance={**facts, "shared": _shared_layers(table)}),
        split=name,
        metrics=metrics,
        predicted_s=predicted,
        actual_s=actual,
        groups=tuple(table.devices[i] for i in split.test),
        notes=table.skipped,
        target="layer",
        summary=network.summary(),
    )


def _maker(kind: str, given: Mapping[str, Any]) -> Callable[[], StorableRegressor[Any]]:
    if kind == NeuralNetwork.kind:
        return lambda: NeuralNetwork(AnnSettings(columns=_ANN_COLUMNS, **given))
    if kind not in (LinearOnFlops.kind, BoostedTrees.kind, GreyBox.kind):
        raise UsageError(
            f"unknown model '{kind}'{near_matches(kind, model_kinds())}; expected one of {', '.join(model_kinds())}"
        )
    if kind == BoostedTrees.kind and set(given) == {"seeds"}:
        return lambda: BoostedTrees(seed=given["seeds"][0])
    if given:
        raise UsageError(f"a model of kind {kind} takes no {', '.join(given)}; leave them out")
    return STORABLE_KINDS[kind]


def _shared_layers(table: LayerTable) -> dict[str, Any]:
    framework = LAYER_WORDS.index("framework")
    words = table.features.words[:, framework].tolist()
    return shared_settings([{"device": d, "framework": w} for d, w in zip(table.devices, words, strict=True)])
