"""Parts of a step as a trace or a profiled run shows them: the numbers that causes are judged by.

Kernels and operators have classes by their names, in the words of a prediction's breakdown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.base.answers import Answer
from forerun.base.errors import ForerunError
from forerun.prediction.estimate import Estimate
from forerun.question.devices import Device, find_device
from forerun.script.diagnosis.trace import Bools, Events, Floats, Spans, Trace
from forerun.script.patching import tables

if TYPE_CHECKING:
    from forerun.script.profiling.profile import Profile

COMMUNICATION = "gradient synchronisation"
CONVOLUTION, LINEAR, ATTENTION = "convolution", "linear", "attention and batched products"
COPIES, OPTIMIZER, ELEMENTWISE = "copies and casts", "optimizer", "element-wise and reductions"
PRODUCTS = (CONVOLUTION, LINEAR, ATTENTION)
"""Classes whose kernels can use matrix units."""

_SIMPLE = re.compile(r"sgemm|scudnn|simt|dgemm|f32f32_f32f32|f64f64|fft2d|winograd3x3|gemmk1", re.I)
"""Names of products that run on the ordinary units; those of matrix units say tensorop, s16816, hmma or nvjet."""
_MATRIX = re.compile(
    r"tensorop|[hs]1688|[hs]16816|[hs]884|i16832|hmma|wgmma|gmma|nvjet|tf32|bf16bf16|f16f16|mfma", re.I
)
_NARROW = re.compile(r"_align[12](?!\d)")
_HALF = re.compile(r"fp16|bf16|half|_h_|hgemm|bfloat16", re.I)
_DOUBLE = re.compile(r"dgemm|d884|f64f64|<double", re.I)


@cache
def class_of_kernel(name: str) -> str:
    """Class of a kernel of a GPU by its name.

    >>> class_of_kernel("ampere_sgemm_128x64_nn"), class_of_kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL")
    ('linear', 'gradient synchronisation')
    """
    return _class_of(name, "kernels")


@cache
def class_of_operator(name: str) -> str:
    """Class of an operator of PyTorch by its name.

    >>> class_of_operator("aten::addmm"), class_of_operator("aten::mul_")
    ('linear', 'element-wise and reductions')
    """
    return _class_of(name, "operators")


def _class_of(name: str, kind: str) -> str:
    rules = tables("diagnosis")[kind].items()
    return next((known for known, pattern in rules if re.search(pattern, name, re.I)), ELEMENTWISE)


@cache
def outside_matrix_units(name: str) -> str:
    """Reason for which a product runs outside the matrix units, or on them in small bites; empty if it does not.

    It is ``fp32``, ``fp64`` or ``alignment``: half precision runs on ordinary units where sizes are no multiples of 8.

    >>> outside_matrix_units("volta_fp16_sgemm_fp16_128x64_nn"), outside_matrix_units("ampere_s16816gemm_bf16_128x64")
    ('alignment', '')
    """
    if _DOUBLE.search(name):
        return "fp64"
    if _NARROW.search(name) and _MATRIX.search(name):
        return "alignment"
    if not _SIMPLE.search(name) or (_MATRIX.search(name) and "simt" not in name):
        return ""
    return "alignment" if _HALF.search(name) else "fp32"


_LOADER = re.compile(r"DataLoader.*__next__|forerun::wait")
_COMPILING = re.compile(r"dynamo_timed|compile_id=|backend_compile|CachingAutotuner|Inductor.*compil", re.I)
_SYNCHRONISING = re.compile(r"Synchronize|^(cuda|hip)Memcpy(?!Async)|StreamWaitValue")
_ALLOCATING = re.compile(r"^(cuda|hip)(Malloc|Free)(?!Host|Async)|^cuMem(Create|Map|Unmap|Release|SetAccess)")
_ITEMS = re.compile(r"^aten::(item|_local_scalar_dense|is_nonzero)$")
_SHARED = re.compile(r"^(gloo|mpi|ucc|o?ccl):|^c10d::")
"""Collectives of a processor: marks of the back end, and operators that call it."""
_LAYOUTS = re.compile(r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw", re.I)
_LARGE_BYTES = 2**20
_SHORT_S = 20e-6
"""Latency of a launch that follows another at once; shorter gaps between queued kernels are the device's own."""
_TOUCHING_S = 2e-6
_LOOP = 10
"""Operators between two calls that read values, none a product, up to which they are of one loop."""
_NOISE = 1.2
_NUM_LONGEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes(Answer):
    """Parts of the mean step of one rank [s]; ``work_s`` is the step without its exposed communication."""

    label: str
    step_s: float
    work_s: float
    busy_s: float
    loader_s: float
    host_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A mean step; times are seconds of it, zero where the source cannot tell.

    Attributes:
        step_s: The step.
        is_on_gpu: Whether a device ran kernels.
        num_steps: Steps behind the mean.
        device: The device, as far as it is known.
        busy_s: Kernels other than communication; operators of a processor.
        loader_s: Wait for the loader while the device has nothing to run.
        host_s: Idle time in which the host had not launched the next kernel, without the parts below.
        sync_s: Idle time after a call that waited for the device.
        copy_s: Copies from pageable memory with nothing beside them.
        pinned_copy_s: Copies from pinned memory with nothing beside them.
        compile_s: Compilation while the device is idle.
        allocator_s: ``cudaMalloc`` and ``cudaFree`` while the device is idle.
        held_s: Time in which something outside the model held the script up, see ``Profile``.
        queued_s: Idle time in which the next kernel had long been launched.
        stretched_s: Time that single kernels took longer than the same kernels of other steps.
        slowed_s: Time that all kernels of some steps took longer than those of others.
        exposed_s: Communication with no kernel beside it.
        layout_s: Kernels that change the layout.
        num_launches, num_syncs, num_allocations, num_compilations: Numbers in a step.
        sync_names: Names of the calls that waited.
        copy_bytes_per_s: Rate of large pinned copies to the device; None without any.
        link_bytes_per_s: Bus rate of large collectives; None where their sizes are not told.
        by_class: Times by class of work.
        longest: Names of the kernels or operators that take most time, with that time.
        off_units_s: Products outside the matrix units by reason, see ``outside_matrix_units``.
        off_units_name: The longest of these kernels.
        ranks: Times of each rank, if there are several traces.
        busy_share: Share of the time in which a monitor saw the device at work; None without it.
        profile: The profiled run; None of traces and numbers.
        estimate: The prediction; None without one.
        other_steps_s: Predicted steps with other settings, by these in words.
    """

    step_s: float
    is_on_gpu: bool = True
    num_steps: int = 0
    device: Device | None = None
    busy_s: float = 0.0
    loader_s: float = 0.0
    host_s: float = 0.0
    sync_s: float = 0.0
    copy_s: float = 0.0
    pinned_copy_s: float = 0.0
    compile_s: float = 0.0
    allocator_s: float = 0.0
    queued_s: float = 0.0
    stretched_s: float = 0.0
    slowed_s: float = 0.0
    exposed_s: float = 0.0
    layout_s: float = 0.0
    num_launches: float = 0.0
    num_syncs: float = 0.0
    num_allocations: float = 0.0
    num_compilations: float = 0.0
    sync_names: tuple[str, ...] = ()
    copy_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    held_s: Mapping[str, float] = field(default_factory=dict)
    by_class: Mapping[str, float] = field(default_factory=dict)
    longest: tuple[tuple[str, float], ...] = ()
    off_units_s: Mapping[str, float] = field(default_factory=dict)
    off_units_name: str = ""
    ranks: tuple[RankTimes, ...] = ()
    busy_share: float | None = None
    profile: Profile | None = None
    estimate: Estimate | None = None
    other_steps_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def idle_s(self) -> float:
        """Time in which the device is idle, but for waits for the loader and copies [s]."""
        return self.host_s + self.sync_s + self.compile_s + self.allocator_s + self.queued_s


def observe(traces: Sequence[Trace]) -> Observation:
    """The mean step of one trace, or of the ranks of a job.

    Of several ranks, the one whose own work is the median speaks for the causes that all share. Its communication is
    that of the rank that waits least: the others' includes waiting for the slowest.
    """
    found = [_observed(trace) for trace in traces]
    if len(found) == 1:
        return found[0]
    ranks = tuple(
        RankTimes(
            label=trace.label,
            step_s=each.step_s,
            work_s=each.step_s - each.exposed_s,
            busy_s=each.busy_s,
            loader_s=each.loader_s,
            host_s=each.host_s,
            exposed_s=each.exposed_s,
        )
        for trace, each in zip(traces, found, strict=True)
    )
    middle = int(np.argsort([rank.work_s for rank in ranks])[(len(ranks) - 1) // 2])
    rates = [each.link_bytes_per_s for each in found if each.link_bytes_per_s is not None]
    return replace(
        found[middle],
        step_s=max(rank.step_s for rank in ranks),
        exposed_s=min(rank.exposed_s for rank in ranks),
        link_bytes_per_s=max(rates, default=None),
        ranks=ranks,
    )


def of_profile(profile: Profile, window: Observation | None = None) -> Observation:
    """The observation of a profiled run: that of its traced window, scaled to the steps outside it, or of its parts."""
    parts = profile.parts
    is_on_gpu = not profile.device.startswith("cpu")
    seen = window or Observation(
        step_s=parts.step_s, is_on_gpu=is_on_gpu, busy_s=parts.kernels_s, host_s=parts.host_s
    )
    idle = ("host_s", "sync_s", "compile_s", "allocator_s", "queued_s")
    # Saving and collecting garbage are of the host's part as well.
    held_s = min(parts.host_s, sum(profile.held_s.get(name, 0.0) for name in ("saving", "collecting")))
    scale = (parts.host_s - held_s) / seen.idle_s if seen.idle_s > 0 else 0.0
    computing_s = seen.busy_s + seen.exposed_s
    kernels = parts.kernels_s / computing_s if computing_s > 0 else 1.0
    return replace(
        seen,
        step_s=profile.step_time_s,
        num_steps=profile.num_steady_steps,
        busy_s=seen.busy_s * kernels,
        stretched_s=seen.stretched_s * (1.0 if is_on_gpu else kernels),
        exposed_s=seen.exposed_s * kernels,
        loader_s=parts.input_wait_s,
        **{name: getattr(seen, name) * scale for name in idle},
        by_class={name: time_s * kernels for name, time_s in seen.by_class.items()},
        off_units_s={name: time_s * kernels for name, time_s in seen.off_units_s.items()},
        held_s=profile.held_s,
        profile=profile,
    )


def _observed(trace: Trace) -> Observation:
    begin_s, end_s = (
        _device_reached(trace, float(edge_s)) for edge_s in (trace.steps[0, 0], trace.steps[-1, 1])
    )
    whole = Spans(np.array([begin_s]), np.array([end_s]))
    found = (_on_gpu if trace.is_on_gpu else _on_processor)(trace, whole)
    number = len(trace.steps)
    longest = tuple((name, time_s / number) for name, time_s in found.pop("longest"))

    def of_a_step(name: str, total: Any) -> Any:
        if isinstance(total, dict):
            return {key: value / number for key, value in total.items()}
        is_sum = name.startswith("num_") or (name.endswith("_s") and not name.endswith("_per_s"))
        return total / number if is_sum else total

    return Observation(
        step_s=(end_s - begin_s) / number,
        is_on_gpu=trace.is_on_gpu,
        num_steps=number,
        device=_device(trace.device_name),
        longest=longest,
        **{name: of_a_step(name, total) for name, total in found.items()},
    )


def _device_reached(trace: Trace, edge_s: float) -> float:
    """When the device is through with what was launched before an edge of the host's steps [s].

    A host that waits for nothing runs ahead by up to a thousand launches, whole steps of a small network.
    """
    before = _launches(trace, trace.kernels).begin_s < edge_s
    return float(max(edge_s, trace.kernels.end_s[before].max(initial=edge_s)))


def _device(name: str) -> Device | None:
    try:
        return find_device(name, prefer_sxm=True) if name else None
    except ForerunError:
        return None


def _on_gpu(trace: Trace, whole: Spans) -> dict[str, Any]:
    begin_s, end_s = float(whole.begin[0]), float(whole.end[0])
    kernels, copies = trace.kernels.inside(begin_s, end_s), trace.copies.inside(begin_s, end_s)
    classes = _classes(trace, kernels)
    is_shared = classes == COMMUNICATION
    own, shared = kernels.where(~is_shared), kernels.where(is_shared)
    busy, communicating = own.spans, shared.spans
    to_device = copies.named(re.compile("HtoD"))
    pageable = to_device.named(re.compile("Pageable"))
    alone = to_device.spans.minus(busy).minus(communicating)
    idle = whole.minus(busy).minus(communicating).minus(copies.spans)
    left = idle
    parts: dict[str, float] = {}
    # Each takes of what those before it left, so that no idle time is counted twice.
    for name, taken in (
        ("compile_s", _marked(trace, _COMPILING)),
        ("allocator_s", trace.calls.named(_ALLOCATING).spans),
        ("loader_s", _marked(trace, _LOADER)),
        ("copy_s", _launches(trace, pageable).spans),
    ):
        parts[name] = left.common(taken).length_s
        left = left.minus(taken)
    pageable_alone_s = alone.common(pageable.spans).length_s
    parts["pinned_copy_s"] = alone.length_s - pageable_alone_s
    parts["copy_s"] += pageable_alone_s
    waits = trace.calls.named(_SYNCHRONISING).inside(begin_s, end_s)
    parts |= _idle_parts(trace, idle, left, waits)
    is_own = np.array([class_of_kernel(name) != COMMUNICATION for name in trace.kernels.names], dtype=bool)
    stretched_s, slowed_s = _uneven(trace, trace.kernels.where(is_own[trace.kernels.name]))
    reasons = [outside_matrix_units(name) for name in kernels.names]
    off = _sums(
        [reasons[i] if c in PRODUCTS else "" for i, c in zip(kernels.name, classes, strict=True)], kernels
    )
    by_class = _sums(classes, kernels)
    by_class[COMMUNICATION] = communicating.minus(busy).length_s
    return {
        **parts,
        "busy_s": busy.length_s,
        "exposed_s": by_class[COMMUNICATION],
        "stretched_s": stretched_s,
        "slowed_s": slowed_s,
        "layout_s": kernels.named(_LAYOUTS).spans.length_s,
        "num_launches": float(len(kernels)),
        "num_syncs": float(len(waits)),
        "num_allocations": float(len(trace.calls.named(_ALLOCATING).inside(begin_s, end_s))),
        "num_compilations": _num_compilations(trace, whole),
        "sync_names": tuple(dict.fromkeys(waits.names[i] for i in waits.name))[:3],
        "copy_bytes_per_s": _rate(to_device.where(~np.isin(to_device.name, np.unique(pageable.name)))),
        "link_bytes_per_s": _bus_rate(shared),
        "by_class": {name: time_s for name, time_s in by_class.items() if time_s > 0},
        "off_units_s": {name: time_s for name, time_s in off.items() if name},
        "off_units_name": _longest(own.where(np.array([bool(r) for r in reasons])[own.name]))[0][0],
        "longest": _longest(kernels),
    }


def _on_processor(trace: Trace, whole: Spans) -> dict[str, Any]:
    begin_s, end_s = float(whole.begin[0]), float(whole.end[0])
    waiting, compiling = _marked(trace, _LOADER), _marked(trace, _COMPILING)
    operators = trace.operators.inside(begin_s, end_s)
    middle = (operators.begin_s + operators.end_s) / 2
    own = operators.where(~waiting.covers(middle) & ~compiling.covers(middle))
    own = own.named(
        re.compile(r"^(?!autograd::|profiler::|ProfilerStep|forerun::|Optimizer|enumerate|c10d::)[\w.]+::")
    )
    busy = own.spans.minus(waiting).minus(compiling)
    # Threads of their own send and receive; what the others' delay adds is waiting as well.
    exposed = _marked(trace, _SHARED).common(whole).minus(busy).minus(waiting).minus(compiling)
    host = whole.minus(busy).minus(waiting).minus(compiling).minus(exposed)
    reading = _readings(own).common(whole)
    self_s = _self_times(own)
    classes = np.array([class_of_operator(name) for name in own.names], dtype=object)[own.name]
    by_class = {COMMUNICATION: exposed.length_s} if len(exposed.begin) else {}
    is_double = [own.names[i].lower() == "double" for i in own.element]
    products = np.isin(classes, PRODUCTS)
    alone = replace(own, end_s=own.begin_s + self_s)
    computing = alone.where(~reading.covers((alone.begin_s + alone.end_s) / 2))
    return {
        "busy_s": busy.minus(reading).length_s,
        "stretched_s": sum(_uneven(trace, computing)),
        "loader_s": waiting.common(whole).minus(compiling).length_s,
        "compile_s": compiling.common(whole).length_s,
        "sync_s": reading.length_s,
        "num_syncs": float(len(own.named(re.compile("^aten::item$")))),
        "sync_names": (".item()",) if len(reading.begin) else (),
        "host_s": host.minus(reading).length_s,
        "exposed_s": exposed.length_s,
        "num_launches": float(len(own)),
        "num_compilations": _num_compilations(trace, whole),
        "by_class": _sums(classes, own, self_s) | by_class,
        "off_units_s": {"fp64": float(self_s[products & np.array(is_double, dtype=bool)].sum())},
        "off_units_name": _longest(own.where(products))[0][0],
        "longest": _longest(own, self_s),
    }


def _marked(trace: Trace, pattern: re.Pattern[str]) -> Spans:
    found = (trace.marks.named(pattern), trace.operators.named(pattern))
    return Spans.of(*(np.concatenate([getattr(each, end) for each in found]) for end in ("begin_s", "end_s")))


def _num_compilations(trace: Trace, whole: Spans) -> float:
    spans = _marked(trace, _COMPILING).common(whole)
    return float(len(spans.begin))


def _classes(trace: Trace, kernels: Events) -> np.ndarray:
    """Class of each kernel: by its name, and for products and updates by where it was launched."""
    names = np.array([class_of_kernel(name) for name in kernels.names], dtype=object)
    classes = names[kernels.name] if len(kernels) else np.zeros(0, dtype=object)
    launch_s = _launches(trace, kernels).begin_s
    is_update = _marked(trace, re.compile(r"^Optimizer\.step#")).covers(launch_s)
    classes[is_update & (classes != COMMUNICATION)] = OPTIMIZER
    by_operator = [class_of_operator(name) for name in trace.operators.names]
    for kind in {CONVOLUTION, ATTENTION}:
        fits = np.array([each == kind for each in by_operator], dtype=bool)
        inside = trace.operators.where(fits[trace.operators.name]) if len(trace.operators) else None
        if inside is not None and len(inside):
            classes[inside.spans.covers(launch_s) & (classes == LINEAR)] = kind
    return classes


def _launches(trace: Trace, events: Events) -> Events:
    """The calls that launched events, one for each; those without a call stand for themselves."""
    order = np.argsort(trace.calls.link, kind="stable")
    links = trace.calls.link[order]
    at = np.minimum(np.searchsorted(links, events.link), max(0, len(links) - 1))
    if not len(links):
        return events
    is_known = (links[at] == events.link) & (events.link >= 0)
    calls = trace.calls.where(order[at])
    return replace(
        calls,
        begin_s=np.where(is_known, calls.begin_s, events.begin_s),
        end_s=np.where(is_known, calls.end_s, events.begin_s),
    )


def _idle_parts(trace: Trace, idle: Spans, left: Spans, waits: Events) -> dict[str, float]:
    """Idle time after calls that waited for the device, with the next kernel queued, and of the host."""
    kernels, copies = trace.kernels, trace.copies
    begins = np.concatenate([kernels.begin_s, copies.begin_s])
    launched = np.concatenate([_launches(trace, kernels).end_s, _launches(trace, copies).end_s])
    order = np.argsort(begins, kind="stable")
    begins, launched = begins[order], launched[order]
    # A gap ends where a kernel begins, but for the rounding of times.
    at = np.minimum(np.searchsorted(begins, left.end - 1e-9), len(begins) - 1)
    queued = np.clip(left.end - np.maximum(left.begin, launched[at] + _SHORT_S), 0.0, None)
    gap_begin = idle.begin[np.searchsorted(idle.begin, left.begin, side="right") - 1]
    after_wait = waits.spans.covers(gap_begin + _TOUCHING_S / 2)
    rest = (left.end - left.begin) - queued
    return {
        "queued_s": float(queued.sum()),
        "sync_s": float(rest[after_wait].sum()),
        "host_s": float(rest[~after_wait].sum()),
    }


def _uneven(trace: Trace, kernels: Events) -> tuple[float, float]:
    """Time that single kernels, and whole steps, are longer than the same kernels of other steps [s].

    Steps repeat their kernels in order: entry (i, k) of a table is kernel k of step i, and its column's least entry the
    time that the kernel needs. A row's median ratio to it is the clock's; what exceeds that is a single kernel's.
    """
    launch_s = _launches(trace, kernels).begin_s
    step = np.searchsorted(trace.steps[:, 0], launch_s, side="right") - 1
    # A kernel belongs to the step that launched it; one launched after the last step, to none.
    step[launch_s >= trace.steps[-1, 1]] = -1
    counts = np.bincount(step[step >= 0], minlength=len(trace.steps))
    alike = np.flatnonzero(counts == np.bincount(counts).argmax())
    if len(alike) < 3 or not counts[alike[0]]:
        return 0.0, 0.0
    chosen = np.isin(step, alike)
    # Stable, so that kernels keep their order within a step.
    in_order = np.argsort(step[chosen], kind="stable")
    table = kernels.where(chosen).durations_s[in_order].reshape(len(alike), -1)
    least = table.min(axis=0)
    heavy = least >= np.median(least)
    pace = np.median(table[:, heavy] / np.maximum(least[heavy], 1e-9), axis=1)
    stretched = np.clip(table - _NOISE * pace[:, None] * least, 0.0, None).sum()
    return float(stretched), float(((pace - 1.0) * least.sum()).sum())


def _readings(operators: Events) -> Spans:
    """Calls that read single values; of a loop of such calls, the whole loop with its Python and indexing."""
    fits = np.array([_ITEMS.search(name) is not None for name in operators.names], dtype=bool)
    at = np.flatnonzero(fits[operators.name])
    begin_s, reached_s = operators.begin_s[at], operators.end_s[at]
    is_product = np.array([class_of_operator(name) in PRODUCTS for name in operators.names], dtype=bool)
    num_products = np.cumsum(is_product[operators.name])[at]
    is_followed = np.flatnonzero((np.diff(at) <= _LOOP) & (np.diff(num_products) == 0))
    reached_s[is_followed] = np.maximum(reached_s[is_followed], begin_s[is_followed + 1])
    return Spans.of(begin_s, reached_s)


def _self_times(events: Events) -> Floats:
    """Times of nested operators without those inside them, thread by thread [s]."""
    found: Floats = events.durations_s.copy()
    stacks: dict[int, list[int]] = {}
    for index in range(len(events)):
        stack = stacks.setdefault(int(events.lane[index]), [])
        while stack and events.end_s[stack[-1]] <= events.begin_s[index]:
            stack.pop()
        if stack:
            found[stack[-1]] -= events.durations_s[index]
        stack.append(index)
    return np.clip(found, 0.0, None)


def _sums(
    keys: Sequence[str] | np.ndarray, events: Events, times_s: Floats | None = None
) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, time_s in zip(keys, events.durations_s if times_s is None else times_s, strict=True):
        found[key] = found.get(key, 0.0) + float(time_s)
    return found


def _longest(events: Events, times_s: Floats | None = None) -> tuple[tuple[str, float], ...]:
    """Names of the events that take most time together, with that time [s]; an empty name without any."""
    sums = np.bincount(events.name, events.durations_s if times_s is None else times_s, len(events.names))
    largest = np.argsort(-sums)[:_NUM_LONGEST]
    return tuple((events.names[i], float(sums[i])) for i in largest if sums[i] > 0) or (("", 0.0),)


def _rate(copies: Events) -> float | None:
    """Rate of the large copies [bytes/s]."""
    large = copies.where(copies.size_bytes >= _LARGE_BYTES)
    return float(large.size_bytes.sum() / large.durations_s.sum()) if len(large) else None


def _bus_rate(collectives: Events) -> float | None:
    """Bus rate of the large collectives, those that waited for others left out [bytes/s].

    An all-reduce of n ranks sends 2 (n - 1) / n of its message over each link, other collectives half of that.
    """
    large: Bools = (collectives.size_bytes >= _LARGE_BYTES) & (collectives.ranks > 1)
    some = collectives.where(large)
    if not len(some):
        return None
    both_ways = np.array([re.search("all_?reduce", name, re.I) is not None for name in some.names])
    factor = np.where(both_ways[some.name], 2.0, 1.0) * (some.ranks - 1) / some.ranks
    return float(np.quantile(factor * some.size_bytes / np.maximum(some.durations_s, 1e-9), 0.75))
