"""Single layers as rows of a layer regressor."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from forerun.fitting.layer_features import LAYER_SIZES, LayerCase
from forerun.hardware.device import Device
from forerun.measurement.layers.figures import layer_figures
from forerun.records.measurement import Scalar
from forerun.run.setup import Precision

__all__ = ["layer_case"]

_DEFAULT_WORDS = {
    "mode": "forward",
    "activation": "none",
    "optimizer": "none",
    "precision": str(Precision.FP32),
    "layout": "nchw",
}


def layer_case(
    kind: str, parameters: Mapping[str, Scalar], device: Device, framework: str = "pytorch"
) -> LayerCase:
    """One layer on a device.

    Args:
        kind: Kind of layer, as in ``measurement.layers.figures``.
        parameters: Sizes and choices of the layer under the names of the public layer tables.
        device: Device of the layer.
        framework: Framework of the layer; at equal sizes, times differ between frameworks.

    Raises:
        InvalidSetupError: No such kind, a size is missing, or sizes contradict each other.
    """
    figures = layer_figures(kind, parameters)
    words = {name: str(parameters.get(name) or default) for name, default in _DEFAULT_WORDS.items()}
    words |= {
        "layer": kind,
        "framework": framework,
        "use_bias": str(bool(parameters.get("use_bias"))).lower(),
    }
    if parameters.get("kernel") is not None:
        words["padding"] = str(parameters.get("padding") or "same")
    if words["mode"] == "forward" or not figures.num_parameters:  # nothing is updated
        words["optimizer"] = "none"
    return LayerCase(
        sizes=_sizes(parameters),
        words=words,
        flops=figures.flops,
        num_inputs=float(prod(figures.input_shape)),
        num_outputs=float(prod(figures.output_shape)),
        num_parameters=float(figures.num_parameters),
        device=device,
    )


def _sizes(parameters: Mapping[str, Scalar]) -> dict[str, float]:
    values = {name: parameters.get(name) for name in LAYER_SIZES}
    found = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
    if "kernel" in found:
        found.setdefault("stride", 1.0)
    return found
