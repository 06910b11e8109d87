"""What the recorder writes down: rows, the module and part each belongs to, and the life of storages."""

from __future__ import annotations

import weakref

import pytest
import torch
import torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from traced_steps import allocated_bytes, graph_of, kernels, live_bytes, record, rows_named, setup_of

from forerun.graph.graph import AllocationKind, MemoryEvent, OpClass, StepPart
from forerun.question.setup import Layout, OptimizerImplementation, Phase
from forerun.tracing.models.sources import build_model
from forerun.tracing.recorder import StepRecorder
from forerun.tracing.step import record_step


def two_layers():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def recorded(run):
    recorder = StepRecorder()
    recorder.records_ops = True
    with recorder:
        run()
    return recorder


def meta(*shape, **options):
    return torch.empty(shape, device="meta", **options)


def test_a_product_into_a_tensor_costs_what_the_product_costs():
    left, right, result = meta(128, 64), meta(64, 32), meta(128, 32)
    plain, into = recorded(lambda: left @ right), recorded(lambda: torch.mm(left, right, out=result))
    assert into.rows[0].cost.flops == plain.rows[0].cost.flops == 2 * 128 * 64 * 32
    added = recorded(lambda: result.addmm_(left, right))
    assert added.rows[0].cost.gemm == plain.rows[0].cost.gemm


def test_gradient_of_a_softmax_has_a_product_before_it():
    shares, gradient = meta(4, 8), meta(4, 8)
    events = recorded(lambda: torch._softmax_backward_data(gradient, shares, -1, torch.float32)).events
    result, product, freed = events[:3]  # the product lives while the kernel runs
    assert result.size_bytes == product.size_bytes == 128
    assert (freed.event, freed.block) == (MemoryEvent.FREE, product.block)


# ---------------------------------------------------------------------------------------------------------
# modules and parts of the step


def test_rows_of_forward_and_backward_belong_to_their_layer():
    raw = record(two_layers(), (8,))
    assert kernels(raw, "0", StepPart.FORWARD) == kernels(raw, "1", StepPart.FORWARD) == ["addmm"]
    # The first layer needs no gradient of its input.
    assert kernels(raw, "0", StepPart.BACKWARD) == ["mm", "sum"]
    assert kernels(raw, "1", StepPart.BACKWARD) == ["mm", "mm", "sum"]
    assert "_log_softmax" in kernels(raw, "", StepPart.FORWARD)


def test_weight_gradients_are_told_from_data_gradients():
    graph = graph_of(two_layers(), (8,))
    ops = graph.ops
    products = [i for i in range(len(ops)) if ops.kernel_names[ops.kernel[i]] == "mm"]
    parts = [(ops.module_names[ops.module[i]], StepPart(ops.step_part[i])) for i in products]
    assert parts == [
        ("1", StepPart.BACKWARD),
        ("1", StepPart.WEIGHT_GRADIENT),
        ("0", StepPart.WEIGHT_GRADIENT),
    ]


def test_gradients_of_a_convolution_are_two_rows():
    raw = record(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten()), (3, 8, 8))
    gradients = rows_named(raw, "convolution_backward")
    assert [(row.module_name, row.step_part, row.cost.op_class) for row in gradients] == [
        ("1", StepPart.BACKWARD, OpClass.CONV),
        ("1", StepPart.WEIGHT_GRADIENT, OpClass.CONV),
        ("1", StepPart.BACKWARD, OpClass.REDUCE),
        ("0", StepPart.WEIGHT_GRADIENT, OpClass.CONV),
        ("0", StepPart.BACKWARD, OpClass.REDUCE),
    ]


def test_a_module_that_is_called_twice_owns_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(self.layer(x))

    raw = record(Twice(), (8,))
    assert kernels(raw, "layer", StepPart.FORWARD) == ["addmm", "addmm"]
    # Weight and bias gradients of each call, the data gradient of the second, sums of the two gradients.
    backward = kernels(raw, "layer", StepPart.BACKWARD)
    assert (backward.count("mm"), backward.count("sum"), backward.count("add")) == (3, 2, 2)


