"""Captures public scripts and compares each with the hand-written specification of its step."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import forerun
from forerun.base.errors import ForerunError
from forerun.graph.captured import CaptureFacts
from forerun.prediction.estimate import Interval
from forerun.question.model import CAPTURE_PREFIX
from studies.markdown import markdown_table
from studies.scripts.cases import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCase:
    """One script of the table.

    Attributes:
        name: Name of the script.
        outcome: ``pretended``, ``recorded``, or the reason why nothing was captured.
        is_expected: Whether it was captured, or refused for the reason that was expected.
        wrong: Facts that are not those of the script, in words; None where nothing was captured.
        any_batch: Whether the graph answers any batch size.
        duration_s: Time of the capture [s].
        step_s, spec_step_s: Step of the capture and of the hand-written specification [s].
        measured_step_s: Step that its authors measured, if known [s].
        memory_bytes, spec_memory_bytes: Their peak memory [bytes].
    """

    name: str
    outcome: str
    is_expected: bool
    wrong: tuple[str, ...] | None = None
    any_batch: bool | None = None
    duration_s: float | None = None
    step_s: float | None = None
    spec_step_s: float | None = None
    measured_step_s: float | None = None
    memory_bytes: float | None = None
    spec_memory_bytes: float | None = None

    def as_dict(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def study_case(case: Case) -> CapturedCase:
    """Captures one script and compares it."""
    begin_s = time.monotonic()
    case.folder.mkdir(parents=True, exist_ok=True)
    try:
        with _working_in(case.folder):
            found = forerun.capture(case.command, timeout_s=600.0)
    except ForerunError as error:
        reason = str(error).partition(" cannot be captured: ")[2] or str(error)
        return CapturedCase(
            name=case.name, outcome=reason, is_expected=bool(case.refused) and case.refused in reason
        )
    duration_s = time.monotonic() - begin_s
    facts = found.facts
    with tempfile.TemporaryDirectory() as folder:
        file = found.save(Path(folder) / "graph.forerun")
        devices = facts.world_size if facts.world_size > 1 else None
        own = forerun.predict(
            f"{CAPTURE_PREFIX}{file}", device=case.device, loader_ms=0.0, num_devices=devices
        )
    spec = None
    if case.model:
        spec = forerun.predict(
            case.model,
            device=case.device,
            batch_size=case.batch_size,
            convolution_precision=case.truth.convolutions or None,
            **case.settings,
        )
    return CapturedCase(
        name=case.name,
        outcome=facts.way,
        is_expected=not case.refused,
        wrong=tuple(
            f"{name} {got}, not {asked}"
            for name, got, asked in zip(_FACTS, _found(facts), _asked(case), strict=True)
            if got != asked
        ),
        any_batch=found.graph.only_batch_size is None,
        duration_s=duration_s,
        step_s=_value(own.step_time_s),
        spec_step_s=_value(spec.step_time_s) if spec else None,
        measured_step_s=case.measured_step_s,
        memory_bytes=_value(own.peak_memory_bytes),
        spec_memory_bytes=_value(spec.peak_memory_bytes) if spec else None,
    )


_FACTS = (
    "samples", "micro-steps", "updates", "precision", "convolutions", "compile", "EMA", "steps of an epoch", "epochs",
    "steps", "validation", "checkpoints",
)  # fmt: skip


def _found(facts: CaptureFacts) -> tuple[object, ...]:
    own = facts.precision if facts.precision in ("fp32", "tf32") else ""
    has_epochs = facts.steps_per_epoch is not None
    return (
        facts.batch_size, facts.num_micro_steps, sum(part.num_uses for part in facts.optimizers), facts.precision,
        facts.convolution_precision or own, facts.compile, facts.averages, facts.steps_per_epoch,
        facts.epochs if has_epochs else None, None if has_epochs else facts.max_steps,
        *("" if pause is None else pause.words for pause in (facts.validation, facts.checkpoints)),
    )  # fmt: skip


def _asked(case: Case) -> tuple[object, ...]:
    return (case.batch_size, case.num_micro_steps, case.num_optimizers, *astuple(case.truth))


def _value(found: Interval | None) -> float | None:
    return None if found is None else found.value


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def markdown_of(found: Sequence[CapturedCase]) -> str:
    """The table of the study."""
    header = (
        "script", "captured", "all facts right", "any batch", "took", "step", "by specification", "memory",
        "by specification",
    )  # fmt: skip
    rows = [
        (
            case.name,
            case.outcome,
            "" if case.wrong is None else "; ".join(case.wrong) or "yes",
            "" if case.any_batch is None else "yes" if case.any_batch else "no",
            _cell(case.duration_s, lambda value: f"{value:.0f} s"),
            _cell(case.step_s, lambda value: f"{value * 1e3:.4g} ms"),
            _beside(case.step_s, case.spec_step_s, lambda value: f"{value * 1e3:.4g} ms")
            or _beside(case.step_s, case.measured_step_s, lambda value: f"measured {value * 1e3:.4g} ms"),
            _cell(case.memory_bytes, lambda value: f"{value * 1e-9:.4g} GB"),
            _beside(case.memory_bytes, case.spec_memory_bytes, lambda value: f"{value * 1e-9:.4g} GB"),
        )
        for case in found
    ]
    captured = [case for case in found if case.wrong is not None]
    right = sum(not case.wrong for case in captured)
    return markdown_table(header, rows) + f"\n{right} of {len(captured)} captures have every fact right.\n"


def _cell(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)


def _beside(value: float | None, other: float | None, text: Callable[[float], str]) -> str:
    if value is None or other is None:
        return ""
    return f"{text(other)} ({100 * (value / other - 1):+.1f} %)"
