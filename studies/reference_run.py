"""The whole evaluation on the public tables: kept stages, the page, and the shipped weights.

A finished stage is kept in the cache folder under the settings it was made with, so that an interrupted run
goes on where it stopped and the weights can be fitted from the same studies that the page prints.
"""

from __future__ import annotations

import datetime
import hashlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from forerun.base.kept import cache_folder
from forerun.cost.time.evidence import ErrorSpreads
from forerun.cost.time.weights import load_weights, save_weights, shipped_weights_path
from forerun.evidence.fitting.measured_steps import Measured
from forerun.evidence.fitting.op_time_fit import FitSettings
from forerun.tracing.trace import TRACE_VERSION
from studies.accuracy_page import AccuracyPage
from studies.energy.study import ENERGY_STUDY_VERSION, EnergyResult, energy_rows, energy_section, energy_study
from studies.forecast.batch_study import batch_study, system_c_study
from studies.forecast.section import ForecastFigures, own_curves
from studies.forecast.study import FORECAST_STUDY_VERSION, forecast_study
from studies.keras.stack_study import stack_markdown, stack_study
from studies.layouts.study import known_networks
from studies.memory.study import bracket_study, transformer_fit_study
from studies.optime.choice_study import (
    all_choices,
    choice_section,
    lambda_study,
    noise_words,
    outside_rates,
    torchvision_study,
)
from studies.optime.evidence_study import evidence_of, fit_spreads, fit_widths, judged_rows, judged_widths
from studies.optime.fit import (
    ENSEMBLE_SETTINGS,
    fittable,
    provenance,
    source_of,
    system_of,
    with_offsets_of_architectures,
    without_bound_boards,
)
from studies.optime.runtime_study import baseline_study, layer_study, runtime_study, tracker_study
from studies.optime.studies import (
    Corpus,
    FewSteps,
    HeldOut,
    OperatorError,
    StepStudies,
    device_study,
    family_study,
    few_shot,
    overall_scales,
    predict_with,
    source_study,
)
from studies.own.records import (
    own_records_digest,
    own_records_section,
    published_compositions,
    tuning_section,
)
from studies.scaling.page import scaling_digest, scaling_section
from studies.schedule.study import schedule_study
from studies.step_sections import StepSections, ask_origins, origins_section
from studies.tables.operators import OperatorTable, read_amd_convolutions, read_operator_tables
from studies.tables.public import require_reference_folder
from studies.tables.published import read_timm_train
from studies.tables.reference_steps import ReferenceSteps, read_reference_steps
from studies.tables.transformers import read_neusight_e2e

STUDY_VERSION = 11
"""Raised whenever a study changes what it computes; kept stages of other versions are not used."""

_Result = TypeVar("_Result")
Operators = tuple[OperatorError, ...]

STUDY_SETTINGS = tuple(FitSettings(seed=seed, num_iterations=1600) for seed in range(2))
DEVICE_STUDY_SETTINGS = tuple(FitSettings(seed=seed, num_iterations=1000) for seed in range(2))

STUDIED_DEVICES = (
    "a100-sxm4-40gb", "gtx-1080-ti", "titan-v", "rtx-5090", "rtx-3090", "p100-pcie-16gb", "rtx-2080-ti",
    "a100-pcie-40gb", "titan-rtx", "rtx-4090", "rtx-2060-max-q", "v100-pcie-32gb", "v100-sxm2-16gb", "t4",
    "rtx-pro-6000-max-q", "p4", "a100-pcie-80gb",
)  # fmt: skip
"""Devices with more than ResNet-50 rows; each is held out of one fit, with every fifth beside it."""

_DEVICE_FITS = 5


STUDIED_SOURCES = (
    "timm_train",
    "timm_infer",
    "torchvision by JHLew",
    "torchvision by ryujaehun",
    "gpu_benchmarks/lambda",
    "neusight_e2e",
)
"""Who measured whole steps; each is left out of one fit."""


