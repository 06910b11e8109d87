"""Steps of real models: what they do, what they report, and through a child and a session."""

import math

import pytest
import torch
from jsonl_sink import JsonlSink
from real_jobs import QUICK, TINY_CNN, run_here

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.measurement.measured_job import run_in_child
from forerun.evidence.measurement.runners import step_runner
from forerun.evidence.measurement.runners.step_runner import step_energy, time_first_and_rest
from forerun.evidence.measurement.runners.torch_device import PeakMemory, set_numeric_flags
from forerun.evidence.measurement.session import run_jobs
from forerun.evidence.records.measured_run import setup_of
from forerun.evidence.records.measurement import Circumstances, JobKind, Outcome
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision, TrainingSetup
from forerun.tracing.models.sources import build_model
from forerun.tracing.step import prepared_batch

CPU = torch.device("cpu")


def prepared(setup, model=TINY_CNN):
    torch.manual_seed(0)
    built = build_model(model, device="cpu", training=setup.phase is not Phase.INFERENCE)
    return built, prepared_batch(built, setup, setup.batch_size_per_device)


def test_a_step_is_forward_loss_backward_update():
    setup = TrainingSetup(batch_size_per_device=4, optimizer="sgd-plain")
    built, batch = prepared(setup)
    before = [p.detach().clone() for p in built.module.parameters()]
    torch.manual_seed(1)  # dropout, if any, is the same in both
    loss = built.loss(built.module(*batch["args"]), batch)
    gradients = torch.autograd.grad(loss, list(built.module.parameters()))

    optimizer = step_runner.make_real_optimizer(setup, built.module, 0.5)
    torch.manual_seed(1)
    step_runner.make_step(built, setup, batch, optimizer, CPU)()
    for new, old, gradient in zip(built.module.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(new.detach(), old - 0.5 * gradient)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.INFERENCE])
def test_other_phases_leave_weights_and_gradients_alone(phase):
    setup = TrainingSetup(batch_size_per_device=2, phase=phase, optimizer="none")
    built, batch = prepared(setup)
    needs_gradients = []
    built.module.register_forward_hook(lambda m, a, out: needs_gradients.append(out.requires_grad))
    before = [p.detach().clone() for p in built.module.parameters()]
    step_runner.make_step(built, setup, batch, None, CPU)()
    assert needs_gradients == [phase is Phase.FORWARD]
    assert all(torch.equal(p, q) for p, q in zip(built.module.parameters(), before, strict=True))
    assert all(p.grad is None for p in built.module.parameters())


