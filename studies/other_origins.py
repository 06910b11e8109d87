"""Further origins in ``steps``: each row is asked as a user asks, or counted under what is missing for an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import forerun
from forerun.base.errors import ForerunError
from forerun.base.tables import read_table
from studies.markdown import markdown_table
from studies.optime.evidence_study import log_interval_scores

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
        for cells_of_row in read_table(folder / "steps" / f"{name}.parquet").to_dict("records"):
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
        reasons += [
            f"{count} of {found.origin.removesuffix(': all')} ({why})" for why, count in found.missing.items()
        ]
    header = (
        "origin",
        "answered",
        "MAPE",
        "median",
        "bias",
        "coverage",
        "half-width",
        "score",
    )
    return (
        "## Further origins, asked as users ask\n\n"
        "By the shipped model; no fit has read these rows.\n\n"
        + markdown_table(header, rows)
        + f"\nRows without an answer: {'; '.join(reasons)}.\n"
    )
