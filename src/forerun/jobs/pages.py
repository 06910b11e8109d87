"""The pages a person reads after ``forerun forecast`` and ``forerun schedule``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_count, format_duration_s
from forerun.surface.report.tables import Columns, table, table_of
from forerun.surface.report.wording import format_percent, format_usd, range_words

if TYPE_CHECKING:
    from forerun.jobs.fitted_laws import CurveFit, PricedFrontier, ScalingForecast, TrainingPrice
    from forerun.jobs.forecast import TradeOff, TradeOffPoint
    from forerun.jobs.forecast_tables import (
        BatchForecast,
        BatchPoint,
        CurvePoint,
        NetworkForecast,
        NetworkValue,
    )
    from forerun.jobs.forecasting.backtest import Backtest
    from forerun.jobs.forecasting.forecast_answer import RunForecast, TimeToTarget
    from forerun.jobs.forecasting.next_trial import NextTrial, Standing
    from forerun.jobs.schedule import FinishTime, JobPlan, PolicyOutcome, Schedule
    from forerun.jobs.schedule_live import JobAdvice, LiveSchedule

_Row = TypeVar("_Row")

_NEVER = "not by the end"
_MOST_POINTS = 12


def _grid(titles: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Table:
    """A table of texts whose first columns are words."""
    return table(titles, rows, left=titles[:words], fold=titles)


def _declared(rows: Sequence[_Row], columns: Columns[_Row], *, left: Iterable[str] = ()) -> Table:
    """A table of declared columns; the first is one of words, and so are those that are named."""
    return table_of(rows, columns, left=[next(iter(columns)), *left], fold=columns)


def _page(*parts: RenderableType, notes: Iterable[str] = ()) -> RenderableType:
    """Parts of a page with an empty line between them, and notes as a list below."""
    spaced: list[RenderableType] = []
    for part in parts:
        spaced += [Text(""), part] if spaced else [part]
    return Group(*spaced, *(Text(note) for note in notes))


def _by_end(value: float, form: Callable[[float], str]) -> str:
    return form(value) if math.isfinite(value) else _NEVER


def _or_dash(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None or math.isnan(value) else form(value)


def forecast_page(answer: RunForecast) -> RenderableType:
    """The value at the end, the time to the target on each clock, advice, and what the forecast rests on."""
    found = answer.curve_forecast
    curve, advice = found.curve, answer.advice
    title = Text.assemble(
        (answer.run, "bold"),
        f": {curve.metric}, {len(curve)} points to {curve.unit} {curve.epochs[-1]:g} of "
        f"{found.end_epoch:g} ({format_percent(found.progress)} done)",
    )
    advised = Text.assemble(
        ("Stop" if advice.should_stop else "Go on", "bold"),
        f": {advice.reason}; the next {advice.gain_unit} gains {advice.gain_next:.3g}",
    )
    decision = answer.decision
    if decision.probability_beats_best is not None:
        advised.append(
            f"; it ends better than the best finished run ({decision.best_finished:.4g}) with a probability of "
            f"{format_percent(decision.probability_beats_best)}"
        )
    divergence = decision.divergence
    advised.append(f"; it diverges with a probability of {format_percent(divergence.probability)}")
    if divergence.num_finished:
        advised.append(
            f" ({divergence.num_diverged} of {divergence.num_finished} finished runs did from here)"
        )
    saved = [] if decision.saved_s is None else [format_duration_s(decision.saved_s.value)]
    saved += [] if decision.saved_usd is None else [format_usd(decision.saved_usd.value)]
    if saved and decision.saved_epochs:
        advised.append(f"; stopping now saves {' and '.join(saved)}")
    weights = [
        (name, format_percent(share), f"{found.finals[name]:.4g}") for name, share in found.weights.items()
    ]
    members = _grid(("forecaster", "weight", "at the end"), weights)
    clocks = [_declared(answer.times, _clock_columns(found.target is not None))] if answer.times else []
    notes = [Text(f"  - {note}") for note in answer.notes]
    head = [Text("Notes", style="bold")] if notes else []
    return Group(_page(title, _headline(answer), *clocks, advised, members), _rests_on(answer), *head, *notes)


def _headline(answer: RunForecast) -> Table:
    found, came = answer.curve_forecast, answer.outcome
    metric, unit, final = found.curve.metric, found.curve.unit, found.final
    ends_80 = f"{final.low_80:.4g} to {final.high_80:.4g}"
    ends_90 = f"{final.low_90:.4g} to {final.high_90:.4g}"
    rows = [(f"{metric} at the end", f"{final.value:.4g}", ends_80, ends_90)]
    if found.target is not None:
        rows += [(*row, "") for row in _target_rows(answer, found.target.value)]
    if came is not None:
        inside = "inside" if came.is_inside_90 else "outside"
        rows.append((f"{metric} as it came", f"{came.final_value:.4g}", "", inside))
        if found.target is not None:
            reached = "never" if came.reached_epoch is None else f"{unit} {came.reached_epoch:g}"
            rows.append(("target as it came", reached, "", ""))
    return _grid(("", "likely", "80 % interval", "90 % interval"), rows)


def _target_rows(answer: RunForecast, target: float) -> list[tuple[str, str, str]]:
    found, steps = answer.curve_forecast, answer.steps_per_epoch
    unit = found.curve.unit
    if found.reached_epoch is not None:
        return [(f"target {target:g}", f"reached at {unit} {found.reached_epoch:g}", "")]
    number = "{:,.1f}" if unit == "epoch" else "{:,.0f}"
    rows = [
        (f"target {target:g} by the end", format_percent(found.probability_at_end), ""),
        _reached_row(f"{unit}s to the target", found.epochs_to_target, number.format),
    ]
    if steps is not None and unit == "epoch":
        ranks = [epoch * steps for epoch in found.epochs_to_target]
        rows.append(_reached_row("steps to the target", ranks, "{:,.0f}".format))
    return rows


def _reached_row(title: str, ranks: Sequence[float], form: Callable[[float], str]) -> tuple[str, str, str]:
    early, middle, late = (_by_end(rank, form) for rank in ranks)
    return title, middle, "" if early == late == _NEVER else f"{early} to {late}"


def _clock_columns(has_target: bool) -> Columns[TimeToTarget]:
    def cost(found: TimeToTarget, rank: int) -> str:
        return "-" if found.cost_usd is None else _by_end(found.cost_usd[rank], format_usd)

    columns: Columns[TimeToTarget] = {
        "on": lambda found: found.clock.device,
        "epoch": lambda found: format_duration_s(found.clock.epoch_time_s.value),
        "whole run": lambda found: format_duration_s(found.end_s.value),
    }
    if not has_target:
        return columns
    return {
        **columns,
        "to target, p50": lambda found: _by_end(found.total_s[1], format_duration_s),
        "p90": lambda found: _by_end(found.total_s[2], format_duration_s),
        "left, p50": lambda found: _by_end(found.left_s[1], format_duration_s),
        "cost p50": lambda found: cost(found, 1),
        "cost p90": lambda found: cost(found, 2),
    }


def _rests_on(answer: RunForecast) -> Text:
    found = answer.curve_forecast
    words = f"\nRests on {found.tier}; interval from {found.num_runs} back-tests"
    if answer.coverage is not None:
        words += f", which 90 % intervals covered in {format_percent(answer.coverage)} of the cases"
    return Text(words + ("" if found.is_calibrated else " (uncalibrated)"))


def backtest_page(answer: Backtest) -> RenderableType:
    """Errors of the forecasters, and coverage and width of the intervals, by share of the run."""

    def by_cut(heading: str, rows: Mapping[str, Mapping[float, float]], form: str) -> Table:
        cells = [
            [name, *(form.format(row[c]) if c in row else "-" for c in answer.cuts)]
            for name, row in rows.items()
        ]
        return _grid((heading, *map(format_percent, answer.cuts)), cells)

    mixtures = {f"mixture, {tier}": row for tier, row in answer.mixture_errors.items()}
    parts: list[RenderableType] = [
        Text(f"{answer.num_runs} runs of {answer.num_jobs} jobs, cut at a share of their length"),
        Group(
            Text(
                "Mean absolute error of the final value (1 - accuracy, or loss over first loss)", style="bold"
            ),
            by_cut("forecaster", {**answer.errors, **mixtures}, "{:.3f}"),
        ),
    ]
    if not answer.coverage_90:
        return _page(*parts, Text("one job only: no interval can be tested on another (uncalibrated)"))
    coverage = Text("Coverage of 90 % intervals, the run's job left out", style="bold")
    parts.append(Group(coverage, by_cut("tier", answer.coverage_90, "{:.0%}")))
    parts.append(Group(Text("Their mean width", style="bold"), by_cut("tier", answer.width_90, "{:.3f}")))
    return _page(*parts)


def next_page(answer: NextTrial) -> RenderableType:
    """The step of work that comes next, and the standing of each trial."""
    name = "a new trial" if answer.trial is None else answer.trial
    words = (
        "nothing is left to run"
        if answer.until is None
        else f"to {format_percent(answer.until)} of its length"
    )
    columns: Columns[Standing] = {
        "trial": lambda row: row.name or "a new one",
        "done": lambda row: format_percent(row.done),
        f"{answer.metric} at the end": lambda row: f"{row.expected_end:.4g}",
        "90 % interval": lambda row: f"{row.low_90:.4g} to {row.high_90:.4g}",
        "not worth it beyond": lambda row: _or_dash(row.index, "{:.4g}".format),
    }
    return _page(
        Text.assemble(("Next", "bold"), f": {words if answer.until is None else f'{name}, {words}'}"),
        _declared(answer.standings, columns),
        Text("a trial is worth its further work as long as none ends better than its last column"),
    )


def trade_off_page(answer: TradeOff) -> RenderableType:
    """Configurations against each other, the Pareto front marked by a star."""
    columns: Columns[tuple[TradeOffPoint, bool]] = {
        "": lambda row: "*" if row[1] else "",
        "configuration": lambda row: row[0].name,
        "device": lambda row: row[0].device,
        "epoch": lambda row: format_duration_s(row[0].epoch_time_s.value),
        "epochs to target": lambda row: _by_end(row[0].epochs_to_target, "{:,.1f}".format),
        "to target, p50": lambda row: _by_end(row[0].time_to_target_s[1], format_duration_s),
        "whole run": lambda row: format_duration_s(row[0].end_time_s.value),
        "end": lambda row: f"{row[0].final_value.value:.4g}",
    }
    rows = list(zip(answer.points, answer.is_on_front, strict=True))
    words = "no configuration beats those with a star in both time and value at the end"
    return _page(_declared(rows, columns, left=("configuration", "device")), Text(words))


def batches_page(answer: BatchForecast) -> RenderableType:
    """Steps against the batch size."""
    critical = answer.law.critical_batch_size
    words = "steps fall as 1 / batch: no batch size measured is large enough to show an end of that"
    if math.isfinite(critical):
        words = (
            f"steps = {answer.law.least_steps:,.0f} (1 + {critical:,.0f} / batch): at a batch of {critical:,.0f} "
            "twice the least steps are needed"
        )
    columns: Columns[BatchPoint] = {
        "batch size": lambda row: f"{row.batch_size:,}",
        "steps": lambda row: f"{row.steps:,.0f}",
        "epochs": lambda row: _or_dash(row.epochs, "{:,.1f}".format),
        "measured steps": lambda row: _or_dash(row.measured_steps, "{:,.0f}".format),
    }
    error = f"worst error at the points it was fitted to: {format_percent(answer.law.worst_error)}"
    return _page(Text(words), _declared(answer.points, columns), Text(error))


def networks_page(answer: NetworkForecast) -> RenderableType:
    """Networks never trained, or left out: values beside what their own runs say, and the curve of one alone."""
    rows = [(name, value) for name, values in answer.networks.items() for value in values]
    parts: list[RenderableType] = [_declared(rows, _network_columns(answer.left_out))]
    for name, points in answer.curves.items():
        if len(answer.curves) == 1:
            words = f"Loss of {name} after k {answer.unit}, 1 / (b0 k + b1) + b2:"
            parts.append(Group(Text(words), _curve_table(points)))
    parts.append(Text("from " + ", ".join(answer.features) + "; the device takes no part"))
    return _page(*parts, notes=[f"- {name}, {value.note}" for name, value in rows if value.note])


def _network_columns(has_actual: bool) -> Columns[tuple[str, NetworkValue]]:
    def error(value: NetworkValue) -> str:
        if value.error_in_loss is not None:
            return f"{value.error_in_loss:.1g} loss"
        return _or_dash(value.error, format_percent)

    def runs(value: NetworkValue) -> str:
        if value.lowest is None or value.highest is None:
            return "-"
        return f"{value.lowest:.4g} to {value.highest:.4g}"

    def mostly(value: NetworkValue) -> str:
        heaviest = max(value.predicted.candidates, key=lambda form: form.weight)
        return f"{heaviest.name} ({format_percent(heaviest.weight)})"

    actual: Columns[tuple[str, NetworkValue]] = {
        "actual": lambda row: _or_dash(row[1].actual, "{:.4g}".format),
        "runs": lambda row: runs(row[1]),
        "error": lambda row: error(row[1]),
    }
    return {
        "network": lambda row: row[0],
        "value": lambda row: row[1].name,
        "predicted": lambda row: f"{row[1].predicted.value:.4g}",
        "range": lambda row: f"{row[1].predicted.low:.4g} to {row[1].predicted.high:.4g}",
        **(actual if has_actual else {}),
        "mostly by": lambda row: mostly(row[1]),
    }


def _curve_table(points: Sequence[CurvePoint]) -> Table:
    """A dozen points of a curve; the error is |predicted - actual| / actual."""
    columns: Columns[CurvePoint] = {
        "k": lambda point: f"{point.k:,}",
        "predicted": lambda point: f"{point.predicted:.4f}",
        "actual": lambda point: _or_dash(point.actual, "{:.4f}".format),
        "error": lambda point: _or_dash(point.error, format_percent),
    }
    apart = max(1, -(-len(points) // _MOST_POINTS))
    shown = [p for i, p in enumerate(points) if i == 0 or (i + 1) % apart == 0 or p is points[-1]]
    made = _declared(shown, columns)
    errors = [point.error for point in points if point.error is not None]
    if errors:
        made.add_row("mean of all", "", "", format_percent(sum(errors) / len(errors)))
    return made


def curve_fit_page(answer: CurveFit) -> RenderableType:
    """Coefficients of a law with their errors."""
    fit, curve = answer.fit, answer.curve
    units = (f"1 / ({curve.metric} x {curve.unit})", f"1 / {curve.metric}", curve.metric)
    errors = [f"± {error:.2g}" if math.isfinite(error) else "not determined" for error in fit.deviations]
    values = [f"{value:.5g}" for value in (fit.b0, fit.b1, fit.b2)]
    rows = list(zip(("b0", "b1", "b2"), values, errors, units, strict=True))
    r2 = "" if answer.r2 is None else f", R2 {answer.r2:.4f}"
    lines = [f"Residual: {fit.rmse:.4g} (root mean square){r2}"]
    if answer.steps_per_epoch is not None:
        per_epoch = f"{fit.b0 * answer.steps_per_epoch:.5g}"
        lines.append(f"An epoch is {answer.steps_per_epoch:g} steps: b0 per epoch {per_epoch}")
    if answer.target is not None and answer.reached_at is not None:
        reached = f"at {curve.unit} {answer.reached_at:,.0f}" if math.isfinite(answer.reached_at) else "never"
        lines.append(f"{answer.target}: {reached}")
    law = f"{curve.metric}(k) = 1 / (b0 k + b1) + b2, k in {curve.unit}s"
    title = Text(f"{answer.run}: {law}, {len(curve):,} points")
    below = Text("\n".join([*lines, *(f"- {note}" for note in curve.notes)]))
    return _page(title, _grid(("coefficient", "value", "error", "unit"), rows), below)


def scaling_page(answer: ScalingForecast) -> RenderableType:
    """The law, the best training for each budget and target, and its time and price on each device."""
    law = [
        (name, f"{value.value:.3g}", range_words(value, "{:.3g}".format))
        for name, value in answer.law.coefficients().items()
    ]
    best = [(asked.question, *_best_cells(asked)) for asked in answer.answers]
    parts: list[RenderableType] = [
        Text(
            f"loss = E + ((A / parameters^alpha)^p + (B / tokens^beta)^p)^(1/p), {answer.law.num_runs} sizes"
        ),
        _grid(("coefficient", "value", "90 % interval"), law),
        _grid(("asked", "parameters", "tokens", "loss", "work [FLOP]"), best),
    ]
    if answer.tuning is not None:
        parts.append(_grid(("asked", "learning rate", "batch size"), _settings_of(answer)))
    if answer.rates:
        prices = [
            (asked.question, *_price_cells(price)) for asked in answer.answers for price in asked.prices
        ]
        parts.append(_grid(("asked", "on", "device hours", "time", "cost"), prices))
    notes = Text("\n".join(f"- {note}" for note in answer.notes))
    return _page(*parts, notes)


def _best_cells(asked: PricedFrontier) -> tuple[str, str, str, str]:
    best = asked.best
    if best is None:
        return ("none reaches it", "-", "-", "-")
    sizes, tokens = (
        f"{format_count(i.value)} ({range_words(i, format_count)})" for i in (best.parameters, best.tokens)
    )
    loss = f"{best.loss.value:.3f} ({range_words(best.loss, '{:.3f}'.format)})"
    return (sizes, tokens, loss, f"{best.flop.value:.3g}")


def _settings_of(answer: ScalingForecast) -> list[tuple[str, str, str]]:
    found = []
    for asked in answer.answers:
        given = (asked.best.learning_rate, asked.best.batch_size) if asked.best is not None else ()
        cells = [f"{i.value:.3g} ({range_words(i, '{:.3g}'.format)})" for i in given if i is not None]
        if len(cells) == 2:
            found.append((asked.question, cells[0], cells[1]))
    return found


def _price_cells(price: TrainingPrice) -> tuple[str, str, str, str]:
    on = price.device if price.num_devices == 1 else f"{price.num_devices} {price.device}"
    hours = f"{price.device_hours.value:,.3g} ({range_words(price.device_hours, '{:,.3g}'.format)})"
    cost = "-" if price.cost_usd is None else format_usd(price.cost_usd.value)
    return on, hours, format_duration_s(price.time_s.value), cost


def schedule_page(answer: Schedule) -> RenderableType:
    """Allocation now and ends of the first policy; the comparison of all; notes."""
    first = answer.outcomes[0]
    parts: list[RenderableType] = []
    if first.now:
        title = Text.assemble((f"Now on {answer.cluster}, policy {first.policy}", "bold"), f": {first.title}")
        ends = sorted(first.finish_times, key=lambda finish: finish.finish_s.value)
        parts.append(Group(title, _declared(first.now, _ALLOCATION, left=("where", "why"))))
        parts.append(
            Group(Text("Done", style="bold"), _declared(ends, _ENDS, left=("90 % interval", "deadline")))
        )
    parts.append(Group(Text("Policies", style="bold"), _declared(answer.outcomes, _COMPARISON)))
    return _page(*parts, Text("\n".join(f"- {note}" for note in answer.notes)))


def _where(plan: JobPlan) -> str:
    def numbers(devices: tuple[int, ...]) -> str:
        return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"

    return ", ".join(f"node {part.node}: {numbers(part.devices)}" for part in plan.nodes) or "-"


_ALLOCATION: Columns[JobPlan] = {
    "job": lambda plan: plan.job,
    "devices": lambda plan: f"{plan.num_devices} {plan.device}" if plan.num_devices else "waits",
    "where": _where,
    "batch": lambda plan: _or_dash(plan.batch_size, "{:,}".format),
    "why": lambda plan: plan.reason,
}


def _moment(time_s: float) -> str:
    return "now" if time_s == 0 else format_duration_s(time_s)


def _deadline(finish: FinishTime) -> str:
    if math.isnan(finish.deadline_share):
        return "-"
    return f"{format_duration_s(finish.deadline_s)}, met in {format_percent(finish.deadline_share)}"


_ENDS: Columns[FinishTime] = {
    "job": lambda finish: finish.job,
    "comes": lambda finish: _moment(finish.arrival_s),
    "starts": lambda finish: _moment(finish.start_s),
    "done after": lambda finish: format_duration_s(finish.finish_s.value),
    "90 % interval": lambda finish: range_words(finish.finish_s, format_duration_s),
    "deadline": _deadline,
}

_COMPARISON: Columns[PolicyOutcome] = {
    "policy": lambda found: found.policy,
    "average": lambda found: format_duration_s(found.metrics.average_completion_s),
    "median": lambda found: format_duration_s(found.metrics.median_completion_s),
    "99th": lambda found: format_duration_s(found.metrics.p99_completion_s),
    "makespan": lambda found: format_duration_s(found.metrics.makespan_s),
    "device h": lambda found: f"{found.metrics.device_hours:,.1f}",
    "fairness": lambda found: _or_dash(found.metrics.worst_fairness, "{:.2f}".format),
    "restarts": lambda found: f"{found.metrics.restarts_per_job:.1f}",
    "used": lambda found: format_percent(found.metrics.utilisation),
    "decision": lambda found: f"{found.metrics.scheduler_ms:.1f} ms",
}


def command_lines(answer: Schedule) -> list[str]:
    """The torchrun lines of the first policy's allocation, each whole, under the name of its job."""
    return [
        line for plan in answer.outcomes[0].now if plan.commands for line in (f"# {plan.job}", *plan.commands)
    ]


