"""``forerun schedule``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import DebugOption, JsonOption, PlotOption
from forerun.cli.output import page_width, print_json, print_page, progress_line, quiet_libraries
from forerun.errors import InvalidSetupError, UsageError

if TYPE_CHECKING:
    from forerun.api.scheduling import Schedule

__all__ = ["schedule"]

_PAGE_WIDTH = 120


def schedule(
    jobs: Annotated[Path | None, typer.Argument(metavar="[JOBS]", help="CSV or YAML file of jobs.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", help="Nodes x devices a node x kind, such as 16x4xt4; groups joined by '+'."
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SYSTEM",
            help="A cluster that is running: slurm, ray, ray:URL, kubernetes, or a file with what they said; "
            "JOBS are then further ones.",
        ),
    ] = None,
    watch: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="With --from: look and decide again after each such time, such as 5m."
        ),
    ] = None,
    is_applied: Annotated[
        bool, typer.Option("--apply", help="With --from: run the commands. Without it nothing is ever run.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Policies to compare, the preferred one first: foresight, srtf, fifo, las, equal, drf, tetris, "
            "optimus, normalised, pollux, sia, deadline.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A trace such as Philly's, Helios', Alibaba's or Tiresias' instead of JOBS; policies fifo, srtf, las.",
        ),
    ] = None,
    round_length: Annotated[
        str, typer.Option("--round", metavar="TIME", help="Time between two decisions, such as 60s or 10min.")
    ] = "60s",
    intra: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="Link inside a node for predicted jobs, where the form of the board does not say it.",
        ),
    ] = None,
    inter: Annotated[
        str | None,
        typer.Option(metavar="LINK", help="Link between nodes for predicted jobs, such as ethernet-25g."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws behind the intervals.")] = 0,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Share a cluster among jobs: who gets which devices now and why, when each is done, how policies compare."""
    if source is not None:
        from forerun.cli.schedule_live import schedule_from

        _refuse_beside_from(cluster=cluster, trace=trace, plot=plot)
        schedule_from(
            source,
            jobs,
            policy=policy,
            options={"round_s": _round_s(round_length), "seed": seed, "intra": intra, "inter": inter},
            watch=watch,
            is_applied=is_applied,
            as_json=as_json,
            debug=debug,
        )
        return
    if watch is not None or is_applied:
        raise UsageError("--watch and --apply are for a running cluster; add --from slurm, ray or kubernetes")
    if (jobs is None) == (trace is None):
        raise UsageError("expected a file of JOBS or --trace FILE, one of the two")
    if cluster is None:
        raise UsageError("expected --cluster SPEC such as 16x4xt4, or --from for a cluster that is running")
    if trace is not None and plot is not None:
        raise UsageError("--plot draws JOBS on their devices; a trace has none, leave it out")
    names = None if policy is None else [name.strip() for name in policy.split(",") if name.strip()]
    with quiet_libraries(debug=debug):
        options = {"round_s": _round_s(round_length), "seed": seed, "intra": intra, "inter": inter}
        with progress_line() as say:
            answer = _answer(jobs, trace, cluster, names, options | {"say": say}, plot)
    if as_json:
        print_json(answer.as_dict())
        return
    from forerun.report.schedule_page import command_lines, schedule_page

    print_page(schedule_page(answer), page_width(_PAGE_WIDTH))
    lines = command_lines(answer)
    if lines:
        # Not through the page: a command that is broken over lines cannot be copied.
        typer.echo("\n".join(("", "To start it (nothing was run)", *lines)))
    if plot is not None:
        typer.echo(f"plot written to {plot}", err=True)


def _refuse_beside_from(**given: object) -> None:
    """Refuses options that a running cluster answers itself."""
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if names:
        raise UsageError(f"--from reads a cluster that is running; leave out {', '.join(names)}")


def _round_s(text: str) -> float:
    from forerun.units import parse_duration_s

    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise InvalidSetupError(f"--round: {error}") from error


def _answer(
    jobs: Path | None,
    trace: Path | None,
    cluster: str,
    names: list[str] | None,
    options: dict[str, Any],
    plot: Path | None,
) -> Schedule:
    if plot is not None:
        from forerun.report.figure import check_plot_path

        check_plot_path(plot)
    from forerun import api

    policies: dict[str, Any] = {} if names is None else {"policies": names}
    if trace is not None:
        return api.schedule_trace(trace, cluster=cluster, **policies)
    assert jobs is not None
    answer = api.schedule(jobs, cluster=cluster, **options, **policies)
    if plot is not None:
        from forerun.report.gantt import gantt_chart

        gantt_chart(plot, answer)
    return answer
