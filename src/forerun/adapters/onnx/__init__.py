"""Models in ONNX files, as modules of PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.tracing.source import Source

if TYPE_CHECKING:
    from forerun.tracing.models.built_model import BuiltModel, InputOptions

__all__ = ["SOURCE"]


def _build(rest: str, options: InputOptions) -> BuiltModel:
    from forerun.adapters.onnx.model import build_onnx  # loads PyTorch

    return build_onnx(rest, options)


SOURCE = Source(build=_build, library="onnx", reads_file=True, is_trusted=False)
