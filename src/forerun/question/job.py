"""The job around the steps: datasets by name, the data loader as plain numbers, and lengths of samples in batches."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from forerun.base.errors import InvalidSetupError, UsageError, near_matches
from forerun.base.tables import own_table
from forerun.question.settings import (
    Setting,
    check_numbers,
    flags,
    from_settings,
    names_needing,
    refuse,
    setting,
)

if TYPE_CHECKING:
    from forerun.graph.graph import ExpertLoad


_COUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE)
COUNT_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
"""Factors of the letters behind a count, such as 15B."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Size of a dataset.

    Attributes:
        name: Name on the command line.
        num_training_samples: Samples of the training split.
        num_validation_samples: Samples of the validation or test split that training scripts evaluate on.
        source: Source of the figures.
        image_size: Height and width of its images, None where they differ or are none [pixels].
    """

    name: str
    num_training_samples: int
    num_validation_samples: int
    source: str
    image_size: int | None = None


DATASETS = {name: Dataset(name, **entry) for name, entry in own_table(__file__, "datasets.toml").items()}


def find_dataset(name: str) -> Dataset:
    """A dataset by name.

    Raises:
        InvalidSetupError: The name is not known.
    """
    # Libraries write CIFAR-10, cifar10, FashionMNIST and imagenet-1k.
    plain = re.sub(r"[-_ ]|(?<!2)1k$", "", name.lower())
    found = next((one for known, one in DATASETS.items() if known.replace("-", "") == plain), None)
    if found is None:
        raise InvalidSetupError(
            f"unknown dataset '{name}'{near_matches(name, DATASETS)}; known: {', '.join(DATASETS)}; "
            "for any other give --dataset-size"
        )
    return found


_OF_ANY_SIZE = re.compile(
    r"(?:torchvision:|timm:|keras:)?(?:(?P<small>(?:wide_|se|eca|sk|xcep)?res(?:net|next|2net|2next)|mobilenet|shufflenet|"
    r"mnasnet|(?:tf_)?efficientnet|ghostnet)|vgg|densenet|regnet|(?:tf_)?mixnet|repvgg|convnext|dla)(?![a-z]*-)",
    re.IGNORECASE,
)
"""Networks of convolutions and one pooling over all places: images of 32 pixels and more, the ``small`` ones of 28."""


def size_of_images(model: Any, given: Mapping[str, Any]) -> int | None:
    """Height and width of a dataset's images, for a network that takes any and a question that names none [pixels].

    Others, such as those with positions, are trained on images resized to their own size: None.

    >>> size_of_images("resnet18", {"dataset": "cifar10"}), size_of_images("vit_b_16", {"dataset": "cifar10"})
    (32, None)

    Raises:
        InvalidSetupError: The dataset is not known.
    """
    is_open = given.get("image_size") is None and given.get("input_shape") is None
    if given.get("dataset") is None or not is_open or not isinstance(model, str):
        return None
    kind, size = _OF_ANY_SIZE.match(model), find_dataset(given["dataset"]).image_size
    least = 28 if kind and kind["small"] and not model.startswith("keras:") else 32
    return size if kind and size and size >= least else None


def parse_count(amount: str | float) -> float:
    """A number of tokens or samples from a number or a text with a letter for thousand, million, billion or trillion.

    >>> parse_count("15B"), parse_count("1.5T"), parse_count(300_000)
    (15000000000.0, 1500000000000.0, 300000.0)

    Raises:
        InvalidSetupError: It is no such number, or none at all.
    """
    match = _COUNT.fullmatch(str(amount).strip().replace(",", ""))
    count = float(match[1]) * COUNT_FACTORS[match[2].lower()] if match else 0.0
    if not 1 <= count <= 1e18:
        raise InvalidSetupError(f"expected a number such as 50000, 300M, 15B or 1.5T, got {str(amount)!r}")
    return count


_job = partial(setting, group="job")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job around its steps.

    Attributes:
        drop_last: Whether a last partial batch is left out.
        image_size: Height and width of the dataset's images, None where they are not known [pixels].
    """

    num_samples: int = _job(
        name="dataset_size",
        help="Training samples of one epoch, for a dataset that forerun does not know.",
        metavar="1M",
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
    image_size: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self)


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
    # A setting of a job without a job would be ignored in silence.
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
    return Job(**{**from_settings(Job, given), **own}, image_size=known.image_size if known else None)


