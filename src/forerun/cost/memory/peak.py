"""Peak memory of a training step, and the verdict on a device.

    peak = smallest limit of the allocator that lets the step run + overhead of the process
    smallest limit = live bytes at the peak + fragmentation

The verdict is honest about its resolution: within the interval of the peak it is "close". On 569 runs of timm models
at the edge of a 24 GB card the relative error of the limit is 2 % (one standard deviation), on published fine-tuning of
language models 15 % and more, for their tools differ in what a loss and an adapter keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, count, repeat
from typing import Literal

from forerun.base.errors import InvalidSetupError
from forerun.base.kept import Kept
from forerun.base.units import GIB, format_bytes
from forerun.cost.memory.replay import ReplayPlan, replay, replay_plan, smallest_limit_bytes
from forerun.cost.memory.stream import LivePeak, live_peak, live_peak_bytes
from forerun.graph.file import check_stream
from forerun.graph.graph import AllocationKind, Graph
from forerun.question.devices.device import Device, DeviceKind
from forerun.question.setup import MAX_BATCH_SIZE, Layout, TrainingSetup

_MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """Constants that turn bytes of tensors into bytes of a device.

    Attributes:
        overhead_bytes: Context, loaded kernels and library handles of the process [bytes].
        live_factor: Smallest limit of the allocator over live bytes, used without a replay.
        workspace_factor: Workspace of a convolution over its input plus output bytes, half precision in NCHW.
        uses_caching_allocator: True if PyTorch's caching allocator is at work; otherwise live bytes count.
    """

    overhead_bytes: float
    live_factor: float
    workspace_factor: float
    uses_caching_allocator: bool


_EAGER_LOADING = MemoryConstants(
    overhead_bytes=(24_268 - 22_550) * _MIB,
    live_factor=1.018,
    workspace_factor=1.0,
    uses_caching_allocator=True,
)
"""Overhead 1.68 GiB: fitted on 569 AMP training runs of timm models on an RTX 3090, PyTorch 1.12 with CUDA 11.3, which
loads all kernels at start."""
_LAZY_LOADING = replace(_EAGER_LOADING, overhead_bytes=0.7 * GIB)
"""Lazily loaded kernels (CUDA 11.7 and later): 0.5 to 1.0 GiB agree with 104 out-of-memory verdicts of transformers on
nine GPUs under PyTorch 2.1; replace it by what nvidia-smi shows for an idle process after one convolution."""
_PROCESS_ONLY = MemoryConstants(
    overhead_bytes=0.5 * GIB, live_factor=1.0, workspace_factor=0.0, uses_caching_allocator=False
)
"""Live bytes and 0.5 GiB assumed for the process; no caching allocator of CUDA is at work here."""


def memory_constants(
    device: Device,
    *,
    torch_version: tuple[int, int] | None = None,
    overhead_bytes: float | None = None,
) -> MemoryConstants:
    """Constants for a device and a PyTorch version.

    Args:
        device: Device that runs the step; only GPUs of NVIDIA have measurements behind their constants.
        torch_version: Major and minor version of PyTorch; None for a current one. Before 1.13 the CUDA builds
            (up to 11.6) load every kernel at start.
        overhead_bytes: Overhead of the process if it is known, such as from ``nvidia-smi`` [bytes].
    """
    if device.kind is not DeviceKind.GPU:
        constants = _PROCESS_ONLY
    elif torch_version is not None and torch_version < (1, 13):
        constants = _EAGER_LOADING
    else:
        constants = _LAZY_LOADING
    if overhead_bytes is None:
        return constants
    if not 0 <= overhead_bytes < float("inf"):
        raise InvalidSetupError(f"memory overhead must be zero or more bytes, got {overhead_bytes}")
    return replace(constants, overhead_bytes=overhead_bytes)


_VISIBLE_FRACTION = 24_268 / 24_576  # GeForce RTX 3090: total_memory of PyTorch over the nominal 24 GiB
_INLINE_ECC_FRACTION = 15 / 16


def visible_memory_bytes(device: Device) -> float:
    """Memory that a program finds on a device, which the driver reports to it [bytes].

    nominal * 0.9875 for GPUs, and * 15/16 more where ECC bits live in the same GDDR chips, which is the
    default on data-centre boards (nvidia-smi: T4 15,360 of 16,384 MiB, L4 23,034, A10 23,028, L40S 46,068).
    HBM keeps the ECC bits apart.

    Sources: 24,268 MiB visible of an RTX 3090's 24,576; NVIDIA CUDA C++ Best Practices Guide (GDDR with ECC
    has 6.25 % less memory); totals as listed in github.com/modal-labs/modal-client/pull/2797.
    """
    if device.kind is not DeviceKind.GPU:
        return device.memory_bytes
    has_inline_ecc = (
        device.vendor == "nvidia"
        and device.segment == "datacenter"
        and device.memory_type.upper().startswith("GDDR")
    )
    return device.memory_bytes * _VISIBLE_FRACTION * (_INLINE_ECC_FRACTION if has_inline_ecc else 1.0)


Verdict = Literal["yes", "no", "close"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWidth:
    """The 90 % interval of the bytes of a step, as factors of the limit of the allocator.

    Attributes:
        low: Lower end over the value.
        high: Upper end over the value.
    """

    low: float
    high: float


_WIDTH = MemoryWidth(low=1 / 1.03, high=1 / 0.97)
"""Images, eager: 98 % of 569 verdicts of ``timm_train`` at the edge of a 24 GB card."""
_WIDE = MemoryWidth(low=1 / 1.15, high=1 / 0.85)
"""Language models, and compiled steps: 26 of 29 full trainings that published their bytes (fms-acceleration, ms-swift,
torchtune, torchao) and six of seven compiled ones. How often a loss copies its logits depends on a release that no
setting names."""
_OF_ADAPTERS = MemoryWidth(low=0.8, high=1.3)
"""Steps whose weights are mostly frozen, so that activations and the loss are most of what is held: 91 % of 118
published runs lie within it. Quantiles of other sources hold 86 % of the runs of one."""

_FEW_TRAINABLE = 0.5
"""Share of trained weights below which the rest is called frozen; adapters train a hundredth."""


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """A named part of the memory at its peak [bytes]; the parts add up to the peak."""

    name: str
    size_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of one device.

    Attributes:
        peak_bytes: Smallest device that runs the step: limit of the allocator plus overhead [bytes].
        low_bytes: Lower end of its interval; of language models without unusual fragmentation [bytes].
        high_bytes: Upper end [bytes].
        live_peak_bytes: Bytes of tensors alive at the peak [bytes].
        overhead_bytes: Context, kernels and handles of the process [bytes].
        parts: Parts of the peak; they add up to ``peak_bytes``.
    """

    peak_bytes: float
    low_bytes: float
    high_bytes: float
    live_peak_bytes: int
    overhead_bytes: float
    parts: tuple[MemoryShare, ...]


