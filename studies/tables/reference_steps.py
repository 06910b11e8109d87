"""The public tables as measured steps: the rows of the fit and of the studies."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from forerun.base.errors import ForerunError
from forerun.evidence.fitting.measured_steps import Measured, SkippedModel, measured_steps
from forerun.evidence.records.step_record import StepRecord
from forerun.question.model import ModelRequest
from forerun.question.setup import Layout, OptimizerImplementation, TrainingSetup
from forerun.tracing.trace import trace
from studies.tables.published import read_lambda_resnet50, read_timm_infer, read_timm_train, read_torchvision
from studies.tables.transformers import read_neusight_e2e, transformer_requests

Job = tuple[StepRecord, ModelRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSteps:
    """Measured steps of the public tables, the same as users ask for them, and models that could not be traced."""

    steps: tuple[Measured, ...]
    asked: tuple[Measured, ...]
    skipped: tuple[SkippedModel, ...]


def read_reference_steps(
    folder: Path, report: Callable[[int, int], None] | None = None, quick: bool = False
) -> ReferenceSteps:
    """Reads and traces the tables of whole steps.

    Args:
        folder: Folder of the tables.
        report: Receives the number of finished traces.
        quick: Whether to leave out the largest tables.
    """
    jobs = _jobs(folder, quick)
    questions = [(as_asked(record), request) for record, request in jobs]
    distinct = [
        (request, replace(record.training_setup(), batch_size_per_device=1))
        for record, request in [*jobs, *questions]
    ]
    trace_all(distinct, report)
    steps, skipped = measured_steps([record for record, _ in jobs], [request for _, request in jobs])
    asked, _ = measured_steps([record for record, _ in questions], [request for _, request in questions])
    answered = {(step.record.source, step.record.row_id): step for step in asked}
    return ReferenceSteps(
        steps=tuple(steps),
        asked=tuple(answered.get((step.record.source, step.record.row_id), step) for step in steps),
        skipped=tuple(skipped),
    )


def as_asked(record: StepRecord) -> StepRecord:
    """A record as a user would ask for it, who types model, device, batch, precision, layout, phase and compiler."""
    return replace(
        record,
        framework_version="",
        optimizer_implementation=OptimizerImplementation.FOREACH,
        fused_attention=True,
        autocast_backward=False,
    )


def _jobs(folder: Path, quick: bool) -> list[Job]:
    whole: list[StepRecord] = [*read_torchvision(folder), *read_lambda_resnet50(folder)]
    train = read_timm_train(folder)
    whole += [r for r in train if _share(r.model, 10)] if quick else train
    if not quick:
        whole += [record for record in read_timm_infer(folder) if _takes_part(record)]
    rows = [
        row for row in read_neusight_e2e(folder) if not row.record.compile and row.record.num_devices == 1
    ]
    requests = transformer_requests(rows)
    jobs = [(record, record.run.model) for record in whole]
    return jobs + [(row.record, request) for row, request in zip(rows, requests, strict=True)]


def trace_all(
    jobs: Iterable[tuple[ModelRequest, TrainingSetup]], report: Callable[[int, int], None] | None
) -> None:
    """Traces everything that is not in the cache yet, in worker processes; what fails is left to its reader.

    Args:
        jobs: Models with setups; the batch size of a setup does not matter.
        report: Called with (done, all) as work proceeds.
    """
    distinct = list(dict.fromkeys(jobs))
    context = get_context("spawn")
    with ProcessPoolExecutor(_NUM_PROCESSES, mp_context=context, initializer=_use_one_thread) as pool:
        for done, _ in enumerate(pool.map(_trace_one, distinct, chunksize=4), start=1):
            if report is not None:
                report(done, len(distinct))


_NUM_PROCESSES = 2


def _trace_one(job: tuple[ModelRequest, TrainingSetup]) -> None:
    with contextlib.suppress(ForerunError):
        trace(*job)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _share(model: str, of: int) -> bool:
    """Whether a model is in a fixed share, one in ``of``, chosen by its name alone."""
    return int(hashlib.sha256(model.encode()).hexdigest(), 16) % of == 0


INFERENCE_SHARE = {Layout.NCHW: 4, Layout.NHWC: 8}
"""One network of the inference table in so many takes part, by its name: the rest would add an hour of tracing."""

INFERENCE_LEFT_OUT = ("bf16", "1.13")
"""Precision and release of the inference table that no fit reads, and that tests ask for."""


def _takes_part(record: StepRecord) -> bool:
    is_left_out = {str(record.precision), record.framework_version}.intersection(INFERENCE_LEFT_OUT)
    return not is_left_out and _share(record.model, INFERENCE_SHARE[record.layout])
