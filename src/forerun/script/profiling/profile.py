"""The answer of ``forerun profile``: parts of a step, use of the machine, advice, and the time of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from forerun.base.answers import Answer, fields_of, from_plain
from forerun.base.errors import ScriptError
from forerun.script.capturing.job import EPOCH_NAMES, SURE_STEP_NAMES
from forerun.script.command_words import command_arguments
from forerun.script.diagnosis.causes import Cause
from forerun.script.profiling.launch import Launch
from forerun.script.profiling.recorded import Floats, ProcessRecord, Spans

if TYPE_CHECKING:
    from forerun.script.diagnosis.observation import Observation

_IMAGE_DIMS = 4
_ALL_CORES = 0.85
_LEAST_STEPS, _STRAIGHT, _GROWN = 6, 0.9, 0.03
"""Steps, share of their memory's variance in a line, and share of growth from which on it grows with the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Four parts of the time of a mean step; they add up to the step.

    Attributes:
        input_wait_s: Wait for the loader while the device has nothing to run [s].
        copy_s: Copies to the device not hidden behind kernels [s].
        kernels_s: Computation: kernels of a GPU, operators of a processor [s].
        host_s: The rest: Python, launches, logging, an idle device [s].
    """

    input_wait_s: float
    copy_s: float
    kernels_s: float
    host_s: float

    @property
    def step_s(self) -> float:
        """Sum of the parts [s]."""
        return self.input_wait_s + self.copy_s + self.kernels_s + self.host_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Answer):
    """A profiled run.

    Attributes:
        command: Words of the command.
        outcome: ``done``, ``stopped``, ``crashed``, ``interrupted`` or ``timeout``.
        status: Exit status; None if forerun ended the command.
        num_steps: Number of training steps seen.
        num_steady_steps: Number of steps behind the figures, without the first one and traced ones.
        step_time_s: Mean time of a steady step [s].
        step_time_median_s: Median time of a steady step [s].
        throughput_samples_per_s: Samples per second of the whole job in steady steps.
        batch_size: Median number of samples in a step; None if the loader does not report it.
        parts: Parts of a mean step.
        batches_per_step: Number of batches in a step, more than one with accumulated gradients; None without a loader.
        has_images: True if a batch has a tensor of four dimensions; None if no batch was seen.
        busy_machine_fraction: Share of the steps in which the training thread was ready to run and had no core, with
            cores of this run left; None where the system does not tell.
        crowded_fraction: Share of the steps in which it had no core because of the run's own threads, more than cores.
        loader_wait_s: Wait for the loader in a step, hidden behind kernels or not [s].
        held_s: Time of a step in which something else held the script up: ``saving`` checkpoints and ``collecting``
            garbage, wherever they happen, and ``between`` the steps, such as a validation [s].
        has_window: True if a traced window separated kernels from host time.
        top_operators: Largest operators of the window, name and share of the window.
        wall_s: Time of the whole run [s].
        phases_s: Time of the whole run by phase: ``start``, ``steps``, ``between``, ``profiling``, ``end`` [s].
        device: Device of the parameters, such as ``cpu``.
        device_busy_fraction: Utilisation of the device during steps.
        cpu_utilisation: CPU time of all processes over time and usable cores.
        cpu_s_per_step: CPU time of all processes per step [s].
        num_usable_cores: Number of cores that the processes may use.
        peak_memory_bytes: Largest memory of all processes [bytes].
        device_peak_bytes: Largest memory allocated on the GPU; None without a GPU [bytes].
        memory_growth_bytes: Memory that each step adds, of the GPU or of the process; 0 unless it grows evenly [bytes].
        num_steps_to_full: Further steps after which that memory is full; None unless it grows.
        sensors: Figures of sensors: clocks, power, throttling.
        loader: Settings of the training loader.
        optimizer: Name and learning rate of the optimizer.
        num_ranks: Number of processes that train.
        num_steps_of_job: Number of steps of the whole job; None if it is not known.
        epochs: Number of epochs of the job, from the script's arguments; None if not known.
        steps_per_epoch: Number of steps per epoch of the training loader; None for a stream.
        job_time_s: Time of the whole job from its start; None if not known [s].
        time_left_s: Time of the job left at the end of this run; None if not known [s].
        advice: The most expensive part of the step that a change can shorten.
        hooks: Changes made by hooks.
        interrupted_by: Name of the signal that ended the run; empty without one.
        num_killed: Number of processes that had to be killed at the end.
        said: Last lines of the command's output, if it crashed.
        notes: Figures that are not known, with the reason.
    """

    command: tuple[str, ...]
    outcome: str
    status: int | None
    num_steps: int
    num_steady_steps: int
    step_time_s: float
    step_time_median_s: float
    throughput_samples_per_s: float | None
    batch_size: float | None
    parts: StepParts
    batches_per_step: float | None
    has_images: bool | None
    busy_machine_fraction: float | None
    loader_wait_s: float
    held_s: Mapping[str, float]
    has_window: bool
    top_operators: tuple[tuple[str, float], ...]
    wall_s: float
    phases_s: Mapping[str, float]
    device: str
    device_busy_fraction: float | None
    cpu_utilisation: float
    cpu_s_per_step: float
    num_usable_cores: float
    peak_memory_bytes: int
    device_peak_bytes: int | None
    sensors: Mapping[str, float]
    loader: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    num_ranks: int
    num_steps_of_job: float | None
    epochs: float | None
    steps_per_epoch: int | None
    job_time_s: float | None
    time_left_s: float | None
    memory_growth_bytes: float = 0.0
    num_steps_to_full: float | None = None
    crowded_fraction: float = 0.0
    advice: Cause | None = None
    hooks: tuple[Mapping[str, Any], ...] = ()
    interrupted_by: str = ""
    num_killed: int = 0
    said: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def samples_per_batch(self) -> float | None:
        """Samples of a batch of the loader, or of a step without a loader; None if they are not known."""
        return None if self.batch_size is None else self.batch_size / (self.batches_per_step or 1.0)

    def json_fields(self) -> dict[str, Any]:
        """The fields as JSON, with the sum of the parts of a step."""
        return {**fields_of(self), "parts": {**fields_of(self.parts), "step_s": self.parts.step_s}}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Profile:
        """The profile whose fields a JSON document holds, as ``as_dict`` writes them."""
        parts = {name: value for name, value in document["parts"].items() if name != "step_s"}
        # An exit status is negative for a signal.
        return cast(Profile, from_plain(cls, {**document, "parts": parts}, least=-256.0))


def steady_steps(steps: Spans) -> Spans:
    """Steps that represent later ones: not traced, and not the first, if there are others.

    The starts of later epochs stay: waiting for workers to start is part of every epoch.
    """
    later = np.arange(len(steps)) > 0
    for keep in (later & (steps.is_traced == 0), later):
        if keep.any():
            return cast(Spans, steps[keep])
    return steps


def parts_of_step(
    step_s: float,
    wait_s: float,
    window: Observation | None,
    *,
    held_s: float = 0.0,
    traced_held_s: float = 0.0,
) -> StepParts:
    """The four parts of a step.

    On a processor nothing runs while the script waits, so the wait is the mean of all steps, and the rest is divided as
    in the window: kernels k = (T - W) k' / (T' - W'). On a GPU kernels and copies take as long traced as not; the rest
    of T is idle, and is wait or host in the window's proportion.

    Args:
        step_s: T, mean time of a step [s].
        wait_s: W, mean wait of a step [s].
        window: Mean step of the traced window; None without a window.
        held_s: H, mean time of a step in which saving and collecting garbage held the script up [s].
        traced_held_s: The same of a traced step [s].
    """
    wait_s = min(wait_s, step_s)
    if window is None:
        return StepParts(input_wait_s=wait_s, copy_s=0.0, kernels_s=step_s - wait_s, host_s=0.0)
    if not window.is_on_gpu:
        # On a processor the kernels run in the host's own time; the share of the traced window is taken for
        # all steps.
        busy_s = window.busy_s + window.exposed_s
        computing_s = max(window.step_s - window.loader_s - traced_held_s, busy_s)
        share = busy_s / computing_s if computing_s > 0 else 1.0
        kernels_s = max(0.0, step_s - wait_s - held_s) * share
        return StepParts(
            input_wait_s=wait_s, copy_s=0.0, kernels_s=kernels_s, host_s=step_s - wait_s - kernels_s
        )
    busy_s = min(step_s, window.busy_s + window.exposed_s)
    copy_s = min(step_s - busy_s, window.copy_s + window.pinned_copy_s)
    idle_s = step_s - busy_s - copy_s
    traced_idle_s = window.loader_s + window.idle_s
    # The device may work on while the host waits for a batch: only the idle share of the wait costs time.
    waited = window.loader_s / traced_idle_s if traced_idle_s > 0 else 0.0
    exposed_s = min(idle_s * waited, wait_s)
    return StepParts(input_wait_s=exposed_s, copy_s=copy_s, kernels_s=busy_s, host_s=idle_s - exposed_s)


def summarise_run(
    run: Launch,
    process: ProcessRecord,
    *,
    num_usable_cores: float,
    usable_bytes: float = 0.0,
    epochs: float | None = None,
    window: Observation | None = None,
) -> Profile:
    """The figures of a run, without advice.

    Args:
        run: Run of the command.
        process: Process whose steps represent the run.
        num_usable_cores: Number of cores that the processes may use.
        usable_bytes: Memory of the machine that the processes may use; 0 if that is not asked [bytes].
        epochs: Number of epochs of the job; None to take the script's own argument.
        window: Mean step of the traced window; None without one.

    Raises:
        ScriptError: The process made no training step.
    """
    if not len(process.steps):
        raise ScriptError("expected a training step, got none")
    # Compilation, the first allocations and cold files are no part of the usual step.
    steady = steady_steps(process.steps)
    step_s, wait_s = float(_took_s(steady).mean()), float(steady.wait_s.mean())
    samples = float(steady.num_samples.mean())
    traced = process.steps[process.steps.is_traced > 0]
    held_s, traced_held_s = (
        float((spans.saving_s + spans.collecting_s).sum()) / max(1, len(spans)) for spans in (steady, traced)
    )
    parts = parts_of_step(step_s, wait_s, window, held_s=held_s, traced_held_s=traced_held_s)
    phases = _phases(run, process)
    loader = _training_loader(process)
    batches = float(steady.num_batches.mean())
    epochs = epochs if epochs is not None else _argument(run, process, "num_epochs", EPOCH_NAMES)
    per_epoch = _steps_per_epoch(process, loader, batches)
    num_steps = _steps_of_job(run, process, epochs, per_epoch)
    job_s, left_s = _job_time(process, phases, step_s, num_steps, per_epoch)
    cpu_s, cpu_share = _cpu(run, process, num_usable_cores)
    device = process.optimizers[0]["device"] if process.optimizers else "cpu"
    num_ranks = run.num_ranks
    growth_bytes, num_to_full = memory_growth(process, usable_bytes)
    busy_fraction, crowded_fraction = without_core(
        run,
        process,
        parts,
        cpu_share,
        num_usable_cores,
        is_on_cpu=window is not None and not window.is_on_gpu,
    )
    return Profile(
        command=run.command,
        outcome=run.outcome,
        status=run.status,
        num_steps=len(process.steps),
        num_steady_steps=len(steady),
        step_time_s=step_s,
        step_time_median_s=float(np.median(_took_s(steady))),
        throughput_samples_per_s=num_ranks * samples / step_s if samples else None,
        batch_size=float(np.median(steady.num_samples)) if samples else None,
        parts=parts,
        batches_per_step=float(max(1, round(batches))) if batches else None,
        has_images=any(len(shape) == _IMAGE_DIMS for shape in process.batch_shapes)
        if process.batch_shapes
        else None,
        busy_machine_fraction=busy_fraction,
        crowded_fraction=crowded_fraction,
        loader_wait_s=wait_s,
        held_s=_held(process, steady),
        has_window=window is not None,
        top_operators=() if window is None else tuple((n, t / window.step_s) for n, t in window.longest),
        wall_s=run.end_s - run.begin_s,
        phases_s=phases,
        device=device,
        device_busy_fraction=None if window is None else parts.kernels_s / step_s,
        cpu_utilisation=cpu_share,
        cpu_s_per_step=cpu_s,
        num_usable_cores=num_usable_cores,
        peak_memory_bytes=run.peak_memory_bytes,
        device_peak_bytes=process.device_peak_bytes,
        memory_growth_bytes=growth_bytes,
        num_steps_to_full=num_to_full,
        sensors=run.telemetry,
        loader=loader,
        optimizer=dict(process.optimizers[0]) if process.optimizers else {},
        num_ranks=num_ranks,
        num_steps_of_job=num_steps,
        epochs=epochs,
        steps_per_epoch=per_epoch,
        job_time_s=job_s,
        time_left_s=left_s,
        hooks=process.hooks,
        interrupted_by=run.interrupted_by,
        num_killed=run.num_killed,
        said=run.said if run.outcome == "crashed" else "",
        notes=_notes(process, num_steps, epochs, num_ranks, has_window=window is not None),
    )


def _phases(run: Launch, process: ProcessRecord) -> dict[str, float]:
    """Time of the whole run by phase; each part is measured, so that their sum can be compared with the wall time."""
    steps, rest, own = process.steps, process.rest, process.own
    first_s = float(min(spans.begin_s.min() for spans in (steps, rest) if len(spans)))
    last_s = float(max(spans.end_s.max() for spans in (steps, rest) if len(spans)))
    own_s = float((own[:, 1] - own[:, 0]).sum()) if len(own) else 0.0
    return {
        "start": first_s - run.begin_s,
        "steps": float(_took_s(steps).sum()),
        "between": float(_took_s(rest).sum()),
        "profiling": own_s,
        "end": max(0.0, run.end_s - last_s),
    }


def _took_s(spans: Spans) -> Floats:
    found: Floats = spans.end_s - spans.begin_s
    return found


def _held(process: ProcessRecord, steady: Spans) -> dict[str, float]:
    """Time of a steady step in which saving, collecting garbage or work between steps held the script up [s]."""
    rest = process.rest
    amid = rest[(rest.begin_s >= steady.begin_s[0]) & (rest.end_s <= steady.end_s[-1])]
    saving_s, collecting_s = (steady[name].sum() + amid[name].sum() for name in ("saving_s", "collecting_s"))
    between_s = (_took_s(amid) - amid.saving_s - amid.collecting_s).sum()
    sums_s = {"saving": saving_s, "collecting": collecting_s, "between": between_s}
    return {name: float(sum_s) / len(steady) for name, sum_s in sums_s.items()}


def _training_loader(process: ProcessRecord) -> dict[str, Any]:
    numbers = process.steps.loader.astype(int)
    known = numbers[numbers >= 0]
    if not len(known):
        return {}
    number = int(np.bincount(known).argmax())
    found = next((loader for loader in process.loaders if loader["loader"] == number), {})
    return {name: value for name, value in found.items() if name not in ("kind", "loader")}


def _steps_per_epoch(
    process: ProcessRecord, loader: Mapping[str, Any], batches_per_step: float
) -> int | None:
    """Steps of an epoch: as the trainer says, as counted over a whole epoch, or the loader's batches by a step's."""
    if (known := process.job.get("steps_per_epoch")) is not None:
        return int(known)
    starts = np.flatnonzero(process.steps.starts_epoch)
    if len(starts) > 1:
        return int(np.median(np.diff(starts)))
    num_batches = loader.get("num_batches")
    if num_batches is None:
        return None
        # Trainers that fetch batches ahead leave a part of one to the first step.
    return max(1, int(num_batches / max(1, round(batches_per_step))))


def _steps_of_job(
    run: Launch, process: ProcessRecord, epochs: float | None, per_epoch: int | None
) -> float | None:
    """Steps of the whole job: as the trainer says, by an argument for the most steps, or by the epochs."""
    most = _argument(run, process, "num_steps", SURE_STEP_NAMES)
    if most is not None and most > 0:
        return most
    return None if epochs is None or per_epoch is None else epochs * per_epoch


def _argument(run: Launch, process: ProcessRecord, told: str, names: Sequence[str]) -> float | None:
    """A length of the job as its trainer told it, else the first of these arguments that is a number.

    Arguments are as the script's parser read them, or as the command has them.
    """
    if (known := process.job.get(told)) is not None:
        return float(known)
    words = {argument.name: argument.value for argument in command_arguments(run.command)}
    values = {**words, **{option["name"]: option["value"] for option in process.options}}
    for name in names:
        try:
            return float(values[name])
        except (KeyError, TypeError, ValueError):
            continue
    return None


def _job_time(
    process: ProcessRecord,
    phases: Mapping[str, float],
    step_s: float,
    num_steps: float | None,
    per_epoch: int | None,
) -> tuple[float | None, float | None]:
    """Time of the whole job, and the time left when this run ended."""
    if num_steps is None:
        return None, None
    num_seen = len(process.steps)
    # Without an epoch's length, what lies between steps comes as often as it was seen.
    epochs_seen = num_seen / per_epoch if per_epoch else 1.0
    between_s = phases["between"] / max(epochs_seen, 1.0)
    epochs_of_job = num_steps / per_epoch if per_epoch else num_steps / num_seen
    job_s = phases["start"] + num_steps * step_s + epochs_of_job * between_s
    left = max(0.0, num_steps - num_seen) / num_steps
    return job_s, left * (job_s - phases["start"])


def without_core(
    run: Launch,
    process: ProcessRecord,
    parts: StepParts,
    cpu_share: float,
    num_cores: float,
    *,
    is_on_cpu: bool,
) -> tuple[float | None, float]:
    """Shares of the steps in which the training thread had no core: others had it, or other threads of the script.

    The system counts the time in which a thread was ready and waited for a core. Where it does not, operators of a
    processor that took longer than the thread ran are taken for such a wait. Where the run has more threads than cores,
    all but C of T threads wait for others of the run: that share of the wait is its own. If its processes keep nearly
    all usable cores at work, the thread waits for them, and not for other work of the machine.
    """
    table = process.thread
    if len(table) < 2 or table[-1, 0] <= table[0, 0]:
        return None, 0.0
    took_s = float(table[-1, 0] - table[0, 0])
    # A negative time stands for a system that does not count it.
    if table[0, 2] >= 0:
        share = float(table[-1, 2] - table[0, 2]) / took_s
    elif is_on_cpu:
        ran = float(table[-1, 1] - table[0, 1]) / took_s
        share = max(0.0, parts.kernels_s / parts.step_s - ran)
    else:
        return None, 0.0
    share = min(1.0, share)
    num_threads = run.num_ranks * (
        (process.optimizers[0].get("num_threads") or 0) if process.optimizers else 0
    )
    own = share * (1 - num_cores / num_threads) if num_threads > num_cores else 0.0
    return share - own if cpu_share < _ALL_CORES else 0.0, own


def _cpu(run: Launch, process: ProcessRecord, num_cores: float) -> tuple[float, float]:
    """CPU time of a step and used share of the cores, between the first and the last step."""
    times = np.asarray([sample.time_s for sample in run.samples])
    used = np.asarray([sample.cpu_s for sample in run.samples])
    begin_s, end_s = process.steps.begin_s[0], process.steps.end_s[-1]
    if len(times) < 2 or end_s <= begin_s:
        return 0.0, 0.0
    used_s = float(np.interp(end_s, times, used) - np.interp(begin_s, times, used))
    return used_s / len(process.steps), used_s / ((end_s - begin_s) * num_cores)


def memory_growth(process: ProcessRecord, usable_bytes: float) -> tuple[float, float | None]:
    """Memory that each step adds [bytes] and the steps until it is full; 0 and None where it does not grow evenly.

    A leak is a straight line through most of what memory varies: caches and allocators fill in ever smaller jumps.
    """
    # The trace of the window takes memory as well.
    later = process.steps[np.flatnonzero(process.steps.is_traced)[-1:].max(initial=-1) + 1 :].view(
        np.recarray
    )
    memories = ((later.device_bytes, process.device_whole_bytes), (later.memory_bytes, usable_bytes))
    for used_bytes, whole_bytes in memories:
        if not whole_bytes or len(used_bytes) < _LEAST_STEPS or not used_bytes.std():
            continue
        number = np.arange(len(used_bytes))
        step_bytes = float(np.polyfit(number, used_bytes, 1)[0])
        is_straight = np.corrcoef(number, used_bytes)[0, 1] ** 2 > _STRAIGHT
        if is_straight and step_bytes * number[-1] >= _GROWN * used_bytes[0]:
            return step_bytes, max(0.0, float(whole_bytes - used_bytes[-1]) / step_bytes)
    return 0.0, None


def _notes(
    process: ProcessRecord, num_steps: float | None, epochs: float | None, num_ranks: int, *, has_window: bool
) -> tuple[str, ...]:
    notes = []
    if not has_window:
        notes.append("no window was traced: the time of kernels includes that of the host")
    if num_steps is None and epochs is None:
        notes.append(
            "the length of the job is not known (no argument --epochs or --max-steps was seen): give it with --epochs"
        )
    elif num_steps is None:
        notes.append("the loader has no known length: the time of the job is not known")
    if not process.loaders:
        notes.append("the script uses no torch DataLoader: the wait for input is not measured")
    if process.optimizers and process.optimizers[0]["name"] is None:
        notes.append("the script steps no torch optimizer: each backward pass counts as a step")
    if num_ranks > 1:
        notes.append(f"{num_ranks} processes train; parts are those of rank {process.rank or 0}")
    return tuple(notes)
