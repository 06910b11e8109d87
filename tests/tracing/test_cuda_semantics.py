"""Meta tensors under the rules of CUDA: autocast, fused attention, dropout masks, fused recurrent layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from traced_steps import allocated_bytes, kernels, record, rows_named

from forerun.graph.graph import AllocationKind, StepPart
from forerun.tracing.cuda_semantics import cuda_semantics, leave_autocast_region


class Attention(nn.Module):
    """Self-attention of one layer, with or without a mask."""

    def __init__(self, mask=None, dropout_p=0.0, num_key_heads=4):
        super().__init__()
        self.project = nn.Linear(32, 32 + 2 * 8 * num_key_heads)
        self.mask, self.dropout_p, self.num_key_heads = mask, dropout_p, num_key_heads

    def forward(self, x):
        sizes = (32, 8 * self.num_key_heads, 8 * self.num_key_heads)
        query, key, value = (
            part.unflatten(2, (-1, 8)).transpose(1, 2) for part in self.project(x).split(sizes, 2)
        )
        mask = None
        if self.mask is not None:
            mask = torch.ones(1, 1, x.shape[1], x.shape[1], device=x.device, dtype=self.mask)
        return functional.scaled_dot_product_attention(
            query, key, value, mask, self.dropout_p, enable_gqa=self.num_key_heads != 4
        )


def meta(*shape, dtype=torch.float32, requires_grad=False):
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=requires_grad)


def under(dtype, run, fused_attention=True):
    with cuda_semantics(dtype, fused_attention=fused_attention):
        return run()


# ---------------------------------------------------------------------------------------------------------
# autocast


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("run", "is_half"),
    [
        (lambda x, w: functional.linear(x, w), True),
        (lambda x, w: x @ w, True),
        (lambda x, w: torch.einsum("ij,jk->ik", x, w), True),
        (lambda x, w: functional.conv1d(x[None], w[..., None]), True),
        (lambda x, w: functional.prelu(x, w[0, :1]), True),
        (lambda x, w: functional.layer_norm(x.half(), (8,)), False),
        (lambda x, w: functional.group_norm(x[None].half(), 2), False),
        (lambda x, w: x.half().softmax(-1), False),
        (lambda x, w: x.half().log_softmax(-1), False),
        (lambda x, w: x.half().sum(), False),
        (lambda x, w: x.half().cumsum(0), False),
        (lambda x, w: x.half().pow(2), False),
        (lambda x, w: x.half().exp(), False),
        (lambda x, w: functional.mse_loss(x.half(), x.half()), False),
        (lambda x, w: torch.addcmul(x, x.half(), x.half()), False),
        (lambda x, w: torch.cdist(x.half(), x.half()), False),
        (lambda x, w: x.half().relu(), True),
        (lambda x, w: x.half() + x.half(), True),
        (lambda x, w: x.half() + x, False),
    ],
)
def test_results_have_the_type_that_cuda_autocast_gives(run, is_half, dtype):
    result = under(dtype, lambda: run(meta(8, 8), meta(8, 8)))
    assert (result.element_size() == 2) is is_half


def test_without_autocast_nothing_is_cast():
    assert under(None, lambda: functional.linear(meta(2, 8), meta(8, 8))).dtype == torch.float32
    assert under(None, lambda: meta(2, 8, dtype=torch.float16).softmax(-1)).dtype == torch.float16


def test_double_precision_is_left_alone():
    double = meta(2, 8, dtype=torch.float64)
    assert under(torch.float16, lambda: functional.linear(double, double)).dtype == torch.float64


def dtype_of_product():
    return functional.linear(meta(2, 8), meta(8, 8)).dtype


def test_the_rules_end_with_the_region():
    with cuda_semantics(torch.float16, fused_attention=True):
        assert dtype_of_product() == torch.float16
        leave_autocast_region()
        assert dtype_of_product() == torch.float32
    assert dtype_of_product() == torch.float32


def test_the_rules_end_after_a_failure_too():
    with pytest.raises(ZeroDivisionError), cuda_semantics(torch.float16, fused_attention=True):
        raise ZeroDivisionError
    assert functional.linear(meta(2, 8), meta(8, 8)).dtype == torch.float32


def test_regions_nest():
    with cuda_semantics(torch.float16, fused_attention=True):
        with cuda_semantics(torch.bfloat16, fused_attention=True):
            assert functional.linear(meta(2, 8), meta(8, 8)).dtype == torch.bfloat16
        with_outer = functional.linear(meta(2, 8), meta(8, 8)).dtype
    assert with_outer == torch.float16


def test_regions_of_torch_on_meta_tensors_are_those_of_the_device():
    with cuda_semantics(torch.float16, fused_attention=True):
        with torch.autocast(device_type="meta", enabled=False):
            assert dtype_of_product() == torch.float32
        with torch.autocast("meta", torch.bfloat16):
            assert dtype_of_product() == torch.bfloat16
        assert dtype_of_product() == torch.float16


class SharedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(self.layer(self.layer(x)))


def test_each_weight_is_cast_once_per_region():
    raw = record(SharedWeight(), (16,), precision="amp")
    casts = [row for row in rows_named(raw, "_to_copy") if row.step_part is StepPart.FORWARD]
    in_layer = [row for row in casts if row.module_name == "layer"]
    # Weight, bias, and the input of the first call.
    assert sorted(row.cost.elements for row in in_layer) == [16, 4 * 16, 16 * 16]
    assert kernels(raw, "layer", StepPart.FORWARD).count("addmm") == 3


def test_a_cast_weight_lives_on_where_the_backward_pass_needs_it():
    raw = record(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), (64,), 1, precision="amp")
    plain = record(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), (64,), 1)
    # Only the second layer's is needed again, for the gradient of its input; there are two steps.
    assert sum(size == 64 * 64 * 2 for size in allocated_bytes(raw, AllocationKind.ACTIVATION)) == 2
    assert sum(size == 64 * 64 * 2 for size in allocated_bytes(plain)) == 0


def test_gradients_of_cast_weights_arrive_in_full_precision():
    raw = record(nn.Linear(64, 32), (64,), 1, precision="amp")
    assert sorted(allocated_bytes(raw, AllocationKind.GRADIENT)) == [32 * 4, 64 * 32 * 4]


@pytest.mark.parametrize("autocast_backward", [False, True])
def test_autocast_in_the_backward_pass_is_a_choice(autocast_backward):
    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            y = self.layer(x)
            return y.relu() * torch.matmul(y, y.transpose(0, 1)).sum()

    raw = record(Powers(), (16,), precision="amp", autocast_backward=autocast_backward)
    assert "mm" in kernels(raw, part=StepPart.BACKWARD)


# ---------------------------------------------------------------------------------------------------------
# attention


@pytest.mark.parametrize(
    ("precision", "mask", "kernel"),
    [
        ("amp", None, "_scaled_dot_product_flash_attention"),
        ("amp-bf16", None, "_scaled_dot_product_flash_attention"),
        ("bf16", None, "_scaled_dot_product_flash_attention"),
        ("amp", torch.bool, "_scaled_dot_product_efficient_attention"),
        ("amp", torch.float32, "_scaled_dot_product_efficient_attention"),
        ("fp32", None, "_scaled_dot_product_efficient_attention"),
        ("fp32", torch.float32, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_is_one_kernel_each_way(precision, mask, kernel):
    raw = record(Attention(mask), (10, 32), precision=precision)
    attention = [name for name in kernels(raw) if "attention" in name]
    assert attention == [kernel, f"{kernel}_backward"]
    assert "bmm" not in kernels(raw)


@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_without_fusion_attention_is_products_and_a_softmax(precision):
    raw = record(Attention(), (10, 32), precision=precision, fused_attention=False)
    assert not [name for name in kernels(raw) if "attention" in name]
    assert kernels(raw, part=StepPart.FORWARD).count("bmm") == 2
    assert kernels(raw, part=StepPart.BACKWARD).count("bmm") == 4
    assert "_softmax" in kernels(raw) or "_safe_softmax" in kernels(raw)


def test_fused_attention_never_holds_the_scores():
    length = 256
    scores_bytes = 4 * 4 * length * length * 2
    fused = record(Attention(), (length, 32), precision="bf16")
    unfused = record(Attention(), (length, 32), precision="bf16", fused_attention=False)
    assert scores_bytes not in allocated_bytes(fused)
    assert scores_bytes in allocated_bytes(unfused)


def test_grouped_queries_repeat_keys_and_values():
    raw = record(Attention(num_key_heads=2), (10, 32), precision="bf16")
    assert "_scaled_dot_product_flash_attention" in kernels(raw)


def test_attention_over_three_axes_is_not_fused():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            return functional.scaled_dot_product_attention(self.layer(x), x, x)

    assert not [name for name in kernels(record(Flat(), (10, 32))) if "attention" in name]


# ---------------------------------------------------------------------------------------------------------
# dropout and recurrent layers


@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_dropout_keeps_a_mask_of_one_byte(precision):
    raw = record(nn.Sequential(nn.Linear(32, 1000), nn.Dropout(0.5)), (32,), 8, precision=precision)
    assert kernels(raw, "1") == ["native_dropout", "native_dropout_backward"]
    assert 8 * 1000 in allocated_bytes(raw, AllocationKind.ACTIVATION)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_or_all_keeps_no_mask(p):
    raw = record(nn.Sequential(nn.Linear(32, 1000), nn.Dropout(p)), (32,), 8)
    assert "native_dropout" not in kernels(raw)
    assert 8 * 1000 not in allocated_bytes(raw)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(12, 16, **options)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_a_recurrent_layer_is_one_call_each_way(kind, precision):
    raw = record(Recurrent(kind, batch_first=True, num_layers=2), (20, 12), precision=precision)
    assert kernels(raw, "layer").count("rnn") == 1
    assert kernels(raw, "layer").count("rnn_backward") == 1
    assert not {"mm", "addmm", "bmm"} & set(kernels(raw))
    assert {row.cost.element_bytes for row in rows_named(raw, "rnn")} == {2 if precision == "amp" else 4}


def test_no_cuda_device_is_asked_for():
    assert not torch.cuda.is_initialized()
