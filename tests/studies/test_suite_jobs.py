"""The jobs of the suite: what must be among them, and that each can be run."""

import pytest

from forerun.evidence.measurement.runners.kernel_runner import KERNELS
from forerun.evidence.measurement.settings import SYSTEM_A_SIZES
from forerun.evidence.records.measured_run import setup_of
from forerun.evidence.records.measurement import JobKind
from forerun.question.setup import Layout, Precision
from forerun.tracing.models.families import FAMILIES
from forerun.tracing.models.sources import build_model
from forerun.tracing.models.vision_models import timm_names, torchvision_names
from studies.suite.models import (
    LIMIT,
    REPEAT,
    SUITE_MODELS,
    batch_searches,
    kernel_jobs,
    on_processor,
    repeat_jobs,
    step_jobs,
)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_system_a_is_there_in_full_and_comes_first(is_gpu):
    core = [
        (s.job.subject, s.job.parameters["batch_size"])
        for s in step_jobs(is_gpu=is_gpu)
        if s.is_core and s.job.parameters["precision"] == "fp32" and s.job.parameters["optimizer"] == "adam"
    ]
    grid = {
        (f"cnn:depth={depth},base_filters={filters}", batch)
        for depth in SYSTEM_A_SIZES["depth"]
        for filters in SYSTEM_A_SIZES["base_filters"]
        for batch in (32, 64, 128)
    }
    assert grid <= set(core)
    assert len(grid) == 18


def test_a_gpu_runs_models_in_all_their_settings():
    steps = step_jobs(is_gpu=True)
    assert sum(s.is_core for s in steps) >= 40
    setups = [setup_of(s.job.parameters) for s in steps]
    assert {s.precision for s in setups} == set(Precision) - {Precision.FP16, Precision.FP8}
    assert {s.layout for s in setups} == set(Layout)
    assert {s.compile for s in setups} == {False, True}
    assert len({s.model_class for s in steps}) == 7
    assert len({s.job.to_json() for s in steps}) == len(steps)


def test_a_processor_runs_small_ones_in_fp32():
    steps = step_jobs(is_gpu=False)
    assert {s.job.parameters["precision"] for s in steps} == {"fp32"}
    assert not any(s.job.parameters["compile"] for s in steps)
    assert max(s.job.parameters.get("image_size", 0) for s in steps) == 64
    assert all(on_processor(model).settings for model in SUITE_MODELS)


def test_every_model_has_a_name_that_its_library_knows():
    known = {"torchvision": torchvision_names(), "timm": timm_names()}
    for model in SUITE_MODELS:
        prefix, _, name = model.subject.partition(":")
        assert prefix in FAMILIES or name in known[prefix]


def test_text_and_small_networks_can_be_built_as_they_are_asked_for():
    for model in SUITE_MODELS:
        if model.subject.partition(":")[0] in FAMILIES:
            build_model(model.subject, image_size=model.image_size, sequence_length=model.sequence_length)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_searches_are_under_limits_and_hold_at_any_batch(is_gpu):
    searches = batch_searches(is_gpu=is_gpu)
    assert len(searches) >= 3
    assert [s.limit_bytes for s in searches] == sorted(s.limit_bytes for s in searches)
    job = searches[0].at(77)
    assert job.parameters["batch_size"] == 77
    assert job.parameters[LIMIT] == searches[0].limit_bytes
    assert setup_of(job.parameters).batch_size_per_device == 77


def test_repeats_are_jobs_of_their_own():
    steps = step_jobs(is_gpu=True)
    start, end = repeat_jobs(steps, "start"), repeat_jobs(steps, "end")
    assert len(start) == len(end) == 3
    assert not {j.to_json() for j in start} & {j.to_json() for j in end}
    assert not {j.to_json() for j in start} & {s.job.to_json() for s in steps}
    assert {j.parameters[REPEAT] for j in start} == {"start"}


@pytest.mark.parametrize("is_gpu", [True, False])
def test_kernels_are_known_to_their_runner(is_gpu):
    jobs = kernel_jobs(is_gpu=is_gpu)
    assert {job.kind for job in jobs} == {JobKind.KERNEL}
    assert {job.subject for job in jobs} == set(KERNELS)
