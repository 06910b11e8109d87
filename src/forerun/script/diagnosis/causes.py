"""Causes of slow steps: each one registered function from an observation to its cost, evidence and remedy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forerun.base.answers import Answer
from forerun.base.errors import ForerunError
from forerun.base.units import format_bytes, format_duration_s
from forerun.question.devices.cluster import Link, find_link, host_link, load_links
from forerun.question.devices.device import NumberFormat
from forerun.script.diagnosis.observation import COMMUNICATION, PRODUCTS, Observation
from forerun.script.patching import tables

if TYPE_CHECKING:
    from forerun.script.profiling.profile import Profile

_LEAST_SHARE = 0.03
"""Share of a step below which a cause is not named: single runs of a step differ by as much."""
LARGE_SHARE = 0.1
"""Share of a cause beside which a step inside the predicted interval is still worth a look."""
NOTABLE_SHARE = 0.05
"""The same in a trace, and on a busy machine, whose operators of several threads are stretched: 27 % became 8 %."""
_NOTABLE = 0.15
OTHER_PROGRAMS = "other programs on the device"
OVER_TCP = "NCCL over TCP"
_MOST_LAUNCH_S = 100e-6
"""Most host time of an operator: eager ones take 15 to 22 us where the host is free, and some times that where not."""
_UNEVEN = 1.6
"""Ratio of the slowest class to the fastest up to which all classes count as slowed alike."""
_ALIKE = math.log(1.5)
"""Two steps of a ratio up to this one may be the same: so far apart are ends of the usual interval."""
_SLOW_LINK = 0.5
"""Share of a link's usable rate below which another link, or a broken one, carries the messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Answer):
    """A cause of a slow step.

    Attributes:
        cause: Its name.
        cost_s: Time of a step that it costs; the whole step, where the run ends by it [s].
        share: The same as a share of the step.
        evidence: Figures that speak for it.
        change: Remedy in words.
        knobs: The same for ``forerun tune``; empty where it has no such knob.
        after_s: Step expected after the change; None where no law tells it [s].
        bottleneck: Part of the step that it belongs to: ``input``, ``copy``, ``host``, ``kernels``, ``machine``; or
            ``memory``.
    """

    cause: str = ""
    cost_s: float
    share: float = 0.0
    evidence: str
    change: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    after_s: float | None = None
    bottleneck: str = "kernels"


_Judge = Callable[[Observation], Cause | None]
_JUDGES: dict[str, tuple[str, _Judge]] = {}


def _cause(name: str, bottleneck: str = "kernels") -> Callable[[_Judge], _Judge]:
    """Registers the judge of a cause."""

    def register(judge: _Judge) -> _Judge:
        assert name not in _JUDGES, f"two causes are called '{name}'"
        _JUDGES[name] = (bottleneck, judge)
        return judge

    return register


def causes_of(seen: Observation) -> tuple[Cause, ...]:
    """The causes that cost a notable share of a step, the most expensive first.

    Other programs on the cores of a run are a circumstance, and stand behind each large cause of its own, ranked by its
    cost on a free machine: no thread waits for a core there, and operators take as long as in the quickest step.
    """
    found = []
    for name, (bottleneck, judge) in _JUDGES.items():
        judged = judge(seen)
        if judged is not None and judged.cost_s >= _LEAST_SHARE * seen.step_s:
            cost_s = min(judged.cost_s, seen.step_s)
            found.append(
                replace(judged, cause=name, bottleneck=bottleneck, cost_s=cost_s, share=cost_s / seen.step_s)
            )
    stolen = (seen.profile.busy_machine_fraction or 0.0) if seen.profile is not None else 0.0
    if stolen < _NOTABLE:
        return tuple(sorted(found, key=lambda cause: -cause.cost_s))
    computing_s = max(0.0, min((1 - stolen) * seen.busy_s, seen.busy_s - seen.stretched_s))
    free_s = computing_s + (1 - stolen) * (seen.step_s - seen.busy_s)

    def place(cause: Cause) -> tuple[bool, float]:
        part = computing_s / seen.busy_s if cause.bottleneck == "kernels" and seen.busy_s else 1 - stolen
        is_large = cause.cause != OTHER_PROGRAMS and part * cause.cost_s >= NOTABLE_SHARE * free_s
        return not is_large, -part * cause.cost_s if is_large else -cause.cost_s

    return tuple(sorted(found, key=place))