def test_optimizer_rows_belong_to_the_optimizer():
    raw = record(two_layers(), (8,), optimizer="sgd")
    updates = [row for row in raw.rows if row.step_part is StepPart.OPTIMIZER]
    assert updates
    assert {row.module_name for row in updates} == {""}
    assert all(row.kernel_name.startswith("_foreach_") for row in updates)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.INFERENCE])
def test_a_forward_pass_alone_has_no_loss_and_no_gradient(phase):
    raw = record(two_layers(), (8,), phase=phase)
    assert kernels(raw) == ["addmm", "addmm"]
    assert {row.step_part for row in raw.rows} == {StepPart.FORWARD}


def test_a_forward_pass_with_gradients_keeps_activations_that_inference_frees():
    chain = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Sigmoid())))
    peaks = {
        phase: max(total for _, total in live_bytes(record(chain, (256,), 64, phase=phase)))
        for phase in Phase
    }
    activation = 64 * 256 * 4
    assert peaks[Phase.FORWARD] - peaks[Phase.INFERENCE] >= 5 * activation
    assert peaks[Phase.TRAIN] > peaks[Phase.FORWARD]


# ---------------------------------------------------------------------------------------------------------
# what is no kernel


def test_views_and_plain_allocations_are_no_kernels():
    def run():
        x = meta(4, 6)
        x.view(24).reshape(6, 4).transpose(0, 1).unsqueeze(0).expand(3, 4, 6)[:, 1:3].detach()
        x.contiguous()
        torch.empty_like(x)

    recorder = recorded(run)
    assert recorder.rows == []


def test_a_reshape_that_must_copy_is_a_kernel():
    recorder = recorded(lambda: meta(4, 6).t().reshape(24))
    assert [row.cost.op_class for row in recorder.rows] == [OpClass.COPY]


def test_views_share_their_block():
    def run():
        x = meta(4, 6)
        views = [x.view(24), x.t(), x[1:]]
        del x
        assert views

    recorder = recorded(run)
    events = [(event.event, event.block) for event in recorder.events]
    assert events == [(MemoryEvent.ALLOCATE, 0), (MemoryEvent.FREE, 0)]


def test_work_in_place_allocates_nothing():
    def run():
        x = meta(4, 6)
        x.add_(1).mul_(2).relu_()

    recorder = recorded(run)
    assert [row.kernel_name for row in recorder.rows] == ["add_", "mul_", "relu_"]
    assert all(row.in_place for row in recorder.rows)
    assert len([event for event in recorder.events if event.event == MemoryEvent.ALLOCATE]) == 1


def test_work_on_the_host_is_no_kernel():
    def run():
        table = torch.linspace(0, 1, 7)
        table * 2 + table.sum()
        torch.arange(5)

    recorder = recorded(run)
    assert recorder.rows == []
    assert recorder.events == []


def test_a_scalar_of_the_host_times_a_device_scalar_stays_on_the_device():
    results = []

    def run():
        results.append(torch.tensor(2.0) * meta() + torch.tensor(1.0))

    recorder = recorded(run)
    assert results[0].is_meta
    assert [row.kernel_name for row in recorder.rows] == ["mul", "add"]


def test_a_quotient_of_integers_is_no_integer():
    results = []

    def run():
        left, right = (meta(8, dtype=torch.int64) for _ in range(2))
        results.extend([left / right, left + right])

    recorded(run)
    assert [result.dtype for result in results] == [torch.float32, torch.int64]


def test_shortcuts_give_the_shapes_that_pytorch_gives():
    def run():
        x, y = meta(3, 4, 5, dtype=torch.float16), meta(3, 4, 5, dtype=torch.float16)
        strided = x.permute(2, 0, 1)
        return [
            x + y,
            x * 2,
            x - y,
            x / 3.0,
            strided + strided,
            x + meta(5),
            x.relu(),
            nn.functional.gelu(strided),
            x.sigmoid(),
            torch.tensor(3) / meta(3, 4),
            meta(4, dtype=torch.int64) / 2,
            meta(4, dtype=torch.int64) / meta(4, dtype=torch.int64),
        ]

    results = []
    recorded(lambda: results.extend(run()))
    for ours, theirs in zip(results, run(), strict=True):
        assert (ours.shape, ours.stride(), ours.dtype, ours.device) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
            theirs.device,
        )


# ---------------------------------------------------------------------------------------------------------
# the memory stream


