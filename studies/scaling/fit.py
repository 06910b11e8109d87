"""Fits the costs that training adds to the bare collectives, to pairs of one device and several.

The constants of a stack on a class of links are those of all rows plus an offset; offsets pay a quadratic penalty, so
that few rows move them little. The loss is the mean absolute error of the logarithm, smoothed at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from forerun.cost.communication.collectives import AllReduce
from forerun.cost.communication.constants import ScalingConstants
from forerun.cost.communication.data_parallel import (
    Bucket,
    DataParallelStep,
    Gradient,
    Pass,
    data_parallel_step,
    expected_normal_maximum,
    gradient_buckets,
)
from forerun.question.devices.cluster import load_links
from studies.scaling.rows import ScalingRow

Floats = npt.NDArray[np.float64]

_PENALTY = 2.0
_SMOOTHING = 0.01
_START = (0.0, 0.0, -4.5, -7.0)
"""Logarithm of the share, logit of the slow-down, logarithms of drag and overhead in seconds."""
_PRIOR_WIDTH = (1.0, 1.5, 1.0, 0.5)
"""The overhead is launches of collectives and their hooks, a millisecond or so: with 1.5 it takes in what is a share of
the step (5 ms). Networks held out do not tell them apart (10.2 % either way), short steps on many devices do."""

_OPTIMIZER_SHARE = 0.03
"""Of a step of which only the whole is known."""

_FORWARD_SHARE = 1 / 3
"""Of forward and backward, where it is not known: the backward pass has two products for each one of the forward
pass."""


def uniform_gradients(total_bytes: float) -> tuple[Gradient, ...]:
    """A hundred equal gradients at equal distances, for models of which only the number of parameters is known."""
    return tuple(Gradient(size_bytes=total_bytes / 100, ready_share=(i + 1) / 100) for i in range(100))


def split_step(step_s: float) -> Pass:
    """Forward, backward and optimizer of a step of which only the whole is known.

    Args:
        step_s: The step [s].
    """
    work_s = step_s * (1 - _OPTIMIZER_SHARE)
    return Pass(
        forward_s=work_s * _FORWARD_SHARE,
        backward_s=work_s * (1 - _FORWARD_SHARE),
        optimizer_s=step_s * _OPTIMIZER_SHARE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """Rows as arrays, (n,) each: times in seconds, shares of the backward pass, and the group of constants."""

    measured_s: Floats
    one_s: Floats
    backward_s: Floats
    first_ready: Floats
    latency_s: Floats
    transfer_s: Floats
    last_share: Floats
    waiting: Floats
    group: npt.NDArray[np.int64]


def key_of_row(row: ScalingRow) -> str:
    """The entry of the table of constants that a row belongs to."""
    stack = row.stack if row.stack in ("pytorch", "tensorflow") else "other"
    return f"{stack}/{row.link_class}"


def all_reduce_of_row(row: ScalingRow) -> AllReduce:
    """The collective of a row's devices."""
    intra = load_links()[row.intra_link]
    inter = load_links()[row.inter_link] if row.inter_link else None
    return AllReduce(
        num_nodes=row.num_nodes,
        num_devices_per_node=row.num_devices // row.num_nodes,
        intra=intra.kind,
        intra_bytes_per_s=intra.usable_bytes_per_s,
        intra_latency_s=intra.latency_s,
        inter_bytes_per_s=inter.usable_bytes_per_s if inter else float("inf"),
        inter_latency_s=inter.latency_s if inter else 0.0,
    )


def predicted_step_s(row: ScalingRow, constants: ScalingConstants) -> float:
    """The step of a row's devices from the measured step of one [s]."""
    return scale_measured_step(row.one_step_s, row.gradient_bytes, all_reduce_of_row(row), constants).step_s


def fit_scaling_constants(rows: Sequence[ScalingRow]) -> dict[str, ScalingConstants]:
    """Constants by stack and link class, by link class alone, and for anything else (key ``""``).

    Args:
        rows: The pairs to fit.
    """
    found: dict[str, ScalingConstants] = {}
    groupings: tuple[Callable[[ScalingRow], str], ...] = (
        key_of_row,
        lambda row: f"/{row.link_class}",
        lambda row: "",
    )
    for grouping in groupings:
        names = sorted({grouping(row) for row in rows})
        columns = _columns(rows, np.asarray([names.index(grouping(row)) for row in rows]))
        found |= {
            name: _constants(values) for name, values in zip(names, _fit(columns, len(names)), strict=True)
        }
    return found


