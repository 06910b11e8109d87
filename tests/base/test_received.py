"""Files of others: what they stand for is bounded before anything is done with it, and a refusal is one line."""

import json

import pytest

from forerun.base.errors import CatalogError, ForerunError, UsageError
from forerun.base.received import json_file, parsed_yaml, read_json
from forerun.base.tables import read_toml
from forerun.jobs.scheduling.live import parse_document
from forerun.surface.cli.main import error_line

BOMB = "l0: &l0 {k: v}\n" + "".join(f"l{n}: &l{n} [*l{n - 1}, *l{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "stand for more than"),
        ("a: &a {b: *a}", "contains itself"),
        ("[" * 20_000, "nested too deeply"),
        ("a: " + "9" * 10_000, "digits"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: \0", "unacceptable character"),
        ("a: 2026-13-45", "month must be in"),
        ("x" * 5_000_000, "more than"),
    ],
)
def test_yaml_that_is_no_data_is_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=said) as refusal:
        parsed_yaml(text)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) <= 300


def test_yaml_may_repeat_a_part():
    assert parsed_yaml("a: &a {x: 1}\nb: *a\nc: [*a, *a]\n") == {
        "a": {"x": 1},
        "b": {"x": 1},
        "c": [{"x": 1}] * 2,
    }


@pytest.mark.parametrize("text", ["x = " + "9" * 10_000, "x = " + "[" * 50_000, "x = 2026-13-45"])
def test_toml_that_is_no_data_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "device.toml").write_text(text, encoding="utf-8")
    with pytest.raises(CatalogError, match="expected a TOML file, but"):
        read_toml(tmp_path / "device.toml", "device")


@pytest.mark.parametrize("text", ["9" * 10_000, "[" * 100_000])
def test_a_cluster_document_that_python_cannot_hold_is_refused(text):
    with pytest.raises(ForerunError, match="no JSON document that can be read"):
        parse_document(text, "squeue")


def test_a_message_that_repeats_a_file_keeps_its_beginning_and_its_end():
    line = error_line(UsageError(f"expected a column, got {'c, ' * 1_000_000}; name it"))
    assert line.startswith("error: expected a column, got c,")
    assert line.endswith("c, ; name it")
    assert len(line) < 2100


def test_a_checksum_is_that_of_values_and_not_of_their_text(tmp_path):
    path, document = tmp_path / "table.json", {"b": [1, 2.5, 1e-300], "a": {"x": None, "ß": True}}
    path.write_text(json_file(document), encoding="utf-8")
    assert read_json(path) == document
    path.write_text(json.dumps(json.loads(path.read_text())), encoding="utf-8")
    assert read_json(path) == document
    path.write_text(path.read_text().replace("2.5", "2.6"), encoding="utf-8")
    with pytest.raises(ValueError, match="checksum"):
        read_json(path)
