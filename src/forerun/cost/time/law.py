"""Constants and equations of the op-level model that its fit (torch) and its evaluation (NumPy) share.

A kernel with work C and traffic D [s], and a step of kernels t_i that take the host h_i to launch, last

    t = (C^4 + D^4)^(1/4) + 12 us sigmoid(latency of its class and part + u_2)
    step = (T^6 + H^6)^(1/6) + what the loop adds,    T = sum t_i,    H = c_0 + sum h_i

``busy_times`` has C and D, ``product_law`` products and attention, ``features`` L2 and Winograd; u is the network's.
``xp`` is the module of the arrays, ``numpy`` or ``torch``: both have the functions that are used here.

Last come bounds of kernels that fill a device: what large products sustain, and how slow large streams can be. The
shipped fit has seen few trainings in half precision throughout and no update of a billion weights. There it puts
streams at a tenth of the bandwidth and products above what anybody sustains. The bounds below are measured ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.graph.graph import OpClass, StepPart
from forerun.question.devices.device import Device, NumberFormat
from forerun.question.setup import FLASH_3_GAIN

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


CONVOLUTIONS = (OpClass.CONV, OpClass.DEPTHWISE_CONV, OpClass.GROUPED_CONV)


def least_launches_s(forward_s: float, backward_s: float) -> Any:
    """Least time of the host to launch a kernel of convolutions and batch norms, (classes and parts,) [s].

    Modules of Python launch forward, the engine of autograd backward. The fit starts at 8 us and stays there where
    kernels decide: hosts of steps of 12 images it books on kernels.

    Evidence: least time of a step over its launches on 13 machines, in inference 16 to 22 us on new desktops, 26 to 52
    on older ones, 38 to 60 on servers (``torchvision``, 12 images; NVIDIA/DeepLearningExamples, one), mean 36; in
    training 15 to 34, mean 24. Devices left out 15.2 to 14.4 %, sources 15.4 to 15.1 %.
    """
    found = np.zeros((len(OpClass), len(StepPart)))
    found[[*CONVOLUTIONS, OpClass.BATCH_NORM], :3] = forward_s, backward_s, backward_s
    return found.ravel()


LEAST_LAUNCH_S = least_launches_s(40e-6, 18e-6)


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
        # No weights may beat the hardware, whatever was fitted.
        compute = xp.maximum(compute, terms.least_compute)
    memory_efficiency = MIN_MEMORY_EFFICIENCY + (1.0 - MIN_MEMORY_EFFICIENCY) * sigmoid(xp, u[1])
    slowness = (1.0 - terms.is_law) * -xp.log(memory_efficiency) + terms.is_law * 0.16 + log_memory
    return compute, terms.memory * xp.exp(xp.clip(slowness, 0.0 if is_bounded else -6.0, 6.0))


LARGE_STREAM_BYTES = 8e6
"""Traffic of the smallest stream that the bounds hold for [bytes]."""

LARGE_UPDATE_BYTES = 250e6
"""Traffic of the smallest update that the bound holds for in any precision [bytes]."""

STREAM_LATENCY_S = 5e-6
"""Time that a stream may take on top [s]."""

LEAST_CONVOLVED_SHARE = 3e-4
"""Share of convolutions in the work from which on streams under autocast have no bound. All steps that the fit has
seen under autocast have more, if only in their first layer (0.05 % in SwinV2 of ``timm_train``). It books there what a
library does around convolutions, such as conversions of the memory order, on the streams beside them: bounded, steps
of ResNet-50 (``gpu_benchmarks``) come out 8 % too fast."""

_FULL_CLOCK_W = 2.3
"""Power limit per dense two-byte TFLOP/s at which large products would hold the clock of their peak [W]. Products of
4,096 and more in ``llm/gemm``, less the 1.10, 1.18 and 1.26 by which its short bursts beat the long runs of
``llm/matmul_peaks``, reach 0.83 of the peak on A100 (1.28 W), 0.68 on H100 (0.71 W) and 0.58 on B300 (0.49 W): 2.24,
2.25 and 2.51 W. Each device is found from the two others within 4 %."""
_POWER_EXPONENT = 1 / 3
"""Far above the lowest voltage power goes with the cube of the clock (P ~ f V^2, V ~ f)."""
_MEASURED_DIES = ("ampere", "hopper", "blackwell")

_SHARE_ON_CDNA = 0.58
"""Share of the dense two-byte peak that large products sustain on AMD's matrix units, whatever the power limit: 0.51 on
MI300X, 0.60 on MI325X, 0.62 on MI355X (``llm/matmul_peaks``, the best of a search over shapes). Nobody measured CDNA 1
and 2 in half precision; MI210's fp32 products on the same units reach 0.56 (``neusight_ops``)."""
LARGEST_SHARE_OF_PEAK = 0.97

