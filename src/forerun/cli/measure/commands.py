"""``forerun measure grid | layers | model | composition | curve | link | loader``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.measure.composition import composition
from forerun.cli.measure.curve import curve
from forerun.cli.measure.loader import loader
from forerun.cli.measure.options import (
    BatchSizesOption,
    CompileOption,
    CsvOption,
    DatasetOption,
    DeviceOption,
    EpochsOption,
    FrameworkOption,
    ImageSizeOption,
    LayoutsOption,
    MaxSecondsOption,
    OccasionOption,
    OptimizerOption,
    PrecisionOption,
    PrecisionsOption,
    RayOption,
    RepetitionsOption,
    SeedOption,
    ThreadsOption,
    TimeoutOption,
    parse_flags,
    parse_sizes,
    parse_whole_numbers,
    parse_words,
)
from forerun.cli.options import SETTING_HELP, DebugOption, JsonOption, RecordsOption
from forerun.cli.output import TABLE_WIDTH_IN_A_PIPE, page_width, print_json, print_page, quiet_libraries
from forerun.run.options import MODEL_HELP

if TYPE_CHECKING:
    from forerun.api.measure_jobs import MeasurementRun
    from forerun.records.measurement import Measurement

__all__ = ["measure"]

measure = typer.Typer(rich_markup_mode=None, add_completion=False)
measure.command("curve", short_help="Train a network for its learning curve.")(curve)


@measure.callback(invoke_without_command=True)
def measuring(context: typer.Context) -> None:
    """Run models and layers for real and keep records of it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@measure.command("grid")
