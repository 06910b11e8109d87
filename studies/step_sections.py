"""The sections of the accuracy page on step times, all from fits that did not see what they predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.evidence.fitting.evaluation import ErrorMetrics, errors
from forerun.question.setup import Phase
from studies.markdown import error_cells, markdown_table
from studies.optime.evidence_study import CoverageCheck
from studies.optime.studies import DeviceResult, HeldOut, OperatorError, joined

__all__ = ["StepSections"]

Floats = npt.NDArray[np.float64]

_MEASURED_STEPS = (0, 5)
_ALL_VISION = "mean, all vision systems but ResNet-50 alone"
_STUDIES = {
    "sources": "a source left out, its devices stay where others measured them",
    "devices": "a device left out",
    "families": "families left out, device and source known",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSections:
    """Results of the studies of step times and their rendering.

    Attributes:
        families: Rows of ``timm_train``, each predicted without its family.
        baselines: Errors of simple predictors on the same rows, all and by layout.
        devices: Rows of each device, predicted without the device.
        few_shot: Rows of each device after k measured steps, by device, table and phase.
        few_shot_sources: The same for sources left out.
        sources: Rows of each source, predicted without the source.
        known_operators: Operators timed alone that no fit of theirs saw, device known.
        other_operators: The same, of devices left out of everything.
        coverage: Coverage of intervals by study.
        transformer_parts_s: Measured forward and backward time of the transformer rows, by row.
    """

    families: HeldOut
    baselines: Mapping[str, Mapping[str, ErrorMetrics]]
    devices: Mapping[str, HeldOut]
    few_shot: Sequence[DeviceResult]
    few_shot_sources: Sequence[DeviceResult]
    sources: Mapping[str, HeldOut]
    known_operators: Sequence[OperatorError]
    other_operators: Sequence[OperatorError]
    coverage: Mapping[str, CoverageCheck]
    transformer_parts_s: Mapping[str, tuple[float, float]]

    def as_markdown(self) -> str:
        """The sections."""
        return "\n".join(
            [
                self._families(),
                self._devices(),
                self._sources(),
                self._transformers(),
                self._operators(),
                self._intervals(),
            ]
        )

    def _families(self) -> str:
        held = self.families
        layout = np.asarray([str(step.setup.layout) for step in held.steps])
        rows = [_error_row("**forerun**, all rows", held)]
        rows += [
            _error_row(f"forerun, {name}", held.take(np.flatnonzero(layout == name)))
            for name in np.unique(layout)
        ]
        rows += [_metrics_row(name, found["all"]) for name, found in self.baselines.items()]
        worst = _worst_families(held)
        return (
            "## Families never seen, on a GPU that was\n\n"
            "`timm_train`, AMP on an RTX 3090; repeats differ by 1.6 %.\n\n"
            + markdown_table(("predictor", "rows", "MAPE", "median", "p90"), rows)
            + f"\nLargest errors: {worst}.\n"
        )

    def _devices(self) -> str:
        numbers = _MEASURED_STEPS
        rows = []
        for result in self.few_shot:
            cells = [_percent_or_dash(result.corrected[k]) for k in numbers]
            rows.append((result.device, str(result.num_rows), *cells))
        rows += [
            (f"**{name}**", "", *(f"**{100 * value:.1f}**" for value in values))
            for name, values in self._device_means(numbers).items()
        ]
        return (
            "## GPUs never seen: datasheet only, then after k measured steps\n\n"
            "MAPE in per cent; measured steps are not counted.\n\n"
            + markdown_table(("device, table, phase", "rows", *(f"k = {k}" for k in numbers)), rows)
        )

    def _device_means(self, numbers: Sequence[int]) -> dict[str, list[float]]:
        """Mean of the systems' MAPEs after each number of measured steps."""

        def is_training(name: str) -> bool:
            return "torchvision train" in name

        groups = {
            "mean, torchvision training": [r for r in self.few_shot if is_training(r.device)],
            "mean, torchvision training and timm inference": [
                r for r in self.few_shot if is_training(r.device) or "timm_infer" in r.device
            ],
            _ALL_VISION: [
                r for r in self.few_shot if "neusight" not in r.device and "lambda" not in r.device
            ],
        }
        return {
            name: [float(np.mean([_mape(r.corrected[k]) for r in results])) for k in numbers]
            for name, results in groups.items()
            if results
        }

    def _transformers(self) -> str:
        published = {Phase.TRAIN: "7.9, 30.6, 25.7", Phase.INFERENCE: "9.9, 10.5, 27.1"}
        rows = []
        for phase, figures in published.items():
            held = self._transformer_rows(phase)
            if held is not None:
                name = "training, forward + backward" if phase is Phase.TRAIN else "inference"
                rows.append((*_error_row(name, held), figures))
        return (
            "## Transformers, the row's GPU never seen\n\n"
            "`neusight_e2e`, fp32; published: NeuSight, Habitat, roofline.\n\n"
            + markdown_table(("rows of", "rows", "MAPE", "median", "p90", "published MAPE"), rows)
            + self._forward_backward()
        )

    def _transformer_rows(self, phase: Phase) -> HeldOut | None:
        parts = []
        for held in self.devices.values():
            chosen = [
                i
                for i, step in enumerate(held.steps)
                if step.record.source == "neusight_e2e"
                and step.setup.phase is phase
                and step.device.vendor == "nvidia"
            ]
            if chosen:
                parts.append(held.take(np.asarray(chosen)))
        return joined(parts) if parts else None

    def _forward_backward(self) -> str:
        held = self._transformer_rows(Phase.TRAIN)
        if held is None:
            return ""
        measured = np.asarray([self.transformer_parts_s[step.record.row_id] for step in held.steps])
        predicted = np.exp(held.log_predicted)
        forward = errors(predicted * held.forward_share, measured[:, 0])
        backward = errors(predicted * (1 - held.forward_share), measured[:, 1])
        shares = f"Forward {100 * forward.mape:.1f} %, backward {100 * backward.mape:.1f} %"
        return f"\n{shares} (NeuSight 19.5 and 18.3 %).\n"

    def _intervals(self) -> str:
        rows = [
            (
                _STUDIES[study],
                str(check.num_groups),
                f"{100 * check.coverage:.0f} %",
                f"{100 * check.worst_coverage:.0f} %",
                f"+{100 * check.median_half_width:.0f} %",
            )
            for study, check in sorted(self.coverage.items(), key=lambda item: list(_STUDIES).index(item[0]))
        ]
        sources = [
            (source, f"{100 * share:.0f} %", f"+{100 * width:.0f} %")
            for source, (share, width) in self.coverage["sources"].by_left_out.items()
        ]
        mean = float(np.mean([share for share, _ in self.coverage["sources"].by_left_out.values()]))
        sources.append(("**mean**", f"**{100 * mean:.0f} %**", ""))
        return (
            "## 90 % intervals\n\nA group is one device, source and phase, or one fold of families.\n\n"
            + markdown_table(
                ("left out", "groups", "coverage", "worst group", "median upper half-width"), rows
            )
            + "\n"
            + markdown_table(("source left out", "coverage", "median upper half-width"), sources)
        )

    def _sources(self) -> str:
        numbers = sorted(self.few_shot_sources[0].corrected)
        means = {
            source: [
                float(np.mean([_mape(r.corrected[k]) for r in results if len(r.corrected[k])]))
                for k in numbers
            ]
            for source, results in (
                (source, [r for r in self.few_shot_sources if r.device.startswith(f"without {source}: ")])
                for source in self.sources
            )
        }
        rows = [
            (source, str(len(self.sources[source].steps)), *map(_percent, values))
            for source, values in means.items()
        ]
        overall = np.mean(list(means.values()), axis=0)
        rows.append(("**mean**", "", *(f"**{_percent(value)}**" for value in overall)))
        return (
            "## Sources never seen\n\nMAPE in per cent, mean over groups of device and phase.\n\n"
            + markdown_table(("source", "rows", *(f"k = {k}" for k in numbers)), rows)
        )

    def _operators(self) -> str:
        rows = [
            (name, *_operator_cells(errors_))
            for name, errors_ in (
                ("device known, a fifth of the rows left out", self.known_operators),
                ("device left out of everything", self.other_operators),
            )
        ]
        return (
            "## Single operators\n\n"
            "Mean over groups of operator, table, device and format; medians of predicted over measured.\n\n"
            + markdown_table(("rows", "groups", "MAPE", "lowest median", "highest median"), rows)
        )

    def summary_rows(self) -> list[tuple[str, str, str]]:
        """Rows of the README's table."""
        seen = errors(np.exp(self.families.log_predicted), np.exp(self.families.log_measured))
        images = self._device_means([0, 5])[_ALL_VISION]
        sources = self.coverage["sources"].by_left_out.values()
        return [
            (
                "step time, network family never seen",
                f"MAPE {100 * seen.mape:.1f} %, median {100 * seen.median_ape:.1f} %",
                "image networks in AMP on one RTX 3090; "
                f"a dense network on totals has {100 * self.baselines['ann']['all'].mape:.0f} %",
            ),
            (
                "step time, GPU never seen",
                f"MAPE {100 * images[0]:.1f} %; {100 * images[1]:.1f} % after five measured steps",
                f"image networks on NVIDIA GPUs; transformers {self._transformers_mape()}",
            ),
            (
                "90 % interval, source never seen",
                f"covers {100 * float(np.mean([share for share, _ in sources])):.0f} %",
                f"worst source {100 * min(share for share, _ in sources):.0f} %",
            ),
        ]

    def _transformers_mape(self) -> str:
        held = self._transformer_rows(Phase.TRAIN)
        if held is None:
            return "not tested"
        return f"{100 * errors(np.exp(held.log_predicted), np.exp(held.log_measured)).mape:.1f} %"


