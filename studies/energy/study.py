"""Energy of epochs under power limits, with the network and the limit, and with the GPU as well, held out.

The time of the epoch at the board's largest limit is given, as it is to the baseline; the study predicts power and
the slowdown under the limit. Constants of the law are of a GPU each, taken to be alike, but for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from forerun.cost.time.power import POWER_LAW, PowerLaw, demand_share, limited_share, power_slowdown
from forerun.evidence.fitting.evaluation import errors
from studies.energy.table import EnergyRows
from studies.markdown import error_cells, markdown_table

ENERGY_STUDY_VERSION = 3
"""Raised whenever the study changes what it computes; kept results of other versions are not used."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Constant:
    """Fit of one constant of the law.

    Attributes:
        low, begin, high: Bounds, and the start of a fit: power that goes with the cube of the clock down to half, not
            what other fits found.
        likeness: Assumed similarity of GPUs: weight of the differences of their logarithms from the mean.
    """

    low: float
    begin: float
    high: float
    likeness: float = 0.0


_PER_GPU = {
    "idle_share": _Constant(0.02, 0.2, 0.39, likeness=0.2),
    "full_share": _Constant(0.4, 0.9, 1.1),
    "slowdown_exponent": _Constant(0.05, 1 / 3, 1.5, likeness=0.15),
    "knee_share": _Constant(0.02, 0.5, 0.95, likeness=0.5),
    "activity_factor": _Constant(0.5, 3.0, 30.0, likeness=1.0),
    "activity_exponent": _Constant(0.5, 1.0, 3.0, likeness=1.3),
}
_SHARED = {"compute_weight": _Constant(-2.0, 0.0, 2.0)}

_OUTLIER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyResult:
    """Energies of epochs, each predicted by a law that has seen neither its network nor its limit [J].

    Attributes:
        gpu, network: GPU and network of each row.
        measured_j: Measured energy.
        known_gpu_j: Predicted, with other networks and limits of the same GPU in the fit.
        new_gpu_j: Predicted, with no row of the GPU in the fit.
        tdp_time_j: The board's limit times the measured time, the baseline.
        limit_time_j: The limit that was set times the measured time.
        laws: Constants fitted to all rows, by GPU.
    """

    gpu: npt.NDArray[np.str_]
    network: npt.NDArray[np.str_]
    measured_j: Floats
    known_gpu_j: Floats
    new_gpu_j: Floats
    tdp_time_j: Floats
    limit_time_j: Floats
    laws: dict[str, PowerLaw]


def energy_study(rows: EnergyRows) -> EnergyResult:
    """Predicts every row by fits without its network and its limit, then without its GPU too."""
    known, new = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    limit_w = np.round(rows.limit_share * rows.board_limit_w)
    for network in np.unique(rows.network):
        for limit in np.unique(limit_w):
            tested = (rows.network == network) & (limit_w == limit)
            if tested.any():
                rest = (rows.network != network) & (limit_w != limit)
                _predict_into(known, rows, tested, fit_power_laws(rows, rest))
        for gpu in np.unique(rows.gpu):
            tested = (rows.network == network) & (rows.gpu == gpu)
            laws = fit_power_laws(rows, (rows.network != network) & (rows.gpu != gpu))
            _predict_into(new, rows, tested, {str(gpu): mean_law(list(laws.values()))})
    return EnergyResult(
        gpu=rows.gpu,
        network=rows.network,
        measured_j=rows.power_w * rows.time_s,
        known_gpu_j=known,
        new_gpu_j=new,
        tdp_time_j=rows.board_limit_w * rows.time_s,
        limit_time_j=rows.limit_share * rows.board_limit_w * rows.time_s,
        laws=fit_power_laws(rows, np.ones(len(rows), dtype=bool)),
    )


def mean_law(laws: Sequence[PowerLaw]) -> PowerLaw:
    """The law of a GPU that nobody measured: the mean of the others."""
    means: dict[str, Any] = {
        name: float(np.mean([getattr(law, name) for law in laws])) for name in (*_PER_GPU, *_SHARED)
    }
    return replace(laws[0], **means)


