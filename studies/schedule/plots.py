"""What forecast errors cost a policy, as a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forerun.surface.report.figure import drawn, look_of


def error_plot(path: Path, errors: Mapping[str, Mapping[str, Mapping[float, float]]]) -> None:
    """Average completion against the spread of the error, speed and remaining work side by side.

    Args:
        path: File to write.
        errors: Average completion [s] by policy, kind of error and spread.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    kinds = list(next(iter(errors.values())))
    with drawn(path, width_in=4.2 * len(kinds), height_in=3.8) as figure:
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for axes, kind in zip(panels, kinds, strict=True):
            for index, (policy, by_kind) in enumerate(errors.items()):
                hours = [time_s / 3600 for time_s in by_kind[kind].values()]
                axes.plot(list(by_kind[kind]), hours, label=policy, **look_of(index))
            axes.set_xlabel(f"spread of the error on {kind} (lognormal)")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.3)
        panels[0].set_ylabel("average completion [h]")
        panels[-1].legend(loc="upper right", fontsize="small")
        figure.suptitle("What forecast errors cost")
