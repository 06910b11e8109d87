"""The space of a study, from a YAML file or a built-in task, and the knobs: settings that can be changed in any script.

metric: {name: val_acc, goal: maximize, at_least: 0.76}
parameters:
batch_size: {min: 8, max: 256, log: true, map: --batch-size}
lr:         {scale_with: batch_size, rule: auto, map: --lr}
num_workers: {values: [0, 2, 4]}
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from forerun.base.errors import UsageError, near_matches
from forerun.base.received import parsed_yaml
from forerun.script.patching import tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting that can be changed.

    Attributes:
        name: Name of the knob in a space.
        has_hook: True if a hook can set the knob inside an unchanged script; others need an argument of the script.
        choices: All values of the knob; empty for numbers.
        lowest: Smallest number.
        changes_result: True if the knob may change the trained model.
        usual: Value in a script that does not set it; None if scripts differ.
        helpful: Value that usually makes a script faster; None if there is none.
    """

    name: str
    has_hook: bool = True
    choices: tuple[Any, ...] = ()
    lowest: float = 0.0
    changes_result: bool = False
    usual: Any = None
    helpful: Any = None


KNOBS: Mapping[str, Knob] = {
    name: Knob(name=name, **{**row, "choices": tuple(row.get("choices", ()))})
    for name, row in tables("tuning")["knobs"].items()
}
"""All knobs by name."""


def find_knob(name: str) -> Knob:
    """The knob with this name.

    Raises:
        UsageError: There is no such knob; the message lists near matches.
    """
    if "quanti" in name.lower():
        raise UsageError(
            f"expected a knob of the training, got '{name}': static quantisation changes a model after its training "
            "and does not change its time; quantise the model that the best configuration saves, with "
            "torchao or torch.ao.quantization"
        )
    if name not in KNOBS:
        raise UsageError(
            f"expected a knob ({', '.join(KNOBS)}), got '{name}'{near_matches(name, KNOBS)}; an argument of the "
            "script with another name is given as map: --its-flag"
        )
    return KNOBS[name]


def check_value(knob: Knob, value: Any) -> Any:
    """The value, checked to be one that the knob can have.

    Raises:
        UsageError: The knob cannot have this value.
    """
    # YAML 1.1 reads a bare off as false.
    if value is False and "off" in knob.choices:
        return "off"
    if knob.choices and value not in knob.choices:
        raise UsageError(
            f"expected {knob.name} to be one of {', '.join(map(str, knob.choices))}, got '{value}'"
        )
    if not knob.choices and not (_is_number(value) and value >= knob.lowest):
        raise UsageError(f"expected {knob.name} to be a number of {knob.lowest:g} or more, got '{value}'")
    return value


