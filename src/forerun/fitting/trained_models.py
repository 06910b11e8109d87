"""Fitted regressors of all kinds, with one function for the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.fitting.calibrated_op import CalibratedOpModel, OpCase, OpLevelRows, op_level_rows
from forerun.fitting.interface import Rows, StorableRegressor
from forerun.fitting.layer_net import LayerNetwork
from forerun.fitting.model_file import TrainedModel, load_model_file
from forerun.fitting.registry import STORABLE_KINDS
from forerun.fitting.step_features import whole_model_features
from forerun.graph.graph import Graph
from forerun.hardware.device import Device
from forerun.optime.weights import OpTimeWeights
from forerun.prediction.step import PreparedModel, prepare
from forerun.run.setup import TrainingSetup

__all__ = ["MODEL_KINDS", "StepCase", "load_trained", "op_rows", "step_rows"]

StepCase = tuple[Graph, Device, TrainingSetup, str]
"""Graph, device, setup and version of the framework ("" if unknown) of one step."""

MODEL_KINDS: Mapping[str, type[StorableRegressor[Any]]] = {
    **STORABLE_KINDS,
    CalibratedOpModel.kind: CalibratedOpModel,
}
"""Every kind of model that ``forerun fit RECORDS`` makes."""


def load_trained(path: Path, kind: str | None = None) -> TrainedModel:
    """Reads a fitted model of any kind, or of the wanted one.

    Raises:
        CostModelError: The file is missing, damaged, of another kind, or newer or older than this version.
    """
    return load_model_file(path, MODEL_KINDS, kind)


def step_rows(kind: str, cases: Sequence[StepCase]) -> Rows:
    """The rows that a regressor of whole steps of this kind reads."""
    assert kind != LayerNetwork.kind
    if kind != CalibratedOpModel.kind:
        return whole_model_features([(graph, device, setup) for graph, device, setup, _ in cases])
    return op_rows(cases)


def op_rows(cases: Sequence[StepCase], weights: OpTimeWeights | None = None) -> OpLevelRows:
    """The rows of the op-level model, by the shipped weights or by others."""
    prepared: dict[int, PreparedModel] = {}
    for graph, *_ in cases:
        if id(graph) not in prepared:
            prepared[id(graph)] = prepare(graph)
    return op_level_rows(
        [OpCase(prepared[id(graph)], device, setup, version) for graph, device, setup, version in cases],
        weights,
    )
