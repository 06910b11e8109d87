"""``forerun measure grid | layers | model | composition | curve | link | loader``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.measurement.settings import (
    SYSTEM_A_SIZES,
    CompositionQuestion,
    CurveQuestion,
    Grid,
    GridQuestion,
    LayerDesign,
    LayerQuestion,
    LinkQuestion,
    ModelQuestion,
    Place,
)
from forerun.question.settings import declared, from_settings
from forerun.question.setup import Layout, Phase, Precision, choice
from forerun.surface.cli.settings import parse_numbers
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from forerun.evidence.measure import MeasurementRun
    from forerun.evidence.measure_curve import TrainedCurve
    from forerun.evidence.measure_loader import LoaderRun
    from forerun.evidence.measurement.session import Event
    from forerun.evidence.records.measurement import Measurement

Writer = Callable[["Iterable[Measurement]", Path], int]

CsvOption = Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Write a table as well.")]

_PAGE = "forerun.evidence.pages.measurement_page:measurement_page"
_Choice = TypeVar("_Choice", bound=StrEnum)
_FLAGS = {"no": False, "yes": True}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_words(name: str, text: str, kind: type[_Choice]) -> list[_Choice]:
    """Members of a choice, written as words separated by commas."""
    return [choice(kind, word, name) for word in _words(text) or [text]]


def parse_flags(text: str) -> list[bool]:
    """The flags ``no`` and ``yes``, one or both, separated by commas."""
    words = [word.strip().lower() for word in text.split(",")]
    if any(word not in _FLAGS for word in words):
        raise InvalidSetupError(f"expected --compile no, yes or no,yes, got '{text}'")
    return [_FLAGS[word] for word in words]


def parse_sizes(texts: Iterable[str]) -> dict[str, list[int]]:
    """Values of each key, from texts such as ``depth=2,3``.

    >>> parse_sizes(["depth=2,3", "base_filters=8"])
    {'depth': [2, 3], 'base_filters': [8]}
    """
    sizes: dict[str, list[int]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key.strip():
            raise InvalidSetupError(f"expected --sizes such as depth=2,3,4, got '{text}'")
        sizes[key.strip()] = parse_numbers(f"the sizes of {key.strip()}", values)
    return sizes


def _counts(text: str) -> list[int]:
    """Whole numbers from zero on, separated by commas; none of an empty text."""
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise InvalidSetupError(
            f"workers must be whole numbers separated by commas, such as 0,1,2, got '{text}'"
        ) from None


_AXES: dict[str, Callable[[str], Any]] = {
    "batch_sizes": lambda text: parse_numbers("batch sizes", text),
    "precisions": lambda text: parse_words("precision", text, Precision),
    "layouts": lambda text: parse_words("layout", text, Layout),
    "compiles": parse_flags,
}


def _own_layout(settings: dict[str, Any]) -> Layout:
    """The layout a framework gives images unless told otherwise."""
    return Layout.NHWC if settings.get("framework") == "keras" else Layout.NCHW


def _run(function: str, settings: dict[str, Any], usual: dict[str, float], **arguments: Any) -> Any:
    """The answer of a function of the package that measures, with a bar while it does.

    Args:
        function: Name of the function.
        settings: The settings that were given, of which place and timing are taken.
        usual: Timing of such measurements where nobody says otherwise.
        arguments: Its other arguments.
    """
    import forerun

    arguments |= from_settings(Place, settings)
    protocol = Protocol(**{**usual, **from_settings(Protocol, settings)})
    with progress_bar() as on_event:
        return getattr(forerun, function)(**arguments, protocol=protocol, on_event=on_event)


def _others(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that say neither where nor how something is measured."""
    shared = declared(LinkQuestion)
    return {name: value for name, value in settings.items() if name not in shared}


def _written(run: MeasurementRun, csv: Path | None, form: str = "") -> MeasurementRun:
    """The run, its measurements written to a table of a form, forerun's own if there is none."""
    if csv is not None:
        from forerun.evidence.records.reading import export_measurements, record_format

        write: Writer = record_format(form).write if form else export_measurements
        typer.echo(f"{write(run.measurements, csv)} rows written to {csv}", err=True)
    return run


@verb(options=GridQuestion, readers=_AXES, aliases={"num_workers": "workers"}, page=_PAGE)
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
    is_plain = not sizes and settings.get("network", "cnn") == "cnn"
    settings.setdefault("layouts", [_own_layout(settings)])
    grid = Grid(
        sizes=SYSTEM_A_SIZES if is_plain else parse_sizes(sizes or ()), **from_settings(Grid, settings)
    )
    return _written(_run("measure_grid", settings, {"timeout_s": 3600.0}, grid=grid), csv, "cnn-grid")


