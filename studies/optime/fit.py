"""Fits the shipped op-level model from the public tables and notes their provenance."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from forerun.cost.time.features import (
    DEVICE_FEATURES,
    POINT_FEATURES,
    REACH,
    STATIC_FEATURES,
    format_classes,
    point_arrays,
)
from forerun.cost.time.law import LAW_CLASSES, NUM_FORMATS, NUM_LATENTS
from forerun.cost.time.step_times import step_times
from forerun.cost.time.weights import CostModel, NetworkWeights, run_kind
from forerun.evidence.fitting.measured_steps import Measured
from forerun.evidence.fitting.op_time_fit import (
    EncodedSamples,
    FitSettings,
    OpNetwork,
    descend,
    encode_samples,
    take,
)
from forerun.graph.graph import OpClass
from forerun.question.devices import find_device
from forerun.question.devices.catalogue import sustained_clock_share
from forerun.question.devices.device import NumberFormat
from forerun.question.setup import Precision, TrainingSetup
from studies.tables.operators import OperatorTable
from studies.tables.reference_steps import INFERENCE_LEFT_OUT, INFERENCE_SHARE

TABLE_SHARES = {
    "timm_train": 0.35,
    "timm_infer": 0.2,
    "gpu_benchmarks/torchvision": 0.27,
    "gpu_benchmarks/lambda": 0.08,
    "neusight_e2e": 0.1,
}
"""Share of each kind of table among the samples drawn for a fit."""

ENSEMBLE_SETTINGS = tuple(FitSettings(seed=seed, num_iterations=4000) for seed in range(2))


OTHER_IMPLEMENTATION = {
    "tresnet": "measured with InPlaceABN kernels (timm 0.6), built with ordinary batch norms by today's timm"
}
"""Families whose measured network is not the one today's library builds: tested, but no fit learns from them."""


def fittable(steps: Sequence[Measured]) -> np.ndarray:
    """Whether a fit may use each step, (n,)."""
    return np.asarray([step.record.family not in OTHER_IMPLEMENTATION for step in steps])


def table_of(measured: Measured) -> str:
    """Kind of table a measurement came from, a key of ``TABLE_SHARES``."""
    source = measured.record.source
    if source != "gpu_benchmarks":
        return source
    return f"{source}/lambda" if measured.record.row_id.startswith("lambda") else f"{source}/torchvision"


def source_of(measured: Measured) -> str:
    """Who measured a step: a table, or one of the owners that a table joins."""
    table = table_of(measured)
    if table != "gpu_benchmarks/torchvision":
        return table
    return f"torchvision by {measured.record.row_id.partition('/')[0]}"


def system_of(measured: Measured) -> str:
    """The machine of a step with its software: device, source, release, compiler and phase."""
    record = measured.record
    compiler = "compiled" if record.compile else "eager"
    words = (f"{measured.device.name}, {source_of(measured)}", record.framework_version or "", compiler)
    return " ".join((*words, str(record.phase)))


def sampling_weights(steps: Sequence[Measured]) -> np.ndarray:
    """Weight of each step: the table's share, within a table proportional to 1/sqrt(rows of the device), (n,)."""
    tables = [table_of(step) for step in steps]
    device_rows = Counter((table, step.record.device) for table, step in zip(tables, steps, strict=True))
    raw = np.asarray([device_rows[t, s.record.device] ** -0.5 for t, s in zip(tables, steps, strict=True)])
    weights = np.zeros(len(steps))
    for table in set(tables):
        chosen = np.asarray([t == table for t in tables])
        weights[chosen] = TABLE_SHARES[table] * raw[chosen] / raw[chosen].sum()
    return weights


def encode(steps: Sequence[Measured], operators: Sequence[OperatorTable] = ()) -> EncodedSamples:
    """Encoded samples with their sampling weights: the steps, then the operators of the tables, one by one."""
    weights = sampling_weights(steps)
    return encode_samples(
        [step.sample(weight) for step, weight in zip(steps, weights, strict=True)],
        [table.sample for table in operators],
    )