def _columns(rows: Sequence[ScalingRow], group: npt.NDArray[np.int64]) -> _Columns:
    figures = np.asarray([_figures(row) for row in rows]).T
    names = [field.name for field in fields(_Columns) if field.name != "group"]
    return _Columns(**dict(zip(names, figures, strict=True)), group=group)


def _figures(row: ScalingRow) -> tuple[float, ...]:
    """The columns of one row, in the order of ``_Columns``."""
    about = all_reduce_of_row(row)
    buckets = gradient_buckets(uniform_gradients(row.gradient_bytes))
    sizes = [bucket.size_bytes for bucket in buckets]
    whole_s = sum(about.time_s(size) for size in sizes)
    # Messages of twice the size split a time into what grows with the size and what does not.
    transfer_s = min(whole_s, sum(about.time_s(2 * size) for size in sizes) - whole_s)
    return (
        row.step_s,
        row.one_step_s,
        split_step(row.one_step_s).backward_s,
        buckets[0].ready_share,
        whole_s - transfer_s,
        transfer_s,
        sizes[-1] / sum(sizes),
        expected_normal_maximum(row.num_devices),
    )


def _fit(rows: _Columns, num_groups: int) -> Floats:
    """Constants of each group in fitted coordinates, (groups, 4)."""

    def loss(flat: Floats) -> float:
        common, offsets = flat[:4], flat[4:].reshape(num_groups, 4)
        residual = np.log(_steps_s(rows, (common + offsets)[rows.group]) / rows.measured_s)
        pull = ((common - _START) / _PRIOR_WIDTH) ** 2
        return float(
            np.sqrt(residual**2 + _SMOOTHING**2).sum() + _PENALTY * (offsets**2).sum() + _PENALTY * pull.sum()
        )

    start = np.concatenate([np.asarray(_START), np.zeros(4 * num_groups)])
    best = minimize(loss, start, method="L-BFGS-B", options={"maxiter": 300}).x
    fitted: Floats = best[:4] + best[4:].reshape(num_groups, 4)
    return fitted


def _steps_s(rows: _Columns, at: Floats) -> Floats:
    """The step of ``scale_measured_step`` for equal gradients: the schedule ends with its first or last bucket."""
    busy_s = rows.latency_s + rows.transfer_s * np.exp(-at[:, 0])
    exposed_s = np.maximum(busy_s * rows.last_share, busy_s - (1 - rows.first_ready) * rows.backward_s)
    slowdown = 1 / (1 + np.exp(-at[:, 1]))
    hidden_s = np.maximum(0.0, busy_s - exposed_s)
    waiting = np.exp(at[:, 2]) * rows.waiting
    steps_s: Floats = rows.one_s * (1 + waiting) + np.exp(at[:, 3]) + exposed_s + slowdown * hidden_s
    return steps_s


def _constants(values: Floats) -> ScalingConstants:
    return ScalingConstants(
        share=float(np.exp(values[0])),
        slowdown=float(1 / (1 + np.exp(-values[1]))),
        drag=float(np.exp(values[2])),
        overhead_s=float(np.exp(values[3])),
    )


def scale_measured_step(
    one_step_s: float,
    gradient_bytes: float,
    all_reduce: AllReduce,
    constants: ScalingConstants,
    buckets: tuple[Bucket, ...] | None = None,
) -> DataParallelStep:
    """The step of many devices from the measured step of one.

    Args:
        one_step_s: Step of one device with the batch that each of the many has [s].
        gradient_bytes: Gradients of the model as they are sent [bytes].
        all_reduce: The devices and links; ``share`` is applied here.
        constants: Effect of training on the link.
        buckets: Gradient buckets; equal gradients at equal distances if None.
    """
    if buckets is None:
        buckets = gradient_buckets(uniform_gradients(gradient_bytes))
    return data_parallel_step(
        split_step(one_step_s),
        buckets,
        lambda size: all_reduce.time_s(size / constants.share),
        all_reduce.num_devices,
        slowdown=constants.slowdown_on(all_reduce),
        coefficient_of_variation=constants.drag,
        overhead_s=constants.overhead_s,
    )
