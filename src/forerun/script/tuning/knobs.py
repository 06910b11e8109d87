"""Knobs: settings of a training run that can be changed, by a hook or by an argument of the script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.base.errors import UsageError, near_matches

__all__ = ["KNOBS", "Knob", "check_value", "find_knob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting that can be changed.

    Attributes:
        name: Name of the knob in a space.
        words: Description of the knob in a few words.
        has_hook: True if a hook can set the knob inside an unchanged script; others need an argument of the script.
        choices: All values of the knob; empty for numbers.
        is_number: True if values are numbers.
        lowest: Smallest number.
        changes_result: True if the knob may change the trained model.
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
            words="batch size: samples in a step",
            has_hook=True,
            is_number=True,
            lowest=1,
            changes_result=True,
        ),
        Knob(name="lr", words="learning rate", has_hook=False, is_number=True, changes_result=True),
        Knob(
            name="epochs",
            words="epochs: passes over the data",
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
            name="cache_data",
            words="decoded samples kept in memory, by an argument of the script",
            has_hook=False,
            choices=_ONOFF,
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
        Knob(name="num_workers", words="worker processes of the loader", has_hook=True, is_number=True),
        Knob(
            name="jpeg_decode_size",
            words="decode JPEGs at a smaller scale that keeps this height and width; 0 for full size [pixels]",
            has_hook=True,
            is_number=True,
            changes_result=True,
        ),
        Knob(name="pin_memory", words="page-locked batches", has_hook=True, choices=_ONOFF),
        Knob(
            name="prefetch_factor",
            words="batches that each worker prepares ahead",
            has_hook=True,
            is_number=True,
            lowest=1,
        ),
        Knob(
            name="persistent_workers",
            words="keep workers alive between epochs",
            has_hook=True,
            choices=_ONOFF,
        ),
        Knob(
            name="optimizer_implementation",
            words="implementation of the optimizer's update",
            has_hook=True,
            choices=("foreach", "fused", "forloop"),
        ),
        Knob(
            name="cudnn_benchmark", words="let cuDNN try its algorithms first", has_hook=True, choices=_ONOFF
        ),
        Knob(
            name="num_threads",
            words="threads for kernels on a processor",
            has_hook=True,
            is_number=True,
            lowest=1,
        ),
        Knob(
            name="accumulation",
            words="batches per optimizer step",
            has_hook=True,
            is_number=True,
            lowest=1,
            changes_result=True,
        ),
        Knob(
            name="cosine_epochs",
            words="epochs over which the learning rate falls along a cosine",
            has_hook=True,
            is_number=True,
            lowest=1,
            changes_result=True,
        ),
    )
}
"""All knobs by name."""


def find_knob(name: str) -> Knob:
    """The knob with this name.

    Raises:
        UsageError: There is no such knob; the message lists near matches.
    """
    if "quanti" in name.lower():
        raise UsageError(
            f"expected a knob of the training, got '{name}': static quantisation changes a model after its training "
            "and does not change its time; quantise the model that the best configuration saves, with "
            "torchao or torch.ao.quantization"
        )
    if name not in KNOBS:
        raise UsageError(
            f"expected a knob ({', '.join(KNOBS)}), got '{name}'{near_matches(name, KNOBS)}; an argument of the "
            "script with another name is given as map: --its-flag"
        )
    return KNOBS[name]


def check_value(knob: Knob, value: Any) -> Any:
    """The value, checked to be one that the knob can have.

    Raises:
        UsageError: The knob cannot have this value.
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
