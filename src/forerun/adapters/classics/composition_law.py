"""Step time of a network from the times of its single layers.

A layer timed alone is a network of one layer: each repetition holds, beside the layer's work, the fixed cost c of a
step (the loop, the start of backward, the optimizer's call). A network pays c once, so a sum of n layers is too large
by (n - 1) c. A layer alone also finds its weights and activations in the cache, and free memory in the allocator,
which a network has filled with other layers; so a sum may also be too small.

A processor computes and launches in one thread. There, K equal layers in one step are timed beside a single one:

    m = (T_K - T_1) / (K - 1)         cost of one more layer in the same step [s]
    c = T_1 - m of a layer that has next to no work
    step = c + sum of m_i

A device works beside its host, so the host's calls hide behind the device's work, or the work behind the calls. With
a the time of a layer without work, timed alone, w_i = max(0, t_i - a) the work of layer i, and h the time the host
needs for the calls of a layer:

    step = sqrt((c + n h)^2 + (sum of w_i)^2)

None of c, h, a needs the network that is predicted. Comparison with measurements: docs/methods/composition.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from forerun.base.errors import InvalidSetupError

__all__ = [
    "HostCosts",
    "host_costs",
    "marginal_time_s",
    "overlapped_step_time_s",
    "serial_step_time_s",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Time that calls cost the host of a device which works beside it.

    Attributes:
        alone_s: a, time of a layer without work, timed alone [s].
        per_step_s: c, cost paid once per step [s].
        per_layer_s: h, cost paid for each layer of a step [s].
    """

    alone_s: float
    per_step_s: float
    per_layer_s: float

    def __post_init__(self) -> None:
        if min(self.alone_s, self.per_step_s, self.per_layer_s) < 0:
            raise InvalidSetupError(f"expected costs of calls of at least 0 s, got {self}")


def host_costs(alone_s: float, num_layers: tuple[int, int], step_times_s: tuple[float, float]) -> HostCosts:
    """Costs of calls from a layer and two networks without work.

    With the steps of networks of n1 < n2 layers, h = (T2 - T1) / (n2 - n1) and c = T1 - n1 h; noise that would make
    one of them negative makes it zero.

    Args:
        alone_s: Time of a layer without work [s].
        num_layers: Number of layers of the two networks, the smaller number first.
        step_times_s: Step times of the two networks [s].

    Raises:
        InvalidSetupError: The second network has no more layers than the first.
    """
    few, many = num_layers
    if few >= many:
        raise InvalidSetupError(
            f"expected two networks with different numbers of layers, the smaller first, got {few} and {many}"
        )
    per_layer_s = max(0.0, (step_times_s[1] - step_times_s[0]) / (many - few))
    per_step_s = max(0.0, step_times_s[0] - few * per_layer_s)
    return HostCosts(alone_s=alone_s, per_step_s=per_step_s, per_layer_s=per_layer_s)


def marginal_time_s(alone_s: float, together_s: float, num_copies: int) -> float:
    """M = (T_K - T_1) / (K - 1), the cost of one more equal layer in a step; not below zero [s].

    Args:
        alone_s: T_1, a step of one layer [s].
        together_s: T_K, a step of K equal layers each with its own weights and inputs [s].
        num_copies: K, number of equal layers, at least 2.

    Raises:
        InvalidSetupError: There are fewer than two copies.
    """
    if num_copies < 2:
        raise InvalidSetupError(f"expected at least 2 copies of a layer, got {num_copies}")
    return max(0.0, (together_s - alone_s) / (num_copies - 1))


def serial_step_time_s(marginal_times_s: Sequence[float], per_step_s: float) -> float:
    """Step time of a network on a processor: c plus the marginal time of each layer [s].

    Args:
        marginal_times_s: ``marginal_time_s`` of each layer, as often as it is called [s].
        per_step_s: c [s].

    Raises:
        InvalidSetupError: There is no layer.
    """
    _check_layers(marginal_times_s)
    return per_step_s + sum(marginal_times_s)


def overlapped_step_time_s(alone_times_s: Sequence[float], costs: HostCosts) -> float:
    """Step time of a network on a device that works beside its host [s].

    The root of squares lies between the larger of calls and work and their sum; the power 2 fits published P100 runs
    better than 1.5, 3, 4 or 8.

    Args:
        alone_times_s: Time of each layer alone, as often as it is called [s].
        costs: Costs of the calls for the host.

    Raises:
        InvalidSetupError: There is no layer.
    """
    _check_layers(alone_times_s)
    calls_s = costs.per_step_s + len(alone_times_s) * costs.per_layer_s
    work_s = sum(max(0.0, time_s - costs.alone_s) for time_s in alone_times_s)
    return hypot(calls_s, work_s)


def _check_layers(times_s: Sequence[float]) -> None:
    if not times_s:
        raise InvalidSetupError("expected at least one layer, got none")