def test_memory_of_a_small_network_by_hand():
    # Linear(8, 16) - ReLU - Linear(16, 4), batch 5, fp32, SGD with momentum.
    raw = record(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (8,), 5, optimizer="sgd")
    parameters = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert sum(allocated_bytes(raw, AllocationKind.WEIGHT)) == parameters
    assert sum(allocated_bytes(raw, AllocationKind.GRADIENT)) == parameters
    assert sum(allocated_bytes(raw, AllocationKind.OPTIMIZER_STATE)) == parameters
    assert sum(allocated_bytes(raw, AllocationKind.INPUT)) == 5 * 8 * 4
    # Kept for the backward pass: the ReLU's output, log-probabilities, labels, the loss and its weight; the
    # first layer's output and the logits are gone.
    history = live_bytes(raw)
    begins = [total for event, total in history if event.event == MemoryEvent.BACKWARD_BEGINS][1]
    kept = 5 * 16 * 4 + 5 * 4 * 4 + 5 * 8 + 4 + 4
    assert begins == 2 * parameters + 5 * 8 * 4 + kept
    ends = [total for event, total in history if event.event == MemoryEvent.STEP_ENDS]
    assert ends == [3 * parameters + 5 * 8 * 4] * 2


def test_both_steps_end_with_the_same_live_bytes():
    raw = record(two_layers(), (8,), optimizer="adam")
    ends = [total for event, total in live_bytes(raw) if event.event == MemoryEvent.STEP_ENDS]
    assert len(ends) == 2
    assert ends[0] == ends[1]


def test_gradients_that_are_zeroed_stay():
    freed = record(two_layers(), (8,), zero_grad_to_none=True)
    kept = record(two_layers(), (8,), zero_grad_to_none=False)
    parameters = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    in_forward = [
        [total for event, total in live_bytes(raw) if event.event == MemoryEvent.BACKWARD_BEGINS][1]
        for raw in (freed, kept)
    ]
    assert in_forward[1] - in_forward[0] == parameters
    assert kernels(freed).count("zero_") == 0
    assert kernels(kept).count("zero_") == 4


def test_every_convolution_may_want_a_workspace():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten())
    raw = record(module, (3, 8, 8), 2)
    sizes = [event.size_bytes for event in raw.events if event.event == MemoryEvent.CONV_WORKSPACE]
    # The depthwise one wants none; the other wants input plus output, forward and backward, in two steps.
    assert sizes == [2 * 4 * (3 * 64 + 4 * 36)] * 4


def test_a_block_that_is_freed_can_be_named_again():
    recorder = StepRecorder()
    with recorder:
        x = meta(10)
        block = recorder.block_of(x)
        reference = weakref.ref(x.untyped_storage())
        del x
        assert reference() is None
        y = meta(20)
        assert recorder.block_of(y) != block
    assert recorder.block_of(torch.empty(3)) is None


# ---------------------------------------------------------------------------------------------------------
# gradient checkpointing and layouts


class Chain(nn.Module):
    def __init__(self, use_checkpoint, use_reentrant=False):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()) for _ in range(4)
        )
        self.use_checkpoint = use_checkpoint
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if self.use_checkpoint else block(x)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_and_lowers_the_peak(use_reentrant):
    plain = record(Chain(False), (64,), 256)
    saving = record(Chain(True, use_reentrant), (64,), 256)
    first_time = [row.kernel_name for row in saving.rows if not row.recomputed]
    assert first_time == kernels(plain)
    assert not any(row.recomputed for row in plain.rows)
    again = [row for row in saving.rows if row.recomputed]
    assert {row.step_part for row in again} == {StepPart.FORWARD}
    assert [row.kernel_name for row in again].count("addmm") == 8
    at_backward = [
        [total for event, total in live_bytes(raw) if event.event == MemoryEvent.BACKWARD_BEGINS][1]
        for raw in (plain, saving)
    ]
    # Each block keeps its input instead of what both of its ReLUs made.
    assert at_backward[0] - at_backward[1] >= 4 * 256 * 64 * 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_rows_belong_to_the_modules_that_are_run_again(use_reentrant):
    raw = record(Chain(True, use_reentrant), (64,))
    again = [(row.module_name, row.kernel_name) for row in raw.rows if row.recomputed]
    assert again.count(("blocks.2.0", "addmm")) == 1
    assert kernels(raw, "blocks.2.0", StepPart.BACKWARD).count("mm") == 2
    assert ("blocks.2.1", "relu") in again
    assert "threshold_backward" in kernels(raw, "blocks.2.1", StepPart.BACKWARD)


