"""forerun's own measurements, the accuracy of regressors, calibration and composition on them, and tuned scripts.

Each folder of ``studies/own/data`` is one machine: ``device.toml`` describes it, the Parquet files are records as
``forerun measure`` and ``forerun calibrate`` wrote them, with every repetition and all circumstances:

- ``grid``: system A's 18 configurations, on two or more occasions;
- ``layers``: single layers whose sizes fill the space;
- ``calibration``: what ``forerun calibrate --minutes 3`` measured;
- ``unseen``: whole models that the calibration did not measure;
- ``composition``: networks, each of their layers alone, and calls without work.

Compares the sum of layers with the whole network: own records, and published ones of a P100.

Published: the layers of two small networks timed one by one, and Keras training runs of the networks
(github.com/profnote/ml-performance-prediction, tables ``iit_layers`` and ``iit_e2e``).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from forerun.adapters.classics.composition import (
    Composition,
    CompositionJobs,
    HostCosts,
    composition_jobs,
    host_costs,
    measured_compositions,
    overlapped_step_time_s,
)
from forerun.adapters.classics.layer_table import measured_layer_table
from forerun.adapters.classics.regressor_fit import (
    WHOLE_NETWORKS,
    fit_layer_regressor,
    fit_step_regressor,
    step_table,
)
from forerun.base.errors import RecordError
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.evidence.fit import cost_model_result
from forerun.evidence.fitting.device_calibration import (
    calibrate,
    corrected_predictions,
    fitted_weights,
    log_predictions,
)
from forerun.evidence.fitting.evaluation import ErrorMetrics, configuration_of, configuration_splits, errors
from forerun.evidence.fitting.measured_steps import DeviceSample, device_samples
from forerun.evidence.records.measurement import JobKind, Measurement
from forerun.evidence.records.reading import import_measurements
from forerun.evidence.records.step_record import step_records
from forerun.question.devices.device import Device
from forerun.question.devices.rows import load_device_file
from forerun.question.model import ModelRequest
from forerun.script.compare import PairedRatio, paired_ratio
from studies.markdown import error_cells, markdown_table
from studies.tables.public import public_table, require_reference_folder

_DATA = Path(__file__).parent / "data"
_GRID_MODELS = ("op", "grey-box", "ann", "linear", "boosting")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridStudy:
    """System A's grid on one machine, each configuration predicted without it.

    Attributes:
        metrics: Errors of step times by regressor [s].
        num_configurations: Size of the grid.
        repeat_noise: Median of |t1 / t2 - 1| over the configurations and pairs of occasions.
        repeat_r2: R2 of an earlier occasion taken as the prediction of a later one.
    """

    metrics: Mapping[str, ErrorMetrics]
    num_configurations: int
    repeat_noise: float
    repeat_r2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationStudy:
    """Models that a calibration did not measure.

    Attributes:
        models: Names, one per row.
        batch_sizes: Samples of a step, one per row.
        measured_s, before_s, after_s: Steps as measured (median of the occasions), by the shipped weights, and
            calibrated [s].
        noise: Half the difference of the occasions over their median, or, of one occasion, half its 95 % interval.
    """

    models: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    measured_s: tuple[float, ...]
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    noise: tuple[float, ...]

    @property
    def before(self) -> ErrorMetrics:
        """Errors of the shipped weights."""
        return errors(np.asarray(self.before_s), np.asarray(self.measured_s))

    @property
    def after(self) -> ErrorMetrics:
        """Errors after calibration."""
        return errors(np.asarray(self.after_s), np.asarray(self.measured_s))


def own_record_folders() -> list[Path]:
    """The machines whose records are kept here."""
    return sorted(path.parent for path in _DATA.glob("*/device.toml"))


def own_records_digest() -> str:
    """Sixteen hexadecimal digits that change with the records."""
    digest = hashlib.sha256()
    for folder in own_record_folders():
        for path in sorted(folder.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def own_device(folder: Path) -> Device:
    """The machine of a folder."""
    return load_device_file(folder / "device.toml")


def own_measurements(folder: Path, name: str) -> list[Measurement]:
    """The records of one campaign.

    Raises:
        RecordError: There is no such file, or it is damaged.
    """
    return list(import_measurements(folder / f"{name}.parquet"))


def grid_study(folder: Path, kinds: Sequence[str] = _GRID_MODELS) -> GridStudy:
    """Leave one configuration out, with all its occasions.

    Args:
        folder: The machine.
        kinds: Regressors to compare.
    """
    measured = [m for m in own_measurements(folder, "grid") if m.kind is JobKind.TRAINING]
    records = list(step_records(measured))
    table = step_table(records, own_device(folder))
    metrics: dict[str, ErrorMetrics] = {}
    if "op" in kinds:
        metrics |= _op_level(folder, measured)
    for kind in kinds:
        if kind != "op":
            metrics |= fit_step_regressor(kind, table, [folder.name]).metrics
    times: dict[str, list[float]] = defaultdict(list)
    for record in records:
        times[configuration_of(record)].append(record.step_time_s)
    pairs = np.asarray([pair for found in times.values() for pair in combinations(found, 2)])
    return GridStudy(
        metrics=metrics,
        num_configurations=len(times),
        repeat_noise=float(np.median(np.abs(pairs[:, 0] / pairs[:, 1] - 1))),
        repeat_r2=errors(pairs[:, 0], pairs[:, 1]).r2 or 0.0,
    )


def _op_level(folder: Path, measured: Sequence[Measurement]) -> dict[str, ErrorMetrics]:
    """The op-level model by its datasheet, by the grid, and refined on a calibration without the grid's family."""
    device, start = own_device(folder), load_weights(shipped_weights_path())
    steps, notes = device_samples(measured, device)
    fitted = cost_model_result(calibrate(steps, device, start), start, [folder.name], notes)
    families = {step.measurement.family for step in steps}
    rest = [m for m in own_measurements(folder, "calibration") if m.family not in families]
    refined = fitted_weights(device_samples(rest, device)[0], start)
    actual = np.asarray([step.step_time_s for step in steps])
    splits = configuration_splits([configuration_of(r) for r in step_records(measured)])
    return {
        "op, calibrated and fitted": errors(corrected_predictions(steps, actual, refined, splits), actual),
        "op, calibrated": errors(np.exp(log_predictions(steps, refined)), actual),
        **fitted.metrics,
    }


