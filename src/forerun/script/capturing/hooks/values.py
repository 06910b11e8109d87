"""Values of pretended tensors, as far as they are known.

A pretended tensor has no data. Small tensors that came from the host, and what follows from them alone (masks, lengths,
positions, labels), are computed beside on the processor, so that a script may branch on them. What depends on weights
or activations is not known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["KnownValues"]

_MOST_INTEGERS = 1 << 18
_MOST_FLOATS = 1 << 14


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
        most = _MOST_FLOATS if tensor.is_floating_point() or tensor.is_complex() else _MOST_INTEGERS
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        if (
            not number
            or storage.nbytes() > most * size
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

    def follow(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        outputs: list[torch.Tensor],
        is_pretended: Callable[[Any], bool],
    ) -> None:
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
                        for target in (
                            args[index] if isinstance(args[index], (list, tuple)) else (args[index],)
                        ):
                            if isinstance(target, torch.Tensor) and is_pretended(target):
                                self.forget(target)
            return
        if not found and not self._is_small(outputs):
            return
        if "device" in kwargs:
            named["device"] = torch.device("cpu")
        try:
            result = func(*plain, **named)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return
        if func._schema.is_mutable:
            return
        results = [item for item in _flat_list(result) if isinstance(item, torch.Tensor)]
        if len(results) == len(outputs):
            for output, values in zip(outputs, results, strict=True):
                self.learn(output, values)

    @staticmethod
    def _is_small(outputs: list[torch.Tensor]) -> bool:
        return all(
            output.numel() <= (_MOST_FLOATS if output.is_floating_point() else _MOST_INTEGERS)
            for output in outputs
        )


def _flat_list(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [inner for item in value for inner in _flat_list(item)]
    return [value]
