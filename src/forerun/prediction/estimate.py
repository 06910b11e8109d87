"""The answer of a prediction: values with intervals, where the time and the memory go, and on what it rests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from forerun.base.answers import Answer, fields_of, plain
from forerun.cost.memory.peak import MemoryShare
from forerun.prediction.published import PublishedStep
from forerun.question.run import Run

if TYPE_CHECKING:
    from forerun.prediction.comparison import RunComparison


class Provenance(StrEnum):
    """Evidence behind a step time, from strongest to weakest."""

    MEASURED = "measured"
    CALIBRATED = "calibrated"
    PUBLISHED = "measured by others"
    INTERPOLATED = "interpolated"
    DATASHEET_ONLY = "datasheet only"


@dataclass(frozen=True, slots=True)
class Interval(Answer):
    """A value and the interval that holds the truth in nine cases of ten, ``low <= value <= high``."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        assert self.low <= self.value <= self.high, f"low <= value <= high must hold, but got {self}"

    @property
    def ends(self) -> tuple[float, float, float]:
        """Value, low and high, a column of arrays of intervals."""
        return self.value, self.low, self.high

    def scaled(self, factor: float) -> Interval:
        """The interval of a quantity ``factor`` times as large, factor >= 0."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def shifted(self, offset: float) -> Interval:
        """The interval of a quantity larger by ``offset``."""
        return Interval(self.value + offset, self.low + offset, self.high + offset)

    def inverse(self, numerator: float = 1.0) -> Interval:
        """The interval of ``numerator / quantity``."""
        return Interval(numerator / self.value, numerator / self.high, numerator / self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSources(Answer):
    """The two sources of a step's error; each as the 90 % upper half-width that it would give alone, as a share.

    Attributes:
        unknown_system: What is not known of the machine: its clocks, host, drivers and libraries. Only measuring helps.
        cost_model: The cost model's own error about this network on this device.
    """

    unknown_system: float
    cost_model: float


@dataclass(frozen=True, slots=True)
class BreakdownPart:
    """A named part of the step; the parts of a step add up to it."""

    name: str
    time_s: float


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Device time that a module causes in all parts and micro-steps of a step [s], and its share of the step."""

    module: str
    time_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage(Answer):
    """One stage of a layout.

    Attributes:
        stage: Its number, from 0.
        ranks: First and last rank of its devices.
        num_blocks: Blocks of the model it has.
        micro_step_s: One micro-step on it, forward and backward [s].
        peak_memory_bytes: Memory of each of its devices [bytes].
    """

    stage: int
    ranks: tuple[int, int]
    num_blocks: int
    micro_step_s: float
    peak_memory_bytes: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism(Answer):
    """Division of a model among devices.

    Attributes:
        tp, cp, dp, pp: Devices of tensor, context and data parallelism, and stages of the pipeline.
        strategy: Strategy of the devices that take samples of their own.
        schedule: Order of the micro-steps on the stages.
        virtual_stages: Groups of blocks of each stage.
        num_micro_steps: Micro-steps of a step.
        bubble_share: Share of the step in which the slowest stage waits for others.
        exposed_share: Share of the step in which communication is waited for.
        worst_stage: Stage whose devices need most memory.
        stages: The stages.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    strategy: str
    schedule: str
    virtual_stages: int
    num_micro_steps: int
    bubble_share: float
    exposed_share: float
    worst_stage: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(Answer):
    """The part of a step that writes tokens, on one device.

    Attributes:
        prompt_tokens, new_tokens: Tokens of a sample that are read at once, and that are written.
        time_to_first_token_s: Pass over the prompts of a batch.
        time_per_token_s: One further token of each sample of the batch, in the mean over the answer; None of one token.
        new_tokens_per_s: Tokens written each second while it writes.
        cache_bytes: Keys and values of the whole batch at its end.
    """

    prompt_tokens: int
    new_tokens: int
    time_to_first_token_s: Interval
    time_per_token_s: Interval | None
    new_tokens_per_s: Interval
    cache_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Answer):
    """Answer of ``forerun.predict``.

    A quantity that was not asked for, or cannot be known, is None and ``notes`` says why.

    Attributes:
        run: The question, whole.
        model: The model as it was named.
        device: Catalogue name of the device.
        device_title: Its name as people write it.
        batch_size_per_device: Samples per step and device.
        precision, layout, compile, optimizer, phase: The training setup; fp64 where the model itself computes in it.
        step_time_s: Time of one step.
        throughput_samples_per_s: Samples per second over all devices.
        epoch_time_s: One pass over the dataset, with its last partial batch and validation.
        job_time_s: All epochs with start-up and checkpoints.
        peak_memory_bytes: Device memory the process needs.
        cost_usd: Price of the job, or of an epoch if no number of epochs was given.
        energy_j: Energy of the device over the same time.
        max_batch_size: Largest batch that fits.
        fits: "yes", "no" or "close"; None where the device's memory says nothing.
        breakdown: Where the step's time goes; adds up to ``step_time_s.value``.
        bound_by: "compute", "memory bandwidth", "host", "offload" or "data loader".
        provenance: What the step time rests on.
        error_sources: The sources of its error, of one micro-step on one device.
        published: Steps of the same network, device, precision and layout that others published, nearest batch first.
        unsupported_ops: Operations without a cost rule of their own, charged by their traffic.
        top_layers: The modules that take most time.
        memory_parts: What the memory holds at the peak.
        device_memory_bytes: Memory of the device that a process can use.
        num_parameters: Parameters of the model.
        flops_per_sample: Work of the step per sample [FLOP].
        num_trainable_parameters: Parameters that the step updates.
        tokens_per_s: Tokens per second over all devices, None of models that do not read tokens.
        tokens_per_s_per_device: The same for one device.
        mfu: Model FLOP utilisation: work of the products that training needs over what the devices could do meanwhile.
        hfu: Hardware FLOP utilisation: the same with the products that are computed again.
        num_steps: Steps of the whole job, None without one.
        num_steps_per_epoch: Steps of an epoch, None without a dataset.
        parallelism: Division of the model among several devices, stage by stage; None where each has all of it.
        passes: Passes of a step of post-training or generation, with their times of one micro-step on one device; empty
            for plain training.
        generation: The part of the step that writes tokens, None without one.
        notes: What a reader must know.
        shown_memory_bytes: Memory that ``nvidia-smi`` shows meanwhile: PyTorch keeps what it freed while the device has
            room; None where nobody measured it.
    """

    run: Run
    model: str
    device: str
    device_title: str
    batch_size_per_device: int
    num_devices: int = 1
    precision: str
    layout: str
    compile: bool
    optimizer: str
    phase: str
    step_time_s: Interval
    throughput_samples_per_s: Interval
    epoch_time_s: Interval | None
    job_time_s: Interval | None
    peak_memory_bytes: Interval | None
    cost_usd: Interval | None
    energy_j: Interval | None
    max_batch_size: Interval | None
    fits: str | None
    breakdown: tuple[BreakdownPart, ...]
    bound_by: str
    provenance: Provenance
    error_sources: ErrorSources
    published: tuple[PublishedStep, ...] = ()
    unsupported_ops: tuple[str, ...]
    top_layers: tuple[LayerTime, ...]
    memory_parts: tuple[MemoryShare, ...]
    device_memory_bytes: float
    num_parameters: int
    flops_per_sample: float
    num_trainable_parameters: int
    tokens_per_s: Interval | None
    tokens_per_s_per_device: Interval | None
    mfu: Interval | None
    hfu: Interval | None
    num_steps: int | None
    num_steps_per_epoch: int | None
    parallelism: Parallelism | None = None
    passes: tuple[BreakdownPart, ...] = ()
    generation: Generation | None = None
    notes: tuple[str, ...]
    shown_memory_bytes: Interval | None = None

    def compare(self, other: Estimate) -> RunComparison:
        """The differences between this run and another, with the parts of time and memory behind them."""
        from forerun.prediction.comparison import compare_answers

        # Of an answer that says more, such as what would make it fit, the estimate alone is compared.
        return compare_answers(plain(fields_of(self)), plain(fields_of(other)))