def layer_errors(folder: Path) -> Mapping[str, ErrorMetrics]:
    """Errors on layers that took no part in the fit of the layer network, and of a linear baseline."""
    table = measured_layer_table(own_measurements(folder, "layers"), own_device(folder))
    return fit_layer_regressor(table, [folder.name]).metrics


def calibration_study(folder: Path) -> CalibrationStudy:
    """Calibrates on the records of a calibration and predicts models that are not among them.

    Raises:
        RecordError: A model is in both.
    """
    device, start = own_device(folder), load_weights(shipped_weights_path())
    seen, _ = device_samples(own_measurements(folder, "calibration"), device)
    wanted = [m for m in own_measurements(folder, "unseen") if m.family != "anchor"]
    unseen, _ = device_samples(wanted, device)
    if both := {s.measurement.subject for s in seen} & {s.measurement.subject for s in unseen}:
        raise RecordError(
            f"{folder.name}: expected models that the calibration did not see, got {sorted(both)}"
        )
    fitted = fitted_weights(seen, start)
    times: dict[tuple[str, int], list[DeviceSample]] = defaultdict(list)
    for sample in unseen:
        key = (sample.measurement.subject, sample.point.setup.batch_size_per_device)
        times[key].append(sample)
    rows = [found[0] for found in times.values()]
    return CalibrationStudy(
        models=tuple(name for name, _ in times),
        batch_sizes=tuple(batch_size for _, batch_size in times),
        measured_s=tuple(float(np.median([s.step_time_s for s in found])) for found in times.values()),
        before_s=tuple(np.exp(log_predictions(rows, start)).tolist()),
        after_s=tuple(np.exp(log_predictions(rows, fitted)).tolist()),
        noise=tuple(map(_noise, times.values())),
    )


def _noise(samples: Sequence[DeviceSample]) -> float:
    if len(samples) == 1:
        return samples[0].relative_noise
    found = [sample.step_time_s for sample in samples]
    return float((max(found) - min(found)) / 2 / np.median(found))


