"""Jobs as people write them down: a CSV or YAML file, checked before anything is computed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from forerun.base.errors import InvalidSetupError, UsageError, near_matches
from forerun.base.received import parsed_yaml
from forerun.base.tables import csv_cells
from forerun.base.units import parse_duration_s
from forerun.question.job import size_of_images
from forerun.question.options import RunOptions
from forerun.question.settings import declared, setting_fields


def _seconds(value: Any) -> Any:
    """A duration as a number or as text; what is neither is left to the field's own check."""
    return parse_duration_s(value) if isinstance(value, str) else value


def _points(value: Any) -> Any:
    """Speeds as '1:100 2:190', for each kind of device as 't4 1:100 2:190; v100 1:300', or as a mapping."""
    if isinstance(value, Mapping):
        return value if all(isinstance(inner, Mapping) for inner in value.values()) else {"": value}
    if not isinstance(value, str):
        return value
    found: dict[str, dict[str, str]] = {}
    for group in value.split(";"):
        words = group.replace(",", " ").split()
        # Without the name of a device the speeds hold for every kind.
        kind = words.pop(0) if words and ":" not in words[0] else ""
        pairs = [word.partition(":") for word in words]
        if not pairs or any(not mark for _, mark, _ in pairs):
            raise ValueError("expected speeds by number of devices such as '1:100 2:190'")
        found[kind.lower()] = {number: speed for number, _, speed in pairs}
        if len(found[kind.lower()]) < len(pairs):
            raise ValueError("expected one speed for each number of devices, got several for one")
    return found


Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Speeds = Annotated[dict[Annotated[int, Field(ge=1)], Positive], Field(min_length=1)]


_OWN = ("batch_size", "dataset", "dataset_size", "epochs", "validation_size", "validate", "startup_s",
        "checkpoint_s", "num_devices", "num_nodes", "intra", "inter", "phase", "price_usd_per_hour",
        "precision", "optimizer", "image_size", "accumulation")  # fmt: skip
"""Settings of a run that mean something else of a job in a schedule, or nothing, or have a default here."""

_DEVICES = ("num_devices", "gpus", "num_gpus", "num_gpu", "num_replicas")
"""Names of the column of devices, also those of Tiresias, Pollux and Sia."""

if TYPE_CHECKING:
    _RunSettings = BaseModel
else:  # made from the declarations
    _RunSettings = create_model("_RunSettings", **setting_fields(RunOptions, without=_OWN))


