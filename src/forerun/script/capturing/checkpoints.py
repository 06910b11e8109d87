"""Checkpoints of a captured script: saved and loaded with storages on the pretended device.

A pretended tensor has no bytes. In a file it is its shape, with its values where they are known (``values``); a tensor
of the processor is saved whole. A file is read on the processor, and what ``map_location`` sends to CUDA is pretended
as it is rebuilt, so that no driver is asked.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from forerun.script.capturing.pretend import Pretence, is_pretended
from forerun.script.patching import after_import, capture_state, surround, tables
from forerun.script.profiling.messages import CaptureSettings

_SAFETENSORS_NAMES = {getattr(torch, name): word for name, word in tables()["safetensors"].items()}


def rebuild_pretended(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], values: torch.Tensor | None
) -> torch.Tensor:
    """A tensor that was pretended when it was saved, where ``map_location`` wants it; unpicklers call this."""
    tensor = torch.empty_strided(size, stride, dtype=dtype).zero_() if values is None else values
    places = capture_state().places
    place = places[-1](torch.UntypedStorage(0), "cuda:0") if places else "cuda:0"
    if not place.startswith("cuda"):
        return tensor
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda") if values is None else values.cuda()


class Checkpoints:
    """Saves and loads of the script.

    Args:
        settings: Settings of the capture; with unsafe files a checkpoint goes to the scratch folder, because what was
            never trained must not replace what was.
        pretence: The pretended device; None if there is none.
        note: Receives a sentence on what was not read.
        saved: Called when the script saves; true if into memory, which may also be to copy something.
    """

    def __init__(
        self,
        settings: CaptureSettings,
        pretence: Pretence | None,
        note: Callable[[str], None],
        saved: Callable[[bool], None],
    ) -> None:
        self._scratch = Path(settings.folder) / "saved" if settings.files == "unsafe" else None
        self._pretence, self._note, self._saved_now = pretence, note, saved
        self._saved: dict[str, Path] = {}
        self._marked: dict[int, Any] = {}

    def cover(self) -> None:
        """Patches what saves and loads."""
        surround(torch, "save")(self._save)
        torch.serialization.save = torch.save
        self._cover_hub()
        if self._pretence is None:
            surround(torch, "load")(lambda load, f, *args, **kwargs: load(self._place(f), *args, **kwargs))
            return
        surround(torch, "load")(self._load)
        torch.serialization.load = torch.load
        torch.serialization.add_safe_globals([rebuild_pretended])
        surround(torch._utils, "_rebuild_tensor")(self._rebuild)
        surround(torch.Tensor, "__reduce_ex__")(self._reduce)
        # Savers look for weights that share memory by its address; a storage of the device has none but its own.
        surround(torch.UntypedStorage, "data_ptr")(
            lambda address, own: own._cdata if own.device.type in ("meta", "cuda") else address(own)
        )
        for kind in (torch.UntypedStorage, torch.TypedStorage):
            kind.cuda = lambda storage, *args, **kwargs: self._mark(storage)  # type: ignore[method-assign, assignment]
        places = {"safetensors.torch": self._cover_safetensors}
        after_import({**places, "torch.distributed.checkpoint": self._cover_distributed})

    def _place(self, file: Any) -> Any:
        """The file to read in place of one that the script saved before."""
        is_path = isinstance(file, (str, os.PathLike))
        return self._saved.get(os.path.abspath(file), file) if is_path else file  # noqa: PTH100

    def _target(self, file: Any) -> Any:
        """The file to write in place of one that the script names."""
        if self._scratch is None or not isinstance(file, (str, os.PathLike)):
            return file
        self._scratch.mkdir(exist_ok=True)
        place = self._scratch / str(len(self._saved))
        return self._saved.setdefault(os.path.abspath(file), place)  # noqa: PTH100

    def _save(self, save: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        self._saved_now(isinstance(f, io.BytesIO))
        file = self._target(f)
        if not isinstance(file, (str, os.PathLike)):
            save(obj, file, *args, **kwargs)
            return
        # By a file of Python: where there is no view, its ``open`` is what redirects, and PyTorch's own writer would
        # go to the place that is named.
        with Path(file).open("wb") as opened:
            save(obj, opened, *args, **kwargs)

    def _load(self, load: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        def place(storage: Any, location: str) -> str:
            if callable(map_location):
                found = map_location(storage, location)
                if found is not None:
                    return "cuda" if id(found) in self._marked else str(found.device)
                return location
            if isinstance(map_location, dict):
                return str(map_location.get(location, location))
            return location if map_location is None else str(map_location)

        def keep(storage: Any, location: str) -> Any:
            if place(storage, location).startswith("cuda"):
                self._mark(storage)
            return storage

        file = self._place(f)
        places = capture_state().places
        places.append(place)
        try:
            return load(file, keep, *args, **kwargs)
        finally:
            places.pop()
            self._marked.clear()

    def _mark(self, storage: Any) -> Any:
        """Notes that a storage belongs on the device; the note holds it, so that no other takes its number."""
        self._marked[id(storage)] = storage
        return storage

    def _rebuild(self, rebuild: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = rebuild(storage, *args, **kwargs)
        is_marked = id(storage) in self._marked or id(storage._untyped_storage) in self._marked
        return tensor.cuda() if is_marked else tensor

    def _reduce(self, reduce: Any, tensor: torch.Tensor, protocol: Any) -> Any:
        # A parameter is rebuilt from its data, which comes here again.
        if not is_pretended(tensor) or isinstance(tensor, torch.nn.Parameter) or self._pretence is None:
            return reduce(tensor, protocol)
        values = self._pretence.known.of(tensor.detach())
        plain = None if values is None else values.clone()
        return rebuild_pretended, (tensor.dtype, tuple(tensor.size()), tensor.stride(), plain)

    def _cover_hub(self) -> None:
        """Pretrained weights that are not on this machine: their values play no part in a step."""
        import torch.hub

        hub: Any = torch.hub

        @surround(hub, "load_state_dict_from_url")
        def read(load: Any, url: str, *args: Any, **kwargs: Any) -> Any:
            try:
                return load(url, *args, **kwargs)
            except OSError:  # the network is off
                name = url.rpartition("/")[2]
                self._note(f"the values of {name}: it is not on this machine, and a step needs none")
                return AbsentWeights()

        @surround(torch.nn.Module, "load_state_dict")
        def take(load: Any, *args: Any, **kwargs: Any) -> Any:
            if any(isinstance(given, AbsentWeights) for given in (*args, *kwargs.values())):
                return torch.nn.modules.module._IncompatibleKeys([], [])
            return load(*args, **kwargs)

    def _cover_safetensors(self, module: Any) -> None:
        @surround(module, "save_file")
        def save(
            original: Any, tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None
        ) -> None:
            self._saved_now(False)
            _write_safetensors(tensors, self._target(filename), metadata)

        @surround(module, "load_file")
        def load(original: Any, filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
            with module.safe_open(filename, framework="pt", device=device) as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict

        opened = module.safe_open

        def open_file(filename: Any, framework: Any = "pt", device: Any = "cpu", **kwargs: Any) -> Any:
            file = opened(self._place(filename), framework=framework, device="cpu", **kwargs)
            return _OnDevice(file) if str(device).startswith(("cuda", "0")) or device == 0 else file

        module.safe_open = sys.modules["safetensors"].safe_open = open_file  # type: ignore[attr-defined]

    def _cover_distributed(self, module: Any) -> None:
        """One file in the folder of a distributed checkpoint holds the state of this process."""

        def folder(given: dict[str, Any]) -> Path:
            storage = given.get("storage_writer") or given.get("storage_reader")
            return Path(given.get("checkpoint_id") or getattr(storage, "path", None) or "checkpoint")

        saving, loading = inspect.signature(module.save), inspect.signature(module.load)

        def save(*args: Any, **kwargs: Any) -> None:
            given = saving.bind(*args, **kwargs).arguments
            place = folder(given)
            if self._scratch is None:
                place.mkdir(parents=True, exist_ok=True)
            torch.save(given["state_dict"], place / _OWN_FILE)

        def load(*args: Any, **kwargs: Any) -> None:
            given = loading.bind(*args, **kwargs).arguments
            place = self._place(folder(given) / _OWN_FILE)
            if place.exists():
                _take_over(given["state_dict"], torch.load(place, weights_only=False))
            elif not place.parent.exists():
                raise FileNotFoundError(f"there is no checkpoint '{place.parent}'")
            else:
                self._note(f"the values of the distributed checkpoint {place.parent}: a step needs none")

        for name in ("save", "async_save", "save_state_dict", "load", "load_state_dict"):
            if hasattr(module, name):
                setattr(module, name, save if "save" in name else load)


class _OnDevice:
    """An open file of safetensors whose tensors come on the pretended device."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _OnDevice:
        self._file.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._file.__exit__(*args)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name).cuda()  # type: ignore[no-any-return]


