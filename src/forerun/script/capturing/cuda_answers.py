"""Answers to a captured script: ``torch.cuda`` has one idle GPU, and pretended tensors look like those of a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import _C

from forerun.script.capturing.pretend import is_pretended, shows_cuda, shows_meta
from forerun.script.patching import surround, tables

_META, _CUDA, _CPU = torch.device("meta"), torch.device("cuda", 0), torch.device("cpu")


class _Stream:
    """A stream, or an event, without a device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.stream_id = self.cuda_stream = self.device_index = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        return None

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _Generator(_C.Generator):
    """A generator of random numbers: that of a CUDA device is one of the processor, whose numbers nobody reads."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def pretend_cuda() -> None:
    """Replaces what asks the driver."""
    cuda: Any = torch.cuda
    gpu, idle = SimpleNamespace(**tables()["gpu"]), tables()["idle"]
    answers = {
        **tables()["cuda"], "get_device_name": gpu.name, "get_device_capability": (gpu.major, gpu.minor),
        "get_device_properties": gpu, "mem_get_info": (gpu.total_memory, gpu.total_memory),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": [torch.zeros(16, dtype=torch.uint8)],
    }  # fmt: skip
    for name, value in answers.items():
        setattr(cuda, name, _always(value))
    for name in idle["cuda"]:
        setattr(cuda, name, _nothing)
    for name in idle["memory"]:
        setattr(cuda.memory, name, getattr(cuda, name))
    cuda.memory._record_memory_history = cuda.memory._dump_snapshot = _nothing
    anything: Any = torch
    cuda.Stream = cuda.Event = cuda.ExternalStream = anything.Event = anything.Stream = _Stream
    cuda.current_stream = cuda.default_stream = _always(_Stream())
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    torch.Generator = _Generator  # type: ignore[misc]
    _C._cuda_getDeviceCount = _always(1)
    _C._cuda_getDevice = _always(0)
    _C._cuda_setDevice = _nothing
    _C._cuda_isCurrentStreamCapturing = _always(False)
    cuda.nccl.version = _always((2, 27, 0))
    pretend_cuda_types()
    _pretend_accelerator()


def _pretend_accelerator() -> None:
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    total = tables()["gpu"]["total_memory"]
    answers = {
        **tables()["accelerator"], "current_accelerator": torch.device("cuda"), "current_stream": _Stream(),
        "get_memory_info": (total, total),
    }  # fmt: skip
    for name, value in answers.items():
        setattr(accelerator, name, _always(value))
    for name in tables()["idle"]["accelerator"]:
        setattr(accelerator, name, _nothing)


_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name).dtype for name in tables()["types"]["names"]}


class _CudaType(type):
    """The class of such types: an instance of one is a tensor on the device of that dtype."""

    dtype: torch.dtype
    is_cuda = True

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, torch.Tensor) and thing.is_cuda and thing.dtype == cls.dtype

    def __call__(cls, *values: Any, **kwargs: Any) -> torch.Tensor:
        if len(values) == 1 and not isinstance(values[0], (int, torch.Size)):
            return torch.as_tensor(values[0]).to("cuda", cls.dtype)
        return torch.empty(*values, dtype=cls.dtype, device="cuda")


_TYPES = {
    name: _CudaType(name, (), {"dtype": dtype, "__module__": "torch.cuda"}) for name, dtype in _DTYPES.items()
}


def cuda_type(named: Any) -> _CudaType | None:
    """The type that a script names, as itself or as text; None for a type of the host and for a dtype."""
    if isinstance(named, str):
        module, _, name = named.rpartition(".")
        return _TYPES.get(name) if module == "torch.cuda" else None
    return named if isinstance(named, _CudaType) else None


def cuda_type_name(dtype: torch.dtype) -> str:
    """The name of the type of a tensor on the device.

    >>> cuda_type_name(torch.int64)
    'torch.cuda.LongTensor'
    """
    return next(
        (f"torch.cuda.{name}" for name, each in _DTYPES.items() if each == dtype), "torch.cuda.Tensor"
    )


def pretend_cuda_types() -> None:
    """Replaces the types of ``torch.cuda``, and what makes one of them the default."""
    for name, kind in _TYPES.items():
        setattr(torch.cuda, name, kind)
    set_default = torch.set_default_tensor_type

    def set_default_tensor_type(named: Any, /) -> None:
        kind = cuda_type(named)
        if kind is None:
            return set_default(named)
        torch.set_default_dtype(kind.dtype)
        return torch.set_default_device("cuda")

    torch.set_default_tensor_type = set_default_tensor_type


def cover_attributes() -> None:
    """Makes pretended tensors look like those of a GPU to Python code."""
    tensor: Any = torch.Tensor
    base: Any = _C.TensorBase
    raw_to, raw_data, raw_device = tensor.to, base.data, base.device.__get__
    main = threading.current_thread()

    def device_of(self: torch.Tensor) -> torch.device:
        return _CUDA if shows_cuda(self) else raw_device(self)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_pretended(self):
            if threading.current_thread() is not main:  # the mode is that of the main thread
                args = tuple(_META if _is_cuda(a) else a for a in args)
                kwargs = {name: _META if _is_cuda(a) else a for name, a in kwargs.items()}
            return raw_to(self, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and is_pretended(args[0]):
            args = (args[0].dtype, *args[1:])
        elif "other" in kwargs and is_pretended(kwargs["other"]):
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
    tensor.is_cuda = property(lambda self: shows_cuda(self) or base.is_cuda.__get__(self))
    tensor.is_meta = property(shows_meta)
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
    tensor.record_stream = lambda self, stream: None
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.is_pinned = lambda self, *args, **kwargs: False
    # The parameters of a module keep their identity when it is moved, as on a real device: tied weights stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)

    @surround(torch.nn.Module, "_apply")
    def moved(move: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What ``weight_norm`` computes of parameters, again before each pass, holds them: those could not be swapped.
        held = vars(module).items()
        vars(module).update(
            {k: v.detach() for k, v in held if isinstance(v, torch.Tensor) and v.grad_fn is not None}
        )
        return move(module, *args, **kwargs)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return True
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"
