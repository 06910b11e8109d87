"""Layouts of devices: laws of steps and memory, impossible layouts, and the best one in the words of frameworks."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import forerun
from forerun.base.errors import InvalidSetupError, UsageError
from forerun.cost.communication.collectives import Collective, Group
from forerun.cost.communication.constants import LayoutConstants, load_layout_table
from forerun.cost.communication.data_parallel import Bucket, bucket_schedule
from forerun.cost.memory.units import unit_memory
from forerun.graph.blocks import blocks_of
from forerun.graph.graph import OpClass
from forerun.graph.shards import Shards, sharded_ops
from forerun.prediction.division import pipeline_s, reduced_backward, stage_units
from forerun.prediction.memory import layout_memory, memory_constants_of
from forerun.prediction.models import TracedModels, cost_model_of
from forerun.prediction.step import prepare
from forerun.prediction.unit_step import bucket_capacity_bytes, layout_step
from forerun.prediction.units import DividedModel
from forerun.question.devices.cluster import parse_cluster
from forerun.question.run import Run
from forerun.question.sharing import FsdpVersion, Handover, PipelineSchedule
from forerun.search.layouts import FRAMEWORKS, LayoutPlan

MODEL = "gpt:depth=4,width=512,vocabulary=4096"
SETTINGS: dict[str, Any] = {
    "precision": "bf16",
    "optimizer": "adamw",
    "sequence_length": 256,
    "batch_size": 4,
}
MODELS = TracedModels()


def run_of(device: str, **options: Any) -> Run:
    return Run.of(MODEL, device=device, **{**SETTINGS, **options})


def step_s(run: Run) -> float:
    return layout_step(
        DividedModel.of(MODELS.of(run)), run, cost_model_of(run), load_layout_table()
    ).step_s.value


@pytest.fixture(scope="module")
def traced() -> DividedModel:
    return DividedModel.of(MODELS.of(run_of("8xh100-sxm", parallel="dp=8")))


def test_weights_of_all_ranks_are_those_of_the_model(traced: DividedModel) -> None:
    blocks = traced.blocks
    total = blocks.weight_bytes.sum()
    divided = unit_memory(traced.model.graph, blocks, Shards(tensor=4), 1).weights
    replicated = blocks.weight_bytes[~blocks.weight_divided].sum()
    assert 4 * divided.sum() == pytest.approx(total + 3 * replicated)
    stages = stage_units(len(blocks.names), 3)
    assert [unit for stage in stages for unit in stage] == list(range(blocks.num_units))
    whole = unit_memory(traced.model.graph, blocks, Shards(), 1).weights
    assert sum(whole[list(stage)].sum() for stage in stages) == pytest.approx(total)


def test_work_of_tensor_parallel_devices_is_that_of_one(traced: DividedModel) -> None:
    graph = traced.model.graph
    ops = sharded_ops(graph, blocks_of(graph), Shards(tensor=4))
    products = graph.ops.gemm[:, 1:].any(axis=(1, 2))
    np.testing.assert_allclose(4 * ops.flops[products].sum(0), graph.ops.flops[products].sum(0))


def test_one_device_of_a_layout_takes_the_step_of_predict(traced: DividedModel) -> None:
    alone = forerun.predict(MODEL, device="h100-sxm", num_devices=1, parallel="tp=1", **SETTINGS)
    assert alone.step_time_s == forerun.predict(MODEL, device="h100-sxm", **SETTINGS).step_time_s
    run = run_of("8xh100-sxm", parallel="dp=8")
    single = replace(run, cluster=replace(run.cluster, num_devices_per_node=1))
    assert step_s(single) == pytest.approx(alone.step_time_s.value)


@pytest.mark.parametrize("parallel", ["dp=8", "tp=2,dp=4", "tp=8", "pp=2,dp=4", "cp=2,dp=4"])
def test_a_compiler_never_slows_a_layout(parallel: str) -> None:
    assert step_s(run_of("8xh100-sxm", parallel=parallel, compile=True)) <= step_s(
        run_of("8xh100-sxm", parallel=parallel)
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("devices", [2, 8])
def test_a_tensor_device_has_its_part_of_every_divided_stream(devices: int, compiled: bool) -> None:
    model = DividedModel.of(MODELS.of(run_of("8xh100-sxm", strategy="zero1", compile=compiled)))
    graph, blocks = model.model.graph, model.traced
    own = sharded_ops(graph, blocks, Shards(tensor=devices))
    streams = (graph.ops.gemm[:, 1:].sum(axis=(1, 2)) == 0) & (blocks.unit >= 0)
    for column in ("read_bytes", "write_bytes", "joined_bytes", "flops", "elements"):
        whole, part = (getattr(ops, column)[streams, 1].sum() for ops in (graph.ops, own))
        assert devices * part == pytest.approx(whole), column


def test_the_interval_of_known_dies_and_models_is_that_of_whole_steps() -> None:
    spread = load_layout_table().log_spread
    known, other = (
        forerun.predict(MODEL, device=device, strategy="zero1", intra="nvlink-4", **SETTINGS).step_time_s
        for device in ("8xh100-sxm", "8xl40s")
    )
    assert np.log(known.high / known.value) == pytest.approx(1.645 * spread, rel=1e-3)
    assert other.high / other.value > known.high / known.value


@pytest.mark.parametrize("axis", ["tp=1", "cp=1", "pp=1", "tp=1,pp=1,cp=1", "ep=1"])
def test_an_axis_of_one_changes_nothing(axis: str) -> None:
    plain = forerun.predict(MODEL, device="8xh100-sxm", parallel="dp=8", **SETTINGS)
    given = forerun.predict(MODEL, device="8xh100-sxm", parallel=f"{axis},dp=8", **SETTINGS)
    assert (given.step_time_s, given.peak_memory_bytes, given.breakdown) == (
        plain.step_time_s,
        plain.peak_memory_bytes,
        plain.breakdown,
    )


@pytest.mark.parametrize(("stages", "steps"), [(2, 4), (4, 8), (8, 8)])
def test_bubble_of_1f1b(stages: int, steps: int) -> None:
    whole = pipeline_s([3.0] * stages, [1.0] * stages, steps, PipelineSchedule.ONE_FORWARD_ONE_BACKWARD)
    assert 1 - 3.0 * steps / whole == pytest.approx((stages - 1) / (steps + stages - 1))
    for schedule in (PipelineSchedule.ZERO_BUBBLE, PipelineSchedule.INTERLEAVED):
        assert pipeline_s([3.0] * stages, [1.0] * stages, steps, schedule, 2) < whole


def test_a_balanced_split_leaves_blocks_to_other_stages_for_the_head(traced: DividedModel) -> None:
    for head in (0.0, 1.5, 4.0, 20.0):
        stages = stage_units(16, 4, head_blocks=head)
        assert [unit for units in stages for unit in units] == list(range(18))
        weights = [len(units) - (0 in units) + (head - 1) * (17 in units) for units in stages]
        even = [len(units) - (0 in units) + (head - 1) * (17 in units) for units in stage_units(16, 4)]
        assert max(weights) <= max(even)
    run = run_of("8xh100-sxm", parallel="pp=2,dp=4", accumulation=8, stage_split="balanced")
    assert sum(len(units) for units in traced.stages(run.layout)) == len(traced.blocks.names) + 2


def test_three_of_many_equal_blocks_say_as_much_as_all() -> None:
    run = run_of("8xh100-sxm", parallel="tp=2,pp=2,dp=2", accumulation=4)
    run = replace(run, model=replace(run.model, model="gpt:depth=5,width=128,vocabulary=512"))
    short, whole = (DividedModel.of(MODELS.of(run, setup)) for setup in (None, run.compute_setup))
    assert [(len(model.blocks.names), len(model.traced.names)) for model in (short, whole)] == [
        (5, 3),
        (5, 5),
    ]
    weights, constants = cost_model_of(run), memory_constants_of(run.cluster.device, run)
    steps = [layout_step(model, run, weights, load_layout_table()).step_s.value for model in (short, whole)]
    assert steps[0] == pytest.approx(steps[1], rel=0.02)
    graphs = [model.model.graph for model in (short, whole)]
    for name in ("num_parameters", "num_trainable_parameters", "model_flops", "recomputed_flops"):
        assert getattr(graphs[0], name) == pytest.approx(getattr(graphs[1], name)), name
    assert graphs[0].total_flops(4) == pytest.approx(
        graphs[1].total_flops(4), rel=1e-3
    )  # but updates of weights
    peaks = [
        [stage.peak_bytes.value for stage in layout_memory(model, run, constants)] for model in (short, whole)
    ]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-6)


def test_tensor_parallelism_waits_for_the_host_that_launches_collectives() -> None:
    run = run_of("8xh100-sxm", parallel="tp=8")
    launch_s = load_layout_table().constants.launch_s
    num_collectives = (
        5 * 2 * 4
    )  # gathering and scattering of two pairs of products in four blocks, both passes
    assert step_s(run) > num_collectives * launch_s > 0


@pytest.mark.parametrize("layout", ["tp=8", "pp=2,dp=4", "cp=8", "tp=2,pp=2,dp=2"])
def test_a_faster_link_never_slows(layout: str) -> None:
    slow, fast = (
        step_s(run_of("8xh100-sxm", parallel=layout, accumulation=4, intra=link))
        for link in ("pcie-4-x16", "nvlink-4")
    )
    assert fast < slow


def test_products_in_fp8_are_divided_as_those_in_half_precision_are() -> None:
    run = run_of("8xh100-sxm", parallel="tp=4,dp=2", precision="fp8")
    graph = MODELS.of(run).graph
    blocks = blocks_of(graph)
    plain = blocks_of(MODELS.of(run_of("8xh100-sxm", parallel="tp=4,dp=2")).graph)
    assert (blocks.weight_divided == plain.weight_divided).all()
    assert blocks.can_be_divided
    ops = sharded_ops(graph, blocks, Shards(tensor=4))
    products = graph.ops.gemm[:, 1:].any(axis=(1, 2))
    np.testing.assert_allclose(4 * ops.flops[products].sum(0), graph.ops.flops[products].sum(0))


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("overlap_tensor", {"parallel": "tp=8"}),
        ("overlap_tensor", {"parallel": "tp=4,dp=2", "recompute": "full", "sequence_parallel": False}),
        ("overlap_update", {"parallel": "dp=8", "strategy": "zero1", "bucket_mb": 5}),
    ],
)
def test_overlapped_collectives_hide_but_do_not_vanish(setting: str, options: dict[str, Any]) -> None:
    size = {"batch_size": 64, "intra": "pcie-4-x16"}
    runs = [run_of("8xh100-sxm", **options, **size, **{setting: value}) for value in (False, True)]
    model = DividedModel.of(MODELS.of(runs[0]))
    plain, hidden = (layout_step(model, run, cost_model_of(run), load_layout_table()) for run in runs)
    assert hidden.exposed_s < plain.exposed_s
    assert hidden.step_s.value < plain.step_s.value
    assert hidden.communication_s == pytest.approx(plain.communication_s)
    assert Run.of(MODEL, **{k: v for k, v in runs[1].json_fields().items() if k != "model"}) == runs[1]


def test_interleaved_groups_are_handed_over_beside_the_next() -> None:
    """What 1F1B waits for, though the interleaved schedule hands over twice as often."""
    options: dict[str, Any] = {"parallel": "pp=2,dp=4", "accumulation": 16, "batch_size": 64}
    ways = ({}, {"pipeline_schedule": "interleaved", "virtual_stages": 2})
    runs = [run_of("8xh100-sxm", **options, **way) for way in ways]
    model = DividedModel.of(MODELS.of(runs[0]))
    plain, interleaved = (layout_step(model, run, cost_model_of(run), load_layout_table()) for run in runs)
    assert plain.stages[0].handover_s > 0
    assert interleaved.stages[0].handover_s == 0
    assert interleaved.communication_s > plain.communication_s
    assert interleaved.step_s.value < plain.step_s.value


def test_buckets_of_zero_grow_with_the_replicas() -> None:
    def bucket_bytes(replicas: int, **settings: Any) -> float:
        return bucket_capacity_bytes(run_of("8xh100-sxm", **{"strategy": "zero1", **settings}), replicas, 2.0)

    # Megatron-LM: max(40 million, 1 million a replica) elements, here of bf16 that are reduced in fp32.
    assert bucket_bytes(8, precision="bf16") == 40e6 * 4
    assert bucket_bytes(256, precision="bf16") == 256e6 * 4
    for size in (5, 25):
        assert bucket_bytes(256, bucket_mb=size) == size * 2**20
    assert bucket_bytes(256, strategy="ddp") == 25 * 2**20


def test_slices_of_tensors_take_time_with_the_replicas() -> None:
    def sliced_s(devices: int) -> float:
        layout = {"strategy": "zero1", "parallel": f"tp={8 // devices}"}
        runs = [run_of("8xh100-sxm", **layout, slice_tensors=value) for value in (True, False)]
        model = DividedModel.of(MODELS.of(runs[0]))
        found = [layout_step(model, run, cost_model_of(run), load_layout_table()) for run in runs]
        return found[0].step_s.value - found[1].step_s.value

    assert sliced_s(8) == pytest.approx(4 * sliced_s(2), rel=0.02)
    assert sliced_s(8) > 0


def test_hosts_that_wait_at_every_handover_slow_pipelines_over_nodes() -> None:
    told = {}

    def steps(parallel: str, **cluster: str) -> list[forerun.Interval]:
        kinds = ({"handover": kind, "accumulation": 8, "parallel": parallel} for kind in Handover)
        found = [forerun.predict(MODEL, **cluster, **SETTINGS, **kind) for kind in kinds]
        told[parallel] = ["--handover ahead" in " ".join(each.notes) for each in found]
        return [each.step_time_s for each in found]

    nodes = {"device": "2x8xh100-sxm", "inter": "infiniband-ndr"}
    unknown, ahead, blocking = steps("tp=8,pp=2", **nodes)
    assert (unknown.value, unknown.low) == (ahead.value, ahead.low)
    assert ahead.high < blocking.value < unknown.high < blocking.high
    narrow = [step.value for step in steps("tp=2,pp=2,dp=4", **nodes)]
    assert narrow[2] / narrow[1] < blocking.value / ahead.value
    assert len({(step.value, step.high) for step in steps("tp=4,pp=2", device="8xh100-sxm")}) == 1
    assert told["tp=8,pp=2"] == [True, False, False]
    assert told["tp=4,pp=2"] == [False] * 3
    run = run_of("2x8xh100-sxm", inter="infiniband-ndr", parallel="tp=8,pp=2", handover="blocking")
    table, model, weights = load_layout_table(), DividedModel.of(MODELS.of(run)), cost_model_of(run)
    tables = [replace(table, constants=replace(table.constants, stall_nodes=number)) for number in (3, 2)]
    some, most = (layout_step(model, run, weights, each).step_s for each in tables)
    assert some.value < most.low
    assert most.high == pytest.approx(some.high)


def test_a_ring_of_tokens_carries_the_keys_that_attention_reads() -> None:
    """Four heads of queries that share one pair of keys and values send a quarter of what four pairs would."""
    run = run_of("2x8xh100-sxm", parallel="cp=16", inter="ethernet-10g", batch_size=64)
    model = DividedModel.of(MODELS.of(run))
    ops = model.model.graph.ops
    attends = ops.op_class == OpClass.ATTENTION
    read = ops.read_bytes.copy()
    read[attends] -= 0.75 * (ops.read_bytes - ops.write_bytes)[attends]
    shared = prepare(replace(model.model.graph, ops=replace(ops, read_bytes=read)))
    # Or where attention reads them repeated: products of a block make 1.5 times its queries instead of 3 times.
    written = ops.write_bytes.copy()
    written[(ops.op_class == OpClass.LINEAR) & (np.cumsum(attends) == 0)] *= 0.5
    repeated = prepare(replace(model.model.graph, ops=replace(ops, write_bytes=written)))
    whole, quarter, again = (
        layout_step(each, run, cost_model_of(run), load_layout_table()).stages[0].context_s
        for each in (model, DividedModel.of(shared), DividedModel.of(repeated))
    )
    assert quarter < 0.45 * whole  # small messages are far from the full rate
    assert again == pytest.approx(quarter, rel=0.1)


def test_devices_of_a_layout_wait_for_each_other_as_replicas_do() -> None:
    """1 + cv E_n of what each computes; E_8 = 1.4236 (Harter 1961, Biometrika 48)."""
    options: dict[str, Any] = {"parallel": "tp=2,dp=4", "batch_size": 64}
    alike, apart = (run_of("8xh100-sxm", **options, variation=value) for value in (0.0, 0.05))
    steps = [
        layout_step(DividedModel.of(MODELS.of(run)), run, cost_model_of(run), load_layout_table())
        for run in (alike, apart)
    ]
    waited_s = steps[1].step_s.value - steps[0].step_s.value
    assert waited_s == pytest.approx(0.05 * 1.4236 * steps[0].compute_s, rel=1e-3)


def test_copies_of_fsdp_are_those_of_its_version() -> None:
    run = run_of("8xh100-sxm", strategy="fsdp", precision="amp-bf16", accumulation=4)
    model = DividedModel.of(MODELS.of(run))
    found = {}
    for version in FsdpVersion:
        sharing = replace(run.sharing, fsdp_version=version)
        step = layout_step(model, replace(run, sharing=sharing), cost_model_of(run), load_layout_table())
        found[version] = step.step_s.value
        copied_s = next((part.time_s for part in step.parts if part.name == "copies of FSDP"), 0.0)
        assert sum(part.time_s for part in step.parts) == pytest.approx(step.step_s.value)
        # Bytes of a weight in half precision: those of fp32 gradients, twice, and their making; two copies and one.
        moved = {"fsdp1": 2 * 2 + 6 + 2 * 4, "fsdp2": 2 * 2 + 2 * 2 + 6, "zero-copy": 0}[version]
        # And the part of a device is summed in all micro-steps but one.
        whole = 4 * moved + 3 * (2 + 2 * 4) / 8
        weights = traced_weights(model) / 2
        assert copied_s == pytest.approx(whole * weights / (0.82 * 3.352e12), rel=0.01)
    assert found["zero-copy"] < found["fsdp2"] < found["fsdp1"]


def test_all_micro_steps_but_the_first_sum_gradients() -> None:
    def sums_s(number: int, **options: Any) -> float:
        run = run_of("8xh100-sxm", precision="amp-bf16", accumulation=number, **options)
        model = DividedModel.of(MODELS.of(run))
        step = layout_step(model, run, cost_model_of(run), load_layout_table())
        assert sum(part.time_s for part in step.parts) == pytest.approx(step.step_s.value)
        copies = sum(
            part.time_s for part in step.parts if part.name in ("sums of gradients", "copies of FSDP")
        )
        return copies * 0.82 * 3.352e12 / traced_weights(model) * 2  # bytes a weight

    # The gradient in half precision, and two of those in fp32: whole in ZeRO's first stage, a part in its second.
    assert sums_s(1, strategy="zero1") == 0
    assert sums_s(4, strategy="zero1") == pytest.approx(3 * 10, rel=0.01)
    assert sums_s(4, strategy="zero2") == pytest.approx(3 * 10 / 8, rel=0.01)
    assert sums_s(4, strategy="fsdp") - 4 * sums_s(1, strategy="fsdp") == pytest.approx(3 * 10 / 8, rel=0.1)
    # Megatron-LM's products add to the sum themselves.
    assert sums_s(4, parallel="pp=2,dp=4") == 0


def traced_weights(model: DividedModel) -> float:
    return float(model.memory(Shards(), 1).weights.sum())


def test_gathered_tokens_are_kept_or_gathered_again(traced: DividedModel) -> None:
    runs = [run_of("8xh100-sxm", parallel="tp=8", keep_gathered=value) for value in (False, True)]
    steps = [layout_step(traced, run, cost_model_of(run), load_layout_table()) for run in runs]
    assert steps[1].communication_s < steps[0].communication_s
    held = [
        layout_memory(traced, run, memory_constants_of(run.cluster.device, run))[0].allocated_bytes
        for run in runs
    ]
    tokens = 4 * 256 * 512 * 2  # samples, tokens, width, bytes
    assert held[1] - held[0] == pytest.approx(4 * 2 * tokens * 7 / 8, rel=0.01)


def test_input_and_head_may_count_as_blocks() -> None:
    stages = stage_units(126, 8, counts_ends=True)
    assert [unit for units in stages for unit in units] == list(range(128))
    assert {len(units) for units in stages} == {16}


def test_a_head_waits_for_no_other_group_of_blocks(traced: DividedModel) -> None:
    def last_activations(**options: Any) -> float:
        run = run_of("8xh100-sxm", parallel="pp=2,dp=4", accumulation=8, **options)
        memory = layout_memory(traced, run, memory_constants_of(run.cluster.device, run))
        return next(part.size_bytes for part in memory[-1].parts if part.name == "activations")

    interleaved = last_activations(pipeline_schedule="interleaved", virtual_stages=2)
    run = run_of("8xh100-sxm", parallel="dp=8")
    kept = traced.memory(Shards(), run.setup.batch_size_per_device).kept
    # Of two groups of one block each, (2 - 1) 2 + 1 are in flight: one and a half times the blocks of the stage.
    assert interleaved - last_activations() == pytest.approx(0.5 * kept[3:5].sum(), rel=0.01)


def test_the_last_stage_has_gradients_of_an_embedding_that_it_shares(traced: DividedModel) -> None:
    run = run_of("8xh100-sxm", parallel="pp=2,dp=4", accumulation=8)
    memory = layout_memory(traced, run, memory_constants_of(run.cluster.device, run))
    held = [sum(p.size_bytes for p in stage.parts if p.name == "gradients") for stage in memory]
    whole = traced.memory(Shards(), 1)
    assert sum(held) == pytest.approx(whole.gradients.sum() + whole.tied)


def test_what_the_host_holds_is_not_on_the_device_and_deepspeed_has_buckets(traced: DividedModel) -> None:
    def parts(**options: Any) -> dict[str, float]:
        run = run_of("8xh100-sxm", **options)
        model = DividedModel.of(MODELS.of(run)) if "offload" in options else traced
        (stage,) = layout_memory(model, run, memory_constants_of(run.cluster.device, run))
        return {part.name: part.size_bytes for part in stage.parts}

    here = parts(strategy="fsdp")
    assert {"weights", "gradients", "optimizer state"} - here.keys() <= {"gradients"}
    assert "gradient buckets" not in here
    away = parts(strategy="fsdp", offload="parameters")
    assert not {"weights", "gradients", "optimizer state"} & away.keys()
    assert away["gathered weights of input and head"] == here["gathered weights of input and head"]
    # reduce_bucket_size of 5e8 gradients in half precision, and fp32 weights beside AdamW's two moments
    zero2, zero3 = parts(strategy="zero2"), parts(strategy="zero3")
    assert zero2["gradient buckets"] == 2 * zero3["gradient buckets"] == 2e9
    assert zero2["optimizer state"] == zero3["optimizer state"]


def test_a_fused_update_has_no_temporaries() -> None:
    def at_update(kind: str) -> float:
        run = run_of(
            "2xh100-sxm", parallel="dp=2", sequence_length=16, batch_size=1, optimizer_implementation=kind
        )
        (stage,) = layout_memory(
            DividedModel.of(MODELS.of(run)), run, memory_constants_of(run.cluster.device, run)
        )
        return stage.allocated_bytes

    assert at_update("fused") < at_update("foreach")


def test_gradients_beside_master_weights_are_in_fp32_unless_they_are_reduced_in_half() -> None:
    def gradients(**options: Any) -> float:
        run = run_of(
            "8xh100-sxm",
            parallel="tp=2,dp=4",
            accumulation=2,
            **{"strategy": "zero1", "master_weights": "fp32", **options},
        )
        held = layout_memory(
            DividedModel.of(MODELS.of(run)), run, memory_constants_of(run.cluster.device, run)
        )[0]
        return sum(part.size_bytes for part in held.parts if part.name == "gradients")

    assert gradients() == pytest.approx(2 * gradients(reduce_precision="half"), rel=0.05)
    assert gradients(master_weights="bf16") == gradients(reduce_precision="half")
    assert gradients(strategy="zero2") == gradients(strategy="zero2", reduce_precision="half")


def test_fully_sharded_memory_falls_with_devices() -> None:
    two, eight = (
        forerun.predict(MODEL, device=f"{number}xh100-sxm", strategy="fsdp", **SETTINGS) for number in (2, 8)
    )
    parts = [{part.name: part.size_bytes for part in found.memory_parts} for found in (two, eight)]
    assert parts[0]["optimizer state"] == pytest.approx(4 * parts[1]["optimizer state"])
    assert eight.parallelism is not None
    assert eight.parallelism.dp == 8
    assert sum(part.time_s for part in eight.breakdown) == pytest.approx(eight.step_time_s.value)


def test_weights_that_are_loaded_whole_need_room_beside_their_shards() -> None:
    def found(tokens: int, **options: Any) -> Any:
        asked = {**SETTINGS, "sequence_length": tokens, "batch_size": 1, "lora": 4}
        return forerun.predict(MODEL, device="8xh100-sxm", strategy="fsdp", **asked, **options)

    plain, whole = found(8), found(8, load_whole=True)
    parts = {part.name: part.size_bytes for part in whole.memory_parts}
    assert parts["whole weights while they are loaded"] == pytest.approx(8 * parts["weights"])
    assert whole.peak_memory_bytes.value > plain.peak_memory_bytes.value
    assert sum(parts.values()) == pytest.approx(whole.peak_memory_bytes.value)
    # A step that needs more is as it was.
    assert found(256, load_whole=True).peak_memory_bytes == found(256).peak_memory_bytes


def test_states_in_eight_bits_are_as_large_beside_fp32_weights() -> None:
    def state(precision: str, optimizer: str) -> float:
        asked = {**SETTINGS, "strategy": "fsdp", "precision": precision, "optimizer": optimizer}
        found = forerun.predict(MODEL, device="8xh100-sxm", **asked)
        return next(part.size_bytes for part in found.memory_parts if part.name == "optimizer state")

    assert state("amp-bf16", "adamw") == pytest.approx(2 * state("bf16", "adamw"))
    assert state("amp-bf16", "adamw-8bit") == pytest.approx(state("bf16", "adamw-8bit"))


def test_gradients_that_are_reduced_once_stay_whole_until_then() -> None:
    def found(number: int, **options: Any) -> Any:
        asked = {**SETTINGS, "batch_size": 1, "strategy": "fsdp", "master_weights": "bf16", **options}
        return forerun.predict(MODEL, device=f"{number}xh100-sxm", **asked)

    parts = [
        {part.name: part.size_bytes for part in found(number, accumulation=4, reduce_once=True).memory_parts}
        for number in (2, 8)
    ]
    # Weights and states are divided, gradients of the last micro-step are not yet.
    assert parts[0]["optimizer state"] == pytest.approx(4 * parts[1]["optimizer state"])
    assert parts[1]["gradients"] > 0.9 * 8 * parts[1]["weights"]
    each = found(8, accumulation=4)
    assert each.peak_memory_bytes.value < found(8, accumulation=4, reduce_once=True).peak_memory_bytes.value
    once = found(8, reduce_once=True)
    assert (once.peak_memory_bytes, once.step_time_s) == (found(8).peak_memory_bytes, found(8).step_time_s)


def test_reentrant_checkpoints_of_frozen_units_keep_inputs_and_their_gradients() -> None:
    def held(**options: Any) -> float:
        asked = {**SETTINGS, "sequence_length": 512, "batch_size": 8, "lora": 4, "recompute": "full"}
        found = forerun.predict(
            "gpt:depth=24,width=512,vocabulary=256",
            device="8xh100-sxm",
            strategy="fsdp",
            **{**asked, **options},
        )
        return float(sum(part.size_bytes for part in found.memory_parts if part.name != "fragmentation"))

    plain, reentrant = held(fsdp_version="fsdp1"), held(fsdp_version="fsdp1", reentrant=True)
    # At the first block, the inputs of those behind it and a gradient of each are there, but the one that flows.
    assert reentrant - plain == pytest.approx((24 - 2) * 2 * 8 * 512 * 512, rel=0.05)
    assert held(reentrant=True) == held()  # fully_shard has no such hooks


def test_the_host_bounds_small_units_of_fsdp_and_the_more_the_more_units_there_are() -> None:
    def found(batch_size: int = 1, **options: Any) -> float:
        asked = {
            **SETTINGS,
            "sequence_length": 64,
            "strategy": "fsdp",
            "lora": 4,
            "batch_size": batch_size,
            **options,
        }
        return float(forerun.predict(MODEL, device="8xh100-sxm", **asked).step_time_s.value)

    plain = found()
    # Four blocks and two ends, and two matrices of each of four blocks' products, at least.
    assert plain > 6 * 1.7e-3
    assert found(wrap_adapters=True) > plain + 16 * 0.7e-3
    # Under a slow host a step takes as many times longer where launching bounds it, and as long where it does not.
    assert found(host_slowdown=3.0) == pytest.approx(3 * plain, rel=0.15)
    assert found(2048, host_slowdown=1.5) == pytest.approx(found(2048), rel=0.02)


def test_temporaries_of_the_update_are_divided_once_among_the_devices_that_share_it() -> None:
    def temporaries_bytes(strategy: str) -> float:
        # In one format: ZeRO-2 would update fp32 copies of weights in half precision.
        run = run_of(
            "2xh100-sxm",
            parallel="dp=2",
            strategy=strategy,
            sequence_length=16,
            batch_size=1,
            master_weights="bf16",
        )
        (stage,) = layout_memory(
            DividedModel.of(MODELS.of(run)), run, memory_constants_of(run.cluster.device, run)
        )
        return next(part.size_bytes for part in stage.parts if part.name == "temporaries")

    whole = temporaries_bytes("ddp")
    assert [temporaries_bytes(name) for name in ("zero1", "zero2", "fsdp")] == pytest.approx([whole / 2] * 3)


def test_states_of_mixed_precision_are_those_of_their_sources() -> None:
    """Megatron-LM, docs/source/api-guide/dist_optimizer.md: 6 + 12/d bytes a weight; Rajbhandari et al. 2020: 16/d."""
    options: dict[str, Any] = {
        "precision": "amp-bf16",
        "sequence_length": 16,
        "batch_size": 1,
        "accumulation": 2,
    }
    for strategy, expected in (("zero1", 6 + 12 / 8), ("fsdp", 16 / 8)):
        found = forerun.predict(MODEL, device="8xh100-sxm", strategy=strategy, **{**SETTINGS, **options})
        parts = {part.name: part.size_bytes for part in found.memory_parts}
        held = sum(parts[name] for name in ("weights", "gradients", "optimizer state"))
        assert held / found.num_parameters == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("options", [{"strategy": "zero2"}, {"parallel": "tp=2,pp=2", "accumulation": 4}])
def test_the_largest_batch_of_a_layout_is_the_last_that_fits(options: dict[str, Any]) -> None:
    def fits(batch_size: float) -> str:
        settings = {**SETTINGS, "batch_size": int(batch_size), **options}
        return forerun.predict(MODEL, device="8xrtx-3060", intra="pcie-4-x16", **settings).fits

    found = forerun.predict(
        MODEL, device="8xrtx-3060", intra="pcie-4-x16", **SETTINGS, **options
    ).max_batch_size
    assert found is not None
    assert found.low <= found.value <= found.high
    assert [fits(size) for size in (found.low, found.low + 1, found.high, found.high + 1)] == [
        "yes",
        "close",
        "close",
        "no",
    ]


def test_gradients_are_reduced_while_a_unit_goes_on() -> None:
    one = reduced_backward([1.0, 1.0], [0.5, 0.5], [1, 1])
    assert (one.exposed_s, one.busy_s) == (0.5, 1.0)
    assert reduced_backward([1.0, 1.0], [0.5, 0.5], [5, 5]).exposed_s == pytest.approx(0.1)
    buckets = [Bucket(size_bytes=2.0, ready_share=(number + 1) / 8) for number in range(8)]
    slow = reduced_backward([4.0], [16.0], [8]).exposed_s
    assert slow == pytest.approx(bucket_schedule(buckets, 4.0, lambda size: size).exposed_s)


def test_frozen_weights_stay_half_and_scales_are_on_every_device() -> None:
    pytest.importorskip("peft")

    def weights_bytes(**options: Any) -> float:
        run = run_of("2xh100-sxm", strategy="fsdp", lora=8, **options)
        memory = layout_memory(
            DividedModel.of(MODELS.of(run)), run, memory_constants_of(run.cluster.device, run)
        )
        return next(part.size_bytes for part in memory[0].parts if part.name == "weights")

    plain = weights_bytes()
    assert weights_bytes(precision="amp-bf16") == plain
    blocks = 12 * 4 * 512**2  # weights of the linear layers
    scales = 4 * blocks / 64
    assert plain - weights_bytes(quantize="nf4") == pytest.approx(1.5 * blocks / 2 - scales, rel=0.02)


def test_the_worst_stage_is_named() -> None:
    found = forerun.predict(MODEL, device="8xh100-sxm", parallel="pp=4", accumulation=8, **SETTINGS)
    stages = found.parallelism
    assert stages is not None
    assert found.peak_memory_bytes is not None
    peaks = [stage.peak_memory_bytes.value for stage in stages.stages]
    assert peaks[stages.worst_stage] == max(peaks) == found.peak_memory_bytes.value
    assert [stage.num_blocks for stage in stages.stages] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parallel": "tp=3,dp=2"}, "multiple of 3 devices, got 8"),
        ({"parallel": "tp=2,dp=2"}, "give dp=4"),
        ({"parallel": "pp=8", "accumulation": 8}, "give pp=4 or less"),
        ({"parallel": "tpx=2"}, "unknown axis 'tpx'"),
        ({"parallel": "tp=2", "virtual_stages": 2}, "there is no pp"),
        ({"parallel": "tp=2", "stage_split": "balanced"}, "there is no pp"),
        ({"strategy": "fsdp", "shard_size": 4}, "belongs to hsdp"),
        ({"strategy": "ddp", "reshard": False}, "belongs to fsdp"),
        ({"strategy": "zero1", "fsdp_version": "fsdp1"}, "belongs to fsdp"),
        ({"strategy": "ddp", "overlap_update": True}, "belongs to zero1"),
        ({"strategy": "zero2", "slice_tensors": True}, "belongs to zero1"),
        ({"parallel": "dp=8", "overlap_tensor": True}, "there is no tp"),
        (
            {"parallel": "pp=2", "pipeline_schedule": "interleaved", "virtual_stages": 2, "accumulation": 3},
            "give --accumulation 4",
        ),
    ],
)
def test_impossible_layouts_say_what_would_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        forerun.predict(MODEL, device="8xh100-sxm", **{**SETTINGS, **options})


def test_tensor_parallelism_must_divide_the_heads() -> None:
    with pytest.raises(UsageError, match="does not divide the 8 heads of attention; give tp=4"):
        forerun.predict(MODEL, device="6xh100-sxm", parallel="tp=6", **SETTINGS)


EXPERT_SETTINGS = {**SETTINGS, "batch_size": 2}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, DividedModel]:
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 1024, "max_position_embeddings": 1024,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("experts") / "config.json"
    path.write_text(json.dumps(config))
    name = f"hf:{path}"
    run = Run.of(name, device="8xh100-sxm", parallel="dp=8", **EXPERT_SETTINGS)
    return name, DividedModel.of(MODELS.of(run))


def test_experts_of_all_ranks_are_those_of_the_model(experts: tuple[str, DividedModel]) -> None:
    _, model = experts
    graph, blocks = model.model.graph, model.blocks
    assert blocks.num_experts == 8
    total, of_experts = blocks.weight_bytes.sum(), blocks.weight_bytes[blocks.weight_expert].sum()
    assert of_experts == 2 * 8 * 3 * 256 * 512 * 2  # blocks, experts, matrices, sizes, bytes
    held = unit_memory(graph, blocks, Shards(expert=4), 1)
    assert held.weights.sum() == pytest.approx(total - of_experts * 3 / 4)
    assert held.gradients.sum() == pytest.approx(held.weights.sum())
    both = unit_memory(graph, blocks, Shards(expert=4, tensor=2), 1)
    left = blocks.weight_bytes[~blocks.weight_divided].sum()
    assert both.weights.sum() == pytest.approx(of_experts / 8 + (total - of_experts - left) / 2 + left)
    products = blocks.expert_product
    ops = sharded_ops(graph, blocks, Shards(expert=4))
    np.testing.assert_allclose(ops.flops[products], graph.ops.flops[products])
    np.testing.assert_allclose(ops.gemm[products, 0, 0], 2)
    assert (ops.read_bytes[products, 0] <= graph.ops.read_bytes[products, 0]).all()


def test_whole_experts_are_divided_among_the_devices_of_tp_as_well(
    experts: tuple[str, DividedModel],
) -> None:
    name, model = experts
    blocks, graph = model.traced, model.model.graph
    parts, whole = Shards(tensor=2, expert=4), Shards(tensor=2, expert=8, whole_experts=True)
    np.testing.assert_allclose(
        unit_memory(graph, blocks, parts, 1).weights, unit_memory(graph, blocks, whole, 1).weights
    )
    work = [
        sharded_ops(graph, blocks, shards).flops[blocks.expert_product].sum() for shards in (parts, whole)
    ]
    assert work[0] == pytest.approx(work[1])

    def found(axes: str, **options: Any) -> Any:
        settings = EXPERT_SETTINGS | options
        return forerun.predict(name, device="8xh100-sxm", parallel=axes, strategy="zero1", **settings)

    divided, folded = found("tp=2,ep=4"), found("tp=2,ep=8", whole_experts=True)
    sums = [
        {part.name: part.time_s for part in step.breakdown}["tensor parallelism"]
        for step in (divided, folded)
    ]
    assert sums[1] < sums[0]
    states = [
        {part.name: part.size_bytes for part in step.memory_parts}["optimizer state"]
        for step in (divided, folded)
    ]
    assert states[0] == pytest.approx(states[1])
    assert found("ep=8", whole_experts=True).step_time_s == found("ep=8").step_time_s
    run = Run.of(name, device="8xh100-sxm", parallel="tp=2,ep=8", whole_experts=True, **EXPERT_SETTINGS)
    assert "--expert-tensor-parallel-size 1" in FRAMEWORKS["megatron"](run)


def test_tokens_that_go_once_to_a_device_are_fewer_than_their_experts(
    experts: tuple[str, DividedModel],
) -> None:
    def found(**options: Any) -> Any:
        asked = {"device": "2x4xh100-sxm", "inter": "infiniband-ndr", "parallel": "dp=8,ep=8"}
        return forerun.predict(experts[0], **asked, **EXPERT_SETTINGS, **options)

    each, merged = (
        sum(part.time_s for part in answer.breakdown if part.name == "expert parallelism")
        for answer in (found(), found(merge_routes=True))
    )
    assert 0 < merged < each
    # With one expert a token there is nothing to merge, and without ep nothing to send.
    group = Group(num_devices=8, intra_bytes_per_s=1e11, constants=LayoutConstants())
    assert group.dispatch_s(1e8, 1.0) == pytest.approx(group.time_s(Collective.ALL_TO_ALL, 1e8))
    assert group.dispatch_s(1e8, 8.0) < group.dispatch_s(1e8, 2.0)
    with pytest.raises(InvalidSetupError, match="there is no ep"):
        run_of("2xh100-sxm", parallel="dp=2", merge_routes=True)


def test_experts_that_are_divided_take_less_memory_and_exchange_tokens(
    experts: tuple[str, DividedModel],
) -> None:
    name, _ = experts

    def found(parallel: str, **options: Any) -> Any:
        return forerun.predict(name, device="8xh100-sxm", parallel=parallel, **EXPERT_SETTINGS, **options)

    whole, divided = found("dp=8"), found("dp=8,ep=8")
    assert divided.peak_memory_bytes.value < whole.peak_memory_bytes.value
    parts = {part.name: part.time_s for part in divided.breakdown}
    assert parts["expert parallelism"] > 0
    # Of four micro-steps one has nothing beside it, of one none.
    exposed = [
        next(
            part.time_s for part in found("dp=8,ep=8", **ways).breakdown if part.name == "expert parallelism"
        )
        for ways in (
            {"accumulation": 4},
            {"accumulation": 4, "overlap_experts": True},
            {"overlap_experts": True},
        )
    ]
    assert exposed[0] == pytest.approx(4 * exposed[1])
    assert exposed[2] == pytest.approx(parts["expert parallelism"])
    assert not any(part.name == "expert parallelism" for part in whole.breakdown)
    assert sum(parts.values()) == pytest.approx(divided.step_time_s.value)
    # What is divided among all replicas anyway is the same with and without it.
    states = [
        {part.name: part.size_bytes for part in found(axes, strategy="fsdp").memory_parts}["optimizer state"]
        for axes in ("dp=8", "dp=8,ep=4")
    ]
    assert states[0] == pytest.approx(states[1])
    assert any("tokens are assumed to spread evenly" in note for note in divided.notes)
    run = Run.of(name, device="8xh100-sxm", parallel="dp=8,ep=8", strategy="fsdp", **EXPERT_SETTINGS)
    assert tomllib.loads(FRAMEWORKS["torchtitan"](run))["parallelism"]["expert_parallel_degree"] == 8
    assert "--expert-model-parallel-size 8" in FRAMEWORKS["megatron"](run)


def test_gradients_of_experts_are_reduced_among_the_devices_that_have_the_same_ones(
    experts: tuple[str, DividedModel],
) -> None:
    name, model = experts
    two, four = (model.memory(Shards(expert=number), 1) for number in (2, 4))
    for name_of in ("weights", "gradients"):
        halved = getattr(two, name_of) - getattr(four, name_of)
        np.testing.assert_allclose(getattr(two, name_of) * two.expert_share, 2 * halved)

    def synchronised_s(axes: str, **options: Any) -> float:
        asked = {"device": "2x4xh100-sxm", "inter": "infiniband-ndr", "parallel": axes}
        answer = forerun.predict(name, **asked, **EXPERT_SETTINGS, **options)
        return sum(part.time_s for part in answer.breakdown if part.name == "gradient synchronisation")

    # Four devices of a node that divide the experts have the node's link to other nodes each to a quarter.
    link = parse_cluster("2x4xh100-sxm", inter="infiniband-ndr").inter_link
    assert link is not None
    each_s = (four.gradients * four.expert_share).sum() / (link.usable_bytes_per_s / 4)
    assert each_s < synchronised_s("dp=8,ep=4") < 4 * each_s
    # Experts that every device has for itself need no reduction.
    assert synchronised_s("dp=8,ep=8") < synchronised_s("dp=8")


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("ep=16", "give ep=8"),
        ("tp=4,ep=4", "give ep=2"),
        ("dp=7,ep=7", "ep=7 does not divide the 8 experts; give ep=4"),
    ],
)
def test_impossible_numbers_of_expert_devices(
    experts: tuple[str, DividedModel], axes: str, words: str
) -> None:
    devices = 7 if "7" in axes else 8
    with pytest.raises(UsageError, match=words):
        forerun.predict(experts[0], device=f"{devices}xh100-sxm", parallel=axes, **EXPERT_SETTINGS)


def test_models_without_experts_refuse_to_divide_them() -> None:
    with pytest.raises(UsageError, match="leave ep out"):
        forerun.predict(MODEL, device="8xh100-sxm", parallel="ep=2", **SETTINGS)


@pytest.fixture(scope="module")
def plan() -> LayoutPlan:
    return forerun.layouts(
        MODEL, device="8xh100-sxm", global_batch=64, recompute="none",
        **{name: value for name, value in SETTINGS.items() if name != "batch_size"},
    )  # fmt: skip


def test_the_best_layout_is_the_fastest_and_on_the_front(plan: LayoutPlan) -> None:
    times = [point.step_time_s.value for point in plan.best]
    assert times == sorted(times)
    assert plan.front[0].step_time_s == plan.best[0].step_time_s
    assert plan.num_compared >= plan.num_fitting >= len(plan.best) == 5
    assert {point.run.batch_size_global for point in plan.best} == {64}


def test_the_best_layout_in_the_words_of_frameworks(plan: LayoutPlan) -> None:
    run = run_of("8xh100-sxm", strategy="zero1", accumulation=2)
    found = json.loads(FRAMEWORKS["deepspeed"](run))
    assert found["zero_optimization"]["stage"] == 1
    assert found["train_batch_size"] == 64 == 4 * 2 * 8
    pipe = run_of("8xh100-sxm", parallel="tp=2,pp=2", strategy="zero1", accumulation=4)
    parsed = tomllib.loads(FRAMEWORKS["torchtitan"](pipe))
    assert parsed["parallelism"]["tensor_parallel_degree"] == 2
    assert parsed["training"]["global_batch_size"] == 32
    assert "--pipeline-model-parallel-size 2" in FRAMEWORKS["megatron"](pipe)
    assert "--nproc-per-node=8" in plan.files["torchrun"]
    with pytest.raises(InvalidSetupError, match="take megatron"):
        FRAMEWORKS["deepspeed"](pipe)


def test_advice_names_changes_that_help() -> None:
    found = forerun.advise(MODEL, device="h100-sxm", **{**SETTINGS, "recompute": "full"})
    assert 1 <= len(found.changes) <= 3
    gains = [change.gain for change in found.changes]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 0
    assert all(change.fits == "yes" for change in found.changes)
