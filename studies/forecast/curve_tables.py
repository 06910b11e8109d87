"""The public tables of learning curves as whole runs.

Six tables, see the method page for their sources. Jobs are networks on a dataset by one team: batch sizes, seeds and
machines of one job are its runs. Origins are families of logs: one repository, or one tool whose logs many
repositories keep (YOLO's ``results.csv``, ``trainer_state.json``, Keras' logs). What is judged on an origin has seen
none of its runs.

Schedules of ``curves`` are in the table; those of ``adaptdl_validation_curves`` are from the scripts of the same
repository (petuum/adaptdl, benchmark/models): cifar10 x0.0133 over 100 epochs, imagenet x0.1 every 30, deepspeech2
/1.1 each epoch, yolov3 a cosine to 1 % after two epochs of warm-up. Elsewhere they are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forerun.jobs.forecasting.backtest import StoredRun
from forerun.jobs.forecasting.curve import Curve, Floats, error_scale, metric_kind
from forerun.jobs.forecasting.schedule import parse_schedule
from studies.tables.public import public_table

CURVE_TABLES = (
    "adaptdl_validation_curves",
    "dawnbench",
    "learning_curves",
    "mlperf_eval_curves",
    "curves/curves",
    "trials/algoperf",
)

_SCHEDULES = {
    "cifar10": "exponential:0.95772",  # 0.0133 ** (1 / 100)
    "imagenet": "step:30,60x0.1",
    "deepspeech2": "exponential:0.90909",
    "yolov3": "cosine:epochs=50,min=0.01,warmup=2",
}
_ADAPTDL_METRICS = {
    "cifar10": ("accuracy", True),
    "imagenet": ("accuracy", True),
    "deepspeech2": ("wer", False),
    "yolov3": ("loss", False),
}
_FEWEST_POINTS = 9
_RUNS_OF_MLPERF = 40
_ONE_TEAM = "dawn_"  # entries of the benchmark's own authors: one job per network


def read_all_curves(folder: Path) -> list[StoredRun]:
    """Runs of all tables."""
    readers: tuple[Callable[[Path], list[StoredRun]], ...] = (
        read_adaptdl_curves,
        _dawnbench,
        _learning_curves,
        _mlperf,
        read_new_curves,
        read_trials,
    )
    return [run for read in readers for run in read(folder)]


def _run(
    table: str,
    job: str,
    name: str,
    epochs: Floats,
    values: Floats,
    is_rising: bool,
    rates: Floats | None = None,
    *,
    metric: str = "accuracy",
    origin: str | None = None,
    training_losses: Floats | None = None,
) -> StoredRun:
    kind = metric_kind(metric, is_rising)
    scale = error_scale(values, is_rising, kind)
    return StoredRun(
        table=table,
        origin=origin or table,
        job=f"{table}: {job}",
        name=name,
        epochs=epochs,
        errors=scale.errors(values),
        rates=rates,
        kind=kind,
        metric=metric,
        span=scale.span,
        training_losses=training_losses,
    )


def read_adaptdl_curves(folder: Path) -> list[StoredRun]:
    """Validation curves of the Pollux artifact: four jobs with 26 runs; those of 2 and 10 epochs are too short."""
    table = public_table(folder, "adaptdl_validation_curves")
    found = []
    for (job, batch), rows in table.groupby(["application", "global_batch_size"]):
        if job not in _SCHEDULES:
            continue
        rows = rows.sort_values("epoch")
        epochs = np.arange(1.0, len(rows) + 1)
        values = rows["validation_metric"].to_numpy(float)
        metric, is_rising = _ADAPTDL_METRICS[str(job)]
        found.append(
            _run(
                "adaptdl_validation_curves",
                str(job),
                f"{job}, batch {batch}",
                epochs,
                values,
                is_rising,
                parse_schedule(_SCHEDULES[str(job)]).rates(epochs),
                metric=metric,
            )
        )
    return found


def _dawnbench(folder: Path) -> list[StoredRun]:
    table = public_table(folder, "dawnbench")
    metrics = {"CIFAR10": "top1_accuracy_pct", "ImageNet": "top5_accuracy_pct", "SQuAD": "f1"}
    found = []
    for (task, entry), rows in table.groupby(["task", "entry"]):
        rows = rows.sort_values("epoch")
        values = rows[metrics[str(task)]].to_numpy(float) / (1 if task == "SQuAD" else 100)
        team = str(entry).split("_")[0]
        if str(entry).startswith(_ONE_TEAM):
            team = "_".join(str(entry).split("_")[:2])
        if len(rows) >= _FEWEST_POINTS:
            epochs = np.arange(1.0, len(rows) + 1)
            found.append(_run("dawnbench", f"{task} {team}", str(entry), epochs, values, True))
    return found


def _learning_curves(folder: Path) -> list[StoredRun]:
    """ResNets of tornadomeet; the language models of this table are in ``curves`` too, with their schedules."""
    table = public_table(folder, "learning_curves")
    table = table[table["source"].str.startswith("tornadomeet")]
    found = []
    for (dataset, name), rows in table.groupby(["dataset", "run"]):
        values = rows.sort_values("epoch")["val_top1"].to_numpy(float)
        epochs = np.arange(1.0, len(values) + 1)
        found.append(_run("learning_curves", f"tornadomeet {dataset}", str(name), epochs, values, True))
    return found


def read_new_curves(folder: Path) -> list[StoredRun]:
    """Logs from public repositories: ten families of them, each an origin."""
    table = public_table(folder, "curves/curves")
    found = []
    for row in table.itertuples():
        epochs = np.asarray(row.epochs, dtype=float)
        found.append(
            _run(
                "curves/curves",
                f"{row.source} {row.job}",
                str(row.name),
                epochs,
                np.asarray(row.values, dtype=float),
                bool(row.rising),
                parse_schedule(row.schedule).rates(epochs) if isinstance(row.schedule, str) else None,
                metric=str(row.metric),
                origin=str(row.source),
            )
        )
    return found


def _mlperf(folder: Path) -> list[StoredRun]:
    """ResNet-50 on ImageNet: one job; forty of its 1,800 runs, drawn once with a fixed seed."""
    table = public_table(folder, "mlperf_eval_curves")
    rows = table[(table["benchmark"] == "resnet") & table["accuracy"].notna()]
    groups = [group for _, group in rows.groupby(["mlperf_round", "submitter", "system", "run_file"])]
    long_enough = [group for group in groups if group["epoch"].nunique() >= _FEWEST_POINTS]
    drawn = np.random.default_rng(0).choice(
        len(long_enough), min(_RUNS_OF_MLPERF, len(long_enough)), replace=False
    )
    found = []
    for index in sorted(drawn.tolist()):
        group = long_enough[index].drop_duplicates("epoch").sort_values("epoch")
        epochs = group["epoch"].to_numpy(float)
        epochs = epochs - epochs[0] + (epochs[1] - epochs[0])
        name = " ".join(str(group[c].iloc[0]) for c in ("mlperf_round", "submitter", "system", "run_file"))
        found.append(
            _run("mlperf_eval_curves", "ResNet-50", name, epochs, group["accuracy"].to_numpy(float), True)
        )
    return found


def _trials(folder: Path) -> Iterator[tuple[Any, Curve]]:
    """AlgoPerf's trials of nine evaluations or more, each with its row of the table."""
    for row in public_table(folder, "trials/algoperf").itertuples():
        values, steps = np.asarray(row.validation_metric, dtype=float), np.asarray(row.global_step, float)
        if len(values) >= _FEWEST_POINTS and np.all(np.diff(steps) > 0):
            metric = str(row.metric)
            losses = np.asarray([] if row.train_loss is None else row.train_loss, float)
            is_whole = len(losses) == len(values) and np.all(np.isfinite(losses))
            curve = Curve(
                name=str(row.source_path),
                metric=metric,
                epochs=steps,
                values=values,
                is_rising=metric not in ("loss", "wer"),
                training_losses=losses if is_whole else None,
            )
            yield row, curve


def _job_of(row: Any) -> str:
    return f"{row.workload} {row.framework} {row.submission}"


def read_trials_as_logged(folder: Path) -> dict[str, list[Curve]]:
    """AlgoPerf's trials of nine evaluations or more by job, those that end in NaN too."""
    found: dict[str, list[Curve]] = {}
    for row, curve in _trials(folder):
        found.setdefault(_job_of(row), []).append(curve)
    return found


def read_trials(folder: Path) -> list[StoredRun]:
    """Trials of AlgoPerf's submissions: the trials of one submission's search on a workload are a job.

    A run that ends in NaN, whose end is not a number to forecast, is left out.
    """
    return [
        _run(
            "trials/algoperf",
            _job_of(row),
            f"{row.leaderboard} {row.source_path}",
            curve.epochs,
            curve.values,
            curve.is_rising,
            metric=curve.metric,
            origin="algoperf",
            training_losses=curve.training_losses,
        )
        for row, curve in _trials(folder)
        if np.all(np.isfinite(curve.values))
    ]
