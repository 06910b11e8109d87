import pytest

from forerun.base.errors import InvalidSetupError
from forerun.cost.memory.peak import memory_constants, visible_memory_bytes
from forerun.question.devices.device import Device, DeviceKind, NumberFormat

MIB, GIB = 1024**2, 1024**3


def device_of(memory_bytes=24 * GIB, **changes):
    fields = {
        "name": "made-up",
        "title": "Made up",
        "vendor": "nvidia",
        "kind": DeviceKind.GPU,
        "architecture": "ampere",
        "segment": "geforce",
        "release": "2020-09",
        "num_compute_units": 82,
        "boost_clock_hz": 1.7e9,
        "l2_cache_bytes": 6e6,
        "memory_bandwidth_bytes_per_s": 936e9,
        "memory_type": "GDDR6X",
        "bus": "PCIe 4.0 x16",
        "power_limit_w": 350.0,
        "peak_flops_per_s": {NumberFormat.FP32: 35e12},
        "aliases": (),
        "sources": {},
    }
    return Device(memory_bytes=memory_bytes, **(fields | changes))


@pytest.mark.parametrize(
    ("torch_version", "overhead_gib"), [((1, 12), 1.68), ((1, 13), 0.7), ((2, 9), 0.7), (None, 0.7)]
)
def test_overhead_depends_on_the_era_of_the_software(torch_version, overhead_gib):
    constants = memory_constants(device_of(), torch_version=torch_version)
    assert constants.overhead_bytes / GIB == pytest.approx(overhead_gib, abs=0.01)


def test_the_rtx_3090_limit_is_the_fitted_one():
    # 22,550 MiB of 24,268 visible, half-splits 22,530 to 22,560
    device = device_of()
    overhead_bytes = memory_constants(device, torch_version=(1, 12)).overhead_bytes
    assert (visible_memory_bytes(device) - overhead_bytes) / MIB == pytest.approx(22_550)


def test_the_user_overrides_the_overhead():
    constants = memory_constants(device_of(), overhead_bytes=0.4 * GIB)
    assert constants.overhead_bytes == 0.4 * GIB


@pytest.mark.parametrize("overhead_bytes", [-1.0, float("nan"), float("inf")])
def test_an_impossible_overhead_is_refused(overhead_bytes):
    with pytest.raises(InvalidSetupError, match="zero or more bytes"):
        memory_constants(device_of(), overhead_bytes=overhead_bytes)


def test_a_cpu_has_no_caching_allocator():
    constants = memory_constants(device_of(kind=DeviceKind.CPU))
    assert not constants.uses_caching_allocator
    assert visible_memory_bytes(device_of(kind=DeviceKind.CPU)) == 24 * GIB


@pytest.mark.parametrize(("nominal_gib", "shown_mib"), [(16, 15_360), (24, 23_034), (48, 46_068)])
def test_inline_ecc_of_data_centre_gddr(nominal_gib, shown_mib):
    # nvidia-smi of T4, L4 and L40S; the program finds about 1 to 2 % less than nvidia-smi shows.
    device = device_of(nominal_gib * GIB, segment="datacenter", memory_type="GDDR6")
    assert visible_memory_bytes(device) / MIB == pytest.approx(shown_mib, rel=0.02)
    of_hbm = device_of(nominal_gib * GIB, segment="datacenter", memory_type="HBM2e")
    assert visible_memory_bytes(device) == pytest.approx(15 / 16 * visible_memory_bytes(of_hbm))
