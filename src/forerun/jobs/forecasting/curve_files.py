"""Learning curves from files: CSV of several origins, and logs of trainers and trackers (``log_files``).

A CSV has a header. Its columns, in any order, further columns being further metrics:

    epoch | step | both              where; the names global_step, iteration, batch, round and tokens mean step
    METRIC                           the value, empty where it was not measured
    learning_rate | lr | lr-...      optional
    elapsed_s | time_s | wall_time   optional, seconds; a wall clock is counted from its first row

Keras' ``CSVLogger``, Lightning's ``CSVLogger`` and YOLO's ``results.csv`` (its rate is ``lr/pg1``) are such files, with
epochs from 0 and gaps: an epoch counted from 0 is taken as done, so 0 becomes 1; rows without the metric are passed
over. Several rows of one epoch are one point, their mean, if there are four epochs or more (Optimus' step logs: epoch,
step, loss, acc); before that each row is a point at its fraction of the epoch. Steps are never taken for epochs. What
was passed over or averaged is said in ``Curve.notes``.

An export of Weights & Biases has a column "RUN - METRIC" for each run, with __MIN and __MAX of what was drawn as one
point, which are left out. A run of a file that holds several is named behind it: ``export.csv/fluent-sun-1``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError, RecordError, near_matches
from forerun.base.tables import encoding_of
from forerun.jobs.forecasting.curve import (
    Curve,
    Floats,
    MetricKind,
    is_falling_metric,
    is_rising_metric,
    metric_kind,
)
from forerun.jobs.forecasting.log_files import (
    EVENTS,
    TRAINER_STATE,
    LogColumns,
    is_mlflow_run,
    of_tracker,
    read_events,
    read_history,
    read_mlflow_run,
    read_stored_run,
    read_trainer_state,
    read_wandb,
    runs_of_store,
)
from forerun.jobs.forecasting.text_logs import MARKDOWN, TEXT_SUFFIXES, is_text_log, read_text_log

_STEP_NAMES = (
    *("step", "global_step", "opt_step", "iteration", "iter", "batch", "round", "time/total_timesteps"),
    *("total_timesteps", "micro_step", "tokens", "tokens_seen", "num_tokens", "n_tokens"),
)
# YOLO's first group are biases, whose rate comes down from 0.1 in the warm-up.
_RATE_NAMES = ("learning_rate", "lr", "learning rate", "lr/pg1", "lr/pg0", "x/lr1", "x/lr0")
_RATE = re.compile(r"(^|[_/. -])lr($|[-_/. ])")  # lr-Adam of Lightning, g_lr of a GAN
_TIME_NAMES = ("elapsed_s", "time_s", "seconds", "time", "elapsed", "wall_time", "time/time_elapsed")
_ALIASES = {"acc": "accuracy", "accuracy": "acc"}
_FEWEST_EPOCHS = 4
_HISTORIES = (
    *("wandb-history.jsonl", "history.jsonl", "metrics.jsonl", "results.jsonl"),
    *("history.json", "metrics.json"),
)
_STORE = "mlflow.db"
_FILES_OF_FOLDERS = (TRAINER_STATE, "results.csv", "metrics.csv", *_HISTORIES, "*.wandb")
_OF_RUN, _LEFT_OUT = " - ", ("__MIN", "__MAX")
_METRIC_FORMS = ("{}", "val_{}", "val/{}", "validation_{}", "eval_{}", "metrics/{}", "metrics/{}(b)")
_WHOLE_LOSS = re.compile(r"(^|/|(val|valid|validation|eval|train|training|total|lm)_)loss$")
_TRAINING_LOSS = re.compile(
    r"(train(ing)?[_/ ]?)?((lm|total|epoch|avg|mean|box)[_ ])?loss([_/](epoch|train))?"
)
_NO_METRIC = re.compile(
    r"time|memory|seed|eta_|norm|per_second|scale|speed|num_|samples|throughput|^tps|^mfu"
)
_OVER_OVERLAPS = re.compile(r"map50-95|map_0\.5:0\.95")  # of YOLO's the mean over overlaps, by its age
_OF_VALIDATION = ("val", "eval", "metrics/")
_OF_TRAINING = ("train", "val", "eval", "test")


def read_curve(
    path: str | Path,
    metric: str | None = None,
    is_rising: bool | None = None,
    rate: str | None = None,
    *,
    by_step: bool = False,
    seen: float = 1.0,
) -> Curve:
    """The curve of a metric.

    Args:
        path: A CSV, a log as in ``log_files``, or a folder with one of them; ``FILE/RUN`` where a file holds several.
        metric: Its name; None takes a validation accuracy if there is one, else a validation loss, else the first.
        is_rising: Whether larger is better; by its name if None.
        rate: Column of the learning rate; one of the usual names if None.
        by_step: Whether each row is a point at its step, where the file has steps, and none are averaged.
        seen: Share of the rows, the first, by which a metric that is not named is taken.

    Raises:
        RecordError: The file cannot be read, is empty, or holds text where a number should be.
        InvalidSetupError: There is no such metric.
    """
    file, run = _file_and_run(Path(path))
    log = _log_of(file, run)
    how = {"by_step": by_step, "is_sparse": log.is_sparse}
    curve = curve_of_columns(log.columns, run or file.name, metric, is_rising, rate, seen=seen, **how)
    planned = log.planned_end if log.planned_unit == curve.unit else None
    return replace(curve, planned_end=planned)


def find_curve_files(folder: str | Path) -> list[Path]:
    """CSV files, event files and logs of trainers in a folder, by name.

    Raises:
        RecordError: The folder does not exist or holds none.
    """
    place = Path(folder)
    if not place.is_dir():
        raise RecordError(f"expected a folder of finished runs, got '{place}', which is none")
    files = sorted(p for p in place.rglob("*") if _is_curve_file(p))
    found = [file / run for file in files for run in _runs_of(file) or ("",)]
    if not found:
        raise RecordError(
            f"'{place}' holds no CSV, no TensorBoard event file, no {TRAINER_STATE}, and no run of W&B or MLflow; put "
            "the logs of runs there"
        )
    return found


def _is_curve_file(file: Path) -> bool:
    if file.is_dir():
        return is_mlflow_run(file)
    is_named = file.suffix in (".csv", ".tsv", ".wandb") or file.name in (TRAINER_STATE, _STORE, *_HISTORIES)
    return is_named or file.name.startswith(EVENTS) or is_text_log(file) or _is_table(file)


def _is_table(file: Path) -> bool:
    """True for a CSV under the name of a log: the examples of Keras' ``CSVLogger`` write to ``training.log``."""
    if file.suffix not in TEXT_SUFFIXES or not file.is_file():
        return False
    with file.open(encoding=encoding_of(file), errors="replace") as opened:
        names = [name.strip().lower() for name in opened.readline().split(",")]
        cells = opened.readline().split(",")
    is_header = len(names) > 1 and any(name in ("epoch", *_STEP_NAMES) for name in names)
    return is_header and len(cells) == len(names) and None not in map(_number, cells)


