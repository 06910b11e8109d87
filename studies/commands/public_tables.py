"""``python -m studies``: the studies of the public tables, and the fits of what is shipped from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from forerun.base.errors import UsageError
from forerun.surface.cli.output import print_json, quiet_libraries
from forerun.surface.cli.settings import DebugOption, JsonOption, PlotOption

SourceOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Source of the rows, several times for several.")
]
OutOption = Annotated[Path, typer.Option(metavar="FILE", help="File to write; the package has one like it.")]
QuickOption = Annotated[
    bool,
    typer.Option("--quick", help="Take a sample of the rows and short fits: minutes instead of an hour."),
]


def _folder() -> Path:
    from studies.tables.public import require_reference_folder

    return require_reference_folder()


@contextmanager
def _making(what: str, out: Path | None, *, debug: bool) -> Iterator[None]:
    """Work whose result goes to a file; that it can is found out before."""
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"the folder of '{out}' does not exist; choose another")
    with quiet_libraries(debug=debug):
        yield
    if out is not None:
        typer.echo(f"{what} written to {out}", err=True)


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from forerun.surface.report.figure import check_plot_path

        check_plot_path(plot)


def fit_weights(out: OutOption, quick: QuickOption = False, debug: DebugOption = False) -> None:
    """Fit the cost model to the public tables (some minutes); afterwards fit its intervals with fit-intervals."""
    with _making("weights", out, debug=debug):
        from studies.reference_run import fit_shipped_weights

        fit_shipped_weights(out, quick=quick)


def fit_intervals(out: OutOption, quick: QuickOption = False, debug: DebugOption = False) -> None:
    """Fit the widths of intervals and the priors of calibrations to steps left out of fits (an hour of work)."""
    with _making("widths of intervals", out, debug=debug):
        from studies.reference_run import fit_shipped_evidence

        fit_shipped_evidence(out, quick=quick)


def fit_scaling(out: OutOption, debug: DebugOption = False) -> None:
    """Fit the costs that training adds to bare collectives to the public tables (some minutes)."""
    with _making("constants", out, debug=debug):
        from studies.scaling.page import fit_scaling_table

        out.write_text(fit_scaling_table(_folder()).to_json(), encoding="utf-8")


def fit_layouts(out: OutOption, debug: DebugOption = False) -> None:
    """Fit the constants of layouts to measured collectives and steps (some minutes)."""
    with _making("constants", out, debug=debug):
        from studies.layouts.fit import fit_layouts as fitted

        out.write_text(fitted(_folder()).to_json(), encoding="utf-8")


def published_steps(out: OutOption, debug: DebugOption = False) -> None:
    """Write the table of published steps that comes with the package, from the public tables (a minute)."""
    with _making("published steps", out, debug=debug):
        from studies.tables.published import published_records, published_text

        out.write_text(published_text(published_records(_folder())), encoding="utf-8")


def backtest(
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the figures that the package ships, from a new study."),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Test all forecasters on the public learning curves; print the section of the page of accuracy."""
    _check_plot(plot)
    with _making("figures", save, debug=debug), _making("plot", plot, debug=debug):
        from studies.forecast.section import forecast_section
        from studies.reference_run import forecast_figures

        figures = forecast_figures(_folder(), save)
        if plot is not None:
            from forerun.jobs.plots import backtest_plot

            backtest_plot(plot, figures.curves.everything)
    if as_json:
        print_json(figures.curves.everything.as_dict())
    else:
        typer.echo(forecast_section(figures))


def schedule(
    quick: Annotated[bool, typer.Option("--quick", help="Two workloads, no integer program.")] = False,
    plot: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Replay public workloads under every policy; print the section of the page of accuracy (some minutes)."""
    _check_plot(plot)
    with _making("plot", plot, debug=debug):
        from studies.schedule.study import error_plot, schedule_section, schedule_study

        found = schedule_study(_folder(), lambda line: typer.echo(line, err=True), quick)
        if plot is not None:
            error_plot(plot, found.errors)
    typer.echo(schedule_section(found))


def parity(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Trace networks in PyTorch and in Keras; compare parameters, work and traffic by class of operation."""
    from studies.keras.parity import keras_parity, parity_markdown

    with quiet_libraries(debug=debug):
        rows = keras_parity()
    if as_json:
        print_json({"pairs": [row.as_dict() for row in rows]})
    else:
        typer.echo(parity_markdown(rows))


def stack(debug: DebugOption = False) -> None:
    """Compare steps of Keras and TensorFlow in the public tables with predictions, each network or GPU held out."""
    from studies.keras.stack_study import stack_markdown, stack_study

    with quiet_libraries(debug=debug):
        page = stack_markdown(stack_study(_folder()))
    typer.echo(page)


def _chosen(given: list[str] | None, known: Collection[str]) -> tuple[str, ...]:
    """The sources that were named, all if none was."""
    for name in given or ():
        if name not in known:
            raise UsageError(f"unknown source '{name}'; expected one of {', '.join(known)}")
    return tuple(given or known)


def fine_tuning(
    source: SourceOption = None,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row to stderr.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Memory and verdicts alone.")] = False,
    debug: DebugOption = False,
) -> None:
    """Compare predictions of fine-tuning language models with measured steps and memory (some minutes)."""
    from studies.fine_tuning.rows import SOURCES
    from studies.fine_tuning.study import study_page

    chosen = _chosen(source, SOURCES)

    def say(text: str) -> None:
        if rows:
            typer.echo(text, err=True)

    with quiet_libraries(debug=debug):
        page = study_page(_folder(), chosen, say, memory=memory)
    typer.echo(page, nl=False)


def layouts(
    source: SourceOption = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Bytes of Megatron-LM's own tests in place of steps.")
    ] = False,
    few_steps: Annotated[
        bool,
        typer.Option("--few-steps", help="What 1, 3 and 5 measured steps of a source make of its others."),
    ] = False,
    grpo: Annotated[
        bool, typer.Option("--grpo", help="Published steps of reinforcement learning, asked plainly.")
    ] = False,
    experts: Annotated[
        bool, typer.Option("--experts", help="Published steps of mixtures of experts, asked by name.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Compare predicted with measured steps of layouts of large models, and the choice among them."""
    if sum((bool(source), memory, few_steps, grpo, experts)) > 1:
        raise UsageError(
            "expected one of --source, --memory, --few-steps, --grpo and --experts, got several; leave all but one out"
        )
    from studies.layouts.asked_by_name import experts_page, grpo_page
    from studies.layouts.megatron_memory import memory_page
    from studies.layouts.rows import SOURCES
    from studies.layouts.study import few_steps_page, study_page

    chosen, folder = _chosen(source, SOURCES), _folder()
    with quiet_libraries(debug=debug):
        if grpo:
            page = grpo_page(folder)
        elif experts:
            page = experts_page(folder)
        elif memory:
            page = memory_page(folder)
        else:
            page = few_steps_page(folder) if few_steps else study_page(folder, chosen)
    typer.echo(page, nl=False)
