import dataclasses
import json
import shlex
import sys
from html.parser import HTMLParser

import pytest
from estimate_cases import BARE, FULL
from typer.testing import CliRunner

import forerun
from forerun.base.errors import MissingExtraError
from forerun.surface.cli.main import app
from forerun.surface.report.document import command_of, html_document, markdown_document, read_answer

HOSTILE = dataclasses.replace(
    FULL,
    model="file.py:<script>alert(1)</script>",
    notes=("a | b <img src=x> & c", "x >= 1", r"\[free](https://a.example) [![b](c)"),
)


class Cells(HTMLParser):
    """Tags of a page, and the text of its cells and paragraphs."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_of_an_estimate_says_everything_once():
    page = Cells(html_document(FULL))
    for title in ("What it takes", "Memory at its peak", "Where a step goes", "Rests on"):
        assert page.words.count(title) == 1
    assert page.words[page.words.index("step") + 1] == "45.2 ms (39.1 to 52.0 ms)"
    assert page.words[page.words.index("weights") + 1] == "256 MiB"
    assert page.tags.count("table") == 3
    assert "the last step of an epoch has 15 samples" in page.words


def test_what_is_not_known_makes_no_row():
    assert "cost of the job" in Cells(html_document(FULL)).words
    assert "cost of" not in " ".join(Cells(html_document(BARE)).words)
    assert "| cost" not in markdown_document(BARE)


def test_names_of_others_are_text_not_html():
    page = html_document(HOSTILE)
    assert not {"script", "img"} & set(Cells(page).tags)
    assert "a | b <img src=x> & c" in Cells(page).words
    text = markdown_document(HOSTILE)
    assert "<" not in text
    assert r"\\\[free\](https://a.example) \[!\[b\](c)" in text  # brackets without a link
    assert "file.py:&lt;script&gt;" in text
    assert r"a \| b &lt;img src=x&gt; &amp; c" in text


def test_tables_of_markdown_have_a_line_per_row():
    lines = markdown_document(FULL).splitlines()
    head = lines.index("| quantity | value (90 % interval) |")
    assert lines[head + 1] == "| --- | --- |"
    assert lines[head + 2] == "| step | 45.2 ms (39.1 to 52.0 ms) |"
    assert lines[head - 1] == ""


def test_the_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forerun\[report\]'"):
        html_document(FULL)


def test_the_command_of_a_run_asks_about_the_same_run():
    asked = forerun.predict(
        "cifar-resnet:8", device="2xt4", batch_size=64, precision="amp", compile=True, fused_attention=False,
        strategy="fsdp", dataset="cifar10", epochs=3, price_usd_per_hour=2.0, loader_ms=1.0, recompute="full",
    )  # fmt: skip
    words = shlex.split(command_of(asked.run))
    assert words[:2] == ["forerun", "predict"]
    done = CliRunner().invoke(app, [*words[1:], "--json"])
    assert json.loads(done.stdout)["run"] == asked.as_dict()["run"]
    assert html_document(asked).count("<svg") == 2


def test_a_curve_of_scaling_is_read_back_and_asked_again(tmp_path):
    asked = forerun.scale(
        "cifar-resnet:8", device="1x4xt4", num_devices=[1, 4], scaling="both", batch_size=64
    )
    curve = read_answer(json.dumps(asked.as_dict()))
    assert curve == asked
    page = html_document(curve)
    assert page.count("<svg") == 1
    assert {"Weak scaling: batch size 64 on every device", "Strong scaling: global batch size 64"} <= set(
        Cells(page).words
    )
    command = markdown_document(curve).partition("## Ask again\n\n")[2].partition("\n")[0]
    done = CliRunner().invoke(app, [*shlex.split(command)[1:], "--json"])
    assert json.loads(done.stdout) == asked.as_dict()
    file = tmp_path / "scale.json"
    file.write_text(json.dumps(asked.as_dict()), encoding="utf-8")
    refused = CliRunner().invoke(app, ["report", str(file), "--format", "slurm-time"])
    assert refused.exit_code == 2
    assert "got a curve of scaling" in refused.output
