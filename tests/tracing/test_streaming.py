"""Closed-form traffic and launches of operations that stream their operands, on hand-made calls."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from op_calls import dense, only_row

from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, TensorInfo
from forerun.tracing.op_rules import cost_rows, num_multi_tensor_launches

torch.set_num_threads(1)

B = 3


@pytest.mark.parametrize(
    ("name", "op_class", "flops"),
    [
        ("relu", OpClass.ACTIVATION, 4),
        ("mul", OpClass.MUL, 1),
        ("add", OpClass.ADD, 1),
        ("exp", OpClass.ELEMENTWISE, 1),
        ("clone", OpClass.COPY, 0),
        ("native_dropout", OpClass.DROPOUT, 2),
    ],
)
def test_elementwise_operations_move_each_operand_once(name, op_class, flops):
    row = only_row(name, [dense(4, 8)], dense(4, 8))
    assert row.op_class is op_class
    assert (row.flops, row.read_bytes, row.write_bytes, row.elements) == (flops * 32, 128, 128, 32)


@pytest.mark.parametrize(("name", "work"), [("_fft_c2c", 5.0), ("_fft_r2c", 2.5)])
def test_a_fourier_transform_is_a_pass_an_axis(name, work):
    (row,) = cost_rows(Call(name, (dense(2, 1024, size=8), [1], 0, True), (dense(2, 1024, size=8),)))
    assert row.flops == work * 2 * 1024 * 10
    assert len(cost_rows(Call(name, (dense(2, 64, 64), [1, 2], 0, True), (dense(2, 64, 64),)))) == 2


def test_an_expanded_operand_is_read_once():
    expanded = TensorInfo((64, 32), 4, 32, True, (0, 1))
    row = only_row("add", [dense(64, 32), expanded], dense(64, 32))
    assert row.read_bytes == 4 * (64 * 32 + 32)


@pytest.mark.parametrize("name", ["zero_", "zeros_like", "full", "arange", "randn"])
def test_a_fill_reads_nothing(name):
    row = only_row(name, [dense(5, 5)] if name.endswith(("_", "like")) else [], dense(5, 5))
    assert (row.read_bytes, row.write_bytes, row.flops) == (0, 100, 0)


@pytest.mark.parametrize(("size", "kind"), [(2, OpClass.CAST), (4, OpClass.COPY)])
def test_a_copy_to_another_size_is_a_cast(size, kind):
    row = only_row("_to_copy", [dense(10)], dense(10, size=size))
    assert (row.op_class, row.read_bytes, row.write_bytes) == (kind, 40, 10 * size)


def test_copy_into_reads_its_source_only():
    row = only_row("copy_", [dense(10), dense(10, size=2)], dense(10), in_place=True)
    assert (row.read_bytes, row.write_bytes, row.op_class) == (20, 40, OpClass.CAST)


def test_gradient_of_a_slice_fills_the_whole_tensor():
    row = only_row("slice_backward", [dense(4, 2), [4, 16], 1, 0, 2, 1], dense(4, 16))
    assert (row.op_class, row.read_bytes, row.write_bytes) == (OpClass.COPY, 32, 256 + 32)


def test_an_embedding_reads_the_rows_it_gathers_not_the_table():
    indices = dense(B, 7, size=8, is_floating=False)
    row = only_row("embedding", [dense(50_000, 16), indices], dense(B, 7, 16))
    assert row.read_bytes == B * 7 * 16 * 4 + B * 7 * 8
    assert row.write_bytes == B * 7 * 16 * 4


def test_an_embedding_bag_reads_every_row_of_a_bag():
    indices, offsets = dense(40, size=8, is_floating=False), dense(B, size=8, is_floating=False)
    row = only_row("_embedding_bag", [dense(1000, 16), indices, offsets], dense(B, 16), dense(0), dense(B))
    assert row.read_bytes == 40 * 16 * 4 + 40 * 8
    assert row.write_bytes == B * 16 * 4


@pytest.mark.parametrize(
    ("name", "args", "width"),
    [
        ("_softmax", (dense(4, 10, 6), 1, False), 10),
        ("_log_softmax", (dense(4, 10), -1, False), 10),
        ("_softmax_backward_data", (dense(4, 10, 6), dense(4, 10, 6), 2, torch.float32), 6),
        ("_masked_softmax", (dense(4, 10), dense(4, 10), None, None), 10),
        ("_masked_softmax", (dense(4, 10), dense(4, 10), 0, None), 4),
    ],
)
def test_softmax_knows_its_width(name, args, width):
    row = only_row(name, args, args[0])
    assert (row.op_class, row.width) == (OpClass.SOFTMAX, width)
    assert row.flops == 5 * args[0].num_elements


@pytest.mark.parametrize(
    ("name", "args", "outputs"),
    [
        ("nll_loss_forward", (dense(4, 10), dense(4, size=8), None, 1, -100), (dense(), dense())),
        ("mse_loss", (dense(4, 10), dense(4, 10), 1), (dense(),)),
        ("sum", (dense(4, 10), [0], True), (dense(1, 10),)),
    ],
)
def test_losses_and_sums_are_reductions(name, args, outputs):
    row = only_row(name, args, *outputs)
    assert row.op_class is OpClass.REDUCE
    assert row.read_bytes == sum(t.touched_bytes for t in args if isinstance(t, TensorInfo))


@pytest.mark.parametrize(
    ("name", "args", "op_class", "width"),
    [
        ("native_batch_norm", (dense(B, 8, 5, 5), dense(8)), OpClass.BATCH_NORM, 25),
        ("native_batch_norm_backward", (dense(B, 8, 5, 5), dense(B, 8, 5, 5)), OpClass.BATCH_NORM, 25),
        ("native_layer_norm", (dense(B, 7, 12), [12], dense(12)), OpClass.LAYER_NORM, 12),
        ("native_layer_norm_backward", (dense(B, 7, 12), dense(B, 7, 12)), OpClass.LAYER_NORM, 12),
        ("native_group_norm", (dense(B, 8, 5, 5), dense(8)), OpClass.GROUP_NORM, 25),
    ],
)
def test_normalisations(name, args, op_class, width):
    row = only_row(name, args, args[0])
    assert (row.op_class, row.width) == (op_class, width)
    assert row.flops == (8 if "backward" in name else 5) * args[0].num_elements


def test_max_pool_backward_reads_gradient_and_indices_but_not_its_input():
    source, out = dense(B, 8, 12, 12), dense(B, 8, 6, 6)
    indices = dense(B, 8, 6, 6, size=8, is_floating=False)
    window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    forward = only_row("max_pool2d_with_indices", (source, *window), out, indices)
    backward = only_row("max_pool2d_with_indices_backward", (out, source, *window, indices), source)
    assert forward.write_bytes == out.touched_bytes + indices.touched_bytes
    assert forward.flops == 4 * source.num_elements
    assert backward.read_bytes == out.touched_bytes + indices.touched_bytes
    assert backward.write_bytes == source.touched_bytes


# ---------------------------------------------------------------------------------------------------------
# multi-tensor kernels


def launches_step_by_step(sizes, num_lists):
    """The loop of MultiTensorApply.cuh: a launch when the tensors or the blocks of one are used up."""
    max_tensors = {1: 110, 2: 64, 3: 48, 4: 36}.get(num_lists, 30)
    launches = tensors = blocks = 0
    for size in sizes:
        chunks = ceil(size / 65536)
        tensors += 1
        for chunk in range(chunks):
            blocks += 1
            is_last = chunk == chunks - 1
            if (tensors == max_tensors and is_last) or blocks == 320:
                launches, blocks, tensors = launches + 1, 0, 0 if is_last else 1
    return launches + (blocks > 0)


@pytest.mark.parametrize(
    ("sizes", "num_lists", "expected"),
    [
        ([10] * 110, 1, 1),
        ([10] * 111, 1, 2),
        ([10] * 64, 2, 1),
        ([10] * 65, 2, 2),
        ([10] * 160, 3, 4),
        ([10] * 160, 4, 5),
        ([65536 * 320], 3, 1),
        ([65536 * 320 + 1], 3, 2),
        ([100_000_000], 2, 5),
    ],
)
def test_launches_of_a_multi_tensor_operation(sizes, num_lists, expected):
    assert num_multi_tensor_launches(sizes, num_lists) == expected
    assert launches_step_by_step(sizes, num_lists) == expected


@pytest.mark.parametrize("num_lists", [1, 2, 3, 4])
def test_launches_of_mixed_sizes_are_counted_from_below(num_lists):
    # The closed form takes the tighter of two limits; where both bind in turn a launch more may run.
    sizes = ([2_359_296, 512, 512, 1_048_576, 256, 256] * 30) + [2_048_000, 1000]
    counted = num_multi_tensor_launches(sizes, num_lists)
    assert counted <= launches_step_by_step(sizes, num_lists) <= 2 * counted


def test_a_multi_tensor_row_shares_its_traffic_among_the_launches():
    weights, gradients = [dense(100, 10)] * 65, [dense(100, 10)] * 65
    row = only_row("_foreach_add_", (weights, gradients, -0.1), in_place=True)
    assert row.op_class is OpClass.OPTIMIZER
    assert row.count == 2
    assert row.count * row.read_bytes == 2 * 65 * 4000
    assert row.count * row.write_bytes == 65 * 4000
    assert row.count * row.flops == 65 * 1000


def test_a_multi_tensor_operation_with_new_results_walks_one_more_list():
    lists = ([dense(10)] * 64, [1.0] * 64)
    assert only_row("_foreach_mul", lists, *[dense(10)] * 64).count == 1
    assert only_row("_foreach_mul", ([dense(10)] * 65, [1.0] * 65), *[dense(10)] * 65).count == 2


@pytest.mark.parametrize(
    ("name", "channels_last", "law_size"),
    [
        ("upsample_bilinear2d", False, 8),
        ("upsample_bilinear2d", True, 1),
        ("upsample_bicubic2d", False, 8),
        ("upsample_bicubic2d", True, 8),
    ],
)
def test_threads_of_an_interpolation_go_through_channels_that_are_not_last(name, channels_last, law_size):
    strides = (128, 1, 32, 8) if channels_last else (128, 16, 4, 1)
    source = TensorInfo((B, 8, 4, 4), 4, B * 128, True, strides)
    row = only_row(name, (source, [8, 8], False, None, None), dense(B, 8, 8, 8))
    assert row.law_size == law_size
    assert row.op_class is OpClass.AVG_POOL
