"""Whole plans on real traces: they say what ``predict`` says, and answer what was asked."""

from __future__ import annotations

import numpy as np
import pytest

import forerun
from forerun.base.errors import InvalidSetupError, UnknownDeviceError, UnknownModelError
from forerun.prediction.run_step import LOADER_BOUND_NOTE
from forerun.search.plan_answer import Plan

MODELS = "cnn:depth=2..3,base_filters=32"
QUESTION = {
    "devices": "t4,a100-sxm4-40gb",
    "batch_sizes": (32, 96, 128),
    "dataset": "cifar10",
    "epochs": 3,
    "price_usd_per_hour": {"t4": 0.35, "a100-sxm4-40gb": 1.5},
}
QUANTITIES = ("step_time_s", "throughput_samples_per_s", "epoch_time_s", "job_time_s", "cost_usd")


def plan(models=MODELS, **changes) -> Plan:
    return forerun.plan(models, **{**QUESTION, **changes})


@pytest.fixture(scope="module")
def found():
    return plan(num_points=24)


def shown(found):
    return {*found.points, *found.pareto, *found.best_by_device, found.chosen}


def test_every_combination_is_a_candidate(found):
    assert found.num_candidates == 2 * 2 * 3 * 2 == len(found.candidates)
    assert found.num_feasible == 24
    assert found.rejected == ()


def test_every_printed_point_equals_predict_to_one_per_cent(found):
    for point in shown(found):
        own = forerun.predict(
            point.model,
            device=point.device,
            batch_size=point.batch_size_per_device,
            precision=point.precision,
            dataset="cifar10",
            epochs=3,
            price_usd_per_hour=QUESTION["price_usd_per_hour"][point.device],
        )
        for name in QUANTITIES:
            theirs, ours = getattr(own, name), getattr(point, name)
            for end in ("value", "low", "high"):
                assert getattr(ours, end) == pytest.approx(getattr(theirs, end), rel=0.01), (name, end)
        assert point.energy_j.value == pytest.approx(own.energy_j.value, rel=0.01)
        assert point.peak_memory_bytes.value == pytest.approx(own.peak_memory_bytes.value, rel=0.01)
        assert (point.fits, point.provenance) == (own.fits, own.provenance)


def test_candidates_of_the_grid_agree_with_the_exact_points(found):
    grid = {
        (c.model, c.device, c.batch_size_per_device, c.precision): c for c in plan(exact=False).candidates
    }
    for point in found.points:
        near = grid[point.model, point.device, point.batch_size_per_device, point.precision]
        assert near.step_time_s == pytest.approx(point.step_time_s.value, rel=1e-6)
        assert near.job_time_s == pytest.approx(point.job_time_s.value, rel=0.01)
        assert near.peak_memory_bytes == pytest.approx(point.peak_memory_bytes.value, rel=0.05)


def test_the_choice_has_the_least_objective(found):
    times = [point.job_time_s.value for point in found.points]
    assert times == sorted(times)
    assert found.chosen == found.points[0]
    assert found.sensitivity is not None
    cheapest = plan(minimize="cost")
    assert cheapest.chosen.cost_usd.value == min(c.cost_usd for c in cheapest.candidates)
    thrifty = plan(minimize="energy")
    assert thrifty.chosen.energy_j.value == min(c.energy_j for c in thrifty.candidates)


def test_nothing_listed_dominates_the_front(found):
    front = [(p.job_time_s.value, p.cost_usd.value) for p in found.pareto]
    assert front == sorted(front)
    for candidate in found.candidates:
        assert not any(
            candidate.job_time_s < 0.98 * time and candidate.cost_usd < 0.98 * cost for time, cost in front
        )


def test_each_rejected_candidate_says_which_limit_it_broke_and_by_how_much(found):
    limit_s = float(np.median([c.job_time_s for c in found.candidates]))
    limited = plan(within=f"time<={limit_s}s,memory<=900MB")
    assert limited.num_feasible + len(limited.rejected) == 24
    for rejection in limited.rejected:
        assert rejection.broken
        for broken in rejection.broken:
            assert broken.excess > 0
            assert broken.value == pytest.approx(broken.bound * (1 + broken.excess))
    worst = [max(b.excess for b in rejection.broken) for rejection in limited.rejected]
    assert worst == sorted(worst)
    counts = {limit: number for limit, number, _ in limited.num_rejected_by_limit}
    assert sum(counts.values()) >= len(limited.rejected)


