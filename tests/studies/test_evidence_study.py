"""Networks that count as measured: what they make of a question; and the fit of widths."""

import numpy as np
import pytest

from forerun.cost.time.evidence import Z_90, ErrorSpreads, operation_mix, step_kind
from forerun.question.devices import find_device
from forerun.question.setup import Precision, TrainingSetup
from op_models import ops_named
from studies.optime.evidence_study import (
    JudgedRows,
    KnownNetwork,
    evidence_of,
    fit_widths,
    log_interval_scores,
)

SETUP = TrainingSetup(precision=Precision.AMP)


def known(device, name):
    mix = operation_mix(ops_named(name, "amp"))
    return KnownNetwork(device=find_device(device), kind=step_kind(SETUP), mix=mix)


def test_a_network_that_is_in_no_fit_is_as_near_as_one_that_is():
    own, other = known("h100-sxm", "vit"), known("t4", "mobilenet")
    assert not evidence_of([], others=[other]).is_near(own.device, SETUP, own.mix)
    assert evidence_of([], others=[other, own]).is_near(own.device, SETUP, own.mix)


def made_rows(errors, covariates, systems):
    names = np.asarray(systems)
    zeros = np.zeros(len(errors))
    words = dict.fromkeys(("study", "left_out", "system", "source", "device"), names)
    return JudgedRows(**words, asked=errors, informed=zeros, covariates=covariates)


def test_widths_follow_a_covariate_that_errors_follow_and_no_other():
    random = np.random.default_rng(0)
    covariates = np.zeros((4000, 3))
    covariates[:, 0] = random.integers(0, 2, 4000)
    covariates[:, 1] = random.random(4000)
    errors = random.normal(0.0, 0.1 * np.exp(0.9 * covariates[:, 0]))
    spreads = ErrorSpreads(system=0.02, doubling=0.0, after_steps=0.1)
    found = fit_widths(made_rows(errors, covariates, random.integers(0, 40, 4000).astype(str)), spreads)
    assert found.learned == pytest.approx(0.9, abs=0.15)
    assert found.spread < 0.2
    half = np.hypot(Z_90 * spreads.system, found.half_widths(covariates))
    assert (np.abs(errors) <= half).mean() == pytest.approx(0.9, abs=0.03)
    constant = log_interval_scores(errors, np.full(4000, np.quantile(np.abs(errors), 0.9)))
    assert log_interval_scores(errors, half).mean() < constant.mean()


def test_the_score_pays_for_width_and_for_what_lies_outside():
    scores = log_interval_scores(np.array([0.1, -0.3]), np.array([0.2, 0.2]))
    assert scores == pytest.approx([0.4, 0.4 + 20 * 0.1])
