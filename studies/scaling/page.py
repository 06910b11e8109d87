"""The section of the accuracy page about scaling: every study with its baselines."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forerun.cost.communication.constants import shipped_table_path
from studies.keras.mirrored_study import MirroredStudy, mirrored_study
from studies.markdown import error_cells, markdown_table
from studies.scaling.mlperf_study import MlperfStudy, mlperf_study
from studies.scaling.rows import ScalingRow
from studies.scaling.speed_studies import FewPoints, placement_study, server_study
from studies.scaling.study import ScalingStudy, scaling_study

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
    names = {"**forerun**": "forerun", "linear scaling": "linear"}
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
    return (
        "### From one measured GPU to several\n\n"
        "`dle_training` and `gpu_benchmarks`, five folds by network.\n\n"
        + markdown_table(("link", "predictor", "rows", "MAPE", "median", "p90"), rows)
        + f"\nMAPE by number: {sizes}.\n"
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
        f"`adaptdl_step_times`: {study.num_jobs} jobs, {study.num_splits} splits.\n\n"
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
    covered = 100 * study.coverage["forerun", _SERVER_POINTS]
    return (
        "### Parameter servers, ten points measured\n\n"
        f"`optimus_dl2_speed`: {study.num_jobs} jobs, {study.num_splits} splits.\n\n"
        + markdown_table(("speed model", "10 points"), rows)
        + f"\n90 % intervals cover {covered:.0f} %.\n"
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
            if which.startswith("published") and model != "patch_camelyon_cnn":
                continue
            rows.append((model or "both", title, *error_cells(study.metrics(which, model))))
    return "### MirroredStrategy, two P100 from one\n\n`iit_e2e`.\n\n" + markdown_table(
        ("network", "predictor", "rows", "MAPE", "median", "p90"), rows
    )


def _mlperf(study: MlperfStudy) -> str:
    return (
        "### ResNet-50 of MLPerf Training, to thousands of accelerators\n\n"
        f"{len(study.rows)} closed results on up to {max(row.num_devices for row in study.rows):,} "
        "accelerators, error of "
        f"the logarithm of their rate: forerun **{study.log_error('predicted'):.2f}**, batch of each device alone "
        f"{study.log_error('batch_only'):.2f}, linear scaling {study.log_error('linear'):.2f}.\n"
    )
