"""Answers as objects of a notebook: their page as text and as HTML, their rows as a table, their chart."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.answers import fields_of, plain
from forerun.base.errors import UsageError
from forerun.base.extras import loaded, require

if TYPE_CHECKING:
    import pandas as pd

_WIDTH = 96

_REPORT = "forerun.surface.report"
_PAGES: Mapping[str, str] = {
    "Prediction": f"{_REPORT}.page:prediction_page",
    "Estimate": f"{_REPORT}.page:estimate_page",
    "RunComparison": f"{_REPORT}.page:comparison_page",
    "Planned": f"{_REPORT}.plan_page:planned_page",
    "Plan": f"{_REPORT}.plan_page:plan_page",
    "Sweep": f"{_REPORT}.page:sweep_page",
    "ScaleCurve": f"{_REPORT}.scale_page:scale_page",
    "LayoutPlan": f"{_REPORT}.scale_page:layouts_page",
    "AdvicePlan": f"{_REPORT}.scale_page:advice_page",
    "Schedule": "forerun.jobs.pages:schedule_page",
    "RunForecast": "forerun.jobs.pages:forecast_page",
    "Diagnosis": "forerun.script.pages:diagnosis_page",
    "Profile": "forerun.script.pages:profile_page",
}
"""Pages of answers by the name of their class, found by name: those of satellites are there where the satellite is."""

_ROWS = {
    "Estimate": "breakdown",
    "RunComparison": "quantities",
    "Plan": "pareto",
    "ScaleCurve": "points",
    "LayoutPlan": "best",
    "AdvicePlan": "changes",
    "Diagnosis": "causes",
    "Schedule": "outcomes",
}
"""Fields that hold the rows of an answer; others are one row."""

_CHARTS = {"Plan": f"{_REPORT}.plan_page:pareto_figure", "ScaleCurve": f"{_REPORT}.scale_page:scale_figure"}
"""Functions from an answer to its figure; others are drawn as bars of their rows."""

_CHART_FILES = {
    "Schedule": "forerun.jobs.plots:gantt_chart",
    "RunForecast": "forerun.jobs.plots:forecast_plot",
    "Profile": "forerun.script.pages:parts_plot",
}
"""Functions that draw an answer to a file."""

_BARS: Mapping[str, tuple[str, Callable[[Any], list[tuple[str, float]]]]] = {
    "Estimate": ("time of one step [ms]", lambda found: [(p.name, 1e3 * p.time_s) for p in found.breakdown]),
    "RunComparison": (
        "change of the time of one step [ms]",
        lambda found: [(part.name, 1e3 * (part.after - part.before)) for part in found.time_parts],
    ),
    "AdvicePlan": ("faster by [%]", lambda found: [(c.settings, 100 * c.gain) for c in found.changes]),
    "LayoutPlan": (
        "time of one step [s]",
        lambda found: [(f"{p.parallel} {p.strategy}", p.step_time_s.value) for p in found.best],
    ),
}
"""Axis and bars of an answer by the name of its class."""

_CARD = (
    '<pre style="font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; line-height: 1.35; '
    "padding: 12px 16px; border: 1px solid #8884; border-radius: 8px; width: fit-content; max-width: 100%; "
    'overflow-x: auto; white-space: pre">{code}</pre>'
)


def has_page(answer: Any) -> bool:
    """True for the answers that are printed as a page."""
    return _of(_PAGES, answer) is not None


def _of(table: Mapping[str, Any], answer: Any) -> Any:
    """The entry of a table for the class of an answer, or for one that it extends; None if there is none."""
    return next((table[one.__name__] for one in type(answer).__mro__ if one.__name__ in table), None)


def _recorded(answer: Any) -> Any:
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=_WIDTH, record=True, markup=False, highlight=False, emoji=False,
        color_system="truecolor", force_terminal=False,
    )  # fmt: skip
    made = loaded(_of(_PAGES, answer))(answer)
    for part in made if hasattr(made, "__next__") else [made]:
        console.print(part)
    return console


def text_of(answer: Any) -> str:
    """The page of an answer as plain text."""
    text: str = _recorded(answer).export_text()
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def html_of(answer: Any) -> str:
    """The page of an answer as a card of HTML, with no script and no style from elsewhere."""
    html: str = _recorded(answer).export_html(inline_styles=True, code_format=_CARD)
    return html


def frame_of(answer: Any) -> pd.DataFrame:
    """The rows of an answer as a table of pandas, intervals as three columns.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    require("to_frame()", "pandas")
    import pandas as pd

    return pd.DataFrame(rows_of(answer))


