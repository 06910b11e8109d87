"""Ours beside others: PyTorch's estimators and simple predictors on ``timm_train``, and layers of 2018, a GPU held out.

A step of a layer (Justus et al. 2018, TensorFlow 1.10) is forward, mean-squared loss, backward and an update that also
changes the input and the target, because both were trainable variables. Its kernels are written down here by hand:
there is no PyTorch model to trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from forerun.adapters.classics.baselines import BASELINES
from forerun.adapters.classics.step_features import whole_model_features
from forerun.cost.time.features import Point
from forerun.cost.time.rows import DistinctOps
from forerun.evidence.fitting.evaluation import (
    ErrorMetrics,
    cross_validated_predictions,
    errors,
    family_folds,
)
from forerun.evidence.fitting.measured_steps import Measured
from forerun.evidence.fitting.op_time_fit import (
    FitSettings,
    StepSample,
    encode_samples,
)
from forerun.graph.graph import OpClass, StepPart
from forerun.question.devices import find_device
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace
from studies.memory.study import Bracket
from studies.optime.fit import fit_op_network, predict_log_times
from studies.optime.pytorch_tools import ToolAnswer, ToolProcess, estimated_step_s, tracked_peak_bytes
from studies.optime.studies import HeldOut
from studies.tables.public import public_table

TRACKED_METHODS = {"PyTorch's MemTracker": False, "MemTracker under our CUDA rules": True}
"""Names of the methods of ``tracker_study``, with whether CUDA's autocast rules are switched on."""

_Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeRow:
    """One measured step and two predictions of it.

    Attributes:
        step: The measured step.
        forerun_s: Our prediction, the step's family left out of the fit [s].
        pytorch: Answer of ``RuntimeEstimator`` [s].
    """

    step: Measured
    forerun_s: float
    pytorch: ToolAnswer


def runtime_study(held: HeldOut, num_rows: int, report: _Report | None = None) -> list[RuntimeRow]:
    """Both predictions for rows at equal distances in the table.

    Args:
        held: Measured steps, each predicted without its family.
        num_rows: Rows to take.
        report: Told how many rows are done.
    """
    found = []
    with ToolProcess() as tool:
        for index in _spread_out(len(held.steps), num_rows):
            step = held.steps[index]
            found.append(
                RuntimeRow(
                    step=step,
                    forerun_s=float(np.exp(held.log_predicted[index])),
                    pytorch=tool.ask(estimated_step_s, step.run.model, step.setup, step.device),
                )
            )
            if report is not None:
                report(len(found), num_rows)
    return found


def tracker_study(brackets: Sequence[Bracket], num_rows: int, report: _Report | None = None) -> list[Bracket]:
    """Brackets at equal distances with the peaks of ``MemTracker`` added; those it cannot run lack them."""
    bracketed = [bracket for bracket in brackets if bracket.failed_bytes is not None]
    found = []
    with ToolProcess() as tool:
        for index in _spread_out(len(bracketed), num_rows):
            found.append(_with_tracker(bracketed[index], tool))
            if report is not None:
                report(len(found), num_rows)
    return found


def _with_tracker(bracket: Bracket, tool: ToolProcess) -> Bracket:
    record, setup = bracket.record, bracket.record.training_setup()
    failed_batch = record.next_larger_batch_failed
    assert bracket.failed_bytes is not None
    assert failed_batch is not None
    ran, failed = dict(bracket.ran_bytes), dict(bracket.failed_bytes)
    for method, cuda_rules in TRACKED_METHODS.items():
        for needed, batch_size in ((ran, record.batch_size_per_device), (failed, failed_batch)):
            at_batch = replace(setup, batch_size_per_device=batch_size)
            answer = tool.ask(tracked_peak_bytes, record.run.model, at_batch, cuda_rules=cuda_rules)
            if answer.value is not None:
                needed[method] = answer.value
    return replace(bracket, ran_bytes=ran, failed_bytes=failed)


