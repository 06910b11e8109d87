"""Schedules from words and from objects."""

import math

import numpy as np
import pytest

from forerun.base.errors import InvalidSetupError
from forerun.jobs.forecasting.schedule import (
    SCHEDULE_WORDS,
    followed_schedule,
    logged_schedule,
    parse_schedule,
    schedule_of,
)


def rates(text, num=90):
    return parse_schedule(text).rates(np.arange(1.0, num + 1))


def test_step_schedule_drops_after_its_milestones():
    found = rates("step:30,60,80x0.1")
    np.testing.assert_allclose(
        found[[0, 29, 30, 59, 60, 79, 80, 89]], [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )


def test_cosine_is_half_in_the_middle_and_ends_at_its_least():
    found = parse_schedule("cosine:epochs=90,min=0.01")
    assert found.num_epochs == 90
    assert found.rate(np.asarray([45.0]))[0] == pytest.approx(0.505)
    assert found.rate(np.asarray([90.0]))[0] == pytest.approx(0.01)


def test_warm_up_rises_from_zero_in_front_of_any_schedule():
    for words in ("cosine:epochs=90,warmup=5", "step:30x0.1,warmup=5", "constant:warmup=5"):
        found = parse_schedule(words)
        assert found.rate(np.asarray([0.0]))[0] == 0
        assert found.rate(np.asarray([5.0]))[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text", ["linear:epochs=50", "poly:epochs=50,power=2", "onecycle:epochs=50", "exponential:0.9"]
)
def test_rates_are_shares_between_zero_and_one(text):
    found = rates(text, 50)
    assert np.all((found >= 0) & (found <= 1))
    assert found[-1] < found.max()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cosin:epochs=90", "unknown schedule 'cosin:epochs=90'; did you mean cosine"),
        ("cosine", "needs its length"),
        ("cosine:epochs=0", "needs its length"),
        ("cosine:epochs=ten", "needs numbers, as in step:30,60x0.1, got 'ten'"),
        ("cosine:epochs=9,peak=2", "has no option peak"),
        ("step:60,30x0.1", "rising milestones"),
        ("step:30x2", "factor between 0 and 1"),
        ("step:", "rising milestones"),
        ("exponential:", "needs numbers"),
        ("exponential:1.5", "must be in"),
        ("onecycle:epochs=9,peak=1", "peak of a one-cycle"),
        ("constant:warmup=-1", "warmup of a schedule"),
        ("poly:epochs=nan", "needs numbers"),
    ],
)
def test_a_wrong_schedule_is_one_clear_message(text, words):
    with pytest.raises(InvalidSetupError, match=words):
        parse_schedule(text)


def test_an_unknown_word_lists_the_known_ones():
    with pytest.raises(InvalidSetupError) as caught:
        parse_schedule("triangular")
    assert all(word in str(caught.value) for word in SCHEDULE_WORDS)


def pytorch_optimizer():
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.2, momentum=0.9)


def test_a_pytorch_scheduler_is_followed_and_left_alone():
    from torch.optim.lr_scheduler import MultiStepLR

    optimizer = pytorch_optimizer()
    scheduler = MultiStepLR(optimizer, milestones=[3, 6], gamma=0.1)
    found = schedule_of(scheduler, 9).rates(np.arange(1.0, 10))
    np.testing.assert_allclose(found, [1] * 3 + [0.1] * 3 + [0.01] * 3)
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_a_cosine_of_pytorch_is_the_cosine_in_words():
    from torch.optim.lr_scheduler import CosineAnnealingLR

    found = schedule_of(CosineAnnealingLR(pytorch_optimizer(), T_max=50), 50).rates(np.arange(1.0, 51))
    words = parse_schedule("cosine:epochs=50").rate(np.arange(0.0, 50))
    np.testing.assert_allclose(found, words, atol=1e-9)


def test_a_scheduler_under_way_gives_the_rates_to_come():
    from torch.optim.lr_scheduler import StepLR

    optimizer = pytorch_optimizer()
    scheduler = StepLR(optimizer, step_size=4, gamma=0.5)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    found = schedule_of(scheduler, 8).rates(np.arange(1.0, 9))
    np.testing.assert_allclose(found, [1] * 4 + [0.5] * 4)