def test_the_binding_limit_and_its_relaxation_lead_to_something_better():
    prices = {"t4": 0.35, "a100-sxm4-40gb": 6.0}
    usd = min(c.cost_usd for c in plan(price_usd_per_hour=prices).candidates) * 1.2
    limited = plan(within=f"cost<={usd}", price_usd_per_hour=prices)
    assert limited.binding.startswith("cost<=")
    relaxation = limited.relaxations[0]
    wider = plan(within=f"cost<={relaxation.bound * 1.0001}", price_usd_per_hour=prices)
    assert wider.chosen.job_time_s.value <= relaxation.point.job_time_s.value * 1.0001
    assert wider.chosen.job_time_s.value < limited.chosen.job_time_s.value


def test_a_budget_nobody_meets_names_the_nearest_miss():
    limited = plan(within="time<=1ms,cost<=1")
    assert (limited.chosen, limited.num_feasible, limited.sensitivity) == (None, 0, None)
    assert limited.binding == "time<=1ms"
    (broken,) = limited.nearest_miss.broken
    assert broken.limit == "time<=1ms"
    assert broken.excess > 100
    assert limited.relaxations[0].gain is None


def test_memory_of_the_device_is_a_limit_without_being_asked():
    crowded = plan(
        "torchvision:vgg16",
        devices="t4",
        batch_sizes=(512,),
        image_sizes=(224,),
        precisions=("fp32",),
        recompute="none",
    )
    assert crowded.chosen is None
    assert crowded.nearest_miss.broken[0].limit == "memory of the device"


def test_where_nothing_fits_what_saves_memory_is_compared_as_well_unless_it_is_named():
    model, asked = "gpt:depth=4,width=4096,vocabulary=65536", {"sequence_length": 1024}
    found = plan(model, devices="2xt4", batch_sizes=None, **asked)
    assert found.chosen.settings.keys() == {"recompute", "strategy"}
    assert "batch sizes from 1, recompute, strategy" in found.notes[0]
    kept = plan(model, devices="2xt4", batch_sizes=(64,), recompute="none", strategy="ddp", **asked)
    assert kept.chosen is None
    assert all(rejected.settings == {} for rejected in kept.rejected)


def test_accuracies_make_a_limit_and_a_front():
    accuracies = {"cnn:depth=2,base_filters=32": 0.75, "cnn:depth=3,base_filters=32": 0.8}
    limited = plan(accuracies=accuracies, within="accuracy>=78%")
    assert limited.chosen.model == "cnn:depth=3,base_filters=32"
    assert limited.chosen.accuracy == 0.8
    assert {p.model for p in plan(accuracies=accuracies).pareto} == set(accuracies)


def test_a_slow_loader_sets_the_step_and_tells_its_workers():
    fed = plan(loader_ms=10.0, loader_workers=2, num_points=24)
    for point in fed.points:
        assert point.throughput_samples_per_s.value <= 200 * (1 + 1e-9)
        assert point.workers_needed > 2
        assert point.step_time_s.high > 1.2 * point.step_time_s.low
    assert LOADER_BOUND_NOTE in fed.notes
    fast = plan(loader_ms=1e-4, loader_workers=2)
    assert LOADER_BOUND_NOTE not in fast.notes
    assert fast.chosen.step_time_s == plan().chosen.step_time_s


def test_a_power_limit_saves_power_and_takes_time(found):
    limited = plan(power_limit_w=60.0, devices="t4")
    free = plan(devices="t4")
    assert limited.chosen.job_time_s.value >= free.chosen.job_time_s.value
    power = [p.chosen.energy_j.value / p.chosen.job_time_s.value for p in (limited, free)]
    assert power[0] <= power[1]
    assert power[0] <= 60.0 * 1.001


def test_carbon_dioxide_is_energy_times_the_grid():
    point = plan(co2_g_per_kwh=400.0).chosen
    assert point.co2_g.value == pytest.approx(point.energy_j.value / 3.6e6 * 400)


def test_a_validation_and_a_start_make_the_job_longer(found):
    longer = plan(validation_size=10_000, startup_s=60.0, checkpoint_s=2.0)
    assert longer.chosen.job_time_s.value > found.chosen.job_time_s.value + 60 + 3 * 2