def _spread_out(num_all: int, num_wanted: int) -> list[int]:
    """Indices at equal distances, the first and the last among them; all if there are not that many."""
    chosen = np.linspace(0, num_all - 1, min(num_wanted, num_all)).round()
    return sorted({int(index) for index in chosen})


def baseline_study(steps: Sequence[Measured]) -> dict[str, dict[str, ErrorMetrics]]:
    """Errors of each baseline over all rows and by layout, five folds by family, which are those of the family study.

    Args:
        steps: The tested rows.
    """
    cases = [(trace(step.run.model, step.setup), step.device, step.setup) for step in steps]
    features = whole_model_features(cases)
    actual = np.asarray([step.record.step_time_s for step in steps])
    layouts = np.asarray([str(step.setup.layout) for step in steps])
    splits = family_folds([step.record for step in steps])
    found: dict[str, dict[str, ErrorMetrics]] = {}
    for name, make in BASELINES.items():
        predicted = cross_validated_predictions(make, features, actual, splits)
        found[name] = {"all": errors(predicted, actual)}
        for layout in np.unique(layouts):
            chosen = layouts == layout
            found[name][str(layout)] = errors(predicted[chosen], actual[chosen])
    return found


_DEVICES = {
    "GTX-1080-Ti": "gtx-1080-ti", "K40": "k40", "K80": "k80", "M60": "m60", "P100": "p100-pcie-16gb",
    "V100": "v100-sxm2-16gb",
}  # fmt: skip
_ELEMENT_BYTES = 4
# Tensors of the weights' size that an update reads and writes, gradient included.
_UPDATE_PASSES = {"sgd": 3, "momentum": 5, "adagrad": 5, "rmsprop": 7, "adadelta": 7, "adam": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """Errors on the layers of a GPU that the fit did not see."""

    device: str
    metrics: ErrorMetrics


_HELD_OUT = "V100"  # as ``justus_layers`` names it
_ROWS_PER_DEVICE = 1500


def layer_study(folder: Path, num_iterations: int) -> LayerResult:
    """Convolution training steps of one GPU predicted from those of the others.

    Args:
        folder: Folder of the public tables.
        num_iterations: Length of the fit.
    """
    table = public_table(folder, "justus_layers")
    table = table[(table["layer"] == "conv2d") & (table["mode"] == "train_step")]
    parts = [
        rows.sample(min(_ROWS_PER_DEVICE, len(rows)), random_state=0) for _, rows in table.groupby("gpu")
    ]
    chosen = pd.concat(parts).reset_index(drop=True)
    samples = [_sample(row) for row in chosen.to_dict("records")]
    encoded = encode_samples(samples)
    is_test = (chosen["gpu"] == _HELD_OUT).to_numpy()
    settings = FitSettings(num_iterations=num_iterations, samples_per_batch=150, seed=0)
    network = fit_op_network(encoded, np.flatnonzero(~is_test), settings)
    predicted = np.exp(predict_log_times(network, encoded, np.flatnonzero(is_test), use_latents=False))
    actual = chosen.loc[is_test, "time_ms_median"].to_numpy(dtype=float) / 1e3
    return LayerResult(device=_HELD_OUT, metrics=errors(predicted, actual))


def _sample(row: Mapping[Any, Any]) -> StepSample:
    device = find_device(_DEVICES[row["gpu"]])
    setup = TrainingSetup(batch_size_per_device=int(row["batch_size"]))
    return StepSample(
        ops=_layer_ops(row),
        point=Point(device=device, setup=setup, era=0.0),
        step_time_s=float(row["time_ms_median"]) / 1e3,
        system=f"justus|{device.name}",
    )


def _layer_ops(row: Mapping[Any, Any]) -> DistinctOps:
    batch, size, kernel = int(row["batch_size"]), int(row["in_size"]), int(row["kernel"])
    stride, channels_in, channels_out = int(row["stride"]), int(row["in_features"]), int(row["out_features"])
    out_size = ceil(size / stride) if row["padding"] == "same" else max(1, (size - kernel) // stride + 1)
    shape_in, shape_out = (batch, size, size, channels_in), (batch, out_size, out_size, channels_out)
    weight = kernel * kernel * channels_in * channels_out
    area = float(kernel * kernel)
    pixels_in, pixels_out = batch * size * size, batch * out_size * out_size
    flops = 2.0 * pixels_out * channels_out * channels_in * area
    moved = float(prod(shape_in) + prod(shape_out) + weight)
    conv = (area, float(stride), float(out_size))
    kernels = [
        (OpClass.CONV, StepPart.FORWARD, flops, moved, (pixels_out, channels_out, channels_in * area), conv),
        (OpClass.CONV, StepPart.BACKWARD, flops, moved, (pixels_in, channels_in, channels_out * area), conv),
        (
            OpClass.CONV,
            StepPart.WEIGHT_GRADIENT,
            flops,
            moved,
            (channels_out, channels_in * area, pixels_out),
            conv,
        ),
    ]
    kernels += _streaming_kernels(row, float(prod(shape_out)), float(prod(shape_in)), float(weight))
    return _as_ops(kernels)


def _streaming_kernels(
    row: Mapping[Any, Any], num_out: float, num_in: float, num_weights: float
) -> list[Any]:
    def stream(op_class: OpClass, part: StepPart, elements: float, passes: float) -> Any:
        return (op_class, part, elements, passes * elements, None, (1.0, 1.0, 0.0))

    found = [
        stream(OpClass.ADD, StepPart.FORWARD, num_out, 3),  # output - target
        stream(OpClass.MUL, StepPart.FORWARD, num_out, 2),  # squared
        stream(OpClass.REDUCE, StepPart.FORWARD, num_out, 1),
        stream(OpClass.MUL, StepPart.BACKWARD, num_out, 3),
        stream(OpClass.ELEMENTWISE, StepPart.BACKWARD, num_out, 2),
    ]
    if row["use_bias"]:
        found.append(stream(OpClass.ADD, StepPart.FORWARD, num_out, 2))
        found.append(stream(OpClass.REDUCE, StepPart.BACKWARD, num_out, 1))
    if row["activation"] not in (None, "None", "none", "linear"):
        found.append(stream(OpClass.ACTIVATION, StepPart.FORWARD, num_out, 2))
        found.append(stream(OpClass.ACTIVATION, StepPart.BACKWARD, num_out, 3))
    passes = _UPDATE_PASSES.get(str(row["optimizer"]).lower(), 3)
    found += [
        stream(OpClass.OPTIMIZER, StepPart.OPTIMIZER, n, passes) for n in (num_weights, num_in, num_out)
    ]
    return found


def _as_ops(kernels: list[Any]) -> DistinctOps:
    count = len(kernels)

    def fixed(values: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        column = np.asarray(values, dtype=np.float64)
        return np.stack([column, np.zeros_like(column)], axis=-1)

    gemm = np.zeros((count, 4, 2))
    attributes = np.ones((count, 8))
    for i, (_, _, _, _, sizes, (area, stride, width)) in enumerate(kernels):
        if sizes is not None:
            gemm[i, :, 0] = (1.0, *sizes)
        attributes[i] = (area, stride, 1.0, width, 1.0, 0.0, 0.0, _ELEMENT_BYTES)
    return DistinctOps(
        group_of_row=np.arange(count),
        count=np.ones(count),
        op_class=np.asarray([k[0] for k in kernels], dtype=np.int64),
        step_part=np.asarray([k[1] for k in kernels], dtype=np.int64),
        flops=fixed([k[2] for k in kernels]),
        moved_bytes=fixed([_ELEMENT_BYTES * k[3] for k in kernels]),
        gemm=gemm,
        elements=fixed([k[3] for k in kernels]),
        attributes=attributes,
        law_size=np.ones(count),
        joined_count=np.ones(count),
        joined_flops=fixed([k[2] for k in kernels]),
        joined_bytes=fixed([_ELEMENT_BYTES * k[3] for k in kernels]),
    )
