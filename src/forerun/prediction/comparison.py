"""Two predictions side by side: what changed in the question, and which parts of time, memory and money follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError
from forerun.base.units import format_bytes, format_count, format_duration_s, format_energy_j

QUANTITIES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "step_time_s": ("step", format_duration_s),
    "throughput_samples_per_s": ("throughput [samples/s]", format_count),
    "epoch_time_s": ("epoch", format_duration_s),
    "job_time_s": ("job", format_duration_s),
    "peak_memory_bytes": ("memory", format_bytes),
    "cost_usd": ("cost", lambda value: f"${value:,.2f}"),
    "energy_j": ("energy", format_energy_j),
}
"""Words of the quantities of an answer, and of their values."""
_NUM_REASONS = 3
_LEAST_SHARE = 0.02
"""Least share of a quantity that a part must change by to be named as a reason for its change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Answer):
    """A quantity, part or setting of two runs.

    Attributes:
        name: Its name in the answers.
        before, after: Its values; None where a run has none.
        change: after / before - 1, None for what is no number, is missing or was zero.
    """

    name: str
    before: Any
    after: Any

    @property
    def change(self) -> float | None:
        """Relative change."""
        numbers = isinstance(self.before, int | float) and isinstance(self.after, int | float)
        return self.after / self.before - 1 if numbers and self.before else None

    def json_fields(self) -> dict[str, Any]:
        """The fields and the relative change."""
        return {"name": self.name, "before": self.before, "after": self.after, "change": self.change}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison(Answer):
    """The differences of two predictions.

    Attributes:
        first, second: The runs in words.
        settings: What differs in the question.
        quantities: Time, throughput, memory, cost and energy that both know.
        time_parts: Time of one step by kind of work [s].
        memory_parts: Memory at the peak by part [bytes].
        fits: Whether each fits its device: "yes", "no" or "close".
        sentences: The changes with their reasons, for people.
    """

    first: str
    second: str
    settings: tuple[Difference, ...]
    quantities: tuple[Difference, ...]
    time_parts: tuple[Difference, ...]
    memory_parts: tuple[Difference, ...]
    fits: tuple[str | None, str | None]
    sentences: tuple[str, ...]


def compare_answers(first: Mapping[str, Any], second: Mapping[str, Any]) -> RunComparison:
    """Compares two answers of ``predict`` as ``--json`` prints them.

    Raises:
        InvalidSetupError: One of them is no such answer.
    """
    for each in (first, second):
        if not isinstance(each, Mapping) or not {"run", "step_time_s", "breakdown"} <= each.keys():
            raise InvalidSetupError(
                "expected two answers of 'forerun predict --json', got another JSON document"
            )
    before, after = first["run"], second["run"]
    settings = tuple(
        Difference(name=name, before=before.get(name), after=after.get(name))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    )
    quantities = tuple(
        Difference(name=name, before=first[name]["value"], after=second[name]["value"])
        for name in QUANTITIES
        if first.get(name) and second.get(name)
    )
    time_parts = _parts(first, second, "breakdown", "time_s")
    memory_parts = _parts(first, second, "memory_parts", "size_bytes")
    fits = (first.get("fits"), second.get("fits"))
    return RunComparison(
        first=_words(first),
        second=_words(second),
        settings=settings,
        quantities=quantities,
        time_parts=time_parts,
        memory_parts=memory_parts,
        fits=fits,
        sentences=tuple(_sentences(quantities, time_parts, memory_parts, fits, second)),
    )


def change_words(change: float) -> str:
    """A relative change as people say it.

    >>> change_words(-0.13), change_words(7.0)
    ('-13 %', '8 times')
    """
    return f"{100 * change:+.0f} %" if change < 2 else f"{1 + change:.3g} times"


def _words(answer: Mapping[str, Any]) -> str:
    run = answer["run"]
    return (
        f"{answer['model']} on {run.get('device', answer['device'])}, batch {answer['batch_size_per_device']}"
    )


def _parts(
    first: Mapping[str, Any], second: Mapping[str, Any], field: str, unit: str
) -> tuple[Difference, ...]:
    """The parts of both answers, those that changed most first."""
    before, after = ({part["name"]: part[unit] for part in each.get(field, ())} for each in (first, second))
    found = (
        Difference(name=name, before=before.get(name, 0.0), after=after.get(name, 0.0))
        for name in {**before, **after}
    )
    return tuple(sorted(found, key=lambda part: -abs(part.after - part.before)))


def _sentences(
    quantities: tuple[Difference, ...],
    time_parts: tuple[Difference, ...],
    memory_parts: tuple[Difference, ...],
    fits: tuple[str | None, str | None],
    second: Mapping[str, Any],
) -> Iterator[str]:
    reasons = {
        "step_time_s": (time_parts, format_duration_s),
        "peak_memory_bytes": (memory_parts, format_bytes),
    }
    for item in quantities:
        title, words = QUANTITIES[item.name]
        change = item.change
        share = "" if change is None else f" ({change_words(change)})"
        because = ""
        if item.name in reasons:
            parts, part_words = reasons[item.name]
            because = _reasons(parts, part_words, _LEAST_SHARE * item.before)
        yield f"{title}: {words(item.before)} to {words(item.after)}{share}{because}"
    device = second.get("device_title", second["device"])
    # That a run no longer fits matters more than how many bytes it takes.
    if fits[0] != fits[1] and fits[1] is not None:
        yield {
            "no": f"no longer fits the {device}",
            "yes": f"now fits the {device}",
            "close": f"too close to call on the {device}: it may run out of memory",
        }[fits[1]]


def _reasons(parts: tuple[Difference, ...], words: Any, least: float) -> str:
    changed = [part for part in parts if abs(part.after - part.before) > least][:_NUM_REASONS]
    told = (f"{part.name} {'+' if part.after > part.before else '-'}{words(abs(part.after - part.before))}"
            for part in changed)  # fmt: skip
    return f"; {', '.join(told)}" if changed else ""
