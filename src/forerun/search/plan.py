"""``forerun.plan``: wires models, devices, prices and limits to the planner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from pydantic import BaseModel, Field

from forerun.base.answers import fields_of
from forerun.base.errors import InvalidSetupError, RecordError, UsageError
from forerun.base.extras import plugin
from forerun.base.stages import stage
from forerun.base.tables import read_rows
from forerun.prediction.estimate_run import input_note
from forerun.prediction.models import TracedModels
from forerun.question.job import DATASETS, Dataset, Job, JobOptions
from forerun.question.model import captured_facts
from forerun.question.options import RunOptions
from forerun.question.recipes import recipe_notes
from forerun.question.run import Run, check_format, cluster_from
from forerun.question.settings import checked, declared
from forerun.question.setup import AttentionKernel, Precision
from forerun.search.assemble import make_plan
from forerun.search.choice import DEVICE_MEMORY, GOALS
from forerun.search.devices import DeviceOption, option_notes, priced_options
from forerun.search.engine import Engine, JobTerms, TargetEpochs
from forerun.search.options import DEFAULT_BATCH_SIZES, PlanOptions
from forerun.search.plan_answer import Plan
from forerun.search.search import (
    SETTINGS,
    Search,
    batch_sizes_of,
    changes_of,
    check_count,
    expand_models,
    is_open,
    own_order,
    parse_limits,
    words_of,
)
from forerun.tracing.trace import full_name

if TYPE_CHECKING:
    from forerun.search.advise import Way

_USUAL_DATASETS: Mapping[tuple[int, ...], str] = {
    (3, 32, 32): "cifar10",
    (1, 28, 28): "mnist",
    (3, 96, 96): "patchcamelyon",
    (3, 224, 224): "imagenet",
}
"""Default dataset of a question, by the shape of a sample."""


@dataclass(frozen=True, kw_only=True)
class Planned(Plan):
    """The answer of ``plan``: a plan that also says what would make its choice faster.

    Attributes:
        asked: The settings of the plan.
    """

    asked: Mapping[str, Any]

    @cached_property
    def ways_to_save(self) -> tuple[Way, ...]:
        """Changes that would make the chosen or nearest candidate faster and were not asked about.

        They are predicted when first asked for; a plan that is not ``exact`` has none.
        """
        best = self.chosen or self.nearest_miss
        if best is None or not self.asked.get("exact", True):
            return ()
        from forerun.search.advise import ways_to_save
        from forerun.search.predict import predict

        own = {
            **{name: value for name, value in self.asked.items() if name in _OF_STEPS},
            "batch_size": best.batch_size_per_device,
            "precision": best.precision,
            "layout": best.layout,
            "image_size": best.image_size,
            "num_devices": best.num_devices if best.num_devices > 1 else None,
            **best.settings,
        }
        return ways_to_save(predict(best.model, device=best.device, **own))

    def json_fields(self) -> dict[str, Any]:
        """The fields of a plan, and the ways to save."""
        found = Plan.json_fields(self) | {"ways_to_save": self.ways_to_save}
        del found["asked"]  # the question, which the other fields tell in its parts
        return found


def plan(
    models: str | Sequence[str],
    *,
    devices: str | Sequence[str],
    use_cache: bool = True,
    **options: Unpack[PlanOptions],
) -> Planned:
    """The best configuration under limits, of every combination of models, devices, batch sizes and the rest.

    Args:
        models: Specifications; keys of a family may be ranges, ``cnn:depth=2..4,base_filters=32..64``.
        devices: Catalogue names, separated by commas or as a list; ``4xt4`` is four of them, ``2x4xt4`` two nodes of
            four; ``all`` is every GPU of the catalogue, ``priced`` every device with a known price.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the plan, as in ``forerun.PlanOptions`` and ``plan --help``: the axes ``batch_sizes``,
            ``precisions``, ``layouts``, ``image_sizes`` and ``search``, the limits ``within``, the goal ``minimize``,
            and all settings of a run that its candidates share.

    Raises:
        UsageError: The question must be changed: unknown names, limits that cannot be read or contradict each other,
            an empty or too large set of candidates.
        FailureError: A model could not be built or traced, a file could not be read, or a curve allows no forecast.

    Examples:
        >>> import forerun
        >>> found = forerun.plan("cnn:depth=2", devices="t4,l4", within="cost<=1", batch_sizes=[64, 128], epochs=3)
        >>> found.num_candidates
        8
    """
    given = checked(options, PlanOptions)
    specs = expand_models(models if isinstance(models, str) else ";".join(models))
    choices = priced_options(devices if isinstance(devices, str) else ",".join(devices), given)
    traced = TracedModels(use_cache=use_cache)
    found = _answer(specs, choices, given, traced)
    wider, words = _wider(found, specs, choices, given)
    if not wider:
        return Planned(**fields_of(found), asked=given)
    given = {**given, **wider}
    found = _answer(specs, choices, given, traced)
    note = (
        f"nothing fits as asked; compared as well: {', '.join(words)} (a setting that you name, such as --recompute "
        "none, is kept)"
    )
    return Planned(**fields_of(replace(found, notes=(note, *found.notes))), asked=given)


def _answer(
    specs: Sequence[str], choices: Sequence[DeviceOption], given: Mapping[str, Any], traced: TracedModels
) -> Plan:
    """The plan of a question whose models and devices are known."""
    goal = given.get("minimize", "time")
    if goal not in GOALS:
        raise InvalidSetupError(f"a plan minimises one of {', '.join(GOALS)}, got '{goal}'")
    limits = parse_limits(given.get("within", ""))
    sizes = batch_sizes_of(given.get("batch_sizes", DEFAULT_BATCH_SIZES))
    changes = changes_of(specs, given)
    # Before the first model is traced: a set too large is refused at once.
    check_count(len(changes) * len(choices) * len(sizes))
    _check_formats(changes, choices, given.get("attention_kernel"))
    run, notes = _shared_run(traced, changes[0], choices, sizes, given)
    assert run.job is not None
    # Searched settings are combined blindly: what a model cannot have is left out, and said.
    if given.get("search"):
        changes, impossible = _possible(traced, run, changes)
        notes = (*notes, *impossible)
    needed = _epochs_to_target(given, specs, run.job.num_samples)
    terms = JobTerms(
        power_limit_w=given.get("power_limit_w"),
        co2_g_per_kwh=given.get("co2_g_per_kwh"),
        accuracies={full_name(model): value for model, value in (given.get("accuracies") or {}).items()},
        epochs_of=None if needed is None else needed.epochs,
    )
    axes = {SETTINGS: changes, "device": choices, "batch_size": sizes}
    search = Search(run=run, axes=axes, limits=limits, goal=goal)
    _check_answerable(search, terms)
    engine = Engine(search, traced, terms)
    notes = (*notes, *_input_notes(traced, run, changes), *option_notes(choices), *engine.notes)
    with stage(f"comparing {engine.num_candidates():,} candidates"):
        found = make_plan(
            engine,
            job=_job_words(run.job, given.get("dataset"), needed),
            target=None if needed is None else needed.target,
            num_points=given.get("num_points", 12),
            max_rejected=given.get("max_rejected", 1000),
            exact=given.get("exact", True),
        )
    of_target = () if needed is None else needed.notes
    return replace(
        found, notes=(*recipe_notes(run.software), *notes, *of_target, *found.notes, *_layout_notes(found))
    )


def _input_notes(models: TracedModels, run: Run, changes: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Notes on images of a dataset that are taken as resized, one a model."""
    is_known = run.job is not None and run.job.image_size is not None
    for model, change in {change["model"]: change for change in changes if is_known}.items():
        candidate = run.with_(**change)
        note = input_note(candidate, models.of(candidate, candidate.setup).graph.input_shape)
        if note is not None and candidate.model.image_size is None:
            yield f"{full_name(model)}: {note}"


