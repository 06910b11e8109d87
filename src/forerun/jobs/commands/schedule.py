"""``forerun schedule``: jobs on a cluster, traces, and a cluster that is running."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from forerun.base.errors import FailureError, InvalidSetupError, UsageError
from forerun.base.stages import progress
from forerun.question.settings import Setting, checked
from forerun.surface.cli.output import page_width, print_json, print_page, quiet_libraries
from forerun.surface.cli.settings import JsonOption, parse_time_s
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.jobs.schedule import Schedule
    from forerun.jobs.schedule_live import LiveSchedule

_WIDTH = 120
_LIVE_WIDTH = 140

ClusterOption = Annotated[
    str,
    typer.Option(
        metavar="SPEC",
        help="Nodes x devices a node x kind, such as 16x4xt4; groups of other devices joined by +. Or a file: "
        "slurm.conf, or YAML of a Ray cluster, Kueue, dstack or SkyPilot.",
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES",
        help="Policies to compare, the preferred one first: foresight (ours), srtf, fifo, las, equal, drf, tetris, "
        "optimus, normalised, pollux, sia, gavel, themis, deadline; NAME:raw changes jobs without asking whether that "
        "pays its restarts. [default: foresight,srtf,fifo]",
        show_default=False,
    ),
]


class DecideOptions(TypedDict, total=False):
    """Settings of decisions about jobs."""

    round_s: Annotated[
        float | None,
        Setting(
            help="Time between two decisions, such as 60s or 10min.",
            group="limits",
            default="60s",
            flag="round",
            metavar="TIME",
            above=0,
        ),
    ]
    intra: Annotated[
        str | None,
        Setting(
            help="Link inside a node for predicted jobs, where the form of the board does not say it.",
            group="device",
            metavar="LINK",
        ),
    ]
    inter: Annotated[
        str | None,
        Setting(
            help="Link between nodes for predicted jobs, such as ethernet-25g.",
            group="device",
            metavar="LINK",
        ),
    ]
    seed: Annotated[
        int | None,
        Setting(help="Seed of the draws behind the intervals.", group="limits", default="0", low=0),
    ]


class ShareOptions(DecideOptions, total=False):
    """Settings of a schedule."""

    fair: Annotated[
        float | None,
        Setting(
            help="Worst finish-time fairness that foresight allows: completion over that with an equal share.",
            group="limits",
            default="10",
            above=1,
        ),
    ]


def _page(answer: Schedule) -> Iterator[Any]:
    from forerun.jobs.pages import command_lines, schedule_page

    yield schedule_page(answer)
    if lines := command_lines(answer):
        # Not through the page: a command that is broken over lines cannot be copied.
        yield "\n".join(("", "To start it (nothing was run)", *lines))


@verb(
    "Share a cluster among jobs.",
    options=ShareOptions,
    readers={"round_s": lambda text: parse_time_s("--round", text)},
    page=_page,
    plot="forerun.jobs.plots:gantt_chart",
    width=_WIDTH,
)
def jobs(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS", help="CSV, YAML or JSON file of jobs.")],
    cluster: ClusterOption,
    settings: dict[str, Any],
    policy: PolicyOption = None,
) -> Schedule:
    """Share a cluster among jobs: who gets which devices now and why, when each is done, how policies compare."""
    import forerun

    asked = {**_policies(policy), **checked(settings, ShareOptions)}
    with progress("sharing the cluster") as say:
        return forerun.schedule(jobs, cluster=_cluster(cluster), say=say, **asked)


@verb("Replay a trace of jobs.", page=_page, width=_WIDTH)
def trace(
    file: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="A trace such as Philly's, Helios', Alibaba's or Tiresias'."),
    ],
    cluster: ClusterOption,
    policy: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Policies to compare: fifo, srtf, las.")
    ] = None,
) -> Schedule:
    """Replay a trace of jobs on a cluster under several policies."""
    import forerun

    with progress("sharing the cluster"):
        return forerun.schedule_trace(file, cluster=_cluster(cluster), **_policies(policy))


def _cluster(spec: str) -> str | Path:
    return path if (path := Path(spec)).is_file() else spec


def _policies(names: str | None) -> dict[str, Any]:
    if names is None:
        return {}
    return {"policies": [name.strip() for name in names.split(",") if name.strip()]}


@verb(
    "Advise a cluster that is running.",
    options=DecideOptions,
    readers={"round_s": lambda text: parse_time_s("--round", text)},
)
def live(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SYSTEM", help="slurm, ray, ray:URL, kubernetes, or a file with what they said."
        ),
    ],
    settings: dict[str, Any],
    debug: bool,
    jobs: Annotated[
        Path | None, typer.Argument(metavar="[JOBS]", help="CSV, YAML or JSON file of further jobs.")
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Policy that decides.")] = "foresight",
    watch: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time after which to look and decide again, such as 5m."),
    ] = None,
    is_applied: Annotated[
        bool, typer.Option("--apply", help="Run the commands. Without it nothing is ever run.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which devices each job of a running cluster should have, and print the commands for that."""
    from forerun.jobs.schedule_live import schedule_live

    if watch is not None and as_json:
        raise UsageError("--json prints one object, --watch one page after another; leave one of the two out")
    every_s = None if watch is None else parse_time_s("--watch", watch)
    if every_s is not None and every_s < 1:
        raise InvalidSetupError(f"--watch: expected a second or more between two looks, got '{watch}'")
    asked = {**checked(settings, DecideOptions), "policy": policy}
    while True:
        try:
            with quiet_libraries(debug=debug), progress("reading the cluster") as say:
                advice = schedule_live(source, jobs, say=say, **asked)
            _show(advice, is_applied, as_json)
        except FailureError as error:
            if every_s is None:
                raise
            # A controller that restarts is back by the next look.
            typer.echo(f"error: {error}", err=True)
        if every_s is None:
            return
        typer.echo(f"next look in {watch}; Ctrl-C ends", err=True)
        time.sleep(every_s)


def _show(advice: LiveSchedule, is_applied: bool, as_json: bool) -> None:
    from forerun.jobs.pages import live_page
    from forerun.jobs.schedule_live import apply_commands

    if as_json:
        print_json(advice.as_dict())
    else:
        print_page(live_page(advice), page_width(_LIVE_WIDTH))
        title = "Running" if is_applied else "To bring it about (nothing was run)"
        # Not through the page: a command that is broken over lines cannot be copied.
        typer.echo(
            "\n".join(("", title, *advice.commands)) if advice.commands else "\nNothing is to be done."
        )
    if is_applied:
        for text in apply_commands(advice):
            typer.echo(text, err=True)


schedule = Verbs(
    "Share a cluster among jobs.",
    {"jobs": jobs, "trace": trace, "live": live},
    short_help="Share a cluster among jobs: each job's share, and the time when it is done.",
    chosen=lambda words: "jobs",
)
