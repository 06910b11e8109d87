"""Several sessions of one study, each a process with its own device or its own node of a cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.base.errors import ForerunError
from forerun.base.plugins import plugin
from forerun.base.process_control import die_with_parent
from forerun.script.tuning.study import TrialStore
from forerun.script.tuning.trial import run_trial
from forerun.script.tuning.tuner import Task, Tuner

__all__ = ["StudyOrder", "search_together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOrder:
    """Order for a session of a study, in plain values so that it can be sent to a process.

    Attributes:
        folder: Folder of the study.
        identity: Values that must be equal for sessions to share the study.
        task: Task to tune.
        base: The script's own values by parameter.
        optimizer: Name of the script's optimizer.
        sampler: Sampler of the study, ``tpe`` or ``random``.
        seed: Seed of the first session's sampler; each further session has the next number.
        ray_address: Cluster that the trials run on; None for this machine.
        spent_s: Time of the budget that was used before the session [s].
    """

    folder: Path
    identity: Mapping[str, Any]
    task: Task
    base: Mapping[str, Any]
    optimizer: str | None
    sampler: str
    seed: int | None
    ray_address: str | None = None
    spent_s: float = 0.0

    @contextlib.contextmanager
    def tuner(self, store: TrialStore, say: Callable[[str], None]) -> Iterator[Tuner]:
        """A session of the study, with its connection to the cluster."""
        with (
            contextlib.nullcontext(run_trial)
            if self.ray_address is None
            else plugin("forerun.clusters", "ray").trial_runner(self.ray_address) as run
        ):
            yield Tuner(
                task=self.task,
                store=store,
                base=self.base,
                optimizer=self.optimizer,
                say=say,
                run=run,
                spent_s=self.spent_s,
            )

    def for_session(self, index: int, device_index: str) -> StudyOrder:
        """The order for a further session, with its own device and seed."""
        order = replace(self.task.order, device_index=device_index)
        seed = None if self.seed is None else self.seed + index
        return replace(self, task=replace(self.task, order=order), seed=seed)


def search_together(tuner: Tuner, order: StudyOrder, devices: Sequence[str]) -> str:
    """Searches here and in a process for each further device, until the budget is used; returns the reason to end.

    Args:
        tuner: Session of this process.
        order: Order for the other sessions.
        devices: Device of each session, that of this process first.
    """
    # Do not fork: this process has threads of the storage and of the samplers.
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_work, args=(order.for_session(index, device), os.getpid()))
        for index, device in enumerate(devices[1:], start=1)
    ]
    try:
        for process in others:
            process.start()
        reason = tuner.search()
        for process in others:
            process.join()
    finally:
        for process in others:
            if process.is_alive():
                process.terminate()
                process.join()
    failed = sum(process.exitcode != 0 for process in others)
    return f"{reason}; {failed} of {len(devices)} sessions failed" if failed else reason


def _work(order: StudyOrder, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    objectives = order.task.objectives
    store = TrialStore(order.folder, objectives, order.identity, sampler=order.sampler, seed=order.seed)
    try:
        with order.tuner(store, _tell) as tuner:
            tuner.search()
    except (ForerunError, KeyboardInterrupt) as error:
        _tell(f"a session ended: {error or 'interrupted'}")
        sys.exit(1)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
