"""Laws of scaling: known coefficients come back, the best size is best, and public runs lie where small ones say."""

import numpy as np
import pytest

from forerun.base.errors import InvalidSetupError
from forerun.jobs.forecasting.scaling_law import FLOP_PER_TOKEN, FinishedRun, fit_scaling_law, fit_tuning_law

# Hoffmann et al. 2022, approach 3 (arXiv 2203.15556, equation 10).
HOFFMANN = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28, "p": 1.0}

# The least loss at each size of the dense grid of Step Law (arXiv 2503.04715, data/dense_lr_bs_loss.csv).
STEP_LAW = [
    (214663680, 4e9, 2.621446),
    (214663680, 11.4e9, 2.484705),
    (214663680, 20e9, 2.440110),
    (214663680, 100e9, 2.342014),
    (268304384, 5e9, 2.557717),
    (268304384, 14.2e9, 2.431947),
    (268304384, 25e9, 2.384887),
    (268304384, 80e9, 2.304973),
    (429260800, 8e9, 2.437313),
    (429260800, 22.7e9, 2.322571),
    (429260800, 40e9, 2.274885),
    (429260800, 50e9, 2.256551),
    (536872960, 10e9, 2.383273),
    (536872960, 28.4e9, 2.262901),
    (536872960, 50e9, 2.217085),
    (1073741824, 20e9, 2.225496),
    (1073741824, 56.9e9, 2.120634),
]


def runs_of(rows):
    return [FinishedRun(parameters=n, tokens=d, loss=loss) for n, d, loss in rows]


def hoffmann_loss(n, d):
    return HOFFMANN["E"] + HOFFMANN["A"] / n ** HOFFMANN["alpha"] + HOFFMANN["B"] / d ** HOFFMANN["beta"]


@pytest.fixture(scope="module")
def made():
    grid = [(n, d) for n in (1e8, 4e8, 1.6e9, 6.4e9) for d in (2e9, 2e10, 2e11)]
    return fit_scaling_law(runs_of([(n, d, hoffmann_loss(n, d)) for n, d in grid]))


def test_a_known_law_comes_back(made):
    for name, value in made.coefficients().items():
        assert value.low <= HOFFMANN[name] <= value.high, name
    assert made.loss(7e10, 1.4e12).value == pytest.approx(hoffmann_loss(7e10, 1.4e12), rel=0.02)


def test_the_best_size_of_a_budget_is_the_best_and_spends_it(made):
    best = made.at_budget(1e22)
    assert FLOP_PER_TOKEN * best.parameters.value * best.tokens.value == pytest.approx(1e22)
    for factor in (0.8, 1.25):
        other = made.loss(factor * best.parameters.value, best.tokens.value / factor)
        assert other.value > made.loss(best.parameters.value, best.tokens.value).value
    assert best.loss.low < best.loss.value < best.loss.high


def test_a_target_is_reached_by_its_own_budget_and_none_below_the_floor(made):
    found = made.at_target(2.1)
    assert made.at_budget(found.flop.value).loss.value == pytest.approx(2.1, abs=1e-6)
    assert found.flop.low < found.flop.value < found.flop.high
    assert made.at_target(1.2) is None


@pytest.mark.parametrize(
    ("num_known", "worst"), [(8, 0.04), (15, 0.025)], ids=["from 215 and 268 M", "from all but 1.07 G"]
)
def test_larger_public_runs_lie_where_smaller_ones_say(num_known, worst):
    law = fit_scaling_law(runs_of(STEP_LAW[:num_known]))
    held = [(law.loss(n, d), loss) for n, d, loss in STEP_LAW[num_known:]]
    assert max(abs(found.value - loss) for found, loss in held) < worst
    assert np.mean([found.low <= loss <= found.high for found, loss in held]) >= 0.5


# The least loss at some sizes of OpenEuroLLM/dense_english_scaling_laws (data/best_HPs/lr_gbsz_min_smooth.csv).
OPEN_EURO = [
    (47557632, 20e9, 2.838680),
    (47557632, 80e9, 2.780348),
    (124455168, 12e9, 2.646751),
    (124455168, 50e9, 2.540175),
    (124455168, 120e9, 2.496961),
    (301880320, 6e9, 2.571191),
    (301880320, 20e9, 2.448036),
    (301880320, 80e9, 2.344158),
    (588544000, 12e9, 2.395097),
    (588544000, 50e9, 2.264775),
    (983138304, 20e9, 2.282620),
    (983138304, 200e9, 2.103729),
    (1713504256, 80e9, 2.094213),
    (1713504256, 300e9, 2.024332),
]


