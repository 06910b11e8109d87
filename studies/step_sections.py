"""The sections of the accuracy page on step times, all from fits that did not see what they predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import forerun
from forerun.base.errors import ForerunError
from forerun.cost.time.evidence import Z_90
from forerun.evidence.fitting.evaluation import ErrorMetrics, errors
from forerun.question.setup import Phase
from studies.markdown import error_cells, markdown_table
from studies.optime.evidence_study import JudgedRows, log_interval_scores
from studies.optime.studies import FewSteps, HeldOut, OperatorError, StepStudies, joined
from studies.tables.public import public_table

Floats = npt.NDArray[np.float64]
Chosen = npt.NDArray[np.bool_]

_HEADER = ("rows", "**default**", "median", "p90", "bias", "informed", "measured", "coverage")
_MEASURED = 5
_LARGE_SYSTEM = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSections:
    """Results of the studies of step times and their rendering.

    Attributes:
        studies: Rows predicted without their family, device or source, and operators without their device.
        rows: The same rows with their errors as asked and informed.
        half_widths: Half-widths of their log times by costs that have not seen them, (n,).
        constant_widths: Those of one width for all, (n,).
        few_shot: Errors after k measured steps, by the systems of ``rows``.
        baselines: Errors of simple predictors on the rows of the families, all and by layout.
        origins: The section on further origins.
        transformer_parts_s: Measured forward and backward time of the transformer rows, by row.
    """

    studies: StepStudies
    rows: JudgedRows
    half_widths: Floats
    constant_widths: Floats
    few_shot: Mapping[str, FewSteps]
    baselines: Mapping[str, Mapping[str, ErrorMetrics]]
    origins: str
    transformer_parts_s: Mapping[str, tuple[float, float]]

    def as_markdown(self) -> str:
        """The sections."""
        return "\n".join(
            [
                self._sources(),
                self._families(),
                self._devices(),
                self._transformers(),
                self._operators(),
                self._intervals(),
                self.origins,
            ]
        )

    def _figures(self, chosen: Chosen, *, alike: bool = True) -> tuple[float, ...]:
        """Figures of some rows in the order of the header, without their number.

        Args:
            chosen: The rows, (n,).
            alike: Whether systems weigh alike, or rows.
        """
        rows, widths = self.rows.take(chosen), self.half_widths[chosen]
        weights = rows.weights if alike else np.full(len(widths), 1.0 / len(widths))
        apart = np.abs(np.expm1(-rows.asked))
        order = np.argsort(apart)
        shares = np.cumsum(weights[order])
        median, p90 = (apart[order][min(int(np.searchsorted(shares, q)), len(order) - 1)] for q in (0.5, 0.9))
        return (
            float(weights @ apart),
            float(median),
            float(p90),
            float(weights @ np.expm1(-rows.asked)),
            float(weights @ np.abs(np.expm1(-rows.informed))),
            self._measured_mape(rows.system.tolist()),
            float(weights @ (np.abs(rows.asked) <= widths)),
        )

    def _measured_mape(self, systems: list[str]) -> float:
        """MAPE after five steps of one's own, systems alike; nan where no system has more steps than that."""
        corrected = [self.few_shot[name].corrected[_MEASURED] for name in dict.fromkeys(systems)]
        return float(np.mean([_mape(found) for found in corrected if len(found)] or [np.nan]))

    def _row(self, name: str, chosen: Chosen, *, alike: bool = True) -> tuple[str, ...]:
        parts = self._figures(chosen, alike=alike)
        cells = [f"{100 * value:.1f}" if np.isfinite(value) else "-" for value in parts[:6]]
        cells[3] = f"{100 * parts[3]:+.1f}"
        return (name, f"{int(chosen.sum()):,}", *cells, f"{100 * parts[6]:.0f} %")

    def _study(self, study: str) -> Chosen:
        found: Chosen = self.rows.study == study
        return found

    def _families(self) -> str:
        held, study = self.studies.families, self._study("families")
        layout = np.asarray([str(step.setup.layout) for step in held.steps])
        is_layout = {name: np.zeros(len(study), dtype=bool) for name in np.unique(layout)}
        # Rows of the families stand in the order of their folds, as ``judged_rows`` takes them.
        order = np.argsort(held.fold, kind="stable")
        for name, chosen in is_layout.items():
            chosen[np.flatnonzero(study)] = layout[order] == name
        rows = [self._row("**forerun**, all rows", study, alike=False)]
        rows += [self._row(f"forerun, {name}", chosen, alike=False) for name, chosen in is_layout.items()]
        simple = [(name, *error_cells(found["all"])) for name, found in self.baselines.items()]
        return (
            "## Families never seen, on a GPU that was\n\n"
            "`timm_train`, AMP on an RTX 3090; repeats differ by 1.6 %.\n\n"
            + markdown_table(("", *_HEADER), rows)
            + "\n"
            + markdown_table(("simple predictor, informed", "rows", "MAPE", "median", "p90"), simple)
            + f"\nLargest errors: {_worst_families(held)}.\n"
        )

    def _sources(self) -> str:
        study = self._study("sources")
        names = dict.fromkeys(self.rows.source[study].tolist())
        rows = [self._row(name, study & (self.rows.source == name)) for name in names]
        rows.append(self._row("**all systems**", study))
        return (
            "## Sources never seen, asked as users ask\n\n"
            "*Default* is what a user must type, *informed* adds the release, settings and machine, *measured* five "
            "steps of one's own instead. All systems (machine, release, phase) have the same weight. MAPE, median, "
            "p90 and bias in per cent.\n\n" + markdown_table(("source left out", *_HEADER), rows)
        )

    def _devices(self) -> str:
        study = self._study("devices")
        names = dict.fromkeys(self.rows.device[study].tolist())
        rows = [self._row(name, study & (self.rows.device == name)) for name in names]
        rows.append(self._row("**all systems**", study))
        return "## GPUs never seen\n\n" + markdown_table(("device left out", *_HEADER), rows)

    def _transformers(self) -> str:
        published = {Phase.TRAIN: "7.9, 30.6, 25.7", Phase.INFERENCE: "9.9, 10.5, 27.1"}
        rows = []
        for phase, figures in published.items():
            held = self._transformer_rows(phase)
            if held is not None:
                name = "training, forward + backward" if phase is Phase.TRAIN else "inference"
                metrics = errors(np.exp(held.log_predicted), np.exp(held.log_measured))
                rows.append((name, *error_cells(metrics), figures))
        return (
            "## Transformers, the row's GPU never seen\n\n"
            "`neusight_e2e`, fp32; published: NeuSight, Habitat, roofline.\n\n"
            + markdown_table(("rows of", "rows", "MAPE", "median", "p90", "published MAPE"), rows)
            + self._forward_backward()
        )

    def _transformer_rows(self, phase: Phase) -> HeldOut | None:
        parts = []
        for held in self.studies.devices.values():
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
        titles = {"sources": "source left out", "devices": "device left out", "families": "families left out"}
        rows = []
        for study, title in titles.items():
            chosen = self._study(study)
            judged = self.rows.take(chosen)
            for name, widths in (("", self.half_widths), (", one width for all", self.constant_widths)):
                inside = np.abs(judged.asked) <= widths[chosen]
                systems = [inside[judged.system == one] for one in np.unique(judged.system)]
                shares = [float(found.mean()) for found in systems if len(found) >= _LARGE_SYSTEM]
                score = judged.weights @ log_interval_scores(judged.asked, widths[chosen])
                rows.append(
                    (
                        f"{title}{name}",
                        str(len(systems)),
                        f"{100 * float(judged.weights @ inside):.0f} %",
                        f"{100 * min(shares):.0f} %" if shares else "-",
                        f"+{100 * float(np.expm1(np.median(widths[chosen]))):.0f} %",
                        f"{score:.2f}",
                    )
                )
        header = (
            "rows, asked as users ask",
            "systems",
            "coverage",
            "worst system",
            "median half-width",
            "score",
        )
        after: dict[int, list[tuple[Floats, Floats]]] = {k: [] for k in (0, 1, 3, 5, 10)}
        for found in self.few_shot.values():
            for k, cells in after.items():
                if len(found.corrected[k]):
                    cells.append((found.corrected[k], found.deviation[k]))
        steps = [
            (
                str(k),
                f"{100 * float(np.mean([_mape(errors_) for errors_, _ in cells])):.1f} %",
                f"{100 * float(np.mean([(np.abs(e) <= Z_90 * d).mean() for e, d in cells])):.0f} %",
                f"+{100 * float(np.expm1(np.median([np.median(Z_90 * d) for _, d in cells]))):.0f} %",
            )
            for k, cells in after.items()
        ]
        return (
            "## 90 % intervals\n\n"
            + markdown_table(header, rows)
            + "\nAfter k steps of one's own, all systems of all studies:\n\n"
            + markdown_table(("k", "MAPE", "coverage", "median half-width"), steps)
        )

    def _operators(self) -> str:
        rows = [
            (name, *_operator_cells(errors_))
            for name, errors_ in (
                ("device known, a fifth of the rows left out", self.studies.known_operators),
                ("device left out of everything", self.studies.other_operators),
            )
        ]
        return (
            "## Single operators\n\n"
            "Mean over groups of operator, table, device and format; medians of predicted over measured.\n\n"
            + markdown_table(
                ("rows", "groups", "MAPE", "lowest median", "highest median", "outside 0.9 to 1.1"), rows
            )
        )

    def summary_rows(self) -> list[tuple[str, str, str]]:
        """Rows of the README's table, asked as users ask."""
        families, devices, sources = (
            self._figures(self._study(study), alike=study != "families")
            for study in ("families", "devices", "sources")
        )
        judged = self.rows.take(self._study("sources"))
        inside = np.abs(judged.asked) <= self.half_widths[self._study("sources")]
        by_source = [
            float(judged.weights[own] @ inside[own] / judged.weights[own].sum())
            for own in (judged.source == name for name in np.unique(judged.source))
        ]
        return [
            (
                "step time, network family never seen",
                f"MAPE {100 * families[0]:.1f} %, median {100 * families[1]:.1f} %",
                "image networks in AMP on one RTX 3090; "
                f"a dense network on totals has {100 * self.baselines['ann']['all'].mape:.0f} %",
            ),
            (
                "step time, GPU never seen",
                f"MAPE {100 * devices[0]:.1f} %; {100 * devices[5]:.1f} % after five measured steps",
                f"NVIDIA GPUs; transformers {self._transformers_mape()}",
            ),
            (
                "step time, source never seen",
                f"MAPE {100 * sources[0]:.1f} %; {100 * sources[4]:.1f} % with release and machine known",
                "systems alike",
            ),
            (
                "90 % interval, source never seen",
                f"covers {100 * sources[6]:.0f} %",
                f"worst source {100 * min(by_source):.0f} %",
            ),
        ]

    def _transformers_mape(self) -> str:
        held = self._transformer_rows(Phase.TRAIN)
        if held is None:
            return "not tested"
        return f"{100 * errors(np.exp(held.log_predicted), np.exp(held.log_measured)).mape:.1f} %"


