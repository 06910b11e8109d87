"""``Run``: one question about one training run, whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Unpack, cast

from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError
from forerun.question.devices.cluster import (
    Cluster,
    check_num_devices,
    cluster_of,
    host_link,
    parse_cluster,
    split_spec,
)
from forerun.question.devices.device import Device, NumberFormat
from forerun.question.job import (
    Batching,
    InputPipeline,
    Job,
    Samples,
    job_from,
    loader_from,
    read_lengths,
    size_of_images,
)
from forerun.question.model import ModelRequest, capture_path, own_settings, own_stack
from forerun.question.options import RunOptions
from forerun.question.post_training import Algorithm, PostTraining
from forerun.question.saving import (
    NO_SAVING,
    Fp8Recipe,
    FusedKernel,
    MasterWeights,
    Offload,
    Unquantized,
    saving_from,
)
from forerun.question.settings import (
    changed_fields,
    checked,
    declared,
    from_settings,
    names_needing,
    refuse,
    told,
)
from forerun.question.setup import (
    PURE_OF,
    AttentionKernel,
    Phase,
    Precision,
    Software,
    TrainingSetup,
    settings_of_release,
)
from forerun.question.sharing import AXES, DeviceLayout, Sharing, Strategy, parse_parallel, sharing_from

if TYPE_CHECKING:
    from forerun.graph.shards import Shards

HERE = "here"
"""The name of this machine's device."""

_GIVE_SEVERAL = "give several, such as --num-devices 8"
_SEVERAL = ("several", "fsdp")
_OF_SEVERAL = (
    *names_needing(Sharing, *_SEVERAL, *AXES),
    "parallel",
    *names_needing(DeviceLayout, *AXES),
)
"""Settings that have no meaning with one device."""

