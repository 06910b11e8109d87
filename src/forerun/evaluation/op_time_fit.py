"""Fits the shipped op-level model from the public tables and notes where it came from."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.costs.calibration import PriorScales
from forerun.costs.op_weights import NetworkWeights, OpTimeWeights
from forerun.evaluation.corpus import Measured
from forerun.evaluation.operator_tables import OperatorTable
from forerun.regressors.op_fit import (
    EncodedSamples,
    FitSettings,
    OpNetwork,
    encode_samples,
    fit_op_network,
)

__all__ = [
    "ENSEMBLE_SETTINGS",
    "OTHER_IMPLEMENTATION",
    "TABLE_SHARES",
    "as_weights",
    "fit_ensemble",
    "operator_rows",
    "sampling_weights",
]

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
    "tresnet": "measured with InPlaceABN kernels (timm 0.6), built with ordinary batch norms by today's timm",
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


def operator_rows(
    steps: Sequence[Measured], operators: Sequence[OperatorTable], without: Sequence[str] = ()
) -> npt.NDArray[np.int64]:
    """Places of the operators in what ``encode`` returns, (k,).

    Args:
        steps: The steps that precede them.
        operators: Their tables.
        without: Devices whose operators are left out.
    """
    keep = [table.device.name not in without for table in operators for _ in table.operators]
    found: npt.NDArray[np.int64] = len(steps) + np.flatnonzero(keep)
    return found


def fit_ensemble(
    encoded: EncodedSamples, chosen: np.ndarray, settings: Sequence[FitSettings] = ENSEMBLE_SETTINGS
) -> list[OpNetwork]:
    """One network per setting, fitted to the chosen samples, steps and operators."""
    return [fit_op_network(encoded, chosen, setting) for setting in settings]


def as_weights(
    networks: Sequence[OpNetwork],
    systems: Sequence[str],
    provenance: Mapping[str, Any],
    fitted: Collection[str] | None = None,
) -> OpTimeWeights:
    """The networks as plain arrays.

    Args:
        networks: Members.
        systems: Keys of their latents.
        provenance: See ``OpTimeWeights``.
        fitted: Systems whose rows were fitted, None for all: what is not among them has no offsets to lend.
    """
    rows = [i for i, name in enumerate(systems) if fitted is None or name in fitted]
    return OpTimeWeights(
        networks=tuple(_as_arrays(network, rows) for network in networks),
        systems=tuple(systems[i] for i in rows),
        provenance=provenance,
        devices=networks[0].devices if networks else (),
        architectures=networks[0].architectures if networks else (),
    )


def _as_arrays(network: OpNetwork, rows: Sequence[int]) -> NetworkWeights:
    state = {name.replace(".", "_"): tensor.detach().numpy() for name, tensor in network.named_parameters()}
    state["latents"] = state["latents"][list(rows)]
    state["device_offsets"] = network.device_offsets().detach().numpy()
    state["architecture_offsets"] = network.architecture_offsets().detach().numpy()
    return NetworkWeights(**{name: state[name].astype(np.float32) for name in NetworkWeights.__slots__})


def measured_devices(steps: Sequence[Measured]) -> dict[str, list[str]]:
    """Which devices were measured in which kind of precision."""
    found: dict[str, set[str]] = {}
    for step in steps:
        kind = "half" if step.setup.precision.is_half else "full"
        found.setdefault(step.device.name, set()).add(kind)
    return {name: sorted(kinds) for name, kinds in sorted(found.items())}


def provenance(
    steps: Sequence[Measured],
    operators: Sequence[OperatorTable],
    settings: Sequence[FitSettings],
    intervals: Mapping[str, Mapping[str, float]],
    scales: PriorScales,
) -> dict[str, Any]:
    """What a reader of the weights must know: tables, rows, date, settings, intervals per tier."""
    rows = Counter(table_of(step) for step in steps)
    rows.update(table.source for table in operators for _ in table.operators)
    return {
        "date": datetime.date.today().isoformat(),
        "rows": dict(sorted(rows.items())),
        "settings": [asdict(setting) for setting in settings],
        "measured_devices": measured_devices(steps),
        "intervals": {tier: dict(law) for tier, law in intervals.items()},
        "calibration_scales": asdict(scales),
    }
