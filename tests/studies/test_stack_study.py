"""The stack's fit: recovers what made the data, and holds on the public tables with each network held out."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from studies.keras.stack_study import alignment, convolution_features, fit_stack, stack_markdown, stack_study

FOLDER = os.environ.get("FORERUN_REFERENCE_DATA", "")


def test_the_fit_recovers_the_step_cost_and_the_factor():
    rng = np.random.default_rng(0)
    convolution_s, other_s = rng.uniform(1e-3, 1e-2, (2, 30))
    rows = pd.DataFrame({"convolution_s": convolution_s, "other_s": other_s})
    rows["measured_s"] = 2e-3 + convolution_s + 0.5 * other_s
    assert fit_stack(rows) == pytest.approx((2e-3, 0.5))
    rows["measured_s"] = 0.5 * convolution_s  # less than the layers alone: nothing below zero
    assert fit_stack(rows) == (0.0, 0.0)


def test_features_of_a_convolution():
    (row,) = convolution_features(np.array([[2.0, 8, 3, 1, 1, 4, 6]]))
    assert np.exp(row[0]) == pytest.approx(2 * 2 * 64 * 9 * 4 * 6)
    assert np.exp(row[3]) == pytest.approx(9 * 4 * 6)
    assert alignment(np.array([1.0, 6, 32, 128])).tolist() == [0, 1, 5, 5]


@pytest.mark.reference
@pytest.mark.skipif(not FOLDER, reason="FORERUN_REFERENCE_DATA names no folder of public tables")
def test_networks_held_out_are_predicted_within_a_fifth():
    study = stack_study(Path(FOLDER))
    _, as_is, blind, after = study.networks["all rows"]
    assert blind <= 0.20 < as_is
    assert after <= 0.08
    text = stack_markdown(study)
    assert "patch_camelyon_cnn" in text
    assert all(held <= 0.15 for _, _, held in study.devices.values())
