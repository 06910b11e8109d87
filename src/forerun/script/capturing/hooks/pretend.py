"""Pretends a CUDA device: what goes to ``cuda`` lives on the meta device, where nothing is computed.

A dispatch mode sends every operation that names a CUDA device to meta; the Python attributes of such tensors
(``device``, ``is_cuda``) answer as on a GPU. FakeTensorMode with real CUDA devices is not used: its backward pass asks
the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import _C
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.script.capturing.hooks.cuda_answers import cuda_type, cuda_type_name
from forerun.script.capturing.hooks.places import place_in_script
from forerun.script.capturing.hooks.values import KnownValues

__all__ = ["Pretence", "ValueNeededError", "is_pretended"]

_META = torch.device("meta")
_CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_aten = torch.ops.aten

_computes = False
"""True while PyTorch's own kernels for meta tensors run, which must see the true device."""

_asks = False
"""True while ``is_pretended`` asks: a function mode of the script sends its question through the patched attribute."""

_base: Any = _C.TensorBase
_raw_is_meta = _base.is_meta.__get__
_raw_device = _base.device.__get__

_SHAPES_FROM_VALUES = {
    "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount", "repeat_interleave",
}  # fmt: skip
_OF_THE_HOST = {"_pack_padded_sequence_backward", "_pad_packed_sequence"}
"""Operations that take some of their operands from the host's memory."""

_FALSE_WHEN_CLEAN = {"any", "isnan", "isinf", "isneginf", "isposinf", "gt", "lt", "ge", "le", "ne"}


class ValueNeededError(RuntimeError):
    """The script computes something whose size depends on values that are not known without computing."""


def is_pretended(tensor: Any) -> bool:
    """True for a tensor that the script believes to be on a GPU."""
    global _asks
    before, _asks = _asks, True
    try:
        found: bool = _raw_is_meta(tensor)
    finally:
        _asks = before
    return found