def test_the_order_of_channels_does_not_change_work_or_allocations():
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.MaxPool2d(6), nn.Flatten()
    )
    nchw, nhwc = (record(module, (3, 8, 8), layout=layout) for layout in (Layout.NCHW, Layout.NHWC))
    assert sum(r.cost.flops for r in nchw.rows) == sum(r.cost.flops for r in nhwc.rows)
    assert allocated_bytes(nchw) == allocated_bytes(nhwc)


def test_channels_last_stays_through_convolutions_and_costs_a_copy_where_images_are_flattened():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    raw = record(network, (3, 16, 16), layout=Layout.NHWC)
    inside = [r for r in raw.rows if r.kernel_name in ("convolution", "native_batch_norm", "relu")]
    assert len(inside) == 6
    assert not any(r.permuted for r in inside)
    flat = record(nn.Sequential(*layers, nn.Flatten()), (3, 16, 16), layout=Layout.NHWC)
    assert "clone" in {r.kernel_name for r in flat.rows}


@pytest.mark.parametrize("num_channels", [1, 4])
def test_no_row_of_a_stack_of_convolutions_is_permuted_in_channels_last(num_channels):
    layers = [nn.Conv2d(num_channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Conv2d(4, 4, 1))
    raw = record(network, (num_channels, 16, 16), layout=Layout.NHWC, phase="forward")
    assert len(rows_named(raw, "convolution")) == 3
    assert not any(row.permuted for row in raw.rows)


@pytest.mark.parametrize("source_last", [False, True])
@pytest.mark.parametrize("weight_last", [False, True])
def test_convolutions_answer_in_channels_last_if_an_operand_is(source_last, weight_last):
    def operand(is_last, *shape):
        order = torch.channels_last if is_last else torch.contiguous_format
        made = torch.empty(shape, device="meta").to(memory_format=order)
        return made.requires_grad_()

    source, weight = operand(source_last, 2, 8, 6, 6), operand(weight_last, 4, 8, 3, 3)
    with StepRecorder():
        out = nn.functional.conv2d(source, weight)
        gradients = torch.autograd.grad(out, (source, weight), torch.empty_like(out))
    for tensor in (out, *gradients):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == (source_last or weight_last)
        assert tensor.is_contiguous() != (source_last or weight_last)


def test_the_stream_ends_with_the_second_step():
    raw = record(two_layers(), (8,), optimizer="adam")
    assert raw.events[-1].event == MemoryEvent.STEP_ENDS


# ---------------------------------------------------------------------------------------------------------
# whole networks against PyTorch's own tracker of memory


def peak_of(name, batch_size, image_size, **options):
    built = build_model(f"torchvision:{name}", image_size=image_size)
    return max(total for _, total in live_bytes(record_step(built, setup_of(**options), batch_size)))


def tracked_peak(name, batch_size, image_size):
    """Peak of two steps by MemTracker, SGD with momentum, gradients freed between steps."""
    with FakeTensorMode():
        network = getattr(torchvision.models, name)()
        optimizer = torch.optim.SGD(
            network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=True
        )
        images = torch.empty(batch_size, 3, image_size, image_size)
        labels = torch.empty(batch_size, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(network, optimizer, images, labels)
        with tracker:
            for _ in range(2):
                loss = nn.functional.cross_entropy(network(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_the_peak_is_that_of_the_tracker_of_pytorch(name):
    ours = peak_of(name, 8, 96, optimizer="sgd")
    assert ours == pytest.approx(tracked_peak(name, 8, 96), rel=1e-3)


def test_the_peak_of_resnet50_is_the_one_on_record():
    # MemTracker, fp32, batch 16, SGD with momentum tensor by tensor, gradients set to zero: 1,615.9 MiB.
    options = {"optimizer": "sgd", "optimizer_implementation": OptimizerImplementation.FOR_LOOP}
    peak = peak_of("resnet50", 16, 224, zero_grad_to_none=False, **options)
    assert peak / 2**20 == pytest.approx(1615.9, abs=0.2)
