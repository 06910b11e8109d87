"""Answers of ``torch.cuda`` and ``torch.accelerator`` to a captured script: one GPU, idle, and its tensor types."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import _C

__all__ = ["GPU_MEMORY_BYTES", "cuda_type", "cuda_type_name", "pretend_cuda", "pretend_cuda_types"]

GPU_MEMORY_BYTES = 80 * 1024**3
_CAPABILITY = (8, 0)


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
    properties = SimpleNamespace(
        name="NVIDIA A100-SXM4-80GB", major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=GPU_MEMORY_BYTES,
        multi_processor_count=108, is_integrated=0, is_multi_gpu_board=0, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_block_optin=166912,
        shared_memory_per_multiprocessor=167936, warp_size=32, gcnArchName="", L2_cache_size=40 * 1024**2,
        uuid="GPU-00000000-0000-0000-0000-000000000000", pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
    )  # fmt: skip
    _C._ensureCUDADeviceGuardSet()
    _C._set_only_lift_cpu_tensors(True)
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_name": properties.name, "get_device_capability": _CAPABILITY, "get_device_properties": properties,
        "is_bf16_supported": True, "is_current_stream_capturing": False, "_is_in_bad_fork": False,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "memory_cached": 0, "max_memory_cached": 0, "memory_stats": {}, "memory_summary": "", "memory_snapshot": [],
        "mem_get_info": (GPU_MEMORY_BYTES, GPU_MEMORY_BYTES), "utilization": 0, "temperature": 40, "power_draw": 0,
        "initial_seed": 0, "get_arch_list": ["sm_80"], "_exchange_device": 0, "_maybe_exchange_device": 0,
        "_get_device_index": 0, "can_device_access_peer": True, "is_tf32_supported": True, "clock_rate": 1410,
        "memory_usage": 0, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": [torch.zeros(16, dtype=torch.uint8)],
    }  # fmt: skip
    for name, value in answers.items():
        setattr(cuda, name, _always(value))
    for name in (
        "init", "_lazy_init", "set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed",
        "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all", "reset_peak_memory_stats",
        "reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats", "set_stream",
        "set_per_process_memory_fraction", "set_sync_debug_mode", "_lazy_call",
    ):  # fmt: skip
        setattr(cuda, name, _nothing)
    # Functions of the memory module are names of torch.cuda as well.
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
                 "empty_cache", "reset_peak_memory_stats", "mem_get_info"):  # fmt: skip
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
    device = torch.device("cuda")
    answers = {
        "is_available": True, "device_count": 1, "current_accelerator": device, "current_device_index": 0,
        "current_device_idx": 0, "current_stream": _Stream(), "memory_allocated": 0, "max_memory_allocated": 0,
        "memory_reserved": 0, "max_memory_reserved": 0, "memory_stats": {},
        "get_memory_info": (GPU_MEMORY_BYTES, GPU_MEMORY_BYTES), "get_device_capability": {},
    }  # fmt: skip
    for name, value in answers.items():
        setattr(accelerator, name, _always(value))
    for name in ("set_device_index", "set_device_idx", "synchronize", "set_stream", "empty_cache",
                 "reset_peak_memory_stats", "reset_accumulated_memory_stats"):  # fmt: skip
        setattr(accelerator, name, _nothing)


_DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


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
