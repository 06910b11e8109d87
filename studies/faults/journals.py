"""Faults of the journal of a study: killed writers, a full disk, flipped bits.

A writer tells each trial that the journal has acknowledged. After the fault the journal must open, hold every
acknowledged trial as it was written, and take another.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from forerun.base.errors import FailureError, RecordError
from forerun.script.tuning.options import parse_objectives
from forerun.script.tuning.space import space_of
from forerun.script.tuning.study import TrialStore, suggest
from forerun.script.tuning.trial import TrialResult
from studies.faults.stores import forked, told_numbers

_SPEED = parse_objectives("speed")
_SPACE = space_of({"parameters": {"num_workers": {"min": 0, "max": 1000}}})
_RECORD = {"result": TrialResult(outcome="done").as_dict(), "is_feasible": True, "source": "sampler"}
_MOST = 10_000
_TRIAL_BYTES = 1500


def _opened(folder: Path, said: list[str] | None = None) -> TrialStore:
    lines = [] if said is None else said
    return TrialStore(folder, _SPEED, {}, sampler="random", seed=0, say=lines.append)


def _add(store: TrialStore) -> int:
    trial = store.ask()
    values = suggest(trial, _SPACE)
    store.tell(trial, [float(trial.number)], {**_RECORD, "values": values})
    return int(trial.number)


def _faults(folder: Path, told: set[int]) -> Counter[str]:
    said: list[str] = []
    store = _opened(folder, said)
    values = {trial.number: trial.values for trial in store.trials()}
    return Counter(
        {
            "lost": len(told - values.keys()),
            "changed": sum(found != [float(number)] for number, found in values.items()),
            "torn and kept aside": len(said),
            "refused": int(_add(store) in values),
        }
    )


def killed_journals(folder: Path, number: int, seed: int = 8) -> Counter[str]:
    """Kills writers of one journal at random moments."""
    draw, found, told = random.Random(seed), Counter({"faults": number}), set[int]()

    def work(pipe: int) -> None:
        store = _opened(folder)
        for _ in range(_MOST):
            os.write(pipe, b"%d\n" % _add(store))

    for _ in range(number):
        with forked(work) as (pid, pipe):
            told |= told_numbers(pipe, least=draw.randrange(0, 5))
            time.sleep(draw.uniform(0.0, 0.05))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            told |= told_numbers(pipe)
        found += _faults(folder, told)
    found["acknowledged"] = len(told)
    return found


def full_journals(folder: Path, number: int, seed: int = 9) -> Counter[str]:
    """Lets the disk be full at random byte positions of the next trials of one journal."""
    draw, found, told = random.Random(seed), Counter({"faults": number}), set[int]()
    for _ in range(number):
        path = folder / "journal.log"
        size = path.stat().st_size if path.exists() else 0
        limit = size + draw.randrange(1, 3 * _TRIAL_BYTES)

        def work(pipe: int, limit: int = limit) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            store = _opened(folder)
            for _ in range(_MOST):
                os.write(pipe, b"%d\n" % _add(store))

        with forked(work) as (pid, pipe):
            told |= told_numbers(pipe)
            os.waitpid(pid, 0)
        found += _faults(folder, told)
    found["acknowledged"] = len(told)
    return found


def flipped_journal_bits(folder: Path, number: int, seed: int = 10) -> Counter[str]:
    """Flips one bit of a journal at a time."""
    draw, found = random.Random(seed), Counter({"faults": number})
    whole = _opened(folder / "whole")
    for _ in range(10):
        _add(whole)
    wanted = {trial.number: (trial.params, trial.values) for trial in whole.trials()}
    data = whole.path.read_bytes()
    flipped = folder / "flipped"
    flipped.mkdir()
    for _ in range(number):
        for path in flipped.iterdir():
            path.unlink()
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (flipped / "journal.log").write_bytes(changed)
        found[_outcome_of_flip(flipped, wanted)] += 1
    return found


def _outcome_of_flip(folder: Path, wanted: dict[int, Any]) -> str:
    said: list[str] = []
    try:
        read = {trial.number: (trial.params, trial.values) for trial in _opened(folder, said).trials()}
    except (RecordError, FailureError):
        return "refused with an error"
    except Exception as error:
        return f"internal error {type(error).__name__}"
    if said:
        return "left out and reported"
    return "outside the data" if read == wanted else "read as another trial"