def _mape(residuals: Floats) -> float:
    return float(np.abs(np.exp(-residuals) - 1).mean())


def _operator_cells(found: Sequence[OperatorError]) -> tuple[str, ...]:
    """Groups, MAPE [%], lowest and highest median of predicted over measured, how many lie outside 0.9 to 1.1."""
    groups: dict[tuple[str, str, str, str], list[Floats]] = {}
    for error in found:
        key = (error.source, error.device, error.precision, error.operator)
        groups.setdefault(key, []).append(error.residuals)
    together = [np.concatenate(parts) for parts in groups.values()]
    medians = [float(np.exp(-np.median(residuals))) for residuals in together]
    mape = float(np.mean([_mape(residuals) for residuals in together]))
    outside = sum(not 0.9 <= median <= 1.1 for median in medians)
    return (
        str(len(together)),
        f"{100 * mape:.1f} %",
        f"{min(medians):.2f}",
        f"{max(medians):.2f}",
        str(outside),
    )


def _worst_families(held: HeldOut) -> str:
    """The two families with the largest errors in all."""
    error = np.abs(np.exp(-held.residuals) - 1)
    names = np.asarray([step.record.family for step in held.steps])

    def total(name: str) -> float:
        return float(error[names == name].sum())

    worst = sorted(np.unique(names).tolist(), key=total, reverse=True)[:2]
    return ", ".join(
        f"{name} ({100 * error[names == name].mean():.0f} % over {int((names == name).sum())} rows)"
        for name in worst
    )


Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginAnswers:
    """Answers to the rows of one table.

    Attributes:
        origin: The table, and what its rows share.
        log_errors: log(measured / predicted) of rows that were answered, (n,).
        log_widths: Half-widths of their 90 % intervals, (n,).
        missing: Rows without an answer by what is missing.
    """

    origin: str
    log_errors: npt.NDArray[np.float64]
    log_widths: npt.NDArray[np.float64]
    missing: Mapping[str, int]


