"""From a step to an epoch and a job."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from forerun.errors import InvalidSetupError, near_matches
from forerun.prediction.estimate import Interval

__all__ = ["DATASETS", "Dataset", "Job", "JobTimes", "find_dataset", "job_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Size of a dataset.

    Attributes:
        name: Name on the command line.
        num_training_samples: Samples of the training split.
        num_validation_samples: Samples of the validation or test split that training scripts evaluate on.
        source: Where the figures come from.
    """

    name: str
    num_training_samples: int
    num_validation_samples: int
    source: str


def _dataset(name: str, training: int, validation: int, source: str) -> Dataset:
    return Dataset(name=name, num_training_samples=training, num_validation_samples=validation, source=source)


DATASETS = {
    dataset.name: dataset
    for dataset in (
        _dataset("cifar10", 50_000, 10_000, "Krizhevsky 2009"),
        _dataset("cifar100", 50_000, 10_000, "Krizhevsky 2009"),
        _dataset("mnist", 60_000, 10_000, "LeCun, Cortes and Burges 1998"),
        _dataset("fashion-mnist", 60_000, 10_000, "Xiao, Rasul and Vollgraf 2017"),
        _dataset("svhn", 73_257, 26_032, "Netzer et al. 2011"),
        _dataset("stl10", 5_000, 8_000, "Coates, Lee and Ng 2011"),
        _dataset("imagenet", 1_281_167, 50_000, "Russakovsky et al. 2015, ILSVRC 2012"),
        _dataset("imagenet21k", 14_197_122, 0, "Deng et al. 2009, fall 2011 release"),
        _dataset("coco", 118_287, 5_000, "Lin et al. 2014, 2017 split"),
        _dataset("voc2012", 5_717, 5_823, "Everingham et al. 2012, classification split"),
        _dataset("patchcamelyon", 262_144, 32_768, "Veeling et al. 2018"),
        _dataset("food101", 75_750, 25_250, "Bossard, Guillaumin and Van Gool 2014"),
        _dataset("flowers102", 1_020, 1_020, "Nilsback and Zisserman 2008"),
        _dataset("intel-image", 14_034, 3_000, "Intel Image Classification, Kaggle 2018"),
        _dataset("digits", 1_797, 0, "scikit-learn, load_digits"),
        _dataset("squad", 87_599, 10_570, "Rajpurkar et al. 2016, version 1.1"),
    )
}


def find_dataset(name: str) -> Dataset:
    """A dataset by name.

    Raises:
        InvalidSetupError: The name is not known.
    """
    found = DATASETS.get(name.lower().replace("_", "-")) or DATASETS.get(name.lower().replace("-", ""))
    if found is None:
        raise InvalidSetupError(
            f"unknown dataset '{name}'{near_matches(name, DATASETS)}; known: {', '.join(DATASETS)}; "
            "for any other give --dataset-size"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job around its steps.

    Attributes:
        num_samples: Training samples of an epoch.
        num_epochs: Epochs, None if only one epoch is asked about.
        num_validation_samples: Samples evaluated after each epoch.
        startup_s: Time before the first step: start of the process, first compilation, cache warm-up [s].
        checkpoint_s: Time to write one checkpoint, after each epoch [s].
        drop_last: Whether a last partial batch is left out.
    """

    num_samples: int
    num_epochs: float | None = None
    num_validation_samples: int = 0
    startup_s: float = 0.0
    checkpoint_s: float = 0.0
    drop_last: bool = False

    def __post_init__(self) -> None:
        positive = {"dataset size": self.num_samples, "number of epochs": self.num_epochs}
        for name, value in positive.items():
            if value is not None and not 0 < value < inf:
                raise InvalidSetupError(f"{name} must be above zero and finite, got {value}")
        not_negative = {
            "validation size": self.num_validation_samples,
            "start-up time": self.startup_s,
            "checkpoint time": self.checkpoint_s,
        }
        for name, value in not_negative.items():
            if not 0 <= value < inf:
                raise InvalidSetupError(f"{name} must be zero or more and finite, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """Times of an epoch and of the job, and the steps of an epoch."""

    num_steps_per_epoch: int
    epoch_time_s: Interval
    job_time_s: Interval | None


def job_times(
    job: Job,
    global_batch_size: int,
    step_s: Interval,
    last_step_s: Interval,
    validation_step_s: Interval | None,
) -> JobTimes:
    """Epoch and job from the times of single steps.

    epoch = full steps * step + last partial step + validation steps * forward + checkpoint
    job = start-up + epochs * epoch

    The interval of a step is one unknown factor, the same in every step, so it scales with the sum.

    Args:
        job: The job.
        global_batch_size: Samples of one step over all devices.
        step_s: Time of a full step.
        last_step_s: Time of the step with the samples that are left over.
        validation_step_s: Forward time of a validation batch of the same size, None without validation.
    """
    num_full, rest = divmod(job.num_samples, global_batch_size)
    has_last = rest > 0 and not job.drop_last
    if not num_full and not has_last:
        raise InvalidSetupError(
            f"an epoch has no step: {job.num_samples} samples at a global batch of {global_batch_size} "
            "with the last partial batch dropped; choose a smaller batch"
        )
    num_validation = ceil(job.num_validation_samples / global_batch_size) if validation_step_s else 0

    def total(name: str) -> float:
        value: float = num_full * getattr(step_s, name) + (getattr(last_step_s, name) if has_last else 0.0)
        if validation_step_s is not None:
            value += num_validation * getattr(validation_step_s, name)
        return value + job.checkpoint_s

    epoch = Interval(total("value"), total("low"), total("high"))
    whole = epoch.scaled(job.num_epochs).shifted(job.startup_s) if job.num_epochs is not None else None
    return JobTimes(num_steps_per_epoch=num_full + has_last, epoch_time_s=epoch, job_time_s=whole)
