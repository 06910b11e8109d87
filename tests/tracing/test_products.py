"""Closed-form work of convolutions, products and recurrent layers, on hand-made calls; the registry of rules."""

from __future__ import annotations

from math import prod

import pytest
import torch
from op_calls import dense, only_row
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, rule
from forerun.tracing.op_rules import RULES, cost_rows
from forerun.tracing.recorder import StepRecorder

torch.set_num_threads(1)

B = 3


def convolution(source, weight, out, *, stride=(1, 1), groups=1, transposed=False, size=4):
    nothing = [0] * (len(source) - 2)
    args = (dense(*source, size=size), dense(*weight, size=size), None, list(stride), nothing, nothing)
    return only_row("convolution", (*args, transposed, nothing, groups), dense(*out, size=size))


def convolution_gradients(source, weight, out, *, groups=1, transposed=False, wanted=(True, True, True)):
    nothing = [0] * (len(source) - 2)
    ones = [1] * (len(source) - 2)
    args = (
        dense(*out),
        dense(*source),
        dense(*weight),
        [weight[0]],
        ones,
        nothing,
        ones,
        transposed,
        nothing,
    )
    outputs = (dense(*source), dense(*weight), dense(out[1]))
    kept = tuple(tensor for tensor, is_wanted in zip(outputs, wanted, strict=True) if is_wanted)
    return cost_rows(Call("convolution_backward", (*args, groups, list(wanted)), kept))


# ---------------------------------------------------------------------------------------------------------
# convolutions


def test_dense_convolution():
    row = convolution((B, 16, 10, 10), (32, 16, 3, 3), (B, 32, 10, 10))
    assert row.op_class is OpClass.CONV
    assert row.flops == 2 * B * 10 * 10 * 32 * 16 * 9
    assert row.gemm == (1, B * 100, 32, 16 * 9)
    assert row.read_bytes == 4 * (B * 16 * 100 + 32 * 16 * 9)
    assert row.write_bytes == 4 * B * 32 * 100
    assert (row.kernel_area, row.stride, row.groups, row.width) == (9, 1, 1, 10)


def test_a_dilated_window_costs_no_more_than_its_elements():
    # Dilation 2 on 14 pixels leaves 10: the work depends on the output and the 9 taps alone.
    row = convolution((B, 16, 14, 14), (32, 16, 3, 3), (B, 32, 10, 10))
    assert row.flops == convolution((B, 16, 10, 10), (32, 16, 3, 3), (B, 32, 10, 10)).flops


def test_a_stride_of_two_quarters_the_work():
    fine = convolution((B, 16, 16, 16), (32, 16, 3, 3), (B, 32, 16, 16))
    coarse = convolution((B, 16, 16, 16), (32, 16, 3, 3), (B, 32, 8, 8), stride=(2, 1))
    assert coarse.flops == fine.flops / 4
    assert coarse.stride == 2


@pytest.mark.parametrize("transposed", [False, True])
def test_depthwise_gradients_cost_one_64th_of_dense_ones(transposed):
    # PyTorch's own counter ignores the groups of a gradient.
    shape = (B, 64, 8, 8)
    by_class = {
        groups: convolution_gradients(
            shape, (64, 64 // groups, 3, 3), shape, groups=groups, transposed=transposed
        )
        for groups in (1, 64)
    }
    forward = convolution(shape, (64, 1, 3, 3), shape, groups=64, transposed=transposed)
    assert forward.op_class is OpClass.DEPTHWISE_CONV
    assert forward.flops == 2 * B * 64 * 64 * 9
    for one, many in zip(by_class[1][:2], by_class[64][:2], strict=True):
        assert one.flops == 64 * many.flops
        assert many.flops == forward.flops
        assert many.gemm[0] == 64


def test_grouped_convolution_and_its_gradients():
    source, weight, out = (B, 32, 9, 9), (64, 8, 3, 3), (B, 64, 9, 9)
    flops = 2 * B * 81 * 64 * 8 * 9
    forward = convolution(source, weight, out, groups=4)
    data, weights, bias = convolution_gradients(source, weight, out, groups=4)
    assert forward.op_class is data.op_class is weights.op_class is OpClass.GROUPED_CONV
    assert [row.flops for row in (forward, data, weights)] == [flops] * 3
    assert forward.gemm == (4, B * 81, 16, 8 * 9)
    assert data.gemm == (4, B * 81, 8, 16 * 9)
    assert weights.gemm == (4, 16, 8 * 9, B * 81)
    assert (data.is_weight_gradient, weights.is_weight_gradient) == (False, True)
    assert data.read_bytes == 4 * (prod(out) + prod(weight))
    assert data.write_bytes == 4 * prod(source)
    assert weights.read_bytes == 4 * (prod(out) + prod(source))
    assert weights.write_bytes == 4 * prod(weight)
    assert (bias.op_class, bias.flops, bias.write_bytes) == (OpClass.REDUCE, prod(out), 4 * 64)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, True, True)])
