"""Steps of a whole model on one batch that stays on the device: any model that ``predict`` takes.

Parameters of the job (each may be left out): ``batch_size``, ``precision``, ``layout``, ``compile``,
``optimizer``, ``optimizer_implementation``, ``phase``, ``fused_attention``; ``image_size``, ``input_shape`` (as text),
``sequence_length``, ``num_classes``; ``seed``, ``cudnn_benchmark``; ``memory_limit_bytes``, a limit that a GPU's
allocator does not exceed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from forerun.errors import InvalidSetupError
from forerun.measurement.jobs import MeasurementJob, RunResult
from forerun.measurement.protocol import Protocol
from forerun.measurement.runners.real_step import make_real_optimizer, make_step, num_parameters, tensor_bytes
from forerun.measurement.runners.table import runner
from forerun.measurement.runners.timing import Timed, time_repetitions
from forerun.measurement.runners.torch_device import (
    PeakMemory,
    limit_device_memory,
    open_device,
    set_numeric_flags,
    synchroniser,
)
from forerun.measurement.telemetry import open_energy_counter
from forerun.records.job_parameters import flag_of, input_options_of, setup_of, whole_of
from forerun.records.measurement import JobKind, Scalar
from forerun.run.setup import Phase

__all__ = ["run_step", "step_energy", "time_first_and_rest"]

_LEARNING_RATE = 1e-4
"""Learning rate, small so that weights stay finite over hundreds of steps on one batch of noise, because denormal
numbers are slow on processors. The time of the optimizer does not depend on it."""

_SHORTEST_ENERGY_SPAN_S = 0.5  # the driver's counter moves in steps of some 100 ms


@runner(JobKind.STEP)
def run_step(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times steps of a model.

    Results are num_parameters, first_step_s, compile_time_s and the peak memory; on a GPU also launched_s, the time
    until the host had launched a step, and step_energy_j.
    """
    import torch

    from forerun.tracing.models.sources import build_model
    from forerun.tracing.step import prepared_batch

    setup = setup_of(job.parameters)
    device = open_device(device_index)
    if job.parameters.get("memory_limit_bytes") is not None:
        limit_device_memory(device, whole_of(job.parameters, "memory_limit_bytes"))
    set_numeric_flags(setup.precision, cudnn_benchmark=flag_of(job.parameters, "cudnn_benchmark"))
    torch.manual_seed(whole_of(job.parameters, "seed", 0))
    built = build_model(
        job.subject,
        training=setup.phase is not Phase.INFERENCE,
        device=str(device),
        **input_options_of(job.parameters),
    )
    if built.only_batch_size not in (None, setup.batch_size_per_device):
        raise InvalidSetupError(
            f"{built.name} runs at batch size {built.only_batch_size} only, got "
            f"{setup.batch_size_per_device}; ask for that one"
        )
    memory = PeakMemory(device, tensor_bytes(built.module))
    batch = prepared_batch(built, setup, setup.batch_size_per_device)
    optimizer = make_real_optimizer(setup, built.module, _LEARNING_RATE)
    step = make_step(built, setup, batch, optimizer, device)
    energy_j: list[float | None] = []
    with open_energy_counter(device_index) as read_energy_j:
        timed, first = time_first_and_rest(
            step,
            synchroniser(device),
            protocol,
            is_compiled=setup.compile,
            at_both_ends=lambda: energy_j.append(read_energy_j()),
        )
    host = {"launched_s": median(timed.returned_s)} if device.type == "cuda" else {}
    return RunResult(
        repetitions_s=timed.repetitions_s,
        warm_up_s=timed.warm_up_s,
        is_stationary=timed.is_stationary,
        results={
            "num_parameters": num_parameters(built.module),
            **first,
            **host,
            **step_energy(energy_j, timed.repetitions_s),
            **memory.figures(),
        },
    )


def step_energy(readings_j: Sequence[float | None], repetitions_s: Sequence[float]) -> dict[str, Scalar]:
    """``step_energy_j``, the mean energy of the timed repetitions [J]; empty if the energy is not known.

    Args:
        readings_j: Counter before the first and after the last repetition [J]; None without a counter.
        repetitions_s: The repetitions, one after the other [s].
    """
    before_j, after_j = readings_j
    if before_j is None or after_j is None or sum(repetitions_s) < _SHORTEST_ENERGY_SPAN_S:
        return {}
    return {"step_energy_j": (after_j - before_j) / len(repetitions_s)}


def time_first_and_rest(
    step: Callable[[], None],
    synchronise: Callable[[], None],
    protocol: Protocol,
    *,
    is_compiled: bool = False,
    at_both_ends: Callable[[], None] | None = None,
) -> tuple[Timed, dict[str, Scalar]]:
    """Times of the first step, which loads and compiles, and of the other steps.

    ``compile_time_s`` is the time of the first step less a later one; without compilation that difference is the start
    of libraries, and only ``first_step_s`` is given.
    """
    synchronise()
    began_s = time.perf_counter()
    step()
    synchronise()
    first_s = time.perf_counter() - began_s
    timed = time_repetitions(step, synchronise, protocol, at_both_ends=at_both_ends)
    figures: dict[str, Scalar] = {"first_step_s": first_s}
    if is_compiled:
        figures["compile_time_s"] = max(0.0, first_s - median(timed.repetitions_s))
    return timed, figures
