"""Large models as evidence of intervals: their measured steps are in no fit, and were predicted all the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forerun.cost.time.evidence import operation_mix, step_kind
from forerun.cost.time.features import NEWEST_ERA
from forerun.prediction.division import compute_setup
from studies.layouts.rows import SOURCES, measured_layouts, whole_table
from studies.layouts.traced import traced_model
from studies.optime.evidence_study import KnownNetwork


def known_networks(folder: Path) -> list[KnownNetwork]:
    """Each network of the sources, once for a device and kind of step.

    Args:
        folder: Folder of the public tables.
    """
    table = whole_table(folder)
    found: dict[tuple[object, ...], KnownNetwork] = {}
    for source in SOURCES:
        for row in measured_layouts(table, source):
            if row.step_s is None:
                continue
            setup, device = compute_setup(row.run), row.run.cluster.device
            mix = operation_mix(traced_model(row.sizes, setup).model.ops)
            kind = step_kind(setup)
            key = (device.name, kind, *np.round(mix, 2).tolist())
            found.setdefault(key, KnownNetwork(device=device, kind=kind, era=NEWEST_ERA, mix=mix))
    return list(found.values())
