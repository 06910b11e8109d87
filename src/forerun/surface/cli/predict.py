"""``forerun predict``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.errors import UsageError
from forerun.question.options import RunOptions
from forerun.surface.cli.output import page_width
from forerun.surface.cli.settings import ModelOrCommand, OnDevice, UnsafeFilesOption, model_of
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.prediction.estimate import Estimate
    from forerun.search.advise import Way

_OF_SWEEPS = ("dataset", "dataset_size", "epochs", "validation_size", "validate", "startup_s", "checkpoint_s",
              "price_usd_per_hour", "batch_size", "precision")  # fmt: skip
_MOST_PLOT_BATCH = 1 << 16


@dataclass(frozen=True)
class _Prediction:
    """An estimate, with the question that it answers."""

    estimate: Estimate
    device: str
    settings: dict[str, Any]
    use_cache: bool

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Changes that would make it fit, where it does not; may need further traces."""
        if self.estimate.fits != "no":
            return ()
        from forerun.base.stages import stage
        from forerun.search.advise import ways_to_fit

        with stage("looking for what would make it fit"):
            return ways_to_fit(self.estimate)

    def as_dict(self) -> dict[str, Any]:
        """The estimate as plain data, with the ways to fit where it does not."""
        found = self.estimate.as_dict()
        if self.estimate.fits == "no":
            found["ways_to_fit"] = [way.as_dict() for way in self.ways]
        return found


def _page(found: _Prediction) -> Iterator[Any]:
    from forerun.base.units import format_bytes, format_count
    from forerun.surface.report.page import PAGE_WIDTH, estimate_page

    yield estimate_page(found.estimate, page_width(PAGE_WIDTH))
    if found.ways:
        yield "What would make it fit"
    for way in found.ways:
        rate = format_count(way.throughput_samples_per_s)
        yield f"  -  {way.words}: {format_bytes(way.peak_memory_bytes)}, {rate} samples/s"


def _plot(path: Path, found: _Prediction) -> None:
    """Throughput and memory against the batch size."""
    import forerun
    from forerun.surface.report.figure import throughput_and_memory
    from forerun.surface.report.wording import plot_title

    estimate = found.estimate
    if estimate.num_devices > 1:
        raise UsageError("--plot draws one device; for several use forerun scale with --plot")
    largest = estimate.max_batch_size.value if estimate.max_batch_size is not None else None
    sizes = plot_batch_sizes(estimate.batch_size_per_device, largest)
    sweep = forerun.sweep(
        estimate.model,
        devices=[found.device],
        batch_sizes=sizes,
        precisions=[estimate.run.setup.precision],
        use_cache=found.use_cache,
        **{name: value for name, value in found.settings.items() if name not in _OF_SWEEPS},
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
    page=_page,
    plot=_plot,
    width=96,
    traces=True,
    rows=lambda found: found.estimate,
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
) -> _Prediction:
    """Predict time, memory and cost of training MODEL on DEVICE, without the device."""
    import forerun

    name = model_of(model, unsafe_files=unsafe_files)
    estimate = forerun.predict(name, device=on, use_cache=use_cache, **settings)
    return _Prediction(estimate, on, settings, use_cache)
