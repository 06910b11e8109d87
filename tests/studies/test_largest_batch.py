"""The search for the largest batch, against memories of known size."""

from hypothesis import given, settings
from hypothesis import strategies as st

from studies.suite.session import largest_batch, next_batch_to_try


@settings(max_examples=200, deadline=None)
@given(truth=st.integers(1, 5000), error=st.floats(0.6, 1.7))
def test_the_bracket_holds_the_truth_and_is_narrow(truth, error):
    tried = largest_batch(lambda size: size <= truth, max(1, round(truth * error)))
    assert len(tried) <= 12
    fitted = max(size for size, fits in tried.items() if fits)
    failed = min(size for size, fits in tried.items() if not fits)
    assert fitted <= truth < failed
    assert failed - fitted <= max(1, 0.06 * fitted)


@given(truth=st.integers(20, 5000))
def test_a_right_guess_takes_two_or_three_runs(truth):
    assert len(largest_batch(lambda size: size <= truth, truth)) <= 3


def test_where_not_even_one_sample_fits_the_search_ends_at_one():
    tried = largest_batch(lambda size: False, 40)
    assert not any(tried.values())
    assert min(tried) == 1 or len(tried) == 12


def test_what_was_tried_is_not_tried_again():
    asked = []

    def fits(size):
        asked.append(size)
        return size <= 100

    first = largest_batch(fits, 100)
    num_asked = len(asked)
    assert largest_batch(fits, 100, known=first) == first
    assert len(asked) == num_asked


def test_no_answer_ends_the_search_with_what_there_is():
    answers = iter([True, None])
    assert largest_batch(lambda size: next(answers), 8) == {8: True}


def test_a_smaller_batch_that_failed_ends_the_search():
    # Memory that was short for another reason: no bracket can be had from it.
    assert next_batch_to_try({10: True, 8: False}, 10) is None