def _percent(part_s: float, seen: Observation) -> str:
    return f"{100 * part_s / seen.step_s:.0f} % of a step"


@_cause("data loader", "input")
def _loader(seen: Observation) -> Cause | None:
    if seen.profile is not None:
        return _more_workers(seen.profile, seen.loader_s)
    return Cause(
        cost_s=seen.loader_s,
        evidence=f"{_percent(seen.loader_s, seen)} ({format_duration_s(seen.loader_s)}) is waiting for the next batch",
        change="prepare samples in more workers (num_workers, persistent_workers), make a sample cheaper, or keep "
        "prepared samples",
    )


def _more_workers(profile: Profile, wait_s: float) -> Cause:
    num_workers = int(profile.loader.get("num_workers") or 0)
    share = 100 * wait_s / profile.step_time_s
    reason = f"{share:.0f} % of a step is waiting for the loader, which has {num_workers} workers"
    cores = max(1, math.floor(profile.num_usable_cores))
    if num_workers >= cores:
        return Cause(
            cost_s=wait_s,
            evidence=reason,
            change=f"all {cores} usable cores are at work on the input: make a sample cheaper (smaller stored images, "
            "a faster decoder, fewer transforms), or keep prepared samples",
        )
    best_s = min(_fed_s(profile, workers) for workers in range(1, cores + 1))
    # The fewest that are as good: each worker takes a core and memory.
    chosen = next(w for w in range(1, cores + 1) if _fed_s(profile, w) <= 1.02 * best_s)
    knobs: dict[str, Any] = {"num_workers": chosen, "persistent_workers": True}
    if not profile.device.startswith("cpu"):
        knobs["pin_memory"] = True
    return Cause(
        cost_s=wait_s,
        evidence=reason,
        change=f"prepare samples in {chosen} worker process{'es' if chosen > 1 else ''} beside the step",
        knobs=knobs,
        after_s=_fed_s(profile, chosen),
    )


def _fed_s(profile: Profile, num_workers: int) -> float:
    """Step of a profiled run with another number of workers [s]."""
    own, samples = int(profile.loader.get("num_workers") or 0), profile.batch_size or 1.0
    # Workers that run already prepare a step's samples in at most their whole time.
    cost_s = (profile.loader_wait_s if own == 0 else profile.step_time_s * own) / samples
    return fed_step_time_s(
        compute_s=profile.step_time_s - profile.loader_wait_s,
        sample_cost_s=cost_s,
        num_samples=samples,
        num_workers=num_workers,
        num_cores=profile.num_usable_cores,
        core_s=profile.cpu_s_per_step if profile.device.startswith("cpu") else samples * cost_s,
    )


def fed_step_time_s(
    *,
    compute_s: float,
    sample_cost_s: float,
    num_samples: float,
    num_workers: int,
    num_cores: float,
    core_s: float,
) -> float:
    """Time of a step while workers prepare its samples in parallel [s].

    T = max(compute, n c / W, core / C): the largest of the step itself, the workers, and all work over all cores.
    Without workers T = compute + n c.

    Args:
        compute_s: Time of the step without its input [s].
        sample_cost_s: c, time one core needs to prepare a sample [s].
        num_samples: n, number of samples in a step.
        num_workers: W, number of workers.
        num_cores: C, number of cores that workers and, on a processor, the step share.
        core_s: CPU time of the step and of its input together [s].

    >>> fed_step_time_s(
    ...     compute_s=1.0, sample_cost_s=0.5, num_samples=4, num_workers=2, num_cores=4, core_s=3.0)
    1.0
    """
    if num_workers == 0:
        return compute_s + num_samples * sample_cost_s
    return max(compute_s, num_samples * sample_cost_s / num_workers, core_s / num_cores)


