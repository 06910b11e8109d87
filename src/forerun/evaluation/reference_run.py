"""The whole evaluation on the public tables: stages that are kept, the page, and the shipped weights.

A finished stage is kept in the cache folder under the settings it was made with, so that an interrupted run
goes on where it stopped and the weights can be fitted from the same studies that the page prints.
"""

from __future__ import annotations

import datetime
import hashlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from forerun.costs.op_weights import OpTimeWeights, load_weights, save_weights, shipped_weights_path
from forerun.evaluation.accuracy_page import AccuracyPage
from forerun.evaluation.baseline_study import baseline_study
from forerun.evaluation.batch_study import batch_study, system_c_study
from forerun.evaluation.choice_sets import outside_rates
from forerun.evaluation.choice_study import (
    all_choices,
    choice_section,
    lambda_study,
    noise_words,
    torchvision_study,
)
from forerun.evaluation.composition_study import published_compositions
from forerun.evaluation.corpus import Measured, print_progress
from forerun.evaluation.energy_study import (
    ENERGY_STUDY_VERSION,
    EnergyResult,
    energy_section,
    energy_study,
)
from forerun.evaluation.energy_table import energy_rows
from forerun.evaluation.forecast_section import ForecastFigures
from forerun.evaluation.forecast_study import FORECAST_STUDY_VERSION, forecast_study
from forerun.evaluation.interval_laws import fit_law
from forerun.evaluation.layer_study import layer_study
from forerun.evaluation.memory_study import bracket_study, transformer_fit_study
from forerun.evaluation.op_time_fit import (
    ENSEMBLE_SETTINGS,
    as_weights,
    encode,
    fit_ensemble,
    fittable,
    provenance,
    table_of,
)
from forerun.evaluation.op_time_studies import (
    HeldOut,
    device_study,
    family_study,
    few_shot,
    joined,
    overall_scales,
)
from forerun.evaluation.operator_tables import OperatorTable, read_operator_tables
from forerun.evaluation.own_curves import own_curves
from forerun.evaluation.own_records import own_records_digest
from forerun.evaluation.own_records_page import own_records_section
from forerun.evaluation.reference_tables import ReferenceSteps, read_reference_steps, require_reference_folder
from forerun.evaluation.runtime_study import RuntimeRow, runtime_study, tracker_study
from forerun.evaluation.scaling_page import scaling_digest, scaling_section
from forerun.evaluation.schedule_study import schedule_study
from forerun.evaluation.stack_study import stack_markdown, stack_study
from forerun.evaluation.tuning_page import tuning_section
from forerun.prediction.estimate import Provenance
from forerun.records.reference import read_timm_train
from forerun.records.reference_transformers import read_neusight_e2e
from forerun.regressors.op_fit import FitSettings
from forerun.tracing.trace import TRACE_VERSION, cache_folder

__all__ = ["fit_shipped_weights", "forecast_figures", "run_reference"]

STUDY_VERSION = 7
"""Raised whenever a study changes what it computes; kept stages of other versions are not used."""

_Result = TypeVar("_Result")

STUDY_SETTINGS = tuple(FitSettings(seed=seed, num_iterations=3000) for seed in range(2))
DEVICE_STUDY_SETTINGS = tuple(FitSettings(seed=seed, num_iterations=2200) for seed in range(2))

STUDIED_DEVICES = (
    "a100-sxm4-40gb",
    "gtx-1080-ti",
    "titan-v",
    "rtx-5090",
    "rtx-3090",
    "p100-pcie-16gb",
    "rtx-2080-ti",
    "a100-pcie-40gb",
    "titan-rtx",
    "rtx-4090",
    "rtx-2060-max-q",
    "v100-pcie-32gb",
    "v100-sxm2-16gb",
    "t4",
    "rtx-pro-6000-max-q",
    "p4",
    "a100-pcie-80gb",
)
"""Devices with more than ResNet-50 rows; each is held out of one fit."""


