"""Fits the op-level model to measured whole steps and to operators timed alone, end to end, in log space.

The times of kernels and steps are those of ``cost.time.law``, with u from a network of two hidden layers; products and
fused attention have no network, but one factor per class, part of the step and number format.

Offsets are hierarchical, each with a prior around zero: per architecture, device (both by number format and group of
classes), device and class; and per measuring system (machine, precision, layout, software) of its compute, memory and
host time and of a. An operator timed alone has no system: what it says is the device's, unless another framework than
PyTorch ran it, whose offsets then are those of a system.

torch is needed here and nowhere else for the cost model; prediction runs on NumPy (``cost.time.step_times``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from forerun.base.errors import CostModelError
from forerun.cost.time.features import (
    POINT_FEATURES,
    STATIC_FEATURES,
    Point,
    counts,
    dynamic_features,
    format_classes,
    point_arrays,
    reach_table,
    roofline_terms_s,
    static_features,
)
from forerun.cost.time.kernel_laws import Kernels, kernel_terms, terms_in_step
from forerun.cost.time.law import (
    GROUP_OF_CLASS,
    LEAST_LAUNCH_S,
    MAX_LATENCY_S,
    NUM_FORMATS,
    NUM_GROUPS,
    NUM_LATENTS,
    NUM_PAIRS,
    SMOOTH_OP,
    SMOOTH_STEP,
    KernelTerms,
    busy_times,
)
from forerun.cost.time.rows import DistinctOps
from forerun.cost.time.weights import CostModel, NetworkWeights
from forerun.graph.graph import OpClass, StepPart

NO_SYSTEM = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One measured step.

    Attributes:
        ops: Distinct kernels of the model's step.
        point: Device and configuration.
        step_time_s: Measured time of the part that ``part_mask`` selects [s].
        system: Key of the measuring system; rows of a system share its offsets.
        weight: Sampling weight.
    """

    ops: DistinctOps
    point: Point
    step_time_s: float
    system: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSample:
    """Operators timed alone on one device, n of them, each a row of ``ops``.

    Attributes:
        ops: The kernels.
        point: Device and configuration; the batch size of rows without one is 1.
        time_s: Measured time of each, (n,) [s].
        weight: Sampling weight of each, (n,).
        system: Key of the framework that ran them, whose offsets they share; empty where what they say is the device's.
    """

    ops: DistinctOps
    point: Point
    time_s: np.ndarray
    weight: np.ndarray
    system: str = NO_SYSTEM


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """Settings of the network's fit; docs/decisions/0015 lists the alternatives tried.

    ``device_penalty`` multiplies the squares of the first layer's weights on ``DEVICE_FEATURES``, ``offset_penalty``
    the squares of the offsets of devices and architectures over their scales.
    """

    hidden: int = 64
    num_iterations: int = 3000
    samples_per_batch: int = 40
    operators_per_batch: int = 250
    operator_share: float = 0.5
    learning_rate: float = 4e-3
    latent_learning_rate: float = 12e-3
    weight_decay: float = 0.02
    device_penalty: float = 0.01
    latent_penalty: float = 0.01
    latent_scale: float = 0.15
    host_latent_scale: float = 0.5
    loop_latent_scale: float = 0.7
    offset_penalty: float = 0.003
    group_scale: float = 0.25
    class_scale: float = 0.12
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples as flat tensors: a row for each kernel (its sample is ``sample``), and one for each sample."""

    features: torch.Tensor
    compute_s: torch.Tensor
    least_compute_s: torch.Tensor
    memory_s: torch.Tensor
    is_law: torch.Tensor
    count: torch.Tensor
    pair: torch.Tensor
    format_class: torch.Tensor
    sample: torch.Tensor
    log_time: torch.Tensor
    system: torch.Tensor
    device: torch.Tensor
    architecture: torch.Tensor
    is_compiled: torch.Tensor
    is_step: torch.Tensor

    @property
    def terms_us(self) -> KernelTerms:
        """Terms of the kernels in microseconds, near one, where single precision is best."""
        return KernelTerms(
            compute=self.compute_s * 1e6,
            least_compute=self.least_compute_s * 1e6,
            memory=self.memory_s * 1e6,
            is_law=self.is_law,
        )

    @property
    def law_index(self) -> torch.Tensor:
        """Place of each kernel among the factors by number format, class and part of the step."""
        formats = torch.div(self.format_class, len(OpClass), rounding_mode="floor")
        return formats * NUM_PAIRS + self.pair


_OF_KERNELS = (
    *("features", "compute_s", "least_compute_s", "memory_s"),
    *("is_law", "count", "pair", "format_class"),
)
"""Columns with a row for each kernel, in the order of ``_kernels``."""
_OF_SAMPLES = ("log_time", "system", "device", "architecture", "is_compiled", "is_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSamples(Batch):
    """All samples; kernel rows of sample i are ``starts[i]:starts[i + 1]``, operators one row each."""

    starts: np.ndarray
    systems: tuple[str, ...]
    devices: tuple[str, ...]
    architectures: tuple[str, ...]
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.log_time)


def encode_samples(
    samples: Sequence[StepSample],
    operators: Sequence[OperatorSample] = (),
    names: tuple[Sequence[str], Sequence[str]] | None = None,
) -> EncodedSamples:
    """Features of all kernels of all samples as one table.

    Args:
        samples: Measured steps.
        operators: Operators timed alone; they follow the steps, one encoded sample each.
        names: Devices and architectures that have offsets, if not those of the samples.
    """
    blocks = [_kernels(sample.ops, sample.point, terms_in_step) for sample in samples]
    blocks += [_kernels(sample.ops, sample.point, kernel_terms) for sample in operators]
    # Each operator is a sample of one kernel, beside the others of its table.
    alone = [(one, row) for one in operators for row in range(len(one.ops))]
    lengths = [*(len(sample.ops) for sample in samples), *(1 for _ in alone)]
    points = [*(sample.point for sample in samples), *(one.point for one, _ in alone)]
    known = [*(sample.system for sample in samples), *(one.system for one, _ in alone)]
    times = [*(sample.step_time_s for sample in samples), *(one.time_s[row] for one, row in alone)]
    weights = [*(sample.weight for sample in samples), *(one.weight[row] for one, row in alone)]
    systems = tuple(sorted(set(known) - {NO_SYSTEM}))
    devices, architectures = names or (
        sorted({point.device.name for point in points}),
        sorted({point.device.architecture for point in points}),
    )

    def flat(index: int, name: str) -> torch.Tensor:
        kind = np.int64 if name in ("pair", "format_class") else np.float32
        return torch.from_numpy(np.concatenate([block[index] for block in blocks]).astype(kind))

    return EncodedSamples(
        **{name: flat(index, name) for index, name in enumerate(_OF_KERNELS)},
        sample=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        log_time=torch.tensor(np.log(times), dtype=torch.float32),
        system=_indices(known, systems),
        systems=systems,
        device=_indices([point.device.name for point in points], devices),
        devices=tuple(devices),
        architecture=_indices([point.device.architecture for point in points], architectures),
        architectures=tuple(architectures),
        weight=np.asarray(weights),
        is_compiled=torch.tensor([point.setup.compile for point in points], dtype=torch.float32),
        is_step=torch.arange(len(points)) < len(samples),
    )


def _kernels(
    ops: DistinctOps, point: Point, terms_of: Callable[[Kernels], KernelTerms]
) -> tuple[np.ndarray, ...]:
    """Columns of the kernels of a sample, in the order of ``_OF_KERNELS``."""
    arrays = point_arrays([point])
    dynamic = dynamic_features(ops, arrays, *roofline_terms_s(ops, arrays))[0]
    shared = np.broadcast_to(arrays.features, (len(ops), arrays.features.shape[1]))
    terms = terms_of(Kernels.at(ops, arrays))
    return (
        np.concatenate([static_features(ops), shared, dynamic], axis=1),
        terms.compute[0],
        terms.least_compute[0],
        terms.memory[0],
        terms.is_law[0],
        counts(ops, arrays)[0],
        ops.op_class * len(StepPart) + ops.step_part,
        format_classes(ops, arrays)[0],
    )


def _indices(names: Sequence[str], known: Sequence[str]) -> torch.Tensor:
    """Place of each name, -1 for names that are not known: the last row of a table, which is zero."""
    index = {name: i for i, name in enumerate(known)}
    return torch.tensor([index.get(name, -1) for name in names], dtype=torch.long)


def _with_zero_row(table: torch.Tensor) -> torch.Tensor:
    return torch.cat([table, torch.zeros(1, table.shape[1])])


class OpNetwork(nn.Module):
    """The model of the module's docstring; ``mean`` and ``scale`` normalise the features."""

    def __init__(
        self,
        mean: torch.Tensor,
        scale: torch.Tensor,
        hidden: int,
        num_systems: int,
        devices: Sequence[str] = (),
        architectures: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.devices, self.architectures = tuple(devices), tuple(architectures)
        self.is_bounded = True
        self.reach = nn.Parameter(torch.from_numpy(reach_table()), requires_grad=False)
        self.mean = nn.Parameter(mean, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.first = nn.Linear(len(mean), hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 3)
        self.latency = nn.Parameter(torch.full((NUM_PAIRS,), -1.0))
        self.law_factor = nn.Parameter(torch.zeros(NUM_FORMATS * NUM_PAIRS))
        self.host = nn.Parameter(torch.full((NUM_PAIRS,), float(np.log(8e-6))))
        self.host_constant = nn.Parameter(torch.tensor(float(np.log(5e-4))))
        self.host_compiled = nn.Parameter(torch.tensor(-0.3))
        self.loop = nn.Parameter(torch.tensor(float(np.log(2e-4))))
        self.floor = nn.Parameter(torch.tensor(float(np.log(1e-5))))
        self.latents = nn.Parameter(torch.zeros(num_systems, NUM_LATENTS))
        self.architecture_groups = nn.Parameter(
            torch.zeros(len(self.architectures), NUM_FORMATS * NUM_GROUPS)
        )
        self.device_groups = nn.Parameter(torch.zeros(len(self.devices), NUM_FORMATS * NUM_GROUPS))
        self.device_classes = nn.Parameter(torch.zeros(len(self.devices), NUM_FORMATS * len(OpClass)))
        with torch.no_grad():
            # The fit begins near constant efficiencies, from which the roofline terms already predict tolerably.
            self.last.weight.mul_(0.3)
            self.last.bias.copy_(torch.tensor([-0.5, 1.0, 0.0]))

    def outputs(self, features: torch.Tensor) -> torch.Tensor:
        """(u_0, u_1, u_2) of each kernel."""
        # An unseen device may lie far outside the fitted ones, where the layers would extrapolate wildly.
        normal = ((features - self.mean) / self.scale).clamp(-4, 4)
        # An input says nothing to the classes that it cannot change; a kernel's class is one of the first columns.
        seen = features[:, : len(OpClass)] @ self.reach
        of_point = slice(len(STATIC_FEATURES), len(STATIC_FEATURES) + len(POINT_FEATURES))
        normal = torch.cat(
            [normal[:, : of_point.start], normal[:, of_point] * seen, normal[:, of_point.stop :]], dim=1
        )
        activation = nn.functional.hardswish  # as good as SiLU and three times as fast in NumPy
        outputs: torch.Tensor = self.last(activation(self.second(activation(self.first(normal)))))
        return outputs

    def device_offsets(self) -> torch.Tensor:
        """Log offsets of each device by (format, class), (devices, formats * classes)."""
        return self.device_groups[:, _GROUP_COLUMNS] + self.device_classes

    def architecture_offsets(self) -> torch.Tensor:
        """Log offsets of each architecture by (format, class), (architectures, formats * classes)."""
        return self.architecture_groups[:, _GROUP_COLUMNS]

    def forward(self, batch: Batch, use_latents: bool = True) -> torch.Tensor:
        """Log times of a batch of samples."""
        # Kernels with a law of their own have one factor instead of the network: most rows are spared its layers.
        u = torch.zeros(len(batch.pair), 3)
        is_net = batch.is_law == 0
        u[is_net] = self.outputs(batch.features[is_net])
        z = _with_zero_row(self.latents)[batch.system]
        if not use_latents:
            z = torch.zeros_like(z)
        known = _with_zero_row(self.device_offsets())[batch.device]
        known = known + _with_zero_row(self.architecture_offsets())[batch.architecture]
        f = known[batch.sample, batch.format_class]
        compute, memory = busy_times(
            torch,
            batch.terms_us,
            (u[:, 0], u[:, 1]),
            self.law_factor[batch.law_index],
            f + z[batch.sample, 0],
            f + z[batch.sample, 1],
            self.is_bounded,
        )
        # The small terms keep the gradient finite for kernels that neither compute nor move anything.
        largest = torch.maximum(compute, memory) + 1e-6
        powers = (compute / largest) ** SMOOTH_OP + (memory / largest) ** SMOOTH_OP + 1e-12
        busy = largest * powers ** (1 / SMOOTH_OP)
        latency = MAX_LATENCY_S * 1e6 * torch.sigmoid(self.latency[batch.pair] + u[:, 2].clamp(-1.5, 1.5))
        num = len(batch.system)
        device = torch.zeros(num).index_add(0, batch.sample, batch.count * (busy + latency))
        least = _LEAST_LAUNCH_S[batch.pair] * (batch.is_compiled[batch.sample] == 0)
        launch = torch.maximum(self.host[batch.pair].exp(), least)
        launches = torch.zeros(num).index_add(0, batch.sample, batch.count * launch * 1e6)
        launches = launches * (batch.is_compiled * self.host_compiled).exp()
        host = self.host_constant.exp() * 1e6 + launches * z[:, 2].exp()
        top = torch.maximum(device, host)
        step = top * ((device / top) ** SMOOTH_STEP + (host / top) ** SMOOTH_STEP) ** (1 / SMOOTH_STEP)
        step = step + (self.loop + z[:, 3]).exp() * 1e6
        alone = device + self.floor.exp() * 1e6
        return torch.log(torch.where(batch.is_step, step, alone) * 1e-6)


_LEAST_LAUNCH_S = torch.from_numpy(LEAST_LAUNCH_S.astype(np.float32))
_GROUP_COLUMNS = torch.from_numpy(
    (np.arange(NUM_FORMATS)[:, None] * NUM_GROUPS + GROUP_OF_CLASS[None]).reshape(-1)
)
"""Column of the groups' tables for each (format, class)."""


def take(encoded: EncodedSamples, chosen: np.ndarray) -> Batch:
    """The chosen samples as a batch."""
    lengths = encoded.starts[chosen + 1] - encoded.starts[chosen]
    offsets = np.repeat(encoded.starts[chosen] - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    rows = torch.from_numpy(np.arange(lengths.sum()) + offsets)
    return Batch(
        **{name: getattr(encoded, name)[rows] for name in _OF_KERNELS},
        **{name: getattr(encoded, name)[chosen] for name in _OF_SAMPLES},
        sample=torch.from_numpy(np.repeat(np.arange(len(chosen)), lengths)),
    )


def _parameter_groups(network: OpNetwork, settings: FitSettings) -> list[dict[str, Any]]:
    """Parameter groups: the layers' weights decay; log launch times do not, because zero would mean one second."""
    layers: list[nn.Parameter] = []
    times: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and name not in _OFFSETS:
            (layers if name.endswith(("weight", "bias")) else times).append(parameter)
    rate = settings.learning_rate
    offsets = [p for name, p in network.named_parameters() if name in _OFFSETS and p.requires_grad]
    return [
        {"params": layers, "lr": rate, "weight_decay": settings.weight_decay},
        {"params": times, "lr": rate, "weight_decay": 0.0},
        {"params": offsets, "lr": settings.latent_learning_rate, "weight_decay": 0.0},
    ]


_OFFSETS = ("latents", "architecture_groups", "device_groups", "device_classes")


_ANCHOR_PENALTY = 1e-3  # loss of a squared distance of one


def refine_op_network(
    start: Mapping[str, np.ndarray],
    encoded: EncodedSamples,
    chosen: np.ndarray,
    settings: FitSettings,
) -> OpNetwork:
    """A fitted network adjusted to measurements of one device, with as little change as they allow.

    The loss is that of the fit of all devices with ``_ANCHOR_PENALTY`` times the squared distance of the layers'
    weights from the start instead of the penalty on device inputs: within one device these do not vary.

    Args:
        start: Parameters of the fitted network by name, with underscores for dots (``first_weight``);
            ``device_offsets`` holds what is known of the one device by (format, class), (1, formats * classes).
        encoded: All samples, of one device.
        chosen: Indices of the samples to fit.
        settings: Schedule and seed; the size is that of ``start``.
    """
    torch.manual_seed(settings.seed)
    hidden = start["first_weight"].shape[0]
    mean, scale = (torch.from_numpy(np.array(start[name])) for name in ("mean", "scale"))
    network = OpNetwork(mean, scale, hidden, len(encoded.systems), encoded.devices)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            stored = name.replace(".", "_")
            if stored in start and name != "latents":
                parameter.copy_(torch.from_numpy(np.array(start[stored])).reshape(parameter.shape))
        network.device_classes.copy_(torch.from_numpy(np.array(start["device_offsets"], dtype=np.float32)))
    network.is_bounded = False  # the device may beat its datasheet, a processor above all
    network.device_groups.requires_grad_(False)
    known = network.device_classes.detach().clone()
    layers = [p for name, p in network.named_parameters() if name.endswith(("weight", "bias"))]
    anchors = [layer.detach().clone() for layer in layers]

    def penalty() -> torch.Tensor:
        distances = [(layer - anchor).square().sum() for layer, anchor in zip(layers, anchors, strict=True)]
        moved = ((network.device_classes - known) / settings.group_scale).square().sum()
        return _ANCHOR_PENALTY * (torch.stack(distances).sum() + moved)

    descend(network, encoded, chosen, settings, np.random.default_rng(settings.seed), penalty)
    return network


def descend(
    network: OpNetwork,
    encoded: EncodedSamples,
    chosen: np.ndarray,
    settings: FitSettings,
    random: np.random.Generator,
    penalty: Callable[[], torch.Tensor],
) -> None:
    """Fits a network to the chosen samples by AdamW, one cycle: L1 on log(predicted / measured) and a penalty.

    Whole steps and operators are drawn apart; the operators' mean error counts ``operator_share`` of the steps'.
    """
    optimizer = torch.optim.AdamW(_parameter_groups(network, settings))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=[settings.learning_rate, settings.learning_rate, settings.latent_learning_rate],
        total_steps=settings.num_iterations,
        pct_start=0.15,
    )
    scales = (
        settings.latent_scale,
        settings.latent_scale,
        settings.host_latent_scale,
        settings.loop_latent_scale,
    )
    latent_scale = torch.tensor(scales)
    is_step = encoded.is_step.numpy()[chosen]
    # Steps and single operators are drawn apart: there are many times more operators, which would drown the
    # steps.
    pools = [
        (chosen[kind], size, share)
        for kind, size, share in (
            (is_step, settings.samples_per_batch, 1.0),
            (~is_step, settings.operators_per_batch, settings.operator_share),
        )
        if kind.any()
    ]
    probabilities = [encoded.weight[pool] / encoded.weight[pool].sum() for pool, _, _ in pools]
    shares = torch.tensor([share / size for _, size, share in pools for _ in range(size)])
    for _ in range(settings.num_iterations):
        drawn = np.concatenate(
            [random.choice(pool, size, p=p) for (pool, size, _), p in zip(pools, probabilities, strict=True)]
        )
        batch = take(encoded, drawn)
        error = network(batch) - encoded.log_time[drawn]
        # Only the offsets of systems in the batch are pulled towards zero; the others would shrink without
        # evidence.
        systems = torch.unique(batch.system[batch.system >= 0])
        latents = ((_with_zero_row(network.latents)[systems] / latent_scale) ** 2).mean()
        loss = (error.abs() * shares).sum() + settings.latent_penalty * latents + penalty()
        if not torch.isfinite(loss):
            raise CostModelError(
                "the fit of the op-level model diverged: its loss is not finite; look for kernels or times of zero "
                f"among the samples {drawn.tolist()}, or lower the learning rate"
            )
        optimizer.zero_grad()
        loss.backward()
        # One mislabelled row, a hundred times too slow, must not move all weights.
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def as_weights(
    networks: Sequence[OpNetwork],
    systems: Sequence[str],
    provenance: Mapping[str, Any],
    fitted: Collection[str] | None = None,
) -> CostModel:
    """The fitted networks as plain arrays.

    Args:
        networks: Members.
        systems: Keys of their latents.
        provenance: See ``CostModel``.
        fitted: Systems with rows in the fit, None for all; the others have no offsets to lend.
    """
    rows = [i for i, name in enumerate(systems) if fitted is None or name in fitted]
    return CostModel(
        networks=tuple(_as_arrays(network, rows) for network in networks),
        systems=tuple(systems[i] for i in rows),
        provenance=provenance,
        devices=networks[0].devices if networks else (),
        architectures=networks[0].architectures if networks else (),
        has_least_launches=True,
    )


def _as_arrays(network: OpNetwork, rows: Sequence[int]) -> NetworkWeights:
    state = {name.replace(".", "_"): tensor.detach().numpy() for name, tensor in network.named_parameters()}
    state["latents"] = state["latents"][list(rows)]
    state["device_offsets"] = network.device_offsets().detach().numpy()
    state["architecture_offsets"] = network.architecture_offsets().detach().numpy()
    return NetworkWeights(**{name: state[name].astype(np.float32) for name in NetworkWeights.__slots__})
