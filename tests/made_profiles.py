"""Profiles of scripts that were never run."""

from dataclasses import replace
from typing import Any

from forerun.script.profiling.profile import Profile, StepParts


def made_profile(
    device: str, *, wait_s: float = 0.06, kernels_s: float = 0.015, host_s: float = 0.005, **changes: Any
) -> Profile:
    """A step of 80 ms, 60 of them waiting for eight samples that the main process decodes; four cores."""
    parts = StepParts(input_wait_s=wait_s, copy_s=0.0, kernels_s=kernels_s, host_s=host_s)
    made = Profile(
        command=("train.py",),
        outcome="done",
        status=0,
        num_steps=40,
        num_steady_steps=39,
        step_time_s=parts.step_s,
        step_time_median_s=parts.step_s,
        throughput_samples_per_s=8.0 / parts.step_s,
        batch_size=8.0,
        parts=parts,
        batches_per_step=1.0,
        has_images=True,
        busy_machine_fraction=0.0,
        loader_wait_s=wait_s,
        held_s={},
        has_window=True,
        top_operators=(),
        wall_s=5.0,
        phases_s={},
        device=device,
        device_busy_fraction=None,
        cpu_utilisation=0.5,
        cpu_s_per_step=0.1,
        num_usable_cores=4.0,
        peak_memory_bytes=1,
        device_peak_bytes=None,
        sensors={},
        loader={"num_workers": 0},
        optimizer={},
        num_ranks=1,
        num_steps_of_job=None,
        epochs=None,
        steps_per_epoch=None,
        job_time_s=None,
        time_left_s=None,
    )
    return replace(made, **changes)
