"""``forerun.plan``: wires models, devices, prices and limits to the planner."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from forerun.api.models import TracedModels
from forerun.api.plan_targets import TargetEpochs, TargetQuestion, epochs_to_target
from forerun.api.planned_models import PlannedModels
from forerun.errors import InvalidSetupError, UsageError
from forerun.hardware.catalogue import load_catalog
from forerun.hardware.price_file import load_prices, read_price_file
from forerun.hardware.prices import InstancePrice, PriceKind, price_age_note
from forerun.planner.assemble import make_plan
from forerun.planner.candidates import Configuration
from forerun.planner.choice import DEVICE_MEMORY, OBJECTIVES
from forerun.planner.devices import DeviceOption, parse_devices, with_prices
from forerun.planner.engine import Engine, PlanQuestion
from forerun.planner.limits import Limit, parse_limits
from forerun.planner.options import DEFAULT_BATCH_SIZES, PlanOptions
from forerun.planner.plan import Plan, PlanWords
from forerun.planner.searched import searched_settings, searched_values
from forerun.planner.space import check_count, expand_models, parse_batch_sizes
from forerun.run.captured import captured_facts, with_captured_settings
from forerun.run.job import DATASETS, Dataset, Job
from forerun.run.model import own_layout, own_stack
from forerun.run.options import RunOptions
from forerun.run.run import Run, check_format
from forerun.run.settings import checked, declared
from forerun.run.setup import AttentionKernel, Layout, Precision, TrainingSetup, choice
from forerun.stages import stage

__all__ = ["plan", "read_accuracies"]

_USUAL_DATASETS: Mapping[tuple[int, ...], str] = {
    (3, 32, 32): "cifar10",
    (1, 28, 28): "mnist",
    (3, 96, 96): "patchcamelyon",
    (3, 224, 224): "imagenet",
}
"""Default dataset of a question, by the shape of a sample."""


def plan(
    models: str | Sequence[str],
    *,
    devices: str | Sequence[str],
    use_cache: bool = True,
    **options: Unpack[PlanOptions],
) -> Plan:
    """The best configuration under limits, of every combination of models, devices, batch sizes and the rest.

    Args:
        models: Specifications; keys of a family may be ranges, ``cnn:depth=2..4,base_filters=32..64``.
        devices: Catalogue names, separated by commas or as a list; ``4xt4`` is four of them, ``2x4xt4`` two nodes of
            four; ``all`` is every GPU of the catalogue, ``priced`` every device with a known price.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the plan, see ``forerun.PlanOptions`` and docs/commands.md: the axes ``batch_sizes``,
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
    minimize = given.get("minimize", "time")
    if minimize not in OBJECTIVES:
        raise InvalidSetupError(f"a plan minimises one of {', '.join(OBJECTIVES)}, got '{minimize}'")
    limits = parse_limits(given.get("within", ""))
    specs = expand_models(models if isinstance(models, str) else ";".join(models))
    names = devices if isinstance(devices, str) else ",".join(devices)
    choices = parse_devices(_named_devices(names, given), intra=given.get("intra"), inter=given.get("inter"))
    sizes = _batch_sizes(given.get("batch_sizes", DEFAULT_BATCH_SIZES))
    searched = searched_values(given.get("search", ()), given, specs)
    configurations = _configurations(
        specs,
        _precisions(specs, searched.get("precision", given.get("precisions"))),
        searched.get("layout", given.get("layouts")),
        given.get("image_sizes", ()),
        searched_settings(searched),
    )
    kernel = AttentionKernel(given.get("attention_kernel") or AttentionKernel.PLAIN)
    for option in choices:
        for configuration in configurations:
            check_format(option.device, configuration.precision, kernel)
    check_count(len(configurations) * len(choices) * len(sizes))
    traced = TracedModels(use_cache=use_cache)
    run, notes = _shared_run(traced, configurations[0], choices, sizes, given)
    assert run.job is not None
    if searched:
        configurations, impossible = _possible(traced, run, configurations)
        notes = (*notes, *impossible)
    left_out = _alike_on_one(configurations, choices)
    learning = TargetQuestion(**{name: given.get(name) for name in _OF_TARGETS})
    needed = epochs_to_target(learning, specs, run.job.num_samples, given.get("epochs"))
    priced = _priced(choices, given)
    known = dict(given.get("accuracies") or {})
    co2_g_per_kwh = given.get("co2_g_per_kwh")
    _check_answerable(limits, minimize, priced, known, co2_g_per_kwh)
    question = PlanQuestion(
        run=run,
        configurations=configurations,
        options=priced,
        batch_sizes=sizes,
        left_out=left_out,
        power_limit_w=given.get("power_limit_w"),
        co2_g_per_kwh=co2_g_per_kwh,
        accuracies=known,
        epochs_of=None if needed is None else needed.epochs,
    )
    words = (*notes, *_price_notes(priced), *_energy_notes(priced))
    num_candidates = (len(configurations) * len(priced) - len(left_out)) * len(sizes)
    with stage(f"comparing {num_candidates:,} candidates"):
        found = make_plan(
            Engine(question, PlannedModels(traced, run, frozenset(map(own_stack, specs)))),
            limits,
            minimize,
            words=_words(run.job, given.get("dataset"), needed, words),
            num_points=given.get("num_points", 12),
            max_rejected=given.get("max_rejected", 1000),
            exact=given.get("exact", True),
        )
    return replace(found, notes=(*found.notes, *_layout_notes(found)))


