"""``forerun measure grid | layers | model | composition | curve | link | loader``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.evidence.commands.measure_options import (
    CompositionOptions,
    CsvOption,
    CurveOptions,
    GridOptions,
    LayerOptions,
    ModelOptions,
    SessionOptions,
    parse_counts,
    parse_flags,
    parse_sizes,
    parse_whole_numbers,
    parse_words,
    session_of,
    timing_of,
)
from forerun.question.setup import Layout, Phase, Precision
from forerun.surface.cli.verbs import Verbs, verb
from forerun.surface.report.figure import make_plot_folder

if TYPE_CHECKING:
    from forerun.evidence.measure_curve import TrainedCurve
    from forerun.evidence.measure_jobs import MeasurementRun
    from forerun.evidence.measure_loader import LoaderRun
    from forerun.evidence.records.measurement import Measurement

__all__ = ["measure"]

Writer = Callable[["Iterable[Measurement]", Path], int]

_PAGE = "forerun.evidence.pages.measurement_page:measurement_page"


def _sizes_of_batches(text: str) -> list[int]:
    return parse_whole_numbers("batch sizes", text)


def _precisions(text: str) -> list[Precision]:
    return parse_words("precision", text, Precision)


def _layouts(text: str) -> list[Layout]:
    return parse_words("layout", text, Layout)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


_AXES: dict[str, Callable[[str], Any]] = {
    "batch_sizes": _sizes_of_batches,
    "precisions": _precisions,
    "layouts": _layouts,
    "compiles": parse_flags,
}


def _own_layout(settings: dict[str, Any]) -> Layout:
    """The layout a framework gives images unless told otherwise."""
    return Layout.NHWC if settings.get("framework") == "keras" else Layout.NCHW


def _run(function: str, timing: dict[str, Any], **arguments: Any) -> Any:
    """The answer of a function of the package that measures, with a bar while it does."""
    import forerun
    from forerun.evidence.commands.progress import progress_bar
    from forerun.evidence.measurement.jobs import Protocol

    with progress_bar() as on_event:
        return getattr(forerun, function)(**arguments, protocol=Protocol(**timing), on_event=on_event)


def _written(run: MeasurementRun, csv: Path | None, writer: Callable[[], Writer]) -> MeasurementRun:
    """The run, its measurements written to a table."""
    if csv is not None:
        num_rows = writer()(run.measurements, csv)
        typer.echo(f"{num_rows} rows written to {csv}", err=True)
    return run


def _writer(form: str) -> Writer:
    """The function that writes a form of table."""
    from forerun.evidence.records.reading import record_format

    return record_format(form).write


def _plain_writer() -> Writer:
    from forerun.evidence.records.files import export_measurements

    return export_measurements


@verb(options=GridOptions, readers=_AXES, aliases={"num_workers": "workers"}, page=_PAGE)
def grid(
    settings: dict[str, Any],
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=1,2",
            help="Values of one key of the family, such as depth=2,3,4; may be repeated. If not given, cnn has "
            "depth=2,3,4 and base_filters=32,64.",
        ),
    ] = None,
    csv: CsvOption = None,
) -> MeasurementRun:
    """Train a family of networks on CIFAR-10 in every combination; a second run finishes the rest."""
    from forerun.evidence.measurement.grid import SYSTEM_A_SIZES, Grid

    session = session_of(settings)
    timing = timing_of(settings, timeout_s=3600.0)
    chosen_sizes = parse_sizes(sizes or ())
    if not sizes and settings.get("network", "cnn") == "cnn":
        chosen_sizes = {key: list(values) for key, values in SYSTEM_A_SIZES.items()}
    settings.setdefault("layouts", [_own_layout(settings)])
    run: MeasurementRun = _run("measure_grid", timing, grid=Grid(sizes=chosen_sizes, **settings), **session)
    return _written(run, csv, lambda: _writer("cnn-grid"))


@verb(
    options=LayerOptions,
    page=_PAGE,
    readers={
        "kinds": _words,
        "modes": _words,
        "precision": lambda text: _precisions(text)[0],
        "layout": lambda text: _layouts(text)[0],
    },
)
def layers(
    settings: dict[str, Any],
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Write a flat table as well: a column per parameter, time_ms, and figures of the device.",
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder, made if need be, for a histogram of the times and for times against FLOPs.",
        ),
    ] = None,
) -> MeasurementRun:
    """Time single layers whose sizes fill the space evenly, forward and as a training step."""
    from forerun.evidence.measurement.layer_design import LayerDesign

    if plots is not None:
        make_plot_folder(plots)
    session = session_of(settings)
    timing = timing_of(settings, num_repetitions=50, max_seconds=5.0, timeout_s=300.0)
    settings.setdefault("layout", _own_layout(settings))
    for name, given, factor in (("max_flops", "max_gflop", 1e9), ("max_bytes", "max_mb", 1e6)):
        if given in settings:
            settings[name] = settings.pop(given) * factor
    run: MeasurementRun = _run("measure_layers", timing, design=LayerDesign(**settings), **session)
    if plots is not None:
        from forerun.evidence.pages.layer_plots import layer_time_histogram, layer_times_against_work

        layer_time_histogram(plots / "layer-times.png", run.measurements)
        layer_times_against_work(plots / "layer-times-against-flops.png", run.measurements)
    return _written(run, csv, lambda: _writer("layers"))


@verb(
    options=ModelOptions,
    readers={**_AXES, "phase": lambda text: parse_words("phase", text, Phase)[0]},
    page=_PAGE,
)
def model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model, as in predict.")],
    settings: dict[str, Any],
    csv: CsvOption = None,
) -> MeasurementRun:
    """Time steps of any model that predict takes, in every combination."""
    timing = timing_of(settings, timeout_s=900.0)
    return _written(_run("measure_model", timing, model=model, **settings), csv, _plain_writer)


@verb(options=SessionOptions, without=("max_seconds",), page=_PAGE)
def link(
    settings: dict[str, Any],
    num_devices: Annotated[int, typer.Option(help="Devices, or processes on a processor; at least 2.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Write the link to a file that --intra and --inter take."),
    ] = None,
) -> MeasurementRun:
    """Measure latency and bandwidth between devices by all-reduces of five sizes."""
    timing = timing_of(settings, timeout_s=300.0)
    run: MeasurementRun = _run("measure_link", timing, num_devices=num_devices, **settings)
    if out is not None:
        from forerun.evidence.measurement.runners.link_runner import write_measured_link

        write_measured_link(run.measurements[-1], out)
        typer.echo(f"link written to {out}", err=True)
    return run


def _plot_composition(path: Path, found: Any) -> None:
    from forerun.evidence.pages.composition_page import plot_compositions

    device = found.run.measurements[0].circumstances.device
    plot_compositions(path, {f"layers and steps on {device}": found.compositions})


@verb(
    options=CompositionOptions,
    readers={"batch_sizes": _AXES["batch_sizes"]},
    page="forerun.evidence.pages.composition_page:composition_page",
    plot=_plot_composition,
)
def composition(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Networks, as in predict.")],
    settings: dict[str, Any],
) -> Any:
    """Time networks and each of their layers alone, and compare the sum of layers with the step."""
    timing = timing_of(settings, num_repetitions=30, max_seconds=5.0, timeout_s=900.0)
    found: Any = _run("measure_composition", timing, models=models, **settings)
    return found


@verb("Train a network for its learning curve.", options=CurveOptions, page=lambda found: found.sentence())
def curve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model, as in predict, such as cifar-resnet:20.")
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE.csv", help="The curve, a row an epoch; a file that exists is begun anew."),
    ],
    settings: dict[str, Any],
) -> TrainedCurve:
    """Train a network for real and write its learning curve, in the columns that forecast reads."""
    import forerun

    return forerun.measure_curve(model, out, on_row=lambda line: typer.echo(line, err=True), **settings)


@verb(
    "Measure what loading images costs.",
    page="forerun.evidence.pages.measurement_page:loader_lines",
)
def loader(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the training images, sub-folders included.")
    ],
    image_size: Annotated[int, typer.Option(help="Height and width of the augmented images [pixels].")] = 224,
    augmentation: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Augmentation: crop (random resized crop, flip), resize (with centre crop) or none.",
        ),
    ] = "crop",
    loader_workers: Annotated[
        str,
        typer.Option(
            "--loader-workers",
            "--workers",
            metavar="0,1,2",
            help="Numbers of worker processes to time in a real DataLoader; '' for none.",
        ),
    ] = "1,2",
    batch_size: Annotated[int, typer.Option(help="Batch size of one device.")] = 32,
    files: Annotated[int, typer.Option(help="Number of files to read, spread evenly over the folder.")] = 256,
    rounds: Annotated[int, typer.Option(help="Rounds over the files; the first one is warm-up.")] = 4,
    seconds: Annotated[float, typer.Option(help="Time that each real DataLoader runs, roughly [s].")] = 3.0,
    samples_per_s: Annotated[
        float | None,
        typer.Option(
            "--samples-per-s",
            help="Throughput of a device [samples/s]; prints the number of workers that it needs.",
        ),
    ] = None,
) -> LoaderRun:
    """Measure what a folder of images costs to read, decode and augment, and how many workers a device needs."""
    from forerun.evidence.measure_loader import measure_loader

    return measure_loader(
        folder,
        image_size=image_size,
        augmentation=augmentation,
        workers=parse_counts(loader_workers),
        batch_size=batch_size,
        most_files=files,
        num_rounds=rounds,
        seconds=seconds,
        samples_per_s=samples_per_s,
    )


measure = Verbs(
    "Run models and layers for real and keep records of it.",
    {
        "curve": curve,
        "grid": grid,
        "layers": layers,
        "model": model,
        "link": link,
        "composition": composition,
        "loader": loader,
    },
)
