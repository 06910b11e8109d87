"""The values of a script as it is, and the command and the hooks that realise other ones."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.base.errors import UsageError, near_matches
from forerun.script.command_words import command_arguments, with_arguments
from forerun.script.profiling.knob_hooks import LOADER_KNOBS
from forerun.script.profiling.profile import Profile
from forerun.script.profiling.recorded import write_text
from forerun.script.tuning.space import KNOBS, Space, check_value, read_yaml

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
    write_text(path, yaml.safe_dump(plain, sort_keys=False))


def read_configuration(path: Path) -> ScriptConfiguration:
    """Reads a configuration from ``write_configuration``, or one that a user wrote by hand.

    Raises:
        UsageError: The file cannot be read, or is not a configuration.
    """
    found = read_yaml(path, "a configuration")
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


def base_values(
    space: Space, profile: Profile | None, options: tuple[dict[str, Any], ...], command: Sequence[str] = ()
) -> dict[str, Any]:
    """The script's own value of each parameter: from the space, its arguments, its loader, or the knob's usual one.

    Arguments are those that argparse has seen, and, for scripts that read them otherwise, those in the command.
    """
    by_flag = {each.flag.removesuffix("="): _plain(each.value) for each in command_arguments(command)}
    # The last value of an option that is given twice counts, as in argparse.
    by_flag.update({flag: option["value"] for option in options for flag in option["flags"]})
    usual = {name: knob.usual for name, knob in KNOBS.items()}
    if profile is not None:
        usual |= {
            name: value for name, value in profile.loader.items() if name in KNOBS and value is not None
        }
        # A loader may have a batch sampler instead of a batch size.
        samples = profile.samples_per_batch if profile.loader else None
        usual["batch_size"] = profile.loader.get("batch_size") or (round(samples) if samples else None)
        usual |= {name: profile.optimizer.get(name) for name in ("num_threads", "lr")}
    found = {}
    for parameter in space.parameters:
        value = parameter.default
        if value is None and parameter.flag is not None:
            value = by_flag.get(parameter.flag.removesuffix("="))
        if value is None:
            value = usual.get(parameter.name)
        if value is not None:
            found[parameter.name] = value
    return found


def _plain(word: Any) -> Any:
    """The value that a word of a command means: a number, true or false, or the word."""
    import yaml

    try:
        found = yaml.safe_load(word) if isinstance(word, str) else word
        return float(found) if isinstance(found, str) else found
    except (yaml.YAMLError, ValueError):
        return word


def check_arguments(space: Space, options: tuple[dict[str, Any], ...]) -> None:
    """Refuse arguments that the script's parser does not know, if forerun saw the parser.

    Raises:
        UsageError: The script's parser knows other arguments, but not this one.
    """
    known = [flag for option in options for flag in option["flags"]]
    for parameter in space.parameters:
        # Scripts that take key=value read them without argparse.
        if parameter.flag is None or not parameter.flag.startswith("-"):
            continue
        if known and parameter.flag.removesuffix("=") not in known:
            raise UsageError(
                f"the script has no argument '{parameter.flag}' (map of '{parameter.name}'); it has {', '.join(known)}"
                f"{near_matches(parameter.flag, known)}"
            )


_OF_BATCHES = ("batch", "accum")


def counts_steps(space: Space, profile: Profile, base: Mapping[str, Any]) -> bool:
    """True if the speed of a trial is in steps a second; False if it is in samples a second.

    Samples are counted in the loader's batches. Without a loader they are the first axis of the model's input, if that
    is a multiple of the script's own batch size; otherwise only steps can be compared, as long as nothing in the space
    changes the samples of a step.

    Raises:
        UsageError: The space changes the samples of a step, and they cannot be counted.
    """
    if profile.loader and profile.batch_size:
        return False
    own = base.get("batch_size")
    rows = profile.batch_size
    if rows and isinstance(own, (int, float)) and own > 0 and rows % own == 0:
        return False
    varying = [
        parameter.name
        for parameter in space.parameters
        if any(word in f"{parameter.name} {parameter.flag or ''}".lower() for word in _OF_BATCHES)
    ]
    if not varying:
        return True
    seen = (
        "the model's input has no first axis that was seen"
        if not rows
        else f"the model's input has {rows:g} rows a step"
    )
    known = "its own batch size is not known" if own is None else f"its own batch size is {own}"
    raise UsageError(
        f"the samples of a step cannot be counted: the script has no DataLoader, {seen}, and {known}; give batch_size "
        f"a default in the space that divides these rows, leave out {', '.join(varying)}, or take --objective time, by "
        "which trials run to their ends"
    )


def fitting_space(space: Space, profile: Profile) -> Space:
    """The space without settings that cannot matter to a script: of loaders, images or optimizers that it has not."""
    left_out: set[str] = set()
    if not profile.loader:
        left_out.update(LOADER_KNOBS)
    if profile.has_images is False:
        left_out.add("channels_last")
    if not profile.optimizer.get("name"):
        left_out.add("optimizer_implementation")
    kept = tuple(parameter for parameter in space.parameters if parameter.name not in left_out)
    return replace(space, parameters=kept) if kept else space