def fit_op_network(encoded: EncodedSamples, chosen: np.ndarray, settings: FitSettings) -> OpNetwork:
    """A network fitted to the chosen samples, see ``descend``; the penalties are those of ``FitSettings``.

    Args:
        encoded: All samples.
        chosen: Indices of the samples to fit.
        settings: Size, schedule and seed.
    """
    torch.manual_seed(settings.seed)
    random = np.random.default_rng(settings.seed)
    features = take(encoded, random.choice(chosen, size=min(400, len(chosen)), replace=False)).features
    deviation = features.std(0)
    scale = torch.where(deviation < 1e-3, torch.ones_like(deviation), deviation)
    names = encoded.devices, encoded.architectures
    network = OpNetwork(features.mean(0), scale, settings.hidden, len(encoded.systems), *names)
    begin = len(STATIC_FEATURES) + POINT_FEATURES.index(DEVICE_FEATURES[0])
    of_device = slice(begin, begin + len(DEVICE_FEATURES))

    def penalty() -> torch.Tensor:
        """Squares of inputs of devices, and of offsets over their scales, of the mean device."""
        inputs = settings.device_penalty * network.first.weight[:, of_device].square().sum()
        groups, classes = settings.group_scale, settings.class_scale
        device = (network.device_groups / groups).square().sum()
        device += (network.device_classes / classes).square().sum()
        architecture = (network.architecture_groups / groups).square().sum()
        offsets = (device + architecture) / max(1, len(network.devices))
        return inputs + settings.offset_penalty * offsets

    descend(network, encoded, chosen, settings, random, penalty)
    return network


