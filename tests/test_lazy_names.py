"""A name that is loaded on first use is there, and not hidden by a module of the same name afterwards."""

import importlib
import pkgutil

import pytest

DOORS = [f"forerun.{name}" for name in ("script.callbacks", "script", "jobs", "evidence", "question.devices")]


@pytest.mark.parametrize("package", ["forerun", *DOORS])
def test_no_module_is_called_like_a_public_name(package):
    found = importlib.import_module(package)
    modules = {module.name for module in pkgutil.iter_modules(found.__path__)}
    assert modules & set(found.__all__) == set()


@pytest.mark.parametrize("package", DOORS)
def test_every_public_name_loads_and_no_other(package):
    found = importlib.import_module(package)
    assert all(getattr(found, name) is not None for name in found.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        found.nothing  # noqa: B018 - the access is what is tested
