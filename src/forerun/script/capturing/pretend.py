"""Pretends a CUDA device: what goes to ``cuda`` lives on the meta device, where nothing is computed.

A dispatch mode sends every operation that names a CUDA device to meta; the Python attributes of such tensors
(``device``, ``is_cuda``) answer as on a GPU. FakeTensorMode with real CUDA devices is not used: its backward pass asks
the driver.

A pretended tensor has no data. Small tensors that came from the host, and what follows from them alone (masks, lengths,
positions, labels), are computed beside on the processor, so that a script may branch on them (``KnownValues``). What
depends on weights or activations is not known.

``torch.cuda`` answers as if there were one idle GPU, and pretended tensors look like those of a GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import _C
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.graph.graph import AllocationKind
from forerun.script.patching import capture_state, is_of_script, place_in_script, surround, tables
from forerun.tracing.meta_results import nested_tensors

META = torch.device("meta")
_aten = torch.ops.aten

_base: Any = _C.TensorBase
_raw_is_meta = _base.is_meta.__get__

_SHAPES_FROM_VALUES = {
    "nonzero", "_unique2", "unique_consecutive", "unique_dim", "bincount", "repeat_interleave",
}  # fmt: skip
_OF_THE_HOST = {"_pack_padded_sequence_backward", "_pad_packed_sequence"}
"""Operations that take some of their operands from the host's memory."""

_CLEAN = {"isnan", "isinf", "isneginf", "isposinf"}
_KEEPS_CLEAN = {"_to_copy", "logical_or", "bitwise_or", "any", "max", "amax", "sum"}
_FALSE_WHEN_CLEAN = {"clean", "any", "gt", "lt", "ge", "le", "ne"}


class ValueNeededError(RuntimeError):
    """The script computes something whose size depends on values that are not known without computing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        capture_state().refusals.append(text)  # a script may catch and print it


def _when_clean(name: str, args: Any) -> bool | None:
    """Result of a test for infinite numbers, or for NaN, where there is none; None for any other operation."""
    if name in _CLEAN:
        return False
    is_infinite = name in ("eq", "ne") and isinstance(args[1], float) and math.isinf(args[1])
    if not is_infinite and (name not in ("eq", "ne") or args[1] is not args[0]):
        return None
    return (name == "eq") == (args[1] is args[0])


def is_pretended(tensor: Any) -> bool:
    """True for a tensor that the script believes to be on a GPU."""
    state = capture_state()
    before, state.asks = state.asks, True
    try:
        found: bool = _raw_is_meta(tensor)
    finally:
        state.asks = before
    return found


def shows_cuda(tensor: Any) -> bool:
    """True while Python code sees a tensor as one of a GPU: a pretended one, outside PyTorch's own kernels."""
    return not capture_state().computes and is_pretended(tensor)


def shows_meta(tensor: Any) -> bool:
    """True while a tensor says that it is one of the meta device, as only PyTorch's own kernels may see it."""
    state = capture_state()
    return (state.computes or state.asks) and bool(_raw_is_meta(tensor))


_MOST_VALUES = 1 << 18
_MOST_CHOSEN = 1 << 12
"""Elements of a mask that is taken to choose all of them, if its values are not known."""


