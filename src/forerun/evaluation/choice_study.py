"""Choice quality: are devices ranked as they were measured, and is the chosen one the right one?

For each network that was measured on at least four devices the devices are ranked by predicted throughput. A choice is
right if the chosen device is truly within 5 % of the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from forerun.evaluation.choice_sets import MeasuredRate, groups_of, kind_of
from forerun.evaluation.corpus import Measured
from forerun.evaluation.op_time_fit import as_weights, encode, fit_ensemble, fittable
from forerun.evaluation.op_time_studies import HeldOut, family_study, predict_with
from forerun.hardware import find_device
from forerun.hardware.device import NumberFormat
from forerun.hardware.prices import PriceKind, cheapest_rental, load_prices
from forerun.regressors.op_fit import FitSettings
from forerun.workload.setup import Phase, Precision

__all__ = [
    "ChoiceResult",
    "SetResult",
    "all_choices",
    "choice_results",
    "choice_section",
    "held_out_rates",
    "lambda_study",
    "torchvision_study",
]

Floats = npt.NDArray[np.float64]

MIN_DEVICES = 4
RIGHT_WITHIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """One set of devices: rank correlation, and how far the chosen device falls behind the best.

    Attributes:
        group: Which set.
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


def lambda_study(
    steps: Sequence[Measured], settings: Sequence[FitSettings], report: Callable[[str], None]
) -> HeldOut:
    """ResNet-50 on the devices of the Lambda suite that no other study holds out, by a fit without any of them."""
    is_lambda = np.asarray([step.record.row_id.startswith("lambda ") for step in steps])
    names = np.asarray([step.device.name for step in steps])
    with_others = set(names[~is_lambda].tolist())
    devices = sorted(set(names[is_lambda].tolist()) - with_others)
    held_out = np.isin(names, devices)
    encoded = encode(steps)
    networks = fit_ensemble(encoded, np.flatnonzero(fittable(steps) & ~held_out), settings)
    report(f"held out together: {', '.join(devices)}")
    rows = np.flatnonzero(held_out & is_lambda)
    return predict_with(as_weights(networks, encoded.systems, {}), [steps[int(row)] for row in rows])


def torchvision_study(
    steps: Sequence[Measured], settings: Sequence[FitSettings], report: Callable[[str], None]
) -> HeldOut:
    """The torchvision networks of ``gpu_benchmarks``, each predicted by a fit without its family on any device."""
    tested = [
        index
        for index, step in enumerate(steps)
        if step.record.source == "gpu_benchmarks" and not step.record.row_id.startswith("lambda ")
    ]
    return family_study(steps, tested, settings, report)


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
    """The sets of at least four devices, ranked by the prediction and by the baselines that can rank them."""
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
    scores, measured = np.asarray(scored).T
    return SetResult(
        group=group,
        num_devices=len(scored),
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
    full = [rate for rate in by_network if kind_of(rate.precision) == "full"]
    half = [rate for rate in by_network if kind_of(rate.precision) == "half"]
    return [
        *choice_results("network held out", by_network),
        *choice_results("- full precision", full),
        *choice_results("- half precision", half),
        *choice_results("device held out", held_out_rates(devices)),
        *choice_results("not in the fit", outside),
    ]


def choice_section(results: Sequence[ChoiceResult]) -> str:
    """The section of the accuracy page."""
    lines = [
        "| sets | ranked by | sets | devices | median Spearman | chosen within 5 % of the best | worst loss |\n",
        "| --- | --- | --- | --- | --- | --- | --- |\n",
    ]
    for result in results:
        sizes = [found.num_devices for found in result.sets]
        lines.append(
            f"| {result.title} | {result.predictor} | {len(result.sets)} | {min(sizes)} to {max(sizes)} | "
            f"{result.median_spearman:.3f} | {100 * result.right_share:.0f} % | "
            f"{100 * max(found.loss for found in result.sets):.0f} % |\n"
        )
    return (
        "## Choosing a device\n\nEvery network of `gpu_benchmarks` that was measured on at least four single GPUs: "
        "devices ranked by predicted throughput against measured throughput (median of a device's runs), and whether "
        "the device that comes first is truly within 5 % of the best. `Network held out`: figures of a network come "
        "from a fit without its family on any device. `Device held out`: figures of a device come from a fit without "
        "any row of it, so every device of a set is one that no measurement stands behind. `Not in the fit`: tables "
        "that no fit has read (PyTorch 0.3, Torch7, TensorFlow, BERT), by the shipped model. Price ranks the devices "
        "of the price table. `dle_training` has no network on four devices of the catalogue.\n\n"
        + "".join(lines)
    )
