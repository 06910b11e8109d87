"""The pages after ``forerun tune`` and ``forerun compare``."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_bytes, format_duration_s
from forerun.script.compare import Comparison
from forerun.script.tune import TuneResult
from forerun.surface.report.tables import table

__all__ = ["comparison_page", "tune_page"]

_MOST_TRIALS = 12


def tune_page(found: TuneResult) -> RenderableType:
    """Result of a study: speed before and after, and the best trials."""
    ran = [trial for trial in found.trials if trial["outcome"] != "rejected"]
    resumed = ", resumed" if found.is_resumed else ""
    parts: list[RenderableType] = [
        Text.assemble(
            ("Tuned", "bold"),
            f" for {', '.join(found.objectives)}: {len(ran)} trials{resumed}, ended by {found.ended_by}; "
            f"{found.num_rejected} rejected by the memory model, {found.num_out_of_memory} lost to memory",
        ),
        Text(""),
        _indented(_trials(found)),
        Text(""),
    ]
    if found.checked is not None and found.checked.get("best") is not None:
        parts += [Text("Whole runs", style="bold"), _indented(_before_after(found.checked)), Text("")]
    if found.verdict is not None:
        style = {"better": "bold green", "worse": "bold red"}.get(found.verdict.verdict, "bold")
        words = found.verdict.words
        parts += [Text(words[:1].upper() + words[1:], style=style), Text("")]
    if found.best is not None:
        parts.append(Text.assemble(("Best: ", "bold"), found.command))
        hooks = ", ".join(f"{name}={value}" for name, value in found.best.hooks.items())
        parts.append(Text(f"      hooks: {hooks or 'none'}"))
        parts.append(Text(f"Run it: forerun apply {found.folder / 'best.yaml'} -- COMMAND"))
    parts += [Text(f"note: {note}", style="dim") for note in (*_failures(found), *found.notes)]
    return Group(*parts)


def _failures(found: TuneResult) -> list[str]:
    """Messages of trials that ended badly, equal ones once."""
    failed = [trial for trial in found.trials if trial["outcome"] in ("crashed", "timeout")]
    reasons: dict[str, list[str]] = {}
    for trial in failed:
        reasons.setdefault(f"{trial['outcome']}: {trial['reason']}", []).append(str(trial["number"]))
    return [
        f"trial{'s' if len(numbers) > 1 else ''} {', '.join(numbers)} {reason}"
        for reason, numbers in reasons.items()
    ]


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2), expand=False)


def _table(*titles: str) -> Table:
    return table(titles, left=titles[:1], fold=titles)


def _trials(found: TuneResult) -> Table:
    table = _table("values", "trial", *found.objectives, "memory", "from", "front")
    told = [trial for trial in found.trials if trial["objectives"] is not None]
    is_rising = found.objectives[0] in ("speed", "accuracy")
    ranked = sorted(told, key=lambda trial: (-1 if is_rising else 1) * trial["objectives"][0])
    for trial in ranked[:_MOST_TRIALS]:
        table.add_row(
            ", ".join(f"{name}={value}" for name, value in trial["values"].items()),
            str(trial["number"]),
            *(f"{value:.4g}" for value in trial["objectives"]),
            format_bytes(trial["peak_memory_bytes"]),
            trial["source"],
            "*" if trial["number"] in found.front else "",
        )
    return table


def _before_after(checked: dict[str, Any]) -> Table:
    before, after = checked["baseline"], checked["best"]
    table = _table("", "before", "after", "ratio")

    def row(name: str, key: str, form: Any, *, has_ratio: bool = True) -> None:
        first, second = before[key], after[key]
        if first is None or second is None:
            return
        ratio = f"{second / first:.2f}" if has_ratio and first else ""
        table.add_row(name, form(first), form(second), ratio)

    row("samples/s", "rate_samples_per_s", lambda v: f"{v:,.1f}")
    row("whole run", "wall_s", format_duration_s)
    row("step", "step_time_s", format_duration_s)
    row("memory", "peak_memory_bytes", format_bytes)
    row("cores used", "cpu_utilisation", lambda v: f"{v:.2f}")
    if checked.get("metric"):
        table.add_row(
            f"{checked['metric']} at the end",
            f"{checked['metric_before']:.4f}",
            f"{checked['metric_after']:.4f}",
            "",
        )
    return table


def comparison_page(found: Comparison) -> RenderableType:
    """Two configurations side by side."""
    table = _table("run", "samples/s", "time", "metric")
    for run in found.runs:
        table.add_row(
            run.which,
            "-" if run.rate_samples_per_s is None else f"{run.rate_samples_per_s:,.1f}",
            format_duration_s(run.wall_s),
            "-" if run.metric is None else f"{run.metric:.4f}",
        )
    parts: list[RenderableType] = [_indented(table), Text("")]
    for name, ratio in (("samples a second", found.speed), ("whole run", found.time)):
        if ratio is not None:
            ends = (
                ""
                if ratio.low is None
                else f" (95 %: {ratio.low:.2f} to {ratio.high:.2f}, p = {ratio.p_value:.2g})"
            )
            parts.append(Text(f"{name}: B is {ratio.ratio:.2f} times as fast as A{ends}"))
    if found.accuracy is not None:
        verdict = "is not worse" if found.accuracy.is_not_inferior else "may be worse"
        low = "" if found.accuracy.low is None else f", at worst {found.accuracy.low:+.4f}"
        parts.append(
            Text(
                f"{found.metric}: B {verdict} than A by more than {found.accuracy.margin:.4g}: "
                f"difference {found.accuracy.difference:+.4f}{low}"
            )
        )
    return Group(*parts)