def _file_and_run(place: Path) -> tuple[Path, str]:
    """The file or folder of a run, and its name there if a file holds several."""
    if place.is_dir():
        for pattern in _FILES_OF_FOLDERS:
            if named := sorted(place.glob(pattern)):
                return named[0], ""
        # The last state has the history of those before it; otherwise a single log somewhere below is meant.
        if states := sorted(place.glob(f"*/{TRAINER_STATE}"), key=lambda file: (len(file.parent.name), file)):
            return states[-1], ""
        is_own = is_mlflow_run(place) or any(place.glob(f"{EVENTS}*"))
        below = [] if is_own else [file for file in place.rglob("*") if _is_curve_file(file)]
        return below[0] if len(below) == 1 else place, ""
    file = next((parent for parent in place.parents if parent.is_file()), place)
    return file, "" if file == place else place.relative_to(file).as_posix()


def _runs_of(file: Path) -> tuple[str, ...]:
    """Names of the runs of a file that holds several."""
    if file.name == _STORE:
        return tuple(runs_of_store(file))
    if file.suffix == ".csv":
        with file.open(newline="", encoding=encoding_of(file), errors="replace") as opened:
            header = [name.strip() for name in next(csv.reader(opened), [])]
        runs = tuple(dict.fromkeys(name.rpartition(_OF_RUN)[0] for name in header if _OF_RUN in name))
        return runs if any(name.endswith(_LEFT_OUT) for name in header) else ()
    return ()


