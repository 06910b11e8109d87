"""``python -m studies fine-tuning``."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.surface.cli.output import quiet_libraries
from forerun.surface.cli.settings import DebugOption
from studies.commands.sources import SourceOption, chosen_sources


def fine_tuning(
    source: SourceOption = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Print every row to stderr as it is answered.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Compare predictions of fine-tuning language models with measured steps and memory (some minutes)."""
    from studies.fine_tuning.rows import SOURCES
    from studies.fine_tuning.study import study_page
    from studies.tables.reference_steps import require_reference_folder

    chosen = chosen_sources(source, SOURCES)

    def say(text: str) -> None:
        if rows:
            typer.echo(text, err=True)

    with quiet_libraries(debug=debug):
        page = study_page(require_reference_folder(), chosen, say)
    typer.echo(page, nl=False)
