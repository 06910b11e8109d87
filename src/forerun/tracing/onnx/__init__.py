"""Models from ONNX files."""
