"""Public measurements of image networks as records, and the table of published steps that is made of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pandas as pd

from forerun.base.errors import RecordError
from forerun.base.tables import check_positive, check_unique
from forerun.evidence.records.measured_run import default_optimizer_implementation, framework_release
from forerun.evidence.records.model_names import model_family
from forerun.evidence.records.step_record import StepRecord
from forerun.evidence.records.tables import timm_settings
from forerun.question.devices import find_device
from forerun.question.setup import Layout, Phase, Precision
from studies.tables.public import integer_or_none, public_table

_INFERENCE_RELEASES = {
    "rtx-3090": "2.4.0",
    "rtx-4090": "2.9.1",
    "rtx-5090": "2.9.1",
    "rtx-pro-6000-max-q": "2.9.1",
}
_NHWC_RELEASES = _INFERENCE_RELEASES | {"rtx-4090": "2.4.0"}
_SOURCES = {
    "timm": "huggingface/pytorch-image-models aa4b5850",
    "lambda": "lambdal/deeplearning-benchmark aa5addb6",
    "ryujaehun": "ryujaehun/pytorch-gpu-benchmark 3f47a9e2",
    "JHLew": "JHLew/pytorch-gpu-benchmark af7fb54c",
}
_HEAD = """\
# Steps of networks that others have published: figures with their sources, made by python -m studies published-steps.
# First the systems (code, device, phase, precision, layout, PyTorch, optimizer or none, usual batch, source), then the
# networks (name, input, parameters, and code@batch=milliseconds of each system). Licences: timm Apache-2.0,
# pytorch-gpu-benchmark MIT, (c) their authors; of Lambda, whose repository has none, single figures of one network.
"""


@dataclass(frozen=True, slots=True)
class _System:
    """Where and how steps were measured."""

    device: str
    phase: str
    precision: str
    layout: str
    release: str
    optimizer: str
    source: str


def published_records(folder: Path) -> list[StepRecord]:
    """The steps that are shipped: training of timm and torchvision, ResNet-50 of Lambda, timm's newest inference.

    Compiled steps are left out.
    """
    records = [*read_timm_train(folder), *read_torchvision(folder), *read_lambda_resnet50(folder)]
    for record in read_timm_infer(folder):
        releases = _NHWC_RELEASES if record.layout is Layout.NHWC else _INFERENCE_RELEASES
        if not record.compile and record.framework_version == releases[record.device]:
            records.append(record)
    return records


def published_text(records: Iterable[StepRecord]) -> str:
    """The text of the table of steps of image networks."""
    sizes: defaultdict[_System, Counter[int]] = defaultdict(Counter)
    found: defaultdict[tuple[str, int, int], list[tuple[_System, StepRecord]]] = defaultdict(list)
    for record in records:
        counted = round(record.num_parameters or 0, -3) or _num_parameters(record.model)
        system = _system_of(record)
        sizes[system][record.batch_size_per_device] += 1
        assert record.image_size is not None
        network = (record.model.partition(":")[2].partition(".")[0], record.image_size, counted)
        found[network].append((system, record))
    usual = {system: batches.most_common(1)[0][0] for system, batches in sizes.items()}
    pairs = map("".join, product(ascii_lowercase, repeat=2))
    codes = dict(zip(sorted(usual, key=repr), pairs, strict=False))
    lines = [
        "\t".join(
            (
                code,
                system.device,
                system.phase,
                system.precision,
                system.layout,
                system.release,
                system.optimizer,
                str(usual[system]),
                system.source,
            )
        )
        for system, code in codes.items()
    ]
    lines.append("")
    for (name, size, counted), rows in sorted(found.items()):
        cells: dict[str, list[float]] = defaultdict(list)
        for system, record in rows:
            batch = record.batch_size_per_device
            cell = codes[system] if batch == usual[system] else f"{codes[system]}@{batch}"
            cells[cell].append(1e3 * record.step_time_s)
        words = [f"{cell}={_middle(times):.4g}" for cell, times in sorted(cells.items())]
        lines.append("\t".join((name, str(size), str(counted), " ".join(words))))
    return _HEAD + "\n".join(lines) + "\n"


def _system_of(record: StepRecord) -> _System:
    owner = "timm" if record.source.startswith("timm") else record.row_id.split("/")[0].split(" ")[0]
    return _System(
        device=record.device,
        phase=str(record.phase),
        precision=str(record.precision),
        layout=str(record.layout),
        release=record.framework_version or "",
        optimizer=record.optimizer if record.includes_optimizer and record.phase is Phase.TRAIN else "none",
        source=_SOURCES[owner],
    )


@cache
def _num_parameters(model: str) -> int:
    """Parameters of a network of torchvision, whose tables do not count them."""
    import torch
    from torchvision.models import get_model

    with torch.device("meta"):
        network = get_model(model.partition(":")[2], weights=None)
    return sum(parameter.numel() for parameter in network.parameters())


def _middle(times_ms: list[float]) -> float:
    """The median of repeats; of two the longer."""
    return sorted(times_ms)[len(times_ms) // 2]


_TIMM_PRECISIONS = {"amp_fp16": Precision.AMP, "amp_bf16": Precision.AMP_BF16, "bf16": Precision.BF16}
_TIMM_COLUMNS = (
    "model", "family", "dtype", "layout", "compiler", "torch_version", "batch_size", "img_size",
    "time_ms_step", "param_count_millions",
)  # fmt: skip


def read_timm_train(folder: Path) -> list[StepRecord]:
    """AMP training steps of 626 vision models on an RTX 3090, PyTorch 1.12, both layouts."""
    return _read_timm(
        folder / "timm_train.parquet", extra=("gpu", "next_larger_batch_failed"), phase=Phase.TRAIN
    )


def read_timm_infer(folder: Path) -> list[StepRecord]:
    """Inference steps on four GPUs; the CPU rows are left out (batch 1, number of threads unknown)."""
    return _read_timm(
        folder / "timm_infer.parquet",
        extra=("device", "device_type"),
        keep=lambda frame: frame["device_type"] == "gpu",
        phase=Phase.INFERENCE,
    )


def _read_timm(
    path: Path,
    extra: tuple[str, ...],
    phase: Phase,
    keep: Callable[[pd.DataFrame], pd.Series[bool]] | None = None,
) -> list[StepRecord]:
    frame = public_table(path.parent, path.stem, (*_TIMM_COLUMNS, *extra))
    if keep is not None:
        frame = frame[keep(frame)].reset_index(drop=True)
    check_positive(frame, path.name, ["time_ms_step", "batch_size", "img_size", "param_count_millions"])
    device = "device" if "device" in frame.columns else "gpu"
    key = ["model", device, "dtype", "layout", "compiler", "torch_version", "img_size"]
    if "committed" in frame.columns:
        key.append("committed")
    check_unique(frame, path.name, key)
    return [
        _timm_record(row, path, device, " ".join(str(row[name]) for name in key), phase)
        for row in frame.to_dict("records")
    ]


def _timm_record(row: Mapping[Any, Any], path: Path, device: str, row_id: str, phase: Phase) -> StepRecord:
    precision = _TIMM_PRECISIONS.get(row["dtype"])
    if precision is None:
        known = ", ".join(_TIMM_PRECISIONS)
        raise RecordError(f"{path.name}, column 'dtype': expected one of {known}, got '{row['dtype']}'")
    return StepRecord(
        source=path.stem,
        row_id=row_id,
        model=f"timm:{row['model']}",
        family=row["family"],
        device=find_device(row[device]).name,
        batch_size_per_device=int(row["batch_size"]),
        image_size=int(row["img_size"]),
        step_time_s=float(row["time_ms_step"]) / 1e3,
        layout=Layout(row["layout"].lower()),
        compile=row["compiler"] != "eager",
        num_parameters=round(float(row["param_count_millions"]) * 1e6),
        next_larger_batch_failed=integer_or_none(row.get("next_larger_batch_failed")),
        **timm_settings(phase, precision, str(row["torch_version"])),
    )


_COLUMNS = (
    "source", "system", "phase", "model", "gpu", "n_gpus", "batch_size_per_gpu", "dtype", "framework",
    "step_time_ms",
)  # fmt: skip
_TABLE = "gpu_benchmarks"


def read_torchvision(folder: Path) -> list[StepRecord]:
    """Training and inference of torchvision models on single GPUs, batch 12 or 15, 224 pixels.

    One training step is zero_grad, copy of the batch to the device, forward, loss and backward; no update.
    ``fp16`` is pure half. Double precision is left out, and so are the GTX 1080 Ti fp32 rows of the ti
    branch: they are three times slower than elsewhere.
    """
    frame = public_table(folder, _TABLE, _COLUMNS)
    is_source = frame["source"].isin(["ryujaehun/pytorch-gpu-benchmark", "JHLew/pytorch-gpu-benchmark"])
    is_outlier = (frame["system"] == "ti branch: results") & (frame["dtype"] == "fp32")
    frame = frame[is_source & (frame["n_gpus"] == 1) & (frame["dtype"] != "fp64") & ~is_outlier]
    frame = frame.reset_index(drop=True)
    check_positive(frame, _TABLE, ["step_time_ms", "batch_size_per_gpu"])
    key = ["source", "system", "phase", "model", "gpu", "dtype", "batch_size_per_gpu", "framework"]
    replica = frame.groupby(key).cumcount() + 1
    return [
        StepRecord(
            **_common_fields(row),
            row_id=" ".join([*(str(row[name]) for name in key), f"#{number}"]),
            model=f"torchvision:{row['model']}",
            family=model_family(row["model"]),
            phase=Phase(row["phase"]),
            note=f"{row['framework']}; time contains the copy of the batch to the device",
        )
        for row, number in zip(frame.to_dict("records"), replica, strict=True)
    ]


def read_lambda_resnet50(folder: Path) -> list[StepRecord]:
    """ResNet-50 training on 24 single GPUs (Lambda's runs of NVIDIA's PyTorch example, synthetic images).

    One record per GPU, precision, batch size and framework build: the median over its hosts and replicas,
    with their standard deviation. ``fp16`` keeps fp32 copies of the weights in the optimizer.
    """
    frame = public_table(folder, _TABLE, _COLUMNS)
    is_source = frame["source"] == "lambdal/deeplearning-benchmark"
    frame = frame[is_source & (frame["model"] == "resnet50") & (frame["n_gpus"] == 1)].reset_index(drop=True)
    check_positive(frame, _TABLE, ["step_time_ms", "batch_size_per_gpu"])
    key = ["gpu", "dtype", "framework", "batch_size_per_gpu"]
    replicas = frame.groupby(key)["step_time_ms"]
    grouped = replicas.median().reset_index()
    grouped["step_time_std_ms"] = replicas.std().to_numpy()
    grouped["num_replicas"] = replicas.count().to_numpy()
    return [
        StepRecord(
            **_common_fields(row),
            row_id="lambda " + " ".join(str(row[name]) for name in key),
            model="torchvision:resnet50",
            family="resnet",
            phase=Phase.TRAIN,
            optimizer="sgd",
            includes_optimizer=True,
            step_time_std_s=float(row["step_time_std_ms"]) / 1e3 if row["num_replicas"] > 1 else None,
            note=f"{row['framework']}; median of {row['num_replicas']} run(s)",
        )
        for row in grouped.to_dict("records")
    ]


def _common_fields(row: Mapping[Any, Any]) -> dict[str, Any]:
    version = _first_version(row["framework"])
    return {
        "source": _TABLE,
        "device": find_device(row["gpu"]).name,
        "batch_size_per_device": int(row["batch_size_per_gpu"]),
        "image_size": 224,
        "step_time_s": float(row["step_time_ms"]) / 1e3,
        "precision": Precision(row["dtype"]),
        "optimizer_implementation": default_optimizer_implementation(version),
        "framework_version": version,
    }


def _first_version(framework: str) -> str:
    """'1.4' from 'PyTorch 1.4.0a0+a5b4d78, CUDA V10.2.89': the framework's release, the older of two."""
    word = framework.removeprefix("PyTorch ").split("/")[0]
    release = framework_release(word.split(",")[0].split(" ")[0])
    if release is None:
        raise RecordError(f"expected a framework such as 'PyTorch 1.4, CUDA 10', got '{framework}'")
    return f"{release[0]}.{release[1]}"
