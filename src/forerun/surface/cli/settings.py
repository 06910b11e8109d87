"""Options of commands: those that several share, and declared settings; and help that groups them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperCommand, TyperGroup

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.base.extras import loaded, plugin
from forerun.question.options import DEVICE_HELP, MODEL_HELP, RunOptions
from forerun.question.settings import Declared, check_number, declared

_HEADINGS = {
    "axes": "What to compare",
    "model": "Model",
    "run": "Run",
    "post-training": "Post-training and generation",
    "saving": "Ways to save memory",
    "device": "Devices and links",
    "sharing": "Sharing among devices",
    "servers": "Parameter servers",
    "points": "Measured points",
    "job": "Job",
    "input": "Input pipeline",
    "price": "Price",
    "limits": "Limits and goal",
    "live": "A cluster that is running",
    "target": "Target",
    "timing": "Timing",
    "software": "Software",
    "output": "Output",
}
"""Headings of the help by group, in their order."""

_OUTPUT = {
    "--json", "--plot", "--debug", "--help", "--no-cache", "--format", "--out", "--timeout", "--in-process",
    "--unsafe-files",
}  # fmt: skip

_SHAPE = re.compile(r"\d+(?:\s*[,x]\s*\d+)*,?", re.IGNORECASE)
_MOST_NUMBER = 100_000


Reader = str | Callable[[str], Any]
"""Function that reads the text of a setting, or its place as ``module:name``, which is loaded when it is needed."""


def parse_input_shape(text: str) -> tuple[int, ...]:
    """Shape of one sample, without the batch.

    >>> parse_input_shape("3,224,224")
    (3, 224, 224)

    Raises:
        InvalidSetupError: The text is not a list of whole numbers.
    """
    if _SHAPE.fullmatch(text.strip()) is None:
        raise InvalidSetupError(
            f"an input shape must be whole numbers without the batch, such as 3,224,224, got '{text}'"
        )
    return tuple(int(size) for size in re.findall(r"\d+", text))


def parse_numbers(name: str, text: str) -> list[int]:
    """Whole numbers from a list of numbers and ranges.

    >>> parse_numbers("workers", "1:4,8")
    [1, 2, 3, 4, 8]

    Raises:
        InvalidSetupError: A part is neither a whole number of at least 1 nor a range of such numbers.
    """
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(-?\d+)\s*(?::\s*(-?\d+)\s*)?", part)
        first = int(ends[1]) if ends else 0
        last = int(ends[2] or ends[1]) if ends else 0
        if first < 1 or last < first or last > _MOST_NUMBER:
            raise InvalidSetupError(
                f"{name} must be whole numbers from 1 to {_MOST_NUMBER:,}, or ranges such as 1:32, got '{part.strip()}'"
            )
        found += range(first, last + 1)
    return found


def parse_time_s(flag: str, text: str) -> float:
    """A duration such as 10min [s]; a refusal names the option.

    >>> parse_time_s("--round", "10min")
    600.0

    Raises:
        InvalidSetupError: The text is not a duration.
    """
    from forerun.base.units import parse_duration_s

    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise InvalidSetupError(f"{flag}: {error}") from error


def _count(text: str) -> float:
    from forerun.question.job import parse_count

    number = parse_count(text)
    return int(number) if number.is_integer() else number


_READERS: Mapping[str, Reader] = {
    "dataset_size": _count,
    "input_shape": parse_input_shape,
    "price_usd_per_hour": "forerun.question.devices.prices:parse_price_usd_per_hour",
}
"""Settings that are parsed from text on every command line."""


def read_settings(
    known: Mapping[str, Declared], readers: Mapping[str, Reader], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Takes the settings that were used out of the arguments of a command, read and checked."""
    read = {**_READERS, **readers}
    # Taken out, so that what is left are the arguments of the verb alone.
    given = {name: arguments.pop(name) for name in known}
    settings = {
        name: loaded(read[name])(value)
        if name in read
        else ",".join(value)
        if known[name].setting.is_repeated
        else value
        for name, value in given.items()
        if value is not None and value != []
    }
    for name, value in settings.items():
        check_number(known[name], value)
    return settings


def setting_parameters(
    known: Mapping[str, Declared], aliases: Mapping[str, str], readers: Mapping[str, Reader]
) -> list[inspect.Parameter]:
    """The options of settings, as parameters of a command."""
    texts, found = {**_READERS, **readers}, []
    for name, item in known.items():
        setting = item.setting
        words = setting.help + (f" [default: {setting.default}]" if setting.default else "")
        names = [item.flag, *([f"--{aliases[name]}"] if name in aliases else [])]
        # What is on by default needs a word that turns it off.
        if item.kind is bool and setting.default == "yes":
            names = [f"{item.flag}/--no-{item.flag.removeprefix('--')}"]
        kind: Any = item.kind if item.kind in (int, float, bool, Path) and name not in texts else str
        kind = list[str] if setting.is_repeated else kind
        option = typer.Option(
            *names,
            help=words,
            metavar=setting.metavar or None,
            autocompletion=_completed(setting.choices) if setting.choices else None,
            rich_help_panel=setting.group,
            show_default=False,
        )
        hint: Any = Annotated[Optional[kind], option]  # noqa: UP045 - made at run time
        found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
    return found


