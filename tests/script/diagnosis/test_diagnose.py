"""Faults injected into traces and numbers, and the cause that is named first."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import forerun
from forerun.base.errors import UsageError
from forerun.prediction.estimate import BreakdownPart, Interval
from forerun.script.callbacks.live import LiveForecast
from forerun.script.diagnosis.causes import causes_of
from forerun.script.diagnosis.diagnose import _HOST, _LOADER
from forerun.script.diagnosis.observation import Observation, observe, of_profile
from forerun.script.diagnosis.trace import read_trace
from forerun.script.profiling.step_hooks import LoaderSpan
from forerun.surface.cli.main import app
from made_profiles import made_profile
from studies.scripts import diagnose as studied
from studies.scripts.diagnose import FAULTS, write_trace

RUN = {"model": "mnist-cnn", "device": "a100-sxm4-40gb", "batch_size": 64}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_of_a_trace_is_named_first(tmp_path, fault):
    network = ("resnet", "gpt")[len(fault) % 2]
    found = forerun.diagnose(trace=write_trace(tmp_path, fault, network, seed=3))
    assert found.causes[0].cause == FAULTS[fault]
    assert found.verdict == "not compared"
    costs = [cause.cost_s for cause in found.causes]
    assert costs == sorted(costs, reverse=True)
    assert all(0 <= cause.share <= 1 for cause in found.causes)


def test_the_parts_of_a_trace_add_up_to_its_step(tmp_path):
    (path,) = write_trace(tmp_path, "loader in the main process", "resnet", seed=3)
    seen = observe([read_trace(path)])
    idle_s = seen.loader_s + seen.host_s + seen.sync_s + seen.queued_s + seen.copy_s + seen.pinned_copy_s
    assert seen.busy_s + idle_s == pytest.approx(seen.step_s, rel=0.02)


def test_ranks_are_compared(tmp_path):
    found = forerun.diagnose(trace=write_trace(tmp_path, "one rank's kernels slow", "gpt", seed=3))
    assert [rank.label for rank in found.ranks] == [f"rank {number}" for number in range(4)]
    assert "rank 2 works" in found.causes[0].evidence
    assert "its kernels take longer" in found.causes[0].evidence


def test_a_number_within_the_interval_is_not_slow():
    estimate = forerun.predict(**RUN)
    found = forerun.diagnose(**RUN, measured=estimate.step_time_s.value)
    assert found.verdict == "not slow"
    assert found.ratio == pytest.approx(1.0)
    assert found.causes[0].cause == "not slow"


def test_throughputs_and_times_are_the_same_number():
    estimate = forerun.predict(**RUN)
    rate = estimate.throughput_samples_per_s.value / 3
    step_s = 3 * estimate.step_time_s.value
    texts = (f"{rate} samples/s", f"{rate / 1e3} k images/sec/GPU", f"{rate / 64} it/s", f"{1e3 * step_s} ms",
             f"{step_s}s/it", f"{100 * estimate.mfu.value / 3} % MFU")  # fmt: skip
    found = [forerun.diagnose(**RUN, measured=text) for text in texts]
    assert {round(each.ratio, 3) for each in found} == {3.0}
    assert {each.verdict for each in found} == {"slow"}


def test_an_idle_gpu_and_another_precision_are_named():
    slow = {"model": "torchvision:resnet50", "device": "a100-sxm4-40gb", "batch_size": 64, "precision": "amp"}
    full_s = forerun.predict(**{**slow, "precision": "fp32"}).step_time_s.value
    assert "fp32 in place of amp" in forerun.diagnose(**slow, measured=full_s).causes[0].evidence
    assert forerun.diagnose(**slow, measured=1.0, gpu_utilization=0.3).causes[0].cause == "idle device"
    # Without a prediction there is no ratio to tell.
    assert forerun.diagnose(measured=1.0, gpu_utilization=1.0).causes[0].cause == "busy device"


def test_a_slower_link_is_named():
    several = {"model": "torchvision:vgg11", "device": "8xh100-sxm", "batch_size": 1, "precision": "amp"}
    slow_s = forerun.predict(**several, intra="pcie-4-x16").step_time_s.value
    assert "PCI Express in place of NVLink" in forerun.diagnose(**several, measured=slow_s).causes[0].evidence
    nodes = {**several, "device": "2x8xh100-sxm", "inter": "infiniband-ndr"}
    found = forerun.diagnose(**nodes, measured=2 * forerun.predict(**nodes).step_time_s.high).causes[0]
    assert found.cause == "slow or wrong link between devices"


def test_classes_that_are_all_slower_alike_mean_a_lowered_clock_and_one_class_means_its_kernels():
    estimate = forerun.predict(
        "torchvision:resnet18", device="a100-sxm4-40gb", batch_size=64, precision="amp"
    )
    step = Interval(0.1, 0.09, 0.11)
    parts = (BreakdownPart("convolution", 0.06), BreakdownPart("normalisation", 0.04))
    estimate = replace(estimate, step_time_s=step, breakdown=parts)
    slow = {part.name: 1.7 * part.time_s for part in parts}
    seen = Observation(step_s=0.17, num_steps=5, busy_s=0.17, by_class=slow, estimate=estimate)
    found = causes_of(seen)
    assert [cause.cause for cause in found] == ["throttled clock or power limit"]
    assert found[0].cost_s == pytest.approx(0.07)
    one = replace(seen, by_class={"convolution": 0.06, "normalisation": 0.11})
    assert [cause.cause for cause in causes_of(one)] == ["kernels slower than predicted"]


def test_sensors_threads_and_busy_cores_of_a_run_are_judged():
    throttled = made_profile(
        "cuda:0", wait_s=0.0, kernels_s=0.08, host_s=0.0, sensors={"gpu_throttled_by_heat_mean": 0.5}
    )
    assert causes_of(of_profile(throttled))[0].cause == "throttled clock or power limit"
    alone = made_profile("cpu", wait_s=0.0, kernels_s=0.08, host_s=0.0, optimizer={"num_threads": 1})
    window = Observation(step_s=0.1, is_on_gpu=False, busy_s=0.1, by_class={"linear": 0.09})
    seen = of_profile(alone, window)
    assert causes_of(seen)[0].cause == "too few threads"
    busy = made_profile("cpu", busy_machine_fraction=0.4)
    assert [cause.cause for cause in causes_of(of_profile(busy))] == [
        "data loader",
        "host and launches",
        "other programs on the device",
    ]


def test_host_time_that_operators_do_not_explain_is_not_cured_by_a_larger_batch():
    few, many = (
        Observation(step_s=0.1, busy_s=0.02, host_s=0.08, num_launches=number) for number in (20, 4000)
    )
    (first,), (second,) = causes_of(few), causes_of(many)
    assert first.cause == second.cause == "host and launches"
    assert "beside the model" in first.change
    assert "more samples in a step" in second.change


def test_waits_have_the_names_of_a_prediction():
    fed = forerun.predict("mnist-cnn", device="t4", batch_size=64, loader_workers=1, loader_ms=2)
    assert {_HOST, _LOADER} <= {part.name for part in fed.breakdown}


def test_a_run_of_this_machine_is_judged():
    command = [
        sys.executable,
        str(Path(studied.__file__).parent / "own" / "slow_mlp.py"),
        "loader sleeps",
    ]
    found = forerun.diagnose("mlp", command=command, num_steps=12)
    assert found.source == "run"
    assert found.device == "cpu"
    assert found.predicted is not None
    loader = found.causes[0]  # whatever else keeps this machine's cores busy
    assert loader.cause == "data loader"
    assert loader.knobs["num_workers"] >= 1
    assert found.by_class[0].name == _LOADER


def test_a_loop_says_the_likely_cause_while_it_is_slower_than_predicted():
    estimate = forerun.predict(**RUN)
    slow_s = 5 * estimate.step_time_s.value

    def words(wait_s, predicted):
        live = LiveForecast(set(), 100, None, 1e9, io.StringIO(), predicted)
        for number in range(12):
            begin_s = number * slow_s
            live._step(LoaderSpan(begin_s=begin_s, end_s=begin_s + slow_s, wait_s=wait_s, num_updates=1))
        said = live.line()
        assert torch.autograd._profiler_enabled() is (predicted is not None)
        live.close()  # else all that this process computes from here on is traced
        assert not torch.autograd._profiler_enabled()
        return said

    assert "(5 times the prediction; 80 % of a step" in words(0.8 * slow_s, estimate)
    assert "forerun diagnose tells why" in words(0.0, estimate)
    assert "prediction" not in words(0.8 * slow_s, None)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "expected one of a command"),
        ({"measured": 1.0, "trace": "t.json", **RUN}, "expected one of a command"),
        ({"measured": 1.0}, "expected the MODEL"),
        ({"measured": 1.0, "model": "mnist-cnn"}, "expected the device"),
        ({**RUN, "measured": 0.0}, "above zero"),
        ({**RUN, "measured": float("nan")}, "above zero"),
        ({**RUN, "measured": "quick"}, "expected a number with a unit"),
        ({**RUN, "measured": "300 tokens/s"}, "reads no tokens"),
        ({**RUN, "measured": 1.0, "gpu_utilization": 7.0}, "from 0 to 1"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused(asked, words):
    with pytest.raises(UsageError) as refused:
        forerun.diagnose(**asked)
    assert words in str(refused.value)


def test_the_command_prints_a_page_and_json(tmp_path):
    (path,) = write_trace(tmp_path, "PCIe x1", "gpt", seed=3)
    done = CliRunner().invoke(app, ["diagnose", "--trace", str(path)])
    assert done.exit_code == 0, done.stderr
    assert "1. slow link to the host" in done.stdout
    answer = json.loads(CliRunner().invoke(app, ["diagnose", "--trace", str(path), "--json"]).stdout)
    assert answer["causes"][0].keys() >= {"cause", "cost_s", "share", "evidence", "change"}
    assert answer.keys() >= {"measured", "predicted", "ratio", "by_class", "causes"}
    done = CliRunner().invoke(
        app, ["diagnose", "--measured", "9 s", "mnist-cnn", "--on", "t4", "--gpu-utilization", "20"]
    )
    assert "1. idle device" in done.stdout
    assert CliRunner().invoke(app, ["diagnose", "--trace", str(tmp_path / "none.json")]).exit_code == 2
    done = CliRunner().invoke(app, ["diagnose", "mnist-cnn", "--on", "t4"])
    assert "expected a measured step of 'mnist-cnn', got none; give --measured 0.41s" in done.stderr
