"""``forerun measure curve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.options import DebugOption, JsonOption
from forerun.cli.output import print_json, quiet_libraries

__all__ = ["curve"]


def curve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The network, as in predict: cifar-resnet:20 ...")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.csv", help="The curve, a row an epoch.")],
    dataset: Annotated[str, typer.Option(metavar="NAME", help="cifar10, synthetic or digits.")] = "cifar10",
    num_images: Annotated[int | None, typer.Option(help="The first so many training images only.")] = None,
    image_size: Annotated[int, typer.Option(help="Height and width of the images [pixels].")] = 32,
    epochs: Annotated[int, typer.Option(help="Epochs at most.")] = 30,
    batch_size: Annotated[int, typer.Option(help="Images of one step.")] = 128,
    learning_rate: Annotated[float, typer.Option(help="Its highest value.")] = 0.1,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help="As in forecast; a cosine over all epochs if not given."),
    ] = None,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="sgd (momentum 0.9) or adam.")] = "sgd",
    seed: Annotated[int, typer.Option(help="Seed of weights, order and images.")] = 0,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu or cuda:N.")] = "cpu",
    target: Annotated[
        str | None, typer.Option(metavar="METRIC>=VALUE", help="End the run when it is reached.")
    ] = None,
    gradient_noise: Annotated[
        bool, typer.Option("--gradient-noise", help="Measure the gradient noise scale on the way.")
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
