"""``forerun predict``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.capture import COMMAND_HELP, model_of
from forerun.cli.options import DebugOption, JsonOption, NoCacheOption, PlotOption, traces_models
from forerun.cli.output import page_width, print_json, print_page, quiet_libraries
from forerun.cli.parsing import plot_batch_sizes
from forerun.cli.settings import with_settings
from forerun.errors import UsageError
from forerun.run.options import DEVICE_HELP, MODEL_HELP, RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forerun.api.ways import Way
    from forerun.prediction.estimate import Estimate

__all__ = ["predict"]

_OF_SWEEPS = ("dataset", "dataset_size", "epochs", "validation_size", "validate", "startup_s", "checkpoint_s",
              "price_usd_per_hour", "batch_size", "precision")  # fmt: skip


@traces_models
@with_settings(RunOptions)
def predict(
    model: Annotated[list[str], typer.Argument(metavar="MODEL", help=MODEL_HELP + COMMAND_HELP)],
    on: Annotated[str, typer.Option(metavar="DEVICE", help=DEVICE_HELP)],
    settings: dict[str, Any],
    as_json: JsonOption = False,
    plot: PlotOption = None,
    no_cache: NoCacheOption = False,
    debug: DebugOption = False,
) -> None:
    """Predict time, memory and cost of training MODEL on DEVICE, without the device."""
    with quiet_libraries(debug=debug):
        name = model_of(model)
        estimate = _estimate(name, on, settings, plot, use_cache=not no_cache)
    if not as_json:
        _print_estimate(estimate)  # at once: what would make it fit may need further traces
    with quiet_libraries(debug=debug):
        ways = _ways(name, on, settings, estimate)
    if as_json:
        of_ways = {"ways_to_fit": [way.as_dict() for way in ways]} if estimate.fits == "no" else {}
        print_json({**estimate.as_dict(), **of_ways})
        return
    for line in _way_lines(ways):
        typer.echo(line)
    if plot is not None:
        typer.echo(f"plot written to {plot}", err=True)


def _estimate(
    model: str, on: str, settings: dict[str, Any], plot: Path | None, *, use_cache: bool
) -> Estimate:
    if plot is not None:
        from forerun.report.plots import check_plot_path

        check_plot_path(plot)
    import forerun

    estimate = forerun.predict(model, device=on, use_cache=use_cache, **settings)
    if plot is not None and estimate.num_devices > 1:
        raise UsageError("--plot draws one device; for several use forerun scale with --plot")
    if plot is not None:
        _write_plot(plot, estimate, on, settings, use_cache=use_cache)
    return estimate


def _ways(model: str, on: str, settings: dict[str, Any], estimate: Estimate) -> tuple[Way, ...]:
    if estimate.fits != "no":
        return ()
    from forerun.api.ways import ways_to_fit
    from forerun.stages import stage

    with stage("looking for what would make it fit"):
        return ways_to_fit(model, on, settings, estimate)


def _way_lines(ways: tuple[Way, ...]) -> Iterator[str]:
    from forerun.units import format_bytes, format_count

    if ways:
        yield "What would make it fit"
    for way in ways:
        rate = format_count(way.throughput_samples_per_s)
        yield f"  -  {way.words}: {format_bytes(way.peak_memory_bytes)}, {rate} samples/s"


def _write_plot(
    path: Path, estimate: Estimate, on: str, settings: dict[str, Any], *, use_cache: bool
) -> None:
    import forerun
    from forerun.report.plots import throughput_and_memory
    from forerun.report.wording import plot_title

    largest = estimate.max_batch_size.value if estimate.max_batch_size is not None else None
    sizes = plot_batch_sizes(estimate.batch_size_per_device, largest)
    sweep = forerun.sweep(
        estimate.model,
        devices=[on],
        batch_sizes=sizes,
        precisions=[estimate.precision],
        use_cache=use_cache,
        **{name: value for name, value in settings.items() if name not in _OF_SWEEPS},
    )
    throughput = (
        sweep.throughput_samples_per_s[0, 0],
        sweep.throughput_low_samples_per_s[0, 0],
        sweep.throughput_high_samples_per_s[0, 0],
    )
    throughput_and_memory(
        path,
        title=plot_title(estimate),
        batch_sizes=sizes,
        throughput_samples_per_s=throughput,
        peak_memory_bytes=sweep.peak_memory_bytes[0, 0],
        device_memory_bytes=float(sweep.device_memory_bytes[0]),
        chosen_batch_size=estimate.batch_size_per_device,
    )


def _print_estimate(estimate: Estimate) -> None:
    from forerun.report.page import PAGE_WIDTH, estimate_page

    width = page_width(PAGE_WIDTH)
    print_page(estimate_page(estimate, width), width)