def grid(
    network: Annotated[
        str,
        typer.Option(metavar="FAMILY", help="Family of networks, such as cnn, cifar-resnet or mnist-cnn."),
    ] = "cnn",
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=1,2",
            help="Values of one key of the family, such as depth=2,3,4; may be repeated. If not given, cnn has "
            "depth=2,3,4 and base_filters=32,64.",
        ),
    ] = None,
    batch_sizes: BatchSizesOption = "32,64,128",
    precision: PrecisionsOption = "fp32",
    layout: LayoutsOption = None,
    compile: CompileOption = "no",
    image_size: Annotated[int, typer.Option(help=SETTING_HELP["image_size"])] = 32,
    optimizer: OptimizerOption = "adam",
    dataset: DatasetOption = "cifar10",
    epochs: EpochsOption = 3,
    steps: Annotated[
        int | None, typer.Option(help="Steps to train of each epoch; the whole epoch is extrapolated.")
    ] = None,
    loader_workers: Annotated[
        int, typer.Option("--loader-workers", "--workers", help=SETTING_HELP["loader_workers"])
    ] = 0,
    seed: SeedOption = 0,
    framework: FrameworkOption = "pytorch",
    replicas: Annotated[
        int, typer.Option(help="With keras: replicas of a MirroredStrategy, each with the batch size.")
    ] = 1,
    device: DeviceOption = "cpu",
    records: RecordsOption = None,
    occasion: OccasionOption = "",
    repetitions: RepetitionsOption = 20,
    max_seconds: MaxSecondsOption = 30.0,
    timeout_s: TimeoutOption = 3600.0,
    threads: ThreadsOption = None,
    ray: RayOption = None,
    csv: CsvOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a family of networks on CIFAR-10 in every combination; a second run finishes the rest."""
    from forerun.measurement.grid import SYSTEM_A_SIZES, Grid
    from forerun.run.setup import Layout, Precision

    chosen_sizes = parse_sizes(sizes or ())
    if not sizes and network == "cnn":
        chosen_sizes = {key: list(values) for key, values in SYSTEM_A_SIZES.items()}
    chosen = Grid(
        network=network,
        sizes=chosen_sizes,
        batch_sizes=parse_whole_numbers("batch sizes", batch_sizes),
        precisions=parse_words("precision", precision, Precision),
        layouts=parse_words("layout", layout or _own_layout(framework), Layout),
        compiles=parse_flags(compile),
        image_size=image_size,
        optimizer=optimizer,
        dataset=dataset,
        num_epochs=epochs,
        num_steps=steps,
        num_workers=loader_workers,
        seed=seed,
        framework=framework,
        num_replicas=replicas,
    )
    session = _session(device, records, occasion, ray)
    timing = _timing(repetitions, max_seconds, timeout_s, threads)
    run = _run("measure_grid", debug, timing, grid=chosen, **session)
    _tell(run, as_json, csv, _write_grid_csv)


@measure.command("layers")
def layers(
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME", help="Kinds of layers, such as conv2d,dense,batch_norm.", show_default="all"
        ),
    ] = None,
    num_layers: Annotated[int, typer.Option(help="Number of layers to time, all kinds together.")] = 1100,
    ranges: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Ranges of the sizes: justus (the published ones), wide, or networks (sizes of image networks).",
        ),
    ] = "wide",
    mode: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME", help="Parts of the step, separated by commas: forward, train_step."
        ),
    ] = "forward,train_step",
    precision: PrecisionOption = "fp32",
    layout: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=SETTING_HELP["layout"], show_default="the framework's own"),
    ] = None,
    framework: FrameworkOption = "pytorch",
    max_gflop: Annotated[float, typer.Option(help="Largest work of one step [10^9 FLOP].")] = 4.0,
    max_mb: Annotated[float, typer.Option(help="Largest memory of one step [10^6 bytes].")] = 200.0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    records: RecordsOption = None,
    occasion: OccasionOption = "",
    repetitions: RepetitionsOption = 50,
    max_seconds: MaxSecondsOption = 5.0,
    timeout_s: TimeoutOption = 300.0,
    threads: ThreadsOption = None,
    ray: RayOption = None,
    csv: CsvOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time single layers whose sizes fill the space evenly, forward and as a training step."""
    from forerun.measurement.layers.design import LayerDesign
    from forerun.run.setup import Layout, Precision

    wanted: dict[str, Any] = {} if kinds is None else {"kinds": _words(kinds)}
    design = LayerDesign(
        **wanted,
        num_layers=num_layers,
        ranges=ranges,
        modes=_words(mode),
        precision=parse_words("precision", precision, Precision)[0],
        layout=parse_words("layout", layout or _own_layout(framework), Layout)[0],
        framework=framework,
        max_flops=max_gflop * 1e9,
        max_bytes=max_mb * 1e6,
        seed=seed,
    )
    session = _session(device, records, occasion, ray)
    timing = _timing(repetitions, max_seconds, timeout_s, threads)
    run = _run("measure_layers", debug, timing, design=design, **session)
    _tell(run, as_json, csv, _write_table)