def memory_width(graph: Graph) -> MemoryWidth:
    """The 90 % interval of the memory of a step, by what is known beforehand of how exact its trace is."""
    if graph.num_trainable_parameters < _FEW_TRAINABLE * graph.num_parameters:
        return _OF_ADAPTERS
    is_exact = graph.eager_memory is None and graph.tokens_per_sample is None
    return _WIDTH if is_exact else _WIDE


_limits_kept: Kept[int] = Kept(4096)
_plans_kept: Kept[tuple[ReplayPlan, ...]] = Kept(16)


def estimate_memory(graph: Graph, setup: TrainingSetup, constants: MemoryConstants) -> MemoryEstimate:
    """Peak memory of a step at the batch size of the setup.

    Args:
        graph: Traced step.
        setup: Batch size, precision and layout.
        constants: Overhead and factors of the device and software, see ``memory_constants``.

    Raises:
        InvalidSetupError: If the graph holds for another batch size only.
        TraceError: If the memory stream is damaged.
    """
    batch_size = setup.batch_size_per_device
    if graph.only_batch_size is not None and batch_size != graph.only_batch_size:
        raise InvalidSetupError(
            f"{graph.model} was traced for batch size {graph.only_batch_size} only, got {batch_size}; "
            "trace it again at the batch size you want"
        )
    peak = live_peak(graph.memory, batch_size)
    if constants.uses_caching_allocator:
        # The device enters only through the factor of the workspace.
        limit_bytes: float = _limits_kept.get(
            (graph,),
            (batch_size, _workspace_factor(setup, constants)),
            lambda: _needed_bytes(plans_for_setup(graph, setup, constants), batch_size),
        )
    else:
        check_stream(graph.memory)
        limit_bytes = peak.total_bytes * constants.live_factor
    width = memory_width(graph)
    # How far blocks scatter depends on the order of a few large ones. Expandable segments, which many tools of language
    # models set, leave next to none of it, so such a step fails for sure only if its tensors do not fit.
    packed_bytes = limit_bytes if width is _WIDTH else peak.total_bytes * constants.live_factor
    least_bytes = min(limit_bytes, packed_bytes)
    return MemoryEstimate(
        peak_bytes=limit_bytes + constants.overhead_bytes,
        low_bytes=least_bytes * width.low + constants.overhead_bytes,
        high_bytes=limit_bytes * width.high + constants.overhead_bytes,
        live_peak_bytes=peak.total_bytes,
        overhead_bytes=constants.overhead_bytes,
        parts=_parts(peak, limit_bytes, constants.overhead_bytes),
    )