class JobEntry(_RunSettings):
    """One job of a file.

    Attributes:
        name: Unlike every other's.
        model: A model as ``forerun predict`` takes it; its speed is predicted.
        points: Measured samples per second by number of devices, by kind of device ('' for every kind).
        table: CSV of measured steps with num_devices, batch_size (global), step_time_s and, if known, device and
            num_nodes; a speed is fitted to it.
        batch_size: Samples of a step on all devices.
        batch_size_max: Largest batch a policy may choose; needs ``noise_scale``.
        noise_scale: Gradient noise scale in samples.
        duration: Time on the devices asked for, in place of speed, batch and work; the job keeps their number [s].
        epochs, dataset, dataset_size, steps, samples: The work; epochs need a dataset or its size.
        target, curve: Loss at which the job is done, and the CSV of its losses so far (column loss, one row an epoch);
            ``epochs`` is then the most it may take.
        num_devices: Devices asked for.
        max_devices: Most that it may get.
        elastic: Whether it may get another number than asked for.
        preemptible: Whether what it has may be changed or taken once it runs.
        min_run: Time for which it keeps what it has [s].
        arrival, deadline: When it comes and must be done, from now [s]; text may carry a unit.
        weight: What its waiting counts.
        restart: Time of a restart [s].
        precision, image_size, optimizer: For ``model``, as in ``forerun predict``; any other setting of a run that its
            steps depend on may stand beside them.
        script: The command line of the training script, for the plan.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[
        str, Field(min_length=1, validation_alias=AliasChoices("name", "job", "job_name", "job_id"))
    ]
    model: str | None = None
    points: Annotated[dict[str, _Speeds] | None, BeforeValidator(_points)] = None
    table: Path | None = None
    batch_size: Annotated[int, Field(ge=1)]
    batch_size_max: Annotated[int, Field(ge=1)] | None = None
    noise_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    duration: Seconds | None = None
    epochs: Positive | None = None
    dataset: str | None = None
    dataset_size: Annotated[int, Field(ge=1)] | None = None
    steps: Positive | None = None
    samples: Positive | None = None
    target: Positive | None = None
    curve: Path | None = None
    num_devices: Annotated[int, Field(ge=1, validation_alias=AliasChoices(*_DEVICES))] = 1
    max_devices: Annotated[int, Field(ge=1)] | None = None
    elastic: bool = True
    preemptible: bool = True
    min_run: Seconds = 0.0
    arrival: Annotated[Seconds, Field(validation_alias=AliasChoices("arrival", "submit_time", "time"))] = 0.0
    deadline: Seconds | None = None
    weight: Positive = 1.0
    restart: Seconds = 60.0
    precision: str = "fp32"
    image_size: Annotated[int, Field(ge=1)] | None = None
    optimizer: str = "sgd"
    script: str = "train.py"

    def run_options(self) -> RunOptions:
        """The settings of the run that were given, for ``model``."""
        names = {*declared(RunOptions)} - {*_OWN}
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        size = self.image_size or size_of_images(self.model, {**given, "dataset": self.dataset})
        own = {"precision": self.precision, "optimizer": self.optimizer, "image_size": size}
        return cast(RunOptions, {**own, **given})

    @model_validator(mode="before")
    @classmethod
    def _of_duration(cls, row: Any) -> Any:
        """A job of a known time is one sample a second on the devices asked for, as many as seconds."""
        if not isinstance(row, Mapping) or row.get("duration") is None:
            return row
        more = {"model", "points", "table", "batch_size", "epochs", "steps", "samples", "elastic"} & {*row}
        if more:
            raise ValueError(
                f"duration stands alone, got {', '.join(sorted(more))} beside it; leave one of both out"
            )
        number = int(next((row[name] for name in _DEVICES if name in row), 1))
        fixed = {"points": {number: 1.0}, "batch_size": 1, "elastic": False}
        return {**row, **fixed, "samples": _seconds(row["duration"])}

    @model_validator(mode="after")
    def _is_complete(self) -> JobEntry:
        if (self.target is None) != (self.curve is None) or (self.target is not None and self.epochs is None):
            raise ValueError("a target needs the curve so far and epochs, the most it may take")
        if sum(given is not None for given in (self.model, self.points, self.table)) != 1:
            raise ValueError("expected one of model, points and table for its speed")
        if sum(given is not None for given in (self.epochs, self.steps, self.samples)) != 1:
            raise ValueError("expected one of epochs, steps and samples for its work")
        if self.epochs is not None and (self.dataset is None) == (self.dataset_size is None):
            raise ValueError("epochs need a dataset or its dataset_size, one of the two")
        if self.batch_size_max is not None:
            if self.noise_scale is None:
                raise ValueError("batch_size_max needs noise_scale, which says what a larger batch is worth")
            if self.batch_size_max < self.batch_size:
                raise ValueError(
                    f"batch_size_max {self.batch_size_max} must not be below batch_size {self.batch_size}"
                )
        asked, most = self.num_devices, self.max_devices
        if most is not None and most < asked:
            raise ValueError(f"max_devices {most} must not be below num_devices {asked}")
        if not self.elastic and most not in (None, asked):
            raise ValueError(f"elastic: false means {asked} devices and no others, but max_devices is {most}")
        if not self.preemptible and self.min_run:
            raise ValueError("min_run says nothing of a job with preemptible: false, which runs to its end")
        if self.deadline is not None and self.deadline <= self.arrival:
            raise ValueError(
                f"the deadline at {self.deadline:g} s must be after the arrival at {self.arrival:g} s"
            )
        return self


def read_jobs(path: str | Path) -> list[JobEntry]:
    """The jobs of a CSV file (a row each; empty cells are not given), a YAML file (a list) or a trace of Gavel.

    Paths in the file are relative to it. Speeds of a trace stand in Gavel's ``*throughputs*.json`` beside it.

    Raises:
        UsageError: There is no such file, or it is none of these.
        InvalidSetupError: There are no jobs, a value is impossible, or two jobs have one name.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"expected a file of jobs at '{path}', but there is none")
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".yaml", ".yml", ".json", ".trace"):
        raise UsageError(
            f"a file of jobs ends in .csv, .yaml, .json or .trace (of Gavel), got '{path.name}'; convert it, or, of "
            "what has run, replay it with 'forerun schedule trace'"
        )
    try:
        if suffix == ".csv":
            rows = list(filter(None, csv_cells(path).values()))
        else:
            rows = _gavel_rows(path) if suffix == ".trace" else _yaml_rows(path)
    except UnicodeDecodeError as error:
        raise InvalidSetupError(f"{path.name} is no text in UTF-8: {error}; save it as such") from error
    return _checked(rows, path.parent, path.name)


def check_entries(rows: Sequence[Mapping[str, Any]], source: str = "jobs") -> list[JobEntry]:
    """Jobs given as mappings with the same names; paths in them are relative to the current folder.

    Args:
        rows: The mappings.
        source: Where they are from, for messages.

    Raises:
        InvalidSetupError: As for ``read_jobs``.
    """
    return _checked([dict(row) for row in rows], Path(), source)


def _checked(rows: Sequence[dict[str, Any]], folder: Path, source: str) -> list[JobEntry]:
    if not rows:
        raise InvalidSetupError(f"{source}: expected at least one job, got none")
    entries = [_entry(row, folder, source, number) for number, row in enumerate(rows, start=1)]
    counts = Counter(entry.name for entry in entries)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise InvalidSetupError(f"{source}: two jobs are called '{twice}'; give each a name of its own")
    return entries


