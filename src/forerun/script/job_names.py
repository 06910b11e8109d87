"""Usual names for the length of a job, looked for in a script's arguments, its variables and its configurations."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from forerun.script.capturing.hooks.places import is_of_script

__all__ = ["EPOCH_NAMES", "STEP_NAMES", "NamedLength", "named_length"]

EPOCH_NAMES = ("num_train_epochs", "epochs", "num_epochs", "n_epochs", "max_epochs", "nepochs", "niter", "max_epoch",
               "total_epochs", "num_epoch", "n_epoch")  # fmt: skip
STEP_NAMES = ("max_steps", "max_iters", "num_iterations", "max_train_steps", "train_iters", "total_steps", "num_steps",
              "train_steps", "num_train_steps", "iterations", "max_iter", "num_iters", "n_iters", "total_iters",
              "n_steps")  # fmt: skip
_HOLDERS = ("args", "opt", "opts", "cfg", "config", "conf", "hparams", "hp", "flags", "training_args", "params",
            "parsed_args", "hyperparameters", "options", "settings", "c", "self", "trainer", "train", "training",
            "solver", "optim", "optimization", "schedule", "run", "t", "train_config", "train_cfg")  # fmt: skip
_DEEPEST = 3
_SURE = ("max_", "total_", "train_", "num_train_")
_MOST = 1e9
"""Larger numbers stand for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLength:
    """A number that a script has under a usual name, such as ``config.trainer.max_iters``."""

    name: str
    value: float

    @property
    def is_sure(self) -> bool:
        """True for a name that hardly means anything else, unlike ``num_steps``."""
        return self.name.rpartition(".")[2].lower().startswith(_SURE)


def named_length(
    frame: FrameType | None, names: Sequence[str], options: Sequence[Mapping[str, Any]] = ()
) -> NamedLength | None:
    """The number under one of some names: in the frames of the script, inside first, then in its main module.

    Args:
        frame: Innermost frame; None for the main module alone.
        names: Names in the order of preference.
        options: Options of the script's parsers, ``name`` and ``value``, which come last.
    """
    for scope in _scopes(frame):
        for place, known in _levels(scope):
            if (found := _first(known, names, place)) is not None:
                return found
    return _first({option["name"]: option["value"] for option in options}, names, "")


def _scopes(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    while frame is not None:
        own = frame.f_locals.get("self")
        if is_of_script(frame.f_code.co_filename):
            yield frame.f_locals
            yield frame.f_globals
        elif "Trainer" in type(own).__name__:  # of a library
            yield {"self": own}
        frame = frame.f_back
    yield vars(sys.modules["__main__"])


def _levels(scope: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Variables, and what the usual holders of configurations hold among them, the outer levels first."""
    level: list[tuple[str, Mapping[str, Any]]] = [("", scope)]
    for _ in range(_DEEPEST + 1):
        yield from level
        level = [
            (f"{place}{name}.", inner)
            for place, known in level
            for name, value in list(known.items())
            if str(name).lower() in _HOLDERS and (inner := _held(value))
        ]


def _held(value: Any) -> Mapping[str, Any]:
    """The values of a configuration: a mapping, a namespace, a dataclass or any object with attributes of its own."""
    if isinstance(value, Mapping):
        return value
    library = (value.__name__ if isinstance(value, ModuleType) else type(value).__module__).split(".")[0]
    found = getattr(value, "__dict__", {})
    return found if isinstance(found, dict) and library not in ("torch", "numpy") else {}


def _first(known: Mapping[str, Any], names: Sequence[str], place: str) -> NamedLength | None:
    folded = {str(name).lower().replace("-", "_"): (name, value) for name, value in list(known.items())}
    for name in names:
        written, value = folded.get(name, (name, None))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MOST:
            return NamedLength(name=f"{place}{written}".removeprefix("self."), value=float(value))
    return None
