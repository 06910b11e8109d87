"""Results that are kept for questions asked again.

Folders of killed processes go at the next start; those of living ones stay.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.base.kept import Kept, KeptBytes, remove_leftovers, temporary_folder, write_whole
from memory_streams import graph_of, training_stream


def test_a_result_is_made_once_for_its_parts_and_values():
    graph = graph_of(training_stream(momentum=True))
    kept: Kept[int] = Kept(2)
    calls = []

    def make():
        calls.append(None)
        return len(calls)

    assert [kept.get((graph,), (1,), make) for _ in range(3)] == [1, 1, 1]
    assert kept.get((graph,), (2,), make) == 2
    # An equal graph that is another object is another graph.
    assert kept.get((replace(graph),), (1,), make) == 3
    # That was one too many: all were forgotten, and are made again.
    assert kept.get((graph,), (1,), make) == 4


def test_results_go_by_their_size_and_their_last_use():
    kept: KeptBytes[str] = KeptBytes(100)
    for name in "abcd":
        kept.keep(name, name, 25)
    assert kept.find("a") == "a"
    kept.keep("e", "e", 20)  # too much: the one asked for longest ago goes
    assert [kept.find(name) for name in "abcde"] == ["a", None, "c", "d", "e"]
    assert kept.size_bytes == 95
    kept.keep("large", "large", 26)  # would push out all the others
    assert kept.find("large") is None
    kept.keep("a", "anew", 10)
    assert (kept.find("a"), kept.size_bytes, len(kept)) == ("anew", 80, 4)


def test_only_folders_of_ended_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = (
        f"import os, tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from forerun.base.kept import temporary_folder\n"
        "folder = temporary_folder(); open(os.path.join(folder.name, 'file'), 'w').close()\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", killed])
    (left,) = tmp_path.iterdir()
    with temporary_folder() as own:
        assert remove_leftovers() == 1
        assert not left.exists()
        assert Path(own).exists()


def test_a_file_is_whole_or_as_it_was(tmp_path):
    file, link = tmp_path / "plot.png", tmp_path / "link.png"
    write_whole(file, b"old")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(file, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]
    link.symlink_to(file)
    write_whole(link, b"new")
    assert link.is_symlink()
    assert file.read_bytes() == b"new"
