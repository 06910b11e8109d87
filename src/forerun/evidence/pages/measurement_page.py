"""The pages of ``forerun measure`` and ``forerun records``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_bytes, format_duration_s
from forerun.evidence.measure_loader import LoaderRun
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome, measurement_document
from forerun.surface.report.tables import Columns, facts, table, table_of
from forerun.surface.report.wording import range_words

if TYPE_CHECKING:
    from forerun.evidence.measure import MeasurementRun

_MOST_ROWS = 60
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
    words = ("what", "setting", "remark")
    columns: Columns[Measurement] = {
        "what": lambda row: row.subject,
        "setting": _setting,
        "step": lambda row: _times(row)[0],
        "95 %": lambda row: _times(row)[1],
        "epoch": lambda row: _result(row, "epoch_time_s"),
        "accuracy": _accuracy,
        "remark": _remark,
    }
    return table_of(rows, columns, left=words, fold=words[1:])


def _times(row: Measurement) -> tuple[str, str]:
    """Median step and half its interval, relative."""
    summary = row.summary
    if summary is None:
        return "-", "-"
    median_s = summary.median_s
    half = 0.5 * (summary.high_s - summary.low_s) / median_s if median_s else 0.0
    return format_duration_s(median_s), f"±{100 * half:.0f} %"


def _result(row: Measurement, name: str) -> str | None:
    value = row.results.get(name)
    return format_duration_s(value) if isinstance(value, (int, float)) else None


def _accuracy(row: Measurement) -> str | None:
    """Accuracy on held-out images after the last epoch."""
    found = [value for name, value in row.results.items() if name.startswith("val_accuracy_")]
    return f"{100 * found[-1]:.1f} %" if found and isinstance(found[-1], (int, float)) else None


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


_KEY_LENGTH = 8


def counts_table(
    store: str, columns: Sequence[str], groups: Iterable[tuple[tuple[str, ...], int]]
) -> RenderableType:
    """Number of measurements for each combination of the columns."""
    counted = [*groups]
    rows = [(*(value or "-" for value in values), str(number)) for values, number in counted]
    total = sum(number for _, number in counted)
    made = table((*columns, "records"), rows, left=columns, fold=columns)
    return Group(made, Text(f"{total} measurements in {store}"))


def record_page(measurement: Measurement) -> RenderableType:
    """All fields of one measurement, a line each."""
    lines: list[tuple[str, str]] = []
    for name, value in measurement_document(measurement).items():
        if isinstance(value, Mapping):
            lines += [(name, ""), *((f"  {inner}", _shown(figure)) for inner, figure in value.items())]
        else:
            lines.append((name, _shown(value)))
    return facts(lines)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_shown(figure)}" for name, figure in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value in (None, "") else str(value)


def records_table(measurements: Iterable[Measurement]) -> RenderableType:
    """One line per measurement: subject, median with its interval, and notes."""
    words = ("what", "asked", "remark")
    titles = ("key", "what", "asked", "device", "median", "95 % interval", "remark")
    return table(titles, map(_record_cells, measurements), left=("key", "device", *words), fold=words)


def _record_cells(found: Measurement) -> tuple[str, ...]:
    asked = " ".join(f"{name}={value}" for name, value in found.parameters.items())
    summary = found.summary
    median = format_duration_s(summary.median_s) if summary else "-"
    interval = (
        f"{format_duration_s(summary.low_s)} to {format_duration_s(summary.high_s)}" if summary else "-"
    )
    remark = found.reason or str(found.outcome)
    if summary and not summary.is_stable:
        remark = f"unstable: {summary.reason}"
    return (
        found.key[:_KEY_LENGTH],
        found.subject,
        asked,
        found.circumstances.device,
        median,
        interval,
        remark,
    )
