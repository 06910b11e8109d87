"""Fit of the constants of layouts: collectives inside a node, and the network between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from forerun.cost.communication.constants import LayoutConstants, LayoutTable
from forerun.prediction.models import cost_model_of
from forerun.prediction.unit_step import layout_step
from forerun.question.devices.cluster import parse_cluster
from studies.layouts.networks import traced_model
from studies.layouts.rows import MeasuredLayout, measured_layouts, whole_table
from studies.tables.public import public_table

Floats = npt.NDArray[np.float64]

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall")
_BOARDS = {"A100-SXM4-80GB": "8xa100-sxm4-80gb", "H100-SXM-80GB": "8xh100-sxm", "B300-SXM": "8xb300-sxm"}
_LEAST_BYTES = 4096
_INTER_SHARES = (1.0, 0.6, 0.4)
_NETWORK_HOPS = (2.0, 15.0, 40.0)
_NUM_ROWS = 110
_CROSSINGS_S = (0.0, 0.2e-3, 0.4e-3, 0.5e-3, 0.6e-3, 0.8e-3, 1e-3)
_BLOCKED_S = (0.0, 0.1e-3, 0.15e-3, 0.2e-3, 0.22e-3, 0.24e-3, 0.26e-3, 0.3e-3)
_BLOCKED_CROSSINGS_S = (0.0, 0.5e-3, 1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3, 4e-3)
_SLICES_S = (0.0, 4e-6, 5e-6, 6e-6, 7e-6, 8e-6, 9e-6, 1e-5)
_STALLED = 1.3
"""Measured over predicted step above which a pipeline of nanotron is taken to have stalled."""
_LAUNCHES_S = (0.0, 0.1e-3, 0.2e-3, 0.3e-3, 0.35e-3, 0.4e-3, 0.45e-3, 0.5e-3)
_LEFT_OUT = ("llm-foundry", "vTrain", "calculon")


def fit_collectives(folder: Path) -> tuple[LayoutConstants, Floats]:
    """Constants of collectives inside a node, and the logarithms of predicted over measured times."""
    table = public_table(folder, "llm/collectives")
    table = table[
        (table.source == "ai-dynamo/aiconfigurator") & (table.dtype == "half") & table.gpu.isin(_BOARDS)
    ]
    table = table[(table.n_gpus > 1) & (table.message_bytes >= _LEAST_BYTES)]
    keys = ["gpu", "op", "n_gpus", "message_bytes"]
    table = table.groupby(keys, as_index=False)[["time_ms"]].median()
    kind = table.op.map(_OPS.index).to_numpy()
    number = table.n_gpus.to_numpy(dtype=float)
    crossing = np.where(kind == 0, 2, 1) * (number - 1) / number * table.message_bytes.to_numpy(dtype=float)
    rates = {}
    for gpu, name in _BOARDS.items():
        link = parse_cluster(name).intra_link
        assert link is not None
        rates[gpu] = link.usable_bytes_per_s
    rate = table.gpu.map(rates).to_numpy(dtype=float)
    measured = table.time_ms.to_numpy(dtype=float) * 1e-3

    def logs(parameters: Floats) -> Floats:
        start, hop, half = np.exp(parameters[:3])
        share = np.exp(parameters[3:])[kind]
        found: Floats = start + (number - 1) * hop + (crossing + np.sqrt(half * crossing)) / (rate * share)
        return np.asarray(np.log(found / measured))

    begin = np.concatenate([np.log([6e-6, 1e-6, 4e6]), np.zeros(len(_OPS))])
    best = least_squares(logs, begin, loss="soft_l1").x
    start, hop, half, *shares = (float(value) for value in np.exp(best))
    constants = LayoutConstants(
        start_s=start + hop, hop_s=hop, half_rate_bytes=half, intra_share=dict(zip(_OPS, shares, strict=True))
    )
    return replace(constants, start_s=start), logs(best)


def logs_of(rows: Sequence[MeasuredLayout], table: LayoutTable) -> Floats:
    """Logarithms of predicted over measured steps."""
    found = []
    for row in rows:
        assert row.step_s is not None
        model = traced_model(row.sizes, row.run.compute_setup)
        found.append(
            np.log(layout_step(model, row.run, cost_model_of(row.run), table).step_s.value / row.step_s)
        )
    return np.asarray(found)


def _with_stalls(rows: Sequence[MeasuredLayout], constants: LayoutConstants) -> tuple[LayoutConstants, int]:
    """Constants with the time of a stalled exchange and the nodes from which on most stall; the number of stalls."""
    found, stalled = [], dict[int, list[bool]]()
    table = LayoutTable(constants=constants, log_spread=0.0, provenance={})
    for row, log in zip(rows, logs_of(rows, table), strict=True):
        assert row.step_s is not None
        stalled.setdefault(row.run.cluster.num_nodes, []).append(bool(np.exp(-log) > _STALLED))
        stages, micro_steps = row.run.layout.pipeline, row.run.sharing.num_accumulation_steps
        exchanges = (micro_steps + stages - 1) * min(4, 2 * stages - 2)
        if np.exp(-log) > _STALLED:
            found.append(row.step_s * float(1 - np.exp(log)) / exchanges)
    nodes = min(number for number, rows_stalled in stalled.items() if np.mean(rows_stalled) > 0.5)
    return replace(constants, stall_s=float(np.median(found)), stall_nodes=nodes), len(found)


def fit_layouts(folder: Path) -> LayoutTable:
    """All constants: those of a node from collectives, those of host and network from steps of nanotron.

    The launch of a collective is the one of a grid that has the least mean absolute error on tensor parallelism inside
    a node. The two constants of the network are the pair of a grid that has it on a sample of layouts without a
    pipeline whose tensor groups stay inside a node, and the wait at each crossing is that of the other ones. The spread
    is that of sources of which no row is in the fit, each source alike.
    """
    constants, errors = fit_collectives(folder)
    steps = whole_table(folder)
    measured = [
        row
        for row in measured_layouts(steps, "nanotron")
        if row.step_s is not None and row.run.uses_layout  # replicas have constants of their own
    ]
    one_node = [row for row in measured if row.run.cluster.num_nodes == 1 and row.run.layout.tensor > 1]

    def error_of(rows: Sequence[MeasuredLayout], tried: LayoutConstants) -> float:
        logs = logs_of(rows, LayoutTable(constants=tried, log_spread=0.0, provenance={}))
        return float(np.abs(np.expm1(logs)).mean())

    launches = [replace(constants, launch_s=launch_s) for launch_s in _LAUNCHES_S]
    constants = min(launches, key=lambda tried: error_of(one_node, tried))
    without = [row for row in measured if row.run.layout.pipeline == 1]
    rows = [row for row in without if row.run.layout.tensor <= row.run.cluster.num_devices_per_node]
    over_nodes = [row for row in without if row not in rows]
    rng = np.random.default_rng(0)
    rows = [rows[index] for index in rng.permutation(len(rows))[:_NUM_ROWS]]
    grid = [
        replace(constants, inter_share=share, network_hops=hops)
        for share in _INTER_SHARES
        for hops in _NETWORK_HOPS
    ]
    network, constants = min(((error_of(rows, tried), tried) for tried in grid), key=lambda pair: pair[0])
    # The other sizes are left to score these laws.
    smallest = [row for row in measured if row.model == "llama-1B-mha"]
    sliced = [row for row in smallest if row in without and row.run.sharing.slice_tensors]
    pipelines = [row for row in smallest if row.run.layout.pipeline > 1 and row.run.cluster.num_nodes > 1]
    inside = [row for row in pipelines if row.run.layout.tensor <= row.run.cluster.num_devices_per_node]
    for name, values, told in (
        ("crossing_s", _CROSSINGS_S, over_nodes),
        ("slice_s", _SLICES_S, sliced),
        ("blocked_s", _BLOCKED_S, inside),
        ("blocked_crossing_s", _BLOCKED_CROSSINGS_S, pipelines),
    ):
        grid = [replace(constants, **dict[str, Any]({name: value})) for value in values]
        constants = grid[int(np.argmin([error_of(told, tried) for tried in grid]))]
    constants, num_stalled = _with_stalls(pipelines, constants)
    table = LayoutTable(constants=constants, log_spread=0.0, provenance={})
    left_out = (
        [row for row in measured_layouts(steps, name) if row.step_s is not None] for name in _LEFT_OUT
    )
    squares = [np.square(logs_of(own, table)).mean() for own in left_out]
    return replace(
        table,
        # A user's runs are one more source: its spread may be that of the worst of those that no fit has seen.
        log_spread=float(np.sqrt(np.max(squares))),
        provenance={
            "collectives": f"ai-dynamo/aiconfigurator: {len(errors)} medians of A100, H100 and B300; median error "
            f"{np.median(np.abs(np.expm1(errors))):.3f}",
            "network": f"{len(rows)} rows of nanotron without a pipeline, drawn with seed 0; mean error {network:.3f}",
            "crossing": f"{len(over_nodes)} rows of nanotron with tensor parallelism over nodes and no pipeline; mean "
            f"error {error_of(over_nodes, constants):.3f}",
            "blocked": f"{len(pipelines)} rows of nanotron's smallest model with a pipeline over nodes; mean error "
            f"{error_of(pipelines, constants):.3f}",
            "slices": f"{len(sliced)} rows of nanotron's smallest model with ZeRO and no pipeline; mean error "
            f"{error_of(sliced, constants):.3f}",
            "stall": f"{num_stalled} of the rows of blocked that took {_STALLED} times as long",
            "launch": f"{len(one_node)} rows of nanotron with tensor parallelism inside a node; mean error "
            f"{error_of(one_node, constants):.3f}",
            "spread": f"all rows of {', '.join(_LEFT_OUT)}, of which none is in the fit",
            "slowdown": "0.1, assumed: no row tells it apart",
            "date": date.today().isoformat(),
        },
    )
