"""An epoch of samples of unequal length: mean step, peak over the epoch, and the batches that would not fit.

Steps are worked out at a few lengths, and lie between them on straight lines of logarithms; sums over a batch, which
kernels without padding and batches of constant tokens need, follow from the law ``a + b N + c S``: N tokens and S
squares of lengths, as products grow with tokens and attention with their squares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError
from forerun.base.numerics import relative_coefficients
from forerun.prediction.estimate import BreakdownPart, Estimate, Interval
from forerun.question.job import Batching, SampleLengths, Samples, read_lengths
from forerun.question.run import Run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NUM_KNOTS = 4
_SHORTEST = 32
_MOST_STEPS = 2_000
"""Steps that stand for an epoch: their mean is known to 0.5 % at a coefficient of variation of 0.2."""
_GROUPED_BATCHES = 50
"""Batches of samples that are sorted together (``LengthGroupedSampler`` of Transformers: trainer_pt_utils.py)."""


def has_lengths(run: Run) -> bool:
    """True if the samples of a run have lengths of their own."""
    return run.samples.lengths is not None


def refuse_lengths(run: Run) -> None:
    """Refuses samples of unequal length where many runs are compared by arrays.

    Raises:
        InvalidSetupError: The run has lengths.
    """
    if has_lengths(run):
        raise InvalidSetupError(
            "--lengths is answered by forerun predict, scale and advise, one run at a time; compare many runs at one "
            "length: give --sequence-length instead"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """Micro-batches of an epoch, in groups of one step of all devices, (steps, micro-steps, replicas).

    Attributes:
        longest: Tokens of the longest sample.
        samples: Samples.
        tokens: Tokens without filling.
        squares: Sum of the squares of the lengths.
    """

    longest: Floats
    samples: Floats
    tokens: Floats
    squares: Floats


def epoch_estimate(run: Run, estimate_at: Callable[[Run], Estimate]) -> Estimate:
    """The estimate of a run whose samples have lengths of their own.

    Time, rate, epoch and job are those of the mean step; the peak is that of the largest batch of the epoch.

    Args:
        run: The run.
        estimate_at: Estimate of a run whose samples are all of one length.
    """
    known = read_lengths(run.samples.lengths or "")
    cut = run.model.sequence_length or max(known.tokens)
    tokens = np.minimum(np.asarray(known.tokens, dtype=np.float64), cut)
    longest = int(tokens.max())
    kind = run.samples.batching
    plain = replace(run, samples=Samples())
    if kind is Batching.PACKED:
        return _packed(plain, tokens, cut, estimate_at, known)
    knots = np.unique(np.geomspace(min(_SHORTEST, longest), longest, _NUM_KNOTS).round()).astype(int)
    answers = [estimate_at(_at(plain, int(knot))) for knot in knots]
    batches = _drawn(tokens, run, longest)
    ends = {
        end: _step_s(knots, np.asarray([getattr(each.step_time_s, end) for each in answers]), batches, run)
        for end in ("low", "value", "high")
    }
    mean = Interval(*(float(ends[end].mean()) for end in ("value", "low", "high")))
    return _told(run, answers, knots, batches, mean, tokens, known)


def _at(run: Run, length: int) -> Run:
    return replace(run, model=replace(run.model, sequence_length=length))


def _drawn(tokens: Floats, run: Run, longest: int) -> _Batches:
    """The batches of an epoch, or of as many steps as tell its mean, drawn with a fixed seed."""
    # The same question gets the same answer.
    rng = np.random.default_rng(0)
    size, micro, replicas = (
        run.setup.batch_size_per_device,
        run.sharing.num_accumulation_steps,
        run.num_replicas,
    )
    each = size * micro * replicas
    wanted = max(each, min(_MOST_STEPS * each, max(len(tokens), 64 * each), 4_000_000))
    drawn = np.concatenate([rng.permutation(tokens) for _ in range(-(-wanted // len(tokens)))])[:wanted]
    kind = run.samples.batching
    if kind in (Batching.GROUPED, Batching.DYNAMIC):
        group = _GROUPED_BATCHES * each
        parts = [np.sort(drawn[k : k + group])[::-1] for k in range(0, len(drawn), group)]
        drawn = np.concatenate(parts)
    if kind is Batching.DYNAMIC:
        rows = _of_constant_tokens(drawn, size * longest)
        rng.shuffle(rows)
    else:
        count = len(drawn) // size
        rows = list(drawn[: count * size].reshape(count, size))
    count = max(1, len(rows) // (micro * replicas))
    rows = (rows * (micro * replicas))[: count * micro * replicas]
    shape = (count, micro, replicas)
    return _Batches(
        longest=np.asarray([row.max() for row in rows]).reshape(shape),
        samples=np.asarray([float(len(row)) for row in rows]).reshape(shape),
        tokens=np.asarray([row.sum() for row in rows]).reshape(shape),
        squares=np.asarray([(row**2).sum() for row in rows]).reshape(shape),
    )


def _of_constant_tokens(ordered: Floats, budget: float) -> list[Floats]:
    """Batches of samples in their order, each with at most so many tokens once filled up."""
    rows, begin = [], 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or (end + 1 - begin) * ordered[begin : end + 1].max() > budget:
            rows.append(ordered[begin:end])
            begin = end
    return rows


def _step_s(knots: Ints, at_knots: Floats, batches: _Batches, run: Run) -> Floats:
    """Time of each step, (steps,) [s]: micro-steps after each other, the slowest replica setting the pace."""
    kind, size = run.samples.batching, run.setup.batch_size_per_device
    if kind in (Batching.PADDED, Batching.GROUPED):
        found = np.exp(np.interp(np.log(batches.longest), np.log(knots), np.log(at_knots)))
    else:
        law = np.stack([np.ones(len(knots)), size * knots, size * knots.astype(float) ** 2], axis=1)
        shares = relative_coefficients(law, at_knots)
        if kind is Batching.PADDING_FREE:
            inputs = (batches.tokens, batches.squares)
        else:
            inputs = (batches.samples * batches.longest, batches.samples * batches.longest**2)
        found = shares[0] + shares[1] * inputs[0] + shares[2] * inputs[1]
    # Fully sharded devices meet in every block, replicas that keep their weights only once a step.
    if run.sharing.strategy.stage == 3:
        return np.asarray(found.max(axis=2).mean(axis=1))
    return np.asarray(found.mean(axis=1).max(axis=1))


def _told(
    run: Run,
    answers: Sequence[Estimate],
    knots: Ints,
    batches: _Batches,
    mean: Interval,
    tokens: Floats,
    known: SampleLengths,
) -> Estimate:
    """The estimate at the longest sample, with the times of the mean step."""
    longest, size = answers[-1], run.setup.batch_size_per_device
    ratio = mean.value / longest.step_time_s.value
    filled = batches.tokens / np.where(
        run.samples.batching is Batching.PADDING_FREE, batches.tokens, batches.samples * batches.longest
    )
    samples = float(batches.samples.sum(axis=(1, 2)).mean())
    rate = samples * float(tokens.mean())
    # Work of samples that were filled up to the longest is not done here: its share is that of the tokens.
    done = rate / (run.batch_size_global * float(knots[-1])) / ratio
    per_epoch = run.batch_size_global / samples
    notes = [
        f"{_words(tokens, known)}, {run.samples.batching}: {100 * (1 - float(filled.mean())):.0f} % of the tokens are "
        "padding; the step is the mean of an epoch, the peak memory is for its largest batch",
        *_limit_notes(answers, knots, batches, size),
    ]
    return replace(
        longest,
        run=run,
        step_time_s=mean,
        throughput_samples_per_s=mean.inverse(samples),
        tokens_per_s=mean.inverse(rate),
        tokens_per_s_per_device=mean.inverse(rate / run.cluster.num_devices),
        mfu=None if longest.mfu is None else longest.mfu.scaled(done),
        hfu=None if longest.hfu is None else longest.hfu.scaled(done),
        epoch_time_s=_scaled(longest.epoch_time_s, ratio * per_epoch),
        job_time_s=_scaled(longest.job_time_s, ratio * per_epoch),
        cost_usd=_scaled(longest.cost_usd, ratio * per_epoch),
        energy_j=_scaled(longest.energy_j, ratio * (per_epoch if run.job else 1.0)),
        breakdown=tuple(BreakdownPart(part.name, part.time_s * ratio) for part in longest.breakdown),
        notes=(*notes, *longest.notes),
    )


def _words(tokens: Floats, known: SampleLengths) -> str:
    span = f"{tokens.min():,.0f} to {tokens.max():,.0f}"
    return f"samples of {span} tokens, {tokens.mean():,.0f} in the mean ({known.source})"


def _scaled(part: Interval | None, factor: float) -> Interval | None:
    return None if part is None else part.scaled(factor)


def _limit_notes(answers: Sequence[Estimate], knots: Ints, batches: _Batches, size: int) -> list[str]:
    """The longest sample that fits, and how soon an epoch comes upon a longer one."""
    peaks = [each.peak_memory_bytes.value for each in answers if each.peak_memory_bytes is not None]
    limit = answers[-1].device_memory_bytes
    if len(peaks) < len(answers) or not limit:
        return []
    if peaks[0] > limit:
        return ["not even the shortest samples fit: a smaller batch would"]
    if peaks[-1] <= limit:
        # Beyond the longest sample asked, memory is taken to grow as between the last two lengths.
        slope = (peaks[-1] - peaks[-2]) / (knots[-1] - knots[-2]) if len(knots) > 1 else 0.0
        if slope <= 0:
            return []
        most = knots[-1] + (limit - peaks[-1]) / slope
        return [f"samples of up to about {most:,.0f} tokens fit in a batch of {size}"]
    fits = float(np.interp(limit, peaks, knots))
    over = np.any(batches.longest > fits, axis=(1, 2)).reshape(-1)
    share = float(over.mean())
    when = f"about one step in {1 / share:,.0f}" if share else "fewer than one step in " + f"{len(over):,}"
    return [
        f"samples of up to about {fits:,.0f} tokens fit in a batch of {size}; {when} would run out of memory: cut the "
        "samples there with --sequence-length, or take a smaller batch"
    ]


def _packed(
    run: Run, tokens: Floats, cut: int, estimate_at: Callable[[Run], Estimate], known: SampleLengths
) -> Estimate:
    """The estimate of samples joined to rows of one length: a row holds as many as its tokens."""
    per_row = cut / float(tokens.mean())
    if run.job is not None:
        rows = max(1, round(run.job.num_samples / per_row))
        run = replace(run, job=replace(run.job, num_samples=rows))
    found = estimate_at(_at(run, cut))
    words = f"packed: a row of {cut:,} tokens holds {per_row:.1f} of them; samples a second are rows"
    note = f"{_words(tokens, known)}, {words}"
    return replace(found, notes=(note, *found.notes))
