"""The pages after ``forerun tune``, its scenarios and ``forerun compare``, and the pictures of scenarios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_bytes, format_duration_s, format_energy_j
from forerun.script.compare import Comparison
from forerun.script.tune import TuneResult
from forerun.surface.report.figure import look_of, new_figure, save_figure
from forerun.surface.report.tables import table
from forerun.surface.report.wording import format_percent

if TYPE_CHECKING:
    from forerun.script.tuning.configuration import ScriptConfiguration
    from forerun.script.tuning.scenario_answer import ScenarioRun, ScenarioRuns

__all__ = ["comparison_page", "scenario_page", "tune_page", "write_scenario_plots"]

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


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("train accuracy", "train_accuracy", format_percent),
    ("test accuracy", "test_accuracy", format_percent),
    ("train loss", "train_loss", lambda v: f"{v:.4f}"),
    ("test loss", "test_loss", lambda v: f"{v:.4f}"),
    ("GPU utilisation", "gpu_utilisation", format_percent),
    ("CPU utilisation", "cpu_utilisation", format_percent),
    ("CPU time", "cpu_time_s", format_duration_s),
    ("step", "step_time_s", format_duration_s),
    ("images/s", "images_per_s", lambda v: f"{v:,.1f}"),
    ("memory", "peak_memory_bytes", format_bytes),
    ("energy of the GPU", "energy_j", format_energy_j),
    ("whole run", "wall_s", format_duration_s),
)
_TITLES = {name: title for title, name, _ in _ROWS}


def scenario_page(found: ScenarioRuns) -> RenderableType:
    """One column per scenario."""
    names = [run.scenario for run in found.scenarios]
    made = table(("", *names), left=("",), fold=("", *names))
    for title, name, form in _ROWS:
        values = [getattr(run.figures, name) for run in found.scenarios]
        made.add_row(title, *("-" if value is None else form(value) for value in values))
    made.add_row("resolution", *(f"{run.image_size} x {run.image_size}" for run in found.scenarios))
    lines = [Text(f"{run.scenario}: {_changes(run.configuration)}") for run in found.scenarios]
    reasons = {
        f"{_TITLES[name]}: {words}" for run in found.scenarios for name, words in run.figures.reasons.items()
    }
    notes = [Text(f"note: {reason}", style="dim") for reason in sorted(reasons)]
    return Group(made, Text(""), *lines, Text(f"files: {found.folder}"), *notes)


def _changes(configuration: ScriptConfiguration) -> str:
    arguments = [f"{flag} {value}" for flag, value in configuration.arguments.items()]
    hooks = [f"{name}={value}" for name, value in configuration.hooks.items()]
    return ", ".join([*arguments, *hooks]) or "the script as it is"


_SMOOTHED = 5


def write_scenario_plots(found: ScenarioRuns) -> None:
    """Writes ``training_loss_comparison.png``, ``training_accuracy_comparison.png`` and ``utilisation.png``.

    The files are written to the folder of the answer.

    Raises:
        FailureError: A file cannot be written.
    """
    folder, runs = found.folder, found.scenarios
    _curves(folder / "training_loss_comparison.png", runs, "loss", "loss", 1.0)
    _curves(folder / "training_accuracy_comparison.png", runs, "acc", "accuracy [%]", 100.0)
    _utilisation(folder / "utilisation.png", runs)


def _curves(path: Path, runs: Sequence[ScenarioRun], name: str, label: str, factor: float) -> None:
    figure = new_figure(width_in=9.6, height_in=4.6)
    for axes, part in zip(figure.subplots(1, 2, sharey=True), ("train", "test"), strict=True):
        for index, run in enumerate(runs):
            rows = run.history
            values = [factor * _number(row[f"{part}_{name}"]) for row in rows]
            # Later curves are thinner: where they meet, those below can be seen.
            look = {**look_of(index), "linewidth": max(1.2, 3.6 - 0.8 * index), "markersize": 9 - 1.5 * index}
            axes.plot([row["epoch"] for row in rows], values, label=run.scenario, **look)
        axes.set(title=part, xlabel="epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=True, alpha=0.3)
    # Both panels share the axis; a limit that is set before the last curve would not follow it.
    axes.set_ylim(bottom=0, top=102 if name == "acc" else 1.05 * axes.get_ylim()[1])
    figure.supylabel(label)
    _legend(figure, axes)
    save_figure(figure, path)


def _number(value: float | None) -> float:
    """Curve of the loss with a gap where a value is missing."""
    return math.nan if value is None else value


def _utilisation(path: Path, runs: Sequence[ScenarioRun]) -> None:
    """CPU, memory and, where there is one, GPU over the time of each final run."""
    panels = [("cpu", "CPU [% of all cores]", 100.0), ("memory_bytes", "memory [GiB]", 1 / 1024**3)]
    if any(row.gpu is not None for run in runs for row in run.utilisation):
        panels.insert(0, ("gpu", "GPU busy [%]", 100.0))
    figure = new_figure(width_in=9.6, height_in=1.0 + 2.0 * len(panels))
    grid = figure.subplots(len(panels), 1, sharex=True)
    for axes, (name, label, factor) in zip(grid, panels, strict=True):
        for index, run in enumerate(runs):
            rows = run.utilisation
            values = _smoothed([factor * _number(getattr(row, name)) for row in rows])
            colour = look_of(index)["color"]
            axes.plot([row.time_s for row in rows], values, label=run.scenario, color=colour, linewidth=1.4)
        axes.set(ylabel=label)
        axes.set_ylim(bottom=0, top=1.05 * axes.get_ylim()[1])
        axes.grid(visible=True, alpha=0.3)
    axes.set(xlabel=f"time since the start of the run [s]; means of {_SMOOTHED} looks")
    _legend(figure, axes)
    save_figure(figure, path)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each reading with its neighbours, because a quarter of a second alone is mostly noise."""
    reach = _SMOOTHED // 2
    return [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]


def _legend(figure: Any, axes: Any) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
