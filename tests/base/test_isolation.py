"""A child answers, speaks while it works, and leaves nothing behind."""

import multiprocessing
import os
import signal
import time

import psutil
import pytest

from forerun.base.errors import InvalidSetupError, IsolationError
from forerun.base.isolation import (
    Child,
    EndedError,
    LateError,
    TimeLimit,
    error_from,
    in_worker,
    replies,
    tell,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="children of these tests are forked")


@pytest.fixture
def child():
    made = Child(multiprocessing.get_context("fork"))
    yield made
    made.close()


def doubled(number):
    for part in range(number):
        tell(part)
    return 2 * number, in_worker()


def refused():
    raise InvalidSetupError("layers must be positive")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def after(seconds):
    time.sleep(seconds)
    return seconds


def kept_from_the_processor(rounds, work_s, kept_s):
    for _ in range(rounds):
        end_s = time.process_time() + work_s
        while time.process_time() < end_s:
            pass
        time.sleep(kept_s)


def test_time_counts_that_the_work_has_spent_on_processors(child):
    begin_s = time.monotonic()
    # Little work within ten times the limit, also where ten others share the processors.
    child.ask(kept_from_the_processor, 4, 0.02, 0.3, timeout_s=1.0, counts_cpu=True)
    assert time.monotonic() - begin_s > 1.0
    with pytest.raises(LateError, match=r"0\.3 s"):
        child.ask(kept_from_the_processor, 10_000, 0.05, 0.15, timeout_s=0.3, counts_cpu=True)
    other = Child(multiprocessing.get_context("fork"))
    try:
        begin_s = time.monotonic()
        with pytest.raises(LateError):  # it waits, which no more time would help
            other.ask(after, 30.0, timeout_s=0.2, counts_cpu=True)
        assert time.monotonic() - begin_s < 5.0
    finally:
        other.close()


def test_work_that_is_kept_from_the_processors_has_ten_times_its_limit():
    begin_s = time.monotonic()
    limit = TimeLimit(0.2, lambda: 0.08 * (time.monotonic() - begin_s))  # it gets little of one
    while not limit.is_over():
        time.sleep(0.01)
    assert 1.9 < time.monotonic() - begin_s < 4.0


def test_work_speaks_while_it_is_done_and_is_answered(child):
    said = []
    reply = child.ask(doubled, 3, timeout_s=60.0, on_message=said.append)
    assert (reply.result, reply.error, said) == ((6, True), "", [0, 1, 2])
    assert not in_worker()


def test_an_error_comes_back_with_its_class_and_text(child):
    reply = child.ask(refused, timeout_s=60.0)
    error = error_from(reply.error, reply.text)
    assert type(error) is InvalidSetupError
    assert str(error) == "layers must be positive"
    assert "refused" in reply.trace
    assert type(error_from("NoSuchError", "it ended")) is IsolationError


def test_death_and_lateness_are_told_apart(child):
    with pytest.raises(LateError, match=r"0\.2 s"):
        child.ask(after, 30.0, timeout_s=0.2)
    other = Child(multiprocessing.get_context("fork"))
    try:
        with pytest.raises(EndedError) as ended:
            other.ask(killed, timeout_s=60.0)
    finally:
        other.close()
    assert (ended.value.exit_code, ended.value.signal_name) == (-signal.SIGKILL, "SIGKILL")
    assert EndedError(3).signal_name == ""


def test_answers_of_several_come_as_they_are_ready_and_the_dead_one_is_named(child):
    other = Child(multiprocessing.get_context("fork"))
    try:
        child.begin(after, 1.0)
        other.begin(after, 0.0)
        assert [(number, reply.result) for number, reply in replies([child, other])] == [(1, 0.0), (0, 1.0)]
        child.begin(after, 30.0)
        other.begin(killed)
        with pytest.raises(EndedError) as ended:
            list(replies([child, other], timeout_s=60.0))
        assert ended.value.number == 1
    finally:
        other.close()


def test_a_closed_child_is_gone():
    made = Child(multiprocessing.get_context("fork"))
    pid = made.pid
    made.close()
    assert not psutil.pid_exists(pid)
