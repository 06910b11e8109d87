"""One process measured, two predicted, two measured: data parallel training over gloo on this machine.

    python benchmarks/two_processes.py [--models cnn:depth=2,base_filters=32 ...] [--batch-size 16] [--folder FOLDER]

First the link between two processes is probed by all-reduces of five sizes; then a step of each model is measured in
one process with one thread and in two with one thread each, in three rounds by turns. The prediction knows the probe
and the step of one process only; compared are the tenth percentiles of the steps. Nothing is hidden on a processor,
whose cores both compute and send:

    step of two = step of one x slow-down of sharing (from the probe) + all-reduce of the gradients
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from forerun.cost.communication.collectives import AllReduce
from forerun.cost.communication.constants import ScalingConstants
from forerun.cost.communication.data_parallel import gradient_buckets
from forerun.evidence.measure import measure_link, measure_model
from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.records.measurement import Measurement
from forerun.question.devices.device import LinkKind
from studies.scaling.fit import scale_measured_step, uniform_gradients

NUM_ROUNDS = 3
MODELS = ("cnn:depth=2,base_filters=32", "cnn:depth=4,base_filters=64", "torchvision:resnet18")
# On a processor a second of communication costs a second: the cores that send do not compute meanwhile.
ON_A_PROCESSOR = ScalingConstants(slowdown=1.0)


def probed(folder: Path, number: int) -> Measurement:
    """A probe of the link."""
    protocol = Protocol(num_repetitions=30, num_threads=2)
    run = measure_link(
        num_devices=2, records=folder / "two.sqlite", occasion=f"link {number}", protocol=protocol
    )
    return run.measurements[-1]


def measured(folder: Path, model: str, batch_size: int, num_processes: int, number: int) -> Measurement:
    """Steps of one process, or of two; each has one thread."""
    run = measure_model(
        model,
        batch_sizes=(batch_size,),
        image_size=64 if model.startswith("torchvision") else None,
        num_devices=num_processes,
        records=folder / "two.sqlite",
        occasion=f"{model} {number}",
        protocol=Protocol(num_repetitions=15, max_seconds=20, num_threads=num_processes),
    )
    return run.measurements[-1]


def figure(measurement: Measurement, name: str) -> float:
    """A number of a finished measurement."""
    value = measurement.results.get(name)
    if not isinstance(value, (int, float)):
        raise SystemExit(f"{measurement.subject} {measurement.outcome}: {measurement.reason}")
    return float(value)


def quiet_s(measurements: Sequence[Measurement]) -> float:
    """Tenth percentile of the steps of all rounds [s], because other work of the machine only adds to a step."""
    steps_s = sorted(time_s for measurement in measurements for time_s in measurement.repetitions_s)
    if not steps_s:
        last = measurements[-1]
        raise SystemExit(f"{last.subject} {last.outcome}: {last.reason}")
    return steps_s[len(steps_s) // 10]


def main() -> None:
    """Measures, predicts, and prints both side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or Path(made)
        probes = [probed(folder, number) for number in range(NUM_ROUNDS)]
        latency_s = min(figure(probe, "latency_s") for probe in probes)
        bandwidth = max(figure(probe, "bandwidth_bytes_per_s") for probe in probes)
        sharing = median(figure(probe, "sharing_slowdown") for probe in probes)
        print(
            f"link: {latency_s * 1e6:.0f} us, {bandwidth / 1e9:.2f} GB/s; a step beside another takes x {sharing:.2f}"
        )
        link = AllReduce(
            num_devices_per_node=2,
            intra=LinkKind.HOST,
            intra_latency_s=latency_s,
            intra_bytes_per_s=bandwidth,
        )
        print(
            f"{'model':30} {'1 process':>10} {'2 predicted':>12} {'2 measured':>11} {'error':>7} {'linear':>7}"
        )
        for model in asked.models:
            pairs = [
                tuple(measured(folder, model, asked.batch_size, n, number) for n in (1, 2))
                for number in range(NUM_ROUNDS)
            ]
            one_s = quiet_s([one for one, _ in pairs])
            two_s = quiet_s([two for _, two in pairs])
            gradients = figure(pairs[0][1], "gradient_bytes")
            predicted_s = scale_measured_step(
                one_s * sharing,
                gradients,
                link,
                ON_A_PROCESSOR,
                buckets=gradient_buckets(uniform_gradients(gradients)),
            ).step_s
            print(
                f"{model:30} {one_s * 1e3:8.1f}ms {predicted_s * 1e3:10.1f}ms {two_s * 1e3:9.1f}ms "
                f"{100 * (predicted_s / two_s - 1):+6.1f}% {100 * (one_s / two_s - 1):+6.1f}%",
                flush=True,
            )


if __name__ == "__main__":
    main()
