import io
from dataclasses import replace

import numpy as np
from rich.console import Console

from forerun.evidence.evaluate import Evaluation
from forerun.evidence.fitting.evaluation import ErrorMetrics
from forerun.evidence.pages.evaluation_page import evaluation_page

ERRORS = ErrorMetrics(
    n=1234, mape=0.0961, median_ape=0.054, p90_ape=0.21, rmse=0.0123, mae=0.01, r2=0.9876, coverage_90=0.905
)
NO_ROWS = np.zeros(0)


def printed(baselines, groups):
    evaluation = Evaluation(
        metrics=ERRORS,
        baselines=baselines,
        groups=groups,
        predicted_s=NO_ROWS,
        low_s=NO_ROWS,
        high_s=NO_ROWS,
        actual_s=NO_ROWS,
        row_groups=(),
        notes=("a note",),
    )
    file = io.StringIO()
    Console(file=file, width=96).print(evaluation_page(evaluation))
    return file.getvalue()


def row(text, name):
    return next(line for line in text.splitlines() if line.startswith(name)).split("  ")


def cells(text, name):
    return [cell.strip() for cell in row(text, name) if cell.strip()]


def test_forerun_stands_beside_the_baselines():
    text = printed({"roofline": replace(ERRORS, mape=0.4, coverage_90=None)}, {})
    assert cells(text, "forerun") == [
        "forerun",
        "1,234",
        "9.6 %",
        "5.4 %",
        "21 %",
        "12.3 ms",
        "0.988",
        "90 %",
    ]
    assert cells(text, "roofline") == ["roofline", "1,234", "40 %", "5.4 %", "21 %", "12.3 ms", "0.988", "-"]
    assert "by group" not in text
    assert "- a note" in text


def test_groups_have_a_table_of_their_own():
    text = printed({}, {"rtx-3090": replace(ERRORS, n=7, r2=None)})
    assert cells(text, "rtx-3090")[:2] == ["rtx-3090", "7"]
    assert cells(text, "rtx-3090")[-2] == "-"


def test_a_baseline_that_could_not_be_fitted_shows_dashes():
    text = printed({"ann": None}, {})
    assert cells(text, "ann") == ["ann", *["-"] * 7]