def composition_rows(folder: Path) -> list[Composition]:
    """Every network of the composition records with its layers, occasion by occasion."""
    by_occasion: dict[str, list[Measurement]] = defaultdict(list)
    for m in own_measurements(folder, "composition"):
        by_occasion[m.circumstances.occasion].append(m)
    rows = []
    for measurements in by_occasion.values():
        networks = _networks(measurements)
        rows += measured_compositions(networks, measurements, overlaps=False)
    return rows


def _networks(measurements: Sequence[Measurement]) -> list[CompositionJobs]:
    """The networks whose own step is among the measurements; chains without work and anchors do not count."""
    found = []
    for m in measurements:
        asked = m.parameters
        if m.kind is not JobKind.STEP or m.family == "anchor" or asked.get("input_shape") == "1x1x1":
            continue
        size = asked.get("image_size")
        found.append(
            composition_jobs(
                ModelRequest(model=m.subject, image_size=None if size is None else int(float(str(size)))),
                int(float(str(asked["batch_size"]))),
                optimizer=str(asked["optimizer"]),
                precision=str(asked["precision"]),
            )
        )
    return found


_LAYERS_WITHOUT_WORK = ("mnist_cnn/fc2", "cifar10_cnn/fc3", "cifar10_cnn/fc4")
"""Dense layers of at most 33,000 weights: under 1 us of a P100, so their time alone is that of a call."""


def recorded_compositions() -> dict[str, list[Composition]]:
    """Networks and their layers, by machine: from the own records and, if they are there, the public tables."""
    panels = {
        f"{own_device(folder).title}, PyTorch": composition_rows(folder) for folder in own_record_folders()
    }
    with suppress(RecordError):  # without the public tables the own records stand on their own
        panels["P100, Keras (published)"] = published_compositions(require_reference_folder())
    return panels


def published_compositions(folder: Path) -> list[Composition]:
    """The two networks of the P100 tables at eight batch sizes each.

    The layers were timed in another loop than the networks, so c and h cannot come from them: they are solved from the
    steps of the two networks at the smallest batch, whose work hardly shows. The other fourteen steps are predicted.

    Args:
        folder: Folder of the public tables.
    """
    runs = public_table(folder, "iit_e2e")
    runs = runs[runs["sum_of_measured_layers_ms"].notna() & (runs["n_gpus"] == 1)]
    layers = public_table(folder, "iit_layers")
    layers = layers[layers["model_layer"].notna() & (layers["n_gpus"] == 1)]
    cases: dict[tuple[str, int], tuple[list[float], float]] = {}
    for run in runs.to_dict("records"):
        name, batch_size = str(run["model"]), int(run["batch_size_per_gpu"])
        chosen = layers["model_layer"].str.startswith(f"{name}/") & (layers["batch_size"] == batch_size)
        times_ms = layers.loc[chosen, "time_ms_median"]
        timed = [float(time_ms) / 1e3 for time_ms in times_ms]
        cases[name, batch_size] = timed, float(run["time_ms_step"]) / 1e3
    without_work = layers["model_layer"].isin(_LAYERS_WITHOUT_WORK)
    alone_s = float(layers.loc[without_work, "time_ms_median"].median()) / 1e3
    costs = _solved_costs(alone_s, cases)
    return [
        Composition(
            network=name.replace("_", "-"),
            batch_size=batch_size,
            num_layers=len(timed),
            sum_of_layers_s=sum(timed),
            composed_s=overlapped_step_time_s(timed, costs),
            measured_s=measured_s,
        )
        for (name, batch_size), (timed, measured_s) in sorted(cases.items())
    ]


def _solved_costs(
    alone_s: float, cases: Mapping[tuple[str, int], tuple[Sequence[float], float]]
) -> HostCosts:
    """Costs of calls from the smallest batch of two networks."""
    smallest: dict[str, int] = {}
    for name, batch_size in cases:
        smallest[name] = min(batch_size, smallest.get(name, batch_size))
    steps = sorted((len(layers), step_s) for layers, step_s in (cases[key] for key in smallest.items()))
    (few, few_s), (many, many_s) = steps[0], steps[-1]
    return host_costs(alone_s, (few, many), (few_s, many_s))


