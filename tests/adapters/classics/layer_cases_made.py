"""Layers made for tests, with times by a known law."""

import numpy as np

from forerun.adapters.classics.layer_table import LayerFeatures, layer_case, layer_features
from regressor_cases import device


def random_layers(n: int, seed: int = 0, largest: float = 8.0) -> LayerFeatures:
    """n dense layers, a training step each, on one device."""
    draw = np.random.default_rng(seed)
    cases = []
    for _ in range(n):
        batch, inputs, outputs = (int(2 ** draw.integers(2, int(largest) + 1)) for _ in range(3))
        sizes = {"batch_size": batch, "in_features": inputs, "out_features": outputs}
        choices = {"mode": "train_step", "activation": str(draw.choice(["relu", "none"]))}
        cases.append(layer_case("dense", {**sizes, **choices}, device()))
    return layer_features(cases)


def layer_law_s(rows: LayerFeatures) -> np.ndarray:
    """A launch, the work and the traffic of three passes."""
    return 2e-5 + 3 * rows.flops / 2e11 + 3 * rows.moved_bytes / 2e10
