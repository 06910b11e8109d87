"""The words of a training command: the Python program, the launcher before it, its arguments and its batch size.

Arguments are ``--flag value``, ``--flag=value`` and ``key=value``.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.base.errors import ScriptError, UsageError

_KEY = re.compile(r"[+~]*[A-Za-z_][\w./@-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandArgument:
    """One argument of a command.

    Attributes:
        flag: Argument as it is written before its value: ``--lr``, ``--lr=`` or ``lr=``.
        value: Its value as written; ``True`` for a flag without one.
    """

    flag: str
    value: Any

    @property
    def name(self) -> str:
        """Name of the argument as a Python name: ``batch_size`` for ``--batch-size=``."""
        return self.flag.strip("-=").replace("-", "_")


def command_arguments(command: Sequence[str]) -> tuple[CommandArgument, ...]:
    """Arguments of a command, in order; a word after a flag is its value unless it looks like an argument itself.

    >>> [(a.name, a.value) for a in command_arguments(["python", "train.py", "--lr", "0.1", "--batch-size=4", "m=8"])]
    [('lr', '0.1'), ('batch_size', '4'), ('m', '8')]
    """
    found = []
    words = list(command)
    for index, word in enumerate(words):
        head, is_joined, value = word.partition("=")
        if word.startswith("-") and len(word) > 1 and not _is_number(word):
            following = words[index + 1] if index + 1 < len(words) else "-"
            if is_joined:
                found.append(CommandArgument(flag=f"{head}=", value=value))
            else:
                is_alone = following.startswith("-") and not _is_number(following)
                found.append(CommandArgument(flag=word, value=True if is_alone else following))
        elif is_joined and index and _KEY.fullmatch(head):
            found.append(CommandArgument(flag=f"{head}=", value=value))
    return tuple(found)


def with_arguments(command: Sequence[str], arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The command with arguments set, each in the way in which the command has it, else as its flag is written.

    A flag that ends in ``=`` is joined with its value; other flags are words before their values, and switches where
    the value is true or false. What the command has is replaced, the rest comes at the end.

    >>> with_arguments(["python", "train.py", "--lr", "0.1"], {"--lr": 0.2, "--amp": True, "--debug": False})
    ('python', 'train.py', '--lr', '0.2', '--amp')
    >>> with_arguments(["python", "train.py", "--batch_size=4", "model=gpt"], {"--batch_size": 8, "lr=": 0.1})
    ('python', 'train.py', 'model=gpt', '--batch_size=8', 'lr=0.1')
    """
    words = list(command)
    for flag, value in arguments.items():
        bare = flag.removesuffix("=")
        is_joined = flag.endswith("=") or any(word.startswith(f"{bare}=") for word in words)
        is_switch = isinstance(value, bool) and not is_joined
        words = _without(words, bare, takes_value=not is_switch)
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        if is_joined:
            words.append(f"{bare}={text}")
        elif value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, text]
    return tuple(words)


def _without(words: Sequence[str], flag: str, *, takes_value: bool) -> list[str]:
    kept: list[str] = []
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word == flag and flag.startswith("-"):
            is_value = takes_value
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