@verb(
    options=LayerQuestion,
    page=_PAGE,
    readers={
        "kinds": _words,
        "modes": _words,
        "precision": lambda text: choice(Precision, text, "precision"),
        "layout": lambda text: choice(Layout, text, "layout"),
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
    if plots is not None:
        from forerun.surface.report.figure import make_plot_folder  # loads NumPy

        make_plot_folder(plots)
    usual = {"num_repetitions": 50, "max_seconds": 5.0, "timeout_s": 300.0}
    settings.setdefault("layout", _own_layout(settings))
    design = LayerDesign(**from_settings(LayerDesign, settings))
    run: MeasurementRun = _run("measure_layers", settings, usual, design=design)
    if plots is not None:
        from forerun.evidence.pages.measured_plots import layer_time_histogram, layer_times_against_work

        layer_time_histogram(plots / "layer-times.png", run.measurements)
        layer_times_against_work(plots / "layer-times-against-flops.png", run.measurements)
    return _written(run, csv, "layers")


@verb(
    options=ModelQuestion,
    readers={**_AXES, "phase": lambda text: choice(Phase, text, "phase")},
    page=_PAGE,
)
def model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model, as in predict.")],
    settings: dict[str, Any],
    csv: CsvOption = None,
) -> MeasurementRun:
    """Time steps of any model that predict takes, in every combination."""
    return _written(_run("measure_model", settings, {}, model=model, **_others(settings)), csv)


@verb(options=LinkQuestion, without=("ray", "max_seconds"), page=_PAGE)
def link(
    settings: dict[str, Any],
    num_devices: Annotated[int, typer.Option(help="Devices, or processes on a processor; at least 2.")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Write the link to a file that --intra and --inter take."),
    ] = None,
) -> MeasurementRun:
    """Measure latency and bandwidth between devices by all-reduces of five sizes."""
    run: MeasurementRun = _run("measure_link", settings, {"timeout_s": 300.0}, num_devices=num_devices)
    if out is not None:
        from forerun.evidence.measurement.runners.data_parallel_runner import write_measured_link

        write_measured_link(run.measurements[-1], out)
        typer.echo(f"link written to {out}", err=True)
    return run


def _plot_composition(path: Path, found: Any) -> None:
    from forerun.evidence.pages.evaluation_page import plot_compositions

    device = found.run.measurements[0].circumstances.device
    plot_compositions(path, {f"layers and steps on {device}": found.compositions})


@verb(
    options=CompositionQuestion,
    without=("ray",),
    readers={"batch_sizes": _AXES["batch_sizes"]},
    page="forerun.evidence.pages.evaluation_page:composition_page",
    plot=_plot_composition,
)
def composition(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Networks, as in predict.")],
    settings: dict[str, Any],
) -> Any:
    """Time networks and each of their layers alone, and compare the sum of layers with the step."""
    usual = {"num_repetitions": 30, "max_seconds": 5.0}
    return _run("measure_composition", settings, usual, models=models, **_others(settings))


@verb("Train a network for its learning curve.", options=CurveQuestion, page=lambda found: found.sentence())
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
        workers=_counts(loader_workers),
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


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[Event], None]]:
    """A function for ``on_event`` that shows each event."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = _Shown(bar)
        yield shown.tell


class _Shown:
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID = bar.add_task("", total=None, left="")
        self._num_done = 0

    def tell(self, event: Event) -> None:
        from forerun.evidence.measurement import session  # with its locks, which the help does without

        bar, task = self._bar, self._task
        if isinstance(event, session.SessionStarted):
            skipped = f"{event.num_skipped} are in the records already" if event.num_skipped else ""
            bar.update(task, total=event.num_jobs, description=skipped)
        elif isinstance(event, session.JobStarted):
            batch = event.job.parameters.get("batch_size")
            described = f"{event.job.subject}, batch size {batch}" if batch else event.job.subject
            bar.update(task, description=described, left=time_left(event.remaining_time_s))
        elif isinstance(event, session.JobProgressed):
            bar.update(task, completed=self._num_done + event.fraction)
        elif isinstance(event, session.JobFinished):
            self._num_done += 1
            bar.update(task, completed=self._num_done, left=time_left(event.remaining_time_s))
        elif isinstance(event, session.JobLost):
            self._num_done += 1
            bar.update(task, completed=self._num_done)


def time_left(remaining_time_s: float | None) -> str:
    """Words for a remaining time: 'about 3 min left'."""
    if remaining_time_s is None:
        return ""
    if remaining_time_s < 90:
        return f"about {remaining_time_s:.0f} s left"
    if remaining_time_s < 5400:
        return f"about {remaining_time_s / 60:.0f} min left"
    return f"about {remaining_time_s / 3600:.1f} h left"
