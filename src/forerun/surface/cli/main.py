"""The root command.

A failed command leaves one line on stderr and an exit status.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from forerun.base.errors import ForerunError, MissingExtraError, UsageError
from forerun.base.extras import extra_of
from forerun.base.kept import remove_leftovers
from forerun.surface.cli.output import show_any_sign, show_own_warnings, shown_stages, warned_once
from forerun.surface.cli.settings import DebugOption
from forerun.surface.cli.verbs import Root

INTERRUPTED_STATUS = 130
"""128 + SIGINT, what shells expect of an interrupted program."""

_received: signal.Signals | None = None
"""The signal other than Ctrl-C that ends this process."""

# The parser's errors have no public name and moved between packages; the public BadParameter is one of them.
_ParserError: type[Exception] = typer.BadParameter.__bases__[0]


class OneLineErrors(TyperGroup):
    """A root command, which turns every exception into one line on stderr and an exit status.

    The status is 2 for a question that must be changed, 1 for one that could not be answered, 130 after Ctrl-C, 143
    after SIGTERM and 129 after SIGHUP. With
    ``--debug`` the traceback is printed above the line.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: object,
    ) -> object:
        """Runs the command line and exits; raises instead where ``standalone_mode`` is off."""
        words = sys.argv[1:] if args is None else list(args)
        parse_and_run = partial(
            super().main, words, prog_name, complete_var, False, windows_expand_args, **extra
        )
        if not standalone_mode:
            return parse_and_run()
        told: BaseException | None = None
        try:
            _refuse_devices(words)
            with warned_once(), shown_stages(words):
                status = parse_and_run()
        except (Exception, KeyboardInterrupt) as error:
            status, told = exit_status(error), error
            if "--debug" in words and not isinstance(error, _ParserError):
                traceback.print_exc(file=sys.stderr)
            _tell(error_line(error))
        else:
            # Newer parsers report Ctrl-C as a status instead of raising.
            if status == INTERRUPTED_STATUS:
                status = exit_status(KeyboardInterrupt())
                _tell(error_line(KeyboardInterrupt()))
        status = _flushed(status, is_told=isinstance(told, OSError))
        sys.exit(status if isinstance(status, int) else 0)


def _refuse_devices(words: Sequence[str]) -> None:
    """Refuses device files such as /dev/zero and /dev/full, which would be read or written for ever.

    Pipes, such as those of a shell's ``<(...)``, /dev/null and a terminal are files enough.
    """
    for word in words:
        if word == "--":  # what follows is another program's
            return
        path = Path(word.partition("=")[2] if word.startswith("--") else word)
        with contextlib.suppress(OSError, ValueError):
            if (path.is_char_device() and path.name in _ENDLESS) or path.is_block_device():
                raise UsageError(f"'{path}' is a device, which never ends; name a file")


_ENDLESS = ("zero", "full", "random", "urandom")