_PYTHON = re.compile(r"python(\d(\.\d+)?)?(\.exe)?$")
_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed")
_FLAGS_WITHOUT_VALUE = re.compile(
    r"--(standalone|multi[-_]gpu|use_fsdp|use_deepspeed|cpu|quiet|no[-_]python|module|use[-_]env|same_network)$|-[mq]$"
)
_NUM_PROCESSES = re.compile(r"--(nproc[-_]per[-_]node|num[-_]processes|num_gpus)$")
_NUM_NODES = re.compile(r"--(nnodes|num[-_]machines|num_nodes)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCommand:
    """A command that runs one Python process.

    Attributes:
        words: The words, the program first.
        asked: The words as the user gave them.
        world_size: Processes that a launcher would have started.
        devices_per_node: Of them, those of one machine.
        is_launched: Whether a launcher sets the variables of its processes, such as ``LOCAL_RANK``.
        variables: Environment variables that the command sets.
    """

    words: tuple[str, ...]
    asked: tuple[str, ...]
    world_size: int = 1
    devices_per_node: int = 1
    is_launched: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


def check_command(command: Sequence[str]) -> tuple[str, ...]:
    """The command, with its program and script checked to exist; a script alone is run by this Python.

    Raises:
        UsageError: There is no command, its program does not exist, or its script does not.
    """
    words, _ = _with_program(_given(command))
    script = next((word for word in words[1:] if word.endswith(".py")), None)
    if script is not None:
        _check_file(script)
    return words


def _given(command: Sequence[str]) -> tuple[str, ...]:
    if not command:
        raise UsageError("expected a command after --, such as: -- python train.py --epochs 3")
    # As a shell does with variables before a program.
    return ("env", *command) if _VARIABLE.match(command[0]) else tuple(command)


def _with_program(words: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The words, with a Python program before a script, and the path of the program."""
    if words[0].endswith(".py"):
        words = (sys.executable, *words)
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(
            "expected a command such as python train.py, or a single MODEL where one is asked for, but there is no "
            f"program '{words[0]}' on the path"
        )
    return words, program


def _check_file(script: str) -> None:
    if not Path(script).is_file():
        raise UsageError(f"expected a script, but there is no file '{script}'; give its path from here")


def parse_command(command: Sequence[str]) -> PythonCommand:
    """The Python process that a command runs; a launcher is taken off.

    >>> parse_command(["torchrun", "--nproc_per_node=8", "setup.py", "--lr", "1"]).world_size
    8
    >>> parse_command(["env", "SEED=1", "python", "-W", "ignore", "-m", "json.tool"]).variables
    {'SEED': '1'}

    Raises:
        UsageError: There is no command, or its program or script does not exist.
        ScriptError: The program is not one of Python.
    """
    words = _given(command)
    own, variables = _without_runner(words)
    rest, num_nodes, per_node, given = _without_launcher(own)
    is_launched = rest is not own
    rest, program = _with_program(rest)
    name = Path(rest[0]).name
    if not _PYTHON.match(name) and not _is_python_script(Path(program)):
        raise ScriptError(
            f"expected a command that runs Python, such as python train.py, but '{rest[0]}' is not; name "
            f"the Python command that it runs{_python_line(rest)}"
        )
    if not _PYTHON.match(name):
        rest = (program, *rest[1:])
    elif not {"-m", "-c"} & set(rest[1:]):
        place = script_place(rest)
        if place >= len(rest):
            raise UsageError("expected a script after python, such as: python train.py")
        _check_file(rest[place])
    return PythonCommand(
        words=rest,
        asked=words,
        world_size=num_nodes * per_node,
        devices_per_node=per_node,
        is_launched=is_launched,
        variables={**given, **variables},
    )


def is_python(word: str) -> bool:
    """True for the name of a Python interpreter.

    >>> is_python("/usr/bin/python3.11"), is_python("yolo")
    (True, False)
    """
    return _PYTHON.match(Path(word).name) is not None


def script_place(words: Sequence[str]) -> int:
    """Position of the script among the words of a Python command, or of the module or text after ``-m`` or ``-c``.

    >>> script_place(["python", "-u", "-W", "ignore", "train.py", "--lr", "1"])
    4
    """
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place - 1] not in ("-m", "-c"):
        place += 2 if words[place] in ("-W", "-X") else 1
    return place


_RUNNERS = ("env", "nohup", "time", "nice")
_PROJECT_RUNNERS = ("uv", "poetry", "pipenv", "pdm", "hatch")
_MOST_LINES = 1000
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")


def _without_runner(words: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command behind a program that runs it unchanged, such as ``uv run``, and the variables set before it."""
    name = Path(words[0]).name
    starts = (
        i for i, word in enumerate(words) if word.endswith(".py") or is_python(word) or word in _LAUNCHERS
    )
    start = next(starts, None)
    if start is None or name not in (*_RUNNERS, *_PROJECT_RUNNERS):
        return words, {}
    rest = words[start:]
    own = (folder / ".venv" / "bin" / "python" for folder in (Path.cwd(), *Path.cwd().parents))
    found = next(filter(Path.exists, own), None) if name in _PROJECT_RUNNERS else None
    if found is not None and rest[0] not in _LAUNCHERS:
        rest = (str(found), *rest[is_python(rest[0]) :])
    return rest, dict(word.split("=", 1) for word in words[:start] if _VARIABLE.match(word))


def _python_line(words: Sequence[str]) -> str:
    """The first line of a shell script that starts Python, as part of a message; empty without one."""
    for name in filter(os.path.isfile, words[1:]):
        with Path(name).open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(itertools.islice(file, _MOST_LINES), 1):
                if any(is_python(word) or word in _LAUNCHERS for word in line.split()):
                    return f": {line.strip()[:200]} ({Path(name).name}, line {number})"
    return ""


def _without_launcher(words: tuple[str, ...]) -> tuple[tuple[str, ...], int, int, dict[str, str]]:
    """The command of one process, the number of machines, the processes of each, and the variables it gets."""
    rest = words
    if _PYTHON.match(Path(rest[0]).name) and len(rest) > 2 and rest[1] == "-m" and rest[2] in _LAUNCHERS:
        rest = (rest[2], *rest[3:])
    name = Path(rest[0]).name
    if name not in _LAUNCHERS:
        return words, 1, 1, {}
    rest = rest[1:]
    if name == "accelerate":
        if rest[:1] != ("launch",):
            raise UsageError("expected 'accelerate launch' before a script")
        rest = rest[1:]
    num_nodes, per_node, runs_module = 1, 1, False
    said: dict[str, Any] = {}
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest[0].partition("=")
        rest = rest[1:]
        runs_module |= flag in ("-m", "--module")
        # A flag without "=" takes the next word, unless it is a switch.
        if not equals and not _FLAGS_WITHOUT_VALUE.match(flag) and rest:
            value, rest = rest[0], rest[1:]
        said[flag.removeprefix("--").replace("-", "_")] = value
        if _NUM_PROCESSES.match(flag):
            per_node = _number(value)
        elif _NUM_NODES.match(flag):
            num_nodes = _number(value.partition(":")[2] or value)
        elif flag == "--include":  # of deepspeed, such as localhost:0,1
            per_node = value.count(",") + 1
    if not rest:
        raise UsageError(f"expected a script after {name}, such as: {name} train.py")
    variables: dict[str, str] = {}
    if name == "accelerate":
        filed = _configured(said["config_file"]) if "config_file" in said else {}
        num_nodes = num_nodes if "num_machines" in said else _number(str(filed.get("num_machines", 1)))
        per_node = per_node if "num_processes" in said else _number(str(filed.get("num_processes", 1)))
        # It counts the processes of all machines together, torchrun those of one.
        per_node = max(1, per_node // num_nodes)
        found = {**filed, **said}
        variables = {f"ACCELERATE_{key.upper()}": str(found[key]) for key in _ACCELERATE if found.get(key)}
    return (sys.executable, *(("-m",) if runs_module else ()), *rest), num_nodes, per_node, variables


_ACCELERATE = ("mixed_precision", "dynamo_backend", "gradient_accumulation_steps")
"""Options of ``accelerate launch`` that its processes read from variables of their environment."""


def _configured(path: str) -> dict[str, Any]:
    """The options of a configuration file of ``accelerate launch``, those of its parts beside the others."""
    from forerun.script.tuning.space import read_yaml

    found = read_yaml(Path(path), "a configuration")
    if not isinstance(found, dict):
        raise UsageError(f"expected options of accelerate in '{path}', got {type(found).__name__}")
    parts = [part for part in found.values() if isinstance(part, dict)]
    return {key: value for part in [*parts, found] for key, value in part.items()}


def _number(text: str) -> int:
    if text in ("gpu", "auto"):
        return 1
    try:
        return max(1, int(text))
    except ValueError:
        raise UsageError(f"expected a number of processes, got '{text}'") from None


def _is_python_script(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = file.readline(300)
            second = file.readline(300)
    except OSError:
        return False
    return first.startswith(b"#!") and (b"python" in first or b"python" in second)


def with_batch_size(
    command: PythonCommand, batch_size: int, other: int, result: Mapping[str, Any]
) -> PythonCommand | None:
    """The command with another batch size in its arguments; None if no argument holds the batch size.

    Args:
        command: The command as it was captured.
        batch_size: Samples of one micro-step in that capture.
        other: The batch size wanted.
        result: What the capture knows of the script's options.
    """
    words = list(command.words)
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if "batch" in flag.lower() and equals and value == str(batch_size):
            words[index] = f"{flag}={other}"
            return replace(command, words=tuple(words))
    options = [o for o in result["options"] if "batch" in o["name"].lower() and o["value"] == batch_size]
    # An option for training goes before one for everything.
    options.sort(
        key=lambda o: ("train" not in o["name"].lower(), "eval" in o["name"].lower() or "test" in o["name"])
    )
    if options and not any(part in options[0]["name"].lower() for part in ("test", "eval", "val")):
        flags = options[0]["flags"]
        for index, word in enumerate(words[:-1]):
            if word in flags and words[index + 1] == str(batch_size):
                words[index + 1] = str(other)
                return replace(command, words=tuple(words))
        return replace(command, words=(*words, max(flags, key=len), str(other)))
    for name, value in result["configurator"].items():
        if "batch" in name.lower() and value == batch_size:
            return replace(command, words=(*words, f"--{name}={other}"))
    return None
