"""``python -m studies``: the studies on public measurements, and the fits of what forerun ships."""

from __future__ import annotations

import typer

from forerun.surface.cli.main import OneLineErrors
from forerun.surface.cli.output import show_any_sign
from forerun.surface.cli.settings import DebugOption
from studies.commands.accuracy import accuracy
from studies.commands.board import board
from studies.commands.faults import faults
from studies.commands.public_tables import (
    backtest,
    fine_tuning,
    fit_intervals,
    fit_layouts,
    fit_scaling,
    fit_weights,
    layouts,
    parity,
    published_steps,
    schedule,
    stack,
)
from studies.commands.scripts import scenarios, scripts
from studies.commands.shipped_graphs import shipped_graphs

app = typer.Typer(
    name="studies",
    cls=OneLineErrors,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("accuracy", short_help="Make the page of accuracy.")(accuracy)
app.command("board", short_help="Make the page of the steps that people have sent.")(board)
app.command("parity", short_help="Compare networks in PyTorch with the same in Keras.")(parity)
app.command("stack", short_help="Compare steps of Keras and TensorFlow with predictions.")(stack)
app.command("scripts", short_help="Capture public training scripts and compare them.")(scripts)
app.command("scenarios", short_help="Tune a training of SqueezeNet in several ways.")(scenarios)
app.command("fit-weights", short_help="Fit the cost model that is shipped.")(fit_weights)
app.command("fit-intervals", short_help="Fit the intervals that are shipped.")(fit_intervals)
app.command("fit-scaling", short_help="Fit the constants of several devices that are shipped.")(fit_scaling)
app.command("published-steps", short_help="Renew the published steps that come with the package.")(
    published_steps
)
app.command("fit-layouts", short_help="Fit the constants of layouts that are shipped.")(fit_layouts)
app.command("layouts", short_help="Compare layouts of large models with measured steps.")(layouts)
app.command("fine-tuning", short_help="Compare fine-tuning of language models with measured steps.")(
    fine_tuning
)
app.command("backtest", short_help="Test forecasters on public learning curves.")(backtest)
app.command("schedule", short_help="Replay public workloads under every policy.")(schedule)
app.command("shipped-graphs", short_help="Renew the graphs that come with the package.")(shipped_graphs)
app.command("faults", short_help="Feed bad input, kill writers, flip bits and load the server.")(faults)


@app.callback(invoke_without_command=True)
def root(context: typer.Context, debug: DebugOption = False) -> None:
    """Study forerun on public measurements, and fit what it ships."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


if __name__ == "__main__":
    show_any_sign()
    app(prog_name="python -m studies")
