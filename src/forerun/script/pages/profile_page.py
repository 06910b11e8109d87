"""The page and the picture of ``forerun profile``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_bytes, format_count, format_duration_s
from forerun.script.profiling.profile import Advice, Profile
from forerun.surface.report.figure import COLOURS, check_plot_path, new_figure, save_figure
from forerun.surface.report.wording import format_percent

__all__ = ["parts_plot", "profile_page"]

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


def profile_page(profile: Profile) -> RenderableType:
    """A profile as a page of text."""
    parts: list[RenderableType] = [_title(profile), Text(""), Text("Where a step goes", style="bold")]
    parts += [_indented(_parts(profile)), Text(""), Text("What is used", style="bold")]
    parts += [_indented(_usage(profile)), Text("")]
    if profile.advice is not None:
        parts += [*_advice(profile.advice), Text("")]
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
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, words in _PART_NAMES.items():
        value_s = getattr(profile.parts, name)
        share = value_s / profile.step_time_s
        table.add_row(
            words, format_duration_s(value_s), format_percent(share), Text("█" * round(_BAR * share))
        )
    return table


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


def _advice(advice: Advice) -> list[Text]:
    gain = (
        ""
        if advice.speedup is None or advice.speedup_low is None or advice.speedup_high is None
        else f" Expected: {advice.speedup:.2f} times the speed ({advice.speedup_low:.2f} to {advice.speedup_high:.2f})."
    )
    knobs = ", ".join(f"{name}={value}" for name, value in advice.change.items())
    lines = [
        Text.assemble(("Bottleneck: ", "bold"), (advice.bottleneck, "bold red"), f". {advice.reason}."),
        Text.assemble(("Next: ", "bold"), f"{advice.words}.{gain}"),
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


def parts_plot(path: Path, profiles: Mapping[str, Profile]) -> None:
    """Parts of the time of a sample, one bar per run.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    figure = new_figure(width_in=8.0, height_in=1.6 + 0.6 * len(profiles))
    axes = figure.subplots()
    names = list(profiles)
    has_samples = all(profile.batch_size for profile in profiles.values())
    left = [0.0] * len(names)
    for index, (part, words) in enumerate(_PART_NAMES.items()):
        values = [
            1e3 * getattr(p.parts, part) / ((p.batch_size or 1.0) if has_samples else 1.0)
            for p in profiles.values()
        ]
        axes.barh(names, values, left=left, label=words, color=COLOURS[index])
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"time of a {'sample' if has_samples else 'step'} [ms]")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    save_figure(figure, path)
