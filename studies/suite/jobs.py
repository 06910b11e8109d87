"""The jobs of the suite: kernels, training steps, repeats, and searches for the largest batch that fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.records.measurement import JobKind, Scalar
from forerun.evidence.records.model_names import model_family
from studies.suite.models import SUITE_MODELS, Setting, SuiteModel, on_processor

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
