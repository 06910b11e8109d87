"""Measures for a calibration: layers and whole models by turns, until the time is up."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from forerun.hardware.device import Device, DeviceKind
from forerun.measurement.calibration_jobs import LOOP_MODEL, calibration_layers, calibration_models
from forerun.measurement.circumstances import describe_circumstances
from forerun.measurement.device_lock import lock_device
from forerun.measurement.jobs import MeasurementJob
from forerun.measurement.keras.run import KERAS_RUN
from forerun.measurement.progress import Event
from forerun.measurement.protocol import Protocol
from forerun.records.measurement import JobKind, Measurement, Outcome
from forerun.records.store.record_store import RecordStore

__all__ = ["loop_cost_s", "measure_for_calibration"]

_LAYER_SHARE = {"pytorch": 0.5, "keras": 0.35}
"""Share of the measuring time by kind of job; Keras models need more, because TensorFlow first builds a graph."""

_LAYERS_AT_ONCE = 6
_NUM_LAYERS = 400
_LAYER_PROTOCOL = Protocol(
    min_warm_up=2, max_warm_up=12, window=3, num_repetitions=7, max_seconds=0.8, timeout_s=60, anchor_every=0
)
_MODEL_PROTOCOL = Protocol(
    min_warm_up=2, max_warm_up=8, window=3, num_repetitions=7, max_seconds=5.0, timeout_s=120, anchor_every=0
)


@dataclass(slots=True)
class _Queue:
    """Jobs of one kind, the number of them in one turn, and their share of the time."""

    jobs: Iterator[MeasurementJob]
    num_at_once: int
    share: float
    protocol: Protocol
    spent_s: float = 0.0


def measure_for_calibration(
    device_index: str,
    device: Device,
    precision: str,
    framework: str,
    records: str | Path | None,
    deadline_s: float,
    on_event: Callable[[Event], None] | None,
) -> tuple[list[Measurement], str]:
    """Measures until the deadline while the device is held; returns the measurements and their store.

    Layers and models take turns, so that a change of the machine affects both alike; the kind that has had less of
    its share of the time is next.

    Args:
        device_index: ``cpu`` or ``cuda:N``.
        device: The device behind that name.
        precision: Precision of what is measured.
        framework: ``pytorch`` or ``keras``.
        records: Store; the default one if None.
        deadline_s: Reading of ``time.monotonic`` after which no job begins; some of each kind are measured anyway.
        on_event: Receives an event for every job.
    """
    shared: dict[str, Any] = {
        "is_gpu": device.kind is DeviceKind.GPU,
        "precision": precision,
        "framework": framework,
    }
    share = _LAYER_SHARE[framework]
    layers = _Queue(iter(calibration_layers(_NUM_LAYERS, **shared)), _LAYERS_AT_ONCE, share, _LAYER_PROTOCOL)
    models = _Queue(iter(calibration_models(**shared)), 1, 1 - share, _MODEL_PROTOCOL)
    occasion = f"calibration {datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')}"
    session: dict[str, Any] = {"device_index": device_index, "occasion": occasion, "on_event": on_event}
    with RecordStore.open(records) as store, lock_device(device_index):
        _measure_in_turns([layers, models], store, deadline_s, session, framework)
        return list(store.measurements(occasion=occasion, outcome=Outcome.DONE)), store.name


def _measure_in_turns(
    queues: Sequence[_Queue], store: RecordStore, deadline_s: float, session: dict[str, Any], framework: str
) -> None:
    from forerun.measurement.session import run_jobs

    waiting = list(queues)
    while waiting:
        queue = min(waiting, key=lambda one: one.spent_s / one.share)
        is_late = time.monotonic() >= deadline_s
        if is_late and queue.spent_s:
            return
        chunk = list(islice(queue.jobs, queue.num_at_once))
        if not chunk:
            waiting.remove(queue)
            continue
        began_s = time.monotonic()
        run_jobs(chunk, store, anchor=None, **session, **_stack_of(queue.protocol, session, framework))
        queue.spent_s += time.monotonic() - began_s


def _stack_of(protocol: Protocol, session: dict[str, Any], framework: str) -> dict[str, Any]:
    """Arguments of ``run_jobs``; jobs of Keras run in another runner."""
    if framework != "keras":
        return {"protocol": protocol}
    around = describe_circumstances(session["device_index"], protocol=protocol, framework=framework)
    return {"protocol": protocol, "circumstances": around, "run": KERAS_RUN}


def loop_cost_s(measured: Sequence[Measurement]) -> float:
    """Time of a step of ``fit`` beside its operations [s].

    It is the step of a network with next to no work, less the call of a layer without any: the measured layers, and so
    the cost model, contain that call. It is zero where no such network was measured, as with PyTorch, where the user
    writes the loop.
    """

    def median_s(chosen: Iterable[Measurement]) -> float:
        times = [float(np.median(m.repetitions_s)) for m in chosen if m.repetitions_s]
        return float(np.median(times)) if times else 0.0

    nulls = (m for m in measured if m.kind is JobKind.LAYER and m.subject == "null")
    return max(0.0, median_s(m for m in measured if m.subject == LOOP_MODEL) - median_s(nulls))
