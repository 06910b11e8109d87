"""Verbs of the command line: each is declared once beside its question, and loaded only when it is asked for.

A verb is a function that asks and returns an answer. ``verb`` gives it the options that are the same everywhere
(``--json``, ``--plot``, ``--debug``, those of tracing) and prints the answer; ``Verbs`` gathers several questions
under one name. Verbs of other parts, and of other packages, are entry points of the group ``forerun.verbs``; a name
with a dot, such as ``schedule.live``, is a further question of a verb.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from forerun.base.errors import UsageError
from forerun.base.extras import loaded, plugin, plugin_names
from forerun.question.settings import declared
from forerun.surface.cli.output import (
    TABLE_WIDTH_IN_A_PIPE,
    json_text,
    page_width,
    print_page,
    quiet_libraries,
)
from forerun.surface.cli.settings import (
    FORMATS,
    CurrencyOption,
    DebugOption,
    FormatOption,
    GroupedHelp,
    InProcessOption,
    JsonOption,
    ModelArgument,
    NoCacheOption,
    PlainValues,
    PlotOption,
    Reader,
    TimeoutOption,
    format_option,
    parse_time_s,
    read_settings,
    setting_parameters,
)

if TYPE_CHECKING:
    from forerun.question.devices.prices import Currency

_CORE = {
    "predict": "forerun.surface.cli.predict:predict",
    "plan": "forerun.surface.cli.search:plan",
    "scale": "forerun.surface.cli.search:scale",
    "layouts": "forerun.surface.cli.search:layouts",
    "advise": "forerun.surface.cli.search:advise",
    "compare": "forerun.surface.cli.review:compare",
    "review": "forerun.surface.cli.review:review",
    "hardware": "forerun.surface.cli.doctor:hardware",
    "sbatch": "forerun.surface.cli.submit:sbatch",
    "sky": "forerun.surface.cli.submit:sky",
    "torchrun": "forerun.surface.cli.submit:torchrun",
    "models": "forerun.surface.cli.doctor:models",
    "prices": "forerun.surface.cli.doctor:prices",
    "report": "forerun.surface.cli.report:report",
    "doctor": "forerun.surface.cli.doctor:doctor",
    "serve": "forerun.surface.cli.serve:serve",
    "mcp": "forerun.surface.cli.serve:mcp",
}
"""Verbs of the core, which are there without an installation too."""

_GROUP = "forerun.verbs"


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """Ways to show an answer, and the options that go with them.

    Attributes:
        page: Function from the answer to what is printed (a page, a text, or several in turn), as ``module:name`` or
            itself.
        as_dict: Function from the answer to its JSON; without it the answer's own method of this name.
        plot: Function that draws the answer to a file, for ``--plot``.
        width: Largest width of the page [columns].
        after: Called with the answer once it is printed, to fail.
        money: Whether the page has amounts of money, which ``--currency`` shows in another one.
        job_formats: Help of ``--format`` where the answer is also written as a job, see ``forerun.formats``.
    """

    page: str | Callable[[Any], Any]
    as_dict: str | Callable[[Any], Mapping[str, Any]] | None = None
    plot: str | Callable[[Path, Any], None] | None = None
    width: int = TABLE_WIDTH_IN_A_PIPE
    after: Callable[[Any], None] | None = None
    money: bool = False
    job_formats: str = ""


def verb(
    short_help: str = "",
    *,
    options: type | None = None,
    without: Iterable[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
    readers: Mapping[str, Reader] = MappingProxyType({}),
    traces: bool = False,
    examples: Sequence[str] = (),
    **ways: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a command of a function that asks.

    Args:
        short_help: Line of the verb in the list of all.
        options: Declaration of its settings; the function receives those that were used as ``settings``.
        without: Settings of ``options`` that this command does not have.
        aliases: Further names of options on this command line, by setting.
        readers: Functions that read the text of a setting, where this command differs from the others.
        traces: Whether models are traced: the function receives ``use_cache``.
        examples: Commands for the help, which is short with them: ``--help-all`` has every option.
        ways: Ways to show its answer, see ``_Shown``; without a ``page`` the function prints for itself and has no
            ``--json`` of its own.
    """
    shown = _Shown(**ways) if ways else None
    known = {} if options is None else dict(declared(options))
    for name in without:
        known.pop(name, None)

    def declare(ask: Callable[..., Any]) -> Callable[..., None]:
        # The type of the answer may be known to type checkers only; the parser has no use for it.
        ask.__annotations__.pop("return", None)
        own = dict(inspect.signature(ask, eval_str=True).parameters)
        # A configuration file may name the model, which may then stay unsaid.
        names_a_model = "config" in known and "model" in own
        if names_a_model:
            own["model"] = own["model"].replace(default=None)

        def command(**given: Any) -> None:
            debug = given["debug"] if "debug" in own else given.pop("debug")
            if known:
                given["settings"] = read_settings(known, readers, given)
            # A file of another tool may name the model, so that the argument may be left out.
            if names_a_model and not given["model"]:
                from forerun.question.recipes import config_model

                found = config_model(given["settings"].get("config"))
                given["model"] = found if own["model"].annotation is ModelArgument else [found]
            if traces:
                from forerun.tracing.source import trace_limits

                given["use_cache"] = not given.pop("no_cache")
                timeout_s = parse_time_s("--timeout", given.pop("timeout"))
                with trace_limits(timeout_s=timeout_s, in_process=given.pop("in_process")):
                    _run(ask, given, shown, debug=debug)
            else:
                _run(ask, given, shown, debug=debug)

        parameters = [p for name, p in own.items() if name not in ("settings", "use_cache", "debug")]
        parameters += _common(shown, own, traces=traces) + setting_parameters(known, aliases, readers)
        command.__name__, command.__doc__ = ask.__name__, ask.__doc__
        # The parser calls a command by keywords; positions are its own matter.
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        # What the parser reads to know the options; a type checker knows no such attributes of functions.
        vars(command).update(__signature__=inspect.Signature(kept), short_help=short_help, examples=examples)
        vars(command)["options"] = options  # of the same question over HTTP
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in kept}
        return command

    return declare


