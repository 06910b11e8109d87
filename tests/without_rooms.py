"""Hides satellites and adapters from this process, as if they were not there; imported by a child process first."""

import sys
from importlib.abc import MetaPathFinder

HIDDEN = tuple(f"forerun.{room}" for room in ("evidence", "script", "jobs", "adapters", "callbacks", "keras"))


class WithoutRooms(MetaPathFinder):
    """Refuses the modules of rooms outside the core."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(tuple(f"{name}." for name in HIDDEN)) or fullname in HIDDEN:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


sys.meta_path.insert(0, WithoutRooms())
