"""Ways in which devices share a step: strategies of replicas, and layouts that divide a model and its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from math import prod
from typing import Annotated, Any, TypedDict

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.question.settings import (
    Setting,
    check_numbers,
    flags,
    from_settings,
    names_needing,
    refuse,
    setting,
)

DEFAULT_BUCKET_BYTES = 25 * 1024**2
"""Default capacity of a gradient bucket of DDP (PyTorch, ``bucket_cap_mb=25``)."""


class Algorithm(StrEnum):
    """Algorithm of an all-reduce."""

    AUTO = "auto"
    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"


class FsdpVersion(StrEnum):
    """Implementation of fully sharded weights, by the copies it makes of them and of their gradients."""

    FSDP1 = "fsdp1"
    """PyTorch's FullyShardedDataParallel: gradients are joined, converted and divided before they are scattered."""
    FSDP2 = "fsdp2"
    """PyTorch's fully_shard: gathered weights are copied out of their buffer, gradients into one."""
    ZERO_COPY = "zero-copy"
    """Weights and gradients live in the buffers of the collectives (Megatron-FSDP)."""


class Strategy(StrEnum):
    """Strategy that shares the work among devices."""

    DDP = "ddp"
    """Replicas that average gradients while the backward pass goes on (PyTorch DistributedDataParallel, Horovod)."""
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"
    """Weights, gradients and optimizer state divided (ZeRO-3), block by block."""
    HSDP = "hsdp"
    """FSDP inside groups of devices, usually nodes, that are replicas of each other."""
    MIRRORED = "mirrored"
    """TensorFlow's MirroredStrategy: one host process for all replicas of a node."""
    AUTO = "auto"
    """The layout that forerun predicts to be the fastest of those that fit."""

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}.get(self.value, 0)


