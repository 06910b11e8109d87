"""The pages a person reads after ``forerun forecast``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.report.wording import format_percent, format_usd
from forerun.units import format_duration_s

__all__ = ["backtest_page", "forecast_page", "trade_off_page"]

_NEVER = "not by the end"


def forecast_page(answer: Mapping[str, Any]) -> RenderableType:
    """A forecast as a page.

    Args:
        answer: What ``forerun forecast --json`` prints.
    """
    parts: list[RenderableType] = [_title(answer), Text(""), _headline(answer), Text("")]
    if answer["on"]:
        parts += [_clocks(answer), Text("")]
    parts += [_advice(answer["advice"]), Text(""), _forecasters(answer), _rests_on(answer)]
    if answer["notes"]:
        parts += [Text("Notes", style="bold"), *(Text(f"  - {note}") for note in answer["notes"])]
    return Group(*parts)


def _title(answer: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (answer["run"], "bold"),
        f": {answer['metric']}, {answer['num_points']} points to {answer['unit']} {answer['last_epoch']:g} of "
        f"{answer['end_epoch']:g} ({format_percent(answer['progress'])} done)",
    )


def _grid() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def _headline(answer: Mapping[str, Any]) -> Table:
    table = _grid()
    table.add_column("")
    table.add_column("likely", justify="right")
    table.add_column("80 % interval", justify="right")
    table.add_column("90 % interval", justify="right")
    final = answer["final_value"]
    table.add_row(
        f"{answer['metric']} at the end",
        f"{final['value']:.4g}",
        f"{final['low_80']:.4g} to {final['high_80']:.4g}",
        f"{final['low']:.4g} to {final['high']:.4g}",
    )
    if answer["target"] is not None:
        _add_target(table, answer)
    if answer["outcome"] is not None:
        _add_outcome(table, answer)
    return table


def _add_outcome(table: Table, answer: Mapping[str, Any]) -> None:
    came = answer["outcome"]
    inside = "inside" if came["is_inside_90"] else "outside"
    table.add_row(f"{answer['metric']} as it came", f"{came['final_value']:.4g}", "", inside)
    if answer["target"] is not None:
        reached = came["reached_epoch"]
        words = "never" if reached is None else f"{answer['unit']} {reached:g}"
        table.add_row("target as it came", words, "", "")


def _add_target(table: Table, answer: Mapping[str, Any]) -> None:
    target, unit = answer["target"], answer["unit"]
    if answer.get("reached_epoch") is not None:
        table.add_row(f"target {target['value']:g}", f"reached at {unit} {answer['reached_epoch']:g}", "", "")
        return
    table.add_row(
        f"target {target['value']:g} by the end", format_percent(answer["probability_of_target"]), "", ""
    )
    times = answer["epochs_to_target"]
    table.add_row(
        f"{unit}s to the target",
        _ranked(times["likely"], "{:,.1f}"),
        f"{_ranked(times['p10'], '{:,.1f}')} to {_ranked(times['p90'], '{:,.1f}')}",
        "",
    )
    steps = answer["steps_to_target"]
    if steps is not None and unit == "epoch":
        table.add_row(
            "steps to the target",
            _ranked(steps["p50"], "{:,.0f}"),
            f"{_ranked(steps['p10'], '{:,.0f}')} to {_ranked(steps['p90'], '{:,.0f}')}",
            "",
        )


def _ranked(value: float | None, form: str) -> str:
    return _NEVER if value is None else form.format(value)


def _clocks(answer: Mapping[str, Any]) -> Table:
    table = _grid()
    for heading in ("on", "epoch", "to target, p50", "p90", "left, p50", "whole run", "cost p50", "p90"):
        table.add_column(heading, justify="left" if heading == "on" else "right")
    for entry in answer["on"]:
        to_target, cost = entry["time_to_target_s"], entry["cost_to_target_usd"]
        has_target = answer["target"] is not None
        table.add_row(
            Text(entry["device"]),
            format_duration_s(entry["epoch_time_s"]["value"]),
            _duration(to_target["p50"]) if has_target else "-",
            _duration(to_target["p90"]) if has_target else "-",
            _duration(entry["time_left_s"]["p50"]) if has_target else "-",
            format_duration_s(entry["time_to_end_s"]["value"]),
            _usd(cost, "p50") if has_target else "-",
            _usd(cost, "p90") if has_target else "-",
        )
    return table


def _duration(value_s: float | None) -> str:
    return _NEVER if value_s is None else format_duration_s(value_s)


def _usd(cost: Mapping[str, float | None] | None, rank: str) -> str:
    if cost is None:
        return "-"
    value = cost[rank]
    return _NEVER if value is None else format_usd(value)


def _advice(advice: Mapping[str, Any]) -> Text:
    return Text.assemble(
        ("Stop" if advice["stop"] else "Go on", "bold"),
        f": {advice['reason']}; the next {advice['gain_unit']} gains {advice['gain_next']:.3g}",
    )


def _forecasters(answer: Mapping[str, Any]) -> Table:
    table = _grid()
    table.add_column("forecaster")
    table.add_column("weight", justify="right")
    table.add_column("at the end", justify="right")
    for row in answer["forecasters"]:
        table.add_row(row["name"], format_percent(row["weight"]), f"{row['final_value']:.4g}")
    return table


def _rests_on(answer: Mapping[str, Any]) -> Text:
    found = answer["calibration"]
    covered = found["coverage_90"]
    words = f"\nRests on {answer['tier']}; interval from {found['num_runs']} back-tests"
    words += (
        f", which 90 % intervals covered in {format_percent(covered)} of the cases"
        if covered is not None
        else ""
    )
    return Text(words + ("" if found["is_calibrated"] else " (uncalibrated)"))


def backtest_page(answer: Mapping[str, Any]) -> RenderableType:
    """A back-test as tables.

    Args:
        answer: What ``forerun forecast --evaluate DIR --json`` prints.
    """
    cuts = [f"{cut:g}" for cut in answer["cuts"]]
    rows = {name: answer["errors"][name] for name in answer["errors"]}
    mixtures = {f"mixture, {tier}": row for tier, row in answer["mixture_errors"].items()}
    parts: list[RenderableType] = [
        Text(f"{answer['num_runs']} runs of {answer['num_jobs']} jobs, cut at a share of their length"),
        Text(""),
        Text("Mean absolute error of the final value (1 - accuracy, or loss over first loss)", style="bold"),
        _cut_table("forecaster", cuts, {**rows, **mixtures}, "{:.3f}"),
    ]
    if answer["coverage_90"]:
        parts += [
            Text(""),
            Text("Coverage of 90 % intervals, the run's job left out", style="bold"),
            _cut_table("tier", cuts, answer["coverage_90"], "{:.0%}"),
            Text(""),
            Text("Their mean width", style="bold"),
            _cut_table("tier", cuts, answer["width_90"], "{:.3f}"),
        ]
    else:
        parts += [Text(""), Text("one job only: no interval can be tested on another (uncalibrated)")]
    return Group(*parts)


def _cut_table(heading: str, cuts: list[str], rows: Mapping[str, Mapping[str, float]], form: str) -> Table:
    table = _grid()
    table.add_column(heading)
    for cut in cuts:
        table.add_column(format_percent(float(cut)), justify="right")
    for name, row in rows.items():
        table.add_row(name, *(form.format(row[cut]) if cut in row else "-" for cut in cuts))
    return table


def trade_off_page(answer: Mapping[str, Any]) -> RenderableType:
    """Configurations against each other, the Pareto front marked by a star.

    Args:
        answer: What ``forerun forecast --trade-off FILE --json`` prints.
    """
    table = _grid()
    for heading in (
        "",
        "configuration",
        "device",
        "epoch",
        "epochs to target",
        "to target, p50",
        "whole run",
        "end",
    ):
        table.add_column(heading, justify="left" if heading in ("", "configuration", "device") else "right")
    for row in answer["configurations"]:
        table.add_row(
            "*" if row["is_on_pareto_front"] else "",
            Text(row["name"]),
            Text(row["device"]),
            format_duration_s(row["epoch_time_s"]["value"]),
            _ranked(row["epochs_to_target"], "{:,.1f}"),
            _duration(row["time_to_target_s"]["p50"]),
            format_duration_s(row["end_time_s"]["value"]),
            f"{row['final_value']['value']:.4g}",
        )
    words = "no configuration beats those with a star in both time and value at the end"
    return Group(table, Text(""), Text(words))
