"""``forerun predict``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import DebugOption, JsonOption, PlotOption
from forerun.cli.output import page_width, print_json, print_page, quiet_libraries
from forerun.cli.parsing import parse_input_shape, parse_price_usd_per_hour, plot_batch_sizes
from forerun.errors import UsageError

if TYPE_CHECKING:
    from forerun.prediction.estimate import Estimate

__all__ = ["predict"]


def predict(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="torchvision:NAME, timm:NAME, hf:CONFIG.json, keras:NAME, keras:FILE.keras, onnx:FILE.onnx, "
            "cnn:depth=4,base_filters=64 and other families, or path/to/file.py:factory.",
        ),
    ],
    on: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="Catalogue name, driver's name, TOML file or 'here', see 'forerun hardware list'; or 4x8xNAME.",
        ),
    ],
    num_devices: Annotated[
        int | None, typer.Option(help="Devices the job runs on; 1 if --on does not say more.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Machines the devices are in; 1 if --on does not say more.")
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(metavar="NAME", help="How several devices share it: ddp, zero1, zero2, fsdp, mirrored."),
    ] = "ddp",
    intra: Annotated[
        str | None, typer.Option(metavar="LINK", help="Link between devices of a node, or a TOML file.")
    ] = None,
    inter: Annotated[
        str | None, typer.Option(metavar="LINK", help="Link between nodes, such as 8xinfiniband-hdr.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples of one step on one device.")] = 32,
    image_size: Annotated[int | None, typer.Option(help="Height and width of images [pixels].")] = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="3,224,224", help="Shape of one sample, without the batch.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of one sample.")] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="fp32, tf32, amp (fp16), amp-bf16, bf16 or fp16.")
    ] = "fp32",
    layout: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Memory order of images: nchw, or nhwc, which is Keras' own."),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="The step runs under torch.compile.")] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="sgd, momentum, nesterov, adam, adamw, rmsprop, adagrad ... or none."
        ),
    ] = "sgd",
    phase: Annotated[
        str, typer.Option(metavar="NAME", help="train (the whole step), forward or inference.")
    ] = "train",
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME", help="A known dataset, such as cifar10 or imagenet.")
    ] = None,
    dataset_size: Annotated[
        int | None, typer.Option(help="Training samples of an epoch, for any other.")
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs of the job.")] = None,
    validation_size: Annotated[int | None, typer.Option(help="Samples evaluated after each epoch.")] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Evaluate the dataset's validation split after each epoch.")
    ] = False,
    startup_s: Annotated[float, typer.Option("--startup-s", help="Time before the first step [s].")] = 0.0,
    checkpoint_s: Annotated[
        float, typer.Option("--checkpoint-s", help="Time of the checkpoint after each epoch [s].")
    ] = 0.0,
    price: Annotated[
        str | None, typer.Option(metavar="1.89/h", help="Price of one device [US dollars per hour].")
    ] = None,
    torch_version: Annotated[
        str | None, typer.Option(metavar="2.4", help="PyTorch of the run; the newest known if not given.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Calibration of the device; --on here takes this machine's by itself."
        ),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Trace the model anew.")] = False,
    debug: DebugOption = False,
) -> None:
    """Predict time, memory and cost of training MODEL on DEVICE, without the device."""
    setup = {
        "layout": layout,
        "compile": compile,
        "optimizer": optimizer,
        "phase": phase,
        "image_size": image_size,
        "input_shape": None if input_shape is None else parse_input_shape(input_shape),
        "sequence_length": sequence_length,
        "torch_version": torch_version,
        "calibration": calibration,
        "use_cache": not no_cache,
    }
    job = {
        "dataset": dataset,
        "dataset_size": dataset_size,
        "epochs": epochs,
        "validation_size": validation_size,
        "validate": validate,
        "startup_s": startup_s,
        "checkpoint_s": checkpoint_s,
        "price_usd_per_hour": None if price is None else parse_price_usd_per_hour(price),
        "num_devices": num_devices,
        "num_nodes": nodes,
        "strategy": strategy,
        "intra": intra,
        "inter": inter,
    }
    with quiet_libraries(debug=debug):
        estimate = _estimate(model, on, batch_size, precision, setup, job, plot)
    if as_json:
        print_json(estimate.as_dict())
        return
    _print_estimate(estimate)
    if plot is not None:
        typer.echo(f"plot written to {plot}", err=True)


def _estimate(
    model: str,
    on: str,
    batch_size: int,
    precision: str,
    setup: dict[str, Any],
    job: dict[str, Any],
    plot: Path | None,
) -> Estimate:
    if plot is not None:
        from forerun.report.plots import check_plot_path

        check_plot_path(plot)
    import forerun

    estimate = forerun.predict(model, device=on, batch_size=batch_size, precision=precision, **setup, **job)
    if plot is not None and estimate.num_devices > 1:
        raise UsageError("--plot draws one device; for several use forerun scale with --plot")
    if plot is not None:
        _write_plot(plot, estimate, on, precision, setup)
    return estimate


def _write_plot(path: Path, estimate: Estimate, on: str, precision: str, setup: dict[str, Any]) -> None:
    import forerun
    from forerun.report.plots import throughput_and_memory
    from forerun.report.wording import plot_title

    largest = estimate.max_batch_size.value if estimate.max_batch_size is not None else None
    sizes = plot_batch_sizes(estimate.batch_size_per_device, largest)
    sweep = forerun.sweep(estimate.model, devices=[on], batch_sizes=sizes, precisions=[precision], **setup)
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
