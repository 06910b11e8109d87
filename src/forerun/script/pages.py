"""The pages and the pictures of the answers about a script: a profile, a study, a diagnosis, a comparison."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forerun.base.answers import fields_of
from forerun.base.units import format_bytes, format_count, format_duration_s
from forerun.surface.report.figure import COLOURS, drawn
from forerun.surface.report.tables import Columns, table, table_of
from forerun.surface.report.wording import format_percent, range_words

if TYPE_CHECKING:  # a page needs no more than what its own answer has loaded
    from forerun.script.compare import ComparedRun, Comparison
    from forerun.script.diagnosis.causes import Cause
    from forerun.script.diagnosis.diagnose import Diagnosis
    from forerun.script.profiling.profile import Profile
    from forerun.script.tune import TuneResult

_PART_NAMES = {
    "input_wait_s": "waiting for input",
    "copy_s": "copies to the device",
    "kernels_s": "kernels",
    "host_s": "host and idle",
}
_PHASES = {
    "start": "start",
    "steps": "training steps",
    "between": "validation and other",
    "profiling": "profiling itself",
    "end": "end",
}
_BAR = 30
_WORTH_SAYING = 0.05
_UNCERTAINTY = 0.25
"""Uncertain share of a saving: workers compete with the step for memory and caches."""


def profile_page(profile: Profile) -> RenderableType:
    """A profile as a page of text."""
    parts: list[RenderableType] = [_title(profile), Text(""), Text("Where a step goes", style="bold")]
    parts += [_indented(_parts(profile)), Text(""), Text("What is used", style="bold")]
    parts += [_indented(_usage(profile)), Text("")]
    if profile.advice is not None:
        parts += [*_advice(profile.advice, profile.step_time_s), Text("")]
    parts.append(_times(profile))
    if profile.hooks:
        parts += [Text(f"hook: {hook['knob']}: {hook['what']}") for hook in profile.hooks]
    parts += [Text(f"note: {note}", style="dim") for note in profile.notes]
    return Group(*parts)


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2), expand=False)


def _title(profile: Profile) -> Text:
    speed = (
        ""
        if profile.throughput_samples_per_s is None
        else f", {format_count(profile.throughput_samples_per_s)} samples/s at {profile.batch_size:.0f} a step"
    )
    return Text.assemble(
        ("Profile", "bold"),
        f" of {' '.join(profile.command)}: {profile.outcome}, {profile.num_steps:,} steps on {profile.device}\n",
        f"step {format_duration_s(profile.step_time_s)} (median {format_duration_s(profile.step_time_median_s)})",
        speed,
    )


def _parts(profile: Profile) -> Table:
    step_s = profile.step_time_s
    columns: Columns[str] = {
        "part": lambda name: _PART_NAMES[name],
        "time": lambda name: format_duration_s(getattr(profile.parts, name)),
        "share": lambda name: format_percent(getattr(profile.parts, name) / step_s),
        "bar": lambda name: "█" * round(_BAR * getattr(profile.parts, name) / step_s),
    }
    made = table_of(list(_PART_NAMES), columns, left=("part", "bar"))
    made.show_header = False
    return made


def _usage(profile: Profile) -> Group:
    lines = [f"CPU {format_percent(profile.cpu_utilisation)} of {profile.num_usable_cores:g} cores"]
    if profile.busy_machine_fraction is not None and profile.busy_machine_fraction >= _WORTH_SAYING:
        lines.append(
            "other work of the machine kept the script off its cores in "
            f"{format_percent(profile.busy_machine_fraction)} of its steps"
        )
    if profile.device_busy_fraction is not None:
        lines.append(f"device computes {format_percent(profile.device_busy_fraction)} of a step")
    lines.append(f"memory {format_bytes(profile.peak_memory_bytes)} at the peak, all processes")
    if profile.device_peak_bytes is not None:
        lines.append(f"device memory {format_bytes(profile.device_peak_bytes)}")
    if (power_w := profile.sensors.get("gpu_power_w_mean")) is not None:
        lines.append(f"power {power_w:.0f} W")
    for name, cause in (("gpu_throttled_by_heat_mean", "heat"), ("gpu_throttled_by_power_mean", "power")):
        if share := profile.sensors.get(name):
            lines.append(f"clocks throttled by {cause} in {format_percent(share)} of the samples")
    return Group(*(Text(line) for line in lines))


def _advice(advice: Cause, step_s: float) -> list[Text]:
    gain = ""
    if advice.after_s is not None:
        saved_s = step_s - advice.after_s
        value, low, high = (
            step_s / max(step_s - factor * saved_s, 1e-3 * step_s)
            for factor in (1.0, 1 - _UNCERTAINTY, 1 + _UNCERTAINTY)
        )
        gain = f" Expected: {value:.2f} times the speed ({low:.2f} to {high:.2f})."
    knobs = ", ".join(f"{name}={value}" for name, value in advice.knobs.items())
    lines = [
        Text.assemble(("Bottleneck: ", "bold"), (advice.bottleneck, "bold red"), f". {advice.evidence}."),
        Text.assemble(("Next: ", "bold"), f"{advice.change}.{gain}"),
    ]
    return [*lines, Text(f"      knobs: {knobs}")] if knobs else lines


def _times(profile: Profile) -> Text:
    phases = ", ".join(
        f"{words} {format_duration_s(profile.phases_s[name])}"
        for name, words in _PHASES.items()
        if profile.phases_s[name] >= 1e-3
    )
    text = Text(f"This run took {format_duration_s(profile.wall_s)}: {phases}")
    if profile.job_time_s is not None and profile.time_left_s is not None:
        text.append(
            f"\nThe whole job of {_length(profile)} takes {format_duration_s(profile.job_time_s)}; "
            f"{format_duration_s(profile.time_left_s)} of it were left"
        )
    return text


def _length(profile: Profile) -> str:
    """Length of the job: by its steps, where they are not those of its epochs."""
    steps, epochs, per_epoch = profile.num_steps_of_job, profile.epochs, profile.steps_per_epoch
    if steps is None or (epochs is not None and per_epoch is not None and steps >= epochs * per_epoch):
        return f"{epochs:g} epochs"
    return f"{steps:,.0f} steps"


def parts_plot(path: Path, profile: Profile) -> None:
    """Parts of the time of a sample as one bar; of a step, where its samples are not known.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    left = 0.0
    with drawn(path, width_in=8.0, height_in=2.2) as figure:
        axes = figure.subplots()
        for index, (part, words) in enumerate(_PART_NAMES.items()):
            value = 1e3 * getattr(profile.parts, part) / (profile.batch_size or 1.0)
            axes.barh(["this run"], [value], left=left, label=words, color=COLOURS[index])
            left += value
        axes.set_xlabel(f"time of a {'sample' if profile.batch_size else 'step'} [ms]")
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small"
        )


