"""The P100 tables: what the published sum of layers overshoots, and why."""

import os
from pathlib import Path

import pytest

from studies.own.records import published_compositions

REFERENCE = Path(os.environ.get("FORERUN_REFERENCE_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.reference
def test_the_published_overshoot_is_explained():
    if not (REFERENCE / "iit_layers.parquet").is_file():
        pytest.skip(f"no public tables in {REFERENCE}")
    rows = published_compositions(REFERENCE)
    assert len(rows) == 16
    by_network = {name: [r for r in rows if r.network == name] for name in ("mnist-cnn", "cifar10-cnn")}
    before = {name: sum(r.overshoot_before for r in found) / 8 for name, found in by_network.items()}
    # The source states 20 and 61 %.
    assert before == pytest.approx({"mnist-cnn": 0.20, "cifar10-cnn": 0.61}, abs=0.015)
    for found in by_network.values():
        assert abs(sum(r.overshoot_after for r in found) / 8) < 0.08
        assert max(abs(r.overshoot_after) for r in found) < 0.12
