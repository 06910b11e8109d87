"""MirroredStrategy of Keras on two logical processors: measured and predicted steps.

The replicas share the threads, so their work adds up: a step of two replicas is a step of twice the batch, and what the
strategy costs. Forms of that cost, each fitted on the other networks by least squares with no term below zero:

    a                   each step is split, run by the replicas' threads and joined
    c * variables       each gradient is a call to sum it and hand it back
    a + c * variables
    a + c * parameters  each gradient is copied, summed and handed back byte by byte

    python benchmarks/keras_mirrored.py --batch-size 32
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from statistics import median

import numpy as np
from scipy.optimize import nnls

import forerun

NETWORKS = {
    "cnn:depth=1,base_filters=8": 8,
    "cnn:depth=2,base_filters=8": 12,
    "cnn:depth=3,base_filters=8": 16,
    "cnn:depth=1,base_filters=32": 8,
    "cnn:depth=3,base_filters=16": 16,
}
"""Networks with their trainable variables: two for each convolution and dense layer."""
FORMS: dict[str, Callable[[float, float], list[float]]] = {
    "a": lambda variables, parameters: [1.0],
    "c * variables": lambda variables, parameters: [variables],
    "a + c * variables": lambda variables, parameters: [1.0, variables],
    "a + c * parameters": lambda variables, parameters: [1.0, parameters],
}
"""Terms of a network with so many variables and so many millions of parameters."""


def _measure_ms(network: str, batch_size: int, num_replicas: int, repetitions: int) -> float:
    """Median step in a child process with one thread [ms]."""
    asked = json.dumps([network, batch_size, num_replicas, repetitions])
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", asked],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.splitlines()[-1])


def _child(text: str) -> None:
    from forerun.adapters.keras.runner import run_keras_job
    from forerun.evidence.measurement.jobs import Protocol
    from forerun.evidence.measurement.layer_design import grid_jobs
    from forerun.evidence.measurement.settings import Grid

    network, batch_size, num_replicas, repetitions = json.loads(text)
    family, _, keys = network.partition(":")
    sizes = {key: (int(value),) for key, value in (part.split("=") for part in keys.split(","))}
    grid = Grid(
        network=family,
        sizes=sizes,
        batch_sizes=(batch_size,),
        dataset="synthetic",
        num_epochs=0,
        num_steps=2,
        framework="keras",
        num_replicas=num_replicas,
    )
    protocol = Protocol(num_repetitions=repetitions, num_threads=1, max_seconds=10)
    result = run_keras_job(grid_jobs(grid)[0], "cpu", protocol)
    print(1e3 * median(result.repetitions_s))


def main() -> None:
    """Reads the options, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32, help="Images of one replica's step.")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--child")
    asked = parser.parse_args()
    if asked.child:
        _child(asked.child)
        return
    batch, repetitions = asked.batch_size, asked.repetitions
    found = {
        name: (_measure_ms(name, 2 * batch, 1, repetitions), _measure_ms(name, batch, 2, repetitions))
        for name in NETWORKS
    }
    print("network                      one replica, twice the batch  two replicas  " + "  ".join(FORMS))
    sizes = {
        name: (variables, 1e-6 * forerun.predict(name, device="t4").num_parameters)
        for name, variables in NETWORKS.items()
    }
    errors: dict[str, list[float]] = {form: [] for form in FORMS}
    for name, (one, two) in found.items():
        cells = []
        for form, terms in FORMS.items():
            others = {key: value for key, value in found.items() if key != name}
            rows = np.array([terms(*sizes[key]) for key in others])
            extra = np.array([max(0.0, second - first) for first, second in others.values()])
            predicted = one + float(np.dot(nnls(rows, extra)[0], terms(*sizes[name])))
            errors[form].append(abs(predicted / two - 1))
            cells.append(f"{predicted:.1f} ms ({predicted / two - 1:+.0%})")
        print(f"{name:27s}  {one:25.1f} ms  {two:9.1f} ms  " + "  ".join(cells))
    print("mean error: " + ", ".join(f"{form} {np.mean(found):.0%}" for form, found in errors.items()))


if __name__ == "__main__":
    main()
