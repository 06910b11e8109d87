"""Installs the hooks at Python's start-up, which finds this module because its folder is first in PYTHONPATH.

The folder holds nothing else, so that it hides no module of the script.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


def _install_hooks() -> None:
    settings_file = os.environ.get("FORERUN_STARTUP")
    if not settings_file:
        return
    package = Path(__file__).resolve().parents[3]
    if "forerun" not in sys.modules:
        # The script's own environment need not have forerun: the package is loaded from the folder of this file, and
        # nothing is added to the path that the script imports from.
        spec = importlib.util.spec_from_file_location(
            "forerun", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        if spec is None or spec.loader is None:
            return
        module = importlib.util.module_from_spec(spec)
        sys.modules["forerun"] = module
        spec.loader.exec_module(module)
    # The hooks of ``forerun profile``, or those that another command names.
    hooks = importlib.import_module(os.environ.get("FORERUN_HOOKS", "forerun.script.profiling.watch"))
    hooks.install(Path(settings_file))


def _load_the_hidden_sitecustomize() -> None:
    """Loads the environment's own sitecustomize, if there is one, because this module hides it."""
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if entry and Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_install_hooks()
_load_the_hidden_sitecustomize()
