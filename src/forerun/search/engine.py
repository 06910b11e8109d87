"""Evaluates the candidates of a search: all at once on grids, and selected ones exactly as ``predict`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from forerun.cost.memory.peak import (
    MemoryWidth,
    memory_width,
    visible_memory_bytes,
)
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Floats, Ints
from forerun.prediction.estimate import Interval
from forerun.prediction.memory import memory_constants_of, replica_bytes, worst_memory
from forerun.prediction.models import TracedModels, cost_model_of
from forerun.prediction.point_times import PointTimes, grid_live_bytes, grid_times, point_times
from forerun.prediction.replica_step import one_steps
from forerun.prediction.run_step import fed_times, shared_times
from forerun.prediction.step import PreparedModel, tier_of
from forerun.prediction.uneven_samples import UnevenEpoch, has_lengths
from forerun.question.run import HERE, Run
from forerun.question.setup import TrainingSetup
from forerun.search.choice import HIGH, LOW, VALUE, CandidateTable, joined, quantities
from forerun.search.devices import DeviceOption
from forerun.search.search import SETTINGS, Search

_OF_EPOCHS = ("epoch_time_s", "job_time_s", "cost_usd", "energy_j", "co2_g")
"""Quantities in proportion to the steps of an epoch and to their time."""
EpochsOf = Callable[[str, Ints], Floats]
"""Epochs that a model needs at global batch sizes: value, low and high, (3, n)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEpochs:
    """Epochs to a target, the answer of an entry point of ``forerun.targets``.

    Attributes:
        target: The target in words.
        epochs: Epochs of every candidate.
        notes: Remarks for the reader.
    """

    target: str
    epochs: EpochsOf
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """Terms of the jobs of a plan beside their runs.

    Attributes:
        power_limit_w: Power limit set on every device, None for that of the board [W].
        co2_g_per_kwh: Carbon intensity of the grid, None if not asked [g/kWh].
        accuracies: Known accuracy by model.
        epochs_of: Epochs by model and batch; None takes those of the job.
    """

    power_limit_w: float | None = None
    co2_g_per_kwh: float | None = None
    accuracies: Mapping[str, float] = field(default_factory=dict)
    epochs_of: EpochsOf | None = None


