"""Trials of a study in a journal file, which processes share and resume.

The journal is whole after a full disk, a kill and the loss of power.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend

from forerun.base.errors import FailureError, RecordError, UsageError
from forerun.script.tuning.options import Objective
from forerun.script.tuning.space import Parameter, Space

_WORKER = "worker"
_CONSTRAINT = "memory_or_target"


class TrialStore:
    """An Optuna study in a journal file.

    Args:
        folder: Folder of the study; made if it is missing.
        objectives: Objectives of the study.
        identity: Values that must be equal to resume the study: command, space, objectives.
        sampler: Sampler of the study, ``tpe`` or ``random``.
        seed: Seed of the sampler.
    """

    def __init__(
        self,
        folder: Path,
        objectives: Sequence[Objective],
        identity: Mapping[str, Any],
        *,
        sampler: str = "tpe",
        seed: int | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.objectives = tuple(objectives)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FailureError(
                f"expected a folder for the study at '{folder}', got: {error.strerror or error}; choose another --study"
            ) from error
        self.path = folder / "journal.sqlite"
        self.is_resumed = self.path.exists()
        chosen: Any = (
            optuna.samplers.RandomSampler(seed=seed)
            if sampler == "random"
            else optuna.samplers.TPESampler(
                # Settings of a script depend on each other, such as workers on the batch; and sessions ask while the
                # trials of others run, whose configurations the liar counts as bad so that none is tried twice.
                seed=seed,
                multivariate=True,
                constant_liar=True,
                n_startup_trials=5,
            )
        )
        self.study = optuna.create_study(
            study_name="forerun",
            storage=JournalStorage(StudyJournal(self.path)),
            sampler=chosen,
            directions=["maximize" if objective.is_rising else "minimize" for objective in objectives],
            load_if_exists=True,
        )
        self._check_identity(identity, folder)

    def _check_identity(self, identity: Mapping[str, Any], folder: Path) -> None:
        plain = json.loads(json.dumps(identity, default=str))
        known = self.study.user_attrs.get("identity")
        if known is None:
            self.study.set_user_attr("identity", plain)
        elif known != plain:
            different = sorted(k for k in {*known, *plain} if known.get(k) != plain.get(k))
            raise UsageError(
                f"the study in '{folder}' has another {' and '.join(different)}; "
                "give another --study, or the same command"
            )

    def claim_lost_trials(self) -> int:
        """Queues trials of workers that died on this machine again; returns their number."""
        count = 0
        for trial, is_alive in self._running_elsewhere():
            if is_alive:
                continue
            told = trial.user_attrs.get("told")
            try:
                # A trial whose figures were written has finished: its session died before it could say so.
                if told is not None:
                    self.study.tell(trial.number, told)
                    continue
                self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            except ValueError:  # another session of the study was faster
                continue
            # A trial may die between being taken from the queue and its first drawn value.
            values = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            source = trial.user_attrs.get("source", "sampler")
            self.study.enqueue_trial(values, user_attrs={"source": source})
            count += 1
        return count

    def num_running_elsewhere(self, *, before: int | None = None) -> int:
        """Number of trials that other living sessions run on this machine; ``before`` counts only smaller numbers."""
        return sum(
            is_alive and (before is None or trial.number < before)
            for trial, is_alive in self._running_elsewhere()
        )

    def _running_elsewhere(self) -> list[tuple[Any, bool]]:
        """Running trials of other sessions on this machine, each with True if the session is alive."""
        found = []
        for trial in self.study.get_trials(deepcopy=False):
            worker = trial.user_attrs.get(_WORKER)
            is_here = worker is not None and worker["host"] == platform.node()
            if trial.state.name == "RUNNING" and is_here and worker["pid"] != os.getpid():
                began = worker["started"]
                found.append((trial, began is not None and _started(worker["pid"]) == began))
        return found

    def enqueue(self, values: Mapping[str, Any], source: str) -> None:
        """Puts a configuration first in the queue, unless the study has it already."""
        self.study.enqueue_trial(dict(values), user_attrs={"source": source}, skip_if_exists=True)

    def ask(self) -> Any:
        """The next trial, marked as a trial of this process."""
        trial = self.study.ask()
        trial.set_user_attr(
            _WORKER, {"host": platform.node(), "pid": os.getpid(), "started": _started(os.getpid())}
        )
        return trial

    def tell(self, trial: Any, values: Sequence[float | None], record: Mapping[str, Any]) -> None:
        """Ends a trial and reports its value to the sampler.

        A trial without a value (too much memory, target not reached, crashed) is a violated constraint with the worst
        finite value: the sampler learns from it, but would forget a failed trial.
        """
        plain = json.loads(json.dumps(record, default=str))
        is_whole = all(value is not None for value in values)
        trial.set_constraint(_CONSTRAINT, -1.0 if is_whole else float(record.get("violation") or 1.0))
        told = [
            objective.worst if value is None else value
            for objective, value in zip(self.objectives, values, strict=True)
        ]
        trial.set_user_attr("record", plain)
        trial.set_user_attr("ended", time.time())
        trial.set_user_attr("told", told)
        self.study.tell(trial, told)

    def prune(self, trial: Any, record: Mapping[str, Any]) -> None:
        """Ends a trial whose forecast cannot win."""
        trial.set_user_attr("record", json.loads(json.dumps(record, default=str)))
        self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)

    def drop(self, trial: Any) -> None:
        """Gives an interrupted trial back to the queue."""
        self.replace(trial, trial.params, trial.user_attrs.get("source", "sampler"))

    def replace(self, trial: Any, values: Mapping[str, Any], source: str) -> None:
        """Ends a trial that has not run, and queues another configuration in its place."""
        self.fail(trial)
        self.study.enqueue_trial(dict(values), user_attrs={"source": source})

    def fail(self, trial: Any) -> None:
        """Ends a trial that has not run; the sampler ignores it."""
        self.study.tell(trial, state=optuna.trial.TrialState.FAIL)

    def trials(self) -> list[Any]:
        """All finished trials, pruned ones included, in order."""
        trials = self.study.get_trials(deepcopy=False)
        return [t for t in trials if t.state.name in ("COMPLETE", "PRUNED") and "record" in t.user_attrs]

    def front(self) -> list[Any]:
        """Trials that no other trial beats in every objective; with one objective, the best trial."""
        return [trial for trial in self.study.best_trials if has_value(trial)]


def values_of(trial: Any) -> dict[str, Any]:
    """Values of a finished trial by parameter."""
    found: dict[str, Any] = trial.user_attrs["record"]["values"]
    return found


def result_of(trial: Any) -> dict[str, Any]:
    """``TrialResult.as_dict`` of a finished trial."""
    found: dict[str, Any] = trial.user_attrs["record"]["result"]
    return found


def has_value(trial: Any) -> bool:
    """True for a trial that brought a value of every objective."""
    return trial.state.name == "COMPLETE" and bool(trial.user_attrs["record"].get("is_feasible"))


def suggest(trial: Any, space: Space) -> dict[str, Any]:
    """Draws a value for each parameter that is not scaled with another."""
    return {parameter.name: _drawn(trial, parameter) for parameter in space.drawn}


def _drawn(trial: Any, parameter: Parameter) -> Any:
    if parameter.values:
        return trial.suggest_categorical(parameter.name, list(parameter.values))
    if parameter.is_whole:
        return trial.suggest_int(
            parameter.name, int(parameter.low), int(parameter.high), log=parameter.is_log
        )
    return trial.suggest_float(parameter.name, parameter.low, parameter.high, log=parameter.is_log)


def _started(pid: int) -> float | None:
    """Start time of a process, which distinguishes it from a later process with the same number."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


