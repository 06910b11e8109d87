"""Small traced models and cost models for the tests of everything above the tracer."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from forerun.cost.time.features import DYNAMIC_FEATURES, POINT_FEATURES, STATIC_FEATURES
from forerun.cost.time.law import NUM_LATENTS
from forerun.cost.time.rows import distinct_ops
from forerun.cost.time.weights import CostModel, load_weights, shipped_weights_path
from forerun.evidence.fitting.op_time_fit import OpNetwork, as_weights
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.trace import trace

torch.set_num_threads(1)

NUM_FEATURES = len(STATIC_FEATURES) + len(POINT_FEATURES) + len(DYNAMIC_FEATURES)
MODELS = {
    "cnn": ("cnn:depth=2,base_filters=16", {}),
    "resnet18": ("torchvision:resnet18", {"image_size": 64}),
    "mobilenet": ("torchvision:mobilenet_v3_small", {"image_size": 64}),
    "vit": ("torchvision:vit_b_32", {"image_size": 64}),
}
DEVICES = ("a100-sxm4-40gb", "rtx-3090")
ARCHITECTURES = ("ampere", "turing")
PROVENANCE = {
    "measured_devices": {
        "rtx-3090": ["half training of convolutions"],
        "a100-sxm4-40gb": ["tf32 training of convolutions", "half training of products"],
    },
    "intervals": {
        "interpolated": {"quantile": 1.6, "base": 0.1, "slope": 1.0},
        "datasheet only": {"quantile": 2.0, "base": 0.2, "slope": 1.0},
    },
}


@cache
def graph_named(name, precision="fp32", phase="train"):
    """The graph of one of ``MODELS``."""
    model, options = MODELS[name]
    setup = TrainingSetup(precision=Precision(precision), phase=Phase(phase))
    return trace(ModelRequest(model=model, **options), setup)


@cache
def ops_named(name, precision="fp32", phase="train"):
    """Its distinct kernels."""
    return distinct_ops(graph_named(name, precision, phase).ops)


def random_networks(num_members=2, num_systems=3, seed=0):
    """Networks nobody fitted."""
    torch.manual_seed(seed)
    networks = []
    for _ in range(num_members):
        network = OpNetwork(
            torch.randn(NUM_FEATURES), 1 + torch.rand(NUM_FEATURES), 16, num_systems, DEVICES, ARCHITECTURES
        )
        with torch.no_grad():
            network.latents.normal_(0, 0.3)
            for table in (network.architecture_groups, network.device_groups, network.device_classes):
                table.normal_(0, 0.2)
            network.law_factor.normal_(0, 0.2)
        networks.append(network)
    return networks


def random_weights(num_members=2, systems=("a", "b", "c"), seed=0) -> CostModel:
    """A cost model nobody fitted: its equations hold all the same."""
    return as_weights(random_networks(num_members, len(systems), seed), systems, PROVENANCE)


def shipped_weights() -> CostModel:
    """The cost model of the package."""
    if not shipped_weights_path().exists():
        pytest.skip("the fitted weights optime/fitted/op_time.safetensors are not in this checkout")
    return load_weights(shipped_weights_path())


def no_offsets(weights):
    """Offsets of a system about which nothing is known."""
    return np.zeros((len(weights.networks), 1, NUM_LATENTS))
