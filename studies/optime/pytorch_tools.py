"""PyTorch's own estimators of time and memory, made to run on a machine without a GPU.

``torch.distributed._tools.RuntimeEstimator`` and ``MemTracker`` watch a step of fake tensors. As they come they
stop without a GPU: fake CUDA tensors cannot run backward ("hasPrimaryContext expects a valid device index"), and
the estimator's cost model asserts that there is an accelerator. What is done about it here, and no more:

- the fake tensors are on the CPU, under the CUDA rules of ``tracing.cuda_semantics`` where these are asked for;
- the check for an accelerator is answered with yes;
- the device's datasheet figures are registered where the estimator looks them up (``register_device_info``).

The estimator's other mode times every kernel on a real GPU and cannot be had without one. Errors of these tools
can end the process, so each step runs in a process of its own pool.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forerun.base.isolation import fork_server
from forerun.base.units import GIB
from forerun.question.devices.device import Device, NumberFormat
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup

if TYPE_CHECKING:
    import torch

_CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """Answer of a tool about one step.

    Attributes:
        value: Its figure in the unit of the function that was called; None if it failed.
        wall_s: Time it took, with building the model [s].
        reason: Why it failed, empty if it did not.
    """

    value: float | None
    wall_s: float
    reason: str = ""


class ToolProcess:
    """Runs the tools in a child process, which is replaced if one of them kills it or takes too long.

    Args:
        limit_s: Longest time of an answer [s].
    """

    def __init__(self, limit_s: float = 120.0) -> None:
        self._limit_s = limit_s
        self._pool = _new_pool()

    def ask(self, tool: Callable[..., float], *args: Any, **kwargs: Any) -> ToolAnswer:
        """The answer of ``tool(*args, **kwargs)``, which must be a function of a module."""
        try:
            return self._pool.submit(_answer, tool, args, kwargs).result(self._limit_s)
        except BrokenProcessPool:
            self._pool = _new_pool()
            return ToolAnswer(value=None, wall_s=0.0, reason="the tool ended its process")
        except FutureTimeoutError:
            for child in multiprocessing.active_children():
                child.kill()
            self._pool = _new_pool()
            return ToolAnswer(value=None, wall_s=self._limit_s, reason=f"no answer in {self._limit_s:.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()


def estimated_step_s(request: ModelRequest, setup: TrainingSetup, device: Device) -> float:
    """Time of one training step by ``RuntimeEstimator``, mode "operator-level-cost-model" [s]."""
    from torch._inductor.analysis.device_info import register_device_info
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    register_device_info(device.name, _device_info(device))
    with _fake_step(request, setup, cuda_rules=True) as (_, run):
        estimator = RuntimeEstimator(gpu_type=device.name)
        with (
            _accelerator_is_there(),
            contextlib.redirect_stdout(io.StringIO()),
            estimator("operator-level-cost-model"),
        ):
            run()
        return estimator.total_runtime / 1e3


def tracked_peak_bytes(request: ModelRequest, setup: TrainingSetup, *, cuda_rules: bool) -> float:
    """Peak of two training steps by ``MemTracker`` [bytes].

    Args:
        request: The model and its inputs.
        setup: Training configuration.
        cuda_rules: Whether CUDA's autocast rules are switched on; without them the step is in fp32, as it is for
            anyone who runs the tool on a machine without a GPU.
    """
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    with _fake_step(request, setup, cuda_rules=cuda_rules) as (external, run):
        tracker = MemTracker()
        tracker.track_external(*external)
        with tracker:
            for _ in range(2):
                run()
                tracker.reset_mod_stats()
        peak: dict[Any, dict[str, int]] = tracker.get_tracker_snapshot("peak")
        return float(peak[torch.device(_CPU)]["Total"])


@contextmanager
def _fake_step(
    request: ModelRequest, setup: TrainingSetup, *, cuda_rules: bool
) -> Iterator[tuple[list[Any], Callable[[], None]]]:
    """Module, optimizer and batch inside a fake mode, and a function that runs a step."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils import _pytree as pytree

    from forerun.tracing.cuda_semantics import cuda_semantics, leave_autocast_region
    from forerun.tracing.models.sources import build_model
    from forerun.tracing.optimizers import make_optimizer
    from forerun.tracing.saving.prepare import AUTOCAST_DTYPE
    from forerun.tracing.step import prepared_batch

    built = build_model(request.model, image_size=request.image_size, input_shape=request.input_shape)
    on_meta = prepared_batch(built, setup, setup.batch_size_per_device)

    def on_cpu(value: Any) -> Any:
        return torch.empty_like(value, device=_CPU) if isinstance(value, torch.Tensor) else value

    with FakeTensorMode(allow_non_fake_inputs=True):
        module = built.module.to_empty(device=_CPU)
        batch = pytree.tree_map(on_cpu, on_meta)
        optimizer = make_optimizer(setup, [p for p in module.parameters() if p.requires_grad])

        def run() -> None:
            rules = cuda_semantics(AUTOCAST_DTYPE.get(setup.precision), fused_attention=setup.fused_attention)
            with rules if cuda_rules else contextlib.nullcontext():
                output = module(*batch.get("args", ()), **batch.get("kwargs", {}))
                loss = built.loss(output, batch)
                del output
                if cuda_rules and not setup.autocast_backward:
                    leave_autocast_region()
                loss.backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=setup.zero_grad_to_none)

        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        yield [module, *([] if optimizer is None else [optimizer]), *tensors], run


def _device_info(device: Device) -> Any:
    """A catalogue device as an entry of PyTorch's datasheet table."""
    import torch
    from torch._inductor.analysis.device_info import DeviceInfo

    names: dict[NumberFormat, torch.dtype | str] = {
        NumberFormat.FP32: torch.float32,
        NumberFormat.TF32: "torch.tf32",
        NumberFormat.FP16: torch.float16,
        NumberFormat.BF16: torch.bfloat16,
    }
    peaks = device.peak_flops_per_s
    return DeviceInfo(
        tops={name: peaks[number] / 1e12 for number, name in names.items() if number in peaks},
        dram_bw_gbs=device.memory_bandwidth_bytes_per_s / 1e9,
        dram_gb=device.memory_bytes / GIB,
    )


@contextmanager
def _accelerator_is_there() -> Iterator[None]:
    import torch

    original = torch.accelerator.is_available
    torch.accelerator.is_available = lambda: True
    try:
        yield
    finally:
        torch.accelerator.is_available = original


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=fork_server(["torch._dynamo"]), initializer=_load_torch)


def _load_torch() -> None:
    # Before the clock of the first answer starts.
    import torch

    torch.set_num_threads(1)


def _answer(tool: Callable[..., float], args: Any, kwargs: Any) -> ToolAnswer:
    begin = time.perf_counter()
    try:
        value: float | None = tool(*args, **kwargs)
        reason = ""
    except Exception as error:  # the tools raise anything; the reason is what is reported
        value, reason = None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ToolAnswer(value=value, wall_s=time.perf_counter() - begin, reason=reason)
