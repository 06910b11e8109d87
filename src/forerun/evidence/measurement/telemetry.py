"""Figures of sensors before, during and after a job, read by a thread of the parent process.

The measured child does not read sensors. A sensor that does not exist is left out, never written as zero.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from forerun.question.devices.local import device_identity, gpu_index

Reading = Mapping[str, float]


def summarise_samples(before: Reading, during: Sequence[Reading], after: Reading) -> dict[str, float]:
    """Figures per sensor: ``NAME_before``, ``NAME_mean``, ``NAME_lowest``, ``NAME_highest`` (during), ``NAME_after``.

    A sensor that missed some samples is summarised over the others. A short job may have no samples during its run.
    """
    figures = {f"{name}_before": value for name, value in before.items()}
    for name in sorted({name for sample in during for name in sample}):
        values = [sample[name] for sample in during if name in sample]
        figures[f"{name}_mean"] = fmean(values)
        figures[f"{name}_lowest"] = min(values)
        figures[f"{name}_highest"] = max(values)
    figures.update({f"{name}_after": value for name, value in after.items()})
    return figures


class Recorder:
    """Reads sensors at fixed intervals while the context of ``record_telemetry`` lasts."""

    def __init__(
        self, sensors: Callable[[], Reading], counters: Callable[[], Reading], every_s: float
    ) -> None:
        self._sensors = sensors
        self._counters = counters
        self._every_s = every_s
        self._during: list[tuple[float, Reading]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="telemetry", daemon=True)
        self.figures: dict[str, float] = {}

    def start(self) -> None:
        """Reads all sensors once, then again and again in a thread."""
        self._before, self._counters_before = self._sensors(), self._counters()
        self._thread.start()

    def stop(self) -> None:
        """Reads all sensors a last time; ``figures`` then holds the summary."""
        self._stop.set()
        self._thread.join()
        self.figures = summarise_samples(
            self._before, [reading for _, reading in self._during], self._sensors()
        )
        # A counter is reported as its growth during the job.
        after = self._counters()
        self.figures.update(
            {name: after[name] - start for name, start in self._counters_before.items() if name in after}
        )

    def _sample(self) -> None:
        while not self._stop.wait(self._every_s):
            self._during.append((time.monotonic(), self._sensors()))

    def series(self, name: str) -> tuple[tuple[float, float], ...]:
        """Values of one sensor during the job with the monotonic time of each [s]; empty without the sensor."""
        return tuple((time_s, reading[name]) for time_s, reading in self._during if name in reading)


@contextlib.contextmanager
def record_telemetry(device_index: str, every_s: float) -> Iterator[Recorder]:
    """Records the sensors of the processor, and of the GPU if the device is one, while the context lasts."""
    with contextlib.ExitStack() as stack:
        read_gpu, count_gpu = stack.enter_context(_open_gpu(device_index))
        recorder = Recorder(
            lambda: {**cpu_sensors(), **read_gpu()}, lambda: {**cpu_counters(), **count_gpu()}, every_s
        )
        recorder.start()
        stack.callback(recorder.stop)
        yield recorder


def cpu_sensors() -> dict[str, float]:
    """Clock [Hz], temperature [C] and load per core of the processor, as far as the system reports them."""
    import psutil

    found: dict[str, float] = {}
    with contextlib.suppress(OSError, AttributeError, NotImplementedError):
        if (clock := psutil.cpu_freq()) is not None and clock.current > 0:
            found["cpu_clock_hz"] = clock.current * 1e6
    with contextlib.suppress(OSError, AttributeError):
        groups = psutil.sensors_temperatures()
        values = [
            entry.current for name in ("coretemp", "k10temp", "cpu_thermal") for entry in groups.get(name, ())
        ]
        if values:
            found["cpu_temperature_c"] = max(values)
    if (load := load_per_core()) is not None:
        found["load_per_core"] = load
    return found


def load_per_core() -> float | None:
    """Load average of the last minute over the cores of this machine; None where the system has none."""
    import psutil

    with contextlib.suppress(OSError):
        return psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    return None


def cpu_counters(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> dict[str, float]:
    """Time taken from this machine so far: ``cpu_throttled_s`` by the quota of the control group,
    ``cpu_steal_s`` by the host of a virtual machine, summed over cores [s].
    """  # noqa: D205
    import psutil

    found: dict[str, float] = {}
    if (steal_s := getattr(psutil.cpu_times(), "steal", None)) is not None:
        found["cpu_steal_s"] = steal_s
    throttled = [
        value for file in _cpu_stat_files(membership, mount) if (value := _throttled_s(file)) is not None
    ]
    if throttled:
        found["cpu_throttled_s"] = max(throttled)
    return found


def _cpu_stat_files(membership: Path, mount: Path) -> Iterator[Path]:
    """Files that may hold the throttling of this process: its own group and, as in a container, the root."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        # Version 2 of control groups names no controllers.
        if controllers == "" or "cpu" in controllers.split(","):
            folder = mount / controllers
            yield from {folder / group.lstrip("/") / "cpu.stat", folder / "cpu.stat"}


