"""Traces read into arrays, and files that are none refused in one line."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import UsageError
from forerun.script.diagnosis import trace as trace_module
from forerun.script.diagnosis.observation import class_of_kernel, observe, outside_matrix_units
from forerun.script.diagnosis.trace import Spans, read_trace


def event(name, begin, took, category="cpu_op", **arguments):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": took,
        "pid": 1,
        "tid": 1,
        "args": arguments,
    }


def steps(number=4):
    return [event(f"ProfilerStep#{i}", 1000.0 * i, 1000.0, "user_annotation") for i in range(number)]


def written(tmp_path, events, name="trace.json", **more):
    path = tmp_path / name
    path.write_text(json.dumps({"schemaVersion": 1, **more, "traceEvents": events}))
    return path


def test_steps_kernels_and_device_are_read(tmp_path):
    kernel = event("ampere_sgemm_128x64_nn", 1200.0, 300.0, "kernel", stream=7, correlation=5, grid=[1, 2, 3])
    launch = event("cudaLaunchKernel", 1100.0, 6.0, "cuda_runtime", correlation=5)
    path = written(
        tmp_path,
        [*steps(), kernel, launch, {"ph": "M", "name": "process_name"}],
        deviceProperties=[{"name": "NVIDIA L4"}],
        distributedInfo={"rank": 3},
    )
    found = read_trace(path)
    assert found.device_name == "NVIDIA L4"
    assert found.rank == 3
    assert found.steps == pytest.approx(np.array([[1e-3, 2e-3], [2e-3, 3e-3], [3e-3, 4e-3]]))
    assert found.kernels.durations_s == pytest.approx([3e-4])
    assert found.kernels.link.tolist() == found.calls.link.tolist() == [5]


def test_packed_files_bare_lists_and_categories_of_first_releases_are_read(tmp_path):
    events = [*steps(), event("volta_sgemm_32x32_sliced1x4_tn", 1200.0, 300.0, "Kernel", stream=7)]
    path = tmp_path / "old.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(events, file)
    assert len(read_trace(path).kernels) == 1


def test_steps_are_found_by_the_marks_of_the_first_optimizer(tmp_path):
    updates = [
        event("Optimizer.step#Adam.step", 100.0 + 500.0 * i, 10.0, "user_annotation") for i in range(4)
    ]
    others = [event("Optimizer.step#SGD.step", 150.0 + 500.0 * i, 10.0, "user_annotation") for i in range(4)]
    found = read_trace(written(tmp_path, [*updates, *others, event("aten::mm", 200.0, 50.0)]))
    assert found.steps_from == "Optimizer.step"
    assert found.steps[:, 0] == pytest.approx([610e-6, 1110e-6])


def test_a_trace_without_marks_is_one_step(tmp_path):
    found = read_trace(written(tmp_path, [event("aten::mm", 200.0, 50.0), event("aten::add", 300.0, 20.0)]))
    assert found.steps == pytest.approx(np.array([[200e-6, 320e-6]]))


def test_collectives_of_a_processor_are_waiting_and_no_work(tmp_path):
    reduce = event("gloo:all_reduce", 2300.0, 500.0, "user_annotation")
    calls = [
        event("aten::mm", 2000.0, 300.0),
        event("c10d::allreduce_", 2300.0, 10.0),
        event("aten::mm", 2400.0, 100.0),
    ]
    seen = observe([read_trace(written(tmp_path, [*steps(), *calls, reduce]))])
    assert 3 * seen.exposed_s == pytest.approx(400e-6)
    assert 3 * seen.busy_s == pytest.approx(400e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "without 'traceEvents'"),
        ("not json at all", "without 'traceEvents'"),
        ('{"step_time_s": {"value": 1}}', "without 'traceEvents'"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "na', "cut off or damaged after 0 events"),
        ('{"traceEvents": [1, 2]}', "got int as number 0"),
        ('{"traceEvents": []}', "expected kernels or operators"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN, "dur": 1}]}', "got ts nan and dur 1"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "a", "dur": 1}]}', "got ts a and dur 1"),
        ('{"traceEvents": [' + "[" * 100_000, "cut off or damaged"),
    ],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(tmp_path, text, words):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="expected") as refused:
        read_trace(path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_packed_and_too_large_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "none.json")
    whole = gzip.compress(json.dumps({"traceEvents": steps()}).encode())
    (tmp_path / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="cut\\.json"):
        read_trace(tmp_path / "cut.json.gz")
    monkeypatch.setattr(trace_module, "_MOST_CHARS", 100)
    with pytest.raises(UsageError, match="profile fewer steps"):
        read_trace(written(tmp_path, steps()))


PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12)


@given(PIECES, PIECES)
def test_spans_are_sets_of_points(first, second):
    def points(pieces):
        return {point for begin, length in pieces for point in range(begin, begin + length)}

    def spans_of(pieces):
        begin, length = np.array(pieces, dtype=float).reshape(-1, 2).T
        return Spans.of(begin, begin + length)

    one, other = spans_of(first), spans_of(second)
    assert one.length_s == len(points(first))
    assert one.minus(other).length_s == len(points(first) - points(second))
    assert one.common(other).length_s == len(points(first) & points(second))
    spans = spans_of([(3, 1)])
    empty = Spans.of(np.zeros(0), np.zeros(0))
    assert spans.minus(empty).length_s == spans.length_s
    assert empty.minus(spans).length_s == 0.0


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", "convolution", ""),
        ("volta_scudnn_128x64_stridedB_splitK_xregs_large_nn_v1", "convolution", "fp32"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_bias_execute", "linear", ""),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>", "linear", ""),
        ("ampere_sgemm_64x64_tn", "linear", "fp32"),
        ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4>", "linear", ""),
        ("void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x64_16x4_nt_align1>", "linear", "fp64"),
        ("void fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention and batched products", ""),
        ("triton_red_fused_native_layer_norm_backward_5", "normalisation", ""),
        ("triton_poi_fused_gelu_3", "element-wise and reductions", ""),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copies and casts", ""),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "gradient synchronisation", ""),
        ("Cijk_Ailk_Bljk_HB_MT128x128x32_MI32x32x8x1", "linear", ""),
    ],
)  # fmt: skip
def test_kernels_are_classed_by_their_names(name, kind, reason):
    assert class_of_kernel(name) == kind
    if kind in ("linear", "convolution"):
        assert outside_matrix_units(name) == reason


def test_a_loop_that_reads_values_counts_whole_and_a_single_reading_for_itself(tmp_path):
    events = steps(3)
    for number in range(3):
        begin = 1000.0 * number
        events.append(event("aten::mm", begin + 10, 190.0))
        # Ten readings, with indexing and Python between them; then a single one, far from them in operators.
        events += [event("aten::select", begin + 300 + 40 * k, 5.0) for k in range(10)]
        events += [event("aten::item", begin + 310 + 40 * k, 10.0) for k in range(10)]
        events += [event("aten::add", begin + 700 + 10 * k, 5.0) for k in range(15)]
        events.append(event("aten::item", begin + 900, 10.0))
    seen = observe([read_trace(written(tmp_path, events))])
    assert seen.sync_s == pytest.approx(380e-6)
    assert seen.num_syncs == 11
    assert seen.busy_s == pytest.approx(190e-6 + 5e-6 + 75e-6)
    assert seen.busy_s + seen.sync_s + seen.host_s == pytest.approx(seen.step_s)


def test_a_host_that_runs_ahead_does_not_shorten_the_steps(tmp_path):
    """Marks of the host are 1 ms apart; the device takes 5 ms for the kernels of each step, one after the other."""
    events = steps(4)
    for number in range(4):
        launched, begun = 1000.0 * number + 500, 5000.0 * number + 600
        events.append(event("cudaLaunchKernel", launched, 6.0, "cuda_runtime", correlation=number))
        events.append(event("ampere_sgemm_128x64_nn", begun, 5000.0, "kernel", stream=7, correlation=number))
    seen = observe([read_trace(written(tmp_path, events))])
    assert seen.step_s == pytest.approx(5e-3)
    assert seen.busy_s == pytest.approx(5e-3)