def _is_number(value: Any) -> TypeGuard[float]:
    """True for a number; truth values, which Python counts as such, are none here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_PARAMETER_KEYS = ("values", "min", "max", "log", "step", "map", "default", "scale_with", "rule")
_TOP_KEYS = ("metric", "parameters")
_RULES = ("auto", "linear", "sqrt")
_FALLING = re.compile(
    r"loss|perplexity|ppl|err|(?:^|_)(?:wer|cer|mae|mse|rmse|bpb|nll)(?:$|_)", re.IGNORECASE
)
_MOST_CANDIDATES = 17
_NUM_POINTS = 9
_PER_CENT = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One dimension of a space.

    Attributes:
        name: Name of the knob or of the script's own argument.
        values: Values to choose from; empty for a range.
        low: Smallest number of a range.
        high: Largest number of a range.
        is_log: True if the logarithm is drawn evenly.
        is_whole: True if the numbers are whole.
        flag: Argument of the script that sets the parameter, ``--lr`` before its value, ``--lr=`` or ``lr=`` joined
            with it; None for a hook.
        default: The script's own value, if forerun cannot see it.
        scale_with: Knob with which the value is scaled; None if the value is drawn.
        rule: Rule of scaling: ``linear``, ``sqrt`` or ``auto``.
    """

    name: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    flag: str | None = None
    default: Any = None
    scale_with: str | None = None
    rule: str = "auto"

    @property
    def candidates(self) -> tuple[Any, ...]:
        """The listed values; of a range its whole numbers if they are few, else points along it, the ends included."""
        if self.values or self.scale_with is not None:
            return self.values
        if self.is_whole and not self.is_log and self.high - self.low < _MOST_CANDIDATES:
            return tuple(range(int(self.low), int(self.high) + 1))
        steps = [index / (_NUM_POINTS - 1) for index in range(_NUM_POINTS)]
        points = [
            self.low * (self.high / self.low) ** step
            if self.is_log
            else self.low + step * (self.high - self.low)
            for step in steps
        ]
        return tuple(dict.fromkeys(round(point) for point in points)) if self.is_whole else tuple(points)

    def holds(self, value: Any) -> bool:
        """True if a value is one of the listed values, or in the range."""
        if self.values:
            return value in self.values
        return _is_number(value) and self.scale_with is None and self.low <= value <= self.high

    def start(self, own: Any) -> Any:
        """The script's own value if it is possible, else the first listed value or the middle of the range."""
        if self.holds(own):
            return own
        if self.values:
            return self.values[0]
        middle = (self.low * self.high) ** 0.5 if self.is_log else 0.5 * (self.low + self.high)
        return round(middle) if self.is_whole else middle

    @property
    def changes_result(self) -> bool:
        """True if the parameter may change the trained model."""
        return self.name not in KNOBS or KNOBS[self.name].changes_result


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """The figure that a script prints as ``NAME=0.81`` or ``NAME: 0.81``.

    Attributes:
        name: Name as printed.
        is_rising: True if a larger value is better.
        target: Value to reach; None without a target.
    """

    name: str
    is_rising: bool = True
    target: float | None = None

    @classmethod
    def named(cls, name: str) -> Metric:
        """The metric with this name: losses, errors and perplexities fall, everything else rises."""
        return cls(name=name, is_rising=_FALLING.search(name) is None)

    def is_reached(self, value: float) -> bool:
        """True if a value is as good as the target, or better."""
        if self.target is None:
            return False
        return value >= self.target if self.is_rising else value <= self.target

    def margin(self, max_loss: float, value: float) -> float:
        """Loss that is accepted, on the metric's own scale.

        A share from 0 to 1 may lose ``max_loss`` itself. A figure that is printed in per cent may lose as many
        hundredths of one hundred, any other figure, such as a loss, that share of its value.

        >>> round(Metric.named("acc").margin(0.01, 0.85), 4), round(Metric.named("acc").margin(0.01, 85.0), 4)
        (0.01, 1.0)
        >>> round(Metric.named("loss").margin(0.01, 6.31), 4)
        0.0631
        """
        if self.is_rising and 0 <= value <= 1:
            return max_loss
        if self.is_rising and 1 < value <= _PER_CENT:
            return max_loss * _PER_CENT
        return max_loss * abs(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Parameters that a study may change, and the metric by which it judges.

    Attributes:
        parameters: Dimensions of the space.
        metric: Metric of quality; None if the script prints none.
    """

    parameters: tuple[Parameter, ...]
    metric: Metric | None = None

    @property
    def drawn(self) -> tuple[Parameter, ...]:
        """The parameters whose values are drawn, and not scaled with another."""
        return tuple(parameter for parameter in self.parameters if parameter.scale_with is None)

    def parameter(self, name: str) -> Parameter | None:
        """The parameter with this name."""
        return next((parameter for parameter in self.parameters if parameter.name == name), None)


def read_yaml(path: Path, what: str) -> Any:
    """The content of a YAML file that should hold ``what``, such as ``a space``.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        return parsed_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"expected {what} at '{path}', got: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"expected YAML in '{path}', got: {error}") from error


def read_space(path: Path) -> Space:
    """Reads a space from a YAML file.

    Raises:
        UsageError: The file cannot be read, or holds no space.
    """
    found = read_yaml(path, "a space")
    if not isinstance(found, dict):
        raise UsageError(f"expected a mapping with 'parameters' in '{path}', got {type(found).__name__}")
    return space_of(found)


def space_of(found: Mapping[str, Any]) -> Space:
    """A space from plain values, each of them checked.

    Raises:
        UsageError: A key is unknown, a range is empty, or a value is not possible.
    """
    _check_keys(found, _TOP_KEYS, "in a space")
    entries = found.get("parameters")
    if not isinstance(entries, dict) or not entries:
        raise UsageError("expected at least one parameter under 'parameters', got none")
    parameters = tuple(_parameter(str(name), entry) for name, entry in entries.items())
    names = [parameter.name for parameter in parameters]
    for parameter in parameters:
        if parameter.scale_with is not None and parameter.scale_with not in names:
            raise UsageError(
                f"'{parameter.name}' scales with '{parameter.scale_with}', which is not in the space"
            )
    return Space(parameters=parameters, metric=_metric(found.get("metric")))


def _check_keys(found: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in found:
        if key not in known:
            raise UsageError(
                f"expected the keys {', '.join(known)} {where}, got '{key}'{near_matches(str(key), known)}"
            )


def _parameter(name: str, entry: Any) -> Parameter:
    if isinstance(entry, list):
        entry = {"values": entry}
    if not isinstance(entry, dict):
        raise UsageError(f"expected values or min and max for '{name}', got '{entry}'")
    _check_keys(entry, _PARAMETER_KEYS, f"for '{name}'")
    flag = entry.get("map")
    # An argument of the script can set any parameter; without one the parameter must be a knob with a hook.
    knob = KNOBS.get(name) if flag else find_knob(name)
    if knob is not None and flag is None and not knob.has_hook:
        raise UsageError(
            f"'{name}' cannot be set from outside: give the script's argument, such as map: --{name}"
        )
    if flag is not None and not re.fullmatch(r"-\S*|[^\s=-][^\s=]*=", str(flag)):
        raise UsageError(
            f"expected an argument such as --{name}, --{name}= or {name}= as map of '{name}', got '{flag}'"
        )
    common: dict[str, Any] = {"name": name, "flag": flag, "default": entry.get("default")}
    if "scale_with" in entry:
        if entry.get("rule", "auto") not in _RULES:
            raise UsageError(
                f"expected the rule of '{name}' to be {', '.join(_RULES)}, got '{entry['rule']}'"
            )
        return Parameter(**common, scale_with=str(entry["scale_with"]), rule=entry.get("rule", "auto"))
    if "values" in entry:
        return _listed(common, entry["values"], knob)
    return _ranged(common, entry, knob)


def _listed(common: dict[str, Any], values: Any, knob: Knob | None) -> Parameter:
    if not isinstance(values, list) or not values:
        raise UsageError(f"expected a list of one value or more for '{common['name']}', got '{values}'")
    checked = tuple(values if knob is None else (check_value(knob, value) for value in values))
    return Parameter(**common, values=tuple(dict.fromkeys(checked)))


def _ranged(common: dict[str, Any], entry: Mapping[str, Any], knob: Knob | None) -> Parameter:
    name, low, high = common["name"], entry.get("min"), entry.get("max")
    numbers = [value for value in (low, high) if _is_number(value)]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)):
        raise UsageError(f"expected numbers as min and max of '{name}', got '{low}' and '{high}'")
    if numbers[0] >= numbers[1]:
        raise UsageError(
            f"min < max must hold for '{name}', but got min={low}, max={high}: the range is empty"
        )
    is_log = bool(entry.get("log", False))
    if is_log and numbers[0] <= 0:
        raise UsageError(f"a logarithmic range must begin above zero, got min={low} for '{name}'")
    if knob is not None:
        for value in numbers:
            check_value(knob, value)
    is_whole = all(isinstance(value, int) for value in (low, high))
    step = entry.get("step")
    if step is not None:
        if not isinstance(step, int) or step < 1 or not is_whole:
            raise UsageError(f"expected a whole step of one or more for '{name}', got '{step}'")
        return Parameter(**common, values=tuple(range(int(numbers[0]), int(numbers[1]) + 1, step)))
    if is_whole and is_log and name == "batch_size":
        # Kernels run best at powers of two, and people can compare them.
        powers = tuple(1 << k for k in range(31) if numbers[0] <= 1 << k <= numbers[1])
        if powers:
            return Parameter(**common, values=powers)
    return Parameter(**common, low=numbers[0], high=numbers[1], is_log=is_log, is_whole=is_whole)


