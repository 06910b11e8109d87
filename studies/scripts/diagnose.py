"""Faults injected into traces, numbers and real runs, and the cause that ``forerun diagnose`` names first.

A trace has one fault: a small machine of a host and streams writes events as Kineto does.
Kernels have names that libraries print, not the words of our rules; times follow from launches, queues and waits.
"""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forerun
from forerun.base.errors import ForerunError
from forerun.script.diagnosis.diagnose import Diagnosis
from studies.markdown import markdown_table

_NETWORKS: dict[str, dict[str, tuple[str, ...]]] = {
    "resnet": {
        "product": (
            "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32_execute_kernel__5x_cudnn",
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_bf16_128x128_32x5_align8>",
        ),
        "fp32": (
            "ampere_scudnn_128x64_relu_medium_nn_v1",
            "sm80_xmma_wgrad_implicit_gemm_indexed_f32f32_f32f32_f32_nhwckrsc_nhwc_tilesize128x64x8_ffma",
        ),
        "narrow": (
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816fprop_analytic_f16_64x64_align2>(Params)",
        ),
        "other": (
            "void cudnn::batchnorm_fwtr_nhwc_semiPersist<__nv_bfloat16, float, float, float, 32, 1, 512>(float*)",
            "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar(at::Tensor&)>(int)",
        ),
    },
    "gpt": {
        "product": (
            "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
            "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn",
        ),
        "fp32": (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>(Params)",
            "ampere_sgemm_128x128_nn",
        ),
        "narrow": (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x1_nn_align2>(Params)",
            "turing_fp16_sgemm_fp16_128x64_nt",
        ),
        "other": (
            "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(Params)",
        ),
    },
}
_UPDATE = "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>>"
_NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

FAULTS = {
    "loader in the main process": "data loader",
    "workers too slow": "data loader",
    "Python between kernels": "host and launches",
    "thousands of tiny kernels": "host and launches",
    ".item() in each layer": "synchronising calls",
    "print of tensors": "synchronising calls",
    "torch.cuda.synchronize() each layer": "synchronising calls",
    "pageable batches": "copies to the device",
    "products in fp32": "no matrix units in use",
    "sizes not multiples of 8": "no matrix units in use",
    "layout turned for each kernel": "wrong layout",
    "clock falls": "throttled clock or power limit",
    "clock swings": "throttled clock or power limit",
    "PCIe x1": "slow link to the host",
    "NCCL over TCP": "slow or wrong link between devices",
    "all-reduce after the backward": "communication that nothing overlaps",
    "one rank's kernels slow": "one slow rank",
    "one rank's loader slow": "one slow rank",
    "recompilation": "recompilation",
    "allocator retries": "allocator retries and fragmentation",
    "another program takes turns": "other programs on the device",
    "another program shares the kernels": "other programs on the device",
    "late batches now and then": "data loader",
    "healthy": "busy device",
    "one .item() a step": "busy device",
    "all-reduce beside the backward": "busy device",
}
"""Faults with the cause that must be named first."""


