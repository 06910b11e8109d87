"""Laws of an epoch of unequal samples, on a step whose time and memory are known."""

from dataclasses import replace

import numpy as np
import pytest

import forerun
from forerun.prediction.estimate import Interval
from forerun.prediction.uneven_samples import epoch_estimate
from forerun.question.run import Run

LAW = "lognormal:median=105,p95=277,max=800"


@pytest.fixture(scope="module")
def known():
    return forerun.predict("gpt2", device="l40s", batch_size=4, sequence_length=64)


def _asked(known, lengths=LAW, **settings):
    """An epoch whose step takes 1 ms and 10 us a token, and holds 1 MB a token in memory of 1 GB."""
    run = Run.of("gpt2", device="l40s", batch_size=4, lengths=lengths, **settings)

    def estimate_at(each):
        tokens = each.model.sequence_length
        step = 1e-3 + 4 * 1e-5 * tokens
        return replace(
            known,
            run=each,
            step_time_s=Interval(step, step, step),
            peak_memory_bytes=Interval(*3 * (4e6 * tokens,)),
            device_memory_bytes=1e9,
        )

    return epoch_estimate(run, estimate_at)


def test_the_order_of_the_ways_to_batch(known):
    times = {way: _asked(known, batching=way) for way in ("padded", "grouped", "padding-free")}
    steps = [each.step_time_s.value for each in times.values()]
    assert steps == sorted(steps, reverse=True)
    mean_tokens = times["padding-free"].tokens_per_s.value * steps[-1] / 4
    assert steps[-1] == pytest.approx(1e-3 + 4e-5 * mean_tokens, rel=0.02)
    # The longest of four samples of a lognormal law, by order statistics.
    drawn = np.random.default_rng(1).choice(np.asarray(forerun_tokens()), (100_000, 4)).max(axis=1)
    assert steps[0] == pytest.approx(1e-3 + 4e-5 * drawn.mean(), rel=0.05)


def forerun_tokens():
    from forerun.question.job import read_lengths

    return read_lengths(LAW).tokens


def test_equal_samples_take_the_step_of_their_length(known, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("128\n" * 8, encoding="utf-8")
    for way in ("padded", "grouped", "padding-free", "dynamic", "packed"):
        found = _asked(known, str(path), batching=way)
        assert found.step_time_s.value == pytest.approx(1e-3 + 4 * 128 * 1e-5, rel=1e-3)


def test_the_longest_sample_that_fits_is_said(known):
    notes = " ".join(_asked(known).notes)
    assert "samples of up to about 250 tokens fit" in notes
    assert "one step in" in notes
    assert "run out of memory" not in " ".join(_asked(known, sequence_length=200).notes)


def test_the_parts_of_the_step_still_add_up(known):
    found = _asked(known, batching="dynamic")
    assert all(part.time_s >= 0 for part in found.breakdown)
    ratio = found.step_time_s.value / (1e-3 + 4e-5 * 800)
    assert sum(part.time_s for part in found.breakdown) == pytest.approx(
        ratio * sum(part.time_s for part in known.breakdown)
    )
    for layer, longest in zip(found.top_layers, known.top_layers, strict=True):
        assert (layer.time_s, layer.share) == (pytest.approx(ratio * longest.time_s), longest.share)


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_plans_sweeps_and_layouts_have_the_mean_step_of_predict(batching):
    asked = {"lengths": LAW, "batching": batching}
    model, job = "gpt:depth=2,width=128,vocabulary=256", {"dataset_size": 5000, "precision": "amp-bf16"}
    found = forerun.plan(
        model, devices="l40s,2xl40s", batch_sizes=[4], precisions=["amp-bf16"], dataset_size=5000, **asked
    )
    assert {point.num_devices for point in found.best_by_device} == {1, 2}
    for point in found.best_by_device:
        one = forerun.predict(model, device=f"{point.num_devices}xl40s", batch_size=4, **job, **asked)
        for name in ("step_time_s", "cost_usd", "throughput_samples_per_s", "peak_memory_bytes"):
            assert getattr(point, name).value == pytest.approx(getattr(one, name).value, rel=1e-9), name
    best = forerun.layouts(model, device="2xl40s", batch_size=4, **asked).best[0]
    whole = forerun.predict(best.run)
    assert best.step_time_s.value == pytest.approx(whole.step_time_s.value, rel=0.02)
    assert best.peak_memory_bytes.value == pytest.approx(whole.peak_memory_bytes.value, rel=1e-9)


def test_batches_in_no_order_may_hold_more_memory_while_the_device_has_it(known, tmp_path):
    for median in (40, 105):
        law = f"lognormal:median={median},p95={1.4 * median}"
        mixed, grouped = (_asked(known, law, batching=way).peak_memory_bytes for way in ("padded", "grouped"))
        assert grouped.high == grouped.value == mixed.value
        most = min(2.0 * mixed.value, 1e9)
        assert mixed.high == pytest.approx(max(most, mixed.value))
        assert (mixed.high < 1e9) == (median == 40)
    path = tmp_path / "equal.csv"
    path.write_text("64\n" * 8, encoding="utf-8")
    assert _asked(known, str(path)).peak_memory_bytes.high == _asked(known, str(path)).peak_memory_bytes.value
