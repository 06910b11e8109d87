"""A device of this machine by its name, and a script that sees no other."""

import pytest

from forerun.errors import InvalidSetupError, UsageError
from forerun.hardware import host_gpus
from forerun.measurement.device_index import check_device, first_device, gpu_index, only_device

GPUS = tuple(
    host_gpus.HostGpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA T4",
        memory_bytes=16 * 10**9,
        memory_used_bytes=0,
        driver_version=None,
        cuda_version=None,
        power_limit_w=None,
        max_sm_clock_hz=None,
        max_memory_clock_hz=None,
        compute_capability=None,
    )
    for index in range(4)
)


@pytest.fixture(params=[0, 4])
def num_gpus(request, monkeypatch):
    """This machine without GPUs, and with four."""
    monkeypatch.setattr(host_gpus, "list_gpus", lambda: GPUS[: request.param])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return request.param


def test_a_name_is_a_device_that_is_there(num_gpus):
    assert check_device("cpu") == "cpu"
    if num_gpus:
        assert [check_device(name) for name in ("cuda", "cuda:3")] == ["cuda:0", "cuda:3"]
    with pytest.raises(UsageError, match=f"one of this machine's {num_gpus} GPUs, got 'cuda:4'"):
        check_device("cuda:4")
    with pytest.raises(InvalidSetupError, match="expected device cpu or cuda:N"):
        check_device("tpu")


def test_a_script_that_is_to_use_the_processor_sees_no_gpu(num_gpus):
    assert only_device("cpu") == ({"CUDA_VISIBLE_DEVICES": ""} if num_gpus else {})
    assert first_device() == ("cuda:0" if num_gpus else "cpu")


@pytest.mark.parametrize(
    ("known", "expected"), [(None, "2"), ("", "2"), ("3,1,0", "0"), ("GPU-1, GPU-0, GPU-3", "GPU-3")]
)
def test_a_number_counts_among_the_gpus_that_are_seen(monkeypatch, known, expected):
    if known is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", known)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_index("cuda:2") == 2
    assert only_device("cuda:2") == {"CUDA_VISIBLE_DEVICES": expected}
    assert only_device("cuda") == {}
