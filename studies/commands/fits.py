"""``python -m studies fit-weights`` and its kin: what is shipped, made from the public tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.base.errors import UsageError
from forerun.surface.cli.output import quiet_libraries
from forerun.surface.cli.settings import DebugOption


def fit_weights(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the weights (.safetensors).")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Fit a sample of the rows for a short time.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Fit the cost model to the public tables (some minutes); afterwards fit its intervals with fit-intervals."""
    _check_folder(out)
    from studies.reference_run import fit_shipped_weights

    with quiet_libraries(debug=debug):
        fit_shipped_weights(out, quick=quick)
    typer.echo(f"weights written to {out}", err=True)


def fit_intervals(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the widths of intervals (.json).")],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Take a sample of the rows and short fits: minutes instead of an hour."),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Fit the widths of intervals and the priors of calibrations to steps left out of fits (an hour of work)."""
    _check_folder(out)
    from studies.reference_run import fit_shipped_evidence

    with quiet_libraries(debug=debug):
        fit_shipped_evidence(out, quick=quick)
    typer.echo(f"widths of intervals written to {out}", err=True)


def fit_scaling(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the constants (.json).")],
    debug: DebugOption = False,
) -> None:
    """Fit the costs that training adds to bare collectives to the public tables (some minutes)."""
    _check_folder(out)
    from studies.scaling.study import fit_scaling_table
    from studies.tables.reference_steps import require_reference_folder

    with quiet_libraries(debug=debug):
        constants = fit_scaling_table(require_reference_folder()).to_json()
    out.write_text(constants, encoding="utf-8")
    typer.echo(f"constants written to {out}", err=True)


def published_steps(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the table (.txt).")],
    debug: DebugOption = False,
) -> None:
    """Write the table of published steps that comes with the package, from the public tables (a minute)."""
    _check_folder(out)
    from studies.tables.published import published_records, published_text
    from studies.tables.reference_steps import require_reference_folder

    with quiet_libraries(debug=debug):
        out.write_text(published_text(published_records(require_reference_folder())), encoding="utf-8")
    typer.echo(f"published steps written to {out}", err=True)


def _check_folder(out: Path) -> None:
    if not out.parent.is_dir():
        raise UsageError(f"the folder of '{out}' does not exist; create it or choose another with --out")
