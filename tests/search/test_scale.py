"""Scaling of traced models: laws of the curve, strategies, several devices in predict."""

import itertools

import pytest

import forerun
from forerun.base.errors import InvalidSetupError, UnknownDeviceError

MODEL = "cnn:depth=2,base_filters=32"
ON = "1x8xv100-sxm2-16gb"


def curve(model=MODEL, device=ON, **options):
    return forerun.scale(model, device=device, **options)


def test_throughput_rises_and_never_beats_linear():
    points = curve(num_devices=[1, 2, 4, 8], batch_size=64).points
    rates = [point.throughput_samples_per_s.value for point in points]
    assert all(a < b for a, b in itertools.pairwise(rates))
    assert all(rate <= point.num_devices * rates[0] for rate, point in zip(rates, points, strict=True))
    assert points[0].efficiency == pytest.approx(1)
    assert all(point.efficiency <= 1 for point in points)


def test_strong_scaling_shares_the_batch_and_speeds_up_less():
    both = curve(num_devices=[1, 4], batch_size=64, scaling="both").points
    weak, strong = (
        next(p for p in both if p.scaling == kind and p.num_devices == 4) for kind in ("weak", "strong")
    )
    assert (weak.batch_size_per_device, strong.batch_size_per_device) == (64, 16)
    assert strong.batch_size_global == 64
    assert strong.speedup < weak.speedup


def test_steps_of_an_epoch_are_those_of_the_global_batch():
    point = curve(num_devices=[8], batch_size=64, dataset="cifar10", epochs=3, price_usd_per_hour=2.0).points[
        0
    ]
    assert point.num_steps_per_epoch == 98  # ceil(50,000 / 512)
    assert point.num_steps == 294
    assert point.epoch_time_s.value == pytest.approx(98 * point.step_time_s.value)
    assert point.cost_usd_per_epoch == pytest.approx(2.0 * 8 * point.epoch_time_s.value / 3600)


def test_accumulation_sends_gradients_less_often():
    once, often = (curve(num_devices=[1, 8], batch_size=16, accumulation=k).points[1] for k in (1, 8))
    assert often.efficiency > once.efficiency
    assert often.batch_size_global == 8 * once.batch_size_global


def test_slower_links_smaller_buckets_and_stragglers_cost():
    def step_s(**options):
        return curve("cifar-resnet:20", num_devices=[8], **options).points[0].step_time_s.value

    base = step_s(variation=0.0)
    assert step_s(variation=0.0, intra="pcie-3-x8") > base
    assert step_s(variation=0.1) > base
    assert step_s(variation=0.0, sync_batch_norm=True) > base
    assert step_s(variation=0.0, bucket_mb=0.1) > base


def test_sharding_divides_memory_and_fsdp_sends_most():
    found = {
        strategy: curve("torchvision:resnet50", num_devices=[8], strategy=strategy, optimizer="adam").points[
            0
        ]
        for strategy in ("ddp", "zero1", "zero2", "fsdp")
    }
    memory = [found[s].peak_memory_bytes for s in ("ddp", "zero1", "zero2", "fsdp")]
    memory[2] -= 2 * 5e8 * 4  # DeepSpeed allocates two buckets of 5e8 gradients, more than this model has
    assert all(a > b for a, b in itertools.pairwise(memory[:3]))
    # The weights are few here, and FSDP holds those that it gathered.
    assert memory[3] < memory[1]
    assert memory[3] == pytest.approx(memory[2], rel=0.01)
    assert found["fsdp"].communication_s > found["zero1"].communication_s
    assert any("measured runs with strategy fsdp" in note for note in curve(strategy="fsdp").notes)


def test_mirrored_has_one_host_for_all():
    small = curve(num_devices=[1, 8], batch_size=1, strategy="mirrored").points
    assert small[1].speedup < 2  # a step of one image is the host's, who launches eight of them


