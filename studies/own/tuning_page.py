"""The section of the accuracy page about profiling and tuning scripts: results of the benchmarks on real runs.

Each table comes from one small file of ``studies/own/tuning_results`` that a benchmark writes with ``--out FILE``:

- ``before_after.json``: ``benchmarks/tune_before_after.py``;
- ``profile_overhead.json``: ``benchmarks/profile_overhead.py``;
- ``memory_limit.json``: ``benchmarks/tune_memory.py``;
- ``first_trials.json``: ``benchmarks/tune_priors.py``.

A file that is not there leaves its table out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.errors import RecordError
from forerun.script.compare import PairedRatio, paired_ratio
from studies.markdown import markdown_table


def tuning_results_folder() -> Path:
    """Folder of the results that come with the package."""
    return Path(__file__).parent / "tuning_results"


def tuning_section(folder: Path | None = None) -> str:
    """All tables whose results are there; nothing without any.

    Args:
        folder: Folder of the results; None for that of the package.

    Raises:
        RecordError: A file of results is damaged.
    """
    place = folder or tuning_results_folder()
    parts = [table(found) for name, table in _TABLES.items() if (found := _read(place / name)) is not None]
    return "\n".join(["## Scripts, profiled and tuned\n", *parts]) if parts else ""


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RecordError(f"expected results as JSON in '{path}', got: {error}; write it anew") from error


def _where(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    return f"{found['date']}, {machine['processor']}, {machine['num_usable_cores']:g} usable cores"


def _before_after(found: Mapping[str, Any]) -> str:
    before, after = found["before"], found["after"]
    rows = [
        ("images/s in steps", *(f"{run['rate_samples_per_s']:.1f}" for run in (before, after))),
        ("step, ms", *(f"{1e3 * run['step_time_s']:.1f}" for run in (before, after))),
        ("whole run, s", *(f"{run['wall_s']:.1f}" for run in (before, after))),
        ("cores used", *(f"{run['cpu_utilisation']:.2f}" for run in (before, after))),
        ("memory, MiB", *(f"{run['peak_memory_bytes'] / 2**20:.0f}" for run in (before, after))),
        (
            f"{found['metric']} after {found['epochs']} epochs",
            *(f"{run['metric']:.4f}" for run in (before, after)),
        ),
    ]
    unchanged = "is unchanged" if found["is_script_unchanged"] else "**has changed**"
    return (
        "### A script written without thought, tuned\n\n"
        f"{_where(found)}; {found['num_images']:,} JPEGs, batch 8; `forerun tune --budget {found['budget']}`, "
        f"{found['num_trials']} trials. The script's file {unchanged}.\n\n"
        + markdown_table(("", "as written", "tuned"), rows)
        + f"\n**{found['speedup']:.2f} times** the images a second.\n"
    )


def _overhead(found: Mapping[str, Any]) -> str:
    pairs: Sequence[Mapping[str, float]] = found["pairs"]
    waits = [abs(pair["wait_s"] / pair["wait_by_hand_s"] - 1) for pair in pairs]
    phases = [abs(pair["phases_s"] / pair["wall_s"] - 1) for pair in pairs]
    parts = [abs(pair["parts_s"] / pair["step_s"] - 1) for pair in pairs]
    rows = [
        ("added to a step, tenth percentile of each run", "3 %", _added(pairs, "low")),
        ("added to a step, median of each run", "3 %", _added(pairs, "median")),
        ("the same of steps that do next to nothing, median", "-", _hooks(found["idle_pairs"])),
        ("wait for the loader against that by hand", "10 %", _largest(waits)),
        ("phases against the wall time", "3 %", _largest(phases)),
        ("four parts against the step", "3 %", _largest(parts)),
    ]
    return (
        "### The profile against a loop instrumented by hand\n\n"
        f"{len(pairs)} pairs of runs.\n\n" + markdown_table(("", "aimed at", "found"), rows)
    )


def _added(pairs: Sequence[Mapping[str, float]], name: str) -> str:
    ratio: PairedRatio = paired_ratio(
        [pair[f"alone_{name}_s"] for pair in pairs], [pair[f"profiled_{name}_s"] for pair in pairs]
    )
    found = f"{100 * (ratio.ratio - 1):+.1f} %"
    if ratio.low is None or ratio.high is None:
        return found
    return f"{found} (95 %: {100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f} %)"


def _hooks(pairs: Sequence[Mapping[str, float]]) -> str:
    """Time that the hooks add to a short step."""
    added_s = [pair["profiled_median_s"] - pair["alone_median_s"] for pair in pairs]
    return f"{1e6 * float(np.median(added_s)):.0f} µs"


def _largest(differences: Sequence[float]) -> str:
    return f"{100 * float(np.median(differences)):.2f} %, at most {100 * max(differences):.2f} %"


def _memory_limit(found: Mapping[str, Any]) -> str:
    rows = [
        (
            study["name"],
            str(study["num_run"]),
            str(study["num_out_of_memory"]),
            str(study["num_rejected"]),
            f"{study['best_rate_samples_per_s']:.0f}",
            f"{study['median_predicted_over_used']:.2f}",
        )
        for study in found["studies"]
    ]
    return (
        f"### A study under a limit of memory\n\nLimit {found['limit_bytes'] / 1e6:,.0f} MB.\n\n"
        + markdown_table(
            (
                "memory",
                "trials run",
                "lost to memory",
                "rejected before",
                "best, images/s",
                "predicted over used",
            ),
            rows,
        )
    )


def _first_trials(found: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            *(
                f"{100 * mean:.1f} % (worst {100 * worst:.1f} %)"
                for mean, worst in zip(search["mean"], search["worst"], strict=True)
            ),
        )
        for name, search in found["searches"].items()
    ]
    return (
        "### First trials from the cost model\n\n"
        f"{found['num_configurations']} measured configurations; share of the best speed.\n\n"
        + markdown_table(("search", *(f"{count} trials" for count in found["checkpoints"])), rows)
    )


_TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "before_after.json": _before_after,
    "profile_overhead.json": _overhead,
    "memory_limit.json": _memory_limit,
    "first_trials.json": _first_trials,
}
