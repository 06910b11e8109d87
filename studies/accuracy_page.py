"""The accuracy page: every figure with its table, split, rows and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.evidence.fitting.evaluation import errors
from forerun.evidence.fitting.measured_steps import SkippedModel
from studies.forecast.section import ForecastFigures, forecast_section, forecast_summary_row
from studies.markdown import markdown_table
from studies.memory.study import Bracket, TransformerVerdicts, bracket_shares
from studies.optime.fit import OTHER_IMPLEMENTATION
from studies.optime.runtime_study import TRACKED_METHODS, LayerResult, RuntimeRow
from studies.schedule.study import ScheduleResults, schedule_section
from studies.step_sections import StepSections

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyPage:
    """Results of the studies and their rendering.

    Attributes:
        date: Day of the run.
        quick: Whether it was a run on a sample.
        num_steps: Measured steps of all tables.
        skipped: Models that could not be traced.
        steps: The sections on step times.
        layers: Convolution layers of a held-out GPU.
        brackets: Memory at the edge of a card.
        pytorch_times: Steps by this package and by PyTorch's ``RuntimeEstimator``.
        pytorch_memory: Some of the brackets, with the peaks of PyTorch's ``MemTracker``.
        transformer_verdicts: Memory verdicts on transformers.
        own_records: The section about forerun's own measurements.
        choices: The section about choosing a device.
        energy: The section about energy under power limits.
        scaling: The section about several devices.
        stack: The section about Keras and TensorFlow.
        tuning: The section about scripts that were profiled and tuned.
        forecasts: Studies of learning curves.
        schedule: Policies, placement and times of the scheduler.
    """

    date: str
    quick: bool
    num_steps: int
    skipped: tuple[SkippedModel, ...]
    steps: StepSections
    layers: LayerResult
    brackets: Sequence[Bracket]
    pytorch_times: Sequence[RuntimeRow]
    pytorch_memory: Sequence[Bracket]
    transformer_verdicts: TransformerVerdicts
    forecasts: ForecastFigures
    schedule: ScheduleResults
    own_records: str
    choices: str
    energy: str
    scaling: str
    stack: str
    tuning: str

    def as_markdown(self) -> str:
        """The page."""
        quick = "**A quick run on a sample: not for quoting.**\n\n" if self.quick else ""
        sections = [
            "# Accuracy\n",
            f"{quick}Made on {self.date} by `python -m studies accuracy` from "
            f"[public tables](methods/evaluation.md#public-tables): {self.num_steps:,} measured steps. An error is "
            "|predicted / measured - 1|: its mean (MAPE), median and 90th percentile (p90). Nothing is predicted "
            "by a model that "
            "was fitted to it.\n",
            self.steps.as_markdown(),
            self._other_tools(),
            self._memory(),
            forecast_section(self.forecasts),
            self.choices,
            self.energy,
            self.scaling,
            self.own_records,
            self.stack,
            *filter(None, [self.tuning]),
            f"## Left out\n\n{len(self.skipped)} models cannot be built as they were measured, or not traced. Tested, "
            f"but not learned from: {', '.join(OTHER_IMPLEMENTATION)}.\n",
        ]
        return "\n".join(sections)

    def scheduling_as_markdown(self) -> str:
        """The page of the scheduler's figures, which lies beside its study."""
        return (
            "# Figures of scheduling\n\nMade by `python -m studies accuracy` beside "
            "[the other figures](../../docs/accuracy.md).\n\n"
            + schedule_section(self.schedule).replace("](methods/", "](../../docs/methods/")
        )

    def _other_tools(self) -> str:
        layers = self.layers.metrics
        answered = [row for row in self.pytorch_times if row.pytorch.value is not None]
        measured = np.asarray([row.step.record.step_time_s for row in answered])
        ours = errors(np.asarray([row.forerun_s for row in answered]), measured)
        theirs = errors(np.asarray([row.pytorch.value for row in answered]), measured)
        return "## Beside other tools\n\n" + markdown_table(
            ("rows", "forerun, MAPE", "beside it"),
            [
                (
                    f"{layers.n:,} convolutions of `justus_layers`, {self.layers.device} left out",
                    f"{100 * layers.mape:.1f} %",
                    "Justus et al. 39.6 %",
                ),
                (
                    f"{len(answered)} steps of `timm_train`",
                    f"{100 * ours.mape:.1f} %",
                    f"PyTorch's `RuntimeEstimator` {100 * theirs.mape:.1f} %",
                ),
            ],
        )

    def _memory(self) -> str:
        header = ("method", "rows", "bracket hit", "verdicts right", "false OOM", "missed OOM")
        methods = ("replay", "live bytes", "16 bytes per parameter")
        sample = [_memory_row(self.pytorch_memory, name) for name in TRACKED_METHODS]
        found = self.transformer_verdicts
        return (
            "## Memory\n\n`timm_train`, 24 GB: the batch that ran fits, the next larger one does not.\n\n"
            + markdown_table(header, [*(_memory_row(self.brackets, name) for name in methods), *sample])
            + f"\n`neusight_memory_fit`: {found.num_right} of {found.num_verdicts} verdicts right; 16 bytes "
            f"per parameter {found.num_accelerate_right}.\n"
        )

    def summary(self) -> str:
        """The table of the README: one row per question."""
        replay = bracket_shares(self.brackets, "replay")
        rule = bracket_shares(self.brackets, "16 bytes per parameter")
        rows = [
            *self.steps.summary_rows(),
            (
                "fits in memory or not",
                f"{100 * replay.verdicts_right:.1f} % of verdicts right",
                "image networks on one card of 24 GB; "
                f"16 bytes per parameter has {100 * rule.verdicts_right:.0f} %",
            ),
            forecast_summary_row(self.forecasts),
        ]
        return f"Made on {self.date}.\n\n" + markdown_table(("question", "answer", "limit"), rows)


def _memory_row(brackets: Sequence[Bracket], method: str) -> tuple[str, ...]:
    shares = bracket_shares(brackets, method)
    titles = {"replay": "**forerun**, allocator replay", "live bytes": "forerun, live bytes (sweeps)"}
    figures = (
        shares.bracket_hit,
        shares.verdicts_right,
        shares.false_out_of_memory,
        shares.missed_out_of_memory,
    )
    return (titles.get(method, method), str(shares.num_rows), *(_share(value) for value in figures))


def _share(value: float) -> str:
    return f"{100 * value:.1f} %" if np.isfinite(value) else "-"
