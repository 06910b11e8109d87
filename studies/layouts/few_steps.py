"""Some measured steps of a source in the calibration of its other steps: those of other sizes, and of the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import minimize

from forerun.cost.communication.constants import ErrorLaw, MeasuredLayouts
from studies.layouts.rows import SOURCES
from studies.layouts.study import predicted_rows
from studies.markdown import markdown_table

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
        for places, errors in sets:
            lower = np.linalg.cholesky(law.alike(places, places) + law.noise**2 * np.eye(len(errors)))
            white = np.linalg.solve(lower, errors)
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