def _metric(found: Any) -> Metric | None:
    if found is None:
        return None
    if isinstance(found, str):
        return Metric.named(found)
    if not isinstance(found, dict) or "name" not in found:
        raise UsageError(f"expected a metric such as {{name: val_acc, goal: maximize}}, got '{found}'")
    usual = Metric.named(str(found["name"]))
    goal = found.get("goal", "maximize" if usual.is_rising else "minimize")
    if goal not in ("maximize", "minimize"):
        raise UsageError(f"expected the goal of the metric to be maximize or minimize, got '{goal}'")
    target = found.get("at_least", found.get("at_most"))
    return replace(usual, is_rising=goal == "maximize", target=None if target is None else float(target))


def default_space(num_cores: float, *, is_gpu: bool) -> Space:
    """Space of the settings that can be changed in any script, without those that change its result."""
    workers = sorted({0, *(w for w in (1, 2, 4, 8, 16) if w <= max(1, num_cores))})
    parameters = [
        Parameter(name="num_workers", values=tuple(workers)),
        Parameter(name="persistent_workers", values=(False, True)),
        Parameter(name="channels_last", values=(False, True)),
        Parameter(name="optimizer_implementation", values=("foreach", "fused")),
    ]
    if is_gpu:
        parameters += [
            Parameter(name="pin_memory", values=(False, True)),
            Parameter(name="cudnn_benchmark", values=(False, True)),
        ]
    else:
        threads = sorted({1, max(1, int(num_cores))})
        parameters.append(Parameter(name="num_threads", values=tuple(threads)))
    return Space(parameters=tuple(parameters))


