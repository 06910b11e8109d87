"""A bar on stderr while jobs run, with the time that is left; nothing where there is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from forerun.evidence.measurement.progress import (
    Event,
    JobFinished,
    JobLost,
    JobProgressed,
    JobStarted,
    SessionStarted,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["progress_bar", "time_left"]


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[Event], None]]:
    """A function for ``on_event`` that shows each event."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = _Shown(bar)
        yield shown.tell


class _Shown:
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID = bar.add_task("", total=None, left="")
        self._num_done = 0

    def tell(self, event: Event) -> None:
        bar, task = self._bar, self._task
        if isinstance(event, SessionStarted):
            bar.update(task, total=event.num_jobs, description=_skipped(event.num_skipped))
        elif isinstance(event, JobStarted):
            batch = event.job.parameters.get("batch_size")
            described = f"{event.job.subject}, batch size {batch}" if batch else event.job.subject
            bar.update(task, description=described, left=time_left(event.remaining_time_s))
        elif isinstance(event, JobProgressed):
            bar.update(task, completed=self._num_done + event.fraction)
        elif isinstance(event, JobFinished):
            self._num_done += 1
            bar.update(task, completed=self._num_done, left=time_left(event.remaining_time_s))
        elif isinstance(event, JobLost):
            self._num_done += 1
            bar.update(task, completed=self._num_done)


def _skipped(num_skipped: int) -> str:
    return f"{num_skipped} are in the records already" if num_skipped else ""


def time_left(remaining_time_s: float | None) -> str:
    """Words for a remaining time: 'about 3 min left'."""
    if remaining_time_s is None:
        return ""
    if remaining_time_s < 90:
        return f"about {remaining_time_s:.0f} s left"
    if remaining_time_s < 5400:
        return f"about {remaining_time_s / 60:.0f} min left"
    return f"about {remaining_time_s / 3600:.1f} h left"
