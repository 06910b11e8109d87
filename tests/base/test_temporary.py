"""Folders of killed processes go at the next start; those of living ones stay."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from forerun.base.temporary import remove_leftovers, temporary_folder


def test_only_folders_of_ended_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = (
        f"import os, tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from forerun.base.temporary import temporary_folder\n"
        "folder = temporary_folder(); open(os.path.join(folder.name, 'file'), 'w').close()\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", killed])
    (left,) = tmp_path.iterdir()
    with temporary_folder() as own:
        assert remove_leftovers() == 1
        assert not left.exists()
        assert Path(own).exists()
