"""``forerun.diagnose``: a measured step beside its prediction, and the causes of the difference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Unpack

from forerun.base.answers import Answer
from forerun.base.errors import ForerunError, InvalidSetupError, UsageError
from forerun.base.units import format_duration_s
from forerun.prediction.estimate import Estimate, Interval
from forerun.question.options import RunOptions, with_common_settings
from forerun.script.capture_script import captured_model
from forerun.script.command_words import check_command
from forerun.script.diagnosis.causes import (
    LARGE_SHARE,
    NOTABLE_SHARE,
    OVER_TCP,
    Cause,
    busy_device,
    causes_of,
)
from forerun.script.diagnosis.observation import (
    COMMUNICATION,
    Observation,
    RankTimes,
    observe,
)
from forerun.script.diagnosis.readings import read_steps, read_table, text_of
from forerun.script.diagnosis.trace import WHOLE_TRACE, Trace, is_trace, read_trace
from forerun.script.profile import run_profiled
from forerun.script.profiling.messages import HookSettings
from forerun.search.predict import predict
from forerun.surface.report.wording import range_words
from forerun.tracing.source import trace_timeout_s

_WARMUP_STEPS, _WINDOW_STEPS = 3, 5
_TIMES_A_TRACE = 5.0
"""Longest time of a command over that of tracing a model: 600 s, as a capture has, where ``--timeout`` is not given."""
_LOADER, _HOST, _COPY = "waiting for the data loader", "waiting for the host", "copies to the device"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime(Answer):
    """Time of a class of work in a step.

    Attributes:
        name: Its name, as in the breakdown of a prediction.
        measured_s: Measured time; None where nothing tells it [s].
        predicted_s: Predicted time; None without a prediction [s].
    """

    name: str
    measured_s: float | None
    predicted_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Answer):
    """A measured step beside its prediction, and the causes of the difference.

    Attributes:
        source: Origin of the measured step: ``run``, ``trace`` or ``number``.
        model, device: The run; None where nothing names them.
        measured: Measured step [s].
        num_steps: Steps behind it; 0 for a number that was given.
        predicted: Predicted step; None without a prediction [s].
        ratio: Measured over predicted.
        verdict: ``slow``, ``not slow``, ``faster`` (than the predicted interval), or ``not compared``.
        by_class: The step by class of work, the largest first.
        causes: Causes, the most expensive first.
        ranks: Times of each rank, if several traces were given.
        notes: What a reader must know.
    """

    source: str
    model: str | None
    device: str | None
    measured: float
    num_steps: int
    predicted: Interval | None
    ratio: float | None
    verdict: str
    by_class: tuple[ClassTime, ...]
    causes: tuple[Cause, ...]
    ranks: tuple[RankTimes, ...]
    notes: tuple[str, ...]


@with_common_settings(RunOptions)
def diagnose(
    model: Any = None,
    *,
    command: Sequence[str] | None = None,
    trace: Path | str | Sequence[Path | str] | None = None,
    measured: float | str | Path | None = None,
    device: Any = None,
    gpu_utilization: float | None = None,
    num_steps: int | None = 40,
    timeout_s: float | None = None,
    echo: IO[str] | None = None,
    use_cache: bool = True,
    **options: Unpack[RunOptions],
) -> Diagnosis:
    """A step of a run, a trace or a number beside its prediction, and what makes it slow.

    Args:
        model: Model of the prediction, as in ``predict``. Without it a command is captured, and a trace judged alone.
        command: Words of a training command, which is run and profiled here.
        trace: Traces of PyTorch's profiler, ``.json`` or ``.json.gz``, those of several ranks together; or its table.
        measured: Measured step [s], a text such as "0.41s", "3.7k tokens/s/GPU", "35 % MFU" or "time: 0.4 data: 0.1";
            or a training log, as a path.
        device: Device of the prediction, as in ``predict``.
        gpu_utilization: Share of the time in which a monitor saw the device at work, 0 to 1.
        num_steps: Number of steps after which the command is stopped; None to let it end.
        timeout_s: Longest time of the command; None for five times that of tracing a model, 600 s unless set [s].
        echo: Stream for the output of the command.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the run, see ``forerun.RunOptions``.

    Raises:
        UsageError: The question must be changed, or a file is no trace.
        FailureError: The model or the command cannot be run, traced or predicted.

    Examples:
        >>> import forerun
        >>> forerun.diagnose("mnist-cnn", measured="1 s", device="a100-sxm4-40gb").verdict
        'slow'
    """
    given = [part for part in (command, trace, measured) if part is not None]
    if len(given) != 1 or given[0] in ([], ()):
        raise UsageError(
            "expected one of a command, a trace and a measured step to diagnose, got none or several"
        )
    settings: dict[str, Any] = {**options, "use_cache": use_cache}
    if command is not None:
        return _of_command(command, model, device, settings, num_steps, timeout_s, echo)
    if model is None and device is not None:
        raise UsageError(
            "expected the MODEL of the prediction to compare with, got none; name it, such as torchvision:resnet50"
        )
    if model is not None and device is None:
        raise UsageError(
            "expected the device of the prediction, got none; give it with --on, such as a100-sxm4-40gb"
        )
    if gpu_utilization is not None and not 0 <= gpu_utilization <= 1:
        raise UsageError(f"expected a utilisation from 0 to 1, got {gpu_utilization:g}")
    estimate = None if model is None else predict(model, device=device, **settings)
    if trace is not None:
        paths = [Path(path) for path in ([trace] if isinstance(trace, Path | str) else trace)]
        if len(paths) > 1 or is_trace(paths[0]):
            traces = [read_trace(path) for path in paths]
            return _answer("trace", observe(traces), estimate, _trace_notes(traces))
    seen = _seen(measured if measured is not None else paths[0], estimate)
    if gpu_utilization is not None:
        seen = replace(seen, busy_s=gpu_utilization * seen.step_s, busy_share=gpu_utilization)
    if estimate is None and not seen.num_steps and gpu_utilization is None:
        raise UsageError(
            "expected the MODEL of the prediction to compare with, got none; name it, such as torchvision:resnet50: "
            f"steps of {format_duration_s(seen.step_s)} alone tell no cause"
        )
    if estimate is not None and not seen.num_steps and seen.step_s > estimate.step_time_s.high:
        # Only a step that is too long for its prediction needs another explanation, and each is a prediction more.
        seen = replace(seen, other_steps_s=dict(_other_steps(estimate)))
    return _answer("number", seen, estimate, ())


def _of_command(
    command: Sequence[str],
    model: Any,
    device: Any,
    settings: Mapping[str, Any],
    num_steps: int | None,
    timeout_s: float | None,
    echo: IO[str] | None,
) -> Diagnosis:
    """The diagnosis of a command that is run here."""
    timeout_s = _TIMES_A_TRACE * trace_timeout_s() if timeout_s is None else timeout_s
    is_long = num_steps is None or num_steps >= _WARMUP_STEPS + _WINDOW_STEPS
    asked = HookSettings(
        warmup_steps=_WARMUP_STEPS,
        window_steps=_WINDOW_STEPS if is_long else 0,
        stop_after_steps=num_steps,
    )
    found, seen = run_profiled(check_command(command), asked, timeout_s=timeout_s, echo=echo)
    notes = list(found.notes)
    if found.outcome not in ("done", "stopped"):
        notes.append(
            f"the script {found.outcome} after {found.num_steps} steps: {found.said or found.status}"
        )
    estimate = None
    try:
        name = model if model is not None else captured_model(command, timeout_s=timeout_s)
        where = device or ("cpu" if found.device.startswith("cpu") else "here")
        estimate = predict(name, device=where, **settings)
    except ForerunError as error:
        notes.append(f"no prediction to compare with: {str(error).partition(', one of')[0]}")
    return _answer("run", seen, estimate, tuple(notes))


def _seen(source: float | str | Path, estimate: Estimate | None) -> Observation:
    """The mean step of a number, with its unit or not, of a training log, or of a printed table of the profiler.

    Raises:
        UsageError: It tells no step.
    """
    if not isinstance(source, Path):
        return read_steps(source, estimate)
    text = text_of(source)
    try:
        return read_table(text, str(source)) or read_steps(text, estimate)
    except InvalidSetupError:
        raise UsageError(
            f"expected a trace with 'traceEvents', a table of key_averages, or lines that tell the time of a step in "
            f"'{source}', such as 'time: 0.59, data_time: 0.03' or '2.1 it/s'; got none; a monitor's utilisation "
            "goes beside a step: --measured 0.41s --gpu-utilization 43"
        ) from None


def _other_steps(estimate: Estimate) -> Iterator[tuple[str, float]]:
    """Predicted steps without settings that are often asked for and not in force."""
    changes: dict[str, dict[str, Any]] = {}
    precision = estimate.run.setup.precision
    if precision != "fp32":
        changes[f"fp32 in place of {precision}"] = {"precision": "fp32"}
    if estimate.layout != "nchw":
        changes["channels first"] = {"layout": "nchw"}
    if estimate.compile:
        changes["no compilation"] = {"compile": False}
    if estimate.run.setup.fused_attention and any("attention" in part.name for part in estimate.breakdown):
        changes["attention in single operations"] = {"fused_attention": False}
    if estimate.run.setup.saving.recompute == "none":
        changes["recomputation of all activations"] = {"recompute": "full"}
    cluster = estimate.run.cluster
    if cluster.intra_link is not None and cluster.intra_link.name.startswith("nvlink"):
        changes["PCI Express in place of NVLink"] = {"intra": "pcie-4-x16"}
        changes["messages through the host's memory in place of NVLink"] = {"intra": "pcie-3-x8"}
    elif cluster.intra_link is not None:
        changes["messages through the host's memory (no P2P)"] = {"intra": "pcie-3-x8"}
    if cluster.num_nodes > 1:
        changes[OVER_TCP] = {"inter": "ethernet-10g"}
    for words, change in changes.items():
        try:
            yield words, predict(estimate.run.with_(**change)).step_time_s.value
        except ForerunError:
            continue


def _trace_notes(traces: Sequence[Trace]) -> tuple[str, ...]:
    first = traces[0]
    if first.steps_from == WHOLE_TRACE:
        notes = ["no marks of steps: the whole trace counts as one; call prof.step() after each step"]
    else:
        left_out = "; the first was left out" if len(first.steps) > 1 else ""
        notes = [f"{len(first.steps)} steps found by {first.steps_from} marks{left_out}"]
    if not first.is_on_gpu:
        notes.append("the trace has no kernels of a device: operators of the processor are judged")
    if len({trace.rank for trace in traces if trace.rank is not None}) < sum(
        t.rank is not None for t in traces
    ):
        notes.append("two traces are of the same rank")
    return tuple(notes)


def _answer(source: str, seen: Observation, estimate: Estimate | None, notes: tuple[str, ...]) -> Diagnosis:
    seen = replace(seen, estimate=estimate)
    predicted = None if estimate is None else estimate.step_time_s
    verdict = "not compared"
    if predicted is not None:
        is_inside = predicted.low <= seen.step_s <= predicted.high
        verdict = "not slow" if is_inside else "slow" if seen.step_s > predicted.high else "faster"
    device = (
        estimate.device if estimate is not None else seen.device.name if seen.device is not None else None
    )
    return Diagnosis(
        source=source,
        model=None if estimate is None else estimate.model,
        device=device,
        measured=seen.step_s,
        num_steps=seen.num_steps,
        predicted=predicted,
        ratio=None if predicted is None else seen.step_s / predicted.value,
        verdict=verdict,
        by_class=_by_class(seen),
        causes=_causes(seen, verdict),
        ranks=seen.ranks,
        notes=notes,
    )


def _causes(seen: Observation, verdict: str) -> tuple[Cause, ...]:
    """The causes; where the step is as predicted, a sentence that there is none comes first."""
    found = causes_of(seen)
    predicted = None if seen.estimate is None else seen.estimate.step_time_s
    if predicted is not None and verdict != "slow" and (not found or found[0].share < LARGE_SHARE):
        words = f"the predicted interval, {range_words(predicted, format_duration_s)}"
        fine = replace(
            busy_device(seen),
            cause="not slow",
            evidence=f"{format_duration_s(seen.step_s)} is {'within' if verdict == 'not slow' else 'below'} {words}",
            change="forerun advise tells which settings would be faster",
        )
        return (fine, *found)
    # A trace measures its parts; the parts of a log are what it happens to print.
    least = NOTABLE_SHARE if seen.longest else LARGE_SHARE
    if found and (found[0].share >= least or predicted is not None or seen.profile):
        return found
    if seen.num_steps == 0 and predicted is not None:
        return (
            replace(
                busy_device(seen),
                cause="not known",
                evidence=f"the step takes {seen.step_s / predicted.value:.3g} times its prediction",
                change=_what_to_look_at(seen),
            ),
        )
    return (busy_device(seen), *found)


def _what_to_look_at(seen: Observation) -> str:
    """The figures that part the explanations of one number, each with the value that speaks for it."""
    assert seen.estimate is not None
    share = seen.estimate.step_time_s.value / seen.step_s
    words = "give the --trace of some steps, or run forerun diagnose -- COMMAND"
    if seen.busy_share is None and share < 1:
        words = (
            f"see the utilisation of the device, and give it as --gpu-utilization: near {100 * share:.0f} % it waits "
            f"for the loader or the host, near 100 % its kernels are slow (clock, precision, other programs); or "
            f"{words}"
        )
    cluster = seen.estimate.run.cluster
    if cluster.num_devices > 1 and share < 1:
        per_node = cluster.num_devices_per_node
        fewer = cluster.with_devices(per_node if cluster.num_nodes > 1 else 1)
        with contextlib.suppress(ForerunError):
            alone = predict(seen.estimate.run.with_(device=fewer)).step_time_s
            words = (
                f"run it on {fewer.spec}, where a step is predicted at {range_words(alone, format_duration_s)}: if it "
                "is, links and network are slow (NCCL_DEBUG=INFO; waiting for others counts as utilisation); if not, "
                f"{words}"
            )
    return words


def _by_class(seen: Observation) -> tuple[ClassTime, ...]:
    """Measured and predicted times by class, the largest first."""
    has_parts = seen.num_steps > 0
    parts = {_LOADER: seen.loader_s, _HOST: seen.idle_s, _COPY: seen.copy_s + seen.pinned_copy_s}
    measured = {**seen.by_class, **{name: time_s for name, time_s in parts.items() if time_s > 0}}
    predicted = {} if seen.estimate is None else {part.name: part.time_s for part in seen.estimate.breakdown}
    known = {**measured, **predicted}
    rows = (
        ClassTime(
            name=name,
            measured_s=measured.get(name, 0.0) if has_parts and (measured or name == COMMUNICATION) else None,
            predicted_s=predicted.get(name, 0.0) if predicted else None,
        )
        for name in known
    )
    return tuple(sorted(rows, key=lambda row: -max(row.measured_s or 0.0, row.predicted_s or 0.0)))
