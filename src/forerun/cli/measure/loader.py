"""``forerun measure loader``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.options import DebugOption, JsonOption
from forerun.cli.output import print_json, quiet_libraries

__all__ = ["loader"]


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
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure what a folder of images costs to read, decode and augment, and how many workers a device needs."""
    from forerun.api.measure_loader import measure_loader

    with quiet_libraries(debug=debug):
        found = measure_loader(
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
    if as_json:
        print_json(found.as_dict())
        return
    from forerun.report.loader_page import loader_lines

    for line in loader_lines(found):
        typer.echo(line)


def _counts(text: str) -> list[int]:
    from forerun.errors import InvalidSetupError

    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise InvalidSetupError(
            f"workers must be whole numbers separated by commas, such as 0,1,2, got '{text}'"
        ) from None