def _yaml_rows(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    try:
        read = parsed_yaml(text)
    except ValueError as error:
        raise InvalidSetupError(f"{path.name} is no YAML: {error}") from error
    rows = read.get("jobs", read) if isinstance(read, dict) else read
    if rows is None:
        return []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        got = f", got a mapping with {', '.join(map(str, rows))}" if isinstance(rows, dict) else ""
        raise InvalidSetupError(
            f"{path.name}: expected a list of jobs, each a mapping, or such a list under 'jobs'{got}"
        )
    return rows


_PLACES = {6: (3, 5, 4), 7: (4, 6, 5), 9: (4, 5, 8), 10: (5, 6, 9), 11: (5, 6, 10)}
"""Places of steps, workers and arrival in a line of Gavel's or Shockwave's traces, by its number of fields."""


def _gavel_rows(path: Path) -> list[dict[str, Any]]:
    """Jobs of a trace of Gavel: their kinds, whose steps per second stand beside it by device, steps and workers.

    Source: stanford-futuredata/gavel, scheduler/utils.py, ``parse_trace`` and ``read_all_throughputs_json_v2``.
    """
    files = sorted(path.parent.glob("*throughputs*.json"))
    if len(files) != 1:
        raise UsageError(
            f"{path.name} tells no speeds: expected one file such as Gavel's simulation_throughputs.json beside it, "
            f"got {', '.join(file.name for file in files) or 'none'}"
        )
    speeds, rows = json.loads(files[0].read_text(encoding="utf-8")), []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        cells, where = line.split("\t"), f"{path.name}, line {number}"
        try:
            steps, workers, arrival = (float(cells[place]) for place in _PLACES[len(cells)])
            weight, goal = map(float, cells[-3:-1]) if len(cells) > 7 else (1.0, -1.0)
        except (KeyError, ValueError):
            raise InvalidSetupError(
                f"{where}: expected job type, command, steps, workers and arrival in Gavel's form, got {line!r:.60}"
            ) from None
        if goal >= 0:
            raise InvalidSetupError(
                f"{where}: its SLO of {goal:g} counts from a duration that a trace does not tell; set it to -1"
            )
        batch = int(workers) * int((re.findall(r"batch size (\d+)", cells[0]) or [1])[0])
        # Jobs that share a device have other keys, and what does not fit has a speed of zero.
        kind = f"('{cells[0]}', {int(workers)})"
        alone = {device: (kinds.get(kind) or {}).get("null") for device, kinds in speeds.items()}
        points = {device: {int(workers): batch * speed} for device, speed in alone.items() if speed}
        if workers and not points:
            raise InvalidSetupError(f"{where}: {files[0].name} has no speed of {kind}; add it")
        row = {
            "name": f"job-{number}",
            "points": points,
            "batch_size": batch,
            "steps": steps,
            "weight": weight,
        }
        row |= {"num_devices": int(workers), "elastic": False, "arrival": arrival}
        # Gavel passes over jobs of no worker.
        rows += [row | {"script": cells[1].rpartition("&& ")[2]}] if workers else []
    return rows


def _entry(row: dict[str, Any], folder: Path, source: str, number: int) -> JobEntry:
    """One row, checked."""
    where = f"{source}, job {number}" + (f" ('{row['name']}')" if "name" in row else "")
    try:
        entry = JobEntry.model_validate(row)
    except ValidationError as error:
        raise InvalidSetupError(f"{where}: {_first(error)}") from error
    files = {what: folder / name for what in ("table", "curve") if (name := getattr(entry, what)) is not None}
    for file in files.values():
        if not file.is_file():
            raise InvalidSetupError(f"{where}: expected a file at '{file}', but there is none")
    return entry.model_copy(update=files)


_INSTEAD = {
    "depend|after": "jobs of a file do not wait for each other: let 'arrival' be the time when the other is done",
    "application": "Pollux and Sia leave its speed and work to their simulators: give model, points or table, and "
    "steps, epochs or samples, in its place",
    "per_s|throughput": "write the speed as points, such as '1:100 2:190': samples per second by number of devices",
}
"""Advice on columns of other schedulers' tables, by parts of their names."""


def _first(error: ValidationError) -> str:
    """The first of pydantic's complaints as one line."""
    first = error.errors()[0]
    # A part of a value is shown by itself.
    field = str(next(iter(first["loc"]), ""))
    if first["type"] == "extra_forbidden":
        instead = next((words for part, words in _INSTEAD.items() if re.search(part, field, re.I)), None)
        near = near_matches(field, JobEntry.model_fields)
        return f"unknown column '{field}'" + (f"; {instead}" if instead else f"{near}; remove or rename it")
    if first["type"] == "missing":
        told = "; the first line of a CSV file names its columns" if field == "name" else ""
        return f"expected a value for '{field}', got none{told}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return (
        f"'{field}': {message}" + ("" if "got" in message else f", got {first['input']!r}")
        if field
        else message
    )
