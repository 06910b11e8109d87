"""Layouts of devices: ways in which the devices of a cluster divide a model, its samples and its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import prod

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.question.settings import setting

__all__ = [
    "AXES",
    "EXPERT_AXIS",
    "ContextKind",
    "DeviceLayout",
    "PipelineSchedule",
    "StageSplit",
    "parse_parallel",
]

AXES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
"""Axes of a layout by their short names, from the devices that talk most to those that talk least."""

EXPERT_AXIS = {"ep": "expert"}
"""Devices that divide the experts: some of those that take tokens of their own, no devices besides."""

_NAMES = (*AXES, *EXPERT_AXIS)
_MOST = 100_000


class PipelineSchedule(StrEnum):
    """Order of the micro-steps on the stages of a pipeline."""

    GPIPE = "gpipe"
    """All forward passes, then all backward passes."""
    ONE_FORWARD_ONE_BACKWARD = "1f1b"
    INTERLEAVED = "interleaved"
    """1F1B with several groups of blocks, virtual stages, on each device."""
    ZERO_BUBBLE = "zero-bubble"
    """1F1B whose weight gradients fill the waiting at the end (ZB-H1)."""


class ContextKind(StrEnum):
    """Exchange of context parallelism: keys and values around a ring, or heads for tokens (all-to-all)."""

    RING = "ring"
    ULYSSES = "ulysses"


class StageSplit(StrEnum):
    """Blocks of the stages of a pipeline."""

    EVEN = "even"
    """As many in each (Megatron-LM)."""
    BALANCED = "balanced"
    """Fewer in the last stage, which has the head: stages of equal weight (nanotron)."""
    ENDS = "ends"
    """Input and head count as one block each (Megatron-LM's account-for-embedding and account-for-loss)."""


_layout = partial(setting, group="sharing")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """Numbers of devices along each axis, and the order of the work.

    Attributes:
        tensor: Devices that divide each block (tp).
        pipeline: Stages of blocks (pp).
        context: Devices that divide the tokens of a sample (cp).
        data: Groups of devices that take samples of their own (dp).
        expert: Of the devices of ``data`` and ``context``, those among which the experts are divided (ep).
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    sequence_parallel: bool = _layout(
        True,
        help="With tp: divide the tokens as well, between the divided products.",
        default="yes",
        needs="tp",
        only_changed=True,
    )
    keep_gathered: bool = _layout(
        False,
        help="With tp: keep the tokens that are gathered for a product until its backward pass (torchtitan) "
        "instead of gathering them again (Megatron-LM).",
        default="no",
        needs="tp",
        only_changed=True,
    )
    context_kind: ContextKind = _layout(
        ContextKind.RING,
        name="context_parallel",
        help="With cp: exchange of keys and values: ring, or ulysses (all-to-all).",
        needs="cp",
    )
    schedule: PipelineSchedule = _layout(
        PipelineSchedule.ONE_FORWARD_ONE_BACKWARD,
        name="pipeline_schedule",
        help="With pp: order of the micro-steps: gpipe, 1f1b, interleaved or zero-bubble.",
        needs="pp",
        only_changed=True,
    )
    virtual_stages: int = _layout(
        1,
        help="With the interleaved schedule: groups of blocks of each stage.",
        low=1,
        high=1000,
        needs="pp",
        only_changed=True,
    )
    stage_split: StageSplit = _layout(
        StageSplit.EVEN,
        help="With pp: as many blocks in every stage (even), fewer beside the head (balanced), or input and "
        "head counted as one block each (ends).",
        needs="pp",
        only_changed=True,
    )

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "data", "expert", "virtual_stages"):
            if getattr(self, name) < 1:
                raise InvalidSetupError(
                    f"every axis of a layout needs at least 1 device, got {name} {getattr(self, name)}"
                )
        if self.keep_gathered and not self.sequence_parallel:
            raise InvalidSetupError(
                "without sequence parallelism every device has all tokens; leave --keep-gathered out"
            )
        if self.schedule is PipelineSchedule.INTERLEAVED and self.pipeline > 1 and self.virtual_stages < 2:
            raise InvalidSetupError(
                "the interleaved schedule needs several groups of blocks on each stage; give --virtual-stages 2"
            )
        if self.virtual_stages > 1 and self.schedule is not PipelineSchedule.INTERLEAVED:
            raise InvalidSetupError(
                f"--virtual-stages {self.virtual_stages} belongs to the interleaved schedule, got "
                f"{self.schedule}; give "
                "--pipeline-schedule interleaved"
            )
        if self.virtual_stages > 1 and self.stage_split is StageSplit.BALANCED:
            raise InvalidSetupError(
                "groups of blocks of the interleaved schedule are all of one size; leave --stage-split balanced out"
            )
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise InvalidSetupError("virtual stages need a pipeline; give --parallel pp=2 or more")

    @property
    def num_devices(self) -> int:
        """Product of all axes; experts are divided among devices that are counted already."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def text(self) -> str:
        """The axes as they are given, such as ``tp=8,dp=2,pp=4``; ``dp=1`` for none."""
        axes = AXES | EXPERT_AXIS
        found = [f"{short}={getattr(self, name)}" for short, name in axes.items() if getattr(self, name) > 1]
        return ",".join(found) or "dp=1"


def parse_parallel(text: str, num_devices: int) -> dict[str, int]:
    """Devices along each axis of ``tp=8,pp=4,dp=16``; the number of data groups follows if it is left out.

    >>> parse_parallel("tp=8,pp=2", 64)
    {'tensor': 8, 'context': 1, 'data': 4, 'pipeline': 2, 'expert': 1}

    Raises:
        InvalidSetupError: An axis is not known or named twice, or the product is not the number of devices.
    """
    given: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.lower().split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in _NAMES:
            raise InvalidSetupError(
                f"unknown axis '{name}' of a layout{near_matches(name, _NAMES)}; expected tp, pp, dp, cp or ep, "
                "such as --parallel tp=8,pp=4,dp=16"
            )
        if name in given:
            raise InvalidSetupError(f"the axis {name} is given twice in '{text}'; give it once")
        if not value.isdigit() or not 1 <= int(value) <= _MOST:
            raise InvalidSetupError(f"expected a number of devices for {name}, got '{value}'; give {name}=2")
        given[name] = int(value)
    if not given:
        raise InvalidSetupError("expected axes of a layout, got none; give --parallel tp=8,pp=4,dp=16")
    return _complete(given, num_devices)


def _complete(given: Mapping[str, int], num_devices: int) -> dict[str, int]:
    expert = given.get("ep", 1)
    given = {name: value for name, value in given.items() if name not in EXPERT_AXIS}
    others = prod(value for name, value in given.items() if name != "dp")
    if num_devices % others:
        enough = others * max(1, -(-num_devices // others))
        raise InvalidSetupError(
            f"{_words(given)} needs a multiple of {others} devices, got {num_devices}; give {enough} devices, or axes "
            f"whose product divides {num_devices}"
        )
    data = given.get("dp", num_devices // others)
    if data * others != num_devices:
        raise InvalidSetupError(
            f"{_words(given)} makes {data * others} devices, but there are {num_devices}; give "
            f"dp={num_devices // others}, or leave dp out"
        )
    sharing = data * given.get("cp", 1)
    if sharing % expert:
        raise InvalidSetupError(
            f"ep={expert} divides experts among the {sharing} devices of dp and cp, which are no multiple of it; give "
            f"ep={max(k for k in range(1, min(expert, sharing) + 1) if sharing % k == 0)}"
        )
    found = {name: given.get(short, 1) if short != "dp" else data for short, name in AXES.items()}
    return found | {"expert": expert}


def _words(given: Mapping[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in given.items())
