"""Documents of older versions, turned step by step into the present one.

Version 1 is a row of the flat table of ``StepRecord`` (``records.importers.tables``): one time of a step, no circumstances but
the device and the framework. Version 2 is ``records.measurement.Measurement``. A document of a newer version is
refused: it may mean something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from forerun.errors import RecordError
from forerun.records.measurement import MEASUREMENT_VERSION, JobKind, Outcome

__all__ = ["Document", "upgraded"]

Document = dict[str, Any]
"""A record as JSON holds it."""


def upgraded(document: Document, place: str) -> Document:
    """The document in the present version."""
    version = document.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RecordError(f"{place}: expected a whole schema_version from 1, got {version!r}")
    if version > MEASUREMENT_VERSION:
        raise RecordError(
            f"{place}: schema_version {version} is newer than this program knows ({MEASUREMENT_VERSION}); "
            "update forerun to read it"
        )
    while version < MEASUREMENT_VERSION:
        document = _UPGRADES[version](document, place)
        version = document["schema_version"]
    return document


_JOB_COLUMNS = (
    "precision",
    "phase",
    "layout",
    "compile",
    "optimizer",
    "optimizer_implementation",
    "includes_optimizer",
    "fused_attention",
    "autocast_backward",
    "image_size",
    "input_shape",
    "sequence_length",
    "num_devices",
    "source",
    "row_id",
)
_RESULT_COLUMNS = (
    "step_time_std_s",
    "num_parameters",
    "peak_memory_bytes",
    "next_larger_batch_failed",
    "note",
)


def _from_flat_row(row: Document, place: str) -> Document:
    """Version 1: one row of ``StepRecord``, one time for the step."""
    for name in ("source", "row_id", "model", "family", "device", "batch_size_per_device", "step_time_s"):
        if row.get(name) in (None, ""):
            raise RecordError(f"{place}, column '{name}': expected a value, got none; fill it in")
    present = {name: value for name, value in row.items() if value not in (None, "")}
    identity = json.dumps([present["source"], present["row_id"]])
    return {
        "schema_version": 2,
        "key": hashlib.sha256(identity.encode()).hexdigest()[:32],
        "kind": str(JobKind.STEP),
        "subject": present["model"],
        "family": present["family"],
        "parameters": {
            "batch_size": present["batch_size_per_device"],
            **{name: present[name] for name in _JOB_COLUMNS if name in present},
        },
        "outcome": str(Outcome.DONE),
        "repetitions_s": [present["step_time_s"]],
        "results": {name: present[name] for name in _RESULT_COLUMNS if name in present},
        "circumstances": {
            "device": present["device"],
            "device_title": present["device"],
            "framework": present.get("framework", "pytorch"),
            "framework_version": str(present.get("framework_version", "")),
            "occasion": str(present["source"]),
        },
    }


_UPGRADES: dict[int, Callable[[Document, str], Document]] = {1: _from_flat_row}