def test_only_the_gradients_that_are_wanted_cost_anything(wanted):
    rows = convolution_gradients((B, 8, 6, 6), (8, 8, 3, 3), (B, 8, 6, 6), wanted=wanted)
    assert len(rows) == sum(wanted)


def test_transposed_convolution_is_the_data_gradient_of_the_other_direction():
    # (B, 16, 5, 5) -> (B, 8, 10, 10), window 2, stride 2: each input pixel writes 8 x 4 numbers.
    row = convolution((B, 16, 5, 5), (16, 8, 2, 2), (B, 8, 10, 10), stride=(2, 2), transposed=True)
    assert row.flops == 2 * B * 25 * 16 * 8 * 4
    assert row.gemm == (1, B * 100, 8, 16 * 4)
    assert row.write_bytes == 4 * B * 8 * 100
    data, weights, _ = convolution_gradients((B, 16, 5, 5), (16, 8, 2, 2), (B, 8, 10, 10), transposed=True)
    assert data.gemm == (1, B * 25, 16, 8 * 4)
    assert data.write_bytes == 4 * B * 16 * 25
    assert weights.flops == data.flops == row.flops


@pytest.mark.parametrize(
    ("source", "weight", "out", "flops"),
    [
        ((B, 4, 100), (8, 4, 5), (B, 8, 96), 2 * B * 96 * 8 * 4 * 5),
        ((B, 4, 6, 8, 8), (8, 4, 3, 3, 3), (B, 8, 6, 8, 8), 2 * B * 384 * 8 * 4 * 27),
    ],
)
def test_convolutions_of_one_and_three_dimensions(source, weight, out, flops):
    row = convolution(source, weight, out, stride=(1,) * (len(source) - 2))
    assert row.flops == flops
    assert row.kernel_area == prod(weight[2:])
    assert convolution_gradients(source, weight, out)[0].flops == flops


# ---------------------------------------------------------------------------------------------------------
# products, attention, recurrent layers


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("mm", ((6, 5), (5, 7))),
        ("addmm", ((7,), (6, 5), (5, 7))),
        ("_addmm_activation", ((7,), (6, 5), (5, 7))),
    ],
)
def test_matrix_product(name, args):
    row = only_row(name, [dense(*shape) for shape in args], dense(6, 7))
    assert row.op_class is OpClass.LINEAR
    assert row.gemm == (1, 6, 7, 5)
    assert row.flops == 2 * 6 * 7 * 5
    assert row.read_bytes == 4 * sum(prod(shape) for shape in args)
    assert row.write_bytes == 4 * 42


def test_matrix_times_vector():
    assert only_row("mv", [dense(6, 5), dense(5)], dense(6)).gemm == (1, 6, 1, 5)


@pytest.mark.parametrize(("name", "before"), [("bmm", []), ("baddbmm", [dense(4, 6, 7, size=2)])])
def test_batched_product(name, before):
    row = only_row(name, [*before, dense(4, 6, 5, size=2), dense(4, 5, 7, size=2)], dense(4, 6, 7, size=2))
    assert row.op_class is OpClass.BMM
    assert row.gemm == (4, 6, 7, 5)
    assert (row.flops, row.element_bytes) == (2 * 4 * 6 * 7 * 5, 2)


@pytest.mark.parametrize(
    ("left", "right", "out", "gemm"),
    [
        ((48, 5), (4, 5, 7), (48, 7), (4, 12, 7, 5)),
        ((4, 6, 5), (5, 48), (6, 48), (4, 6, 12, 5)),
        ((6, 48), (48, 7), (4, 6, 7), (4, 6, 7, 12)),
        ((4, 6, 5), (4, 5, 7), (4, 6, 7), (4, 6, 7, 5)),
    ],
    ids=["tokens", "transposed", "weight gradient", "batched"],
)
def test_products_of_experts_count_each_token_once(left, right, out, gemm):
    row = only_row("_grouped_mm", [dense(*left, size=2), dense(*right, size=2)], dense(*out, size=2))
    assert row.op_class is OpClass.BMM
    assert row.gemm == gemm
    assert row.flops == 2 * prod(gemm)
    assert row.read_bytes == 2 * (prod(left) + prod(right))


def test_a_triangular_system_is_half_a_product():
    row = only_row(
        "linalg_solve_triangular", [dense(2, 6, 6), dense(2, 6, 5), False, True, False], dense(2, 6, 5)
    )
    assert row.flops == 2 * 6 * 6 * 5


