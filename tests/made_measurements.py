"""Measurements made for tests."""

from typing import Any

from forerun.evidence.records.measurement import Circumstances, JobKind, Measurement, Outcome, Summary


def measurement(number: int = 0, **changed: Any) -> Measurement:
    circumstances = Circumstances(
        device=changed.pop("device", "cpu"),
        device_title="Test CPU",
        framework_version="2.15.0",
        occasion=changed.pop("occasion", "first"),
        started_at="2026-11-21T00:00:00+00:00",
        telemetry={"power_before_w": 12.5},
    )
    values: dict[str, Any] = {
        "key": f"{number:032x}",
        "kind": JobKind.STEP,
        "subject": "cnn:depth=2,base_filters=32",
        "family": "cnn",
        "parameters": {
            "batch_size": 32,
            "precision": "fp32",
            "optimizer": "adam",
            "image_size": 32,
            "compile": False,
        },
        "outcome": Outcome.DONE,
        "repetitions_s": (0.1, 0.3, 0.2000000000000001),
        "warm_up_s": (0.5,),
        "summary": Summary(median_s=0.2000000000000001, low_s=0.1, high_s=0.3, is_stable=True),
        "results": {
            "num_parameters": 1234,
            "peak_host_memory_bytes": 1e9,
            "note": 'a "quoted", text\nwith a line',
        },
        "circumstances": circumstances,
    }
    return Measurement(**(values | changed))


TRAINING_BATCH_SIZES = (16, 32, 64, 128)


def small_trainings():
    """One training of a small network for each of these batch sizes."""
    for number, batch in enumerate(TRAINING_BATCH_SIZES):
        step_s = 2e-3 + 1e-4 * batch
        yield measurement(
            number,
            kind=JobKind.TRAINING,
            parameters={
                "depth": 2, "base_filters": 32, "batch_size": batch, "dataset_size": 6400, "num_epochs": 2,
                "optimizer": "adam",
            },
            results={
                "num_parameters": 1000, "step_time_s": step_s, "epoch_time_s": step_s * 6400 / batch,
                "epoch_time_1_s": 2.0, "epoch_time_2_s": 1.0,
                "accuracy_1": 0.3, "accuracy_2": 0.5, "loss_1": 2.0, "loss_2": 1.5, "val_loss_1": 2.1,
            },
        )  # fmt: skip
