"""The section of the accuracy page about scaling: every study with its baselines."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forerun.communication.scaling_constants import load_scaling_table, shipped_table_path
from studies.keras.mirrored_study import MirroredStudy, mirrored_study
from studies.markdown import error_cells, markdown_table
from studies.scaling.mlperf_study import MlperfStudy, mlperf_study
from studies.scaling.rows import ScalingRow
from studies.scaling.speed_studies import FewPoints, placement_study, server_study
from studies.scaling.study import ScalingStudy, scaling_study

__all__ = ["scaling_digest", "scaling_section"]

_SERVER_POINTS = 10
_PLACEMENT_POINTS = (8, 16)


def scaling_section(folder: Path, quick: bool = False) -> str:
    """Runs the studies of scaling and prints them.

    Args:
        folder: Folder of the public tables.
        quick: Three random splits instead of forty.
    """
    num_splits = 3 if quick else 40
    return "\n".join(
        (
            "## Several devices\n",
            _one_to_many(scaling_study(folder)),
            _placements(placement_study(folder, _PLACEMENT_POINTS, num_splits)),
            _servers(server_study(folder, _SERVER_POINTS, num_splits)),
            _mirrored(mirrored_study(folder)),
            _mlperf(mlperf_study(folder)),
        )
    )


def scaling_digest() -> str:
    """Changes with the shipped constants, which some of the studies ask."""
    return hashlib.sha256(shipped_table_path().read_bytes()).hexdigest()[:12]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _one_to_many(study: ScalingStudy) -> str:
    names = {"**forerun**": "forerun", "bare collectives": "bare", "linear scaling": "linear"}
    rows = []
    for link in (None, "nvlink", "pcie", "network"):

        def keep(row: ScalingRow, link: str | None = link) -> bool:
            return link in (None, row.link_class)

        for title, which in names.items():
            rows.append((link or "all", title, *error_cells(study.metrics(which, keep))))
    sizes = ", ".join(
        f"{number} GPUs {_percent(study.metrics('forerun', lambda row, n=number: row.num_devices == n).mape)}"  # type: ignore[misc]
        for number in (2, 4, 8)
    )
    spread = load_scaling_table().log_spread
    return (
        "### From one measured GPU to several\n\n"
        "`dle_training` and `gpu_benchmarks`: the step of n GPUs from the measured step of one of the same source, "
        "machine, model, precision and batch. Constants of each kind of link and software are fitted in five folds by "
        f"network, the row's network left out. {study.num_impossible} rows beyond 1.1 times n-fold speed are not "
        f"tested; networks of unpublished size are left out: {', '.join(study.left_out)}.\n\n"
        + markdown_table(("link", "predictor", "rows", "MAPE", "median", "p90"), rows)
        + f"\nMAPE by number: {sizes}. Standard deviation of the logarithm that intervals take: "
        + ", ".join(f"{name} {value:.2f}" for name, value in spread.items())
        + ".\n"
    )


def _placements(study: FewPoints) -> str:
    names = {
        "**forerun**: mean of both, residuals carried on": "forerun",
        "mean of both": "average",
        "ring with stragglers (ours)": "ring",
        "Pollux' form": "pollux",
    }
    rows = [
        (title, *(_percent(study.mean(which, number)) for number in _PLACEMENT_POINTS))
        for title, which in names.items()
    ]
    covered = ", ".join(
        f"{100 * study.coverage['forerun', number]:.0f} % at {number}" for number in _PLACEMENT_POINTS
    )
    return (
        "### Data parallel placements, a few points measured\n\n"
        f"`adaptdl_step_times`, T4 on AWS: {study.num_jobs} jobs, {study.num_splits} random splits each, mean error on "
        "the points left out (Pollux' form fitted as its authors do: 9.4 and 8.7 %). The four differ in the form "
        "only: all are fitted as most probable values and know the synchronisation of the measured points.\n\n"
        + markdown_table(("speed model", *(f"{number} points" for number in _PLACEMENT_POINTS)), rows)
        + f"\n90 % intervals cover {covered} points.\n"
    )


def _servers(study: FewPoints) -> str:
    names = {
        "**forerun**: mean of Optimus' form and a smooth surface, residuals carried on": "forerun",
        "Optimus' form, relative least squares, residuals carried on": "form",
        "the same at ten *designed* points": "designed",
        "Optimus' form, relative least squares": "relative",
        "Optimus' form, plain least squares": "plain",
        "linear scaling": "linear",
    }
    rows = [(title, _percent(study.mean(which, _SERVER_POINTS))) for title, which in names.items()]
    gain = study.mean("form", _SERVER_POINTS) - study.mean("designed", _SERVER_POINTS)
    covered = 100 * study.coverage["forerun", _SERVER_POINTS]
    return (
        "### Parameter servers, ten points measured\n\n"
        f"`optimus_dl2_speed`, failed runs left out: {study.num_jobs} jobs, {study.num_splits} random splits each, "
        "mean error on the points left out.\n\n"
        + markdown_table(("speed model", "10 points"), rows)
        + "\nPoints proposed by `forerun scale --propose` (half for the published coefficients, the rest for those "
        f"fitted to the first half) are better than random ones by {100 * gain:.1f} points. 90 % intervals cover "
        f"{covered:.0f} %.\n"
    )


def _mirrored(study: MirroredStudy) -> str:
    rows = []
    titles = {
        "**forerun**": "predicted_s",
        "linear scaling": "one_step_s",
        "the source, without its factor": "published_s",
        "the source, factor 1.5 tuned on the network": "published_with_factor_s",
    }
    for model in ("mnist_cnn", "patch_camelyon_cnn", None):
        for title, which in titles.items():
            if which == "published_with_factor_s" and model != "patch_camelyon_cnn":
                continue
            rows.append((model or "both", title, *error_cells(study.metrics(which, model))))
    return (
        "### MirroredStrategy, two P100 from one\n\n"
        "`iit_e2e`: every run on two GPUs from the runs of the same network and optimizer on one; nothing is fitted to "
        "two, and no factor is set by hand.\n\n"
        + markdown_table(("network", "predictor", "rows", "MAPE", "median", "p90"), rows)
        + "\nThe source predicts some batch sizes only.\n"
    )


def _mlperf(study: MlperfStudy) -> str:
    rows = [
        (
            row.mlperf_round,
            row.accelerator,
            f"{row.num_devices:,}",
            str(row.batch_size_per_device),
            f"{row.relative:.2f}",
            f"{row.predicted:.2f}",
            f"{row.batch_only:.2f}",
        )
        for row in study.rows
    ]
    return (
        "### ResNet-50 of MLPerf Training, to thousands of accelerators\n\n"
        "Rate of one accelerator relative to the smallest size of the same round, NVIDIA's closed results. Nothing is "
        f"fitted to them. Root mean square error of the logarithm: forerun **{study.log_error('predicted'):.2f}**, the "
        f"batch of each device alone {study.log_error('batch_only'):.2f}, linear scaling "
        f"{study.log_error('linear'):.2f}; correlation of the logarithms {study.correlation:.2f}.\n\n"
        + markdown_table(
            ("round", "accelerator", "number", "batch of each", "measured", "forerun", "batch alone"), rows
        )
        + "\nMost of the fall-off is the smaller batch of each device. Where we are too low: the constants of "
        "communication are those of ordinary PyTorch and TensorFlow runs, and these entries hide nearly all of it.\n"
    )