def test_distances_of_all_pairs():
    row = only_row("_cdist_forward", [dense(2, 6, 5), dense(2, 7, 5), 2.0, None], dense(2, 6, 7))
    assert row.gemm == (2, 6, 7, 5)


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_fused_attention_does_two_products_forward_and_five_backward(kind):
    query, key, value = dense(2, 4, 10, 8, size=2), dense(2, 4, 12, 8, size=2), dense(2, 4, 12, 8, size=2)
    name = f"_scaled_dot_product_{kind}_attention"
    forward = only_row(name, (query, key, value, 0.0, False), query, dense(2, 4, 10))
    backward = only_row(f"{name}_backward", (query, query, key, value, query), query, key, value)
    one_product = 2 * (2 * 4) * 10 * 12 * 8
    assert forward.op_class is backward.op_class is OpClass.ATTENTION
    assert (forward.flops, backward.flops) == (2 * one_product, 5 * one_product)
    # The scores never reach memory.
    assert forward.read_bytes == 2 * 2 * 4 * 8 * (10 + 12 + 12)
    assert forward.gemm == (8, 10, 12, 8)


@pytest.mark.parametrize(("mode", "num_gates"), [("lstm", 4), ("gru", 3), ("rnn", 1)])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_recurrent_layer(mode, num_gates, batch_first, has_bias):
    steps, inputs, hidden = 7, 5, 6
    source = dense(B, steps, inputs) if batch_first else dense(steps, B, inputs)
    weights = [dense(num_gates * hidden, inputs), dense(num_gates * hidden, hidden)]
    weights += [dense(num_gates * hidden)] * 2 * has_bias
    state, out = dense(1, B, hidden), dense(steps, B, hidden)
    forward = only_row("rnn", (source, state, weights, mode, 1, 1, batch_first, True, 0), out)
    backward = only_row(
        "rnn_backward", (out, source, state, weights, dense(9), mode, 1, 1, batch_first, 0), source, *weights
    )
    assert forward.op_class is OpClass.RECURRENT
    assert forward.flops == 2 * steps * B * num_gates * hidden * (inputs + hidden)
    assert backward.flops == 2 * forward.flops
    assert forward.serial_steps == backward.serial_steps == steps
    assert forward.gemm == (1, B, num_gates * hidden, hidden)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_and_directions_of_a_recurrent_stack_wait_for_each_other(has_bias):
    weights = ([dense(24, 6), dense(24, 6)] + [dense(24)] * 2 * has_bias) * 6
    args = (dense(7, B, 6), dense(6, B, 6), weights, "lstm", 3, 2, False, True, 0)
    assert only_row("rnn", args, dense(7, B, 12)).serial_steps == 7 * 3 * 2


def test_packed_sequences_have_as_many_steps_as_the_longest():
    weights = [dense(24, 5), dense(24, 6)]
    args = (dense(20, 5), dense(1, B, 6), weights, "lstm", 1, 1, False, True, 8)
    packed = only_row("rnn", args, dense(20, 6))
    assert (packed.serial_steps, packed.flops) == (8, 2 * 20 * 24 * (5 + 6))
    assert packed.gemm == (1, 20 / 8, 24, 6)


# ---------------------------------------------------------------------------------------------------------
# the registry


def test_an_unknown_operation_is_charged_by_its_traffic_and_reported():
    row = only_row("brand_new_operation", [dense(4, 8)], dense(4, 2))
    assert row.op_class is OpClass.UNKNOWN
    assert not row.is_supported
    assert (row.read_bytes, row.write_bytes) == (128, 32)


def test_two_rules_for_one_operation_are_refused():
    with pytest.raises(AssertionError, match="two rules for mm"):
        rule("mm")(lambda call: [])
    assert "mm" in RULES


def counted_by_torch(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def counted_by_rules(run):
    recorder = StepRecorder()
    recorder.records_ops = True
    with recorder:
        run()
    matrices = (OpClass.CONV, OpClass.LINEAR, OpClass.BMM, OpClass.ATTENTION)
    return sum(row.cost.flops * row.cost.count for row in recorder.rows if row.cost.op_class in matrices)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    "run",
    [
        lambda: functional.conv2d(meta(2, 8, 9, 9), meta(16, 8, 3, 3), stride=2, padding=1).sum().backward(),
        lambda: functional.conv1d(meta(2, 8, 50), meta(16, 8, 5), dilation=3).sum().backward(),
        lambda: functional.conv_transpose2d(meta(2, 8, 5, 5), meta(8, 4, 2, 2), stride=2).sum().backward(),
        lambda: (meta(5, 6) @ meta(6, 7)).sum().backward(),
        lambda: torch.bmm(meta(3, 5, 6), meta(3, 6, 7)).sum().backward(),
        lambda: (
            functional.scaled_dot_product_attention(meta(2, 4, 8, 16), meta(2, 4, 8, 16), meta(2, 4, 8, 16))
            .sum()
            .backward()
        ),
    ],
    ids=["conv2d", "conv1d", "conv_transpose2d", "mm", "bmm", "attention"],
)
def test_the_rules_agree_with_the_counter_of_pytorch_where_that_is_right(run):
    assert counted_by_rules(run) == counted_by_torch(run) > 0
