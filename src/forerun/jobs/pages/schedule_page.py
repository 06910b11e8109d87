"""The page a person reads after ``forerun schedule``."""

from __future__ import annotations

from math import isfinite

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_duration_s
from forerun.jobs.schedule import FinishTime, JobPlan, PolicyOutcome, Schedule
from forerun.jobs.schedule_live import JobAdvice, LiveSchedule
from forerun.jobs.scheduling.live import ActionKind
from forerun.surface.report.tables import table
from forerun.surface.report.wording import format_percent, range_words

__all__ = ["command_lines", "live_page", "schedule_page"]


def schedule_page(answer: Schedule) -> RenderableType:
    """Allocation now and ends of the first policy; the comparison of all; notes."""
    first = answer.outcomes[0]
    parts: list[RenderableType] = []
    if first.now:
        parts += [
            Text.assemble((f"Now on {answer.cluster}, policy {first.policy}", "bold"), f": {first.title}"),
            _allocation(first),
            Text(""),
            Text("Done", style="bold"),
            _ends(first),
            Text(""),
        ]
    parts += [Text("Policies", style="bold"), _comparison(answer)]
    parts += [Text(""), *(Text(f"- {note}") for note in answer.notes)]
    return Group(*parts)


def _table(*columns: tuple[str, bool]) -> Table:
    titles = [title for title, _ in columns]
    return table(titles, left=[title for title, is_number in columns if not is_number], fold=titles)


def _allocation(outcome: PolicyOutcome) -> Table:
    table = _table(("job", False), ("devices", True), ("where", False), ("batch", True), ("why", False))
    for plan in outcome.now:
        where = ", ".join(f"node {part.node}: {_range(part.devices)}" for part in plan.nodes)
        batch = f"{plan.batch_size:,}" if plan.batch_size is not None else "-"
        table.add_row(Text(plan.job), _devices(plan), Text(where or "-"), batch, Text(plan.reason))
    return table


def _devices(plan: JobPlan) -> str:
    return f"{plan.num_devices} {plan.device}" if plan.num_devices else "waits"


def _range(devices: tuple[int, ...]) -> str:
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"


def _ends(outcome: PolicyOutcome) -> Table:
    table = _table(
        ("job", False),
        ("comes", True),
        ("starts", True),
        ("done after", True),
        ("90 % interval", False),
        ("deadline", False),
    )
    for finish in sorted(outcome.finish_times, key=lambda f: f.finish_s.value):
        table.add_row(
            Text(finish.job),
            _moment(finish.arrival_s),
            _moment(finish.start_s),
            format_duration_s(finish.finish_s.value),
            range_words(finish.finish_s, format_duration_s),
            _deadline(finish),
        )
    return table


def _moment(time_s: float) -> str:
    return "now" if time_s == 0 else format_duration_s(time_s)


def _deadline(finish: FinishTime) -> str:
    if finish.deadline_share != finish.deadline_share:
        return "-"
    return f"{format_duration_s(finish.deadline_s)}, met in {format_percent(finish.deadline_share)}"


def _comparison(answer: Schedule) -> Table:
    titles = ("average", "median", "99th", "makespan", "device h", "fairness", "restarts", "used", "decision")
    table = _table(("policy", False), *((title, True) for title in titles))
    for outcome in answer.outcomes:
        m = outcome.metrics
        fairness = "-" if m.worst_fairness != m.worst_fairness else f"{m.worst_fairness:.2f}"
        table.add_row(
            Text(outcome.policy),
            format_duration_s(m.average_completion_s),
            format_duration_s(m.median_completion_s),
            format_duration_s(m.p99_completion_s),
            format_duration_s(m.makespan_s),
            f"{m.device_hours:,.1f}",
            fairness,
            f"{m.restarts_per_job:.1f}",
            format_percent(m.utilisation),
            f"{m.scheduler_ms:.1f} ms",
        )
    return table


def command_lines(answer: Schedule) -> list[str]:
    """The torchrun lines of the first policy's allocation, each whole, under the name of its job."""
    return [
        line for plan in answer.outcomes[0].now if plan.commands for line in (f"# {plan.job}", *plan.commands)
    ]


_WORDS = {
    ActionKind.KEEP: "keeps",
    ActionKind.SUBMIT: "submit",
    ActionKind.START: "start",
    ActionKind.WAIT: "waits",
    ActionKind.STOP: "stop",
    ActionKind.CHANGE: "change",
}


def live_page(advice: LiveSchedule) -> RenderableType:
    """A page: the share of each job and the one it should have, its end then, and the sources of the advice."""
    titles = ("job", "has", "should", "get", "done after", "90 % interval", "why")
    made = table(titles, left=[title for title in titles if title != "done after"], fold=titles)
    for item in advice.jobs:
        made.add_row(
            Text(item.job if item.job.endswith(item.title) else f"{item.job} {item.title}"),
            Text(_where(item.has)),
            Text(_WORDS[item.action.kind]),
            Text(_gets(item)),
            format_duration_s(item.finish_s.value) if isfinite(item.finish_s.value) else "-",
            range_words(item.finish_s, format_duration_s) if isfinite(item.finish_s.high) else "-",
            Text(item.reason),
        )
    title = Text.assemble((f"{advice.system}, {advice.cluster}", "bold"), f", policy {advice.policy}")
    notes = [Text(f"- {note}") for note in advice.notes]
    return Group(title, made, Text(""), *notes)


def _gets(item: JobAdvice) -> str:
    where = _where(item.action.nodes)
    return where if where == "-" or not item.action.device else f"{where} ({item.action.device})"


def _where(nodes: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{number} on {node}" for node, number in nodes) or "-"
