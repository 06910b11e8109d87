"""What README.md and docs/ promise: set-up commands, links, and examples that run."""

import os
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun.base.kept import KeptBytes
from forerun.surface.cli.main import app

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

MADE = ROOT / "docs" / "commands.md"
"""A page that is written when the site is built."""

FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
ROOMS = [
    "graph",
    "question",
    "tracing",
    "cost",
    "prediction",
    "search",
    "surface",
    "evidence",
    "script",
    "jobs",
    "adapters",
]
MODULE = re.compile(rf"`((?:{'|'.join(ROOMS)})(?:\.[a-z_]+)+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


SCRIPT = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
batch_size = parser.parse_args().batch_size
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(torch.randn(batch_size, 32)), torch.randint(10, (batch_size,))).backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: language, the file it stands for if it names one, and text."""

    language: str
    file: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text(encoding="utf-8"))]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def exists(target: Path) -> bool:
    return target.exists() or target.resolve() == MADE


def shell_commands(page: Path) -> list[str]:
    lines = [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]
    return [line for line in lines if line.startswith("forerun ")]


def refused_commands(page: Path) -> list[str]:
    """Commands that a page shows to be refused, in blocks of the language console."""
    return [line for block in blocks(page) if block.language == "console" for line in block.text.splitlines()]


@cache
def assert_runs(command: str, script: str) -> None:
    """Pages repeat each other's commands: one is run once, as long as the reader's training script is the same."""
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception}"
    assert result.stdout.strip(), f"{command} printed nothing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all pages, so that a model is traced once, with a training script of the reader's."""
    place = tmp_path_factory.mktemp("docs")
    (place / "train.py").write_text(SCRIPT, encoding="utf-8")
    # Calibrations are the pages' own, graphs those of all tests.
    traces = Path(os.environ["FORERUN_CACHE"], "traces")
    traces.mkdir(parents=True, exist_ok=True)
    (place / "cache").mkdir()
    (place / "cache" / "traces").symlink_to(traces)
    return place


@pytest.fixture(autouse=True)
def _work_there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FORERUN_CACHE", str(folder / "cache"))
    # "python train.py" means this environment's Python, as in an activated one.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    # An example that measures must not wait for another test that does.
    monkeypatch.setattr("tempfile.tempdir", str(folder))


def test_readme_has_exactly_two_set_up_commands():
    section = README.read_text(encoding="utf-8").partition("\n## Set up\n")[2].partition("\n## ")[0]
    commands = [text.strip().splitlines() for _, _, text in FENCE.findall(section)]
    assert [len(lines) for lines in commands] == [1, 1]
    assert " predict torchvision:resnet50 --on a100-" in commands[0][0]
    assert commands[1][0].endswith("-m pytest")


def test_readme_shows_the_real_output_of_its_first_command(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    (first, _), (shown,) = (
        [block.text for block in blocks(README) if block.language == language][:2]
        for language in ("sh", "text")
    )
    command = first.strip().partition("/bin/forerun ")[2]
    # It installs the core alone, so its answer says what traced the model.
    monkeypatch.setattr(import_module("forerun.tracing.trace"), "library_versions", lambda *_, **__: ())
    monkeypatch.setattr("forerun.prediction.models._models", KeptBytes(2**28))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, shlex.split(command))
    assert printed(result.stdout) == printed(shown)


def printed(text: str) -> list[str]:
    """Lines without the spaces at their end, and without dates."""
    return [DATE.sub("DATE", line.rstrip()) for line in text.strip().splitlines()]


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").split()) <= 700


def test_pages_are_short():
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    methods = [page for page in words if page.parent.name == "methods"]
    assert [name(page) for page in methods if words[page] > 1200] == []
    assert (
        sum(n for page, n in words.items() if page == README or page.is_relative_to(ROOT / "docs")) <= 40_000
    )


def test_readme_has_one_place_for_the_accuracy_table():
    text = README.read_text(encoding="utf-8")
    assert text.count("<!-- accuracy:begin -->") == text.count("<!-- accuracy:end -->") == 1
    assert text.index("<!-- accuracy:begin -->") < text.index("<!-- accuracy:end -->")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    targets = [t.partition("#")[0] for t in LINK.findall(page.read_text(encoding="utf-8"))]
    broken = [t for t in targets if t and "://" not in t and not exists(page.parent / t)]
    assert broken == []


@pytest.mark.parametrize("page", [p for p in PAGES if MODULE.search(p.read_text(encoding="utf-8"))], ids=name)
def test_modules_that_a_page_names_exist(page):
    """Pages refer to the docstrings of laws by the names of their modules, such as ``cost.time.law``."""
    names = set(MODULE.findall(page.read_text(encoding="utf-8")))
    assert [found for found in names if find_spec(f"forerun.{found}") is None] == []


def test_every_page_is_linked_from_another():
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
    }
    # The folder of decisions is linked as such and opens on its list.
    alone = [name(p) for p in PAGES if p not in (README, ROOT / "docs/decisions/README.md")]
    assert [page for page in alone if ROOT / page not in linked] == []


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=name)
def test_examples_run(page, folder):
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    values: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "python" and not block.file:
            exec(compile(block.text, name(page), "exec"), values)  # noqa: S102
    for command in shell_commands(page):
        assert_runs(command, (folder / "train.py").read_text(encoding="utf-8"))


def assert_refused(command: str) -> None:
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code in (1, 2), f"{command}\n{result.output}"
    assert re.match(r"error: .+[;:,] ?.+", result.stderr), f"{command}\n{result.stderr}"


@pytest.mark.parametrize("page", [p for p in PAGES if refused_commands(p)], ids=name)
def test_refused_questions_are_refused_with_a_way(page):
    for command in refused_commands(page):
        assert_refused(command)


def test_there_are_twenty_questions_each_with_a_command():
    text = (ROOT / "docs" / "how-to" / "index.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (?=\d+\. )", text, flags=re.MULTILINE)[1:]
    assert [int(part.split(".")[0]) for part in parts] == list(range(1, 21))
    assert [part for part in parts if "\nforerun " not in part] == []
