"""Datasets by name, and the job around the steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Annotated, Any, TypedDict

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.question.settings import Setting, from_settings, refuse, setting

__all__ = ["DATASETS", "Dataset", "Job", "JobOptions", "find_dataset", "job_from", "parse_tokens"]

_COUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Size of a dataset.

    Attributes:
        name: Name on the command line.
        num_training_samples: Samples of the training split.
        num_validation_samples: Samples of the validation or test split that training scripts evaluate on.
        source: Source of the figures.
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


def parse_tokens(amount: str | float) -> float:
    """A number of tokens from a number or a text with a letter for thousand, million, billion or trillion.

    >>> parse_tokens("15B"), parse_tokens("1.5T"), parse_tokens(300_000)
    (15000000000.0, 1500000000000.0, 300000.0)

    Raises:
        InvalidSetupError: It is no such number, or none at all.
    """
    match = _COUNT.fullmatch(str(amount).strip().replace(",", ""))
    tokens = float(match[1]) * _FACTORS[match[2].lower()] if match else 0.0
    if not 1 <= tokens <= 1e18:
        raise InvalidSetupError(f"tokens are a number such as 300M, 15B or 1.5T, got {str(amount)!r}")
    return tokens


_job = partial(setting, group="job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job around its steps.

    Attributes:
        drop_last: Whether a last partial batch is left out.
    """

    num_samples: int = _job(
        name="dataset_size",
        help="Training samples of one epoch, for any other dataset.",
        low=1,
        high=10**15,
    )
    num_tokens: float | None = _job(
        None,
        name="tokens",
        help="Tokens of the whole job in place of a dataset, such as 300M or 15B; needs the sequence length.",
        metavar="15B",
    )
    num_epochs: float | None = _job(
        None, name="epochs", help="Epochs of the job.", words="number of epochs", above=0, high=1e9
    )
    num_validation_samples: int = _job(
        0,
        name="validation_size",
        help="Validation samples evaluated after each epoch.",
        low=0,
        high=10**15,
        only_changed=True,
    )
    startup_s: float = _job(
        0.0,
        help="Time before the first step [s].",
        words="start-up time",
        default="0",
        low=0,
        high=1e9,
        only_changed=True,
    )
    checkpoint_s: float = _job(
        0.0,
        help="Time to write the checkpoint after each epoch [s].",
        words="checkpoint time",
        default="0",
        low=0,
        high=1e9,
        only_changed=True,
    )
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


class JobOptions(TypedDict, total=False):
    """Settings of a job by name; a dataset says its samples."""

    dataset: Annotated[
        str | None,
        Setting(help="Dataset that forerun knows, such as cifar10 or imagenet.", group="job", metavar="NAME"),
    ]
    dataset_size: int | None
    tokens: str | float | None
    epochs: float | None
    validation_size: int | None
    validate: Annotated[
        bool | None,
        Setting(help="Evaluate the validation split of the dataset after each epoch.", group="job"),
    ]
    startup_s: float | None
    checkpoint_s: float | None


def job_from(given: Mapping[str, Any]) -> Job | None:
    """The job from settings by name; None if only the step is asked about.

    Raises:
        InvalidSetupError: Settings contradict each other, or have no meaning without a dataset.
    """
    if "tokens" in given:
        return _job_of_tokens(given)
    dataset, dataset_size = given.get("dataset"), given.get("dataset_size")
    if dataset is not None and dataset_size is not None:
        raise InvalidSetupError("give either a dataset or a dataset size, not both")
    if dataset is None and dataset_size is None:
        needing = {
            "epochs": "epochs",
            "validation_size": "validation size",
            "validate": "validate",
            "startup_s": "start-up time",
            "checkpoint_s": "checkpoint time",
        }
        needed = [words for name, words in needing.items() if given.get(name)]
        if needed:
            raise InvalidSetupError(
                f"{', '.join(needed)}: expected a dataset as well; give --dataset NAME or --dataset-size N"
            )
        return None
    known = find_dataset(dataset) if dataset is not None else None
    validation_size = given.get("validation_size")
    if given.get("validate") and validation_size is None:
        if known is None or not known.num_validation_samples:
            whose = f"the dataset {known.name} has" if known else "a dataset size alone has"
            raise InvalidSetupError(f"{whose} no validation split to evaluate; give --validation-size N")
        validation_size = known.num_validation_samples
    num_samples = known.num_training_samples if known else dataset_size
    assert num_samples is not None
    own = {"num_samples": num_samples, "num_validation_samples": validation_size or 0}
    return Job(**{**from_settings(Job, given), **own})


def _job_of_tokens(given: Mapping[str, Any]) -> Job:
    """One pass over as many samples as hold the tokens."""
    refuse(
        given,
        ("dataset", "dataset_size", "epochs", "validation_size", "validate"),
        "--tokens is the length of the whole job",
        "leave --tokens out",
    )
    length = given.get("sequence_length")
    if length is None:
        raise InvalidSetupError(
            "--tokens needs the tokens of one sample: give --sequence-length, such as 4096"
        )
    tokens = parse_tokens(given["tokens"])
    own = {"num_samples": max(1, ceil(tokens / length)), "num_epochs": 1.0, "num_tokens": tokens}
    return Job(**{**from_settings(Job, given), **own})