def _layout_notes(plan: Plan) -> tuple[str, ...]:
    """The way to divide a model of which no candidate's device can hold a copy."""
    nearest = plan.nearest_miss
    if nearest is None or all(broken.limit != DEVICE_MEMORY for broken in nearest.broken):
        return ()
    count = max(nearest.num_devices, 8)
    return (
        "every device of a plan holds the whole model and its batch: plan smaller batches, or divide it by "
        f"forerun layouts {nearest.model} --on {count}x{nearest.device}",
    )


_OF_TARGETS = ("target", "curve", "curve_batch_size", "schedule", "history", "batches", "critical_batch_size")
_OF_RUNS = frozenset(declared(RunOptions)) - {
    "num_devices",
    "num_nodes",
    "intra",
    "inter",
    "price_usd_per_hour",
}


def _named_devices(names: str, given: Mapping[str, Any]) -> str:
    """The list of devices with ``all`` (GPUs of the catalogue) and ``priced`` (those with a price) spelled out."""

    def of(word: str) -> Sequence[str]:
        if word.strip().lower() == "all":
            return [device.name for device in load_catalog().values() if device.kind == "gpu"]
        if word.strip().lower() == "priced":
            return sorted({price.device for price in _prices(given.get("prices_file"))})
        return [word]

    return ",".join(name for word in names.split(",") for name in of(word))


def _lower(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.lower() for word in words)


def _words_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """The words of a list or of one text with commas."""
    words = given.split(",") if isinstance(given, str) else given
    return tuple(word.strip() for word in words if word.strip())


