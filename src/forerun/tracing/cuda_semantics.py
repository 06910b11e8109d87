"""Makes meta tensors follow the rules that CUDA tensors follow under PyTorch.

Meta tensors carry no autocast key, run attention unfused and take recurrent layers apart. A spare dispatch
key, ``AutocastPrivateUse1``, sits above autograd and is unused without a third-party backend: Python kernels
of that key treat meta tensors as CUDA's kernels treat CUDA tensors:

- autocast: the operation lists of CUDA (``ATen/autocast_mode.h``), with each fp32 leaf weight cast once per
  region;
- ``scaled_dot_product_attention`` becomes one flash or memory-efficient kernel;
- dropout keeps a one-byte mask;
- LSTM, GRU and RNN layers, which PyTorch takes apart into a chain of small products step by step, become one fused call
  for the whole sequence, as cuDNN runs them. Its two operations, ``forerun::rnn`` and ``forerun::rnn_backward``, only
  carry shapes; they exist on the meta device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import _C
from torch.library import Library

from forerun.tracing.calls import operation_facts
from forerun.tracing.device_ops import define
from forerun.tracing.meta_results import mapped_tensors
from forerun.tracing.op_rules.products import NUM_GATES


def _rnn_on_meta(
    source: torch.Tensor,
    hidden: torch.Tensor,
    _weights: list[torch.Tensor],
    mode: str,
    num_layers: int,
    num_directions: int,
    _batch_first: bool,
    train: bool,
    _num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_size = hidden.shape[-1]
    output = source.new_empty((*source.shape[:-1], hidden_size * num_directions))
    final_cell = hidden.new_empty(hidden.shape if mode == "lstm" else (0,))
    # cuDNN keeps the activated gates and the cell state of every layer for the backward pass.
    num_tokens = source.numel() // source.shape[-1]
    kept = (NUM_GATES[mode] + 1) * hidden_size * num_layers * num_directions * num_tokens
    return output, hidden.new_empty(hidden.shape), final_cell, source.new_empty((kept if train else 0,))


_rnn = define(
    "rnn(Tensor source, Tensor hidden, Tensor[] weights, str mode, int num_layers, int num_directions, "
    "bool batch_first, bool train, int num_steps) -> (Tensor, Tensor, Tensor, Tensor)",
    _rnn_on_meta,
)
_rnn_backward = define(
    "rnn_backward(Tensor grad_output, Tensor source, Tensor hidden, Tensor[] weights, Tensor reserve, str mode, "
    "int num_layers, int num_directions, bool batch_first, int num_steps) -> Tensor[]",
    lambda _gradient, source, _hidden, weights, *_: [one.new_empty(one.shape) for one in (source, *weights)],
)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    source, hidden, weights, mode, num_layers, num_directions, batch_first, _, num_steps = inputs
    ctx.save_for_backward(source, hidden, output[3], *weights)
    ctx.settings = (mode, num_layers, num_directions, batch_first, num_steps)


def _backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
    source, hidden, reserve, *weights = ctx.saved_tensors
    made = _rnn_backward(grad_output, source, hidden, list(weights), reserve, *ctx.settings)
    return made[0], None, list(made[1:]), None, None, None, None, None, None


torch.library.register_autograd("forerun::rnn", _backward, setup_context=_setup_context)


def fused_layers(
    mode: str,
    source: torch.Tensor,
    hx: Any,
    weights: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    num_steps: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Replacement of ``aten::lstm.input``, ``gru.input`` and ``rnn_*.input``: one kernel per call.

    The steps of a source without an axis for them, (tokens, features), are given as ``num_steps``.
    """
    hidden = hx[0] if isinstance(hx, (list, tuple)) else hx
    num_directions = 2 if bidirectional else 1
    output, final_hidden, final_cell, _ = _rnn(
        source, hidden, list(weights), mode, num_layers, num_directions, batch_first, train, num_steps
    )
    return (output, final_hidden, final_cell) if mode == "lstm" else (output, final_hidden)


def fused_layers_of_packed(
    mode: str,
    source: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Any,
    weights: list[torch.Tensor],
    *settings: Any,
) -> tuple[torch.Tensor, ...]:
    """Replacement of ``aten::lstm.data`` and its like, whose source holds packed sequences, (tokens, features)."""
    has_biases, num_layers, dropout, train, bidirectional = settings
    return fused_layers(
        mode, source, hx, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first=False,
        num_steps=len(batch_sizes),
    )  # fmt: skip


_KEY_NAME = "AutocastPrivateUse1"
_KEY: Any = getattr(_C.DispatchKey, _KEY_NAME)
_KEY_SET = _C.DispatchKeySet(_KEY)


_RECURRENT_MODES = {
    f"{name}.{overload}": mode
    for name, mode in (("lstm", "lstm"), ("gru", "gru"), ("rnn_tanh", "rnn"), ("rnn_relu", "rnn"))
    for overload in ("input", "data")
}


