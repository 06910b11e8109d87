"""Hides the optional packages from this process, as if they were not installed; imported by a child process first."""

import sys
from importlib.machinery import PathFinder

from forerun.base import extras
from forerun.base.extras import EXTRA_OF_PACKAGE


class Without(PathFinder):
    """The finder of modules on the path, which does not find the optional packages."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return (
            None
            if fullname.partition(".")[0] in EXTRA_OF_PACKAGE
            else super().find_spec(fullname, path, target)
        )


sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]

_installed_version = extras.installed_version
extras.installed_version = lambda name: None if name in EXTRA_OF_PACKAGE else _installed_version(name)