def _wider(
    found: Plan, specs: Sequence[str], choices: Sequence[DeviceOption], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Axes that save memory, and their words, where no candidate fits its device and the user left them open."""
    over = {limit: count for limit, count, _ in found.num_rejected_by_limit}
    if over.get(DEVICE_MEMORY) != found.num_candidates:
        return {}, []
    searched = words_of(given.get("search") or ())
    shares = given.get("parallel") is None and any(option.num_devices > 1 for option in choices)
    added = [
        name
        for name in ("recompute", *(["strategy"] if shares else []))
        if given.get(name) is None and not {"all", name} & {*searched} and is_open(name, specs)
    ]
    wider: dict[str, Any] = {"search": (*searched, *added)} if added else {}
    if given.get("batch_sizes") is not None:
        return wider, added
    return wider | {"batch_sizes": f"1,2,4,{DEFAULT_BATCH_SIZES}"}, ["batch sizes from 1", *added]


def runs_to_trace(models: Sequence[str], given: Mapping[str, Any]) -> Iterator[Run]:
    """One candidate of a plan for each trace that it needs; of the devices a trace depends on their layout alone.

    Args:
        models: Its models.
        given: Its settings with its devices, checked.
    """
    changes = changes_of(expand_models(";".join(models)), given)
    choices = priced_options(",".join(given["devices"]), given)
    _check_formats(changes, choices, given.get("attention_kernel"))
    kept, clusters = _OF_TRACES, {False: cluster_from(choices[0].device, {})}
    if given.get("parallel") or given.get("strategy"):
        kept, clusters = _OF_RUNS, {each.num_devices > 1: each.cluster for each in choices}
    for cluster in clusters.values():
        shared = {name: value for name, value in given.items() if name in kept}
        first = {name: value for name, value in changes[0].items() if name != "strategy"}
        run = Run.of(device=cluster, **shared | first)  # the first model decides what nobody said
        yield from Search(run=run, axes={SETTINGS: changes}).runs()


def _check_formats(
    changes: Sequence[Mapping[str, Any]], options: Sequence[DeviceOption], attention: str | None
) -> None:
    """Refuses a precision or kernel that one of the devices does not have."""
    kernel = AttentionKernel(attention or AttentionKernel.PLAIN)
    for option, precision in product(options, dict.fromkeys(change["precision"] for change in changes)):
        check_format(option.device, Precision(precision), kernel)


def _layout_notes(plan: Plan) -> tuple[str, ...]:
    """Note on dividing a model where no candidate's device can hold a copy of it."""
    nearest = plan.nearest_miss
    if nearest is None or all(broken.limit != DEVICE_MEMORY for broken in nearest.broken):
        return ()
    count = max(nearest.num_devices, 8)
    return (
        "no device holds its share of these: plan smaller batches, or divide the model by "
        f"forerun layouts {nearest.model} --on {count}x{nearest.device}",
    )


def _epochs_to_target(
    given: Mapping[str, Any], models: Sequence[str], num_samples: int
) -> TargetEpochs | None:
    """Epochs to the target of a plan, by whoever forecasts learning curves; None without a target."""
    question = {name: given[name] for name in _OF_TARGETS if name in given}
    if not question:
        return None
    forecaster = plugin("forerun.targets", "curves")
    if forecaster is None:
        raise UsageError(
            "--target expects forecasts of learning curves, but no installed package has the entry point 'curves' of "
            "'forerun.targets'; install all of forerun, or give --epochs instead of a target"
        )
    found: TargetEpochs = forecaster(question, models, num_samples, given.get("epochs"))
    return found


_OF_TARGETS = ("target", "curve", "curve_batch_size", "schedule", "history", "batches", "critical_batch_size")
_OF_TRACES = frozenset(
    name for name, item in declared(RunOptions).items() if item.setting.group in ("model", "run", "saving")
)
_OF_RUNS = frozenset(declared(RunOptions)) - {
    "num_devices",
    "num_nodes",
    "intra",
    "inter",
    "price_usd_per_hour",
}
_OF_STEPS = _OF_RUNS - declared(JobOptions).keys()
"""Settings that change a step: a job does not, and its dataset may be one that the plan assumed."""


def _possible(
    models: TracedModels, run: Run, changes: Sequence[dict[str, Any]]
) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """The changes of a search that their models can have, and notes on the others.

    Raises:
        UsageError: There is none.
    """
    found: list[dict[str, Any]] = []
    reasons: dict[str, None] = {}
    last: UsageError | None = None
    for change in changes:
        try:
            candidate = run.with_(**change)
            shape = models.of(candidate, candidate.setup).graph.input_shape
        except UsageError as error:
            last = error
            # A model that cannot be compiled or recomputed still has its other configurations.
            reasons[f"left out of the search: {error}"] = None
            continue
        if len(shape) == 3 or change["layout"] == own_order(change["model"]):
            found.append(change)
    if not found and last is not None:
        raise last
    return tuple(found), tuple(reasons)


def _shared_run(
    models: TracedModels,
    first: Mapping[str, Any],
    choices: Sequence[DeviceOption],
    sizes: Sequence[int],
    given: Mapping[str, Any],
) -> tuple[Run, tuple[str, ...]]:
    """The run of the first candidate with the settings that all share, and notes on the assumptions about its job."""
    # Settings of several devices are checked where there are most: one device alone would refuse them.
    most = max(choices, key=lambda option: option.num_devices)
    settings = {name: value for name, value in given.items() if name in _OF_RUNS}
    model = first["model"]
    facts = captured_facts(model)
    is_one = {"epochs", "tokens"}.isdisjoint(settings) and (facts is None or "epochs" not in facts.settings())
    if is_one:
        settings["epochs"] = 1.0
    settings |= {
        "batch_size": sizes[0],
        "precision": first["precision"],
        "layout": first["layout"],
        "image_size": first.get("image_size"),
    }
    notes: list[str] = []
    if {"dataset", "dataset_size", "tokens"}.isdisjoint(settings):
        # A job needs a dataset: the step alone tells the shape of a sample, or that a captured script has its own.
        of_step = {name: value for name, value in settings.items() if name not in _OF_JOBS}
        step = Run.of(model, device=most.cluster, **of_step)
        if step.job is None:
            known = _usual_dataset(models.of(step).graph.input_shape, model)
            notes.append(f"no dataset was given: an epoch of {known.name} is assumed")
            settings["dataset"] = known.name
    if is_one and not given.get("target"):
        notes.append("no number of epochs was given: the job is one epoch")
    return Run.of(model, device=most.cluster, **settings), tuple(notes)


_OF_JOBS = ("epochs", "validation_size", "validate", "startup_s", "checkpoint_s")


def _usual_dataset(input_shape: tuple[int, ...], model: str) -> Dataset:
    name = _USUAL_DATASETS.get(tuple(input_shape))
    if name is None:
        raise InvalidSetupError(
            f"the length of an epoch of {model} is not known: give --tokens 1B with --sequence-length 4096 for a "
            "language model, --dataset NAME or --dataset-size N"
        )
    return DATASETS[name]


def _job_words(job: Job, dataset: str | None, needed: TargetEpochs | None) -> str:
    data = f"{job.num_samples:,} samples{f' of {dataset}' if dataset else ''}"
    if needed is not None:
        return f"training on {data} until {needed.target}"
    return f"{job.num_epochs:g} epoch{'s' if job.num_epochs != 1 else ''} of {data}"


def _check_answerable(search: Search, terms: JobTerms) -> None:
    """Refuses limits and goals whose quantity is known for no candidate."""
    options: Sequence[DeviceOption] = search.axes["device"]
    co2_g_per_kwh = terms.co2_g_per_kwh
    asked = {search.goal, *(limit.quantity.name for limit in search.limits)}
    if "accuracy" in asked and not terms.accuracies:
        raise InvalidSetupError(
            "a limit on accuracy needs the accuracy of each model: --accuracies FILE.csv with columns model,accuracy"
        )
    if "co2" in asked and co2_g_per_kwh is None:
        raise InvalidSetupError("co2 needs the intensity of the grid: --co2 GRAMS per kWh, such as 400")
    if co2_g_per_kwh is not None and not 0 <= co2_g_per_kwh < math.inf:
        raise InvalidSetupError(f"a carbon intensity must be zero or more g/kWh, got {co2_g_per_kwh}")
    if asked & {"energy", "co2"} and all(option.device.kind != "gpu" for option in options):
        names = ", ".join(option.label for option in options)
        raise InvalidSetupError(
            f"energy is known for GPUs only, not for {names}: leave it out, or name a GPU"
        )
    if "cost" in asked and all(option.usd_per_hour is None for option in options):
        names = ", ".join(option.label for option in options)
        raise InvalidSetupError(f"no price is known for {names}: give --price 1.89/h or --prices FILE.toml")


class _Accuracy(BaseModel):
    model: str = Field(description="the name of a model")
    accuracy: float = Field(ge=0, le=1, description="a fraction of 0 to 1")


def read_accuracies(path: str | Path) -> dict[str, float]:
    """Accuracy by model, from a CSV file with the columns ``model`` and ``accuracy`` (a fraction).

    Raises:
        InvalidSetupError: The file cannot be read, lacks a column, or has a value that is not a fraction.
    """
    try:
        return {row.model: row.accuracy for _, row in read_rows(Path(path), _Accuracy)}
    except RecordError as error:  # the table is a part of the question
        raise InvalidSetupError(str(error)) from error
