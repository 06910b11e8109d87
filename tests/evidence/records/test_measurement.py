"""The identity of stored jobs: what was measured by an earlier version is found again."""

from forerun.evidence.measurement.jobs import MeasurementJob, job_key
from forerun.evidence.records.measurement import JobKind


def test_the_key_of_a_step_is_that_of_the_first_stores():
    job = MeasurementJob(
        kind=JobKind.STEP,
        subject="mnist-cnn",
        family="mnist-cnn",
        parameters={
            "optimizer": "sgd", "phase": "train", "batch_size": 32, "precision": "fp32", "layout": "nchw",
            "compile": False,
        },
    )  # fmt: skip
    key = job_key(job, device="cpu X, 2 cores, 2 threads", framework_version="2.15.0", occasion="")
    assert key == "35b65034cb008c16f03161e2f3eadaf4"