_MOST_TRIALS = 12


def tune_page(found: TuneResult) -> RenderableType:
    """Result of a study: speed before and after, and the best trials."""
    ran = [trial for trial in found.trials if trial["outcome"] != "rejected"]
    resumed = ", resumed" if found.is_resumed else ""
    parts: list[RenderableType] = [
        Text.assemble(
            ("Tuned", "bold"),
            f" for {', '.join(found.objectives)}: {len(ran)} trial{'s' * (len(ran) != 1)}{resumed}, ended by "
            f"{found.ended_by}; {found.num_rejected} rejected by the memory model, {found.num_out_of_memory} lost to "
            "memory",
        ),
        Text(""),
        _indented(_trials(found)),
        Text(""),
    ]
    if found.checked is not None and found.checked.get("best") is not None:
        parts += [Text("Whole runs", style="bold"), _indented(_before_after(found.checked)), Text("")]
    if found.verdict is not None:
        style = {"better": "bold green", "worse": "bold red"}.get(found.verdict.verdict, "bold")
        words = found.verdict.words
        parts += [Text(words[:1].upper() + words[1:], style=style), Text("")]
    if found.best is not None:
        parts.append(Text.assemble(("Best: ", "bold"), found.command))
        hooks = ", ".join(f"{name}={value}" for name, value in found.best.hooks.items())
        parts.append(Text(f"      hooks: {hooks or 'none'}"))
        parts.append(Text(f"Run it: forerun apply {found.folder / 'best.yaml'} -- COMMAND"))
    parts += [Text(f"note: {note}", style="dim") for note in (*_failures(found), *found.notes)]
    return Group(*parts)


def _failures(found: TuneResult) -> list[str]:
    """Messages of trials that ended badly, equal ones once."""
    failed = [trial for trial in found.trials if trial["outcome"] in ("crashed", "timeout")]
    reasons: dict[str, list[str]] = {}
    for trial in failed:
        reasons.setdefault(f"{trial['outcome']}: {trial['reason']}", []).append(str(trial["number"]))
    return [
        f"trial{'s' if len(numbers) > 1 else ''} {', '.join(numbers)} {reason}"
        for reason, numbers in reasons.items()
    ]


def _trials(found: TuneResult) -> Table:
    told = [trial for trial in found.trials if trial["objectives"] is not None]
    sign = -1 if found.objectives[0] in ("speed", "accuracy") else 1
    ranked = sorted(told, key=lambda trial: sign * trial["objectives"][0])
    columns: Columns[dict[str, Any]] = {
        "values": lambda trial: ", ".join(f"{name}={value}" for name, value in trial["values"].items()),
        "trial": lambda trial: str(trial["number"]),
        **{name: partial(_objective, index=index) for index, name in enumerate(found.objectives)},
        "memory": lambda trial: format_bytes(trial["peak_memory_bytes"]),
        "from": lambda trial: trial["source"],
        "front": lambda trial: "*" if trial["number"] in found.front else "",
    }
    return table_of(ranked[:_MOST_TRIALS], columns, left=("values",), fold=tuple(columns))


def _objective(trial: dict[str, Any], *, index: int) -> str:
    return f"{trial['objectives'][index]:.4g}"


