"""Settings that stand where a user says nothing: those of a captured script, a configuration file or a training tool.

A configuration file of axolotl, torchtune, litgpt, torchtitan, DeepSpeed or another tool is known by keys that only its
tool has. ``config_files.toml`` says what each key stands for. A key that may change time or memory and stands for no
setting is named in a note, so that nobody takes it for understood; one that decides what a step holds is refused.
``recipes.toml`` has the defaults of each tool, with the file of the tool that says it.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache, reduce
from operator import add, floordiv, mul
from pathlib import Path
from typing import Any, cast

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.base.received import parsed_json, parsed_yaml
from forerun.base.tables import own_table
from forerun.question.model import (
    architectures,
    base_name,
    captured_facts,
    find_architecture,
    is_captured,
    is_keras,
    own_settings,
)
from forerun.question.options import RunOptions
from forerun.question.saving import listed_names
from forerun.question.settings import declared
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision, Software
from forerun.question.sharing import AXES, EXPERT_AXIS, Sharing, Strategy, parse_parallel

_AWAITED = ("several", "fsdp", *AXES, *EXPERT_AXIS)
"""Needs of settings that more devices, or another division of them, may bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeLine:
    """One setting of a tool.

    Attributes:
        name: Name of the setting.
        value: Its value where the condition holds.
        file: File of the tool that says so, as repository:path.
        when: Condition: full, adapters, plain-adapters (without dropout, algorithm, 8 bits), quantized, mxfp8, several,
            architecture, a strategy, fsdp (or hsdp) or an axis; None for always.
        otherwise: Its value elsewhere; None if the tool then has no such setting.
    """

    name: str
    value: Any
    file: str
    when: str | None = None
    otherwise: Any = None


@cache
def recipes() -> Mapping[str, tuple[RecipeLine, ...]]:
    """The recipes by the names of their tools."""
    return {
        tool: tuple(RecipeLine(name=name, **line) for name, line in lines.items())
        for tool, lines in own_table(__file__, "recipes.toml").items()
    }


