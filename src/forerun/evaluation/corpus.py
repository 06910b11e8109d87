"""Measured steps with the graphs of their models: what fits and studies work on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from forerun.costs.op_weights import system_key
from forerun.errors import ForerunError
from forerun.hardware import find_device
from forerun.hardware.device import Device
from forerun.records.reference_transformers import TransformerRow, transformer_config
from forerun.records.step_record import StepRecord
from forerun.regressors.op_features import Point, software_era
from forerun.regressors.op_fit import StepSample
from forerun.regressors.op_rows import DistinctOps, distinct_ops
from forerun.tracing.trace import ModelRequest, cache_folder, trace
from forerun.workload.graph import Graph
from forerun.workload.setup import TrainingSetup

__all__ = [
    "Measured",
    "SkippedModel",
    "is_measured_network",
    "measured_steps",
    "print_progress",
    "request_of",
    "trace_all",
    "transformer_requests",
]


_OTHER_NAMES = {
    "timm:ig_resnext101_32x16d": "timm:resnext101_32x16d",
    "timm:ig_resnext101_32x32d": "timm:resnext101_32x32d",
}
"""Networks that timm 1.0 builds under another name; under the old one it builds ``resnext101_32x8d``."""

_PARAMETER_ROUNDING = 5_000  # timm's tables give millions with two decimals
_FLOAT32_ROUNDING = 2**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured step, ready for a fit: its record, its device and the distinct kernels of its model."""

    record: StepRecord
    device: Device
    setup: TrainingSetup
    ops: DistinctOps
    uses_layer_norm: bool

    def sample(self, weight: float = 1.0) -> StepSample:
        """As a sample of the op-level fit."""
        return StepSample(
            ops=self.ops,
            point=self.point(),
            step_time_s=self.record.step_time_s,
            system=self.system,
            weight=weight,
        )

    @property
    def system(self) -> str:
        """Key of the measuring system: table, device, precision, layout, compiler, software, phase."""
        record = self.record
        compiler = "compiled" if record.compile else "eager"
        return system_key(
            record.source,
            self.device.name,
            self.setup.precision,
            self.setup.layout,
            compiler,
            record.framework_version,
            record.phase,
        )

    def point(self) -> Point:
        """Where the op-level model is evaluated."""
        version = self.record.framework_version
        era = software_era(version) if version else 1.0
        return Point(device=self.device, setup=self.setup, uses_layer_norm=self.uses_layer_norm, era=era)


@dataclass(frozen=True, slots=True)
class SkippedModel:
    """A model of a table that this version of its library cannot build, and why."""

    model: str
    reason: str


def request_of(record: StepRecord) -> ModelRequest:
    """The trace a record needs."""
    return ModelRequest(
        model=_OTHER_NAMES.get(record.model, record.model),
        image_size=record.image_size,
        input_shape=record.input_shape,
        sequence_length=record.sequence_length,
    )


def is_measured_network(record: StepRecord, graph: Graph) -> bool:
    """Whether a graph has as many parameters as the source counted, to the rounding of its table.

    A name may stand for another network in a later version of a library: timm 1.0 builds
    ``ig_resnext101_32x48d`` (828 million parameters) as ``resnext101_32x8d`` (89 million). A prediction of that
    network says nothing about the run.

    Args:
        record: A published run; without a count of parameters nothing speaks against the graph.
        graph: What its name builds today.
    """
    counted = record.num_parameters
    if counted is None:
        return True
    return abs(graph.num_parameters - counted) <= _PARAMETER_ROUNDING + counted * _FLOAT32_ROUNDING


def transformer_requests(rows: Sequence[TransformerRow]) -> list[ModelRequest]:
    """Writes the configuration of each row's model to the cache folder and asks for that."""
    requests = []
    for row in rows:
        text = json.dumps(transformer_config(row), sort_keys=True, indent=1)
        name = row.record.model.removeprefix("hf:")
        path = cache_folder() / "configs" / f"{name}-{row.record.phase}-{row.record.sequence_length}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        requests.append(ModelRequest(model=f"hf:{path}", sequence_length=row.record.sequence_length))
    return requests


def _trace_one(job: tuple[ModelRequest, TrainingSetup]) -> str:
    """Traces into the cache; the reason if that failed."""
    try:
        trace(*job)
    except ForerunError as error:
        return str(error)
    return ""


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def trace_all(
    jobs: Iterable[tuple[ModelRequest, TrainingSetup]],
    num_processes: int = 2,
    report: Callable[[int, int], None] | None = None,
) -> dict[tuple[ModelRequest, TrainingSetup], str]:
    """Traces everything that is not in the cache yet, in worker processes.

    Args:
        jobs: Models with setups; the batch size of a setup does not matter.
        num_processes: Workers.
        report: Called with (done, all) as work proceeds.

    Returns:
        The reason for each job that failed, empty for the others.
    """
    distinct = list(dict.fromkeys(jobs))
    reasons: dict[tuple[ModelRequest, TrainingSetup], str] = {}
    context = get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=_use_one_thread) as pool:
        for done, (job, reason) in enumerate(
            zip(distinct, pool.map(_trace_one, distinct, chunksize=4), strict=True), start=1
        ):
            reasons[job] = reason
            if report is not None:
                report(done, len(distinct))
    return reasons


def measured_steps(
    records: Sequence[StepRecord],
    requests: Sequence[ModelRequest] | None = None,
    on_graph: Callable[[StepRecord, Graph], None] | None = None,
    devices: Mapping[str, Device] | None = None,
) -> tuple[list[Measured], list[SkippedModel]]:
    """Records with the distinct kernels of their models; models that cannot be traced are listed.

    Args:
        records: Measured steps.
        requests: The traces they need, if not the ones their names say.
        on_graph: Called with each record and its full graph, for studies that need more than the kernels.
        devices: Figures of devices by name, instead of the catalogue's.
    """
    found: list[Measured] = []
    skipped: dict[str, SkippedModel] = {}
    known: dict[tuple[ModelRequest, TrainingSetup], tuple[DistinctOps, bool] | None] = {}
    for record, request in zip(records, requests or [request_of(r) for r in records], strict=True):
        setup = record.training_setup()
        key = (request, _without_batch(setup))
        if key not in known:
            try:
                graph = trace(request, setup)
            except ForerunError as error:
                skipped[record.model] = SkippedModel(record.model, str(error))
                known[key] = None
                continue
            if not is_measured_network(record, graph):
                skipped[record.model] = SkippedModel(
                    record.model,
                    f"another network than the measured one: {graph.num_parameters:,} parameters, "
                    f"the table counts {record.num_parameters:,}",
                )
                known[key] = None
                continue
            kernels = (distinct_ops(graph.ops), graph.uses_layer_norm)
            if graph.only_batch_size is None:
                known[key] = kernels
            if on_graph is not None:
                on_graph(record, graph)
        elif (stored := known[key]) is not None:
            kernels = stored
        else:
            continue
        device = (devices or {}).get(record.device) or find_device(record.device)
        found.append(
            Measured(record=record, device=device, setup=setup, ops=kernels[0], uses_layer_norm=kernels[1])
        )
    return found, list(skipped.values())


def _without_batch(setup: TrainingSetup) -> TrainingSetup:
    return replace(setup, batch_size_per_device=1)


def print_progress(what: str) -> Callable[[int, int], None]:
    """A reporter that writes a line to stderr now and then."""

    def report(done: int, total: int) -> None:
        if done % 100 == 0 or done == total:
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)

    return report
