"""The notebooks as they are kept; ``pytest --nbmake notebooks`` runs them."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_there_are_six_and_their_page_names_them():
    page = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert [path.stem for path in NOTEBOOKS] == [
        "01_baseline",
        "02_collect",
        "03_regressor",
        "04_what_if",
        "05_keras",
        "06_scripts",
    ]
    assert all(f"({path.name})" in page for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_light_and_without_outputs(path):
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    assert path.stat().st_size < 20_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_can_be_parsed_and_names_no_place_of_one_machine(path):
    for cell in cells(path, "code"):
        text = "".join(cell["source"])
        ast.parse("\n".join("pass" if line.startswith("!") else line for line in text.splitlines()))
        assert re.search(r"(?<![\w.])/(?:home|root|tmp|work|Users)/", text) is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_what_it_is_and_stays_small_by_default(path):
    first = "".join(cells(path, "markdown")[0]["source"])
    assert first.startswith(f"# {int(path.stem[:2])}. ")
    assert "\nFULL = False" in "".join(cells(path, "code")[0]["source"])
