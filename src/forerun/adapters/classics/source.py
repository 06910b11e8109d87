"""The source of ``mlpredict:FILE``, apart from the package: its commands load no framework for their help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.tracing.source import Source

if TYPE_CHECKING:
    from forerun.tracing.models.built_model import BuiltModel, InputOptions


def _build(rest: str, options: InputOptions) -> BuiltModel:
    from forerun.adapters.classics.mlpredict_files import build_mlpredict  # loads PyTorch

    return build_mlpredict(rest, options)


MLPREDICT = Source(build=_build, reads_file=True)
