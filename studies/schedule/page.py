"""The section on scheduling of the accuracy page."""

from __future__ import annotations

from collections.abc import Sequence

from studies.schedule.server_study import ratios
from studies.schedule.study import ERROR_SPREADS, PolicyRow, ScheduleResults

__all__ = ["schedule_section"]

_KNOWN_H = {
    "fifo": 2.16,
    "optimus": 1.56,
    "las": 1.09,
    "equal": 0.91,
    "normalised": 0.89,
    "srtf": 0.86,
    "pollux": 0.64,
}
"""Average completion in an earlier trial on the eight workloads of the Sia artifact [h]."""

_PUBLISHED_RATIOS = {"optimus": "1 / 1", "tetris": "1.33 / 1.14", "drf": "1.62 / 1.31"}


def schedule_section(found: ScheduleResults) -> str:
    """Markdown of the section."""
    return "\n".join(
        [
            "## Scheduling\n",
            _replay(found.replay),
            _checks(found),
            _errors(found),
            _mixed(found.mixed),
            _gavel(found.gavel),
            _servers(found),
            _placement(found),
            _scale(found),
        ]
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(header), " | ".join(["---"] * len(header)), *(" | ".join(row) for row in rows)]
    return "".join(f"| {line} |\n" for line in lines)


def _figures(row: PolicyRow) -> tuple[str, ...]:
    return (
        f"{row.mean('average_completion_s') / 3600:.2f} ({row.spread('average_completion_s') / 3600:.2f})",
        f"{row.mean('p99_completion_s') / 3600:.1f}",
        f"{row.mean('makespan_s') / 3600:.1f}",
        f"{row.mean('restarts_per_job'):.1f}",
        f"{100 * row.mean('utilisation'):.0f} %",
        f"{row.mean('scheduler_ms'):.1f}",
    )


_HEADER = (
    "average h (std)",
    "p99 h",
    "makespan h",
    "restarts a job",
    "in use",
    "decision ms",
)


def _replay(rows: Sequence[PolicyRow]) -> str:
    lines = [
        (
            f"**{row.policy}**" if row.policy == "foresight" else row.policy,
            "forecasts" if row.forecast else "truth",
            *_figures(row),
            "" if row.forecast or row.policy not in _KNOWN_H else f"{_KNOWN_H[row.policy]:.2f}",
        )
        for row in rows
    ]
    return (
        f"160 jobs on 64 T4, mean over {len(rows[0].metrics)} workloads; `foresight` was developed on these.\n\n"
        + _table(("policy", "knows", *_HEADER, "earlier trial, average h"), lines)
    )


def _checks(found: ScheduleResults) -> str:
    lines = [("workloads 8 to 15", row.policy, *_figures(row)) for row in found.fresh]
    lines += [("arrivals of one day", row.policy, *_figures(row)) for row in found.bursts]
    return "### Other workloads, forecasts only\n\n" + _table(("workloads", "policy", *_HEADER), lines)


def _errors(found: ScheduleResults) -> str:
    lines = [
        (policy, kind, *(f"{by_spread[spread] / 3600:.2f}" for spread in ERROR_SPREADS))
        for policy, kinds in found.errors.items()
        for kind, by_spread in kinds.items()
    ]
    return (
        "### What forecast errors cost\n\nAverage completion in hours; the truth times lognormal factors.\n\n"
        + _table(("policy", "error on", *(f"{spread:g}" for spread in ERROR_SPREADS)), lines)
        + "\n![average completion against the spread of the error](methods/schedule-errors.png)\n"
    )


def _mixed(rows: Sequence[PolicyRow]) -> str:
    lines = [(row.policy, *_figures(row)) for row in rows]
    return "### Unlike devices\n\n24 T4, 24 RTX 2080 Ti, 16 A100.\n\n" + _table(("policy", *_HEADER), lines)


def _gavel(rows: Sequence[PolicyRow]) -> str:
    lines = [(row.policy, *_figures(row)) for row in rows]
    return (
        "### Jobs of one size on unlike devices\n\n24 K80, 24 P100, 24 V100; jobs as in Gavel.\n\n"
        + _table(("policy", *_HEADER), lines)
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
    return "### Optimus in its own setting\n\nParameter servers, measured speeds, 60 jobs.\n\n" + _table(
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
        + _table(("placement", "transfer ms", "nodes a job"), lines)
        + "\nResNet-50 on ten servers:\n\n"
        + _table(("assignment", "size gap", "request gap", "requests"), blocks)
    )


def _scale(found: ScheduleResults) -> str:
    lines = [
        (row.what, f"{row.num_jobs:,}", f"{row.num_tasks:,}", f"{row.processor_s:.1f}") for row in found.scale
    ]
    return "### Large scale\n\nOne core.\n\n" + _table(("decision", "jobs", "tasks", "processor s"), lines)