def test_a_plan_without_a_dataset_says_which_one_it_took():
    assumed = plan(dataset=None, epochs=None)
    assert "no dataset was given: an epoch of cifar10 is assumed" in assumed.notes
    assert "no number of epochs was given: the job is one epoch" in assumed.notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"minimize": "fun"}, "a plan minimises one of time, cost, energy, co2, got 'fun'"),
        ({"within": "accuracy>=90%"}, "a limit on accuracy needs the accuracy of each model"),
        ({"within": "co2<=1kg"}, "co2 needs the intensity of the grid"),
        ({"within": "cost<=1", "devices": "cpu", "price_usd_per_hour": None}, "no price is known for cpu"),
        ({"devices": ""}, "expected at least one device"),
        ({"batch_sizes": ()}, "a plan needs at least one batch size"),
        ({"batch_sizes": (0, 32)}, "batch size"),
        ({"batch_sizes": "1:3000000:1"}, "are too many, at most 200,000"),
        ({"batch_sizes": range(1, 100_001)}, "800,000 are too many"),
        ({"precisions": ()}, "at least one precision"),
        ({"precisions": ("fp12",)}, "fp12"),
        ({"image_sizes": (0,)}, "an image size must be at least 1 pixel"),
        ({"dataset_size": 100}, "either a dataset or a dataset size"),
        ({"price_kinds": ("free",)}, "free"),
        ({"price_usd_per_hour": -1.0}, "a price must be zero or more"),
        ({"power_limit_w": 900.0}, "the power limit of"),
        ({"epochs": -1}, "epochs"),
    ],
)
def test_questions_that_cannot_be_meant_are_refused_in_one_sentence(changes, words):
    with pytest.raises(InvalidSetupError) as error:
        plan("cnn:depth=2,base_filters=32" if "batch_sizes" not in changes else MODELS, **changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_names_are_refused_with_near_matches():
    with pytest.raises(UnknownDeviceError, match="t4"):
        plan(devices="t44")
    with pytest.raises(UnknownModelError, match="cnn"):
        plan("cnnn:depth=2")


def test_several_devices_of_a_machine_equal_predict():
    price = {"price_usd_per_hour": 0.35}
    found = plan(devices="t4,t4x4", num_points=24, **price)
    many = [point for point in found.points if point.num_devices == 4]
    assert len(many) == 12
    for point in many:
        own = forerun.predict(
            point.model,
            device="t4",
            num_devices=4,
            batch_size=point.batch_size_per_device,
            precision=point.precision,
            dataset="cifar10",
            epochs=3,
            **price,
        )
        for name in ("step_time_s", "job_time_s", "cost_usd", "peak_memory_bytes", "energy_j"):
            assert getattr(point, name).value == pytest.approx(getattr(own, name).value, rel=0.01), name
        assert point.step_time_s.high == pytest.approx(own.step_time_s.high, rel=0.01)


def test_four_devices_are_never_more_than_four_times_as_fast():
    found = plan(devices="t4,t4x4", batch_sizes=range(16, 257, 16), num_points=1)
    rates = {(c.model, c.num_devices, c.batch_size_per_device, c.precision): c for c in found.candidates}
    for (model, number, size, precision), candidate in rates.items():
        if number == 4:
            alone = rates[model, 1, size, precision]
            assert candidate.throughput_samples_per_s <= 4 * alone.throughput_samples_per_s * (1 + 1e-9)
            assert candidate.peak_memory_bytes >= alone.peak_memory_bytes


@pytest.mark.parametrize("sharing", [{"parallel": "tp=2,pp=2"}, {"strategy": "fsdp"}])
def test_a_layout_is_planned_as_it_is_predicted(sharing):
    run = {"precision": "bf16", "sequence_length": 128, "accumulation": 4, "dataset_size": 1000, **sharing}
    wanted = forerun.predict("gpt:depth=2", device="4xa100-sxm4-80gb", batch_size=2, epochs=1, **run)
    axes = {"precisions": [run.pop("precision")], "batch_sizes": [1, 2]}
    for is_exact in (False, True):
        found = forerun.plan("gpt:depth=2", devices="4xa100-sxm4-80gb", exact=is_exact, **axes, **run)
        own = next(each for each in found.as_dict()["candidates"] if each["batch_size_per_device"] == 2)
        assert own["step_time_s"] == pytest.approx(wanted.step_time_s.value, rel=1e-6)
        assert own["peak_memory_bytes"] == pytest.approx(wanted.peak_memory_bytes.value, rel=1e-6)
