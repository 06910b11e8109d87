"""``forerun plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import DebugOption, JsonOption
from forerun.cli.output import TABLE_WIDTH_IN_A_PIPE, page_width, print_json, print_page, quiet_libraries
from forerun.errors import UsageError

if TYPE_CHECKING:
    from forerun.planner.plan import Plan
    from forerun.run.input_pipeline import InputPipeline

__all__ = ["plan"]

_FORMATS = ("table", "json", "job", "slurm-time")


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="As in 'forerun predict'; keys of a family may be ranges (cnn:depth=2..4,base_filters=32..64), "
            "several models are parted by semicolons.",
        ),
    ],
    on: Annotated[
        str,
        typer.Option(metavar="DEVICES", help="Devices parted by commas; t4x4 is four of them in one job."),
    ],
    within: Annotated[
        str,
        typer.Option(
            metavar="LIMITS",
            help="Limits such as 'time<=2h, cost<=20, memory<=24GB'; also epoch, step, energy, co2, throughput and "
            "accuracy.",
        ),
    ] = "",
    minimize: Annotated[str, typer.Option(metavar="NAME", help="time, cost, energy or co2.")] = "time",
    batch_size: Annotated[
        str,
        typer.Option(
            metavar="SIZES",
            help="Numbers and ranges: 32:1024 doubles, 32:1024:32 has a step, 48,96 is a list.",
        ),
    ] = "8:1024",
    precision: Annotated[str, typer.Option(metavar="NAMES", help="Precisions to try.")] = "fp32,amp",
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Memory orders of images to try: nchw, nhwc; the framework's own if not given.",
        ),
    ] = None,
    image_size: Annotated[
        str | None, typer.Option(metavar="SIZES", help="Image sizes to try [pixels], as --batch-size.")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Steps run under torch.compile.")] = False,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="Optimizer of all candidates.")] = "sgd",
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of one sample.")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A known dataset; if none is given the usual one of the input's shape."
        ),
    ] = None,
    dataset_size: Annotated[
        int | None, typer.Option(help="Training samples of an epoch, for any other.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs of the job, one if not given.")] = None,
    validation_size: Annotated[int, typer.Option(help="Samples evaluated after each epoch.")] = 0,
    startup_s: Annotated[float, typer.Option("--startup-s", help="Time before the first step [s].")] = 0.0,
    checkpoint_s: Annotated[
        float, typer.Option("--checkpoint-s", help="Time of the checkpoint after each epoch [s].")
    ] = 0.0,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="1.89/h", help="Price of one device, or t4=0.35/h,l4=0.80/h, instead of the table."
        ),
    ] = None,
    price_kind: Annotated[
        str, typer.Option(metavar="NAMES", help="Ways of paying: on-demand, spot, reserved-1y, reserved-3y.")
    ] = "on-demand",
    provider: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Providers: aws, google, azure, lambda, runpod; all if not given."
        ),
    ] = "",
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Your own prices, and hardware you own.")
    ] = None,
    co2: Annotated[float | None, typer.Option(help="Carbon intensity of the grid [g/kWh].")] = None,
    power_limit: Annotated[float | None, typer.Option(help="Power limit set on every device [W].")] = None,
    loader_ms: Annotated[
        float | None, typer.Option("--loader-ms", help="Time of a core to decode and augment a sample [ms].")
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers of the data loader; needs --loader-ms.")] = 8,
    cores: Annotated[float | None, typer.Option(help="Cores the workers share.")] = None,
    sample_kb: Annotated[float, typer.Option("--sample-kb", help="Size of a stored sample [kB].")] = 0.0,
    storage_mb_s: Annotated[
        float | None, typer.Option("--storage-mb-s", help="Reading bandwidth of the storage [MB/s].")
    ] = None,
    network_mb_s: Annotated[
        float | None, typer.Option("--network-mb-s", help="Bandwidth of the network to it [MB/s].")
    ] = None,
    accuracies: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Known accuracy of each model: columns model,accuracy."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC>=VALUE",
            help="Train until this is reached, such as 'accuracy>=0.92'; needs --curve.",
        ),
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="The run so far, as in 'forerun forecast', or a table with the columns model,run.",
        ),
    ] = None,
    curve_batch_size: Annotated[
        int | None, typer.Option(help="Samples of a step of that run, where its file does not say.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Its learning rate, as in 'forerun forecast'.")
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Finished runs of the same job; enough without --curve."),
    ] = None,
    batches: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv", help="Steps or epochs to the target at several batch sizes, as in forecast."
        ),
    ] = None,
    critical_batch_size: Annotated[
        float | None, typer.Option(help="Batch size that doubles the epochs, instead of --batches.")
    ] = None,
    torch_version: Annotated[str | None, typer.Option(metavar="2.4", help="PyTorch of the run.")] = None,
    points: Annotated[int, typer.Option(help="Candidates to list.", min=1)] = 12,
    rejected: Annotated[
        int, typer.Option(help="Rejected candidates in the JSON, nearest misses first.", min=0)
    ] = 1000,
    pareto: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Write time against cost with the front marked.")
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="table, json, job (the chosen job for a scheduler) or slurm-time (its --time with margin).",
        ),
    ] = "table",
    as_json: JsonOption = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Trace the models anew.")] = False,
    debug: DebugOption = False,
) -> None:
    """Find the best device, batch size and precision within limits on time, money, memory and energy."""
    form = _format(output, as_json)
    rates = {
        "cores": cores,
        "sample_kb": sample_kb,
        "storage_mb_s": storage_mb_s,
        "network_mb_s": network_mb_s,
    }
    with quiet_libraries(debug=debug):
        found = _plan(
            model,
            on,
            pareto,
            {
                "within": within,
                "minimize": minimize,
                "batch_sizes": batch_size,
                "precisions": _words(precision),
                "layouts": None if layout is None else _words(layout),
                "image_sizes": image_size,
                "compile": compile,
                "optimizer": optimizer,
                "sequence_length": sequence_length,
                "dataset": dataset,
                "dataset_size": dataset_size,
                "epochs": epochs,
                "validation_size": validation_size,
                "startup_s": startup_s,
                "checkpoint_s": checkpoint_s,
                "price_usd_per_hour": price,
                "price_kinds": _words(price_kind),
                "providers": _words(provider),
                "prices_file": prices,
                "co2_g_per_kwh": co2,
                "power_limit_w": power_limit,
                "loader": _loader(loader_ms, workers, rates),
                "accuracies": accuracies,
                "target": target,
                "curve": curve,
                "curve_batch_size": curve_batch_size,
                "schedule": schedule,
                "history": history,
                "batches": batches,
                "critical_batch_size": critical_batch_size,
                "torch_version": torch_version,
                "num_points": points,
                "max_rejected": rejected,
                "use_cache": not no_cache,
            },
        )
    _print(found, form)
    if pareto is not None:
        typer.echo(f"plot written to {pareto}", err=True)


def _format(output: str, as_json: bool) -> str:
    if output not in _FORMATS:
        raise UsageError(f"a plan is printed as {', '.join(_FORMATS)}, got '{output}'")
    return "json" if as_json else output


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _loader(loader_ms: float | None, workers: int, rates: dict[str, float | None]) -> InputPipeline | None:
    if loader_ms is None:
        given = [f"--{name.replace('_', '-')}" for name, value in rates.items() if value]
        if given:
            raise UsageError(f"{', '.join(given)}: the input pipeline needs --loader-ms as well")
        return None
    from forerun.run.input_pipeline import InputPipeline

    def scaled(name: str, unit: float) -> float | None:
        value = rates[name]
        return None if value is None else value * unit

    return InputPipeline(
        sample_cost_s=loader_ms / 1e3,
        num_workers=workers,
        num_cores=rates["cores"],
        sample_bytes=scaled("sample_kb", 1e3) or 0.0,
        storage_bytes_per_s=scaled("storage_mb_s", 1e6),
        network_bytes_per_s=scaled("network_mb_s", 1e6),
    )


def _plan(model: str, on: str, pareto: Path | None, options: dict[str, Any]) -> Plan:
    if pareto is not None:
        from forerun.report.figure import check_plot_path

        check_plot_path(pareto)
    import forerun
    from forerun.api.plan import read_accuracies
    from forerun.api.plan_targets import read_curves
    from forerun.planner.devices import parse_prices
    from forerun.planner.space import parse_batch_sizes

    if options["price_usd_per_hour"] is not None:
        options["price_usd_per_hour"] = parse_prices(options["price_usd_per_hour"])
    sizes = options["image_sizes"]
    options["image_sizes"] = () if sizes is None else parse_batch_sizes(sizes)
    if options["curve"] is not None:
        options["curve"] = read_curves(options["curve"])
    if options["accuracies"] is not None:
        options["accuracies"] = read_accuracies(options["accuracies"])
    found = forerun.plan(model, devices=on, **options)
    if pareto is not None:
        from forerun.report.plan_plots import pareto_plot

        pareto_plot(pareto, found)
    return found


def _print(found: Plan, form: str) -> None:
    if form == "json":
        print_json(found.as_dict())
        return
    if form == "table":
        from forerun.report.plan_page import plan_page

        width = page_width(TABLE_WIDTH_IN_A_PIPE)
        print_page(plan_page(found), width)
        return
    from forerun.report.job_formats import job_estimate, slurm_time

    if form == "job":
        print_json(job_estimate(found))
        return
    typer.echo(slurm_time(found))
