"""Microbenchmarks of kernels, and the null step."""

import statistics

import pytest
from real_jobs import run_here

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.runners.kernel_runner import KERNELS
from forerun.evidence.records.measurement import JobKind

SIZES = {
    "gemm": {"m": 16, "n": 8, "k": 32},
    "convolution": {
        "batch_size": 2,
        "in_channels": 4,
        "out_channels": 8,
        "in_size": 9,
        "kernel": 3,
        "stride": 2,
    },
    "copy": {"num_bytes": 1 << 16},
    "launch": {"num_calls": 20},
}
WORK = {
    "gemm": ("flops_per_s", 2 * 16 * 8 * 32),
    "convolution": ("flops_per_s", 2 * 2 * 8 * 5 * 5 * 4 * 9),
    "copy": ("bytes_per_s", 2 << 16),
}


def test_every_kernel_is_tested_here():
    assert set(SIZES) == set(KERNELS)


@pytest.mark.parametrize("kernel", WORK)
def test_rates_are_work_over_the_median_time(kernel):
    found = run_here(JobKind.KERNEL, kernel, **SIZES[kernel])
    name, work = WORK[kernel]
    assert found.results == {name: pytest.approx(work / statistics.median(found.repetitions_s))}


def test_a_launch_is_told_per_call():
    found = run_here(JobKind.KERNEL, "launch", num_calls=20)
    assert found.results["seconds_per_call"] == pytest.approx(statistics.median(found.repetitions_s) / 20)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_formats(kernel, precision):
    asked = {**SIZES[kernel], "precision": precision}
    assert len(run_here(JobKind.KERNEL, kernel, **asked).repetitions_s) == 3


def test_a_convolution_in_channels_last():
    asked = {**SIZES["convolution"], "layout": "nhwc"}
    assert run_here(JobKind.KERNEL, "convolution", **asked).results["flops_per_s"] > 0


def test_the_null_step_costs_next_to_nothing():
    found = run_here(JobKind.NULL, "null")
    # Not a benchmark: a null step of more than this would hide whole layers.
    assert 0 <= min(found.repetitions_s) < 1e-3


@pytest.mark.parametrize(
    ("kernel", "changed", "told"),
    [
        ("gem", {}, "did you mean gemm"),
        ("gemm", {"m": "many"}, "whole number as m"),
        ("gemm", {"precision": "amp"}, "runs in one format"),
    ],
)
def test_kernels_that_cannot_be_meant(kernel, changed, told):
    with pytest.raises(InvalidSetupError, match=told):
        run_here(JobKind.KERNEL, kernel, **{**SIZES.get(kernel, {}), **changed})
