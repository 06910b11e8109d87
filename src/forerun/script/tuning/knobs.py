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
        has_hook: True if a hook can set the knob inside an unchanged script; others need an argument of the script.
        choices: All values of the knob; empty for numbers.
        lowest: Smallest number.
        changes_result: True if the knob may change the trained model.
        usual: Value in a script that does not set it; None if scripts differ.
        helpful: Value that usually makes a script faster; None if there is none.
    """

    name: str
    has_hook: bool = True
    choices: tuple[Any, ...] = ()
    lowest: float = 0.0
    changes_result: bool = False
    usual: Any = None
    helpful: Any = None


_ONOFF: Mapping[str, Any] = {"choices": (False, True), "usual": False}
_MODES = ("off", "default", "reduce-overhead", "max-autotune")

KNOBS: Mapping[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(name="batch_size", lowest=1, changes_result=True),  # samples in a step
        Knob(name="lr", has_hook=False, changes_result=True),
        Knob(name="epochs", has_hook=False, lowest=1, changes_result=True),
        Knob(name="image_size", has_hook=False, lowest=1, changes_result=True),  # height and width [pixels]
        Knob(name="cache_data", has_hook=False, choices=(False, True)),  # decoded samples kept in memory
        Knob(name="amp", choices=("off", "bf16", "fp16"), changes_result=True, usual="off"),
        Knob(name="channels_last", **_ONOFF, helpful=True),
        Knob(name="compile", choices=_MODES, usual="off"),  # modes of torch.compile
        Knob(name="num_workers", usual=0),
        # JPEGs are decoded at a smaller scale that keeps this height and width; 0 for their full size [pixels].
        Knob(name="jpeg_decode_size", changes_result=True, usual=0),
        Knob(name="pin_memory", **_ONOFF, helpful=True),
        Knob(name="prefetch_factor", lowest=1, usual=2, helpful=4),  # batches that each worker prepares ahead
        Knob(name="persistent_workers", **_ONOFF, helpful=True),
        Knob(
            name="optimizer_implementation",
            choices=("foreach", "fused", "forloop"),
            usual="foreach",
            helpful="fused",
        ),
        Knob(name="cudnn_benchmark", **_ONOFF, helpful=True),
        Knob(name="num_threads", lowest=1),
        Knob(name="accumulation", lowest=1, changes_result=True, usual=1),  # batches per optimizer step
        Knob(name="cosine_epochs", lowest=1, changes_result=True),  # the learning rate falls over them
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
            "and takes no part in the time of it; quantise the model that the best configuration saves, with "
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
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not knob.choices and not (is_number and value >= knob.lowest):
        raise UsageError(f"expected {knob.name} to be a number of {knob.lowest:g} or more, got '{value}'")
    return value