class Engine:
    """Evaluates the candidates of one search.

    A step is the sum of few distinct kernels, whose times are smooth in the batch size. So all candidates of one graph
    are one grid of batch sizes and devices, worked out by arithmetic on arrays; only what is printed is worked out
    one by one.

    Args:
        search: A run with the axes ``settings``, ``device`` (options with their prices) and ``batch_size``.
        models: Traced models.
        terms: What is known of the jobs.
        cost_model: The cost model of all devices, if the user gave one.
    """

    def __init__(
        self,
        search: Search,
        models: TracedModels,
        terms: JobTerms | None = None,
        cost_model: CostModel | None = None,
    ) -> None:
        self.search = search
        self._models = models
        self._terms = terms or JobTerms()
        self._changes = tuple(search.axes[SETTINGS])
        self._options: tuple[DeviceOption, ...] = tuple(search.axes["device"])
        self._sizes = np.asarray(search.axes["batch_size"], dtype=np.int64)
        # Changed once here and not for each candidate: reading settings costs more than a row of the grid.
        self._runs_of = [search.run.with_(**change) for change in self._changes]
        self._cost_model, self._weights = cost_model, dict[tuple[str, str], CostModel]()
        self._visible_bytes = np.asarray([visible_memory_bytes(option.device) for option in self._options])
        self._constants = [memory_constants_of(option.device, search.run) for option in self._options]
        self._epoch = UnevenEpoch.of(search.run) if has_lengths(search.run) else None
        equal = self._epoch.runs(search.run) if self._epoch else ()
        self._at_lengths = [Engine(replace(search, run=run), models, terms, cost_model) for run in equal]

    def weights_of(self, option: DeviceOption) -> CostModel:
        """The cost model of an option: the user's, the named calibration, that of this machine, or the shipped one."""
        if self._cost_model is not None:
            return self._cost_model
        key = (option.name, option.device.name)
        if key not in self._weights:
            run = self.search.run
            calibration = run.software.calibration
            # No calibration serves models of two frameworks.
            is_one = len({each.stack for each in self._runs_of}) == 1
            if calibration is None and option.name.lower() == HERE and is_one:
                calibration = HERE
            software = replace(run.software, calibration=calibration)
            self._weights[key] = cost_model_of(replace(run, cluster=option.cluster, software=software))
        return self._weights[key]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the samples."""
        return () if self._epoch is None else (self._epoch.note(self.search.run),)

    def all_candidates(self) -> CandidateTable:
        """All combinations: times are interpolated between batch sizes, memory comes from live bytes."""
        if self._epoch is not None:
            return self._of_epoch(self._epoch, [each.all_candidates() for each in self._at_lengths])
        parts = []
        for index in range(len(self._changes)):
            for run, sizes in self._runs(index, 0, self._sizes):
                for group in self._by_weights():
                    options = [number for number in group if not self._is_alike(index, number)]
                    for setup, alike in self._by_setup(run, options).items():
                        parts.extend(self._grid(index, run, setup, sizes, alike))
        return joined(parts)

    def exactly(self, keys: Iterable[tuple[int, int, int]]) -> CandidateTable:
        """The candidates of these keys (configuration, option, batch size), in this order, exact as in ``predict``."""
        keys = list(keys)
        if self._epoch is not None:
            return self._of_epoch(self._epoch, [each.exactly(keys) for each in self._at_lengths])
        parts, positions = [], []
        # All batch sizes of one graph on one device are one call of the cost model.
        for index, option in dict.fromkeys((key[0], key[1]) for key in keys):
            rows = [row for row, key in enumerate(keys) if key[:2] == (index, option)]
            positions.extend(rows)
            sizes = np.asarray([keys[row][2] for row in rows])
            parts += [self._exact(index, option, run, some) for run, some in self._runs(index, option, sizes)]
        return joined(parts).ordered(np.argsort(positions))

    def _of_epoch(self, epoch: UnevenEpoch, tables: Sequence[CandidateTable]) -> CandidateTable:
        """Candidates with the mean step of an epoch of unequal samples, and the memory of the longest."""
        longest = tables[-1]
        if len(tables) == 1:
            return longest
        steps_s = np.stack([table.values["step_time_s"] for table in tables])
        runs = [self._run(*longest.key(row)) for row in range(len(longest))]
        means = [epoch.mean_step(run, steps_s[:, :, row]) for row, run in enumerate(runs)]
        step_s = np.asarray([mean.time_s.ends for mean in means]).T
        samples = np.asarray([mean.samples for mean in means])
        ratio = step_s[VALUE] / steps_s[-1, VALUE]
        per_epoch = ratio * np.asarray([run.batch_size_global for run in runs]) / samples
        values = {
            name: found * per_epoch if name in _OF_EPOCHS else found for name, found in longest.values.items()
        }
        peaks = longest.values["peak_memory_bytes"].T
        held = zip(runs, peaks, longest.device_memory_bytes, strict=True)
        ends = [epoch.peak(run, Interval(*peak), device_bytes).ends for run, peak, device_bytes in held]
        values |= {
            "peak_memory_bytes": np.asarray(ends).T,
            "step_time_s": step_s,
            # The longest step has the least throughput: the ends change places.
            "throughput_samples_per_s": samples / step_s[[VALUE, HIGH, LOW]],
            "device_samples_per_s": longest.values["device_samples_per_s"] / per_epoch,
        }
        return replace(longest, values=values)

    def num_candidates(self) -> int:
        """Combinations of the axes that are compared."""
        pairs = ((i, k) for i in range(len(self._changes)) for k in range(len(self._options)))
        return len(self._sizes) * sum(not self._is_alike(*pair) for pair in pairs)

    def _is_alike(self, index: int, number: int) -> bool:
        """True for another strategy than the first on one device, which shares its work with none."""
        strategies = [self._changes[row].get("strategy") for row in (0, index)]
        return strategies[0] != strategies[1] and self._options[number].num_devices == 1

    def _run(self, index: int, number: int, batch_size: int) -> Run:
        """The run of a candidate."""
        run = self._runs_of[index]
        setup = replace(run.setup, batch_size_per_device=batch_size)
        return replace(run, setup=setup, cluster=self._options[number].cluster)

    def _runs(self, index: int, number: int, sizes: Ints) -> Iterator[tuple[Run, Ints]]:
        """Batch sizes that share a graph: all of them, or one at a time where the model depends on it."""
        run = self._run(index, number, int(sizes[0]))
        for _, part in self._models.runs(run, [int(size) for size in sizes]):
            own = sizes[part]
            yield self._run(index, number, int(own[0])), own

    def _by_weights(self) -> list[list[int]]:
        """Groups of options that share a cost model."""
        groups: dict[int, list[int]] = {}  # cost models hold arrays: they are told apart by identity
        for number, option in enumerate(self._options):
            groups.setdefault(id(self.weights_of(option)), []).append(number)
        return list(groups.values())

    def _by_setup(self, run: Run, options: Iterable[int]) -> dict[TrainingSetup, list[int]]:
        """Options by the setup in which a run is computed on them; tensor parallelism computes in another one."""
        found: dict[TrainingSetup, list[int]] = {}
        for number in options:
            setup = replace(run, cluster=self._options[number].cluster).compute_setup
            found.setdefault(setup, []).append(number)
        return found

    def _grid(
        self, index: int, run: Run, setup: TrainingSetup, sizes: Ints, options: list[int]
    ) -> list[CandidateTable]:
        first = self._run(index, options[0], int(sizes[0]))
        model = self._models.of(first)
        devices = [self._options[number].device for number in options]
        weights = self.weights_of(self._options[options[0]])
        version = run.software.torch_version
        times = grid_times(model, devices, sizes, setup, weights, version)
        validation, inference = None, run.validation_setup
        if inference is not None:
            forward = self._models.of(run, inference)
            validation = grid_times(forward, devices, sizes, inference, weights, version)
        live = grid_live_bytes(model.graph, sizes)
        parts = []
        for row, number in enumerate(options):
            own = times.row(row)
            # One step of many: here its time is taken as proportional to its samples.
            samples = self._last_samples(number, sizes)
            steps = _Steps(
                own=own,
                last_s=own.ends() * (samples / sizes),
                last_samples=samples,
                validation=None if validation is None else validation.row(row),
            )
            one = self._run(index, number, int(sizes[0]))
            if one.uses_layout:
                memory = self._replays_of(number, model, one, sizes)
            else:
                memory = self._live_memory(number, live, memory_width(model.graph))
            parts.append(self._table(index, number, sizes, model, steps, memory, exact=False))
        return parts

    def _last_samples(self, number: int, sizes: Ints) -> Ints:
        """Samples of the last step of an epoch on one device.

        Of several devices or micro-steps the last step is a whole one, as in ``predict``.
        """
        run = self.search.run
        is_alone = self._options[number].num_devices == 1 and run.sharing.num_accumulation_steps == 1
        if run.job is None or not is_alone:
            return sizes
        rest = run.job.num_samples % sizes
        return np.where(rest > 0, rest, sizes)

    def _exact(self, index: int, number: int, run: Run, sizes: Ints) -> CandidateTable:
        setup = run.compute_setup
        model = self._models.of(run)
        own = self._points(model, number, setup, sizes)
        last, samples = own.ends(), self._last_samples(number, sizes)
        if model.graph.only_batch_size is not None:
            samples = sizes
        elif (samples != sizes).any():
            last = self._points(model, number, setup, samples).ends()
        validation, inference = None, run.validation_setup
        if inference is not None:
            validation = self._points(self._models.of(run, inference), number, inference, sizes)
        memory = self._replays_of(number, model, run, sizes)
        times = _Steps(own=own, last_s=last, last_samples=samples, validation=validation)
        return self._table(index, number, sizes, model, times, memory, exact=True)

    def _points(self, model: PreparedModel, number: int, setup: TrainingSetup, sizes: Ints) -> PointTimes:
        option = self._options[number]
        setups = [replace(setup, batch_size_per_device=int(size)) for size in sizes]
        devices = [option.device] * len(setups)
        version = self.search.run.software.torch_version
        return point_times(model, devices, setups, self.weights_of(option), version)

    def _table(
        self,
        index: int,
        number: int,
        sizes: Ints,
        model: PreparedModel,
        times: _Steps,
        memory_bytes: Floats,
        *,
        exact: bool,
    ) -> CandidateTable:
        terms, option = self._terms, self._options[number]
        run = self._run(index, number, int(sizes[0]))
        weights = self.weights_of(option)
        own, alone, alone_bytes = times.own, times.own.ends(), memory_bytes
        busy = shared_times(model, run, sizes, alone, weights, exact=exact)
        # A replay counts what several devices hold already; live bytes are those of one device alone.
        if not exact and not run.uses_layout:
            memory_bytes = memory_bytes + [replica_bytes(run, each) for each in busy.gradient_bytes]
        micro_steps, batch_sizes = run.sharing.num_accumulation_steps, sizes
        if option.num_devices > 1:
            batch_sizes = sizes * replace(self.search.run, cluster=option.cluster).num_replicas
        step_s = fed_times(run, busy.step_s, sizes * micro_steps)
        # A device that waits for the loader draws less; one that waits for others is counted as if it worked.
        is_single = np.isnan(busy.activity)
        activity = np.where(is_single, own.activity, busy.activity) * busy.step_s[0] / step_s[0]
        values = quantities(
            run.job,
            option,
            batch_sizes,
            activity,
            np.where(is_single, own.compute_fraction, busy.compute_fraction),
            step_s=step_s,
            last_s=fed_times(run, busy.step_s * (times.last_s / alone), times.last_samples * micro_steps),
            validation_s=np.zeros_like(alone) if times.validation is None else times.validation.ends(),
            num_epochs=self._epochs(run, batch_sizes * micro_steps),
            num_micro_steps=micro_steps,
            power_limit_w=terms.power_limit_w,
            co2_g_per_kwh=terms.co2_g_per_kwh,
        )
        count = len(sizes)
        return CandidateTable(
            configurations=self._changes,
            options=self._options,
            configuration=np.full(count, index),
            option=np.full(count, number),
            batch_size=sizes,
            values={
                **values,
                "peak_memory_bytes": memory_bytes,
                "alone_memory_bytes": alone_bytes,
                "accuracy": np.full((3, count), terms.accuracies.get(run.model.model, np.nan)),
                "device_samples_per_s": np.tile(sizes / own.step_s, (3, 1)),
            },
            device_memory_bytes=np.full(count, self._visible_bytes[number]),
            provenance=np.full(count, str(tier_of(model, option.device, run.setup, weights))),
        )

    def _epochs(self, run: Run, global_batch: Ints) -> Floats:
        if self._terms.epochs_of is not None:
            return self._terms.epochs_of(run.model.model, global_batch)
        known = None if run.job is None else run.job.num_epochs
        return np.full((3, len(global_batch)), float(known or 1))

    def _live_memory(self, number: int, live_bytes: Floats, width: MemoryWidth) -> Floats:
        constants = self._constants[number]
        # The allocator needs more than what lives at once, for it leaves gaps; how much more, only a replay tells. The
        # grid takes the usual factor, and the band in which the verdict is "close" as its interval.
        limit = live_bytes * constants.live_factor
        ends = np.stack([limit, limit * width.low, limit * width.high])
        return np.asarray(ends + constants.overhead_bytes)

    def _replays_of(self, number: int, model: PreparedModel, run: Run, sizes: Ints) -> Floats:
        return np.stack([self._replayed(number, model, run, int(size)) for size in sizes], axis=1)

    def _replayed(self, number: int, model: PreparedModel, run: Run, size: int) -> tuple[float, float, float]:
        """Value, low and high of the peak."""
        gradient_bytes = 0.0
        if run.cluster.num_devices > 1 and not run.uses_layout:
            (one,) = one_steps(model, run, [size], self.weights_of(self._options[number]))
            gradient_bytes = one.gradient_bytes
        of_size = replace(run, setup=replace(run.setup, batch_size_per_device=size))
        return worst_memory(model, of_size, gradient_bytes, self._constants[number]).peak_bytes.ends


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Micro-steps of one device, n of them: whole ones, the last of an epoch, (3, n), its samples, and validation."""

    own: PointTimes
    last_s: Floats
    last_samples: Ints
    validation: PointTimes | None
