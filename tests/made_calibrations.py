"""A calibration of this machine without measuring: the shipped cost model, named as one."""

from dataclasses import replace

from forerun.cost.time.weights import CostModel, load_weights, shipped_weights_path
from forerun.question.devices.device import Device


def made_calibration(
    device: Device, framework: str = "pytorch", step_cost_s: float = 0.0, kinds: tuple[str, ...] = ("full",)
) -> CostModel:
    """Of a device with a framework, in full precision unless half is among the kinds."""
    weights = load_weights(shipped_weights_path())
    return replace(
        weights,
        provenance={
            **weights.provenance,
            "calibrated_device": device.title,
            "framework": f"{framework} 3.0",
            "step_cost_s": step_cost_s,
            "measured_devices": {device.name: list(kinds)},
            "num_layers": 50,
            "num_models": 8,
            "method": "refined",
            "intervals": {"calibrated": {"quantile": 1.0, "base": 0.3, "slope": 0.5}},
        },
    )
