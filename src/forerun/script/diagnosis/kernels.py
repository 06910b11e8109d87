"""Classes of kernels and operators by their names, in the words of a prediction's breakdown."""

from __future__ import annotations

import re
from functools import cache

COMMUNICATION = "gradient synchronisation"
CONVOLUTION, LINEAR, ATTENTION = "convolution", "linear", "attention and batched products"
COPIES, OPTIMIZER, ELEMENTWISE = "copies and casts", "optimizer", "element-wise and reductions"
PRODUCTS = (CONVOLUTION, LINEAR, ATTENTION)
"""Classes whose kernels can use matrix units."""

_KERNELS = (
    (COMMUNICATION, r"nccl|rccl|msccl|all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|symm_mem"),
    (OPTIMIZER, r"multi_tensor_apply|fused_?adam|fused_?lamb|fused_?sgd|adamw?_kernel"),
    (ATTENTION, r"flash|fmha|attention|sdpa|attn|softmax|\bmha|bmm"),
    ("recurrent layers", r"\b(rnn|lstm|gru)|elemwisernn|persist.*rnn"),
    (
        "normalisation",
        r"batch_?norm|bn_(fw|bw)|layer_?norm|group_?norm|rms_?norm|rowwise_?moments|gammabeta|welford",
    ),
    (COPIES, r"nchwtonhwc|nhwctonchw|direct_copy|copy_kernel|catarray|transpose|memcpy|permute|_cast"),
    (
        CONVOLUTION,
        r"conv(?!ert)|fprop|dgrad|wgrad|implicit_?gemm|winograd|scudnn|cudnn.*(tensorop|fft)|igemm",
    ),
    ("pooling and resizing", r"pool|upsample|interpolat"),
    ("embedding", r"embedding|indexselect|index_put"),
    (LINEAR, r"gemm|gemv|cublas|cutlass|nvjet|split_?k|wgmma|cijk_|_mm(_|$)|matmul|dot_kernel"),
)
_OPERATORS = (
    (COPIES, r"::(copy_|_to_copy|to|contiguous|clone|cat|stack)$"),
    (CONVOLUTION, r"conv"),
    (ATTENTION, r"bmm|softmax|attention"),
    ("recurrent layers", r"lstm|gru|rnn"),
    ("normalisation", r"norm"),
    ("pooling and resizing", r"pool|upsample"),
    ("embedding", r"embedding"),
    (LINEAR, r"::(linear|addmm|mm|matmul|mv|dot|addmv|_scaled_mm)"),
    (OPTIMIZER, r"_foreach|_fused_adam|_fused_sgd"),
)
_SIMPLE = re.compile(r"sgemm|scudnn|simt|dgemm|f32f32_f32f32|f64f64|fft2d|winograd3x3|gemmk1", re.I)
"""Names of products that run on the ordinary units; those of matrix units say tensorop, s16816, hmma or nvjet."""
_MATRIX = re.compile(
    r"tensorop|[hs]1688|[hs]16816|[hs]884|i16832|hmma|wgmma|gmma|nvjet|tf32|bf16bf16|f16f16|mfma", re.I
)
_NARROW = re.compile(r"_align[12](?!\d)")
_HALF = re.compile(r"fp16|bf16|half|_h_|hgemm|bfloat16", re.I)
_DOUBLE = re.compile(r"dgemm|d884|f64f64|<double", re.I)


@cache
def class_of_kernel(name: str) -> str:
    """Class of a kernel of a GPU by its name.

    >>> class_of_kernel("ampere_sgemm_128x64_nn"), class_of_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    ('linear', 'gradient synchronisation')
    """
    return _first(_KERNELS, name)


@cache
def class_of_operator(name: str) -> str:
    """Class of an operator of PyTorch by its name.

    >>> class_of_operator("aten::addmm"), class_of_operator("aten::mul_")
    ('linear', 'element-wise and reductions')
    """
    return _first(_OPERATORS, name)


def _first(rules: tuple[tuple[str, str], ...], name: str) -> str:
    return next((known for known, pattern in rules if re.search(pattern, name, re.I)), ELEMENTWISE)


@cache
def outside_matrix_units(name: str) -> str:
    """Reason for which a product runs outside the matrix units, or on them in small bites; empty if it does not.

    It is ``fp32``, ``fp64`` or ``alignment``: half precision runs on ordinary units where sizes are no multiples of 8.

    >>> outside_matrix_units("volta_fp16_sgemm_fp16_128x64_nn"), outside_matrix_units("ampere_s16816gemm_bf16_128x64")
    ('alignment', '')
    """
    if _DOUBLE.search(name):
        return "fp64"
    if _NARROW.search(name) and _MATRIX.search(name):
        return "alignment"
    if not _SIMPLE.search(name) or (_MATRIX.search(name) and "simt" not in name):
        return ""
    return "alignment" if _HALF.search(name) else "fp32"