def test_a_function_of_the_step_is_a_schedule_as_keras_has_them():
    def decay(step):
        return 0.1 * 0.5 ** (step // 20)

    found = schedule_of(decay, 4, steps_per_epoch=10).rates(np.arange(1.0, 5))
    np.testing.assert_allclose(found, [1, 1, 0.5, 0.5])


def test_anything_else_is_refused():
    with pytest.raises(InvalidSetupError, match="got int"):
        schedule_of(3, 10)


def test_a_schedule_passes_through():
    once = parse_schedule("constant")
    assert schedule_of(once, 5) is once
    assert math.isclose(float(once.rates([1.0])[0]), 1.0)


@pytest.mark.parametrize(
    ("words", "at", "rate"),
    [
        ("trapezoid:epochs=100,decay_from=60", [30, 80, 99.999], [1.0, 0.505, 0.0]),
        ("wsd:epochs=100,decay_from=60,decay_to=80,min=0.1,warmup=10", [20, 60, 99], [1.0, 1.0, 0.1]),
        ("polynomial:epochs=10,power=2", [5], [(1 - 0.45) ** 2]),
        ("one-cycle:epochs=10", [3], [2.5 / 3]),
    ],
)
def test_words_that_people_use(words, at, rate):
    schedule = parse_schedule(words)
    epochs = np.arange(1.0, schedule.num_epochs + 1)
    found = np.interp(at, epochs, schedule.rates(epochs))
    np.testing.assert_allclose(found, rate, atol=0.02)


@pytest.mark.parametrize("words", ["trapezoid:epochs=90", "trapezoid:epochs=90,decay_from=80,decay_to=70"])
def test_a_trapezoid_needs_its_corner(words):
    with pytest.raises(InvalidSetupError, match="decay_from"):
        parse_schedule(words)


@pytest.mark.parametrize("words", ["reduce-on-plateau", "ReduceLROnPlateau", "reduce_on_plateau:epochs=50"])
def test_a_schedule_that_follows_the_metric_says_so(words):
    assert parse_schedule(words).follows_metric
    assert not parse_schedule("constant").follows_metric


@pytest.mark.parametrize(
    "words",
    [
        "constant:epochs=100",
        "linear:epochs=100,warmup=5",
        "linear:epochs=100,min=0.01,warmup=3",
        "cosine:epochs=100",
        "cosine:epochs=100,min=0.1,warmup=10",
        "exponential:0.97",
    ],
)
def test_logged_rates_are_continued_in_their_shape(words):
    epochs = np.arange(1.0, 101)
    rates = 3e-4 * parse_schedule(words).rate(epochs)
    found = logged_schedule(epochs[:40], rates[:40], 100.0)
    np.testing.assert_allclose(found.rate(epochs), rates / rates[:40].max(), atol=0.02)
    assert "logged rates" in found.notes[0]


def test_logged_rates_of_no_known_shape_stay_where_they_are():
    rates = np.where(np.arange(40) < 30, 1.0, 0.1)
    found = logged_schedule(np.arange(1.0, 41), rates, 100.0)
    np.testing.assert_allclose(found.rate(np.asarray([20.0, 60.0, 99.0])), [1.0, 0.1, 0.1])
    assert "the last one is kept" in found.notes[0]


@pytest.mark.parametrize("rates", [[0.0, 0.0], [np.nan, 0.1]])
def test_logged_rates_must_be_numbers_above_zero(rates):
    with pytest.raises(InvalidSetupError, match="needs numbers above zero"):
        logged_schedule(np.asarray([1.0, 2.0]), np.asarray(rates), 10.0)


STEPS = np.arange(10.0, 1001, 10)


@pytest.mark.parametrize(
    "words",
    [
        "linear:epochs=1000",
        "cosine:epochs=1000",
        "cosine:epochs=1000,min=0.1",
        "linear:epochs=1000,warmup=50",
    ],
)
def test_rates_that_fall_tell_where_the_run_ends(words):
    rates = 3e-4 * parse_schedule(words).rate(STEPS)
    found = followed_schedule(STEPS[:30], rates[:30], None)
    assert found.num_epochs == pytest.approx(1000, rel=0.01)
    np.testing.assert_allclose(found.rate(STEPS), rates / rates.max(), atol=0.02)


def test_rates_set_once_an_epoch_end_with_the_last_epoch():
    epochs = np.arange(1.0, 101)
    rates = 0.05 * (1 + np.cos(np.pi * (epochs - 1) / 100))
    assert followed_schedule(epochs[:30], rates[:30], None).num_epochs == 100


@pytest.mark.parametrize(
    ("rates", "end"),
    [
        (np.full(30, 0.1), None),
        (np.where(np.arange(30) < 20, 0.1, 0.01), None),
        (np.where(np.arange(30) < 20, 0.1, 0.01), 100.0),
        (np.arange(1.0, 31), 100.0),
        (0.1 * np.exp(-np.arange(30) / 20), None),
        (np.full(30, np.nan), None),
    ],
)
def test_rates_that_follow_no_shape_tell_nothing(rates, end):
    assert followed_schedule(np.arange(1.0, 31), rates, end) is None


def test_a_line_behind_a_warm_up_is_no_power():
    epochs = np.arange(1.0, 71)
    rates = 0.01 * (1 - 0.9 * (epochs - 1) / 70)
    rates[:4] = 0.003, 0.0066, 0.0097417, rates[4]  # as YOLOv5 logs them: one comes twice
    found = followed_schedule(epochs[:21], rates[:21], 70.0)
    assert "straight line" in found.notes[0]
    np.testing.assert_allclose(found.rate(epochs), rates / rates.max(), atol=0.002)


def test_a_cosine_that_began_before_the_first_evaluation():
    epochs = np.arange(1.0, 15)
    rates = 0.5 * (1 + np.cos(np.pi * (epochs - 0.3) / 13.7))
    found = followed_schedule(epochs[:5], rates[:5], 14.0)
    np.testing.assert_allclose(found.rate(epochs), rates / rates[0], atol=0.02)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("end", [20.0, 30.0, None])
def test_rates_of_either_end_of_an_epoch_are_continued_as_a_cosine(first, end):
    epochs = np.arange(1.0, 31)
    rates = 0.05 * (1 + np.cos(np.pi * (epochs - first) / 30))
    found = followed_schedule(epochs[:15], rates[:15], end)
    assert found.num_epochs == 30
    np.testing.assert_allclose(found.rate(epochs), rates / rates[0], atol=0.002)
    assert followed_schedule(epochs[:15], rates[:15], 40.0) is None  # its rate ends before
