"""Epochs of ``fit`` on this processor, measured and predicted from a calibration made on other networks.

Calibrates Keras on TensorFlow (or takes a calibration that was made before, with its records), trains networks that
the calibration has not seen by ``fit`` with ``forerun.keras.StepTimer``, each in a process of its own, and prints
measured and predicted steps and epochs. Beside them: the prediction from the datasheet alone, and a line over the work
of a step through the steps that the calibration measured, a + b * FLOP with the least relative squares.

The data come from a ``tf.data.Dataset`` whose tuner is off. Beside it stand epochs of ``fit`` on arrays, whose data
set ``fit`` makes itself with the tuner on: more than every second of them waits for a tick of it.

    python benchmarks/keras_epoch.py --minutes 2.5
    python benchmarks/keras_epoch.py --calibration keras.safetensors --records keras.sqlite
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = 96
EPOCHS = 10


@dataclass(frozen=True, slots=True)
class Run:
    """A model specification, the batch size, and the shape of an image."""

    model: str
    batch_size: int
    shape: tuple[int, int, int]

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return BATCHES * self.batch_size


RUNS = (
    Run("keras:mnist-cnn", 64, (28, 28, 1)),
    Run("keras:cnn:depth=3,base_filters=16", 32, (32, 32, 3)),
    Run("keras:mlp:depth=3,width=512", 128, (28, 28, 1)),
    Run(f"{Path(__file__).with_name('keras_small_resnet.py')}:resnet", 32, (32, 32, 3)),
)


def _fit(model: str, batch_size: int, shape: list[int], records: str) -> None:
    """Child process: trains like a user and prints the output of the callback."""
    import keras

    from forerun.keras import StepTimer

    if ".py:" in model:
        from keras_small_resnet import resnet

        network = resnet()
    else:
        from forerun.adapters.keras.networks import build_keras_family

        network = build_keras_family(model.removeprefix("keras:"))
    network.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    num_samples = BATCHES * batch_size
    random = np.random.default_rng(0)
    images = random.random((num_samples, *shape), dtype=np.float32)
    labels = random.integers(0, 10, num_samples)
    told = {"dataset_size": num_samples, "batch_size": batch_size, "subject": model}
    fed = StepTimer(records, occasion=f"dataset {model}", **told)
    network.fit(_dataset(images, labels, batch_size), epochs=EPOCHS, callbacks=[fed], verbose=0)
    own = StepTimer(records, occasion=f"arrays {model}", **told)
    network.fit(images, labels, batch_size=batch_size, epochs=EPOCHS, callbacks=[own], verbose=0)
    figures = {name: fed.measurement.results[name] for name in ("step_time_s", "epoch_time_s")}
    print(
        json.dumps(
            {**figures, "epochs_on_arrays_s": own.epoch_times_s[1:], "starts_s": own.epoch_starts_s[1:]}
        )
    )


def _dataset(images: np.ndarray, labels: np.ndarray, batch_size: int) -> Any:
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    found = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images))
    return found.batch(batch_size, drop_remainder=True).prefetch(2).with_options(options)


def _measured(run: Run, records: Path) -> dict[str, Any]:
    asked = json.dumps([run.model, run.batch_size, run.shape, str(records)])
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, __file__, "--child", asked],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{run.model} did not train (status {done.returncode}): {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _estimates(run: Run, calibration: Path) -> tuple[Any, Any]:
    """Predictions from the calibration, and from the datasheet of this processor alone."""
    import forerun
    from forerun.question.devices import find_device

    asked: dict[str, Any] = {
        "batch_size": run.batch_size,
        "optimizer": "adam",
        "dataset_size": run.num_samples,
    }
    return (
        forerun.predict(run.model, device="here", calibration=calibration, **asked),
        forerun.predict(run.model, device=find_device("here"), **asked),
    )


def _line_over_work(records: Path) -> tuple[float, float]:
    """A [s] and b [s/FLOP] of t = a + b * FLOP through the measured steps of whole models."""
    import forerun
    from forerun.evidence.calibrate import LOOP_MODEL
    from forerun.evidence.records.measurement import JobKind, Outcome
    from forerun.evidence.records.record_store import RecordStore
    from forerun.question.devices import find_device

    with RecordStore.open(records, create=False) as store:
        steps = [
            m for m in store.measurements(kind=JobKind.STEP, outcome=Outcome.DONE) if m.subject != LOOP_MODEL
        ]
    rows = []
    for step in steps:
        batch_size, image_size = (int(str(step.parameters[name])) for name in ("batch_size", "image_size"))
        found = forerun.predict(
            step.subject, device=find_device("here"), batch_size=batch_size, image_size=image_size
        )
        rows.append((batch_size * found.flops_per_sample, float(np.median(step.repetitions_s))))
    work, times = np.asarray(rows).T
    columns = np.stack([np.ones(len(work)), work], axis=1) / times[:, None]
    (a, b), *_ = np.linalg.lstsq(columns, np.ones(len(work)), rcond=None)
    return float(a), float(b)


def _calibrate(minutes: float, folder: Path) -> tuple[Path, Path]:
    import forerun

    file, records = folder / "keras.safetensors", folder / "keras.sqlite"
    found = forerun.calibrate(framework="keras", minutes=minutes, out=file, records=records)
    print(
        f"calibration: {found.num_layers} layers, {found.num_models} models, {found.duration_s:.0f} s; "
        f"a step of fit takes {1e3 * found.step_cost_s:.1f} ms beside its operations"
    )
    for model in found.models:
        print(f"  {model.model:28s} batch {model.batch_size:3d} {1e3 * model.measured_s:8.1f} ms, left out "
              f"{model.after_s / model.measured_s - 1:+.0%}")  # fmt: skip
    return file, records


def _report(calibration: Path, records: Path, own: Path) -> None:
    a, b = _line_over_work(records)
    print(f"{'network':34s} batch  step: measured  predicted (90 %)            error   epoch: measured  "
          "predicted (90 %)          error   datasheet alone  line over FLOP   epochs on arrays (waits)")  # fmt: skip
    errors = []
    for run in RUNS:
        measured = _measured(run, own)
        found, plain = _estimates(run, calibration)
        line_s = BATCHES * (a + b * run.batch_size * found.flops_per_sample)
        step, epoch = found.step_time_s, found.epoch_time_s
        epoch_s = measured["epoch_time_s"]
        row = (epoch.value / epoch_s - 1, plain.epoch_time_s.value / epoch_s - 1, line_s / epoch_s - 1)
        errors.append(row)
        name = Path(run.model).name if ".py:" in run.model else run.model
        print(
            f"{name:34s} {run.batch_size:5d}  {1e3 * measured['step_time_s']:11.2f} ms  "
            f"{1e3 * step.value:7.2f} ({1e3 * step.low:.2f} to {1e3 * step.high:.2f}) ms  "
            f"{step.value / measured['step_time_s'] - 1:+7.1%}  {epoch_s:13.3f} s  "
            f"{epoch.value:6.3f} ({epoch.low:.3f} to {epoch.high:.3f}) s  "
            f"{row[0]:+7.1%}  {row[1]:+14.0%}  {row[2]:+13.0%}   "
            + " ".join(
                f"{epoch_s:.2f} ({start_s:.2f})"
                for epoch_s, start_s in zip(measured["epochs_on_arrays_s"], measured["starts_s"], strict=True)
            )
        )
    mean = np.abs(np.asarray(errors)).mean(axis=0)
    print(f"mean absolute error of the epoch: calibrated {mean[0]:.1%}, datasheet alone {mean[1]:.0%}, line over "
          f"FLOP {mean[2]:.0%}; largest calibrated {np.abs(np.asarray(errors))[:, 0].max():.1%}")  # fmt: skip


def main() -> None:
    """Reads the options, calibrates unless told not to, measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2.5, help="Time of the calibration.")
    parser.add_argument("--calibration", type=Path, help="Take this one instead of making it.")
    parser.add_argument("--records", type=Path, help="Its records, for the line over FLOP.")
    parser.add_argument("--keep", type=Path, help="Folder that keeps the calibration and all records.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        _fit(*json.loads(asked.child))
        return
    if (asked.calibration is None) != (asked.records is None):
        parser.error("--calibration and --records go together")
    with tempfile.TemporaryDirectory(prefix="forerun-epoch-") as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        files = (asked.calibration, asked.records) if asked.calibration else _calibrate(asked.minutes, folder)
        _report(*files, folder / "fit.sqlite")


if __name__ == "__main__":
    main()
