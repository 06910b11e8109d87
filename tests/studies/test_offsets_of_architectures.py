"""Offsets of architectures: recovered from made rows, and on the rows of MIOpen within the interval."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.cost.time.features import Point
from forerun.cost.time.step_times import step_times
from forerun.evidence.fitting.op_time_fit import OperatorSample
from forerun.graph.graph import OpClass
from forerun.question.devices import find_device
from forerun.question.setup import Precision, TrainingSetup
from op_models import no_offsets, ops_named, shipped_weights
from studies.optime.fit import with_offsets_of_architectures, without_bound_boards
from studies.tables.operators import OperatorTable, read_amd_convolutions

FOLDER = os.environ.get("FORERUN_REFERENCE_DATA", "")
AS_TRAINED = {Precision.FP16: Precision.AMP, Precision.BF16: Precision.AMP_BF16}


def kernel_times(weights, ops, device, precision):
    point = Point(device=device, setup=TrainingSetup(precision=AS_TRAINED.get(precision, precision)))
    return step_times(ops, [point], weights, no_offsets(weights), with_kernels=True).kernel_s[0] / ops.count


def test_an_offset_is_recovered_and_reaches_its_architecture_alone():
    ops = ops_named("resnet18", "fp32")
    ops = ops.take(np.flatnonzero(ops.op_class == OpClass.CONV))
    ops = replace(ops, count=np.ones(len(ops)))
    start, device, other = shipped_weights(), find_device("rx-7900-xtx"), find_device("a10")
    before = kernel_times(start, ops, device, Precision.FP32)
    sample = OperatorSample(
        ops=ops,
        point=Point(device=device, setup=TrainingSetup()),
        time_s=1.5 * before,
        weight=np.ones(len(ops)),
    )
    table = OperatorTable(source="made", device=device, operators=("conv",) * len(ops), sample=sample)
    found = with_offsets_of_architectures(start, [table])
    column = 2 * len(OpClass) + OpClass.CONV
    assert found.offsets_of_kernels(device)[:, column] == pytest.approx(np.log(1.5), rel=1e-5)
    for one in (start, found):
        assert kernel_times(one, ops, other, Precision.FP32) == pytest.approx(
            kernel_times(start, ops, other, Precision.FP32)
        )


def test_a_board_at_its_power_limit_does_not_speak_for_its_architecture():
    shipped, column = shipped_weights(), 2 * len(OpClass) + OpClass.LINEAR
    row = shipped.architectures.index("ada")
    with_share = []
    for network in shipped.networks:
        shared = network.architecture_offsets.copy()
        shared[row, column] += 0.1
        with_share.append(replace(network, architecture_offsets=shared))
    start = replace(shipped, networks=tuple(with_share))
    found = without_bound_boards(start)
    limited, other = find_device("l4"), find_device("rtx-4080")
    assert found.offsets_of_kernels(limited) == pytest.approx(start.offsets_of_kernels(limited), abs=1e-6)
    assert np.all(start.offsets_of_kernels(other)[:, column] > 0.05)
    assert found.offsets_of_kernels(other)[:, column] == pytest.approx(0.0, abs=1e-6)
    # A die that is measured at full clock speaks for its boards as before.
    volta = find_device("titan-v")
    assert found.offsets_of_kernels(volta) == pytest.approx(start.offsets_of_kernels(volta))


@pytest.mark.reference
@pytest.mark.skipif(not FOLDER, reason="FORERUN_REFERENCE_DATA names no folder of public tables")
def test_sums_of_twenty_convolutions_of_an_mi300x_lie_within_a_factor():
    weights, random = shipped_weights(), np.random.default_rng(0)
    for table in read_amd_convolutions(Path(FOLDER)):
        if table.device.name != "mi300x":
            continue
        precision, measured = table.sample.point.setup.precision, table.sample.time_s
        predicted = kernel_times(weights, table.sample.ops, table.device, precision)
        assert abs(np.median(np.log(measured / predicted))) < 0.1
        rows = random.integers(0, len(measured), (400, 20))
        errors = np.log(measured[rows].sum(axis=1) / predicted[rows].sum(axis=1))
        assert np.mean(np.abs(errors) < np.log(1.7)) > 0.9
