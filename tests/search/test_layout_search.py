"""Search of layouts: what is compared, in which order, and what is said of those that may not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forerun
from forerun.prediction.models import TracedModels
from forerun.prediction.units import DividedModel
from forerun.question.run import Run
from forerun.search.layout_search import LayoutPoint, LayoutSpace, chosen_points, layout_changes, variants
from forerun.search.layouts import LayoutPlan

MODEL = "gpt:depth=8,width=256,vocabulary=1024"


def run_of(**options: object) -> Run:
    settings = {"precision": "bf16", "optimizer": "adamw", "sequence_length": 256, "batch_size": 4}
    return Run.of(MODEL, device="2x4xh100-sxm", inter="infiniband-ndr", **{**settings, **options})


@pytest.fixture(scope="module")
def space() -> LayoutSpace:
    return LayoutSpace.of(DividedModel.of(TracedModels().of(run_of(parallel="dp=8", strategy="zero1"))), 32)


@pytest.fixture(scope="module")
def plan() -> LayoutPlan:
    return forerun.layouts(
        MODEL, device="2x4xh100-sxm", inter="infiniband-ndr", precision="bf16", sequence_length=256,
        global_batch=32, recompute="none",
    )  # fmt: skip


def test_a_model_of_which_three_blocks_were_traced_is_divided_as_a_whole(space: LayoutSpace) -> None:
    assert (space.num_blocks, space.can_be_divided) == (8, True)
    parallel = {change["parallel"] for change in layout_changes(run_of(strategy="zero1"), space)}
    assert {"dp=8", "tp=4,dp=2", "tp=2,dp=2,pp=2", "pp=8"} <= parallel


def test_all_samples_of_a_device_at_once_are_among_the_micro_batches(space: LayoutSpace) -> None:
    run = run_of(strategy="zero1")
    for batch, tokens in ((24, 4096), (96, 512), (256, None), (1000, None)):
        own = replace(space, global_batch=batch * run.cluster.num_devices, num_tokens=tokens)
        sizes = {
            c["batch_size"]
            for c in layout_changes(run, own)
            if c["parallel"] == f"dp={run.cluster.num_devices}"
        }
        assert max(sizes) == batch
        assert all(batch % size == 0 for size in sizes)


def test_variants_keep_devices_and_batch(space: LayoutSpace) -> None:
    run = run_of(parallel="pp=2,dp=4", strategy="zero1", accumulation=4)
    changed = [run.with_(**change) for change in variants(run, space)]
    assert {one.sharing.strategy for one in changed} == {"zero1", "fsdp"}
    assert {one.layout.schedule for one in changed} == {"1f1b", "zero-bubble", "interleaved"}
    assert {one.layout.virtual_stages for one in changed} == {1, 4}
    assert {one.batch_size_global for one in changed} == {run.batch_size_global}
    tokens = run_of(parallel="cp=4,dp=2", strategy="zero1")
    assert [change["context_parallel"] for change in variants(tokens, space)] == ["ulysses"]
    experts = replace(space, num_experts=8)
    spread = run_of(parallel="dp=8,ep=2", strategy="zero1")
    assert [change["parallel"] for change in variants(spread, experts)] == ["dp=8,ep=8"]


def test_what_is_sure_to_fit_comes_first(plan: LayoutPlan) -> None:
    def changed(point: LayoutPoint, step_share: float, fits: str) -> LayoutPoint:
        return replace(point, step_time_s=point.step_time_s.scaled(step_share), fits=fits)

    best = plan.best[0]
    points = [changed(best, 0.5, "close"), changed(best, 0.8, "yes"), changed(best, 0.1, "no"), best]
    chosen, front = chosen_points(points, 3)
    assert chosen == (points[1], points[3], points[0])
    assert front == (points[0],)


def test_a_layout_says_its_room_and_what_a_failure_would_be(plan: LayoutPlan) -> None:
    assert all(point.room_bytes > 0 and not point.failure for point in plan.best)
    tight = forerun.layouts(
        "gpt:depth=8,width=4096", device="4xt4", precision="amp", sequence_length=512, global_batch=4,
        recompute="none", top=40,
    )  # fmt: skip
    unsure = [point for point in tight.best if point.fits == "close"]
    assert all(point.room_bytes < 0 and "may run out of memory by up to" in point.failure for point in unsure)


def test_a_model_without_repeated_blocks_is_shared_among_devices_and_computes_nothing_again(tmp_path) -> None:
    net = tmp_path / "net.py"
    net.write_text("import torch\ndef make(): return torch.nn.Linear(64, 64), torch.zeros(4, 64)\n")
    asked = {"model": f"{net}:make", "device": "4xl4"}
    best = forerun.layouts(**asked, batch_size=32).best[0]
    assert (best.parallel, best.recompute) == ("dp=4", "none")
    alone = forerun.predict(
        **asked,
        batch_size=best.batch_size,
        accumulation=best.accumulation,
        strategy=best.strategy,
        parallel="dp=4",
    )
    assert best.step_time_s.value == pytest.approx(alone.step_time_s.value, rel=1e-9)