def run_reference(quick: bool = False) -> AccuracyPage:
    """Runs every study, or takes up those that are done, and returns the page of figures.

    Args:
        quick: A sample of the rows and short fits; for checking that everything runs, not for quoting.

    Raises:
        RecordError: The public tables were not found.
    """
    folder = require_reference_folder()
    steps = _steps(folder, quick)
    families = _family_stage(steps, quick)
    devices = _device_stage(steps, quick)
    train = read_timm_train(folder)
    if quick:
        # Neighbours in the table are the small models, which never ran out of memory.
        train = train[:: len(train) // 40]
    brackets = _kept("brackets", quick, lambda: bracket_study(train, print_progress("memory")))
    return AccuracyPage(
        date=datetime.date.today().isoformat(),
        quick=quick,
        num_steps=len(steps.steps),
        skipped=steps.skipped,
        families=families,
        baselines=_kept("baselines", quick, lambda: baseline_study(families.steps)),
        devices=devices,
        few_shot=few_shot(by_source(devices)),
        layers=_kept("layers", quick, lambda: layer_study(folder, num_iterations=200 if quick else 2500)),
        brackets=brackets,
        pytorch_times=_kept("pytorch times", quick, lambda: _pytorch_times(families, quick)),
        pytorch_memory=_kept(
            "pytorch memory",
            quick,
            lambda: tracker_study(brackets, 2 if quick else 4, print_progress("MemTracker")),
        ),
        transformer_verdicts=_kept("transformer memory", quick, lambda: transformer_fit_study(folder)),
        transformer_parts_s={
            row.record.row_id: (row.forward_time_s, row.backward_time_s)
            for row in read_neusight_e2e(folder)
            if row.backward_time_s is not None
        },
        forecasts=forecast_figures(folder),
        schedule=_kept("schedule", quick, lambda: schedule_study(folder, _say, quick)),
        own_records=_kept(
            f"own records {own_records_digest()}",
            quick,
            lambda: own_records_section(published_compositions(folder)),
        ),
        scaling=_kept(f"scaling {scaling_digest()}", quick, lambda: scaling_section(folder, quick)),
        stack=_kept("software stack", quick, lambda: stack_markdown(stack_study(folder))),
        choices=_choices(folder, steps, devices, quick),
        tuning=tuning_section(),
        energy=energy_section(_kept(f"energy {ENERGY_STUDY_VERSION}", quick, lambda: _energy(folder))),
    )


def forecast_figures(folder: Path, save: Path | None = None) -> ForecastFigures:
    """Studies of learning curves; a minute, so that they need no quick form.

    Args:
        folder: Where the public tables are.
        save: File for the figures that come with the package; the study is then made anew.
    """
    stage = f"forecasts {FORECAST_STUDY_VERSION}"
    if save is not None:
        _stage_path(stage, False).unlink(missing_ok=True)
    return ForecastFigures(
        curves=_kept(stage, False, lambda: forecast_study(folder, print_progress("curves"), save)),
        batches=batch_study(folder),
        system_c=system_c_study(),
        own=own_curves(),
    )


def fit_shipped_weights(out: Path, quick: bool = False) -> None:
    """Fits the ensemble to all rows; interval laws and calibration scales come from the held-out studies."""
    steps = _steps(require_reference_folder(), quick)
    families, devices = _family_stage(steps, quick), _device_stage(steps, quick)
    settings = _shortened(ENSEMBLE_SETTINGS, quick)
    measured = [step for step, good in zip(steps.steps, fittable(steps.steps), strict=True) if good]
    operators = _operators()
    weights = _kept("ensemble", quick, partial(_fit_all, measured, operators, settings))
    sources = by_source(devices)
    apart = joined(list(sources.values()))
    groups = [name for name, held in sources.items() for _ in held.steps]
    laws = {
        Provenance.INTERPOLATED: fit_law(families.residuals, families.spread, families.fold.tolist()),
        Provenance.DATASHEET_ONLY: fit_law(apart.residuals, apart.spread, groups),
    }
    notes = provenance(
        measured,
        operators,
        settings,
        {str(tier): asdict(law) for tier, law in laws.items()},
        overall_scales(sources),
    )
    save_weights(replace(weights, provenance=notes), out)


def _operators() -> list[OperatorTable]:
    return _kept("operators", False, lambda: read_operator_tables(require_reference_folder()))


def _fit_all(
    measured: list[Measured], operators: list[OperatorTable], settings: tuple[FitSettings, ...]
) -> OpTimeWeights:
    encoded = encode(measured, operators)
    return as_weights(fit_ensemble(encoded, np.arange(len(encoded)), settings), encoded.systems, {})


def by_source(devices: dict[str, HeldOut]) -> dict[str, HeldOut]:
    """Held-out rows by device, table and phase: different machines, although the device has one name."""
    found: dict[str, HeldOut] = {}
    for device, held in devices.items():
        keys = np.asarray([f"{device}, {_source_name(step)}" for step in held.steps])
        for key in dict.fromkeys(keys.tolist()):
            found[key] = held.take(np.flatnonzero(keys == key))
    return found


def _source_name(step: Measured) -> str:
    return f"{table_of(step)} {step.record.phase}"


def _steps(folder: Path, quick: bool) -> ReferenceSteps:
    return _kept("steps", quick, lambda: read_reference_steps(folder, print_progress("traces"), quick))


def _shortened(settings: tuple[FitSettings, ...], quick: bool) -> tuple[FitSettings, ...]:
    return tuple(replace(s, num_iterations=150) for s in settings[:1]) if quick else settings


def _family_stage(steps: ReferenceSteps, quick: bool) -> HeldOut:
    tested = [i for i, step in enumerate(steps.steps) if step.record.source == "timm_train"]
    settings = _shortened(STUDY_SETTINGS, quick)
    return _kept(
        "families",
        quick,
        lambda: family_study(steps.steps, tested, settings, _say, operators=_operators()),
    )


def _device_stage(steps: ReferenceSteps, quick: bool) -> dict[str, HeldOut]:
    studied = STUDIED_DEVICES[:2] if quick else STUDIED_DEVICES
    settings = _shortened(DEVICE_STUDY_SETTINGS, quick)
    found: dict[str, HeldOut] = {}
    for device in studied:
        study = partial(device_study, steps.steps, [device], settings, _say, _operators())
        found |= _kept(f"device {device}", quick, study)
    return found


def _pytorch_times(families: HeldOut, quick: bool) -> list[RuntimeRow]:
    weights = load_weights(shipped_weights_path())
    return runtime_study(families, weights, 3 if quick else 12, print_progress("RuntimeEstimator"))


def _choices(folder: Path, steps: ReferenceSteps, devices: dict[str, HeldOut], quick: bool) -> str:
    settings = _shortened(DEVICE_STUDY_SETTINGS, quick)
    networks = _kept(
        "choice torchvision families", quick, lambda: torchvision_study(steps.steps, settings, _say)
    )
    others = _kept("choice lambda", quick, lambda: lambda_study(steps.steps, settings, _say))
    outside = _kept(
        "choice outside", quick, lambda: outside_rates(folder, load_weights(shipped_weights_path()))
    )
    results = all_choices(networks, [*devices.values(), others], outside)
    return choice_section(results, noise_words(networks))


def _energy(folder: Path) -> EnergyResult:
    return energy_study(energy_rows(folder, load_weights(shipped_weights_path())))


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _kept(stage: str, quick: bool, make: Callable[[], _Result]) -> _Result:
    """The result of a stage, made if it is not in the cache folder yet."""
    path = _stage_path(stage, quick)
    if path.exists():
        # The user's own cache, written by this program: nothing else is ever read by pickle.
        with path.open("rb") as file:
            found: _Result = pickle.load(file)
        return found
    result = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_suffix(".partial")
    with partial_path.open("wb") as file:
        pickle.dump(result, file)
    partial_path.replace(path)
    return result


def _stage_path(stage: str, quick: bool) -> Path:
    key = repr((stage, quick, STUDY_VERSION, TRACE_VERSION, STUDY_SETTINGS, DEVICE_STUDY_SETTINGS))
    name = f"{stage.replace(' ', '-')}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pickle"
    return cache_folder() / "studies" / name