_PATIENCE_S = 60.0
"""Longest wait for other sessions, which hold the lock for some milliseconds."""


class StudyJournal(BaseJournalBackend):  # type: ignore[misc]  # Optuna is not followed
    """Optuna's operations of a study as rows of an SQLite file that several processes share.

    SQLite writes the rows of a call whole or not at all, also on a full disk and where their writer dies, and its locks
    are the kernel's own, free as soon as their holder is dead. It would read a flipped bit as another figure, so each
    row has a checksum.

    Args:
        path: File of the journal; made if it is missing.

    Raises:
        RecordError: The file is damaged.
        FailureError: The file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened("open") as journal:
            if (found := journal.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
                raise self._damaged(found)
            # A damaged name of the table must not lead to a second, empty one.
            if not journal.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                journal.execute(
                    "CREATE TABLE IF NOT EXISTS log (number INTEGER PRIMARY KEY, text TEXT, crc32 INTEGER)"
                )

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Records from this number on."""
        query = "SELECT number, text, crc32 FROM log WHERE number > ? ORDER BY number"
        with self._opened("read") as journal:
            rows = journal.execute(query, (log_number_from,)).fetchall()
        for number, (found, text, crc32) in enumerate(rows, start=log_number_from + 1):
            if found != number or crc32 != zlib.crc32(str(text).encode()):
                raise self._damaged(f"record {number} has another checksum, or is missing")
            yield json.loads(text)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Adds records; after an error none of them is in the file."""
        texts = [json.dumps(record, separators=(",", ":")) for record in logs]
        rows = [(text, zlib.crc32(text.encode())) for text in texts]
        with self._opened("write") as journal:
            journal.executemany("INSERT INTO log (text, crc32) VALUES (?, ?)", rows)

    @contextlib.contextmanager
    def _opened(self, what: str) -> Iterator[sqlite3.Connection]:
        """A transaction of the file; undone by an error."""
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=_PATIENCE_S)) as journal, journal:
                yield journal
        except sqlite3.OperationalError as error:
            raise FailureError(
                f"expected to {what} the journal of the study '{self.path}', got: {error}; everything that it "
                "acknowledged is in it: give the disk room, and run the same command again"
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, found: str) -> RecordError:
        return RecordError(
            f"expected the journal of a study in '{self.path}', got damage: {found}; restore the file from a copy, or "
            "begin another study with --study"
        )