_ATTENTION_COST = {"hopper": FLASH_3_GAIN}
"""PyTorch's fused attention is FlashAttention-2; ``llm/attention``, on which the law of attention rests, has
FlashAttention-3 on Hopper."""

ELEMENT_WISE = (
    OpClass.COPY,
    OpClass.ACTIVATION,
    OpClass.MUL,
    OpClass.ADD,
    OpClass.ELEMENTWISE,
    OpClass.DROPOUT,
    OpClass.CAST,
)
_LEAST_SHARE = {
    **dict.fromkeys(ELEMENT_WISE, 0.75),
    OpClass.OPTIMIZER: 0.7,
    OpClass.REDUCE: 0.5,
    OpClass.LAYER_NORM: 0.36,
    OpClass.SOFTMAX: 0.4,
}
"""Least share of the bandwidth. Element-wise kernels of ``neusight_ops`` above 0.1 ms reach 0.82 to 0.84 on seven
devices; PyTorch's layer norm 0.51 forward (A100) and 0.36 backward (H100), its softmax of 50,000 columns and more 0.40
(``llm/liger_kernels``: layer_norm, cross_entropy); softmax of short rows 0.66 (``neusight_ops``)."""

_FORWARD_NORM = 0.51
_SHORT_SOFTMAX = 0.66
_SHORT_ROW = 4096


def holds_under_autocast(op_class: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """True for streams with a bound under autocast, those that move single elements or sum them, (n,).

    Norms and softmaxes are left to the fit, which has seen those of many transformers under autocast.
    """
    found: npt.NDArray[np.bool_] = np.isin(op_class, (*ELEMENT_WISE, OpClass.REDUCE))
    return found


def sustained_products(device: Device) -> float | None:
    """Largest share of the peak that products of two-byte operands sustain; None for dies that nobody measured.

    share = min(1, p / p0)^(1/3), with p the power limit over the dense peak and p0 = 2.3 W per TFLOP/s. A board with a
    lower limit or more units has a lower clock: 0.68 on H100 SXM (700 W), 0.60 at 500 W, 0.59 on H100 PCIe (350 W, 756
    TFLOP/s). Measured on data-centre dies with stacked memory of three architectures.
    """
    peak = device.peak_flops_per_s.get(NumberFormat.BF16)
    is_measured = device.architecture in _MEASURED_DIES and device.has_stacked_memory
    if not is_measured or not peak or not device.power_limit_w:
        return None
    found: float = min(1.0, device.power_limit_w / (peak * 1e-12 * _FULL_CLOCK_W)) ** _POWER_EXPONENT
    return found


def largest_product_share(device: Device) -> float:
    """Largest share of the peak that products of two-byte operands reach: as measured on the die, 0.97 on any other."""
    if device.vendor == "amd" and device.architecture.startswith("cdna"):
        return _SHARE_ON_CDNA
    return sustained_products(device) or LARGEST_SHARE_OF_PEAK


def shortness(kernel_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """1 / (1 + t / 100 us) of launches that take t: systems differ most in their short kernels."""
    return np.reciprocal(1.0 + kernel_s / 100e-6)


def attention_cost(device: Device) -> float:
    """Time of PyTorch's fused attention over that of the library which was measured on the device's architecture."""
    return _ATTENTION_COST.get(device.architecture, 1.0)


def least_stream_share(op_class: int, step_part: int, width: float) -> float:
    """Least share of the bandwidth that a large kernel reaches; 0 for classes without a bound.

    Args:
        op_class: ``OpClass``.
        step_part: ``StepPart``.
        width: Columns of the rows that a norm or softmax works on.
    """
    kind = OpClass(int(op_class))
    if kind is OpClass.SOFTMAX and width <= _SHORT_ROW:
        return _SHORT_SOFTMAX
    if kind is OpClass.LAYER_NORM and step_part == StepPart.FORWARD:
        return _FORWARD_NORM
    return _LEAST_SHARE.get(kind, 0.0)