def plans_for_setup(graph: Graph, setup: TrainingSetup, constants: MemoryConstants) -> tuple[ReplayPlan, ...]:
    """The stream of the graph, and of a compiled step that of eager execution too; remembered.

    A compiled step has fewer bytes alive, but other requests may by chance pack worse, by a per cent or two.
    """
    factor = _workspace_factor(setup, constants)
    streams = (graph.memory,) if graph.eager_memory is None else (graph.memory, graph.eager_memory)
    # An answer replays for its memory, and once more for the largest batch.
    return _plans_kept.get(
        (graph,), (factor,), lambda: tuple(replay_plan(stream, workspace_factor=factor) for stream in streams)
    )


def fits(low_bytes: float, high_bytes: float, device_memory_bytes: float) -> Verdict:
    """Verdict on a step on a device: it fits ("yes"), does not ("no"), or is near the limit ("close").

    Near is within the interval of its peak: 3 % for images, more for language models, adapters and compiled steps.

    Args:
        low_bytes: Lower end of the interval of its peak [bytes].
        high_bytes: Upper end [bytes].
        device_memory_bytes: Memory that a program finds on the device, see ``visible_memory_bytes`` [bytes].
    """
    if high_bytes <= device_memory_bytes:
        return "yes"
    return "no" if low_bytes > device_memory_bytes else "close"


def _workspace_factor(setup: TrainingSetup, constants: MemoryConstants) -> float:
    # Only for these setups did a workspace improve the verdicts on published out-of-memory limits.
    wants_workspace = setup.layout is Layout.NCHW and setup.precision.is_half
    return constants.workspace_factor if wants_workspace else 0.0


