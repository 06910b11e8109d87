"""Bad values for every option of every command, made from the options' own declarations.

A good command line stands for each command; each case changes one option of it to a value that the option's kind
suggests: numbers that are none, negative, huge or not finite; texts that are empty, long or in another script; files
that are missing, folders, devices, full disks, empty, binary, or nested deeply. A case fails if it prints a traceback
or "internal error", ends by a signal, takes longer than 30 s of the processor, prints more than one JSON object, or is
answered as if the bad value had not been given.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from typer.main import get_command

from studies.markdown import markdown_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command.

    Attributes:
        words: The command line.
        status: Exit status; negative for a signal; None if it was ended because it took too long.
        out, err: Its output.
        time_s: Its time [s].
        cpu_s: Its CPU time, that of its ended processes included [s].
    """

    words: tuple[str, ...]
    status: int | None
    out: str
    err: str
    time_s: float
    cpu_s: float


def run_command(words: Sequence[str], folder: Path) -> Ended:
    """Runs ``forerun WORDS`` in a folder and waits for its end, for ``_TIMEOUT_S`` at most.

    Args:
        words: Words of the command line.
        folder: Working folder; the output goes to files in it.
    """
    outputs = [folder / name for name in (".out", ".err")]
    began_s = time.monotonic()
    pid = os.fork()
    if not pid:
        _be_the_command(words, folder, outputs)
    status, cpu_s = None, _TIMEOUT_S
    while time.monotonic() - began_s < _TIMEOUT_S:
        found, state, used = os.wait4(pid, os.WNOHANG)
        if found:
            status, cpu_s = os.waitstatus_to_exitcode(state), used.ru_utime + used.ru_stime
            break
        time.sleep(0.01)
    else:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in outputs]
    time_s = time.monotonic() - began_s
    return Ended(words=tuple(words), status=status, out=texts[0], err=texts[1], time_s=time_s, cpu_s=cpu_s)


def _be_the_command(words: Sequence[str], folder: Path, outputs: Sequence[Path]) -> None:
    os.setsid()
    os.chdir(folder)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # What captured the output of this process has nothing to do with the command.
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w")), encoding="utf-8", errors="replace")
        for number in (1, 2)
    )
    status: object = 0
    try:
        from forerun.surface.cli.main import run

        sys.argv = ["forerun", *words]
        run()
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 70
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # this child must never go on as the process that it was forked from
        os._exit(status if isinstance(status, int) else 1)


LONGEST_CPU_S = 30.0
"""Longest CPU time of a case [s]; its time by the clock depends on what else the machine does."""
_TIMEOUT_S = 150.0

_NUMBERS = (
    "abc", "", "-1", "0", "1e308", "99999999999999999999999999", "nan", "inf", "-inf", "1.5.2", "０x１",
)  # fmt: skip
_TEXTS = (
    "",
    "-",
    "é" * 300,
    "a" * 20_000,
    "{}",
    "%s%n",
    "[" * 5000,
    "../../etc/passwd",
    "1e308",
    "a;b=,;=",
    "\udc80",
)
_FILES = (
    "missing/x.csv", "/", "/proc/self/mem", "/dev/full", "/dev/null", "empty.csv", "binary.csv", "deep.json",
    "deep.yaml", "nul.csv", "huge-numbers.csv", "bad.onnx",
)  # fmt: skip
_MODELS = (
    "cnn:depth=-1", "cnn:depth=100000", "cnn:depth=1e308", "cnn:depth", "cnn:depth=2,depth=3", "hf:negative.json",
    "hf:deep.json", "hf:many-layers.json", "hf:missing.json", "hf:/proc/self/mem", "onnx:binary.csv", "onnx:bad.onnx",
    "onnx:/dev/null", "keras:missing.keras", "torchvision:", "timm:" + "x" * 1000, "own.py:exits", "own.py:raises",
    "own.py:", "own.py:none", "binary.py:x", ":", "cnn:" + "[" * 5000,
)  # fmt: skip

