"""Predictions and measurements of a suite, made up from known truths."""

from dataclasses import replace

from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.evidence.records.measurement import Outcome, Summary
from forerun.question.devices import find_device
from forerun.question.setup import Layout, Precision
from made_measurements import measurement
from studies.suite.models import REPEAT, Search, Setting, SuiteModel, batch_searches, step_jobs
from studies.suite.prediction import about, predict_jobs

DEVICE = find_device("rtx-4070")

MODELS = tuple(
    SuiteModel(
        subject=subject,
        model_class="small CNN" if subject.startswith("cnn") else "CIFAR ResNet",
        settings=(
            Setting(32, Precision.FP32, is_core=True),
            Setting(256, Precision.AMP, Layout.NHWC),
        ),
        image_size=32,
        searches=(Search(Setting(1, Precision.FP32), 0.25),) if subject == "cifar-resnet:20" else (),
    )
    for subject in ("cnn:depth=2,base_filters=16", "cnn:depth=3,base_filters=8", "cifar-resnet:20")
)


def predicted(device=DEVICE, models=MODELS):
    weights = load_weights(shipped_weights_path())
    return predict_jobs(
        step_jobs(is_gpu=True, models=models),
        batch_searches(is_gpu=True, models=models),
        device,
        weights,
        about(weights, shipped_weights_path()),
    )


def measured(job, time_s, number, outcome=Outcome.DONE, **results):
    made = measurement(
        number,
        kind=job.kind,
        subject=job.subject,
        family=job.family,
        parameters=job.parameters,
        device="rtx-4070",
    )
    summary = Summary(median_s=time_s, low_s=0.99 * time_s, high_s=1.01 * time_s, is_stable=True)
    done = outcome is Outcome.DONE
    return replace(
        made,
        outcome=outcome,
        repetitions_s=(time_s,) * 3 if done else (),
        summary=summary if done else None,
        results=dict(results),
        circumstances=replace(made.circumstances, started_at="2100-01-01T00:00:00+00:00"),
    )


def repeated(job, when):
    return replace(job, parameters={**job.parameters, REPEAT: when})
