"""A setting is one field: its help, unit, bounds and choices stand on the field of the dataclass that holds it.

``setting`` makes such a field. Everything else follows from ``declared``: options of the command line, HTTP bodies,
jobs files, the page and that of commands; ``from_settings`` reads the fields of a part from a user's words and ``told``
says them again. A word that no field holds, such as the name of a dataset, is declared by the annotation of its key in
a typed dictionary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from forerun.base.errors import InvalidSetupError, near_matches

_KEY = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Declaration of one setting.

    Attributes:
        help: One sentence, the same on the command line, over HTTP and in the documentation.
        group: Heading of the setting in the help: model, device, run, saving, sharing, job, input, price, software or
            output.
        default: Default value in words, where the field's own does not say it.
        metavar: Example or name of the value on the command line.
        low, high: Least and largest value; None for no bound.
        above: Value that must be exceeded.
        choices: The possible words; those of its enumeration, for a field that holds one.
        flag: Name on the command line without dashes, if it differs from the name in Python.
        words: Its name in messages, where that is another one.
        http_high: Largest value over HTTP, where that is less than ``high``.
        is_local: Whether the value names a file of this machine, which is refused over HTTP.
        is_repeated: Whether it may be given several times on the command line, joined by commas.
        name: Name of the setting, where its field is called otherwise.
        unit: Value of the field that the number 1 stands for, such as 1e-3 for milliseconds in a field of seconds.
        needs: Without which it has no meaning: training, several (devices), fsdp, tp, cp, pp or loader.
        only_changed: Whether a run tells it only where it differs from the default.
        read: Value of the field from the user's.
        tell: The user's value from that of the field.
    """

    help: str = dataclasses.field(kw_only=False)
    group: str
    default: str = ""
    metavar: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    flag: str = ""
    words: str = ""
    http_high: float | None = None
    is_local: bool = False
    is_repeated: bool = False
    name: str = ""
    unit: float | None = None
    needs: str = ""
    only_changed: bool = False
    read: Callable[[Any], Any] | None = None
    tell: Callable[[Any], Any] | None = None


def setting(value: Any = dataclasses.MISSING, /, **declaration: Any) -> Any:
    """A field of a dataclass that holds a setting.

    >>> @dataclass(frozen=True)
    ... class Step:
    ...     warmup_s: float = setting(0.0, help="Time before the first step [ms].", group="run", unit=1e-3)
    >>> told(Step(**from_settings(Step, {"warmup_s": 250})))
    {'warmup_s': 250.0}

    Args:
        value: Default value of the field; without one the field must be given.
        declaration: See ``Setting``.
    """
    return dataclasses.field(default=value, metadata={_KEY: Setting(**declaration)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A setting with its name and the type of its values.

    Attributes:
        name: Its name in Python, over HTTP and in files.
        kind: int, float, bool, str, Path or tuple.
        element: Type of the values of a tuple.
        setting: The declaration.
        path: Names of the fields that lead to the one that holds it; empty for a word that no field holds.
        default: Default value of that field.
        holds: Enumeration that the field holds, None for other values.
    """

    name: str
    kind: type
    setting: Setting
    element: type = int
    path: tuple[str, ...] = ()
    default: Any = None
    holds: type[StrEnum] | None = None

    @property
    def flag(self) -> str:
        """Name of the setting on the command line, with dashes."""
        return "--" + (self.setting.flag or self.name.replace("_", "-"))

    def read(self, value: Any) -> Any:
        """Value of the field from the user's."""
        if self.setting.read is not None:
            return self.setting.read(value)
        if self.holds is not None:
            return self.holds(value)
        if self.kind is tuple:
            return tuple(value)
        return value if self.setting.unit is None else value * self.setting.unit

    def tell(self, value: Any) -> Any:
        """The user's value from that of the field; None where there is nothing to say."""
        if value is None or (self.setting.only_changed and value == self.default):
            return None
        if self.setting.tell is not None:
            return self.setting.tell(value)
        if isinstance(value, tuple):
            return list(value) if self.element is int else ",".join(map(str, value)) or None
        if isinstance(value, StrEnum):
            return str(value)
        return value if self.setting.unit is None else value / self.setting.unit


def flag_of(name: str, options: type) -> str:
    """The name of a setting on the command line."""
    return declared(options)[name].flag


_HOLDERS: list[type] = []


def held_by(*parts: type) -> None:
    """Says which dataclasses hold the keys of typed dictionaries that these do not declare themselves."""
    _HOLDERS.extend(parts)


def flags(names: Iterable[str]) -> str:
    """Settings as a user of the command line knows them, for messages."""
    return ", ".join("--" + name.replace("_", "-") for name in names)


def names_needing(part: type, *needs: str) -> list[str]:
    """Settings of a part of a run that have no meaning without something, such as several devices."""
    return [name for name, item in declared(part).items() if item.setting.needs in needs]


def refuse(given: Mapping[str, Any], names: Iterable[str], why: str, otherwise: str) -> None:
    """Refuses settings that have no meaning in the rest of the question.

    Raises:
        InvalidSetupError: One of them is given, and is not False.
    """
    useless = [name for name in names if given.get(name) not in (None, False)]
    if useless:
        raise InvalidSetupError(f"{flags(useless)} cannot be used here: {why}; leave it out, or {otherwise}")


@cache
def declared(options: type) -> Mapping[str, Declared]:
    """The settings of a dataclass or of a typed dictionary by name, in the order of their declaration."""
    if dataclasses.is_dataclass(options):
        return {item.name: item for item in _of_fields(options)}
    # A key without a declaration is a field somewhere: its help stands once, there.
    held = {name: item for part in _HOLDERS for name, item in declared(part).items()}
    found = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        own = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Setting)]
        kind = get_args(hint)[0] if own else hint
        item = Declared(name=name, kind=_plain(kind), setting=own[0]) if own else held[name]
        found[name] = replace(item, kind=_plain(kind), element=_element(kind))
    return found


