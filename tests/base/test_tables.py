"""Tables of a user: rows that are right, and refusals that name the place."""

import pytest
from pydantic import BaseModel, ConfigDict, Field

from forerun.base.errors import CatalogError, RecordError
from forerun.base.tables import checked_table, read_rows, read_toml


class Limits(BaseModel):
    model_config = ConfigDict(extra="forbid")
    low: float = Field(ge=0, description="a number, zero or more")


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")
    num_devices: int = Field(ge=1, description="a whole number above zero")
    step_time_s: float = Field(gt=0, description="a positive number")
    name: str = ""


class Table(BaseModel):
    limits: Limits = Field(description="a table")


def rows(tmp_path, text):
    path = tmp_path / "points.csv"
    path.write_text(text, encoding="utf-8")
    return read_rows(path, Point)


def test_rows_are_read_without_spaces_marks_and_empty_cells(tmp_path):
    found = rows(tmp_path, "\ufeffnum_devices, step_time_s,name\n1, 0.5,\n\n 2,0.3 ,two\n")
    assert found == [
        (2, Point(num_devices=1, step_time_s=0.5)),
        (4, Point(num_devices=2, step_time_s=0.3, name="two")),
    ]


@pytest.mark.parametrize("mark", [";", "\t"])
def test_spreadsheets_that_part_cells_otherwise_are_read(tmp_path, mark):
    text = "num_devices,step_time_s,name\n1,0.5,one\n".replace(",", mark)
    assert rows(tmp_path, text) == [(2, Point(num_devices=1, step_time_s=0.5, name="one"))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_devices,step_time_s\n", "expected a row or more below the header num_devices,step_time_s,name"),
        (
            "num_devices,step_time_s\n1,0.5\n2,-1\n",
            "line 3: 'step_time_s' must be a positive number, got '-1'",
        ),
        (
            "num_devices,step_time_s\n1,\n",
            "line 2: 'step_time_s' must be a positive number, got None; add it",
        ),
        ("num_devices,step_time\n1,2\n", "unknown column 'step_time'; did you mean step_time_s"),
        ("num_devices,step_time_s\n1,2,3\n", "line 2: more cells than columns"),
    ],
)
def test_a_damaged_row_is_refused_with_its_line(tmp_path, text, words):
    with pytest.raises(RecordError, match=words):
        rows(tmp_path, text)


def test_a_missing_file_is_said_as_such(tmp_path):
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        read_rows(tmp_path / "none.csv", Point)
    with pytest.raises(CatalogError, match="expected a readable price file"):
        read_toml(tmp_path / "none.toml", "price")


def test_a_table_in_a_table_is_named():
    with pytest.raises(CatalogError, match="file, limits: 'low' must be a number, zero or more, got -1"):
        checked_table({"limits": {"low": -1}}, Table, "file")
    with pytest.raises(CatalogError, match="file, limits: unknown key 'lov'; did you mean low"):
        checked_table({"limits": {"lov": 1}}, Table, "file")


def test_toml_of_an_editor_that_marks_its_encoding_is_read(tmp_path):
    (tmp_path / "prices.toml").write_text("\ufeffx = 1\n", encoding="utf-8")
    assert read_toml(tmp_path / "prices.toml", "price") == {"x": 1}
