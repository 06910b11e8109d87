"""``forerun plan``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
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
    from forerun.search.advise import Way
    from forerun.search.plan_answer import Plan

_OF_CHOICE = {"num_devices", "num_nodes", "price_usd_per_hour", "intra", "inter"}
"""Settings that the chosen candidate decides."""


def _prices(text: str) -> Any:
    from forerun.search.devices import parse_prices

    return parse_prices(text)


def _accuracies(path: str) -> Any:
    from forerun.search.plan import read_accuracies

    return read_accuracies(Path(path))


@dataclass(frozen=True)
class _Planned:
    """A plan, with what was asked."""

    plan: Plan
    settings: dict[str, Any]

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Changes that would make the chosen or nearest candidate faster and were not asked about."""
        best = self.plan.chosen or self.plan.nearest_miss
        if best is None:
            return ()
        from forerun.question.job import JobOptions
        from forerun.question.options import RunOptions
        from forerun.question.settings import declared
        from forerun.search.advise import ways_to_save
        from forerun.search.predict import predict

        # The job decides nothing about a step, and its dataset may be one that the plan assumed.
        of_runs = declared(RunOptions).keys() - declared(JobOptions).keys() - _OF_CHOICE
        own = {
            **{name: value for name, value in self.settings.items() if name in of_runs},
            "batch_size": best.batch_size_per_device,
            "precision": best.precision,
            "layout": best.layout,
            "image_size": best.image_size,
            "num_devices": best.num_devices if best.num_devices > 1 else None,
            **best.settings,
        }
        estimate = predict(best.model, device=best.device, **own)
        return ways_to_save(estimate)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data, with further ways to save."""
        return {**self.plan.as_dict(), "ways_to_save": [way.as_dict() for way in self.ways]}


def _page(found: _Planned) -> Iterator[Any]:
    from forerun.surface.report.plan_page import plan_page

    yield plan_page(found.plan)
    if found.ways:
        yield f"Also worth trying with the {'chosen' if found.plan.chosen else 'nearest'} one"
    for way in found.ways:
        yield f"  -  {way.words}: {100 * way.gain:.0f} % less time"


@verb(
    "Find the best configuration within limits.",
    options=PlanOptions,
    aliases={"loader_workers": "workers", "loader_cores": "cores"},
    readers={"price_usd_per_hour": _prices, "accuracies": _accuracies},
    page=_page,
    traces=True,
    rows=lambda found: found.plan,
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
    pareto: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Plot time against cost, with the Pareto front marked."),
    ] = None,
    unsafe_files: UnsafeFilesOption = False,
) -> _Planned:
    """Find the best device, batch size and precision within limits on time, money, memory and energy."""
    if pareto is not None:
        from forerun.surface.report.figure import check_plot_path

        check_plot_path(pareto)
    import forerun

    name = model_of(model, unsafe_files=unsafe_files)
    found = forerun.plan(name, devices=on, use_cache=use_cache, **settings)
    if pareto is not None:
        from forerun.surface.report.objects import save_plot

        save_plot(pareto, found)
        typer.echo(f"plot written to {pareto}", err=True)
    return _Planned(found, settings)
