"""Turns exceptions of PyTorch and of a user's model into one clear sentence."""

from __future__ import annotations

import inspect
import re
import traceback
from pathlib import Path

import torch

from forerun.base.errors import ForerunError, InvalidSetupError, ModelBuildError, TraceError
from forerun.tracing.models.built_model import BuiltModel

_TOO_SMALL = re.compile(
    r"output size is too small|kernel size can't be greater than actual input size|"
    r"kernel size should be|padded input size per channel|expected more than 1 value per channel|"
    r"calculated output size|smaller than kernel|non-empty 3D or 4D|non-zero size|input size to be non-empty|"
    r"padding size should be less than|spatial dimensions to be non-zero",
    re.IGNORECASE,
)
_MISMATCH = re.compile(
    r"shapes cannot be multiplied|same reduction dim|to have \d+ channels|is invalid for input of size|"
    r"must match the (size|existing)|"
    r"size of tensor a|sizes of tensors must match|doesn't match model|doesn't match|expected input|"
    r"normalized_shape|should be divisible|must be divisible|not divisible|size mismatch|weight of size|"
    r"input\.size\(-1\) must be equal|expected \dD|got input of size|unflatten|out of bounds for dimension|"
    r"incompatible dimensions|cannot be broadcast|not aligned|index out of range|dimension out of range",
    re.IGNORECASE,
)
_DATA_DEPENDENT = re.compile(
    r"cannot be called on meta tensors|data-dependent|aten::_local_scalar_dense|"
    r"aten::(nonzero|masked_select|_unique2?|unique_\w+|bincount|equal)\b|"
    r"nonzero.*meta|cannot copy out of meta tensor|boolean value of tensor|numpy\(\) on tensor|"
    r"can't convert meta device|number of output elements|repeat_interleave",
    re.IGNORECASE,
)
_TORCH = Path(torch.__file__).parent
_FORERUN = Path(__file__).parents[1]


def explain_failure(exc: BaseException, built: BuiltModel) -> ForerunError:
    """The error to raise if a step of a built model could not run.

    Args:
        exc: Exception raised while the model ran on meta tensors.
        built: Model that was run.

    Returns:
        ``InvalidSetupError`` for sizes the model cannot take, ``ModelBuildError`` for an incomplete model or one
        that takes other inputs, ``TraceError`` for everything else. Raise it ``from exc``.
    """
    if isinstance(exc, ForerunError):
        return exc
    text = str(exc)
    shape = "x".join(map(str, built.input_shape))
    if isinstance(exc, NotImplementedError) and "forward" in text and "missing the required" in text:
        return ModelBuildError(f"{built.name} is not a complete model: its class defines no forward()")
    if isinstance(exc, TypeError) and (inputs := _explain_inputs(text, built)):
        return inputs
    if _is_data_dependent(exc, text):
        return TraceError(
            f"{built.name} decides what to compute by the values of a tensor{place_of(exc)}, and a step is "
            f"traced without values ({first_line(exc)}); make that part depend on shapes only, or predict "
            "the part of the model that does"
        )
    if _TOO_SMALL.search(text):
        return InvalidSetupError(
            f"inputs of {shape} are too small for {built.name}: {first_line(exc)}; give a larger image_size, "
            "input_shape or sequence_length"
        )
    if isinstance(exc, (RuntimeError, ValueError, AssertionError, IndexError)) and _is_about_sizes(exc, text):
        return InvalidSetupError(
            f"{built.name} cannot take inputs of {shape}: {first_line(exc)}{place_of(exc)}; "
            "give the input_shape (or image_size, sequence_length) it was made for"
        )
    return TraceError(
        f"the step of {built.name} raised {type(exc).__name__}{place_of(exc)}: {first_line(exc)}; "
        "the model must run a forward and backward pass on tensors of the 'meta' device"
    )


def first_line(exc: BaseException) -> str:
    """The first line of an exception's text, or its type if the text is empty."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    text = lines[0] if lines else type(exc).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def place_of(exc: BaseException) -> str:
    """`` (file.py, line 12)`` for the innermost line of the model's own code; empty without such a line."""
    for frame in reversed(traceback.extract_tb(exc.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_FORERUN):
            return ""
        if not path.is_relative_to(_TORCH) and not frame.filename.startswith("<"):
            return f" ({path.name}, line {frame.lineno})"
    return ""


def _is_data_dependent(exc: BaseException, text: str) -> bool:
    if type(exc).__name__ in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return True
    return isinstance(exc, (RuntimeError, NotImplementedError, TypeError)) and bool(
        _DATA_DEPENDENT.search(text)
    )


def _is_about_sizes(exc: BaseException, text: str) -> bool:
    return bool(_MISMATCH.search(text)) or (isinstance(exc, AssertionError) and "size" in text.lower())


def _explain_inputs(text: str, built: BuiltModel) -> ForerunError | None:
    missing = re.search(r"missing (\d+) required (?:positional|keyword-only) arguments?: (.+)", text)
    extra = re.search(r"takes (?:from \d+ to )?(\d+) positional arguments? but (\d+)", text)
    if "forward" not in text or not (missing or extra):
        return None
    remedy = "hand over a factory (file.py:factory) that returns (module, example_batch)"
    if missing:
        num_inputs = _num_inputs(built.module)
        return ModelBuildError(
            f"{built.name} takes {num_inputs} inputs and was given one tensor; also needed: "
            f"{missing[2]}; {remedy}"
        )
    assert extra is not None
    return ModelBuildError(
        f"{built.name} takes {int(extra[1]) - 1} inputs and was given {int(extra[2]) - 1}; {remedy}"
    )


def _num_inputs(module: torch.nn.Module) -> int:
    required = (p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty)
    return sum(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in required)