_GOOD: dict[str, tuple[str, ...]] = {
    "predict": ("cnn:depth=2,base_filters=32", "--on", "t4", "--json"),
    "plan": ("cnn:depth=2,base_filters=32", "--on", "t4", "--json"),
    "scale devices": ("cnn:depth=2,base_filters=32", "--on", "t4", "--json"),
    "layouts": ("gpt2", "--on", "8xa100-sxm4-80gb", "--json"),
    "advise": ("cnn:depth=2,base_filters=32", "--on", "t4", "--json"),
    "forecast run": ("curve.csv", "--target", "accuracy>=0.7", "--json"),
    "schedule jobs": ("jobs.csv", "--cluster", "2x4xt4", "--json"),
    "evaluate steps": ("timm.csv", "--on", "rtx-3090", "--json"),
    "report": ("answer.json",),
    "fit": ("timm.csv", "--model", "ann", "--out", "ann.safetensors", "--json"),
    "hardware show": ("t4", "--json"),
    "records list": ("--records", "records.sqlite", "--json"),
    "records check": ("--records", "records.sqlite", "--json"),
    "records show": ("0", "--records", "records.sqlite", "--json"),
    "records export": ("out.csv", "--records", "records.sqlite", "--json"),
    "records import": ("empty.csv", "--records", "records.sqlite", "--json"),
}
"""A command line for each command that runs nothing of its own for long; ``fit`` may refuse a table so small."""
_MEASURING = (
    "measure grid", "measure layers", "measure model", "measure link", "tune", "profile", "calibrate",
)  # fmt: skip
"""Commands that run things: they get values that their kind cannot have, and nothing else."""
_PRELOADED = (
    "forerun.surface.cli.main", "forerun.search.predict", "forerun.search.plan", "forerun.search.layouts",
    "forerun.search.advise", "forerun.search.scale", "forerun.jobs.forecast", "forerun.jobs.schedule",
    "forerun.evidence.evaluate", "forerun.evidence.measure", "forerun.script.tune", "pandas", "pyarrow.csv",
    "scipy.optimize", "sqlalchemy.dialects.sqlite", "forerun.surface.report.figure", "forerun.jobs.plots",
)  # fmt: skip
_NEVER = ("--help", "--version", "--debug", "--json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command line with a bad value.

    Attributes:
        command: Name of the command.
        option: The option that is changed, or the argument.
        words: Words of the command line.
        must_fail: True if no reading of the value makes sense.
    """

    command: str
    option: str
    words: tuple[str, ...]
    must_fail: bool


def bad_cases(number: int) -> list[Case]:
    """Cases drawn from all that the declarations suggest, evenly over the commands."""
    draw = random.Random(22)
    by_command: dict[str, list[Case]] = {}
    for case in _all_cases():
        by_command.setdefault(case.command, []).append(case)
    for cases in by_command.values():
        draw.shuffle(cases)
    chosen: list[Case] = []
    while len(chosen) < number and any(by_command.values()):
        for cases in by_command.values():
            if cases and len(chosen) < number:
                chosen.append(cases.pop())
    return chosen


def _all_cases() -> Iterator[Case]:
    from forerun.surface.cli.main import app

    for name, command in _commands(get_command(app)):
        is_measuring = name in _MEASURING
        if name not in _GOOD and not is_measuring:
            continue
        good = _GOOD.get(name, ())
        for parameter in command.params:
            if parameter.opts[0] in _NEVER or getattr(parameter, "is_flag", False):
                continue
            for value, must_fail in _values(name, parameter, is_measuring):
                words = _changed(good, parameter, value)
                option = parameter.opts[0]
                yield Case(command=name, option=option, words=(*name.split(), *words), must_fail=must_fail)


def _commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, f"{path} {name}".strip())
    if not hasattr(command, "commands"):
        yield path, command


def _values(command: str, parameter: Any, is_measuring: bool) -> Iterator[tuple[str, bool]]:
    kind = parameter.type_descriptor.annotation
    if kind in (int, float):
        low = parameter.min
        for value in _NUMBERS:
            number = _number(value)
            is_wrong = number is None or (kind is int and value in ("1e308", "nan", "inf", "-inf"))
            is_low = number is not None and low is not None and number < low
            if is_wrong or is_low or not is_measuring:
                yield value, is_wrong or is_low
        return
    if is_measuring:
        return
    if kind is Path or parameter.name in ("file", "source", "jobs", "curve", "records"):
        for value in _FILES:
            yield value, False
        return
    for value in _MODELS if parameter.name == "model" and command != "fit" else _TEXTS:
        yield value, False


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _changed(good: Sequence[str], parameter: Any, value: str) -> list[str]:
    words = list(good)
    if parameter.param_type_name == "argument":
        if words and not words[0].startswith("-"):
            words[0] = value
            return ["--", *words] if value.startswith("-") and value != "-" else words
        return [value, *words]
    for flag in parameter.opts:
        if flag in words:
            words[words.index(flag) + 1] = value
            return words
    return [*words, f"{parameter.opts[0]}={value}"]


def make_files(folder: Path) -> None:
    """Writes the files that the command lines name, good ones and bad ones."""
    header = "epoch,accuracy,val_loss\n"
    rows = "".join(f"{epoch},{0.75 - 0.5 / epoch:.4f},{0.8 + 1 / epoch:.4f}\n" for epoch in range(1, 13))
    texts = {
        "curve.csv": header + rows,
        "jobs.csv": "name,points,batch_size,steps,num_devices,arrival,deadline,script\n"
        "a,1:100 2:190 4:340,32,20000,2,,,train.py\nb,1:50 2:95 4:180,64,4000,4,,2h,\n",
        "timm.csv": "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count\n"
        "resnet18,2500.0,25.6,64,64,11.69\nresnet18,2900.0,44.1,128,64,11.69\n",
        "empty.csv": "",
        "nul.csv": "epoch,accuracy\n1,0.5\x00\n",
        "huge-numbers.csv": "epoch,accuracy\n1," + "9" * 5000 + "\n1e308,1e308\n",
        "deep.json": "[" * 100_000,
        "deep.yaml": "[" * 5000,
        "negative.json": json.dumps(
            {
                "model_type": "gpt2",
                "n_layer": -3,
                "n_embd": 64,
                "n_head": 2,
                "vocab_size": 100,
                "n_positions": 64,
            }
        ),
        "many-layers.json": json.dumps(
            {"model_type": "gpt2", "n_layer": 100_000, "n_embd": 64, "n_head": 2, "vocab_size": 100}
        ),
        "own.py": "import os\ndef exits(): os._exit(0)\ndef raises(): raise ValueError('no')\n"
        "def none(): return None\n",
        "answer.json": "{}",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    noise = random.Random(1).randbytes(4096)
    for name in ("binary.csv", "binary.py", "bad.onnx"):
        (folder / name).write_bytes(noise)


def run_cases(
    cases: Sequence[Case], folder: Path, *, with_good: bool = True
) -> list[tuple[Case, Ended, str]]:
    """Runs cases; returns each with its end and its fault in words, empty if there is none.

    Args:
        cases: The cases.
        folder: Folder for files.
        with_good: True runs the good command lines too, whose answers show which values were ignored.
    """
    for name in _PRELOADED:  # once here instead of once in each copy of this process
        import_module(name)
    make_files(folder)
    _make_store(folder / "records.sqlite")
    answers = {
        name: run_command([*name.split(), *words], folder).out
        for name, words in (_GOOD.items() if with_good else ())
    }
    judged = []
    for case in cases:
        ended = run_command(case.words, folder)
        judged.append((case, ended, judge(case, ended, answers.get(case.command, ""))))
    return judged


def _make_store(path: Path) -> None:
    from forerun.evidence.records.record_store import RecordStore

    RecordStore.open(path).close()


def judge(case: Case, ended: Ended, good_answer: str) -> str:
    """The fault of a command's end, empty if there is none."""
    if ended.status is None or ended.cpu_s > LONGEST_CPU_S:
        return "took longer than 30 s"
    if "Traceback (most recent call last)" in ended.err:
        return "traceback"
    if "internal error" in ended.err:
        return "internal error"
    if ended.status not in (0, 1, 2):
        return f"exit status {ended.status}"
    if ended.status and len([line for line in ended.err.splitlines() if line.startswith("error:")]) != 1:
        return "not one line"
    if ended.out and "--json" in case.words and not _is_json(ended.out):
        return "not one JSON object"
    if case.must_fail and ended.status == 0:
        return "accepted" + (" and ignored" if ended.out == good_answer else "")
    return ""


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def bad_input_table(judged: Sequence[tuple[Case, Ended, str]]) -> list[str]:
    """Lines of a table: cases, ends and faults by command."""
    table: list[tuple[object, ...]] = []
    for command in (*dict.fromkeys(case.command for case, _, _ in judged), "all"):
        rows = [row for row in judged if command in (row[0].command, "all")]
        faults = Counter(fault.partition(" and ")[0] for _, _, fault in rows if fault)
        known = [
            faults.pop(name, 0)
            for name in ("traceback", "internal error", "took longer than 30 s", "accepted")
        ]
        refused = sum(1 for _, ended, _ in rows if ended.status in (1, 2))
        answered = sum(1 for _, ended, _ in rows if ended.status == 0)
        table.append((command, len(rows), refused, answered, *known, sum(faults.values())))
    header = (
        "command", "cases", "refused", "answered", "tracebacks", "internal errors", "over 30 s", "accepted", "other",
    )  # fmt: skip
    return markdown_table(header, table).splitlines()
