"""Choice quality: agreement of predicted and measured ranks of devices, and loss of the chosen device.

For each network that was measured on at least four devices the devices are ranked by predicted throughput. A choice is
right if the chosen device is truly within 5 % of the best.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import spearmanr

from forerun.cost.time.weights import CostModel
from forerun.evidence.fitting.measured_steps import Measured
from forerun.evidence.fitting.op_time_fit import FitSettings
from forerun.evidence.records.step_record import StepRecord
from forerun.prediction.point_times import point_times
from forerun.prediction.step import PreparedModel, prepare
from forerun.question.devices import find_device
from forerun.question.devices.device import Device, NumberFormat, PriceKind
from forerun.question.devices.prices import cheapest_rental, load_prices
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.trace import trace
from studies.markdown import markdown_table
from studies.optime.studies import Corpus, HeldOut, family_study
from studies.tables.public import public_table
from studies.tables.transformers import prepared_bert

Floats = npt.NDArray[np.float64]

MIN_DEVICES = 4
RIGHT_WITHIN = 0.05
_NUM_DRAWS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """One set of devices: rank correlation, and the shortfall of the chosen device against the best.

    Attributes:
        group: Name of the set.
        num_devices: Devices in it.
        spearman: Rank correlation of predicted and measured throughput.
        loss: Share by which the chosen device is slower than the best.
    """

    group: str
    num_devices: int
    spearman: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceResult:
    """Sets of one kind, ranked by one predictor."""

    title: str
    predictor: str
    sets: tuple[SetResult, ...]

    @property
    def median_spearman(self) -> float:
        """Median rank correlation."""
        return float(np.median([found.spearman for found in self.sets]))

    @property
    def right_share(self) -> float:
        """Share of sets whose chosen device is within 5 % of the best."""
        return float(np.mean([found.loss <= RIGHT_WITHIN for found in self.sets]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatNoise:
    """Spread of runs of one network on one device with the same software, precision and batch size.

    Attributes:
        log_deviation: Standard deviation of the logarithm of the step time around the mean of its runs.
        num_runs: Runs of which there are two or more.
    """

    log_deviation: float
    num_runs: int


def repeat_noise(records: Iterable[StepRecord]) -> RepeatNoise:
    """The noise of measurements of which some repeat each other, pooled over networks and devices."""
    runs: dict[tuple[object, ...], list[float]] = {}
    for record in records:
        key = (
            *(record.source, record.model, record.phase, record.device, record.precision, record.layout),
            *(record.compile, record.framework_version, record.batch_size_per_device),
        )
        runs.setdefault(key, []).append(float(np.log(record.step_time_s)))
    repeated = [own for own in runs.values() if len(own) > 1]
    squares = sum(float(np.var(own)) * len(own) for own in repeated)
    freedom = sum(len(own) - 1 for own in repeated)
    return RepeatNoise(
        log_deviation=float(np.sqrt(squares / max(1, freedom))), num_runs=sum(map(len, repeated))
    )


def perfect_choices(title: str, rates: Sequence[MeasuredRate], noise: RepeatNoise) -> ChoiceResult:
    """Score of a chooser that knows every true speed, if each set were measured once more.

    The measured speeds stand for the true ones; each device is measured anew as often as it was, its median falling
    beside the truth by the noise of a run over the root of their number. Fifty draws a set, from a fixed seed.
    """
    generator = np.random.default_rng(0)
    found = []
    for group, rows in groups_of(rates).items():
        devices = _by_device(rows)
        if len(devices) < MIN_DEVICES:
            continue
        true = np.asarray([device.measured_samples_per_s for device in devices])
        counts = np.asarray([sum(row.device == device.device for row in rows) for device in devices])
        for _ in range(_NUM_DRAWS):
            error = generator.normal(0.0, noise.log_deviation / np.sqrt(counts))
            found.append(_scored(group, true, true * np.exp(error)))
    return ChoiceResult(title=title, predictor="perfect", sets=tuple(found))


def lambda_study(corpus: Corpus, settings: Sequence[FitSettings], report: Callable[[str], None]) -> HeldOut:
    """ResNet-50 on the devices of the Lambda suite that no other study holds out, by a fit without any of them."""
    is_lambda = np.asarray([step.record.row_id.startswith("lambda ") for step in corpus.steps])
    names = np.asarray([step.device.name for step in corpus.steps])
    with_others = set(names[~is_lambda].tolist())
    devices = sorted(set(names[is_lambda].tolist()) - with_others)
    held_out = np.isin(names, devices)
    fit = corpus.fitted_without(held_out, settings, np.isin(corpus.operator_devices(), devices))
    report(f"held out together: {', '.join(devices)}")
    return corpus.predicted_by(fit.weights, np.flatnonzero(held_out & is_lambda))


def torchvision_study(
    corpus: Corpus, settings: Sequence[FitSettings], report: Callable[[str], None]
) -> HeldOut:
    """The torchvision networks of ``gpu_benchmarks``, each predicted by a fit without its family on any device."""
    tested = [
        index
        for index, step in enumerate(corpus.steps)
        if step.record.source == "gpu_benchmarks" and not step.record.row_id.startswith("lambda ")
    ]
    return family_study(corpus, tested, settings, report)[0]


def held_out_rates(parts: Iterable[HeldOut]) -> list[MeasuredRate]:
    """Throughputs of ``gpu_benchmarks``, each predicted by a fit that has not seen its row."""
    found = []
    for held in parts:
        for step, log_predicted in zip(held.steps, held.log_predicted, strict=True):
            if step.record.source != "gpu_benchmarks":
                continue
            size = step.setup.batch_size_per_device
            found.append(
                MeasuredRate(
                    group=_group(step),
                    device=step.device.name,
                    precision=step.setup.precision,
                    measured_samples_per_s=size / step.record.step_time_s,
                    predicted_samples_per_s=float(size / np.exp(log_predicted)),
                )
            )
    return found


def _group(step: Measured) -> str:
    record = step.record
    kind = kind_of(step.setup.precision)
    if record.row_id.startswith("lambda "):
        return f"Lambda ResNet-50 {record.framework_version} {kind}"
    phase = "train" if step.setup.phase is Phase.TRAIN else "inference"
    return f"torchvision {record.model} {phase} {kind}"


def choice_results(title: str, rates: Sequence[MeasuredRate]) -> list[ChoiceResult]:
    """The sets of at least four devices, ranked by the prediction and by the baselines."""
    sets = {name: _by_device(rows) for name, rows in groups_of(rates).items()}
    large = {name: rows for name, rows in sets.items() if len(rows) >= MIN_DEVICES}
    predictors: dict[str, Callable[[MeasuredRate], float | None]] = {
        "**forerun**": lambda rate: rate.predicted_samples_per_s,
        "peak FLOP/s": lambda rate: _peak(rate.device, rate.precision),
        "price": lambda rate: _price(rate.device),
    }
    results = []
    for name, score in predictors.items():
        found = [result for group, rows in large.items() if (result := _ranked(group, rows, score))]
        if found:
            results.append(ChoiceResult(title=title, predictor=name, sets=tuple(found)))
    return results


def _by_device(rates: Sequence[MeasuredRate]) -> list[MeasuredRate]:
    """One rate per device: the median of its runs."""
    found = []
    for device in dict.fromkeys(rate.device for rate in rates):
        own = [rate for rate in rates if rate.device == device]
        found.append(
            MeasuredRate(
                group=own[0].group,
                device=device,
                precision=own[0].precision,
                measured_samples_per_s=float(np.median([rate.measured_samples_per_s for rate in own])),
                predicted_samples_per_s=float(np.median([rate.predicted_samples_per_s for rate in own])),
            )
        )
    return found


def _ranked(
    group: str, rates: Sequence[MeasuredRate], score: Callable[[MeasuredRate], float | None]
) -> SetResult | None:
    """A set ranked by a score; None where fewer than four of its devices have one."""
    scored = [(value, rate.measured_samples_per_s) for rate in rates if (value := score(rate)) is not None]
    if len(scored) < MIN_DEVICES:
        return None
    return _scored(group, *np.asarray(scored).T)


def _scored(group: str, scores: Floats, measured: Floats) -> SetResult:
    return SetResult(
        group=group,
        num_devices=len(scores),
        spearman=float(spearmanr(scores, measured).statistic),
        loss=float(1 - measured[np.argmax(scores)] / measured.max()),
    )


def _peak(device: str, precision: Precision) -> float:
    peaks = find_device(device).peak_flops_per_s
    if precision.is_half:
        return max(peaks.get(NumberFormat.FP16, 0.0), peaks[NumberFormat.FP32])
    return peaks.get(NumberFormat.TF32, 0.0) if precision is Precision.TF32 else peaks[NumberFormat.FP32]


def _price(device: str) -> float | None:
    rental = cheapest_rental(load_prices(), device, kinds=(PriceKind.ON_DEMAND,))
    return None if rental is None else rental.usd_per_hour


def all_choices(
    networks: HeldOut, devices: Iterable[HeldOut], outside: Sequence[MeasuredRate]
) -> list[ChoiceResult]:
    """Results of all kinds of sets.

    Args:
        networks: Rows predicted without their network's family.
        devices: Rows predicted without their device.
        outside: Rows of tables that no fit has read.
    """
    by_network = held_out_rates([networks])
    return [
        *choice_results("network held out", by_network),
        *choice_results("device held out", held_out_rates(devices)),
        *choice_results("not in the fit", outside),
    ]


def noise_words(networks: HeldOut) -> str:
    """Share of the misses that is noise of the measurements."""
    noise = repeat_noise(step.record for step in networks.steps if step.record.source == "gpu_benchmarks")
    rates = held_out_rates([networks])
    perfect = perfect_choices("network held out", rates, noise)
    return (
        f"\nRepeats lie {100 * noise.log_deviation:.1f} % apart; knowing every true speed would give "
        f"{perfect.median_spearman:.3f} and {100 * perfect.right_share:.0f} %.\n"
    )


def choice_section(results: Sequence[ChoiceResult], noise: str = "") -> str:
    """The section of the accuracy page.

    Args:
        results: Sets of all kinds.
        noise: Text about the share of the misses that is noise of the measurements.
    """
    rows = []
    for result in results:
        sizes = [found.num_devices for found in result.sets]
        worst = max(found.loss for found in result.sets)
        shares = (f"{100 * result.right_share:.0f} %", f"{100 * worst:.0f} %")
        counts = (str(len(result.sets)), f"{min(sizes)} to {max(sizes)}", f"{result.median_spearman:.3f}")
        rows.append((result.title, result.predictor, *counts, *shares))
    header = (
        "sets", "ranked by", "sets", "devices", "median Spearman", "chosen within 5 % of the best", "worst loss",
    )  # fmt: skip
    return (
        "## Choosing a device\n\nNetworks of `gpu_benchmarks` on four GPUs or more.\n\n"
        + markdown_table(header, rows)
        + noise
    )


_NETWORKS = {
    "alexnet": "alexnet",
    "googlenet-v1": "googlenet",
    "inception3": "inception_v3",
    **{name: name for name in ("vgg16", "vgg19", "densenet161")},
    **{f"resnet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
}
_BERT = {"bert_base_squad": (768, 12), "bert_large_squad": (1024, 24)}
_BERT_TOKENS = 384
_SOURCES = {
    "u39kun/deep-learning-benchmark": "u39kun",
    "jcjohnson/cnn-benchmarks": "jcjohnson",
    "lambdal/lambda-tensorflow-benchmark": "Lambda TensorFlow",
    "lambdal/deeplearning-benchmark": "Lambda BERT",
}
_PRECISIONS = ("fp32", "tf32", "fp16", "amp")
_MIXED_FP16 = ("Lambda TensorFlow", "Lambda BERT")
"""Their fp16 keeps fp32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """Throughput of one network on one device.

    Attributes:
        group: Set of comparable measurements: source, network, phase and kind of precision.
        device: Catalogue name.
        precision: Precision of the run.
        measured_samples_per_s: Measured throughput.
        predicted_samples_per_s: Predicted throughput.
    """

    group: str
    device: str
    precision: Precision
    measured_samples_per_s: float
    predicted_samples_per_s: float


