"""Plots of layer benchmarks: how long layers take, and that against their work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from forerun.base.errors import FailureError
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome
from forerun.surface.report.figure import (
    COLOURS,
    Floats,
    check_plot_path,
    look_of,
    new_figure,
    plain_log_ticks,
    save_figure,
)

__all__ = ["layer_time_histogram", "layer_times_against_work"]

_NUM_BINS = 40
_NULL = "null"  # a call without work, the overhead of each


def layer_time_histogram(path: Path, measurements: Iterable[Measurement]) -> None:
    """Number of layers by time, logarithmic in the time.

    Args:
        path: File to write.
        measurements: Measurements, of which the finished layers are drawn.

    Raises:
        UsageError, FailureError: There is no layer, or the file cannot be written.
    """
    check_plot_path(path)
    _, _, times_ms = _layers(measurements)
    figure = new_figure(width_in=7.0, height_in=4.4)
    axes = figure.subplots()
    bins = np.geomspace(0.95 * times_ms.min(), 1.05 * times_ms.max(), _NUM_BINS)
    axes.hist(times_ms, bins=bins.tolist(), color=COLOURS[0], edgecolor="white", linewidth=0.4)
    median = float(np.median(times_ms))
    axes.axvline(median, color=COLOURS[1], linestyle="--", label=f"median {median:.3g} ms")
    axes.set(xscale="log", xlabel="time of a layer [ms]", ylabel="layers")
    plain_log_ticks(axes.xaxis)
    axes.set_title(f"{len(times_ms):,} layers", fontsize="medium")
    axes.legend(fontsize="small")
    save_figure(figure, path)


def layer_times_against_work(path: Path, measurements: Iterable[Measurement]) -> None:
    """Time of each layer against its FLOPs, forward and training steps apart, a colour per kind.

    Args:
        path: File to write.
        measurements: Measurements, of which the finished layers are drawn.

    Raises:
        UsageError, FailureError: There is no layer, or the file cannot be written.
    """
    check_plot_path(path)
    names, flops, times_ms = _layers(measurements)
    has_work = flops > 0
    if not has_work.any():
        raise FailureError("a plot of times against FLOPs needs a layer that computes, got none")
    figure = new_figure(width_in=7.0, height_in=5.0)
    axes = figure.subplots()
    kinds = sorted(set(names))
    for index, kind in enumerate(kinds):
        rows = has_work & np.asarray([name == kind for name in names])
        axes.scatter(
            flops[rows] / 1e9,
            times_ms[rows],
            s=14,
            alpha=0.6,
            linewidths=0,
            label=f"{kind} ({rows.sum():,})",
            **look_of(index),
        )
    axes.set(
        xscale="log", yscale="log", xlabel="work of the forward pass [GFLOP]", ylabel="time of a layer [ms]"
    )
    plain_log_ticks(axes.xaxis)
    plain_log_ticks(axes.yaxis)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="x-small", ncols=2)
    save_figure(figure, path)


def _layers(measurements: Iterable[Measurement]) -> tuple[list[str], Floats, Floats]:
    """Kind with its mode, FLOPs and median time [ms] of each finished layer."""
    names: list[str] = []
    numbers: list[tuple[float, float]] = []
    for m in measurements:
        is_layer = m.kind is JobKind.LAYER and m.outcome is Outcome.DONE and m.subject != _NULL
        if not is_layer or not m.repetitions_s:
            continue
        work = m.parameters.get("flops")
        mode = str(m.parameters.get("mode", "")).replace("_", " ")
        names.append(f"{m.subject}, {mode}" if mode else m.subject)
        numbers.append(
            (float(work) if isinstance(work, (int, float)) else 0.0, 1e3 * float(np.median(m.repetitions_s)))
        )
    if not names:
        raise FailureError("plots of layers need at least one finished layer, got none")
    flops, times_ms = np.asarray(numbers).T
    return names, flops, times_ms
