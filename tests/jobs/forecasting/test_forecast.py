"""A curve to an answer: values, targets, probabilities, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.base.errors import ForecastError, InvalidSetupError, RecordError
from forerun.jobs.forecasting.backtest_table import RANKS, shipped_table, target_times
from forerun.jobs.forecasting.curve import (
    Curve,
    MetricKind,
    clean,
    error_scale,
    parse_target,
    without_outliers,
)
from forerun.jobs.forecasting.forecast import forecast_curve
from forerun.jobs.forecasting.forecast_answer import (
    chance_to_diverge,
    diverged_later,
    stop_advice,
)
from forerun.jobs.forecasting.forecaster import Tier
from forerun.jobs.forecasting.next_trial import chance_to_win
from forerun.jobs.forecasting.schedule import parse_schedule

TABLE = shipped_table()


def accuracy_curve(num=30, floor=0.06, noise=0.004, seed=0, rates=None, values=None):
    epochs = np.arange(1.0, num + 1)
    if values is None:
        values = 1 - floor - 0.6 * epochs**-0.7 + np.random.default_rng(seed).normal(0, noise, num)
    return Curve(
        name="run",
        metric="accuracy",
        epochs=epochs,
        values=np.asarray(values, dtype=float),
        is_rising=True,
        learning_rates=rates,
    )


def ask(curve=None, **question):
    return forecast_curve(curve or accuracy_curve(), TABLE, **question)


def test_tiers_follow_from_what_is_known():
    assert ask(end_epoch=100).tier is Tier.CURVE
    assert ask(schedule=parse_schedule("cosine:epochs=100")).tier is Tier.SCHEDULE
    sibling = accuracy_curve(100, seed=4)
    assert ask(siblings=[sibling]).tier is Tier.HISTORY
    both = ask(siblings=[sibling], schedule=parse_schedule("cosine:epochs=100"))
    assert both.tier is Tier.HISTORY
    assert "finished runs show" in both.notes[-1]


@pytest.mark.parametrize(
    "question", [{"end_epoch": 100.0}, {"schedule": parse_schedule("cosine:epochs=100")}]
)
def test_intervals_are_nested_and_inside_the_scale(question):
    found = ask(**question)
    assert len(found.epochs) == 70
    assert np.all(found.low_90 <= found.low_80)
    assert np.all(found.low_80 <= found.values)
    assert np.all(found.values <= found.high_80)
    assert np.all(found.high_80 <= found.high_90)
    assert np.all(found.high_90 <= 1)
    assert (
        found.final.low_90
        <= found.final.low_80
        <= found.final.value
        <= found.final.high_80
        <= found.final.high_90
    )
    assert sum(found.weights.values()) == pytest.approx(1)


def test_no_share_is_forecast_below_zero():
    noisy = [0.27, 0.27, 0.28, 0.21, 0.3, 0.15, 0.25, 0.39, 0.6, 0.05, 0.43, 0.37, 0.38, 0.46, 0.26, 0.43]
    assert ask(accuracy_curve(16, values=noisy), end_epoch=32).final.low_90 >= 0


def test_more_of_the_run_narrows_the_interval():
    whole = accuracy_curve(100)
    widths = []
    for seen in (15, 40, 80):
        final = ask(whole.first(seen), schedule=parse_schedule("cosine:epochs=100")).final
        widths.append(final.high_90 - final.low_90)
    assert widths[0] > widths[1] > widths[2]


@settings(max_examples=15, deadline=None)
@given(value=st.floats(0.7, 0.94), harder=st.floats(0.001, 0.05))
def test_probability_rises_with_time_and_falls_with_the_target(value, harder):
    easy = ask(end_epoch=100.0, target=parse_target(f"accuracy>={value:.4f}"))
    hard = ask(end_epoch=100.0, target=parse_target(f"accuracy>={value + harder:.4f}"))
    assert np.all(np.diff(easy.probability) >= 0)
    assert easy.probability_at_end >= hard.probability_at_end - 1e-12
    assert easy.epochs_to_target[0] <= easy.epochs_to_target[1] <= easy.epochs_to_target[2]
    assert easy.epochs_to_target[1] <= hard.epochs_to_target[1]


def test_a_level_run_reaches_a_target_as_independent_draws_do():
    # One spread above the target, an evaluation is lucky with the probability Phi(-1).
    found = target_times(np.ones((len(RANKS), 20)), np.arange(11.0, 31), 0.9, 10.0, 0.1)
    reached = 0.025 + 0.95 * (1 - (1 - 0.158655) ** np.arange(1, 21))
    late = np.exp(-2 / 3**4)  # a third of the run is done
    assert found.probability == pytest.approx(late * reached / (1 - reached + late * reached), abs=1e-5)
    assert found.epochs_to_target == (11, 15, 24)
    end = target_times(np.ones((len(RANKS), 4)), np.arange(27.0, 31), 0.9, 26.0, 0.1)
    assert end.probability[-1] < 0.3 < reached[3]
    assert end.epochs_to_target == (27, np.inf, np.inf)


def test_a_sure_run_reaches_a_target_at_the_first_evaluation_beyond_it():
    falling = np.tile(np.linspace(1.0, 0.05, 20), (len(RANKS), 1))
    found = target_times(falling, np.arange(1.0, 21), 0.52, 0.0, 0.0)
    assert found.epochs_to_target == (11,) * 3


def test_a_run_wanders_between_ranks():
    # Every rank stays where it is: one below the target would be there at once, one above it never.
    futures = np.tile(np.linspace(1.4, 0.6, len(RANKS))[:, None], (1, 100))
    found = target_times(futures, np.arange(1.0, 101), 0.7, 0.0, 0.0)
    assert found.probability[0] < 0.2 < 0.3 < found.probability[-1]


def test_a_target_reached_already_is_said_to_be():
    found = ask(target=parse_target("accuracy>=0.5"), end_epoch=100)
    assert found.reached_epoch == 2
    assert found.probability_at_end == 1
    assert found.epochs_to_target == (2, 2, 2)
    advice = stop_advice(found, None)
    assert advice.should_stop
    assert "reached at epoch 2" in advice.reason


def test_a_target_out_of_reach_has_no_epoch_and_the_advice_is_to_stop():
    found = ask(target=parse_target("accuracy>=0.9999"), end_epoch=40)
    assert found.epochs_to_target == (float("inf"),) * 3
    assert found.probability_at_end <= 0.05
    advice = stop_advice(found, 60.0)
    assert advice.should_stop
    assert advice.gain_unit == "hour"


def test_a_falling_loss_is_forecast_in_its_own_units():
    epochs = np.arange(1.0, 31)
    curve = Curve(name="run", metric="loss", epochs=epochs, values=2 + 9 * epochs**-0.5, is_rising=False)
    found = ask(curve, end_epoch=60, target=parse_target("loss<=3.3"))
    assert 2 < found.final.value < 3.7
    assert np.all(np.diff(found.probability) >= 0)


def test_per_cent_and_fractions_give_the_same_answer():
    fraction = accuracy_curve()
    percent = accuracy_curve(values=100 * fraction.values)
    once, hundred = ask(fraction, end_epoch=60).final, ask(percent, end_epoch=60).final
    assert hundred.value == pytest.approx(100 * once.value)
    assert hundred.low_90 == pytest.approx(100 * once.low_90)


def test_without_a_length_it_is_said_what_was_taken():
    found = ask()
    assert found.end_epoch == 60
    assert any("length of the run was not given" in note for note in found.notes)


def test_a_run_at_its_end_has_nothing_to_come():
    found = ask(end_epoch=30.0, target=parse_target("accuracy>=0.999"))
    assert len(found.epochs) == 0
    assert found.probability_at_end == 0
    assert found.final.low_90 == found.final.value == found.final.high_90


def test_a_curve_that_begins_at_zero_is_forecast():
    curve = accuracy_curve()
    moved = replace(curve, epochs=curve.epochs - 1)
    for question in ({"end_epoch": 100.0}, {"schedule": parse_schedule("cosine:epochs=100,warmup=5")}):
        found = ask(moved, **question)
        assert np.all(np.isfinite(found.values))
        assert found.final.value == pytest.approx(ask(curve, **question).final.value, abs=0.02)


def test_steps_are_kept_as_steps():
    steps = 125.0 * np.arange(1, 13)
    curve = Curve(
        name="r", metric="loss", epochs=steps, values=11 * steps**-0.2, is_rising=False, unit="step"
    )
    found = ask(curve, end_epoch=3000)
    assert found.epochs[-1] == 3000
    assert found.curve.steps_per_epoch() == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.1, 0.2, 0.3], "at least 4 points"),
        ([np.nan] * 6, "every value is NaN"),
        ([0.5] * 10, "does not move"),
        ([0.5, 0.4, 0.45, 0.42, 0.41, 0.4], "not improved since its first point"),
        ([0.1, 0.5, 0.8, 0.85, 0.88, 0.9, 0.1, 0.1, 0.1, 0.1], "has diverged"),
        ([0.1, 0.5, 0.8, 0.85, np.nan, np.nan, np.nan], "has diverged"),
    ],
)
def test_refusals_have_a_reason(values, words):
    with pytest.raises(ForecastError, match=words):
        ask(accuracy_curve(len(values), values=values))


def loss_curve(values, metric="loss"):
    epochs = np.arange(1.0, len(values) + 1)
    return Curve(
        name="r", metric=metric, epochs=epochs, values=np.asarray(values, dtype=float), is_rising=False
    )


def test_a_loss_that_runs_away_is_recognised():
    with pytest.raises(ForecastError, match="diverged: loss ends at 200"):
        ask(loss_curve([10, 8, 7, 6, 5.5, 5, 40, 60, 90, 200]))


@pytest.mark.parametrize(
    "values",
    [
        [0.344, 0.36, 0.28, 0.25, 0.31, 0.36, 0.40, 0.42],  # first epochs of a detector that warms up
        [0.05, 0.32, 0.28, 0.02, 0.01, 0.20, 0.35, 0.41],
        [0.904, 0.912, 0.916, 0.913, 0.910, 0.908, 0.908, 0.908],  # fine-tuning that slips by 0.8 points
        [0.3, 0.5, 0.62, 0.66, 0.2, 0.3, 0.5, 0.6, 0.67, 0.68],
    ],
)
def test_a_run_that_only_slips_has_not_diverged(values):
    for seen in range(6, len(values) + 1):
        assert not clean(accuracy_curve(seen, values=values[:seen])).has_diverged


def test_a_validation_loss_that_rises_by_overfitting_has_not_diverged_and_is_followed():
    epochs = np.arange(1.0, 41)
    values = 0.3 + 0.5 / epochs + 0.006 * epochs
    found = ask(loss_curve(values, "val_loss"), end_epoch=80)
    assert found.final.value > 1.2 * values.min()


def test_a_run_that_goes_on_learning_its_training_data_alone_stays_where_it_is():
    epochs = np.arange(1.0, 41)
    curve = loss_curve(0.3 + 0.7 / epochs, "val_loss")
    falling, alike = (replace(curve, training_losses=losses) for losses in (0.94**epochs, curve.values))
    bare, overfit, learning = (ask(c, end_epoch=80) for c in (curve, falling, alike))
    assert overfit.weights["plateau"] > 0.7
    assert bare.final.value < overfit.final.value < curve.values[-1]
    assert bare.final == learning.final
    slower = ask(replace(curve, training_losses=curve.values**1.6), end_epoch=80)  # most of its fall is seen
    assert 0.1 < slower.weights["plateau"] < 0.7
    words = replace(falling, metric="wer")  # go on falling while losses stand still
    assert "plateau" not in ask(words, end_epoch=80).weights
    told = (ask(c, end_epoch=80, schedule=parse_schedule("cosine:epochs=80")).final for c in (curve, falling))
    assert len(set(told)) == 1


def test_with_nothing_beside_the_curve_the_interval_holds_most_of_the_way_back():
    found = ask(end_epoch=60)
    now = float(np.median(found.curve.values[-3:]))
    assert found.final.value > now
    assert found.final.low_90 <= found.final.value - 0.7 * (found.final.value - now) + 1e-9


@pytest.mark.parametrize(
    ("curve", "target", "words"),
    [
        (
            accuracy_curve(),
            "accuracy>=2",
            "cannot be reached: accuracy is at most 1 in this run; for 2 per cent",
        ),
        (accuracy_curve(), "accuracy>=92", "for 92 per cent write 0.92"),
        (accuracy_curve(values=100 * accuracy_curve().values), "accuracy>=101", "at most 100 in this run"),
        (accuracy_curve(values=100 * accuracy_curve().values), "accuracy>=0.92", "in per cent; write 92"),
        (loss_curve([3, 2, 1.5, 1.2, 1.1]), "loss<=-1", "never below 0"),
    ],
)
def test_a_target_that_no_run_can_reach_is_refused(curve, target, words):
    with pytest.raises(InvalidSetupError, match=words):
        ask(curve, target=parse_target(target))


def test_a_target_in_per_cent_holds_for_shares_and_for_per_cent():
    shares = accuracy_curve()
    logged = accuracy_curve(values=100 * shares.values)
    said = [ask(c, target=parse_target("accuracy>=92%")).probability_at_end for c in (shares, logged)]
    assert said[0] == pytest.approx(said[1], abs=0.02)


def test_a_run_that_overfits_is_stopped_and_its_best_named():
    epochs = np.arange(1.0, 31)
    values = 1.2 + 0.9 * np.exp(-epochs / 4) + 0.02 * np.maximum(0.0, epochs - 9)
    curve = Curve(name="r", metric="val_loss", epochs=epochs, values=values, is_rising=False)
    advice = stop_advice(ask(curve, end_epoch=60), None)
    assert advice.should_stop
    assert "worse since its best" in advice.reason
    assert not stop_advice(ask(curve.first(9), end_epoch=60), None).should_stop


def test_a_score_without_a_known_top_may_have_any_target():
    epochs = np.arange(1.0, 21)
    curve = Curve(name="r", metric="reward", epochs=epochs, values=40 * epochs**0.5, is_rising=True)
    assert 0 <= ask(curve, target=parse_target("reward>=5000"), end_epoch=40).probability_at_end < 0.5


def test_word_errors_are_on_their_own_scale_whatever_the_first_value():
    epochs = np.arange(1.0, 31)
    values = 12 + 110 * epochs**-0.8  # per cent, above 100 at first
    curve = Curve(name="r", metric="eval_wer", epochs=epochs, values=values, is_rising=False)
    fraction = Curve(name="r", metric="eval_wer", epochs=epochs, values=values / 100, is_rising=False)
    once, hundred = ask(fraction, end_epoch=60).final, ask(curve, end_epoch=60).final
    assert hundred.value == pytest.approx(100 * once.value)
    assert curve.kind is MetricKind.ERROR_RATE


def test_a_metric_far_from_perfect_is_not_forecast_to_become_perfect():
    epochs = np.arange(1.0, 31)
    values = 0.40 - 0.35 * epochs**-0.5
    curve = Curve(name="r", metric="metrics/mAP50-95(B)", epochs=epochs, values=values, is_rising=True)
    found = ask(curve, schedule=parse_schedule("linear:epochs=100,min=0.01,warmup=3"))
    assert 0.33 < found.final.value < 0.48
    assert curve.kind is MetricKind.OVERLAP


def test_language_models_gain_less_from_a_drop_than_classifiers():
    epochs = 100.0 * np.arange(1, 31)
    schedule = parse_schedule("trapezoid:epochs=6000,decay_from=4200")
    loss = Curve(
        name="r",
        metric="val_loss",
        epochs=epochs,
        values=3.2 + 30 * epochs**-0.5,
        is_rising=False,
        unit="step",
    )
    stay, fall = (ask(loss, schedule=s) for s in (parse_schedule("constant:epochs=6000"), schedule))
    assert 0.9 * stay.final.value < fall.final.value < stay.final.value
    # The rate has stayed at its peak: the annealing law alone knows what its fall to zero brings.
    assert fall.weights["annealing 5%"] > 0.7 > stay.weights.get("annealing 5%", 0.0)


def test_a_constant_rate_is_a_schedule_like_any_other():
    """Training losses of a hyperbola at a constant rate, whose ends must lie in most of their 90 % intervals."""
    epochs, inside, probability = np.arange(1.0, 121), 0, []
    for seed in range(12):
        losses = 1 / (0.1 * epochs + 0.6) + 0.1
        noisy = losses * (1 + np.random.default_rng(seed).normal(0, 0.02, len(epochs)))
        found = ask(
            loss_curve(noisy[:60]),
            schedule=parse_schedule("constant:epochs=120"),
            target=parse_target(f"loss<={losses[93]:.5f}"),
        )
        inside += found.final.low_90 <= losses[-6:].mean() <= found.final.high_90
        probability.append(found.probability_at_end)
        assert not stop_advice(found, None).should_stop
    assert inside >= 11
    assert np.median(probability) > 0.5


def test_a_rate_that_follows_the_metric_is_said_to_be_unknown():
    curve = accuracy_curve(rates=np.where(np.arange(30) < 20, 0.1, 0.01))
    found = ask(curve, schedule=parse_schedule("reduce-on-plateau"), end_epoch=60)
    assert found.tier is Tier.CURVE
    assert any("reduced when the metric stalls" in note for note in found.notes)


def test_the_length_that_a_log_names_is_taken():
    curve = replace(accuracy_curve(), planned_end=80.0, notes=("3 rows were passed over",))
    found = ask(curve)
    assert found.end_epoch == 80
    assert "3 rows were passed over" in found.notes
    assert ask(replace(curve, planned_end=20.0)).end_epoch == 30


def test_a_changing_rate_without_a_schedule_has_the_interval_of_unknown_ones():
    curve = accuracy_curve(rates=0.95 ** np.arange(30))
    assert ask(curve, end_epoch=100).tier is Tier.CURVE
    assert ask(curve, schedule=parse_schedule("exponential:0.95"), end_epoch=100).tier is Tier.SCHEDULE


def test_a_constant_rate_needs_no_schedule():
    assert ask(accuracy_curve(rates=np.full(30, 0.1)), end_epoch=100).tier is Tier.CURVE


def test_an_end_behind_the_curve_and_a_contrary_target_are_refused():
    with pytest.raises(InvalidSetupError, match="whole length with --epochs"):
        ask(end_epoch=10)
    with pytest.raises(InvalidSetupError, match="disagree about whether larger is better"):
        ask(target=parse_target("accuracy<=0.9"))
    falling = Curve(name="s", metric="loss", epochs=np.arange(1.0, 9), values=np.ones(8), is_rising=False)
    with pytest.raises(InvalidSetupError, match="or the reverse"):
        ask(siblings=[falling])


def test_rows_must_rise_and_match():
    with pytest.raises(RecordError, match="rise from row to row"):
        Curve(name="r", metric="a", epochs=np.asarray([1.0, 1.0]), values=np.zeros(2), is_rising=True)
    with pytest.raises(RecordError, match="as many values as epochs"):
        Curve(name="r", metric="a", epochs=np.arange(3.0), values=np.zeros(2), is_rising=True)


def test_a_falling_metric_must_begin_above_zero():
    with pytest.raises(RecordError, match="must begin above zero"):
        error_scale([-1.0, -2.0], is_rising=False)


def test_lonely_outliers_go_and_drops_stay():
    rng = np.random.default_rng(0)
    values = np.where(np.arange(40) < 20, 0.5, 0.3) + rng.normal(0, 0.003, 40)
    values[11] = 2.0
    found, num = without_outliers(values)
    assert num == 1
    assert found[11] == pytest.approx(0.5, abs=0.01)
    np.testing.assert_array_equal(np.delete(found, 11), np.delete(values, 11))


def test_gaps_are_left_out_and_told():
    values = accuracy_curve().values.copy()
    values[5] = np.nan
    cleaned = clean(accuracy_curve(values=values))
    assert cleaned.num_missing == 1
    assert "1 rows without a number" in cleaned.notes[0]
    assert not cleaned.has_diverged


def test_the_schedule_decides_what_is_still_to_come():
    """Before any drop, a run that will drop its rate is forecast to end better than one that keeps it."""
    stay = ask(schedule=parse_schedule("constant:epochs=100")).final.value
    drop = ask(schedule=parse_schedule("step:40,80x0.1"), end_epoch=100).final.value
    assert drop > stay


def test_a_run_ahead_of_its_siblings_is_likelier_to_beat_them_and_saves_what_is_left():
    from forerun.jobs.forecasting.forecast_answer import decision_of

    finished = [power_run(0.2 + 0.02 * seed, seed=seed) for seed in range(3)]
    chances = []
    for floor in (0.05, 0.4):
        found = forecast_curve(power_run(floor, seed=9).first(50), TABLE, siblings=finished)
        decision = decision_of(found, finished, None)
        assert decision.saved_epochs == 50
        assert decision.saved_s is None
        assert decision.expected_gain >= 0
        chances.append(decision.probability_beats_best)
    assert chances[0] > 0.5 > 0.1 > chances[1]
    bare = decision_of(forecast_curve(power_run(0.1, seed=1).first(50), TABLE, end_epoch=100.0), [], None)
    assert bare.best_finished is None
    assert bare.probability_beats_best is None


def test_finished_runs_that_diverged_from_here_on_tell_of_this_one():
    good = power_run(0.1, seed=1)
    late, early = (replace(good, values=np.where(good.epochs > n, np.nan, good.values)) for n in (80, 20))
    assert diverged_later([good, late, early], 0.5) == [False, True]  # one was lost before
    bare, safe, one_of_two = (chance_to_diverge(d, 0.5) for d in ([], [False] * 9, [False, True]))
    assert 0 < safe.probability < bare.probability < 0.01 < 0.25 < one_of_two.probability < 0.5
    assert (one_of_two.num_diverged, one_of_two.num_finished) == (1, 2)
    # What was lost on its way is no finished run whose end or length counts.
    own = power_run(0.1, seed=2).first(50)
    alone, beside = (forecast_curve(own, TABLE, siblings=runs) for runs in ([good], [good, late]))
    assert beside.final == alone.final


def power_run(floor, seed):
    epochs = np.arange(1.0, 101)
    noise = np.random.default_rng(seed).normal(0, 0.003, 100)
    values = 1 - floor - (1 - floor) * epochs**-0.6 + noise
    return Curve(name=f"{seed}", metric="accuracy", epochs=epochs, values=values, is_rising=True)


def test_the_chance_to_win_knows_no_unit_and_falls_with_the_number_of_rivals():
    finished = [power_run(0.2 + 0.02 * seed, seed=seed) for seed in range(4)]
    run = power_run(0.19, seed=9).first(50)
    chance = chance_to_win(run, finished, 0.5)
    assert 0 < chance < chance_to_win(run, finished[:1], 0.5) < 1
    percent = [replace(curve, values=100 * curve.values) for curve in (run, *finished)]
    assert chance_to_win(percent[0], percent[1:], 0.5) == pytest.approx(chance)
    losses = [replace(c, metric="loss", is_rising=False, values=3 * (1 - c.values)) for c in (run, *finished)]
    assert chance_to_win(losses[0], losses[1:], 0.5) == pytest.approx(chance)
    assert chance_to_win(run, [], 0.5) is None
    diverged = replace(run, values=np.full(50, np.nan))
    assert chance_to_win(run, [diverged], 0.5) is None
