"""Steps that a text tells: a number with its unit, a training log, or the printed table of PyTorch's profiler."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.errors import UsageError
from forerun.base.units import parse_amount
from forerun.prediction.estimate import Estimate
from forerun.script.diagnosis.observation import (
    COMMUNICATION,
    OPTIMIZER,
    PRODUCTS,
    Observation,
    class_of_kernel,
    class_of_operator,
    outside_matrix_units,
)

_MOST_BYTES = 64 * 2**20
_NUMBER = r"(\d[\d,_]*\.?\d*(?:e[+-]?\d+)?)"
# A time with its unit, and perhaps its running mean in brackets, as ImageNet's example prints it; 12:30 is a clock.
_TIME = rf"['\"]?\s*[:=]?\s*{_NUMBER}\s*(ms|s\b)?(?![\d:])(?:[^()\n]{{0,20}}\(\s*{_NUMBER}\s*(ms|s)?\b)?"
_STEP = re.compile(
    r"(?<![\w.-])(?<!data )(?<!total )(?<!epoch )(?<!eval )(?<!val )"
    rf"(?:(?:iter|iteration|batch|train)[_ ])?(?:step[_ ])?(?:time|dt)(?: per iteration)?\s*(\(ms\)|\(s\))?{_TIME}",
    re.IGNORECASE,
)
_DATA = re.compile(rf"(?<![\w.-])(?:load_)?data(?:[_ ]?time)?\s*(\(ms\)|\(s\))?{_TIME}", re.IGNORECASE)
_UNIT = r"(samples|sequences|seq|images|img|imgs|tokens|tok|words|steps|it|iter|iters|t|w)"
_PER = r"(?:\s*/\s*|_per_|(?=ps))(?:s(?:ec(?:ond)?)?(?![a-z])|ps)\s*(?:(?:/|_per_)\s*(gpu|device))?"
# With the unit before or behind: "410 images/s", "samples_per_second: 410". A k stands for thousands.
_RATE = re.compile(rf"(?<![\w.]){_NUMBER}\s*(k?)\s*{_UNIT}{_PER}", re.IGNORECASE)
_NAMED_RATE = re.compile(rf"{_UNIT}{_PER}['\"]?\s*[:=]\s*{_NUMBER}\s*(k?)", re.IGNORECASE)
_PER_STEP = re.compile(
    rf"(?<![\w.]){_NUMBER}\s*(ms|s)\s*/\s*(?:it|iter|iteration|step|batch)\b", re.IGNORECASE
)
_TIMERS = re.compile(r"time \(ms\)((?: \| [\w -]+: [\d.]+)+)")
_TIMER = re.compile(r"([\w -]+): ([\d.]+)")
_MFU = re.compile(rf"{_NUMBER}\s*(%?)\s*mfu|mfu['\"]?\s*[:=]?\s*{_NUMBER}\s*(%?)", re.IGNORECASE)
_STEPS = ("steps", "it", "iter", "iters")
_AMOUNT = re.compile(r"(-?[\d.]+)\s*(us|ms|s|%|)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "%": 0.01, "": 1.0}
_CALLS = re.compile(r"^\W*(\S.*?)\s*\|\s*[\d.e-]+\s*\|\s*(\d+)\s*\|\s*([\d.]+)", re.MULTILINE)
_ALLOCATIONS = r"^(cuda|hip)(Malloc|Free)$"
_STEP_MARKS = ("ProfilerStep", "Optimizer.step", "enumerate(DataLoader)")
_STALL = 3.0
"""Steps that take longer than this many median ones without waiting for data are held up by the host."""


def read_steps(text: float | str, estimate: Estimate | None) -> Observation:
    """The mean step that a text tells, as causes are judged by.

    Args:
        text: A time [s], a number with its unit, or lines of a log.
        estimate: Prediction that turns rates into times; None without one.

    Raises:
        UsageError: It tells no step, or not what this needs a prediction for.
    """
    if not isinstance(text, str):
        return _alone(float(text), f"{text}")
    lines = text.strip().splitlines()
    if (timed := _of_timers(text)) is not None:
        return timed
    steps = [found for line in lines if (found := _timed(_STEP, line)) is not None]
    waits = [found for line in lines if (found := _timed(_DATA, line)) is not None]
    if not steps:
        rates = [rate for line in lines if (rate := _of_rate(line, estimate)) is not None]
        return _alone(_mean(rates) if rates else parse_amount(text, "time"), text)
    if len(waits) != len(steps):
        return _alone(_mean([step_s for step_s, _ in steps]), text)
    if steps[-1][1] and waits[-1][1]:
        # Running means of the whole run stand behind the last step's own figures.
        step_s, wait_s, stalled_s = steps[-1][0], waits[-1][0], 0.0
    else:
        own = np.array([[step[0], wait[0]] for step, wait in zip(steps, waits, strict=True)])
        own = own[1:] if len(own) > 2 else own
        computing_s = np.clip(own[:, 0] - own[:, 1], 0.0, None)
        step_s, wait_s = (float(mean) for mean in own.mean(axis=0))
        stalled_s = float(np.clip(computing_s - _STALL * np.median(computing_s), 0.0, None).mean())
    # Some time the step without its data, which a wait that is longer betrays.
    step_s += wait_s if wait_s > _checked(step_s, text) else 0.0
    return Observation(
        step_s=step_s,
        num_steps=len(steps),
        busy_s=step_s - wait_s - stalled_s,
        loader_s=wait_s,
        host_s=stalled_s,
    )


def _of_timers(text: str) -> Observation | None:
    """The mean step by the timers that DeepSpeed and Megatron print; None without them."""
    rows = [
        {re.sub("[ -]", "_", name.strip()): float(time_ms) / 1e3 for name, time_ms in _TIMER.findall(line)}
        for line in _TIMERS.findall(text)
    ]
    steps = [row for row in rows if {"forward", "backward"} <= set(row)]  # others are of micro-steps
    if not steps:
        return None
    mean_s = {name: _mean([row.get(name, 0.0) for row in steps]) for name in steps[0]}
    wait_s = mean_s.get("batch_generator", mean_s.get("data_loader", 0.0))
    optimizer_s = mean_s.get("optimizer", mean_s.get("step", 0.0))
    shared_s = mean_s.get("backward_allreduce", 0.0)
    computing_s = mean_s["forward"] + mean_s["backward"]
    step_s = _checked(computing_s + optimizer_s + wait_s, text)
    classes = {
        OPTIMIZER: optimizer_s,
        COMMUNICATION: shared_s,
        "forward and backward": computing_s - shared_s,
    }
    return Observation(
        step_s=step_s,
        num_steps=len(steps),
        busy_s=step_s - wait_s - shared_s,
        loader_s=wait_s,
        exposed_s=shared_s,
        by_class=classes,
    )


def _alone(step_s: float, text: str) -> Observation:
    return Observation(step_s=_checked(step_s, text), busy_s=step_s)


def _checked(step_s: float, text: str) -> float:
    if not 0 < step_s < float("inf"):
        raise UsageError(
            f"expected a measured step above zero, got '{text[:60]}'; such as 0.41s, '1200 samples/s' or '35 % MFU'"
        )
    return step_s


def _float(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _timed(pattern: re.Pattern[str], line: str) -> tuple[float, bool] | None:
    """A time that a line names [s], and whether it is a running mean, which stands in brackets."""
    found = pattern.search(line)
    if found is None:
        return None
    head, own, unit, mean, mean_unit = found.groups()
    unit = (mean_unit if mean else None) or unit or (head or "s").strip("()")
    return _float(mean or own) * (1e-3 if unit.lower() == "ms" else 1.0), mean is not None


def _mean(times_s: list[float]) -> float:
    return float(np.mean(times_s[1:] if len(times_s) > 2 else times_s))


def _of_rate(line: str, estimate: Estimate | None) -> float | None:
    """Time of a step by a rate or a use of the device [s]; 0 for one that is no more than zero, None without any."""
    if per_step := _PER_STEP.search(line):
        return _float(per_step[1]) * (1e-3 if per_step[2].lower() == "ms" else 1.0)
    rates = [found.groups() for found in _RATE.finditer(line)]
    rates += [
        (n, factor, *unit) for *unit, n, factor in (found.groups() for found in _NAMED_RATE.finditer(line))
    ]
    if rates:
        # Steps need no prediction.
        text, factor, unit, per_device = next((rate for rate in rates if rate[2].lower() in _STEPS), rates[0])
    elif mfu := _MFU.search(line):
        text, is_percent = mfu[1] or mfu[3], bool(mfu[2] or mfu[4])
        if estimate is None or estimate.mfu is None:
            raise UsageError("this prediction has no MFU; give samples/s or the time of a step")
        share = _float(text) / (100 if is_percent or _float(text) > 1 else 1)
        return estimate.step_time_s.value * estimate.mfu.value / share if 0 < share <= 1 else 0.0
    else:
        return None
    unit = unit.lower()
    number = _float(text) * (1000 if factor else 1)
    if unit in _STEPS:
        return 1 / number if number > 0 else 0.0
    if estimate is None:
        raise UsageError(f"expected the MODEL that makes {unit}/s a step, got none; name it with its device")
    # What is named tps is of one device: torchtitan's word, as wps is fairseq's for all.
    number *= estimate.run.cluster.num_devices if per_device or unit == "t" else 1
    per_s = estimate.tokens_per_s if unit[0] in "tw" else estimate.throughput_samples_per_s
    if per_s is None:
        raise UsageError(f"'{estimate.model}' reads no tokens; give samples/s or the time of a step")
    return per_s.value * estimate.step_time_s.value / number if number > 0 else 0.0


def text_of(path: Path) -> str:
    """The text of a file.

    Raises:
        UsageError: It is no text, or too long.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"expected a log or a trace in '{path}', got: {error.strerror}") from None
    if b"\0" in content[:4096] or len(content) > _MOST_BYTES:
        kind = (
            "a report of Nsight Systems" if path.suffix in (".nsys-rep", ".qdrep", ".sqlite") else "no text"
        )
        raise UsageError(
            f"expected a trace of PyTorch's profiler, its printed table or a training log in '{path}', got {kind}; "
            "export a trace with prof.export_chrome_trace"
        )
    return content.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of a table: the name, the host's own time, that with what it calls, and the device's own [s]."""

    name: str
    self_s: float
    self_share: float
    total_s: float
    device_s: float
    device_share: float
    number: int


def read_table(text: str, source: str) -> Observation | None:
    """The mean step of a table of ``key_averages``, or of Lightning's simple profiler; None for another text.

    The host's own time, or the device's where that is longer, stands for the time that passed, which a table lacks.

    Raises:
        UsageError: It counts nested operators twice, or is cut off.
    """
    if "Profiler Report" in text and (calls := _CALLS.findall(text)):
        return _of_calls({name: (int(number), float(total_s)) for name, number, total_s in calls})
    if "Self CPU" not in text or not re.search("(# of|Number of) Calls", text):
        return None
    rows = list(_rows(text, source))
    counts = {row.name.split("#")[0].rstrip("*"): row.number for row in rows}
    number = next((counts[mark] for mark in _STEP_MARKS if counts.get(mark)), 1)
    kernels = [
        row
        for row in rows
        if row.device_s and not row.self_s and not row.name.startswith(("Profiler", "Optim"))
    ]
    is_on_gpu = any(row.device_s for row in rows)
    operators = [row for row in rows if "::" in row.name and not row.name.startswith("autograd::")]
    own = kernels or [row for row in operators if row.device_s or not is_on_gpu]
    sums: dict[str, float] = {}
    off: dict[str, float] = {}
    for row in own:
        time_s = (row.device_s if is_on_gpu else row.self_s) / number
        kind = class_of_kernel(row.name) if kernels else class_of_operator(row.name)
        sums[kind] = sums.get(kind, 0.0) + time_s
        reason = outside_matrix_units(row.name) if kernels and kind in PRODUCTS else ""
        off[reason] = off.get(reason, 0.0) + time_s
    off.pop("", None)
    host_s, device_s = (
        (
            _footer(text, name)
            or max(
                (getattr(row, own_s) / share for row in rows if (share := getattr(row, of)) > 0), default=0.0
            )
        )
        / number
        for name, own_s, of in (("CPU", "self_s", "self_share"), ("CUDA", "device_s", "device_share"))
    )
    busy_s = device_s if is_on_gpu else sum(sums.values())
    step_s = max(host_s, device_s, sum(sums.values()))
    if not is_on_gpu:
        # A table is cut after its longest rows: what they do not show is taken for operators.
        spent_s = sum(
            row.self_s for row in rows if row not in operators and not row.name.startswith("autograd::")
        )
        busy_s = max(busy_s, step_s - spent_s / number)
    left_s = max(0.0, step_s - busy_s)
    parts: dict[str, Any] = {}
    for name, pattern, column in (
        ("loader_s", r"DataLoader.*__?n|dataloader_n|^enumerate\(DataLoader", "total_s"),
        ("allocator_s", _ALLOCATIONS, "self_s"),
        ("sync_s", r"^aten::(item|_local_scalar_dense)$|^(cuda|hip)\w*Synchronize$", "self_s"),
    ):
        spent_s = sum(getattr(row, column) for row in rows if re.search(pattern, row.name)) / number
        parts[name] = min(left_s, spent_s)
        left_s -= parts[name]
    longest = sorted(own, key=lambda row: -(row.device_s if is_on_gpu else row.self_s))[:8]
    return Observation(
        step_s=step_s,
        is_on_gpu=is_on_gpu,
        num_steps=number,
        busy_s=busy_s,
        host_s=left_s,
        exposed_s=sums.get(COMMUNICATION, 0.0) if not is_on_gpu else 0.0,
        num_launches=sum(row.number for row in operators) / number,
        num_allocations=sum(row.number for row in rows if re.search(_ALLOCATIONS, row.name)) / number,
        by_class=sums,
        off_units_s=off,
        off_units_name=next((row.name for row in longest if outside_matrix_units(row.name)), ""),
        longest=tuple((row.name, (row.device_s if is_on_gpu else row.self_s) / number) for row in longest),
        **parts,
    )


def _of_calls(calls: Mapping[str, tuple[int, float]]) -> Observation:
    """The mean step by the calls of Lightning's trainer: batches, and waits for the next one."""
    waits = [
        each for name, each in calls.items() if re.search(r"train_dataloader_next|get_train_batch", name)
    ]
    whole = next((each for name, each in calls.items() if "run_training_epoch" in name), None)
    batches = max(
        (n for name, (n, _) in calls.items() if re.search(r"run_training_batch|optimizer_step", name)),
        default=0,
    )
    if whole is None or not waits or not batches:
        raise UsageError(
            "expected run_training_epoch, the batches and the waits for them in Lightning's report; one is missing"
        )
    step_s = whole[1] / batches
    wait_s = min(step_s, sum(time_s for _, time_s in waits) / batches)
    return Observation(step_s=step_s, num_steps=batches, busy_s=step_s - wait_s, loader_s=wait_s)


