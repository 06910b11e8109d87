"""The page that ``forerun measure loader`` prints."""

from __future__ import annotations

from collections.abc import Iterator

from forerun.api.measure_loader import LoaderRun
from forerun.report.wording import range_words
from forerun.units import format_bytes, format_duration_s

__all__ = ["loader_lines"]


def loader_lines(run: LoaderRun) -> Iterator[str]:
    """One sentence each on the cost of a sample, real loaders and their prediction, and the workers a device needs."""
    cost = run.sample_cost_s
    yield f"{run.num_files} images below {run.folder}, {format_bytes(run.sample_bytes)} each on average"
    spread = range_words(cost, format_duration_s)
    parts = (
        f"decoding {format_duration_s(run.decode_s)}, augmenting {format_duration_s(run.augment_s)}; "
        f"reading it again {format_duration_s(run.read_s)}"
    )
    yield f"a core takes {format_duration_s(cost.value)} a sample ({spread} over the rounds): {parts}"
    yield f"first round of reading: {format_bytes(run.first_read_bytes_per_s)}/s"
    for rate in run.rates:
        yield (
            f"{_workers(rate.num_workers)}: {rate.measured_samples_per_s:.0f} samples/s measured, "
            f"{rate.predicted_samples_per_s:.0f} predicted"
        )
    if run.wanted_samples_per_s is not None:
        yield _needed(run, run.wanted_samples_per_s)
    milliseconds = 1e3 * (cost.value + run.read_s)
    yield (
        f"for a plan: --loader-ms {milliseconds:.3g} --loader-workers N --loader-cores {run.num_cores:g} "
        f"--sample-kb {run.sample_bytes / 1e3:.3g}"
    )


def _workers(count: int) -> str:
    return "without workers" if count == 0 else f"{count} worker{'s' if count > 1 else ''}"


def _needed(run: LoaderRun, wanted: float) -> str:
    if run.workers_needed is None:
        return f"{wanted:g} samples/s are more than the {run.num_cores:g} cores of this machine can load"
    return f"{wanted:g} samples/s need {_workers(run.workers_needed)} to keep the device busy"
