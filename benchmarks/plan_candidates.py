"""Times a plan of 10,000 candidates on one core, and the same candidates one by one through ``predict``.

    OMP_NUM_THREADS=1 python benchmarks/plan_candidates.py

The models are traced before the clock starts. The loop is timed over candidates at equal distances and scaled up.
``--agreement`` compares every point that a plan of system A's 18 configurations lists with ``predict`` instead.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import forerun
from forerun.search.plan_answer import Plan, PlanPoint

FAMILY = "cnn:depth=2..4,base_filters=32..64"
DEVICES = "t4,v100-sxm2-16gb,l4,a100-sxm4-40gb,h100-sxm,rtx-4090"
JOB = {"dataset": "cifar10", "epochs": 3}
BATCH_SIZES = range(8, 8 + 8 * 140, 8)
NUM_LOOPED = 40


def main() -> None:
    """Prints the times, or the agreement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agreement", action="store_true")
    if parser.parse_args().agreement:
        print_agreement()
    else:
        print_times()


def asked(batch_sizes: range | list[int], **options: object) -> Plan:
    """The plan of all candidates."""
    return forerun.plan(FAMILY, devices=DEVICES, batch_sizes=batch_sizes, **JOB, **options)  # type: ignore[arg-type]


def print_times() -> None:
    """The plan beside the loop."""
    asked([64])  # traces
    begin, begin_cpu = time.perf_counter(), time.process_time()
    found = asked(BATCH_SIZES, within="cost<=1")
    plan_s, plan_cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    print(
        f"{found.num_candidates:,} candidates, listed ones exactly: {plan_s:.2f} s by the clock, "
        f"{plan_cpu_s:.2f} s of one core"
    )
    rows = np.linspace(0, len(found.candidates) - 1, NUM_LOOPED).astype(int)
    begin = time.process_time()
    for row in rows:
        candidate = found.candidates[row]
        forerun.predict(
            candidate.model,
            device=candidate.device,
            batch_size=candidate.batch_size_per_device,
            precision=candidate.precision,
            **JOB,
        )
    each_s = (time.process_time() - begin) / NUM_LOOPED
    loop_s = each_s * found.num_candidates
    print(f"a loop over predict: {1e3 * each_s:.0f} ms each, {loop_s:.0f} s of one core for all")
    print(f"that is {loop_s / plan_cpu_s:.0f} times as long")


def print_agreement() -> None:
    """The largest difference between a listed point and ``predict``, for every listed point of the grid."""
    found = asked([32, 64, 128, 256], num_points=288)
    worst = {
        name: max(difference(point, name) for point in found.points) for name in ("job_time_s", "energy_j")
    }
    print(
        f"{len(found.points)} points of {found.num_candidates} candidates, largest difference from predict:"
    )
    for name, value in worst.items():
        print(f"  {name}: {100 * value:.4f} %")


def difference(point: PlanPoint, name: str) -> float:
    """Relative difference of a quantity from ``predict``."""
    own = forerun.predict(
        point.model,
        device=point.device,
        batch_size=point.batch_size_per_device,
        precision=point.precision,
        **JOB,
    )
    return abs(getattr(point, name).value / getattr(own, name).value - 1)


if __name__ == "__main__":
    main()