_sharing = partial(setting, group="sharing", needs="several")
_fsdp = partial(setting, group="sharing", needs="fsdp", only_changed=True)
_HALF_OR_FULL: dict[str, Any] = {
    "metavar": "NAME",
    "choices": ("half", "fp32"),
    "only_changed": True,
    "read": lambda word: word == "half",
    "tell": lambda is_half: "half" if is_half else "fp32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Sharing of the work among devices.

    Attributes:
        layout: Division of the model and the tokens; its number of data groups follows from the devices.
    """

    strategy: Strategy = _sharing(
        Strategy.DDP,
        help="Strategy that shares work among the devices: ddp, zero1, zero2, zero3, fsdp, hsdp, mirrored, or auto.",
    )
    all_reduce: Algorithm = _sharing(
        Algorithm.AUTO,
        help="All-reduce algorithm: auto (the fastest), ring, tree or hierarchical.",
    )
    bucket_bytes: float | None = _sharing(
        None,
        name="bucket_mb",
        unit=1024**2,
        help="Capacity of a gradient bucket [MiB].",
        words="capacity of a bucket [MiB]",
        default="25, with ZeRO more",
        above=0,
        high=100_000,
    )
    num_accumulation_steps: int = setting(
        1,
        name="accumulation",
        help="Micro-steps of one step: their gradients are summed before the update.",
        words="accumulation steps",
        group="run",
        low=1,
        high=100_000,
        http_high=10_000,
        needs="training",
    )
    sync_batch_norm: bool = _sharing(
        False, help="Synchronise the statistics of batch norms among the devices."
    )
    coefficient_of_variation: float | None = _sharing(
        None,
        name="variation",
        help="Coefficient of variation of the step time between devices, such as 0.05.",
        words="coefficient of variation",
        default="as measured in training",
        low=0,
        high=10,
    )
    layout: DeviceLayout = field(default_factory=lambda: DeviceLayout())
    shard_size: int | None = _sharing(
        None,
        help="With hsdp: devices that divide the weights among them.",
        default="the devices of a node",
        low=1,
        high=100_000,
        needs="fsdp",
    )
    reshard: bool = _fsdp(
        True,
        help="With fsdp: free gathered weights between the forward and the backward pass.",
    )
    prefetch: bool = _fsdp(
        True,
        help="With fsdp: gather the weights of the next block while a block computes.",
    )
    gather_half: bool = _sharing(
        True,
        name="gather_precision",
        help="With fsdp and a mixed precision: format in which weights are gathered, half or fp32.",
        default="half",
        needs="fsdp",
        **_HALF_OR_FULL,
    )
    reduce_half: bool = _sharing(
        False,
        name="reduce_precision",
        help="With a mixed precision: format in which gradients are reduced, half or fp32.",
        default="fp32",
        **_HALF_OR_FULL,
    )
    fsdp_version: FsdpVersion = _fsdp(
        FsdpVersion.FSDP2,
        help="With fsdp: implementation, by the copies it makes: fsdp1 or fsdp2 (PyTorch), or zero-copy "
        "(Megatron-FSDP).",
        words="FSDP version",
    )
    load_whole: bool = _fsdp(
        False,
        help="With fsdp: every device has the whole weights beside its shards while a checkpoint is loaded.",
    )
    reduce_once: bool = _fsdp(
        False,
        help="With fsdp and --accumulation: keep whole gradients until the last micro-step reduces them (no_sync, as "
        "accelerate does).",
    )
    wrap_adapters: bool = _fsdp(
        False,
        help="With fsdp and --lora: every matrix of the adapters is a unit of its own (fsdp_auto_wrap_policy of peft).",
    )
    reentrant: bool = _fsdp(
        False,
        help="With fsdp1, --lora and --recompute full: reentrant checkpoints, with which FSDP keeps inputs of frozen "
        "blocks and their gradients to the end of the step (use_reentrant of Transformers in 2024).",
    )
    overlap_tensor: bool = _sharing(
        False,
        help="With tp: run its collectives in pieces beside the products that they belong to (tp_comm_overlap of "
        "Megatron-LM, asynchronous tensor parallelism of PyTorch).",
        needs="tp",
        only_changed=True,
    )
    overlap_experts: bool = _sharing(
        False,
        help="With ep and several micro-steps: tokens go to their experts and back beside the computation of another "
        "micro-step (overlap_moe_expert_parallel_comm of Megatron-LM).",
        needs="ep",
        only_changed=True,
    )
    overlap_update: bool = _sharing(
        False,
        help="With zero1 or zero2: gather updated weights behind the next forward pass (overlap-param-gather of "
        "Megatron-LM).",
        only_changed=True,
    )
    slice_tensors: bool = _sharing(
        False,
        help="With zero1: cut each tensor for each replica, slice by slice (nanotron), instead of one buffer of all.",
        only_changed=True,
    )

    def __post_init__(self) -> None:
        if (
            not self.layout.divides_model
        ):  # its devices follow from the run: every data parallel run has one layout
            object.__setattr__(self, "layout", replace(self.layout, data=1))
        check_numbers(self)


class SharingOptions(TypedDict, total=False):
    """Settings of several devices by name."""

    accumulation: int | None
    strategy: str | None
    all_reduce: str | None
    bucket_mb: float | None
    sync_batch_norm: bool | None
    variation: float | None
    parallel: Annotated[
        str | None,
        Setting(
            help="Devices of tensor (tp), context (cp), data (dp), pipeline (pp) and expert (ep) parallelism; dp may "
            "be left out.",
            group="sharing",
            default="all devices take samples of their own",
            metavar="tp=8,pp=4,dp=16",
            needs="several",
        ),
    ]
    sequence_parallel: bool | None
    keep_gathered: bool | None
    merge_routes: bool | None
    whole_experts: bool | None
    context_parallel: str | None
    pipeline_schedule: str | None
    virtual_stages: int | None
    handover: str | None
    stage_split: str | None
    shard_size: int | None
    reshard: bool | None
    prefetch: bool | None
    gather_precision: str | None
    reduce_precision: str | None
    fsdp_version: str | None
    load_whole: bool | None
    reduce_once: bool | None
    wrap_adapters: bool | None
    reentrant: bool | None
    overlap_tensor: bool | None
    overlap_experts: bool | None
    overlap_update: bool | None
    slice_tensors: bool | None


def sharing_from(given: Mapping[str, Any], num_devices: int) -> Sharing:
    """Sharing of the work from settings by name.

    Raises:
        InvalidSetupError: A setting has no meaning beside the others, or the devices cannot be divided so.
    """
    if SharingOptions.__annotations__.keys().isdisjoint(given):  # nothing to hold against the rest
        return Sharing()
    found = Sharing(**from_settings(Sharing, given), layout=layout_from(given, num_devices))
    _check_strategy(found, given)
    _check_groups(found, num_devices)
    return found


def layout_from(given: Mapping[str, Any], num_devices: int) -> DeviceLayout:
    """The layout of ``--parallel`` and the settings beside it."""
    axes: dict[str, Any] = {}
    if "parallel" in given:
        axes |= parse_parallel(given["parallel"], num_devices)
    for axis, name in (AXES | EXPERT_AXIS).items():
        if axes.get(name, 1) > 1:
            continue
        useless = [word for word in names_needing(Sharing, axis) if word in given]
        refuse(given, useless, f"there is no {axis}", f"give --parallel {axis}=2")
        if useless and axis == "tp":  # --no-sequence-parallel has no meaning either
            raise InvalidSetupError(f"{flags(useless)} needs tensor parallelism; give --parallel tp=2")
    return DeviceLayout(**axes, **from_settings(DeviceLayout, given))


def _check_strategy(sharing: Sharing, given: Mapping[str, Any]) -> None:
    """Refuses settings of one strategy beside another."""
    strategy = sharing.strategy
    useless = [name for name in names_needing(Sharing, "fsdp") if name in given]
    # Which strategy ``auto`` finds is not known yet.
    if useless and strategy.stage < 3 and strategy is not Strategy.AUTO:
        raise InvalidSetupError(
            f"{flags(useless)} belongs to fsdp, got strategy {strategy}; give --strategy fsdp or hsdp"
        )
    if sharing.overlap_update and strategy.stage not in (1, 2) and strategy is not Strategy.AUTO:
        raise InvalidSetupError(
            f"--overlap-update belongs to zero1 and zero2, got strategy {strategy}; give --strategy zero1"
        )
    if sharing.slice_tensors and strategy not in (Strategy.ZERO1, Strategy.AUTO):
        raise InvalidSetupError(
            f"--slice-tensors belongs to zero1, got strategy {strategy}; give --strategy zero1"
        )
    if sharing.shard_size is not None and strategy is not Strategy.HSDP:
        raise InvalidSetupError("--shard-size belongs to hsdp; give --strategy hsdp")
    if strategy is Strategy.AUTO and "parallel" in given:
        raise InvalidSetupError("--strategy auto finds the layout itself; leave --parallel out")
    if sharing.layout.divides_model and strategy is Strategy.MIRRORED:
        raise InvalidSetupError("--parallel cannot be used with strategy mirrored; give ddp, zero1 or fsdp")
    if sharing.layout.pipeline > 1 and strategy is Strategy.ZERO2:
        raise InvalidSetupError(
            "zero2 reduces gradients in every micro-step, which no pipeline does; give --strategy zero1"
        )


def _check_groups(sharing: Sharing, num_devices: int) -> None:
    data = num_devices // sharing.layout.num_sharing
    shard_size = sharing.shard_size
    if shard_size is not None and data % shard_size:
        fitting = [k for k in range(1, data + 1) if data % k == 0]
        raise InvalidSetupError(
            f"groups of {shard_size} devices do not divide {data} data groups; give --shard-size "
            f"{min(fitting, key=lambda k: abs(k - shard_size))}"
        )


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


class Handover(StrEnum):
    """Work of a stage's host while a message of another node is on its way."""

    UNKNOWN = "unknown"
    AHEAD = "ahead"
    """It launches on: sizes are agreed beforehand (Megatron-LM, torchtitan)."""
    BLOCKING = "blocking"
    """It reads the size of each message from the device first (nanotron)."""


_layout = partial(setting, group="sharing", only_changed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """Numbers of devices along each axis, and the order of the work.

    Attributes:
        tensor: Devices that divide each block (tp).
        pipeline: Stages of blocks (pp).
        context: Devices that divide the tokens of a sample (cp).
        data: Groups of devices that take samples of their own (dp).
        expert: Of the devices of ``data`` and ``context``, and of ``tensor`` with whole experts, those among which the
            experts are divided (ep).
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    sequence_parallel: bool = _layout(
        True,
        help="With tp: divide the tokens as well, between the divided products.",
        needs="tp",
    )
    keep_gathered: bool = _layout(
        False,
        help="With tp: keep the tokens that are gathered for a product until its backward pass (torchtitan) "
        "instead of gathering them again (Megatron-LM).",
        needs="tp",
    )
    merge_routes: bool = _layout(
        False,
        help="With ep: send a token once to each device and node that has some of its experts (DeepEP) instead of once "
        "to each expert.",
        needs="ep",
    )
    whole_experts: bool = _layout(
        False,
        help="With ep: devices of tp have whole experts and tokens of their own too (expert-tensor-parallel-size 1 of "
        "Megatron-LM) instead of parts of each expert.",
        default="no",
        needs="ep",
    )
    context_kind: ContextKind = _layout(
        ContextKind.RING,
        name="context_parallel",
        help="With cp: exchange of keys and values: ring, or ulysses (all-to-all).",
        needs="cp",
        only_changed=False,
    )
    schedule: PipelineSchedule = _layout(
        PipelineSchedule.ONE_FORWARD_ONE_BACKWARD,
        name="pipeline_schedule",
        help="With pp: order of the micro-steps: gpipe, 1f1b, interleaved or zero-bubble.",
        needs="pp",
    )
    virtual_stages: int = _layout(
        1,
        help="With the interleaved schedule: groups of blocks on each stage.",
        low=1,
        high=1000,
        needs="pp",
    )
    handover: Handover = _layout(
        Handover.UNKNOWN,
        help="With pp over nodes: hosts launch ahead of what stages receive (ahead, Megatron-LM), or read the size of "
        "each message first (blocking, nanotron); unknown takes the first, and its interval reaches to the second.",
        needs="pp",
    )
    stage_split: StageSplit = _layout(
        StageSplit.EVEN,
        help="With pp: as many blocks in every stage (even), fewer beside the head (balanced), or input and "
        "head counted as one block each (ends).",
        needs="pp",
    )

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "data", "expert", "virtual_stages"):
            if getattr(self, name) < 1:
                raise InvalidSetupError(
                    f"every axis of a layout needs at least 1 device, got {name} {getattr(self, name)}"
                )
        sharing = self.data * self.context * (self.tensor if self.whole_experts else 1)
        if sharing % self.expert:
            raise InvalidSetupError(
                f"ep={self.expert} must divide the {sharing} devices of dp and cp, among which the experts are spread; "
                f"give ep={max(k for k in range(1, min(self.expert, sharing) + 1) if sharing % k == 0)}, or "
                "--whole-experts, with which those of tp have experts of their own too"
            )
        if self.whole_experts and self.tensor > 1 and not self.sequence_parallel:
            raise InvalidSetupError(
                "without sequence parallelism devices of tp have no tokens of their own; leave --whole-experts out"
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
    def num_sharing(self) -> int:
        """Devices that share a sample."""
        return self.tensor * self.pipeline * self.context

    @property
    def replicated(self) -> int:
        """Devices that have the same blocks: those of context and data parallelism."""
        return self.context * self.data

    @property
    def divides_model(self) -> bool:
        """True if an axis besides that of samples is longer than one: a data parallel run is a layout of ones."""
        return self.num_sharing * self.expert > 1

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
    # Data groups are what is left of the devices, and alone may stay unsaid.
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
    found = {name: given.get(short, 1) if short != "dp" else data for short, name in AXES.items()}
    return found | {"expert": expert}


def _words(given: Mapping[str, int]) -> str:
    return ",".join(f"{name}={value}" for name, value in given.items())