@pytest.mark.parametrize(
    ("precision", "weights", "products"),
    [
        (Precision.FP32, torch.float32, torch.float32),
        (Precision.AMP_BF16, torch.float32, torch.bfloat16),
        (Precision.BF16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_of_weights_and_of_products(precision, weights, products):
    setup = TrainingSetup(batch_size_per_device=2, precision=precision, layout=Layout.NHWC)
    built, batch = prepared(setup)
    first = next(m for m in built.module.modules() if isinstance(m, torch.nn.Conv2d))
    seen = []
    first.register_forward_hook(lambda m, a, out: seen.append((out.dtype, out)))
    optimizer = step_runner.make_real_optimizer(setup, built.module)
    step_runner.make_step(built, setup, batch, optimizer, CPU)()
    assert first.weight.dtype is weights
    assert seen[0][0] is products
    assert seen[0][1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("implementation", OptimizerImplementation)
def test_the_update_is_the_same_in_every_implementation(implementation):
    setup = TrainingSetup(batch_size_per_device=2, optimizer="adam", optimizer_implementation=implementation)
    built, batch = prepared(setup)
    optimizer = step_runner.make_real_optimizer(setup, built.module, 0.01)
    group = optimizer.param_groups[0]
    assert bool(group["fused"]) is (implementation is OptimizerImplementation.FUSED)
    assert bool(group["foreach"]) is (implementation is OptimizerImplementation.FOREACH)
    step = step_runner.make_step(built, setup, batch, optimizer, CPU)
    before = next(built.module.parameters()).detach().clone()
    step()
    # Adam's first step is the rate times the sign of the gradient.
    moved = (next(built.module.parameters()).detach() - before).abs()
    assert moved.max().item() == pytest.approx(0.01, rel=0.02)


def test_an_optimizer_without_a_fused_form_is_refused():
    setup = TrainingSetup(optimizer="adadelta", optimizer_implementation=OptimizerImplementation.FUSED)
    with pytest.raises(InvalidSetupError, match="no fused form"):
        step_runner.make_real_optimizer(setup, torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    "precision", [known for known in Precision if known not in (Precision.FP8, Precision.FP64)]
)
def test_tf32_is_allowed_for_tf32_alone(precision):
    set_numeric_flags(precision)
    assert torch.backends.cuda.matmul.allow_tf32 is (precision is Precision.TF32)
    assert torch.backends.cudnn.allow_tf32 is (precision is Precision.TF32)


@pytest.mark.parametrize("convolutions", [Precision.FP32, Precision.TF32])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32])
def test_convolutions_have_a_flag_of_their_own(precision, convolutions):
    set_numeric_flags(precision, convolutions=convolutions)
    assert torch.backends.cuda.matmul.allow_tf32 is (precision is Precision.TF32)
    assert torch.backends.cudnn.allow_tf32 is (convolutions is Precision.TF32)


def test_results_of_a_step():
    found = run_here(JobKind.STEP, TINY_CNN, batch_size=4, optimizer="adam", precision="fp32")
    network = build_model(TINY_CNN)
    assert found.results["num_parameters"] == sum(p.numel() for p in network.module.parameters())
    assert found.results["first_step_s"] > 0
    assert found.results["peak_rss_delta_bytes"] > 0
    assert "compile_time_s" not in found.results
    assert "peak_memory_bytes" not in found.results  # no allocator counts on a processor
    assert len(found.repetitions_s) == 3


def test_the_first_step_is_told_apart_from_the_rest():
    calls = []
    timed, figures = time_first_and_rest(lambda: calls.append(1), lambda: None, QUICK, is_compiled=True)
    assert len(calls) == 1 + len(timed.warm_up_s) + len(timed.repetitions_s)
    assert 0 <= figures["compile_time_s"] <= figures["first_step_s"]


def test_a_compiled_step_gives_what_an_eager_one_gives(monkeypatch):
    """Without the code generator, which needs a compiler: the graph is captured and run as it is."""
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: original(module, backend="eager"))
    losses = []
    for is_compiled in (False, True):
        setup = TrainingSetup(batch_size_per_device=2, compile=is_compiled)
        built, batch = prepared(setup)
        network = step_runner.compiled(built.module, setup)
        losses.append(built.loss(network(*batch["args"]), batch).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_growth_of_memory_is_seen():
    memory = PeakMemory(CPU, held_bytes=1000)
    torch.ones(25_000_000).sum()
    grown = memory.figures()["peak_rss_delta_bytes"]
    assert 90e6 < grown < 400e6


def test_a_child_runs_a_real_step_and_another_model_fails_in_its_own_way():
    job = MeasurementJob(kind=JobKind.STEP, subject=TINY_CNN, family="cnn", parameters={"batch_size": 4})
    report = run_in_child(job, "cpu", QUICK)
    assert report.outcome is Outcome.DONE, report.reason
    assert len(report.result.repetitions_s) == 3
    bad = MeasurementJob(kind=JobKind.STEP, subject="cnn:depth=99", family="cnn")
    report = run_in_child(bad, "cpu", QUICK)
    assert report.outcome is Outcome.FAILED
    assert "depth" in report.reason


def test_a_session_of_real_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # its lock is not that of a real session
    place = Circumstances(device="cpu", device_title="a test", num_threads=1, framework_version="0")
    jobs = [
        MeasurementJob(kind=JobKind.STEP, subject=TINY_CNN, family="cnn", parameters={"batch_size": n})
        for n in (2, 4)
    ]
    sink = JsonlSink(tmp_path / "records.jsonl")
    report = run_jobs(jobs, sink, protocol=QUICK, circumstances=place)
    assert report.outcomes == {Outcome.DONE: 2}
    assert report.null_step_s < 1e-3
    steps = [line for line in sink.lines() if line["kind"] == "step"]
    assert [line["parameters"]["batch_size"] for line in steps] == [2, 4]
    assert all(line["results"]["null_step_s"] == report.null_step_s for line in steps)
    assert run_jobs(jobs, sink, protocol=QUICK, circumstances=place).num_skipped == 2


def test_a_setup_from_parameters():
    setup = setup_of({"batch_size": 8, "precision": "amp", "layout": "nhwc", "phase": "inference"})
    assert setup.batch_size_per_device == 8
    assert setup.precision is Precision.AMP
    assert setup.layout is Layout.NHWC
    assert setup.optimizer == "none"
    assert setup_of({"optimizer": "adam"}).optimizer == "adam"


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"batch_size": "many"}, "whole number as batch_size"),
        ({"batch_size": True}, "whole number as batch_size"),
        ({"batch_size": 0}, "batch size must be"),
        ({"precision": "fp4"}, "unknown precision"),
        ({"precision": "fp8"}, "fp8 is predicted but not measured: expected one of fp32"),
        ({"precision": "fp64"}, "fp64 is predicted but not measured: expected one of fp32"),
        ({"optimizer": "adamw-8bit"}, "adamw-8bit is predicted but not measured: .* none, sgd"),
        ({"compile": "maybe"}, "true or false as compile"),
        ({"input_shape": "3 by 4"}, "input_shape of the job"),
        ({"optimizer": "adm"}, "did you mean adam"),
        ({"batch_size": math.nan}, "whole number as batch_size"),
    ],
)
def test_parameters_that_cannot_be_meant(parameters, told):
    with pytest.raises(InvalidSetupError, match=told):
        run_here(JobKind.STEP, TINY_CNN, **parameters)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there():
    job = MeasurementJob(kind=JobKind.STEP, subject=TINY_CNN, family="cnn")
    report = run_in_child(job, "cuda:0", QUICK)
    assert report.outcome is Outcome.FAILED
    assert "GPU" in report.reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", Precision)
def test_a_step_on_a_gpu(precision):
    job = MeasurementJob(
        kind=JobKind.STEP,
        subject=TINY_CNN,
        family="cnn",
        parameters={"batch_size": 8, "precision": precision, "optimizer": "adam"},
    )
    report = run_in_child(job, "cuda:0", QUICK)
    assert report.outcome is Outcome.DONE, report.reason
    assert report.result.results["peak_memory_bytes"] > 0


def test_the_energy_of_a_step_is_what_the_counter_grew_by():
    assert step_energy([100.0, 400.0], [0.2, 0.2, 0.2]) == {"step_energy_j": pytest.approx(100.0)}


@pytest.mark.parametrize(
    ("readings", "times"), [([None, None], [1.0]), ([5.0, None], [1.0]), ([5.0, 9.0], [0.1, 0.1])]
)
def test_no_energy_is_told_without_a_counter_or_over_less_than_its_steps(readings, times):
    assert step_energy(readings, times) == {}


def test_a_processor_has_no_energy_and_no_launching():
    result = run_here(JobKind.STEP, TINY_CNN, batch_size=2)
    assert not {"step_energy_j", "launched_s"} & set(result.results)
    assert len(result.repetitions_s) == 3
