"""Laws of the choice among trials that can be paused."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.base.errors import ForecastError, InvalidSetupError
from forerun.jobs.forecast import forecast_next
from forerun.jobs.forecasting.curve import Curve, error_scale
from forerun.jobs.forecasting.next_trial import (
    STAGES,
    chosen,
    next_stage,
    next_trial,
    stage_logs,
    standings_of,
)


def trial(floor, num=40, seen=40, name="", *, metric="val_loss", is_rising=False):
    epochs = np.arange(1.0, num + 1)
    values = floor + 0.5 * epochs**-0.7
    values = 1 - values if is_rising else values
    return Curve(
        name=name or f"{floor:g}",
        metric=metric,
        epochs=epochs[:seen],
        values=values[:seen],
        is_rising=is_rising,
    )


def steps_of(floors, budget=None):
    """Steps of a search among whole trials, one waiting at a time: trial and share."""
    trials, at = [trial(floor) for floor in floors], [0.0] * len(floors)
    taken = [(0, STAGES[0])]
    at[0] = STAGES[0]
    while min(at) < 1:
        begun = [i for i, share in enumerate(at) if share]
        curves = [trials[i].first(round(at[i] * 40)) for i in begun]
        waiting = len(begun) < len(floors)
        found = next_trial(curves, [40.0] * len(curves), num_new=int(waiting), budget=budget)
        names = [curve.name for curve in curves]
        place = begun[names.index(found.trial)] if found.trial else len(begun)
        assert found.until == next_stage(at[place])
        at[place] = found.until
        taken.append((place, found.until))
    return taken


def test_a_search_takes_every_stage_once_and_the_best_trial_is_whole_first():
    floors = [0.3, 0.25, 0.1, 0.35, 0.2, 0.4]
    taken = steps_of(floors)
    assert sorted(taken) == sorted((i, stage) for i in range(6) for stage in STAGES)
    assert next(i for i, share in taken if share == 1) == 2


def test_the_choice_knows_neither_unit_nor_direction():
    floors, seen = (0.3, 0.1, 0.2), (40, 4, 8)
    falling = [trial(f, seen=n) for f, n in zip(floors, seen, strict=True)]
    rising = [
        trial(f, seen=n, metric="val_accuracy", is_rising=True) for f, n in zip(floors, seen, strict=True)
    ]
    scaled = [
        Curve(name=t.name, metric=t.metric, epochs=t.epochs, values=7 * t.values, is_rising=False)
        for t in falling
    ]
    base = next_trial(falling, [40.0] * 3, num_new=1)
    for others in (rising, scaled):
        found = next_trial(others, [40.0] * 3, num_new=1)
        assert (found.trial, found.until) == (base.trial, base.until)
        assert [row.name for row in found.standings] == [row.name for row in base.standings]
    assert next_trial(rising, [40.0] * 3).standings[0].high_90 <= 1
    assert base.standings[-1].index is None
    assert base.standings[-1].done == 1


def test_a_budget_goes_to_trials_that_it_finishes():
    index, done = np.asarray([-2.0, -1.0, np.inf]), np.asarray([0.1, 0.7, 1.0])
    assert chosen(index, done) == 0
    assert chosen(index, done, budget=0.5) == 1
    assert chosen(index, done, budget=0.2) == 0
    assert chosen(index[2:], done[2:]) is None


def test_of_equal_means_the_less_certain_trial_is_worth_more_and_the_better_mean_more():
    logs = np.full((4, len(STAGES)), np.nan)
    logs[:, 0] = (-1.0, -1.2, -1.1, -0.9)
    logs[3, 1:] = -0.9 - 0.1 * np.arange(1, len(STAGES))
    done = np.asarray([0.1, 0.1, 0.1, 1.0])
    found = standings_of(logs, done)
    assert found.index[1] < found.index[2] < found.index[0] < found.index[3] == np.inf
    assert found.spread[3] == 0
    assert found.mean[3] == pytest.approx(logs[3, -1])
    # Dear work is left to the trials nearest their end, cheap work tries more.
    assert np.all(
        standings_of(logs, done, budget=100.0).index[:3] < standings_of(logs, done, budget=1.0).index[:3]
    )


def test_a_trial_in_nan_comes_last_and_none_at_all_is_refused():
    lost = Curve(
        name="lost", metric="val_loss", epochs=np.arange(1.0, 5.0), values=np.asarray([0.5, 3, np.nan, np.nan]),
        is_rising=False,
    )  # fmt: skip
    found = next_trial([trial(0.2, seen=4), trial(0.3, seen=4), lost], [40.0] * 3)
    assert found.standings[-1].name == "lost"
    assert found.trial == "0.2"
    with pytest.raises(ForecastError, match="got none; start one"):
        next_trial([], [])


def test_logs_in_a_folder_say_which_runs_next(tmp_path):
    for name, floor, seen in (("a", 0.3, 40), ("b", 0.1, 4), ("c", 0.35, 4)):
        curve = trial(floor, seen=seen)
        rows = [f"{e:g},{v}" for e, v in zip(curve.epochs, curve.values, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["epoch,val_loss", *rows]))
    found = forecast_next(tmp_path, epochs=40)
    assert (found.trial, found.until) == ("b.csv", 0.2)
    assert forecast_next(tmp_path, epochs=40, budget=0.01).trial == "b.csv"
    with pytest.raises(InvalidSetupError, match="got none; give --epochs"):
        forecast_next(tmp_path)
    with pytest.raises(InvalidSetupError, match=r"a\.csv: .* 40 epochs or more, got 30; correct"):
        forecast_next(tmp_path, epochs=30)
    with pytest.raises(InvalidSetupError, match="0 or more waiting trials"):
        forecast_next(tmp_path, epochs=40, waiting=-1)


def test_a_trial_first_looked_at_late_had_that_error_before():
    late = Curve(
        name="late",
        metric="loss",
        epochs=np.asarray([3.0, 6.0]),
        values=np.asarray([0.5, 0.4]),
        is_rising=False,
    )
    logs = stage_logs(late, error_scale([1.0], False), 10.0)
    np.testing.assert_allclose(np.exp(logs[:4]), [0.5, 0.5, 0.5, 0.5])
    assert np.isnan(logs[4:]).all()