def _batch_sizes(given: str | int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(given, int):
        given = (given,)
    sizes = parse_batch_sizes(given) if isinstance(given, str) else tuple(sorted(set(given)))
    if not sizes:
        raise InvalidSetupError("a plan needs at least one batch size, got none")
    for size in (sizes[0], sizes[-1]):
        TrainingSetup(batch_size_per_device=size)  # refuses a value that is not a batch size
    return sizes


def _image_sizes(given: str | int | Sequence[int]) -> tuple[int | None, ...]:
    if isinstance(given, int):
        given = (given,)
    sizes = parse_batch_sizes(given, "image size") if isinstance(given, str) else tuple(given)
    for size in sizes:
        if size < 1:
            raise InvalidSetupError(f"an image size must be at least 1 pixel, got {size}")
    return sizes or (None,)


def _precisions(specs: Sequence[str], given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The precisions asked for; without any, those of captured scripts, or fp32 and amp."""
    if given is not None:
        return _words_of(given)
    held = {facts.precision for spec in specs if (facts := captured_facts(spec)) is not None}
    if len(held) > 1:
        raise InvalidSetupError(
            f"captured scripts of different precisions, {', '.join(sorted(held))}: plan them one by one"
        )
    return tuple(held) or ("fp32", "amp")


def _layout(spec: str) -> str:
    facts = captured_facts(spec)
    return own_layout(spec) if facts is None else facts.layout


def _configurations(
    specs: Sequence[str],
    precisions: Sequence[str],
    layouts: str | Sequence[str] | None,
    image_sizes: str | Sequence[int],
    searched: Sequence[Mapping[str, Any]],
) -> tuple[Configuration, ...]:
    named = None if layouts is None else _words_of(layouts)
    if not precisions or (named is not None and not named):
        raise InvalidSetupError("a plan needs at least one precision and one layout")
    for spec in specs:
        for precision in precisions:
            with_captured_settings(
                spec, {"precision": precision}, one_device=True
            )  # refuses what a capture does not hold
    return tuple(
        Configuration(
            model=spec,
            precision=choice(Precision, precision, "precision"),
            layout=choice(Layout, layout, "layout"),
            image_size=size,
            **settings,
        )
        for spec in specs
        for size in _image_sizes(image_sizes)
        for layout in ((_layout(spec),) if named is None else named)
        for precision in precisions
        for settings in searched
    )


def _possible(
    models: TracedModels, run: Run, configurations: Sequence[Configuration]
) -> tuple[tuple[Configuration, ...], tuple[str, ...]]:
    """The configurations of a search that their models can have, and notes on the others.

    Raises:
        UsageError: There is none.
    """
    found: list[Configuration] = []
    reasons: dict[str, None] = {}
    last: UsageError | None = None
    for configuration in configurations:
        try:
            candidate = configuration.applied(run, run.setup.batch_size_per_device)
            shape = models.of(candidate, candidate.setup).graph.input_shape
        except UsageError as error:
            last = error
            reasons[f"left out of the search: {error}"] = None
            continue
        if len(shape) == 3 or configuration.layout is _layout(configuration.model):
            found.append(configuration)
    if not found and last is not None:
        raise last
    return tuple(found), tuple(reasons)


def _alike_on_one(
    configurations: Sequence[Configuration], options: Sequence[DeviceOption]
) -> frozenset[tuple[int, int]]:
    """Configurations of another strategy than the first, on options of one device, which shares its work with none."""
    first = configurations[0].strategy
    return frozenset(
        (index, number)
        for index, configuration in enumerate(configurations)
        for number, option in enumerate(options)
        if configuration.strategy != first and option.num_devices == 1
    )


def _shared_run(
    models: TracedModels,
    first: Configuration,
    choices: Sequence[DeviceOption],
    sizes: Sequence[int],
    given: Mapping[str, Any],
) -> tuple[Run, tuple[str, ...]]:
    """The run of the first candidate with the settings that all share, and notes on the assumptions about its job."""
    most = max(choices, key=lambda option: option.num_devices)
    settings = {name: value for name, value in given.items() if name in _OF_RUNS}
    facts = captured_facts(first.model)
    is_one = {"epochs", "tokens"}.isdisjoint(settings) and (facts is None or "epochs" not in facts.settings())
    if is_one:
        settings["epochs"] = 1.0
    settings |= {
        "batch_size": sizes[0],
        "precision": str(first.precision),
        "layout": str(first.layout),
        "image_size": first.image_size,
    }
    notes: list[str] = []
    if not {"dataset", "dataset_size", "tokens"}.isdisjoint(settings):
        run = Run.of(first.model, device=most.cluster, **settings)
    else:
        of_job = {name: settings.pop(name) for name in _OF_JOBS if name in settings}
        run = Run.of(first.model, device=most.cluster, **settings)
        if run.job is not None:  # that of a captured script
            run = Run.of(first.model, device=most.cluster, **settings, **of_job)
        else:
            known = _usual_dataset(models.of(run).graph.input_shape, first.model)
            notes.append(f"no dataset was given: an epoch is that of {known.name}")
            run = Run.of(first.model, device=most.cluster, dataset=known.name, **settings, **of_job)
    if is_one and not given.get("target"):
        notes.append("no number of epochs was given: the job is one epoch")
    return run, tuple(notes)


_OF_JOBS = ("epochs", "validation_size", "validate", "startup_s", "checkpoint_s")


def _usual_dataset(input_shape: tuple[int, ...], model: str) -> Dataset:
    name = _USUAL_DATASETS.get(tuple(input_shape))
    if name is None:
        raise InvalidSetupError(
            f"the length of an epoch of {model} is not known: give --dataset NAME or --dataset-size N"
        )
    return DATASETS[name]


def _words(job: Job, dataset: str | None, needed: TargetEpochs | None, notes: tuple[str, ...]) -> PlanWords:
    data = f"{job.num_samples:,} {dataset or 'samples'}"
    if needed is not None:
        said = f"training on {data} until {needed.target}"
        return PlanWords(job=said, target=needed.target, notes=(*notes, *needed.notes))
    said = f"{job.num_epochs:g} epoch{'s' if job.num_epochs != 1 else ''} of {data}"
    return PlanWords(job=said, target=None, notes=notes)


def _priced(choices: Sequence[DeviceOption], given: Mapping[str, Any]) -> tuple[DeviceOption, ...]:
    kinds = [
        choice(PriceKind, kind, "way of paying")
        for kind in _words_of(given.get("price_kinds", ("on-demand",)))
    ]
    return with_prices(
        choices,
        _prices(given.get("prices_file")),
        given.get("price_usd_per_hour"),
        kinds=(*kinds, PriceKind.OWNED),
        providers=_lower(_words_of(given.get("providers", ()))),
    )


def _prices(path: str | Path | None) -> tuple[InstancePrice, ...]:
    """The shipped prices; a user's own prices replace those of the same devices."""
    if path is None:
        return load_prices()
    own = read_price_file(Path(path))
    theirs = {price.device for price in own}
    return (*own, *(price for price in load_prices() if price.device not in theirs))


def _check_answerable(
    limits: Sequence[Limit],
    minimize: str,
    options: Sequence[DeviceOption],
    accuracies: Mapping[str, float],
    co2_g_per_kwh: float | None,
) -> None:
    """Refuses limits and objectives whose quantity is known for no candidate."""
    asked = {minimize, *(limit.quantity.name for limit in limits)}
    if "accuracy" in asked and not accuracies:
        raise InvalidSetupError(
            "a limit on accuracy needs the accuracy of each model: --accuracies FILE.csv with columns model,accuracy"
        )
    if "co2" in asked and co2_g_per_kwh is None:
        raise InvalidSetupError("co2 needs the intensity of the grid: --co2 GRAMS per kWh, such as 400")
    if co2_g_per_kwh is not None and not 0 <= co2_g_per_kwh < math.inf:
        raise InvalidSetupError(f"a carbon intensity must be zero or more g/kWh, got {co2_g_per_kwh}")
    if asked & {"energy", "co2"} and all(option.device.kind != "gpu" for option in options):
        names = ", ".join(option.label for option in options)
        raise InvalidSetupError(f"energy is known of GPUs only, not of {names}: leave it out, or name a GPU")
    if "cost" in asked and all(option.usd_per_hour is None for option in options):
        names = ", ".join(option.label for option in options)
        raise InvalidSetupError(f"no price is known of {names}: give --price 1.89/h or --prices FILE.toml")


def _price_notes(options: Sequence[DeviceOption]) -> tuple[str, ...]:
    notes = []
    without = [option.label for option in options if option.usd_per_hour is None]
    if without and len(without) < len(options):
        notes.append(
            f"no price is known of {', '.join(without)}: give --price NAME=0.50/h or --prices FILE.toml"
        )
    elif without:
        notes.append("no price is known of any of these devices, so cost is left out")
    used = [option.rental.price for option in options if option.rental is not None]
    old = price_age_note(used, datetime.date.today())
    return (*notes, old) if old else tuple(notes)


def _energy_notes(options: Sequence[DeviceOption]) -> tuple[str, ...]:
    without = [option.label for option in options if option.device.kind != "gpu"]
    return (f"energy is known of GPUs only, not of {', '.join(without)}",) if without else ()


def read_accuracies(path: Path) -> dict[str, float]:
    """Accuracy by model, from a CSV file with the columns ``model`` and ``accuracy`` (a fraction).

    Raises:
        InvalidSetupError: The file cannot be read, lacks a column, or has a value that is not a fraction.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetupError(f"the accuracies '{path}' cannot be read: {error}; check the path") from error
    found = {}
    for number, row in enumerate(rows, start=2):
        try:
            value = float(row["accuracy"])
            model = row["model"].strip()
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidSetupError(
                f"{path}, line {number}: expected the columns model,accuracy with a fraction, got {row}"
            ) from None
        if not 0 <= value <= 1:
            raise InvalidSetupError(f"{path}, line {number}: accuracy must be between 0 and 1, got {value}")
        found[model] = value
    if not found:
        raise InvalidSetupError(f"{path}: expected at least one line below model,accuracy, got none")
    return found