@_cause("host and launches", "host")
def _host(seen: Observation) -> Cause | None:
    launches = (
        f", which launches {seen.num_launches:,.0f} kernels" if seen.num_launches and seen.is_on_gpu else ""
    )
    evidence = (
        f"{_percent(seen.host_s, seen)} is neither kernels nor input{launches}: Python, launches, logging"
    )
    if seen.num_launches and seen.host_s > _MOST_LAUNCH_S * seen.num_launches:
        return Cause(
            cost_s=seen.host_s,
            evidence=f"{evidence}; {seen.num_launches:,.0f} operators a step do not explain it",
            change="look at what the loop does beside the model: Python over samples, logging, files, sleeping; "
            "'py-spy top', or a trace with_stack=True, names the lines",
        )
    if seen.profile is not None and seen.profile.samples_per_batch is not None:
        return _larger_batch(seen.profile, seen.host_s, evidence)
    return Cause(
        cost_s=seen.host_s,
        evidence=evidence,
        change="take more samples in a step, fuse kernels (torch.compile, CUDA graphs, fused optimizers), and move "
        "Python and logging out of the loop",
    )


def _larger_batch(profile: Profile, host_s: float, evidence: str) -> Cause:
    batch, per_step, factor = profile.samples_per_batch or 1.0, profile.batches_per_step or 1.0, 4
    larger, rate = round(factor * batch), "with the learning rate scaled with it"
    if profile.loader:  # else no hook reaches its batches
        rate += " (forerun tune does both)"
    if per_step >= factor:
        rate = (
            f"and accumulate {per_step / factor:.3g} batches instead of {per_step:.3g}: a step keeps its samples and "
            "its learning rate"
        )
    elif per_step > 1.5:
        rate = f"of {per_step:.3g} batches a step, {rate}"
    return Cause(
        cost_s=host_s,
        evidence=evidence,
        change=f"use batch size {larger}, {rate}; and look for Python that works sample by sample",
        knobs={"batch_size": larger} if profile.loader else {},
        # Host work is per batch: four times the samples share it.
        after_s=(factor * (profile.step_time_s - profile.parts.host_s) + profile.parts.host_s) / factor,
    )


def _part(row: Mapping[str, Any]) -> None:
    """Registers a cause that costs a part of the step, from a row of ``tables.toml``."""
    name, _, entry = row["part"].partition(".")

    @_cause(row["cause"], row["bottleneck"])
    def judge(seen: Observation) -> Cause | None:
        cost_s = getattr(seen, name).get(entry, 0.0) if entry else getattr(seen, name)
        if cost_s <= row.get("least_share", 0.0) * seen.step_s:
            return None
        evidence = row["evidence"].format(
            seen=seen, share=_percent(cost_s, seen), syncs=", ".join(seen.sync_names)
        )
        return Cause(cost_s=cost_s, evidence=evidence, change=row["change"], knobs=row.get("knobs", {}))


for _row in tables("diagnosis")["parts"]:
    _part(_row)


@_cause("growing memory", "memory")
def _growing_memory(seen: Observation) -> Cause | None:
    profile = seen.profile
    if profile is None or profile.num_steps_to_full is None:
        return None
    if seen.compile_s >= _LEAST_SHARE * seen.step_s:
        return None  # what is compiled in each step is kept as well
    if profile.num_steps_to_full >= (profile.num_steps_of_job or math.inf) - profile.num_steps:
        return None
    return Cause(
        cost_s=math.inf,
        evidence=f"each step leaves {format_bytes(profile.memory_growth_bytes)} more in use: memory is full after at "
        f"most {profile.num_steps_to_full:,.0f} steps more",
        change="keep loss.item() and output.detach() in place of tensors, which hold their graphs; empty lists of "
        "outputs (a cache of samples stops growing after the first epoch)",
    )


