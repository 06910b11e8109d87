"""Evaluates candidates: all at once by grids, and chosen ones exactly as ``predict`` does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forerun.errors import InvalidSetupError
from forerun.memory.constants import MemoryConstants, memory_constants, visible_memory
from forerun.memory.peak import CLOSE_FRACTION, estimate_memory
from forerun.optime.weights import OpTimeWeights
from forerun.planner.candidates import CandidateTable, Configuration, JobArrays, joined, quantities
from forerun.planner.devices import DeviceOption
from forerun.planner.scaling import ScaledSteps
from forerun.prediction.input_pipeline import fed_step_s
from forerun.prediction.point_times import PointTimes, grid_live_bytes, grid_times, point_times
from forerun.prediction.predictor import release_of
from forerun.prediction.step import PreparedModel, provenance_of
from forerun.run.input_pipeline import InputPipeline
from forerun.run.job import Job
from forerun.run.setup import Phase, TrainingSetup

__all__ = ["Engine", "EpochsOf", "ModelSource", "PlanQuestion", "Scaling"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class ModelSource(Protocol):
    """Where the engine gets traced models and cost models from."""

    def prepared(self, configuration: Configuration, setup: TrainingSetup) -> PreparedModel:
        """The traced step of a configuration."""
        ...

    def weights(self, option: DeviceOption) -> OpTimeWeights:
        """The cost model of a device: its calibration, or the shipped one."""
        ...


class Scaling(Protocol):
    """What several devices make of the step of one."""

    def __call__(
        self,
        model: PreparedModel,
        option: DeviceOption,
        setup: TrainingSetup,
        batch_sizes: Ints,
        step_s: Floats,
        *,
        exact: bool,
    ) -> ScaledSteps:
        """Steps over all devices of the option from those of one device, (3, n) [s]."""
        ...


class EpochsOf(Protocol):
    """How many epochs a model needs at a global batch size."""

    def __call__(self, model: str, global_batch: Ints) -> Floats:
        """Value, low and high, (3, n)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What a plan is about.

    Attributes:
        configurations, options, batch_sizes: The axes; every combination is a candidate.
        setup: Optimizer, phase and the rest of the training setup.
        job: Dataset and epochs.
        torch_version: PyTorch version of the run, None for the newest known.
        power_limit_w: Power limit that is set on each device, None for the boards' own [W].
        co2_g_per_kwh: Intensity of the grid, None if not asked [g/kWh].
        loader: The input pipeline of one device, None if batches are always there.
        accuracies: Known accuracy by model.
        scaling: Time of steps on several devices; None refuses them.
        epochs_of: Epochs by model and batch; None takes those of the job.
    """

    configurations: tuple[Configuration, ...]
    options: tuple[DeviceOption, ...]
    batch_sizes: tuple[int, ...]
    setup: TrainingSetup
    job: Job
    torch_version: str | None = None
    power_limit_w: float | None = None
    co2_g_per_kwh: float | None = None
    loader: InputPipeline | None = None
    accuracies: Mapping[str, float]
    scaling: Scaling | None = None
    epochs_of: EpochsOf | None = None


class Engine:
    """Evaluates the candidates of one question; keeps replays of the allocator for the exact ones."""

    def __init__(self, question: PlanQuestion, source: ModelSource) -> None:
        many = [option.label for option in question.options if option.num_devices > 1]
        if many and question.scaling is None:
            raise InvalidSetupError(
                f"this version plans one device per job, got {', '.join(many)}; ask for one device and its share "
                "of the batch"
            )
        self._question = question
        self._source = source
        self._replays: dict[tuple[int, int, MemoryConstants], tuple[float, float, float]] = {}
        visible = [visible_memory(option.device).value_bytes for option in question.options]
        self._visible_bytes = np.asarray(visible)
        self._constants = [
            memory_constants(option.device, torch_version=release_of(question.torch_version))
            for option in question.options
        ]

    def all_candidates(self) -> CandidateTable:
        """Every combination, by interpolation between batch sizes and live bytes for memory."""
        parts = []
        batch_sizes = np.asarray(self._question.batch_sizes, dtype=np.int64)
        for index in range(len(self._question.configurations)):
            for setup, sizes in self._runs(index, batch_sizes):
                for options in self._by_weights():
                    parts.extend(self._grid(index, setup, sizes, options))
        return joined(parts)

    def exactly(self, keys: Iterable[tuple[int, int, int]]) -> CandidateTable:
        """The candidates of these keys (configuration, option, batch size), in this order, as ``predict`` has them."""
        keys = list(keys)
        parts, positions = [], []
        for index, option in dict.fromkeys((key[0], key[1]) for key in keys):
            rows = [row for row, key in enumerate(keys) if key[:2] == (index, option)]
            positions.extend(rows)
            parts.append(self._exact(index, option, np.asarray([keys[row][2] for row in rows])))
        return _ordered(joined(parts), np.argsort(positions))

    def _setup(self, index: int, batch_size: int) -> TrainingSetup:
        configuration = self._question.configurations[index]
        return replace(
            self._question.setup,
            precision=configuration.precision,
            layout=configuration.layout,
            batch_size_per_device=batch_size,
        )

    def _runs(self, index: int, sizes: Ints) -> Iterator[tuple[TrainingSetup, Ints]]:
        """The batch sizes that one graph holds for: all, or one at a time where a model depends on them."""
        setup = self._setup(index, int(sizes[0]))
        model = self._source.prepared(self._question.configurations[index], setup)
        if model.graph.only_batch_size is None:
            yield setup, sizes
            return
        for size in sizes:
            yield self._setup(index, int(size)), np.asarray([size])

    def _by_weights(self) -> list[list[int]]:
        """Options that share a cost model."""
        groups: dict[int, list[int]] = {}
        for number, option in enumerate(self._question.options):
            groups.setdefault(id(self._source.weights(option)), []).append(number)
        return list(groups.values())

    def _grid(
        self, index: int, setup: TrainingSetup, sizes: Ints, options: list[int]
    ) -> list[CandidateTable]:
        question = self._question
        configuration = question.configurations[index]
        model = self._source.prepared(configuration, setup)
        devices = [question.options[number].device for number in options]
        weights = self._source.weights(question.options[options[0]])
        times = grid_times(model, devices, sizes, setup, weights, question.torch_version)
        validation = None
        if question.job.num_validation_samples:
            inference = _inference(setup)
            forward = self._source.prepared(configuration, inference)
            validation = grid_times(forward, devices, sizes, inference, weights, question.torch_version)
        live = grid_live_bytes(model.graph, sizes)
        parts = []
        for row, number in enumerate(options):
            own = _device_row(times, row)
            # One step of many: here its time is taken as proportional to its samples.
            global_batch = sizes * question.options[number].num_devices
            # Of several devices the last step is a whole one, as in ``predict``.
            is_one = question.options[number].num_devices == 1
            last = own.step_s * ((question.job.num_samples % global_batch) / global_batch if is_one else 1.0)
            arrays = (own, last, None if validation is None else _device_row(validation, row))
            parts.append(
                self._table(
                    index, number, sizes, setup, model, arrays, self._live_memory(number, live), exact=False
                )
            )
        return parts

    def _exact(self, index: int, number: int, sizes: Ints) -> CandidateTable:
        return joined([self._exact_part(index, number, *run) for run in self._runs(index, sizes)])

    def _exact_part(self, index: int, number: int, setup: TrainingSetup, sizes: Ints) -> CandidateTable:
        question = self._question
        option, configuration = question.options[number], question.configurations[index]
        model = self._source.prepared(configuration, setup)
        own = self._points(model, option, setup, sizes)
        rest = question.job.num_samples % sizes
        if option.num_devices == 1 and model.graph.only_batch_size is None and rest.any():
            last = self._points(model, option, setup, np.where(rest > 0, rest, sizes)).step_s
        else:
            last = own.step_s
        validation = None
        if question.job.num_validation_samples:
            inference = _inference(setup)
            forward = self._source.prepared(configuration, inference)
            validation = self._points(forward, option, inference, sizes)
        memory = np.asarray([self._replayed(index, number, model, int(size)) for size in sizes]).T
        times = (own, last, validation)
        return self._table(index, number, sizes, setup, model, times, memory, exact=True)

    def _points(
        self, model: PreparedModel, option: DeviceOption, setup: TrainingSetup, sizes: Ints
    ) -> PointTimes:
        setups = [replace(setup, batch_size_per_device=int(size)) for size in sizes]
        devices = [option.device] * len(setups)
        return point_times(model, devices, setups, self._source.weights(option), self._question.torch_version)

    def _table(
        self,
        index: int,
        number: int,
        sizes: Ints,
        setup: TrainingSetup,
        model: PreparedModel,
        times: tuple[PointTimes, Floats, PointTimes | None],
        memory_bytes: Floats,
        *,
        exact: bool,
    ) -> CandidateTable:
        question = self._question
        option, configuration = question.options[number], question.configurations[index]
        own, last, validation = times
        step = _triple(own)
        scaled = step
        if option.num_devices > 1:
            assert question.scaling is not None
            found = question.scaling(model, option, setup, sizes, step, exact=exact)
            scaled, memory_bytes = found.step_s, memory_bytes + found.grown_bytes
        arrays = JobArrays(
            step_s=self._fed(scaled, sizes),
            last_s=self._fed(scaled * (last / own.step_s), sizes * last / own.step_s),
            validation_s=np.zeros_like(step) if validation is None else _triple(validation),
            num_epochs=self._epochs(configuration.model, sizes * option.num_devices),
        )
        values = quantities(
            question.job,
            arrays,
            option,
            sizes,
            # A device that waits for the loader draws less; one that waits for others is counted as if it worked.
            own.activity * scaled[0] / arrays.step_s[0],
            own.compute_fraction,
            power_limit_w=question.power_limit_w,
            co2_g_per_kwh=question.co2_g_per_kwh,
        )
        accuracy = question.accuracies.get(configuration.model, np.nan)
        weights = self._source.weights(option)
        count = len(sizes)
        return CandidateTable(
            configurations=question.configurations,
            options=question.options,
            configuration=np.full(count, index),
            option=np.full(count, number),
            batch_size=sizes,
            values={
                **values,
                "peak_memory_bytes": memory_bytes,
                "accuracy": np.full((3, count), accuracy),
                "device_samples_per_s": np.tile(sizes / own.step_s, (3, 1)),
            },
            device_memory_bytes=np.full(count, self._visible_bytes[number]),
            provenance=np.full(count, str(provenance_of(option.device, setup, weights))),
        )

    def _fed(self, step_s: Floats, sizes: Floats | Ints) -> Floats:
        loader = self._question.loader
        return step_s if loader is None else fed_step_s(step_s, np.asarray(sizes, dtype=np.float64), loader)

    def _epochs(self, model: str, global_batch: Ints) -> Floats:
        question = self._question
        if question.epochs_of is not None:
            return question.epochs_of(model, global_batch)
        return np.full((3, len(global_batch)), float(question.job.num_epochs or 1))

    def _live_memory(self, number: int, live_bytes: Floats) -> Floats:
        constants = self._constants[number]
        limit = live_bytes * constants.live_factor
        ends = np.stack([limit, limit / (1 + CLOSE_FRACTION), limit / (1 - CLOSE_FRACTION)])
        return np.asarray(ends + constants.overhead_bytes)

    def _replayed(
        self, index: int, number: int, model: PreparedModel, size: int
    ) -> tuple[float, float, float]:
        """Value, low and high of the peak; devices that differ in their overhead only share a replay."""
        constants = self._constants[number]
        key = (index, size, replace(constants, overhead_bytes=0.0, source=""))
        if key not in self._replays:
            found = estimate_memory(model.graph, self._setup(index, size), constants)
            ends = (found.peak_bytes, found.low_bytes, found.high_bytes)
            self._replays[key] = tuple(end - constants.overhead_bytes for end in ends)  # type: ignore[assignment]
        value, low, high = (end + constants.overhead_bytes for end in self._replays[key])
        return value, low, high


def _inference(setup: TrainingSetup) -> TrainingSetup:
    return replace(setup, phase=Phase.INFERENCE, optimizer="none")


def _device_row(times: PointTimes, row: int) -> PointTimes:
    return PointTimes(
        step_s=times.step_s[row],
        log_width=times.log_width[row],
        activity=times.activity[row],
        compute_fraction=times.compute_fraction[row],
    )


def _triple(times: PointTimes) -> Floats:
    factor = np.exp(times.log_width)
    return np.stack([times.step_s, times.step_s / factor, times.step_s * factor])


def _ordered(table: CandidateTable, order: Sequence[int] | Ints) -> CandidateTable:
    return replace(
        table,
        configuration=table.configuration[order],
        option=table.option[order],
        batch_size=table.batch_size[order],
        values={name: values[:, order] for name, values in table.values.items()},
        device_memory_bytes=table.device_memory_bytes[order],
        provenance=table.provenance[order],
    )
