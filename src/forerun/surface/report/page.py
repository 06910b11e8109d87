"""The page of a prediction, with bars as wide as the terminal leaves room for, of two side by side, and of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_bytes, format_count, format_duration_s, format_energy_j
from forerun.prediction.estimate import Estimate, Interval
from forerun.question.setup import MAX_BATCH_SIZE
from forerun.surface.report.tables import Columns, table, table_of
from forerun.surface.report.wording import (
    bound_sentence,
    fit_sentence,
    format_flops,
    format_percent,
    format_usd,
    format_whole,
    provenance_sentence,
    range_words,
    setup_words,
)

if TYPE_CHECKING:
    from forerun.prediction.comparison import Difference, RunComparison
    from forerun.search.predict import Prediction
    from forerun.search.sweep import Sweep

WIDTH_WITH_BARS = 60
"""Narrowest page with bars; below it the figures need all the room."""

_INDENT = (0, 0, 0, 2)
_MEMORY_WORDS = {"context": "context of the driver"}


def estimate_page(estimate: Estimate) -> RenderableType:
    """An estimate as a page of text; every bar and colour repeats a figure beside it."""
    parts: list[RenderableType] = [_title(estimate), Text(""), _headline(estimate), Text("")]
    if estimate.peak_memory_bytes is not None:
        parts += [
            _memory_sentence(estimate, estimate.peak_memory_bytes),
            _memory_bars(estimate),
            Text(""),
        ]
    step = f"{format_duration_s(estimate.step_time_s.value)}, {bound_sentence(estimate.bound_by)}"
    causes = merge_small(tuple((part.name, part.time_s) for part in estimate.breakdown))
    times = [(Text.assemble(("Step  ", "bold"), step), causes)]
    if len(estimate.passes) > 1:
        times.append((Text("Passes", style="bold"), [(part.name, part.time_s) for part in estimate.passes]))
    for heading, spans in times:
        rows = _waterfall(spans, sum(time_s for _, time_s in spans), format_duration_s)
        parts += [heading, _Bars(rows), Text("")]
    if estimate.top_layers:
        layers = [
            (layer.module, format_duration_s(layer.time_s), format_percent(layer.share))
            for layer in estimate.top_layers
        ]
        parts += [Text("Most expensive layers", style="bold"), _grid("lrr", layers), Text("")]
    parts.append(Text.assemble(("Rests on  ", "bold"), provenance_sentence(estimate)))
    remarks = list(estimate.notes)
    if estimate.unsupported_ops:
        strange = ", ".join(estimate.unsupported_ops)
        remarks.insert(0, f"without a rule of their own, charged by their traffic: {strange}")
    if remarks:
        parts += [Text("Notes", style="bold"), _grid("ll", [("-", remark) for remark in remarks])]
    return Group(*parts)


def prediction_page(found: Prediction) -> Iterator[RenderableType]:
    """An estimate as a page, and what would make the run fit, once that is known."""
    yield estimate_page(found)
    if found.ways_to_fit:
        yield "What would make it fit"
    for way in found.ways_to_fit:
        rate = format_count(way.throughput_samples_per_s)
        yield f"  -  {way.words}: {format_bytes(way.peak_memory_bytes)}, {rate} samples/s"


def _title(estimate: Estimate) -> Text:
    devices = f"{estimate.num_devices} x " if estimate.num_devices > 1 else ""
    rate, samples = estimate.tokens_per_s, estimate.throughput_samples_per_s.value
    tokens = "" if rate is None else f" of {format_whole(round(rate.value / samples))} tokens"
    whole, trained = map(format_count, (estimate.num_parameters, estimate.num_trainable_parameters))
    return Text.assemble(
        (estimate.model, "bold"),
        " on ",
        (f"{devices}{estimate.device_title}", "bold"),
        f"\n{setup_words(estimate)}",
        f"\n{whole} parameters",
        ", " if trained == whole else f" ({trained} trained), ",
        f"{format_flops(estimate.flops_per_sample)} a sample{tokens}",
    )


def _grid(sides: str, rows: Iterable[Sequence[str | Text]]) -> RenderableType:
    """Rows of words below a heading; ``sides`` has l for a column to the left and r for one to the right."""
    table = Table.grid(padding=(0, 2), pad_edge=False)
    for side in sides:
        table.add_column(justify="right" if side == "r" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return Padding(table, _INDENT, expand=False)


def _headline(estimate: Estimate) -> RenderableType:
    rows: list[Sequence[str | Text]] = [("", "", Text("90 % interval", style="dim"))]
    for name, interval, format_value in quantities(estimate):
        if interval is not None:
            value = Text(format_value(interval.value), style="bold")
            rows.append((name, value, range_words(interval, format_value)))
    return _grid("lrl", rows)


def quantities(estimate: Estimate) -> Iterator[tuple[str, Interval | None, Callable[[float], str]]]:
    """Names and values of an estimate with the functions that write them, in the order of the page."""
    # Cost and energy are those of the longest span in the question.
    span = "job" if estimate.job_time_s else "epoch" if estimate.epoch_time_s else "step"
    num_steps = estimate.num_steps_per_epoch
    steps = f" ({format_whole(num_steps)} steps)" if num_steps is not None else ""
    yield "step", estimate.step_time_s, format_duration_s
    yield "throughput", estimate.throughput_samples_per_s, lambda rate: f"{format_count(rate)} samples/s"
    rate = lambda value: f"{format_count(value)} tokens/s"  # noqa: E731
    if estimate.generation is not None:
        yield "time to first token", estimate.generation.time_to_first_token_s, format_duration_s
        yield "time per token", estimate.generation.time_per_token_s, format_duration_s
    yield "tokens", estimate.tokens_per_s, rate
    if estimate.num_devices > 1:
        yield "tokens of a device", estimate.tokens_per_s_per_device, rate
    if estimate.tokens_per_s is not None:
        yield "MFU", estimate.mfu, format_percent
        if estimate.hfu != estimate.mfu:
            yield "HFU", estimate.hfu, format_percent
    yield f"epoch{steps}", estimate.epoch_time_s, format_duration_s
    yield "job", estimate.job_time_s, format_duration_s
    yield f"cost of the {span}", estimate.cost_usd, format_usd
    yield f"energy of the {span}", estimate.energy_j, format_energy_j


def _memory_sentence(estimate: Estimate, peak: Interval) -> Text:
    text = Text.assemble(
        ("Memory  ", "bold"), f"{format_bytes(peak.value)} ({range_words(peak, format_bytes)})"
    )
    if estimate.device_memory_bytes > 0:
        text.append(f" of {format_bytes(estimate.device_memory_bytes)}")
    text.append(f": {fit_sentence(estimate.fits)}", style="bold")
    largest = estimate.max_batch_size
    # That of one device alone may be larger than the batch that does not fit; and beyond the bound it says nothing.
    most = estimate.batch_size_per_device if estimate.fits == "no" else MAX_BATCH_SIZE
    if largest is not None and largest.value < 1 and estimate.fits == "no" and most > 1:
        text.append("; a batch of 1 does not fit either")
    elif largest is not None and 1 <= largest.value < most:
        text.append(f"; largest batch {format_whole(largest.value)} ({range_words(largest, format_whole)})")
    if (shown := estimate.shown_memory_bytes) is not None:
        text.append(f"; nvidia-smi shows {range_words(shown, format_bytes)}")
    return text


def _memory_bars(estimate: Estimate) -> RenderableType:
    parts = merge_small(
        tuple((_MEMORY_WORDS.get(p.name, p.name), p.size_bytes) for p in estimate.memory_parts)
    )
    used = sum(size for _, size in parts)
    card = estimate.device_memory_bytes
    rows = _waterfall(parts, max(used, card), format_bytes)
    if card > used:
        free = Bar(used / card, 1.0, fill="·", ascii_fill=".", colour="dim")
        rows.append(("free", free, format_bytes(card - used), format_percent(1 - used / card)))
    # What is too much is drawn to scale as well: it says how far away fitting is.
    elif 0 < card < used:
        beyond = Bar(card / used, 1.0, fill="!", ascii_fill="!", colour="red")
        share = format_percent(1 - card / used)
        rows.append(("more than there is", beyond, format_bytes(used - card), share))
    return _Bars(rows)


_BarRow = tuple[str, "Bar", str, str]


def _waterfall(
    parts: Sequence[tuple[str, float]], whole: float, format_value: Callable[[float], str]
) -> list[_BarRow]:
    """A row per part; each bar begins where the one above ended, and the line stands for ``whole``."""
    rows, start = [], 0.0
    for name, size in parts:
        end = start + size / whole
        rows.append((name, Bar(start, end), format_value(size), format_percent(size / whole)))
        start = end
    return rows


@dataclass(frozen=True, slots=True)
class _Bars:
    """Names with bars and figures, the bars where the page has room for them."""

    rows: list[_BarRow]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with_bars = options.max_width >= WIDTH_WITH_BARS
        table = Table.grid(padding=(0, 2), expand=with_bars)
        table.add_column(overflow="fold")
        if with_bars:
            table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        for name, bar, words, share in self.rows:
            table.add_row(Text(name), *([bar] if with_bars else []), Text(words), Text(share))
        yield Padding(table, _INDENT, expand=False)


def bar_cells(start: float, end: float, width: int) -> tuple[int, int]:
    """First cell of a bar and the cell after its last, on a line of ``width`` cells for 0 to 1.

    Anything above zero keeps one cell, so that no part vanishes; what lies beyond 1 is cut off.
    """
    if end <= start or width < 1:
        return 0, 0
    first = min(max(0, round(start * width)), width - 1)
    return first, min(width, max(first + 1, round(end * width)))


def bar_text(start: float, end: float, width: int, fill: str) -> str:
    """A bar from ``start`` to ``end`` as text of exactly ``width`` characters."""
    first, last = bar_cells(start, end, width)
    return " " * first + fill * (last - first) + " " * (width - last)


def merge_small(parts: tuple[tuple[str, float], ...]) -> list[tuple[str, float]]:
    """Largest parts first; those below 2 % of the sum become one 'other', so the sum stays."""
    total = sum(size for _, size in parts)
    ordered = sorted((part for part in parts if part[1] > 0), key=lambda part: -part[1])
    large = [part for part in ordered if part[1] >= 0.02 * total]
    small = ordered[len(large) :]
    # One small part says more under its own name.
    if len(small) < 2:
        return ordered
    return [*large, (f"other ({len(small)} parts)", sum(size for _, size in small))]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from ``start`` to ``end`` on a line from 0 to 1, drawn over the width of its cell."""

    start: float
    end: float
    fill: str = "█"
    ascii_fill: str = "#"
    colour: str = "cyan"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fill = self.ascii_fill if options.ascii_only else self.fill
        yield Segment(bar_text(self.start, self.end, options.max_width, fill), Style.parse(self.colour))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(10, options.max_width), options.max_width)