@_cause("copies to the device", "copy")
def _copies(seen: Observation) -> Cause | None:
    profile_s = seen.profile.parts.copy_s if seen.profile is not None else 0.0
    pinned_s = 0.0 if _slow_host_link(seen) else seen.pinned_copy_s
    cost_s = max(profile_s, seen.copy_s + pinned_s)
    kind = " from pageable memory" if seen.copy_s > pinned_s else ""
    return Cause(
        cost_s=cost_s,
        evidence=f"{_percent(cost_s, seen)} is copying batches to the device{kind} with nothing else running",
        change="pin the loader's memory, and copy with non_blocking=True, so that copies run beside kernels",
        knobs={"pin_memory": True},
        after_s=seen.step_s - cost_s,
    )


@_cause("no matrix units in use")
def _matrix_units(seen: Observation) -> Cause | None:
    reason = max(seen.off_units_s, key=lambda name: seen.off_units_s[name], default="")
    time_s = seen.off_units_s.get(reason, 0.0)
    words = {
        "fp32": "use TF32 (torch.set_float32_matmul_precision('high')) or autocast to bf16",
        "fp64": "use float32: numpy and Python make float64 of what they touch",
        "alignment": "make channels, hidden sizes and the vocabulary multiples of 8 (64 on A100 and later)",
    }
    gain = _lost_share(seen, reason)
    if not time_s or not gain:
        return None
    return Cause(
        cost_s=gain * time_s,
        evidence=f"products on the ordinary units ({reason}) take {_percent(time_s, seen)}, most of it "
        f"{seen.off_units_name[:70]}",
        change=words[reason],
        knobs={"amp": "bf16"} if reason == "fp32" else {},
    )


def _lost_share(seen: Observation, reason: str) -> float:
    """Share of a product's time that its matrix units, or numbers of half the width, would save, by peak rates."""
    if reason == "fp64" and not seen.is_on_gpu:
        return 0.5  # a vector holds half as many
    if seen.device is None:
        return 0.5
    peaks = seen.device.peak_flops_per_s
    now = {"fp32": NumberFormat.FP32, "fp64": NumberFormat.FP64}.get(reason, NumberFormat.FP16_VECTOR)
    if not seen.device.has_matrix_units:
        return 0.0 if reason != "fp64" else 1 - peaks.get(now, 0.0) / peaks[NumberFormat.FP32]
    best = max(peaks.get(kind, 0.0) for kind in (NumberFormat.TF32, NumberFormat.FP16, NumberFormat.BF16))
    return 1 - peaks.get(now, peaks[NumberFormat.FP32]) / best if best else 0.5


@_cause("throttled clock or power limit")
def _throttled(seen: Observation) -> Cause | None:
    change = "look at clocks, temperature and power limit (nvidia-smi -q -d CLOCK,PERFORMANCE,POWER), and at cooling"
    sensors = {} if seen.profile is None else seen.profile.sensors
    share = max(sensors.get(f"gpu_throttled_by_{name}_mean", 0.0) for name in ("heat", "power"))
    predicted = _all_slower(seen)
    if share >= _NOTABLE:
        cost_s = share * seen.busy_s
        evidence = f"the device reports lowered clocks in {100 * share:.0f} % of the samples"
    elif predicted and max(predicted) <= _UNEVEN * min(predicted) and not any(seen.off_units_s.values()):
        cost_s = max(0.0, seen.busy_s - sum(_computed(seen).values()))
        evidence = (
            f"every class of kernels takes {min(predicted):.2g} to {max(predicted):.2g} times its prediction"
        )
    else:
        cost_s = seen.slowed_s
        evidence = f"all kernels of some steps take longer than in others, by {_percent(cost_s, seen)}"
    return Cause(cost_s=cost_s, evidence=evidence, change=change)


