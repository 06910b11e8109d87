"""Compares the sum of layers with the whole network: own records, and published ones of a P100.

Published: the layers of two small networks timed one by one, and Keras training runs of the networks
(github.com/profnote/ml-performance-prediction, tables ``iit_layers`` and ``iit_e2e``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from forerun.adapters.classics.composition import Composition, HostCosts, host_costs, overlapped_step_time_s
from forerun.base.errors import RecordError
from studies.own.records import composition_rows, own_device, own_record_folders
from studies.tables.reference_steps import require_reference_folder

_LAYERS_WITHOUT_WORK = ("mnist_cnn/fc2", "cifar10_cnn/fc3", "cifar10_cnn/fc4")
"""Dense layers of at most 33,000 weights: under 1 us of a P100, so their time alone is that of a call."""


def recorded_compositions() -> dict[str, list[Composition]]:
    """Networks and their layers, by machine: from the own records and, if they are there, the public tables."""
    panels = {
        f"{own_device(folder).title}, PyTorch": composition_rows(folder) for folder in own_record_folders()
    }
    with suppress(RecordError):  # without the public tables the own records stand on their own
        panels["P100, Keras (published)"] = published_compositions(require_reference_folder())
    return panels


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