def _nodes(nodes: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{number} on {node}" for node, number in nodes) or "-"


def _gets(item: JobAdvice) -> str:
    where = _nodes(item.action.nodes)
    return where if where == "-" or not item.action.device else f"{where} ({item.action.device})"


_ADVICE: Columns[JobAdvice] = {
    "job": lambda item: item.job if item.job.endswith(item.title) else f"{item.job} {item.title}",
    "has": lambda item: _nodes(item.has),
    "should": lambda item: (
        f"{item.action.kind}s" if item.action.kind in ("keep", "wait") else str(item.action.kind)
    ),
    "get": _gets,
    "done after": lambda item: (
        format_duration_s(item.finish_s.value) if math.isfinite(item.finish_s.value) else "-"
    ),
    "90 % interval": lambda item: (
        range_words(item.finish_s, format_duration_s) if math.isfinite(item.finish_s.high) else "-"
    ),
    "why": lambda item: item.reason,
}


def live_page(advice: LiveSchedule) -> RenderableType:
    """A page: the share of each job and the one it should have, its end then, and the sources of the advice."""
    titles = (title for title in _ADVICE if title != "done after")
    title = Text.assemble((f"{advice.system}, {advice.cluster}", "bold"), f", policy {advice.policy}")
    made = Group(title, _declared(advice.jobs, _ADVICE, left=titles))
    return _page(made, Text("\n".join(f"- {note}" for note in advice.notes)))