_WIDE_BYTES = 4.0
_FILES = {"recipe", "config"}
_OF_CLUSTER = ("num_devices", "num_nodes", "intra", "inter")
_LENGTHS = {"dataset", "dataset_size", "tokens"}
_OF_JOB = {"dataset", "validate", *declared(Job)}


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
        known = "bf16" if NumberFormat.BF16 in device.peak_flops_per_s else "amp"
        raise InvalidSetupError(
            f"{device.title} has no fp8; give --precision {known}, or a device with fp8 such as h100-sxm or rtx-4090"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Answer):
    """One training run, the whole question; ``Run.of`` makes one from a user's words.

    Attributes:
        model: The network and its inputs.
        setup: Training configuration of one device.
        cluster: The devices.
        sharing: Sharing of the work by several devices.
        job: Dataset and epochs; None if only the step is asked about.
        samples: Lengths of the samples, where they are unequal.
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
    samples: Samples = field(default_factory=Samples)
    loader: InputPipeline | None = None
    software: Software = field(default_factory=Software)
    price_usd_per_hour: float | None = None
    module: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, model: Any, *, device: str | Device | Cluster, **options: Unpack[RunOptions]) -> Run:
        """A run from a model, a device and settings by name; see ``RunOptions`` for the settings.

        Args:
            model: A specification such as ``torchvision:resnet50``, or a model object; None if ``config`` names it.
            device: A name, ``4x8xh100-sxm``, a TOML file, ``here``, a ``Device`` or a ``Cluster``.
            options: The settings.

        Raises:
            UsageError: A setting is not known, has an impossible value, contradicts another, or has no meaning
                in the rest of the question.
        """
        given: Mapping[str, Any] = checked(options, RunOptions)
        # Files of tools and captured scripts are read by a module that other questions do without.
        if model is None:
            from forerun.question.recipes import config_model

            model = config_model(given.get("config"))
        cluster = cluster_from(device, given)
        waiting: dict[str, Any] = {}
        if capture_path(model) is not None:
            from forerun.question.recipes import with_captured_settings

            # A script that ran on several devices says so itself, unless the user names a number.
            is_one = cluster.num_devices == 1 and given.get("num_devices") is None
            given = with_captured_settings(model, given, one_device=is_one)
            cluster = cluster_from(device, given)
        if given.keys() & _FILES:
            from forerun.question.recipes import recipe_settings

            given, waiting = recipe_settings(given, model, cluster.device.architecture, cluster.num_devices)
        if given.get("lengths") is not None and _LENGTHS.isdisjoint(given):
            counted = read_lengths(given["lengths"]).num_samples
            given = given if counted is None else {**given, "dataset_size": counted}
        if (size := size_of_images(model, given)) is not None:
            given = {**given, "image_size": size}
        setup = _setup(model, given)
        if cluster.num_devices > 1 and setup.phase is not Phase.TRAIN:
            raise InvalidSetupError(
                f"several devices are predicted in training only, got phase {setup.phase}; ask for one device"
            )
        # One device that was asked for by number is a point of a search: settings of several wait for the next.
        if cluster.num_devices == 1 and given.get("num_devices") is None:
            refuse(given, _OF_SEVERAL, "there is one device", _GIVE_SEVERAL)
        name = model if isinstance(model, str) else type(model).__name__
        run = cls(
            model=ModelRequest(model=name, **from_settings(ModelRequest, given)),
            setup=setup,
            cluster=cluster,
            sharing=sharing_from(given, cluster.num_devices),
            job=job_from(given),
            samples=Samples(**from_settings(Samples, given)),
            loader=loader_from(given),
            software=Software(**{"calibration": _own_calibration(device), **from_settings(Software, given)}),
            price_usd_per_hour=given.get("price_usd_per_hour"),
            module=None if isinstance(model, str) else model,
        )
        # A search adds devices and axes to the run: the tool's settings of them are set beforehand.
        return run.with_(**waiting) if waiting else run

    def __post_init__(self) -> None:
        check_format(self.cluster.device, self.setup.precision, self.setup.attention_kernel)
        if self.setup.saving.offload is not Offload.NONE:
            host_link(self.cluster.device)
        saving = self.setup.saving
        is_mixed = saving.unquantized is Unquantized.FP32 and self.cluster.num_devices > 1
        if is_mixed and (self.sharing.layout.divides_model or self.sharing.strategy.stage == 3):
            raise InvalidSetupError(
                "--unquantized fp32 cannot be used where devices share the weights of a block, which have one format "
                "there; leave it out"
            )
        if FusedKernel.EXPERTS in saving.fused_kernels and saving.fp8_recipe is not Fp8Recipe.MX:
            raise InvalidSetupError(
                "--fused-kernels experts are Transformer Engine's kernels for MXFP8; give --precision fp8 --fp8-recipe "
                "mx"
            )
        quantize = saving.quantize
        # litgpt/finetune/lora.py: the weights of its FSDP cannot be those of bitsandbytes.
        if self.software.recipe == "litgpt" and quantize is not None and self.cluster.num_devices > 1:
            raise InvalidSetupError(
                f"litgpt quantizes weights on one device only, got {self.cluster.num_devices} and --quantize "
                f"{quantize}; give one device, or leave it out"
            )
        self._check_samples()
        if self.stack == "keras" and (
            self.setup.saving != NO_SAVING or self.setup.precision is Precision.FP8
        ):
            raise InvalidSetupError(
                "ways to save memory and fp8 work for PyTorch models only, got a Keras model; leave them out"
            )

    def _check_samples(self) -> None:
        lengths, batching = self.samples.lengths, self.samples.batching
        if not self.setup.generates:
            if lengths is None and batching is not Batching.PADDED:
                raise InvalidSetupError(
                    f"--batching {batching} has no meaning without --lengths; give the lengths of your samples"
                )
            return
        known = (Batching.PADDED, Batching.PADDING_FREE)[: 2 if self.setup.phase is Phase.TRAIN else 1]
        if lengths is not None or batching not in known:
            raise InvalidSetupError(
                "a step that writes its answers has their lengths by --answer-lengths instead of --lengths, and "
                f"--batching {' or '.join(known)}, got {batching if lengths is None else '--lengths'}; leave it out"
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
        """Devices along each axis; those that no axis divides take samples of their own.

        Raises:
            InvalidSetupError: The devices are no multiple of those that share a sample.
        """
        found, others = self.sharing.layout, self.sharing.layout.num_sharing
        if self.cluster.num_devices % others:
            raise InvalidSetupError(
                f"{found.text} needs a multiple of {others} devices, got {self.cluster.num_devices}; give "
                f"{others * -(-self.cluster.num_devices // others)} devices, or a smaller tp, pp or cp"
            )
        number = self.cluster.num_devices // others
        return found if found.data == number else replace(found, data=number)

    @property
    def is_divided(self) -> bool:
        """True if a step is more than one micro-step on one device."""
        return self.cluster.num_devices > 1 or self.sharing.num_accumulation_steps > 1

    @property
    def uses_layout(self) -> bool:
        """True if the devices divide the model or its states by units, or several passes of post-training."""
        sharing, algorithm = self.sharing, self.setup.post.algorithm
        return self.cluster.num_devices > 1 and (
            sharing.layout.divides_model or sharing.strategy.stage > 0 or algorithm is not Algorithm.SFT
        )

    @property
    def num_shards(self) -> int:
        """Devices among which the strategy divides states; 1 where each has all of them."""
        layout, sharing = self.layout, self.sharing
        if sharing.strategy is not Strategy.HSDP:
            return layout.replicated if sharing.strategy.stage else 1
        # Each node holds a whole copy of the state, on as many of its devices as divide the replicas evenly.
        usual = max(1, min(layout.replicated, self.cluster.num_devices_per_node // layout.tensor))
        return sharing.shard_size or max(k for k in range(1, usual + 1) if layout.replicated % k == 0)

    @property
    def shards(self) -> Shards:
        """Devices that divide the operations of a step."""
        from forerun.graph.shards import Shards

        layout = self.layout
        return Shards(
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
            whole_experts=layout.whole_experts and layout.tensor > 1,
            sequence_parallel=layout.sequence_parallel and layout.tensor > 1,
        )

    @property
    def compute_setup(self) -> TrainingSetup:
        """Setup of the operations of a device: where units are divided, mixed precision has weights in half precision.

        Frameworks that divide states or models hold or gather weights in half precision and update those in fp32;
        replicas cast them (autocast). DeepSpeed updates fp32 copies of weights that are in half precision.
        """
        if self.uses_layout:
            setup = self.setup.with_half_weights()
            if not self.has_masters or setup.saving.master_weights is MasterWeights.FP32:
                return setup
            return replace(setup, saving=replace(setup.saving, master_weights=MasterWeights.FP32))
        if self.setup.generates and self.samples.batching is Batching.PADDING_FREE:
            return replace(self.setup, post=replace(self.setup.post, packs_answers=True))
        return self.setup

    @property
    def wide_factor(self) -> float:
        """Bytes of a weight that the optimizer updates over those of one that computes, where units are divided.

        Beside adapters the frozen weights stay in half precision, and the adapters are traced in fp32.
        """
        widens = self.setup.precision in PURE_OF and self.setup.saving.lora_rank is None
        return _WIDE_BYTES / 2 if widens else 1.0

    @property
    def has_masters(self) -> bool:
        """True if fp32 copies of weights in half precision are updated: as told, and else under ZeRO-2 and ZeRO-3.

        Source: deepspeedai/DeepSpeed: deepspeed/runtime/zero/stage3.py, ``_create_fp32_partitions``.
        """
        setup, saving = self.setup, self.setup.saving
        chosen = saving.master_weights
        if chosen is None and saving.lora_rank is None and setup.phase is Phase.TRAIN:
            is_deepspeed = self.uses_layout and self.sharing.strategy in (Strategy.ZERO2, Strategy.ZERO3)
            return is_deepspeed and setup.precision in PURE_OF.values()
        return chosen is MasterWeights.FP32 and setup.precision.is_half

    @property
    def gradient_factor(self) -> float:
        """Bytes of a gradient that is kept and reduced over those of one that a product makes.

        Beside master weights in fp32 replicas of Megatron-LM, nanotron and DeepSpeed's ZeRO-1 sum their gradients in
        fp32 too, unless they reduce them in half precision (NVIDIA/Megatron-LM: ``megatron/core/distributed``).
        """
        sharing, is_full = self.sharing, self.setup.saving.lora_rank is None
        if self.has_masters and is_full and sharing.strategy.stage <= 1 and not sharing.reduce_half:
            return _WIDE_BYTES / 2
        return self.wide_factor

    @property
    def wide_state_factor(self) -> float:
        """Bytes of the optimizer's state over those traced: states in 8 bits are as large beside fp32 weights."""
        return 1.0 if self.setup.optimizer == "adamw-8bit" else self.wide_factor

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
        return self.setup.for_inference()

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
        if any(value is None for values in used.values() for value in values):
            raise InvalidSetupError(f"{', '.join(used)}: expected values of the settings, got None")
        asked: list[dict[str, Any]] = [dict(zip(used, each, strict=True)) for each in product(*used.values())]
        return tuple(self.with_(**changes) for changes in asked)

    def with_(
        self, *, model: str | None = None, device: str | Device | Cluster | None = None, **changes: Any
    ) -> Run:
        """This run with other settings, by the names of ``RunOptions``; all else stays as it is.

        A setting that is None gets the default of its field. Settings are checked as in a new question, but none is
        refused for being useless: a strategy may be set before there are several devices.

        >>> run = Run.of("torchvision:resnet50", device="t4")
        >>> run.with_(device="8xa100-sxm4-40gb", precision="amp", strategy="fsdp").cluster.spec
        '8xa100-sxm4-40gb'

        Args:
            model: Another model by name.
            device: Another device or cluster; its calibration is then its own.
            changes: Settings.

        Raises:
            UsageError: A setting is not known, or is impossible for the run.
        """
        if any(changes.get(name) is not None for name in _FILES):
            from forerun.question.recipes import recipe_settings

            to = self.cluster if device is None else cluster_from(device, {})
            held, waiting = recipe_settings(
                changes, model or self.model.model, to.device.architecture, to.num_devices
            )
            changes = held | waiting
        own = {"image_size": self.model.image_size, "input_shape": self.model.input_shape}
        size = size_of_images(model or self.model.model, {**own, **changes})
        changes = changes if size is None else {**changes, "image_size": size}
        given = checked(changes, RunOptions)
        values = _fields_of(changes, given)
        if model is not None:
            # A named model takes the place of the object that the run was made with.
            values |= {("model", "model"): model, ("module",): None}
        # A calibration was measured on the device that is being replaced.
        if device is not None and "calibration" not in changes:
            values["software", "calibration"] = _own_calibration(device)
        cluster = self._cluster_with(device, given)
        if "parallel" in changes:
            words = changes["parallel"]
            axes: dict[str, Any] = {} if words is None else dict(parse_parallel(words, cluster.num_devices))
            values["sharing", "layout"] = replace(self.sharing.layout, **axes) if axes else DeviceLayout()
        if changes.keys() & _OF_JOB:
            values["job",] = job_from(
                {"sequence_length": self.model.sequence_length} | _changed(self.job, changes, given)
            )
        if changes.keys() & declared(InputPipeline).keys():
            values["loader",] = loader_from(_changed(self.loader, changes, given))
        return cast(Run, changed_fields(self, {**values, ("cluster",): cluster}))

    def _cluster_with(self, device: str | Device | Cluster | None, given: Mapping[str, Any]) -> Cluster:
        words = {name: given[name] for name in _OF_CLUSTER if name in given}
        if device is not None:
            return cluster_from(device, words)
        found = self.cluster
        if "num_devices" in words or "num_nodes" in words:
            number, nodes = words.pop("num_devices", found.num_devices), words.pop("num_nodes", None)
            # A cluster of one device has no shape to keep: more of them stand in one machine.
            found = found.with_devices(number, nodes or (1 if found.num_devices == 1 else None))
        return cluster_from(found, words) if words else found

    def json_fields(self) -> dict[str, Any]:
        """The run as flat settings under the names of ``RunOptions``, those without a value left out."""
        several = self.cluster.num_devices > 1
        intra, inter = self.cluster.intra_link, self.cluster.inter_link
        found = {
            "model": self.model.model,
            "device": self.cluster.spec,
            **self._told(),
            "intra": intra.name if several and intra is not None else None,
            "inter": inter.name if several and inter is not None else None,
            "parallel": self.layout.text if several and self.layout.divides_model else None,
            "price_usd_per_hour": self.price_usd_per_hour,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _told(self) -> dict[str, Any]:
        """The settings that the parts hold, without those that have no meaning here."""
        several = self.cluster.num_devices > 1
        axes = [short for short, axis in AXES.items() if several and getattr(self.sharing.layout, axis) > 1]
        here = {"", "training", "loader", *(_SEVERAL if several else ()), *axes}
        found = {
            name: value for name, value in told(self).items() if declared(Run)[name].setting.needs in here
        }
        if self.job is not None and self.job.num_tokens is not None:  # the tokens alone say how long it is
            found.pop("dataset_size", None)
            found.pop("epochs", None)
        return found


def _fields_of(changes: Mapping[str, Any], given: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Values of fields by their paths, from settings that are changed; those of jobs and loaders are made together."""
    held = declared(Run)
    values: dict[tuple[str, ...], Any] = {
        item.path: item.read(given[name]) if name in given else item.default
        for name, item in held.items()
        if name in changes and item.path[0] not in ("job", "loader")
    }
    # Summed gradients live through all micro-steps, which changes the trace and not only the sharing.
    if "accumulation" in changes:
        values["setup", "keeps_gradients"] = given.get("accumulation", 1) > 1
    if "price_usd_per_hour" in changes:
        values["price_usd_per_hour",] = given.get("price_usd_per_hour")
    return values


def _changed(part: Any, changes: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a job or loader with those that are given; those that are changed to None are left out."""
    kept = {} if part is None else told(part)
    gone = set(changes)
    if changes.keys() & _LENGTHS:  # one way to say the length of a job replaces the other
        gone |= _LENGTHS
    if "tokens" in kept or "tokens" in given:  # tokens are the length of the whole job
        gone |= {"dataset_size", "epochs", "validation_size"}
    return {name: value for name, value in kept.items() if name not in gone} | dict(given)


def _setup(model: Any, given: Mapping[str, Any]) -> TrainingSetup:
    phase = Phase(given.get("phase", Phase.TRAIN))
    if phase is not Phase.TRAIN:
        why = f"phase {phase} updates no weights"
        useless = [*names_needing(Sharing, "training"), *names_needing(TrainingSetup, "training")]
        refuse(given, useless, why, "ask for --phase train")
        if str(given.get("optimizer", "none")).lower() != "none":
            refuse(given, ("optimizer",), why, "ask for --phase train")
    values = from_settings(TrainingSetup, {**own_settings(model), **given})
    # A captured graph has the kernels that ran.
    values = values if capture_path(model) else settings_of_release(given) | values
    if phase is not Phase.TRAIN:
        values["optimizer"] = "none"
    return TrainingSetup(
        **values,
        keeps_gradients=given.get("accumulation", 1) > 1,
        saving=saving_from(given),
        post=PostTraining(**from_settings(PostTraining, given)),
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
        refuse(given, ("intra", "inter"), "there is one device", _GIVE_SEVERAL)
    elif found.num_nodes == 1:
        refuse(given, ("inter",), "there is one node", "give several, such as --nodes 2")
    return found


def _own_calibration(device: str | Device | Cluster) -> str | None:
    """With ``here``, this machine's own calibration."""
    is_here = isinstance(device, str) and split_spec(device.strip())[2].lower() == HERE
    return HERE if is_here else None
