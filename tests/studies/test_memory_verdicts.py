import math

import pytest

from forerun.base.errors import InvalidSetupError
from forerun.cost.memory.peak import MemoryConstants, max_batch_size
from forerun.question.setup import TrainingSetup
from memory_streams import MIB, graph_of, training_stream
from studies.memory.study import (
    BracketRow,
    accelerate_rule_bytes,
    bracket_verdicts,
    runs_by_accelerate_rule,
    runs_by_live_bytes,
    runs_by_replay,
)

CONSTANTS = MemoryConstants(
    overhead_bytes=0.0, live_factor=1.0, workspace_factor=0.0, uses_caching_allocator=True, source="for tests"
)
GRAPHS = {"chain": graph_of(training_stream(), num_parameters=MIB)}
MEMORY_BYTES = 300 * MIB


def row(ran, failed):
    return BracketRow(model="chain", setup=TrainingSetup(batch_size_per_device=ran), failed_batch_size=failed)


def test_shares_by_hand():
    # A method that says "runs" up to 10: hit, false out-of-memory, missed out-of-memory, one-sided and right.
    rows = [row(8, 12), row(12, 16), row(4, 8), row(2, None)]
    shares = bracket_verdicts(rows, lambda _, batch_size: batch_size <= 10)
    assert (shares.num_rows, shares.num_bracketed) == (4, 3)
    assert shares.bracket_hit == pytest.approx(1 / 3)
    assert shares.false_out_of_memory == pytest.approx(1 / 4)
    assert shares.missed_out_of_memory == pytest.approx(1 / 3)
    assert shares.verdicts_right == pytest.approx(5 / 7)


def test_without_brackets_their_shares_are_unknown():
    shares = bracket_verdicts([row(8, None)], lambda *_: True)
    assert math.isnan(shares.bracket_hit)
    assert shares.verdicts_right == 1.0


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="at least one row"):
        bracket_verdicts([], lambda *_: True)


@pytest.mark.parametrize("method", [runs_by_replay, runs_by_live_bytes])
def test_the_methods_find_the_edge_of_the_memory(method):
    edge = max_batch_size(
        GRAPHS["chain"], TrainingSetup(), MEMORY_BYTES, CONSTANTS, by_replay=method is runs_by_replay
    ).value
    runs = method(GRAPHS, CONSTANTS, MEMORY_BYTES)
    assert bracket_verdicts([row(edge - 5, edge + 8)], runs).bracket_hit == 1.0


def test_the_accelerate_rule_ignores_the_batch():
    runs = runs_by_accelerate_rule(GRAPHS, MEMORY_BYTES)
    assert bracket_verdicts([row(1, 10_000)], runs).bracket_hit == 0.0
    assert not runs_by_accelerate_rule(GRAPHS, 15 * MIB)(row(1, None), 1)


def test_accelerate_rule_is_16_bytes_per_parameter():
    # ResNet-50: 25,557,032 parameters
    assert accelerate_rule_bytes(25_557_032) == 408_912_512
    with pytest.raises(InvalidSetupError, match="zero or more"):
        accelerate_rule_bytes(-1)
