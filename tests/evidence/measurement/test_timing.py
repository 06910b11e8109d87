"""Timing against a clock whose every reading is known."""

import time

import pytest

from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.measurement.runners.timing import Repetitions, time_repetitions


class Machine:
    """A device that works behind the back of the clock: a step only queues, ``synchronise`` waits."""

    def __init__(self, durations_s):
        self._durations_s = durations_s
        self.now_s = 100.0
        self.num_steps = 0
        self._queued_s = 0.0

    def step(self):
        self._queued_s += self._durations_s(self.num_steps)
        self.num_steps += 1

    def synchronise(self):
        self.now_s += self._queued_s
        self._queued_s = 0.0

    def clock(self):
        return self.now_s


def timed_on(machine, **settings):
    return time_repetitions(machine.step, machine.synchronise, Protocol(**settings), clock=machine.clock)


def test_each_repetition_is_the_time_of_its_own_step():
    machine = Machine(lambda i: 1.0 + 0.0001 * (i % 2))
    timed = timed_on(machine, num_repetitions=4, window=3, max_seconds=100)
    assert timed.is_stationary
    assert len(timed.warm_up_s) == 6
    assert timed.warm_up_s[:2] == pytest.approx((1.0, 1.0001))
    assert timed.repetitions_s == pytest.approx((1.0, 1.0001, 1.0, 1.0001))
    assert machine.num_steps == 10


def test_work_queued_before_is_not_charged_to_the_first_repetition():
    machine = Machine(lambda i: 1.0)
    machine.step()
    machine.step()
    assert timed_on(machine, num_repetitions=3, window=3).warm_up_s[0] == pytest.approx(1.0)


def test_the_warm_up_lasts_until_the_times_have_settled():
    timed = timed_on(Machine(lambda i: 5.0 if i < 12 and i % 3 == 0 else 1.0 + 8 * 0.5**i), max_seconds=1e6)
    assert timed.is_stationary
    assert 10 <= len(timed.warm_up_s) < 60
    assert max(timed.repetitions_s) < 1.05


def test_a_step_that_never_settles_is_timed_all_the_same_and_said_to_be_unsettled():
    timed = timed_on(Machine(lambda i: 1.1**i), max_warm_up=20, num_repetitions=5, max_seconds=1e9)
    assert (len(timed.warm_up_s), len(timed.repetitions_s)) == (20, 5)
    assert not timed.is_stationary


@pytest.mark.parametrize("min_warm_up", [3, 5])
def test_slow_steps_get_the_least_of_both(min_warm_up):
    timed = timed_on(Machine(lambda i: 40.0), min_warm_up=min_warm_up, max_seconds=30)
    assert (len(timed.warm_up_s), len(timed.repetitions_s)) == (min_warm_up, 3)
    assert timed.is_stationary


def test_too_few_repetitions_to_tell_are_not_called_stationary():
    timed = timed_on(Machine(lambda i: 40.0), min_warm_up=1, max_seconds=30)
    assert (len(timed.warm_up_s), len(timed.repetitions_s)) == (1, 3)
    assert not timed.is_stationary


def test_slow_steps_that_still_change_are_not_called_stationary():
    assert not timed_on(Machine(lambda i: 40.0 * 0.8**i), max_seconds=30).is_stationary


def test_the_timed_repetitions_stop_when_their_time_is_up():
    timed = timed_on(Machine(lambda i: 1.0), num_repetitions=1000, max_seconds=20)
    assert len(timed.repetitions_s) == 20


def test_no_warm_up_can_be_asked_for():
    timed = timed_on(Machine(lambda i: 1.0), min_warm_up=0, max_warm_up=0, num_repetitions=12)
    assert timed.warm_up_s == ()
    assert timed.is_stationary


def test_the_real_clock_sees_a_real_wait():
    timed = time_repetitions(lambda: time.sleep(0.002), lambda: None, Protocol(num_repetitions=3, window=3))
    assert min(timed.repetitions_s) >= 0.002


def test_an_error_of_the_step_goes_through():
    with pytest.raises(ZeroDivisionError):
        time_repetitions(lambda: 1 / 0, lambda: None, Protocol())


def test_when_the_call_returned_is_told_apart_from_when_the_device_was_done():
    machine = Machine(lambda i: 1.0)
    timed = timed_on(machine, num_repetitions=4, window=3)
    assert timed.returned_s == (0.0,) * 4  # a step only queues
    assert timed.repetitions_s == pytest.approx((1.0,) * 4)


def test_both_ends_of_the_timed_repetitions_are_told():
    machine = Machine(lambda i: 1.0)
    seen = []
    timed = time_repetitions(
        machine.step,
        machine.synchronise,
        Protocol(num_repetitions=5, window=3),
        clock=machine.clock,
        at_both_ends=lambda: seen.append(machine.now_s),
    )
    assert seen[1] - seen[0] == pytest.approx(sum(timed.repetitions_s))
    assert seen[0] == pytest.approx(100.0 + sum(timed.warm_up_s))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_repetitions": 4, "window": 3, "max_seconds": 100},
        {"num_repetitions": 50, "window": 3, "max_seconds": 12},
        {"num_repetitions": 3, "min_warm_up": 1, "max_warm_up": 2, "window": 3, "max_seconds": 100},
    ],
)
def test_a_loop_that_is_not_ours_is_timed_by_the_same_rules(settings):
    def duration_s(i):
        return 1.0 + (2.0 if i == 0 else 0.0001 * (i % 2))

    expected = timed_on(Machine(duration_s), **settings)
    machine = Machine(duration_s)
    taken = Repetitions(Protocol(**settings), clock=machine.clock)
    is_done = False
    while not is_done:
        time_s = duration_s(machine.num_steps)
        machine.step()
        machine.synchronise()
        is_done = taken.add(time_s)
    assert taken.warm_up_s == pytest.approx(expected.warm_up_s)
    assert taken.repetitions_s == pytest.approx(expected.repetitions_s)
    assert taken.is_stationary == expected.is_stationary
