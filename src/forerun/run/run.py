"""``Run``: one question about one training run, whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any, Unpack

from forerun.answers import Answer
from forerun.errors import InvalidSetupError
from forerun.hardware.cluster import (
    Cluster,
    check_num_devices,
    cluster_of,
    host_link,
    parse_cluster,
    split_spec,
)
from forerun.hardware.device import Device, NumberFormat
from forerun.run.captured import with_captured_settings
from forerun.run.input_pipeline import InputPipeline
from forerun.run.job import Job, find_dataset, parse_tokens
from forerun.run.model import ModelRequest, own_layout, own_settings, own_stack
from forerun.run.options import RunOptions
from forerun.run.parallel import AXES, ContextKind, DeviceLayout, PipelineSchedule, StageSplit, parse_parallel
from forerun.run.saving import (
    Fp8Recipe,
    Loss,
    MasterWeights,
    Offload,
    Quantization,
    Saving,
    Unquantized,
    fused_kernels_of,
    listed_names,
    own_loss_of,
)
from forerun.run.settings import Declared, checked, declared
from forerun.run.setup import AttentionKernel, Layout, Phase, Precision, TrainingSetup
from forerun.run.sharing import Algorithm, FsdpVersion, Sharing, Strategy

__all__ = ["HERE", "Run", "Software", "check_format", "cluster_from", "parse_release"]

HERE = "here"
"""The name of this machine's device."""

_NEWEST_RELEASE = (2, 99)
_MILLI = 1e-3
_KILO, _MEGA = 1e3, 1e6

_OF_LAYOUTS = ("parallel", "sequence_parallel", "keep_gathered", "context_parallel", "pipeline_schedule",
               "virtual_stages", "stage_split", "shard_size", "reshard", "prefetch", "gather_precision",
               "reduce_precision", "fsdp_version", "overlap_tensor", "overlap_update")  # fmt: skip
