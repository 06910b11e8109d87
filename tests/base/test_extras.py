"""Entry points are found by group and name, those of forerun first."""

import sys
from importlib.metadata import EntryPoint

import pytest

from forerun.base import extras as plugins
from forerun.base.errors import UsageError


@pytest.fixture
def declared(monkeypatch):
    """Entry points of a group as they are declared by forerun, and by all packages."""

    def declare(own, others):
        kept = [*(("elsewhere", p) for p in others), *(("forerun", p) for p in own)]
        monkeypatch.setattr(plugins, "_kept", lambda: kept)
        monkeypatch.setattr(plugins, "_points", plugins._points.__wrapped__)

    return declare


def test_a_name_gives_the_object_that_its_entry_point_names(declared):
    declared([EntryPoint("square", "math:sqrt", "forerun.laws")], [])
    assert plugins.plugin("forerun.laws", "square")(9.0) == 3.0


def test_another_package_adds_a_name_but_takes_none_over(declared):
    mine = EntryPoint("square", "math:sqrt", "forerun.laws")
    declared(
        [mine],
        [EntryPoint("square", "math:exp", "forerun.laws"), EntryPoint("log", "math:log", "forerun.laws")],
    )
    assert plugins.plugin_names("forerun.laws") == ["square", "log"]
    assert plugins.plugin("forerun.laws", "square")(9.0) == 3.0
    assert plugins.plugin("forerun.laws", "log")(1.0) == 0.0


def test_an_unknown_name_is_none(declared):
    declared([], [])
    assert plugins.plugin("forerun.laws", "nothing") is None


def test_an_entry_point_to_nothing_is_named(declared):
    declared([EntryPoint("broken", "math:no_such", "forerun.laws")], [])
    with pytest.raises(UsageError, match="expected the entry point 'broken'"):
        plugins.plugin("forerun.laws", "broken")


def test_a_part_that_is_not_there_is_named_and_a_missing_library_is_left_to_its_caller(declared):
    declared([EntryPoint("onnx", "no_such_room.onnx:SOURCE", "forerun.sources")], [])
    with pytest.raises(
        UsageError, match=r"expected the part of forerun that has 'onnx' \(no_such_room\.onnx\)"
    ):
        plugins.plugin("forerun.sources", "onnx")


def test_of_two_packages_of_a_name_the_first_on_the_path_counts(tmp_path, monkeypatch):
    for version, target in (("2.0", "math:sqrt"), ("1.0", "math:exp")):
        info = tmp_path / version / f"elsewhere-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: elsewhere\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[forerun.laws]\nroot = {target}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "2.0"), str(tmp_path / "1.0")])
    assert list(plugins._read()) == [("elsewhere", plugins.EntryPoint("root", "math:sqrt", "forerun.laws"))]