def rows_of(answer: Any, as_dict: Callable[[], Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """The rows of an answer as plain values, each under a name without a table in it.

    Args:
        answer: The answer; one whose rows are not declared has those of its longest list, or is one row.
        as_dict: Gives its JSON, where the answer cannot say it itself.
    """
    if type(answer).__name__ == "Sweep":
        return _sweep_rows(answer)
    field = _of(_ROWS, answer)
    if field == "breakdown":  # an estimate is one row
        return [_flat({name: value for name, value in answer.as_dict().items() if name != "run"})]
    if field is not None:
        return [_flat(plain(fields_of(row) if is_dataclass(row) else row)) for row in getattr(answer, field)]
    known = answer.as_dict() if as_dict is None else as_dict()
    lists = {name: value for name, value in known.items() if isinstance(value, list) and value}
    # An answer may hold several lists; its longest table is what a data frame is wanted for.
    tables = [value for value in lists.values() if all(isinstance(row, Mapping) for row in value)]
    if not tables and len(lists) == 1:
        ((name, values),) = lists.items()
        return [{name: value} for value in values]
    return [_flat(row) for row in max(tables, key=len, default=[known])]


def rows_text(rows: Sequence[Mapping[str, Any]], form: str) -> str:
    r"""Rows as text, ``csv`` or ``markdown``, with a column for every name that one of them has.

    >>> print(rows_text([{"name": "a|b", "time_s": 0.5}, {"name": "c"}], "markdown"), end="")
    | name | time_s |
    |---|---|
    | a\|b | 0.5 |
    | c |  |
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    if form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
    cells = [["" if row.get(name) is None else str(row[name]) for name in names] for row in rows]
    lines = [names, *([markdown_text(cell).replace("\n", " ") for cell in line] for line in cells)]
    made = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([made[0], "|---" * len(names) + "|", *made[1:]]) + "\n"


def markdown_text(value: object) -> str:
    r"""The text of a value in Markdown: no HTML, no link, no end of a table's cell.

    >>> print(markdown_text("[a](b) | <i>"))
    \[a\](b) \| &lt;i&gt;
    """
    return re.sub(r"[\\\[\]|]", r"\\\g<0>", html.escape(str(value), quote=False))


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            is_interval = value.keys() == {"value", "low", "high"}
            inner = {("" if key == "value" and is_interval else key): part for key, part in value.items()}
            found |= {f"{prefix}{name}{'_' if key else ''}{key}": part for key, part in inner.items()}
        elif not isinstance(value, list):
            found[f"{prefix}{name}"] = value
    return found


def _sweep_rows(sweep: Any) -> list[dict[str, Any]]:
    times = [f"step_time_{end}s" for end in ("", "low_", "high_")]
    arrays = (*times, "throughput_samples_per_s", "peak_memory_bytes")
    return [
        {
            "device": device, "precision": precision, "batch_size": size,
            **{name: float(getattr(sweep, name)[i, j, k]) for name in arrays},
        }
        for i, device in enumerate(sweep.devices)
        for j, precision in enumerate(sweep.precisions)
        for k, size in enumerate(sweep.batch_sizes)
    ]  # fmt: skip


def save_plot(path: Path, answer: Any) -> None:
    """Draws the chart of an answer to a file."""
    from forerun.surface.report.figure import save_figure

    save_figure(plot_of(answer), path)


def plot_of(answer: Any) -> Any:
    """The chart of an answer as a figure of matplotlib.

    Raises:
        MissingExtraError: matplotlib is not installed.
        UsageError: The answer has nothing to draw.
    """
    require("plot()", "matplotlib")
    if chart := _of(_CHARTS, answer):
        return loaded(chart)(answer)
    from forerun.surface.report.figure import kept_figure, new_figure

    if chart := _of(_CHART_FILES, answer):
        return kept_figure(loaded(chart), answer)
    if type(answer).__name__ == "Sweep":
        return _sweep_chart(answer)
    bars = _of(_BARS, answer)
    if bars is None:
        raise UsageError(f"{type(answer).__name__} has no chart; see its to_frame()")
    axis, bars_of = bars
    # A bar chart is drawn from below, and read from above.
    bars = bars_of(answer)[::-1]
    figure = new_figure(width_in=7, height_in=0.9 + 0.35 * len(bars))
    axes = figure.add_subplot()
    axes.barh([bar_name for bar_name, _ in bars], [value for _, value in bars])
    axes.set_xlabel(axis)
    return figure


def _sweep_chart(sweep: Any) -> Any:
    """Throughput against the batch size, a line for each device and precision."""
    from forerun.surface.report.figure import new_figure

    figure = new_figure(width_in=6, height_in=4)
    axes = figure.add_subplot()
    for device, of_device in zip(sweep.devices, sweep.throughput_samples_per_s, strict=True):
        for precision, rates in zip(sweep.precisions, of_device, strict=True):
            axes.plot(sweep.batch_sizes, rates, marker="o", label=f"{device}, {precision}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("batch size")
    axes.set_ylabel("samples/s")
    axes.legend()
    return figure
