"""``python -m studies layouts`` and ``fit-layouts``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.base.errors import UsageError
from forerun.surface.cli.output import quiet_libraries
from forerun.surface.cli.settings import DebugOption
from studies.commands.sources import SourceOption, chosen_sources


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
    debug: DebugOption = False,
) -> None:
    """Compare predicted with measured steps of layouts of large models, and the choice among them."""
    if sum((bool(source), memory, few_steps, grpo)) > 1:
        raise UsageError(
            "expected one of --source, --memory, --few-steps and --grpo, got several; leave all but one out"
        )
    from studies.layouts.few_steps import few_steps_page
    from studies.layouts.grpo import grpo_page
    from studies.layouts.megatron_memory import memory_page
    from studies.layouts.rows import SOURCES
    from studies.layouts.study import study_page
    from studies.tables.reference_steps import require_reference_folder

    chosen = chosen_sources(source, SOURCES)
    folder = require_reference_folder()
    with quiet_libraries(debug=debug):
        page = (
            grpo_page(folder)
            if grpo
            else memory_page(folder)
            if memory
            else few_steps_page(folder)
            if few_steps
            else study_page(folder, chosen)
        )
    typer.echo(page, nl=False)


def fit_layouts(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the constants (.json).")],
    debug: DebugOption = False,
) -> None:
    """Fit the constants of layouts to measured collectives and steps (some minutes)."""
    if not out.parent.is_dir():
        raise UsageError(f"the folder of '{out}' does not exist; create it or choose another with --out")
    from studies.layouts.fit import fit_layouts as fitted
    from studies.tables.reference_steps import require_reference_folder

    with quiet_libraries(debug=debug):
        constants = fitted(require_reference_folder()).to_json()
    out.write_text(constants, encoding="utf-8")
    typer.echo(f"constants written to {out}", err=True)