def _job_of_tokens(given: Mapping[str, Any]) -> Job:
    """One pass over as many samples as hold the tokens."""
    refuse(
        given,
        ("dataset", "dataset_size", "epochs", "validation_size", "validate"),
        "--tokens is the length of the whole job",
        "leave --tokens out",
    )
    length = given.get("sequence_length")
    if given.get("lengths") is not None:
        counts = read_lengths(given["lengths"]).tokens
        length = sum(min(each, length or each) for each in counts) / len(counts)
    if length is None:
        raise InvalidSetupError(
            "--tokens needs the tokens of one sample: give --sequence-length, such as 4096"
        )
    tokens = parse_count(given["tokens"])
    # A budget of tokens is one pass, however often the data behind it repeats.
    own = {"num_samples": max(1, ceil(tokens / length)), "num_epochs": 1.0, "num_tokens": tokens}
    return Job(**{**from_settings(Job, given), **own})


CHARACTERS_PER_TOKEN = 4.4
"""Characters of English text a token, where no tokens are counted; vocabularies of 32,000 to 128,000 words differ by a
tenth from it."""

_LAW = re.compile(r"lognormal:(.*)")
_NUMBERS = re.compile(r"\d{1,8}(,\d{1,8})*")
_DRAWN = 4096
_COUNTS = ("length", "num_tokens", "n_tokens", "tokens", "input_ids", "token_count")


class Batching(StrEnum):
    """Samples of unequal length in one batch."""

    PADDED = "padded"
    """Drawn at random and filled up to the longest of the batch."""
    GROUPED = "grouped"
    """The same among samples of similar length (group_by_length of Transformers)."""
    DYNAMIC = "dynamic"
    """As many samples of similar length as keep the tokens of a batch."""
    PACKED = "packed"
    """Joined to rows of the sequence length, which attention takes as one."""
    PADDING_FREE = "padding-free"
    """Laid end to end without filling; attention stays within each sample (FlashAttention's varlen kernels)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLengths:
    """Lengths of samples.

    Attributes:
        tokens: Tokens of each sample, in the order of the file; of a law, of its quantiles.
        num_samples: Samples of an epoch; None if only the law of their lengths is known.
        source: Where the tokens come from, in words.
    """

    tokens: tuple[int, ...]
    num_samples: int | None
    source: str


def _lengths_in_words(given: str | Sequence[int]) -> str:
    return given if isinstance(given, str) else ",".join(map(str, given))


def read_lengths(given: str | Sequence[int]) -> SampleLengths:
    """Lengths from numbers, a file, or a law such as ``lognormal:median=600,p95=3000,max=8192``.

    A CSV file has a column of token counts, called length or tokens, or numbers alone. A line of JSON has such a count,
    a list ``input_ids``, or texts, whose characters are counted at ``CHARACTERS_PER_TOKEN`` a token.

    >>> found = read_lengths("lognormal:median=600,p95=3000")
    >>> sorted(found.tokens)[2048]
    600

    Raises:
        UsageError: The file cannot be read, or holds no lengths; the law lacks a number.
    """
    words = _lengths_in_words(given)
    if _NUMBERS.fullmatch(words):
        return _of_numbers(words)
    law = _LAW.fullmatch(words.strip())
    if law is not None:
        return _of_law(law[1])
    path = Path(words).expanduser()
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise UsageError(
            f"cannot read the lengths '{words[:200]}': {error.strerror}; give a .jsonl or .csv file, numbers such as "
            "180,420, or lognormal:median=600,p95=3000"
        ) from None
    return _of_file(path, changed)


@lru_cache(maxsize=64)
def _of_numbers(words: str) -> SampleLengths:
    tokens = tuple(map(int, words.split(",")))
    if min(tokens) < 1:
        raise InvalidSetupError("a sample has at least one token, got a length of 0; leave such samples out")
    return SampleLengths(tokens=tokens, num_samples=len(tokens), source="the lengths given")


@lru_cache(maxsize=64)
def _of_law(words: str) -> SampleLengths:
    given = dict(part.split("=", 1) for part in words.split(",") if "=" in part)
    try:
        median, p95 = (float(given.pop(name)) for name in ("median", "p95"))
        most = float(given.pop("max", math.inf))
    except (KeyError, ValueError):
        median, p95, most = 0.0, 0.0, 0.0
    if given or not 1 <= median <= p95 <= 1e8 or most < median:
        raise InvalidSetupError(
            "a law of lengths is lognormal:median=600,p95=3000, with max=8192 if there is a longest sample; got "
            f"'{words}'"
        )
    from statistics import NormalDist  # brings fractions and decimals along

    spread = math.log(p95 / median) / NormalDist().inv_cdf(0.95)
    # Quantiles in place of draws: the same question always has the same answer.
    quantiles = (NormalDist().inv_cdf((k + 0.5) / _DRAWN) for k in range(_DRAWN))
    tokens = tuple(round(max(1.0, min(most, median * math.exp(spread * each)))) for each in quantiles)
    return SampleLengths(tokens=tokens, num_samples=None, source="a lognormal law")


@lru_cache(maxsize=8)
def _of_file(path: Path, changed: int) -> SampleLengths:
    import csv

    read = _of_csv if path.suffix.lower() in (".csv", ".txt") else _of_json
    try:
        with path.open(encoding="utf-8", newline="") as file:
            tokens, source = read(file)
    except (OSError, ValueError, OverflowError, csv.Error) as error:
        raise UsageError(
            f"cannot read the lengths '{path}': {error}; give token counts or texts, one a line"
        ) from None
    if not tokens:
        raise UsageError(f"'{path}' holds no samples; give token counts or texts, one a line")
    if min(tokens) < 0:
        raise UsageError(f"'{path}': a sample has zero or more tokens, got {min(tokens):,}; correct the file")
    return SampleLengths(
        tokens=tuple(max(1, each) for each in tokens), num_samples=len(tokens), source=source
    )


def _of_csv(file: Any) -> tuple[list[int], str]:
    import csv

    rows = [row for row in csv.reader(file) if row]
    if not rows:
        return [], ""
    head = [name.strip().lower() for name in rows[0]]
    column = next((head.index(name) for name in _COUNTS if name in head), None)
    # A file of numbers alone has no header to skip.
    body = rows if column is None and head[0].replace(".", "", 1).isdigit() else rows[1:]
    if column is None and body is not rows:
        raise ValueError(f"expected a column called {', '.join(_COUNTS[:3])}, got {', '.join(head)}")
    return [round(float(row[column or 0])) for row in body], "token counts of the file"


def _of_json(file: Any) -> tuple[list[int], str]:
    found, counted = [], False
    for line in filter(str.strip, file):
        sample = json.loads(line)
        count = (
            next((sample[name] for name in _COUNTS if name in sample), None)
            if isinstance(sample, dict)
            else None
        )
        counted = counted or count is not None
        if isinstance(count, list):
            found.append(len(count))
        elif count is not None:
            found.append(round(float(count)))
        else:
            found.append(math.ceil(sum(map(len, _texts(sample))) / CHARACTERS_PER_TOKEN))
    source = "token counts of the file" if counted else f"{CHARACTERS_PER_TOKEN} characters a token"
    return found, source


def _texts(part: Any) -> Iterator[str]:
    """All texts in a sample: those of fields, and of the messages of a conversation."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for value in part.values():
            yield from _texts(value)
    elif isinstance(part, Sequence):
        for value in part:
            yield from _texts(value)


