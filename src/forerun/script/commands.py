"""``forerun profile``, ``capture``, ``tune``, ``compare`` and ``apply``, which run a script."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.base.units import parse_amount
from forerun.question.settings import checked
from forerun.script.tuning.options import TuneSettings
from forerun.surface.cli.output import print_json
from forerun.surface.cli.settings import (
    RUN_TIME_HELP,
    SETTING_HELP,
    JsonOption,
    MetricOption,
    ShowOutputOption,
    UnsafeFilesOption,
)
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.graph.captured import Capture
    from forerun.script.compare import Comparison
    from forerun.script.profiling.profile import Profile
    from forerun.script.tune import TuneResult


def _fail(found: Profile) -> None:
    """Ends the command as the script ended."""
    if found.outcome == "interrupted":
        # Shells expect 128 and the number of the signal.
        raise typer.Exit(128 + signal.Signals[found.interrupted_by])
    if found.outcome in ("crashed", "timeout"):
        from forerun.base.errors import ScriptError

        raise ScriptError(
            f"the script {'crashed' if found.outcome == 'crashed' else 'ran into the time limit'} after "
            f"{found.num_steps} steps (exit status {found.status}); the profile is of what was seen"
            + (f"; it said: {found.said}" if found.said else "")
        )


@verb(
    "Tell where a training script spends its time.",
    page="forerun.script.pages:profile_page",
    plot="forerun.script.pages:parts_plot",
    after=_fail,
)
def profile(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="Training command, after --, as you would run it.")
    ],
    steps: Annotated[
        int | None,
        typer.Option(help="Number of steps after which the script is stopped.", show_default="its end"),
    ] = None,
    window: Annotated[int, typer.Option(help="Number of steps under torch.profiler; 0 for none.")] = 5,
    warmup: Annotated[int, typer.Option(help="Number of warm-up steps before the profiled ones.")] = 3,
    epochs: Annotated[
        float | None, typer.Option(help=SETTING_HELP["epochs"], show_default="by the script's arguments")
    ] = None,
    timeout: Annotated[str | None, typer.Option(metavar="10min", help=RUN_TIME_HELP)] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", "--records", metavar="FOLDER", help="Folder for the raw recordings of all processes."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the trace of the profiled steps, for chrome://tracing and Perfetto; an existing folder for "
            "TensorBoard's profiler plugin.",
        ),
    ] = None,
) -> Profile:
    """Run a training script unchanged and show where its time goes, what limits it and what to try next."""
    import forerun

    return forerun.profile(
        command,
        num_steps=steps,
        window_steps=window,
        warmup_steps=warmup,
        epochs=epochs,
        timeout_s=None if timeout is None else parse_amount(timeout, "time"),
        folder=keep,
        trace=trace,
        echo=sys.stderr,
    )


@verb(
    "Capture the step of a training script, to ask about it later.",
    page=lambda found: iter(found[0].facts.notes()),
    as_dict=lambda found: {"file": str(found[1]), **asdict(found[0].facts)},
    after=lambda found: typer.echo(f"written to {found[1]}: ask with capture:{found[1]}", err=True),
)
def capture(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="Training command, after --, as you would run it.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File for the captured graph, such as graph.forerun.")
    ],
    timeout: Annotated[
        str, typer.Option(metavar="10min", help="Longest time of the script until its third step.")
    ] = "10min",
    unsafe_files: UnsafeFilesOption = False,
) -> tuple[Capture, Path]:
    """Capture the training step of a script, unchanged and without a GPU, for capture:FILE in any question.

    The script's own code runs until its third step, without network, over a copy-on-write view of all files, so that it
    changes none. Where the system has no such view, changes are redirected or refused, and a note says so.
    """
    import forerun

    found = forerun.capture(command, timeout_s=parse_amount(timeout, "time"), unsafe_files=unsafe_files)
    return found, found.save(out)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "trial_s": lambda text: parse_amount(text, "time"),
    "timeout_s": lambda text: parse_amount(text, "time"),
    "memory_limit_bytes": lambda text: parse_amount(text, "memory"),
}


def _say(line: str) -> None:
    typer.echo(line, err=True)


@verb(
    "Find a better configuration of a training script.",
    options=TuneSettings,
    readers=_READERS,
    page="forerun.script.pages:tune_page",
)
def tune(
    settings: dict[str, Any],
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="[SPACE.yaml] -- COMMAND",
            help="Space of the settings to try, and the training command as you run it.",
        ),
    ],
    show_output: ShowOutputOption = False,
) -> TuneResult:
    """Find a faster or better configuration of a training script within a budget, without editing it."""
    import forerun

    words = list(command)
    space = Path(words.pop(0)) if words[0].endswith((".yaml", ".yml")) else None
    return forerun.tune(
        words,
        space=space,
        say=_say,
        echo=sys.stderr if show_output else None,
        **checked(settings, TuneSettings),
    )


_AS_IT_IS = "script"


@verb("Run two configurations in turns and compare them.", page="forerun.script.pages:comparison_page")
def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="First configuration: a YAML file, or 'script' for the plain command."
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="B", help="Second configuration: a YAML file, or 'script' for the plain command."
        ),
    ],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Training command, after --.")],
    repetitions: Annotated[int, typer.Option(help="Runs of each configuration.")] = 3,
    metric: MetricOption = None,
    margin: Annotated[
        float,
        typer.Option(
            help="Loss of the metric that still counts as equal: a share, relative to the value for losses.",
            min=0.0,
        ),
    ] = 0.01,
    show_output: ShowOutputOption = False,
) -> Comparison:
    """Run a command in two configurations by turns, and compare their speed and accuracy in pairs."""
    import forerun

    return forerun.compare(
        command,
        None if first == _AS_IT_IS else Path(first),
        None if second == _AS_IT_IS else Path(second),
        repetitions=repetitions,
        metric=metric,
        margin=margin,
        say=_say,
        echo=sys.stderr if show_output else None,
    )


@verb("Run a script with a configuration that was found.")
def apply(
    configuration: Annotated[
        Path, typer.Argument(metavar="BEST.yaml", help="Configuration that 'forerun tune' wrote.")
    ],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Training command, after --.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact command without running it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a command with a configuration that tune found, and print the exact command."""
    import forerun
    from forerun.script.command_words import check_command
    from forerun.script.tuning.configuration import read_configuration

    found = read_configuration(configuration)
    exact = shlex.join(found.command(check_command(command)))
    answer = {"command": exact, "arguments": found.arguments, "hooks": found.hooks}
    if dry_run:
        if as_json:
            print_json({**answer, "wall_s": None})
            return
        typer.echo(exact)
        for name, value in found.hooks.items():
            typer.echo(f"hook: {name}={value}")
        return
    run = forerun.apply(
        command,
        found,
        say=_say,
        # The script's own output is the answer, unless JSON was asked for.
        echo=sys.stderr if as_json else sys.stdout,
    )
    if as_json:
        print_json({**answer, "wall_s": run.end_s - run.begin_s})
