"""Settings that training tools use where their user says nothing, each with the file of the tool that says it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forerun.base.errors import InvalidSetupError
from forerun.question.captured import is_captured
from forerun.question.config_files import config_note, read_config
from forerun.question.model import is_keras
from forerun.question.options import RunOptions
from forerun.question.parallel import AXES
from forerun.question.settings import declared
from forerun.question.setup import Software
from forerun.question.sharing import Sharing, Strategy

__all__ = ["RecipeLine", "own_precision", "recipe_notes", "recipe_settings", "recipes"]

_AWAITED = ("several", "fsdp", *AXES)
"""Needs of settings that more devices, or another division of them, may bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeLine:
    """One setting of a tool.

    Attributes:
        name: Name of the setting.
        value: Its value where the condition holds.
        file: File of the tool that says so, as repository:path.
        when: Condition: full, adapters, several, an architecture, a strategy or an axis; None for always.
        otherwise: Its value elsewhere; None if the tool then has no such setting.
    """

    name: str
    value: Any
    file: str
    when: str | None = None
    otherwise: Any = None


@cache
def recipes() -> Mapping[str, tuple[RecipeLine, ...]]:
    """The recipes by the names of their tools."""
    text = Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8")
    return {
        tool: tuple(RecipeLine(name=name, **line) for name, line in lines.items())
        for tool, lines in tomllib.loads(text).items()
    }


def recipe_settings(
    given: Mapping[str, Any], model: Any, architecture: str, num_devices: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a run with those of its configuration file and recipe beneath them, and those that must wait.

    Settings of several devices wait where there is one: a search may add devices to the run.

    Args:
        given: Settings of the user, which go before those of the file, and these before the tool's.
        model: The model.
        architecture: Architecture of the device.
        num_devices: Number of devices.

    Raises:
        UsageError: The file cannot be read, or the model is one that no recipe is for.
    """
    path = given.get("config")
    of_file = {} if path is None else read_config(path).settings
    tool = given.get("recipe") or of_file.get("recipe")
    if tool is None and not of_file:
        return dict(given), {}
    _check_model(model)
    lines = [*(RecipeLine(name=name, value=value, file=str(path)) for name, value in of_file.items())]
    lines += [line for line in recipes().get(tool or "", ()) if line.name not in of_file]
    lines = [line for line in lines if line.name not in given]
    # Adapters and the strategy of the tool decide what else holds.
    known = {**{line.name: line.value for line in lines if line.when is None}, **given}
    strategy = Strategy(known.get("strategy") or Strategy.DDP)
    axes = {word.partition("=")[0].strip() for word in str(known.get("parallel") or "").split(",")}
    facts = {architecture, str(strategy), "full" if known.get("lora") is None else "adapters", *axes}
    present = axes | ({"several"} if num_devices > 1 else set())
    if strategy.stage == 3:
        facts.add("fsdp")
        present |= {"fsdp"} if num_devices > 1 else set()
    held, waiting = dict(given), {}
    for line in lines:
        value = line.value if line.when is None or line.when in facts | present else line.otherwise
        needs = declared(RunOptions)[line.name].setting.needs
        if value is None:
            continue
        if needs not in _AWAITED or needs in present:
            held[line.name] = value
        elif line.name in declared(Sharing):
            waiting[line.name] = value
    return held, waiting


def _check_model(model: Any) -> None:
    if is_keras(model) or is_captured(model):
        raise InvalidSetupError(
            "--recipe and --from are for PyTorch models by name; a captured script has the settings of its own tool, "
            "and Keras those of Keras; leave them out"
        )


def own_precision(given: Mapping[str, Any]) -> str | None:
    """The precision that a configuration file or a recipe brings along, None if neither does."""
    path = given.get("config")
    of_file = {} if path is None else read_config(path).settings
    lines = recipes().get(given.get("recipe") or of_file.get("recipe", ""), ())
    return of_file.get("precision") or next((line.value for line in lines if line.name == "precision"), None)


def recipe_notes(software: Software) -> tuple[str, ...]:
    """The settings of a recipe and of a configuration file in words, for every answer about the run."""
    of_file = config_note(software.config)
    if software.recipe is None:
        return of_file
    names = ", ".join("--" + line.name.replace("_", "-") for line in recipes()[software.recipe])
    return (
        *of_file,
        f"recipe {software.recipe}: what was not asked for is as this tool has it by default ({names}); "
        "forerun/question/recipes.toml names the file of each",
    )
