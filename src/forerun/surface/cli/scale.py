"""``forerun scale``: on devices and nodes; other forms of it are entry points ``scale.NAME``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.question.options import MODEL_HELP, ScaleOptions
from forerun.surface.cli.options import COMMAND_HELP, OnDevice, UnsafeFilesOption, model_of
from forerun.surface.cli.settings import parse_numbers
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.search.scale import ScaleCurve

__all__ = ["scale"]

_QUESTION_OF = {"--fit": "points", "--propose": "points", "--workers": "servers", "--servers": "servers"}
"""Options that only one other question has, which may then stay unnamed."""


@verb(
    "Scale over devices and nodes.",
    options=ScaleOptions,
    aliases={"accumulation": "accumulation-steps"},
    readers={"num_devices": lambda text: parse_numbers("devices", text)},
    page="forerun.surface.report.scale_page:scale_page",
    plot="forerun.surface.report.scale_page:scale_plot",
    traces=True,
)
def devices(
    model: Annotated[list[str], typer.Argument(metavar="MODEL", help=MODEL_HELP + COMMAND_HELP)],
    on: OnDevice,
    settings: dict[str, Any],
    use_cache: bool,
    unsafe_files: UnsafeFilesOption = False,
) -> ScaleCurve:
    """Predict how training MODEL scales with devices and nodes."""
    import forerun

    name = model_of(model, unsafe_files=unsafe_files)
    return forerun.scale(name, device=on, use_cache=use_cache, **settings)


def _chosen(words: Sequence[str]) -> str:
    own = words[: words.index("--")] if "--" in words else words
    flags = [word.partition("=")[0] for word in own]
    return next((question for flag, question in _QUESTION_OF.items() if flag in flags), "devices")


scale = Verbs(
    "Predict how training scales with devices, or with workers and parameter servers.",
    {"devices": devices},
    short_help="Predict how training scales with devices or servers.",
    chosen=_chosen,
)
