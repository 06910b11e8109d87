"""``forerun scale``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import DebugOption, JsonOption, NoCacheOption, PlotOption
from forerun.cli.output import TABLE_WIDTH_IN_A_PIPE, page_width, print_json, print_page, quiet_libraries
from forerun.cli.parsing import parse_numbers
from forerun.cli.settings import with_settings
from forerun.errors import InvalidSetupError
from forerun.run.options import DEVICE_HELP, ScaleOptions
from forerun.run.settings import flag_of

if TYPE_CHECKING:
    from forerun.api.scale import ScaleCurve
    from forerun.api.scale_servers import ServerCurve, SpeedFit

__all__ = ["scale"]

_OF_DEVICES = ("num_devices", "num_nodes", "scaling", "strategy", "algorithm", "bucket_mb", "sync_batch_norm",
               "variation", "intra", "accumulation")  # fmt: skip
"""Settings that a question about workers and servers has no use for."""
_OF_POINTS = ("num_devices", "num_nodes", "batch_size")
"""Settings of the sizes that are predicted from measured points."""


@with_settings(
    ScaleOptions,
    aliases={"accumulation": "accumulation-steps"},
    readers={"num_devices": lambda text: parse_numbers("devices", text)},
)
def scale(
    settings: dict[str, Any],
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Model, as in predict; not needed with --fit.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help=DEVICE_HELP,
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="1:32",
            help="Numbers of workers of a parameter-server job, such as 1:32; replaces --devices.",
        ),
    ] = None,
    servers: Annotated[
        str | None, typer.Option(metavar="2,4", help="Numbers of parameter servers, such as 2,4.")
    ] = None,
    asynchronous: Annotated[
        bool, typer.Option("--asynchronous", help="Let the workers run without waiting for each other.")
    ] = False,
    coefficients: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Published speed function to use instead of first principles: optimus."
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="POINTS.csv", help="Table of measured points: fit a speed model to them and extrapolate."
        ),
    ] = None,
    speed_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Speed model of --fit.",
            show_default="the best by cross-validation",
        ),
    ] = None,
    propose: Annotated[
        int | None,
        typer.Option(help="Number of sizes to propose for measuring next, among --workers and --servers."),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(help="Batch size of all workers together, with synchronous parameter servers."),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    no_cache: NoCacheOption = False,
    debug: DebugOption = False,
) -> None:
    """Predict how MODEL scales with devices and nodes, or with workers and parameter servers."""
    if plot is not None:
        from forerun.report.plots import check_plot_path

        check_plot_path(plot)
    sizes = {
        "num_workers": None if workers is None else parse_numbers("workers", workers),
        "num_servers": None if servers is None else parse_numbers("servers", servers),
    }
    of_servers = {
        "--asynchronous": asynchronous or None,
        "--coefficients": coefficients,
        "--global-batch-size": global_batch_size,
    }
    answer: ScaleCurve | ServerCurve | SpeedFit
    with quiet_libraries(debug=debug):
        if fit is not None or propose is not None:
            _refuse(settings, set(settings) - set(_OF_POINTS), "measured points")
            answer = _from_points(fit, speed_model, propose, sizes, settings, global_batch_size, asynchronous)
        elif workers is not None or servers is not None:
            _refuse(settings, _OF_DEVICES, "workers and parameter servers")
            _refuse_options({"--speed-model": speed_model}, "without --fit")
            answer = _servers(
                model,
                on,
                sizes,
                settings,
                global_batch_size,
                asynchronous,
                coefficients,
                use_cache=not no_cache,
            )
        else:
            _refuse_options(
                {**of_servers, "--speed-model": speed_model}, "of devices without --workers or --fit"
            )
            answer = _devices(model, on, settings, use_cache=not no_cache)
    _tell(answer, as_json, plot)


def _refuse(settings: dict[str, Any], useless: Any, what: str) -> None:
    """Refuses settings that the question has no use for."""
    named = [flag_of(name, ScaleOptions) for name in settings if name in useless]
    _refuse_options(dict.fromkeys(named, True), f"of {what}")


def _refuse_options(options: dict[str, Any], what: str) -> None:
    named = [name for name, value in options.items() if value is not None]
    if named:
        raise InvalidSetupError(f"{', '.join(named)} cannot be used in a question {what}; leave it out")


def _required(value: str | None, what: str) -> str:
    if value is None:
        raise InvalidSetupError(
            f"expected {what}, got none; give it, or measured points with --fit POINTS.csv"
        )
    return value


def _devices(model: str | None, on: str | None, settings: dict[str, Any], *, use_cache: bool) -> ScaleCurve:
    import forerun

    return forerun.scale(
        _required(model, "a MODEL"),
        device=_required(on, "a device with --on"),
        use_cache=use_cache,
        **settings,
    )


def _servers(
    model: str | None,
    on: str | None,
    sizes: dict[str, list[int] | None],
    settings: dict[str, Any],
    global_batch_size: int | None,
    asynchronous: bool,
    coefficients: str | None,
    *,
    use_cache: bool,
) -> ServerCurve:
    import forerun

    return forerun.scale_servers(
        _required(model, "a MODEL"),
        num_workers=sizes["num_workers"] or range(1, 33),
        num_servers=sizes["num_servers"] or (1, 2, 4),
        device=on,
        global_batch_size=global_batch_size,
        synchronous=not asynchronous,
        coefficients=coefficients,
        use_cache=use_cache,
        **settings,
    )


def _from_points(
    fit: Path | None,
    speed_model: str | None,
    propose: int | None,
    sizes: dict[str, list[int] | None],
    settings: dict[str, Any],
    global_batch_size: int | None,
    asynchronous: bool,
) -> SpeedFit:
    import forerun

    return forerun.fit_speed(
        fit,
        speed_model=speed_model,
        num_devices=settings.get("num_devices"),
        num_nodes=settings.get("num_nodes"),
        batch_size=settings.get("batch_size", 32),
        global_batch_size=global_batch_size,
        num_proposals=propose or 0,
        synchronous=not asynchronous,
        **sizes,
    )


def _tell(answer: ScaleCurve | ServerCurve | SpeedFit, as_json: bool, plot: Path | None) -> None:
    found = answer.as_dict()
    if plot is not None:
        from forerun.report.scale_plots import scale_plot

        scale_plot(plot, found)
        typer.echo(f"plot written to {plot}", err=True)
    if as_json:
        print_json(found)
        return
    from forerun.report.scale_page import scale_page

    print_page(scale_page(found), page_width(TABLE_WIDTH_IN_A_PIPE))
