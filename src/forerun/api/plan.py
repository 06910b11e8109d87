"""``forerun.plan``: wires models, devices, prices and limits to the planner."""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forerun.api.plan_targets import TargetEpochs, TargetQuestion, epochs_to_target
from forerun.api.planned_models import PlannedModels
from forerun.convergence.curve import Curve
from forerun.errors import InvalidSetupError
from forerun.hardware.price_file import load_prices, read_price_file
from forerun.hardware.prices import InstancePrice, PriceKind, price_age_note
from forerun.planner.assemble import make_plan
from forerun.planner.candidates import Configuration
from forerun.planner.choice import OBJECTIVES
from forerun.planner.devices import DeviceOption, parse_devices, with_prices
from forerun.planner.engine import Engine, PlanQuestion
from forerun.planner.limits import Limit, parse_limits
from forerun.planner.plan import Plan, PlanWords
from forerun.planner.scaling import DataParallelScaling
from forerun.planner.space import check_count, expand_models, parse_batch_sizes
from forerun.prediction.input_pipeline import InputPipeline
from forerun.prediction.job import DATASETS, Dataset, Job, find_dataset
from forerun.run.setup import Layout, Precision, TrainingSetup, choice
from forerun.tracing.keras.source import own_stack

__all__ = ["DEFAULT_BATCH_SIZES", "plan", "read_accuracies"]

DEFAULT_BATCH_SIZES = "8:1024"

_USUAL_DATASETS: Mapping[tuple[int, ...], str] = {
    (3, 32, 32): "cifar10",
    (1, 28, 28): "mnist",
    (3, 96, 96): "patchcamelyon",
    (3, 224, 224): "imagenet",
}
"""Dataset of a question that names none, by the shape of a sample."""