_OWN_FILE = ".forerun.pt"


class AbsentWeights(dict[str, Any]):
    """The weights of a file that is not there: any network takes them, and keeps its own."""


def _take_over(target: Any, source: Any) -> None:
    """Puts values other than tensors, such as the number of steps, in their places; tensors keep theirs."""
    if not isinstance(target, dict):
        return
    for name, value in target.items():
        if isinstance(value, dict):
            _take_over(value, source.get(name, {}))
        elif hasattr(value, "load_state_dict") and name in source:
            value.load_state_dict(source[name])
        elif not isinstance(value, torch.Tensor) and name in source:
            target[name] = source[name]


def _write_safetensors(tensors: dict[str, torch.Tensor], path: Any, metadata: Any) -> None:
    """Writes a file of the library's format; where a pretended tensor lies, it has a hole that takes no room.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype, shape = _SAFETENSORS_NAMES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # So that the data begin at a multiple of eight bytes, as in the library's own files.
    text += b" " * (-len(text) % 8)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        first = file.tell()
        for name, tensor in tensors.items():
            if is_pretended(tensor):
                continue
            with contextlib.suppress(RuntimeError):  # a tensor without bytes
                data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                file.seek(first + header[name]["data_offsets"][0])
                file.write(data)
        # The file gets its full length, though nothing was written at its end.
        file.truncate(first + end)
