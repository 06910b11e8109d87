"""Records that tests build on."""

from __future__ import annotations

import dataclasses
from typing import Any

from forerun.evidence.records.step_record import StepRecord
from forerun.question.setup import Phase, Precision

PLAIN = StepRecord(
    source="cases",
    row_id="1",
    model="timm:resnet50",
    family="resnet",
    device="rtx-3090",
    batch_size_per_device=64,
    step_time_s=0.25,
    precision=Precision.AMP,
    phase=Phase.TRAIN,
    image_size=224,
)


def record(**changes: Any) -> StepRecord:
    return dataclasses.replace(PLAIN, **changes)
