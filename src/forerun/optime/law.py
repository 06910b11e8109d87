"""Constants of the op-level model that its fit (torch) and its evaluation (NumPy) share."""

from __future__ import annotations

from forerun.graph.graph import OpClass

__all__ = [
    "CAP_LATENCY_S",
    "MAX_EFFICIENCY",
    "MAX_LATENCY_S",
    "MIN_MEMORY_EFFICIENCY",
    "SMOOTH_OP",
    "SMOOTH_STEP",
    "roofline_cap",
]

SMOOTH_OP = 4.0
"""Power of the smooth maximum of a kernel's compute and memory time."""

SMOOTH_STEP = 6.0
"""Power of the smooth maximum of a step's device and host time."""

MAX_LATENCY_S = 12e-6
"""Largest latency of a kernel on the device [s]."""

MAX_EFFICIENCY = 1.6
"""Largest efficiency; above one, because Winograd convolutions do fewer FLOP and caches move fewer bytes."""

MIN_MEMORY_EFFICIENCY = 0.1
"""Smallest memory efficiency, so that kernels unlike those of the fit do not get almost no bandwidth."""

CAP_LATENCY_S = 25e-6
"""Time that even the smallest kernel may take on top of the cap times its roofline time [s]."""


def roofline_cap(op_class: int, element_bytes: float) -> float:
    """Largest ratio of a kernel's predicted time to its roofline time.

    The network knows no bound where it extrapolates: a convolution of half a microsecond's work, smaller than any
    in its fit, came out at 1.5 ms. In the fit, kernels on 4-byte operands stay below 6 times (compute plus memory
    time), those on 2-byte operands below 30, except grouped convolutions, which cuDNN runs far slower still.
    """
    if element_bytes != 2:
        return 8.0
    return 100.0 if op_class == OpClass.GROUPED_CONV else 30.0
