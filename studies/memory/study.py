"""Out-of-memory verdicts with families held out, and on transformers nobody fitted to.

A script that walks down a list of batch sizes until one runs leaves a bracket: the largest batch that ran and
the next larger one, which failed. A method of prediction hits the bracket if it says "runs" for the first and
"fails" for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.base.errors import ForerunError
from forerun.base.units import GIB
from forerun.cost.memory.peak import estimate_memory, memory_constants, plans_for_setup, visible_memory_bytes
from forerun.cost.memory.replay import smallest_limit_bytes
from forerun.cost.memory.stream import live_peak_bytes
from forerun.evidence.fitting.evaluation import family_folds
from forerun.evidence.fitting.measured_steps import is_measured_network
from forerun.evidence.records.step_record import StepRecord
from forerun.graph.graph import Graph
from forerun.question.devices import find_device
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace
from studies.tables.public import public_table
from studies.tables.transformers import read_neusight_e2e, transformer_requests


def accelerate_rule_bytes(num_parameters: int) -> float:
    """Memory by the common rule: 16 bytes per parameter, activations left out [bytes].

    4 for the weight, 4 for its gradient and 8 for the two moments of Adam, all in fp32. A baseline only.

    Source: Hugging Face Accelerate, "Model memory estimator" (total for training with Adam: 4 x model size).
    """
    return 16.0 * num_parameters


Floats = npt.NDArray[np.float64]

_RTX_3090_VISIBLE_BYTES = 24_268 * 1024**2
_ERA = (1, 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """Smallest allocator limits of a run that passed and of the next larger one, which failed, by each method.

    Attributes:
        record: The published run.
        ran_bytes: By method, bytes needed at the batch that ran.
        failed_bytes: By method, bytes needed at the batch that failed; None if none was tried.
    """

    record: StepRecord
    ran_bytes: dict[str, float]
    failed_bytes: dict[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictShares:
    """Shares of right verdicts of a method, as fractions.

    Attributes:
        num_rows: Rows, each with a batch that ran.
        num_bracketed: Rows that also have a batch that failed.
        bracket_hit: Share of the bracketed rows with both verdicts right.
        false_out_of_memory: Share of all rows whose batch that ran was said to fail.
        missed_out_of_memory: Share of the bracketed rows whose batch that failed was said to run.
        verdicts_right: Share of all verdicts that were right.
    """

    num_rows: int
    num_bracketed: int
    bracket_hit: float
    false_out_of_memory: float
    missed_out_of_memory: float
    verdicts_right: float


def bracket_study(
    records: Sequence[StepRecord], report: Callable[[int, int], None] | None = None
) -> list[Bracket]:
    """Memory needed at both ends of each bracket, by the replay, by live bytes and by the common rule.

    Left out are records whose model today's library cannot build, or builds as another network than the one
    that was measured.
    """
    found = []
    for index, record in enumerate(records, start=1):
        try:
            graph = trace(record.run.model, record.run.setup)
        except ForerunError:
            continue
        if not is_measured_network(record, graph):
            continue
        setup = record.training_setup()
        failed = record.next_larger_batch_failed
        found.append(
            Bracket(
                record=record,
                ran_bytes=_needed_bytes(graph, setup, record.batch_size_per_device),
                failed_bytes=None if failed is None else _needed_bytes(graph, setup, failed),
            )
        )
        if report is not None:
            report(index, len(records))
    return found


def _needed_bytes(graph: Graph, setup: TrainingSetup, batch_size: int) -> dict[str, float]:
    constants = memory_constants(find_device("rtx-3090"), torch_version=_ERA)
    if graph.only_batch_size is not None and graph.only_batch_size != batch_size:
        return {}
    at_batch = replace(setup, batch_size_per_device=batch_size)
    (plan,) = plans_for_setup(graph, at_batch, constants)
    return {
        "replay": float(smallest_limit_bytes(plan, batch_size)),
        "live bytes": float(live_peak_bytes(graph.memory, batch_size)),
        "16 bytes per parameter": accelerate_rule_bytes(graph.num_parameters),
    }


def bracket_shares(brackets: Sequence[Bracket], method: str, num_folds: int = 5) -> VerdictShares:
    """Shares of right verdicts, the one constant (the card's usable memory) fitted to the other families.

    With fewer families than folds each family is a fold.
    """
    usable = [
        b for b in brackets if method in b.ran_bytes and (b.failed_bytes is None or method in b.failed_bytes)
    ]
    ran = np.asarray([b.ran_bytes[method] for b in usable])
    failed = np.asarray([np.inf if b.failed_bytes is None else b.failed_bytes[method] for b in usable])
    says_ran, says_failed = np.empty(len(usable), dtype=bool), np.empty(len(usable), dtype=bool)
    records = [b.record for b in usable]
    for split in family_folds(records, min(num_folds, len({record.family for record in records}))):
        limit = (
            _RTX_3090_VISIBLE_BYTES
            if method.startswith("16 ")
            else best_limit(ran[split.fit], failed[split.fit])
        )
        says_ran[split.test] = ran[split.test] <= limit
        says_failed[split.test] = failed[split.test] > limit
    bracketed = np.isfinite(failed)
    right = int(says_ran.sum() + says_failed[bracketed].sum())
    return VerdictShares(
        num_rows=len(usable),
        num_bracketed=int(bracketed.sum()),
        bracket_hit=float((says_ran & says_failed)[bracketed].mean()),
        false_out_of_memory=float((~says_ran).mean()),
        missed_out_of_memory=float((~says_failed)[bracketed].mean()),
        verdicts_right=right / (len(usable) + int(bracketed.sum())),
    )


def best_limit(ran: Floats, failed: Floats) -> float:
    """The limit with most right verdicts; the middle one of equals [bytes]."""
    candidates = np.linspace(20 * GIB, _RTX_3090_VISIBLE_BYTES, 400)
    right = [(ran <= limit).sum() + (np.isfinite(failed) & (failed > limit)).sum() for limit in candidates]
    best = candidates[np.asarray(right) == max(right)]
    return float(best[len(best) // 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerVerdicts:
    """Counts of verdicts on transformers: all, right, and right by the rule of accelerate."""

    num_verdicts: int
    num_right: int
    num_accelerate_right: int


def transformer_fit_study(folder: Path) -> TransformerVerdicts:
    """Verdicts on ``neusight_memory_fit`` with the shipped constants; nothing is fitted to this table.

    Models that no trace exists for (a mixture of experts that routes by values) are left out.
    """
    table = public_table(folder, "neusight_memory_fit")
    rows = {
        (row.record.model.removeprefix("hf:"), "train" if row.record.phase == "train" else "infer"): row
        for row in read_neusight_e2e(folder)
        if not row.record.compile
    }
    predicted, actual, by_rule = [], [], []
    for entry in table.to_dict("records"):
        row = rows.get((entry["model"], entry["mode"]))
        if row is None:
            continue
        setup = replace(row.record.training_setup(), batch_size_per_device=int(entry["batch_size"]))
        try:
            graph = trace(transformer_requests([row])[0], setup)
        except ForerunError:
            continue
        device = find_device(str(entry["gpu"]).lower())
        needed = estimate_memory(graph, setup, memory_constants(device, torch_version=(2, 1)))
        visible = visible_memory_bytes(device)
        predicted.append(needed.peak_bytes <= visible)
        by_rule.append(accelerate_rule_bytes(graph.num_parameters) <= visible)
        actual.append(bool(entry["fits"]))
    said, was, rule = np.asarray(predicted), np.asarray(actual), np.asarray(by_rule)
    return TransformerVerdicts(
        num_verdicts=len(was),
        num_right=int((said == was).sum()),
        num_accelerate_right=int((rule == was).sum()),
    )
