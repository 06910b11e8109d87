"""Hand-made estimates for the tests of pages and commands."""

from __future__ import annotations

import dataclasses
from typing import Any

from forerun.prediction.estimate import (
    BreakdownPart,
    ErrorSources,
    Estimate,
    Interval,
    LayerTime,
    MemoryShare,
    Provenance,
)
from forerun.question.run import Run

GIB = 1024.0**3

FULL = Estimate(
    run=Run.of("torchvision:resnet50", device="a100-sxm4-40gb", dataset="imagenet", epochs=90),
    model="torchvision:resnet50",
    device="a100-sxm4-40gb",
    device_title="NVIDIA A100 SXM4 40GB",
    batch_size_per_device=32,
    precision="fp32",
    layout="nchw",
    compile=False,
    optimizer="sgd",
    phase="train",
    step_time_s=Interval(0.0452, 0.0391, 0.052),
    throughput_samples_per_s=Interval(708.0, 615.0, 818.0),
    epoch_time_s=Interval(1812.0, 1566.0, 2088.0),
    job_time_s=Interval(163_080.0, 140_940.0, 187_920.0),
    peak_memory_bytes=Interval(4.0 * GIB, 3.8 * GIB, 4.4 * GIB),
    cost_usd=Interval(85.6, 74.0, 98.7),
    energy_j=Interval(4.04e7, 1.0e7, 6.2e7),
    max_batch_size=Interval(391.0, 350.0, 410.0),
    fits="yes",
    breakdown=(
        BreakdownPart("convolution", 0.03),
        BreakdownPart("normalisation", 0.01),
        BreakdownPart("element-wise and reductions", 0.0047),
        BreakdownPart("optimizer", 0.0003),
        BreakdownPart("linear", 0.0002),
    ),
    bound_by="compute",
    provenance=Provenance.INTERPOLATED,
    error_sources=ErrorSources(unknown_system=0.15, cost_model=0.2),
    unsupported_ops=(),
    top_layers=(
        LayerTime("layer1.0.conv2", 0.0031, 0.069),
        LayerTime("layer1.1.conv2", 0.0029, 0.064),
        LayerTime("conv1", 0.0021, 0.046),
    ),
    memory_parts=(
        MemoryShare("activations", 2.5 * GIB),
        MemoryShare("CUDA context and libraries", 1.0 * GIB),
        MemoryShare("weights", 0.25 * GIB),
        MemoryShare("gradients", 0.25 * GIB),
    ),
    device_memory_bytes=40.0 * GIB,
    num_parameters=25_557_032,
    flops_per_sample=24.5e9,
    num_trainable_parameters=25_557_032,
    tokens_per_s=None,
    tokens_per_s_per_device=None,
    mfu=Interval(0.38, 0.33, 0.44),
    hfu=Interval(0.38, 0.33, 0.44),
    num_steps=3_603_330,
    num_steps_per_epoch=40_037,
    notes=("the last step of an epoch has 15 samples",),
)

BARE = dataclasses.replace(
    FULL,
    epoch_time_s=None,
    job_time_s=None,
    cost_usd=None,
    energy_j=None,
    peak_memory_bytes=None,
    max_batch_size=None,
    fits=None,
    memory_parts=(),
    top_layers=(),
    num_steps_per_epoch=None,
    provenance=Provenance.DATASHEET_ONLY,
    notes=(),
)


def changed(**values: Any) -> Estimate:
    """``FULL`` with some attributes replaced."""
    return dataclasses.replace(FULL, **values)