def _mape(residuals: Floats) -> float:
    return float(np.abs(np.exp(-residuals) - 1).mean())


def _percent(value: float) -> str:
    return f"{100 * value:.1f}" if np.isfinite(value) else "-"


def _operator_cells(found: Sequence[OperatorError]) -> tuple[str, str, str, str]:
    """Groups, MAPE [%], lowest and highest median of predicted over measured."""
    groups: dict[tuple[str, str, str, str], list[Floats]] = {}
    for error in found:
        groups.setdefault((error.source, error.device, error.precision, error.operator), []).append(
            error.residuals
        )
    together = [np.concatenate(parts) for parts in groups.values()]
    medians = [float(np.exp(-np.median(residuals))) for residuals in together]
    mape = float(np.mean([_mape(residuals) for residuals in together]))
    return str(len(together)), f"{_percent(mape)} %", f"{min(medians):.2f}", f"{max(medians):.2f}"


def _percent_or_dash(residuals: Floats) -> str:
    return f"{100 * _mape(residuals):.1f}" if len(residuals) else "-"


def _error_row(name: str, held: HeldOut) -> tuple[str, ...]:
    return _metrics_row(name, errors(np.exp(held.log_predicted), np.exp(held.log_measured)))


def _metrics_row(name: str, found: ErrorMetrics) -> tuple[str, ...]:
    return (name, *error_cells(found))


def _worst_families(held: HeldOut, limit: int = 2) -> str:
    error = np.abs(np.exp(-held.residuals) - 1)
    names = np.asarray([step.record.family for step in held.steps])

    def total(name: str) -> float:
        return float(error[names == name].sum())

    worst = sorted(np.unique(names).tolist(), key=total, reverse=True)[:limit]
    return ", ".join(
        f"{name} ({100 * error[names == name].mean():.0f} % over {int((names == name).sum())} rows)"
        for name in worst
    )