def kind_of(precision: Precision) -> str:
    """Half or full precision, as a user asks for it; on newer devices full precision runs as TF32."""
    return "half" if precision.is_half else "full"


def outside_rates(folder: Path, weights: CostModel) -> list[MeasuredRate]:
    """Rows of ``gpu_benchmarks`` that no fit has read, with the shipped model's predictions.

    Networks that torchvision or Transformers define, on single GPUs of the catalogue. XLA runs are left out.

    Raises:
        RecordError: The table lacks its columns.
    """
    needed = (
        "source", "phase", "model", "gpu", "n_gpus", "dtype", "batch_size_per_gpu", "throughput", "framework",
    )  # fmt: skip
    frame = public_table(folder, "gpu_benchmarks", needed)
    is_xla = frame["framework"].str.contains("XLA") | frame["system"].fillna("").str.contains("XLA")
    chosen = frame[
        frame["source"].isin(_SOURCES)
        & (frame["n_gpus"] == 1)
        & frame["dtype"].isin(_PRECISIONS)
        & frame["throughput"].notna()
        & frame["batch_size_per_gpu"].notna()
        & ~is_xla
        & ~frame["framework"].str.contains("cuDNN none")
    ]
    return [
        rate
        for name, rows in chosen.groupby(["source", "model", "phase"])
        for rate in _rates(name, rows, weights)
    ]


