"""Sensors: what is there is summarised, what is not is absent."""

import time

import pytest

from forerun.evidence.measurement.telemetry import (
    Recorder,
    cpu_counters,
    cpu_sensors,
    gpu_energy,
    gpu_sensors,
    open_energy_counter,
    record_telemetry,
    summarise_samples,
)


def test_samples_are_summarised_per_sensor():
    figures = summarise_samples(
        {"clock_hz": 1.0}, [{"clock_hz": 4.0, "power_w": 7.0}, {"clock_hz": 2.0}, {}], {"power_w": 5.0}
    )
    assert figures == {
        "clock_hz_before": 1.0,
        "clock_hz_mean": 3.0,
        "clock_hz_lowest": 2.0,
        "clock_hz_highest": 4.0,
        "power_w_mean": 7.0,
        "power_w_lowest": 7.0,
        "power_w_highest": 7.0,
        "power_w_after": 5.0,
    }


def test_nothing_to_read_gives_no_figures():
    assert summarise_samples({}, [], {}) == {}


def test_a_recorder_reads_while_the_job_runs_and_counters_tell_their_growth():
    readings = iter(range(10_000))
    counts = iter([{"throttled_s": 5.0, "gone_s": 1.0}, {"throttled_s": 7.5}])
    recorder = Recorder(lambda: {"x": float(next(readings))}, lambda: next(counts), every_s=0.001)
    recorder.start()
    time.sleep(0.1)
    recorder.stop()
    assert recorder.figures["x_before"] == 0.0
    assert recorder.figures["x_lowest"] == 1.0
    assert recorder.figures["x_after"] == recorder.figures["x_highest"] + 1
    assert recorder.figures["throttled_s"] == 2.5
    assert "gone_s" not in recorder.figures


def test_this_machine_is_read_before_during_and_after():
    with record_telemetry("cpu", every_s=0.01) as recorder:
        time.sleep(0.1)
    sensors = cpu_sensors()
    assert all(value > 0 for name, value in sensors.items() if name != "load_per_core")
    for name in sensors:
        assert {f"{name}_{part}" for part in ("before", "mean", "lowest", "highest", "after")} <= set(
            recorder.figures
        )
    assert all(recorder.figures[name] >= 0 for name in cpu_counters())


def test_an_error_of_the_job_does_not_leave_the_thread_running():
    with pytest.raises(ZeroDivisionError), record_telemetry("cpu", every_s=0.01) as recorder:
        raise ZeroDivisionError
    assert not recorder._thread.is_alive()


def test_a_gpu_that_is_not_here_is_left_out():
    with record_telemetry("cuda:999", every_s=10) as recorder:
        pass
    assert not any(name.startswith("gpu") for name in recorder.figures)


@pytest.mark.parametrize(
    ("membership", "file", "text", "throttled_s"),
    [
        ("0::/user/job\n", "user/job/cpu.stat", "usage_usec 12\nthrottled_usec 2500000\n", 2.5),
        ("0::/user/job\n", "cpu.stat", "throttled_usec 1000000\n", 1.0),
        (
            "3:cpu,cpuacct:/job\n",
            "cpu,cpuacct/job/cpu.stat",
            "nr_periods 3\nthrottled_time 1500000000\n",
            1.5,
        ),
        ("3:cpu:/job\n1:memory:/m\n", "cpu/cpu.stat", "nr_throttled 0\nthrottled_time 0\n", 0.0),
    ],
)
def test_throttling_of_the_control_group(tmp_path, membership, file, text, throttled_s):
    (tmp_path / "membership").write_text(membership)
    stat = tmp_path / "mount" / file
    stat.parent.mkdir(parents=True)
    stat.write_text(text)
    assert cpu_counters(tmp_path / "membership", tmp_path / "mount")["cpu_throttled_s"] == throttled_s


@pytest.mark.parametrize("text", ["usage_usec 12\n", ""])
def test_no_quota_means_no_figure_instead_of_zero(tmp_path, text):
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "cpu.stat").write_text(text)
    assert "cpu_throttled_s" not in cpu_counters(tmp_path / "membership", tmp_path)
    assert "cpu_throttled_s" not in cpu_counters(tmp_path / "no such file", tmp_path)


class PartialDriver:
    """A driver whose board knows its clocks and why it throttles, but has no power meter."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksThrottleReasonSwPowerCap = 0x4  # noqa: N815
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20  # noqa: N815
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N815
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80  # noqa: N815

    def nvmlDeviceGetClockInfo(self, handle, clock):  # noqa: N802
        return {1: 1410, 2: 1215}[clock]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        return 0x40

    def __getattr__(self, name):
        def refuse(*arguments):
            raise self.NVMLError(name)

        return refuse


def test_a_gpu_tells_what_it_knows_and_nothing_else():
    assert gpu_sensors(PartialDriver(), object()) == {
        "gpu_clock_hz": 1410e6,
        "gpu_memory_clock_hz": 1215e6,
        "gpu_throttled_by_heat": 1.0,
        "gpu_throttled_by_power": 0.0,
    }


class MeteredDriver(PartialDriver):
    def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
        return 2500


def test_the_energy_counter_is_in_joules_and_absent_where_there_is_none():
    assert gpu_energy(MeteredDriver(), object()) == {"gpu_energy_j": 2.5}
    assert gpu_energy(PartialDriver(), object()) == {}
    with open_energy_counter("cpu") as read_j:
        assert read_j() is None
