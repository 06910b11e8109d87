"""``forerun evaluate methods``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.base.errors import UsageError
from forerun.base.units import parse_amount
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.adapters.classics.compare_methods import MethodsComparison

__all__ = ["methods"]


@verb(
    "Compare runs of networks with sums of their layers.",
    page="forerun.adapters.classics.compare_methods:methods_page",
    plot="forerun.adapters.classics.compare_methods:methods_plot",
    width=96,
)
def methods(
    records: Annotated[
        str, typer.Argument(metavar="RECORDS", help="Table of measured runs; each names its own device.")
    ],
    layers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Model of layers that forerun fit --model layers wrote.",
            show_default="the published sums in the table",
        ),
    ] = None,
    last_layer: Annotated[
        str | None,
        typer.Option(metavar="4.8ms", help="With --layers: step of the last layer alone under the strategy."),
    ] = None,
) -> MethodsComparison:
    """Compare measured runs of networks with sums of their layers, and with our prediction."""
    from forerun.adapters.classics.compare_methods import compare_methods

    if layers is None and last_layer is not None:
        raise UsageError(
            "the published sums have their own last layer; name a file with --layers, or leave --last-layer out"
        )
    last_layer_s = None if last_layer is None else parse_amount(last_layer, "time")
    return compare_methods(records, layers=layers, last_layer_s=last_layer_s)