def _rates(name: Hashable, rows: pd.DataFrame, weights: CostModel) -> Iterator[MeasuredRate]:
    source, model, phase = (str(part) for part in name)  # type: ignore[attr-defined]
    title = _SOURCES[source]
    if (model in _BERT) != (title == "Lambda BERT") or (model not in _BERT and model not in _NETWORKS):
        return
    setups = [_setup(row, title, phase) for row in rows.to_dict("records")]
    devices = [find_device(gpu) for gpu in rows["gpu"]]
    predicted = _predicted(model, devices, setups, weights)
    sizes = np.asarray([setup.batch_size_per_device for setup in setups])
    for device, setup, rate, step_s, size in zip(
        devices, setups, rows["throughput"], predicted, sizes, strict=True
    ):
        yield MeasuredRate(
            group=f"{title} {model} {phase} {kind_of(setup.precision)}",
            device=device.name,
            precision=setup.precision,
            measured_samples_per_s=float(rate),
            predicted_samples_per_s=float(size / step_s),
        )


def _setup(row: Mapping[Any, Any], title: str, phase: str) -> TrainingSetup:
    precision = Precision(row["dtype"])
    if precision is Precision.FP16 and title in _MIXED_FP16:
        precision = Precision.AMP
    optimizer = "adam" if title == "Lambda BERT" else "sgd" if title == "Lambda TensorFlow" else "none"
    return TrainingSetup(
        batch_size_per_device=int(row["batch_size_per_gpu"]),
        precision=precision,
        phase=Phase(phase),
        optimizer=optimizer if phase == "train" else "none",
    )


def _predicted(
    model: str, devices: list[Device], setups: list[TrainingSetup], weights: CostModel
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Predicted steps, one trace per kind of precision [s]."""
    times = np.empty(len(setups))
    for precision in dict.fromkeys(setup.precision for setup in setups):
        rows = [i for i, setup in enumerate(setups) if setup.precision is precision]
        prepared = _prepared(model, setups[rows[0]])
        found = point_times(prepared, [devices[i] for i in rows], [setups[i] for i in rows], weights)
        times[rows] = found.step_s
    return times


def _prepared(model: str, setup: TrainingSetup) -> PreparedModel:
    if model not in _BERT:
        return prepare(trace(ModelRequest(model=f"torchvision:{_NETWORKS[model]}"), setup))
    hidden_size, num_layers = _BERT[model]
    return prepared_bert(setup, _BERT_TOKENS, hidden_size=hidden_size, num_layers=num_layers)


def groups_of(rates: Iterable[MeasuredRate]) -> dict[str, list[MeasuredRate]]:
    """Measurements by set."""
    found: dict[str, list[MeasuredRate]] = {}
    for rate in rates:
        found.setdefault(rate.group, []).append(rate)
    return found
