import pytest
from command_line import invoke
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError
from forerun.question.devices.prices import parse_price_usd_per_hour
from forerun.surface.cli.predict import plot_batch_sizes
from forerun.surface.cli.settings import parse_input_shape


@pytest.mark.parametrize(
    "text", ["1.89", "1.89/h", "$1.89/h", " 1.89 / hour ", "1.89 USD/h", "$ 1.89", "1.89$/hr"]
)
def test_a_price_may_be_written_in_the_usual_ways(text):
    assert parse_price_usd_per_hour(text) == 1.89


@pytest.mark.parametrize("text", ["", "abc", "-1/h", "1.89/day", "1.89xyz/h", "1,89/h", "nan", "inf", "1e3"])
def test_anything_else_is_no_price(text):
    with pytest.raises(InvalidSetupError, match=r"such as 1\.89/h"):
        parse_price_usd_per_hour(text)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5).map(tuple))
def test_shape_round_trip(shape):
    assert parse_input_shape(",".join(map(str, shape))) == shape
    assert parse_input_shape(" x ".join(map(str, shape))) == shape


@pytest.mark.parametrize("text", ["", "3,x", "3;4", "-3,4", "3.5", ",3", "3,,4"])
def test_anything_else_is_no_shape(text):
    with pytest.raises(InvalidSetupError, match="such as 3,224,224"):
        parse_input_shape(text)


@given(st.integers(1, 10**6), st.one_of(st.none(), st.floats(1, 1e6)))
def test_plot_holds_the_batch_asked_about_and_stays_small(batch_size, largest):
    sizes = plot_batch_sizes(batch_size, largest)
    assert batch_size in sizes
    assert sizes == tuple(sorted(set(sizes)))
    assert 2 <= len(sizes) <= 24


def test_plot_shows_the_first_batch_that_no_longer_fits():
    assert plot_batch_sizes(32, 391.0) == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    assert plot_batch_sizes(24, None) == (1, 2, 4, 8, 16, 24, 32, 64, 128)


@pytest.mark.parametrize("verb", ["predict", "plan", "scale", "layouts", "advise", "diagnose"])
def test_the_help_of_a_question_is_short_and_the_rest_is_one_option_away(verb):
    short, whole = invoke(verb, "--help").stdout, invoke(verb, "--help-all").stdout
    assert len(short.splitlines()) <= (65 if verb == "predict" else 75)
    assert "--precision" in short
    assert f"forerun {verb} " in short.partition("Examples:")[2]
    assert "--help-all shows all" in short
    assert "--bucket-mb" not in short
    assert "--bucket-mb" in whole
