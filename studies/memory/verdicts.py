"""Out-of-memory verdicts against runs whose limit is known from both sides.

A script that walks down a list of batch sizes until one runs leaves a bracket: the largest batch that ran and
the next larger one, which failed. A method of prediction hits the bracket if it says "runs" for the first and
"fails" for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from forerun.base.errors import InvalidSetupError
from forerun.cost.memory.constants import MemoryConstants
from forerun.cost.memory.peak import estimate_memory, step_runs
from forerun.graph.graph import Graph
from forerun.question.setup import TrainingSetup

_ACCELERATE_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketRow:
    """A published run at the edge of a device's memory.

    Attributes:
        model: Key of the model's graph.
        setup: The training setup; its batch size is the largest that ran.
        failed_batch_size: The next larger batch, which ran out of memory; None if none was tried.
    """

    model: str
    setup: TrainingSetup
    failed_batch_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BracketShares:
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


RunsAtBatch = Callable[[BracketRow, int], bool]
"""A method under test: whether the row's model is predicted to run at a batch size."""


def bracket_verdicts(rows: Iterable[BracketRow], runs_at_batch: RunsAtBatch) -> BracketShares:
    """Compare a method's verdicts with the runs.

    Args:
        rows: Published runs, at least one.
        runs_at_batch: The method.
    """
    # (said to run where it ran, said to fail where it failed; None if no batch failed)
    verdicts = [
        (
            runs_at_batch(row, row.setup.batch_size_per_device),
            None if row.failed_batch_size is None else not runs_at_batch(row, row.failed_batch_size),
        )
        for row in rows
    ]
    if not verdicts:
        raise ValueError("shares need at least one row, got none")
    bracketed = [(ran, failed) for ran, failed in verdicts if failed is not None]
    num_right = sum(ran for ran, _ in verdicts) + sum(failed for _, failed in bracketed)
    return BracketShares(
        num_rows=len(verdicts),
        num_bracketed=len(bracketed),
        bracket_hit=_share(ran and failed for ran, failed in bracketed),
        false_out_of_memory=_share(not ran for ran, _ in verdicts),
        missed_out_of_memory=_share(not failed for _, failed in bracketed),
        verdicts_right=num_right / (len(verdicts) + len(bracketed)),
    )


def runs_by_replay(
    graphs: Mapping[str, Graph], constants: MemoryConstants, device_memory_bytes: float
) -> RunsAtBatch:
    """The model of this package: one replay at the device's limit.

    Args:
        graphs: Graph of each model.
        constants: Constants of the device and software of the rows.
        device_memory_bytes: Memory that a program finds on the device [bytes].
    """

    def runs(row: BracketRow, batch_size: int) -> bool:
        setup = replace(row.setup, batch_size_per_device=batch_size)
        return step_runs(graphs[row.model], setup, device_memory_bytes, constants)

    return runs


def runs_by_live_bytes(
    graphs: Mapping[str, Graph], constants: MemoryConstants, device_memory_bytes: float
) -> RunsAtBatch:
    """Baseline: live bytes times a factor plus the overhead, no allocator.

    Args:
        graphs: Graph of each model.
        constants: Constants of the device and software of the rows.
        device_memory_bytes: Memory that a program finds on the device [bytes].
    """

    def runs(row: BracketRow, batch_size: int) -> bool:
        setup = replace(row.setup, batch_size_per_device=batch_size)
        estimate = estimate_memory(graphs[row.model], setup, constants, by_replay=False)
        return estimate.peak_bytes <= device_memory_bytes

    return runs


def runs_by_accelerate_rule(graphs: Mapping[str, Graph], device_memory_bytes: float) -> RunsAtBatch:
    """Baseline: 16 bytes per parameter, whatever the batch.

    Args:
        graphs: Graph of each model.
        device_memory_bytes: Memory that a program finds on the device [bytes].
    """

    def runs(row: BracketRow, _batch_size: int) -> bool:
        return accelerate_rule_bytes(graphs[row.model].num_parameters) <= device_memory_bytes

    return runs


def _share(outcomes: Iterable[bool]) -> float:
    counted = list(outcomes)
    return sum(counted) / len(counted) if counted else float("nan")


def accelerate_rule_bytes(
    num_parameters: int, *, bytes_per_parameter: float = _ACCELERATE_BYTES_PER_PARAMETER
) -> float:
    """Memory by the common rule: 16 bytes per parameter, activations left out [bytes].

    4 for the weight, 4 for its gradient and 8 for the two moments of Adam, all in fp32. A baseline only.

    Source: Hugging Face Accelerate, "Model memory estimator" (total for training with Adam: 4 x model size).
    """
    if num_parameters < 0:
        raise InvalidSetupError(f"a model has zero or more parameters, got {num_parameters}")
    return num_parameters * bytes_per_parameter
