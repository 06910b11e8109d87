"""Faults injected into traces, numbers and real runs, and the cause that ``forerun diagnose`` names first."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forerun
from forerun.base.errors import ForerunError
from forerun.script.diagnosis.diagnose import Diagnosis
from studies.markdown import markdown_table
from studies.scripts.slow_traces import FAULTS, write_trace

_SCRIPT = Path(__file__).parent / "own" / "slow_mlp.py"
_SPIN = "while True: pass"
_BUSY = "other programs on the device"
RUNS = {
    "loader sleeps": "data loader",
    "preprocess in Python": "data loader",
    "item of each sample": "synchronising calls",
    "host": "host and launches",
    "float64": "no matrix units in use",
    "compile": "recompilation",
    "thread": "too few threads",
    "busy": _BUSY,
}
"""Faults of the real script, with the cause that must be named first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault and the cause that was named first.

    Attributes:
        fault: The fault.
        kind: ``trace``, ``number`` or ``run``.
        expected, named: Cause that must be named, and the one that was.
        share: Share of the step that it is said to cost.
    """

    fault: str
    kind: str
    expected: str
    named: str
    share: float

    @property
    def is_right(self) -> bool:
        """Whether the cause is right."""
        return self.named == self.expected


def diagnosed_traces(seed: int = 1) -> Iterator[Injected]:
    """All faults of traces, in two networks."""
    with tempfile.TemporaryDirectory() as folder:
        for network in ("resnet", "gpt"):
            for fault, expected in FAULTS.items():
                found = forerun.diagnose(trace=write_trace(Path(folder), fault, network, seed))
                yield _injected(f"{network}: {fault}", "trace", expected, found)


def diagnosed_numbers() -> Iterator[Injected]:
    """Single numbers: as predicted, as with another precision, and with a device that is mostly idle."""
    run: dict[str, Any] = {"model": "torchvision:resnet50", "device": "a100-sxm4-40gb", "batch_size": 64}
    half, full = (forerun.predict(**run, precision=kind).step_time_s.value for kind in ("amp", "fp32"))
    for fault, expected, step_s, busy in (
        ("as predicted", "not slow", half, None),
        ("a tenth above", "not slow", 1.1 * half, None),
        ("autocast left out", "other settings than asked for", full, None),
        ("GPU at 30 %", "idle device", 3 * half, 0.3),
    ):
        found = forerun.diagnose(**run, precision="amp", measured=step_s, gpu_utilization=busy)
        yield _injected(fault, "number", expected, found)


def diagnosed_runs() -> Iterator[Injected]:
    """The faults of a real script on this machine's processor."""
    for fault, expected in RUNS.items():
        others = [
            subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(4 if expected == _BUSY else 0)
        ]
        try:
            command = [sys.executable, str(_SCRIPT), fault]
            yield _injected(fault, "run", expected, forerun.diagnose("mlp", command=command, num_steps=16))
        except ForerunError as error:
            yield Injected(fault=fault, kind="run", expected=expected, named=f"failed: {error}", share=0.0)
        finally:
            for other in others:
                other.kill()
                other.wait()


def _injected(fault: str, kind: str, expected: str, found: Diagnosis) -> Injected:
    # A machine that others use as well is said so first, and rightly; the fault is then the next cause.
    causes = [each for each in found.causes if expected == _BUSY or kind == "trace" or each.cause != _BUSY]
    first = (causes or found.causes)[0]
    return Injected(fault=fault, kind=kind, expected=expected, named=first.cause, share=first.share)


def table_of(found: list[Injected]) -> str:
    """The table, with the number of right answers."""
    rows = [
        [
            each.fault,
            each.kind,
            each.expected,
            "yes" if each.is_right else each.named,
            f"{100 * each.share:.0f} %",
        ]
        for each in found
    ]
    right = sum(each.is_right for each in found)
    head = f"{right} of {len(found)} causes named first are right ({100 * right / max(1, len(found)):.0f} %).\n\n"
    return head + markdown_table(["fault", "of a", "expected", "named first", "of a step"], rows)
