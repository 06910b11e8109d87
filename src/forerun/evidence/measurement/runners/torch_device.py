"""The device a runner works on, as PyTorch sees it: synchronisation, numeric flags and peak memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.records.measured_run import Parameters, flag_of
from forerun.evidence.records.measurement import Scalar
from forerun.question.devices.local import gpu_index
from forerun.question.setup import Precision, TrainingSetup

if TYPE_CHECKING:
    import torch

_PROCESS = Path("/proc/self")


def open_device(device_index: str) -> torch.device:
    """The device, made the current one.

    Raises:
        MeasurementError: The GPU does not exist, or this PyTorch cannot use it.
    """
    import torch

    index = gpu_index(device_index)
    if index is None:
        return torch.device("cpu")
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise MeasurementError(
            f"expected PyTorch to see a GPU as cuda:{index}, but it sees {torch.cuda.device_count()}; "
            "choose another device, or install a PyTorch built for the driver"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def synchroniser(device: torch.device) -> Callable[[], None]:
    """A function that returns when the device has finished; a processor always has."""
    if device.type != "cuda":
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)


def check_measured_precision(precision: Precision) -> None:
    """Raises ``InvalidSetupError`` for fp8, for which PyTorch has no layer, and fp64, which no fit takes."""
    if precision in (Precision.FP8, Precision.FP64):
        known = ", ".join(known for known in Precision if known not in (Precision.FP8, Precision.FP64))
        raise InvalidSetupError(f"{precision} is predicted but not measured: expected one of {known}")


def set_numeric_flags(
    precision: Precision, *, convolutions: Precision | None = None, cudnn_benchmark: bool = False
) -> None:
    """Allows TF32 for products in ``tf32``, and for convolutions if they are, and forbids it otherwise.

    PyTorch's own default is a mixture: TF32 convolutions beside fp32 matrix products.

    Args:
        precision: Precision of the step.
        convolutions: That of convolutions in fp32; None for that of the step.
        cudnn_benchmark: Whether cuDNN tries its algorithms.

    Raises:
        InvalidSetupError: The precision is predicted only.
    """
    import torch

    check_measured_precision(precision)
    torch.backends.cuda.matmul.allow_tf32 = precision is Precision.TF32
    torch.backends.cudnn.allow_tf32 = (convolutions or precision) is Precision.TF32
    torch.backends.cudnn.benchmark = cudnn_benchmark


def set_step_flags(setup: TrainingSetup, parameters: Parameters) -> None:
    """The flags of a step of a whole model, see ``set_numeric_flags``, with those of its job."""
    set_numeric_flags(
        setup.precision,
        convolutions=setup.convolution_precision,
        cudnn_benchmark=flag_of(parameters, "cudnn_benchmark"),
    )


class PeakMemory:
    """Peak memory since this object was made.

    A GPU's allocator counts the memory of a job. A processor has no such count: there the resident memory of the
    process is taken, which also holds freed blocks, code and thread stacks, and so has another name.

    Args:
        device: Device whose memory is watched.
        held_bytes: Size of weights and buffers on the device already, which count as well [bytes].
    """

    def __init__(self, device: torch.device, held_bytes: int = 0) -> None:
        self._device = device
        self._held_bytes = held_bytes
        if device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._resident = ResidentPeak()

    def figures(self) -> dict[str, Scalar]:
        """``peak_memory_bytes`` and ``peak_reserved_bytes`` of a GPU, ``peak_rss_delta_bytes`` of a processor."""
        if self._device.type == "cuda":
            import torch

            return {
                "peak_memory_bytes": torch.cuda.max_memory_allocated(self._device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            }
        # Weights were loaded before the count began, and count in a prediction.
        return {"peak_rss_delta_bytes": self._resident.grown_bytes() + self._held_bytes}


class ResidentPeak:
    """Largest growth of this process's resident memory since this object was made."""

    def __init__(self) -> None:
        _forget_peak()
        self._begin_bytes = _resident_bytes()

    def grown_bytes(self) -> int:
        """Peak less the memory in the beginning [bytes]."""
        return max(0, _peak_resident_bytes() - self._begin_bytes)


def _forget_peak() -> None:
    """Resets the kernel's record of the process's largest resident memory; some systems do not allow this."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return  # the figure then includes the memory of loading the model


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _peak_resident_bytes() -> int:
    try:
        status = (_PROCESS / "status").read_text(encoding="utf-8")
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return _peak_from_usage()


def _peak_from_usage() -> int:
    """Peak of the whole process, for systems without ``/proc``."""
    if sys.platform == "win32":
        return _resident_bytes()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
