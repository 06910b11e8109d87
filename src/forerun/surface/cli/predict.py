"""``forerun predict``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.errors import UsageError
from forerun.question.options import RunOptions
from forerun.surface.cli.settings import ModelOrCommand, OnDevice, UnsafeFilesOption, model_of
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.search.predict import Prediction

_MOST_PLOT_BATCH = 1 << 16


def _plot(path: Path, found: Prediction) -> None:
    """Throughput and memory against the batch size."""
    import forerun
    from forerun.surface.report.figure import throughput_and_memory
    from forerun.surface.report.wording import plot_title

    if found.num_devices > 1:
        raise UsageError("--plot draws one device; for several use forerun scale with --plot")
    largest = found.max_batch_size.value if found.max_batch_size is not None else None
    sizes = plot_batch_sizes(found.batch_size_per_device, largest)
    run = found.run
    sweep = forerun.sweep(
        run, devices=[run.cluster.device], batch_sizes=sizes, precisions=[run.setup.precision]
    )
    throughput_and_memory(path, sweep, title=plot_title(found), chosen_batch_size=found.batch_size_per_device)


def plot_batch_sizes(batch_size: int, largest_that_fits: float | None) -> tuple[int, ...]:
    """Batch sizes of a plot: the one asked about, and powers of two up to the first that no longer fits.

    Without a known limit, they go up to eight times the batch size.
    """
    end = min(_MOST_PLOT_BATCH, 8 * batch_size if largest_that_fits is None else 2 * largest_that_fits)
    powers = [1 << k for k in range(24) if 1 << k <= max(end, 2 * batch_size)]
    return tuple(sorted({*powers, batch_size}))


@verb(
    "Predict time, memory and cost of training.",
    options=RunOptions,
    page="forerun.surface.report.page:prediction_page",
    plot=_plot,
    width=96,
    traces=True,
    money=True,
    examples=(
        "forerun predict torchvision:resnet50 --on l4 --batch-size 128 --precision amp --dataset imagenet --epochs 90",
        "forerun predict llama-3.1-8b --on rtx-4090 --lora 16 --quantize nf4 --sequence-length 2048",
        "forerun predict --on a100-sxm4-80gb -- python train.py --batch-size 64",
    ),
)
def predict(
    model: ModelOrCommand,
    on: OnDevice,
    settings: dict[str, Any],
    use_cache: bool,
    unsafe_files: UnsafeFilesOption = False,
) -> Prediction:
    """Predict time, memory and cost of training MODEL on DEVICE, without the device."""
    import forerun

    name = model_of(model, unsafe_files=unsafe_files)
    return forerun.predict(name, device=on, use_cache=use_cache, **settings)
