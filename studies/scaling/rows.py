"""Pairs of measured steps, one device and several of the same machine, from ``dle_training`` and ``gpu_benchmarks``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.tables.public import public_table

if TYPE_CHECKING:
    import pandas as pd


MODEL_PARAMETERS: Mapping[str, tuple[float, str]] = {
    "alexnet": (61.1e6, "torchvision's table of models"),
    "googlenet": (6.6e6, "torchvision's table of models"),
    "inception3": (23.8e6, "Keras' table of applications, InceptionV3"),
    "inception4": (42.7e6, "timm's table of results"),
    "resnet50": (25.56e6, "torchvision's table of models"),
    "resnet101": (44.55e6, "torchvision's table of models"),
    "resnet152": (60.19e6, "torchvision's table of models"),
    "vgg16": (138.36e6, "torchvision's table of models"),
    "resnext101-32x4d": (44.18e6, "timm's table of results"),
    "se-resnext101-32x4d": (48.96e6, "timm's table of results"),
    "ssd": (23e6, "ResNet-50 to its third stage, six extra blocks and heads, added up"),
    "maskrcnn": (44.4e6, "torchvision's table of models, maskrcnn_resnet50_fpn"),
    "efficientdet": (3.9e6, "Tan, Pang and Le 2020, D0"),
    "bert_base": (110e6, "Devlin et al. 2019"),
    "bert_large": (340e6, "Devlin et al. 2019"),
    "bart": (406e6, "Lewis et al. 2020, large"),
    "gnmt": (164e6, "4 + 4 LSTM layers of 1024 and 32,320 words, added up"),
    "transformer": (213e6, "Vaswani et al. 2017, big"),
    "transformerxlbase": (192e6, "NVIDIA/DeepLearningExamples, README of Transformer-XL"),
    "transformerxllarge": (257e6, "Dai et al. 2019"),
    "tacotron2": (28.2e6, "Shen et al. 2018, as NVIDIA's implementation counts"),
    "waveglow": (87.7e6, "Valle et al. 2021 (Flowtron), table of model sizes"),
    "ncf": (31.8e6, "embeddings of 165,237 users and items of 64 + 128, and four layers, added up"),
    "jasper": (333e6, "Li et al. 2019, 10x5 dense residual"),
    "fastspeech": (30.1e6, "Ren et al. 2019"),
    "wav2vec2": (95e6, "Baevski et al. 2020, base"),
    "unet": (31.0e6, "Ronneberger, Fischer and Brox 2015, layers added up"),
    "unet3d": (19.07e6, "Cicek et al. 2016"),
    "nnunet": (31.2e6, "Isensee et al. 2021, layers of the 3D network added up"),
    "vnet": (45.6e6, "Milletari, Navab and Ahmadi 2016, layers added up"),
}
"""Parameters by the name used here, and where the figure is from."""

# A word of a table's model or variant name -> the name used here; the first that occurs counts.
_WORDS = (
    ("bert_large", "bert_large"), ("bert_base", "bert_base"), ("biobert", "bert_base"), ("bert", "bert_large"),
    ("se-resnext101", "se-resnext101-32x4d"), ("resnext101", "resnext101-32x4d"), ("resnet152", "resnet152"),
    ("resnet101", "resnet101"), ("resnet50", "resnet50"), ("resnet-50", "resnet50"), ("rn50", "resnet50"),
    ("inception3", "inception3"), ("inception_v3", "inception3"), ("inceptionv3", "inception3"),
    ("inception4", "inception4"), ("vgg16", "vgg16"), ("alexnet", "alexnet"), ("googlenet", "googlenet"),
    ("efficientdet", "efficientdet"), ("maskrcnn", "maskrcnn"), ("ssd", "ssd"), ("gnmt", "gnmt"), ("bart", "bart"),
    ("transformerxllarge", "transformerxllarge"), ("transformerxlbase", "transformerxlbase"),
    ("transformer-xl", "transformerxlbase"), ("transformer", "transformer"),
    ("waveglow", "waveglow"), ("tacotron2", "tacotron2"), ("ncf", "ncf"), ("jasper", "jasper"),
    ("fastspeech", "fastspeech"), ("wav2vec2", "wav2vec2"), ("nnunet", "nnunet"), ("unet_3d", "unet3d"),
    ("unet_medical", "unet"), ("vnet", "vnet"),
)  # fmt: skip
_NOT_THESE = ("se3transformer",)


def parameters_of(*names: str) -> tuple[str, float] | None:
    """The name used here and the parameters of a network, from its name in a table; None if its size is not known.

    >>> parameters_of("resnet50v1.5")
    ('resnet50', 25560000.0)
    """
    for text in names:
        if any(word in text.lower() for word in _NOT_THESE):
            return None
    for text in names:
        for word, name in _WORDS:
            if word in text.lower():
                return name, MODEL_PARAMETERS[name][0]
    return None


# Part of a row's GPU name -> its link inside a node; the first that occurs counts.
_LINKS = (
    ("B200", "nvlink-5"), ("H100 SXM", "nvlink-4"), ("A100 SXM", "nvlink-3"), ("V100 SXM", "nvlink-2"),
    ("V100 DGXS", "nvlink-2"), ("P100", "nvlink-1"), ("H100 PCIe", "pcie-5-x16"), ("A100 PCIe", "pcie-4-x16"),
    ("A40", "pcie-4-x16"), ("A5500", "pcie-4-x16"), ("Ada", "pcie-4-x16"), ("RTX 30", "pcie-4-x16"),
    ("RTX 20", "pcie-3-x16"), ("Quadro", "pcie-3-x16"), ("1080", "pcie-3-x16"), ("K80", "pcie-3-x16"),
    ("TITAN", "pcie-3-x16"),
)  # fmt: skip
_HALF = ("fp16", "amp", "mixed", "bf16 mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One pair.

    Attributes:
        source: Table and source.
        system: Machine as the source names it.
        model: Name of the network, as ``MODEL_PARAMETERS`` has it; the group that is held out together.
        stack: "pytorch", "tensorflow", "mxnet" ...
        intra_link: Link between the GPUs of a node.
        inter_link: Link between nodes, empty if there is one node.
        num_devices, num_nodes: Devices and nodes of the row that is predicted.
        num_parameters: Parameters of the network.
        gradient_bytes: Gradients as they are sent [bytes].
        precision: As the source names it.
        one_step_s: Measured step of one device, up to the constant factor of the unit of throughput [s].
        step_s: Measured step of all devices in the same unit [s].
    """

    source: str
    system: str
    model: str
    stack: str
    intra_link: str
    inter_link: str = ""
    num_devices: int
    num_nodes: int = 1
    num_parameters: float
    gradient_bytes: float
    precision: str
    one_step_s: float
    step_s: float

    @property
    def efficiency(self) -> float:
        """Measured throughput over n times that of one device."""
        return self.one_step_s / self.step_s

    @property
    def link_class(self) -> str:
        """Link that limits the row: nvlink, pcie or network."""
        if self.num_nodes > 1:
            return "network"
        return self.intra_link.split("-")[0]