def recipe_settings(
    given: Mapping[str, Any], model: Any, architecture: str, num_devices: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a run with those of its configuration file and recipe beneath them, and those that must wait.

    Settings of several devices wait where there is one: a search may add devices to the run.

    Args:
        given: Settings of the user, which go before those of the file, and these before the tool's.
        model: The model.
        architecture: Architecture of the device.
        num_devices: Number of devices.

    Raises:
        UsageError: The file cannot be read, or the model is one that no recipe is for.
    """
    path = given.get("config")
    asked = {"precision": own_settings(model).get("precision"), **given}
    of_file = {} if path is None else read_config(path).settings_on(num_devices, asked)
    tool = given.get("recipe") or of_file.get("recipe")
    _check_model(model)
    lines = [*(RecipeLine(name=name, value=value, file=str(path)) for name, value in of_file.items())]
    lines += [line for line in recipes().get(tool or "", ()) if line.name not in of_file]
    lines = [line for line in lines if line.name not in given]
    # Adapters and the strategy of the tool decide what else holds.
    known = {**{line.name: line.value for line in lines if line.when is None}, **given}
    strategy = Strategy(known.get("strategy") or Strategy.DDP)
    words = (word.partition("=") for word in str(known.get("parallel") or "").split(","))
    axes = {name.strip() for name, _, value in words if value.strip() != "1"}
    facts = {architecture, str(strategy), _trained(known), *axes}
    facts |= {"quantized"} if known.get("quantize") is not None else set()
    facts |= {"mxfp8"} if known.get("fp8_recipe") == "mx" else set()
    is_plain = not known.get("lora_dropout") and known.get("algorithm") is None
    if "adapters" in facts and is_plain and known.get("quantize") != "int8":
        facts.add("plain-adapters")
    present = set(axes)
    if num_devices > 1:
        facts.add("several")
        present |= {"several", "fsdp"} if strategy.stage == 3 else {"several"}
    if strategy is Strategy.HSDP:
        facts.add("fsdp")
    held, waiting = dict(given), {}
    for line in lines:
        value = line.value if line.when is None or line.when in facts else line.otherwise
        needs = declared(RunOptions)[line.name].setting.needs
        if value is None:
            continue
        if needs not in _AWAITED or needs in present:
            held[line.name] = value
        elif line.name in declared(Sharing):
            waiting[line.name] = value
    # What a tool updates in bf16 is what it holds in bf16; other precisions have weights of their own.
    is_bf16 = "adapters" in facts or held.get("precision", "bf16") in ("bf16", "fp8")
    if not is_bf16 and given.get("master_weights") is None and held.get("master_weights") == "bf16":
        del held["master_weights"]
    return held, waiting


def _trained(known: Mapping[str, Any]) -> str:
    return "full" if known.get("lora") is None else "adapters"


def _check_model(model: Any) -> None:
    if is_keras(model) or is_captured(model):
        raise InvalidSetupError(
            "--recipe and --from are for PyTorch models by name; a captured script has the settings of its own tool, "
            "and Keras those of Keras; leave them out"
        )


def own_precision(given: Mapping[str, Any]) -> str | None:
    """The precision that a configuration file or a recipe brings along, None if neither does."""
    path = given.get("config")
    of_file = {} if path is None else read_config(path).settings
    lines = recipes().get(given.get("recipe") or of_file.get("recipe", ""), ())
    is_held = {None, _trained({**of_file, **given})}
    found = (
        line.value if line.when in is_held else line.otherwise for line in lines if line.name == "precision"
    )
    return of_file.get("precision") or next(found, None)


def recipe_notes(software: Software) -> tuple[str, ...]:
    """Notes of every answer: keys of a configuration file that were not understood, and settings of a recipe."""
    notes = []
    if software.config is not None:
        found, ignored = read_config(software.config), ""
        if found.not_understood:
            ignored = f"; ignored, because not understood: {'; '.join(found.not_understood)}"
        notes.append(f"{found.path}: read as a configuration of {found.tool}{ignored}")
    if software.recipe is not None:
        names = ", ".join("--" + line.name.replace("_", "-") for line in recipes()[software.recipe])
        notes.append(
            f"recipe {software.recipe}: settings that were not given have this tool's defaults ({names}); "
            "forerun/question/recipes.toml names the source of each"
        )
    return tuple(notes)


_JOINED = ("lora_targets", "fused_kernels")
"""Settings that several keys of a file may add to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The settings that a configuration file holds, or several together.

    Attributes:
        path: The file, or several, separated by commas.
        tool: The tool that it is for.
        model: The model it names, as forerun names it; None if it names none.
        settings: Settings of a run, with the recipe of the tool.
        not_understood: Keys that may change time or memory, with their values.
        global_batch: Samples of an update on all devices; None if the file does not say so.
        is_deepspeed: Whether DeepSpeed trains.
    """

    path: str
    tool: str
    model: str | None
    settings: Mapping[str, Any]
    not_understood: tuple[str, ...]
    global_batch: int | None = None
    is_deepspeed: bool = False

    def settings_on(self, num_devices: int, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings beside those of the user, with the micro-steps that make the samples of an update.

        Epochs have a meaning only where the user says how much data there is, and tokens where samples have a length.
        """
        held = dict(self.settings)
        is_half = "precision" not in held and given.get("precision") in ("bf16", "fp16")
        if self.is_deepspeed and is_half and (given.get("lora") or held.get("lora")) is None:
            held["master_weights"] = "fp32"  # "auto": beside the precision of the question
        if given.keys().isdisjoint(("dataset", "dataset_size", "lengths")):
            held.pop("epochs", None)
        if (given.get("sequence_length") or held.get("sequence_length")) is None:
            held.pop("tokens", None)
        if self.global_batch is not None and "accumulation" not in held:
            axes = given.get("parallel") or held.get("parallel")
            groups = parse_parallel(axes, num_devices)["data"] if axes and num_devices > 1 else num_devices
            batch = given.get("batch_size") or held.get("batch_size") or self.global_batch
            held["accumulation"] = max(1, self.global_batch // (batch * groups))
        return held


@cache
def _tools() -> Mapping[str, Mapping[str, Any]]:
    """The meanings of the keys of each tool; the tables of a tool override those of the tool that it resembles."""
    tools = own_table(__file__, "config_files.toml")
    for tool in tools.values():
        for name, part in tools.get(tool.get("like"), {}).items():
            if isinstance(part, dict):
                tool[name] = tool.get(name, {}) | {
                    key: value for key, value in part.items() if key not in tool.get(name, {})
                }
            elif name in ("ignored", "decides"):
                tool[name] = [*tool.get(name, ()), *part]
            else:
                tool.setdefault(name, part)
    return tools


def read_config(path: str | Path) -> ConfigFile:
    """The settings in a configuration file, or in several, separated by commas.

    What a trainer's own file says goes before the file of its launcher, DeepSpeed or accelerate.

    Raises:
        UsageError: A file cannot be read, is of no tool that is known, or says otherwise than another one.
    """
    files = [_read_file(name.strip()) for name in str(path).split(",")]
    settings: dict[str, Any] = {}
    for file in sorted(files, key=lambda file: file.tool not in _LAUNCHERS):
        for name, value in file.settings.items():
            if settings.get(name, value) != value and name not in ("precision", "master_weights"):
                raise UsageError(
                    f"expected files that agree, got {name.replace('_', ' ')} {value} in '{file.path}' and "
                    f"{settings[name]} in another one of --from; leave one of them out"
                )
            settings[name] = value
    is_deepspeed = any(file.is_deepspeed for file in files)
    return ConfigFile(
        path=str(path),
        tool=" and ".join(dict.fromkeys(file.tool for file in files)),
        model=next((file.model for file in files if file.model is not None), None),
        settings=_under_deepspeed(settings) if is_deepspeed else _under_fsdp(settings, files),
        not_understood=tuple(line for file in files for line in file.not_understood),
        global_batch=next((file.global_batch for file in files if file.global_batch is not None), None),
        is_deepspeed=is_deepspeed,
    )


_LAUNCHERS = ("deepspeed", "accelerate")


def _under_deepspeed(found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with DeepSpeed's mixed precision: the model in half precision beside fp32 weights, no autocast.

    Source: deepspeedai/DeepSpeed: deepspeed/runtime/engine.py, ``_configure_distributed_model``, and
    deepspeed/runtime/zero/stage3.py.
    """
    own = next(
        (line.value for line in recipes().get(found.get("recipe", ""), ()) if line.name == "precision"), None
    )
    half = {"amp-bf16": "bf16", "bf16": "bf16", "amp": "fp16", "fp16": "fp16"}.get(
        found.get("precision") or own or ""
    )
    if half is None or "lora" in found:
        return dict(found)
    return {**found, "precision": half, "master_weights": "fp32"}


def _under_fsdp(found: dict[str, Any], files: Iterable[ConfigFile]) -> dict[str, Any]:
    """The settings with accelerate's FSDP: under its mixed precision what is trained is cast to fp32 first.

    Source: huggingface/accelerate: src/accelerate/accelerator.py, ``prepare_model``, and
    src/accelerate/utils/fsdp_utils.py.
    """
    own = next((file.settings for file in files if file.tool == "accelerate"), {})
    mixed = str(own.get("precision", ""))
    if own.get("strategy") not in ("fsdp", "hsdp") or not mixed.startswith("amp") or "lora" in found:
        return found
    # The weights themselves are in fp32: there are no others beside them, whatever a recipe says.
    return {**found, "precision": mixed, "master_weights": None}


def _read_file(path: str) -> ConfigFile:
    held = _with_bases(Path(path))
    for name, tool in _tools().items():
        if any(held.keys() >= set(marks) for marks in tool["marks"]):
            return _read(Path(path), name, tool, {key: _resolved(held, value) for key, value in held.items()})
    raise UsageError(
        f"'{path}' is no configuration of {', '.join(_tools())}: none has its keys; give the settings as options"
    )


def _with_bases(path: Path) -> dict[str, Any]:
    """Keys of a file over those of the files that it names as its defaults, as NeMo RL's do, beside its own folder."""
    own = dict(_flat(_content(path)))
    named = own.pop("defaults", ())
    held: dict[str, Any] = {}
    for word in [named] if isinstance(named, str) else named:
        if not isinstance(word, str) or not word.endswith((".yaml", ".yml")):
            continue  # Hydra's groups
        if not (path.parent / word).is_file():
            raise UsageError(
                f"'{path}' has its defaults in '{word}', which is not there; put that file there as well"
            )
        held |= _with_bases(path.parent / word)
    return held | own


def _content(path: Path) -> Mapping[str, Any]:
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        readers: dict[str, Callable[[str], Any]] = {
            ".toml": tomllib.loads,
            ".json": parsed_json,
            ".sh": _options,
        }
        found = readers.get(path.suffix, parsed_yaml)(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"cannot read '{path}': {reason}; give a YAML, TOML or JSON file, or a shell script"
        ) from None
    if not isinstance(found, dict):
        raise UsageError(
            f"expected keys and values in '{path}', got {type(found).__name__}; give a tool's own file"
        )
    return found


def _options(text: str) -> dict[str, Any]:
    r"""Options that a shell script gives its program: ``--key value`` and ``key.name=value``, variables filled in.

    >>> _options("N=${N:-8}\ntorchrun --nnodes 2 train.py --lora-r $N --bf16 data.size=4")
    {'program': 'train.py', 'lora_r': 8, 'bf16': True, 'data.size': 4}
    """
    variables: dict[str, str] = {}
    found: dict[str, Any] = {}
    key, begun = None, False
    for raw in shlex.split(text.replace("\\\n", " "), comments=True):
        word = _VARIABLE.sub(lambda match: variables.get(match[1] or match[3], match[2] or match[0]), raw)
        name, sign, value = word.partition("=")
        is_option = name.startswith("--") and len(name) > 2
        if not begun and sign and name.isidentifier():
            variables[name] = value
        elif is_option or (sign and "." in name.strip("+~") and "/" not in name):
            key = name.lstrip("-+~").replace("-", "_") if is_option else name.strip("+~")
            # A launcher's options stand before the program, and only its file says how devices are used.
            if begun or key == "config_file":
                found[key] = parsed_yaml(value) if sign else True
            key = None if sign or key not in found else key
        elif word.endswith(".py") or key is None:
            if word.endswith(".py") or word in _PROGRAMS or word.startswith(("verl.", "openrlhf.", "trl.")):
                begun, found["program"] = True, word
        elif not word.startswith("-") or word[1:].replace(".", "").isdigit():
            before = found[key]
            found[key] = (
                parsed_yaml(word)
                if before is True
                else [*(before if isinstance(before, list) else [before]), word]
            )
    return found


_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_PROGRAMS = ("train", "sft", "dpo", "grpo", "kto", "reward", "rloo")
"""Commands of llamafactory-cli, swift and trl after which their options stand."""


def _flat(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of nested mappings, joined by dots, with their values; those without a value left out."""
    for key, value in part.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif value is not None:
            yield name, value


def _resolved(held: Mapping[str, Any], value: Any) -> Any:
    """The value of a key, or that of another one it refers to, such as ``${data.max_prompt_length}``."""
    for _ in range(8):  # references of references; one in a circle stays as it is
        match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        if match is None or match[1] not in held:
            break
        value = held[match[1]]
    return value


def _read(path: Path, name: str, tool: Mapping[str, Any], held: Mapping[str, Any]) -> ConfigFile:
    found: dict[str, Any] = {"recipe": tool["recipe"]} if "recipe" in tool else dict(tool.get("always", {}))
    for needed, default in tool.get("defaults", {}).items():
        found |= default if _is_set(held, needed) else {}
    strange: list[str] = []
    terms = [term.split() for term in listed_names(tool.get("global_batch", ""))]
    total = next((term for term in terms if _made(held, term)), [])
    axes, model = [], None
    is_deepspeed = tool.get("deepspeed", False) or held.get("distributed_type") == "DEEPSPEED"
    for key, value in held.items():
        # Tools write the settings of a feature even where the feature is off.
        if not all(_is_set(held, needed) for needed in _matched(tool.get("only_with", {}), key) or ()):
            continue
        word = _word(value, tool.get("renamed", {}))
        meaning = _meaning(tool["values"], key, word)
        others = _matched(tool.get("with_others", {}), key) or ()
        is_deepspeed |= key == "deepspeed"
        if key in tool.get("axes", {}) and word not in ("1", "none"):
            axes.append(f"{tool['axes'][key]}={word}")
        if not all(_is_set(held, needed) for needed in others) and meaning:
            strange.append(f"{key}: {word}")
        elif tool["settings"].get(key) == "model":
            model, more = _model(name, word, held)
            _add(found, more)
        elif key in tool["settings"]:
            # "auto" leaves the choice to the tool's trainer, as an absent line does.
            if word != "auto":
                _add(found, {tool["settings"][key]: word if isinstance(value, list) else value})
        elif key in tool.get("files", ()) and (named := _beside(path, word)) is not None:
            other = read_config(named)
            _add(found, other.settings)
            strange += other.not_understood
        elif meaning is not None:
            strange += [f"{key}: {word}"] if meaning.get("named") else []
            _add(found, {name: value for name, value in meaning.items() if name != "named"})
        elif _is_any(tool.get("decides", ()), key):
            _check_decision(path, tool, key, word)
        elif key in (*tool.get("axes", ()), *tool.get("shards", ()), *total):
            pass
        elif _matched(tool["values"], key) is not None or not _is_any(tool["ignored"], key):
            strange.append(f"{key}: {word}")
    if found.get("strategy", "fsdp") == "fsdp":
        found |= _of_groups(tool, held)
    if axes:
        found["parallel"] = ",".join(axes)
    # Targets of adapters without a rank belong to a full fine-tuning that once was LoRA.
    if "lora" not in found and found.get("recipe") != "unsloth":
        found.pop("lora_targets", None)
        found.pop("lora_dropout", None)
    ones = dict.fromkeys(tool.get("ones", ()), 1)
    for setting, term in tool.get("made", {}).items():
        is_asked = all(_is_set(held, needed) for needed in _matched(tool.get("only_with", {}), setting) or ())
        if is_asked and (made := _made({**ones, **found, **held}, term.split())) is not None:
            found[setting] = made
    return ConfigFile(
        path=str(path),
        tool=name,
        model=model,
        settings=found,
        not_understood=tuple(strange),
        global_batch=_made(held, total) or None,
        is_deepspeed=is_deepspeed,
    )


_SIGNS = {"*": mul, "+": add, "/": floordiv}


def _made(held: Mapping[str, Any], term: Sequence[str]) -> int | None:
    """The value of ``a * b / c``, from left to right; None if a key has no positive number."""
    numbers = [held.get(key) for key in term[::2]]
    if not numbers or not all(isinstance(number, int) and number > 0 for number in numbers):
        return None
    found = cast("list[int]", numbers)
    return reduce(
        lambda value, step: _SIGNS[step[0]](value, step[1]), zip(term[1::2], found[1:], strict=True), found[0]
    )


def _of_groups(tool: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """The strategy that numbers of replicas and of shards stand for; -1 shards are all devices."""
    replicas, shards = (held.get(key, 1) for key in tool.get("shards", ("", "")))
    if replicas == 1:
        return {} if shards == 1 else {"strategy": "fsdp"}
    if shards == 1:
        return {"strategy": "ddp"}
    return {"strategy": "hsdp"} | ({"shard_size": shards} if shards > 1 else {})


def _beside(path: Path, word: str) -> Path | None:
    """The file that a configuration names, as seen from here or from its own folder; None if it is in neither."""
    return next((found for found in (Path(word), path.parent / word) if found.is_file()), None)


def _is_any(patterns: Iterable[str], key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _matched(table: Mapping[str, Any], key: str) -> Any:
    """The entry of a key, by its name or its pattern; None without one."""
    return table.get(key) or next((entry for name, entry in table.items() if fnmatchcase(key, name)), None)


def _meaning(table: Mapping[str, Any], key: str, word: str) -> Mapping[str, Any] | None:
    """The settings that a key with this value stands for, None if they are not known.

    A feature that is off, or left to the tool, has none.
    """
    words = _matched(table, key)
    if words is None:
        return None
    found = {} if word in ("false", "auto") and word not in words else _matched(words, word)
    return (
        found if found is None else {name: word if value == "=" else value for name, value in found.items()}
    )


def _check_decision(path: Path, tool: Mapping[str, Any], key: str, word: str) -> None:
    if word.lower() in ("false", "none", "0", ""):
        return
    known = _matched(tool["values"], key)
    expected = f"; expected {', '.join(known)}" if known else ""
    raise UsageError(
        f"'{path}' has {key}: {word}, which changes what a step holds and is not known here{expected}; take the line "
        "out to ask without it"
    )


def _is_set(held: Mapping[str, Any], needed: str) -> bool:
    """True if a key is set, ``key``, has this value, ``key=value`` or ``key=*part*``, or is not set, ``!key``."""
    key, _, value = needed.removeprefix("!").partition("=")
    return (bool(held.get(key)) and (not value or fnmatchcase(_word(held[key]), value))) != needed.startswith(
        "!"
    )


def _add(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        found[name] = f"{found[name]},{value}" if name in _JOINED and name in found else value


def _word(value: Any, renamed: Mapping[str, str] | None = None) -> str:
    if isinstance(value, list):
        return ",".join(dict.fromkeys(_word(item, renamed) for item in value))
    word = str(value).lower() if isinstance(value, bool) else str(value)
    return (renamed or {}).get(word, word)


def _model(tool: str, word: str, held: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model that a file names, and what its name says of adapters."""
    more: dict[str, Any] = {}
    last = others = word.rstrip("/").rpartition("/")[2]
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
        # A flavor of one's own, such as opt-30B-A3B, has the tokenizer of the model it is made from.
        others = str(held.get("model.hf_assets_path", last)).rstrip("/").rpartition("/")[2]
    last = _tools()[tool].get("models", {}).get(last, last)
    for name in (word, last):
        known = find_architecture(name)
        if known is not None:
            return known.name, more
    squeezed = {re.sub(r"[^a-z0-9]", "", name): name for name in architectures()}
    for name in (last, others):
        known_name = squeezed.get(re.sub(r"[^a-z0-9]", "", base_name(name).lower().removeprefix("meta-")))
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


_FIXED = ("layout", "optimizer", "optimizer_implementation")
_KINDS: Mapping[str, type[StrEnum]] = {
    "precision": Precision,
    "layout": Layout,
    "optimizer_implementation": OptimizerImplementation,
    "strategy": Strategy,
}
_OF_INPUT = ("image_size", "input_shape", "sequence_length")
_SAME_KERNELS = ({"fp32", "tf32"}, {"bf16", "fp16"}, {"amp", "amp-bf16"})
"""Precisions that share a graph."""


def with_captured_settings(model: Any, given: Mapping[str, Any], *, one_device: bool) -> dict[str, Any]:
    """The settings of a run with those that its captured script decides; other models change nothing.

    Args:
        model: The model.
        given: The settings of the user, who may choose batch size, micro-steps, devices, job and loader anew.
        one_device: Whether the user named one device and no number of them.

    Raises:
        InvalidSetupError: A setting contradicts the capture.
    """
    facts = captured_facts(model)
    if facts is None:
        return dict(given)
    own = facts.settings()
    for name, kind in _KINDS.items():
        said = getattr(facts, name)
        if said and said not in list(kind):
            raise UsageError(
                f"expected a captured graph whose {name.replace('_', ' ')} is one of {', '.join(kind)}, got "
                f"'{said[:20]}'; capture the script again"
            )
    for name in _OF_INPUT:
        if given.get(name) is not None:
            raise _contradiction(name, given[name], "the inputs of the script")
    if given.get("phase", Phase.TRAIN) != Phase.TRAIN:
        raise _contradiction("phase", given["phase"], "a training step")
    if given.get("fused_attention") is False:
        raise _contradiction("fused attention", "no", "attention as the script runs it")
    for name in _FIXED:
        if given.get(name) is not None and str(given[name]).lower() != own.get(name):
            raise _contradiction(name.replace("_", " "), given[name], own.get(name))
    wanted, held = str(given.get("precision") or own["precision"]), own["precision"]
    # A graph was recorded with the kernels of one precision: another one has other kernels, not other times.
    if wanted != held and not any({wanted, held} <= same for same in _SAME_KERNELS):
        raise _contradiction("precision", wanted, held)
    if given.get("dataset") is not None:
        own.pop("dataset_size", None)
    if any(given.get(name) is not None for name in ("dataset", "dataset_size", "tokens")):
        own.pop("validation_size", None)  # that of other data
    if one_device and facts.world_size > 1:
        own["num_devices"] = facts.world_size
    if not one_device or facts.world_size > 1:
        own |= facts.sharing_settings()
    return {**own, **{name: value for name, value in given.items() if value is not None}}


def _contradiction(name: str, wanted: Any, held: Any) -> InvalidSetupError:
    return InvalidSetupError(
        f"a captured script keeps its {name}: asked for {wanted}, the capture holds {held}; leave it out, or capture "
        "the script again with other arguments"
    )
