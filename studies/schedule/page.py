"""The section on scheduling of the accuracy page."""

from __future__ import annotations

from studies.markdown import markdown_table
from studies.schedule.comparison import comparison_section
from studies.schedule.server_study import ratios
from studies.schedule.study import ERROR_SPREADS, ScheduleResults

_PUBLISHED_RATIOS = {"optimus": "1 / 1", "tetris": "1.33 / 1.14", "drf": "1.62 / 1.31"}


def schedule_section(found: ScheduleResults) -> str:
    """Markdown of the section."""
    return "\n".join(
        [
            "## Scheduling\n",
            comparison_section(found.compared),
            _errors(found),
            _servers(found),
            _placement(found),
            _scale(found),
        ]
    )


def _errors(found: ScheduleResults) -> str:
    lines = [
        (policy, kind, *(f"{by_spread[spread] / 3600:.2f}" for spread in ERROR_SPREADS))
        for policy, kinds in found.errors.items()
        for kind, by_spread in kinds.items()
    ]
    return (
        "### What forecast errors cost\n\nAverage completion in hours; the truth times lognormal factors.\n\n"
        + markdown_table(("policy", "error on", *(f"{spread:g}" for spread in ERROR_SPREADS)), lines)
        + "\n![average completion against the spread of the error](methods/schedule-errors.png)\n"
    )


def _servers(found: ScheduleResults) -> str:
    lines = []
    for number in (min(found.servers), max(found.servers)):
        rows = found.servers[number]
        relative = ratios(rows)
        lines += [
            (
                str(number),
                row.policy,
                f"{row.average_completion_s:,.0f}",
                f"{row.makespan_s:,.0f}",
                f"{relative[row.policy][0]:.2f} / {relative[row.policy][1]:.2f}",
                _PUBLISHED_RATIOS.get(row.policy, "") if number == min(found.servers) else "",
            )
            for row in rows
        ]
    return (
        "### Optimus in its own setting\n\nParameter servers, measured speeds, 60 jobs.\n\n"
        + markdown_table(
            (
                "nodes",
                "policy",
                "average s",
                "makespan s",
                "average / makespan relative to optimus",
                "published",
            ),
            lines,
        )
    )


def _placement(found: ScheduleResults) -> str:
    result = found.placement
    lines = [
        (name, f"{1e3 * seconds:.0f}", f"{result.nodes[name]:.1f}")
        for name, seconds in result.transfer_s.items()
    ]
    blocks = [
        (name, f"{b.size_gap / 1e6:.2f} M", str(b.request_gap), str(b.num_requests))
        for name, b in result.blocks.items()
    ]
    return (
        "### Placement and parameter blocks\n\n102 MB over 1 Gbit/s:\n\n"
        + markdown_table(("placement", "transfer ms", "nodes a job"), lines)
        + "\nResNet-50 on ten servers:\n\n"
        + markdown_table(("assignment", "size gap", "request gap", "requests"), blocks)
    )


def _scale(found: ScheduleResults) -> str:
    lines = [
        (row.what, f"{row.num_jobs:,}", f"{row.num_tasks:,}", f"{row.processor_s:.1f}") for row in found.scale
    ]
    return "### Large scale\n\nOne core.\n\n" + markdown_table(
        ("decision", "jobs", "tasks", "processor s"), lines
    )
