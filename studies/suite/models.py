"""Jobs of the suite: models of different kinds, each in its most informative settings, kernels, repeats and searches.

A row is a model with an image size or a length, and settings ``BATCH PRECISION [nhwc] [compile]``; those with a star
are of the core, which comes first. The sizes are those that keep a data-centre GPU busy, and some that do not; a
processor takes ``on_processor`` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.records.measurement import JobKind, Scalar
from forerun.evidence.records.model_names import model_family
from forerun.question.setup import Layout, Precision

SMALL_CNN = "small CNN"
CIFAR_RESNET = "CIFAR ResNet"
CLASSIC_CNN = "classic CNN"
MOBILE_CNN = "mobile CNN"
MODERN_CNN = "modern CNN"
VISION_TRANSFORMER = "vision transformer"
TEXT_TRANSFORMER = "text transformer"

WHOLE_CARD_GIB = 1024
"""More than any card has."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of one run of a model.

    Attributes:
        batch_size: Samples of a step.
        precision: Precision of the step.
        layout: Memory order of images.
        compile: Whether the step runs under torch.compile.
        is_core: Whether the step is measured first.
    """

    batch_size: int
    precision: Precision
    layout: Layout = Layout.NCHW
    compile: bool = False
    is_core: bool = False


@dataclass(frozen=True, slots=True)
class Search:
    """A search for the largest batch that fits.

    Attributes:
        setting: Settings of the model; the search changes the batch size.
        limit_gib: Limit of the memory, small so that a step at the edge takes less than a second [GiB].
    """

    setting: Setting
    limit_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteModel:
    """A model of the suite.

    Attributes:
        subject: Model specification, as in ``predict``.
        model_class: Kind of network, for the table of errors.
        settings: Settings of its runs.
        optimizer: Optimizer of its training step.
        image_size: Height and width of its images [pixels]; None for the family's own and for text.
        sequence_length: Tokens of a sample; None for images.
        searches: Searches for its largest batch on a GPU.
        processor_limit_gib: Limit of such a search on a processor; None for none [GiB].
    """

    subject: str
    model_class: str
    settings: tuple[Setting, ...]
    optimizer: str = "sgd"
    image_size: int | None = None
    sequence_length: int | None = None
    searches: tuple[Search, ...] = ()
    processor_limit_gib: float | None = None


def _setting(text: str) -> Setting:
    words = text.split()
    return Setting(
        int(words[0].rstrip("*")),
        Precision(words[1]),
        Layout.NHWC if "nhwc" in words else Layout.NCHW,
        "compile" in words,
        words[0].endswith("*"),
    )


def _settings(text: str) -> tuple[Setting, ...]:
    return tuple(_setting(part) for part in text.split(","))


def _searches(text: str) -> tuple[Search, ...]:
    """Settings with their limits, such as ``64 fp32 @ 16``."""
    pairs = [part.split("@") for part in text.split(",") if part]
    return tuple(Search(_setting(setting), float(limit)) for setting, limit in pairs)


def _images(
    subject: str,
    model_class: str,
    settings: str,
    image_size: int = 224,
    searches: str = "",
    limit_gib: float | None = None,
) -> SuiteModel:
    return SuiteModel(
        subject=subject,
        model_class=model_class,
        settings=_settings(settings),
        image_size=image_size,
        searches=_searches(searches),
        processor_limit_gib=limit_gib,
    )


def _small_cnn(depth: int, base_filters: int) -> SuiteModel:
    """A network of system A: its three batch sizes in fp32, all core, and what a modern GPU would rather run."""
    is_largest = (depth, base_filters) == (4, 64)
    extra = ", 512 amp nhwc, 4096 amp nhwc, 128* amp compile" if is_largest else ""
    return SuiteModel(
        subject=f"cnn:depth={depth},base_filters={base_filters}",
        model_class=SMALL_CNN,
        settings=_settings(f"32* fp32, 64* fp32, 128* fp32, 32 amp, 512 tf32, 512 amp{extra}"),
        optimizer="adam",
        image_size=32,
        searches=_searches("128 fp32 @ 4" if is_largest else ""),
        processor_limit_gib=0.5 if is_largest else None,
    )


def _cifar(subject: str, settings: str, searches: str = "", limit_gib: float | None = None) -> SuiteModel:
    return _images(subject, CIFAR_RESNET, settings, 32, searches, limit_gib)


def _text(subject: str, sequence_length: int, settings: str, searches: str = "") -> SuiteModel:
    return SuiteModel(
        subject=subject,
        model_class=TEXT_TRANSFORMER,
        settings=_settings(settings),
        optimizer="adamw",
        sequence_length=sequence_length,
        searches=_searches(searches),
    )


SUITE_MODELS: Sequence[SuiteModel] = (
    *(_small_cnn(depth, base_filters) for depth in (2, 3, 4) for base_filters in (32, 64)),
    _cifar("cifar-resnet:20", "128* fp32, 128 amp, 1024* amp", limit_gib=0.5),
    _cifar("cifar-resnet:56", "128* fp32, 512 tf32", "128 fp32 @ 4"),
    _cifar("cifar-resnet:110", "128 amp"),
    _cifar("cifar-resnet18", "128* fp32, 512* amp nhwc"),
    _cifar("cifar-resnet50", "256* amp, 128 tf32"),
    _images("torchvision:resnet18", CLASSIC_CNN, "256* amp, 128 fp32, 256 amp nhwc compile", limit_gib=0.75),
    _images(
        "torchvision:resnet50",
        CLASSIC_CNN,
        "64* fp32, 64* tf32, 256* amp, 256* amp nhwc, 32* amp, 256 amp-bf16 nhwc, 256 bf16, 512 amp nhwc",
        searches=f"256 amp nhwc @ 16, 64 fp32 @ 24, 256 amp nhwc @ {WHOLE_CARD_GIB}",
    ),
    _images("torchvision:resnet152", CLASSIC_CNN, "64 amp nhwc"),
    _images("torchvision:vgg16", CLASSIC_CNN, "64* fp32, 128 amp"),
    _images("torchvision:alexnet", CLASSIC_CNN, "512* amp"),
    _images("torchvision:squeezenet1_1", CLASSIC_CNN, "256* fp32, 256 amp"),
    _images("torchvision:googlenet", CLASSIC_CNN, "256 amp"),
    _images("torchvision:densenet121", CLASSIC_CNN, "64* fp32, 128 amp", searches="64 fp32 @ 12"),
    _images("torchvision:wide_resnet50_2", CLASSIC_CNN, "128 tf32"),
    _images("torchvision:resnext50_32x4d", CLASSIC_CNN, "128* amp nhwc, 64 tf32"),
    _images("torchvision:mobilenet_v2", MOBILE_CNN, "256* amp, 128 fp32"),
    _images("torchvision:mobilenet_v3_small", MOBILE_CNN, "512 fp32"),
    _images("torchvision:efficientnet_b0", MOBILE_CNN, "128* amp, 128 amp nhwc", searches="128 amp @ 8"),
    _images("torchvision:shufflenet_v2_x1_0", MOBILE_CNN, "256* amp"),
    _images("torchvision:regnet_y_8gf", MODERN_CNN, "64* amp"),
    _images("torchvision:convnext_tiny", MODERN_CNN, "128* amp nhwc, 64 tf32", searches="128 amp nhwc @ 16"),
    _images("timm:resnetv2_50", MODERN_CNN, "128 amp"),
    _images("timm:seresnet50", MODERN_CNN, "128* amp nhwc"),
    _images("timm:efficientnetv2_rw_s", MODERN_CNN, "64 amp nhwc"),
    _images("timm:mixer_b16_224", VISION_TRANSFORMER, "64* amp"),
    _images("timm:deit_small_patch16_224", VISION_TRANSFORMER, "256 amp"),
    _images(
        "torchvision:vit_b_16",
        VISION_TRANSFORMER,
        "64* amp-bf16, 64 fp32, 128 tf32, 64 amp-bf16 compile",
        searches="64 amp-bf16 @ 16",
    ),
    _images("torchvision:vit_l_16", VISION_TRANSFORMER, "32 amp-bf16"),
    _images("torchvision:swin_t", VISION_TRANSFORMER, "64* amp"),
    _text("gpt:depth=12,width=768", 512, "16* amp-bf16, 8 fp32, 32 bf16", "16 amp-bf16 @ 16"),
    _text("gpt:depth=6,width=512", 256, "64* tf32, 64 amp-bf16 compile"),
    _text("gpt:depth=24,width=1024", 1024, "4 amp-bf16"),
)
"""The models; torchvision's and timm's are left out where those are not installed."""

_PROCESSOR_IMAGE_SIZE = 64
_PROCESSOR_SEQUENCE_LENGTH = 64
_PROCESSOR_SHARE = 32


def on_processor(model: SuiteModel) -> SuiteModel:
    """The same model in fp32 at sizes of which a processor takes some seconds; small CNNs stay as they are.

    Settings that become equal are kept once, compiled ones are left out.
    """
    limit_gib = model.processor_limit_gib
    searches = () if limit_gib is None else (Search(Setting(1, Precision.FP32), limit_gib),)
    if model.model_class == SMALL_CNN:
        kept = [s for s in model.settings if s.is_core and s.precision is Precision.FP32]
        return replace(model, settings=tuple(kept), searches=searches)
    found: dict[Setting, None] = {}
    for setting in model.settings:
        if not setting.compile:
            size = max(2, setting.batch_size // _PROCESSOR_SHARE)
            found[replace(setting, batch_size=size, precision=Precision.FP32, is_core=True)] = None
    return replace(
        model,
        settings=tuple(found),
        searches=searches,
        image_size=None if model.image_size is None else min(model.image_size, _PROCESSOR_IMAGE_SIZE),
        sequence_length=None if model.sequence_length is None else _PROCESSOR_SEQUENCE_LENGTH,
    )


REPEAT = "repeat"
"""Parameter of a job that is run at the start and again at the end."""

LIMIT = "memory_limit_bytes"
"""Parameter of a job that runs under a limit."""

_GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """A training step of the suite.

    Attributes:
        job: Job to run.
        model_class: Kind of network.
        is_core: Whether the step is measured first.
    """

    job: MeasurementJob
    model_class: str
    is_core: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSearch:
    """A model whose largest batch under a limit is searched by real runs.

    Attributes:
        job: A step of the model at batch size 1, with the limit among its parameters.
        model_class: Kind of network.
    """

    job: MeasurementJob
    model_class: str

    @property
    def limit_bytes(self) -> int:
        """Limit of the allocator of a GPU, or of the process on a processor [bytes]."""
        return int(float(str(self.job.parameters[LIMIT])))

    def at(self, batch_size: int) -> MeasurementJob:
        """The step at a batch size."""
        return replace(self.job, parameters={**self.job.parameters, "batch_size": batch_size})


def step_jobs(*, is_gpu: bool, models: Sequence[SuiteModel] = SUITE_MODELS) -> list[StepJob]:
    """Training steps of all models whose libraries are installed, each once."""
    found: dict[str, StepJob] = {}
    for model in _installed(models):
        sized = model if is_gpu else on_processor(model)
        for setting in sized.settings:
            job = _job(sized, setting)
            found.setdefault(
                job.to_json(), StepJob(job=job, model_class=model.model_class, is_core=setting.is_core)
            )
    return list(found.values())


def _installed(models: Iterable[SuiteModel]) -> list[SuiteModel]:
    known = {name: find_spec(name) is not None for name in ("torchvision", "timm")}
    # The ResNets with a CIFAR stem are torchvision's.
    needs = {
        "cifar-resnet18": "torchvision",
        "cifar-resnet34": "torchvision",
        "cifar-resnet50": "torchvision",
    }
    return [m for m in models if known.get(needs.get(m.subject, m.subject.partition(":")[0]), True)]


def _job(model: SuiteModel, setting: Setting) -> MeasurementJob:
    parameters: dict[str, Scalar] = {
        "batch_size": setting.batch_size,
        "precision": str(setting.precision),
        "layout": str(setting.layout),
        "compile": setting.compile,
        "optimizer": model.optimizer,
        "phase": "train",
        "image_size": model.image_size,
        "sequence_length": model.sequence_length,
    }
    prefix = model.subject.partition(":")[0]
    return MeasurementJob(
        kind=JobKind.STEP,
        subject=model.subject,
        family=model_family(model.subject) if prefix in ("torchvision", "timm") else prefix,
        parameters={name: value for name, value in parameters.items() if value is not None},
    )


_REPEATED = ("cnn:depth=3,base_filters=32", "cifar-resnet:56", "torchvision:resnet50")


def repeat_jobs(steps: Sequence[StepJob], when: str) -> list[MeasurementJob]:
    """A few of the steps, once more, at the ``start`` or the ``end``: the noise of the measuring itself."""
    first = {step.job.subject: step.job for step in reversed(steps)}
    chosen = [first[subject] for subject in _REPEATED if subject in first]
    return [replace(job, parameters={**job.parameters, REPEAT: when}) for job in chosen]


def batch_searches(*, is_gpu: bool, models: Sequence[SuiteModel] = SUITE_MODELS) -> list[BatchSearch]:
    """The searches of all models whose libraries are installed, those under a small limit first."""
    found = []
    for model in _installed(models):
        sized = model if is_gpu else on_processor(model)
        for search in sized.searches:
            job = _job(sized, replace(search.setting, batch_size=1))
            limited = {**job.parameters, LIMIT: int(search.limit_gib * _GIB)}
            found.append(BatchSearch(job=replace(job, parameters=limited), model_class=model.model_class))
    return sorted(found, key=lambda search: search.limit_bytes)


def kernel_jobs(*, is_gpu: bool) -> list[MeasurementJob]:
    """Products, convolutions, copies and launches, which show the share of its datasheet that the device reaches."""
    return [
        MeasurementJob(kind=JobKind.KERNEL, subject=subject, family="kernel", parameters=dict(parameters))
        for subject, parameters in (_GPU_KERNELS if is_gpu else _PROCESSOR_KERNELS)
    ]


def _cube(size: int, precision: str) -> tuple[str, dict[str, Scalar]]:
    return "gemm", {"m": size, "n": size, "k": size, "precision": precision}


def _convolution(
    batch: int, channels: int, size: int, precision: str, layout: str
) -> tuple[str, dict[str, Scalar]]:
    return "convolution", {
        "batch_size": batch, "in_channels": channels, "out_channels": channels, "in_size": size, "kernel": 3,
        "precision": precision, "layout": layout,
    }  # fmt: skip


_GPU_KERNELS: Sequence[tuple[str, dict[str, Scalar]]] = (
    ("launch", {"num_calls": 200}),
    ("copy", {"num_bytes": _GIB}),
    *(_cube(8192, precision) for precision in ("bf16", "fp16", "tf32", "fp32")),
    _cube(1024, "bf16"),
    _convolution(128, 128, 56, "fp16", "nhwc"),
    _convolution(128, 128, 56, "fp16", "nchw"),
    _convolution(64, 128, 56, "fp32", "nchw"),
    ("copy", {"num_bytes": 16 * 1024**2}),
)
_PROCESSOR_KERNELS: Sequence[tuple[str, dict[str, Scalar]]] = (
    ("launch", {"num_calls": 200}),
    ("copy", {"num_bytes": 64 * 1024**2}),
    _cube(1024, "fp32"),
    _convolution(8, 64, 56, "fp32", "nchw"),
)
