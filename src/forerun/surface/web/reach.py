"""Bounds of what a question over MCP or HTTP may reach: names of the catalogue, files of one folder, code of another.

A question from an agent or a page is written by somebody else: a model's name must not run code of this machine that
its owner did not offer, nor tell what other files there are. Both are decided before anything is opened, by the path
alone, so that the refusal of a file that exists is that of one that does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forerun.base.errors import UsageError
from forerun.base.extras import plugin
from forerun.base.kept import cache_folder, temporary_folder, write_whole
from forerun.question.settings import Declared
from forerun.tracing.source import named_source

MOST_VALUES = 4096
"""Longest list in a question; beyond it an answer takes minutes and nobody reads its rows."""

_MOST_TEXT = 20_000
MOST_CONFIGS = 1000
"""Pasted configurations that are kept, of at most 64 KiB each."""
_COUNTS = re.compile(r"^(?:\s*\d+\s*[x×*]\s*)+")
"""Numbers of nodes and devices before the file of a device, as in 4x8xMY.toml."""
_FILES = (
    ".toml",
    ".csv",
    ".json",
    ".yaml",
    ".yml",
    ".keras",
    ".h5",
    ".hdf5",
    ".pt",
    ".npz",
    ".db",
    ".parquet",
    ".gz",
)
_PATHS = {"trace", "run", "history", "table", "curve"}
"""Arguments of tools that are files whatever they end in."""


def code_of(model: str) -> str | None:
    """The file of Python code in the name of a model, None if it names none.

    >>> code_of("nets/small.py:make")
    'nets/small.py'
    """
    head, ending, _ = model.strip().partition(".py")
    return head + ending if ending else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The files that questions may name.

    Attributes:
        files: Folder of files that are read; None where no file may be named.
        code: Folder whose code is run; None where no code is.
        captures: Captures that were sent; None where none can be.
    """

    files: Path | None = None
    code: Path | None = None
    captures: Captures | None = None

    def check(self, arguments: Mapping[str, Any], known: Mapping[str, Declared]) -> None:
        """Checks every text of a question.

        Args:
            arguments: The question.
            known: Its settings; those that name a file are taken as paths whatever they end in.

        Raises:
            UsageError: A name reaches beyond the folders, a list or a text is too long, or a text is not one line.
        """
        for name, value in arguments.items():
            # Names come from outside as well, and go into messages.
            _ = [*_texts("settings", name), *_texts(name, value)]
            parts = value if isinstance(value, list) else [value]
            for part in parts:
                if isinstance(part, Mapping):
                    self.check(part, known)
            if name == "script":  # of a job, which is printed
                continue
            is_path = name in _PATHS or (name in known and known[name].setting.is_local)
            for text in _texts(name, [part for part in parts if not isinstance(part, Mapping)]):
                # Several models or groups of devices stand in one text, and each may name a file.
                for part in re.split("[;+,]" if name == "cluster" else ";", text):
                    self.check_name(part.strip(), is_path=is_path)

    def check_name(self, text: str, *, is_path: bool = False) -> None:
        """Checks one name.

        Raises:
            UsageError: It reaches beyond the folders.
        """
        code = code_of(text)
        if code is not None:
            self._check_code(code)
            return
        source = named_source(text)
        path = (
            text.partition(":")[2] if (source and source.reads_file) or text.startswith("capture:") else text
        )
        if is_path or path is not text or text.lower().endswith(_FILES):
            path = _COUNTS.sub("", path.removeprefix("keras:"))
            if self.files is None:
                raise UsageError(f"'{text}' names a file: over HTTP none is read; use the command line")
            if not _lies_in(path, self.files):
                raise UsageError(
                    f"'{text}' lies outside the working folder of this server, which reads no other files; start it "
                    "in the folder of the file, or use the command line"
                )

    def _check_code(self, path: str) -> None:
        if self.code is None:
            raise UsageError(
                f"'{path}' is code, which this server does not run; start it with --allow-code DIR to allow the code "
                "in DIR, or use the command line"
            )
        if not _lies_in(path, self.code):
            raise UsageError(f"'{path}' lies outside the folder of --allow-code; only code inside it is run")


def _lies_in(path: str, folder: Path) -> bool:
    """True if a path is inside a folder once links are followed."""
    return Path(path).expanduser().resolve().is_relative_to(folder.resolve())


def _texts(name: str, value: Any) -> Iterator[str]:
    """The texts of a value, and of the lists and tables in it."""
    if isinstance(value, str):
        if not value.isprintable():
            raise UsageError(
                f"{name!r}: expected text in one line without control characters, got {value[:60]!r}"
            )
        if len(value) > _MOST_TEXT:
            raise UsageError(
                f"'{name}' has at most {_MOST_TEXT:,} characters here, got {len(value):,}; ask for less"
            )
        yield value
    elif isinstance(value, Mapping | list | tuple):
        if len(value) > MOST_VALUES:
            raise UsageError(
                f"'{name}' has at most {MOST_VALUES:,} values here, got {len(value):,}; ask for less"
            )
        for part in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(name, part)


