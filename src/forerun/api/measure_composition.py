"""Measures a network and compares its step with the sum of its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.answers import Answer
from forerun.api.measure_jobs import MeasurementRun, measure_jobs
from forerun.fitting.compositions import Composition, measured_compositions
from forerun.measurement.composition_jobs import composition_jobs
from forerun.measurement.device_index import gpu_index
from forerun.measurement.progress import Event
from forerun.measurement.protocol import Protocol
from forerun.records.importers.model_names import subject_family
from forerun.run.model import ModelRequest

__all__ = ["CompositionRun", "measure_composition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositionRun(Answer):
    """Networks compared with their layers.

    Attributes:
        run: The measurements.
        compositions: One comparison per network and batch size.
    """

    run: MeasurementRun
    compositions: tuple[Composition, ...]

    def json_fields(self) -> dict[str, Any]:
        """The fields of the run, and the compositions."""
        return {**self.run.json_fields(), "compositions": self.compositions}


def measure_composition(
    models: Sequence[str],
    *,
    batch_sizes: Sequence[int] = (32,),
    image_size: int | None = None,
    optimizer: str = "adam",
    precision: str = "fp32",
    device: str = "cpu",
    records: str | Path | None = None,
    occasion: str = "",
    protocol: Protocol | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> CompositionRun:
    """Measures networks, each of their layers alone, and empty calls; compares the step with the sums.

    Args:
        models: Networks as ``predict`` names them.
        batch_sizes: Batch sizes of one device; every network is measured at each.
        image_size: Height and width of square images, None for the networks' own [pixels].
        optimizer: As in ``predict``.
        precision: As in ``predict``.
        device: ``cpu`` or ``cuda:N``.
        records: Store of the records; the default store if None.
        occasion: Label of the session; the same label resumes it.
        protocol: Rules of timing.
        on_event: Receives an event for every job.

    Raises:
        UsageError: A network, the device or the setup is not possible.
        MeasurementError: The device is busy, or a part of a network could not be measured.
        RecordError: The store cannot be used.
    """
    networks = [
        composition_jobs(
            ModelRequest(model=model, image_size=image_size),
            subject_family(model),
            batch_size,
            optimizer=optimizer,
            precision=precision,
        )
        for model in models
        for batch_size in batch_sizes
    ]
    jobs = list({job.to_json(): job for network in networks for job in network.jobs}.values())
    run = measure_jobs(jobs, device, records, occasion, protocol, None, on_event)
    overlaps = gpu_index(device) is not None
    rows = measured_compositions(networks, run.measurements, overlaps=overlaps)
    return CompositionRun(run=run, compositions=tuple(rows))
