"""A measured link as a file that ``scale --intra`` and ``--inter`` take."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import MeasurementError
from forerun.hardware.link import LinkKind
from forerun.measurement.device_index import gpu_index
from forerun.records.measurement import Measurement

__all__ = ["write_measured_link"]


def write_measured_link(measurement: Measurement, path: Path) -> None:
    """Writes the link of a probe; its usable share is 1, because the measured rate is the usable rate.

    Args:
        measurement: A finished probe.
        path: TOML file to write.

    Raises:
        MeasurementError: The probe has no result, or the file cannot be written.
    """
    results, around = measurement.results, measurement.circumstances
    latency, bandwidth = results.get("latency_s"), results.get("bandwidth_bytes_per_s")
    if not isinstance(latency, float) or not isinstance(bandwidth, float):
        raise MeasurementError(
            f"expected a finished probe of a link, got one that {measurement.outcome}: {measurement.reason}"
        )
    kind = LinkKind.HOST if gpu_index(around.device_index) is None else LinkKind.PCIE
    source = (
        f"five all-reduces of {results['world_size']} processes, {around.started_at[:10]}, "
        f"{around.framework} {around.framework_version}"
    )
    text = f"""# Measured by forerun measure link.
[link]
name = "measured"
title = "link measured on {around.device_title}"
kind = "{kind}"
bandwidth_gb_s = {bandwidth / 1e9:.6g}
usable_share = 1.0
latency_us = {max(latency, 1e-9) * 1e6:.6g}

[link.sources]
bandwidth_gb_s = "{source}"
usable_share = "the measured rate is the usable rate"
latency_us = "{source}"
"""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MeasurementError(
            f"the link could not be written to '{path}': {error.strerror or error}"
        ) from error