def read_expert_load(words: str, num_experts: int, num_chosen: float) -> ExpertLoad:
    """Tokens of experts from a law or a file.

    Zipf's law gives the n-th of e experts n^-s times the tokens of the first. A token that chooses k of them goes to
    each at most once, so that none has more than e/k times the mean: what is above goes to the others.

    Args:
        words: ``even``, ``zipf:1.2``, or a ``.csv`` or ``.json`` file with the tokens of each expert.
        num_experts: Experts of a block.
        num_chosen: Experts of a token.

    >>> [round(each, 2) for each in read_expert_load("zipf:1", 4, 1).parts]
    [1.92, 0.96, 0.64, 0.48]

    Raises:
        InvalidSetupError: The law is not known, or the file has another number of experts.
    """
    from forerun.graph.graph import ExpertLoad  # brings NumPy along

    words = str(words)  # Python may give a number
    law = re.fullmatch(r"zipf:(\d+(?:\.\d+)?)", words)
    if words == "even" or (law and float(law[1]) == 0):
        return ExpertLoad((1.0,) * num_experts, has_places=False)
    if law and float(law[1]) <= 10:
        parts = [(rank + 1) ** -float(law[1]) for rank in range(num_experts)]
        return ExpertLoad(_within(parts, num_experts / max(num_chosen, 1.0)), has_places=False)
    if not words.lower().endswith((".csv", ".json", ".jsonl")):
        raise InvalidSetupError(
            f"--expert-load must be even, zipf:1.2 with an exponent up to 10, or a .csv or .json file, got '{words}'"
        )
    tokens = read_lengths(words).tokens
    if len(tokens) != num_experts:
        raise InvalidSetupError(
            f"the model has {num_experts} experts in a block, but '{words}' gives the tokens of {len(tokens)}; give "
            "a line for each expert"
        )
    return ExpertLoad(_within(tokens, float(num_experts)), has_places=True)


