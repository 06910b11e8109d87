"""Commands of earlier systems: ``forerun scale servers``, ``scale points`` and ``evaluate methods``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from forerun.base.errors import UsageError
from forerun.base.units import parse_amount
from forerun.question.options import DEVICE_HELP, RunOptions, ScaleOptions
from forerun.question.settings import Setting, declared
from forerun.surface.cli.settings import COMMAND_HELP, UnsafeFilesOption, model_of, parse_numbers
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.adapters.classics.compare_methods import MethodsComparison
    from forerun.adapters.classics.scale_servers import ServerCurve, SpeedFit


class _Sizes(TypedDict, total=False):
    """Sizes of a job with parameter servers."""

    num_workers: Annotated[
        str | None,
        Setting(
            help="Numbers of workers of a parameter-server job, such as 1:32; replaces --devices.",
            group="servers",
            metavar="1:32",
            flag="workers",
        ),
    ]
    num_servers: Annotated[
        str | None,
        Setting(
            help="Numbers of parameter servers, such as 2,4.", group="servers", metavar="2,4", flag="servers"
        ),
    ]
    asynchronous: Annotated[bool | None, Setting(help="Workers do not wait for each other.", group="servers")]
    global_batch_size: Annotated[
        int | None,
        Setting(
            help="Batch size of all workers together, which synchronous workers share; otherwise --batch-size is each "
            "worker's.",
            group="servers",
            low=1,
        ),
    ]


class ServerOptions(_Sizes, RunOptions, total=False):
    """Settings of a job with parameter servers."""

    coefficients: Annotated[
        str | None,
        Setting(
            help="Published speed function to use instead of first principles: optimus.",
            group="servers",
            metavar="NAME",
        ),
    ]


class PointOptions(_Sizes, ScaleOptions, total=False):
    """Settings of a curve fitted to measured points."""

    fit: Annotated[
        Path | None,
        Setting(
            help="Table of measured points: fit a speed model to them and extrapolate.",
            group="points",
            metavar="POINTS.csv",
        ),
    ]
    speed_model: Annotated[
        str | None,
        Setting(
            help="Speed model of --fit.",
            group="points",
            default="the best by cross-validation",
            metavar="NAME",
        ),
    ]
    propose: Annotated[
        int | None,
        Setting(
            help="Number of sizes to propose for measuring next, among --workers and --servers.",
            group="points",
            low=1,
        ),
    ]


_OF_SIZES = {"num_devices", "num_nodes", "batch_size"}
"""Settings of a run that a curve fitted to points has a use for."""

_READERS = {
    "num_devices": lambda text: parse_numbers("devices", text),
    "num_workers": lambda text: parse_numbers("workers", text),
    "num_servers": lambda text: parse_numbers("servers", text),
}


@verb(
    "Scale over workers and parameter servers.",
    options=ServerOptions,
    without={"num_devices", "num_nodes", "strategy", "all_reduce", "bucket_mb", "sync_batch_norm", "variation",
             "intra", "accumulation"},
    readers={name: read for name, read in _READERS.items() if name != "num_devices"},
    page="forerun.adapters.classics.scale_page:servers_page",
    plot="forerun.adapters.classics.scale_page:servers_plot",
    traces=True,
)  # fmt: skip
def servers(
    settings: dict[str, Any],
    use_cache: bool,
    model: Annotated[list[str], typer.Argument(metavar="MODEL", help="Model, as in predict." + COMMAND_HELP)],
    on: Annotated[str | None, typer.Option(metavar="DEVICE", help=DEVICE_HELP)] = None,
    unsafe_files: UnsafeFilesOption = False,
) -> ServerCurve:
    """Predict how training MODEL scales with workers and parameter servers."""
    from forerun.adapters.classics.scale_servers import scale_servers

    return scale_servers(
        model_of(model, unsafe_files=unsafe_files),
        num_workers=settings.pop("num_workers", range(1, 33)),
        num_servers=settings.pop("num_servers", (1, 2, 4)),
        device=on,
        synchronous=not settings.pop("asynchronous", False),
        use_cache=use_cache,
        **settings,
    )


@verb(
    "Scale by measured points.",
    options=PointOptions,
    without=declared(ScaleOptions).keys() - _OF_SIZES,
    readers=_READERS,
    page="forerun.adapters.classics.scale_page:fit_page",
    plot="forerun.adapters.classics.scale_page:fit_plot",
)
def points(settings: dict[str, Any]) -> SpeedFit:
    """Fit a speed model to measured points and extrapolate, or propose the sizes to measure next."""
    from forerun.adapters.classics.scale_servers import fit_speed

    return fit_speed(
        settings.pop("fit", None),
        num_proposals=settings.pop("propose", 0),
        batch_size=settings.pop("batch_size", None),
        synchronous=not settings.pop("asynchronous", False),
        **settings,
    )


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
