"""The table of published steps that comes with the package, from the public tables of image networks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.evidence.records.step_record import StepRecord
from forerun.question.setup import Layout, Phase
from studies.tables.gpu_benchmarks import read_lambda_resnet50, read_torchvision
from studies.tables.timm import read_timm_infer, read_timm_train

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
    codes = {system: _code(number) for number, system in enumerate(sorted(usual, key=repr))}
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


def _code(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return letters[number // 26] + letters[number % 26]