def _log_of(file: Path, run: str) -> LogColumns:
    runs = _runs_of(file) if file.is_file() else ()
    if run not in runs and (run or len(runs) > 1):
        raise InvalidSetupError(
            f"{file}: expected one of its runs, such as '{file.name}/{(runs or ('RUN',))[0]}', got "
            f"'{run}'{near_matches(run, runs)}; it holds {', '.join(runs[:20]) or 'a single one'}"
        )
    run = run or next(iter(runs), "")
    if file.suffix == ".db":
        return read_stored_run(file, runs_of_store(file).get(run, run))
    if is_mlflow_run(file):
        return read_mlflow_run(file)
    if file.is_dir() or file.name.startswith(EVENTS):
        return LogColumns(columns=read_events(file))
    if (reader := _READERS.get(file.suffix)) and not _is_table(file):
        return reader(file)
    columns = read_columns(file)
    return LogColumns(columns=_of_run(columns, run) if run else columns, is_sparse=False)


def _read_json(file: Path) -> LogColumns:
    is_state = file.name == TRAINER_STATE or not file.is_file()
    return (read_trainer_state if is_state else read_history)(file)


_READERS = {".json": _read_json, ".jsonl": read_history, ".wandb": read_wandb}
_READERS |= dict.fromkeys((*TEXT_SUFFIXES, MARKDOWN), read_text_log)


def _of_run(columns: Mapping[str, Floats], run: str) -> dict[str, Floats]:
    """Columns of one run of an export, in the rows where it has a number."""
    own = {
        name.rpartition(_OF_RUN)[2]: c for name, c in columns.items() if name.rpartition(_OF_RUN)[0] == run
    }
    own = {name: column for name, column in own.items() if not name.endswith(_LEFT_OUT)}
    rows = np.any([np.isfinite(column) for column in own.values()], axis=0)
    shared = {name: column for name, column in columns.items() if _OF_RUN not in name}
    return of_tracker({name: column[rows] for name, column in (shared | own).items()})