@torch.no_grad()
def predict_log_times(
    network: OpNetwork, encoded: EncodedSamples, chosen: np.ndarray, use_latents: bool
) -> np.ndarray:
    """Log step times of the chosen samples."""
    parts = np.array_split(chosen, max(1, len(chosen) // 200))
    return np.concatenate([network(take(encoded, part), use_latents).numpy() for part in parts if len(part)])


def fit_ensemble(
    encoded: EncodedSamples, chosen: np.ndarray, settings: Sequence[FitSettings] = ENSEMBLE_SETTINGS
) -> list[OpNetwork]:
    """One network per setting, fitted to the chosen samples, steps and operators."""
    return [fit_op_network(encoded, chosen, setting) for setting in settings]


def with_offsets_of_architectures(weights: CostModel, tables: Sequence[OperatorTable]) -> CostModel:
    """The cost model with offsets of architectures from convolutions that its networks were not fitted on.

    Offset of an architecture and format: the median of log(measured / predicted) over the rows of its devices that
    have the format, with kernels predicted as in a training under autocast or in fp32. The networks stay.
    """
    logs: dict[tuple[str, int], list[np.ndarray]] = {}
    for table in tables:
        sample, precision = table.sample, table.sample.point.setup.precision
        if NumberFormat(str(precision)) not in table.device.peak_flops_per_s:
            continue
        setup = TrainingSetup(precision=_AS_TRAINED.get(precision, precision))
        point, offsets = replace(sample.point, setup=setup), np.zeros((len(weights.networks), 1, NUM_LATENTS))
        times = step_times(sample.ops, [point], weights, offsets, with_kernels=True)
        assert times.kernel_s is not None
        column = int(format_classes(sample.ops, point_arrays([point]))[0, 0])
        logs.setdefault((table.device.architecture, column), []).append(
            np.log(sample.time_s / times.kernel_s[0])
        )
    names = tuple(sorted({*weights.architectures, *(architecture for architecture, _ in logs)}))
    added = np.zeros((len(names), NUM_FORMATS * len(OpClass)), dtype=np.float32)
    for (architecture, column), parts in logs.items():
        added[names.index(architecture), column] = np.median(np.concatenate(parts))
    places = [names.index(name) for name in weights.architectures]

    def grown(network: NetworkWeights) -> NetworkWeights:
        table = added.copy()
        table[places] += network.architecture_offsets
        return replace(network, architecture_offsets=table)

    rows = Counter(table.source for table in tables for _ in table.operators)
    return replace(
        weights,
        architectures=names,
        networks=tuple(map(grown, weights.networks)),
        provenance={**weights.provenance, "offset_rows": dict(rows)},
    )


_LEAST_CLOCK_SHARE, _LEAST_OFFSET = 0.75, 0.002
_PRODUCTS_IN_FULL = [2 * len(OpClass) + op_class for op_class in (*LAW_CLASSES, OpClass.RECURRENT)]


def without_bound_boards(weights: CostModel) -> CostModel:
    """The cost model in which boards at their power limit do not speak for their architecture's products in fp32.

    Products draw most power, so a board that cannot hold its clock departs by a share of its own: of the boards of an
    architecture, one that holds 0.75 of its clock foretells 0.8 of the offset of another, one that holds less 0.2. The
    offset of such an architecture is that of its other measured boards, shrunk as one more board at zero would; all
    measured boards keep the sum. Boards whose own offset is below 0.002 were not measured.
    """
    devices = [find_device(name) for name in weights.devices]
    holds = np.asarray([sustained_clock_share(device) >= _LEAST_CLOCK_SHARE for device in devices])
    of_device = np.asarray([device.architecture for device in devices])
    own = np.mean([network.device_offsets for network in weights.networks], axis=0)

    def moved(network: NetworkWeights) -> NetworkWeights:
        shared, boards = network.architecture_offsets.copy(), network.device_offsets.copy()
        for row, architecture in enumerate(weights.architectures):
            for column in _PRODUCTS_IN_FULL:
                measured = (of_device == architecture) & (np.abs(own[:, column]) >= _LEAST_OFFSET)
                if not (measured & ~holds).any():
                    continue
                total = shared[row, column] + boards[measured, column]
                free = total[holds[measured]]
                shared[row, column] = free.sum() / (len(free) + 1)
                boards[measured, column] = total - shared[row, column]
        return replace(network, architecture_offsets=shared, device_offsets=boards)

    return replace(weights, networks=tuple(map(moved, weights.networks)))


_AS_TRAINED = {Precision.FP16: Precision.AMP, Precision.BF16: Precision.AMP_BF16}


def measured_devices(steps: Sequence[Measured]) -> dict[str, list[str]]:
    """Kinds of runs that each device was measured in."""
    found: dict[str, set[str]] = {}
    for step in steps:
        found.setdefault(step.device.name, set()).add(run_kind(step.ops, step.setup))
    return {name: sorted(kinds) for name, kinds in sorted(found.items())}


def provenance(
    steps: Sequence[Measured],
    operators: Sequence[OperatorTable],
    settings: Sequence[FitSettings],
    weights: CostModel,
) -> dict[str, Any]:
    """Provenance of the weights: tables, rows and what of them is left out, date, settings and held inputs."""
    rows = Counter(table_of(step) for step in steps)
    rows.update(table.source for table in operators for _ in table.operators)
    return {
        "date": datetime.date.today().isoformat(),
        "rows": dict(sorted(rows.items())),
        "left_out": {**OTHER_IMPLEMENTATION, "timm_infer": " and ".join(INFERENCE_LEFT_OUT)},
        "one_network_in": {f"timm_infer, {layout}": share for layout, share in INFERENCE_SHARE.items()},
        "settings": [asdict(setting) for setting in settings],
        "measured_devices": measured_devices(steps),
        "held_inputs": held_inputs(weights),
    }


def held_inputs(weights: CostModel) -> dict[str, float]:
    """Value at which each input of limited reach stands in the classes that it does not reach: its mean in the fit."""
    mean = np.mean([network.mean for network in weights.networks], axis=0)[len(STATIC_FEATURES) :]
    return {name: round(float(mean[POINT_FEATURES.index(name)]), 3) for name in REACH}