def _tell(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever listened is gone
        typer.echo(line, err=True)


def _flushed(status: object, *, is_told: bool) -> object:
    """The exit status after the last output: a full disk or a closed pipe is told once, not by a traceback."""
    if sys.stdout is None:  # closed before the start, as by >&-
        if not status:
            _tell("error: the output is closed; name a place for it, such as > FILE")
        return status or 1
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        # What is left in the buffer cannot be written at the end either.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError) and not is_told:
            _tell(error_line(error))
        return status or 1
    return status


def end_cleanly_on_signals() -> None:
    """Makes SIGTERM and SIGHUP end the command like Ctrl-C: what is done is kept, and processes are ended.

    A signal that is ignored, as SIGHUP under nohup, stays ignored.
    """

    def end(number: int, _: object) -> None:
        global _received
        is_first, _received = _received is None, signal.Signals(number)
        if is_first:  # a second one must not interrupt the cleaning up
            raise KeyboardInterrupt(_received.name)

    for name in ("SIGTERM", "SIGHUP"):
        found = getattr(signal, name, None)
        if found is not None and signal.getsignal(found) is signal.SIG_DFL:
            signal.signal(found, end)


def exit_status(error: BaseException) -> int:
    """Exit status for an error."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return INTERRUPTED_STATUS if _received is None else 128 + _received
    if isinstance(error, ForerunError):
        return error.exit_status
    if extra_of(error):
        return MissingExtraError.exit_status
    return 2 if isinstance(error, _ParserError) else 1


def error_line(error: BaseException) -> str:
    """One line about an error: the problem, and the next step."""
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted" if _received is None else f"ended by {_received.name}"
    if isinstance(error, ForerunError):
        return _one_line(f"error: {error}")
    if isinstance(error, _ParserError):
        return _one_line(f"error: {_parser_message(error)}")
    # A library that is missing deep inside must not end as an internal error.
    if extra := extra_of(error):
        return _one_line(f"error: {MissingExtraError('this command', extra)}")
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else "output: "
        return _one_line(f"error: {place}{error.strerror}; name another place, or make room there")
    if isinstance(error, UnicodeEncodeError):
        return "error: a word of the command line is no text in UTF-8; write it in UTF-8"
    if isinstance(error, RecursionError):
        return "error: the input is nested too deeply; make it flatter"
    if isinstance(error, MemoryError):
        return "error: the question needs more memory than this process may have; ask for less"
    if isinstance(error, OverflowError):
        return _one_line(f"error: a number is too large to calculate with ({error}); give a smaller one")
    kind = type(error).__name__
    return _one_line(f"internal error: {kind}: {error}") + "; rerun with --debug for the traceback"


def _parser_message(error: Exception) -> str:
    found = cast(typer.BadParameter, error)  # has all that the other errors of the parser have
    message = found.format_message().strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    needed = getattr(getattr(found, "param", None), "help", None)
    if needed and message.startswith("missing "):  # explained by its own help
        message += f": {needed[:1].lower()}{needed[1:].rstrip('.')}"
    command = found.ctx.command_path if found.ctx is not None else "forerun"
    return f"{message}; {_verbs_with(found)}see '{command} --help'"


def _verbs_with(error: Any) -> str:
    """The verbs that have an option which this one lacks, such as --co2 of plan, or the option that is meant."""
    option, context = getattr(error, "option_name", None), error.ctx
    if option is None or context is None:
        return _place_of_word(error)
    group = context.find_root()
    plain = option.replace("_", "-")
    meant = _OTHER_NAMES.get(f"{context.info_name}{plain}") or _OTHER_NAMES.get(plain)
    if meant is not None:
        return f"for {option} write {meant}; "
    verbs = {name: group.command.get_command(group, name) for name in ("predict", "plan", "scale", "layouts")}
    having = [name for name, verb in verbs.items() if verb and any(option in p.opts for p in verb.params)]
    return f"{option} is an option of forerun {' and forerun '.join(having)}; " if having else ""


def _place_of_word(error: Any) -> str:
    """Where a word belongs that has no place: after one of the questions of a verb, or after --on."""
    if error.ctx is None or error.ctx.parent is None:
        return ""
    if questions := getattr(error.ctx.command, "commands", None):
        return f"its questions: {', '.join(questions)}; "
    if "extra argument" not in error.format_message():
        return ""
    if any("--on" in part.opts for part in error.ctx.command.params):
        return "a device is named as --on NAME; "
    beside = getattr(error.ctx.parent.command, "commands", None) if error.ctx.parent.parent else None
    return f"questions beside it: {', '.join(beside)}; " if beside else ""


# Words of other tools, and of people, for what has another name here.
_OTHER_NAMES = {
    name: meant
    for names, meant in (
        ("--spot", "--price-kind spot, an option of forerun plan"),
        ("--csv", "--format csv"),
        ("--markdown", "--format markdown"),
        ("--pareto", "--plot FILE.png"),
        ("--output", "--json, or --format csv, with > FILE"),
        ("--disk", "--storage-mb-s 150"),
        ("--workers --num-workers", "--loader-workers 4"),
        ("--gpus", "--on 4xNAME"),
        ("--num-devices", "--on 8xNAME, or several numbers as forerun scale --devices 8,16"),
        ("--gpu --device", "--on NAME"),
        ("--num-nodes", "--nodes 2"),
        ("--seq-len --max-length --context-length --max-seq-length", "--sequence-length 2048"),
        ("--gradient-checkpointing --checkpointing", "--recompute full"),
        ("--grad-accum --gradient-accumulation-steps", "--accumulation 4"),
        ("--fp16", "--precision amp, or fp16 without autocast"),
        ("--bf16", "--precision bf16, or amp-bf16 with autocast"),
        ("--mixed-precision", "--precision amp"),
        ("--lora-rank", "--lora 16"),
        ("--qlora", "--lora 16 --quantize nf4"),
        ("--4bit", "--quantize nf4"),
        ("--budget --max-cost", "--within 'cost<=50', an option of forerun plan"),
        ("--deadline --max-time", "--within 'time<=24h', an option of forerun plan"),
        ("--prefer", "--minimize cost, an option of forerun plan"),
        ("--samples", "--dataset-size 1M"),
        ("--max-steps --steps", "--epochs 1 --dataset-size N, N = steps x global batch"),
        ("--per-device-train-batch-size", "--batch-size 8"),
        ("--zero", "--strategy zero2"),
        (
            "compare--on",
            "forerun plan 'MODEL;MODEL' --on NAME; two answers of predict --json are compared as A.json B.json",
        ),
        ("calibrate--on", "--device cuda:0 on that machine; forerun predict --on NAME answers without it"),
        ("--fsdp", "--strategy fsdp"),
    )
    for name in names.split()
}


def _one_line(text: str) -> str:
    """The words in one line: the beginning, and the end, which says what to do, of a message that repeats a file."""
    words = " ".join(text.split())
    if len(words) > _LONGEST_LINE:
        words = f"{words[: _LONGEST_LINE - 500]} ... {words[-500:]}"
    # A name in a file may hold what moves a terminal's cursor.
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in words)


_LONGEST_LINE = 2000


class _Forerun(OneLineErrors, Root):
    """All verbs, with one line for each failure."""


# Plain help: rich's markup would add its import time to every call.
app = typer.Typer(
    name="forerun",
    cls=_Forerun,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version; with --verbose also those of libraries and GPUs."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: the details that a bug report needs.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress; answers and errors are still printed.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Know what a training run will take before you run it."""
    if version:
        from forerun.surface.cli.doctor import version_lines

        for line in version_lines(verbose=verbose):
            typer.echo(line)
        raise typer.Exit
    if verbose:
        raise typer.BadParameter("--verbose goes with --version")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """Entry point of the command ``forerun``."""
    gc.set_threshold(50_000)  # imports and short answers leave few cycles, and looking for them takes time
    show_any_sign()
    show_own_warnings()
    end_cleanly_on_signals()
    remove_leftovers()
    try:
        app(prog_name="forerun")
    finally:
        # At its end Python looks for garbage in all that was loaded, which takes a tenth of a short answer's time.
        gc.freeze()