def test_a_sharp_best_size_does_not_hide_how_slowly_the_best_loss_falls():
    law = fit_scaling_law(runs_of(OPEN_EURO[:10]))
    assert law.coefficients()["p"].low > 1
    for n, d, loss in OPEN_EURO[10:]:
        found = law.loss(n, d)
        assert found.value == pytest.approx(loss, rel=0.02)
        assert found.low < loss < found.high


def test_a_run_that_cheaper_ones_beat_counts_little():
    spoilt = [*STEP_LAW[:12], (2e9, 4e9, 3.4)]
    one, other = (fit_scaling_law(runs_of(rows)).loss(1.07e9, 2e10).value for rows in (STEP_LAW[:12], spoilt))
    assert other == pytest.approx(one, rel=0.004)


def test_of_runs_with_one_size_only_the_best_counts():
    once = fit_scaling_law(runs_of(STEP_LAW[:6]))
    twice = fit_scaling_law(runs_of(STEP_LAW[:6] + [(n, d, loss + 1) for n, d, loss in STEP_LAW[:6]]))
    assert once.num_runs == twice.num_runs == 6
    assert once.loss(1e9, 1e10) == twice.loss(1e9, 1e10)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (STEP_LAW[:3], "4 or more runs that differ in parameters and in tokens, got 3 of 1 sizes"),
        (STEP_LAW[:4], "got 4 of 1 sizes and 4 numbers of tokens"),
        ([*STEP_LAW[:5], (1e9, 0.0, 2.0)], "above zero"),
    ],
)
def test_runs_that_determine_no_law(rows, message):
    with pytest.raises(InvalidSetupError, match=message):
        fit_scaling_law(runs_of(rows))


# Learning rate and batch.


def tuned(n, d):
    """Best rate and batch of a made law."""
    return 0.004 * (n / 1e8) ** -0.4 * (d / 1e10) ** 0.1, 3e5 * (d / 1e10) ** 0.5


def grid_of(n, d, reach=3):
    rate, batch = tuned(n, d)
    steps = [2.0**i for i in range(-reach, reach + 1)]
    return [
        FinishedRun(
            parameters=n,
            tokens=d,
            learning_rate=rate * a,
            batch_size=batch * b,
            loss=hoffmann_loss(n, d) * np.exp(0.01 * np.log(a) ** 2 + 0.005 * np.log(b) ** 2),
        )
        for a in steps
        for b in steps
    ]


def test_the_best_rate_and_batch_of_a_known_law_come_back_at_a_larger_size():
    sizes = [(n, d) for n in (1e8, 2e8, 4e8) for d in (2e9, 1e10)]
    law = fit_tuning_law([run for n, d in sizes for run in grid_of(n, d)])
    assert law.num_sizes == 6
    for found, wanted in zip(law.best(1.6e9, 4e10), tuned(1.6e9, 4e10), strict=True):
        assert found.value == pytest.approx(wanted, rel=0.2)  # the published exponents pull a little
        assert found.low < wanted < found.high


def test_a_diverged_run_does_not_move_the_best_rate():
    runs = [run for n in (1e8, 4e8) for run in grid_of(n, 1e10)]
    diverged = FinishedRun(parameters=1e8, tokens=1e10, learning_rate=1.0, batch_size=3e5, loss=11.0)
    one, other = (fit_tuning_law(given).best(1e9, 1e10)[0].value for given in (runs, [*runs, diverged]))
    assert other == pytest.approx(one, rel=0.01)


def test_runs_that_tell_no_best_rate_give_none():
    assert fit_tuning_law(runs_of(STEP_LAW)) is None
    assert fit_tuning_law(grid_of(1e8, 1e10)[:2]) is None
    falls = [
        FinishedRun(parameters=1e8, tokens=d, learning_rate=a, batch_size=b, loss=3 * a**-0.1 * b**0.1)
        for d in (1e9, 1e10)
        for a in (0.001, 0.01, 0.1)
        for b in (1, 10, 100)
    ]
    law = fit_tuning_law(falls)  # no least within the grid: none, or the prior's, far beyond it
    assert law is None or law.best(1e8, 1e10)[0].value > 0.1


def test_a_rate_that_is_none_is_refused():
    with pytest.raises(InvalidSetupError, match="above zero and finite"):
        fit_tuning_law([FinishedRun(parameters=1e8, tokens=1e9, loss=2.0, learning_rate=0.0, batch_size=1.0)])
