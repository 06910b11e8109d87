"""``forerun sbatch``, ``sky`` and ``torchrun``: a job is predicted just before it is handed to the real command.

The job's file is read and never written. Its run is named by a line of its own,
``#FORERUN torchvision:resnet50 --batch-size 256 --dataset imagenet --epochs 90``, or found by capturing the training
command that it starts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.base.errors import FailureError, UsageError
from forerun.base.received import parsed_yaml
from forerun.base.tables import own_table
from forerun.question.devices.cluster import joined_spec, split_spec
from forerun.surface.cli.verbs import verb

_LAUNCHERS = re.compile(r"torchrun|accelerate|deepspeed|python(\d(\.\d+)?)?")
_WRAPPERS = ("srun", "exec", "time", "nohup", "env", "uv", "conda", "mamba", "micromamba", "poetry", "pipenv", "mpirun",
             "mpiexec", "numactl", "singularity", "apptainer")  # fmt: skip
"""Programs before a launcher on the same line; any other, such as ``echo``, only speaks of one."""

_NO_TRAINING = ("pip", "venv", "virtualenv", "ensurepip", "ipykernel", "json.tool", "nltk.downloader")
"""Modules that Python runs to prepare a training."""

_COUNTS = re.compile(
    r"--(?:(?P<devices>nproc[-_]per[-_]node|num_gpus)|(?P<all>num_processes)|nnodes|num[-_](?:machines|nodes))(?:=|$)"
)
_GPUS = re.compile(
    r"(?:gres[:/])?(?:gpu(?![A-Za-z0-9]):?)?(?P<name>[\w.-]+(?=:\d)|[A-Za-z][\w.-]*)?:?(?P<number>\d+)?"
)
_OWN = re.compile(r"^[ \t]*#FORERUN[ \t]+(.*)$", re.MULTILINE)
_SBATCH = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_REMARK = re.compile(r"(?:^|\s)#")
_LARGEST_CHARACTERS = 2**20

SKYPILOT_ACCELERATORS: Mapping[str, str] = own_table(__file__, "skypilot.toml")
"""SkyPilot's names of accelerators (``sky show-gpus``) and the catalogue devices that clouds sell under these names."""

