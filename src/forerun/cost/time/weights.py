"""The fitted op-level model on disk: a safetensors file with its provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from forerun.base.answers import fields_of, from_plain
from forerun.base.errors import CostModelError
from forerun.base.kept import writes
from forerun.base.received import DAMAGE, check_array, check_name, in_a_line, read_tensors, tensors_file
from forerun.cost.time.evidence import number_format
from forerun.cost.time.features import DYNAMIC_FEATURES, POINT_FEATURES, STATIC_FEATURES
from forerun.cost.time.law import CONVOLUTIONS, NUM_FORMATS, NUM_LATENTS, NUM_PAIRS
from forerun.cost.time.rows import DistinctOps
from forerun.cost.time.systems import SystemOffsets, parsed_systems
from forerun.graph.graph import OpClass
from forerun.question.devices.catalogue import same_die
from forerun.question.devices.device import Device
from forerun.question.setup import Layout, Phase, TrainingSetup

Floats32 = npt.NDArray[np.float32]
Floats64 = npt.NDArray[np.float64]

WEIGHTS_FORMAT_VERSION = 2

DEFAULT_STACK = "pytorch"

NUM_CIRCUMSTANCES = 3
"""Half precision, NHWC and compiled, of which steps of a calibrated device have offsets of their own."""

_LEAST_OFFSET = 0.02
"""Offsets below it are those of what was not measured."""
FEATURES = (*STATIC_FEATURES, *POINT_FEATURES, *DYNAMIC_FEATURES)
_ENTRY = "forerun"
_NUM_OUTPUTS = 3
"""Log efficiencies in arithmetic and in traffic, and the latency."""
_SHAPES: Mapping[str, tuple[int | str, ...]] = {
    "reach": (len(OpClass), len(POINT_FEATURES)),
    "mean": (len(FEATURES),), "scale": (len(FEATURES),), "first_weight": ("width", len(FEATURES)),
    "first_bias": ("width",), "second_weight": ("width", "width"), "second_bias": ("width",),
    "last_weight": (_NUM_OUTPUTS, "width"), "last_bias": (_NUM_OUTPUTS,), "latency": (NUM_PAIRS,),
    "law_factor": (NUM_FORMATS * NUM_PAIRS,), "host": (NUM_PAIRS,), "host_constant": (1,), "host_compiled": (1,),
    "loop": (1,), "latents": ("systems", NUM_LATENTS), "device_offsets": ("devices", NUM_FORMATS * len(OpClass)),
    "architecture_offsets": ("architectures", NUM_FORMATS * len(OpClass)),
}  # fmt: skip
"""Shapes of the tensors of a network; a word is a length that other tensors or the header share."""
_LARGEST_WEIGHT = 1e3
_LARGEST_LOG = 50.0
"""Offsets are logarithms of factors: a device is no e^50 times as fast as another."""
_LOGS = (
    "law_factor",
    "host",
    "host_constant",
    "host_compiled",
    "loop",
    "latents",
    "device_offsets",
    "architecture_offsets",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkWeights:
    """One member of the ensemble; names as in ``op_time_fit.OpNetwork``, shapes in ``_SHAPES``.

    ``reach`` says which inputs of a point its classes see (``features.REACH``).
    """

    reach: Floats32
    mean: Floats32
    scale: Floats32
    first_weight: Floats32
    first_bias: Floats32
    second_weight: Floats32
    second_bias: Floats32
    last_weight: Floats32
    last_bias: Floats32
    latency: Floats32
    law_factor: Floats32
    host: Floats32
    host_constant: Floats32
    host_compiled: Floats32
    loop: Floats32
    latents: Floats32
    device_offsets: Floats32
    architecture_offsets: Floats32


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLaw:
    """The way a calibrated device departs from the networks with the size of a step.

    The log time of a step changes by the sum of exponent x (log size - centre) over its two sizes: work [FLOP] and
    traffic [bytes]. Beyond the sizes that were measured the law stays at its last value.

    Attributes:
        exponents: Of the work and of the traffic.
        centres: Mean log sizes of the measured steps.
        lows, highs: Least and largest log sizes of the measured steps.
    """

    exponents: tuple[float, float]
    centres: tuple[float, float]
    lows: tuple[float, float]
    highs: tuple[float, float]

    def log_factors(self, log_sizes: Floats64) -> Floats64:
        """Change of the log time of p steps with these log sizes, (p, 2) -> (p,)."""
        # A power law fitted on a few sizes goes anywhere beyond them.
        held = np.clip(log_sizes, self.lows, self.highs)
        found: Floats64 = (held - np.asarray(self.centres)) @ np.asarray(self.exponents)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run that a calibrated device was measured with, and its departure from what everything else explains.

    Attributes:
        network: Figures of its kernels (``network_key``).
        circumstances: Number format, layout, phase and compiler.
        batch_size: Samples of its step.
        log_factor: Log time of the run beyond the corrected model.
    """

    network: tuple[float, ...]
    circumstances: str
    batch_size: int
    log_factor: float