def plan(
    models: str | Sequence[str],
    *,
    devices: str | Sequence[str],
    within: str | Sequence[str] = "",
    minimize: str = "time",
    batch_sizes: str | Sequence[int] = DEFAULT_BATCH_SIZES,
    precisions: Sequence[str] = ("fp32", "amp"),
    layouts: Sequence[str] = ("nchw",),
    image_sizes: Sequence[int] = (),
    compile: bool = False,
    optimizer: str = "sgd",
    sequence_length: int | None = None,
    dataset: str | None = None,
    dataset_size: int | None = None,
    epochs: float | None = None,
    validation_size: int = 0,
    startup_s: float = 0.0,
    checkpoint_s: float = 0.0,
    price_usd_per_hour: float | Mapping[str, float] | None = None,
    price_kinds: Sequence[str] = ("on-demand",),
    providers: Sequence[str] = (),
    prices_file: str | Path | None = None,
    co2_g_per_kwh: float | None = None,
    power_limit_w: float | None = None,
    loader: InputPipeline | None = None,
    accuracies: Mapping[str, float] | None = None,
    target: str | None = None,
    curve: str | Path | Curve | Mapping[str, str | Path | Curve] | None = None,
    curve_batch_size: int | None = None,
    schedule: Any = None,
    history: str | Path | None = None,
    batches: str | Path | None = None,
    critical_batch_size: float | None = None,
    torch_version: str | None = None,
    num_points: int = 12,
    max_rejected: int = 1000,
    exact: bool = True,
    use_cache: bool = True,
) -> Plan:
    """The best configuration under limits, of every combination of models, devices, batch sizes and the rest.

    Args:
        models: Specifications; keys of a family may be ranges, ``cnn:depth=2..4,base_filters=32..64``.
        devices: Catalogue names, parted by commas or as a list; ``t4x4`` is four of them.
        within: Limits such as ``time<=2h, cost<=20, memory<=24GB``.
        minimize: time, cost, energy or co2.
        batch_sizes: Numbers and ranges, ``32:1024`` doubles, ``32:1024:32`` has a step; or a list of numbers.
        precisions: Precisions to try.
        layouts: Memory orders of images to try.
        image_sizes: Image sizes to try; none is the model's own [pixels].
        compile: Whether all steps run under torch.compile.
        optimizer: Optimizer of all candidates.
        sequence_length: Tokens of one sample.
        dataset: Name of a known dataset; the usual one of the input's shape if no length is given.
        dataset_size: Samples of an epoch, instead of ``dataset``.
        epochs: Epochs of the job, one if not given; with a target the length of the run, as in ``forecast``.
        validation_size: Samples evaluated after each epoch.
        startup_s: Time before the first step [s].
        checkpoint_s: Time of a checkpoint after each epoch [s].
        price_usd_per_hour: Price of one device, for all or by catalogue name; goes before the price table [USD/h].
        price_kinds: Ways of paying to choose from: on-demand, spot, reserved-1y, reserved-3y.
        providers: Providers to choose from, all if empty.
        prices_file: A user's own prices (TOML), which go before the shipped ones.
        co2_g_per_kwh: Intensity of the grid [g/kWh].
        power_limit_w: Power limit that is set on every device [W].
        loader: The input pipeline of one device.
        accuracies: Known accuracy by model, for limits on accuracy.
        target: What training is to reach, such as ``accuracy>=0.92``; the epochs are then those of a forecast.
        curve: The run so far, as in ``forecast``, or one for each model.
        curve_batch_size: Samples of a step of that run, where the file does not say.
        schedule: Its learning rate, as in ``forecast``.
        history: Finished runs of the same job, a folder; enough without a curve.
        batches: A table of steps or epochs to the target at several batch sizes, as in ``forecast_batches``.
        critical_batch_size: Batch size at which twice the least number of epochs is needed, instead of ``batches``.
        torch_version: PyTorch version of the run.
        num_points: Candidates to list.
        max_rejected: Rejected candidates to list with their reasons.
        exact: Whether listed candidates are evaluated once more exactly as ``predict`` does; without, they are those
            of the grid: memory within some per cent, and times at more than 16 batch sizes interpolated.
        use_cache: Whether to use the cache of traced graphs.

    Raises:
        UsageError: The question must be changed: unknown names, limits that cannot be read or contradict each other,
            an empty or too large set of candidates.
        FailureError: A model could not be built or traced, a file could not be read, or a curve says nothing.

    Example:
        >>> import forerun
        >>> found = forerun.plan("cnn:depth=2", devices="t4,l4", within="cost<=1", batch_sizes=[64, 128], epochs=3)
        >>> found.num_candidates
        8
    """
    if minimize not in OBJECTIVES:
        raise InvalidSetupError(f"a plan minimises one of {', '.join(OBJECTIVES)}, got '{minimize}'")
    limits = parse_limits(within)
    specs = expand_models(models if isinstance(models, str) else ";".join(models))
    options = parse_devices(devices if isinstance(devices, str) else ",".join(devices))
    sizes = _batch_sizes(batch_sizes)
    configurations = _configurations(specs, precisions, layouts, image_sizes)
    check_count(len(configurations) * len(options) * len(sizes))
    setup = TrainingSetup(compile=compile, optimizer=optimizer.lower())
    source = PlannedModels(
        sequence_length=sequence_length, use_cache=use_cache, stacks=frozenset(map(own_stack, specs))
    )
    job, notes = _job(
        source,
        configurations[0],
        setup,
        dataset,
        dataset_size,
        epochs,
        validation_size,
        startup_s,
        checkpoint_s,
        is_target=target is not None,
    )
    learning = TargetQuestion(
        target=target,
        curve=curve,
        curve_batch_size=curve_batch_size,
        schedule=schedule,
        history=history,
        batches=batches,
        critical_batch_size=critical_batch_size,
    )
    needed = epochs_to_target(learning, specs, job.num_samples, epochs)
    table = _prices(prices_file)
    kinds = [choice(PriceKind, kind, "way of paying") for kind in price_kinds]
    priced = with_prices(
        options, table, price_usd_per_hour, kinds=(*kinds, PriceKind.OWNED), providers=_lower(providers)
    )
    known = dict(accuracies or {})
    _check_answerable(limits, minimize, priced, known, co2_g_per_kwh)
    question = PlanQuestion(
        configurations=configurations,
        options=priced,
        batch_sizes=sizes,
        setup=setup,
        job=job,
        torch_version=torch_version,
        power_limit_w=power_limit_w,
        co2_g_per_kwh=co2_g_per_kwh,
        loader=loader,
        accuracies=known,
        scaling=DataParallelScaling(source.weights, torch_version),
        epochs_of=None if needed is None else needed.epochs,
    )
    return make_plan(
        Engine(question, source),
        limits,
        minimize,
        words=_words(job, dataset, needed, (*notes, *_price_notes(priced), *_energy_notes(priced))),
        loader=loader,
        num_points=num_points,
        max_rejected=max_rejected,
        exact=exact,
    )