CastWeights = dict[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class _Region:
    """State of the semantics in force."""

    autocast_dtype: torch.dtype | None
    fused_attention: bool
    cast_weights: CastWeights = field(default_factory=dict)
    repeats: bool = False

    def covers(self, values: Any) -> bool:
        """True if an operation on these values is one of the device."""
        return True


class _FollowedRegion:
    """The semantics of a script that enters and leaves autocast regions itself."""

    fused_attention = True
    repeats = False

    def __init__(self, is_on_device: Callable[[torch.Tensor], bool]) -> None:
        self._is_on_device = is_on_device
        self.cast_weights: CastWeights = {}
        self.dtypes_seen: set[torch.dtype] = set()

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        if not torch.is_autocast_enabled("cuda"):
            return None
        dtype: torch.dtype = torch.get_autocast_dtype("cuda")
        self.dtypes_seen.add(dtype)
        return dtype

    @autocast_dtype.setter
    def autocast_dtype(self, value: torch.dtype | None) -> None:
        raise AssertionError("the script's own regions decide")

    def covers(self, values: Any) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                return self._is_on_device(value)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                return self._is_on_device(value[0])
        return False


_region: _Region | _FollowedRegion | None = None
_libraries: list[Library] = []

_Values = TypeVar("_Values")


def _is_castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast(values: _Values, dtype: torch.dtype, region: _Region | _FollowedRegion) -> _Values:
    found: _Values = mapped_tensors(values, lambda tensor: _cast_tensor(tensor, dtype, region))
    return found


def _cast_tensor(value: torch.Tensor, dtype: torch.dtype, region: _Region | _FollowedRegion) -> torch.Tensor:
    if not _is_castable(value) or value.dtype == dtype:
        return value
    # PyTorch keeps the casts of such weights alone (``cached_cast`` in autocast_mode.cpp).
    is_cached = value.is_leaf and value.requires_grad and value.dtype == torch.float32 and value._base is None
    if not is_cached or dtype == torch.float32:
        return value.to(dtype)
    known = region.cast_weights.get(id(value))
    if known is None:
        # With the weight itself, so that no other tensor gets its id.
        known = region.cast_weights[id(value)] = (value, value.to(dtype))
    return known[1]


def _float_dtypes(values: Any) -> Iterator[torch.dtype]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _float_dtypes(value)
        elif _is_castable(value):
            yield value.dtype


def _covers(values: Any) -> bool:
    return _region is None or _region.covers(values)


def _casting(values: Any) -> tuple[torch.dtype, _Region | _FollowedRegion] | None:
    """Format and region of the casts of an operation's values; None if they are left as they are."""
    if _region is None or (dtype := _region.autocast_dtype) is None or not _region.covers(values):
        return None
    return dtype, _region


_Cast = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Arguments of an operation as its autocast rule casts them."""


def _casts(rule: _Cast) -> Callable[[Any], Callable[..., Any]]:
    """The kernel of an operation, whose arguments are cast first."""

    def kernel_of(op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _C._ExcludeDispatchKeyGuard(_KEY_SET):
                args, kwargs = rule(op, args, kwargs)
                return op(*args, **kwargs)

        return kernel

    return kernel_of


def _lower_precision(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    casting = _casting(args)
    return _cast((args, kwargs), *casting) if casting else (args, kwargs)


def _full_precision(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    casting = _casting(args)
    return _cast((args, kwargs), torch.float32, casting[1]) if casting else (args, kwargs)


def _full_precision_output(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if _casting(args) and _is_castable(args[0]) and kwargs.get("dtype") is None:
        positional = [argument.name for argument in op._schema.arguments]
        if positional.index("dtype") >= len(args):
            kwargs["dtype"] = torch.float32
    return args, kwargs


def _widest(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    casting, dtypes = _casting(args), set(_float_dtypes(args))
    if not casting or len(dtypes) < 2:
        return args, kwargs
    wide = torch.float32 if torch.float32 in dtypes else casting[0]
    return _cast((args, kwargs), wide, casting[1])


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention as CUDA dispatches scaled_dot_product_attention: flash without a mask in half precision."""
    is_covered, is_fused = _covers((query,)), _region is None or _region.fused_attention
    # Older releases have no fused kernel: attention was a chain of products and a softmax, which keeps the
    # scores.
    if is_covered and not (is_fused or is_causal or enable_gqa):
        return _attention_in_pieces(query, key, value, attn_mask, dropout_p, scale)
    with _C._ExcludeDispatchKeyGuard(_KEY_SET):
        if casting := _casting((query,)):
            query, key, value, attn_mask = _cast((query, key, value, attn_mask), *casting)
        if not (is_covered and is_fused) or query.dim() != 4 or query.dtype == torch.float64:
            op = torch.ops.aten.scaled_dot_product_attention.default
            return op(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa and key.shape[1] != query.shape[1]:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256:
            flash = torch.ops.aten._scaled_dot_product_flash_attention.default
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        needs_log_sum = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
        return efficient(query, key, value, attn_mask, needs_log_sum, dropout_p, is_causal, scale=scale)[0]


def _attention_in_pieces(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    """Attention in pieces, softmax((q scale) k') v, as models wrote it before the fused kernels.

    Autocast acts on each piece: the softmax is fp32 and its copy for the second product half precision, six bytes per
    score, while PyTorch's own unfused attention keeps four.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores + attn_mask
    shares = scores.softmax(dim=-1)
    if dropout_p:
        shares = torch.dropout(shares, dropout_p, True)
    return shares @ value


def _dropout(source: torch.Tensor, p: float, train: bool) -> Any:
    with _C._ExcludeDispatchKeyGuard(_KEY_SET):
        if not train or p == 0.0 or p == 1.0 or not _covers((source,)):
            return torch.ops.aten.dropout.default(source, p, train)
        return torch.ops.aten.native_dropout.default(source, p, train)[0]


def _recurrent(op: Any, mode: str) -> Callable[..., Any]:
    make = fused_layers_of_packed if op._overloadname == "data" else fused_layers

    def kernel(*args: Any) -> Any:
        with _C._ExcludeDispatchKeyGuard(_KEY_SET):
            if not _covers(args):
                return op(*args)
            if casting := _casting(args):
                args = _cast(args, *casting)
            return make(mode, *args)

    return kernel


def _resolve(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _register() -> None:
    """Registers the kernels once per process; they run only while the key is switched on."""
    if _libraries:
        return
    fall_through = Library("_", "IMPL")
    fall_through.fallback(torch.library.fallthrough_kernel, _KEY_NAME)
    aten = Library("aten", "IMPL")
    rules = (
        ("to_lower_precision", _lower_precision),
        ("to_fp32", _full_precision),
        ("output_in_fp32", _full_precision_output),
        ("to_widest", _widest),
    )
    for names, rule in rules:
        for name in operation_facts()[names]:
            aten.impl(name, _casts(rule)(_resolve(name)), _KEY_NAME)
    aten.impl("scaled_dot_product_attention", _attention, _KEY_NAME)
    aten.impl("dropout", _dropout, _KEY_NAME)
    for name, mode in _RECURRENT_MODES.items():
        aten.impl(name, _recurrent(_resolve(name), mode), _KEY_NAME)
    _libraries.extend((fall_through, aten))


@contextmanager
def cuda_semantics(autocast_dtype: torch.dtype | None, *, fused_attention: bool) -> Iterator[None]:
    """Switches the CUDA rules on for the tensors of the enclosed code.

    Args:
        autocast_dtype: float16 or bfloat16 inside an autocast region; None without a region.
        fused_attention: True runs attention as one kernel.
    """
    global _region
    _register()
    previous = _region
    _region = _Region(autocast_dtype, fused_attention)
    _C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    _C._dispatch_tls_set_dispatch_key_included(_KEY, True)
    try:
        with patch.object(torch, "autocast", _autocast):
            yield
    finally:
        _C._dispatch_tls_set_dispatch_key_included(_KEY, previous is not None)
        _region = previous


def follow_autocast(is_on_device: Callable[[torch.Tensor], bool]) -> set[torch.dtype]:
    """Switches the CUDA rules on for the rest of the process; the script's own autocast regions decide on casts.

    Args:
        is_on_device: True for a tensor that stands for one on the device; others follow the processor's rules.

    Returns:
        Formats of the regions that were entered since, filled as the script runs.
    """
    global _region
    _register()
    region = _FollowedRegion(is_on_device)
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        region.cast_weights.clear()
        clear()

    torch.clear_autocast_cache = clear_autocast_cache  # called when the outermost region ends
    _region = region
    _C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    _C._dispatch_tls_set_dispatch_key_included(_KEY, True)
    return region.dtypes_seen


def leave_autocast_region() -> None:
    """Ends the autocast region early: no more casts are made, and cached weight copies are dropped."""
    if _region is not None:
        _region.autocast_dtype = None
        _region.cast_weights.clear()


def autocast_dtype_now() -> torch.dtype | None:
    """Type of the autocast region in force, None outside of one."""
    return None if _region is None else _region.autocast_dtype


def repeats_now() -> bool:
    """True while a checkpoint repeats a part of the forward pass."""
    return _region is not None and _region.repeats


@contextmanager
def autocast_again(dtype: torch.dtype | None, *, repeats: bool = True) -> Iterator[None]:
    """Enters an autocast region of a type, or of none, as a checkpoint does that repeats a part of the forward pass."""
    if _region is None:
        yield
        return
    before, _region.autocast_dtype = _region.autocast_dtype, dtype
    repeated, _region.repeats = _region.repeats, repeats or _region.repeats
    try:
        yield
    finally:
        _region.autocast_dtype, _region.repeats = before, repeated
        if before is None:
            _region.cast_weights.clear()


_TORCH_AUTOCAST = torch.autocast


def _autocast(device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, **more: Any) -> Any:
    """``torch.autocast``, which refuses meta tensors: there a region is one of the device that they stand for."""
    if device_type != "meta":
        return _TORCH_AUTOCAST(device_type, dtype, enabled, **more)
    wanted = dtype or torch.get_autocast_dtype("cuda")
    return autocast_again(wanted if enabled else None, repeats=False)
