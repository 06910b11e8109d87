"""Pictures of profiled runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forerun.profiling.profile import Profile
from forerun.report.figure import COLOURS, check_plot_path, new_figure, save_figure
from forerun.report.profile_page import PART_NAMES

__all__ = ["parts_plot"]


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
    for index, (part, words) in enumerate(PART_NAMES.items()):
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
