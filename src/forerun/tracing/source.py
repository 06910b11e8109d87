"""Sources of models: what stands before the colon of a model's name, and what reads the rest.

Sources of PyTorch's libraries are named here; others are entry points of the group ``forerun.sources`` (``onnx``,
``mlpredict`` and ``keras`` come with forerun). Another package adds one by an entry point that names a ``Source``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forerun.base.errors import ForerunError, UsageError
from forerun.base.plugins import plugin, plugin_names

if TYPE_CHECKING:
    from forerun.graph.graph import Graph
    from forerun.question.model import ModelRequest
    from forerun.question.setup import TrainingSetup
    from forerun.tracing.models.built_model import BuiltModel, InputOptions

__all__ = ["Question", "Source", "find_source", "named_source", "source_names"]

Question = tuple["ModelRequest", "TrainingSetup", Any]
"""A model, its setup, and an object in place of the model's name or None."""

_GROUP = "forerun.sources"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One kind of models; a declaration, which loads nothing before it is asked.

    Attributes:
        build: Makes a module with a batch and a loss from the name without its prefix; None for a source that traces.
        trace: Traces models itself, all in one go: a graph for each question, or the error in its place.
        library: Package whose version decides what a name means; None without one.
        reads_file: True if the name is the path of a file, whose content is the model's definition.
        is_trusted: False if a file or code of somebody else is read, so that it is built in a process of its own.
    """

    build: Callable[[str, InputOptions], BuiltModel] | None = None
    trace: Callable[[Sequence[Question]], list[Graph | ForerunError]] | None = None
    library: str | None = None
    reads_file: bool = False
    is_trusted: bool = True


def _later(module: str, name: str) -> Callable[[str, InputOptions], BuiltModel]:
    """A function of a module that loads a framework, imported when it is called."""

    def build(rest: str, options: InputOptions) -> BuiltModel:
        built: BuiltModel = getattr(import_module(module), name)(rest, options)
        return built

    return build


_MODELS = "forerun.tracing.models"

_OF_PYTORCH = {
    "torchvision": Source(
        build=_later(f"{_MODELS}.torchvision_models", "build_torchvision"), library="torchvision"
    ),
    "timm": Source(build=_later(f"{_MODELS}.timm_models", "build_timm"), library="timm"),
    "hf": Source(
        build=_later(f"{_MODELS}.transformers_models", "build_transformers"),
        library="transformers",
        reads_file=True,
        is_trusted=False,
    ),
}


def find_source(prefix: str) -> Source | None:
    """The source of a prefix; None if no installed package has it.

    Raises:
        UsageError: An entry point of the prefix is broken.
    """
    if prefix in _OF_PYTORCH:
        return _OF_PYTORCH[prefix]
    found = plugin(_GROUP, prefix)
    if found is not None and not isinstance(found, Source):
        raise UsageError(
            f"expected the entry point {prefix!r} of {_GROUP!r} to be a Source, got {type(found).__name__}; "
            "update or remove the package that declares it"
        )
    return found


def named_source(model: str) -> Source | None:
    """The source that a model's name begins with; None for a bare name, a path, or an unknown prefix."""
    prefix, colon, _ = model.partition(":")
    return find_source(prefix) if colon and prefix.isidentifier() else None


def source_names() -> list[str]:
    """All prefixes."""
    return [*_OF_PYTORCH, *plugin_names(_GROUP)]
