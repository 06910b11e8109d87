"""The tree of errors: exit statuses, near matches, the hint of a missing extra."""

from __future__ import annotations

import inspect

import pytest

from forerun.base import errors
from forerun.base.errors import FailureError, ForerunError, MissingExtraError, UsageError, near_matches

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
]
WARNINGS = [kind for kind in CLASSES if issubclass(kind, Warning)]
ERRORS = [kind for kind in CLASSES if kind not in WARNINGS]


def test_every_exception_is_an_error_or_a_warning():
    assert [kind.__name__ for kind in WARNINGS] == ["StoreWarning"]
    assert [kind for kind in WARNINGS if issubclass(kind, ForerunError)] == []


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_has_its_place_and_exit_status(kind):
    assert issubclass(kind, ForerunError)
    if kind is not ForerunError:
        assert issubclass(kind, UsageError) != issubclass(kind, FailureError)
    assert kind.exit_status == (2 if issubclass(kind, UsageError) else 1)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_and_warning_is_drawn_and_described(kind):
    assert kind.__name__ in errors.__doc__
    assert kind.__doc__


def test_near_matches():
    known = ["resnet50", "resnet18", "vgg16"]
    assert near_matches("ResNet5O", known) == "; did you mean resnet50, resnet18?"
    assert near_matches("zzz", known) == ""
    assert near_matches("resnet", [f"resnet{i}" for i in range(9)], limit=2).count("resnet") == 2


def test_a_missing_extra_is_named_with_its_install_command():
    error = MissingExtraError("timm:convnext_tiny", "timm")
    assert "timm:convnext_tiny needs the optional extra 'timm'" in str(error)
    assert "pip install 'forerun[timm]'" in str(error)
    assert error.exit_status == 2