def test_predict_of_several_devices_agrees_with_the_curve_and_its_parts_add_up():
    point = curve(num_devices=[8], batch_size=64, dataset="cifar10", epochs=2).points[0]
    found = forerun.predict(
        MODEL, device=ON, batch_size=64, dataset="cifar10", epochs=2, price_usd_per_hour=1.0
    )
    assert found.num_devices == 8
    assert found.step_time_s.value == pytest.approx(point.step_time_s.value)
    assert found.num_steps_per_epoch == point.num_steps_per_epoch
    assert sum(part.time_s for part in found.breakdown) == pytest.approx(found.step_time_s.value)
    assert all(
        layer.share * found.step_time_s.value == pytest.approx(layer.time_s) for layer in found.top_layers
    )
    assert sum(part.size_bytes for part in found.memory_parts) == pytest.approx(found.peak_memory_bytes.value)
    assert found.cost_usd.value == pytest.approx(8 * found.job_time_s.value / 3600)
    named = forerun.predict(MODEL, device="v100-sxm2-16gb", num_devices=8, batch_size=64)
    assert named.step_time_s.value == pytest.approx(found.step_time_s.value)


def test_validation_is_shared_by_the_devices():
    def epoch_s(**options):
        return forerun.predict(
            MODEL, device=ON, batch_size=64, dataset="cifar10", **options
        ).epoch_time_s.value

    assert 0 < epoch_s(validate=True) - epoch_s() < epoch_s()


def test_predict_shards_as_the_curve_does():
    found = forerun.predict("torchvision:resnet50", device=ON, optimizer="adam", strategy="fsdp")
    alone = forerun.predict("torchvision:resnet50", device="v100-sxm2-16gb", optimizer="adam")
    assert found.peak_memory_bytes.value < alone.peak_memory_bytes.value
    assert all(part.size_bytes >= 0 for part in found.memory_parts)
    assert sum(part.size_bytes for part in found.memory_parts) == pytest.approx(found.peak_memory_bytes.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_devices": [0, 2]}, InvalidSetupError, "devices must be at least 1, got 0"),
        ({"num_devices": [-1]}, InvalidSetupError, "got -1"),
        ({"num_devices": []}, InvalidSetupError, "at least one number of devices, got none"),
        ({"num_devices": [2.5]}, InvalidSetupError, "must be a whole number, got 2.5"),
        (
            {"num_devices": [6], "num_nodes": 4, "inter": "ethernet-10g"},
            InvalidSetupError,
            "6 devices cannot be spread",
        ),
        ({"num_devices": [3], "scaling": "strong", "batch_size": 64}, InvalidSetupError, None),
        (
            {"num_devices": [1, 3], "scaling": "strong", "batch_size": 64},
            InvalidSetupError,
            "64 cannot be shared by 3",
        ),
        (
            {"scaling": "week"},
            InvalidSetupError,
            "unknown scaling 'week'; expected one of weak, strong, both",
        ),
        ({"strategy": "zero4"}, InvalidSetupError, "unknown strategy 'zero4'"),
        ({"all_reduce": "star"}, InvalidSetupError, "unknown all reduce 'star'"),
        ({"bucket_mb": 0}, InvalidSetupError, r"capacity of a bucket \[MiB\] must be above zero"),
        ({"accumulation": 0}, InvalidSetupError, "accumulation.* must be at least 1"),
        (
            {"variation": -1.0},
            InvalidSetupError,
            "coefficient of variation must be zero or more",
        ),
        ({"intra": "nvlnk-2"}, UnknownDeviceError, "expected a link .*'nvlnk-2'"),
        ({"device": "2x8xv100-sxm2-16gb", "num_devices": [16]}, UnknownDeviceError, "--inter"),
    ],
)
def test_curves_that_cannot_be_asked(options, error, message):
    if message is None:
        assert (
            curve(**options).points[0].batch_size_per_device == 64
        )  # the first number sets the global batch
        return
    with pytest.raises(error, match=message):
        curve(**options)


def test_a_device_object_and_nodes_are_taken():
    device = forerun.find_device("a100-sxm4-80gb")
    found = forerun.predict(MODEL, device=device, num_devices=16, num_nodes=2, inter="8xinfiniband-hdr")
    assert found.num_devices == 16
    assert any("2 x 8 devices" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": ON, "num_devices": 4}, InvalidSetupError, "has 8 devices, but 4 are asked for"),
        ({"device": "t4", "num_devices": 2, "intra": "nvlink-99"}, UnknownDeviceError, "'nvlink-99'"),
        (
            {"device": "t4", "num_devices": 4, "num_nodes": 2},
            UnknownDeviceError,
            "between the nodes.*--inter",
        ),
    ],
)
def test_clusters_that_predict_cannot_take(options, error, message):
    with pytest.raises(error, match=message):
        forerun.predict(MODEL, **options)
