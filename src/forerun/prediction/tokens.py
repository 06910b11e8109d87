"""Tokens per second, and the shares of the devices' peak that a step uses."""

from __future__ import annotations

from typing import TypedDict

from forerun.graph.graph import Graph
from forerun.hardware.device import Device, NumberFormat
from forerun.prediction.estimate import Interval
from forerun.run.run import Run
from forerun.run.setup import Precision

__all__ = ["TokenFigures", "peak_of_precision", "tokens_and_use"]

_FORMATS = {
    Precision.FP32: NumberFormat.FP32,
    Precision.TF32: NumberFormat.TF32,
    Precision.AMP: NumberFormat.FP16,
    Precision.FP16: NumberFormat.FP16,
    Precision.AMP_BF16: NumberFormat.BF16,
    Precision.BF16: NumberFormat.BF16,
    Precision.FP8: NumberFormat.FP8,
}


class TokenFigures(TypedDict):
    """Figures of a step that depend on its work and its tokens; names as in ``Estimate``."""

    tokens_per_s: Interval | None
    tokens_per_s_per_device: Interval | None
    mfu: Interval | None
    hfu: Interval | None


def peak_of_precision(device: Device, precision: Precision) -> float | None:
    """Dense datasheet peak of the format in which a precision multiplies, None if the device has none [FLOP/s]."""
    return device.peak_flops_per_s.get(_FORMATS[precision])


def tokens_and_use(graph: Graph, run: Run, step_s: Interval) -> TokenFigures:
    """Tokens per second and the use of the peak of a step.

    MFU = work of the products that training needs / (step time x devices x peak of the precision); HFU counts what is
    computed again as well. The work is that of the traced products, so adapters count what they compute, and attention
    counts in full, without halving it for a causal mask (Chowdhery et al. 2022, appendix B).

    Args:
        graph: The traced step.
        run: The run.
        step_s: Time of its step, all micro-steps together [s].
    """
    number = run.cluster.num_devices
    tokens = None
    if graph.tokens_per_sample is not None:
        tokens = step_s.inverse(graph.tokens_per_sample * run.batch_size_global)
    batch = run.setup.batch_size_per_device
    passes_per_device = run.batch_size_global / batch / number  # below one where devices share a model
    useful, again = (
        passes_per_device * (constant + slope * batch)
        for constant, slope in (graph.model_flops, graph.recomputed_flops)
    )
    peak = peak_of_precision(run.cluster.device, run.setup.precision)
    is_known = peak is not None and useful > 0
    return TokenFigures(
        tokens_per_s=tokens,
        tokens_per_s_per_device=None if tokens is None else tokens.scaled(1 / number),
        mfu=step_s.inverse(useful / peak) if is_known and peak else None,
        hfu=step_s.inverse((useful + again) / peak) if is_known and peak else None,
    )