def _of_fields(holder: type) -> Iterator[Declared]:
    """The settings that a dataclass holds, and those of the dataclasses in it."""
    hints = get_type_hints(holder)
    for field in dataclasses.fields(holder):
        hint, own = hints[field.name], field.metadata.get(_KEY)
        if own is not None:
            yield _held(field, hint, own)
            continue
        for part in get_args(hint) or (hint,):
            if dataclasses.is_dataclass(part):
                assert isinstance(part, type)
                for item in _of_fields(part):
                    yield replace(item, path=(field.name, *item.path))


def _held(field: dataclasses.Field[Any], hint: Any, own: Setting) -> Declared:
    kind = _plain(hint)
    holds = kind if issubclass(kind, StrEnum) else None
    elements = {inner for part in (hint, *get_args(hint)) for inner in get_args(part)}
    is_names = kind is tuple and int not in elements
    if holds is not None and not own.choices:
        own = replace(own, choices=tuple(holds), metavar=own.metavar or "NAME")
    value = field.default
    words = own.default or (str(value) if isinstance(value, str) else "yes" if value is True else "")
    if value is False and own.only_changed:
        words = words or "no"
    # Defaults that say nothing are left out: off, none and zero.
    if not words and isinstance(value, int | float) and not isinstance(value, bool) and value:
        words = f"{value / (own.unit or 1):g}"
    own = replace(own, default=words)
    if own.choices or is_names:  # names of a tuple are given as one text with commas, or as a list
        kind = str
    return Declared(
        name=own.name or field.name,
        kind=kind,
        setting=own,
        element=str if is_names else int,
        path=(field.name,),
        default=field.default,
        holds=holds,
    )


