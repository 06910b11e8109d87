"""Constants and equations of the op-level model that its fit (torch) and its evaluation (NumPy) share.

A kernel with work C and traffic D [s], and a step of kernels t_i that take the host h_i to launch, last

    t = (C^4 + D^4)^(1/4) + 12 us sigmoid(latency of its class and part + u_2)
    step = (T^6 + H^6)^(1/6) + what the loop adds,    T = sum t_i,    H = c_0 + sum h_i

``busy_times`` has C and D, ``product_law`` products and attention, ``features`` L2 and Winograd; u is the network's.
``xp`` is the module of the arrays, ``numpy`` or ``torch``: both have the functions that are used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.graph.graph import OpClass, StepPart

__all__ = [
    "CAP_LATENCY_S",
    "CLASS_GROUPS",
    "GROUP_OF_CLASS",
    "LAW_CLASSES",
    "MAX_EFFICIENCY",
    "MAX_LATENCY_S",
    "MIN_MEMORY_EFFICIENCY",
    "NUM_FORMATS",
    "NUM_GROUPS",
    "NUM_LATENTS",
    "NUM_PAIRS",
    "SMOOTH_OP",
    "SMOOTH_STEP",
    "KernelTerms",
    "busy_times",
]

SMOOTH_OP = 4.0
"""Power of the smooth maximum of a kernel's compute and memory time."""

SMOOTH_STEP = 6.0
"""Power of the smooth maximum of a step's device and host time."""

MAX_LATENCY_S = 12e-6
"""Largest latency of a kernel on the device [s]."""

MAX_EFFICIENCY = 1.6
"""Above one, for Winograd convolutions do fewer FLOP than direct ones; what is certain bounds it (``least`` times)."""

MIN_MEMORY_EFFICIENCY = 0.1
"""Smallest memory efficiency, so that kernels unlike those of the fit do not get almost no bandwidth."""

CAP_LATENCY_S = 25e-6
"""Time that even the smallest kernel may take on top of the cap times its roofline time [s]."""

LAW_CLASSES = (OpClass.LINEAR, OpClass.BMM, OpClass.ATTENTION)
"""Classes whose time is a law of tiles and waves times one factor; the network has no say in it."""

NUM_FORMATS = 3
"""Arithmetic of a kernel: 0 two-byte operands, 1 TF32, 2 anything else."""

NUM_LATENTS = 4
"""Offsets of a measuring system: of the logs of its compute, memory and host time and of what its loop adds."""

NUM_PAIRS = len(OpClass) * len(StepPart)

CLASS_GROUPS = (
    (OpClass.CONV,),
    (OpClass.DEPTHWISE_CONV, OpClass.GROUPED_CONV),
    (OpClass.LINEAR, OpClass.RECURRENT),
    (OpClass.BMM, OpClass.ATTENTION),
    (OpClass.BATCH_NORM, OpClass.LAYER_NORM, OpClass.GROUP_NORM, OpClass.SOFTMAX),
)
"""Classes that a device or an architecture runs alike faster or slower; the rest, which streams, is one more group."""

NUM_GROUPS = len(CLASS_GROUPS) + 1


def _group_of_class() -> Any:
    groups = np.full(len(OpClass), len(CLASS_GROUPS))
    for number, classes in enumerate(CLASS_GROUPS):
        groups[list(classes)] = number
    return groups


GROUP_OF_CLASS = _group_of_class()
"""Group of each class, (number of classes,)."""


@dataclass(frozen=True, slots=True)
class KernelTerms:
    """Physical terms of kernels, arrays of one shape.

    Attributes:
        compute: Time of the work: by the law of tiles and waves for ``LAW_CLASSES``, else at the sustained peak.
        least_compute: Time below which no kernel does that work.
        memory: Time of the traffic at the full bandwidth of where it lies, memory or L2.
        is_law: Whether the class is one of ``LAW_CLASSES``, 1 or 0.
    """

    compute: Any
    least_compute: Any
    memory: Any
    is_law: Any


def sigmoid(xp: Any, values: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + xp.exp(-values))


def busy_times(
    xp: Any,
    terms: KernelTerms,
    u: tuple[Any, Any],
    law_factor: Any,
    log_compute: Any,
    log_memory: Any,
    is_bounded: bool = True,
) -> tuple[Any, Any]:
    """Time of each kernel's work and of its traffic, in the unit of the terms.

    compute = max(least, C c e^(log_compute)), with c the law's factor, or 1 / (1.6 sigmoid(u_0));
    memory = M e^(max(0, log_memory - log(e_m))), e_m = 0.1 + 0.9 sigmoid(u_1), and 0.85 for the law's classes.

    Args:
        xp: Module of the arrays.
        terms: What physics says.
        u: (u_0, u_1) of the network; of no account where ``is_law``.
        law_factor: Log of the law's factor.
        log_compute: Log offsets of device, architecture and system for the work.
        log_memory: The same for the traffic.
        is_bounded: Whether no kernel beats the datasheet; not so where a device's own measurements were fitted.
    """
    efficiency = MAX_EFFICIENCY * sigmoid(xp, u[0])
    log_cost = terms.is_law * law_factor - (1.0 - terms.is_law) * xp.log(efficiency)
    compute = terms.compute * xp.exp(log_cost + log_compute)
    if is_bounded:
        compute = xp.maximum(compute, terms.least_compute)
    memory_efficiency = MIN_MEMORY_EFFICIENCY + (1.0 - MIN_MEMORY_EFFICIENCY) * sigmoid(xp, u[1])
    slowness = (1.0 - terms.is_law) * -xp.log(memory_efficiency) + terms.is_law * 0.16 + log_memory
    return compute, terms.memory * xp.exp(xp.clip(slowness, 0.0 if is_bounded else -6.0, 6.0))
