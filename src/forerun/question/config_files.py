"""Configuration files of training tools as settings of a run: axolotl, torchtune, litgpt, torchtitan, DeepSpeed ...

A file is known by keys that only its tool has. ``config_files.toml`` says what each key stands for; a key that may
change time or memory and stands for no setting is named in a note, so that nobody takes it for understood.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.question.model import architectures, find_architecture

__all__ = ["ConfigFile", "config_model", "config_note", "read_config"]

_JOINED = ("lora_targets", "fused_kernels")
"""Settings that several keys of a file may add to."""
_VARIANT = re.compile(r"[-_](?:instruct|chat|base|it|hf|fp16|bf16|bnb-4bit|unsloth)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The settings that a configuration file holds.

    Attributes:
        path: The file.
        tool: The tool that it is for.
        model: The model it names, as forerun names it; None if it names none.
        settings: Settings of a run, with the recipe of the tool.
        not_understood: Keys that may change time or memory, with their values.
    """

    path: str
    tool: str
    model: str | None
    settings: Mapping[str, Any]
    not_understood: tuple[str, ...]


@cache
def _tools() -> Mapping[str, Mapping[str, Any]]:
    text = Path(__file__).with_name("config_files.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def read_config(path: str | Path) -> ConfigFile:
    """The settings in a configuration file.

    Raises:
        UsageError: The file cannot be read, or is of no tool that is known.
    """
    held = dict(_flat(_content(Path(path))))
    for name, tool in _tools().items():
        if all(mark in held for mark in tool["marks"]):
            return _read(str(path), name, tool, held)
    raise UsageError(
        f"'{path}' is no configuration of {', '.join(_tools())}: none has its keys; give the settings as options"
    )


def _content(path: Path) -> Mapping[str, Any]:
    import yaml  # a question without a file has no use for it

    try:
        text = path.expanduser().read_text(encoding="utf-8")
        if path.suffix == ".toml":
            found = tomllib.loads(text)
        else:
            found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot read '{path}': {reason}; give a YAML, TOML or JSON file") from None
    if not isinstance(found, dict):
        raise UsageError(
            f"expected keys and values in '{path}', got {type(found).__name__}; give a tool's own file"
        )
    return found


def _flat(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of nested mappings, joined by dots, with their values; those without a value left out."""
    for key, value in part.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif value is not None:
            yield name, value


def _read(path: str, name: str, tool: Mapping[str, Any], held: Mapping[str, Any]) -> ConfigFile:
    found: dict[str, Any] = {"recipe": tool["recipe"]} if "recipe" in tool else {}
    strange, axes, model = [], [], None
    for key, value in held.items():
        needed = tool.get("only_with", {}).get(key)
        if needed is not None and not _is_set(held, needed):
            continue
        word = _word(value)
        if tool["settings"].get(key) == "model":
            model, more = _model(name, word, held)
            _add(found, more)
        elif key in tool["settings"]:
            if word != "auto":
                _add(found, {tool["settings"][key]: word if isinstance(value, list) else value})
        elif word in tool["values"].get(key, {}):
            _add(found, tool["values"][key][word])
        elif key in tool.get("axes", {}):
            axes += [f"{tool['axes'][key]}={word}"] if word != "1" else []
        elif key in tool.get("shares", {}):
            found["accumulation"] = max(1, int(value) // int(held[tool["shares"][key]]))
        elif not any(fnmatchcase(key, pattern) for pattern in tool["ignored"]):
            strange.append(f"{key}: {word}")
    if axes:
        found["parallel"] = ",".join(axes)
    if "lora" not in found and found.get("recipe") != "unsloth":
        found.pop("lora_targets", None)
        found.pop("lora_dropout", None)
    return ConfigFile(path=path, tool=name, model=model, settings=found, not_understood=tuple(strange))


def _is_set(held: Mapping[str, Any], needed: str) -> bool:
    key, _, value = needed.partition("=")
    return bool(held.get(key)) and (not value or _word(held[key]) == value)


def _add(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        found[name] = f"{found[name]},{value}" if name in _JOINED and name in found else value


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(dict.fromkeys(map(_word, value)))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _model(tool: str, word: str, held: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model that a file names, and what its name says of adapters."""
    more: dict[str, Any] = {}
    last = word.rstrip("/").rpartition("/")[2]
    if tool == "torchtune":  # torchtune.models.llama3_1.qlora_llama3_1_8b
        kind, _, size = (
            word.rpartition(".")[2].partition("lora_")
            if "lora_" in word
            else ("", "", word.rpartition(".")[2])
        )
        last = size
        more = {"quantize": "nf4-dq"} if kind == "q" else {}
    if tool == "torchtitan":
        last = f"{held.get('model.name', '')}{word}"
    plain = _VARIANT.sub("", last)
    for name in (word, last, plain):
        known = find_architecture(name)
        if known is not None:
            return known.name, more
    squeezed = {re.sub(r"[^a-z0-9]", "", name): name for name in architectures()}
    known_name = squeezed.get(re.sub(r"[^a-z0-9]", "", plain.lower().removeprefix("meta-")))
    if known_name is not None:
        return known_name, more
    return (
        f"hf:{word.removeprefix('checkpoints/')}" if tool not in ("torchtune", "torchtitan") else last
    ), more


def config_model(path: str | Path | None) -> str:
    """The model that a configuration file names.

    Raises:
        InvalidSetupError: There is no file, or it names none.
    """
    found = None if path is None else read_config(path).model
    if found is None:
        raise InvalidSetupError(
            f"expected a model, got {'none' if path is None else f'{path}, which names none'}; give its name, such as "
            "llama-3.1-8b, or with --from a configuration file that names one"
        )
    return found


def config_note(path: str | Path | None) -> tuple[str, ...]:
    """The keys of a configuration file that were not understood, in words; none without a file."""
    if path is None:
        return ()
    found = read_config(path)
    if not found.not_understood:
        return (f"{found.path}: read as a configuration of {found.tool}",)
    return (
        f"{found.path}: read as a configuration of {found.tool}; not understood, and not in this answer: "
        f"{'; '.join(found.not_understood)}",
    )
