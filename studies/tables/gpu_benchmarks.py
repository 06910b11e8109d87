"""Public measurements on many GPUs as records: torchvision models and Lambda's ResNet-50."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.base.errors import RecordError
from forerun.base.tables import check_positive
from forerun.evidence.records.measured_run import default_optimizer_implementation, framework_release
from forerun.evidence.records.model_names import model_family
from forerun.evidence.records.step_record import StepRecord
from forerun.question.devices import find_device
from forerun.question.setup import Phase, Precision
from studies.tables.public import public_table

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
