"""The command and the hooks that realise the values of a trial."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.base.errors import FailureError, UsageError
from forerun.script.command_words import with_arguments
from forerun.script.tuning.knobs import KNOBS, check_value
from forerun.script.tuning.space import Space

__all__ = [
    "ScriptConfiguration",
    "configure",
    "read_configuration",
    "scaled_learning_rate",
    "write_configuration",
]

_ADAPTIVE = ("adam", "adamw", "adamax", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "lamb")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptConfiguration:
    """One way to run a script.

    Attributes:
        arguments: Values of the script's arguments, by flag.
        hooks: Values that hooks set, by knob.
    """

    arguments: dict[str, Any]
    hooks: dict[str, Any]

    def command(self, base: Sequence[str]) -> tuple[str, ...]:
        """The command with the arguments of this configuration."""
        return with_arguments(base, self.arguments)


def scaled_learning_rate(
    base_lr: float, *, base_batch_size: float, batch_size: float, rule: str, optimizer: str | None = None
) -> float:
    """Learning rate for another batch size.

    linear: lr b / b0. sqrt: lr sqrt(b / b0). ``auto`` is sqrt for optimizers that divide by the gradient's own size,
    linear for the others.

    Source: Goyal et al. 2017, arXiv:1706.02677 (linear, SGD); Malladi et al. 2022, arXiv:2205.10287 (square root,
    Adam).

    >>> scaled_learning_rate(0.1, base_batch_size=8, batch_size=32, rule="auto", optimizer="Adam")
    0.2
    """
    factor = batch_size / base_batch_size
    if rule == "auto":
        rule = "sqrt" if (optimizer or "").lower() in _ADAPTIVE else "linear"
    return base_lr * (math.sqrt(factor) if rule == "sqrt" else factor)


def configure(
    space: Space, values: Mapping[str, Any], base: Mapping[str, Any], optimizer: str | None
) -> ScriptConfiguration:
    """The configuration of a trial.

    Args:
        space: Space of the study.
        values: Drawn values by parameter.
        base: Values of the script as it is, by parameter.
        optimizer: Name of the script's optimizer, which decides the rule of the learning rate.

    Raises:
        UsageError: A scaled value has no value to start from.
    """
    arguments: dict[str, Any] = {}
    hooks: dict[str, Any] = {}
    for parameter in space.parameters:
        if parameter.scale_with is None:
            if parameter.name not in values:
                continue
            value = values[parameter.name]
        else:
            own, other = base.get(parameter.name), base.get(parameter.scale_with)
            if own is None or other is None:
                raise UsageError(
                    f"'{parameter.name}' scales with '{parameter.scale_with}', but the script's own values are "
                    "not known; give both a default in the space"
                )
            value = scaled_learning_rate(
                float(own),
                base_batch_size=float(other),
                batch_size=float(values.get(parameter.scale_with, other)),
                rule=parameter.rule,
                optimizer=optimizer,
            )
        if parameter.flag is not None:
            arguments[parameter.flag] = value
        else:
            hooks[parameter.name] = value
    return ScriptConfiguration(arguments=arguments, hooks=hooks)


def write_configuration(
    path: Path, found: ScriptConfiguration, command: Sequence[str], about: Mapping[str, Any]
) -> None:
    """Writes a configuration as YAML, with the command it was found for and the facts known about it.

    Raises:
        FailureError: The file cannot be written.
    """
    import yaml

    plain = {
        "arguments": found.arguments,
        "hooks": found.hooks,
        "command": shlex.join(found.command(command)),
        "about": dict(about),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise FailureError(f"expected to write '{path}', got: {error.strerror}") from error


def read_configuration(path: Path) -> ScriptConfiguration:
    """Reads a configuration from ``write_configuration``, or one that a user wrote by hand.

    Raises:
        UsageError: The file cannot be read, or is not a configuration.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"expected a configuration at '{path}', got: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"expected YAML in '{path}', got: {error}") from error
    if not isinstance(found, dict) or not {"arguments", "hooks"} & set(found):
        raise UsageError(f"expected 'arguments' and 'hooks' in '{path}', as forerun tune writes them")
    hooks = found.get("hooks") or {}
    for name, value in hooks.items():
        if name not in KNOBS or not KNOBS[name].has_hook:
            raise UsageError(
                f"'{path}': no hook sets '{name}'; known: {', '.join(k for k in KNOBS if KNOBS[k].has_hook)}"
            )
        check_value(KNOBS[name], value)
    return ScriptConfiguration(arguments=dict(found.get("arguments") or {}), hooks=dict(hooks))
