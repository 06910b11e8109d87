"""Pictures of scenarios: loss, accuracy and utilisation over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.report.figure import look_of, new_figure, save_figure

__all__ = ["write_scenario_plots"]


def write_scenario_plots(folder: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Writes ``training_loss_comparison.png``, ``training_accuracy_comparison.png`` and ``utilisation.png``.

    Raises:
        FailureError: A file cannot be written.
    """
    _curves(folder / "training_loss_comparison.png", found, "loss", "loss", 1.0)
    _curves(folder / "training_accuracy_comparison.png", found, "acc", "accuracy [%]", 100.0)
    _utilisation(folder / "utilisation.png", found)


def _curves(path: Path, found: Sequence[Mapping[str, Any]], name: str, label: str, factor: float) -> None:
    figure = new_figure(width_in=9.6, height_in=4.6)
    for axes, part in zip(figure.subplots(1, 2, sharey=True), ("train", "test"), strict=True):
        for index, run in enumerate(found):
            rows = run["history"]
            values = [factor * row[f"{part}_{name}"] for row in rows]
            axes.plot([row["epoch"] for row in rows], values, label=run["scenario"], **look_of(index))
        axes.set(xlabel="epoch", ylabel=f"{part} {label}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    save_figure(figure, path)


def _utilisation(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    figure = new_figure(width_in=9.6, height_in=4.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for index, run in enumerate(found):
        looks = {"color": look_of(index)["color"], "linewidth": 1.2}
        times = [row[0] for row in run["utilisation"]]
        upper.plot(times, [100 * row[1] for row in run["utilisation"]], label=run["scenario"], **looks)
        lower.plot(times, [row[2] / 1024**3 for row in run["utilisation"]], **looks)
    upper.set(ylabel="CPU [% of all cores]")
    lower.set(ylabel="memory [GiB]", xlabel="time since the start of the run [s]")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    save_figure(figure, path)