_OF_SEVERAL = ("strategy", "algorithm", "bucket_mb", "sync_batch_norm", "variation", *_OF_LAYOUTS)
_OF_TRAINING = ("accumulation", "optimizer_implementation")
_OF_LOADER = ("loader_workers", "loader_cores", "sample_kb", "storage_mb_s", "network_mb_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Software of a run.

    Attributes:
        torch_version: PyTorch version, None for the newest known.
        calibration: File of a calibration of the device; ``here`` for this machine's own, if there is one.
        memory_overhead_bytes: Memory of an idle process on the device, None for the usual [bytes].
    """

    torch_version: str | None = None
    calibration: str | None = None
    memory_overhead_bytes: float | None = None

    def __post_init__(self) -> None:
        parse_release(self.torch_version)


def check_format(
    device: Device, precision: Precision, kernel: AttentionKernel = AttentionKernel.PLAIN
) -> None:
    """Raises ``InvalidSetupError`` for fp8 or a library of attention on a device that does not have it.

    Other formats fall back to slower ones.
    """
    if kernel is AttentionKernel.FLASH_3 and device.architecture != "hopper":
        raise InvalidSetupError(
            f"{device.title} does not run FlashAttention-3, which is for Hopper; give --attention-kernel flash-2"
        )
    if precision is Precision.FP8 and NumberFormat.FP8 not in device.peak_flops_per_s:
        raise InvalidSetupError(
            f"{device.title} has no fp8; give --precision bf16, or a device with fp8 such as h100-sxm or rtx-4090"
        )


def parse_release(torch_version: str | None) -> tuple[int, int] | None:
    """Major and minor version of a PyTorch version, None for none.

    >>> parse_release("2.4.1")
    (2, 4)

    Raises:
        InvalidSetupError: The text is not a version of PyTorch.
    """
    if torch_version is None:
        return None
    parts = str(torch_version).strip().partition("+")[0].split(".")
    try:
        release = (int(parts[0]), int(parts[1]))
    except (ValueError, IndexError):
        raise InvalidSetupError(f"a PyTorch version looks like 2.4 or 2.4.1, got '{torch_version}'") from None
    if not (1, 0) <= release <= _NEWEST_RELEASE or min(release) < 0:
        raise InvalidSetupError(f"PyTorch has versions 1.0 to 2.x, got '{torch_version}'; give one of them")
    return release


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Answer):
    """One training run, the whole question; ``Run.of`` makes one from a user's words.

    Attributes:
        model: The network and its inputs.
        setup: Training configuration of one device.
        cluster: The devices.
        sharing: Sharing of the work by several devices.
        job: Dataset and epochs; None if only the step is asked about.
        loader: The input pipeline of each device; None if batches are always ready.
        software: Versions and calibration.
        price_usd_per_hour: Price of one device, None if not known [USD/h].
        module: The model object, if the model has no name; it takes no part in comparisons of runs.

    Examples:
        >>> run = Run.of("torchvision:resnet50", device="8xa100-sxm4-40gb", batch_size=64, precision="amp")
        >>> run.cluster.num_devices, run.batch_size_global
        (8, 512)
        >>> [each.setup.batch_size_per_device for each in run.over(batch_sizes=[32, 64])]
        [32, 64]
    """

    model: ModelRequest
    setup: TrainingSetup
    cluster: Cluster
    sharing: Sharing = field(default_factory=Sharing)
    job: Job | None = None
    loader: InputPipeline | None = None
    software: Software = field(default_factory=Software)
    price_usd_per_hour: float | None = None
    module: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, model: Any, *, device: str | Device | Cluster, **options: Unpack[RunOptions]) -> Run:
        """A run from a model, a device and settings by name; see ``RunOptions`` for the settings.

        Args:
            model: A specification such as ``torchvision:resnet50``, or a model object.
            device: A name, ``4x8xh100-sxm``, a TOML file, ``here``, a ``Device`` or a ``Cluster``.
            options: The settings.

        Raises:
            UsageError: A setting is not known, has an impossible value, contradicts another, or has no meaning
                in the rest of the question.
        """
        return cls._of_settings(model, device, checked(options, RunOptions))

    @classmethod
    def _of_settings(cls, model: Any, device: str | Device | Cluster, given: Mapping[str, Any]) -> Run:
        named = cluster_from(device, given)
        is_one = named.num_devices == 1 and given.get("num_devices") is None
        given = with_captured_settings(model, given, one_device=is_one)
        setup = _setup(model, given)
        cluster = cluster_from(device, given)
        if cluster.num_devices > 1 and setup.phase is not Phase.TRAIN:
            raise InvalidSetupError(
                f"several devices are predicted in training only, got phase {setup.phase}; ask for one device"
            )
        if cluster.num_devices == 1 and given.get("num_devices") is None:
            _refuse(given, _OF_SEVERAL, "there is one device", "give several, such as --num-devices 8")
        shape = given.get("input_shape")
        return cls(
            model=ModelRequest(
                model=model if isinstance(model, str) else type(model).__name__,
                image_size=given.get("image_size"),
                input_shape=None if shape is None else tuple(shape),
                sequence_length=given.get("sequence_length"),
            ),
            setup=setup,
            cluster=cluster,
            sharing=_sharing(given, cluster),
            job=_job(given),
            loader=_loader(given),
            software=Software(
                torch_version=given.get("torch_version"),
                calibration=_calibration(device, given),
                memory_overhead_bytes=given.get("memory_overhead_bytes"),
            ),
            price_usd_per_hour=given.get("price_usd_per_hour"),
            module=None if isinstance(model, str) else model,
        )

    def __post_init__(self) -> None:
        check_format(self.cluster.device, self.setup.precision, self.setup.attention_kernel)
        if self.setup.saving.offload is not Offload.NONE:
            host_link(self.cluster.device)
        shares_weights = self.sharing.layout is not None or self.sharing.strategy.stage == 3
        if (
            self.setup.saving.unquantized is Unquantized.FP32
            and self.cluster.num_devices > 1
            and shares_weights
        ):
            raise InvalidSetupError(
                "--unquantized fp32 cannot be used where devices share the weights of a block, which have one format "
                "there; leave it out"
            )
        if self.stack == "keras" and (self.setup.saving != Saving() or self.setup.precision is Precision.FP8):
            raise InvalidSetupError(
                "ways to save memory and fp8 are known of PyTorch models, got one of Keras; leave them out"
            )

    @property
    def stack(self) -> str:
        """The framework of the model, ``pytorch`` or ``keras``."""
        return own_stack(self.module if self.module is not None else self.model.model)

    @property
    def batch_size_per_device(self) -> int:
        """Batch size of one device and step, all its micro-steps together."""
        return self.setup.batch_size_per_device * self.sharing.num_accumulation_steps

    @property
    def layout(self) -> DeviceLayout:
        """Devices along each axis; without ``--parallel`` all take samples of their own.

        Raises:
            InvalidSetupError: The devices are no multiple of those that share a sample.
        """
        found = self.sharing.layout or DeviceLayout()
        others = found.tensor * found.pipeline * found.context
        if self.cluster.num_devices % others:
            raise InvalidSetupError(
                f"{found.text} needs a multiple of {others} devices, got {self.cluster.num_devices}; give "
                f"{others * -(-self.cluster.num_devices // others)} devices, or a smaller tp, pp or cp"
            )
        return replace(found, data=self.cluster.num_devices // others)

    @property
    def num_replicas(self) -> int:
        """Groups of devices that take samples of their own."""
        return self.layout.data

    @property
    def batch_size_global(self) -> int:
        """Samples of one step of all devices."""
        return self.num_replicas * self.batch_size_per_device

    @property
    def validation_setup(self) -> TrainingSetup | None:
        """The setup of the validation after each epoch, None without one."""
        if self.job is None or not self.job.num_validation_samples:
            return None
        return replace(self.setup, phase=Phase.INFERENCE, optimizer="none")

    def over(
        self,
        *,
        devices: Iterable[str | Device] | None = None,
        precisions: Iterable[str] | None = None,
        layouts: Iterable[str] | None = None,
        batch_sizes: Iterable[int] | None = None,
        num_devices: Iterable[int] | None = None,
        strategies: Iterable[str] | None = None,
    ) -> tuple[Run, ...]:
        """This run for every combination of the values given, the last axis changing fastest.

        Args:
            devices: Devices instead of this one, each alone or as ``8xt4``.
            precisions: Precisions.
            layouts: Memory orders of images.
            batch_sizes: Samples of one device and step.
            num_devices: Numbers of devices of the same machines.
            strategies: Strategies that share the work.

        Raises:
            UsageError: A value is impossible for its setting.
        """
        axes = {
            "device": devices,
            "precision": precisions,
            "layout": layouts,
            "batch_size": batch_sizes,
            "num_devices": num_devices,
            "strategy": strategies,
        }
        used = {name: tuple(values) for name, values in axes.items() if values is not None}
        return tuple(self._with(dict(zip(used, values, strict=True))) for values in product(*used.values()))

    def _with(self, values: Mapping[str, Any]) -> Run:
        for name, value in values.items():
            if value is None:
                raise InvalidSetupError(
                    f"{name.replace('_', ' ')} must be a whole number or a name, got None"
                )
        device = values.get("device")
        given = checked({name: value for name, value in values.items() if name != "device"}, RunOptions)
        cluster, software = self.cluster, self.software
        if device is not None:
            cluster = cluster_from(device, {})
            software = replace(software, calibration=_calibration(device, {}))
        if "num_devices" in given:
            cluster = cluster.with_devices(given["num_devices"])
        setup = self.setup
        if "precision" in given:
            setup = replace(setup, precision=Precision(given["precision"]))
        if "layout" in given:
            setup = replace(setup, layout=Layout(given["layout"]))
        if "batch_size" in given:
            setup = replace(setup, batch_size_per_device=given["batch_size"])
        sharing = self.sharing
        if "strategy" in given:
            sharing = replace(sharing, strategy=Strategy(given["strategy"]))
        return replace(self, cluster=cluster, software=software, setup=setup, sharing=sharing)

    def json_fields(self) -> dict[str, Any]:
        """The run as flat settings under the names of ``RunOptions``, those without a value left out."""
        setup, sharing, job, loader = self.setup, self.sharing, self.job, self.loader
        several = self.cluster.num_devices > 1
        intra, inter = self.cluster.intra_link, self.cluster.inter_link
        found = {
            "model": self.model.model,
            "device": self.cluster.spec,
            "image_size": self.model.image_size,
            "input_shape": None if self.model.input_shape is None else list(self.model.input_shape),
            "sequence_length": self.model.sequence_length,
            "batch_size": setup.batch_size_per_device,
            "precision": str(setup.precision),
            "layout": str(setup.layout),
            "compile": setup.compile,
            "optimizer": setup.optimizer,
            "optimizer_implementation": str(setup.optimizer_implementation),
            "phase": str(setup.phase),
            "fused_attention": setup.fused_attention,
            "attention_kernel": _unless(str(setup.attention_kernel), "plain"),
            "accumulation": sharing.num_accumulation_steps,
            **_saving_fields(setup.saving),
            "intra": intra.name if several and intra is not None else None,
            "inter": inter.name if several and inter is not None else None,
            "strategy": str(sharing.strategy) if several else None,
            "algorithm": str(sharing.algorithm) if several else None,
            "bucket_mb": sharing.bucket_bytes / 1024**2 if several else None,
            "sync_batch_norm": sharing.sync_batch_norm if several else None,
            "variation": sharing.coefficient_of_variation,
            **(_layout_fields(self) if several else {}),
            "dataset_size": job.num_samples if job and job.num_tokens is None else None,
            "tokens": job.num_tokens if job else None,
            "epochs": job.num_epochs if job and job.num_tokens is None else None,
            "validation_size": job.num_validation_samples or None if job else None,
            "startup_s": job.startup_s or None if job else None,
            "checkpoint_s": job.checkpoint_s or None if job else None,
            "loader_ms": loader.sample_cost_s / _MILLI if loader else None,
            "loader_workers": loader.num_workers if loader else None,
            "loader_cores": loader.num_cores if loader else None,
            "sample_kb": loader.sample_bytes / _KILO or None if loader else None,
            "storage_mb_s": _in(loader.storage_bytes_per_s, _MEGA) if loader else None,
            "network_mb_s": _in(loader.network_bytes_per_s, _MEGA) if loader else None,
            "price_usd_per_hour": self.price_usd_per_hour,
            "torch_version": self.software.torch_version,
            "calibration": self.software.calibration,
            "memory_overhead_bytes": self.software.memory_overhead_bytes,
        }
        return {name: value for name, value in found.items() if value is not None}


def _unless(value: str, usual: str) -> str | None:
    return None if value == usual else value


def _layout_fields(run: Run) -> dict[str, Any]:
    """The settings of layouts that differ from their defaults, under the names of ``RunOptions``."""
    sharing, plain = run.sharing, Sharing()
    found: dict[str, Any] = {
        "shard_size": sharing.shard_size,
        "reshard": None if sharing.reshard == plain.reshard else sharing.reshard,
        "prefetch": None if sharing.prefetch == plain.prefetch else sharing.prefetch,
        "gather_precision": None if sharing.gather_half == plain.gather_half else "fp32",
        "reduce_precision": None if sharing.reduce_half == plain.reduce_half else "half",
        "fsdp_version": _unless(str(sharing.fsdp_version), str(plain.fsdp_version)),
        "overlap_tensor": sharing.overlap_tensor or None,
        "overlap_update": sharing.overlap_update or None,
    }
    if sharing.layout is None:
        return found
    layout, usual = run.layout, DeviceLayout()
    return found | {
        "parallel": layout.text,
        "sequence_parallel": None if layout.sequence_parallel else False,
        "keep_gathered": layout.keep_gathered or None,
        "context_parallel": str(layout.context_kind) if layout.context > 1 else None,
        "pipeline_schedule": str(layout.schedule) if layout.schedule != usual.schedule else None,
        "virtual_stages": layout.virtual_stages if layout.virtual_stages > 1 else None,
        "stage_split": str(layout.stage_split) if layout.stage_split != usual.stage_split else None,
    }


def _saving_fields(saving: Saving) -> dict[str, Any]:
    """The ways to save memory that are used, under the names of ``RunOptions``."""
    plain = Saving()
    found = {
        "recompute": saving.recompute,
        "lora": saving.lora_rank,
        "lora_targets": ",".join(saving.lora_targets) or None,
        "lora_dropout": saving.lora_dropout,
        "quantize": saving.quantize,
        "unquantized": saving.unquantized,
        "freeze": ",".join(saving.freeze) or None,
        "loss": saving.loss,
        "offload": saving.offload,
        "master_weights": saving.master_weights,
        "fused_kernels": ",".join(saving.fused_kernels) or None,
        "fp8_recipe": saving.fp8_recipe,
    }
    same = {"recompute": plain.recompute, "loss": plain.loss, "offload": plain.offload, "lora_dropout": 0.0}
    numbers = ("lora", "lora_dropout")
    return {
        name: None if value is None or value == same.get(name) else value if name in numbers else str(value)
        for name, value in found.items()
    }


def _in(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _flags(names: Iterable[str]) -> str:
    known: Mapping[str, Declared] = declared(RunOptions)
    return ", ".join(known[name].flag for name in names)


def _refuse(given: Mapping[str, Any], names: Iterable[str], why: str, otherwise: str) -> None:
    """Refuses settings that have no meaning in the rest of the question."""
    useless = [name for name in names if given.get(name) not in (None, False)]
    if useless:
        raise InvalidSetupError(f"{_flags(useless)} cannot be used here: {why}; leave it out, or {otherwise}")


def _setup(model: Any, given: Mapping[str, Any]) -> TrainingSetup:
    phase = Phase(given.get("phase", Phase.TRAIN))
    own = own_settings(model)
    if phase is not Phase.TRAIN:
        own.pop("optimizer", None)
    given = {**own, **given}
    optimizer = str(given.get("optimizer", "sgd" if phase is Phase.TRAIN else "none")).lower()
    if phase is not Phase.TRAIN:
        why = f"phase {phase} updates no weights"
        _refuse(given, _OF_TRAINING, why, "ask for --phase train")
        if optimizer != "none":
            _refuse(given, ("optimizer",), why, "ask for --phase train")
    names = ("precision", "optimizer_implementation", "attention_kernel")
    words = {name: given[name] for name in names if name in given}
    return TrainingSetup(
        batch_size_per_device=given.get("batch_size", 32),
        layout=Layout(given.get("layout") or own_layout(model)),
        compile=given.get("compile", False),
        optimizer=optimizer,
        phase=phase,
        fused_attention=given.get("fused_attention", True),
        keeps_gradients=given.get("accumulation", 1) > 1,
        saving=_saving(given),
        **words,
    )


def _saving(given: Mapping[str, Any]) -> Saving:
    kinds = {
        "quantize": Quantization,
        "unquantized": Unquantized,
        "loss": Loss,
        "offload": Offload,
        "master_weights": MasterWeights,
        "fp8_recipe": Fp8Recipe,
    }
    chosen: dict[str, Any] = {name: kind(given[name]) for name, kind in kinds.items() if name in given}
    if "recompute" in given:
        chosen["recompute"] = str(given["recompute"]).strip().lower().replace("_", "-")
    fused = given.get("fused_kernels", ())
    chosen.setdefault("loss", own_loss_of(fused))
    return Saving(
        lora_rank=given.get("lora"),
        lora_targets=listed_names(given.get("lora_targets", ())),
        lora_dropout=given.get("lora_dropout", 0.0),
        freeze=listed_names(given.get("freeze", ())),
        fused_kernels=fused_kernels_of(fused),
        **chosen,
    )


def cluster_from(device: str | Device | Cluster, given: Mapping[str, Any]) -> Cluster:
    """The devices that a name, with numbers and links beside it, stands for.

    Args:
        device: A device or its name, ``4x8xh100-sxm``, a TOML file of either, or a cluster.
        given: Settings; only ``num_devices``, ``num_nodes``, ``intra`` and ``inter`` are read.

    Raises:
        UsageError: A name is not known, or the numbers contradict each other.
    """
    intra, inter = given.get("intra"), given.get("inter")
    if isinstance(device, Cluster):
        found = device
        if intra or inter:
            found = cluster_of(
                device.device, device.num_nodes, device.num_devices_per_node, intra=intra, inter=inter
            )
    elif isinstance(device, Device):
        found = cluster_of(device, 1, 1, intra=intra, inter=inter)
    else:
        found = parse_cluster(device, intra=intra, inter=inter)
    num_devices, num_nodes = given.get("num_devices"), given.get("num_nodes")
    if num_devices is not None or num_nodes is not None:
        number = num_devices if num_devices is not None else found.num_devices
        check_num_devices(number)
        if found.num_devices > 1 and number != found.num_devices:
            raise InvalidSetupError(
                f"'{found.spec}' has {found.num_devices} devices, but {number} are asked for; leave one of them out"
            )
        # A device alone says nothing of machines: all are in one unless their number is given.
        found = found.with_devices(number, num_nodes or (1 if found.num_devices == 1 else None))
    if found.num_devices == 1:
        _refuse(given, ("intra", "inter"), "there is one device", "give several, such as --num-devices 8")
    elif found.num_nodes == 1:
        _refuse(given, ("inter",), "there is one node", "give several, such as --nodes 2")
    return found


def _sharing(given: Mapping[str, Any], cluster: Cluster) -> Sharing:
    known = {
        "strategy": "strategy",
        "algorithm": "algorithm",
        "accumulation": "num_accumulation_steps",
        "sync_batch_norm": "sync_batch_norm",
        "variation": "coefficient_of_variation",
    }
    values: dict[str, Any] = {target: given[name] for name, target in known.items() if name in given}
    if "strategy" in values:
        values["strategy"] = Strategy(values["strategy"])
    if "algorithm" in values:
        values["algorithm"] = Algorithm(values["algorithm"])
    if "bucket_mb" in given:
        values["bucket_bytes"] = given["bucket_mb"] * 1024**2
    plain = ("shard_size", "reshard", "prefetch", "overlap_tensor", "overlap_update")
    values |= {name: given[name] for name in plain if name in given}
    if "fsdp_version" in given:
        values["fsdp_version"] = FsdpVersion(given["fsdp_version"])
    if "gather_precision" in given:
        values["gather_half"] = given["gather_precision"] == "half"
    if "reduce_precision" in given:
        values["reduce_half"] = given["reduce_precision"] == "half"
    values["layout"] = _layout(given, cluster)
    found = Sharing(**values)
    _check_fsdp(found, given, cluster)
    return found


def _layout(given: Mapping[str, Any], cluster: Cluster) -> DeviceLayout | None:
    """The layout of ``--parallel`` and the settings beside it."""
    needs = {
        "sequence_parallel": "tp",
        "keep_gathered": "tp",
        "overlap_tensor": "tp",
        "context_parallel": "cp",
        "pipeline_schedule": "pp",
        "virtual_stages": "pp",
        "stage_split": "pp",
    }
    axes = parse_parallel(given["parallel"], cluster.num_devices) if "parallel" in given else {}
    sizes = {short: axes.get(name, 1) for short, name in AXES.items()}
    for name, axis in needs.items():
        if name in given and sizes[axis] == 1:
            _refuse(given, (name,), f"there is no {axis}", f"give --parallel {axis}=2")
            if axis == "tp":
                raise InvalidSetupError(f"{_flags((name,))} needs tensor parallelism; give --parallel tp=2")
    if not axes:
        return None
    words = {
        "context_parallel": ("context_kind", ContextKind),
        "pipeline_schedule": ("schedule", PipelineSchedule),
        "stage_split": ("stage_split", StageSplit),
    }
    chosen: dict[str, Any] = {
        target: kind(given[name]) for name, (target, kind) in words.items() if name in given
    }
    plain: dict[str, Any] = {
        name: given[name]
        for name in ("sequence_parallel", "keep_gathered", "virtual_stages")
        if name in given
    }
    return DeviceLayout(**{**axes, **chosen, **plain})


def _check_fsdp(sharing: Sharing, given: Mapping[str, Any], cluster: Cluster) -> None:
    """Refuses settings of FSDP without it, and shards that do not divide the devices."""
    if sharing.strategy.stage < 3 and sharing.strategy is not Strategy.AUTO:
        useless = [
            name
            for name in ("shard_size", "reshard", "prefetch", "gather_precision", "fsdp_version")
            if name in given
        ]
        if useless:
            raise InvalidSetupError(
                f"{_flags(useless)} belongs to fsdp, got strategy {sharing.strategy}; give --strategy fsdp or hsdp"
            )
    if (
        sharing.overlap_update
        and sharing.strategy.stage not in (1, 2)
        and sharing.strategy is not Strategy.AUTO
    ):
        raise InvalidSetupError(
            f"--overlap-update belongs to zero1 and zero2, got strategy {sharing.strategy}; give --strategy zero1"
        )
    if sharing.shard_size is not None and sharing.strategy is not Strategy.HSDP:
        raise InvalidSetupError("--shard-size belongs to hsdp; give --strategy hsdp")
    layout = sharing.layout
    data = cluster.num_devices if layout is None else layout.data
    shard_size = sharing.shard_size
    if shard_size is not None and data % shard_size:
        fitting = [k for k in range(1, data + 1) if data % k == 0]
        raise InvalidSetupError(
            f"groups of {shard_size} devices do not divide {data} data groups; give --shard-size "
            f"{min(fitting, key=lambda k: abs(k - shard_size))}"
        )
    if layout is not None and sharing.strategy is Strategy.MIRRORED:
        raise InvalidSetupError("--parallel cannot be used with strategy mirrored; give ddp, zero1 or fsdp")
    if layout is not None and layout.pipeline > 1 and sharing.strategy is Strategy.ZERO2:
        raise InvalidSetupError(
            "zero2 reduces gradients in every micro-step, which no pipeline does; give --strategy zero1"
        )


def _job(given: Mapping[str, Any]) -> Job | None:
    if "tokens" in given:
        return _job_of_tokens(given)
    dataset, dataset_size = given.get("dataset"), given.get("dataset_size")
    if dataset is not None and dataset_size is not None:
        raise InvalidSetupError("give either a dataset or a dataset size, not both")
    if dataset is None and dataset_size is None:
        needing = {
            "epochs": "epochs",
            "validation_size": "validation size",
            "validate": "validate",
            "startup_s": "start-up time",
            "checkpoint_s": "checkpoint time",
        }
        needed = [words for name, words in needing.items() if given.get(name)]
        if needed:
            raise InvalidSetupError(
                f"{', '.join(needed)}: expected a dataset as well; give --dataset NAME or --dataset-size N"
            )
        return None
    known = find_dataset(dataset) if dataset is not None else None
    validation_size = given.get("validation_size")
    if given.get("validate") and validation_size is None:
        if known is None or not known.num_validation_samples:
            whose = f"the dataset {known.name} has" if known else "a dataset size alone has"
            raise InvalidSetupError(f"{whose} no validation split to evaluate; give --validation-size N")
        validation_size = known.num_validation_samples
    num_samples = known.num_training_samples if known else dataset_size
    assert num_samples is not None
    return Job(
        num_samples=num_samples,
        num_epochs=given.get("epochs"),
        num_validation_samples=validation_size or 0,
        startup_s=given.get("startup_s", 0.0),
        checkpoint_s=given.get("checkpoint_s", 0.0),
    )


def _job_of_tokens(given: Mapping[str, Any]) -> Job:
    """One pass over as many samples as hold the tokens."""
    _refuse(
        given,
        ("dataset", "dataset_size", "epochs", "validation_size", "validate"),
        "--tokens is the length of the whole job",
        "leave --tokens out",
    )
    length = given.get("sequence_length")
    if length is None:
        raise InvalidSetupError(
            "--tokens needs the tokens of one sample: give --sequence-length, such as 4096"
        )
    tokens = parse_tokens(given["tokens"])
    return Job(
        num_samples=max(1, ceil(tokens / length)),
        num_epochs=1.0,
        num_tokens=tokens,
        startup_s=given.get("startup_s", 0.0),
        checkpoint_s=given.get("checkpoint_s", 0.0),
    )


def _loader(given: Mapping[str, Any]) -> InputPipeline | None:
    cost_ms = given.get("loader_ms")
    if cost_ms is None:
        named = [name for name in _OF_LOADER if given.get(name) is not None]
        if named:
            raise InvalidSetupError(
                f"{_flags(named)}: the input pipeline needs --loader-ms as well; give the time of a sample"
            )
        return None

    def scaled(name: str, unit: float) -> float | None:
        value = given.get(name)
        return None if value is None else value * unit

    return InputPipeline(
        sample_cost_s=cost_ms * _MILLI,
        num_workers=given.get("loader_workers", 8),
        num_cores=given.get("loader_cores"),
        sample_bytes=scaled("sample_kb", _KILO) or 0.0,
        storage_bytes_per_s=scaled("storage_mb_s", _MEGA),
        network_bytes_per_s=scaled("network_mb_s", _MEGA),
    )


def _calibration(device: str | Device | Cluster, given: Mapping[str, Any]) -> str | None:
    named = given.get("calibration")
    if named is not None:
        return str(Path(named))
    is_here = isinstance(device, str) and split_spec(device.strip())[2].lower() == HERE
    return HERE if is_here else None
