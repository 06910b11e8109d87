"""Effects on a step beside its device: that of the software stack it runs in, and the wait for its host's memory.

    step = step in PyTorch + cost of the training loop + wait for weights and states on the host

The figures of Keras come from the study of Keras on TensorFlow in the public tables; the spread is the 90 % quantile of
|log(measured / modelled)| with networks or GPUs held out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Graph, HostTraffic
from forerun.question.devices.cluster import host_link
from forerun.question.devices.device import Device, DeviceKind
from forerun.question.run import Run


def stack_of(graph: Graph, device: Device, weights: CostModel) -> StackEffect | None:
    """The stack whose effect is not in the cost model yet; None for PyTorch, and where nothing is known of it.

    A calibration with Keras holds the times of its operations; only the cost of its loop is added.
    """
    if not graph.is_keras:
        return None
    if weights.calibrated_stack == "keras":
        return calibrated_effect(weights)
    return KERAS_ON_TENSORFLOW if device.kind is DeviceKind.GPU else None


HOST_UPDATE_BYTES_PER_S = 109e9
"""Rate at which a host of two processors reads and writes weights, gradients and states [bytes/s].

Adam over 10 billion parameters takes 2.57 s, 28 bytes each. Source: Ren et al. 2021, ZeRO-Offload, table 4 (CPU-Adam).
"""


def host_wait_s(traffic: HostTraffic, device: Device, step_s: float) -> float:
    """Wait beside the step of the device [s].

    Weights come and gradients go while the device computes; the links to and from the host work at the same time. What
    takes longer than the step is waited for. The update follows, and then the weights that the device keeps come back:

    t = max(0, max(weights, gradients) / link - step) + update / host + updated weights / link.

    Args:
        traffic: Transfers of one step.
        device: The device, whose bus fixes the link to the host.
        step_s: Step of the device, given that everything is there [s].
    """
    rate = host_link(device).usable_bytes_per_s
    coming = traffic.forward_bytes + traffic.backward_bytes
    hidden_s = max(coming, traffic.gradient_bytes) / rate
    update_s = traffic.update_bytes / HOST_UPDATE_BYTES_PER_S
    return max(0.0, hidden_s - step_s) + update_s + traffic.updated_bytes / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class StackEffect:
    """Effect of a software stack on step times.

    Attributes:
        name: Name of the stack, such as ``keras``.
        step_cost_s: Fixed cost of a step of the stack's training loop [s].
        log_spread: Half-width of the 90 % interval of the effect, in the logarithm.
        devices: Catalogue names of the devices on which the effect was measured.
        source: Tables, rows and day of the fit.
    """

    name: str
    step_cost_s: float
    log_spread: float
    devices: tuple[str, ...]
    source: str


KERAS_ON_TENSORFLOW = StackEffect(
    name="Keras on TensorFlow",
    step_cost_s=0.32e-3,
    log_spread=0.306,
    devices=("p100-pcie-16gb", "v100-sxm2-16gb", "a100-sxm4-40gb"),
    source="step cost: iit_e2e, 40 steps of two networks on a P100, TensorFlow 2; device as in PyTorch: "
    "dle_training, 6 steps of ResNet-50 on V100 and A100, TensorFlow 1.15; fitted 2026-11-22",
)


def calibrated_effect(weights: CostModel) -> StackEffect:
    """Effect of the stack of a calibration: the weights hold its operations, but not its training loop."""
    known = weights.provenance
    return replace(
        KERAS_ON_TENSORFLOW,
        step_cost_s=weights.step_cost_s,
        log_spread=0.0,
        devices=tuple(known["measured_devices"]),
        source=f"calibrated with {known['framework']} on {known['date']}, {known['num_layers']} layers and "
        f"{known['num_models']} models",
    )


def stack_note(effect: StackEffect, device: str) -> str:
    """Remark for the reader on a stack's effect on a device."""
    if effect.source.startswith("calibrated"):
        return (
            f"software stack: {effect.source}; a step of fit costs {1e3 * effect.step_cost_s:.1f} ms beside its "
            "operations"
        )
    text = (
        f"software stack: for {effect.name} a step costs {1e3 * effect.step_cost_s:.1f} ms more than for PyTorch "
        f"({effect.source})"
    )
    if device in effect.devices:
        return text
    return f"{text}; no step of {effect.name} was measured on {device}: the effect is that of other GPUs"


def stack_notes(graph: Graph, run: Run, weights: CostModel) -> Iterator[str]:
    """Remarks for the reader on a model of Keras."""
    device = run.cluster.device
    if (effect := stack_of(graph, device, weights)) is not None:
        yield stack_note(effect, device.name)
    elif weights.calibrated_device is None:
        yield (
            f"software stack: no step of Keras on TensorFlow was measured on a {device.kind}; the time is "
            "of the same operations in PyTorch"
        )
    if run.job is not None:
        yield (
            "an epoch is the sum of its steps: fit on arrays, or on a tf.data.Dataset with autotuning, often waits "
            "between epochs, by up to an epoch's time and at most 60 s (docs/methods/keras.md says how to avoid it)"
        )
    if run.setup.compile:
        yield "memory is for eager execution; torch.compile usually needs less"