_TITLES = {
    "op, calibrated and fitted": "**op-level model, calibrated, and offsets from the other configurations**",
    "op, calibrated": "op-level model, calibrated: no row of the grid",
    "op": "op-level model, offsets from the other configurations",
    "op, nothing measured": "op-level model, datasheet only",
    "grey-box": "grey box: op-level model, datasheet only, with three terms fitted to the other configurations",
    "ann": "dense network of system A",
    "linear": "line in FLOPs",
    "linear on FLOPs": "line in FLOPs",
    "boosting": "gradient boosting on whole-model sums",
}


def own_records_section(published: Sequence[Composition]) -> str:
    """Every machine whose records are shipped.

    Args:
        published: Compositions of the public tables, to stand beside our own.
    """
    parts = ["## Measured by forerun itself\n"]
    compositions = {}
    for folder in own_record_folders():
        parts += _machine(folder)
        compositions[f"{own_device(folder).title}, PyTorch"] = composition_rows(folder)
    parts.append(_compositions({**compositions, "P100, Keras, published": published}))
    return "\n".join(parts)


def _machine(folder: Path) -> list[str]:
    device = own_device(folder)
    return [
        f"{device.title} ([records](../studies/own/data/{folder.name})).\n",
        _grid(grid_study(folder)),
        _layers(layer_errors(folder)),
        _calibration(calibration_study(folder)),
    ]


def _grid(study: GridStudy) -> str:
    rows = [
        (
            f"{_TITLES[kind := name.removesuffix(WHOLE_NETWORKS)]}{name.removeprefix(kind)}",
            *error_cells(found),
            "-" if found.r2 is None else f"{found.r2:.4f}",
            f"{1e3 * found.mae:.1f}",
            f"{1e3 * found.rmse:.1f}",
        )
        for name, found in study.metrics.items()
        if not name.startswith("linear on FLOPs")
    ]
    return (
        "### System A's grid\n\n"
        f"Two occasions differ by {100 * study.repeat_noise:.1f} % (R2 {study.repeat_r2:.4f}); MAE and RMSE in ms.\n\n"
        + markdown_table(("predictor", "rows", "MAPE", "median", "p90", "R2", "MAE", "RMSE"), rows)
    )


def _layers(found: Mapping[str, ErrorMetrics]) -> str:
    rows = [
        ("**layer network**" if name == "layers" else "line in FLOPs", *error_cells(metrics))
        for name, metrics in found.items()
    ]
    return "### Layers never seen\n\nA tenth held out.\n\n" + markdown_table(
        ("predictor", "rows", "MAPE", "median", "p90"), rows
    )


def _calibration(study: CalibrationStudy) -> str:
    return (
        f"### Three minutes of calibration\n\n{len(set(study.models))} models measured afterwards: MAPE "
        f"{100 * study.before.mape:.0f} % from the datasheet, **{100 * study.after.mape:.1f} %** calibrated.\n"
    )


def _compositions(found: Mapping[str, Sequence[Composition]]) -> str:
    rows = []
    for title, compositions in found.items():
        means = (
            float(np.mean([getattr(row, name) for row in compositions]))
            for name in ("overshoot_before", "overshoot_after")
        )
        rows.append((title, str(len(compositions)), *(f"{100 * mean:+.1f} %" for mean in means)))
    return (
        "### Sum of layers against the network\n\nMean overshoot ([why](methods/composition.md)).\n\n"
        + markdown_table(("networks of", "steps", "sum of layers", "composed"), rows)
    )


def tuning_results_folder() -> Path:
    """Folder of the results that come with the package."""
    return Path(__file__).parent / "tuning_results"


def tuning_section(folder: Path | None = None) -> str:
    """All tables whose results are there; nothing without any.

    Each file was written with ``--out FILE`` by one of ``benchmarks``: ``tune_before_after.py``,
    ``profile_overhead.py``, ``tune_memory.py`` and ``tune_priors.py``.

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


def _before_after(found: Mapping[str, Any]) -> str:
    before, after, machine = (found[name] for name in ("before", "after", "machine"))
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
        f"{found['date']}, {machine['processor']}, {machine['num_usable_cores']:g} usable cores; "
        f"{found['num_images']:,} JPEGs, batch 8; `forerun tune --budget {found['budget']}`, "
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