def _common(
    shown: _Shown | None, own: Mapping[str, inspect.Parameter], *, traces: bool
) -> list[inspect.Parameter]:
    """The options that every verb of a kind has."""
    kinds: dict[str, tuple[Any, Any]] = {}
    if shown is not None:
        kinds["as_json"] = (JsonOption, False)
        # In an annotation, the first name of an option stands where its default does elsewhere.
        hints = [hint for part in own.values() for hint in getattr(part.annotation, "__metadata__", ())]
        if all(getattr(hint, "default", None) != "--format" for hint in hints):  # none of its own
            kinds["form"] = (format_option(shown.job_formats) if shown.job_formats else FormatOption, "table")
    if shown is not None and shown.money:
        kinds["currency"] = (CurrencyOption, None)
    if shown is not None and shown.plot is not None:
        kinds["plot"] = (PlotOption, None)
    if traces:
        kinds["no_cache"] = (NoCacheOption, False)
        kinds["timeout"] = (TimeoutOption, "120s")
        kinds["in_process"] = (InProcessOption, False)
    kinds["debug"] = (DebugOption, False)
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for name, (kind, default) in kinds.items()
    ]


def _run(ask: Callable[..., Any], given: dict[str, Any], shown: _Shown | None, *, debug: bool) -> None:
    """Asks and prints: only the answer goes to stdout."""
    if shown is None:
        ask(**given)
        return
    form, path, currency = (
        _form(given, jobs=bool(shown.job_formats)),
        given.pop("plot", None),
        given.pop("currency", None),
    )
    if currency is not None:
        from forerun.question.devices.prices import find_currency

        currency = find_currency(currency)
    with quiet_libraries(debug=debug):
        if path is not None:
            from forerun.surface.report.figure import check_plot_path

            check_plot_path(path)  # before minutes of work
        answer = ask(**given)
        if path is not None and shown.plot is not None:
            loaded(shown.plot)(path, answer)
    if form not in FORMATS:
        typer.echo(format_of_job(form, answer))
    elif form == "table":
        with nullcontext() if currency is None else _in_currency(currency):
            for part in _parts(loaded(shown.page), answer, debug=debug):
                if isinstance(part, str):
                    typer.echo(part)
                else:
                    print_page(part, page_width(shown.width))
    else:
        as_dict = answer.as_dict if shown.as_dict is None else partial(loaded(shown.as_dict), answer)
        with quiet_libraries(debug=debug):
            if form == "json":
                text = json_text(as_dict()) + "\n"
            else:
                from forerun.surface.report.objects import rows_of, rows_text

                text = rows_text(rows_of(answer, as_dict), form)
        sys.stdout.write(text)
    if path is not None:
        typer.echo(f"plot written to {path}", err=True)
    if shown.after is not None:
        shown.after(answer)


def format_of_job(name: str, answer: Any) -> str:
    """The job of an answer in the format of a scheduler, see ``forerun.formats``."""
    found = plugin("forerun.formats", name)(answer)
    return found if isinstance(found, str) else json_text(found)


