"""The energy study on made-up epochs whose law is known, and on the public table."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.cost.time.power import POWER_LAW, POWER_LAWS, demand_share, limited_share, power_slowdown
from studies.energy.study import (
    EnergyRows,
    energy_rows,
    energy_section,
    energy_study,
    fit_power_laws,
    mean_law,
)

GPUS = {"one": 0.15, "two": 0.30}
NETWORKS = {"idle": 0.02, "middle": 0.25, "busy": 0.6}
BATCHES = (0.25, 0.5, 1.0, 1.4)
"""Activity at several batch sizes, as far apart as in the public table: less would not tell idle power apart."""
BOARD_W = 250.0


def made_rows(noise=0.0):
    """Every network on every GPU at five limits, by a law that is like the shipped one but for idle power."""
    rows = []
    random = np.random.default_rng(0)
    for gpu, idle in GPUS.items():
        law = replace(POWER_LAW, idle_share=idle)
        for network, activity in NETWORKS.items():
            for share in BATCHES:
                own = np.asarray([activity * share])
                for limit in (0.5, 0.6, 0.7, 0.85, 1.0):
                    demand = demand_share(own, law)
                    slow = power_slowdown(demand, limit, np.asarray([0.6]), law)[0]
                    power = limited_share(demand, limit)[0] * BOARD_W * np.exp(noise * random.normal())
                    rows.append((gpu, network, limit, 100.0 * slow, power, own[0]))
    gpu, network, limit, time_s, power_w, activity = (
        np.asarray(column) for column in zip(*rows, strict=True)
    )
    ones = np.ones(len(rows))
    return EnergyRows(
        gpu=gpu,
        network=network,
        board_limit_w=BOARD_W * ones,
        limit_share=limit,
        full_time_s=100.0 * ones,
        full_limit_share=ones,
        time_s=time_s,
        power_w=power_w,
        activity=activity,
        compute_fraction=0.6 * ones,
    )


@pytest.fixture(scope="module")
def study():
    return energy_study(made_rows(noise=0.02))


def test_a_known_law_is_found_again():
    rows = made_rows()
    laws = fit_power_laws(rows, np.ones(len(rows), dtype=bool))
    assert set(laws) == set(GPUS)
    for gpu, idle in GPUS.items():
        assert laws[gpu].idle_share == pytest.approx(idle, abs=0.02)
        shares = [
            demand_share(rows.activity, law) for law in (laws[gpu], replace(POWER_LAW, idle_share=idle))
        ]
        assert shares[0] == pytest.approx(shares[1], rel=0.03)


def test_networks_and_limits_that_were_held_out_are_predicted(study):
    own = np.abs(study.known_gpu_j / study.measured_j - 1)
    assert np.isfinite(study.known_gpu_j).all()
    assert np.isfinite(study.new_gpu_j).all()
    assert np.median(own) < 0.1
    assert own.mean() < np.abs(study.tdp_time_j / study.measured_j - 1).mean()


def test_a_gpu_that_was_held_out_is_the_mean_of_the_others(study):
    assert mean_law(list(study.laws.values())).idle_share == pytest.approx(
        np.mean([law.idle_share for law in study.laws.values()])
    )
    assert np.median(np.abs(study.known_gpu_j - study.measured_j)) < np.median(
        np.abs(study.new_gpu_j - study.measured_j)
    )


def test_the_section_has_a_row_for_each_predictor_and_network(study):
    text = energy_section(study)
    for words in ("network and power limit held out", "TDP x time", "| idle |", "| busy |"):
        assert words in text


@pytest.mark.reference
def test_shipped_constants_are_those_of_the_public_table():
    if not os.environ.get("FORERUN_REFERENCE_DATA"):
        pytest.skip("FORERUN_REFERENCE_DATA names no folder")
    from forerun.cost.time.weights import load_weights, shipped_weights_path

    rows = energy_rows(Path(os.environ["FORERUN_REFERENCE_DATA"]), load_weights(shipped_weights_path()))
    laws = fit_power_laws(rows, np.ones(len(rows), dtype=bool))
    pairs = [(POWER_LAW, mean_law(list(laws.values())))]
    pairs += list(zip(POWER_LAWS.values(), (laws[name] for name in sorted(laws)), strict=True))
    for shipped, found in pairs:
        for name in ("idle_share", "full_share", "slowdown_exponent", "activity_exponent", "activity_factor"):
            assert getattr(shipped, name) == pytest.approx(getattr(found, name), rel=0.05)