@measure.command("model")
def model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    batch_sizes: BatchSizesOption = "32",
    precision: PrecisionsOption = "fp32",
    layout: LayoutsOption = None,
    compile: CompileOption = "no",
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=SETTING_HELP["optimizer"],
            show_default="sgd, with --parameter-servers sgd-plain",
        ),
    ] = None,
    phase: Annotated[str, typer.Option(metavar="NAME", help=SETTING_HELP["phase"])] = "train",
    image_size: ImageSizeOption = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="3,224,224", help=SETTING_HELP["input_shape"])
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help=SETTING_HELP["sequence_length"])] = None,
    num_devices: Annotated[
        int,
        typer.Option(help="Number of devices (on a processor: processes), each with the batch size."),
    ] = 1,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="Strategy that shares the work among devices: ddp.")
    ] = "ddp",
    framework: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Framework: pytorch, or keras (on TensorFlow).",
            show_default="that of the model",
        ),
    ] = None,
    parameter_servers: Annotated[
        int,
        typer.Option(help="With keras: parameter servers of a ParameterServerStrategy, as local processes."),
    ] = 0,
    workers: Annotated[
        int, typer.Option(help="Workers of the parameter servers, each with the batch size.")
    ] = 2,
    device: DeviceOption = "cpu",
    records: RecordsOption = None,
    occasion: OccasionOption = "",
    repetitions: RepetitionsOption = 20,
    max_seconds: MaxSecondsOption = 30.0,
    timeout_s: TimeoutOption = 900.0,
    threads: ThreadsOption = None,
    ray: RayOption = None,
    csv: CsvOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time steps of any model that predict takes, in every combination."""
    from forerun.cli.parsing import parse_input_shape
    from forerun.run.setup import Layout, Phase, Precision

    session = _session(device, records, occasion, ray)
    timing = _timing(repetitions, max_seconds, timeout_s, threads)
    run = _run(
        "measure_model",
        debug,
        timing,
        model=model,
        batch_sizes=parse_whole_numbers("batch sizes", batch_sizes),
        precisions=parse_words("precision", precision, Precision),
        layouts=None if layout is None else parse_words("layout", layout, Layout),
        compiles=parse_flags(compile),
        optimizer=optimizer,
        phase=parse_words("phase", phase, Phase)[0],
        image_size=image_size,
        input_shape=None if input_shape is None else parse_input_shape(input_shape),
        sequence_length=sequence_length,
        num_devices=num_devices,
        strategy=strategy,
        framework=framework,
        num_servers=parameter_servers,
        num_workers=workers,
        **session,
    )
    _tell(run, as_json, csv, _write_table)


@measure.command("link")
def link(
    num_devices: Annotated[
        int, typer.Option(help="Number of devices (on a processor: processes), at least 2.")
    ] = 2,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Write the link to a file that --intra and --inter take."),
    ] = None,
    device: DeviceOption = "cpu",
    records: RecordsOption = None,
    occasion: OccasionOption = "",
    repetitions: RepetitionsOption = 20,
    timeout_s: TimeoutOption = 300.0,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure latency and bandwidth between devices by all-reduces of five sizes."""
    timing = _timing(repetitions, 30.0, timeout_s, threads)
    run = _run(
        "measure_link",
        debug,
        timing,
        num_devices=num_devices,
        device=device,
        records=records,
        occasion=occasion,
    )
    if out is not None:
        from forerun.measurement.link_file import write_measured_link

        write_measured_link(run.measurements[-1], out)
        typer.echo(f"link written to {out}", err=True)
    _tell(run, as_json, None, _write_table)


measure.command("composition")(composition)
measure.command("loader", short_help="Measure what loading images costs.")(loader)


def _own_layout(framework: str) -> str:
    """The layout that a framework gives to images by default."""
    return "nhwc" if framework == "keras" else "nchw"


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _session(device: str, records: str | None, occasion: str, ray: str | None) -> dict[str, Any]:
    return {"device": device, "records": records, "occasion": occasion, "ray": ray}


def _timing(repetitions: int, max_seconds: float, timeout_s: float, threads: int | None) -> dict[str, Any]:
    return {
        "num_repetitions": repetitions,
        "max_seconds": max_seconds,
        "timeout_s": timeout_s,
        "num_threads": threads,
    }


def _run(function: str, debug: bool, timing: dict[str, Any], **arguments: Any) -> MeasurementRun:
    import forerun
    from forerun.cli.measure.progress import progress_bar
    from forerun.measurement.protocol import Protocol

    protocol = Protocol(**timing)
    with quiet_libraries(debug=debug), progress_bar() as on_event:
        run: MeasurementRun = getattr(forerun, function)(**arguments, protocol=protocol, on_event=on_event)
    return run


def _write_grid_csv(measurements: Iterable[Measurement], path: Path) -> int:
    from forerun.records.importers.cnn_csv import write_cnn_csv

    return write_cnn_csv(measurements, path)


def _write_table(measurements: Iterable[Measurement], path: Path) -> int:
    from forerun.records.store.files import export_measurements

    return export_measurements(measurements, path)


def _tell(run: MeasurementRun, as_json: bool, csv: Path | None, write: Any) -> None:
    if csv is not None:
        num_rows = write(run.measurements, csv)
        typer.echo(f"{num_rows} rows written to {csv}", err=True)
    if as_json:
        print_json(run.as_dict())
        return
    from forerun.report.measurement_page import measurement_page

    print_page(measurement_page(run), page_width(TABLE_WIDTH_IN_A_PIPE))
