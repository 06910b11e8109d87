"""``forerun.sweep``: one model over devices, precisions and batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import InvalidSetupError
from forerun.cost.memory.peak import visible_memory_bytes
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Floats, Ints
from forerun.prediction.models import TracedModels
from forerun.question.devices.device import Device
from forerun.question.options import RunOptions
from forerun.question.run import HERE, Run
from forerun.search.choice import HIGH, LOW, VALUE
from forerun.search.devices import DeviceOption
from forerun.search.engine import Engine
from forerun.search.estimates import run_from
from forerun.search.search import SETTINGS, Search

if TYPE_CHECKING:
    import torch


_OF_JOBS = ("dataset", "dataset_size", "epochs", "validation_size", "validate", "startup_s", "checkpoint_s",
            "price_usd_per_hour")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(Answer):
    """Predictions of one model over devices, batch sizes and precisions; arrays are (devices, precisions, batches).

    Attributes:
        run: The run at the first value of every axis.
        devices: Devices, each alone or as ``8xt4``.
        precisions: Precisions.
        batch_sizes: Samples of one device and micro-step.
        batch_size_global: Samples of a step of all devices, (devices, 1, batches).
        step_time_s: Step time [s].
        step_time_low_s: Lower end of its 90 % interval [s].
        step_time_high_s: Upper end of its 90 % interval [s].
        throughput_samples_per_s: Samples of all devices over the step time.
        peak_memory_bytes: Peak memory of one device alone by live bytes, without the allocator's replay [bytes].
        device_memory_bytes: Memory a process finds on each device, (devices,) [bytes].
    """

    run: Run
    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    batch_size_global: Ints
    step_time_s: Floats
    step_time_low_s: Floats
    step_time_high_s: Floats
    peak_memory_bytes: Floats
    device_memory_bytes: Floats

    def json_fields(self) -> dict[str, Any]:
        """The fields, and the throughput."""
        return {**fields_of(self), "throughput_samples_per_s": self.throughput_samples_per_s}

    @property
    def throughput_samples_per_s(self) -> Floats:
        """Samples per second."""
        return np.asarray(self.batch_size_global / self.step_time_s)

    @property
    def throughput_low_samples_per_s(self) -> Floats:
        """Lower end of the 90 % interval of the samples per second."""
        return np.asarray(self.batch_size_global / self.step_time_high_s)

    @property
    def throughput_high_samples_per_s(self) -> Floats:
        """Upper end of the 90 % interval of the samples per second."""
        return np.asarray(self.batch_size_global / self.step_time_low_s)


def sweep(
    model: str | torch.nn.Module | Run,
    *,
    devices: Sequence[str | Device],
    batch_sizes: Sequence[int],
    precisions: Sequence[str] = ("fp32",),
    cost_model: CostModel | None = None,
    use_cache: bool = True,
    **options: Unpack[RunOptions],
) -> Sweep:
    """Step time and memory of one model over every combination of devices, precisions and batch sizes.

    The model is traced once per kind of precision, whatever the number of points.

    Args:
        model: As in ``predict``; of a ``Run`` the devices, precisions and batch sizes are replaced.
        devices: Devices, each as in ``predict``.
        batch_sizes: Samples of one device and step.
        precisions: Precisions.
        cost_model: As in ``predict``.
        use_cache: Whether to use the cache of traced graphs.
        options: The other settings of a run; settings of jobs and prices do not change a step and are refused, as
            are ``precision`` and ``batch_size``, which have lists of their own.

    Raises:
        UsageError: The question must be changed.
        FailureError: The model could not be built or traced, or the cost model could not be read.
    """
    if not devices or not batch_sizes or not precisions:
        raise InvalidSetupError("a sweep needs at least one device, one batch size and one precision")
    _refuse(options)
    first = run_from(model, None if isinstance(model, Run) else devices[0], options)
    by_device = first.over(devices=devices)
    given = [run.setup.batch_size_per_device for run in first.over(batch_sizes=batch_sizes)]
    sizes, places = np.unique(given, return_inverse=True)
    # ``here`` among the devices brings its own calibration, which is no one else's.
    own = first.software.calibration
    named = own if options.get("calibration") or (isinstance(model, Run) and own != HERE) else None
    search = Search(
        run=replace(first, software=replace(first.software, calibration=named)),
        axes={
            SETTINGS: [{"precision": precision} for precision in precisions],
            "device": [
                DeviceOption(cluster=run.cluster, name=run.software.calibration or "") for run in by_device
            ],
            "batch_size": sizes.tolist(),
        },
    )
    table = Engine(search, TracedModels(use_cache=use_cache), cost_model=cost_model).all_candidates()

    def column(name: str, end: int = VALUE) -> Floats:
        found = np.empty((len(by_device), len(precisions), len(sizes)))
        at = (table.option, table.configuration, np.searchsorted(sizes, table.batch_size))
        found[at] = table.values[name][end]
        return found[:, :, places]

    number = np.asarray([run.num_replicas * run.sharing.num_accumulation_steps for run in by_device])
    return Sweep(
        run=by_device[0].over(precisions=precisions[:1], batch_sizes=batch_sizes[:1])[0],
        devices=tuple(run.cluster.spec for run in by_device),
        precisions=tuple(precisions),
        batch_sizes=tuple(batch_sizes),
        batch_size_global=number[:, None, None] * np.asarray(batch_sizes, dtype=np.int64),
        step_time_s=column("step_time_s"),
        step_time_low_s=column("step_time_s", LOW),
        step_time_high_s=column("step_time_s", HIGH),
        peak_memory_bytes=column("alone_memory_bytes"),
        device_memory_bytes=np.asarray([visible_memory_bytes(run.cluster.device) for run in by_device]),
    )


def _refuse(options: RunOptions) -> None:
    for name, wanted in (("precision", "precisions"), ("batch_size", "batch_sizes")):
        if options.get(name) is not None:
            raise InvalidSetupError(
                f"a sweep is over several: give {wanted}=[{options.get(name)!r}] in place of {name}"
            )
    useless = [name for name in _OF_JOBS if options.get(name) not in (None, False)]
    if useless:
        raise InvalidSetupError(
            f"a sweep predicts step times, which {', '.join(useless)} cannot change; leave it out"
        )
