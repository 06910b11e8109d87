"""The page and the plot of ``forerun plan``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_bytes, format_count, format_duration_s, format_energy_j, format_mass_g
from forerun.prediction.estimate import Interval
from forerun.question.model import own_settings
from forerun.search.choice import DEVICE_MEMORY
from forerun.search.plan_answer import (
    BrokenLimit,
    CandidateAxes,
    Plan,
    PlanCandidate,
    PlanPoint,
    PlanRelaxation,
    Rejection,
)
from forerun.search.search import QUANTITIES, Quantity
from forerun.surface.report.figure import look_of, new_figure, plain_log_ticks
from forerun.surface.report.tables import Columns, table_of
from forerun.surface.report.wording import format_percent, format_price, format_usd, format_whole, range_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from forerun.search.plan import Planned

_MOST_REJECTED = 8
_MOST_UNPRICED = 12

_Cell = Callable[[Any], "str | Text | None"]


def plan_page(plan: Plan) -> RenderableType:
    """A plan as a page of text: the choice, the candidates, the front, and the rejected candidates with reasons."""
    parts: list[RenderableType] = [_title(plan), Text(""), *_choice(plan), Text("")]
    heading = "Best candidates" if plan.chosen else "Nearest misses"
    parts += [Text(heading, style="bold"), _indented(_points(plan, plan.points)), Text("")]
    if len(plan.pareto) > 1:
        parts += [Text(_front_words(plan), style="bold"), _indented(_points(plan, plan.pareto)), Text("")]
    if plan.unpriced:
        unpriced = "Without a known price: the fastest of each device, whose cost cannot be judged"
        quickest = sorted(plan.unpriced, key=lambda point: point.job_time_s.value)[:_MOST_UNPRICED]
        parts += [Text(unpriced, style="bold"), _indented(_points(plan, quickest))]
        if len(plan.unpriced) > len(quickest):
            more = len(plan.unpriced) - len(quickest)
            parts.append(_indented(Text(f"and {more} slower ones; --json lists them")))
        parts.append(Text(""))
    if plan.rejected:
        parts += [Text(_rejected_words(plan), style="bold"), _indented(_rejections(plan)), Text("")]
    if plan.notes:
        parts.append(Text("Notes", style="bold"))
        parts.append(_indented(Group(*(Text(f"- {note}") for note in plan.notes))))
    return Group(*parts)


def planned_page(found: Planned) -> Iterator[RenderableType]:
    """A plan as a page, and what would make its choice faster, once that is known."""
    yield plan_page(found)
    if found.ways_to_save:
        yield f"Also worth trying with the {'chosen' if found.chosen else 'nearest'} one"
    for way in found.ways_to_save:
        yield f"  -  {way.words}: {100 * way.gain:.0f} % less time"


def plan_choice_lines(plan: Plan) -> tuple[str, ...]:
    """One sentence each on the choice, the binding limit and the certainty of the choice."""
    return tuple(str(line).strip() for line in _choice(plan))


def rejection_line(rejection: Rejection) -> str:
    """A rejected candidate, with the limits that it breaks."""
    return f"{point_words(rejection)}: {', '.join(_broken_words(broken) for broken in rejection.broken)}"


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2), expand=False)


def _title(plan: Plan) -> Text:
    limits = ", ".join(plan.limits) or "no limits"
    feasible = (
        f"{format_whole(plan.num_feasible)} of {format_whole(plan.num_candidates)} candidates keep the limits"
    )
    return Text.assemble(
        ("Plan", "bold"), f" for {plan.job}: least {plan.minimize} within {limits}\n", feasible
    )


def _choice(plan: Plan) -> list[Text]:
    if plan.chosen is None:
        miss = plan.nearest_miss
        assert miss is not None
        lines = [
            Text.assemble(("Nothing keeps all limits. ", "bold red"), f"Nearest: {point_words(miss)}"),
            Text(f"  it breaks {', '.join(_broken_words(broken) for broken in miss.broken)}"),
        ]
        return [*lines, *_relaxations(plan)]
    lines = [Text.assemble(("Choose ", "bold"), (point_words(plan.chosen), "bold green"))]
    lines += [Text(f"  {line}") for line in _figures(plan.chosen)]
    return [*lines, *_binding(plan), *_relaxations(plan), *_sensitivity(plan)]


def point_words(point: CandidateAxes) -> str:
    """A candidate in words: 'cnn:depth=2 on t4 x4, batch 64, amp, nchw'."""
    image = (
        "" if "precision" in own_settings(point.model) else f", {point.layout}"
    )  # of a language model there is none
    image += f", {point.image_size} pixels" if point.image_size else ""
    return (
        f"{point.model} on {point.device_words}, batch {format_whole(point.batch_size_per_device)}, "
        f"{point.precision}{image}"
        f"{''.join(f', {words}' for words in map(_setting_words, point.settings.items()) if words)}"
    )


def _setting_words(setting: tuple[str, Any]) -> str:
    """A searched setting in words, empty where it is the usual one: 'compiled', 'recompute full', 'zero1'."""
    name, value = setting
    if name == "compile":
        return "compiled" if value else ""
    if name == "recompute":
        return "" if value == "none" else f"recompute {value}"
    return str(value)


def _figures(point: PlanPoint) -> list[str]:
    lines = [
        f"job {with_range(point.job_time_s, 'time')}, step {with_range(point.step_time_s, 'time')}",
        f"memory {with_range(point.peak_memory_bytes, 'memory')}",
    ]
    if point.num_epochs.high > point.num_epochs.low:
        lines[0] += f", {with_range(point.num_epochs, 'epochs')} epochs"
    money = [f"cost {with_range(point.cost_usd, 'money')}"] if point.cost_usd else []
    energy = [f"energy {with_range(point.energy_j, 'energy')}"] if point.energy_j else []
    carbon = [f"CO2 {with_range(point.co2_g, 'mass')}"] if point.co2_g else []
    if money or energy:
        lines.append(", ".join([*money, *energy, *carbon]))
    if point.price_source and point.price_usd_per_hour is not None:
        lines.append(f"price {format_price(point.price_usd_per_hour)}/h: {point.price_source}")
    if point.workers_needed is not None:
        lines.append(f"needs {point.workers_needed} loader workers to keep a device busy")
    return lines


def with_range(interval: Interval | None, kind: str) -> str:
    """A value of a kind of quantity with its interval; a dash for none."""
    if interval is None:
        return "-"
    words = partial(format_quantity, kind=kind)
    return f"{words(interval.value)} ({range_words(interval, words)})"


def format_quantity(value: float, kind: str) -> str:
    """A value of a kind of quantity, as ``units.UNITS`` knows them, or of epochs."""
    formats: Mapping[str, Callable[[float], str]] = {
        "time": format_duration_s,
        "money": format_usd,
        "memory": format_bytes,
        "energy": format_energy_j,
        "mass": format_mass_g,
        "rate": lambda rate: f"{format_count(rate)} samples/s",
        "share": format_percent,
        "epochs": lambda epochs: f"{epochs:.3g}",
    }
    return formats[kind](value)


def _binding(plan: Plan) -> list[Text]:
    if plan.binding is None and any(_is_quicker(plan, point) for point in plan.unpriced):
        return [Text("  No limit binds: only devices whose price is not known, listed below, are faster.")]
    if plan.binding is None:
        sure = "that surely fits " if any(_is_quicker(plan, point) for point in plan.points) else ""
        return [Text(f"  No limit binds: nothing {sure}has less {plan.minimize}.")]
    return [Text.assemble("  Binding: ", (plan.binding, "bold"))]


def _is_quicker(plan: Plan, point: PlanPoint) -> bool:
    chosen = plan.chosen
    return plan.minimize == "time" and chosen is not None and point.job_time_s.value < chosen.job_time_s.value


def _relaxations(plan: Plan) -> list[Text]:
    return [Text(f"  {_relaxation_words(plan, item)}") for item in plan.relaxations]


def _relaxation_words(plan: Plan, item: PlanRelaxation) -> str:
    quantity = _quantity_of(item.limit)
    verb, word = ("raise", "more") if item.factor > 1 else ("lower", "less")
    change = f"{verb} {item.limit} to {format_quantity(item.bound, quantity.kind)}"
    share = f"{_far_words(item.factor - 1) or format_percent(abs(item.factor - 1))} {word}"
    gain = f", {plan.minimize} falls by {format_percent(item.gain)}" if item.gain is not None else ""
    return f"{change} ({share}): {point_words(item.point)}{gain}"


def _sensitivity(plan: Plan) -> list[Text]:
    found = plan.sensitivity
    assert found is not None
    held = "it still keeps all limits" if found.keeps_limits else f"it would break {', '.join(found.broken)}"
    if found.stays_best:
        rank = "and stays the best" if found.keeps_limits else "though nothing would be better"
    else:
        more = f"{format_percent(found.regret)} more {plan.minimize}"
        rank = f"and it would take {more} than {point_words(found.rivals[0])}"
    return [Text(f"  At the bad end of its interval {held}, {rank}.")]


def _points(plan: Plan, points: Sequence[PlanPoint]) -> Table:
    return table_of(points, point_columns(plan), left=_WORDS)


def point_columns(plan: Plan) -> dict[str, _Cell]:
    """The columns that say something about the candidates of a plan."""
    columns: dict[str, _Cell] = {
        title: cell for title, cell in _COLUMNS.items() if title != "epochs" or plan.target is not None
    }
    # A column that is equal in all rows says nothing: the head of the page has it.
    for title in _SAID_ONCE:
        if len({columns[title](candidate) for candidate in plan.candidates}) < 2:
            del columns[title]
    return columns


def _interval(name: str, kind: str) -> _Cell:
    return lambda point: _cell(getattr(point, name), kind)


def _setting(name: str) -> _Cell:
    def cell(point: PlanPoint) -> str:
        value = point.settings.get(name, "-")
        return ("yes" if value else "no") if isinstance(value, bool) else str(value)

    return cell


_COLUMNS: Columns[PlanPoint] = {
    "model": lambda point: point.model,
    "device": lambda point: point.device_words,
    "batch": lambda point: format_whole(point.batch_size_per_device),
    "precision": lambda point: point.precision,
    "layout": lambda point: point.layout,
    "compile": _setting("compile"),
    "recompute": _setting("recompute"),
    "strategy": _setting("strategy"),
    "image": lambda point: str(point.image_size or "own"),
    "epochs": _interval("num_epochs", "epochs"),
    "job": _interval("job_time_s", "time"),
    "cost": _interval("cost_usd", "money"),
    "energy": lambda point: None if point.energy_j is None else format_energy_j(point.energy_j.value),
    "CO2": lambda point: None if point.co2_g is None else format_mass_g(point.co2_g.value),
    "memory": lambda point: _memory_cell(point),
    "accuracy": lambda point: None if point.accuracy is None else format_percent(point.accuracy),
}
_WORDS = ("model", "device", "precision", "layout", "compile", "recompute", "strategy")
_SAID_ONCE = ("model", "layout", "compile", "recompute", "strategy", "image")


def _cell(interval: Interval | None, kind: str) -> str | None:
    """A value and its interval: '41.2 s (37.0 to 46.1)'."""
    if interval is None:
        return None
    words = with_range(interval, kind)
    unit = words.partition(" (")[0].partition(" ")[2]
    return words.replace(f" {unit})", ")") if unit else words  # a unit that all three have is said once


def _memory_cell(point: PlanPoint) -> str:
    words = format_bytes(point.peak_memory_bytes.value)
    return (
        words
        if point.fits == "yes"
        else f"{words}, {'too close' if point.fits == 'close' else 'does not fit'}"
    )


def _front_words(plan: Plan) -> str:
    second = "cost" if any(point.cost_usd for point in plan.pareto) else "energy"
    return f"Front of time and {second}: nothing is both faster and {'cheaper' if second == 'cost' else 'thriftier'}"


def _rejected_words(plan: Plan) -> str:
    counts = [
        f"{limit} {format_whole(rejected)} ({format_whole(alone)} by it alone)"
        for limit, rejected, alone in plan.num_rejected_by_limit
        if rejected
    ]
    return f"Left out: {', '.join(counts)}"


def _rejections(plan: Plan) -> RenderableType:
    lines = [Text(rejection_line(item)) for item in plan.rejected[:_MOST_REJECTED]]
    rest = plan.num_candidates - plan.num_feasible - len(lines)
    if rest > 0:
        lines.append(Text(f"and {format_whole(rest)} more; --json lists them", style="dim"))
    return Group(*lines)


def _broken_words(broken: BrokenLimit) -> str:
    if broken.excess is None or broken.value is None:
        return f"{broken.limit} (not known)"
    kind = "memory" if broken.limit == DEVICE_MEMORY else _quantity_of(broken.limit).kind
    value = format_quantity(broken.value, kind)
    far, near = _far_words(broken.excess), format_percent(broken.excess)
    if broken.limit == DEVICE_MEMORY:
        return f"{value} for the {format_bytes(broken.bound)} of the device ({far or f'+{near}'})"
    return f"{broken.limit} {far or f'by {near}'} ({value})"


def _far_words(excess: float) -> str:
    """A factor, which says more than per cent from the double on; empty below."""
    return f"{1 + excess:.3g} times" if excess >= 1 else ""


def _quantity_of(limit: str) -> Quantity:
    return QUANTITIES[limit.partition("<")[0].partition(">")[0].partition("≤")[0].partition("≥")[0]]


_UNITS = ((1.0, "s"), (60.0, "min"), (3600.0, "h"), (86400.0, "d"))


def pareto_figure(plan: Plan) -> Figure:
    """Time against cost of all candidates, the best of each device and the front with whiskers at 90 %."""
    figure = new_figure(width_in=7.6, height_in=5.4)
    axes = figure.subplots()
    # The choice is often on the front and the best of its device too: it is drawn once.
    points = list(
        dict.fromkeys((*plan.best_by_device, *plan.pareto, *([plan.chosen] if plan.chosen else [])))
    )
    points = points or list(plan.points)
    by_cost = any(point.cost_usd for point in points)
    seconds, unit = _unit([point.job_time_s.value for point in points])
    for index, device in enumerate(dict.fromkeys(point.device_words for point in points)):
        _draw_cloud(axes, [c for c in plan.candidates if c.device_words == device], index, seconds, by_cost)
        _draw_device(axes, [p for p in points if p.device_words == device], device, index, seconds, by_cost)
    front = [(point.job_time_s.value / seconds, _second(point, by_cost)) for point in plan.pareto]
    known = [(x, second.value) for x, second in front if second is not None]
    if len(known) > 1:
        axes.plot(
            *zip(*known, strict=True), color="#555555", linestyle="--", linewidth=1, zorder=1, label="front"
        )
    if plan.chosen is not None:
        _mark_choice(axes, plan.chosen, seconds, by_cost)
    _draw_limits(axes, plan, seconds, by_cost)
    _label(axes, plan, unit, by_cost)
    return figure


def _unit(times_s: Sequence[float]) -> tuple[float, str]:
    """The largest unit in which the shortest time is at least one."""
    shortest = min(times_s, default=1.0)
    return next((pair for pair in reversed(_UNITS) if shortest >= pair[0]), _UNITS[0])


def _second(point: PlanPoint, by_cost: bool) -> Interval | None:
    if by_cost:
        return point.cost_usd
    return point.energy_j.scaled(1 / 3.6e6) if point.energy_j is not None else None


def _draw_device(
    axes: Axes, points: Sequence[PlanPoint], device: str, index: int, seconds: float, by_cost: bool
) -> None:
    drawn = [
        (point.job_time_s.scaled(1 / seconds), second)
        for point in points
        if (second := _second(point, by_cost))
    ]
    if not drawn:
        return
    look = look_of(index)
    x, y = [time.value for time, _ in drawn], [second.value for _, second in drawn]
    x_ends = [[t.value - t.low for t, _ in drawn], [t.high - t.value for t, _ in drawn]]
    y_ends = [[s.value - s.low for _, s in drawn], [s.high - s.value for _, s in drawn]]
    axes.errorbar(
        x, y, xerr=x_ends, yerr=y_ends, fmt=look["marker"], color=look["color"], label=device,
        markersize=6, elinewidth=0.7, alpha=0.85, zorder=2,
    )  # fmt: skip


def _draw_cloud(
    axes: Axes, candidates: Sequence[PlanCandidate], index: int, seconds: float, by_cost: bool
) -> None:
    """All candidates of a device, small; hollow those that break a limit."""
    for keeps_limits in (True, False):
        drawn = [
            (candidate.job_time_s / seconds, second if by_cost else second / 3.6e6)
            for candidate in candidates
            if candidate.keeps_limits is keeps_limits
            and (second := candidate.cost_usd if by_cost else candidate.energy_j) is not None
        ]
        colour = look_of(index)["color"]
        face = colour if keeps_limits else "none"
        axes.scatter(
            [x for x, _ in drawn], [y for _, y in drawn],
            s=9, facecolors=face, edgecolors=colour, linewidths=0.6, alpha=0.45, zorder=1,
        )  # fmt: skip


def _mark_choice(axes: Axes, chosen: PlanPoint, seconds: float, by_cost: bool) -> None:
    second = _second(chosen, by_cost)
    if second is None:
        return
    x, y = chosen.job_time_s.value / seconds, second.value
    axes.scatter(
        [x], [y], s=190, facecolors="none", edgecolors="black", linewidths=1.6, zorder=3, label="choice"
    )


def _draw_limits(axes: Axes, plan: Plan, seconds: float, by_cost: bool) -> None:
    """Upper limits on the quantities of the axes; one far beyond the points would squeeze them."""
    from forerun.search.search import parse_limits

    for limit in parse_limits(plan.limits):
        if limit.quantity.name == "time" and limit.bound / seconds < axes.get_xlim()[1] * 1.5:
            axes.axvline(limit.bound / seconds, color="#AA0000", linestyle=":", label=limit.text)
        if by_cost and limit.quantity.name == "cost" and limit.bound < axes.get_ylim()[1] * 1.5:
            axes.axhline(limit.bound, color="#AA0000", linestyle="-.", label=limit.text)


def _label(axes: Axes, plan: Plan, unit: str, by_cost: bool) -> None:
    axes.set_xlabel(f"time of the job [{unit}]")
    axes.set_ylabel("cost of the job [USD]" if by_cost else "energy of the job [kWh]")
    # Candidates differ by factors of hundreds in both.
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        plain_log_ticks(axis)
    axes.grid(visible=True, alpha=0.25)
    # Beside the points, which fill the plot.
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small", frameon=False)
    models = list(dict.fromkeys(point.model for point in plan.candidates))
    name = models[0] if len(models) == 1 else f"{len(models)} models"
    axes.set_title(
        f"{name}, {plan.job}\n{plan.num_feasible:,} of {plan.num_candidates:,} candidates keep the limits"
    )
