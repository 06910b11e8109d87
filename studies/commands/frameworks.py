"""``python -m studies parity`` and ``stack``: compare Keras with PyTorch."""

from __future__ import annotations

import typer

from forerun.surface.cli.output import print_json, quiet_libraries
from forerun.surface.cli.settings import DebugOption, JsonOption


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
    from studies.tables.reference_steps import require_reference_folder

    with quiet_libraries(debug=debug):
        page = stack_markdown(stack_study(require_reference_folder()))
    typer.echo(page)
