"""What forecast errors cost a policy, as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forerun.surface.report.figure import check_plot_path, look_of, new_figure, save_figure

__all__ = ["error_plot"]


def error_plot(path: Path, errors: Mapping[str, Mapping[str, Mapping[float, float]]]) -> None:
    """Average completion against the spread of the error, speed and remaining work side by side.

    Args:
        path: File to write.
        errors: Average completion [s] by policy, kind of error and spread.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    kinds = list(next(iter(errors.values())))
    figure = new_figure(width_in=4.2 * len(kinds), height_in=3.8)
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for index, (policy, by_kind) in enumerate(errors.items()):
            spreads = list(by_kind[kind])
            hours = [by_kind[kind][spread] / 3600 for spread in spreads]
            axes.plot(spreads, hours, label=policy, **look_of(index))
        axes.set_xlabel(f"spread of the error on {kind} (lognormal)")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    panels[0].set_ylabel("average completion [h]")
    panels[-1].legend(loc="upper right", fontsize="small")
    figure.suptitle("What forecast errors cost")
    save_figure(figure, path)
