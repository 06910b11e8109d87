"""The device's part of a step, predicted by a cost model for every configuration of a space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.script.profiling.profile import Profile
from forerun.script.tuning.knobs import KNOBS
from forerun.script.tuning.space import Space

__all__ = ["PREDICTED_KNOBS", "DevicePoint", "DeviceSteps", "device_point", "device_points", "script_point"]

PREDICTED_KNOBS = ("batch_size", "amp", "channels_last", "image_size")
"""Knobs that change the device's work in a step and that the cost model knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePoint:
    """Settings on which the device's part of a step depends; the fields are knobs.

    Attributes:
        batch_size: Number of samples of a step on one device.
        amp: Mixed precision: ``off``, ``bf16`` or ``fp16``.
        channels_last: True if images are in the memory order channels_last.
        image_size: Height and width of images; None for the model's own size [pixels].
    """

    batch_size: int
    amp: str = "off"
    channels_last: bool = False
    image_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSteps:
    """Predicted steps of a model, over the points of a space.

    Attributes:
        source: Name of the model that predicts the steps, in a few words.
        own: Point of the script as it is.
        step_s: Step time by point [s]; a point without an entry is not known.
        peak_bytes: Upper end of the peak memory by point [bytes].
        memory_bytes: Memory of the device; None to reject nothing by memory [bytes].
    """

    source: str
    own: DevicePoint
    step_s: Mapping[DevicePoint, float]
    peak_bytes: Mapping[DevicePoint, float]
    memory_bytes: float | None = None

    def relative_time(self, values: Mapping[str, Any]) -> float | None:
        """Time of a step over that of the script as it is, T(values) / T(own); None if it is not known."""
        step_s = self.step_s.get(device_point(values, self.own))
        return None if step_s is None else step_s / self.step_s[self.own]

    def fits(self, values: Mapping[str, Any]) -> bool:
        """True if the upper end of the predicted peak fits in the device's memory, or the point is the script's own."""
        point = device_point(values, self.own)
        peak_bytes = self.peak_bytes.get(point)
        if point == self.own or peak_bytes is None or self.memory_bytes is None:
            return True
        return peak_bytes <= self.memory_bytes

    def num_changes(self, values: Mapping[str, Any]) -> int:
        """Number of knobs whose value differs from the script as it is."""
        point = device_point(values, self.own)
        return sum(getattr(point, name) != getattr(self.own, name) for name in PREDICTED_KNOBS)


def device_point(values: Mapping[str, Any], own: DevicePoint) -> DevicePoint:
    """The point of a configuration; a knob it does not set keeps the script's value."""
    return replace(own, **{name: values[name] for name in PREDICTED_KNOBS if name in values})


def script_point(profile: Profile, base: Mapping[str, Any], image_size: int | None) -> DevicePoint | None:
    """The point of the script as it is; None if its batch size is not known.

    Args:
        profile: Profile of the script as it is.
        base: The script's own values that are known.
        image_size: Height and width of the script's images, if the base lacks them; None for the model's own size
            [pixels].
    """
    batch_size = base.get("batch_size") or profile.loader.get("batch_size") or profile.batch_size
    if not batch_size:
        return None
    amp = base.get("amp", "off")
    return DevicePoint(
        batch_size=round(batch_size),
        amp=amp if amp in KNOBS["amp"].choices else "off",
        channels_last=base.get("channels_last") is True,
        image_size=base.get("image_size") or image_size,
    )


def device_points(space: Space, own: DevicePoint) -> dict[str, tuple[Any, ...]]:
    """The values of each knob of a point, in order: the candidates of the space, and the script's own."""
    axes = {}
    for name in PREDICTED_KNOBS:
        parameter = space.parameter(name)
        listed = () if parameter is None else parameter.candidates
        axes[name] = tuple(dict.fromkeys((*listed, getattr(own, name))))
    return axes
