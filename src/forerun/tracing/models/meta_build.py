"""Builds modules on the meta device, or copies existing ones there, without holding a weight.

Inside ``building_on`` another device takes the place of meta, and weights have the values their library gives them:
the same sources of models then make networks that can run. Exceptions of PyTorch and of a user's model become one
clear sentence.
"""

from __future__ import annotations

import copy
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from forerun.base.errors import ForerunError, InvalidSetupError, ModelBuildError, TraceError
from forerun.base.tables import own_table
from forerun.tracing.models.built_model import BuiltModel

Built = TypeVar("Built")

_META = torch.device("meta")
_device: ContextVar[torch.device] = ContextVar("forerun_building_device", default=_META)

_OWN_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


@contextmanager
def building_on(device: torch.device) -> Iterator[None]:
    """Makes the functions of this module build and copy on a device, not on meta."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def building_device() -> torch.device:
    """Device on which tensors are made now."""
    return _device.get()


def is_building_on_meta() -> bool:
    """True while modules are built with shapes only."""
    return building_device().type == "meta"


class _HostLinspace(TorchFunctionMode):
    """Makes ``linspace`` real: many constructors read drop-path rates from it with ``.item()``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.linspace:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


class _NoRandomFill(TorchFunctionMode):
    """Leaves weights unwritten: their values are never read, and untouched pages take no memory."""

    _RANDOM = frozenset({torch.Tensor.uniform_, torch.Tensor.normal_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in self._RANDOM else func(*args, **(kwargs or {}))


_ASKED = {"isfinite": True, "isnan": False, "isinf": False}
_KEPT = frozenset(
    ("all", "any", "sum", "logical_not", "bitwise_not", "logical_or", "logical_and", "eq", "ne", "gt", "lt")
) | frozenset(f"__{name}__" for name in ("invert", "or", "and", "eq", "ne", "gt", "lt"))
_READ = frozenset({"item", "__bool__", "is_nonzero"})


class FiniteNumbers(TorchFunctionMode):
    """Answers a model that asks whether its numbers are finite: all are, as in a run that goes well.

    What is worked out of such answers alone, by the functions below, is known as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_known = bool(args) and isinstance(args[0], torch.Tensor) and args[0] in self._known
        if is_known and name in _READ:
            return self._known[args[0]].item()
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_meta:
            if name in _ASKED:
                self._known[result] = torch.tensor(_ASKED[name], device="cpu")
            elif is_known and name in _KEPT:
                values = [self._known.get(a) if isinstance(a, torch.Tensor) else a for a in args]
                if name in ("all", "any", "sum"):
                    values = values[:1]  # along an axis or along all
                if all(value is not None for value in values) and not (name == "sum" and values[0]):
                    self._known[result] = func(*values)
        return result


Answers = tuple[tuple[Any, str, Any], ...]
"""Functions of libraries that ask for values: their owner, name and replacement."""

_in_force: Answers = ()


@contextmanager
def answered(answers: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Functions of libraries that ask for values, replaced for a while."""
    global _in_force
    before, chosen = _in_force, tuple(answer for answer in answers if hasattr(answer[0], answer[1]))
    with ExitStack() as stack:
        for owner, name, new in chosen:
            stack.enter_context(patch.object(owner, name, new))
        _in_force = (*before, *chosen)
        try:
            yield
        finally:
            _in_force = before


def answers_now() -> Answers:
    """Answers in force, for a checkpoint that repeats a part of the forward pass after they were taken back."""
    return _in_force


def build_on_meta(make: Callable[[], Built]) -> Built:
    """The result of ``make()`` with every tensor it creates on the meta device.

    A constructor that reads values of tensors fails there and is run again on the CPU. A module still has to
    go through ``move_to_meta`` or ``meta_copy``, which replace its tensors on the CPU.
    """
    if not is_building_on_meta():
        with building_device():
            return make()
    try:
        with torch.device("meta"), _HostLinspace():
            return make()
    except (RuntimeError, NotImplementedError):
        with _NoRandomFill():
            return make()


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same sizes, strides and type; parameters stay parameters."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(
            "a lazy parameter has no shape yet: call the module once with data before handing it over"
        )
    with torch.no_grad():
        try:
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        except RuntimeError:  # sparse and other layouts without strides
            empty = torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        parameter = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
        parameter.__dict__.update(vars(tensor))
        return parameter
    return empty.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def move_to_meta(module: torch.nn.Module) -> torch.nn.Module:
    """Replaces every tensor of a module by a meta tensor, in place; shared tensors stay shared.

    Besides parameters and buffers it replaces plain tensors in attributes, also inside lists and dicts.
    Scalar tensors outside of parameters and buffers stay: they work beside meta tensors, and their values
    may be read.
    """
    if not is_building_on_meta():
        return module.to(building_device())
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in known:  # the original is kept too, so that its id is not reused
            known[id(tensor)] = (tensor, meta_like(tensor))
        return known[id(tensor)][1]

    for child in module.modules():
        tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = moved(tensor)
    for child in module.modules():
        for name, value in list(vars(child).items()):
            if name not in _OWN_TABLES:
                vars(child)[name] = _replaced(value, moved)
    return module


def _replaced(value: Any, moved: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        is_scalar = value.dim() == 0 and not isinstance(value, torch.nn.Parameter)
        return value if is_scalar else moved(value)
    # By exact type: a subclass, such as a named tuple, may not be made from an iterator.
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, moved) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, moved) for key, item in value.items()}
    return value


