from dataclasses import replace

import pytest

from forerun.question.devices import find_device, load_catalog
from forerun.question.devices.device import DeviceKind
from forerun.question.devices.power_share import POWER_EXPONENT, power_share, same_die, sustained_clock_share


@pytest.mark.parametrize(
    ("limited", "free"), [("t4", "rtx-2080-ti"), ("p4", "p100-pcie-16gb"), ("l4", "rtx-4090")]
)
def test_small_cards_cannot_hold_the_clock_their_siblings_hold(limited, free):
    assert power_share(find_device(limited)) < 0.65
    assert sustained_clock_share(find_device(limited)) < 0.75 * sustained_clock_share(find_device(free))


def test_more_power_never_lowers_the_clock_and_never_raises_it_over_the_boost_clock():
    device = find_device("rtx-pro-6000-max-q")
    shares = [sustained_clock_share(replace(device, power_limit_w=watts)) for watts in (150, 300, 600, 5000)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(shares[1] * 0.5**POWER_EXPONENT)
    assert shares[-1] == 1.0


def test_every_device_has_a_positive_share_and_cpus_have_one():
    for device in load_catalog().values():
        assert 0.2 < sustained_clock_share(device) <= 1.0
        if device.kind is not DeviceKind.GPU:
            assert power_share(device) == 1.0


def test_an_architecture_nobody_catalogued_is_not_judged():
    unknown = replace(find_device("t4"), architecture="new")
    assert power_share(unknown) == 1.0


def test_boards_of_one_die_clock_and_power_compute_alike():
    assert "h100-sxm" in same_die(find_device("h200-sxm"))
    assert "a100-sxm4-40gb" in same_die(find_device("a100-sxm4-80gb"))
    assert "a100-pcie-80gb" not in same_die(find_device("a100-sxm4-80gb"))
