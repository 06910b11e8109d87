"""Results of operations on meta tensors, each worked out once.

PyTorch works out many meta results by running a decomposition in Python, about 200 µs a call. A network repeats its
operations layer after layer and step after step: a result is kept by the shapes of its operands. Shortcuts give what
CUDA's kernels return where the meta kernels return something else, and skip updates in place, which change no shape;
a shortcut returns ``NotImplemented`` when its case does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forerun.tracing.calls import operation_facts

Shortcut = Callable[..., Any]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_MOST_RESULTS = 50_000


@dataclass(frozen=True, slots=True)
class _Empty:
    """A new tensor, by what ``torch.empty_strided`` needs."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


_kept: dict[Any, Any] = {}
_run_always: set[Any] = set()
"""Operations that return views, are not named so by their schema, or return values of the host."""


class _NotKeptError(Exception):
    """The operands are not all plain meta tensors and values that can be compared."""


def meta_result(func: Any, args: Any, kwargs: Any, is_meta: Callable[[torch.Tensor], bool]) -> Any:
    """The result of an operation on meta tensors; it runs if it was not run before with operands of these shapes.

    Args:
        func: Operation of PyTorch's dispatcher.
        args: Its operands.
        kwargs: Its operands by name.
        is_meta: Function that is True for a meta tensor.
    """
    if func in _run_always:
        return func(*args, **kwargs)
    try:
        key = (func, _key(args, is_meta), _key(tuple(kwargs.items()), is_meta))
        kept = _kept.get(key)
    except (_NotKeptError, TypeError):
        return func(*args, **kwargs)
    if kept is not None:
        return _made(kept)
    result = func(*args, **kwargs)
    kept = _form_of(func, args, result, is_meta)
    if kept is None:
        _run_always.add(func)
        return result
    if len(_kept) >= _MOST_RESULTS:
        _kept.clear()
    _kept[key] = kept
    return result


def _key(value: Any, is_meta: Callable[[torch.Tensor], bool]) -> Any:
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in _PLAIN_TYPES and value.layout is torch.strided
        if not is_plain or not is_meta(value) or value.is_complex():
            raise _NotKeptError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([_key(item, is_meta) for item in value])
    return type(value), value  # 1, 1.0 and True are equal, their results are not


def _form_of(func: Any, args: Any, result: Any, is_meta: Callable[[torch.Tensor], bool]) -> Any:
    """The result as what makes one like it; None if not every tensor of it is a new one."""
    schema = func._schema
    if schema.is_mutable or any(output.alias_info is not None for output in schema.returns):
        return None
    taken = {tensor.untyped_storage()._cdata for tensor in nested_tensors(args)}

    def form(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([form(item) for item in value])
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout is not torch.strided:
            raise _NotKeptError
        found = _Empty(value.shape, value.stride(), value.dtype)
        # A view, or a result in a larger storage, could not be made again by its shape: its memory would be another's.
        storage = value.untyped_storage()
        is_whole = is_meta(value) and storage.nbytes() == _made(found).untyped_storage().nbytes()
        if type(value) is not torch.Tensor or not is_whole or storage._cdata in taken:
            raise _NotKeptError
        taken.add(storage._cdata)
        return found

    try:
        return form(result)
    except _NotKeptError:
        return None


def nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a structure of mappings, lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from nested_tensors(item)


def mapped_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        parts = [mapped_tensors(item, change) for item in value]
        # A named tuple takes its fields one by one.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return {name: mapped_tensors(item, change) for name, item in value.items()}
    return value


def _made(form: Any) -> Any:
    if isinstance(form, _Empty):
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
    if isinstance(form, (list, tuple)):
        return type(form)([_made(item) for item in form])
    return form


def _written(target: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return target


def _statistics(source: torch.Tensor, size: int) -> torch.Tensor:
    dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
    return torch.empty(size, dtype=dtype, device="meta")


def _batch_norm(
    source: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any, **__: Any
) -> Any:
    size = source.shape[1] if training else 0
    return torch.empty_like(source), _statistics(source, size), _statistics(source, size)


def _batch_norm_backward(grad: Any, source: Any, weight: Any, *rest: Any, **__: Any) -> Any:
    wanted = rest[-1]
    size = source.shape[1]
    dtype = weight.dtype if weight is not None else torch.float32
    return (
        torch.empty_like(source) if wanted[0] else None,
        torch.empty(size, dtype=dtype, device="meta") if wanted[1] else None,
        torch.empty(size, dtype=dtype, device="meta") if wanted[2] else None,
    )


def _suggests_channels_last(tensor: torch.Tensor) -> bool:
    # The rule of PyTorch's suggest_memory_format (c10/core/MemoryFormat.h): the strides alone decide, so the
    # weight of a convolution with one channel can count as channels_last although it is contiguous either way.
    sizes, strides = tensor.shape, tensor.stride()
    least = 0
    for axis in (1, 3, 2, 0):
        if sizes[axis] == 0 or strides[axis] < least or strides[1] == 0:
            return False
        if axis == 0 and least == strides[1]:
            return False
        least = strides[axis] * sizes[axis]
    return True


def _convolution(source: torch.Tensor, weight: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
    # cuDNN's result is channels_last if the input or the weight is; that of the meta kernel is always NCHW.
    if source.dim() != 4 or not (_suggests_channels_last(source) or _suggests_channels_last(weight)):
        return NotImplemented
    result = torch.ops.aten.convolution.default(source, weight, *rest, **kwargs)
    return torch.empty_like(result, memory_format=torch.channels_last)


def _ctc_loss(scores: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any) -> Any:
    # The losses of the texts, and the sums over paths to each place of a text with blanks between its characters.
    frames, texts = scores.shape[0], scores.shape[1] if scores.dim() == 3 else 1
    places = 2 * (targets.shape[-1] if targets.dim() == 2 else -(-targets.numel() // texts)) + 1
    return scores.new_empty((texts,)), scores.new_empty((texts, frames, places))


SHORTCUTS: dict[Any, Shortcut] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
    **dict.fromkeys((torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor), _ctc_loss),
}
_FACTS = operation_facts()
for _names, _given, _shortcut in (
    (["_ctc_loss_backward"], ("default", "Tensor"), lambda _, scores, *__: scores.new_empty(scores.shape)),
    # Where gradient and input lie in memory in different orders, some of CUDA's kernels take that of the input; the
    # weights of the cost model were fitted with that of the gradient.
    (
        _FACTS["like_their_gradient"],
        ("default", "grad_input"),
        lambda first, *_, **__: torch.empty_like(first),
    ),
    (_FACTS["written_in_place"], ("default",), _written),
    (["add_", "mul_", "sub_", "div_"], ("Tensor",), _written),
    (_FACTS["written_lists"], ("List", "Scalar", "ScalarList", "Tensor", "default"), lambda *_, **__: None),
):
    _packets = (getattr(torch.ops.aten, name) for name in _names)
    SHORTCUTS |= {
        getattr(packet, one): _shortcut for packet in _packets for one in _given if one in packet.overloads()
    }
