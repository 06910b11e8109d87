"""The page of ``forerun diagnose``."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forerun.base.answers import fields_of
from forerun.base.units import format_duration_s
from forerun.script.diagnosis.diagnose import Diagnosis
from forerun.surface.report.tables import table
from forerun.surface.report.wording import format_percent, range_words

_VERDICTS = {
    "slow": "slow",
    "not slow": "not slow: within the interval",
    "faster": "faster than predicted",
    "not compared": "no prediction to compare with",
}
_SOURCES = {"run": "a command", "trace": "a trace", "number": "measured steps"}
_LEAST_SHARE = 0.01


def diagnosis_page(found: Diagnosis) -> RenderableType:
    """A diagnosis as a page of text."""
    parts: list[RenderableType] = [_title(found), Text("")]
    for number, cause in enumerate(found.causes, start=1):
        cost = (
            f", {format_duration_s(cause.cost_s)} of a step ({format_percent(cause.share)})"
            if cause.cost_s
            else ""
        )
        parts += [
            Text.assemble(f"{number}. ", (cause.cause, "bold red" if cause.cost_s else "bold"), cost),
            Padding(Text(f"seen: {cause.evidence}\ndo:   {cause.change}"), (0, 0, 0, 3), expand=False),
        ]
    rows = [row for row in found.by_class if _share(found, row.measured_s, row.predicted_s) >= _LEAST_SHARE]
    if rows:
        parts += [Text(""), _classes(found)]
    if found.ranks:
        parts += [Text(""), _ranks(found)]
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def _title(found: Diagnosis) -> Text:
    where = " on ".join(filter(None, (found.model, found.device)))
    steps = f", mean of {found.num_steps:,} steps" if found.num_steps else ""
    text = Text.assemble(("Diagnosis", "bold"), f" of {where or _SOURCES[found.source]}\n")
    text.append(f"measured   {format_duration_s(found.measured)}{steps}\n")
    if found.predicted is not None:
        text.append(
            f"predicted  {range_words(found.predicted, format_duration_s)}; measured is {found.ratio:.3g} times it\n"
        )
    return text.append(_VERDICTS[found.verdict], "bold")


def _share(found: Diagnosis, *times_s: float | None) -> float:
    return max(time_s or 0.0 for time_s in times_s) / found.measured


def _classes(found: Diagnosis) -> Table:
    rows = []
    for row in found.by_class:
        if _share(found, row.measured_s, row.predicted_s) >= _LEAST_SHARE:
            ratio = row.measured_s / row.predicted_s if row.measured_s and row.predicted_s else None
            times = (
                "-" if time_s is None else format_duration_s(time_s)
                for time_s in (row.measured_s, row.predicted_s)
            )
            rows.append((row.name, *times, "" if ratio is None else f"{ratio:.2g}"))
    titles = ("part of the step", "measured", "predicted", "ratio")
    return table(titles, rows, left=titles[:1])


def _ranks(found: Diagnosis) -> Table:
    titles = ("rank", "step", "own work", "kernels", "loader", "host", "communication")
    figures = (fields_of(rank).values() for rank in found.ranks)
    rows = [(label, *(format_duration_s(time_s) for time_s in times)) for label, *times in figures]
    return table(titles, rows, left=titles[:1])