def read_scaling_rows(folder: Path) -> tuple[list[ScalingRow], list[str]]:
    """All pairs, and the names of networks that are left out because their size is not published.

    Rows of a machine that was measured more than once count once, by their median. Rows that the tables' own notes call
    wrong are left out: NCF of Lambda's newest suite, where four and more GPUs are a hundred times too fast.
    """
    left_out: set[str] = set()
    rows = [*_benchmark_rows(folder, left_out), *_dle_rows(folder, left_out)]
    return rows, sorted(left_out)


def _benchmark_rows(folder: Path, left_out: set[str]) -> Iterable[ScalingRow]:
    table = public_table(folder, "gpu_benchmarks")
    table = table[(table["phase"] == "train") & table["throughput"].notna() & (table["n_gpus"] > 0)].copy()
    table["machine"] = table["system"].map(_machine)
    table["batch"] = table["batch_size_per_gpu"].astype(str)
    keys = [
        "source", "machine", "model", "input", "gpu", "batch", "dtype", "framework", "input_pipeline",
        "throughput_unit",
    ]  # fmt: skip
    for pair in _pairs(_with_texts(table, keys), keys):
        if pair["source"].startswith("lambdal/deep") and pair["model"] == "ncf":
            continue
        if pair["parallelism"] == "DataParallel":
            continue  # one process with threads, another model: see thread_rows
        found = parameters_of(pair["model"])
        if found is None:
            left_out.add(pair["model"])
            continue
        yield _benchmark_row(pair, *found)