_ALL = "--help-all"

_COMMON = {
    "--on", "--batch-size", "--precision", "--dataset", "--epochs", "--tokens", "--sequence-length", "--lora",
    "--recompute", "--compile", "--price", "--within", "--minimize", "--search", "--devices", "--global-batch",
    "--target", "--json", "--plot", "--help",
}  # fmt: skip
"""Options that the short help shows."""


def _is_common(words: str) -> bool:
    """True for a record of an argument or of a common option."""
    return not words.startswith("-") or bool(_COMMON & set(words.replace(",", " ").replace("/", " ").split()))


class PlainValues:
    """A command whose plain options are read without a schema."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options, each with its own reading of plain texts."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command that this is mixed into
        for parameter in found:
            # Once: the parser asks for the parameters of a command several times.
            vars(parameter).setdefault(
                "process_value", partial(_plain_value, parameter, parameter.process_value)
            )
        return found


def _plain_value(parameter: Any, convert: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    """The value of an option; plain texts and numbers are read here.

    The parser makes a schema for each option, given or not, with a library that takes longer to import than a cached
    prediction to make. It still reads whatever is not plain, and words the refusals.
    """
    described = getattr(parameter, "type_descriptor", None)
    kind = getattr(described, "annotation", None)
    # Bounds and several values are the parser's matter.
    is_plain = described is not None and not (described.is_ranged or parameter.multiple or parameter.callback)
    if is_plain and parameter.nargs == 1 and isinstance(value, str):
        for words, convert_text in _PLAIN.get(kind, {}).items():
            if words.fullmatch(value):
                return convert_text(value)
    if (
        kind == list[str]
        and (value is None or isinstance(value, tuple))
        and (value or not parameter.required)
    ):
        return list(value or ())
    if value is None and not parameter.required and not parameter.multiple:
        return parameter.callback(context, parameter, None) if parameter.callback else None
    try:
        return convert(context, value)
    except typer.BadParameter as error:
        if found := _REFUSAL.match(error.message):
            error.message = f"it must be {found[1]}, got {value!r}"
            if value.startswith("--"):
                error.message += (
                    f"; a value stands before the next option, as {parameter.opts[0]} {parameter.metavar}"
                )
        raise


_REFUSAL = re.compile(r"Input should be (.*?)(?:, unable to parse .*)?$")
"""Words in which the parser's library refuses a value."""


_PLAIN: Mapping[Any, Mapping[re.Pattern[str], Callable[[str], Any]]] = {
    str: {re.compile(".*", re.DOTALL): str},
    int: {re.compile("-?[0-9]{1,18}"): int},
    float: {re.compile(r"-?[0-9]+(\.[0-9]+)?"): float},
}
"""Texts of options that need no schema, by the type of the option."""


