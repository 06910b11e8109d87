"""The pages of ``forerun measure``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_bytes, format_duration_s
from forerun.evidence.measure_loader import LoaderRun
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome
from forerun.surface.report.tables import table
from forerun.surface.report.wording import range_words

if TYPE_CHECKING:
    from forerun.evidence.measure_jobs import MeasurementRun

__all__ = ["loader_lines", "measurement_page"]

_MOST_ROWS = 60
_WIDEST_SUBJECT = 26  # of 80 columns; longer ones are folded
_PLAIN = (None, "fp32", "nchw", "none")  # values that are left out
_LAYER_SIZES = ("in_size", "sequence_length", "in_features", "out_features", "kernel", "stride", "mode")


def measurement_page(run: MeasurementRun) -> RenderableType:
    """One line per measurement, then the counts of the session."""
    shown = run.measurements[:_MOST_ROWS]
    parts: list[RenderableType] = [_table(shown)]
    if (num_more := len(run.measurements) - len(shown)) > 0:
        parts.append(Text(f"... and {num_more:,} more"))
    return Group(*parts, Text(""), *(Text(line) for line in _sentences(run)))


def _table(rows: Sequence[Measurement]) -> Table:
    has_epochs = any("epoch_time_s" in row.results for row in rows)
    figures = ("step", "95 %", *(("epoch", "accuracy") if has_epochs else ()))
    words = ("what", "setting", "remark")
    made = table(("what", "setting", *figures, "remark"), left=words, fold=words[1:])
    for row in rows:
        cells = [
            row.subject,
            _setting(row),
            *_times(row),
            *(_epoch(row) if has_epochs else ()),
            _remark(row),
        ]
        made.add_row(*map(Text, cells))
    return made


def _times(row: Measurement) -> tuple[str, str]:
    """Median step and half its interval, relative."""
    summary = row.summary
    if summary is None:
        return "-", "-"
    median_s = summary.median_s
    half = 0.5 * (summary.high_s - summary.low_s) / median_s if median_s else 0.0
    return format_duration_s(median_s), f"±{100 * half:.0f} %"


def _epoch(row: Measurement) -> tuple[str, str]:
    """Time of an epoch, and the accuracy on held-out images after the last one."""
    results: Mapping[str, Any] = row.results
    accuracies = [results[name] for name in results if name.startswith("val_accuracy_")]
    epoch_s = results.get("epoch_time_s")
    return (
        "-" if epoch_s is None else format_duration_s(epoch_s),
        f"{100 * accuracies[-1]:.1f} %" if accuracies else "-",
    )


def _remark(row: Measurement) -> str:
    if row.outcome is not Outcome.DONE:
        return f"{row.outcome}: {row.reason}"
    summary, words = row.summary, _of_several(row.results)
    if summary is not None and not summary.is_stable:
        words.append(f"unstable: {summary.reason}")
    return "; ".join(words)


def _of_several(results: Mapping[str, Any]) -> list[str]:
    """The result of a measurement of several devices."""
    words = []
    if "synchronisation_s" in results:
        words.append(f"synchronisation {format_duration_s(results['synchronisation_s'])}")
    if "bandwidth_bytes_per_s" in results:
        rate = f"{format_bytes(results['bandwidth_bytes_per_s'])}/s"
        words.append(f"latency {format_duration_s(results['latency_s'])}, bandwidth {rate}")
    return words


def _setting(row: Measurement) -> str:
    asked = row.parameters
    words = [f"batch size {asked['batch_size']}"] if "batch_size" in asked else []
    words += [f"{asked['num_devices']} devices"] if "num_devices" in asked else []
    if row.kind is JobKind.LAYER:
        words += [f"{name} {asked[name]}" for name in _LAYER_SIZES if name in asked]
    words += [
        str(asked[name]) for name in ("precision", "layout", "optimizer") if asked.get(name) not in _PLAIN
    ]
    return ", ".join([*words, *(["compiled"] if asked.get("compile") else [])])


def _sentences(run: MeasurementRun) -> list[str]:
    counts = (
        ", ".join(f"{count} {outcome}" for outcome, count in run.report.outcomes.items()) or "nothing new"
    )
    lines = [f"This session: {counts}; {run.report.num_skipped} were in the records already."]
    if run.report.num_unstable:
        lines.append(
            f"{run.report.num_unstable} are marked unstable: measure them again on a quieter machine."
        )
    if run.report.num_lost:
        lines.append(f"{run.report.num_lost} were lost with their node; run the same command again.")
    return [*lines, f"Records: {run.records}"]


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
