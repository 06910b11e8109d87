"""An epoch of samples of unequal length: mean step, peak over the epoch, and the batches that would not fit.

Steps are worked out at a few lengths, and lie between them on straight lines of logarithms; sums over a batch, which
kernels without padding and batches of constant tokens need, follow from the law ``a + b N + c S``: N tokens and S
squares of lengths, as products grow with tokens and attention with their squares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.base.numerics import relative_coefficients
from forerun.graph.graph import Floats, Ints
from forerun.prediction.estimate import BreakdownPart, Estimate, Interval
from forerun.prediction.memory import shown_memory
from forerun.question.job import Batching, SampleLengths, Samples, read_lengths
from forerun.question.run import Run

_NUM_KNOTS = 4
_SHORTEST = 32
_MOST_STEPS = 2_000
"""Steps that stand for an epoch: their mean is known to 0.5 % at a coefficient of variation of 0.2."""
_GROUPED_BATCHES = 50
"""Batches of samples that are sorted together (``LengthGroupedSampler`` of Transformers: trainer_pt_utils.py)."""
_SCATTERED = 2.0
"""Upper end of reserved memory over the need of the largest batch, where lengths come in no order: 95 % of 53 runs of
ms-swift. Blocks of shorter batches stay in the cache of the allocator until memory is short. Grouped samples begin with
the longest, whose blocks serve all others: so does litgpt, whose 27 runs hold what the batch needs."""


def has_lengths(run: Run) -> bool:
    """True if the samples of a run have lengths of their own."""
    return run.samples.lengths is not None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStep:
    """Mean step of an epoch.

    Attributes:
        time_s: Their time [s].
        samples: Samples of all devices.
        batches: The batches of which they are made.
    """

    time_s: Interval
    samples: float
    batches: _Batches


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenEpoch:
    """Samples with lengths of their own, and the few lengths at which steps are worked out for them.

    Attributes:
        known: Lengths as they were given.
        tokens: Tokens of each sample once cut, (samples,).
        knots: Lengths at which steps are asked, rising to the longest sample; that of a row of packed ones.
    """

    known: SampleLengths
    tokens: Floats
    knots: Ints

    @classmethod
    def of(cls, run: Run) -> UnevenEpoch:
        """The epoch of a run that has lengths."""
        known = read_lengths(run.samples.lengths or "")
        cut = run.model.sequence_length or max(known.tokens)
        tokens = np.minimum(np.asarray(known.tokens, dtype=np.float64), cut)
        longest = int(tokens.max())
        knots = np.unique(np.geomspace(min(_SHORTEST, longest), longest, _NUM_KNOTS).round()).astype(int)
        return cls(
            known=known,
            tokens=tokens,
            knots=np.asarray([cut]) if run.samples.batching is Batching.PACKED else knots,
        )

    def runs(self, run: Run) -> list[Run]:
        """The run with samples that are all as long as each of the knots."""
        if run.samples.batching is Batching.PACKED and run.job is not None:
            rows = max(1, round(run.job.num_samples / self.per_row))
            run = replace(run, job=replace(run.job, num_samples=rows))
        models = [replace(run.model, sequence_length=int(knot)) for knot in self.knots]
        return [replace(run, samples=Samples(), model=each) for each in models]

    @property
    def per_row(self) -> float:
        """Samples of a packed row."""
        return float(self.knots[-1]) / float(self.tokens.mean())

    @property
    def words(self) -> str:
        """The samples in words."""
        span = f"{self.tokens.min():,.0f} to {self.tokens.max():,.0f}"
        return f"samples of {span} tokens, {self.tokens.mean():,.0f} in the mean ({self.known.source})"

    def note(self, run: Run) -> str:
        """Remark on the samples in an answer that compares many runs."""
        return f"{self.words}, {run.samples.batching}: steps are the mean of an epoch, memory that of its largest batch"

    def peak(self, run: Run, peak: Interval, device_bytes: float) -> Interval:
        """Memory of the largest batch, with what the allocator may hold of others while the device has it [bytes]."""
        in_order = run.samples.batching in (Batching.GROUPED, Batching.PACKED)
        is_mixed = not in_order and self.tokens.min() < self.tokens.max()
        most = min(_SCATTERED * peak.value, device_bytes) if is_mixed else 0.0
        return Interval(peak.value, peak.low, max(peak.high, most))

    def mean_step(self, run: Run, at_knots: Floats) -> MeanStep:
        """The mean step of an epoch.

        Args:
            run: The run, whose samples are not packed.
            at_knots: Value, low and high of a step whose samples are as long as each knot, (knots, 3) [s].
        """
        batches = _drawn(self.tokens, run, int(self.knots[-1]))
        value, low, high = (float(_step_s(self.knots, end, batches, run).mean()) for end in at_knots.T)
        samples = float(batches.samples.sum(axis=(1, 2)).mean())
        return MeanStep(time_s=Interval(value, low, high), samples=samples, batches=batches)


def epoch_estimate(run: Run, estimate_at: Callable[[Run], Estimate]) -> Estimate:
    """The estimate of a run whose samples have lengths of their own.

    Time, rate, epoch and job are those of the mean step; the peak is that of the largest batch of the epoch.

    Args:
        run: The run.
        estimate_at: Estimate of a run whose samples are all of one length.
    """
    epoch = UnevenEpoch.of(run)
    answers = [estimate_at(each) for each in epoch.runs(run)]
    if run.samples.batching is Batching.PACKED:
        words = f"a row of {epoch.knots[-1]:,} tokens holds {epoch.per_row:.1f} of them; samples a second are rows"
        note = f"{epoch.words}, packed: {words}"
        return replace(answers[0], notes=(note, *answers[0].notes))
    ends = np.asarray([each.step_time_s.ends for each in answers])
    return _told(run, answers, epoch, epoch.mean_step(run, ends))


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


def _told(run: Run, answers: Sequence[Estimate], epoch: UnevenEpoch, mean: MeanStep) -> Estimate:
    """The estimate at the longest sample, with the times of the mean step."""
    longest, size, batches = answers[-1], run.setup.batch_size_per_device, mean.batches
    ratio, peak = mean.time_s.value / longest.step_time_s.value, longest.peak_memory_bytes
    most = None if peak is None else epoch.peak(run, peak, longest.device_memory_bytes)
    filled = batches.tokens / np.where(
        run.samples.batching is Batching.PADDING_FREE, batches.tokens, batches.samples * batches.longest
    )
    rate = mean.samples * float(epoch.tokens.mean())
    # Work of samples that were filled up to the longest is not done here: its share is that of the tokens.
    done = rate / (run.batch_size_global * float(epoch.knots[-1])) / ratio
    per_epoch = run.batch_size_global / mean.samples
    notes = [
        f"{epoch.words}, {run.samples.batching}: {100 * (1 - float(filled.mean())):.0f} % of the tokens are padding; "
        "the step is the mean of an epoch, the peak memory is for its largest batch",
        *_limit_notes(answers, epoch.knots, batches, size),
    ]
    return replace(
        longest,
        run=run,
        step_time_s=mean.time_s,
        peak_memory_bytes=most,
        shown_memory_bytes=shown_memory(run, most, longest.device_memory_bytes)
        if most and longest.shown_memory_bytes
        else None,
        throughput_samples_per_s=mean.time_s.inverse(mean.samples),
        tokens_per_s=mean.time_s.inverse(rate),
        tokens_per_s_per_device=mean.time_s.inverse(rate / run.cluster.num_devices),
        mfu=None if longest.mfu is None else longest.mfu.scaled(done),
        hfu=None if longest.hfu is None else longest.hfu.scaled(done),
        epoch_time_s=_scaled(longest.epoch_time_s, ratio * per_epoch),
        job_time_s=_scaled(longest.job_time_s, ratio * per_epoch),
        cost_usd=_scaled(longest.cost_usd, ratio * per_epoch),
        energy_j=_scaled(longest.energy_j, ratio * (per_epoch if run.job else 1.0)),
        breakdown=tuple(BreakdownPart(part.name, part.time_s * ratio) for part in longest.breakdown),
        top_layers=tuple(replace(layer, time_s=layer.time_s * ratio) for layer in longest.top_layers),
        notes=(*notes, *longest.notes),
    )


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