def _before_after(checked: dict[str, Any]) -> Table:
    before, after = checked["baseline"], checked["best"]
    titles = ("", "before", "after", "ratio")
    made = table(titles, left=titles[:1], fold=titles)

    def row(name: str, key: str, form: Any) -> None:
        first, second = before[key], after[key]
        if first is None or second is None:
            return
        ratio = f"{second / first:.2f}" if first else ""
        made.add_row(name, form(first), form(second), ratio)

    row("samples/s", "rate_samples_per_s", lambda v: f"{v:,.1f}")
    row("whole run", "wall_s", format_duration_s)
    row("step", "step_time_s", format_duration_s)
    row("memory", "peak_memory_bytes", format_bytes)
    row("cores used", "cpu_utilisation", lambda v: f"{v:.2f}")
    if checked.get("metric"):
        made.add_row(
            f"{checked['metric']} at the end",
            f"{checked['metric_before']:.4f}",
            f"{checked['metric_after']:.4f}",
            "",
        )
    return made


_VERDICTS = {
    "slow": "slow",
    "not slow": "not slow: within the interval",
    "faster": "faster than predicted",
    "not compared": "no prediction to compare with",
}
_SOURCES = {"run": "a command", "trace": "a trace", "number": "measured steps"}
_LEAST_SHARE = 0.01


def diagnosis_page(found: Diagnosis) -> RenderableType:
    """A diagnosis as a page of text."""
    parts: list[RenderableType] = [_diagnosis_title(found), Text("")]
    for number, cause in enumerate(found.causes, start=1):
        cost = (
            f", {format_duration_s(cause.cost_s)} of a step ({format_percent(cause.share)})"
            if cause.cost_s and cause.bottleneck != "memory"
            else ""
        )
        parts += [
            Text.assemble(f"{number}. ", (cause.cause, "bold red" if cause.cost_s else "bold"), cost),
            Padding(Text(f"seen: {cause.evidence}\ndo:   {cause.change}"), (0, 0, 0, 3), expand=False),
        ]
    if classes := [
        (
            row.name,
            "-" if row.measured_s is None else format_duration_s(row.measured_s),
            "-" if row.predicted_s is None else format_duration_s(row.predicted_s),
            f"{row.measured_s / row.predicted_s:.2g}" if row.measured_s and row.predicted_s else "",
        )
        for row in found.by_class
        if max(row.measured_s or 0.0, row.predicted_s or 0.0) >= _LEAST_SHARE * found.measured
    ]:
        titles: tuple[str, ...] = ("part of the step", "measured", "predicted", "ratio")
        parts += [Text(""), table(titles, classes, left=titles[:1])]
    if found.ranks:
        titles = ("rank", "step", "own work", "kernels", "loader", "host", "communication")
        figures = (fields_of(rank).values() for rank in found.ranks)
        ranks = [(label, *map(format_duration_s, times_s)) for label, *times_s in figures]
        parts += [Text(""), table(titles, ranks, left=titles[:1])]
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def _diagnosis_title(found: Diagnosis) -> Text:
    where = " on ".join(filter(None, (found.model, found.device)))
    steps = f", mean of {found.num_steps:,} steps" if found.num_steps else ""
    text = Text.assemble(("Diagnosis", "bold"), f" of {where or _SOURCES[found.source]}\n")
    text.append(f"measured   {format_duration_s(found.measured)}{steps}\n")
    if found.predicted is not None:
        text.append(
            f"predicted  {range_words(found.predicted, format_duration_s)}; measured is {found.ratio:.3g} times it\n"
        )
    return text.append(_VERDICTS[found.verdict], "bold")


def comparison_page(found: Comparison) -> RenderableType:
    """Two configurations side by side."""
    columns: Columns[ComparedRun] = {
        "run": lambda run: run.which,
        "samples/s": lambda run: "-" if run.rate_samples_per_s is None else f"{run.rate_samples_per_s:,.1f}",
        "time": lambda run: format_duration_s(run.wall_s),
        "metric": lambda run: "-" if run.metric is None else f"{run.metric:.4f}",
    }
    runs = table_of(found.runs, columns, left=("run",), fold=tuple(columns))
    parts: list[RenderableType] = [_indented(runs), Text("")]
    for name, ratio in (("samples a second", found.speed), ("whole run", found.time)):
        if ratio is not None:
            ends = (
                ""
                if ratio.low is None
                else f" (95 %: {ratio.low:.2f} to {ratio.high:.2f}, p = {ratio.p_value:.2g})"
            )
            parts.append(Text(f"{name}: B is {ratio.ratio:.2f} times as fast as A{ends}"))
    if found.accuracy is not None:
        verdict = "is not worse" if found.accuracy.is_not_inferior else "may be worse"
        low = "" if found.accuracy.low is None else f", at worst {found.accuracy.low:+.4f}"
        parts.append(
            Text(
                f"{found.metric}: B {verdict} than A by more than {found.accuracy.margin:.4g}: "
                f"difference {found.accuracy.difference:+.4f}{low}"
            )
        )
    return Group(*parts)