class _MissingError(Exception):
    """What an answer would need, in the text."""


def _vision(row: Row) -> dict[str, Any]:
    if row["framework"] != "pytorch":
        raise _MissingError(f"steps in {row['framework']}")
    if not str(row["model"]).startswith("torchvision:"):
        raise _MissingError("inputs of the network that the source does not state")
    return {
        "model": row["model"],
        "device": row["device"],
        "batch_size": int(row["batch_per_device"]),
        "precision": row["precision"],
        "phase": row["phase"],
        **({} if row["phase"] == "inference" else {"optimizer": row["optimizer"] or "none"}),
    }


def _vectorlm(row: Row) -> dict[str, Any]:
    number = int(row["gpus"])
    return {
        "model": "llama-3-8b",
        "device": "a100-sxm4-80gb" if number == 1 else f"1x{number}xa100-sxm4-80gb",
        "batch_size": int(row["batch_per_gpu"]),
        "sequence_length": int(row["sequence_length_tokens"]),
        **({"strategy": "fsdp"} if number > 1 else {}),
        **({"lora": int(row["lora_rank"])} if row["method"] == "lora" else {}),
    }


def _lacks(what: str) -> Callable[[Row], dict[str, Any]]:
    def ask(row: Row) -> dict[str, Any]:
        raise _MissingError(what)

    return ask


