"""The tables of options in docs/commands.md are those of the commands."""

from pathlib import Path

import pytest

from forerun.errors import FailureError
from studies.commands.option_tables import option_tables, with_option_tables

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_of_commands_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert with_option_tables(text) == text
    for command in (
        "predict",
        "scale",
        "plan",
        "tune",
        "forecast",
        "measure curve",
        "measure grid",
        "measure model",
    ):
        assert f"<!-- options of forerun {command} -->" in text


def test_a_table_out_of_date_is_renewed_and_told(tmp_path):
    page = tmp_path / "commands.md"
    page.write_text("<!-- options of forerun predict -->\nold\n<!-- end of options -->\n", encoding="utf-8")
    with pytest.raises(FailureError, match="out of date"):
        option_tables(page, check=True)
    option_tables(page)
    assert "| `--batch-size <int>` | Batch size of one device" in page.read_text(encoding="utf-8")
    option_tables(page, check=True)