def run_reference(quick: bool = False) -> AccuracyPage:
    """Runs every study that is not done yet, and returns the page of figures.

    Args:
        quick: A sample of the rows and short fits; for checking that everything runs, not for quoting.

    Raises:
        RecordError: The public tables were not found.
    """
    folder = require_reference_folder()
    steps = _steps(folder, quick)
    held_out = step_studies(folder, quick)
    families, devices = held_out.families, held_out.devices
    train = read_timm_train(folder)
    if quick:
        # Neighbours in the table are the small models, which never ran out of memory.
        train = train[:: len(train) // 40]
    brackets = _kept("brackets", quick, lambda: bracket_study(train, _progress("memory")))
    return AccuracyPage(
        date=datetime.date.today().isoformat(),
        quick=quick,
        num_steps=len(steps.steps),
        skipped=steps.skipped,
        steps=step_sections(folder, quick),
        layers=_kept("layers 2", quick, lambda: layer_study(folder, num_iterations=200 if quick else 2500)),
        brackets=brackets,
        pytorch_times=_kept(
            "pytorch times 2",
            quick,
            lambda: runtime_study(families, 3 if quick else 12, _progress("RuntimeEstimator")),
        ),
        pytorch_memory=_kept(
            "pytorch memory",
            quick,
            lambda: tracker_study(brackets, 2 if quick else 4, _progress("MemTracker")),
        ),
        transformer_verdicts=_kept("transformer memory 2", quick, lambda: transformer_fit_study(folder)),
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


def step_sections(folder: Path, quick: bool = False) -> StepSections:
    """The sections on step times; stages that are not kept are made.

    Args:
        folder: Folder of the public tables.
        quick: A sample of the rows and short fits.
    """
    held_out = step_studies(folder, quick)
    rows = judged_rows(held_out)
    spreads = _spreads(folder, quick)
    return StepSections(
        rows=rows,
        half_widths=judged_widths(rows, spreads),
        constant_widths=judged_widths(rows, spreads, constant=True),
        few_shot=_few_steps(folder, quick),
        baselines=_kept("baselines", quick, lambda: baseline_study(held_out.families.steps)),
        studies=held_out,
        origins=origins_section(ask_origins(folder, _say)),
        transformer_parts_s={
            row.record.row_id: (row.forward_time_s, row.backward_time_s)
            for row in read_neusight_e2e(folder)
            if row.backward_time_s is not None
        },
    )


def forecast_figures(folder: Path, save: Path | None = None) -> ForecastFigures:
    """Studies of learning curves; a minute, so that they need no quick form.

    Args:
        folder: Folder of the public tables.
        save: File for the figures that come with the package; the study is then made anew.
    """
    stage = f"forecasts {FORECAST_STUDY_VERSION}"
    if save is not None:
        _stage_path(stage, False).unlink(missing_ok=True)
    return ForecastFigures(
        curves=_kept(stage, False, lambda: forecast_study(folder, _progress("curves"), save)),
        batches=batch_study(folder),
        system_c=system_c_study(),
        own=own_curves(),
    )


def fit_shipped_weights(out: Path, quick: bool = False) -> None:
    """Fits the ensemble to all rows."""
    folder = require_reference_folder()
    settings = _shortened(ENSEMBLE_SETTINGS, quick)
    corpus = _corpus(folder, quick)
    weights = _kept(
        "ensemble", quick, lambda: corpus.fitted_without(np.zeros(len(corpus.steps), bool), settings).weights
    )
    steps = [step for step, good in zip(corpus.steps, fittable(corpus.steps), strict=True) if good]
    weights = replace(weights, provenance=provenance(steps, corpus.operators, settings, weights))
    weights = with_offsets_of_architectures(without_bound_boards(weights), read_amd_convolutions(folder))
    save_weights(weights, out)


def fit_shipped_evidence(out: Path, quick: bool = False) -> None:
    """Fits the widths of intervals and the scales of calibrations to the held-out studies."""
    folder = require_reference_folder()
    held_out = step_studies(folder, quick)
    steps = [step for step in _steps(folder, quick).steps if fittable([step])[0]]
    others, spreads = known_networks(folder), _spreads(folder, quick)
    evidence = evidence_of(
        steps,
        [table.device for table in (*_operators(folder), *read_amd_convolutions(folder))],
        widths=fit_widths(judged_rows(held_out), spreads),
        spreads=spreads,
        scales=overall_scales(by_system(held_out.devices) | by_system(held_out.sources)),
        others=others,
    )
    out.write_text(evidence.to_json(), encoding="utf-8")


def _spreads(folder: Path, quick: bool) -> ErrorSpreads:
    """Differences between systems, with the predictions of the shipped weights, which all systems share."""

    def make() -> ErrorSpreads:
        steps = _steps(folder, quick).steps
        residuals = predict_with(load_weights(shipped_weights_path()), steps).residuals
        return fit_spreads(steps, residuals, [one.corrected[5] for one in _few_steps(folder, quick).values()])

    digest = hashlib.sha256(shipped_weights_path().read_bytes()).hexdigest()[:12]
    return _kept(f"spreads {digest}", quick, make)


def _few_steps(folder: Path, quick: bool) -> dict[str, FewSteps]:
    """Errors of every held-out system after some of its steps were measured."""

    def make() -> dict[str, FewSteps]:
        held_out = step_studies(folder, quick)
        devices, sources = by_system(held_out.devices), by_system(held_out.sources)
        prior, families = devices | sources, by_system({"families": held_out.families})
        return few_shot(devices, prior, _device_fit) | few_shot(sources | families, prior, source_of)

    return _kept("few steps", quick, make)


def by_system(held_out: dict[str, HeldOut]) -> dict[str, HeldOut]:
    """Held-out rows as a user asks for them, by the system that measured them under what was left out."""
    found: dict[str, HeldOut] = {}
    for name, held in held_out.items():
        systems = np.asarray([system_of(step) for step in held.steps])
        for system in dict.fromkeys(systems.tolist()):
            found[f"without {name}: {system}"] = held.as_asked().take(np.flatnonzero(systems == system))
    return found


def _steps(folder: Path, quick: bool) -> ReferenceSteps:
    return _kept("steps", quick, lambda: read_reference_steps(folder, _progress("traces"), quick))


def _shortened(settings: tuple[FitSettings, ...], quick: bool) -> tuple[FitSettings, ...]:
    return tuple(replace(s, num_iterations=150) for s in settings[:1]) if quick else settings


@cache
def _corpus(folder: Path, quick: bool) -> Corpus:
    found = _steps(folder, quick)
    return Corpus.of(found.steps, found.asked, _operators(folder))


def _operators(folder: Path) -> list[OperatorTable]:
    return _kept("operators", False, lambda: read_operator_tables(folder))


def _device_fit(step: Measured) -> str:
    """The fit that a step's device was left out of, or the device if it was in all."""
    name = step.device.name
    return str(STUDIED_DEVICES.index(name) % _DEVICE_FITS) if name in STUDIED_DEVICES else name


def _family_stage(folder: Path, quick: bool) -> tuple[HeldOut, Operators]:
    settings = _shortened(STUDY_SETTINGS, quick)

    def study() -> tuple[HeldOut, Operators]:
        corpus = _corpus(folder, quick)
        tested = [i for i, step in enumerate(corpus.steps) if step.record.source == "timm_train"]
        return family_study(corpus, tested, settings, _say)

    return _kept("families", quick, study)


def step_studies(folder: Path, quick: bool) -> StepStudies:
    """Families, devices and sources left out, each stage made if it is not kept."""
    families, known = _family_stage(folder, quick)
    settings = _shortened(DEVICE_STUDY_SETTINGS, quick)

    def device_stage(number: int) -> tuple[dict[str, HeldOut], Operators]:
        names = STUDIED_DEVICES[number::_DEVICE_FITS]
        _say(f"held out: {', '.join(names)}")
        return device_study(_corpus(folder, quick), names, settings)

    def source_stage(name: str) -> HeldOut:
        _say(f"held out: {name}")
        return source_study(_corpus(folder, quick), name, settings)

    numbers = range(1 if quick else _DEVICE_FITS)
    devices = [_kept(f"devices {number}", quick, partial(device_stage, number)) for number in numbers]
    sources = {
        name: _kept(f"source {name}", quick, partial(source_stage, name))
        for name in (STUDIED_SOURCES[:1] if quick else STUDIED_SOURCES)
    }
    return StepStudies(
        families=families,
        devices={name: held for found, _ in devices for name, held in found.items()},
        sources=sources,
        known_operators=known,
        other_operators=tuple(error for _, errors in devices for error in errors),
    )


def _choices(folder: Path, steps: ReferenceSteps, devices: dict[str, HeldOut], quick: bool) -> str:
    settings = _shortened(DEVICE_STUDY_SETTINGS, quick)
    networks = _kept(
        "choice torchvision families",
        quick,
        lambda: torchvision_study(_corpus(folder, quick), settings, _say),
    )
    others = _kept("choice lambda", quick, lambda: lambda_study(_corpus(folder, quick), settings, _say))
    outside = _kept(
        "choice outside", quick, lambda: outside_rates(folder, load_weights(shipped_weights_path()))
    )
    results = all_choices(networks, [*devices.values(), others], outside)
    return choice_section(results, noise_words(networks))


def _energy(folder: Path) -> EnergyResult:
    return energy_study(energy_rows(folder, load_weights(shipped_weights_path())))


def _progress(what: str) -> Callable[[int, int], None]:
    """A reporter that writes a line to stderr now and then."""

    def report(done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return report


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _kept(stage: str, quick: bool, make: Callable[[], _Result]) -> _Result:
    """The result of a stage, made if it is not in the cache folder yet."""
    path = _stage_path(stage, quick)
    if path.exists():
        # The user's own cache, written by this program: nothing else is ever read by pickle.
        with path.open("rb") as file:
            found: _Result = pickle.load(file)  # noqa: S301
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