_MOST_CONFIGURATIONS = 100_000


def configuration_key(values: Mapping[str, Any]) -> str:
    """Text that identifies values, whatever their order."""
    return json.dumps(dict(values), sort_keys=True, default=str)


def num_configurations(space: Space) -> int | None:
    """Number of configurations in a space; None if a range has infinitely many values."""
    counts = [len(_choices(parameter)) for parameter in space.drawn]
    return prod(counts) if all(counts) else None


def untried_neighbour(
    space: Space, values: Mapping[str, Any], tried: Collection[str], seed: int
) -> dict[str, Any] | None:
    """An untried configuration, one parameter away if such a one is left.

    Args:
        space: All parameters; a range of fractions has no neighbours.
        values: Configuration whose neighbours are searched.
        tried: ``configuration_key`` of each tried configuration.
        seed: Seed of the order among neighbours at one distance.

    Returns:
        Values of the configuration; None if all have been tried, or there are too many to search.
    """
    parameters = {parameter.name: _choices(parameter) for parameter in space.drawn}
    order = random.Random(seed)
    near = list(_one_away(parameters, values))
    order.shuffle(near)
    found = next((other for other in near if configuration_key(other) not in tried), None)
    count = num_configurations(space)
    if found is not None or count is None or count > _MOST_CONFIGURATIONS:
        return found
    names, every = list(parameters), list(itertools.product(*parameters.values()))
    order.shuffle(every)
    rows = (dict(zip(names, row, strict=True)) for row in every)
    return next((row for row in rows if configuration_key(row) not in tried), None)


def _choices(parameter: Parameter) -> list[Any]:
    if parameter.values:
        return list(parameter.values)
    if parameter.is_whole and parameter.high - parameter.low < _MOST_CONFIGURATIONS:
        return list(range(int(parameter.low), int(parameter.high) + 1))
    return []


def _one_away(parameters: Mapping[str, list[Any]], values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, choices in parameters.items():
        for choice in choices:
            if choice != values[name]:
                yield {**values, name: choice}