_NUM_PARTS = 6


def comparison_page(found: RunComparison) -> RenderableType:
    """Two predictions: the settings that differ, the changes with their reasons, and the parts of time and memory."""
    settings = table(
        ("setting", "first", "second"),
        [(item.name, _word(item.before), _word(item.after)) for item in found.settings],
        left=("setting", "first", "second"),
    )
    parts: list[RenderableType] = [
        Text.assemble(("first   ", "bold"), found.first),
        Text.assemble(("second  ", "bold"), found.second),
        Text(""),
    ]
    if found.settings:
        parts += [settings, Text("")]
    parts += [Text(f"  -  {sentence}") for sentence in found.sentences]
    for title, items, words in (
        ("time of a step", found.time_parts, format_duration_s),
        ("memory", found.memory_parts, format_bytes),
    ):
        if items:
            parts += [Text(""), _table(title, items, words)]
    return Group(*parts)


def _word(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _table(title: str, items: tuple[Difference, ...], words: Any) -> RenderableType:
    from forerun.prediction.comparison import change_words

    return table_of(
        items[:_NUM_PARTS],
        {
            title: lambda item: item.name,
            "first": lambda item: words(item.before),
            "second": lambda item: words(item.after),
            "change": lambda item: None if item.change is None else change_words(item.change),
        },
        left=(title,),
    )


def sweep_page(sweep: Sweep) -> RenderableType:
    """A row for each device, precision and batch size."""
    from forerun.surface.report.objects import rows_of  # which a prediction does without

    columns: Columns[dict[str, Any]] = {
        "device": lambda row: row["device"],
        "precision": lambda row: row["precision"],
        "batch": lambda row: str(row["batch_size"]),
        "step": lambda row: format_duration_s(row["step_time_s"]),
        "samples/s": lambda row: format_count(row["throughput_samples_per_s"]),
        "memory": lambda row: format_bytes(row["peak_memory_bytes"]),
    }
    return table_of(rows_of(sweep), columns, left=("device", "precision"))
