"""Speed models fitted to few points, on parameter servers and data parallel placements; splits by a fixed seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from forerun.adapters.classics.model_choice import ALL_REDUCE_MODELS, AVERAGE, SERVER_AVERAGE
from forerun.adapters.classics.server_models import OptimusModel, propose_points, server_columns
from forerun.adapters.classics.speed_models import SmoothedModel, SpeedModel, SpeedPoint
from forerun.base.errors import InvalidSetupError
from forerun.base.numerics import fit_relative
from studies.tables.public import public_table

Floats = npt.NDArray[np.float64]

_SEED = 20260101

_Method = Callable[[Sequence[SpeedPoint], Sequence[SpeedPoint]], Floats]
"""Function from the points of a fit and others to the steps of the others [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewPoints:
    """Mean error of held-out points after a fit to few.

    Attributes:
        errors: Mean |predicted / measured - 1| by method, job and number of points.
        num_jobs: Jobs.
        num_splits: Random splits of each.
        coverage: Share of held-out points inside the 90 % interval, by method and number of points.
    """

    errors: Mapping[tuple[str, str, int], float]
    num_jobs: int
    num_splits: int
    coverage: Mapping[tuple[str, int], float]

    def mean(self, method: str, num_points: int) -> float:
        """Mean over the jobs."""
        found = [
            value
            for (name, _, number), value in self.errors.items()
            if name == method and number == num_points
        ]
        return float(np.mean(found))

    def jobs(self) -> list[str]:
        """Names of the jobs."""
        return sorted({job for _, job, _ in self.errors})


def read_server_points(folder: Path) -> dict[str, list[SpeedPoint]]:
    """Points of ``optimus_dl2_speed`` by job: workers, servers, step of the fixed global batch; no failed runs."""
    table = public_table(folder, "optimus_dl2_speed")
    table = table[~table["failed_run"] & (table["seconds_per_step"] > 0)]
    found: dict[str, list[SpeedPoint]] = {}
    for row in table.to_dict("records"):
        point = SpeedPoint(
            num_devices=int(row["n_workers"]),
            num_servers=int(row["n_parameter_servers"]),
            batch_size_per_device=float(row["batch_size_total"]) / int(row["n_workers"]),
            step_time_s=float(row["seconds_per_step"]),
        )
        found.setdefault(str(row["model"]), []).append(point)
    return found


def read_placements(folder: Path) -> dict[str, list[SpeedPoint]]:
    """Points of ``adaptdl_step_times``, AWS T4 placements, by job."""
    table = public_table(folder, "adaptdl_step_times")
    table = table[(table["cluster"] == "aws") & (table["measurement_kind"] == "placements")]
    found: dict[str, list[SpeedPoint]] = {}
    for row in table.to_dict("records"):
        step_s = float(row["step_time_s"])
        point = SpeedPoint(
            num_devices=int(row["n_gpus"]),
            num_nodes=int(row["n_nodes"]),
            batch_size_per_device=float(row["batch_size_per_gpu"]),
            step_time_s=step_s,
            synchronisation_s=min(max(0.0, float(row["sync_time_s"])), step_s),
        )
        found.setdefault(str(row["application"]), []).append(point)
    return found


def server_study(folder: Path, num_points: int = 10, num_splits: int = 40) -> FewPoints:
    """Held-out errors on parameter servers.

    Methods: "forerun" (mean of Optimus' form and a surface, residuals carried on), "form" (Optimus' form alone with
    its residuals), "relative" and "plain" (least squares on relative and on absolute error), "linear" (speed in
    proportion to workers), and "designed": "form" at points that were proposed instead of drawn.
    """
    jobs = read_server_points(folder)
    ours = SmoothedModel(SERVER_AVERAGE)
    others: dict[str, _Method] = {
        "form": partial(_fitted, _smoothed_form()),
        "relative": partial(_fitted, OptimusModel()),
        "plain": _plain,
        "linear": _linear,
    }
    found, inside = _held_out(jobs, ours, others, num_points, num_splits, with_design=True)
    coverage = {("forerun", num_points): inside}
    return FewPoints(errors=found, num_jobs=len(jobs), num_splits=num_splits, coverage=coverage)


def _held_out(
    jobs: Mapping[str, Sequence[SpeedPoint]],
    ours: SpeedModel,
    others: Mapping[str, _Method],
    number: int,
    num_splits: int,
    *,
    with_design: bool = False,
) -> tuple[dict[tuple[str, str, int], float], float]:
    """Mean error by method and job after so many points, and the share of points inside our intervals."""
    found: dict[tuple[str, str, int], float] = {}
    inside: list[float] = []
    for job, points in jobs.items():
        rng = np.random.default_rng(_SEED)
        collected: dict[str, list[float]] = defaultdict(list)
        for _ in range(num_splits):
            train, test = _split(points, rng.permutation(len(points))[:number].tolist())
            fit = ours.fit(train)
            collected["forerun"].append(_error(fit.step_s(test), test))
            intervals = zip(fit.intervals(test), test, strict=True)
            inside += [one.low <= point.measured_s <= one.high for one, point in intervals]
            for name, predict in others.items():
                collected[name].append(_error(predict(train, test), test))
            if with_design:
                train, test = _split(points, _designed(points, number, rng))
                collected["designed"].append(_error(_smoothed_form().fit(train).step_s(test), test))
        found |= {(name, job, number): float(np.mean(values)) for name, values in collected.items()}
    return found, float(np.mean(inside))


def _smoothed_form() -> SpeedModel:
    """The form the design is made for."""
    return SmoothedModel(OptimusModel())


def _split(points: Sequence[SpeedPoint], chosen: Sequence[int]) -> tuple[list[SpeedPoint], list[SpeedPoint]]:
    inside = set(chosen)
    return [points[i] for i in chosen], [point for i, point in enumerate(points) if i not in inside]


def _error(predicted: Floats, test: Sequence[SpeedPoint]) -> float:
    measured = np.asarray([point.measured_s for point in test])
    return float(np.mean(np.abs(predicted / measured - 1)))


def _plain(train: Sequence[SpeedPoint], test: Sequence[SpeedPoint]) -> Floats:
    """Non-negative least squares on times, not divided by them: Optimus' own fit."""
    batch = train[0].batch_size_global
    columns = server_columns(train, synchronous=True, batch=batch)
    times = np.asarray([point.measured_s for point in train])
    theta, _ = nnls(columns, times)
    predicted: Floats = server_columns(test, synchronous=True, batch=batch) @ theta
    return np.maximum(predicted, 1e-9)


def _fitted(model: SpeedModel, train: Sequence[SpeedPoint], test: Sequence[SpeedPoint]) -> Floats:
    return model.fit(train).step_s(test)


def _linear(train: Sequence[SpeedPoint], test: Sequence[SpeedPoint]) -> Floats:
    """Speed in proportion to workers, from the first point."""
    first = train[0]
    return np.asarray([first.measured_s * first.num_devices / point.num_devices for point in test])


def _designed(points: Sequence[SpeedPoint], num_points: int, rng: np.random.Generator) -> list[int]:
    """A design in two rounds: half the points for an expected theta, the rest for the theta fitted to them.

    The candidates are a random nine tenths of the sizes, so that splits differ.
    """
    pool = rng.permutation(len(points))[: int(0.9 * len(points))].tolist()
    candidates = [points[i] for i in pool]
    num_first = num_points // 2 + 1
    first = propose_points(candidates, num_first)
    columns = server_columns(first, synchronous=True, batch=first[0].batch_size_global)
    try:
        names = [f"t{i}" for i in range(columns.shape[1])]
        theta = fit_relative(columns, np.asarray([p.measured_s for p in first]), names).coefficients.tolist()
    except InvalidSetupError:
        return [pool[candidates.index(point)] for point in propose_points(candidates, num_points)]
    left = [point for point in candidates if point not in first]
    more = propose_points(left, num_points - num_first, measured=first, theta=theta)
    return [pool[candidates.index(point)] for point in (*first, *more)]


def placement_study(folder: Path, numbers: Sequence[int] = (8, 16), num_splits: int = 40) -> FewPoints:
    """Held-out errors on data parallel placements after 8 and 16 points a job."""
    jobs = read_placements(folder)
    ours = SmoothedModel(AVERAGE)
    others: dict[str, _Method] = {model.name: partial(_fitted, model) for model in ALL_REDUCE_MODELS}
    found: dict[tuple[str, str, int], float] = {}
    coverage: dict[tuple[str, int], float] = {}
    for number in numbers:
        errors, coverage["forerun", number] = _held_out(jobs, ours, others, number, num_splits)
        found |= errors
    return FewPoints(errors=found, num_jobs=len(jobs), num_splits=num_splits, coverage=coverage)
