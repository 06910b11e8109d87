"""Models in ONNX files, as modules of PyTorch."""

from forerun.tracing.source import Source, later

__all__ = ["SOURCE"]

SOURCE = Source(
    build=later(f"{__name__}.model", "build_onnx"), library="onnx", reads_file=True, is_trusted=False
)