def _tpu(row: Row) -> dict[str, Any]:
    raise _MissingError(
        "the device: tpu7x is not in the catalogue"
        if row["device"] == "tpu7x"
        else "the batch size, which the source does not state"
    )


def _by_device(row: Row) -> str:
    return f"{row['device']}, {str(row['source']).rpartition('/')[0].rpartition('/')[2]}"


_ORIGINS: Mapping[str, tuple[Callable[[Row], dict[str, Any]], Callable[[Row], str]]] = {
    "vision_small_batch": (_vision, _by_device),
    "vectorlm": (_vectorlm, lambda row: f"Llama-3-8B, {row['method']}, {int(row['gpus'])} GPU"),
    "detectron2_zoo": (_lacks("networks of detectron2, whose boxes depend on the data"), lambda _: "all"),
    "mmdetection3d_memory": (_lacks("sparse convolutions, whose points depend on the data"), lambda _: "all"),
    "gaudi": (_lacks("the device: Gaudi is not in the catalogue"), lambda _: "all"),
    "tpu_recipes": (_tpu, lambda _: "all"),
    "grpo_nemo_rl": (
        _lacks("times of generation and training apart, which are not published"),
        lambda _: "all",
    ),
}


def ask_origins(folder: Path, report: Callable[[str], None] = lambda _: None) -> list[OriginAnswers]:
    """Asks every row of every table.

    Args:
        folder: Folder of the public tables.
        report: Told about each table.
    """
    found = []
    for name, (question, group) in _ORIGINS.items():
        report(f"asked: {name}")
        errors: dict[str, list[tuple[float, float]]] = {}
        missing: dict[str, Counter[str]] = {}
        for cells_of_row in public_table(folder, f"steps/{name}").to_dict("records"):
            row: Row = {str(key): None if value != value else value for key, value in cells_of_row.items()}
            cells = errors.setdefault(group(row), [])
            lacks = missing.setdefault(group(row), Counter())
            try:
                step = forerun.predict(**question(row)).step_time_s
            except _MissingError as reason:
                lacks[str(reason)] += 1
            except ForerunError as error:
                lacks[str(error).partition("; ")[0]] += 1
            else:
                cells.append((np.log(row["step_time_s"] / step.value), np.log(step.high / step.value)))
        for title, cells in errors.items():
            log_errors, log_widths = np.asarray(cells, dtype=np.float64).reshape(-1, 2).T
            found.append(
                OriginAnswers(
                    origin=f"{name}: {title}",
                    log_errors=log_errors,
                    log_widths=log_widths,
                    missing=dict(missing[title]),
                )
            )
    return found


def origins_section(answers: list[OriginAnswers]) -> str:
    """The section of the page."""
    rows: list[tuple[str, ...]] = []
    reasons: list[str] = []
    for found in answers:
        number = len(found.log_errors)
        apart = np.expm1(-found.log_errors)
        if number:
            figures = [
                f"{100 * np.abs(apart).mean():.1f}",
                f"{100 * np.median(np.abs(apart)):.1f}",
                f"{100 * apart.mean():+.1f}",
                f"{100 * np.mean(np.abs(found.log_errors) <= found.log_widths):.0f} %",
                f"+{100 * np.expm1(np.median(found.log_widths)):.0f} %",
                f"{log_interval_scores(found.log_errors, found.log_widths).mean():.2f}",
            ]
            rows.append((found.origin, str(number), *figures))
        if found.missing:
            whys = "; ".join(f"{count}: {why}" for why, count in found.missing.items())
            reasons.append(f"{found.origin.removesuffix(': all')} ({whys})")
    header = (
        "origin", "answered", "MAPE", "median", "bias", "coverage", "half-width", "score",
    )  # fmt: skip
    return (
        "## Further origins, asked as users ask\n\n"
        "By the shipped model; no fit has read these rows.\n\n"
        + markdown_table(header, rows)
        + f"\nRows without an answer: {'; '.join(reasons)}.\n"
    )