def _throttled_s(file: Path) -> float | None:
    """Throttled time [s]; version 2 has ``throttled_usec``, version 1 ``throttled_time`` in nanoseconds."""
    try:
        lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    values = {words[0]: words[1] for words in lines if len(words) == 2}
    for name, unit_s in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):
        if name in values:
            return float(values[name]) * unit_s
    return None


@contextlib.contextmanager
def open_energy_counter(device_index: str) -> Iterator[Callable[[], float | None]]:
    """A function that reads the energy a GPU has used so far [J]; it returns None without a counter."""
    with _open_gpu(device_index) as (_, count):
        yield lambda: count().get("gpu_energy_j")


@contextlib.contextmanager
def _open_gpu(
    device_index: str,
) -> Iterator[tuple[Callable[[], dict[str, float]], Callable[[], dict[str, float]]]]:
    """Functions that read the sensors and the counters of a GPU.

    There are none for a processor, or if the driver does not answer.
    """
    if gpu_index(device_index) is None:
        yield dict, dict
        return
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        yield dict, dict
        return
    except pynvml.NVMLError:
        yield dict, dict
        return
    try:
        # By identity: NVML counts all GPUs of the machine, PyTorch only those visible to this process.
        handle = pynvml.nvmlDeviceGetHandleByUUID(device_identity(device_index))
        yield lambda: gpu_sensors(pynvml, handle), lambda: gpu_energy(pynvml, handle)
    except pynvml.NVMLError:
        yield dict, dict
    finally:
        pynvml.nvmlShutdown()


def gpu_sensors(nvml: Any, handle: Any) -> dict[str, float]:
    """Clocks [Hz], power [W], temperature [C], use and causes of throttling of a GPU, as far as the board reports them.

    A cause of throttling is 0 or 1, so that its mean is the share of the samples in which it held.
    """
    questions: dict[str, Callable[[], float]] = {
        "gpu_clock_hz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        "gpu_memory_clock_hz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6,
        "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "gpu_busy_fraction": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    }
    found: dict[str, float] = {}
    for name, question in questions.items():
        with contextlib.suppress(nvml.NVMLError):
            found[name] = float(question())
    with contextlib.suppress(nvml.NVMLError):
        found.update(_throttling(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    return found


def gpu_energy(nvml: Any, handle: Any) -> dict[str, float]:
    """``gpu_energy_j``: energy the board has used since its driver was loaded, updated every 100 ms or so [J]."""
    with contextlib.suppress(nvml.NVMLError):
        return {"gpu_energy_j": nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3}
    return {}


def _throttling(nvml: Any, reasons: int) -> dict[str, float]:
    heat = nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
    power = nvml.nvmlClocksThrottleReasonSwPowerCap | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    return {
        "gpu_throttled_by_heat": float(bool(reasons & heat)),
        "gpu_throttled_by_power": float(bool(reasons & power)),
    }


_LOOK_S = 1.0
_SAMPLE_EVERY_S = 0.2
_NOTABLE = 0.15


def device_load(device_index: str) -> float | None:
    """Share of a device that is at work while this process does nothing; None where the system does not tell.

    For a processor it is the share of all cores' time, for a GPU the driver's share of time with kernels.
    """
    import psutil

    with record_telemetry(device_index, _SAMPLE_EVERY_S) as recorder:
        before = psutil.cpu_times()
        time.sleep(_LOOK_S)
        after = psutil.cpu_times()
    if device_index != "cpu":
        return recorder.figures.get("gpu_busy_fraction_mean")
    spent = {name: getattr(after, name) - getattr(before, name) for name in before._fields}
    # Linux counts the time of guests in that of users too.
    whole_s = sum(seconds for name, seconds in spent.items() if not name.startswith("guest"))
    idle_s = spent["idle"] + spent.get("iowait", 0.0)
    return max(0.0, 1.0 - idle_s / whole_s) if whole_s > 0 else None


def load_warning(device_index: str, load: float | None) -> str:
    """A line about a device that is busy before it is measured; empty if it is quiet."""
    if load is None or load < _NOTABLE:
        return ""
    what = "the processor" if device_index == "cpu" else device_index
    return (
        f"{what} is busy: other processes use {load:.0%} of it; what is measured now describes this load as well, so "
        "end them or measure later"
    )
