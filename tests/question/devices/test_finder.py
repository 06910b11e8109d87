"""This machine, and the device that ``here`` means."""

import json
import os
from dataclasses import replace
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forerun.question.devices
from forerun.base.errors import UnknownDeviceError
from forerun.question.devices import (
    DeviceKind,
    Host,
    HostGpu,
    NumberFormat,
    describe_host,
    find_device,
    load_catalog,
)
from forerun.question.devices.finder import cpu_device, cpu_flops_per_clock, gpu_device
from forerun.question.devices.here import HostCpu, list_gpus, visible_gpus

GIB = 1024**3


def gpu(name="NVIDIA GeForce RTX 3090", memory_gib=24.0, index=0):
    return HostGpu(
        index=index,
        uuid=f"GPU-{index}abc",
        name=name,
        memory_bytes=int(memory_gib * GIB),
        memory_used_bytes=0,
        driver_version="570.1",
        cuda_version="12.8",
        power_limit_w=None,
        max_sm_clock_hz=None,
        max_memory_clock_hz=None,
        compute_capability=None,
    )


def host(
    num_usable_cores=8.0, physical=32, logical=64, clock_hz=3e9, features=("avx2", "fma"), model="Intel Xeon"
):
    cpu = HostCpu(
        model=model,
        features=features,
        num_physical_cores=physical,
        num_logical_cores=logical,
        num_allowed_cores=logical,
        clock_hz=clock_hz,
        last_level_cache_bytes=None,
    )
    return Host(
        cpu=cpu,
        num_usable_cores=num_usable_cores,
        memory_total_bytes=64 * GIB,
        memory_available_bytes=60 * GIB,
        memory_limit_bytes=8 * GIB,
        swap_total_bytes=0,
        disk_free_bytes=GIB,
        gpus=(),
        operating_system="Linux",
        python_version="3.12.0",
        torch_version=None,
    )


def test_this_machine_is_described():
    here = describe_host()
    assert 0 < here.num_usable_cores <= here.cpu.num_logical_cores
    assert here.cpu.num_physical_cores <= here.cpu.num_logical_cores
    assert here.cpu.num_allowed_cores <= (os.cpu_count() or 1)
    assert 0 < here.memory_usable_bytes <= here.memory_total_bytes
    assert here.memory_available_bytes <= here.memory_total_bytes
    assert here.disk_free_bytes > 0
    assert here.cpu.model
    assert here.torch_version == metadata.version("torch")


def test_a_host_survives_json():
    here = replace(describe_host(), gpus=(gpu(),))
    plain = json.loads(json.dumps(here.as_dict(), allow_nan=False))
    assert plain["memory_total_bytes"] == here.memory_total_bytes
    assert plain["cpu"]["features"] == list(here.cpu.features)
    assert plain["gpus"][0]["name"] == "NVIDIA GeForce RTX 3090"


def test_here_is_a_device_that_can_be_asked():
    device = find_device("here")
    assert device.peak_flops_per_s[NumberFormat.FP32] > 0
    assert device.memory_bytes > 0
    if not visible_gpus(list_gpus()):
        assert device.kind is DeviceKind.CPU
        assert device.num_compute_units <= max(1, os.cpu_count() or 1)


def test_the_driver_name_and_memory_choose_the_board():
    assert gpu_device(gpu()) is load_catalog()["rtx-3090"]
    assert gpu_device(gpu("NVIDIA GeForce RTX 4060 Ti", 16.0)).name == "rtx-4060-ti-16gb"
    assert gpu_device(gpu("NVIDIA GeForce RTX 4060 Ti", 8.0)).name == "rtx-4060-ti-8gb"


def test_error_correction_does_not_make_another_board():
    """A T4 reports 15360 of 16384 MiB."""
    assert gpu_device(gpu("Tesla T4", 15.0)) is load_catalog()["t4"]


def test_memory_unlike_the_entry_is_taken_from_the_driver():
    device = gpu_device(gpu("NVIDIA GeForce RTX 3080 Laptop GPU", 8.0))
    assert device.name == "rtx-3080-laptop"
    assert device.memory_bytes == 8 * GIB
    assert "driver" in device.sources["memory_bytes"]


def test_an_unknown_board_is_named():
    with pytest.raises(UnknownDeviceError, match=r"got 'NVIDIA Foo 9000'.*describe it in a TOML file"):
        gpu_device(gpu("NVIDIA Foo 9000"))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("0,1,2", [0, 1, 2]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,9,0", [1]),
        ("GPU-2abc", [2]),
        ("GPU-", []),
    ],
)
def test_visible_gpus_follow_cuda(setting, expected):
    gpus = [gpu(index=index) for index in range(3)]
    assert [one.index for one in visible_gpus(gpus, setting)] == expected


def test_all_gpus_are_visible_without_a_setting(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(visible_gpus([gpu(), gpu(index=1)])) == 2


def test_a_cpu_counts_cores_once_and_takes_the_limit_of_the_container():
    device = cpu_device(host(num_usable_cores=8.0))
    assert device.num_compute_units == 4  # eight threads, two per core
    assert device.memory_bytes == 8 * GIB
    assert device.peak_flops_per_s[NumberFormat.FP32] == pytest.approx(4 * 32 * 3e9)
    assert set(device.sources) == set(load_catalog()["cpu"].sources)


@given(st.floats(0.1, 64), st.floats(0.1, 64))
def test_more_cores_never_make_a_slower_cpu(first, second):
    few, many = (cpu_device(host(num_usable_cores=cores)) for cores in sorted((first, second)))
    assert few.num_compute_units <= many.num_compute_units
    assert few.peak_flops_per_s[NumberFormat.FP32] <= many.peak_flops_per_s[NumberFormat.FP32]
    assert few.memory_bandwidth_bytes_per_s <= many.memory_bandwidth_bytes_per_s


def test_a_clock_the_system_hides_is_that_of_the_class():
    device = cpu_device(host(clock_hz=None))
    assert device.boost_clock_hz == load_catalog()["cpu"].boost_clock_hz
    assert "not reported" in device.sources["boost_clock_hz"]


@pytest.mark.parametrize(
    ("model", "features", "fp32", "bf16"),
    [
        ("Intel Xeon", ("avx2", "fma", "avx512f"), 64, None),
        ("Intel Xeon", ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"), 64, 2048),
        ("AMD EPYC 9654", ("avx2", "fma", "avx512f", "avx512_bf16"), 32, 64),
        ("AMD EPYC 7742", ("avx2", "fma"), 32, None),
        ("Neoverse-N1", ("asimd",), 16, None),
    ],
)
def test_vector_extensions_set_the_rate(model, features, fp32, bf16):
    rates = cpu_flops_per_clock(host(model=model, features=features).cpu)
    assert rates[NumberFormat.FP32] == fp32
    assert rates[NumberFormat.FP64] == fp32 / 2
    assert rates.get(NumberFormat.BF16) == bf16


def test_the_public_names_load():
    for name in forerun.question.devices.__all__:
        assert getattr(forerun.question.devices, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = forerun.question.devices.nothing