def from_settings(part: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the fields of a dataclass from settings by name; those that are not given are left out."""
    return {
        item.path[0]: item.read(given[name])
        for name, item in declared(part).items()
        if len(item.path) == 1 and name in given
    }


def told(part: Any) -> dict[str, Any]:
    """The settings that a dataclass holds, as a user gives them; those without a value left out."""
    kind: type = type(part)
    found = {}
    for name, item in declared(kind).items():
        value = part
        for step in item.path:
            value = None if value is None else getattr(value, step)
        found[name] = item.tell(value)
    return {name: value for name, value in found.items() if value is not None}


def changed_fields(part: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    """A frozen dataclass with other values of fields, by the paths that lead to them.

    All fields of one dataclass change at once, so that its own checks see them together.
    """
    own = {path[0]: value for path, value in changes.items() if len(path) == 1}
    for head in {path[0] for path in changes if len(path) > 1}:
        inner = {path[1:]: value for path, value in changes.items() if path[0] == head and len(path) > 1}
        # A call may replace a part and change a field of it: the change is to the new part.
        own[head] = changed_fields(own.get(head, getattr(part, head)), inner)
    return replace(part, **own) if own else part


def _plain(hint: Any) -> type:
    """The type of a value, without None and type arguments."""
    if get_origin(hint) in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        if any(get_origin(part) is Mapping for part in parts):
            return object  # the verb that takes a mapping checks its contents
        hint = Path if Path in parts else parts[0]
    found: type = get_origin(hint) or hint
    return tuple if found is Sequence else found


def _element(hint: Any) -> type:
    """The type of the values of a sequence; whole numbers where nothing is said."""
    for part in get_args(hint):
        if get_origin(part) is Sequence:
            (found,) = get_args(part)
            return found if isinstance(found, type) else int
    return int


def checked(given: Mapping[str, Any], options: type) -> dict[str, Any]:
    """The given settings without None, each value checked against its declaration.

    Raises:
        InvalidSetupError: A setting is not known, or has an impossible value.
    """
    known = declared(options)
    for name in given:
        if name not in known:
            raise InvalidSetupError(f"unknown setting '{name}'{near_matches(name, known)}; leave it out")
    return {name: _checked(known[name], value) for name, value in given.items() if value is not None}


def check_number(item: Declared, value: Any) -> None:
    """Checks a number against the bounds of its declaration; leaves other values alone.

    Raises:
        InvalidSetupError: The number is outside.
    """
    if item.kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        _checked(item, value)


def _checked(item: Declared, value: Any) -> Any:
    setting = item.setting
    words = setting.words or item.name.replace("_", " ")
    if setting.choices:
        # Names of choices have underscores in Python and dashes on the command line.
        word = str(value).strip().lower().replace("_", "-")
        if word not in setting.choices:
            raise InvalidSetupError(
                f"unknown {words} {str(value)!r}; expected one of {', '.join(setting.choices)}"
            )
        return word
    if item.kind is bool:
        if not isinstance(value, bool):
            raise InvalidSetupError(f"{words} is either true or false, got {value!r}")
        return value
    if item.kind in (int, float):
        return _number(words, value, item.kind, setting)
    if item.kind is tuple and item.element is not int:
        return tuple(value)
    if item.kind is tuple:
        return tuple(_number(words, part, int, setting) for part in value)
    return value


def check_numbers(part: Any) -> None:
    """Checks the numbers that a dataclass holds against the bounds of their declarations, in the user's unit.

    Raises:
        InvalidSetupError: One is outside, or not finite.
    """
    kind: type = type(part)
    for field, item in _numbers(kind):
        value = getattr(part, field)
        if value is not None:
            _checked(item, value / (item.setting.unit or 1))


@cache
def _numbers(kind: type) -> tuple[tuple[str, Declared], ...]:
    own = (item for item in declared(kind).values() if len(item.path) == 1)
    return tuple((item.path[0], item) for item in own if item.kind in (int, float))


def whole(name: str, value: Any) -> int:
    """A whole number.

    Raises:
        InvalidSetupError: The value is not a whole number.
    """
    found: int = _number(name, value, int)
    return found


def _number(name: str, value: Any, kind: type[int | float], setting: Setting | None = None) -> Any:
    """A number within the bounds of a setting."""
    try:
        # True is a number to Python, and none to a user.
        found = None if isinstance(value, (bool, str)) else kind(value)
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None or (found != value if kind is int else not isfinite(found)):
        raise InvalidSetupError(
            f"{name} must be a {'whole' if kind is int else 'finite'} number, got {value!r}"
        )
    return found if setting is None else _bounded(name, found, setting)


def _bounded(name: str, value: Any, setting: Setting) -> Any:
    low, high, above = setting.low, setting.high, setting.above
    if low is not None and value < low:
        raise InvalidSetupError(
            f"{name} must be {'zero or more' if low == 0 else f'at least {low:g}'}, got {value}"
        )
    if above is not None and value <= above:
        raise InvalidSetupError(f"{name} must be above {'zero' if above == 0 else f'{above:g}'}, got {value}")
    if high is not None and value > high:
        most = f"{high:,.0f}" if float(high).is_integer() else f"{high:g}"
        raise InvalidSetupError(f"{name} must be at most {most}, got {value}")
    return value


def setting_fields(
    options: type, *, without: Collection[str] = (), over_http: bool = False
) -> dict[str, Any]:
    """Fields of a pydantic model: the declared settings with their bounds, each None unless given.

    Args:
        options: The declaration.
        without: Settings that the model has in a form of its own, or not at all.
        over_http: Whether the bounds are those of questions over HTTP, and settings that name a file are left out.
    """
    from pydantic import BaseModel, Field  # nothing else of a run needs it

    found = {}
    for name, item in declared(options).items():
        if name in without or (over_http and item.setting.is_local):
            continue
        # A field may not be called like a method of the model.
        is_taken = hasattr(BaseModel, name)
        field = Field(default=None, description=item.setting.help, alias=name if is_taken else None)
        found[f"{name}_" if is_taken else name] = (field_type(item, over_http=over_http) | None, field)
    return found


def field_type(item: Declared, *, over_http: bool) -> Any:
    """The type of a setting with its bounds."""
    from pydantic import Field

    setting = item.setting
    if setting.choices:
        return Literal[setting.choices]
    if item.kind is bool:
        return bool
    high = setting.http_high if over_http and setting.http_high is not None else setting.high
    numbers = Field(ge=setting.low, gt=setting.above, le=high)
    if item.kind is int:
        return Annotated[int, numbers]
    if item.kind is float:
        return Annotated[float, Field(ge=setting.low, gt=setting.above, le=high, allow_inf_nan=False)]
    if item.kind is tuple:
        return Annotated[list[Annotated[int, numbers]], Field(min_length=1, max_length=64)]
    return Annotated[str, Field(max_length=200)] if over_http else str
