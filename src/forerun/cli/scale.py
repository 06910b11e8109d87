"""``forerun scale``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import DebugOption, JsonOption, PlotOption
from forerun.cli.output import TABLE_WIDTH_IN_A_PIPE, page_width, print_json, print_page, quiet_libraries
from forerun.cli.parsing import parse_input_shape, parse_numbers, parse_price_usd_per_hour
from forerun.errors import InvalidSetupError

if TYPE_CHECKING:
    from forerun.api.scale import ScaleCurve
    from forerun.api.scale_servers import ServerCurve, SpeedFit

__all__ = ["scale"]


def scale(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The model, as in predict; not needed with --fit.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="A device, nodes x devices x name such as 4x8xh100-sxm, or a TOML file of either.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="1,2,4,8", help="Numbers of devices; 1:8 is every number from 1 to 8."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Machines the devices are in; as few as hold them if not given.")
    ] = None,
    scaling: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="weak (the batch of a device stays), strong (the global one), both."
        ),
    ] = "weak",
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="ddp, zero1, zero2, fsdp or mirrored.")
    ] = "ddp",
    intra: Annotated[
        str | None, typer.Option(metavar="LINK", help="Link between devices of a node, or a TOML file.")
    ] = None,
    inter: Annotated[
        str | None, typer.Option(metavar="LINK", help="Link between nodes, such as 8xinfiniband-hdr.")
    ] = None,
    algorithm: Annotated[
        str, typer.Option(metavar="NAME", help="All-reduce: auto, ring, tree or hierarchical.")
    ] = "auto",
    bucket_mb: Annotated[float, typer.Option(help="Capacity of a gradient bucket [MiB].")] = 25.0,
    accumulation_steps: Annotated[int, typer.Option(help="Micro-steps of a step.")] = 1,
    sync_batch_norm: Annotated[
        bool, typer.Option("--sync-batch-norm", help="Statistics of batch norms are synchronised.")
    ] = False,
    variation: Annotated[
        float | None, typer.Option(help="Coefficient of variation of the step between devices.")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="1:32", help="Workers of a parameter-server job, instead of --devices."),
    ] = None,
    servers: Annotated[str | None, typer.Option(metavar="2,4", help="Parameter servers.")] = None,
    asynchronous: Annotated[
        bool, typer.Option("--asynchronous", help="Workers do not wait for each other.")
    ] = False,
    coefficients: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="optimus: the published speed function instead of first principles."
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(metavar="POINTS.csv", help="Fit a speed model to measured points and extrapolate."),
    ] = None,
    speed_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model of --fit; the best by cross-validation if not given."),
    ] = None,
    propose: Annotated[
        int | None, typer.Option(help="Propose so many sizes to measure next, of --workers and --servers.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples of one device (or worker) and step.")] = 32,
    global_batch_size: Annotated[
        int | None, typer.Option(help="Samples of one step of all workers; of synchronous parameter servers.")
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Height and width of images [pixels].")] = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="3,224,224", help="Shape of one sample, without the batch.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of one sample.")] = None,
    precision: Annotated[str, typer.Option(metavar="NAME", help="As in predict.")] = "fp32",
    layout: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Memory order of images: nchw, or nhwc, which is Keras' own."),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="The step runs under torch.compile.")] = False,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="As in predict.")] = "sgd",
    dataset: Annotated[str | None, typer.Option(metavar="NAME", help="A known dataset.")] = None,
    dataset_size: Annotated[int | None, typer.Option(help="Training samples of an epoch.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs to the target.")] = None,
    price: Annotated[
        str | None, typer.Option(metavar="1.89/h", help="Price of one device [US dollars per hour].")
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Trace the model anew.")] = False,
    debug: DebugOption = False,
) -> None:
    """Predict how MODEL scales: devices and nodes, or workers and parameter servers, or from measured points."""
    if plot is not None:
        from forerun.report.plots import check_plot_path

        check_plot_path(plot)
    job = {
        "dataset": dataset,
        "dataset_size": dataset_size,
        "epochs": epochs,
        "price_usd_per_hour": None if price is None else parse_price_usd_per_hour(price),
    }
    setup = {
        "precision": precision,
        "layout": layout,
        "compile": compile,
        "optimizer": optimizer,
        "image_size": image_size,
        "input_shape": None if input_shape is None else parse_input_shape(input_shape),
        "sequence_length": sequence_length,
        "use_cache": not no_cache,
    }
    sharing = {
        "num_nodes": nodes,
        "scaling": scaling,
        "strategy": strategy,
        "intra": intra,
        "inter": inter,
        "algorithm": algorithm,
        "bucket_mb": bucket_mb,
        "num_accumulation_steps": accumulation_steps,
        "sync_batch_norm": sync_batch_norm,
        "coefficient_of_variation": variation,
    }
    sizes = {
        "num_devices": None if devices is None else parse_numbers("devices", devices),
        "num_workers": None if workers is None else parse_numbers("workers", workers),
        "num_servers": None if servers is None else parse_numbers("servers", servers),
    }
    with quiet_libraries(debug=debug):
        answer: ScaleCurve | ServerCurve | SpeedFit
        if fit is not None or propose is not None:
            answer = _from_points(
                fit, speed_model, propose, sizes, batch_size, global_batch_size, nodes, asynchronous
            )
        elif workers is not None or servers is not None:
            answer = _servers(
                model, on, sizes, setup, job, inter, batch_size, global_batch_size, asynchronous, coefficients
            )
        else:
            answer = _devices(model, on, sizes["num_devices"], batch_size, setup, job, sharing)
    _tell(answer, as_json, plot)


def _required(value: str | None, what: str) -> str:
    if value is None:
        raise InvalidSetupError(
            f"expected {what}, got none; give it, or measured points with --fit POINTS.csv"
        )
    return value


def _devices(
    model: str | None,
    on: str | None,
    num_devices: list[int] | None,
    batch_size: int,
    setup: dict[str, Any],
    job: dict[str, Any],
    sharing: dict[str, Any],
) -> ScaleCurve:
    import forerun

    return forerun.scale(
        _required(model, "a MODEL"),
        device=_required(on, "a device with --on"),
        num_devices=num_devices or (1, 2, 4, 8),
        batch_size=batch_size,
        **setup,
        **job,
        **sharing,
    )


def _servers(
    model: str | None,
    on: str | None,
    sizes: dict[str, Any],
    setup: dict[str, Any],
    job: dict[str, Any],
    inter: str | None,
    batch_size: int,
    global_batch_size: int | None,
    asynchronous: bool,
    coefficients: str | None,
) -> ServerCurve:
    import forerun

    return forerun.scale_servers(
        _required(model, "a MODEL"),
        device=on,
        num_workers=sizes["num_workers"] or range(1, 33),
        num_servers=sizes["num_servers"] or (1, 2, 4),
        inter=inter,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        synchronous=not asynchronous,
        coefficients=coefficients,
        **setup,
        **job,
    )


def _from_points(
    fit: Path | None,
    speed_model: str | None,
    propose: int | None,
    sizes: dict[str, Any],
    batch_size: int,
    global_batch_size: int | None,
    nodes: int | None,
    asynchronous: bool,
) -> SpeedFit:
    import forerun

    return forerun.fit_speed(
        fit,
        speed_model=speed_model,
        num_proposals=propose or 0,
        num_nodes=nodes,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
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