def _lower(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.lower() for word in words)


def _batch_sizes(given: str | Sequence[int]) -> tuple[int, ...]:
    sizes = parse_batch_sizes(given) if isinstance(given, str) else tuple(sorted(set(given)))
    if not sizes:
        raise InvalidSetupError("a plan needs at least one batch size, got none")
    for size in (sizes[0], sizes[-1]):
        TrainingSetup(batch_size_per_device=size)  # refuses what is no batch size
    return sizes


def _configurations(
    specs: Sequence[str], precisions: Sequence[str], layouts: Sequence[str], image_sizes: Sequence[int]
) -> tuple[Configuration, ...]:
    if not precisions or not layouts:
        raise InvalidSetupError("a plan needs at least one precision and one layout")
    for size in image_sizes:
        if size < 1:
            raise InvalidSetupError(f"an image size must be at least 1 pixel, got {size}")
    return tuple(
        Configuration(
            model=spec,
            precision=choice(Precision, precision, "precision"),
            layout=choice(Layout, layout, "layout"),
            image_size=size,
        )
        for spec in specs
        for size in (image_sizes or (None,))
        for layout in layouts
        for precision in precisions
    )


def _job(
    source: PlannedModels,
    first: Configuration,
    setup: TrainingSetup,
    dataset: str | None,
    dataset_size: int | None,
    epochs: float | None,
    validation_size: int,
    startup_s: float,
    checkpoint_s: float,
    *,
    is_target: bool,
) -> tuple[Job, tuple[str, ...]]:
    """The job, and a note where its dataset was assumed."""
    if dataset is not None and dataset_size is not None:
        raise InvalidSetupError("give either a dataset or a dataset size, not both")
    notes = []
    if dataset is None and dataset_size is None:
        known = _usual_dataset(source.prepared(first, _with(setup, first)).graph.input_shape, first.model)
        notes.append(f"no dataset was given: an epoch is that of {known.name}")
        dataset_size = known.num_training_samples
    elif dataset is not None:
        dataset_size = find_dataset(dataset).num_training_samples
    if epochs is None and not is_target:
        notes.append("no number of epochs was given: the job is one epoch")
    assert dataset_size is not None
    job = Job(
        num_samples=dataset_size,
        num_epochs=1.0 if epochs is None else epochs,
        num_validation_samples=validation_size,
        startup_s=startup_s,
        checkpoint_s=checkpoint_s,
    )
    return job, tuple(notes)


def _with(setup: TrainingSetup, configuration: Configuration) -> TrainingSetup:
    return replace(
        setup,
        precision=configuration.precision,
        layout=configuration.layout,
    )


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


def _prices(path: str | Path | None) -> tuple[InstancePrice, ...]:
    """The shipped prices; a user's own take the place of those of the same devices."""
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
    """Refuses limits and objectives whose quantity is known of no candidate."""
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
        InvalidSetupError: The file cannot be read, lacks a column, or has a value that is no fraction.
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
