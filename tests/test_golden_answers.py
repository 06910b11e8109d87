"""Questions over all verbs have the answers that are kept: a change of the code changes none that it does not mean to.

How to ask anew: ``golden/renew.py``; what was changed on purpose: ``golden/CHANGES.md``.
"""

import json

import pytest

from golden.asking import ANSWERS, answer_file, ask, differences, folder_of_questions, question_names

ADDED_KEYS = {"run", "fits", "batch_size_global"} | {
    "num_trainable_parameters", "num_steps", "tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu", "parallelism",
    "settings", "unpriced", "passes", "generation", "shown_memory_bytes",
}  # fmt: skip
"""Keys that answers may have beyond those that are kept: the question, the verdict and batch of a scaling point, the
trained parameters, the steps of the job, the figures of token models, the stages of a
layout, the passes and the generation of a step, the memory that the driver shows, the settings that a plan searched
and its devices without a price."""

MOST_BYTES = 1_000_000
"""Help texts of all verbs are 107 kB of it, plans 220 kB."""


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory):
    with folder_of_questions(tmp_path_factory.mktemp("questions")):
        yield


@pytest.mark.parametrize("name", question_names())
def test_the_answer_is_the_one_that_is_kept(name):
    kept = json.loads(answer_file(name).read_text(encoding="utf-8"))
    found = differences(kept, ask(name), ADDED_KEYS)
    assert not found, f"{len(found)} differences: " + "; ".join(found[:10])


def test_every_answer_belongs_to_a_question_and_all_are_small():
    files = list(ANSWERS.glob("*"))
    assert sorted(path.stem for path in files) == sorted(question_names())
    assert sum(path.stat().st_size for path in files) < MOST_BYTES


@pytest.mark.parametrize(
    ("kept", "new", "place"),
    [
        ({"a": 1.0}, {"a": 1.0 + 5e-6}, ".a: 1.0 before"),
        ({"a": [1.0, 2.0]}, {"a": [1.0]}, ".a: 2 entries before, 1 now"),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, ".a.b: 'x' before, 'y' now"),
        ({"a": 10_000_000}, {"a": 10_000_001}, ".a: 10000000 before"),
        ({"a": True}, {"a": 1}, ".a: True before"),
        ({"a": None}, {"a": 0.0}, ".a: None before"),
        ({"a": 1}, {}, ".a: gone"),
        ({}, {"a": 1}, ".a: new"),
    ],
)
def test_differences_are_found(kept, new, place):
    (found,) = differences(kept, new)
    assert found.startswith(place)


def test_what_is_close_enough_and_what_was_added_are_no_differences():
    assert differences({"a": [1.0, 0.0, 2]}, {"a": [1.0 + 5e-7, 1e-13, 2.0]}) == []
    assert differences({"a": [{}]}, {"a": [{"run": 1}]}, {"run"}) == []
