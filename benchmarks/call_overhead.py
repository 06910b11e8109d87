"""Cost of a training step beside its layers, in Keras on TensorFlow and in PyTorch, and the factor between them.

Each framework runs in a process of its own, one thread: chains of 1 and 17 dense layers of one unit (they have calls
and next to no work), the network of the MNIST study, and each of its layers alone. Printed are the cost of a step, of
one more layer, and the sum of the layers over the step.

    python benchmarks/call_overhead.py --batch-size 32 --repetitions 40
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

CHAIN = 17
LAYERS = [
    ("conv", (28, 28, 1), 32),
    ("conv", (13, 13, 32), 32),
    ("dense", (800,), 128),
    ("dense", (128,), 10),
]


def _median_ms(step: Callable[[], Any], repetitions: int) -> float:
    for _ in range(5):
        step()
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return 1e3 * median(times)


def _keras_step(layers: list[Any], shape: tuple[int, ...], batch_size: int) -> Callable[[], Any]:
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input(shape), *layers])
    model.compile(optimizer="sgd", loss="mse")
    x = np.random.default_rng(0).random((batch_size, *shape), dtype=np.float32)
    y = np.zeros((batch_size, *model.output_shape[1:]), np.float32)
    return lambda: model.train_on_batch(x, y)


def _keras_layer(kind: str, width: int) -> list[Any]:
    from keras import layers

    if kind == "conv":
        return [layers.Conv2D(width, 3, activation="relu"), layers.MaxPooling2D()]
    return [layers.Dense(width, activation="relu")]


def _torch_step(layers: list[Any], shape: tuple[int, ...], batch_size: int) -> Callable[[], Any]:
    import torch

    model = torch.nn.Sequential(*layers)
    ordered = (shape[-1], *shape[:-1]) if len(shape) == 3 else shape
    x = torch.rand(batch_size, *ordered)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def _torch_layer(kind: str, width: int, shape: tuple[int, ...]) -> list[Any]:
    from torch import nn

    if kind == "conv":
        return [nn.Conv2d(shape[-1], width, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return [nn.Linear(shape[0], width), nn.ReLU()]


def _measure(framework: str, batch_size: int, repetitions: int) -> dict[str, float]:
    if framework == "keras":
        import tensorflow as tf
        from keras.layers import Flatten

        tf.config.threading.set_intra_op_parallelism_threads(1)
        make, flatten = _keras_step, Flatten
        built = [_keras_layer(kind, width) for kind, _, width in LAYERS]
        one = [_keras_layer("dense", 1) for _ in range(CHAIN)]
        whole = [_keras_layer(kind, width) for kind, _, width in LAYERS]
    else:
        import torch

        torch.set_num_threads(1)
        make, flatten = _torch_step, torch.nn.Flatten
        built = [_torch_layer(kind, width, shape) for kind, shape, width in LAYERS]
        one = [_torch_layer("dense", 1, (1,)) for _ in range(CHAIN)]
        whole = [_torch_layer(kind, width, shape) for kind, shape, width in LAYERS]
    network = [*whole[0], *whole[1], flatten(), *whole[2], *whole[3]]
    single = _median_ms(make(list(one[0]), (1,), batch_size), repetitions)
    chain = _median_ms(make([layer for part in one for layer in part], (1,), batch_size), repetitions)
    shapes = [shape for _, shape, _ in LAYERS]
    layers = [
        _median_ms(make(part, shape, batch_size), repetitions)
        for part, shape in zip(built, shapes, strict=True)
    ]
    step = _median_ms(make(network, LAYERS[0][1], batch_size), repetitions)
    per_layer = (chain - single) / (CHAIN - 1)
    return {
        "step_ms": step,
        "sum_ms": sum(layers),
        "per_layer_ms": per_layer,
        "per_step_ms": single - per_layer,
    }


def main() -> None:
    """Reads the options, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--framework", choices=("keras", "pytorch"))
    asked = parser.parse_args()
    if asked.framework:
        print(json.dumps(_measure(asked.framework, asked.batch_size, asked.repetitions)))
        return
    print(
        "framework  step ms  sum of layers ms  factor  cost of a step ms  of a layer ms  factor from these costs"
    )
    for framework in ("pytorch", "keras"):
        command = [sys.executable, __file__, "--framework", framework, "--batch-size", str(asked.batch_size)]
        command += ["--repetitions", str(asked.repetitions)]
        environment = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        step, total, once = found["step_ms"], found["sum_ms"], found["per_step_ms"]
        predicted = total / (total - (len(LAYERS) - 1) * once)
        print(
            f"{framework:9s}  {step:7.2f}  {total:16.2f}  {total / step:6.2f}  {once:17.3f}  "
            f"{found['per_layer_ms']:13.3f}  {predicted:23.2f}"
        )


if __name__ == "__main__":
    main()
