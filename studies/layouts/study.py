"""Predicted against measured steps of large models on several devices, and the choice of a layout.

The steps are in no fit, and were predicted all the same: their networks are evidence of intervals as well. Then some
measured steps of a source calibrate its other steps: those of other sizes, and of the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import minimize

from forerun.base.errors import InvalidSetupError
from forerun.cost.communication.constants import ErrorLaw, MeasuredLayouts
from forerun.cost.memory.peak import memory_constants, visible_memory_bytes
from forerun.cost.time.evidence import operation_mix, step_kind
from forerun.evidence.fitting.evaluation import errors
from forerun.prediction.memory import worst_memory
from forerun.prediction.models import cost_model_of
from forerun.prediction.run_step import divided_steps
from forerun.question.devices.device import NumberFormat
from forerun.question.setup import Precision
from forerun.question.sharing import Handover
from studies.layouts.networks import traced_model
from studies.layouts.rows import SOURCES, MeasuredLayout, measured_layouts, whole_table
from studies.markdown import markdown_table
from studies.optime.evidence_study import KnownNetwork

_LEAST_GROUP = 4
_GROUP = ["model", "device", "num_devices", "precision", "adapters", "global_batch"]


def predicted_rows(folder: Path, source: str, *, is_plain: bool = False) -> pd.DataFrame:
    """Measured and predicted steps and memory of one source; impossible layouts are left out.

    Asked plainly, nobody says how the source's pipelines hand over.
    """
    table = whole_table(folder)
    found = []
    for row in measured_layouts(table, source):
        if row.step_s is None:
            continue
        if is_plain:
            layout = replace(row.run.layout, handover=Handover.UNKNOWN)
            row = replace(row, run=replace(row.run, sharing=replace(row.run.sharing, layout=layout)))
        try:
            found.append(_predicted(row) | {"mfu_pct": table.mfu_pct[row.row]})
        except InvalidSetupError:
            continue  # 28 blocks on 32 stages: the framework leaves stages empty
    return pd.DataFrame(found)


def parts_of(rows: pd.DataFrame, source: str) -> dict[str, pd.DataFrame]:
    """All rows of a source, and of nanotron its layouts without and with a pipeline as well."""
    found = {source: rows}
    if source == "nanotron":
        has_pipeline = rows.layout.str.contains("pp=")
        found |= {f"{source}, no pipeline": rows[~has_pipeline], f"{source}, pipelines": rows[has_pipeline]}
    return found


def _predicted(row: MeasuredLayout) -> dict[str, object]:
    run = row.run
    most = 3 if run.uses_layout else row.sizes.layers  # replicas are traced whole
    model = traced_model(row.sizes, run.compute_setup, most).model
    (found,) = divided_steps(model, run, [run.setup.batch_size_per_device], cost_model_of(run))
    step = found.step_s
    worst = worst_memory(
        model, run, found.gradient_bytes, memory_constants(run.cluster.device)
    ).peak_bytes.low
    return {
        "row": row.row,
        "model": row.model,
        "num_devices": run.cluster.num_devices,
        "global_batch": run.batch_size_global,
        "device": run.cluster.device.name,
        "precision": str(run.setup.precision),
        "adapters": run.setup.saving.lora_rank is not None,
        "layout": run.layout.text,
        "measured_s": row.step_s,
        "predicted_s": step.value,
        "low_s": step.low,
        "high_s": step.high,
        "fits": worst <= visible_memory_bytes(run.cluster.device),
        "recompute": run.setup.saving.recompute,
        "ideal_s": _ideal_s(row),
        "size": (row.sizes.hidden, row.sizes.layers),
        "shape": found.shape,
    }


def _ideal_s(row: MeasuredLayout) -> float:
    """Step at the dense peak of the precision: 6 FLOP a weight and token, and attention in full [s].

    Beside adapters the gradients of weights are left out.
    """
    sizes, run = row.sizes, row.run
    width = sizes.hidden // sizes.heads
    products = sizes.hidden * width * 2 * (sizes.heads + sizes.kv_heads)
    products += sizes.hidden * sizes.feed_forward * (3 if sizes.gated else 2)
    weights = sizes.layers * products + sizes.hidden * sizes.vocabulary
    passes = 3 if run.setup.saving.lora_rank is None else 2
    work = 2 * passes * weights + 12 * sizes.layers * sizes.hidden * sizes.tokens
    kind = NumberFormat.FP8 if run.setup.precision is Precision.FP8 else NumberFormat.FP16
    peak = run.cluster.device.peak_flops_per_s[kind] * run.cluster.num_devices
    return work * sizes.tokens * run.batch_size_global / peak


def constant_mfu_error(rows: pd.DataFrame) -> float:
    """Mean error of one MFU for all rows, the one that is best on these rows themselves."""
    shares = np.sort((rows.ideal_s / rows.measured_s).to_numpy())
    return float(min(np.abs(rows.ideal_s / share / rows.measured_s - 1).mean() for share in shares))


def choices(rows: pd.DataFrame) -> dict[str, float]:
    """Choice of a layout: share of groups whose best is in the first three predicted, and loss by the first.

    A group has one model, kind and number of devices, precision and global batch, and at least four layouts.
    """
    hits, losses = [], []
    for _, group in rows.groupby(_GROUP):
        if group.predicted_s.nunique() < _LEAST_GROUP:  # releases that repeat a row count once
            continue
        best = group.measured_s.min()
        order = group.sort_values("predicted_s").measured_s
        hits.append(bool((order.head(3) == best).any()))
        losses.append(order.iloc[0] / best - 1)
    return {
        "groups": float(len(hits)),
        "in_first_three": float(np.mean(hits)) if hits else float("nan"),
        "loss": float(np.median(losses)) if losses else float("nan"),
    }


def study_page(folder: Path, sources: tuple[str, ...] = tuple(SOURCES)) -> str:
    """The figures of all sources as a Markdown table."""
    header = (
        "source", "rows", "MAPE %", "constant MFU %", "median %", "p90 %", "bias %", "in 90 % interval", "called fits",
        "best in first three", "loss %",
    )  # fmt: skip
    cells: list[tuple[str, ...]] = []
    for source in sources:
        rows = predicted_rows(folder, source)
        if rows.empty:
            continue
        parts = parts_of(rows, source)
        if source == "nanotron":
            parts["nanotron, pipelines asked plainly"] = predicted_rows(folder, source, is_plain=True).loc[
                parts["nanotron, pipelines"].index
            ]
        for words, part in parts.items():
            chosen = choices(part)
            found = errors(part.predicted_s, part.measured_s, (part.low_s, part.high_s))
            bias = float(np.exp(np.median(np.log(part.predicted_s / part.measured_s))) - 1)
            figures = (found.mape, constant_mfu_error(part), found.median_ape, found.p90_ape, bias)
            picked = loss = ""
            if chosen["groups"]:
                picked = f"{chosen['in_first_three']:.0%} of {chosen['groups']:.0f}"
                loss = f"{100 * chosen['loss']:.1f}"
            shares = (f"{found.coverage_90:.2f}", f"{part.fits.mean():.2f}")
            cells.append(
                (words, str(found.n), *(f"{100 * value:.1f}" for value in figures), *shares, picked, loss)
            )
    return markdown_table(header, cells)


def known_networks(folder: Path) -> list[KnownNetwork]:
    """Each network of the sources, once for a device and kind of step.

    Args:
        folder: Folder of the public tables.
    """
    table = whole_table(folder)
    found: dict[tuple[object, ...], KnownNetwork] = {}
    for source in SOURCES:
        for row in measured_layouts(table, source):
            if row.step_s is None:
                continue
            setup, device = row.run.compute_setup, row.run.cluster.device
            mix = operation_mix(traced_model(row.sizes, setup).model.ops)
            kind = step_kind(setup)
            key = (device.name, kind, *np.round(mix, 2).tolist())
            found.setdefault(key, KnownNetwork(device=device, kind=kind, mix=mix))
    return list(found.values())


Floats = npt.NDArray[np.float64]

_NUM_STEPS = (0, 1, 3, 5)
_MOST_ROWS = 60
_REPEATS = 60
_LEAST_ROWS = 30
_START = (0.06, 0.1, 0.05, 1.0, 1.0, 0.2, 0.2)
_ITERATIONS = 40


def rows_with_errors(folder: Path) -> dict[str, pd.DataFrame]:
    """Rows of every source with the logarithm of measured over predicted; of nanotron those above 20 % MFU."""
    found = {}
    for source in SOURCES:
        rows = predicted_rows(folder, source)
        found[source] = rows.assign(log=np.log(rows.measured_s / rows.predicted_s)).reset_index(drop=True)
    return found


def _law(logs: Floats) -> ErrorLaw:
    common, shape, noise, hidden, block, exposed, waiting = (float(value) for value in np.exp(logs))
    return ErrorLaw(common=common, shape=shape, noise=noise, lengths=(hidden, block, exposed, waiting))


def fit_error_law(sources: Mapping[str, pd.DataFrame]) -> ErrorLaw:
    """The law under which the errors of some sources are likeliest, each source one draw."""
    sets = []
    for rows in sources.values():
        chosen = rows.sample(min(_MOST_ROWS, len(rows)), random_state=0)
        sets.append((np.asarray([shape.coordinates for shape in chosen["shape"]]), chosen.log.to_numpy()))

    def cost(logs: Floats) -> float:
        law, total = _law(logs), 0.0
        for places, found in sets:
            lower = np.linalg.cholesky(law.alike(places, places) + law.noise**2 * np.eye(len(found)))
            white = np.linalg.solve(lower, found)
            total += 0.5 * float(white @ white) + float(np.log(np.diag(lower)).sum())
        return total

    bounds = [(-5.0, 1.0)] * 3 + [(-4.0, 3.0)] * 4
    return _law(
        minimize(cost, np.log(_START), method="L-BFGS-B", bounds=bounds, options={"maxiter": _ITERATIONS}).x
    )


def few_steps_page(folder: Path) -> str:
    """Errors after 0, 1, 3 and 5 measured steps of one size, as a Markdown table.

    The law is fitted on all sources but the one that is predicted. Means over 60 draws of a size and its steps.
    """
    sources = rows_with_errors(folder)
    cells = []
    for name, rows in sources.items():
        if len(rows) < _LEAST_ROWS or rows["size"].nunique() < 2:
            continue
        law = fit_error_law({other: found for other, found in sources.items() if other != name})
        for same, words in ((False, "other sizes"), (True, "other steps of the size")):
            figures = [f"{100 * _error(rows, number, law, same=same):.1f}" for number in _NUM_STEPS]
            cells.append((name, words, *figures))
    return markdown_table(("source", "predicted", *(f"{number} steps" for number in _NUM_STEPS)), cells)


def _error(rows: pd.DataFrame, number: int, law: ErrorLaw, *, same: bool) -> float:
    """Mean error after some steps of a size that is drawn anew in every repeat."""
    rng = np.random.default_rng(0)
    # The same sizes for every number of steps: those with steps left to predict.
    counts = rows["size"].value_counts()
    sizes = [size for size, count in counts.items() if count > max(_NUM_STEPS)]
    found = []
    for _ in range(_REPEATS):
        size = sizes[rng.integers(len(sizes))]
        is_size = rows["size"] == size
        drawn = rows[is_size].sample(max(_NUM_STEPS), random_state=int(rng.integers(2**31))).index
        tested = rows[is_size & ~rows.index.isin(drawn)] if same else rows[~is_size]
        left = tested.log.to_numpy()
        if number:
            known = rows.loc[drawn[:number]]
            measured = MeasuredLayouts(
                device="any", shapes=tuple(known["shape"]), logs=tuple(known.log), law=law
            )
            left = left - np.asarray([measured.correction(shape)[0] for shape in tested["shape"]])
        found.append(float(np.abs(np.expm1(-left)).mean()))
    return float(np.mean(found))