def _parts(peak: LivePeak, limit_bytes: float, overhead_bytes: float) -> tuple[MemoryShare, ...]:
    held = peak.bytes_by_kind
    named = {
        "weights": held[AllocationKind.WEIGHT] + held[AllocationKind.BUFFER],
        "gradients": held[AllocationKind.GRADIENT],
        "optimizer state": held[AllocationKind.OPTIMIZER_STATE],
        "activations": held[AllocationKind.ACTIVATION],
        "temporaries": held[AllocationKind.TEMPORARY],
        "input": held[AllocationKind.INPUT],
        "fragmentation": limit_bytes - peak.total_bytes,
        "context": overhead_bytes,
    }
    return tuple(MemoryShare(name, float(size)) for name, size in named.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxBatchSize:
    """Largest batch that fits, with those at the two ends of its interval.

    Attributes:
        value: Largest batch that fits; 0 if not even one sample does; None if unknown.
        low: Largest batch whose upper end fits; its verdict is "yes".
        high: Largest batch whose lower end fits; beyond it the verdict is "no".
        reason: Reason why the value is unknown or zero; empty otherwise.
    """

    value: int | None
    low: int | None
    high: int | None
    reason: str = ""


def max_batch_size(
    graph: Graph, setup: TrainingSetup, device_memory_bytes: float, constants: MemoryConstants
) -> MaxBatchSize:
    """Largest batch of a device, solved at the limit of the allocator and at the ends of its interval.

    Live bytes bound the answer from above; replays at the limit refine it downwards. The two ends take
    their fragmentation from the middle: six replays for each end would move it by less than its 3 %.

    Args:
        graph: Traced step.
        setup: Precision and layout; its batch size is not used.
        device_memory_bytes: Memory that a program finds on the device [bytes].
        constants: Overhead and factors of the device and software.
    """
    if graph.only_batch_size is not None:
        reason = f"{graph.model} was traced for batch size {graph.only_batch_size} only; others are unknown"
        return MaxBatchSize(value=None, low=None, high=None, reason=reason)
    limit_bytes = device_memory_bytes - constants.overhead_bytes
    plans = plans_for_setup(graph, setup, constants) if constants.uses_caching_allocator else ()
    need_bytes = cache(partial(_needed_bytes, plans))
    value = _largest_batch(graph, constants, plans, limit_bytes, need_bytes)
    factor = constants.live_factor
    if plans and value > 0:
        factor = need_bytes(value) / live_peak_bytes(graph.memory, value)
    width = memory_width(graph)
    # Live bytes grow with the batch as the limit of the allocator does, and are far quicker to ask about.
    low = _largest_by_live_bytes(graph, factor, limit_bytes / width.high)
    least = factor if width is _WIDTH else min(factor, constants.live_factor)
    high = _largest_by_live_bytes(graph, least, limit_bytes / width.low)
    return MaxBatchSize(
        value=value, low=min(low, value), high=max(high, value), reason=_reason(value, device_memory_bytes)
    )


def _largest_batch(
    graph: Graph,
    constants: MemoryConstants,
    plans: Sequence[ReplayPlan],
    limit_bytes: float,
    need_bytes: Callable[[int], int],
) -> int:
    """Largest batch within a limit of the allocator; 0 if there is none."""
    if not plans:
        return _largest_by_live_bytes(graph, constants.live_factor, limit_bytes)
    by_live_bytes = _largest_by_live_bytes(graph, 1.0, limit_bytes)
    found = largest_passing(
        lambda batch: any(replay(plan, batch, int(limit_bytes)).passes for plan in plans), by_live_bytes
    )
    # One replay at the limit and the search for the smallest limit can differ by the tolerance of the search;
    # the answer has to agree with ``fits``, which uses the smallest limit.
    return nearest_passing(lambda batch: need_bytes(batch) <= limit_bytes, found, by_live_bytes)


def nearest_passing(passes: Callable[[int], bool], start: int, upper: int) -> int:
    """Batch at or near ``start`` that passes, 0 if none below does, whose successor fails or is above ``upper``.

    Steps of one, then doubling ones: of millions of samples, thousands lie within the tolerance of a search.

    Args:
        passes: Whether a batch does.
        start: Batch to look from.
        upper: Largest batch.
    """
    strides = chain(repeat(1, 16), (2**n for n in count(1)))
    passing, failing = start, upper + 1
    while passing > 0 and not passes(passing):
        failing, passing = passing, max(0, passing - next(strides))
    while failing > upper and passing < upper:
        probe = min(upper, passing + next(strides))
        if passes(probe):
            passing = probe
        else:
            failing = probe
    return passing if failing > upper else _between(passes, passing, failing)


def _between(passes: Callable[[int], bool], passing: int, failing: int) -> int:
    """Largest batch below one that fails, from one that passes or zero, by halving."""
    while failing - passing > 1:
        middle = (failing + passing) // 2
        if passes(middle):
            passing = middle
        else:
            failing = middle
    return passing


def _needed_bytes(plans: Sequence[ReplayPlan], batch_size: int) -> int:
    """Smallest limit of the allocator, never above that of the next powers of two, to which a batch could be padded.

    Live bytes grow with the batch, but how best-fitting blocks scatter is chance: ViT-B/32 under autocast has 229 MiB
    of fragmentation with 16 samples and 146 with 32.
    """
    needed = min(smallest_limit_bytes(plan, batch_size) for plan in plans)
    larger = 2 ** int(batch_size).bit_length()
    # Fragmentation can only add to live bytes: a batch whose live bytes need more cannot lower the limit.
    while larger <= MAX_BATCH_SIZE and min(live_peak_bytes(p.stream, larger) for p in plans) < needed:
        needed = min(needed, *(smallest_limit_bytes(plan, larger) for plan in plans))
        larger *= 2
    return needed


def _largest_by_live_bytes(graph: Graph, factor: float, limit_bytes: float) -> int:
    """Largest batch whose live bytes times a factor stay within the limit; 0 if there is none."""
    return largest_passing(
        lambda batch: live_peak_bytes(graph.memory, batch) * factor <= limit_bytes, MAX_BATCH_SIZE
    )


def largest_passing(passes: Callable[[int], bool], upper: int) -> int:
    """Largest batch up to ``upper`` that passes, 0 if none; looks near ``upper`` first."""
    if upper == 0 or passes(upper):
        return upper
    # Fragmentation costs a few per cent, so the answer lies just below the bound of live bytes.
    failing, stride = upper, max(1, upper // 64)
    passing = upper - stride
    while passing > 0 and not passes(passing):
        failing, stride = passing, 2 * stride
        passing = max(0, passing - stride)
    return _between(passes, max(0, passing), failing)


def _reason(value: int, device_memory_bytes: float) -> str:
    if value == 0:
        return f"not even one sample fits into {format_bytes(device_memory_bytes)}"
    if value == MAX_BATCH_SIZE:
        return f"batch sizes above {MAX_BATCH_SIZE:,} are not considered"
    return ""