def _computed(seen: Observation) -> dict[str, float]:
    """Predicted times by the classes that kernels have [s]."""
    parts = () if seen.estimate is None else seen.estimate.breakdown
    return {
        part.name: part.time_s for part in parts if part.name in seen.by_class and part.name != COMMUNICATION
    }


def _all_slower(seen: Observation) -> list[float]:
    """Ratios of measured to predicted classes, if every large one is above the prediction's interval; else none."""
    if seen.estimate is None or not seen.is_on_gpu:
        return []
    interval, computed = seen.estimate.step_time_s, _computed(seen)
    large = {name: time_s for name, time_s in computed.items() if time_s >= 0.05 * sum(computed.values())}
    ratios = [seen.by_class[name] / time_s for name, time_s in large.items()]
    return ratios if len(ratios) > 1 and min(ratios) > interval.high / interval.value else []


@_cause("kernels slower than predicted")
def _slow_class(seen: Observation) -> Cause | None:
    if seen.estimate is None or _all_slower(seen) or not seen.is_on_gpu:
        return None
    interval = seen.estimate.step_time_s
    extra = {
        name: seen.by_class[name] - time_s * interval.high / interval.value
        for name, time_s in _computed(seen).items()
    }
    worst = max(extra, key=lambda name: extra[name], default="")
    if not worst or (worst in PRODUCTS and any(seen.off_units_s.values())):
        return None
    return Cause(
        cost_s=extra[worst],
        evidence=f"{worst} takes {format_duration_s(seen.by_class[worst])} of a step, predicted are "
        f"{format_duration_s(_computed(seen)[worst])}",
        change="look for unfused or repeated kernels of this class: another implementation, torch.compile, layout",
    )


def _slow_host_link(seen: Observation) -> Link | None:
    """The link that copies to the device should use, if they have less than half of its rate."""
    if seen.copy_bytes_per_s is None:
        return None
    try:
        link = find_link("pcie-3-x8") if seen.device is None else host_link(seen.device)
    except ForerunError:
        return None
    return link if seen.copy_bytes_per_s < _SLOW_LINK * link.usable_bytes_per_s else None


@_cause("slow link to the host")
def _host_link(seen: Observation) -> Cause | None:
    link = _slow_host_link(seen)
    if link is None or seen.copy_bytes_per_s is None:
        return None
    return Cause(
        cost_s=seen.pinned_copy_s * (1 - seen.copy_bytes_per_s / link.usable_bytes_per_s),
        evidence=f"pinned copies run at {seen.copy_bytes_per_s / 1e9:.2g} GB/s, {link.title} gives "
        f"{link.usable_bytes_per_s / 1e9:.2g}",
        change="look at the lanes (nvidia-smi -q: PCIe generation and link width now and at most), at risers and slots",
    )


def _expected_link(seen: Observation) -> Link:
    """The link of the prediction's cluster; without one, the least network that gradients should use.

    Machines of boards with links of their own (SXM) have a network card beside each board, as fast as its bus.
    """
    if seen.estimate is not None:
        cluster = seen.estimate.run.cluster
        found = cluster.inter_link if cluster.num_nodes > 1 else cluster.intra_link
        if found is not None:
            return found
    if seen.device is not None and not seen.device.bus.startswith("PCIe"):
        with contextlib.suppress(ForerunError):
            return host_link(seen.device)
    return find_link("pcie-3-x8")


def _is_slow_link(seen: Observation) -> bool:
    rate = seen.link_bytes_per_s
    return rate is not None and rate < _SLOW_LINK * _expected_link(seen).usable_bytes_per_s


