"""Questions that search: ``plan``, ``scale`` (other forms of it are entry points), ``layouts`` and ``advise``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.question.options import LayoutOptions, RunOptions, ScaleOptions
from forerun.search.options import PlanOptions
from forerun.surface.cli.settings import (
    COMMAND_HELP,
    ModelArgument,
    ModelOrCommand,
    OnDevice,
    UnsafeFilesOption,
    known_devices,
    known_models,
    model_of,
    parse_numbers,
)
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.search.advise import AdvicePlan
    from forerun.search.layouts import LayoutPlan
    from forerun.search.plan import Planned
    from forerun.search.scale import ScaleCurve


@verb(
    "Find the best configuration within limits.",
    options=PlanOptions,
    aliases={"loader_workers": "workers", "loader_cores": "cores"},
    readers={
        "price_usd_per_hour": "forerun.search.devices:parse_prices",
        "accuracies": "forerun.search.plan:read_accuracies",
    },
    page="forerun.surface.report.plan_page:planned_page",
    plot="forerun.surface.report.objects:save_plot",
    traces=True,
    money=True,
    job_formats="Format: table, json, csv or markdown (the rows), job (the chosen job, for a scheduler), slurm-time "
    "(a --time with a margin), or sbatch, sky, dstack or ray (what each is told).",
    examples=(
        "forerun plan torchvision:resnet50 --on t4,l4 --batch-size 64,128 --dataset imagenet --epochs 90",
        "forerun plan llama-3.2-1b --on l4,rtx-4090 --tokens 100M --sequence-length 2048 --within 'cost<=20'",
        "forerun plan resnet50 --on 8xa100-sxm4-40gb --dataset imagenet --search all --format csv",
    ),
)
def plan(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Model, as in 'forerun predict'; keys of a family may be ranges (cnn:depth=2..4,base_filters=32..64). "
            "Several models are separated by semicolons." + COMMAND_HELP,
            autocompletion=known_models,
        ),
    ],
    on: Annotated[
        str,
        typer.Option(
            metavar="DEVICES",
            help="Devices to compare, separated by commas; 4xt4 is one job on four, 2x4xt4 on two nodes of four.",
            autocompletion=known_devices,
        ),
    ],
    settings: dict[str, Any],
    use_cache: bool,
    unsafe_files: UnsafeFilesOption = False,
) -> Planned:
    """Find the best device, batch size and precision within limits on time, money, memory and energy."""
    import forerun

    name = model_of(model, unsafe_files=unsafe_files)
    return forerun.plan(name, devices=on, use_cache=use_cache, **settings)


_QUESTION_OF = {"--fit": "points", "--propose": "points", "--workers": "servers", "--servers": "servers"}
"""Options that only one other question has, which may then stay unnamed."""


@verb(
    "Scale over devices and nodes.",
    options=ScaleOptions,
    aliases={"accumulation": "accumulation-steps"},
    readers={"num_devices": lambda text: parse_numbers("devices", text)},
    page="forerun.surface.report.scale_page:scale_page",
    plot="forerun.surface.report.objects:save_plot",
    traces=True,
    money=True,
    examples=(
        "forerun scale torchvision:resnet50 --on a100-sxm4-40gb --devices 1,2,4,8 --precision amp",
        "forerun scale llama-3.2-1b --on 4x8xh100-sxm --inter ethernet-100g --sequence-length 2048",
    ),
)
def devices(
    model: ModelOrCommand,
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


@verb(
    "Find the best way to divide a model among devices.",
    options=LayoutOptions,
    page="forerun.surface.report.scale_page:layouts_page",
    traces=True,
    examples=(
        "forerun layouts llama-3.1-70b --on 8x8xh100-sxm --inter infiniband-ndr --global-batch 512 "
        "--sequence-length 4096",
    ),
)
def layouts(model: ModelArgument, on: OnDevice, settings: dict[str, Any], use_cache: bool) -> LayoutPlan:
    """Find the best way to divide MODEL among the devices of a cluster."""
    import forerun

    return forerun.layouts(model, device=on, use_cache=use_cache, **settings)


@verb(
    "Name the changes that help a run most.",
    options=RunOptions,
    page="forerun.surface.report.scale_page:advice_page",
    traces=True,
    examples=("forerun advise torchvision:resnet50 --on l4 --batch-size 64",),
)
def advise(model: ModelArgument, on: OnDevice, settings: dict[str, Any], use_cache: bool) -> AdvicePlan:
    """Name the three changes that help training MODEL on DEVICE most, with their gain and memory."""
    import forerun

    return forerun.advise(model, device=on, use_cache=use_cache, **settings)
