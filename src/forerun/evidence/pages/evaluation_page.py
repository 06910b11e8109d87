"""The pages of ``forerun evaluate``, ``fit`` and ``calibrate``, and of networks beside the sums of their layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_duration_s
from forerun.surface.report.figure import drawn, look_of, plain_log_ticks
from forerun.surface.report.tables import Columns, table, table_of
from forerun.surface.report.wording import format_percent

if TYPE_CHECKING:
    from forerun.adapters.classics.composition import Composition, CompositionRun
    from forerun.evidence.calibrate import Calibration, LeftOutModel
    from forerun.evidence.evaluate import Evaluation
    from forerun.evidence.fit import FitResult
    from forerun.evidence.fitting.evaluation import ErrorMetrics


_COLUMNS = {
    "rows": "n",
    "MAPE": "mape",
    "median": "median_ape",
    "90th": "p90_ape",
    "RMSE": "rmse",
    "R2": "r2",
    "in 90 % interval": "coverage_90",
}
_OF_FIT = ("rows", "R2", "MAE", "RMSE", "MAPE", "median", "90th")


def evaluation_page(evaluation: Evaluation) -> RenderableType:
    """Errors as tables: forerun and the baselines on the same rows, then forerun by group."""
    predictors = {"forerun": evaluation.metrics, **evaluation.baselines}
    parts: list[RenderableType] = [
        Text("Absolute percentage errors of the step time: mean (MAPE), median and 90th percentile"),
        Text(""),
        error_table("predictor", predictors),
    ]
    if evaluation.groups:
        parts += [Text(""), error_table("forerun by group", evaluation.groups)]
    if evaluation.notes:
        parts += [Text(""), *(Text(f"- {note}") for note in evaluation.notes)]
    return Group(*parts)


def error_table(
    heading: str,
    rows: Mapping[str, ErrorMetrics | None],
    titles: Sequence[str] = tuple(_COLUMNS),
    time_text: Callable[[float], str] = format_duration_s,
) -> Table:
    """Errors by name, one line each; a missing error is a dash.

    Args:
        heading: Title of the names.
        rows: Errors by name; fractions, times in seconds.
        titles: Titles of the errors to show.
        time_text: Words for a time [s].
    """
    formats = {"n": "{:,.0f}".format, "r2": "{:.3f}".format, "rmse": time_text, "mae": time_text}

    def cell(errors: ErrorMetrics | None, field: str) -> str:
        value = getattr(errors, field, None)
        return "-" if value is None else formats.get(field, format_percent)(value)

    fields = [_COLUMNS.get(title, title.lower()) for title in titles]
    cells = [[name, *(cell(errors, field) for field in fields)] for name, errors in rows.items()]
    return table([heading, *titles], cells, left=(heading,), fold=(heading, "in 90 % interval"))


_TARGETS = {"epoch": "; times of one epoch, as in the CSV", "step": "", "layer": ""}


def fit_page(fit: FitResult) -> RenderableType:
    """Summary, errors and provenance of a fit."""
    facts = fit.model.provenance
    parts: list[RenderableType] = [Text(fit.summary), Text("")] if fit.summary else []
    time_text = "{:.4g} s".format if fit.target == "epoch" else format_duration_s
    errors = error_table("model", fit.metrics, _OF_FIT, time_text)
    errors.columns[0].min_width = 15
    parts += [
        Text(
            f"{facts['num_rows']:,} rows of {facts['num_configurations']:,} configurations "
            f"on {', '.join(facts['devices'])}; {', '.join(facts['software'])}"
        ),
        Text(f"Errors on rows that were not fitted: {fit.split}{_TARGETS[fit.target]}"),
        Text(""),
        errors,
    ]
    if fit.notes:
        parts += [Text(""), *(Text(f"- {note}") for note in fit.notes)]
    return Group(*parts)


def calibration_page(found: Calibration) -> RenderableType:
    """The page."""
    is_layouts = found.method == "layouts"
    lines: list[RenderableType] = [
        Text(f"{found.device}, {found.framework}", style="bold"),
        Text(
            f"{found.num_layers} layers and {found.num_models} models in "
            f"{format_duration_s(found.duration_s)}; {_METHODS[found.method]}"
        ),
    ]
    if found.models:
        lines += [Text(""), table_of(found.models, _MODELS, left=("model",)), Text("")]
        lines.append(
            Text(
                f"mean error on models left out: {found.mape_before:.0%} before, {found.mape_after:.0%} after "
                + ("(each predicted from the others)" if is_layouts else _UNSEEN)
            )
        )
    if found.step_cost_s:
        lines.append(
            Text(f"a step of fit takes {format_duration_s(found.step_cost_s)} beside its operations")
        )
    lines += [Text(note) for note in found.notes]
    use = f"give it as --calibration {found.file}" if is_layouts else "predict --on here uses it"
    lines.append(Text(f"written to {found.file}; {use}"))
    lines.append(Text(f"measurements in {found.records}"))
    return Group(*lines)


_UNSEEN = "(each predicted by a calibration that had not seen its family)"
_METHODS = {
    "refined": "the networks of the cost model were refined on them",
    "offset": "offsets of the cost model were fitted to them",
    "layouts": "steps of like shape are corrected as they were measured",
}
_MODELS: Columns[LeftOutModel] = {
    "model": lambda m: m.model,
    "batch": lambda m: str(m.batch_size),
    "measured": lambda m: format_duration_s(m.measured_s),
    "noise": lambda m: f"± {m.relative_noise:.1%}",
    "before": lambda m: f"{m.before_s / m.measured_s - 1:+.0%}",
    "after": lambda m: f"{m.after_s / m.measured_s - 1:+.0%}",
}


_TITLES = ("network", "batch", "layers", "step", "95 %", "sum of layers", "composed")


def composition_page(found: CompositionRun) -> RenderableType:
    """One line per network and batch size, then the mean overshoot before and after."""
    rows = found.compositions
    made = table(_TITLES, map(_cells, rows), left=_TITLES[:1], fold=_TITLES[:1])
    left_out = sorted({name for row in rows for name in row.left_out})
    lines = [
        f"Mean overshoot: sum of layers {_mean([row.overshoot_before for row in rows]):+.1%}, "
        f"composed {_mean([row.overshoot_after for row in rows]):+.1%}; mean error of the composed step "
        f"{_mean([abs(row.overshoot_after) for row in rows]):.1%}."
    ]
    if left_out:
        lines.append(f"In the steps but in no sum: {', '.join(left_out)}.")
    if num_unstable := found.run.report.num_unstable:
        lines.append(f"{num_unstable} measurements are marked unstable.")
    return Group(made, Text(""), *(Text(line) for line in [*lines, f"Records: {found.run.records}"]))


def _cells(row: Composition) -> tuple[str, ...]:
    noise = row.relative_noise
    return (
        row.network,
        str(row.batch_size),
        str(row.num_layers),
        format_duration_s(row.measured_s),
        "-" if noise is None else f"±{100 * noise:.0f} %",
        f"{format_duration_s(row.sum_of_layers_s)} ({row.overshoot_before:+.0%})",
        f"{format_duration_s(row.composed_s)} ({row.overshoot_after:+.0%})",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def plot_compositions(path: Path, panels: Mapping[str, Sequence[Composition]]) -> None:
    """Sum of layers and composed step over the measured step, one panel per machine.

    Args:
        path: File to write.
        panels: Rows by title.

    Raises:
        UsageError, FailureError: The file cannot be written, or has another ending than .png.
    """
    with drawn(path, width_in=5.2 * len(panels), height_in=4.6) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (title, rows) in zip(grid, panels.items(), strict=True):
            measured_ms = [1e3 * row.measured_s for row in rows]
            series = {
                "sum of layers alone": [1e3 * row.sum_of_layers_s for row in rows],
                "composed": [1e3 * row.composed_s for row in rows],
            }
            for index, (label, values_ms) in enumerate(series.items()):
                axes.scatter(measured_ms, values_ms, label=label, s=26, **look_of(index))
            ends = (0.8 * min(measured_ms), 1.25 * max(measured_ms))
            axes.plot(ends, ends, color="0.5", linewidth=1, label="equal to the step")
            axes.set(xscale="log", yscale="log", title=title)
            axes.set(xlabel="measured step [ms]", ylabel="from layers [ms]")
            for axis in (axes.xaxis, axes.yaxis):
                plain_log_ticks(axis)
            axes.grid(visible=True, which="both", alpha=0.25)
            axes.legend(fontsize=8)