_DOUBLINGS_TO_FORGET = 2.0
"""A run's own departure falls to 1/e over so many doublings of the batch."""


def network_key(ops: DistinctOps) -> tuple[float, ...]:
    """Work and traffic of a step, constant and per sample each: equal for equal networks, formats and phases."""
    # Six digits: traces of one network on two machines differ by rounding only.
    sums = np.concatenate([ops.count @ ops.flops, ops.count @ ops.moved_bytes])
    return tuple(float(f"{value:.6g}") for value in sums)


def run_kind(ops: DistinctOps, setup: TrainingSetup) -> str:
    """Kind of a run, such as "half training of convolutions": number format, phase and the larger part of the work."""
    phase = "training" if setup.phase is Phase.TRAIN else "inference"
    work = ops.count * ops.flops.sum(axis=1)
    of_convolutions = work[np.isin(ops.op_class, CONVOLUTIONS)].sum()
    larger = "convolutions" if 2 * of_convolutions > work.sum() else "products"
    return f"{number_format(setup.precision)} {phase} of {larger}"


def run_circumstances(setup: TrainingSetup) -> str:
    """Number formats, layout, phase and compiler of a run."""
    compiler = "compiled" if setup.compile else "eager"
    formats = "+".join(dict.fromkeys(filter(None, (setup.precision, setup.convolution_precision))))
    return "|".join((formats, setup.layout, setup.phase, compiler))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel(SystemOffsets):
    """The model of step times: a fitted ensemble, the correction of one device, and the facts about both.

    ``forerun.fit`` and ``forerun.calibrate`` make one for a device. Every verb takes its file as ``calibration``, and
    ``predict`` the object as ``cost_model``.

    Attributes:
        networks: Members of the ensemble.
        systems: Keys of the measuring systems, in the order of the networks' ``latents`` (see ``system_key``).
        provenance: Tables, rows, date and settings of the fit, error quantiles per tier; see docs/methods.
        class_offsets: Log offset of the time of each ``OpClass`` on a calibrated device; empty for none.
        circumstance_offsets: Log offsets of its steps in half precision, in NHWC and compiled, then those of each
            ``OpClass`` in half precision; empty for none.
        size_law: Dependence of a calibrated device's departure on the size of the step; None for none.
        overall_offset: Log offset of everything a step takes on a calibrated device.
        short_offset: Log offset of its shortest kernels, less for longer ones (``law.shortness``).
        runs: The runs it was measured with.
        devices: Names of the devices of the networks' ``device_offsets``.
        architectures: Names of those of ``architecture_offsets``.
        has_least_launches: Whether launches take ``law.LEAST_LAUNCH_S`` at least; calibrations of before have none.
    """

    kind: ClassVar[str] = "op"
    """Its name among the models that ``forerun fit`` makes."""

    networks: tuple[NetworkWeights, ...]
    provenance: Mapping[str, Any]
    class_offsets: tuple[float, ...] = ()
    circumstance_offsets: tuple[float, ...] = ()
    size_law: SizeLaw | None = None
    overall_offset: float = 0.0
    short_offset: float = 0.0
    runs: tuple[MeasuredRun, ...] = ()
    devices: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    has_least_launches: bool = False

    def save(self, path: str | Path) -> None:
        """Writes the file that ``forerun predict --calibration`` takes.

        Raises:
            CostModelError: The file cannot be written.
        """
        with writes(path, CostModelError):
            save_weights(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """The cost model of a file.

        Raises:
            CostModelError: The file is missing, damaged, or made for other features than this version computes.
        """
        return load_weights(Path(path))

    @property
    def calibrated_device(self) -> str | None:
        """Title of the one device these weights were calibrated on; None for weights of all devices."""
        found = self.provenance.get("calibrated_device")
        return None if found is None else str(found)

    @property
    def calibrated_stack(self) -> str | None:
        """The framework of the calibration, ``pytorch`` or ``keras``; None for weights of all devices."""
        if self.calibrated_device is None:
            return None
        return str(self.provenance.get("framework", DEFAULT_STACK)).partition(" ")[0]

    @property
    def step_cost_s(self) -> float:
        """Time of a step of the calibrated training loop on top of its operations [s]."""
        return float(self.provenance.get("step_cost_s", 0.0))

    @property
    def is_refined(self) -> bool:
        """True if the networks were refined on layers of one device, down to the smallest kernels."""
        return self.provenance.get("method") == "refined"

    @property
    def is_of_one_machine(self) -> bool:
        """True if they were fitted to one machine, whose name is written last."""
        return self.calibrated_device is not None or self.is_refined or bool(self.class_offsets)

    def offsets_of_kernels(self, device: Device) -> Floats64:
        """Log offsets of a device and its architecture by (format, class); zero where nobody measured, (members, c).

        Boards of one die, clock and power compute alike: what was not measured on a board, whose offset stays near zero
        in the fit, is taken from the one of them that is farthest from zero.
        """
        total: Floats64 = np.zeros((len(self.networks), NUM_FORMATS * len(OpClass)))
        own = self._table("device_offsets", self.devices, device.name)
        total = total if own is None else own
        alike = [self._table("device_offsets", self.devices, name) for name in same_die(device)]
        for found in (table for table in alike if table is not None):
            sizes, others = np.abs(total.mean(axis=0)), np.abs(found.mean(axis=0))
            # An offset near zero is what the fit leaves where it saw nothing: a board of the same die then knows more.
            total = np.where((sizes < _LEAST_OFFSET) & (others > sizes), found, total)
        shared = self._table("architecture_offsets", self.architectures, device.architecture)
        return total if shared is None else total + shared

    def _table(self, table: str, names: Sequence[str], name: str) -> Floats64 | None:
        if name not in names:
            return None
        row = names.index(name)
        return np.stack([getattr(network, table)[row] for network in self.networks]).astype(np.float64)

    def nearness_to_runs(
        self, ops: DistinctOps, setups: Sequence[TrainingSetup]
    ) -> tuple[Floats64, Floats64]:
        """Nearness of steps of one network to the measured run most alike, 0 to 1, and its log factor, (p,) each."""
        if not self.runs:
            return np.zeros(len(setups)), np.zeros(len(setups))
        network = network_key(ops)
        asked = [run_circumstances(setup) for setup in setups]
        sizes = np.asarray([setup.batch_size_per_device for setup in setups], dtype=np.float64)
        same = np.asarray(
            [[run.network == network and run.circumstances == own for run in self.runs] for own in asked]
        )
        doublings = np.abs(np.log2(sizes[:, None] / np.asarray([run.batch_size for run in self.runs])))
        nearness = np.where(same, np.exp(-doublings / _DOUBLINGS_TO_FORGET), 0.0)
        factors = np.asarray([run.log_factor for run in self.runs])
        return nearness.max(axis=1), factors[nearness.argmax(axis=1)]


def circumstance_flags(setup: TrainingSetup) -> tuple[bool, bool, bool]:
    """Flags of a step: half precision, NHWC, compiled."""
    return setup.precision.is_half, setup.layout is Layout.NHWC, setup.compile


def shipped_weights_path() -> Path:
    """The weights that come with the package."""
    return Path(__file__).parent / "fitted" / "op_time.safetensors"


def save_weights(weights: CostModel, path: Path) -> None:
    """Writes the ensemble; tensors are named ``network index.field``."""
    tensors = {
        f"{index}.{name}": np.ascontiguousarray(np.atleast_1d(getattr(network, name)))
        for index, network in enumerate(weights.networks)
        for name in NetworkWeights.__slots__
    }
    header = {
        "format_version": WEIGHTS_FORMAT_VERSION,
        "features": FEATURES,
        **{name: value for name, value in fields_of(weights).items() if name != "networks"},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tensors_file(header, tensors, _ENTRY))


def is_cost_model(path: Path) -> bool:
    """True if the header of a file is that of a cost model; any other file, or none, is not one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return _ENTRY in (file.metadata() or {})
    except (SafetensorError, OSError, ValueError):
        return False


def load_weights(path: Path) -> CostModel:
    """Reads a fitted model; a file that has not changed is read once.

    Raises:
        CostModelError: The file is missing, damaged, or made for other features than this version computes.
    """
    if not path.is_file():
        raise CostModelError(
            f"the fitted cost model is missing: expected {path.name} in {path.parent}; reinstall forerun, or make "
            "one with: forerun fit RECORDS --out FILE"
        )
    status = path.stat()
    # A file that was written again is another file, though its path is the same.
    return _load(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _load(path: Path, _changed_ns: int, _size: int) -> CostModel:
    try:
        header, tensors = read_tensors(path, _ENTRY)
        if header is None:
            raise ValueError(f"it has no header '{_ENTRY}'")
        if not isinstance(header, dict):
            raise ValueError("its header is no table")
        _check_version(header, path)
        own = {name: value for name, value in header.items() if name not in ("format_version", "features")}
        found: CostModel = from_plain(CostModel, {**own, "networks": ()}, least=-np.inf)
        check_facts(found.provenance)
        from_plain(Mapping[str, int], found.provenance.get("rows", {}), "provenance rows")
        _check_lists(found)
        return replace(found, networks=_networks(tensors, found))
    except DAMAGE as error:
        raise CostModelError(
            f"the fitted cost model {path.name} is damaged: {in_a_line(error)}; reinstall forerun or fit it again"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _IntervalLaw:
    quantile: float
    base: float
    slope: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """Settings that all records of a fit share."""

    precision: str | None = None
    layout: str | None = None
    compile: bool | None = None
    phase: str | None = None
    optimizer: str | None = None
    image_size: int | None = None
    framework: str | None = None
    framework_version: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The part of a provenance that answers are made with; the rest is for readers."""

    calibrated_device: str | None = None
    framework: str | None = None
    date: str | None = None
    method: str | None = None
    step_cost_s: float = 0.0
    num_layers: int = 0
    num_models: int = 0
    models: tuple[str, ...] = ()
    measured_devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    intervals: Mapping[str, _IntervalLaw] = field(default_factory=dict)
    started_from: Mapping[str, Any] = field(default_factory=dict)
    shared: _Shared = _Shared()
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    dataset_size: int | None = None


def check_facts(provenance: Mapping[str, Any]) -> None:
    """Looks at the facts of a fitted model that answers are made with.

    Raises:
        ValueError: One is missing, or of another type; the message names it.
    """
    names = {field.name for field in fields(_Facts)}
    asked = {name: value for name, value in provenance.items() if name in names}
    found: _Facts = from_plain(_Facts, asked, "provenance")
    for name in ("calibrated_device", "framework", "date"):
        check_name(f"provenance {name}", getattr(found, name) or "")
    if found.calibrated_device is None:
        return
    if found.framework is None or not found.measured_devices or found.date is None:
        raise ValueError("provenance: expected framework, date and measured_devices beside calibrated_device")
    if "calibrated" not in found.intervals:
        raise ValueError("provenance: expected a law in intervals for calibrated steps")
    if not all(kind.split() for kinds in found.measured_devices.values() for kind in kinds):
        raise ValueError("provenance measured_devices: expected kinds of runs, got an empty word")


def _check_lists(header: CostModel) -> None:
    lengths = {"class_offsets": len(OpClass), "circumstance_offsets": NUM_CIRCUMSTANCES + len(OpClass)}
    logs: dict[str, tuple[float, ...]] = {
        name: (getattr(header, name),) for name in ("overall_offset", "short_offset")
    }
    logs["log_factor"] = tuple(run.log_factor for run in header.runs)
    for name, length in lengths.items():
        logs[name] = getattr(header, name)
        if len(logs[name]) not in (0, length):
            raise ValueError(f"{name}: expected {length} numbers or none, got {len(logs[name])}")
    if header.size_law is not None:
        logs |= asdict(header.size_law)
    for name, values in logs.items():
        array = np.asarray(values, dtype=np.float64)
        check_array(name, array, "float64", array.shape, -_LARGEST_LOG, _LARGEST_LOG)
    if any(run.batch_size < 1 for run in header.runs):
        raise ValueError("runs: expected batch sizes of 1 or more")
    # For its refusals: a precision that does not exist is told with the file, not at the first answer.
    parsed_systems(header.systems)


def _networks(tensors: Mapping[str, Any], header: CostModel) -> tuple[NetworkWeights, ...]:
    count = 1 + max((int(name.partition(".")[0]) for name in tensors if name[:1].isdigit()), default=-1)
    count = min(max(count, 1), len(tensors) + 1)
    # Networks of older files see every input in every class.
    seen = {
        f"{index}.reach": np.ones((len(OpClass), len(POINT_FEATURES)), dtype=np.float32)
        for index in range(count)
    }
    tensors = seen | dict(tensors)
    expected = {f"{index}.{name}" for index in range(count) for name in NetworkWeights.__slots__}
    if missing := sorted(expected - set(tensors)):
        raise ValueError(f"{len(missing)} tensors are missing, first {missing[0]}")
    lengths = {name: len(getattr(header, name)) for name in ("systems", "devices", "architectures")}
    for index in range(count):
        _check_network(tensors, index, lengths)
    return tuple(
        NetworkWeights(**{name: tensors[f"{index}.{name}"] for name in NetworkWeights.__slots__})
        for index in range(count)
    )


def _check_network(tensors: Mapping[str, Any], index: int, lengths: Mapping[str, int]) -> None:
    own = {**lengths, "width": len(tensors[f"{index}.first_bias"])}
    for name, shape in _SHAPES.items():
        # Features are divided by their scales.
        low = 1e-6 if name == "scale" else -_LARGEST_WEIGHT
        sizes = tuple(own[axis] if isinstance(axis, str) else axis for axis in shape)
        most = _LARGEST_LOG if name in _LOGS else _LARGEST_WEIGHT
        check_array(f"{index}.{name}", tensors[f"{index}.{name}"], "float32", sizes, max(low, -most), most)


def _check_version(header: Mapping[str, Any], path: Path) -> None:
    if missing := sorted({"features", "systems", "provenance"} - set(header)):
        raise ValueError(f"its header lacks {', '.join(missing)}")
    features = from_plain(tuple[str, ...], header["features"], "features")
    if (header.get("format_version"), features) != (WEIGHTS_FORMAT_VERSION, FEATURES):
        raise CostModelError(
            f"the fitted cost model {path.name} was made for another version of forerun: expected format "
            f"{WEIGHTS_FORMAT_VERSION} with {len(FEATURES)} features, got format "
            f"{in_a_line(header.get('format_version'))[:20]} with {len(features)}; reinstall forerun, or make a "
            "calibration again with: forerun calibrate"
        )