OnOption = Annotated[
    str | None,
    typer.Option("--on", metavar="DEVICE", help="Device of the job, where its file does not name it."),
]
WithinOption = Annotated[
    str,
    typer.Option(
        "--within", metavar="LIMITS", help="Limits that the job must keep, such as 'time<=24h, cost<=50'."
    ),
]
DryOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the command that would be run, and run nothing.")
]
FileArgument = Annotated[
    list[str],
    typer.Argument(metavar="FILE [OPTIONS]...", help="File of the job, and options of the real command."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A job as its file says it.

    Attributes:
        words: The words of ``forerun predict`` about it: a model and options, or -- and a command.
        kind: Kind of its devices; empty where the file names none.
        num_nodes, devices_per_node: Its size.
        has_time: Whether it has a time limit.
    """

    words: tuple[str, ...]
    kind: str = ""
    num_nodes: int = 1
    devices_per_node: int = 1
    has_time: bool = True

    def on(self, asked: str | None = None) -> str:
        """Devices with their numbers, such as 2x8xh100-sxm; a kind that was asked for alone has those of the job."""
        kind = asked or self.kind
        is_whole = not kind or split_spec(kind)[2] != kind
        return kind if is_whole else joined_spec(self.num_nodes, self.devices_per_node, kind)


def _text_of(path: str) -> str:
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_LARGEST_CHARACTERS + 1)
        if len(text) > _LARGEST_CHARACTERS:
            raise ValueError(f"it has more than {_LARGEST_CHARACTERS:,} characters")
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the job's file {path}: {said}; name a text file") from None
    return text


def _training_words(text: str, path: str) -> tuple[str, ...]:
    """The words of a question: those of the line #FORERUN, or the last training command of a script."""
    own = _OWN.search(text)
    if own is not None:
        return tuple(shlex.split(own[1]))
    # The training is the last such line: those before prepare data or the environment.
    for line in reversed(text.replace("\\\n", " ").splitlines()):
        words = [] if line.lstrip().startswith("#") else _command(_split(line))
        module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        if (module and module not in _NO_TRAINING) or any(word.endswith(".py") for word in words):
            return ("--", *words)
    raise UsageError(
        f"{path}: expected a line such as 'python train.py' or '#FORERUN torchvision:resnet50 --dataset imagenet "
        "--epochs 90', got neither; add the latter"
    )


def _split(line: str) -> list[str]:
    """The words of a line, or of the line that it hands to another shell; a sum of a shell is one word."""
    try:
        words = shlex.split(re.sub(r"\$\(\([^)]*\)\)", "$N", line))
    except ValueError:  # half of a quotation over several lines
        return []
    handed = next(
        (word for i, word in enumerate(words) if words[i - 2 : i] in (["bash", "-c"], ["sh", "-c"])), ""
    )
    return _split(handed) if handed else words


def _command(words: list[str]) -> list[str]:
    """The training command of a line, without what wraps it and where its output goes; empty if it is none."""
    words = list(dropwhile(lambda word: re.match(r"\w+=", word), words))
    first = next((i for i, word in enumerate(words) if _LAUNCHERS.fullmatch(Path(word).name)), None)
    if first is None or (first and Path(words[0]).name not in _WRAPPERS):
        return []
    return list(takewhile(lambda word: not re.match(r"\d?[>|&;<]", word), words[first:]))


def _counted(words: tuple[str, ...], num_nodes: int, per_node: int) -> tuple[str, ...]:
    """The words with the size of the job where a launcher is told variables of a shell."""
    found = list(words)
    for i, (word, following) in enumerate(pairwise([*words, ""])):
        match = _COUNTS.match(word)
        sizes = {"devices": per_node, "all": num_nodes * per_node}
        count = "" if match is None else str(sizes.get(match.lastgroup or "", num_nodes))
        if match and "=" in word and "$" in word:
            found[i] = f"{word.partition('=')[0]}={count}"
        elif match and following.startswith("$"):
            found[i + 1] = count
    return tuple(found)


def slurm_job(text: str, path: str, more: Sequence[str]) -> _Job:
    """A batch script of Slurm with the options of its command line.

    Args:
        text: The script.
        path: Its name, for messages.
        more: Options after the script, which win over its own.
    """
    options: dict[str, str] = {}
    words = [word for line in _SBATCH.findall(text) for word in _split(_REMARK.split(line, 1)[0])] + list(
        more
    )
    # Slurm takes "--gres=gpu:2" and "--gres gpu:2", "-N 2" and "-N2".
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if re.match(r"-[A-Za-z].", word):
            options[word[:2]] = word[2:].removeprefix("=")
        elif name.startswith("-"):
            options[name] = value if equals else following

    def count(*names: str) -> int:
        found = next((options[name].partition("-")[0] for name in names if name in options), "")
        return int(found) if found.isdigit() else 0

    num_nodes = count("--nodes", "-N") or 1
    tasks = count("--ntasks-per-node", "--tasks-per-node") or max(1, count("--ntasks", "-n") // num_nodes)
    kind, per_node = "", 1
    # The whole job's devices are shared by its nodes, a task's are those of each of its tasks.
    ways = {
        "--gres": 1.0,
        "--gpus-per-node": 1.0,
        "--gpus-per-task": tasks,
        "--gpus": 1 / num_nodes,
        "-G": 1 / num_nodes,
    }
    for name, times in ways.items():
        parts = [part for part in options.get(name, "").split(",") if part]
        if name == "--gres":  # which may also ask for disks and shares of a device
            parts = [part for part in parts if part.startswith("gpu")]
        if parts and (found := _GPUS.fullmatch(parts[0])):
            kind, per_node = found["name"] or "", max(1, int(int(found["number"] or 1) * times))
            break
    return _Job(
        words=_counted(_training_words(text, path), num_nodes, per_node),
        kind="" if kind == "gpu" else kind,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        has_time=bool({"--time", "-t"} & options.keys()),
    )


def sky_task(text: str, path: str) -> _Job:
    """A task of SkyPilot.

    Raises:
        UsageError: It is no YAML of a task.
    """
    try:
        task = parsed_yaml(text)
    except ValueError as error:
        raise UsageError(
            f"{path}: expected the YAML of a SkyPilot task, but it cannot be read: {error}; correct the file"
        ) from None
    if not isinstance(task, dict):
        raise UsageError(f"{path}: expected a task of SkyPilot, got {type(task).__name__}; see its examples")
    resources, nodes = task.get("resources") or {}, task.get("num_nodes") or 1
    if not isinstance(resources, dict) or not str(nodes).isdigit():
        raise UsageError(
            f"{path}: expected resources as a mapping and a whole number of nodes, got {resources!r:.40} and {nodes!r}"
        )
    kind, per_node = sky_accelerators(resources, path)
    source = text if _OWN.search(text) else str(task.get("run") or "")
    num_nodes = int(nodes)
    return _Job(
        words=_counted(_training_words(source, path), num_nodes, per_node),
        kind=kind,
        num_nodes=num_nodes,
        devices_per_node=per_node,
    )


def sky_accelerators(resources: Mapping[str, Any], path: str) -> tuple[str, int]:
    """Kind and number of the devices of a node that a task of SkyPilot would like best; no kind where it wants none.

    Raises:
        UsageError: The number is no whole one.
    """
    # The first of several is what the task would like best.
    choices = [resources, *(resources.get("ordered") or ()), *(resources.get("any_of") or ())]
    wanted = next((one["accelerators"] for one in choices if one.get("accelerators")), "")
    if isinstance(wanted, dict):  # a set such as {L4:1, T4:1} is read as names without values
        wanted = [name if number is None else f"{name}:{number}" for name, number in wanted.items()]
    first = str(next(iter(wanted), "") if isinstance(wanted, list) else wanted)
    name, _, number = first.partition(":")
    if number and not number.isdigit():
        raise UsageError(
            f"{path}: expected accelerators such as L4:2, got '{first}'; a job has whole devices"
        )
    return SKYPILOT_ACCELERATORS.get(name.upper(), name.lower()), int(number or 1)


def _estimate_of(job: _Job, on: str | None, within: str) -> Any:
    """The prediction of a job, as the command line makes it; its page goes to stderr, for the user to see.

    Raises:
        UsageError: No device is named, or a limit is broken.
    """
    device = job.on(on)
    if not device:
        raise UsageError("the job names no kind of device; add --on DEVICE, such as --on 4xl40s")
    split = job.words.index("--") if "--" in job.words else len(job.words)
    found = predicted([*job.words[:split], "--on", device, *job.words[split:]])
    for sentence in broken_limits(found, within):
        raise FailureError(f"the job breaks {sentence}; it was not submitted")
    if found["fits"] == "no":
        raise FailureError(f"the job does not fit {device}, so it was not submitted; see forerun advise")
    return found


def predicted(words: Sequence[str], folder: Path | None = None) -> dict[str, Any]:
    """The answer of ``forerun predict --json`` in a process of its own, which reads the words of a user.

    Args:
        words: Model or command, and options.
        folder: Where it runs; this folder unless given.

    Raises:
        FailureError: It failed; its last line is told.
    """
    import subprocess
    import sys

    command = [sys.executable, "-m", "forerun", "predict", "--json", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise FailureError(f"it could not be predicted: {last.removeprefix('error: ')}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def broken_limits(found: Mapping[str, Any], within: str) -> Iterator[str]:
    """The limits that a prediction breaks, each with its value.

    Args:
        found: An answer of ``forerun predict --json``.
        within: Limits as ``plan --within`` takes them.

    Raises:
        UsageError: The prediction has nothing to check a limit against.
    """
    from forerun.search.search import parse_limits
    from forerun.surface.report.plan_page import format_quantity

    for limit in parse_limits(within):
        value = found.get(limit.quantity.field)
        if value is None:
            raise UsageError(
                f"'{limit.text}' cannot be checked: the prediction has no {limit.quantity.field}; name the dataset, "
                "epochs and price of the job"
            )
        amount = value["value"] if isinstance(value, dict) else value
        if amount > limit.bound if limit.is_upper else amount < limit.bound:
            words = format_quantity(amount, limit.quantity.kind)
            yield f"'{limit.text}': {limit.quantity.name} is {words}"


def _told(found: dict[str, Any]) -> Iterator[str]:
    from forerun.base.units import format_bytes, format_duration_s
    from forerun.surface.report.wording import fit_sentence

    yield f"step {format_duration_s(found['step_time_s']['value'])}"
    if found["job_time_s"]:
        low, high = (format_duration_s(found["job_time_s"][end]) for end in ("low", "high"))
        yield f"job {low} to {high}"
    if found["cost_usd"]:
        yield f"${found['cost_usd']['value']:,.2f}"
    if found["peak_memory_bytes"]:
        yield f"memory {format_bytes(found['peak_memory_bytes']['value'])}: {fit_sentence(found['fits'])}"


def _hand_over(words: list[str], found: dict[str, Any], *, dry_run: bool) -> None:
    typer.echo(f"forerun: {found['model']} on {found['device_title']}: {', '.join(_told(found))}", err=True)
    if dry_run:
        typer.echo(shlex.join(words))
        return
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(f"'{words[0]}' is not installed here; use --dry-run to see the command")
    typer.echo(f"forerun: runs {shlex.join(words)}", err=True)
    os.execv(program, words)


_PASSES_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Options after the job's file are those of the real command."""


def _passes_on(command: Callable[..., None]) -> Callable[..., None]:
    """A verb whose unknown words are handed to another command."""
    command.context_settings = _PASSES_ON  # type: ignore[attr-defined]
    return command


@_passes_on
@verb("Predict a Slurm job, then submit it.")
def sbatch(
    job: FileArgument, on: OnOption = None, within: WithinOption = "", dry_run: DryOption = False
) -> None:
    """Predict the job of a batch script, refuse it over a limit, fill its time limit, and hand it to sbatch."""
    read = slurm_job(_text_of(job[0]), job[0], job[1:])
    found = _estimate_of(read, on, within)
    filled = []
    if not read.has_time and found["job_time_s"]:
        from forerun.question.job import time_limit_s

        filled = [f"--time={time_limit_s(found['job_time_s']['high']) // 60}"]
        typer.echo(f"forerun: the job has no time limit; {filled[0]} minutes is added", err=True)
    _hand_over(["sbatch", *filled, *job[1:], job[0]], found, dry_run=dry_run)


@_passes_on
@verb("Predict a SkyPilot task, then launch it.")
def sky(
    job: FileArgument, on: OnOption = None, within: WithinOption = "", dry_run: DryOption = False
) -> None:
    """Predict the run of a task, refuse it over a limit, and hand it to sky launch."""
    found = _estimate_of(sky_task(_text_of(job[0]), job[0]), on, within)
    _hand_over(["sky", "launch", job[0], *job[1:]], found, dry_run=dry_run)


@_passes_on
@verb("Predict a training command, then run it.")
def torchrun(
    job: Annotated[
        list[str],
        typer.Argument(metavar="WORDS...", help="Options of torchrun, the script and its arguments."),
    ],
    on: OnOption = None,
    within: WithinOption = "",
    dry_run: DryOption = False,
) -> None:
    """Predict the script that torchrun would start, refuse it over a limit, and hand over to torchrun."""
    found = _estimate_of(_Job(words=("--", "torchrun", *job)), on, within)
    _hand_over(["torchrun", *job], found, dry_run=dry_run)