def _predict_into(out: Floats, rows: EnergyRows, tested: Bools, laws: dict[str, PowerLaw]) -> None:
    for gpu, law in laws.items():
        chosen = tested & (rows.gpu == gpu)
        share, slowdown = _under_limit(rows, chosen, law)
        out[chosen] = share * rows.board_limit_w[chosen] * rows.full_time_s[chosen] * slowdown


def _under_limit(rows: EnergyRows, chosen: Bools, law: PowerLaw) -> tuple[Floats, Floats]:
    """Power as a share of the board's limit, and time over that at the largest limit."""
    demand = demand_share(rows.activity[chosen], law)
    fraction = rows.compute_fraction[chosen]
    slowdown = power_slowdown(demand, rows.limit_share[chosen], fraction, law)
    at_full = power_slowdown(demand, rows.full_limit_share[chosen], fraction, law)
    return limited_share(demand, rows.limit_share[chosen]), slowdown / at_full


def fit_power_laws(rows: EnergyRows, fitted: Bools) -> dict[str, PowerLaw]:
    """Laws of the GPUs in the fitted rows, by least squares on the logarithms of power and slowdown.

    Args:
        rows: Epochs.
        fitted: Whether each row takes part in the fit, (n,).
    """
    gpus = [str(gpu) for gpu in np.unique(rows.gpu[fitted])]
    chosen = [fitted & (rows.gpu == gpu) for gpu in gpus]
    constants = [constant for constant in _PER_GPU.values() for _ in gpus] + list(_SHARED.values())

    def laws(values: Floats) -> list[PowerLaw]:
        shared = dict(zip(_SHARED, values[-len(_SHARED) :], strict=True))
        own = values[: -len(_SHARED)].reshape(len(_PER_GPU), len(gpus))
        return [
            replace(POWER_LAW, **shared, **dict(zip(_PER_GPU, own[:, index], strict=True)))
            for index in range(len(gpus))
        ]

    def residuals(values: Floats) -> Floats:
        parts = [_residuals(rows, chosen[index], law) for index, law in enumerate(laws(values))]
        own = values[: -len(_SHARED)].reshape(len(_PER_GPU), len(gpus))
        for row, constant in zip(own, _PER_GPU.values(), strict=True):
            if constant.likeness:
                part = np.log(row)
                parts.append(constant.likeness * (part - part.mean()))
        return np.concatenate([*parts, [0.5 * values[-1]]])

    begin = np.asarray([constant.begin for constant in constants])
    bounds = ([constant.low for constant in constants], [constant.high for constant in constants])
    found = least_squares(residuals, begin, bounds=bounds, loss="soft_l1", f_scale=_OUTLIER, xtol=1e-6)
    return dict(zip(gpus, laws(found.x), strict=True))


def _residuals(rows: EnergyRows, chosen: Bools, law: PowerLaw) -> Floats:
    share, slowdown = _under_limit(rows, chosen, law)
    power = np.log(share * rows.board_limit_w[chosen] / rows.power_w[chosen])
    time = np.log(slowdown * rows.full_time_s[chosen] / rows.time_s[chosen])
    return np.concatenate([power, time])


def energy_section(result: EnergyResult) -> str:
    """The section of the accuracy page."""
    predictors = {
        "**forerun**, network and power limit held out": result.known_gpu_j,
        "forerun, network and GPU held out": result.new_gpu_j,
        "TDP x time": result.tdp_time_j,
        "set limit x time": result.limit_time_j,
    }
    table = [(name, *error_cells(errors(energy, result.measured_j))) for name, energy in predictors.items()]
    return (
        "## Energy under power limits\n\n`zeus_epoch_time_power`; the baselines know the measured time.\n\n"
        + markdown_table(("predictor", "rows", "MAPE", "median", "p90"), table)
        + "\nNetwork and power limit held out:\n\n"
        + markdown_table(
            ("rows of", "rows", "MAPE", "median", "p90"),
            _groups(result, result.network),
        )
    )


def _groups(result: EnergyResult, names: npt.NDArray[np.str_]) -> list[tuple[str, ...]]:
    found = []
    for name in np.unique(names).tolist():
        own = names == name
        found.append((name, *error_cells(errors(result.known_gpu_j[own], result.measured_j[own]))))
    return found
