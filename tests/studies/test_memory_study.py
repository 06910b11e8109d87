"""Verdicts out of kept memory figures, and which runs they are drawn from; no model is traced."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.base.units import GIB
from forerun.evidence.records.step_record import StepRecord
from forerun.graph.graph import Graph, MemoryStream, OpTable
from forerun.question.setup import Phase, Precision
from studies.memory.study import (
    Bracket,
    accelerate_rule_bytes,
    best_limit,
    bracket_shares,
    is_measured_network,
)

_FAMILIES = ("resnet", "vgg", "volo", "nest", "hrnet", "xcit")


def _record(family="resnet", num_parameters=None, batch_size=64):
    return StepRecord(
        source="timm_train",
        row_id=f"{family} {batch_size}",
        model=f"timm:{family}",
        family=family,
        device="rtx-3090",
        batch_size_per_device=batch_size,
        step_time_s=0.1,
        precision=Precision.AMP,
        phase=Phase.TRAIN,
        num_parameters=num_parameters,
    )


def _graph(num_parameters):
    nothing, pairs = np.zeros(0, dtype=np.int64), np.zeros((0, 2))
    columns = dict.fromkeys(OpTable.__annotations__, nothing)
    affine = dict.fromkeys(("flops", "read_bytes", "write_bytes", "elements", "joined_bytes"), pairs)
    names = {"gemm": np.zeros((0, 4, 2)), "kernel_names": (), "module_names": ()}
    return Graph(
        model="timm:some",
        input_shape=(3, 224, 224),
        num_parameters=num_parameters,
        num_trainable_parameters=num_parameters,
        ops=OpTable(**{**columns, **affine, **names}),
        memory=MemoryStream(event=nothing, block=nothing, size_bytes=pairs, kind=nothing),
    )


def _bracket(family, ran_gib, failed_gib):
    failed = None if failed_gib is None else {"replay": failed_gib * GIB}
    return Bracket(record=_record(family), ran_bytes={"replay": ran_gib * GIB}, failed_bytes=failed)


@pytest.mark.parametrize(
    ("counted", "built", "same"),
    [
        (25_560_000, 25_557_032, True),  # resnet50, to the table's two decimals
        (1_590_000, 1_593_912, True),
        (828_409_973, 828_411_176, True),  # the table holds 32-bit floats
        (65_410_004, 65_428_680, False),  # tnt_b: the position embedding of pixels changed
        (15_410_000, 25_045_686, False),  # ecaresnext50t: two blocks a stage, today 3, 4, 6, 3
        (828_409_973, 88_791_336, False),  # ig_resnext101_32x48d under its wrong alias
    ],
)
def test_a_name_counts_only_if_it_still_builds_the_measured_network(counted, built, same):
    assert is_measured_network(_record(num_parameters=counted), _graph(built)) is same


def test_nothing_speaks_against_a_graph_where_no_parameters_were_counted():
    assert is_measured_network(_record(num_parameters=None), _graph(1))


def test_limit_between_all_that_ran_and_all_that_failed_makes_every_verdict_right():
    brackets = [_bracket(family, 20 + i / 10, 23.2 + i / 10) for i, family in enumerate(_FAMILIES)]
    shares = bracket_shares(brackets, "replay", num_folds=3)
    assert (shares.num_rows, shares.num_bracketed) == (6, 6)
    assert shares.bracket_hit == shares.verdicts_right == 1
    assert shares.false_out_of_memory == shares.missed_out_of_memory == 0


def test_errors_are_counted_on_the_side_they_fall():
    right = [_bracket(family, 21, 23.3) for family in _FAMILIES for _ in range(3)]
    brackets = [*right, _bracket("late", 15, 18), _bracket("early", 30, 40), _bracket("open", 12, None)]
    shares = bracket_shares(brackets, "replay", num_folds=3)
    assert shares.num_rows == 21
    assert shares.num_bracketed == 20
    assert shares.missed_out_of_memory == pytest.approx(1 / 20)
    assert shares.false_out_of_memory == pytest.approx(1 / 21)
    assert shares.bracket_hit == pytest.approx(18 / 20)
    assert shares.verdicts_right == pytest.approx(39 / 41)


def test_a_bracket_without_the_method_is_no_row():
    absent = replace(_bracket("vgg", 21, 23), ran_bytes={}, failed_bytes={})
    brackets = [absent, *(_bracket(family, 21, 23.3) for family in _FAMILIES)]
    assert bracket_shares(brackets, "replay", num_folds=3).num_rows == len(_FAMILIES)


def test_limit_is_the_middle_of_those_with_most_right_verdicts():
    limit = best_limit(np.array([21.0, 22.0]) * GIB, np.array([23.0, np.inf]) * GIB)
    assert limit == pytest.approx(22.5 * GIB, rel=2e-3)


def test_a_sample_of_few_families_has_one_fold_each():
    """MemTracker answers for a handful of rows only."""
    assert bracket_shares([_bracket(family, 21, 23.3) for family in _FAMILIES[:3]], "replay").num_rows == 3


def test_accelerate_rule_is_16_bytes_per_parameter():
    # ResNet-50: 25,557,032 parameters
    assert accelerate_rule_bytes(25_557_032) == 408_912_512
