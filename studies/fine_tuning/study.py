"""Predictions of fine-tuning beside measurements: step time, memory, verdicts, and one constant MFU as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

import forerun
from forerun.base.errors import ForerunError
from forerun.prediction.estimate import Estimate
from forerun.prediction.uneven_samples import UnevenEpoch
from forerun.question.devices.cluster import parse_cluster
from forerun.question.devices.device import NumberFormat
from forerun.question.job import Samples
from studies.fine_tuning.rows import MeasuredTuning, MemoryKind, read_rows
from studies.markdown import markdown_table

_NOT_OF_TORCH = ("context", "buffers of collectives")
_SPREAD = "lognormal:median=2540,p95=7968,max=19548"
"""Lengths of ms-swift's samples: the lognormal law with the mean of 3,234 tokens and the deviation of 2,547 that it
prints."""
_TAIL = 0.03
"""Share of runs beyond each end of an interval that is chosen from other sources."""
Say = Callable[[str], None]


@cache
def _asked(settings: tuple[tuple[str, object], ...]) -> Estimate:
    options = dict(settings)
    return forerun.predict(options.pop("model"), **options)  # type: ignore[arg-type]


def _ask(row: MeasuredTuning, tokens: int, *, varying: bool = False) -> Estimate:
    samples = {"lengths": row.lengths, "batching": row.batching} if varying else {"sequence_length": tokens}
    return _asked(tuple(sorted({**row.question, **samples}.items())))


def memory_of(answer: Estimate, kind: MemoryKind) -> float:
    """The part of a predicted memory that a source prints [bytes].

    Torch knows neither the process's context nor the buffers of NCCL, and allocated memory has no fragments; between
    steps there are weights and state, and gradients as large as the trained weights.
    """
    parts = {part.name: part.size_bytes for part in answer.memory_parts}
    if kind is MemoryKind.HELD:
        weights = parts["weights"]
        trained = answer.num_trainable_parameters * (4 if answer.run.setup.saving.lora_rank else 2)
        return weights + parts.get("optimizer state", 0.0) + trained
    left = (*_NOT_OF_TORCH, "fragmentation") if kind is MemoryKind.ALLOCATED else _NOT_OF_TORCH
    return sum(size for name, size in parts.items() if name not in left)


def _work_flop(row: MeasuredTuning, answer: Estimate) -> float:
    """Work of a step as a user without a tool counts it: 2 FLOP a parameter and token for each of its passes."""
    assert row.tokens is not None
    saving = answer.run.setup.saving
    passes = 2 + (saving.lora_rank is None) + (saving.recompute == "full")
    samples = answer.run.setup.batch_size_per_device * answer.run.sharing.num_accumulation_steps
    layout = answer.run.sharing.layout
    split = 1 if layout is None else layout.tensor * layout.context
    return 2.0 * passes * answer.num_parameters * row.tokens * samples / split


def answers_of(rows: Iterable[MeasuredTuning], say: Say = lambda text: None) -> pd.DataFrame:
    """Measured and predicted values, a line for each row; a refused question has its message in ``refused``."""
    found = []
    for row in rows:
        line: dict[str, object] = {"source": row.source, "row": row.row, **row.question, "tokens": row.tokens}
        try:
            if row.tokens is not None and row.step_s is not None:
                answer = _ask(row, row.tokens, varying=row.lengths is not None)
                device = parse_cluster(str(row.question["device"])).device
                line |= {
                    "measured_s": row.step_s,
                    "predicted_s": answer.step_time_s.value,
                    "low_s": answer.step_time_s.low,
                    "high_s": answer.step_time_s.high,
                    "at_peak_s": _work_flop(row, answer) / device.peak_flops_per_s[NumberFormat.BF16],
                }
            if row.tokens != row.longest_tokens or row.step_s is None:
                assert row.longest_tokens is not None
                answer = _ask(row, row.longest_tokens)
            peak = answer.peak_memory_bytes
            line |= {
                "fits": row.fits,
                "predicted_fits": peak is None or peak.value <= answer.device_memory_bytes,
                "verdict": answer.fits,
            }
            if row.is_uneven and peak is not None:
                mixed = replace(answer.run, samples=Samples(lengths=_SPREAD))
                peak = UnevenEpoch.of(mixed).peak(mixed, peak, answer.device_memory_bytes)
            if row.memory_bytes is not None and row.memory_kind is not None and peak is not None:
                line |= {
                    "measured_bytes": row.memory_bytes,
                    "predicted_bytes": memory_of(answer, row.memory_kind),
                    "memory_class": ("adapters" if "lora" in row.question else "full")
                    + (", unequal samples" if row.is_uneven else ""),
                    "low_share": peak.low / peak.value,
                    "high_share": peak.high / peak.value,
                }
        except ForerunError as error:
            line["refused"] = str(error)
        say(" ".join(f"{name}={value}" for name, value in line.items()))
        found.append(line)
    columns = ["source", "measured_s", "predicted_s", "low_s", "high_s", "at_peak_s", "fits", "predicted_fits",
               "verdict", "measured_bytes", "predicted_bytes", "memory_class", "low_share", "high_share",
               "refused"]  # fmt: skip
    return pd.DataFrame(found).reindex(columns=list(dict.fromkeys([*(found[0] if found else ()), *columns])))


def summary_of(answers: pd.DataFrame) -> dict[str, float]:
    """Figures of one source; NaN where it has no such rows.

    The baseline is one MFU, fitted on the very rows: the median of measured time over time at the device's peak.
    """
    timed = answers.dropna(subset=["measured_s", "predicted_s"])
    ratio = timed.predicted_s / timed.measured_s
    ape = (ratio - 1).abs()
    constant = timed.at_peak_s * (timed.measured_s / timed.at_peak_s).median()
    sized = answers.dropna(subset=["measured_bytes", "predicted_bytes"])
    off = (sized.predicted_bytes / sized.measured_bytes - 1).abs()
    share = sized.measured_bytes / sized.predicted_bytes
    told = answers[answers.refused.isna()]
    ran, oom = told[told.fits.isin([True])], told[told.fits.isin([False])]
    silent = told[told.fits.isna()]
    inside = (timed.measured_s >= timed.low_s) & (timed.measured_s <= timed.high_s)
    return {
        "n": len(timed),
        "mape": ape.mean(),
        "median": ape.median(),
        "bias": ratio.median() - 1,
        "inside": inside.mean(),
        "baseline": (constant / timed.measured_s - 1).abs().mean(),
        "n_memory": len(sized),
        "memory_median": off.median(),
        "memory_p90": float(np.quantile(off, 0.9)) if len(off) else np.nan,
        "memory_bias": (sized.predicted_bytes / sized.measured_bytes).median() - 1,
        "memory_inside": ((share >= sized.low_share) & (share <= sized.high_share)).mean(),
        "memory_width": (sized.high_share / sized.low_share).median(),
        "ran": len(ran),
        "ran_fits": ran.predicted_fits.astype(float).sum(),
        "oom": len(oom),
        "oom_right": len(oom) - oom.predicted_fits.astype(float).sum(),
        "silent": len(silent),
        "silent_no": len(silent) - silent.predicted_fits.astype(float).sum(),
        "refused": answers.refused.notna().sum(),
    }


def left_out_table(answers: pd.DataFrame) -> list[str]:
    """Share of each source's runs within an interval of memory that the other sources give, as lines of Markdown.

    Its ends are quantiles of measured over predicted bytes, each source with the same weight. Tables of one origin, as
    those with fused kernels, are one source.
    """
    sized = answers.dropna(subset=["measured_bytes", "predicted_bytes"])
    origins = sized.source.str.split(",").str[0]
    lines = [
        "| memory of | left out | runs | interval of the others | held | held as shipped |",
        "| --- " * 6 + "|",
    ]
    held, count = 0.0, 0
    for (kind, origin), own in sized.groupby([sized.memory_class, origins]):
        share = own.measured_bytes / own.predicted_bytes
        shipped = ((share >= own.low_share) & (share <= own.high_share)).mean()
        others = sized[(sized.memory_class == kind) & (origins != origin)]
        low, high = _quantiles(others, origins[others.index]) if len(others) else (np.nan, np.nan)
        inside = float(((share >= low) & (share <= high)).mean())
        words = f"{low:.2f} to {high:.2f} | {inside:.2f}" if len(others) else "no other source | "
        lines.append(f"| {kind} | {origin} | {len(own)} | {words} | {shipped:.2f} |")
        held, count = held + inside * len(own) * bool(len(others)), count + len(own) * bool(len(others))
    return [*lines, f"| all | each source | {count} | | {held / max(count, 1):.2f} | |"]


def _quantiles(rows: pd.DataFrame, origins: pd.Series[str]) -> tuple[float, float]:
    share = (rows.measured_bytes / rows.predicted_bytes).to_numpy(dtype=np.float64)
    weight = (1 / origins.groupby(origins).transform("size")).to_numpy(dtype=np.float64)
    order = np.argsort(share)
    below = np.cumsum(weight[order]) - weight[order] / 2
    low, high = np.interp((_TAIL, 1 - _TAIL), below / weight.sum(), share[order])
    return float(low), float(high)


_OUTCOMES = {True: "ran", False: "out of memory", None: "failed without a word"}
_VERDICTS = {"yes": "fits", "close": "may run out of memory", "no": "does not fit"}


def words_table(answers: pd.DataFrame) -> list[str]:
    """Verdicts by what happened, as lines of Markdown."""
    told = answers[answers.refused.isna()]
    table: list[tuple[object, ...]] = []
    for outcome, words in _OUTCOMES.items():
        rows = told[told.fits.isna() if outcome is None else told.fits.isin([outcome])]
        table.append((words, len(rows), *((rows.verdict == verdict).sum() for verdict in _VERDICTS)))
    return markdown_table(("what happened", "rows", *_VERDICTS.values()), table).splitlines()


def _percent(value: float) -> str:
    return "" if np.isnan(value) else f"{100 * value:.1f}"


def _plain(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.2f}"


def study_page(folder: Path, sources: tuple[str, ...], say: Say, *, memory: bool = False) -> str:
    """The figures of all sources, or of memory alone, and the rows left out, as Markdown."""
    titles = (
        "source", "steps", "MAPE %", "median %", "bias %", "in 90 % interval", "constant MFU %", "sizes",
        "memory median %", "p90 %", "bias %", "in interval", "high/low", "ran, called fits", "out of memory, called so",
        "failed, called out of memory",
    )  # fmt: skip
    rows = []
    left = ["", "Rows left out:", ""]
    all_answers = []
    for source in sources:
        read = read_rows(folder, source)
        asked = [each for each in read.rows if not memory or each.memory_bytes or each.fits is not True]
        answers = answers_of([replace(each, step_s=None) for each in asked] if memory else asked, say)
        all_answers.append(answers)
        for name, group in answers.groupby("source", sort=False):
            found = summary_of(group)
            cells = (
                str(name),
                f"{found['n']:.0f}",
                *(_percent(found[key]) for key in ("mape", "median", "bias")),
                _plain(found["inside"]),
                _percent(found["baseline"]),
                f"{found['n_memory']:.0f}",
                *(_percent(found[key]) for key in ("memory_median", "memory_p90", "memory_bias")),
                *(_plain(found[key]) for key in ("memory_inside", "memory_width")),
                *(
                    f"{found[right]:.0f} of {found[number]:.0f}" if found[number] else ""
                    for right, number in (("ran_fits", "ran"), ("oom_right", "oom"), ("silent_no", "silent"))
                ),
            )
            rows.append(cells)
        reasons = dict(read.left_out)
        for message in answers.refused.dropna():
            reasons[f"refused: {message}"] = reasons.get(f"refused: {message}", 0) + 1
        if reasons:
            left.append(f"- {source}: " + "; ".join(f"{number} ({why})" for why, number in reasons.items()))
    together = pd.concat(all_answers, ignore_index=True)
    words, widths = words_table(together), left_out_table(together)
    return "\n".join([markdown_table(titles, rows), *words, "", *widths, *left]) + "\n"