class Pretence(TorchDispatchMode):
    """Sends operations on ``cuda`` to the meta device, and answers reads of values.

    Attributes:
        num_on_device: Operations on the device so far.
        reads: Places in the script that read a value, with their number, while ``notes_reads`` is true.
        guesses: Places that decided by a value that is not known.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = KnownValues()
        self.num_on_device = 0
        self.notes_reads = False
        self.reads: dict[str, int] = {}
        self.guesses: dict[str, int] = {}
        self.recorder: Any = None
        self._maker: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, on meta if it belongs to the device."""
        global _computes
        before, _computes = _computes, True
        try:
            return self._dispatched(func, args, kwargs)
        finally:
            _computes = before

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        device = kwargs.get("device")
        wants_device = device is not None and device.type == "cuda"
        if not wants_device and not any(is_pretended(t) for t in _tensors(args, kwargs)):
            return func(*args, **kwargs)
        self.num_on_device += 1
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            return self._read(args[0])
        if name == "_to_copy" and device is not None and device.type == "cpu":
            return self._to_host(args[0], kwargs)
        if name == "copy_" and not is_pretended(args[0]):
            return self._into_host(args[0], args[1])
        if name == "equal":
            return True
        if wants_device:
            kwargs["device"] = _META
        kwargs.pop("pin_memory", None)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        if name == "_to_copy" and not is_pretended(args[0]):
            return self._to_device(func, args, kwargs)
        if name in ("_pin_memory", "_amp_update_scale_"):
            return args[0]
        if name in _SHAPES_FROM_VALUES:
            return self._of_known_shape(func, name, args, kwargs)
        if name == "_pack_padded_sequence":
            return _packed(*args)
        if name in ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put"):
            args = self._with_known_masks(name, args)
            if args is None:
                return self._masked_put(name, func)
        args = args if name in _OF_THE_HOST else _on_device(args)
        result = func(*args, **kwargs)
        outputs = [t for t in _tensors(result) if is_pretended(t)]
        self.known.follow(func, args, kwargs, outputs, is_pretended)
        for output in outputs:
            if output.dtype == torch.bool and output.dim() == 0:
                self._maker[output.untyped_storage()._cdata] = name
        return result

    def _note(self, notes: dict[str, int]) -> None:
        if self.notes_reads:
            place = place_in_script()
            notes[place] = notes.get(place, 0) + 1

    def _read(self, tensor: torch.Tensor) -> Any:
        """A number read by the host: the host waits for the device here."""
        self._note(self.reads)
        if self.recorder is not None:
            self.recorder.note_read(tensor.element_size())
        values = self.known.of(tensor)
        if values is not None:
            return values.item()
        if tensor.dtype == torch.bool:
            self._note(self.guesses)
            return self._maker.get(tensor.untyped_storage()._cdata) not in _FALSE_WHEN_CLEAN
        return 1.0 if tensor.is_floating_point() else 1

    def _to_host(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        self._note(self.reads)
        if self.recorder is not None:
            self.recorder.note_read(tensor.element_size() * tensor.numel())
        dtype = kwargs.get("dtype") or tensor.dtype
        values = self.known.of(tensor)
        if values is not None:
            return values.to(dtype, copy=True)
        if dtype == torch.bool or not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=dtype)
        return torch.ones(tensor.shape, dtype=dtype)

    def _into_host(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        self._note(self.reads)
        values = self.known.of(source)
        return target.copy_(values) if values is not None else target

    def _to_device(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        source = args[0]
        result: torch.Tensor = func(*args, **kwargs)
        if self.recorder is not None:
            self.recorder.watch_input(result)
        # Weights are not known, so that nothing that follows from them is.
        if source.dtype == result.dtype and not source.requires_grad and type(source) is torch.Tensor:
            self.known.learn(result, source)
        return result

    def _of_known_shape(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            return func(*args, **kwargs)
        plain = [self._host_value(value) for value in args]
        if any(value is NotImplemented for value in plain):
            raise ValueNeededError(
                f"{name} at {place_in_script()}: the size of its result depends on values that are not known without "
                "computing"
            )
        result = func(*plain, **{k: v for k, v in kwargs.items() if k != "device"})
        if isinstance(result, torch.Tensor):
            return self._as_pretended(result)
        return tuple(self._as_pretended(each) for each in result)

    def _host_value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and is_pretended(value):
            found = self.known.of(value)
            return NotImplemented if found is None else found
        return value

    def _as_pretended(self, values: torch.Tensor) -> torch.Tensor:
        result = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=_META)
        self.known.learn(result, values)
        return result

    def _with_known_masks(self, name: str, args: Any) -> Any:
        """Indices with masks replaced by positions; None where a mask is not known and none of its size is needed."""
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            mask = self._host_value(index)
            if mask is NotImplemented:
                if name.startswith("index_put"):
                    self._masked = args[0]
                    return None
                raise ValueNeededError(
                    f"a choice by a mask at {place_in_script()}: the size of its result depends on values that are not "
                    "known without computing"
                )
            indices += [self._as_pretended(part) for part in mask.nonzero(as_tuple=True)]
        return (args[0], indices, *args[2:])

    def _masked_put(self, name: str, func: Any) -> torch.Tensor:
        """Writes where a mask holds: the shape of the result is that of the target, whatever the mask holds."""
        target, self._masked = self._masked, torch.empty(0)
        self.known.forget(target)
        filled = (
            torch.ops.aten.masked_fill_.Scalar if name.endswith("_") else torch.ops.aten.masked_fill.Scalar
        )
        mask = torch.empty(target.shape, dtype=torch.bool, device=_META)
        result: torch.Tensor = filled(target, mask, 0)
        return result


def _packed(
    padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of padded sequences one after the other, and how many sequences have each step; of the host."""
    steps = torch.arange(int(lengths.max()))
    batch_sizes = (lengths[None, :] > steps[:, None]).sum(dim=1)
    return padded.flatten(0, 1)[: int(lengths.sum())].clone(), batch_sizes


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


def _on_device(args: Any) -> Any:
    """Operands of the processor beside pretended ones are moved; a number in a tensor may stay."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not is_pretended(value) and value.dim():
            return value.to(_META)
        if isinstance(value, list):
            return [moved(item) for item in value]
        if type(value) is tuple:
            return tuple(moved(item) for item in value)
        return value

    return tuple(moved(value) for value in args)


def cover_attributes() -> None:
    """Makes pretended tensors look like those of a GPU to Python code."""
    tensor: Any = torch.Tensor
    base: Any = _C.TensorBase
    raw_to, raw_data = tensor.to, base.data
    main = threading.current_thread()

    def device_of(self: torch.Tensor) -> torch.device:
        return _CUDA if not _computes and is_pretended(self) else _raw_device(self)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_pretended(self):
            if threading.current_thread() is not main:  # the mode is that of the main thread
                args = tuple(_META if _is_cuda(a) else a for a in args)
                kwargs = {name: _META if _is_cuda(a) else a for name, a in kwargs.items()}
            return raw_to(self, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and _raw_is_meta(args[0]):
            args = (args[0].dtype, *args[1:])
        elif "other" in kwargs and _raw_is_meta(kwargs["other"]):
            kwargs["dtype"] = kwargs.pop("other").dtype
        named = kwargs.get("device")
        if named is not None and _is_cuda(named):
            kwargs.pop("device")
        elif args and _is_cuda(args[0]):
            args = args[1:]
        while args and args[0] is None:  # no device and no dtype
            args = args[1:]
        if (
            any(not isinstance(a, bool) for a in args)
            or kwargs.get("dtype")
            or kwargs.get("device") is not None
        ):
            return raw_to(self, *args, **kwargs)
        if kwargs.get("memory_format") is not None:
            return self.contiguous(memory_format=kwargs["memory_format"])
        return self.clone() if kwargs.get("copy") or True in args[1:] else self

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        return to(self, _CUDA, **{k: v for k, v in kwargs.items() if k == "memory_format"})

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if is_pretended(self) == is_pretended(value):
            raw_data.__set__(self, value)
        else:  # another kind of storage: the tensor itself becomes the other, and keeps its identity
            torch.utils.swap_tensors(self, torch.nn.Parameter(value, self.requires_grad)
                                     if isinstance(self, torch.nn.Parameter) else value.detach())  # fmt: skip

    raw_repr = tensor.__repr__

    def text(self: torch.Tensor, *, tensor_contents: Any = None) -> Any:
        if not is_pretended(self):
            return raw_repr(self, tensor_contents=tensor_contents)
        return f"tensor(..., device='cuda:0', size={tuple(self.shape)}, dtype={self.dtype})"

    tensor.device = property(device_of)
    tensor.__repr__ = text
    tensor.is_cuda = property(
        lambda self: (not _computes and is_pretended(self)) or base.is_cuda.__get__(self)
    )
    tensor.is_meta = property(lambda self: (_computes or _asks) and _raw_is_meta(self))
    tensor.get_device = lambda self: 0 if is_pretended(self) else -1
    tensor.data = property(raw_data.__get__, set_data)
    raw_type = tensor.type

    def kind(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return cuda_type_name(self.dtype) if is_pretended(self) else raw_type(self)
        wanted = cuda_type(dtype)
        if wanted is not None:
            return self.to(_CUDA, wanted.dtype)
        if isinstance(dtype, torch.dtype) or not is_pretended(self):
            return raw_type(self, dtype, non_blocking, **kwargs)
        return raw_type(self.to(_CPU), dtype)  # a type of the host

    tensor.to, tensor.cuda, tensor.type = to, cuda, kind
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.is_pinned = lambda self, *args, **kwargs: False
    # The parameters of a module keep their identity when it is moved, as on a real device: tied weights stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return True
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


def skip_initial_values() -> None:
    """Leaves large weights of the processor unfilled: nobody reads them once they are on the device."""
    tensor: Any = torch.Tensor
    for name in ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "xavier_uniform_"):
        original = getattr(tensor, name, None)
        if original is None:
            continue

        def fill(self: torch.Tensor, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            if not is_pretended(self) and self.numel() > _SMALL:
                return self
            return _original(self, *args, **kwargs)

        setattr(tensor, name, fill)


_SMALL = 4096
