"""A name that is loaded on first use is not hidden by a module of the same name afterwards."""

import importlib
import pkgutil

import pytest


@pytest.mark.parametrize("package", ["forerun", "forerun.script.callbacks"])
def test_no_module_is_called_like_a_public_name(package):
    found = importlib.import_module(package)
    modules = {module.name for module in pkgutil.iter_modules(found.__path__)}
    assert modules & set(found.__all__) == set()
