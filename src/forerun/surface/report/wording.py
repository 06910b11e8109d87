"""Wording of quantities, setups and verdicts on every page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from forerun.base.units import format_beside, format_count
from forerun.prediction.estimate import Estimate, Interval, Provenance
from forerun.question.model import find_architecture

if TYPE_CHECKING:
    from forerun.question.devices.prices import Currency

_PHASES = {"train": "training step", "forward": "forward pass", "inference": "inference"}

_FITS = {
    "yes": "fits",
    "no": "does not fit",
    "close": "too close to call, may run out of memory",
    None: "not compared with a device",
}

_PROVENANCE = {
    Provenance.MEASURED: "this very configuration was measured on this device",
    Provenance.CALIBRATED: "the cost model was adjusted to measurements of this very device",
    Provenance.PUBLISHED: "published steps of this network on this device",
    Provenance.INTERPOLATED: "the cost model was fitted on steps of other models on this kind of device",
    Provenance.DATASHEET_ONLY: "the cost model was fitted without this kind of device and precision; "
    "only the datasheet is known, so the interval is wider",
}

_BOUNDS = {
    "compute": "bound by compute: the arithmetic takes most of the time",
    "memory bandwidth": "bound by memory bandwidth: moving data takes most of the time",
    "data loader": "bound by the data loader: the device waits for batches; more workers or cores would help",
    "offload": "bound by transfers: the device waits for weights or states that the host holds",
    "host": "bound by the host: the device waits for the CPU to launch work; a larger batch costs little",
}


def range_words(interval: Interval, format_value: Callable[[float], str]) -> str:
    """The interval of a value in the value's unit, which both ends share: '39.1 to 52.0 ms'."""
    whole = format_value(interval.value)
    low, high = (format_beside(end, whole, format_value) for end in (interval.low, interval.high))
    number, _, unit = low.partition(" ")
    return f"{number if unit == high.partition(' ')[2] else low} to {high}"


_shown: ContextVar[Currency | None] = ContextVar("forerun_currency", default=None)


@contextmanager
def amounts_in(currency: Currency) -> Iterator[None]:
    """Inside the context, amounts of money are written in another currency."""
    token = _shown.set(currency)
    try:
        yield
    finally:
        _shown.reset(token)


def _currency() -> Currency:
    from forerun.question.devices.prices import DOLLAR  # a page without money does without tables of prices

    return _shown.get() or DOLLAR


def format_usd(amount_usd: float) -> str:
    """An amount of money, in dollars or the currency of ``amounts_in``: '$0.0123', '$4.20', '$1,234'."""
    return _currency().format(amount_usd)


def format_price(price_usd: float) -> str:
    """A price to the hundredth, in dollars or the currency of ``amounts_in``: '$0.50'."""
    return _currency().format_price(price_usd)


def format_flops(work_flop: float) -> str:
    """An amount of work: '24.5 GFLOP'."""
    text = format_count(work_flop)
    return f"{text}FLOP" if text[-1].isalpha() else f"{text} FLOP"


def format_percent(fraction: float) -> str:
    """A share: '61 %', below ten per cent '6.8 %'."""
    per_cent = 100 * fraction
    return f"{per_cent:.1f} %" if abs(per_cent) < 9.95 else f"{per_cent:.0f} %"


def format_whole(count: float) -> str:
    """A whole number with separators: '40,037'."""
    return f"{count:,.0f}"


def setup_words(estimate: Estimate) -> str:
    """The training setup in one line."""
    per_device = " a device" if estimate.num_devices > 1 else ""
    return f"batch {format_whole(estimate.batch_size_per_device)}{per_device}, {_recipe(estimate)}"


def plot_title(estimate: Estimate) -> str:
    """Title of a plot over batch sizes."""
    return f"{estimate.model} on {estimate.device_title}\n{_recipe(estimate)}"


def _recipe(estimate: Estimate) -> str:
    words = [
        estimate.precision,
        # The order of an image's channels says nothing to those who train on tokens, sound or rows.
        *([estimate.layout] if _reads_images(estimate) else []),
        "compiled" if estimate.compile else "eager",
        _PHASES.get(estimate.phase, estimate.phase),
    ]
    if estimate.phase == "train":
        words.append("no optimizer" if estimate.optimizer == "none" else estimate.optimizer)
    return ", ".join(words)


def _reads_images(estimate: Estimate) -> bool:
    known = find_architecture(estimate.model)
    is_sound = known is not None and known.model_class.endswith("CTC")
    return not (estimate.tokens_per_s or is_sound) and any(
        p.name == "convolution" for p in estimate.breakdown
    )


def fit_sentence(fits: str | None) -> str:
    """The verdict on memory."""
    return _FITS[fits]


def provenance_sentence(estimate: Estimate) -> str:
    """The basis of the step time and the sources of its error, in words."""
    tier, errors = estimate.provenance, estimate.error_sources
    unknown = f"unknown machine +{format_percent(errors.unknown_system)}, " if errors.unknown_system else ""
    return f"{tier}: {_PROVENANCE[tier]}. Error: {unknown}cost model +{format_percent(errors.cost_model)}"


def bound_sentence(bound_by: str) -> str:
    """First change to make for a faster step."""
    return _BOUNDS.get(bound_by, f"bound by {bound_by}")