def _with_texts(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """The table with these columns as text; groups would lose rows whose keys are missing."""
    for key in keys:
        table[key] = table[key].astype(object).where(table[key].notna(), "").astype(str)
    return table


def _machine(system: Any) -> str:
    """The machine without its number of GPUs and host number."""
    text = re.sub(r"(^|_)\d+x(?=[A-Z0-9])", r"\1", str(system))
    return re.sub(r"[_ -]?host\d+", "", text)


def _pairs(table: pd.DataFrame, keys: list[str]) -> list[dict[str, Any]]:
    """One row per configuration of several devices beside the median of one device, as dictionaries."""
    one = table[table["n_gpus"] == 1].groupby(keys, as_index=False)["throughput"].median()
    several = table[table["n_gpus"] > 1]
    extra = ["n_nodes", "parallelism"]
    grouped = several.groupby([*keys, "n_gpus", *extra], as_index=False, dropna=False)["throughput"].median()
    joined = grouped.merge(one, on=keys, suffixes=("", "_one"))
    return [{str(key): value for key, value in row.items()} for row in joined.to_dict("records")]


def _benchmark_row(pair: dict[str, Any], model: str, num_parameters: float) -> ScalingRow:
    stack = _stack(pair["framework"])
    num_nodes = int(pair["n_nodes"])
    is_oneflow = pair["source"].startswith("Oneflow")
    # 2-byte gradients: tf_cnn_benchmarks sends fp16 gradients with --use_fp16 (compact_gradient_transfer).
    gradient_size = 2 if stack == "tensorflow" and pair["dtype"] in _HALF else 4
    return ScalingRow(
        source=pair["source"],
        system=pair["machine"],
        model=model,
        stack=stack,
        intra_link=_link_of(pair["gpu"], pair["machine"], int(pair["n_gpus"])),
        inter_link=("infiniband-edr" if is_oneflow else "ethernet-10g") if num_nodes > 1 else "",
        num_devices=int(pair["n_gpus"]),
        num_nodes=num_nodes,
        num_parameters=num_parameters,
        gradient_bytes=gradient_size * num_parameters,
        precision=pair["dtype"],
        **_times(pair, model),
    )


def _stack(framework: str) -> str:
    for word in ("tensorflow", "mxnet", "oneflow", "paddle"):
        if word in framework.lower():
            return word
    return "pytorch"


def _link_of(gpu: str, machine: str, num_devices: int) -> str:
    if "NVLink" in machine and num_devices == 2:
        return "nvlink-2-bridge"
    return next((link for word, link in _LINKS if word in gpu), "pcie-3-x16")


# Units of throughput in one sample of a batch, where the unit is not the sample: words of both languages of a pair, the
# configurations' target lengths, mean frames of an LJSpeech utterance, the samples of one training segment; the
# Transformer's batch counts words.
_UNITS_PER_SAMPLE = {
    "gnmt": 50, "transformerxlbase": 192, "transformerxllarge": 384, "tacotron2": 566, "waveglow": 8000,
    "transformer": 1,
}  # fmt: skip
_SAMPLE_UNITS = ("image", "sequence")
_USUAL_STEP_S = 0.3
"""Step of a device where the batch is not known: the middle of those that are."""
_LEAST_STEP_S = 0.005
"""No network of these tables trains a batch in less."""


def _times(pair: dict[str, Any], model: str) -> dict[str, Any]:
    """Steps in seconds, from the batch and the unit of the throughput."""
    one, several = float(pair["throughput_one"]), float(pair["throughput"])
    unit = str(pair["throughput_unit"]).lower()
    is_sample = any(word in unit for word in _SAMPLE_UNITS)
    known = re.fullmatch(r"\d+(?:\.\d+)?", str(pair["batch"])) and "not stated" not in unit
    known = known and (is_sample or model in _UNITS_PER_SAMPLE)
    per_sample = 1 if is_sample else _UNITS_PER_SAMPLE.get(model, 1)
    one_s = float(pair["batch"]) * per_sample / one if known else _USUAL_STEP_S
    if one_s < _LEAST_STEP_S:
        one_s = _USUAL_STEP_S  # the unit is not the one its name says
    return {"one_step_s": one_s, "step_s": one_s * one * int(pair["n_gpus"]) / several}


def _dle_rows(folder: Path, left_out: set[str]) -> Iterable[ScalingRow]:
    table = public_table(folder, "dle_training")
    table = table[table["throughput"].notna() & (table["n_gpus"] > 0)].copy()
    table["batch"] = table["batch_size_per_gpu"].astype(str)
    table["machine"] = table["system"].fillna("").astype(str)
    keys = [
        "framework", "task", "model", "variant", "machine", "gpu", "gpu_memory_gb", "batch", "sequence_length",
        "gradient_accumulation_steps", "precision", "throughput_unit", "readme",
    ]  # fmt: skip
    table["n_nodes"] = table["n_nodes"].fillna(1)
    table["parallelism"] = "DDP"
    for pair in _pairs(_with_texts(table, keys), keys):
        if pair["model"] == "ConvNets":
            continue  # the overview repeats the tables of the networks
        found = parameters_of(pair["model"], pair["variant"])
        if found is None:
            left_out.add(pair["model"])
            continue
        yield _dle_row(pair, *found)


def _dle_row(pair: dict[str, Any], model: str, num_parameters: float) -> ScalingRow:
    stack = _stack(pair["framework"])
    gradient_size = 2 if stack == "tensorflow" and pair["precision"] in _HALF else 4
    return ScalingRow(
        source="NVIDIA/DeepLearningExamples",
        system=pair["machine"],
        model=model,
        stack=stack,
        intra_link="nvlink-3" if "A100" in pair["gpu"] else "nvlink-2",
        num_devices=int(pair["n_gpus"]),
        num_nodes=int(pair["n_nodes"]),
        num_parameters=num_parameters,
        gradient_bytes=gradient_size * num_parameters,
        precision=pair["precision"],
        **_times(pair, model),
    )
