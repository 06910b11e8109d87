"""Pages about many devices: the table and the plot of ``forerun scale``, layouts and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from forerun.base.units import format_bytes, format_count, format_duration_s
from forerun.prediction.estimate import Interval
from forerun.search.advise import AdvicePlan, Change
from forerun.search.layout_search import LayoutPoint
from forerun.search.layouts import LayoutPlan
from forerun.search.scale import ScalePoint
from forerun.surface.report.figure import draw_band, look_of, new_figure, number_labels
from forerun.surface.report.tables import Columns, table_of
from forerun.surface.report.wording import format_usd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from forerun.search.scale import ScaleCurve

SCALE_COLUMNS: Columns[ScalePoint] = {
    "devices": lambda point: str(point.num_devices),
    "nodes": lambda point: str(point.num_nodes),
    "global batch": lambda point: str(point.batch_size_global),
    "step": lambda point: format_duration_s(point.step_time_s.value),
    "90 %": lambda point: both_ends(point.step_time_s),
    "samples/s": lambda point: format_count(point.throughput_samples_per_s.value),
    "speed-up": lambda point: f"{point.speedup:.2f}",
    "efficiency": lambda point: f"{100 * point.efficiency:.0f} %",
    "exposed": lambda point: format_duration_s(point.exposed_s),
    "memory": lambda point: format_bytes(point.peak_memory_bytes),
    "steps/epoch": lambda point: (
        None if point.num_steps_per_epoch is None else f"{point.num_steps_per_epoch:,}"
    ),
    "epoch": lambda point: (
        None if point.epoch_time_s is None else format_duration_s(point.epoch_time_s.value)
    ),
    "cost/epoch": lambda point: (
        None if point.cost_usd_per_epoch is None else format_usd(point.cost_usd_per_epoch)
    ),
}


def scale_page(curve: ScaleCurve) -> RenderableType:
    """A table for each kind of scaling, with the number of devices at which more stop paying."""
    links = " and ".join(link for link in (curve.intra_link, curve.inter_link) if link)
    head = f"{curve.model} on {curve.device}, {curve.precision}, {curve.strategy}"
    parts: list[RenderableType] = [Text(head + (f", over {links}" if links else ""), style="bold")]
    for kind, points in points_by_scaling(curve).items():
        parts += [
            Text(""),
            Text(scaling_words(kind, points[0].batch_size_per_device, points[0].batch_size_global)),
            table_of(points, SCALE_COLUMNS),
            Text(paying_sentence(curve.stops_paying_at[kind])),
        ]
    return Group(*parts, Text(""), *(Text(f"- {note}") for note in curve.notes))


def points_by_scaling(curve: ScaleCurve) -> Mapping[str, list[ScalePoint]]:
    """The points of each kind of scaling, weak scaling first."""
    kinds = dict.fromkeys(str(point.scaling) for point in curve.points)
    return {kind: [point for point in curve.points if point.scaling == kind] for kind in kinds}


def both_ends(time_s: Interval) -> str:
    """Both ends of an interval, each with its unit."""
    return f"{format_duration_s(time_s.low)} to {format_duration_s(time_s.high)}"


def scaling_words(kind: str, batch_size_per_device: int, batch_size_global: int) -> str:
    """A kind of scaling and the batch that stays the same in it."""
    if kind == "weak":
        return f"weak scaling: batch size {batch_size_per_device} on every device"
    return f"strong scaling: global batch size {batch_size_global}"


def paying_sentence(number: int | None) -> str:
    """A sentence on the number of devices from which adding more no longer pays, None where all pay."""
    if number is None:
        return "Every size pays: the devices that are added bring at least half of what the first does."
    return f"Adding devices stops paying at {number}: those that are added bring less than half of what the first does."


def scale_figure(curve: ScaleCurve) -> Figure:
    """Throughput and efficiency against the number of devices."""
    figure = new_figure(width_in=10, height_in=4.4)
    left, right = figure.subplots(1, 2)
    for index, (kind, points) in enumerate(points_by_scaling(curve).items()):
        _draw_kind(left, right, index, kind, points, curve.stops_paying_at[kind])
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        number_labels(axes, np.asarray([point.num_devices for point in curve.points]))
        axes.set_xlabel("devices")
        axes.grid(alpha=0.3)
    left.set_yscale("log", base=2)
    left.set_yticks(*_powers(left))
    left.set_ylabel("samples per second")
    right.set_ylim(0, 105)
    right.set_ylabel("efficiency [%]")
    left.legend()
    right.legend()
    figure.suptitle(f"{curve.model} on {curve.device}, {curve.strategy}")
    return figure


def _draw_kind(
    left: Axes, right: Axes, index: int, kind: str, points: list[ScalePoint], stop: int | None
) -> None:
    numbers = np.asarray([point.num_devices for point in points])
    rates = [point.throughput_samples_per_s for point in points]
    draw_band(left, numbers, rates, index, f"{kind} scaling, 90 % interval")
    # The line of perfect scaling goes through one device, which the curve need not have.
    alone = rates[0].value / points[0].speedup
    left.plot(
        numbers, alone * numbers, color="#888888", linestyle="--", label="linear" if not index else None
    )
    shares = [100 * point.efficiency for point in points]
    right.plot(numbers, shares, label=f"{kind} scaling", **look_of(index))
    if stop is not None:
        colour = look_of(index)["color"]
        right.axvline(stop, color=colour, linestyle=":", label=f"{kind}: stops paying at {stop}")


def _powers(axes: Axes) -> tuple[list[float], list[str]]:
    low, high = axes.get_ylim()
    ticks = [2.0**k for k in range(-4, 40) if low <= 2.0**k <= high]
    return ticks, [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in ticks]


_LAYOUTS: Columns[LayoutPoint] = {
    "layout": lambda point: point.parallel,
    "strategy": lambda point: point.strategy,
    "micro-batch": lambda point: str(point.batch_size),
    "steps": lambda point: str(point.accumulation),
    "recompute": lambda point: point.recompute,
    "schedule": lambda point: point.schedule,
    "step": lambda point: format_duration_s(point.step_time_s.value),
    "samples/s": lambda point: f"{point.throughput_samples_per_s.value:.4g}",
    "memory": lambda point: format_bytes(point.peak_memory_bytes.value),
    "room": lambda point: format_bytes(max(0.0, point.room_bytes)),
    "fits": lambda point: point.fits,
}
_CHANGES: Columns[Change] = {
    "change": lambda change: change.settings,
    "faster by": lambda change: _gain_words(change.gain),
    "90 %": lambda change: f"{_gain_words(change.gain_low)} to {_gain_words(change.gain_high)}",
    "memory": lambda change: format_bytes(change.peak_memory_bytes.value),
    "fits": lambda change: change.fits or "",
}


def _gain_words(gain: float) -> str:
    """A gain in per cent, from nine times as fast on as a factor."""
    return f"{gain:+.0%}".replace("%", " %") if gain < 9 else f"{1 + gain:.3g} times"


def layouts_page(plan: LayoutPlan) -> Iterator[RenderableType]:
    """The best layouts, the front, what to change first, and the best layout in the words of frameworks.

    Of a plan for one framework (``--write``) its file alone, to be kept.
    """
    if len(plan.files) == 1:
        yield from (text.removesuffix("\n") for text in plan.files.values())
        return
    head = f"{plan.model} on {plan.cluster}, global batch {plan.global_batch}"
    parts: list[RenderableType] = [
        Text(head, style="bold"),
        Text(f"{plan.num_compared:,} layouts compared, {plan.num_fitting:,} fit"),
        Text(""),
        Text("Fastest layouts, the sure ones first; room is what stays free at the upper end of the memory"),
        table_of(plan.best, _LAYOUTS, left=("layout", "strategy")),
        Text(""),
        Text("Why"),
        *(
            Text(
                f"- {point.parallel} {point.strategy}: {'; '.join(filter(None, (point.reason, point.failure)))}"
            )
            for point in plan.best
        ),
        Text(""),
        Text("Time against memory (Pareto front)"),
        table_of(plan.front, _LAYOUTS, left=("layout", "strategy")),
        Text(""),
        Text(f"What to change first: {plan.change_first}"),
    ]
    yield Group(*parts)
    for name, text in plan.files.items():
        yield Group(Text(""), Text(f"{name}:", style="bold"))
        yield text.rstrip()  # a plain text is no paragraph: the lines of a file stay as they are, to be copied
    yield Group(Text(""), *(Text(f"- {note}") for note in plan.notes))


def advice_page(plan: AdvicePlan) -> RenderableType:
    """The present run, and the changes that help most."""
    parts: list[RenderableType] = [
        Text(f"{plan.model} on {plan.device}", style="bold"),
        Text(
            f"now: {plan.samples_per_s:.4g} samples/s, step {format_duration_s(plan.step_time_s.value)}, "
            f"{format_bytes(plan.peak_memory_bytes.value)} a device, fits: {plan.fits}"
        ),
        Text(""),
    ]
    if not plan.changes:
        parts.append(Text("No change that was tried makes this run faster."))
    else:
        parts.append(table_of(plan.changes, _CHANGES, left=("change",)))
        parts += [Text(""), *(Text(f"- {change.settings}: {change.meaning}") for change in plan.changes)]
    return Group(*parts, Text(""), *(Text(f"- {note}") for note in plan.notes))
