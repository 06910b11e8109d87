"""Tables and plots of ``forerun scale servers`` and ``forerun scale points``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from forerun.base.units import format_duration_s
from forerun.prediction.estimate import Interval
from forerun.surface.report.figure import draw_band, look_of, new_figure, save_figure
from forerun.surface.report.scale_page import both_ends
from forerun.surface.report.tables import Columns, table_of

if TYPE_CHECKING:
    from forerun.adapters.classics.scale_servers import ServerCurve, ServerPoint, SpeedFit

_SERVER_COLUMNS: Columns[ServerPoint] = {
    "servers": lambda point: str(point.num_servers),
    "workers": lambda point: str(point.num_workers),
    "batch": lambda point: f"{point.batch_size_per_update:,}",
    "step": lambda point: format_duration_s(point.step_time_s),
    "steps/s": lambda point: f"{point.steps_per_s:.3g}",
    "samples/s": lambda point: f"{point.throughput_samples_per_s:,.0f}",
    "efficiency": lambda point: f"{100 * point.efficiency:.0f} %",
    "time to target": lambda point: None if point.job_time_s is None else format_duration_s(point.job_time_s),
}


def servers_page(curve: ServerCurve) -> RenderableType:
    """Every number of workers and servers, the fastest, and the steps of an epoch."""
    first = curve.points[0]
    best = ", ".join(
        f"{workers} workers with {servers} servers" for servers, workers in curve.best_workers.items()
    )
    lines = [f"Fastest: {best}."]
    batch = f"{curve.batch_size:,} samples"
    if curve.is_global_batch:
        lines.append(f"All workers share the {batch} of an update.")
    elif curve.mode == "synchronous":
        lines.append(f"Each worker has {batch} of an update; --global-batch-size shares one batch.")
    else:
        lines.append(f"An update has the {batch} of one worker.")
    if first.num_steps_per_epoch is not None and len({p.batch_size_per_update for p in curve.points}) == 1:
        total = "" if first.num_steps is None else f", {first.num_steps:,} steps in {curve.epochs:g} epochs"
        lines.append(f"{first.num_steps_per_epoch:,} steps an epoch{total}.")
    head = Text(f"{curve.model}, {curve.mode} parameter servers", style="bold")
    notes = [Text(f"- {note}") for note in curve.notes]
    return Group(head, Text(""), table_of(curve.points, _SERVER_COLUMNS), *map(Text, lines), Text(""), *notes)


def servers_plot(path: Path, curve: ServerCurve) -> None:
    """Updates per second, and time or efficiency, against the number of workers; writes a png, svg or pdf."""
    figure = new_figure(width_in=10, height_in=4.4)
    left, right = figure.subplots(1, 2)
    has_time = curve.points[0].job_time_s is not None
    for index, servers in enumerate(dict.fromkeys(point.num_servers for point in curve.points)):
        points = [point for point in curve.points if point.num_servers == servers]
        workers = [point.num_workers for point in points]
        look = {"label": f"{servers} servers", "markersize": 4, **look_of(index)}
        left.plot(workers, [point.steps_per_s for point in points], **look)
        shown = [100 * p.efficiency if p.job_time_s is None else p.job_time_s / 3600 for p in points]
        right.plot(workers, shown, **look)
    left.set_ylabel("updates of the model per second")
    right.set_ylabel(f"hours for {curve.epochs:g} epochs" if has_time else "efficiency [%]")
    _finish(left, right, "workers")
    figure.suptitle(f"{curve.model}, {curve.mode} parameter servers")
    save_figure(figure, path)


def fit_page(fit: SpeedFit) -> RenderableType:
    """The speed model, its errors and coefficients, the sizes asked about, and those to measure next."""
    parts: list[RenderableType] = []
    if fit.model is not None:
        errors = ", ".join(
            f"{name} {'cannot be fitted without some' if error is None else f'{100 * error:.1f} %'}"
            for name, error in fit.errors.items()
        )
        found = ", ".join(f"{name} {value:.3g}" for name, value in fit.parameters.items())
        parts += [
            Text(f"speed model: {fit.model}", style="bold"),
            Text(f"errors of left-out points: {errors}"),
            Text(f"coefficients: {found}"),
            Text(""),
            table_of(fit.points, _fit_columns(fit.points[0])),
            Text(""),
        ]
    if fit.proposals:
        sizes = ", ".join(
            f"{size['num_workers']} workers x {size['num_servers']} servers" for size in fit.proposals
        )
        parts.append(Text(f"measure next: {sizes}"))
    return Group(*parts, *(Text(f"- {note}") for note in fit.notes))


def _fit_columns(first: Mapping[str, Any]) -> Columns[Mapping[str, Any]]:
    sizes = ("num_workers", "num_servers") if "num_workers" in first else ("num_devices", "num_nodes")
    first_size, second_size = sizes
    return {
        first_size.removeprefix("num_"): lambda point: str(point[first_size]),
        second_size.removeprefix("num_"): lambda point: str(point[second_size]),
        "batch": lambda point: f"{point['batch_size_per_device']:g}",
        "step": lambda point: format_duration_s(point["step_time_s"].value),
        "90 %": lambda point: both_ends(point["step_time_s"]),
        "samples/s": lambda point: f"{point['throughput_samples_per_s'].value:,.1f}",
        "measured": lambda point: (
            "-" if point["measured_step_time_s"] is None else format_duration_s(point["measured_step_time_s"])
        ),
    }


def fit_plot(path: Path, fit: SpeedFit) -> None:
    """Throughput and step against the size, with intervals and the measured points; writes a png, svg or pdf."""
    figure = new_figure(width_in=10, height_in=4.4)
    left, right = figure.subplots(1, 2)
    name = "num_devices" if "num_devices" in fit.points[0] else "num_workers"
    for index, servers in enumerate(dict.fromkeys(point.get("num_servers", 0) for point in fit.points)):
        chosen = sorted((p for p in fit.points if p.get("num_servers", 0) == servers), key=lambda p: p[name])
        numbers = _numbers(chosen, name)
        label = f"{servers} servers" if servers else "fitted, 90 % interval"
        steps: list[Interval] = [point["step_time_s"] for point in chosen]
        draw_band(left, numbers, [point["throughput_samples_per_s"] for point in chosen], index, label)
        draw_band(right, numbers, steps, index, label)
        seen = [point for point in chosen if point["measured_step_time_s"] is not None]
        measured = [point["measured_step_time_s"] for point in seen]
        right.plot(_numbers(seen, name), measured, "kx", label="measured" if seen else None)
    left.set_ylabel("samples per second")
    right.set_ylabel("step [s]")
    _finish(left, right, name.removeprefix("num_"))
    figure.suptitle(f"speed model '{fit.model}'")
    save_figure(figure, path)


def _numbers(points: Sequence[Mapping[str, Any]], name: str) -> Any:
    return np.asarray([point[name] for point in points])


def _finish(left: Any, right: Any, of: str) -> None:
    for axes in (left, right):
        axes.set_xlabel(of)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