def _form(given: dict[str, Any], *, jobs: bool) -> str:
    """The format that was asked for.

    Raises:
        UsageError: There is no such format, or two were asked for.
    """
    as_json, form = given.pop("as_json"), given.pop("form", "table")
    known = (*FORMATS, *(plugin_names("forerun.formats") if jobs else ()))
    if form not in known:
        raise UsageError(f"the format must be one of {', '.join(known)}, got '{form}'")
    if as_json and form not in ("table", "json"):
        raise UsageError(f"--json and --format {form} contradict each other; give one of them")
    return "json" if as_json else form


@contextmanager
def _in_currency(currency: Currency) -> Iterator[None]:
    """Amounts of a page in a currency, with its rate below them."""
    from forerun.surface.report.wording import amounts_in

    with amounts_in(currency):
        yield
    typer.echo(currency.words)


def _parts(page: Callable[[Any], Any], answer: Any, *, debug: bool) -> Iterator[Any]:
    """The parts of a page one by one: the first is read while the next is still being computed."""
    with quiet_libraries(debug=debug):
        made = page(answer)
    if not isinstance(made, Iterator):
        yield made
        return
    while True:
        with quiet_libraries(debug=debug):
            part = next(made, None)
        if part is None:
            return
        yield part


@dataclass(frozen=True)
class Verbs:
    """Several questions under one name.

    Attributes:
        help: What they have in common.
        short_help: Line of the verb in the list of all.
        questions: Their functions by name, or the places of these.
        chosen: The question that a command line without a name asks, from its words; None prints the help.
    """

    help: str
    questions: Mapping[str, Callable[..., None] | str]
    short_help: str = ""
    chosen: Callable[[Sequence[str]], str] | None = None


class _Commands(Mapping[str, Any]):
    """Commands by name, each built when it is asked for.

    Args:
        declared: The verbs, or their places.
        prefix: What the names of further entry points begin with.
    """

    def __init__(self, declared: Mapping[str, Any], prefix: str = "") -> None:
        self._declared, self._prefix = declared, prefix
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        # Every verb brings imports of its own, which the others need not wait for.
        if name not in self._built:
            found = loaded(self._declared.get(name))
            if found is None and "." not in name:
                found = plugin(_GROUP, self._prefix + name)
            if found is None:
                raise KeyError(name)
            self._built[name] = _command_of(name, found, self._prefix)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        further = (name.removeprefix(self._prefix) for name in plugin_names(_GROUP) if self._of(name))
        yield from dict.fromkeys([*self._declared, *further])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _of(self, name: str) -> bool:
        return name.startswith(self._prefix) and "." not in name.removeprefix(self._prefix)


def _command_of(name: str, found: Any, prefix: str) -> Any:
    """The command of a verb, of several questions, or of a function that another package declares."""
    if isinstance(found, Verbs):
        commands = _Commands(found.questions, f"{prefix}{name}.")
        return _Questions(found, name=name, commands=commands, help=found.help, short_help=found.short_help)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    short_help, context_settings = getattr(found, "short_help", ""), getattr(found, "context_settings", {})
    app.command(name, cls=GroupedHelp, short_help=short_help or None, context_settings=context_settings)(
        found
    )
    command: Any = typer.main.get_command(app)
    command.examples = getattr(found, "examples", ())
    return command


class _Group(PlainValues, TyperGroup):
    """A command of commands that are loaded one by one."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names for the help; a verb whose part is not there is left out."""
        return [name for name in self.commands if self._is_there(name)]

    def _is_there(self, name: str) -> bool:
        try:
            return self.commands[name] is not None
        except (ImportError, UsageError):
            return False


class _Questions(_Group):
    """The command of several questions; without the name of one, the chosen one is asked."""

    def __init__(self, declared: Verbs, **more: Any) -> None:
        super().__init__(rich_markup_mode=None, invoke_without_command=True, **more)
        self._declared = declared

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the chosen question where no question is named."""
        choose = self._declared.chosen
        if choose is None or (args and args[0] in self.commands):
            return super().make_context(info_name, args, parent, **extra)
        chosen: Any = self.commands[choose(args)]
        chosen.questions = self
        return chosen.make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Runs the question that is named, or prints the help."""
        if not (getattr(ctx, "_protected_args", ()) or ctx.args):
            typer.echo(ctx.get_help())
            return None
        return super().invoke(ctx)


class Root(_Group):
    """The root command: verbs of the core, then those of entry points."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.commands = _Commands(_CORE)  # type: ignore[assignment]  # nothing is added to it