def joined(arguments: Mapping[str, Any], settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of a tool and its settings as one question; what is None is not given.

    Raises:
        UsageError: A name stands in both.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    twice = sorted(given.keys() & (settings or {}).keys())
    if twice:
        raise UsageError(
            f"'{twice[0]}' is an argument of this tool and stands in 'settings' as well; give it once, as the argument"
        )
    return {**given, **(settings or {})}


def question(name: str) -> Callable[..., Any]:
    """The function of a question that a satellite answers.

    Raises:
        UsageError: This installation lacks the satellite.
    """
    found: Callable[..., Any] | None = plugin("forerun.questions", name)
    if found is None:
        raise UsageError(
            f"expected the part of forerun that answers '{name}', got none; install forerun anew"
        )
    return found


CAPTURE_NAME = re.compile(r"capture:[0-9a-f]{16}")
"""Name of a capture that was sent."""
TRACE_NAME = r"^trace:[0-9a-f]{16}$"
"""Pattern of the name of a profiler's trace that was sent."""
MOST_CAPTURE_BYTES = 8 * 2**20
"""Largest file that is taken [bytes]; a captured step of 20,000 operations has 1.2 MB."""
_MOST_CAPTURES = 16
_KEPT_S = 3600.0


class Captures:
    """Captures and traces that were sent over HTTP, as files of this process.

    Each goes an hour after its last question, the oldest where there are many, and all with the process.
    """

    def __init__(self) -> None:
        self._folder = temporary_folder()

    def keep(self, content: bytes, kind: Literal["capture", "trace"] = "capture") -> str:
        """Keeps the content of a file, and returns its name; what it holds is not looked at."""
        self.forget(_MOST_CAPTURES - 1)
        name = f"{kind}:{hashlib.sha256(content).hexdigest()[:16]}"
        self._path(name).write_bytes(content)
        return name

    def file(self, name: str) -> Path:
        """The file of a capture.

        Raises:
            UsageError: It was not sent, or is gone.
        """
        path = self._path(name)
        try:
            os.utime(path)
        except OSError:
            raise UsageError(
                f"'{name}' is not on this server, which keeps a file for an hour; send the file once more"
            ) from None
        return path

    def forget(self, most: int = _MOST_CAPTURES) -> None:
        """Removes the captures that nobody has asked for in an hour, and all but the newest."""
        found = sorted(Path(self._folder.name).iterdir(), key=lambda path: -path.stat().st_mtime)
        for index, path in enumerate(found):
            if index >= most or time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink(missing_ok=True)

    def public(self, text: str) -> str:
        """A text with the name of each file in the place of its path."""
        return re.sub(
            rf"(?:capture:)?{re.escape(self._folder.name)}/([0-9a-f]{{16}})\.(capture|trace)", r"\2:\1", text
        )

    def close(self) -> None:
        """Removes all."""
        self._folder.cleanup()

    def _path(self, name: str) -> Path:
        kind, _, digest = name.partition(":")
        return Path(self._folder.name) / f"{digest}.{kind}"


CONFIG_NAME = re.compile(r"config:[0-9a-f]{16}")
"""Name of a configuration that was pasted."""


def kept_config(config: dict[str, Any]) -> str:
    """Keeps a configuration in the cache folder, and returns its name.

    Raises:
        UsageError: It is no configuration of a model.
    """
    if not isinstance(config.get("model_type"), str):
        raise UsageError("expected the config.json of a Transformers model, which has a model_type; got none")
    if "auto_map" in config:
        raise UsageError("this configuration loads code of its own, which is not run; use the command line")
    try:
        content = json.dumps(config, sort_keys=True, allow_nan=False)
    except ValueError:
        raise UsageError(
            "expected finite numbers in this configuration, got NaN or Infinity; correct it"
        ) from None
    name = f"config:{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.encode())
    kept = sorted(path.parent.glob("*.json"), key=lambda path: -path.stat().st_mtime)
    for oldest in kept[MOST_CONFIGS:]:
        oldest.unlink(missing_ok=True)
    return name


def config_file(name: str) -> str:
    """The model of a kept configuration, ``hf:FILE``.

    Raises:
        UsageError: It was not kept here.
    """
    path = _path(name)
    if not path.is_file():
        raise UsageError(f"the configuration of '{name}' is not kept on this server; paste it once more")
    return f"hf:{path}"


def _path(name: str) -> Path:
    return cache_folder() / "configs" / f"{name.removeprefix('config:')}.json"