@_cause("slow or wrong link between devices")
def _slow_link(seen: Observation) -> Cause | None:
    rate = seen.link_bytes_per_s
    change = (
        "see with NCCL_DEBUG=INFO whether NET/IB or NET/Socket is used and whether P2P is on; set "
        "NCCL_SOCKET_IFNAME and NCCL_IB_HCA, and load the network's plug-in"
    )
    slow_s = seen.other_steps_s.get(OVER_TCP, 0.0)
    # Between nodes a network is slow by any factor, as the links, the plug-in and the cards it finds have it.
    if rate is None and seen.estimate is not None and slow_s > seen.step_s / math.exp(_ALIKE):
        predicted_s = seen.estimate.step_time_s.value
        return Cause(
            cost_s=seen.step_s - predicted_s,
            evidence=f"over TCP the step is predicted at {format_duration_s(slow_s)}, over the network asked for at "
            f"{format_duration_s(predicted_s)}: one between the two explains it",
            change=f"{change}; a run on one node tells whether it is the network",
        )
    if rate is None or not _is_slow_link(seen):
        return None
    expected = _expected_link(seen)
    nearest = min(load_links().values(), key=lambda link: abs(math.log(link.usable_bytes_per_s / rate)))
    return Cause(
        cost_s=seen.exposed_s * (1 - rate / expected.usable_bytes_per_s),
        evidence=f"large collectives run at {rate / 1e9:.2g} GB/s, as over {nearest.title}; {expected.title} gives "
        f"{expected.usable_bytes_per_s / 1e9:.2g}; {_percent(seen.exposed_s, seen)} is waiting for them",
        change=change,
    )


@_cause("communication that nothing overlaps")
def _exposed(seen: Observation) -> Cause | None:
    if _is_slow_link(seen):
        return None
    return Cause(
        cost_s=seen.exposed_s,
        evidence=f"{_percent(seen.exposed_s, seen)} is communication with no kernel beside it",
        change="let buckets go out during the backward pass (DDP, with no_sync between micro-steps), raise "
        "bucket_cap_mb, prefetch with FSDP, or take a larger batch",
    )