class _Machine:
    """A host thread and the streams of one device; times in microseconds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.free = 1e9, {7: 0.0, 20: 0.0}
        self.events: list[dict[str, Any]] = []
        self._link = 1000

    def span(self, category: str, name: str, begin: float, end: float, **arguments: Any) -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 41, "tid": arguments.pop("tid", 41),
                            "ts": begin, "dur": end - begin, "args": arguments})  # fmt: skip

    def host(self, category: str, name: str, took: float) -> None:
        begin, self.now = self.now, self.now + took
        self.span(category, name, begin, self.now, **{"External id": len(self.events)})

    def work(self, name: str, took: float, *, stream: int = 7, kind: str = "kernel", call: str = "cudaLaunchKernel",
             late: float = 0.0, **more: Any) -> None:  # fmt: skip
        """Launches a kernel or a copy, which runs when its stream is free."""
        self._link += 1
        begin, self.now = self.now, self.now + self.random.uniform(4, 7)
        self.span("cuda_runtime", call, begin, self.now, correlation=self._link, cbid=211)
        start = max(self.now + 3, self.free[stream] + 1) + late
        self.free[stream] = start + took * self.random.uniform(0.98, 1.02)
        self.span(kind, name, start, self.free[stream], tid=stream, stream=stream, correlation=self._link, device=0,
                  grid=[int(took), 1, 1], block=[256, 1, 1], **more)  # fmt: skip

    def wait(self, call: str) -> None:
        """A call that returns when the device has nothing left to do."""
        begin, self.now = self.now, max(self.now + 5, self.free[7] + 4)
        self.span("cuda_runtime", call, begin, self.now)


def write_trace(folder: Path, fault: str, network: str, seed: int) -> list[Path]:
    """Writes the traces of a fault, one for each rank."""
    ranks = 4 if "rank" in fault else 1
    paths = []
    for rank in range(ranks):
        is_sick = ranks == 1 or rank == 2
        events = _steps(_Machine(seed + rank), fault if is_sick else "healthy", network, ranks > 1)
        if ranks > 1 and not is_sick:
            events = _waiting(events, 0.35)
        document = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
            "traceEvents": events,
        }
        paths.append(folder / f"{network}-{fault.replace(' ', '-').replace('/', '')}-{rank}.pt.trace.json.gz")
        with gzip.open(paths[-1], "wt", encoding="utf-8", compresslevel=1) as file:
            json.dump(document, file)
    return paths


def _waiting(events: list[dict[str, Any]], share: float) -> list[dict[str, Any]]:
    """The events of a rank that waits for a slower one inside each collective, which shifts all later events."""
    shift, found = 0.0, []
    for event in sorted(events, key=lambda each: each["ts"]):
        event = {**event, "ts": event["ts"] + shift}
        if event["name"] == _NCCL:
            extra = share * 5200.0
            event["dur"] += extra
            shift += extra
        found.append(event)
    return found


def _steps(machine: _Machine, fault: str, network: str, is_shared: bool) -> list[dict[str, Any]]:
    for number in range(8):
        begin = machine.now
        _batch(machine, fault, number)
        pace = _pace(machine, fault, number)
        for layer, took in enumerate(_layers(fault, is_sick="kernels slow" in fault)):
            _layer(machine, fault, network, took * pace, layer)
            if "beside" in fault and layer in (30, 50):
                _reduce(machine, 20e6, 60e9, is_beside=True)
        if "all-reduce after" in fault or "TCP" in fault or is_shared:
            _reduce(machine, 100e6, 1.1e9 if "TCP" in fault else 60e9)
        update = machine.now
        for _ in range(6):
            machine.work(_UPDATE, 80)
        machine.span("user_annotation", "Optimizer.step#AdamW.step", update, machine.now)
        machine.host("cpu_op", "aten::add_", 20)
        if "print" in fault or "a step" in fault or number % 4 == 3:
            machine.wait("cudaStreamSynchronize")
        if network == "resnet":  # the other trace has the marks of its optimizer alone
            machine.span("user_annotation", f"ProfilerStep#{number + 10}", begin, machine.now)
    return machine.events


def _batch(machine: _Machine, fault: str, number: int) -> None:
    process = "_SingleProcessDataLoaderIter" if "main" in fault else "_MultiProcessingDataLoaderIter"
    is_late = "loader" in fault or "workers" in fault or ("late" in fault and number % 3 == 1)
    took = 60_000 if is_late else 60
    machine.host("user_annotation", f"enumerate(DataLoader)#{process}.__next__", took)
    kind = "Memcpy HtoD (Pageable -> Device)" if "pageable" in fault else "Memcpy HtoD (Pinned -> Device)"
    size, rate = (60e6, 5e9) if "pageable" in fault else (14e6, 0.4e9 if "PCIe" in fault else 20e9)
    machine.work(kind, size / rate * 1e6, kind="gpu_memcpy", call="cudaMemcpyAsync", bytes=int(size))
    if "pageable" in fault:
        machine.wait("cudaStreamSynchronize")


def _layers(fault: str, *, is_sick: bool) -> Iterator[float]:
    rate = 1.6 if is_sick else 2.2 if "fp32" in fault or "multiples" in fault else 1.0
    tiny = "tiny" in fault
    yield from [6.0 if tiny else 260.0 * rate] * (700 if tiny else 80)


def _pace(machine: _Machine, fault: str, number: int) -> float:
    if "clock falls" in fault:
        return 1.0 + 0.12 * number
    return machine.random.choice([1.0, 1.5]) if "clock swings" in fault else 1.0


def _layer(machine: _Machine, fault: str, network: str, took: float, layer: int) -> None:
    names = _NETWORKS[network]
    products = names["fp32" if "fp32" in fault else "narrow" if "multiples" in fault else "product"]
    late = (
        machine.random.uniform(1500, 4000)
        if "takes turns" in fault and machine.random.random() < 0.06
        else 0.0
    )
    shared = machine.random.uniform(2, 4) if "shares" in fault and machine.random.random() < 0.2 else 1.0
    machine.host("cpu_op", "aten::convolution" if network == "resnet" else "aten::addmm", 8)
    machine.work(products[layer % len(products)], took * shared, late=late)
    machine.work(names["other"][layer % 2], 0.25 * took)
    if "layout" in fault:
        machine.work(
            "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)0>",
            120,
        )
    if "Python" in fault:
        machine.now += 600
    if "each layer" in fault:
        machine.wait("cudaDeviceSynchronize" if "synchronize" in fault else "cudaStreamSynchronize")
        machine.now += 160
    if "print" in fault and layer % 4 == 0:
        machine.work(
            "Memcpy DtoH (Device -> Pageable)", 3, kind="gpu_memcpy", call="cudaMemcpyAsync", bytes=4096
        )
        machine.wait("cudaStreamSynchronize")
        machine.now += 400
    if "recompilation" in fault and layer == 40:
        machine.wait("cudaStreamSynchronize")
        machine.host("cpu_op", "compile_fx_inner (dynamo_timed)", 90_000)
    if "allocator" in fault and layer % 8 == 0:
        for call in ("cudaFree", "cudaMalloc"):
            machine.wait(call)
            machine.now += 700
            machine.span("cuda_runtime", call, machine.now - 700, machine.now)


def _reduce(machine: _Machine, size: float, rate: float, *, is_beside: bool = False) -> None:
    """An all-reduce after all that was launched; what is launched later waits for it, unless it runs beside."""
    machine.free[20] = max(machine.free.values())
    number = int(size / 4)
    told: dict[str, Any] = {
        "Collective name": "allreduce",
        "In msg nelems": number,
        "Out msg nelems": number,
        "dtype": "Float",
    }
    machine.work(_NCCL, 1.75 * size / rate * 1e6, stream=20, **{**told, "Group size": 8})
    if not is_beside:
        machine.free[7] = machine.free[20]


_SCRIPT = Path(__file__).parent / "own" / "slow_mlp.py"
_SPIN = "while True: pass"
_BUSY = "other programs on the device"
RUNS = {
    "loader sleeps": "data loader",
    "preprocess in Python": "data loader",
    "item of each sample": "synchronising calls",
    "host": "host and launches",
    "float64": "no matrix units in use",
    "compile": "recompilation",
    "thread": "too few threads",
    "busy": _BUSY,
}
"""Faults of the real script, with the cause that must be named first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault and the cause that was named first.

    Attributes:
        fault: The fault.
        kind: ``trace``, ``number`` or ``run``.
        expected, named: Cause that must be named, and the one that was.
        share: Share of the step that it is said to cost.
    """

    fault: str
    kind: str
    expected: str
    named: str
    share: float

    @property
    def is_right(self) -> bool:
        """Whether the cause is right."""
        return self.named == self.expected


def diagnosed_traces(seed: int = 1) -> Iterator[Injected]:
    """All faults of traces, in two networks."""
    with tempfile.TemporaryDirectory() as folder:
        for network in ("resnet", "gpt"):
            for fault, expected in FAULTS.items():
                found = forerun.diagnose(trace=write_trace(Path(folder), fault, network, seed))
                yield _injected(f"{network}: {fault}", "trace", expected, found)


def diagnosed_numbers() -> Iterator[Injected]:
    """Single numbers: as predicted, as with another precision, and with a device that is mostly idle."""
    run: dict[str, Any] = {"model": "torchvision:resnet50", "device": "a100-sxm4-40gb", "batch_size": 64}
    half, full = (forerun.predict(**run, precision=kind).step_time_s.value for kind in ("amp", "fp32"))
    for fault, expected, step_s, busy in (
        ("as predicted", "not slow", half, None),
        ("a tenth above", "not slow", 1.1 * half, None),
        ("autocast left out", "other settings than asked for", full, None),
        ("GPU at 30 %", "idle device", 3 * half, 0.3),
    ):
        found = forerun.diagnose(**run, precision="amp", measured=step_s, gpu_utilization=busy)
        yield _injected(fault, "number", expected, found)


def diagnosed_runs() -> Iterator[Injected]:
    """The faults of a real script on this machine's processor."""
    for fault, expected in RUNS.items():
        others = [
            subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(4 if expected == _BUSY else 0)
        ]
        try:
            command = [sys.executable, str(_SCRIPT), fault]
            yield _injected(fault, "run", expected, forerun.diagnose("mlp", command=command, num_steps=16))
        except ForerunError as error:
            yield Injected(fault=fault, kind="run", expected=expected, named=f"failed: {error}", share=0.0)
        finally:
            for other in others:
                other.kill()
                other.wait()


def _injected(fault: str, kind: str, expected: str, found: Diagnosis) -> Injected:
    # A machine that others use as well is said so first, and rightly; the fault is then the next cause.
    causes = [each for each in found.causes if expected == _BUSY or kind == "trace" or each.cause != _BUSY]
    first = (causes or found.causes)[0]
    return Injected(fault=fault, kind=kind, expected=expected, named=first.cause, share=first.share)


def table_of(found: list[Injected]) -> str:
    """The table, with the number of right answers."""
    rows = [
        [
            each.fault,
            each.kind,
            each.expected,
            "yes" if each.is_right else each.named,
            f"{100 * each.share:.0f} %",
        ]
        for each in found
    ]
    right = sum(each.is_right for each in found)
    head = f"{right} of {len(found)} causes named first are right ({100 * right / max(1, len(found)):.0f} %).\n\n"
    return head + markdown_table(["fault", "of a", "expected", "named first", "of a step"], rows)
