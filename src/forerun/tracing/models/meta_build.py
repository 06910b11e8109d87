"""Builds modules on the meta device, or copies existing ones there, without holding a weight.

Inside ``building_on`` another device takes the place of meta, and weights have the values their library gives them:
the same sources of models then make networks that can run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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