@_cause("one slow rank", "machine")
def _slow_rank(seen: Observation) -> Cause | None:
    if len(seen.ranks) < 2:
        return None
    *others, slowest = sorted(seen.ranks, key=lambda rank: rank.work_s)
    usual = others[len(others) // 2]
    parts = {"kernels": slowest.busy_s - usual.busy_s, "wait for the loader": slowest.loader_s - usual.loader_s,
             "host": slowest.host_s - usual.host_s}  # fmt: skip
    most = max(parts, key=lambda name: parts[name])
    return Cause(
        cost_s=slowest.work_s - usual.work_s,
        evidence=f"{slowest.label} works {format_duration_s(slowest.work_s)} of a step, the others "
        f"{format_duration_s(usual.work_s)} and then wait for it; its {most} take{'s' * (most != 'kernels')} longer",
        change=f"look at the machine of {slowest.label} (clocks, ECC errors, other programs, its disk), or take it out",
    )


@_cause(OTHER_PROGRAMS, "machine")
def _other_programs(seen: Observation) -> Cause | None:
    share = (seen.profile.busy_machine_fraction or 0.0) if seen.profile is not None else 0.0
    if share >= _NOTABLE:
        return Cause(
            cost_s=share * seen.step_s,
            evidence="the machine is busy with other work: the script was ready to run and had no core in "
            f"{100 * share:.0f} % of its steps",
            change="end the other work or wait for it: it stretches all parts of the step alike; cores that "
            "are reserved (taskset, a container's quota) help as well",
        )
    cost_s = seen.queued_s + seen.stretched_s if seen.is_on_gpu else 0.0
    return Cause(
        cost_s=cost_s,
        evidence=f"in {_percent(cost_s, seen)} kernels that were launched did not run, or ran longer than usual",
        change="see with nvidia-smi which programs share the device; end them, or take another one",
    )


@_cause("too few threads")
def _threads(seen: Observation) -> Cause | None:
    profile = seen.profile
    if profile is None or not profile.device.startswith("cpu") or not profile.optimizer.get("num_threads"):
        return None
    threads, cores = int(profile.optimizer["num_threads"]), math.floor(profile.num_usable_cores)
    total_s = sum(seen.by_class.values())
    share = sum(seen.by_class.get(name, 0.0) for name in PRODUCTS) / total_s if total_s else 0.0
    return Cause(
        cost_s=share * seen.busy_s * max(0.0, 1 - threads / cores),
        evidence=f"PyTorch uses {threads} of {cores} cores, and products take {100 * share:.0f} % of its operators",
        change="set OMP_NUM_THREADS, or torch.set_num_threads, to the number of cores",
    )


@_cause("too many threads", "machine")
def _crowded(seen: Observation) -> Cause | None:
    profile = seen.profile
    if profile is None or not profile.crowded_fraction:
        return None
    cores = max(1, math.floor(profile.num_usable_cores))
    threads = int(profile.optimizer["num_threads"])
    each = f"each of {profile.num_ranks} processes uses" if profile.num_ranks > 1 else "PyTorch uses"
    best = max(1, cores // profile.num_ranks)
    return Cause(
        cost_s=profile.crowded_fraction * seen.step_s,
        evidence=f"{each} {threads} threads for {cores} cores: in {100 * profile.crowded_fraction:.0f} % of a step "
        "they kept the script off a core",
        change=f"set OMP_NUM_THREADS, or torch.set_num_threads, to {best}",
        knobs={"num_threads": best},
    )


@_cause("idle device", "host")
def _idle(seen: Observation) -> Cause | None:
    if seen.busy_share is None:
        return None
    return Cause(
        cost_s=(1 - seen.busy_share) * seen.step_s,
        evidence=f"the device computes {100 * seen.busy_share:.0f} % of the time, and else waits for loader or host",
        change="a trace tells the two apart: forerun diagnose -- COMMAND, or forerun diagnose --trace FILE",
    )


@_cause("other settings than asked for")
def _other_settings(seen: Observation) -> Cause | None:
    others = {name: other_s for name, other_s in seen.other_steps_s.items() if name != OVER_TCP}
    if seen.estimate is None or not others:
        return None
    step_s = seen.estimate.step_time_s.value
    nearest = min(others, key=lambda name: abs(math.log(others[name] / seen.step_s)))
    other_s = others[nearest]
    if abs(math.log(other_s / seen.step_s)) > _ALIKE or other_s <= step_s:
        return None
    return Cause(
        cost_s=min(other_s, seen.step_s) - step_s,  # no more than the step is longer than it should be
        evidence=f"with {nearest} the step is predicted at {format_duration_s(other_s)}, nearer to the measured one",
        change=f"see whether the run has {nearest}",
    )


def busy_device(seen: Observation) -> Cause:
    """The finding for a step in which only kernels take time, with ways to make them faster."""
    profile = seen.profile
    if profile is None and seen.num_steps and not seen.longest:
        return Cause(
            cause="busy device or host",
            cost_s=0.0,
            evidence=f"{_percent(seen.busy_s, seen)} is no wait for data",
            change="the utilisation of the device (--gpu-utilization) tells the two apart, or a trace of some steps",
        )
    has_images = profile is not None and bool(profile.has_images)
    knobs: dict[str, Any] = {"amp": "bf16"} if seen.is_on_gpu else {}
    if has_images:
        knobs["channels_last"] = True
    tried = [
        *(["mixed precision"] if seen.is_on_gpu else []),
        *(["channels_last memory"] if has_images else []),
    ]
    gain = (
        "'forerun predict --precision amp' tells the gain"
        if seen.is_on_gpu
        else "what that gains on this processor must be measured"
    )
    return Cause(
        cause="busy device",
        cost_s=0.0,
        evidence=f"{_percent(seen.busy_s, seen)} is computing: the device is used",
        change=f"try {', then '.join([*tried, *([] if seen.is_on_gpu else ['a larger batch'])])}; {gain}",
        knobs=knobs,
    )
