"""A plan or prediction as one document to send to a colleague: HTML with its pictures inside, or Markdown."""

from __future__ import annotations

import datetime
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

from forerun import __version__
from forerun.planner.plan import Plan, PlanPoint
from forerun.prediction.estimate import Estimate, Interval
from forerun.report.plan_page import format_quantity, plan_choice_lines, point_words, rejection_line
from forerun.report.wording import bound_sentence, fit_sentence, provenance_sentence, range_words, setup_words

__all__ = ["html_document", "markdown_document"]

_MOST_REJECTED = 20


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a document: paragraphs, then a table, then a picture."""

    title: str
    paragraphs: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    picture_svg: str = ""


def html_document(answer: Plan | Estimate) -> str:
    """One HTML file that needs nothing but itself."""
    title = _title(answer)
    body = "\n".join(_html_section(section) for section in _sections(answer))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n<meta name="viewport" '
        f'content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{html.escape(title)}</h1>\n{body}\n<footer>{html.escape(_made())}</footer>\n</body></html>\n"
    )


def markdown_document(answer: Plan | Estimate) -> str:
    """The same as Markdown, without pictures."""
    parts = [f"# {_title(answer)}\n"]
    for section in _sections(answer):
        parts.append(f"## {section.title}\n")
        parts += [f"{paragraph}\n" for paragraph in section.paragraphs]
        if section.rows:
            lines = [section.header, ("---",) * len(section.header), *section.rows]
            parts.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "\n".join([*parts, f"{_made()}\n"])


def _made() -> str:
    return f"Made by forerun {__version__} on {datetime.date.today()}. Ranges are 90 % intervals."


def _title(answer: Plan | Estimate) -> str:
    if isinstance(answer, Estimate):
        return f"{answer.model} on {answer.device_title}"
    models = list(dict.fromkeys(candidate.model for candidate in answer.candidates))
    return f"Plan: {models[0] if len(models) == 1 else f'{len(models)} models'}, {answer.job}"


def _sections(answer: Plan | Estimate) -> list[Section]:
    return _plan_sections(answer) if isinstance(answer, Plan) else _estimate_sections(answer)


def _plan_sections(plan: Plan) -> list[Section]:
    limits = ", ".join(plan.limits) or "no limits"
    kept = f"{plan.num_feasible:,} of {plan.num_candidates:,} candidates keep the limits"
    asked = f"Least {plan.minimize} within {limits}: {kept}."
    sections = [
        Section("Choice", (asked, *plan_choice_lines(plan)), picture_svg=_plan_picture(plan)),
        _points_section("Best of each device", plan.best_by_device),
        _points_section("Front: nothing is better in both", plan.pareto),
        _points_section("Best candidates" if plan.chosen else "Nearest misses", plan.points),
    ]
    if plan.rejected:
        lines = tuple((rejection_line(item),) for item in plan.rejected[:_MOST_REJECTED])
        sections.append(
            Section("Left out, nearest misses first", header=("candidate and what it breaks",), rows=lines)
        )
    if plan.notes:
        sections.append(Section("Notes", plan.notes))
    return [section for section in sections if section.paragraphs or section.rows]


def _points_section(title: str, points: Sequence[PlanPoint]) -> Section:
    header = ("candidate", "job", "cost", "energy", "memory", "price")
    rows = tuple(
        (
            point_words(point),
            _with_range(point.job_time_s, "time"),
            _with_range(point.cost_usd, "money"),
            _with_range(point.energy_j, "energy"),
            _with_range(point.peak_memory_bytes, "memory"),
            point.price_source or "-",
        )
        for point in points
    )
    return Section(title, header=header, rows=rows)


def _plan_picture(plan: Plan) -> str:
    from forerun.report.plan_plots import pareto_figure

    if not plan.candidates:
        return ""
    text = io.StringIO()
    pareto_figure(plan).savefig(text, format="svg")
    # The declaration and the doctype belong to a file of its own.
    return text.getvalue()[text.getvalue().index("<svg") :]


def _estimate_sections(estimate: Estimate) -> list[Section]:
    figures = (
        ("step", estimate.step_time_s, "time"),
        ("throughput", estimate.throughput_samples_per_s, "rate"),
        ("epoch", estimate.epoch_time_s, "time"),
        ("job", estimate.job_time_s, "time"),
        ("cost", estimate.cost_usd, "money"),
        ("energy", estimate.energy_j, "energy"),
        ("peak memory", estimate.peak_memory_bytes, "memory"),
    )
    rows = tuple((name, _with_range(value, kind)) for name, value, kind in figures if value is not None)
    memory = tuple((part.name, format_quantity(part.size_bytes, "memory")) for part in estimate.memory_parts)
    step = tuple((part.name, format_quantity(part.time_s, "time")) for part in estimate.breakdown)
    rests = (provenance_sentence(estimate.provenance), *estimate.notes)
    return [
        Section("What it takes", (setup_words(estimate),), ("quantity", "value (90 % interval)"), rows),
        Section("Memory at its peak", (f"It {fit_sentence(estimate.fits)}.",), ("part", "size"), memory),
        Section("Where a step goes", (f"{bound_sentence(estimate.bound_by)}.",), ("part", "time"), step),
        Section("Rests on", rests),
    ]


def _with_range(interval: Interval | None, kind: str) -> str:
    if interval is None:
        return "-"

    def words(value: float) -> str:
        return format_quantity(value, kind)

    return f"{words(interval.value)} ({range_words(interval, words)})"


def _html_section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    parts += [f"<p>{html.escape(paragraph)}</p>" for paragraph in section.paragraphs]
    if section.rows:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in section.header)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in section.rows
        )
        parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )
    if section.picture_svg:
        parts.append(f"<figure>{section.picture_svg}</figure>")
    return "\n".join(parts)


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.45 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 1.6rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884; vertical-align: top; }
figure { margin: 1rem 0; background: #fff; border-radius: .4rem; padding: .5rem; }
svg { max-width: 100%; height: auto; }
footer { margin-top: 2rem; color: #777; }
"""