class GroupedHelp(PlainValues, TyperCommand):
    """A command whose help lists its options under headings, then the other questions of its verb."""

    questions: TyperGroup | None = None
    examples: Sequence[str] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the words; ``--help-all`` before a script's own prints the whole help."""
        own = args[: args.index("--")] if "--" in args else args
        if _ALL in own:
            ctx.meta[_ALL] = True
            typer.echo(ctx.get_help())
            ctx.exit()
        pairs = [(*word.split("=", 1), after)[:2] for word, after in pairwise([*own, ""])]
        for option in self.get_params(ctx):
            said = {value: name for name, value in pairs if name in option.opts and name.startswith("--")}
            if len(said) > 1 and not (option.multiple or option.is_flag):
                compared = (
                    f", or ask forerun plan with --on {','.join(said)}" if "--on" in said.values() else ""
                )
                raise UsageError(
                    f"{', '.join(set(said.values()))} takes one value, got {' and '.join(said)}; give one{compared}"
                )
        found: list[str] = super().parse_args(ctx, args)
        return found

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the options, group by group; of many, those that most questions need."""
        groups = grouped_options(self, ctx)
        number = sum(len(records) for _, records in groups)
        is_short = bool(self.examples) and not ctx.meta.get(_ALL)
        for heading, records in groups:
            shown = [record for record in records if not is_short or _is_common(record[0])]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")
        if is_short:
            formatter.write(f"\n{_ALL} shows all {number} options by group.\n")
        if self.questions is not None:
            self.questions.format_commands(ctx, formatter)


def grouped_options(command: Any, context: Any = None) -> list[tuple[str, list[tuple[str, str]]]]:
    """The parameters of a command with their help, by heading, in the order of the headings."""
    own = context or typer.Context(command)
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(own):
        record = parameter.get_help_record(own)
        if record is not None:
            group = getattr(parameter, "rich_help_panel", None) or _own_group(parameter)
            groups.setdefault(group, []).append(record)
    order = ["arguments", "main", *_HEADINGS]
    return [
        (_HEADINGS.get(group, "Arguments" if group == "arguments" else "Question"), groups[group])
        for group in sorted(groups, key=lambda name: order.index(name) if name in order else len(order))
    ]


def _own_group(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "arguments"
    return "output" if _OUTPUT & set(parameter.opts) else "main"


SETTING_HELP = {name: item.setting.help for name, item in declared(RunOptions).items()}
"""Help of the settings of a run, for commands that declare such an option themselves."""

COMMAND_HELP = " Or, after --, the command of a training script, such as: -- python train.py --epochs 3."
"""End of the help of a model that may also be a command."""

RUN_TIME_HELP = "Longest time of one run of the script, such as 10min."

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

FORMATS = ("table", "json", "csv", "markdown")
"""Formats of every answer: a page, one JSON object, or its rows."""


def _completed(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """The completion of a shell for a setting of several words."""

    def completed(incomplete: str) -> list[str]:
        return [str(word) for word in choices if word.startswith(incomplete)]

    return completed


def format_option(help_text: str) -> Any:
    """The option ``--format`` of a command."""
    option = typer.Option("--format", metavar="NAME", help=help_text, autocompletion=_completed(FORMATS))
    return Annotated[str, option]


FormatOption = format_option("Format: table, json, or the rows of the answer as csv or markdown.")

CurrencyOption = Annotated[
    str | None,
    typer.Option(
        metavar="eur",
        help="Currency of the page: a code such as eur, at the dated rate of the catalogue, or eur=1.08 for a rate of "
        "your own in dollars. JSON stays in US dollars.",
        rich_help_panel="price",
    ),
]

PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Write a plot as well (.png, .svg or .pdf).")
]

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Trace the model anew instead of reading the cached trace.")
]


def known_models(incomplete: str) -> list[str]:
    """Names of models for the completion of a shell."""
    from forerun.prediction.models import kept_model_names
    from forerun.question.model import architectures, flat_names
    from forerun.tracing.trace import shipped_models

    names = [*architectures(), *shipped_models(), *flat_names(kept_model_names() or {})]
    bare = [name.rpartition(":")[2] for name in shipped_models() if "=" not in name]
    return [name for name in dict.fromkeys([*bare, *names]) if name.startswith(incomplete)]


def known_devices(incomplete: str) -> list[str]:
    """Names of devices for the completion of a shell, after numbers such as 4x8x and commas."""
    from forerun.question.devices import load_catalog

    before, number, name = _NUMBERED.fullmatch(incomplete).groups()  # type: ignore[union-attr]  # matches all
    return [f"{before}{number}{device}" for device in [*load_catalog(), "here"] if device.startswith(name)]


_NUMBERED = re.compile(r"((?:.*,)?)((?:\d+x)*)(.*)", re.DOTALL)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=known_models)]
ModelOrCommand = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", help=MODEL_HELP + COMMAND_HELP, autocompletion=known_models),
]
OnDevice = Annotated[str, typer.Option(metavar="DEVICE", help=DEVICE_HELP, autocompletion=known_devices)]

RecordsOption = Annotated[
    str | None,
    typer.Option(
        "--records",
        metavar="STORE",
        help="Store of the records: a file or a database URL; if not given, the variable FORERUN_RECORDS or a "
        "file in your data folder.",
    ),
]

MetricOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Metric that the script prints, such as val_acc.")
]

ShowOutputOption = Annotated[
    bool, typer.Option("--show-output", help="Show the output of the script on stderr.")
]

UnsafeFilesOption = Annotated[
    bool,
    typer.Option(
        "--unsafe-files",
        help="Let a captured script change your files; without it, it sees a copy of what it changes.",
    ),
]

TimeoutOption = Annotated[
    str,
    typer.Option(
        "--timeout", metavar="120s", help="Longest processor time for building and tracing one model."
    ),
]
InProcessOption = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Build the model in this process, not in one of its own; without limits on time and memory.",
    ),
]


def model_of(words: Sequence[str], *, unsafe_files: bool = False) -> str:
    """The model of a question: its name, or the capture of the command that stands in its place.

    Raises:
        UsageError, FailureError: The command cannot be captured.
    """
    # A script without arguments is one word as well.
    if len(words) == 1 and not words[0].endswith(".py"):
        return words[0]
    captured = plugin("forerun.models", "command")
    if captured is None:
        raise UsageError(
            f"expected the name of one MODEL, got '{' '.join(words)}'; no installed part captures the command of a "
            "script"
        )
    model: str = captured(list(words), unsafe_files=unsafe_files)
    typer.echo(f"captured {' '.join(words)}; without the script ask again with {model}", err=True)
    return model
