"""``forerun measure curve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.measure.options import DatasetOption, DeviceOption, EpochsOption, SeedOption
from forerun.cli.options import SETTING_HELP, DebugOption, JsonOption
from forerun.cli.output import print_json, quiet_libraries

__all__ = ["curve"]


def curve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model, as in predict, such as cifar-resnet:20.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.csv", help="File for the curve, one row per epoch.")],
    dataset: DatasetOption = "cifar10",
    num_images: Annotated[
        int | None, typer.Option(help="Number of training images to use, the first ones.", show_default="all")
    ] = None,
    image_size: Annotated[int, typer.Option(help=SETTING_HELP["image_size"])] = 32,
    epochs: EpochsOption = 30,
    batch_size: Annotated[int, typer.Option(help="Batch size of one device.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate of the schedule.")] = 0.1,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="Learning-rate schedule, as in 'forerun forecast'.",
            show_default="a cosine over all epochs",
        ),
    ] = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="Optimizer: sgd (with momentum 0.9) or adam.")
    ] = "sgd",
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    target: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC>=VALUE", help="Target that ends the training, such as 'val_accuracy>=0.92'."
        ),
    ] = None,
    gradient_noise: Annotated[
        bool, typer.Option("--gradient-noise", help="Measure the gradient noise scale during training.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a network for real and write its learning curve, in the columns that forecast reads."""
    import forerun

    with quiet_libraries(debug=debug):
        found = forerun.measure_curve(
            model,
            out,
            dataset=dataset,
            num_images=num_images,
            image_size=image_size,
            num_epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            schedule=schedule,
            optimizer=optimizer,
            seed=seed,
            device=device,
            target=target,
            with_gradient_noise=gradient_noise,
            on_row=lambda line: typer.echo(line, err=True),
        )
    if as_json:
        print_json(found.as_dict())
        return
    typer.echo(found.sentence())
