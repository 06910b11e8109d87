"""``forerun plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.search.options import PlanOptions
from forerun.surface.cli.settings import (
    COMMAND_HELP,
    UnsafeFilesOption,
    known_devices,
    known_models,
    model_of,
)
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.search.plan import Planned


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
