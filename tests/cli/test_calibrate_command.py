"""``forerun calibrate``: what is refused, in one line each."""

import pytest
from command_line import invoke


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--framework", "jax"), "expected framework pytorch or keras, got 'jax'"),
        (("--minutes", "0.1"), "half a minute or more"),
        (("--framework", "keras", "--from", "nothing.sqlite", "--device", "rtx-4070"), "nothing.sqlite"),
    ],
)
def test_mistakes_are_one_line_each(words, told):
    failed = invoke("calibrate", *words, "--json")
    assert failed.exit_code in (1, 2)
    assert failed.stdout == ""
    assert len(failed.stderr.strip().splitlines()) == 1
    assert told in failed.stderr
