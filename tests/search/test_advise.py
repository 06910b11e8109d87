"""Changes that make a language model fit: several together where no single one is enough."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import forerun
from forerun.prediction.estimate import Interval
from forerun.question.run import Run
from forerun.search.advise import ways_to_fit, ways_to_save
from forerun.search.offers import faster, together

MODEL = "gpt:depth=4,width=1024,vocabulary=8192"
SETTINGS = {"precision": "bf16", "optimizer": "adamw", "sequence_length": 1024, "batch_size": 64}
DEVICE = "t4"


@pytest.fixture(scope="module")
def estimate():
    return forerun.predict(MODEL, device=DEVICE, **SETTINGS | {"precision": "fp32"})


def test_each_rung_keeps_what_the_one_before_saved(estimate):
    none_fits = replace(estimate, max_batch_size=Interval(0.0, 0.0, 0.0))
    rungs = [dict(offer.change) for offer in together(none_fits)]
    assert rungs[0] == {"batch_size": 1, "accumulation": 64, "recompute": "full", "precision": "amp"}
    for before, after in itertools.pairwise(rungs):
        assert {**before, **after} == after
    assert rungs[-1] | {"lora": 16, "quantize": "nf4"} == rungs[-1]


def test_what_cannot_fit_by_its_weights_alone_is_not_tried(estimate):
    small = forerun.predict("llama-3-8b", device="t4", batch_size=1, precision="amp", use_cache=True)
    (offer,) = together(small)
    assert "--lora 16 --quantize nf4" in offer.options


def test_a_run_that_fits_has_no_ways():
    fits = forerun.predict(MODEL, device="a100-sxm4-80gb", **SETTINGS | {"batch_size": 1})
    assert ways_to_fit(fits) == ()
    assert "ways_to_fit" not in fits.as_dict()


def test_the_answer_of_predict_says_what_would_make_its_run_fit():
    found = forerun.predict("mnist-cnn", device="t4", batch_size=400_000)
    assert found.as_dict()["ways_to_fit"] == [way.as_dict() for way in ways_to_fit(found)]
    assert found.ways_to_fit[0].words in str(found)
    assert list(found.to_frame()["fits"]) == ["no"]


def test_autocast_is_offered_where_the_device_only_emulates_bf16():
    settings = {"precision": "bf16", "batch_size": 1, "sequence_length": 128}
    runs = [Run.of(MODEL, device=device, **settings) for device in ("t4", "l4")]
    offered = [[offer.change for offer in faster(run)] for run in runs]
    assert [{"precision": "amp"} in changes for changes in offered] == [True, False]


def test_advice_for_a_run_that_does_not_fit_begins_with_one_that_does():
    plan = forerun.advise(MODEL, device="t4", **SETTINGS | {"precision": "fp16", "batch_size": 256})
    assert plan.fits == "no"
    best = plan.changes[0]
    assert best.fits != "no"
    assert "--accumulation" in best.settings
    assert best.run.batch_size_global == 256
    assert best.peak_memory_bytes.value < plan.peak_memory_bytes.value


TOKENS = {"sequence_length": 2048}


def ways_of(model, device):
    estimate = forerun.predict(model, device=device, **TOKENS)
    assert estimate.fits == "no"
    return [dict(way.change) for way in ways_to_fit(estimate)]


def test_a_language_model_too_large_for_its_card_fits_with_adapters_or_on_several_cards():
    changes = ways_of("llama-3.2-1b", "rtx-3070")
    assert {"recompute": "full", "lora": 16} in changes
    assert any(change.get("strategy") == "fsdp" and change["num_devices"] in (2, 4, 8) for change in changes)
    assert any("device" in change for change in changes)
    own = next(change for change in changes if "lora" in change)
    # Adapters scatter by half in published runs, so that little of them is sure.
    assert forerun.predict("llama-3.2-1b", device="rtx-3070", **TOKENS, **own).fits != "no"


def test_several_cards_divide_the_state_before_anything_else_is_asked_of_the_user():
    changes = ways_of("llama-3.2-1b", "4xt4")
    assert changes[0]["strategy"] == "fsdp"
    assert not any("lora" in change for change in changes)


def test_weights_larger_than_the_card_are_quantized_and_the_format_is_one_that_it_has():
    changes = ways_of("llama-3.1-8b", "t4")
    assert {"recompute": "full", "precision": "fp16", "lora": 16, "quantize": "nf4"} in changes
    assert {"recompute": "full"} not in changes  # it leaves the weights


def test_a_batch_that_is_too_large_is_split_into_the_largest_micro_steps_that_fit():
    plan = forerun.advise("torchvision:resnet50", device="rtx-3060", batch_size=512)
    (first, *_) = [
        change for change in plan.changes if "micro" in change.meaning or "--accumulation" in change.settings
    ]
    assert "--recompute" not in first.settings
    assert first.run.setup.batch_size_per_device >= 32
    assert first.run.batch_size_global == 512


def test_models_without_convolutions_gain_nothing_from_channels_last():
    plain, last = (
        forerun.predict(MODEL, device="a100-sxm4-80gb", layout=layout, **SETTINGS | {"batch_size": 1})
        for layout in ("nchw", "nhwc")
    )
    assert plain.step_time_s == last.step_time_s
    words = [way.words for way in ways_to_save(plain)]
    assert not any("nhwc" in word for word in words)


def test_advice_for_a_loader_that_is_too_slow_begins_with_workers():
    fed = {"batch_size": 256, "precision": "amp", "loader_ms": 9, "loader_workers": 6, "loader_cores": 4}
    plan = forerun.advise("cnn:depth=2", device="t4", **fed)
    best = plan.changes[0]
    assert "--loader-cores" in best.settings
    alone = forerun.predict("cnn:depth=2", device="t4", batch_size=256, precision="amp")
    assert best.run.loader.num_workers == best.run.loader.num_cores
    assert best.samples_per_s == pytest.approx(alone.throughput_samples_per_s.value)
    enough = {**fed, "loader_workers": 10_000, "loader_cores": 10_000}
    plan = forerun.advise("cnn:depth=2", device="t4", **enough)
    assert not any("loader" in change.settings for change in plan.changes)
    # Settings that cost nothing come before a device that must be rented.
    assert [change.settings.split()[0] == "--on" for change in plan.changes] == [False, False, True]
    slow = {**fed, "sample_kb": 100, "storage_mb_s": 1}
    assert not forerun.advise("cnn:depth=2", device="t4", **slow).changes


def test_advice_for_keras_names_what_keras_has():
    run = Run.of("keras:cnn:depth=2,base_filters=32", device="2xt4", strategy="mirrored")
    settings = [offer.options for offer in faster(run)]
    assert {"--precision amp", "--compile", "--batch-size 64"} <= set(settings)
    assert not any(word in " ".join(settings) for word in ("--strategy", "fused"))