class _MetaCopies(TorchFunctionMode):
    """Makes ``deepcopy`` of a plain tensor a meta tensor, not a second copy of its data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                is_scalar = tensor.dim() == 0
                memo[id(tensor)] = tensor.detach().clone() if is_scalar else meta_like(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def meta_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module with its tensors on meta; the module itself is not changed and no data is copied.

    Inside ``building_on`` the copy has the values, on that device.
    """
    if not is_building_on_meta():
        return copy.deepcopy(module).to(building_device())
    memo: dict[int, Any] = {}
    tensors = [*module.parameters(), *module.buffers()]
    memo.update((id(tensor), meta_like(tensor)) for tensor in tensors)
    memo[id(memo)] = tensors  # deepcopy keeps objects there that must outlive the copy
    with _MetaCopies():
        copied = copy.deepcopy(module, memo)
    return move_to_meta(copied)


_TOKEN_INPUTS = ("args", "input_ids", "decoder_input_ids")
_LABELS = 2


def with_real_batches(built: BuiltModel, device: torch.device) -> BuiltModel:
    """The same model with a maker of batches with values, on the device."""
    make_shapes = built.make_batch
    num_tokens = _vocabulary(built.module)

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        with building_on(device):
            batch = make_shapes(batch_size)
        return {name: _filled(name, value, num_tokens, device) for name, value in batch.items()}

    return replace(built, make_batch=make_batch)


def _vocabulary(module: nn.Module) -> int:
    """Number of rows of the first table in which tokens are looked up."""
    tables = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    first = next(tables, None)
    return _LABELS if first is None else first.num_embeddings


def _filled(name: str, value: Any, num_tokens: int, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        bound = num_tokens if name in _TOKEN_INPUTS else _LABELS
        return _values_like(value, bound, device) if value.is_meta else value.to(device)
    if isinstance(value, Mapping):
        return {key: _filled(str(key), item, num_tokens, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(name, item, num_tokens, device) for item in value)
    return value


def _values_like(meta: torch.Tensor, bound: int, device: torch.device) -> torch.Tensor:
    if meta.is_floating_point() or meta.is_complex():
        return torch.randn(meta.shape, dtype=meta.dtype, device=device)
    if meta.dtype == torch.bool:
        return torch.ones(meta.shape, dtype=torch.bool, device=device)
    return torch.randint(bound, meta.shape, dtype=meta.dtype, device=device)


_WORDS = own_table(__file__, "failures.toml")
_SAYS = {kind: re.compile("|".join(words), re.IGNORECASE) for kind, words in _WORDS.items()}
"""Kinds of failures, by what their messages say."""

_TORCH = Path(torch.__file__).parent
_FORERUN = Path(__file__).parents[1]
_OF_OPERATIONS = (
    *(_FORERUN / f"{name}.py" for name in ("recorder", "meta_results", "cuda_semantics")),
    Path(__file__),
)
"""Code inside of every operation, so that the line of a model that calls it stands before."""


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
    if is_data_dependent(exc):
        return TraceError(
            f"{built.name} decides what to compute by the values of a tensor{place_of(exc)}, and a step is "
            f"traced without values ({first_line(exc).partition('. ')[0]}); make that part depend on shapes only, or "
            "predict the part of the model that does"
        )
    if _SAYS["too_small"].search(text):
        return InvalidSetupError(
            f"inputs of {shape} are too small for {built.name}: {first_line(exc)}; give a larger image size, "
            "input shape or sequence length"
        )
    names_a_size = isinstance(exc, AssertionError) and "size" in text.lower()
    is_about_sizes = names_a_size or _SAYS["mismatch"].search(text)
    if isinstance(exc, (RuntimeError, ValueError, AssertionError, IndexError)) and is_about_sizes:
        return InvalidSetupError(
            f"{built.name} cannot take inputs of {shape}: {first_line(exc).rstrip('.')}{place_of(exc)}; "
            "give the --input-shape (or --image-size, --sequence-length) it was made for"
        )
    if "does not require grad" in text and not any(p.requires_grad for p in built.module.parameters()):
        return ModelBuildError(
            f"no weight of {built.name} is trained: it has none, or all are frozen (requires_grad is False); train "
            "one, or ask for --phase inference"
        )
    if _SAYS["other_device"].search(text):
        return ModelBuildError(
            f"{built.name} computes with tensors on the CPU and on the device{place_of(exc)}: {first_line(exc)}; make "
            "them on the device of the inputs (device=x.device)"
        )
    remedy = (
        "give a factory (file.py:factory) that returns (module, example_batch) with the inputs of a step that trains"
        if built.name.startswith("hf:")
        else "the model must run a forward and backward pass on tensors of the 'meta' device"
    )
    return TraceError(
        f"the step of {built.name} raised {type(exc).__name__}{place_of(exc)}: {first_line(exc)}; {remedy}"
    )


def first_line(exc: BaseException) -> str:
    """The first line of an exception's text, or its type if the text is empty."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    text = lines[0] if lines else type(exc).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return text if len(text) <= 300 else text[:297] + "..."


def place_of(exc: BaseException) -> str:
    """`` (file.py, line 12)`` for the innermost line of the model's own code; empty without such a line."""
    for frame in reversed(traceback.extract_tb(exc.__traceback__)):
        path = Path(frame.filename)
        if path in _OF_OPERATIONS:
            continue
        if path.is_relative_to(_FORERUN):
            return ""
        if not path.is_relative_to(_TORCH) and not frame.filename.startswith("<"):
            return f" ({path.name}, line {frame.lineno})"
    return ""


def is_data_dependent(exc: BaseException) -> bool:
    """True if a computation was stopped because it asked for the values of a tensor."""
    if type(exc).__name__ in ("GuardOnDataDependentSymNode", "DataDependentOutputException"):
        return True
    return isinstance(exc, (RuntimeError, NotImplementedError, TypeError)) and bool(
        _SAYS["data_dependent"].search(str(exc))
    )


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
