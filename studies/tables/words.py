"""Words and cells of public tables: names of devices, precisions, whole numbers with gaps."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.base.errors import RecordError, near_matches
from forerun.question.setup import Precision

REFERENCE_DEVICES = {
    # timm results
    "RTX-3090": "rtx-3090",
    "RTX-4090": "rtx-4090",
    "RTX-5090": "rtx-5090",
    "RTX-PRO-6000-Max-Q": "rtx-pro-6000-max-q",
    # pytorch-gpu-benchmark and the Lambda suite
    "A10": "a10",
    "A40": "a40",
    "A100 PCIe 80GB": "a100-pcie-80gb",
    "A100 SXM 40GB": "a100-sxm4-40gb",
    "A100 SXM 80GB": "a100-sxm4-80gb",
    "B200": "b200",
    "GH200": "gh200",
    "GTX 1080 Ti": "gtx-1080-ti",
    "H100 PCIe": "h100-pcie",
    "H100 SXM": "h100-sxm",
    "Quadro RTX 5000": "quadro-rtx-5000",
    "Quadro RTX 6000": "quadro-rtx-6000",
    "RTX 2060 Max-Q": "rtx-2060-max-q",
    "RTX 2070 Max-Q": "rtx-2070-max-q",
    "RTX 2080 Super Max-Q": "rtx-2080-super-max-q",
    "RTX 2080 Ti": "rtx-2080-ti",
    "RTX 3070": "rtx-3070",
    "RTX 3080": "rtx-3080",
    "RTX 3080 Laptop": "rtx-3080-laptop",
    "RTX 3090": "rtx-3090",
    "RTX 6000 Ada": "rtx-6000-ada",
    "RTX A4000": "rtx-a4000",
    "RTX A5500": "rtx-a5500",
    "TITAN RTX": "titan-rtx",
    "TITAN V": "titan-v",
    # The DGX Station has V100 boards of its own; silicon and memory are those of the SXM2 module.
    "V100 DGXS 16GB": "v100-sxm2-16gb",
    "V100 SXM 16GB": "v100-sxm2-16gb",
    # NeuSight
    "A100-PCIE-40GB": "a100-pcie-40gb",
    "A100-PCIE-80GB": "a100-pcie-80gb",
    "A100-SXM4-40GB": "a100-sxm4-40gb",
    "H100-SXM-80GB": "h100-sxm",
    "L4": "l4",
    "MI100": "mi100",
    "MI210": "mi210",
    "MI250": "mi250",
    "P100-PCIE-16GB": "p100-pcie-16gb",
    "P4": "p4",
    "T4": "t4",
    "V100-PCIE-32GB": "v100-pcie-32gb",
}


def catalogue_device(name: str, table: str) -> str:
    """Catalogue name of a device of a reference table."""
    if name not in REFERENCE_DEVICES:
        raise RecordError(
            f"{table}: no catalogue name is known for the device '{name}'"
            f"{near_matches(name, REFERENCE_DEVICES)}; add it to studies.tables.words"
        )
    return REFERENCE_DEVICES[name]


def integer_or_none(value: object) -> int | None:
    """A whole number from a nullable cell; gaps arrive as NaN, None or pandas' NA."""
    import pandas as pd

    return None if pd.isna(value) else int(float(str(value)))  # type: ignore[call-overload]


def known_precision(known: Mapping[str, Precision], word: str, table: str) -> Precision:
    """The precision a table's ``dtype`` word stands for."""
    if word not in known:
        raise RecordError(f"{table}, column 'dtype': expected one of {', '.join(known)}, got '{word}'")
    return known[word]
