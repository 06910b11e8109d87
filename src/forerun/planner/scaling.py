"""Steps and memory of several devices of one machine, for plans: data parallel replicas, as ``predict`` has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.communication.scaling_constants import load_scaling_table
from forerun.hardware.cluster import cluster_of
from forerun.kept import Kept
from forerun.optime.weights import OpTimeWeights
from forerun.planner.devices import DeviceOption
from forerun.prediction.one_device import one_steps
from forerun.prediction.predictor import Question
from forerun.prediction.scale import scaled_step
from forerun.prediction.step import PreparedModel
from forerun.run.setup import TrainingSetup
from forerun.run.sharing import Sharing

__all__ = ["DataParallelScaling", "ScaledSteps"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MOST_NODES = 6
"""Batch sizes at which a grid looks at communication; between them its share of the step changes slowly."""
_MOST_KEPT = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSteps:
    """What several devices make of steps of one.

    Attributes:
        step_s: Value, low and high of the step of all, (3, n) [s].
        grown_bytes: Memory that each device needs beyond that of one alone, (n,) [bytes].
    """

    step_s: Floats
    grown_bytes: Floats


class DataParallelScaling:
    """Replicas in one machine over the links that the form of the boards fixes; keeps what it has worked out.

    Args:
        weights_of: The cost model of a device.
        torch_version: PyTorch of the run.
    """

    def __init__(
        self, weights_of: Callable[[DeviceOption], OpTimeWeights], torch_version: str | None = None
    ) -> None:
        self._weights_of = weights_of
        self._torch_version = torch_version
        self._settings = Sharing()
        self._kept: Kept[Floats] = Kept(_MOST_KEPT)

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
        """Steps of all devices of an option.

        Args:
            model: The traced step.
            option: Device and number of devices.
            setup: Any batch size.
            batch_sizes: Samples of one device, ascending unless ``exact``, (n,).
            step_s: Steps of one device, (3, n) [s].
            exact: Whether every batch size is worked out, or interpolated between six.

        Raises:
            UnknownDeviceError: The link between the devices is not known.
        """
        nodes = batch_sizes
        if not exact and len(batch_sizes) > _MOST_NODES:
            chosen = np.linspace(0, len(batch_sizes) - 1, _MOST_NODES).round().astype(int)
            nodes = batch_sizes[chosen]
        found = self._at(model, option, setup, [int(size) for size in nodes])
        if nodes is not batch_sizes:
            found = np.stack([np.interp(np.log(batch_sizes), np.log(nodes), row) for row in found])
        return ScaledSteps(step_s=step_s * found[:3], grown_bytes=found[3])

    def _at(
        self, model: PreparedModel, option: DeviceOption, setup: TrainingSetup, sizes: Sequence[int]
    ) -> Floats:
        """Ratios of value, low and high to those of one device, and the memory beyond [bytes], (4, n)."""
        general = replace(setup, batch_size_per_device=1)
        columns = {
            size: column
            for size in sizes
            if (column := self._kept.find((model,), (option.label, general, size))) is not None
        }
        missing = [size for size in sizes if size not in columns]
        if missing:
            for size, column in zip(missing, self._worked_out(model, option, setup, missing), strict=True):
                self._kept.keep((model,), (option.label, general, size), column)
                columns[size] = column
        return np.stack([columns[size] for size in sizes], axis=1)

    def _worked_out(
        self, model: PreparedModel, option: DeviceOption, setup: TrainingSetup, sizes: Sequence[int]
    ) -> list[Floats]:
        question = Question(
            device=option.device,
            setup=setup,
            torch_version=self._torch_version,
            weights=self._weights_of(option),
        )
        cluster = cluster_of(option.device, 1, option.num_devices)
        columns = []
        steps = one_steps(model, question, sizes, self._settings.bucket_bytes)
        for one, size in zip(steps, sizes, strict=True):
            step_s, _ = scaled_step(one, cluster, self._settings, load_scaling_table(), size)
            ends = [getattr(step_s, end) / getattr(one.step_s, end) for end in ("value", "low", "high")]
            # Replicas hold their buckets beside the gradients, as ``scaled_memory_bytes`` has it.
            columns.append(np.asarray([*ends, one.gradient_bytes]))
        return columns