def _footer(text: str, name: str) -> float:
    found = re.search(
        rf"Self {name.replace('CUDA', '(?:CUDA|XPU)')} time total:\s*(-?[\d.]+)\s*([um]?s)", text
    )
    return 0.0 if found is None else float(found[1]) * _UNITS[found[2]]


def _rows(text: str, source: str) -> Iterator[_Row]:
    columns: Mapping[str, int] = {}
    for line in text.splitlines():
        cells = [
            cell.strip() for cell in re.split(r"\s*\|\s*|\s{2,}", line.strip().strip("|")) if cell.strip()
        ]
        if cells and cells[0] == "Name":
            columns = {name.replace("XPU", "CUDA"): index - len(cells) for index, name in enumerate(cells)}
            if "Self CUDA" not in columns and "CUDA total" in columns:
                raise UsageError(
                    f"the table in '{source}' is of a PyTorch before 1.7, which counts nested operators twice; "
                    "give a trace (prof.export_chrome_trace)"
                )
        elif columns and len(cells) == len(columns) and re.search(r"\d", line):
            amounts = {name: _amount(cells[index]) for name, index in columns.items()}
            yield _Row(
                name=cells[0],
                self_s=amounts["Self CPU"],
                self_share=amounts.get("Self CPU %", 0.0),
                total_s=amounts.get("CPU total", 0.0),
                device_s=amounts.get("Self CUDA", 0.0),
                device_share=amounts.get("Self CUDA %", 0.0),
                number=int(amounts.get("# of Calls", 0.0)),
            )


def _amount(cell: str) -> float:
    """A number of calls, a share or a time [s]; 0 for anything else."""
    found = _AMOUNT.fullmatch(cell)
    return 0.0 if found is None else float(found[1]) * _UNITS[found[2]]
