"""``forerun.advise``, and ways to make a run fit: changes that help a run, each predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Unpack

from forerun.base.answers import Answer
from forerun.cost.time.weights import CostModel
from forerun.prediction.estimate import Estimate, Interval
from forerun.prediction.estimate_run import input_note
from forerun.prediction.models import TracedModels
from forerun.question.devices.cluster import Cluster
from forerun.question.devices.device import Device
from forerun.question.options import RunOptions, with_common_settings
from forerun.question.run import Run
from forerun.search.estimates import estimate_of, estimates, run_from
from forerun.search.offers import (
    Offer,
    divided,
    faster,
    forgotten,
    larger_devices,
    shared,
    smaller,
    together,
    with_workers,
)
from forerun.search.search import SETTINGS, Search
from forerun.tracing.trace import full_name

if TYPE_CHECKING:
    import torch

_LEAST_GAIN = 0.01
_NOISE = 0.02
"""Shares of a step below this are within the noise of a measurement."""
_NUM_CHANGES = 3
_MOST_DEVICES = 2
_TOGETHER = "together they make the run fit this device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Answer):
    """One change of a run.

    Attributes:
        settings: The options that differ, as on the command line.
        meaning: What it does, and what it costs.
        gain: Samples per second over those of the run as it is, less 1.
        gain_low, gain_high: The same at the ends of the interval of the changed run; errors that both runs share are
            left out.
        samples_per_s: Throughput after the change.
        peak_memory_bytes: Memory of a device after the change.
        fits: "yes", "no" or "close".
        run: The changed run.
    """

    settings: str
    meaning: str
    gain: float
    gain_low: float
    gain_high: float
    samples_per_s: float
    peak_memory_bytes: Interval
    fits: str | None
    run: Run


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvicePlan(Answer):
    """The changes that help a run most.

    Attributes:
        run: The run as it is.
        model, device: Its model and devices.
        step_time_s: Its step.
        samples_per_s: Its throughput.
        peak_memory_bytes: Memory of a device.
        fits: "yes", "no" or "close".
        changes: At most three changes, the best first.
        num_tried: Changes that were predicted.
        notes: What a reader must know.
    """

    run: Run
    model: str
    device: str
    step_time_s: Interval
    samples_per_s: float
    peak_memory_bytes: Interval
    fits: str | None
    changes: tuple[Change, ...]
    num_tried: int
    notes: tuple[str, ...]


@with_common_settings(RunOptions)
def advise(
    model: str | torch.nn.Module | Run,
    *,
    device: str | Device | Cluster | None = None,
    cost_model: CostModel | None = None,
    use_cache: bool = True,
    **options: Unpack[RunOptions],
) -> AdvicePlan:
    """The three changes that help a run most, each by itself, with its predicted gain and memory.

    Of a run that does not fit, several changes together that make it fit the device are tried first. Tried
    are recomputation, a larger batch, half precision, torch.compile, fused attention, optimizer and kernels, another
    strategy or layout, adapters (LoRA), workers of the loader, and other devices. A change must fit, unless
    nothing does. The global batch stays where the change says nothing else.

    Args:
        model: As in ``predict``.
        device: As in ``predict``.
        cost_model: As in ``predict``.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the run as it is, see ``forerun.RunOptions``.

    Raises:
        UsageError: The question must be changed.
        FailureError: The model could not be built or traced.
    """
    run = run_from(model, device, options)
    models = TracedModels(use_cache=use_cache)
    now = estimate_of(run, models, cost_model).estimate

    def tried(offers: Iterable[Offer]) -> Iterator[Change]:
        for offer, found in predicted(run, offers, models, cost_model):
            yield _change(run, offer, now, found)

    changes: list[Change] = []
    if now.fits == "no":
        for change in tried(chain(divided(now), together(now))):
            words = change.settings + change.meaning
            changes.append(replace(change, settings=words, meaning=_TOGETHER))
            if change.fits != "no":
                break  # the next would ask more of the user
    if run.loader is not None:
        fed = estimate_of(replace(run, loader=None), models, cost_model).estimate
        changes += tried(with_workers(run, fed.step_time_s))
    changes += tried(faster(run))
    helpful = [change for change in changes if change.gain > _LEAST_GAIN and change.fits == "yes"]
    if now.fits == "no":
        helpful = [change for change in changes if change.fits != "no"]
    assert now.peak_memory_bytes is not None
    of_input = filter(None, [input_note(run, models.of(run).graph.input_shape)])
    return AdvicePlan(
        run=run,
        model=full_name(run.model.model),
        device=run.cluster.spec,
        step_time_s=now.step_time_s,
        samples_per_s=now.throughput_samples_per_s.value,
        peak_memory_bytes=now.peak_memory_bytes,
        fits=now.fits,
        changes=_best(helpful),
        num_tried=len(changes),
        notes=(*of_input, *_notes(now, changes)),
    )


def predicted(
    run: Run, offers: Iterable[Offer], models: TracedModels, cost_model: CostModel | None = None
) -> Iterator[tuple[Offer, Estimate]]:
    """Offers with their estimates, one at a time; those that the model or device does not allow are left out."""
    known = tuple(offers)
    search = Search(run=run, axes={SETTINGS: [offer.change for offer in known]})
    answers = estimates(search, models, cost_model, skips_refused=True)
    return ((offer, found.estimate) for offer, found in zip(known, answers, strict=True) if found is not None)


def _best(changes: list[Change]) -> tuple[Change, ...]:
    """The changes that help most: several together that make a run fit, settings, and last the best other device."""
    ordered = sorted(changes, key=lambda change: (change.meaning != _TOGETHER, -change.gain))
    devices = [change for change in ordered if change.settings.startswith("--on ")]
    own = [change for change in ordered if change not in devices]
    num_own = max(_NUM_CHANGES - len(devices), _NUM_CHANGES - 1)
    return (*own[:num_own], *devices)[:_NUM_CHANGES]


def _change(run: Run, offer: Offer, now: Estimate, found: Estimate) -> Change:
    before, after = now.throughput_samples_per_s.value, found.throughput_samples_per_s
    assert found.peak_memory_bytes is not None
    gain = after.value / before - 1
    own = (found.step_time_s.high / found.step_time_s.low) / (now.step_time_s.high / now.step_time_s.low)
    # Both predictions rest on the same cost model: the gain is uncertain by what the change adds, and a tenth of
    # itself.
    spread = max(0.1 * abs(gain), abs(own**0.5 - 1))
    return Change(
        settings=offer.options,
        meaning=offer.meaning,
        gain=gain,
        gain_low=gain - spread,
        gain_high=gain + spread,
        samples_per_s=after.value,
        peak_memory_bytes=found.peak_memory_bytes,
        fits=found.fits,
        run=run.with_(**offer.change),
    )


def _notes(now: Estimate, tried: list[Change]) -> Iterator[str]:
    yield f"{len(tried)} changes were predicted; gains of several do not add up"
    if now.fits == "no":
        yield "the run does not fit as it is: changes that fit are shown, whatever they cost"
        return
    full = (change for change in tried if change.gain > _LEAST_GAIN and change.fits != "yes")
    for change in islice(full, 3):
        faster = (
            f"{100 * change.gain:.0f} % faster" if change.gain < 9 else f"{1 + change.gain:.3g} times as fast"
        )
        yield f"{change.settings} would be {faster}, but does not surely fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way(Answer):
    """A change of a run.

    Attributes:
        words: The change in words, with what else it changes.
        change: Settings to change, by their names in Python; ``device`` for another device.
        peak_memory_bytes: Peak memory of one device with the change [bytes].
        throughput_samples_per_s: Throughput with the change [samples/s].
        gain: Share of the step's time that the change saves at the same work, negative if it costs time.
    """

    words: str
    change: Mapping[str, Any]
    peak_memory_bytes: float
    throughput_samples_per_s: float
    gain: float


def ways_to_fit(estimate: Estimate) -> tuple[Way, ...]:
    """Changes that let a run fit that does not, each checked by a prediction; empty for a run that fits.

    A smaller batch, the same batch in micro-steps, recomputation, half precision, FSDP over several devices; if none of
    these is enough, several changes together; several such devices that divide the weights; and larger devices, those
    with the lowest price first.

    Args:
        estimate: The answer about the run as it is.
    """
    if estimate.fits != "no":
        return ()
    found = list(_ways(estimate, _said(smaller(estimate))))
    found += islice(_ways(estimate, _said(divided(estimate))), 1)
    if not found:
        found += islice(_ways(estimate, _said(together(estimate), "together ")), 1)
    found += islice(_ways(estimate, shared(estimate)), 1)
    return (*found, *islice(_ways(estimate, _said(larger_devices(estimate))), _MOST_DEVICES))


def ways_to_save(estimate: Estimate) -> tuple[Way, ...]:
    """Changes that make a run faster and are often forgotten, the largest gain first.

    Channels last, torch.compile and autocast, each alone.

    Args:
        estimate: The answer about the run as it is.
    """
    ways = [way for way in _ways(estimate, _said(forgotten(estimate))) if way.gain >= _NOISE]
    return tuple(sorted(ways, key=lambda way: -way.gain))


def _said(offers: Iterable[Offer], before: str = "") -> Iterator[Offer]:
    """Offers whose meaning begins with their options."""
    return (replace(offer, meaning=f"{before}{offer.options}{offer.meaning}") for offer in offers)


def _ways(estimate: Estimate, offers: Iterable[Offer]) -> Iterator[Way]:
    """The offers that fit, with their figures."""
    for offer, changed in predicted(estimate.run, offers, TracedModels()):
        peak, rate = changed.peak_memory_bytes, changed.throughput_samples_per_s.value
        if changed.fits == "no" or peak is None or peak.value > changed.device_memory_bytes:
            continue
        yield Way(
            words=offer.meaning,
            change=offer.change,
            peak_memory_bytes=peak.value,
            throughput_samples_per_s=rate,
            gain=1 - estimate.throughput_samples_per_s.value / rate,
        )