class KnownValues:
    """Storages of pretended tensors with their values: each has a flat tensor of the processor beside it."""

    def __init__(self) -> None:
        self._flat: dict[int, torch.Tensor] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a pretended tensor, as a view that shares memory with those of its other views."""
        if not self._flat:
            return None
        flat = self._flat.get(tensor.untyped_storage()._cdata)
        if flat is None or flat.dtype != tensor.dtype:
            return None
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def learn(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Keeps the values of a new pretended tensor, if they are few; a view of a known one has them already."""
        number = tensor.numel()
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        if (
            not number
            or storage.nbytes() > _MOST_VALUES * size
            or values.shape != tensor.shape
            or tensor.storage_offset()
            or storage._cdata in self._flat
        ):
            return
        flat = torch.empty(storage.nbytes() // size, dtype=tensor.dtype)
        # An expanded axis has one element in memory.
        for axis, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[axis] > 1:
                tensor, values = tensor.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
        flat.as_strided(tensor.size(), tensor.stride(), 0).copy_(values)
        key = storage._cdata
        self._flat[key] = flat
        self._watch[key] = weakref.ref(storage, lambda _: self._forget(key))

    def forget(self, tensor: torch.Tensor) -> None:
        """Drops the values of a tensor that something unknown was written to."""
        if self._flat:
            self._forget(tensor.untyped_storage()._cdata)

    def _forget(self, key: int) -> None:
        self._flat.pop(key, None)
        self._watch.pop(key, None)

    def follow(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        """Computes an operation beside the pretended one, if all its operands are known."""
        found: list[bool] = []

        def known(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and is_pretended(value):
                values = self.of(value)
                found.append(values is not None)
                return values
            if isinstance(value, (list, tuple)):
                return type(value)(known(item) for item in value) if type(value) in (list, tuple) else value
            return value

        plain = [known(value) for value in args]
        named = {name: known(value) for name, value in kwargs.items() if name not in ("device", "generator")}
        if not all(found):
            if func._schema.is_mutable:
                for index, argument in enumerate(func._schema.arguments):
                    if argument.alias_info is not None and argument.alias_info.is_write and index < len(args):
                        for target in filter(is_pretended, nested_tensors(args[index])):
                            self.forget(target)
            return
        # Values are computed for shapes and loop bounds; large tensors have nothing to tell there.
        if not found and any(output.numel() > _MOST_VALUES for output in outputs):
            return
        if "device" in kwargs:
            named["device"] = torch.device("cpu")
        try:
            result = func(*plain, **named)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return
        if func._schema.is_mutable:
            return
        results = list(nested_tensors(result))
        if len(results) == len(outputs):
            for output, values in zip(outputs, results, strict=True):
                self.learn(output, values)


class Pretence(TorchDispatchMode):
    """Sends operations on ``cuda`` to the meta device, and answers reads of values.

    Attributes:
        guesses: Places that decided by a value that is not known, with their number, while ``notes_guesses`` is true.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = KnownValues()
        self.notes_guesses = False
        self.guesses: dict[str, int] = {}
        self.recorder: Any = None
        self._maker: dict[int, str] = {}
        self._num_falling = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, on meta if it belongs to the device."""
        state = capture_state()
        before, state.computes = state.computes, True
        try:
            return self._dispatched(func, args, kwargs)
        finally:
            state.computes = before

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        device = kwargs.get("device")
        wants_device = device is not None and device.type == "cuda"
        if not wants_device and not any(is_pretended(t) for t in nested_tensors((args, kwargs))):
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        # The host asks for a value that does not exist: it gets a plausible one, and the read is counted.
        if name == "_local_scalar_dense":
            return self._read(args[0])
        if name == "_to_copy" and device is not None and device.type == "cpu":
            return self._to_host(args[0], kwargs)
        if name == "copy_" and not is_pretended(args[0]):
            values = self.known.of(args[1])
            return args[0] if values is None else args[0].copy_(values)
        # Scripts compare replicas to check that they agree; pretended ones do.
        if name == "equal":
            return True
        if wants_device:
            kwargs["device"] = META
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
        if name == "masked_select":  # an index by the mask, as on CUDA
            source, mask = torch.broadcast_tensors(*args[:2])
            func, name, args = _aten.index.Tensor, "index", (source, [mask])
        if name in ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put"):
            known = self._with_known_masks(name, args)
            if known is None:
                return self._masked_put(name, args[0])
            args = known
        # A scalar tensor of the host may take part in an operation of the device, as on CUDA.
        args = args if name in _OF_THE_HOST else _on_device(args)
        result = func(*args, **kwargs)
        outputs = [t for t in nested_tensors(result) if is_pretended(t)]
        self.known.follow(func, args, kwargs, outputs)
        # Numbers are clean, and so is what a test of it gives, however far it is added up: no overflow skips an update.
        clean = _when_clean(name, args)
        if name in _KEEPS_CLEAN and all(self._made_by(one) == "clean" for one in nested_tensors(args)):
            clean = False
        for output in outputs:
            key = output.untyped_storage()._cdata
            self._maker.pop(key, None)
            if clean is not None:
                self._maker[key] = "finite" if clean else "clean"
                self.known.learn(output, torch.full((), clean, dtype=output.dtype).expand(output.shape))
            elif output.dtype == torch.bool:
                # Numbers that a network computes are equal to none.
                is_real = name == "eq" and args[0].is_floating_point()
                self._maker[key] = "clean" if is_real else "met" if self._searches(name, args) else name
        return result

    def _searches(self, name: str, args: Any) -> bool:
        """True for what a line search asks of a good step: a curve that bends up, and a slope that became flatter."""
        if name not in ("le", "gt") or not self._is_of_optimizer():
            return False
        return isinstance(args[1], torch.Tensor) if name == "le" else bool(args[1] > 0)

    def _is_of_optimizer(self) -> bool:
        return self.recorder is not None and bool(self.recorder.in_optimizer)

    def _made_by(self, tensor: torch.Tensor) -> str | None:
        """Operation that made a tensor of truth values, or ``clean`` for a test of clean numbers and what follows."""
        return self._maker.get(tensor.untyped_storage()._cdata)

    def _note_guess(self) -> None:
        if self.notes_guesses:
            place = place_in_script()
            self.guesses[place] = self.guesses.get(place, 0) + 1

    def _read(self, tensor: torch.Tensor) -> Any:
        """A number read by the host: the host waits for the device here."""
        if self.recorder is not None:
            self.recorder.note_read(tensor.element_size())
        if (values := self.known.of(tensor)) is not None:
            return values.item()
        if tensor.dtype == torch.bool:
            self._note_guess()
            return self._made_by(tensor) not in _FALSE_WHEN_CLEAN
        if not tensor.is_floating_point():
            return 1
        # A loss that stays would end the search of an optimizer.
        self._num_falling += self._is_of_optimizer()
        return 1.0 / (1 + 1e-3 * self._num_falling * self._is_of_optimizer())

    def _to_host(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if self.recorder is not None:
            self.recorder.note_read(tensor.element_size() * tensor.numel())
        dtype = kwargs.get("dtype") or tensor.dtype
        if (values := self.known.of(tensor)) is not None:
            return values.to(dtype, copy=True)
        # A mask holds, such as that of the tokens of a text that did not end early.
        if tensor.dtype == torch.bool:
            maker = self._made_by(tensor)
            return torch.full(tensor.shape, maker not in (*_FALSE_WHEN_CLEAN, "eq"), dtype=dtype)
        if dtype == torch.bool or not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=dtype)
        return torch.ones(tensor.shape, dtype=dtype)

    def _to_device(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        source = args[0]
        result: torch.Tensor = func(*args, **kwargs)
        if self.recorder is not None:
            self.recorder.watch(result, AllocationKind.INPUT)
        # Weights are not known, so that nothing that follows from them is.
        if source.dtype == result.dtype and not source.requires_grad and type(source) is torch.Tensor:
            self.known.learn(result, source)
        return result

    def _of_known_shape(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            return func(*args, **kwargs)
        plain = [self._host_value(value) for value in args]
        if plain[0] is NotImplemented and (any(plain[2:]) if name == "bincount" else _checks_metric(name)):
            self._note_guess()  # predictions have no more classes than there are
            plain[0] = torch.zeros(args[0].shape, dtype=args[0].dtype)
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
        result = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=META)
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
            labels = self._made_by(index) == "ne"  # such as ``labels != -100``
            if mask is NotImplemented and (labels or (index.dim() == 1 and index.numel() <= _MOST_CHOSEN)):
                self._note_guess()  # such as the tokens of a text that did not end early
                mask = torch.ones(index.shape, dtype=torch.bool)
            if mask is NotImplemented:
                if name.startswith("index_put"):
                    return None
                raise ValueNeededError(
                    f"a choice by a mask at {place_in_script()}: the size of its result depends on values that are not "
                    "known without computing"
                )
            indices += [self._as_pretended(part) for part in mask.nonzero(as_tuple=True)]
        return (args[0], indices, *args[2:])

    def _masked_put(self, name: str, target: torch.Tensor) -> torch.Tensor:
        """Writes where a mask holds: the shape of the result is that of the target, whatever the mask holds."""
        self.known.forget(target)
        filled = _aten.masked_fill_.Scalar if name.endswith("_") else _aten.masked_fill.Scalar
        mask = torch.empty(target.shape, dtype=torch.bool, device=META)
        result: torch.Tensor = filled(target, mask, 0)
        return result


def _checks_metric(name: str) -> bool:
    """True where torchmetrics asks which classes were predicted, to refuse what is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{os.sep}torchmetrics{os.sep}" not in frame.f_code.co_filename:
        frame = None if is_of_script(frame.f_code.co_filename) else frame.f_back
    return name == "_unique2" and frame is not None


def _packed(
    padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of padded sequences one after the other, and how many sequences have each step; of the host."""
    steps = torch.arange(int(lengths.max()))
    batch_sizes = (lengths[None, :] > steps[:, None]).sum(dim=1)
    return padded.flatten(0, 1)[: int(lengths.sum())].clone(), batch_sizes


def _on_device(args: Any) -> Any:
    """Operands of the processor beside pretended ones are moved; a number in a tensor may stay."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not is_pretended(value) and value.dim():
            return value.to(META)
        if isinstance(value, list):
            return [moved(item) for item in value]
        if type(value) is tuple:
            return tuple(moved(item) for item in value)
        return value

    return tuple(moved(value) for value in args)


def skip_initial_values() -> None:
    """Leaves large weights of the processor unfilled: nobody reads them once they are on the device."""

    def filled(fill: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_left = not is_pretended(self) and self.numel() > _SMALL
        return self if is_left else fill(self, *args, **kwargs)

    for name in ("normal_", "uniform_"):
        surround(torch.Tensor, name)(filled)


_SMALL = 4096


_CUDA, _CPU = torch.device("cuda", 0), torch.device("cpu")


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


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


_nothing = _always(None)


def _num_devices() -> int:
    """Devices of this machine: one for each of the processes that a launcher would start here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def pretend_cuda() -> None:
    """Replaces what asks the driver."""
    cuda: Any = torch.cuda
    gpu, idle = SimpleNamespace(**tables()["gpu"]), tables()["idle"]
    _C._ensureCUDADeviceGuardSet()
    _C._set_only_lift_cpu_tensors(True)
    answers = {
        **tables()["cuda"], "device_count": _num_devices(), "get_device_name": gpu.name,
        "get_device_capability": (gpu.major, gpu.minor),
        "get_device_properties": gpu, "mem_get_info": (gpu.total_memory, gpu.total_memory),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": [torch.zeros(16, dtype=torch.uint8)],
    }  # fmt: skip
    accelerator = {
        **tables()["accelerator"], "device_count": _num_devices(), "current_stream": _Stream(),
        "current_accelerator": torch.device("cuda"),
        "get_memory_info": (gpu.total_memory, gpu.total_memory),
    }  # fmt: skip
    for owner, found, unused in (
        (cuda, answers, idle["cuda"]),
        (torch.accelerator, accelerator, idle["accelerator"]),
    ):
        for name, value in found.items():
            setattr(owner, name, _always(value))
        for name in unused:
            setattr(owner, name, _nothing)
    for name in idle["memory"]:
        setattr(cuda.memory, name, getattr(cuda, name))
    cuda.memory._record_memory_history = cuda.memory._dump_snapshot = _nothing
    anything: Any = torch
    cuda.Stream = cuda.Event = cuda.ExternalStream = anything.Event = anything.Stream = _Stream
    cuda.current_stream = cuda.default_stream = _always(_Stream())
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    torch.Generator = _Generator  # type: ignore[misc]
    _C._cuda_getDeviceCount = _always(_num_devices())
    _C._cuda_getDevice = _always(0)
    _C._cuda_setDevice = _nothing
    _C._cuda_isCurrentStreamCapturing = _always(False)
    cuda.nccl.version = _always((2, 27, 0))
    pretend_cuda_types()
    for name in ("tensor", "as_tensor"):
        surround(torch, name)(lambda make, data, *args, **kwargs: make(with_numbers(data), *args, **kwargs))


def with_numbers(data: Any) -> Any:
    """Nested lists with numbers in the place of the device's, each of which the host reads."""
    if not isinstance(data, (list, tuple)):
        return data
    return [
        x.item() if isinstance(x, torch.Tensor) and is_pretended(x) and not x.dim() else with_numbers(x)
        for x in data
    ]


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
    return "torch.cuda." + next((name for name, each in _DTYPES.items() if each == dtype), "Tensor")


def pretend_cuda_types() -> None:
    """Replaces the types of ``torch.cuda``, and what makes one of them the default."""
    for name, kind in _TYPES.items():
        setattr(torch.cuda, name, kind)

    @surround(torch, "set_default_tensor_type")
    def set_default_tensor_type(set_default: Any, named: Any, /) -> None:
        kind = cuda_type(named)
        if kind is None:
            return set_default(named)  # type: ignore[no-any-return]
        torch.set_default_dtype(kind.dtype)
        return torch.set_default_device("cuda")


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
                args = tuple(META if _is_cuda(a) else a for a in args)
                kwargs = {name: META if _is_cuda(a) else a for name, a in kwargs.items()}
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
        given = [*(a for a in args if not isinstance(a, bool)), kwargs.get("dtype"), kwargs.get("device")]
        if any(one is not None for one in given):
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
        else:  # another kind of storage: the tensor itself becomes the other, and keeps its identity and attributes
            own = vars(self).copy()
            torch.utils.swap_tensors(self, torch.nn.Parameter(value, self.requires_grad)
                                     if isinstance(self, torch.nn.Parameter) else value.detach())  # fmt: skip
            vars(self).update(own)

    @surround(tensor, "__repr__")
    def text(show: Any, self: torch.Tensor, **kwargs: Any) -> Any:
        words = f"tensor(..., device='cuda:0', size={tuple(self.shape)}, dtype={self.dtype})"
        return words if is_pretended(self) else show(self, **kwargs)

    tensor.device = property(device_of)
    tensor.is_cuda = property(lambda self: shows_cuda(self) or base.is_cuda.__get__(self))
    tensor.is_meta = property(shows_meta)
    tensor.get_device = lambda self: 0 if is_pretended(self) else -1
    tensor.data = property(raw_data.__get__, set_data)

    @surround(tensor, "type")
    def kind(
        raw_type: Any, self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any
    ) -> Any:
        if dtype is None:
            return cuda_type_name(self.dtype) if is_pretended(self) else raw_type(self)
        wanted = cuda_type(dtype)
        if wanted is not None:
            return self.to(_CUDA, wanted.dtype)
        if isinstance(dtype, torch.dtype) or not is_pretended(self):
            return raw_type(self, dtype, non_blocking, **kwargs)
        return raw_type(self.to(_CPU), dtype)  # a type of the host

    tensor.to, tensor.cuda = to, cuda
    tensor.record_stream = lambda self, stream: None
    tensor.pin_memory = lambda self, *args, **kwargs: self
    tensor.is_pinned = lambda self, *args, **kwargs: False
    # The parameters of a module keep their identity when it is moved, as on a real device: tied weights stay tied.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: ())  # type: ignore[assignment, attr-defined]  # they stay

    @surround(torch.nn.Module, "_apply")
    def moved(move: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What ``weight_norm`` computes of parameters, again before each pass, holds them: those could not be swapped.
        held = vars(module).items()
        vars(module).update(
            {k: v.detach() for k, v in held if isinstance(v, torch.Tensor) and v.grad_fn is not None}
        )
        # Parameters that change places with others would lose what a script has written on them.
        written = [(p, vars(p).copy()) for p in module._parameters.values() if p is not None]
        moved = move(module, *args, **kwargs)
        for parameter, own in written:
            vars(parameter).update(own)
        return moved


def _is_cuda(value: Any) -> bool:
    name = value.type if isinstance(value, torch.device) else value
    return type(value) is int or (isinstance(name, str) and name.partition(":")[0] == "cuda")
