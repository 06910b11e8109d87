"""What can be changed about a training run, and how each change reaches a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import UsageError, near_matches

__all__ = ["KNOBS", "Knob", "check_value", "find_knob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be changed.

    Attributes:
        name: As in a space.
        words: What it is.
        has_hook: Whether it can be set inside an unchanged script; others need an argument of the script.
        choices: All values there are; empty for numbers.
        is_number: Whether values are numbers.
        lowest: Smallest number.
        changes_result: Whether a trained model may come out different.
    """

    name: str
    words: str
    has_hook: bool
    choices: tuple[Any, ...] = ()
    is_number: bool = False
    lowest: float = 0.0
    changes_result: bool = False


_ONOFF = (False, True)

KNOBS: Mapping[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            name="batch_size",
            words="samples of a step",
            has_hook=True,
            is_number=True,
            lowest=1,
            changes_result=True,
        ),
        Knob(name="lr", words="learning rate", has_hook=False, is_number=True, changes_result=True),
        Knob(
            name="epochs",
            words="passes over the data",
            has_hook=False,
            is_number=True,
            lowest=1,
            changes_result=True,
        ),
        Knob(
            name="image_size",
            words="height and width of images [pixels]",
            has_hook=False,
            is_number=True,
            lowest=1,
            changes_result=True,
        ),
        Knob(
            name="amp",
            words="autocast of the forward pass",
            has_hook=True,
            choices=("off", "bf16", "fp16"),
            changes_result=True,
        ),
        Knob(name="channels_last", words="memory order of images", has_hook=True, choices=_ONOFF),
        Knob(
            name="compile",
            words="torch.compile, by mode",
            has_hook=True,
            choices=("off", "default", "reduce-overhead", "max-autotune"),
        ),
        Knob(name="num_workers", words="processes of the loader", has_hook=True, is_number=True),
        Knob(
            name="jpeg_decode_size",
            words="JPEGs are decoded at a scale that keeps this height and width; 0 for full size [pixels]",
            has_hook=True,
            is_number=True,
            changes_result=True,
        ),
        Knob(name="pin_memory", words="page-locked batches", has_hook=True, choices=_ONOFF),
        Knob(
            name="prefetch_factor", words="batches ahead per worker", has_hook=True, is_number=True, lowest=1
        ),
        Knob(
            name="persistent_workers", words="workers live on between epochs", has_hook=True, choices=_ONOFF
        ),
        Knob(
            name="optimizer_implementation",
            words="how the update is computed",
            has_hook=True,
            choices=("foreach", "fused", "forloop"),
        ),
        Knob(name="cudnn_benchmark", words="cuDNN tries algorithms first", has_hook=True, choices=_ONOFF),
        Knob(
            name="num_threads",
            words="threads of a processor's kernels",
            has_hook=True,
            is_number=True,
            lowest=1,
        ),
        Knob(
            name="accumulation",
            words="batches of one optimizer step",
            has_hook=True,
            is_number=True,
            lowest=1,
            changes_result=True,
        ),
        Knob(
            name="cosine_epochs",
            words="epochs of a cosine of the learning rate",
            has_hook=True,
            is_number=True,
            lowest=1,
            changes_result=True,
        ),
    )
}
"""All knobs by name."""


def find_knob(name: str) -> Knob:
    """The knob of a name.

    Raises:
        UsageError: There is none; the message lists near matches.
    """
    if name not in KNOBS:
        raise UsageError(
            f"expected a knob ({', '.join(KNOBS)}), got '{name}'{near_matches(name, KNOBS)}; an argument of the "
            "script with another name is given as map: --its-flag"
        )
    return KNOBS[name]


def check_value(knob: Knob, value: Any) -> Any:
    """The value, if the knob can have it.

    Raises:
        UsageError: It cannot.
    """
    # YAML 1.1 reads a bare off as false.
    if value is False and "off" in knob.choices:
        return "off"
    if knob.choices and value not in knob.choices:
        raise UsageError(
            f"expected {knob.name} to be one of {', '.join(map(str, knob.choices))}, got '{value}'"
        )
    if knob.is_number and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or value < knob.lowest
    ):
        raise UsageError(f"expected {knob.name} to be a number of {knob.lowest:g} or more, got '{value}'")
    return value