def _within(tokens: Sequence[float], most: float) -> tuple[float, ...]:
    """Tokens in parts of their mean, none above ``most``."""
    parts = [each * len(tokens) / sum(tokens) for each in tokens]
    # What is taken from the fullest goes to the others, which may then become too full.
    while max(parts) > most * (1 + 1e-9):
        free = [each for each in parts if each < most]
        room = len(parts) - most * (len(parts) - len(free))
        parts = [most if each >= most else each * room / sum(free) for each in parts]
    return tuple(parts)


_samples = partial(setting, group="job", only_changed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples of unequal length."""

    lengths: str | None = _samples(
        None,
        help="Lengths of the samples: a .jsonl or .csv file of token counts or texts, counts such as 180,420, or a law "
        "such as lognormal:median=600,p95=3000; --sequence-length then cuts them.",
        metavar="FILE",
        is_local=True,
        read=_lengths_in_words,
    )
    batching: Batching = _samples(
        Batching.PADDED,
        help="With --lengths: how unequal samples are batched: padded, grouped (by length), dynamic (constant tokens), "
        "packed or padding-free; with ppo and grpo padded or padding-free answers.",
    )

    def __post_init__(self) -> None:
        if self.lengths is not None:
            read_lengths(self.lengths)


TIME_MARGIN = 1.15
"""Margin beyond the upper end of the 90 % interval, for slow starts and epochs; a job that is cut off is lost."""

_MARGIN_FLOOR_S = 300.0


def time_limit_s(job_high_s: float) -> int:
    """Time limit to ask a scheduler for [s]: 1.15 times the upper end of the job's time and 5 min, in whole minutes."""
    return ceil((job_high_s * TIME_MARGIN + _MARGIN_FLOOR_S) / 60) * 60


class SamplesOptions(TypedDict, total=False):
    """Samples of unequal length by name."""

    lengths: str | Sequence[int] | None
    batching: str | None


_input = partial(setting, group="input")
MOST_WORKERS = 10_000


_loader = partial(_input, needs="loader")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPipeline:
    """A data loader of one training process; a bandwidth that is None is no limit."""

    sample_cost_s: float = _input(
        name="loader_ms",
        unit=1e-3,
        help="Time that one processor core takes to decode and augment a sample [ms].",
        words="time of a sample [ms]",
        low=0,
        high=1e6,
    )
    num_workers: int = _loader(
        8,
        name="loader_workers",
        help="Worker processes of each device's data loader.",
        words="number of workers",
        low=0,
        high=MOST_WORKERS,
    )
    num_cores: float | None = _loader(
        None,
        name="loader_cores",
        help="Processor cores that the workers of the data loader share.",
        words="number of cores",
        default="one per worker",
        above=0,
        high=1e6,
    )
    sample_bytes: float = _loader(
        0.0,
        name="sample_kb",
        unit=1e3,
        help="Size of a stored sample [kB].",
        words="size of a sample [kB]",
        low=0,
        high=1e9,
        only_changed=True,
    )
    storage_bytes_per_s: float | None = _loader(
        None,
        name="storage_mb_s",
        unit=1e6,
        help="Reading bandwidth of the storage [MB/s].",
        words="storage bandwidth [MB/s]",
        above=0,
        high=1e9,
    )
    network_bytes_per_s: float | None = _loader(
        None,
        name="network_mb_s",
        unit=1e6,
        help="Bandwidth of the network to the storage [MB/s].",
        words="network bandwidth [MB/s]",
        above=0,
        high=1e9,
    )

    def __post_init__(self) -> None:
        check_numbers(self)


class LoaderOptions(TypedDict, total=False):
    """Settings of the data loader by name."""

    loader_ms: float | None
    loader_workers: int | None
    loader_cores: float | None
    sample_kb: float | None
    storage_mb_s: float | None
    network_mb_s: float | None


def loader_from(given: Mapping[str, Any]) -> InputPipeline | None:
    """The data loader from settings by name; None if batches are always ready.

    Raises:
        InvalidSetupError: A setting has no meaning without the time of a sample.
    """
    if "loader_ms" in given:
        return InputPipeline(**from_settings(InputPipeline, given))
    named = [name for name in names_needing(InputPipeline, "loader") if name in given]
    if named:
        raise InvalidSetupError(
            f"{flags(named)}: the input pipeline needs --loader-ms as well; give the time of a sample"
        )
    return None
