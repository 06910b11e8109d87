"""Lengths of samples from laws and files."""

import json
import math

import numpy as np
import pytest

from forerun.base.errors import UsageError
from forerun.question.job import CHARACTERS_PER_TOKEN, read_lengths
from forerun.question.run import Run


def test_a_law_has_the_quantiles_that_it_names():
    found = read_lengths("lognormal:median=600,p95=3000,max=8192")
    assert np.percentile(found.tokens, [50, 95]) == pytest.approx([600, 3000], rel=0.01)
    assert max(found.tokens) == 8192
    assert found.num_samples is None


def test_files_hold_counts_or_texts(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("id,length\n1,10\n2,30\n", encoding="utf-8")
    assert read_lengths(str(table)).tokens == (10, 30)
    table.write_text("7\n9\n", encoding="utf-8")
    assert read_lengths(str(table)).tokens == (7, 9)
    lines = tmp_path / "a.jsonl"
    chat = {"messages": [{"role": "user", "content": "a" * 400}]}
    lines.write_text(
        "\n".join(map(json.dumps, [{"input_ids": [1, 2, 3]}, {"num_tokens": 5}, chat])), encoding="utf-8"
    )
    assert read_lengths(str(lines)).tokens == (3, 5, math.ceil(404 / CHARACTERS_PER_TOKEN))


def test_a_file_says_how_many_samples_an_epoch_has(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("10\n20\n30\n", encoding="utf-8")
    run = Run.of("llama-3.2-1b", device="l40s", lengths=str(table), epochs=2)
    assert (run.job.num_samples, run.job.num_epochs) == (3, 2)
    again = Run.of("llama-3.2-1b", device="l40s", lengths=str(table), batching="packed", dataset_size=12)
    assert again.job.num_samples == 12
    assert again.json_fields()["batching"] == "packed"


@pytest.mark.parametrize("text", ["length\n100\n-5\n", "100\ninf\n", "100\nnan\n"])
def test_counts_that_no_sample_has_are_refused(text, tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"lengths\.csv"):
        read_lengths(str(path))


def test_lengths_are_a_list_of_numbers_too_alone_over_http():
    from pydantic import ValidationError

    from forerun.surface.web.questions import PredictBody

    asked = {"model": "llama-3.2-1b", "device": "l40s"}
    run = Run.of(**PredictBody(**asked, lengths=[10, 30], epochs=2).arguments())
    assert run == Run.of(**asked, lengths="10,30", epochs=2)
    assert (run.job.num_samples, read_lengths(run.samples.lengths).tokens) == (2, (10, 30))
    assert PredictBody(**asked, lengths="lognormal:median=600,p95=3000").lengths
    for wrong in ("/etc/passwd", "data.jsonl", [0], []):
        with pytest.raises(ValidationError):
            PredictBody(**asked, lengths=wrong)
    with pytest.raises(UsageError, match="at least one token"):
        read_lengths("5,0")


@pytest.mark.parametrize("words", ["lognormal:median=600", "lognormal:median=600,p95=3", "/nowhere.csv"])
def test_laws_that_say_nothing_and_missing_files_are_refused(words):
    with pytest.raises(UsageError, match="lognormal:median=600,p95=3000"):
        read_lengths(words)
    with pytest.raises(UsageError):
        Run.of("llama-3.2-1b", device="l40s", batching="packed")
