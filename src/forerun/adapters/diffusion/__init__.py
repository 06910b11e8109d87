"""Networks of diffusers, which make images and videos: ``diffusers:flux.1-dev``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.tracing.source import Source

if TYPE_CHECKING:
    from forerun.tracing.models.built_model import BuiltModel, InputOptions

__all__ = ["SOURCE"]


def _build(rest: str, options: InputOptions) -> BuiltModel:
    from forerun.adapters.diffusion.step import build_diffusion  # loads PyTorch

    return build_diffusion(rest, options)


SOURCE = Source(build=_build, library="diffusers", is_trusted=False)
