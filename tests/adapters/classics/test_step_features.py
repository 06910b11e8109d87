import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from forerun.adapters.classics.step_features import (
    FLAG_NAMES,
    peak_flops_per_s,
    pytorch_rule_time_s,
    whole_model_features,
)
from forerun.base.errors import RecordError
from forerun.graph.graph import OpClass
from forerun.question.devices.device import NumberFormat
from forerun.question.setup import Layout, Phase, Precision, TrainingSetup
from regressor_cases import NUM_CLASSES, device, graph, random_features

SETUP = TrainingSetup(batch_size_per_device=10, precision=Precision.FP32)
# Per sample: two convolutions of 1 TFLOP and 1 GB each, three activations of 2 GB.
TWO_CLASSES = graph((OpClass.CONV, 2, 1e12, 1e9), (OpClass.ACTIVATION, 3, 1e9, 2e9))


def test_sums_by_hand():
    features = whole_model_features([(TWO_CLASSES, device(), SETUP)])
    assert features.flops[0] == pytest.approx(10 * (2 * 1e12 + 3 * 1e9))
    assert features.traffic_bytes[0] == pytest.approx(10 * (2 * 1e9 + 3 * 2e9))
    assert features.class_flops[0, OpClass.CONV] == pytest.approx(10 * 2e12)
    assert features.class_bytes[0, OpClass.ACTIVATION] == pytest.approx(10 * 6e9)
    assert features.num_kernels[0] == 5
    assert (features.batch_size[0], features.image_size[0], features.num_parameters[0]) == (10, 32, 1000)
    assert (features.peak_flops_per_s[0], features.bandwidth_bytes_per_s[0]) == (1e13, 1e12)


def test_classes_add_up_to_the_whole():
    setups = [dataclasses.replace(SETUP, batch_size_per_device=batch) for batch in (1, 7, 64)]
    features = whole_model_features([(TWO_CLASSES, device(), setup) for setup in setups])
    assert features.class_flops.shape == (3, NUM_CLASSES)
    np.testing.assert_allclose(features.class_flops.sum(1), features.flops)
    np.testing.assert_allclose(features.class_bytes.sum(1), features.traffic_bytes)


def test_flags_say_what_they_are_called():
    setup = TrainingSetup(precision=Precision.AMP, layout=Layout.NHWC, phase=Phase.INFERENCE)
    flags = whole_model_features([(TWO_CLASSES, device(), setup)]).flags[0]
    assert dict(zip(FLAG_NAMES, flags, strict=True)) == {
        "nhwc": 1, "autocast": 1, "compile": 0, "inference": 1, "layer_norm": 0,
    }  # fmt: skip


def test_take_keeps_order():
    features = random_features(5)
    np.testing.assert_array_equal(features.take(np.array([4, 0])).flops, features.flops[[4, 0]])


def test_bad_features_are_refused():
    features = random_features(5)
    with pytest.raises(AssertionError, match="batch_size"):
        dataclasses.replace(features, batch_size=features.batch_size[:4])
    with pytest.raises(RecordError, match="'num_parameters' holds NaN"):
        dataclasses.replace(features, num_parameters=np.full(5, np.nan))
    with pytest.raises(RecordError, match="at least one"):
        whole_model_features([])


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision.FP32, 1e13),
        (Precision.TF32, 1e13),
        (Precision.AMP, 4e13),
        (Precision.FP16, 4e13),
        (Precision.BF16, 1e13),
    ],
)
def test_peak_of_a_precision_falls_back_to_fp32(precision, expected):
    assert peak_flops_per_s(device(), precision) == expected


def test_slow_half_precision_is_not_used_for_arithmetic():
    """GTX 1080 Ti: half runs at 1/64 of fp32, so libraries compute in fp32."""
    pascal = device(peak_flops_per_s={NumberFormat.FP32: 11.3e12, NumberFormat.FP16: 0.177e12})
    assert peak_flops_per_s(pascal, Precision.FP16) == 11.3e12


def test_pytorch_rule_by_hand():
    # Convolution: 1e13 / 2 / 7.5e12 s against 0.01 s of traffic; activations: 0.02 s, no FLOPs.
    expected = 2 * (1e13 / 2 / 7.5e12) + 3 * 0.02
    assert pytorch_rule_time_s(TWO_CLASSES, device(), SETUP) == pytest.approx(expected)
    features = whole_model_features([(TWO_CLASSES, device(), SETUP)])
    assert features.pytorch_rule_time_s[0] == pytest.approx(expected)


def test_no_framework_is_loaded_for_features_and_baselines():
    code = (
        "import sys, forerun.evidence.fitting.evaluation, forerun.adapters.classics.baselines;"
        "import studies.tables.published;"
        "assert not {'torch', 'sklearn', 'timm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