def read_columns(file: Path) -> dict[str, Floats]:
    """Columns of a CSV as numbers, an empty cell as NaN.

    Raises:
        RecordError: The file is missing, empty, has one column, or text in a number.
    """
    try:
        with file.open(newline="", encoding=encoding_of(file)) as opened:
            text = opened.read()
        text = "\n".join(line for line in text.splitlines() if not line.startswith("#{"))
        first = text.partition("\n")[0]
        mark = max(",;\t", key=first.count)
        rows = list(csv.reader(text.splitlines(), delimiter=mark))
        rows = [row for row in rows if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{file}: expected a CSV of a run, and it cannot be read: {error}") from error
    if len(rows) < 2:
        raise RecordError(
            f"{file}: expected a header and rows such as 'epoch,accuracy', got {len(rows)} row{'s'[len(rows) == 1 :]}"
        )
    names = [name.strip() for name in rows[0]]
    is_monitor = names[:3] == ["r", "l", "t"]  # of Stable-Baselines3: reward, steps and time of each episode
    if is_monitor:
        names[:3] = "reward", "step", "elapsed_s"
    if len(names) < 2 and not _is_metric(names[0]):
        raise RecordError(
            f"{file}: expected at least two columns, epoch or step and a metric, got only '{names[0]}'"
        )
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise RecordError(
            f"{file}: expected a name of its own for each column, got '{twice}' {names.count(twice)} times; rename one"
        )
    cells = [row + [""] * (len(names) - len(row)) for row in rows[1:]]
    if mark != ",":
        cells = [[cell.replace(",", ".") for cell in row] for row in cells]  # 0,98 where commas are points
    columns = {
        name: np.asarray([_cell(row[i], name, number, file) for number, row in enumerate(cells, start=2)])
        for i, name in enumerate(names)
        if name and any(_number(row[i]) is not None for row in cells)
    }
    return columns | ({"step": np.cumsum(columns["step"])} if is_monitor else {})


def _number(text: str) -> float | None:
    """A cell as a number, NaN for an empty one, a share for 10%; None for words, such as dates or names of phases."""
    number = text.strip().removesuffix("%")
    try:
        return float(number or "nan") / (100 if text.rstrip().endswith("%") else 1)
    except ValueError:
        return None


def _cell(text: str, name: str, row: int, file: Path) -> float:
    number = _number(text)
    if number is None:
        raise RecordError(f"{file}: expected a number in column '{name}', row {row}, got '{text.strip()}'")
    return number


def _named(columns: Mapping[str, Floats], names: Sequence[str]) -> str | None:
    lowered = {name.lower(): name for name in columns}
    found = next((lowered[name] for name in names if name in lowered), None)
    if found is None and "lr" in names:
        found = next((name for key, name in lowered.items() if _RATE.search(key)), None)
    return found


def curve_of_columns(
    columns: Mapping[str, Floats],
    name: str,
    metric: str | None,
    is_rising: bool | None,
    rate: str | None = None,
    *,
    by_step: bool = False,
    is_sparse: bool = False,
    seen: float = 1.0,
) -> Curve:
    """The curve in some columns of equal length, as in ``LogColumns``; ``rate`` names that of the learning rate."""
    epoch, step = _named(columns, ("epoch", "epochs")), _named(columns, _STEP_NAMES)
    counted: tuple[str, ...] = ()
    if epoch is not None and step is not None and _falls(columns[epoch]) and not _falls(columns[step]):
        epoch, counted = None, ("epochs begin anew while steps go on: points stand at their steps",)
    if epoch is None and step is None:
        if not any(map(_is_metric, columns)):
            raise RecordError(
                f"{name}: expected a column 'epoch' or 'step', got {', '.join(columns)}; call the one that counts so"
            )
        epoch, counted = "epoch", ("no column of epochs or steps: each row is taken as an epoch",)
        columns = {epoch: np.arange(1.0, len(next(iter(columns.values()))) + 1), **columns}
    elif epoch is None and step is not None and "token" in step.lower():
        counted = (f"steps are counted in {step}",)
    elapsed = _named(columns, _TIME_NAMES)
    wanted, rate = rate, _named(columns, _RATE_NAMES if rate is None else (rate.lower(),))
    if rate is None and wanted is not None:
        raise InvalidSetupError(
            f"{name}: no column '{wanted}' with the learning rate{near_matches(wanted, columns)}; the file has "
            f"{', '.join(columns)}"
        )
    counts = [c for c in columns if c.lower() in _STEP_NAMES or _RATE.search(c.lower())]
    places = list(dict.fromkeys(c for c in (epoch, step, rate, elapsed, *counts) if c is not None))
    chosen = _metric_column(columns, name, metric, places, seen)
    if not np.isfinite(columns[chosen]).any():
        raise RecordError(
            f"{name}: every value of '{chosen}' is NaN or empty; the run has no number to go by"
        )
    # An empty cell is a row of another metric; in a table, a NaN that was written is not told from it.
    keep = ~np.isnan(columns[chosen]) | _lost(columns, chosen) if is_sparse else _measured(columns[chosen])
    cut = {c: columns[c][keep] for c in dict.fromkeys((*places, chosen))}
    rows = {
        "epochs": _filled(columns[epoch])[keep] if epoch else None,
        "steps": cut[step] if step else None,
        "learning_rates": _between_rows(columns[step or epoch or ""], columns[rate])[keep] if rate else None,
        "elapsed_s": _since_start(_filled(columns[elapsed]))[keep] if elapsed else None,
        "training_losses": _training_losses(columns, chosen, keep),
        "values": np.where(np.isinf(cut[chosen]), np.nan, cut[chosen]),
    }
    rising = is_rising_metric(chosen) if is_rising is None else is_rising
    known, passes = _last_pass({column: values for column, values in rows.items() if values is not None})
    curve = _curve_of_rows(known, name, chosen, rising, by_step=by_step)
    return replace(
        curve, notes=(*passes, *counted, *_row_notes(chosen, keep, len(known["values"]), len(curve)))
    )


def _row_notes(metric: str, keep: npt.NDArray[np.bool_], num_rows: int, num_points: int) -> tuple[str, ...]:
    """Notes on the rows: those without the metric, and those that were averaged."""
    num_passed = int((~keep).sum())
    passed = f"{num_passed} rows without a value of {metric} were skipped"
    averaged = f"{num_rows} rows became {num_points} points: the rows of an epoch are one point, their mean"
    return (*([passed] if num_passed else []), *([averaged] if num_rows > num_points else []))


def _training_losses(
    columns: Mapping[str, Floats], metric: str, keep: npt.NDArray[np.bool_]
) -> Floats | None:
    """Median training loss of the rows since the kept row before, beside a metric of validation; None without one."""
    named = [name for name in columns if _TRAINING_LOSS.fullmatch(name.lower()) and name != metric]
    name = min(named, key=lambda name: "train" not in name.lower(), default=None)
    of_validation = metric.lower().startswith((*_OF_VALIDATION, "test", "dev"))
    is_unsaid = "train" in (name or "").lower() and "train" not in metric.lower() and "/" not in metric
    if name is None or not (of_validation or is_unsaid):
        return None
    ends = np.flatnonzero(keep) + 1
    parts = (columns[name][begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True))
    finite = [part[np.isfinite(part)] for part in parts]
    return _filled(np.asarray([np.median(part) if len(part) else np.nan for part in finite]))


def _lost(columns: Mapping[str, Floats], metric: str) -> npt.NDArray[np.bool_]:
    """Rows behind the last number of a metric in which another loss is NaN, if that loss ends so: the run is lost."""
    found = np.zeros(len(columns[metric]), dtype=bool)
    for name, column in columns.items():
        written = np.flatnonzero(~np.isnan(column))
        if name != metric and _WHOLE_LOSS.search(name.lower()) and np.isinf(column[written[-1]]):
            found |= np.isinf(column)
    found[: np.flatnonzero(np.isfinite(columns[metric]))[-1] + 1] = False
    return found


def _measured(values: Floats) -> npt.NDArray[np.bool_]:
    """Rows up to the last two behind the last number: a log that ends in NaN is a run that ended in NaN."""
    finite = np.isfinite(values)
    if finite.mean() > 0.5:  # a dense column: what is missing was written as NaN
        return np.ones(len(values), dtype=bool)
    return finite


def _metric_column(
    columns: Mapping[str, Floats], name: str, metric: str | None, places: list[str], seen: float
) -> str:
    others = [c for c in columns if c not in places]
    if not others:
        raise RecordError(f"{name}: expected a metric beside {', '.join(places)}, got none")
    if metric is None:
        first = {c: columns[c][: max(1, round(seen * len(columns[c])))] for c in others}
        return _default_metric(first, [c for c in others if np.isfinite(first[c]).any()] or others)
    lowered = {c.lower(): c for c in others}
    wanted = metric.lower()
    tried = [wanted, _ALIASES.get(wanted, wanted)]
    tried = [form.format(word) for word in tried for form in _METRIC_FORMS]
    found = next((lowered[word] for word in tried if word in lowered), None)
    if found is None:
        raise InvalidSetupError(
            f"{name}: no metric '{metric}'{near_matches(wanted, lowered)}; the file has {', '.join(others)}"
        )
    return found


def _default_metric(columns: Mapping[str, Floats], names: list[str]) -> str:
    """A metric with enough values and of validation before others, one that rises before losses, whole losses first."""

    def count(name: str) -> int:
        return int(np.isfinite(columns[name]).sum())

    most = max(map(count, names))
    # Where losses say of which data they are, as fastai's do, a metric that does not is of validation.
    losses = [name.lower() for name in names if _WHOLE_LOSS.search(name.lower())]
    all_say = len(losses) > 1 and all(name.startswith(_OF_TRAINING) for name in losses)

    def is_validation(name: str) -> bool:
        is_loss = metric_kind(name, is_rising_metric(name)) is MetricKind.LOSS
        unsaid = all_say and not is_loss and not name.startswith(_OF_TRAINING)
        return name.startswith(_OF_VALIDATION) or unsaid

    def rank(name: str) -> tuple[bool, ...]:
        lowered = name.lower()
        return (
            bool(_NO_METRIC.search(lowered)),
            count(name) < _FEWEST_EPOCHS,
            count(name) > 1 and bool(np.nanmin(columns[name]) == np.nanmax(columns[name])),  # switched off
            not is_validation(lowered),
            metric_kind(name, is_rising_metric(name)) is MetricKind.LOSS,
            2 * count(name) > most,  # what is evaluated is logged more rarely than what each step does
            "map" not in lowered,
            lowered.endswith(("precision", "recall")),  # either rises where the other falls
            not _OVER_OVERLAPS.search(lowered),
            not _WHOLE_LOSS.search(lowered),
        )

    return min(names, key=rank)


def _is_metric(name: str) -> bool:
    return is_rising_metric(name) or is_falling_metric(name)


def _falls(places: Floats) -> bool:
    return bool(np.any(np.diff(places[np.isfinite(places)]) < 0))


def _filled(values: Floats) -> Floats:
    """Gaps filled with the value before, or else the one after: loggers write rates in rows of their own."""
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return values
    index = np.searchsorted(finite, np.arange(len(values)), side="right") - 1
    return values[finite[np.maximum(index, 0)]]


def _between_rows(places: Floats, rates: Floats) -> Floats:
    """Rates at all rows: on lines between those that were logged, behind the last on the line of the last three."""
    known = np.isfinite(rates) & np.isfinite(places)
    where, found = places[known], rates[known]
    if known.all() or len(where) < 3 or np.any(np.diff(where) <= 0):
        return _filled(rates)
    slopes = np.diff(found[-3:]) / np.diff(where[-3:])
    slope = slopes[1] if abs(slopes[1] - slopes[0]) <= 0.1 * abs(slopes[1]) else 0.0
    behind = np.maximum(found[-1] + slope * (places - where[-1]), 0.0)
    return _filled(np.where(places > where[-1], behind, np.interp(places, where, found)))


def _since_start(times_s: Floats) -> Floats:
    """A wall clock, recognised by its size, as time since its first row."""
    return times_s - times_s[0] if len(times_s) and times_s[0] > 1e8 else times_s


def _curve_of_rows(
    rows: dict[str, Floats], name: str, metric: str, is_rising: bool, *, by_step: bool = False
) -> Curve:
    """The curve of rows that hold the metric, by the columns of a curve."""
    epochs, steps = rows.get("epochs"), _steps_of(rows, name)
    unit, groups = "step", None
    is_one_epoch = epochs is not None and len(np.unique(epochs)) == 1  # how long it is is not known
    if epochs is None or (steps is not None and (by_step or is_one_epoch)):
        where = _from_one(rows["steps"] if steps is None else steps)
    else:
        unit = "epoch"
        where, groups = _epoch_positions(epochs, steps)
    given: dict[str, Any] = {key: column for key, column in rows.items() if key != "steps"} | {
        "epochs": where
    }
    given |= {} if steps is None else {"steps": steps}
    if groups is not None:
        given = {key: _per_group(column, groups, key) for key, column in given.items()}
    if not np.all(np.isfinite(given["epochs"])):
        raise RecordError(f"{name}: expected a number in every row of '{unit}', got an empty one")
    whole = {key: c for key, c in given.items() if key == "values" or np.all(np.isfinite(c))}
    return Curve(name=name, metric=metric, is_rising=is_rising, unit=unit, **whole)


def _last_pass(rows: dict[str, Floats]) -> tuple[dict[str, Floats], tuple[str, ...]]:
    """Leaves out what was logged before a run began anew, where the last pass is long enough; a note of it."""
    epochs = rows.get("epochs", np.zeros(1))
    begins = 1 + np.flatnonzero((np.diff(epochs) < 0) & (epochs[1:] == epochs[0]))
    # Loggers that append hold several runs in one file, and the one that is asked about is the last.
    if not len(begins) or len(epochs) - begins[-1] < _FEWEST_EPOCHS:
        return rows, ()
    note = f"the run began anew: {begins[-1]} rows of earlier passes are left out"
    return {key: column[begins[-1] :] for key, column in rows.items()}, (note,)


def _steps_of(rows: Mapping[str, Floats], name: str) -> Floats | None:
    """Steps since the start of training: those that begin anew in each epoch are joined."""
    steps, epochs = rows.get("steps"), rows.get("epochs")
    if steps is None or epochs is None:
        return steps
    if not np.all(np.isfinite(steps)):
        return None
    falls, rises = np.diff(steps) < 0, np.diff(epochs) > 0
    if not falls.any():
        return steps
    if np.any(falls & ~rises):
        row = int(np.argmax(falls & ~rises)) + 2
        raise RecordError(
            f"{name}: steps must rise from row to row within an epoch, got {steps[row - 1]:g} after "
            f"{steps[row - 2]:g} in row {row}; keep the rows of one run, in order"
        )
    # Steps that count from 0 have one more in an epoch than their largest number.
    per_epoch = float(steps.max()) + (1 if steps.min() == 0 else 0)
    offset = 0 if epochs[0] == 0 else epochs[0]
    return np.asarray(steps + (epochs - offset) * per_epoch, dtype=float)


def _epoch_positions(epochs: Floats, steps: Floats | None) -> tuple[Floats, Floats | None]:
    """Epochs done at each row, and the group of each row where rows of an epoch become one point."""
    distinct = np.unique(epochs)
    if len(distinct) == len(epochs) or np.any(np.diff(epochs) < 0):
        return _from_one(epochs), None
    if len(distinct) >= _FEWEST_EPOCHS:
        return epochs + (distinct[0] == 0), epochs
    if steps is None:
        place = np.concatenate([np.arange(1.0, n + 1) / n for n in np.unique(epochs, return_counts=True)[1]])
        return epochs - (0 if epochs[0] == 0 else 1) + place, None
    # Few epochs: each row at its fraction of them, a whole epoch being the most steps that one has.
    first = np.asarray([steps[epochs == e].max() for e in distinct])
    per_epoch = float(np.diff(first).mean()) if len(first) > 1 else float(first[0])
    return _from_one(steps) / max(per_epoch, 1.0), None


def _from_one(places: Floats) -> Floats:
    """Places counted from 1; a row at 0 is the first thing done."""
    spacing = places[1] - places[0] if len(places) > 1 else 1.0
    return places + spacing if places[0] == 0 and spacing > 0 else places


def _per_group(column: Floats, groups: Floats, name: str) -> Floats:
    """One value per epoch: the mean of a metric, the last of everything else."""
    found = []
    for group in np.unique(groups):
        rows = column[groups == group]
        finite = rows[np.isfinite(rows)]
        mean = float(finite.mean()) if len(finite) else float("nan")
        found.append(mean if name == "values" else float(rows[-1]))
    return np.asarray(found)
