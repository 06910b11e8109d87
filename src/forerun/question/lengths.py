"""Lengths of the samples of a dataset, and the way in which a batch holds them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypedDict

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.question.settings import setting

__all__ = ["CHARACTERS_PER_TOKEN", "Batching", "SampleLengths", "Samples", "SamplesOptions", "read_lengths"]

CHARACTERS_PER_TOKEN = 4.4
"""Characters of English text a token, where no tokens are counted; vocabularies of 32,000 to 128,000 words differ by a
tenth from it."""

_LAW = re.compile(r"lognormal:(.*)")
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


def read_lengths(words: str) -> SampleLengths:
    """Lengths from a file, or from a law such as ``lognormal:median=600,p95=3000,max=8192``.

    A CSV file has a column of token counts, called length or tokens, or numbers alone. A line of JSON has such a count,
    a list ``input_ids``, or texts, whose characters are counted at ``CHARACTERS_PER_TOKEN`` a token.

    >>> found = read_lengths("lognormal:median=600,p95=3000")
    >>> sorted(found.tokens)[2048]
    600

    Raises:
        UsageError: The file cannot be read, or holds no lengths; the law lacks a number.
    """
    law = _LAW.fullmatch(words.strip())
    if law is not None:
        return _of_law(law[1])
    path = Path(words).expanduser()
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise UsageError(
            f"cannot read the lengths '{words}': {error.strerror}; give a .jsonl or .csv file, or "
            "lognormal:median=600,p95=3000"
        ) from None
    return _of_file(path, changed)


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
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"cannot read the lengths '{path}': {error}; give token counts or texts, one a line"
        ) from None
    if not tokens:
        raise UsageError(f"'{path}' holds no samples; give token counts or texts, one a line")
    return SampleLengths(tokens=tuple(tokens), num_samples=len(tokens), source=source)


def _of_csv(file: Any) -> tuple[list[int], str]:
    import csv

    rows = [row for row in csv.reader(file) if row]
    if not rows:
        return [], ""
    head = [name.strip().lower() for name in rows[0]]
    column = next((head.index(name) for name in _COUNTS if name in head), None)
    body = rows if column is None and head[0].replace(".", "", 1).isdigit() else rows[1:]
    if column is None and body is not rows:
        raise ValueError(f"expected a column called {', '.join(_COUNTS[:3])}, got {', '.join(head)}")
    return [max(1, round(float(row[column or 0]))) for row in body], "token counts of the file"


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
    return [max(1, each) for each in found], source


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


_samples = partial(setting, group="job", only_changed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples of unequal length."""

    lengths: str | None = _samples(
        None,
        help="Lengths of the samples: a .jsonl or .csv file of token counts or texts, or a law such as "
        "lognormal:median=600,p95=3000; --sequence-length then cuts them.",
        metavar="FILE",
        is_local=True,
    )
    batching: Batching = _samples(
        Batching.PADDED,
        help="With --lengths: batches of unequal samples: padded, grouped (by length), dynamic (constant tokens), "
        "packed or padding-free.",
    )

    def __post_init__(self) -> None:
        if self.lengths is None and self.batching is not Batching.PADDED:
            raise InvalidSetupError(
                f"--batching {self.batching} has no meaning without --lengths; give the lengths of your samples"
            )
        if self.lengths is not None:
            read_lengths(self.lengths)


class SamplesOptions(TypedDict, total=False):
    """Samples of unequal length by name."""

    lengths: str | None
    batching: str | None
