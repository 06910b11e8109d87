"""A plan, a prediction or a curve of scaling as one document: HTML with its pictures inside, or Markdown.

Each is read back from the JSON that the command line and the server write.
"""

from __future__ import annotations

import datetime
import io
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from forerun import __version__
from forerun.base.answers import from_plain, needed_fields
from forerun.base.errors import MissingExtraError, UsageError
from forerun.base.units import format_bytes
from forerun.prediction.estimate import Estimate
from forerun.question.options import RunOptions
from forerun.question.run import Run
from forerun.question.settings import declared
from forerun.search.plan_answer import Plan, PlanPoint
from forerun.search.scale import ScaleCurve
from forerun.surface.report.figure import COLOURS, new_figure
from forerun.surface.report.objects import markdown_text
from forerun.surface.report.page import quantities
from forerun.surface.report.plan_page import (
    format_quantity,
    pareto_figure,
    plan_choice_lines,
    point_columns,
    rejection_line,
    with_range,
)
from forerun.surface.report.scale_page import (
    SCALE_COLUMNS,
    paying_sentence,
    points_by_scaling,
    scale_figure,
    scaling_words,
)
from forerun.surface.report.tables import Columns, cells_of
from forerun.surface.report.wording import (
    bound_sentence,
    fit_sentence,
    provenance_sentence,
    range_words,
    setup_words,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_REJECTED = 20


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a document: paragraphs, then a table, then a picture."""

    title: str
    paragraphs: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    picture_svg: str = ""


def html_document(answer: Readable) -> str:
    """One self-contained HTML file."""
    return _document(answer, "document.html.jinja", autoescape=True)


def markdown_document(answer: Readable) -> str:
    """The document as Markdown, without pictures."""
    return _document(answer, "document.md.jinja", finalize=markdown_text)


def _document(answer: Readable, template: str, **options: Any) -> str:
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise MissingExtraError("a report as a document", "report") from error
    folder = PackageLoader("forerun.surface.report")
    environment = Environment(
        loader=folder, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, **options
    )
    found = environment.get_template(template)
    made = f"Made by forerun {__version__} on {datetime.date.today()}. Ranges are 90 % intervals."
    return found.render(title=_title(answer), sections=_sections(answer), made=made)


def _title(answer: Readable) -> str:
    if isinstance(answer, ScaleCurve):
        return f"{answer.model} on several {answer.device}"
    if isinstance(answer, Estimate):
        return f"{answer.model} on {answer.device_title}"
    models = list(dict.fromkeys(candidate.model for candidate in answer.candidates))
    return f"Plan: {models[0] if len(models) == 1 else f'{len(models)} models'}, {answer.job}"


def _sections(answer: Readable) -> list[Section]:
    if isinstance(answer, ScaleCurve):
        return _scale_sections(answer)
    return _plan_sections(answer) if isinstance(answer, Plan) else _estimate_sections(answer)


def _plan_sections(plan: Plan) -> list[Section]:
    limits = ", ".join(plan.limits) or "no limits"
    kept = f"{plan.num_feasible:,} of {plan.num_candidates:,} candidates keep the limits"
    asked = f"Least {plan.minimize} within {limits}: {kept}."
    picture = _svg(pareto_figure(plan)) if plan.candidates else ""
    tables = {
        "Best of each device": plan.best_by_device,
        "Front: nothing is better in both": plan.pareto,
        "Without a known price: the fastest of each device": plan.unpriced,
        "Best candidates" if plan.chosen else "Nearest misses": plan.points,
    }
    sections = [
        Section("Choice", (asked, *plan_choice_lines(plan)), picture_svg=picture),
        *(
            Section(title, (), *cells_of(rows, {**point_columns(plan), **_OF_DOCUMENTS}))
            for title, rows in tables.items()
        ),
    ]
    if plan.rejected:
        lines = tuple((rejection_line(item),) for item in plan.rejected[:_MOST_REJECTED])
        sections.append(
            Section("Left out, nearest misses first", header=("candidate and what it breaks",), rows=lines)
        )
    if plan.notes:
        sections.append(Section("Notes", plan.notes))
    return [section for section in sections if section.paragraphs or section.rows]


_OF_DOCUMENTS: Columns[PlanPoint] = {
    "energy": lambda point: None if point.energy_j is None else with_range(point.energy_j, "energy"),
    "memory": lambda point: with_range(point.peak_memory_bytes, "memory"),
    "price": lambda point: point.price_source,
}
"""Columns that a page has no room for, or only for their values."""


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg")
    # The declaration and the doctype belong to a file of its own.
    return text.getvalue()[text.getvalue().index("<svg") :]


def _bars(parts: Sequence[tuple[str, float]], kind: str) -> str:
    """Parts as bars with their sizes beside them; empty without parts."""
    # A bar chart is drawn from below, and read from above.
    shown = [(name, value) for name, value in parts if value > 0][::-1]
    if not shown:
        return ""
    figure = new_figure(width_in=7, height_in=0.7 + 0.32 * len(shown))
    axes = figure.subplots()
    bars = axes.barh([name for name, _ in shown], [value for _, value in shown], color=COLOURS[0])
    axes.bar_label(bars, labels=[format_quantity(value, kind) for _, value in shown], padding=4)
    axes.margins(x=0.18)
    axes.xaxis.set_visible(False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    return _svg(figure)


def _estimate_sections(estimate: Estimate) -> list[Section]:
    figures = [*quantities(estimate), ("peak memory", estimate.peak_memory_bytes, format_bytes)]
    rows = tuple(
        (name, f"{words(each.value)} ({range_words(each, words)})") for name, each, words in figures if each
    )
    memory = tuple((part.name, format_quantity(part.size_bytes, "memory")) for part in estimate.memory_parts)
    step = tuple((part.name, format_quantity(part.time_s, "time")) for part in estimate.breakdown)
    rests = (provenance_sentence(estimate), *estimate.notes)
    return [
        Section("What it takes", (setup_words(estimate),), ("quantity", "value (90 % interval)"), rows),
        Section(
            "Memory at its peak",
            (f"It {fit_sentence(estimate.fits)}.",),
            ("part", "size"),
            memory,
            _bars([(part.name, part.size_bytes) for part in estimate.memory_parts], "memory"),
        ),
        Section(
            "Where a step goes",
            (f"{bound_sentence(estimate.bound_by)}.",),
            ("part", "time"),
            step,
            _bars([(part.name, part.time_s) for part in estimate.breakdown], "time"),
        ),
        Section("Rests on", rests),
        *([Section("Ask again", _commands(estimate))] if estimate.run is not None else []),
    ]


def _commands(estimate: Estimate) -> tuple[str, ...]:
    assert estimate.run is not None
    asked = command_of(estimate.run)
    if estimate.num_devices == 1:
        return (asked,)
    numbers = ",".join(str(1 << k) for k in range(estimate.num_devices.bit_length()))
    return asked, f"On fewer devices: {command_of(estimate.run, 'scale')} --devices {numbers}"


def _scale_sections(curve: ScaleCurve) -> list[Section]:
    links = " and ".join(link for link in (curve.intra_link, curve.inter_link) if link)
    setup = f"{curve.precision}, {curve.strategy}" + (f", over {links}" if links else "")
    sections = [Section("More devices", (f"{setup}.",), picture_svg=_svg(scale_figure(curve)))]
    kinds = points_by_scaling(curve)
    for kind, points in kinds.items():
        words = scaling_words(kind, points[0].batch_size_per_device, points[0].batch_size_global)
        title = words[0].upper() + words[1:]
        sections.append(
            Section(title, (paying_sentence(curve.stops_paying_at[kind]),), *cells_of(points, SCALE_COLUMNS))
        )
    sections += [Section("Notes", curve.notes)] if curve.notes else []
    if curve.run is not None:
        numbers = ",".join(str(number) for number in sorted({point.num_devices for point in curve.points}))
        scaling = "both" if len(kinds) > 1 else next(iter(kinds))
        command = f"{command_of(curve.run, 'scale')} --devices {numbers} --scaling {scaling}"
        sections.append(Section("Ask again", (command,)))
    return sections


def command_of(run: Run, verb: str = "predict") -> str:
    """The command that asks about a run: its settings that are not the usual ones of its model and device."""
    given = run.json_fields()
    usual = Run.of(given["model"], device=given["device"]).json_fields()
    words = ["forerun", verb, given["model"], "--on", given["device"]]
    settings = declared(RunOptions)
    for name, value in given.items():
        if name in ("model", "device") or value is None or value == usual.get(name):
            continue
        flag = settings[name].setting.flag or name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [
                f"--{flag}",
                ",".join(map(str, value)) if isinstance(value, list | tuple) else _plain_number(value),
            ]
    return shlex.join(words)


def _plain_number(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


Readable = Plan | Estimate | ScaleCurve
"""An answer of which a report can be made."""

_EXPECTED = "expected what 'forerun predict --json', 'forerun plan --json' or 'forerun scale --json' printed"


def read_answer(text: str, where: str = "the input") -> Readable:
    """The plan, prediction or curve of scaling of a JSON text.

    Raises:
        UsageError: The text is not JSON, or none of these.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: {_EXPECTED}, but it is not JSON ({error})") from error
    kinds: tuple[type[Readable], ...] = (Plan, Estimate, ScaleCurve)
    for kind in kinds:
        if isinstance(found, dict) and found.keys() >= set(needed_fields(kind)):
            return _read(kind, found, where)
    raise UsageError(
        f"{where}: {_EXPECTED} in this version, for devices and not for parameter servers, got other JSON"
    )


def _read(kind: type[Readable], found: dict[str, Any], where: str) -> Readable:
    try:
        if kind is Plan:
            counts = [tuple(item.values()) for item in found["num_rejected_by_limit"]]
            found = {**found, "num_rejected_by_limit": counts}
        answer: Readable = from_plain(kind, found, least=-inf, ignores_unknown=True, readers={Run: _run})
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError) as error:
        raise UsageError(
            f"{where}: the JSON is damaged ({type(error).__name__}: {error}); make it again"
        ) from error
    return answer


def _run(settings: dict[str, Any]) -> Run | None:
    """The run of a prediction; None where a device or a file of another machine was asked about."""
    rest = {name: value for name, value in settings.items() if name not in ("model", "device")}
    try:
        return Run.of(settings["model"], device=settings["device"], **rest)
    except UsageError:
        return None
