"""Sum of layers against whole network: measured here, and as published for a P100.

Published: the layers of two small networks timed one by one, and Keras training runs of the networks
(github.com/profnote/ml-performance-prediction, tables ``iit_layers`` and ``iit_e2e``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from forerun.errors import MeasurementError
from forerun.measurement.composition_jobs import EMPTY_NETWORK_LAYERS, CompositionJobs, LayerJobs
from forerun.measurement.jobs import MeasurementJob
from forerun.optime.composition import (
    HostCosts,
    host_costs,
    marginal_time_s,
    overlapped_step_time_s,
    serial_step_time_s,
)
from forerun.records.measurement import Measurement, Outcome

__all__ = ["Composition", "measured_compositions", "published_compositions"]

_LAYERS_WITHOUT_WORK = ("mnist_cnn/fc2", "cifar10_cnn/fc3", "cifar10_cnn/fc4")
"""Dense layers of at most 33,000 weights: under 1 us of a P100, so their time alone is that of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A network beside the sum of its layers.

    Attributes:
        network: Its name.
        batch_size: Samples of a step.
        num_layers: Calls of layers, repeated ones included.
        sum_of_layers_s: Sum of the layers timed alone [s].
        composed_s: Step composed from them [s].
        measured_s: Step measured [s].
        relative_noise: Half the 95 % interval of the measured step over it; None if not known.
        left_out: Kinds of modules that are in the step and not in the sum.
    """

    network: str
    batch_size: int
    num_layers: int
    sum_of_layers_s: float
    composed_s: float
    measured_s: float
    relative_noise: float | None = None
    left_out: tuple[str, ...] = ()

    @property
    def overshoot_before(self) -> float:
        """Sum of layers over the step, less one."""
        return self.sum_of_layers_s / self.measured_s - 1

    @property
    def overshoot_after(self) -> float:
        """Composed step over the step, less one."""
        return self.composed_s / self.measured_s - 1


def measured_compositions(
    networks: Sequence[CompositionJobs], measurements: Iterable[Measurement], *, overlaps: bool
) -> list[Composition]:
    """Each network beside its layers; costs of calls from what has no work.

    Args:
        networks: Jobs of the networks.
        measurements: Among them those of the jobs.
        overlaps: Whether the device works beside its host.

    Raises:
        MeasurementError: A job has no finished measurement.
    """
    found = {_identity_of(m): m for m in measurements if m.outcome is Outcome.DONE}
    return [_composition(jobs, found, overlaps=overlaps) for jobs in networks]


def _identity_of(what: MeasurementJob | Measurement) -> str:
    return MeasurementJob(
        kind=what.kind, subject=what.subject, family=what.family, parameters=what.parameters
    ).to_json()


def _composition(jobs: CompositionJobs, found: Mapping[str, Measurement], *, overlaps: bool) -> Composition:
    def measurement(job: MeasurementJob) -> Measurement:
        if (one := found.get(_identity_of(job))) is None:
            raise MeasurementError(
                f"{job.subject} of {jobs.whole.subject} has no finished measurement; run the same command again, or "
                "look for its reason with: forerun records list"
            )
        return one

    def marginal_s(layer: LayerJobs) -> float:
        alone_s = _time_s(measurement(layer.alone))
        if layer.together is None:  # so large that neither calls nor caches matter
            return alone_s
        return marginal_time_s(alone_s, _time_s(measurement(layer.together)), layer.num_copies)

    alone_s = [_time_s(measurement(layer.alone)) for layer in jobs.layers]
    empty_s = _time_s(measurement(jobs.empty_layer.alone))
    if overlaps:
        few, many = (_time_s(measurement(job)) for job in jobs.empty_networks)
        costs = host_costs(empty_s, EMPTY_NETWORK_LAYERS, (few, many))
        composed_s = overlapped_step_time_s(alone_s, costs)
    else:
        per_step_s = max(0.0, empty_s - marginal_s(jobs.empty_layer))
        composed_s = serial_step_time_s([marginal_s(layer) for layer in jobs.layers], per_step_s)
    whole = measurement(jobs.whole)
    measured_s = _time_s(whole)
    noise = None if whole.summary is None else (whole.summary.high_s - whole.summary.low_s) / measured_s / 2
    return Composition(
        network=jobs.whole.subject,
        batch_size=int(float(str(jobs.whole.parameters["batch_size"]))),
        num_layers=len(jobs.layers),
        sum_of_layers_s=sum(alone_s),
        composed_s=composed_s,
        measured_s=measured_s,
        relative_noise=noise,
        left_out=jobs.left_out,
    )


def _time_s(measurement: Measurement) -> float:
    summary = measurement.summary
    return median(measurement.repetitions_s) if summary is None else summary.median_s


def published_compositions(folder: Path) -> list[Composition]:
    """The two networks of the P100 tables at eight batch sizes each.

    The layers were timed in another loop than the networks, so c and h cannot come from them: they are solved from the
    steps of the two networks at the smallest batch, whose work hardly shows. The other fourteen steps are predicted.

    Args:
        folder: Folder of the public tables.
    """
    import pandas as pd

    runs = pd.read_parquet(folder / "iit_e2e.parquet")
    runs = runs[runs["sum_of_measured_layers_ms"].notna() & (runs["n_gpus"] == 1)]
    layers = pd.read_parquet(folder / "iit_layers.parquet")
    layers = layers[layers["model_layer"].notna() & (layers["n_gpus"] == 1)]
    cases: dict[tuple[str, int], tuple[list[float], float]] = {}
    for run in runs.to_dict("records"):
        name, batch_size = str(run["model"]), int(run["batch_size_per_gpu"])
        chosen = layers["model_layer"].str.startswith(f"{name}/") & (layers["batch_size"] == batch_size)
        times_ms = layers.loc[chosen, "time_ms_median"]
        timed = [float(time_ms) / 1e3 for time_ms in times_ms]
        cases[name, batch_size] = timed, float(run["time_ms_step"]) / 1e3
    without_work = layers["model_layer"].isin(_LAYERS_WITHOUT_WORK)
    alone_s = float(layers.loc[without_work, "time_ms_median"].median()) / 1e3
    costs = _solved_costs(alone_s, cases)
    return [
        Composition(
            network=name.replace("_", "-"),
            batch_size=batch_size,
            num_layers=len(timed),
            sum_of_layers_s=sum(timed),
            composed_s=overlapped_step_time_s(timed, costs),
            measured_s=measured_s,
        )
        for (name, batch_size), (timed, measured_s) in sorted(cases.items())
    ]


def _solved_costs(
    alone_s: float, cases: Mapping[tuple[str, int], tuple[Sequence[float], float]]
) -> HostCosts:
    """Costs of calls from the smallest batch of two networks."""
    smallest: dict[str, int] = {}
    for name, batch_size in cases:
        smallest[name] = min(batch_size, smallest.get(name, batch_size))
    steps = sorted((len(layers), step_s) for layers, step_s in (cases[key] for key in smallest.items()))
    (few, few_s), (many, many_s) = steps[0], steps[-1]
    return host_costs(alone_s, (few, many), (few_s, many_s))
