"""Steps of post-training and generation, composed of traced passes of the same model.

=========  ==================================================================================================
algorithm  passes before the forward and backward pass of the policy
=========  ==================================================================================================
``dpo``    the reference over both answers of a pair
``orpo``   none; a sample is a pair
``kto``    the policy over a mismatched answer, the reference over both
``reward`` none; a sample is a pair, the head has one value
``grpo``   the answer is written; log-probabilities of the policy and of the reference
``ppo``    the same, the reward model, the value model, and the training of the value model
=========  ==================================================================================================

Sources: huggingface/trl, ``trl/trainer/``: ``dpo_trainer.py``, ``orpo_trainer.py``, ``kto_trainer.py``,
``reward_trainer.py``, ``ppo_trainer.py``; NVIDIA-NeMo/RL, ``nemo_rl/algorithms/grpo.py``. A reference that shares the
frozen weights of adapters is the model without them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.errors import InvalidSetupError
from forerun.cost.time.rows import MATRIX_CLASSES, joined_kernels
from forerun.graph.graph import AllocationKind, Graph, OpClass, OpTable, expert_products
from forerun.graph.passes import (
    Held,
    Pass,
    joined_tables,
    of_samples,
    pass_rows,
    step_of_passes,
    taken_rows,
    with_samples,
)
from forerun.prediction.estimate import BreakdownPart, Generation, Interval
from forerun.prediction.step import PreparedModel, StepPrediction
from forerun.question.job import read_lengths
from forerun.question.model import POSITIONS, ModelRequest, find_architecture
from forerun.question.post_training import PLAIN, Algorithm, Engine, PostTraining
from forerun.question.run import Run
from forerun.question.setup import Phase, Precision, TrainingSetup

PREFILL = "prefill"
DECODE = "decode"
CRITIC = "critic"
OWN_PASS = "forward, backward and update"
_PAIRS = (Algorithm.DPO, Algorithm.ORPO, Algorithm.REWARD, Algorithm.CONTRASTIVE)
_DEFAULT_TOKENS = 2048
_OF_ONE_DEVICE = ("algorithm", "new_tokens", "answer_lengths", "engine", "reference", "packs_answers")
_ONLINE_NOTES = ("the scoring of answers and the loading of data are not counted",)
_ALL_EXPERTS = 4.0
"""Tokens of each expert from which on hardly any, e^-4 of them, has none."""
_REPLAYED = 2.0
"""``law_size`` of streams that an engine replays and of products of single tokens, see ``kernel_laws``."""
_OTHER_PRECISIONS = {
    Precision.AMP: Precision.FP16,
    Precision.AMP_BF16: Precision.BF16,
    Precision.FP8: Precision.BF16,
}

_Trace = Callable[[ModelRequest, TrainingSetup], Graph]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of a sample.

    Attributes:
        prompt: Those of the prompt.
        new: Those that are written; of unequal answers those of the longest of a batch.
        mean: Those of an answer in the mean.
        mean_context: Tokens that a pass over a written one sees in the mean.
    """

    prompt: int
    new: int
    mean: float
    mean_context: float

    @property
    def steps(self) -> int:
        """Passes over one token: the pass over the prompt gives the first, and the last one is not read."""
        return self.new - 1

    @property
    def alive(self) -> float:
        """Share of the answers that are not done yet, in the mean over these passes."""
        return (self.mean - 1) / self.steps if self.steps else 1.0


def tokens_of(request: ModelRequest, setup: TrainingSetup) -> Tokens:
    """The prompt and the written tokens of a sample.

    The longest of B answers has E[max] = sum over the sorted lengths x_i of x_i ((i/n)^B - ((i-1)/n)^B) tokens. The L-1
    passes over tokens of an answer of L see the prompt and L/2 tokens of the answer in the mean.

    Raises:
        InvalidSetupError: Nothing is left for the prompt.
        UsageError: The lengths of the answers cannot be read.
    """
    total = request.sequence_length or min(_DEFAULT_TOKENS, _num_positions(request.model))
    new = setup.post.new_tokens or total // 2
    if not 1 <= new < total:
        raise InvalidSetupError(
            f"{new:,} new tokens leave no prompt in a sequence of {total:,}; give a --sequence-length above "
            f"{new:,}, which counts the prompt and the answer, or fewer --new-tokens"
        )
    prompt, law = total - new, setup.post.answer_lengths
    if law is None:
        return Tokens(prompt=prompt, new=new, mean=new, mean_context=prompt + new / 2)
    if (known := setup.post.mean_answer_tokens) is not None:
        if known > new:
            raise InvalidSetupError(
                f"the mean length of the answers must be at most the {new:,} --new-tokens of the longest, got "
                f"{known:,.0f}; give a shorter mean, or more --new-tokens"
            )
        return Tokens(prompt=prompt, new=new, mean=known, mean_context=prompt + known / 2)
    lengths = np.minimum(np.sort(np.asarray(read_lengths(law).tokens, dtype=np.float64)), new)
    below = (np.arange(len(lengths) + 1) / len(lengths)) ** setup.batch_size_per_device
    mean = float(lengths.mean())
    return Tokens(
        prompt=prompt,
        new=max(1, round(float(lengths @ np.diff(below)))),
        mean=mean,
        # Answers of a single token have no pass over a token, and no context to take the mean of.
        mean_context=prompt + float((lengths * (lengths - 1)).sum() / max(1.0, (lengths - 1).sum())) / 2,
    )


def composed_step(request: ModelRequest, setup: TrainingSetup, trace: _Trace) -> Graph:
    """The graph of a step of post-training, or of a batch of answers.

    Args:
        request: The model.
        setup: The setup, with an algorithm or the phase ``generate``.
        trace: Traces a plain step.

    Raises:
        InvalidSetupError: The model writes no tokens, or has no head with one value.
        UsageError, FailureError: It cannot be built or traced.
    """
    if setup.post != PostTraining(**{name: getattr(setup.post, name) for name in _OF_ONE_DEVICE}):
        raise InvalidSetupError(
            "--generation-tensor and --generation-on need several devices, got one; give more, such as --num-devices 8"
        )
    trace = cache(trace)  # passes of one shape are one trace, also of models that are kept nowhere
    if setup.generates and request.sequence_length is None:
        plain = _Parts(request, replace(setup, post=PLAIN), setup.post, trace, None)
        _check_reads_tokens(trace(request, plain.inference))
    tokens = _checked_tokens(request, setup, trace)
    if tokens is not None:
        # What is trained on is filled up to the longest answer, unless it is laid end to end.
        answer = tokens.mean if setup.post.packs_answers else tokens.new
        request = replace(request, sequence_length=round(tokens.prompt + answer))
    parts = _Parts(request, replace(setup, post=PLAIN), setup.post, trace, tokens)
    if setup.phase is Phase.GENERATE:
        return parts.generation()
    found: Graph = _step_of(setup.post, parts)
    return found


def _checked_tokens(request: ModelRequest, setup: TrainingSetup, trace: _Trace) -> Tokens | None:
    """Tokens of a sample, None where none are written; a model without so many positions refuses its prompt and answer.

    Raises:
        InvalidSetupError: It has fewer positions, or nothing is left for the prompt.
    """
    if not setup.generates:
        return None
    if (request.sequence_length or 0) > _num_positions(request.model):
        # Rotary positions go on beyond the number in the configuration, which the library knows.
        trace(request, _Parts(request, replace(setup, post=PLAIN), setup.post, trace, None).inference)
    return tokens_of(request, setup)


def divided_step(
    request: ModelRequest, setup: TrainingSetup, trace: _Trace
) -> tuple[Graph, dict[str, Graph]]:
    """The training step of a run whose devices divide it, and the graphs of its other passes by their names.

    Raises:
        InvalidSetupError: The model writes no tokens, or has no head with one value.
        UsageError, FailureError: It cannot be built or traced.
    """
    tokens = _checked_tokens(request, setup, trace)
    if tokens is not None:  # trainers of many devices pack their samples
        request = replace(request, sequence_length=round(tokens.prompt + tokens.mean))
    post = replace(setup.post, packs_answers=True)
    parts = _Parts(request, replace(setup, post=PLAIN), post, trace, tokens)
    found, beside = (parts.with_head() if setup.post.algorithm.is_headed else parts).training(), {}
    if setup.post.algorithm is Algorithm.PPO:
        beside[CRITIC] = parts.with_head().training()
    if tokens is None:
        return found, beside
    beside |= {PREFILL: parts.prompt(tokens), DECODE: parts.one_token()}
    return replace(found, notes=(*found.notes, parts.answers(), *_ONLINE_NOTES)), beside


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherPass:
    """A pass before that of the policy, of a step that devices divide.

    Attributes:
        name: Its name.
        times: Sequences of each sample, over those of the policy.
        is_trained: Whether it has a backward pass and an update as well.
        has_own_weights: Whether its model is not the policy.
        is_headed: Whether its model has a head of one value.
    """

    name: str
    times: int = 1
    is_trained: bool = False
    has_own_weights: bool = True
    is_headed: bool = False


@dataclass(frozen=True, slots=True)
class _Named:
    """The passes of an algorithm by name: what ``_Parts`` composes of graphs."""

    is_headed: bool = False

    def with_head(self) -> _Named:
        return _Named(is_headed=True)

    def writing(self) -> tuple[OtherPass, ...]:
        return ()  # engines have a division of their own

    def forward(self, name: str, **kind: Any) -> OtherPass:
        return OtherPass(name=name, is_headed=self.is_headed, **kind)

    def trained(self, name: str) -> OtherPass:
        return OtherPass(name=name, is_headed=True, is_trained=True)

    def step(self, *passes: OtherPass) -> tuple[OtherPass, ...]:
        return passes


def other_passes(setup: TrainingSetup) -> tuple[OtherPass, ...]:
    """Passes without answers before that of the policy, in their order."""
    found: tuple[OtherPass, ...] = _step_of(setup.post, _Named())
    return found


def generating_setup(request: ModelRequest, setup: TrainingSetup) -> TrainingSetup:
    """The setup in which an engine writes the answers of a step."""

    def none(request: ModelRequest, setup: TrainingSetup) -> Graph:
        raise AssertionError("a setup needs no trace")

    return _Parts(request, replace(setup, post=PLAIN), setup.post, none, None).generating


def passes_of(model: PreparedModel, step: StepPrediction) -> tuple[BreakdownPart, ...]:
    """The passes of a step in their order, with times that add up to the step."""
    ops, rows = model.graph.ops, pass_rows(model.graph.ops)
    row_s = (step.kernel_s / model.ops.count)[model.ops.group_of_row] * ops.count
    sums = {name or OWN_PASS: float(row_s[found].sum()) for name, found in rows.items()}
    # Where the host is waited for, every pass waits by its share.
    scale = step.step_s.value / sum(sums.values())
    return tuple(BreakdownPart(name, time_s * scale) for name, time_s in sums.items())


def generation_of(
    model: PreparedModel, run: Run, step: StepPrediction, passes: Sequence[BreakdownPart]
) -> Generation | None:
    """The part of a step that writes tokens, None without one."""
    times = {part.name: part.time_s for part in passes}
    if PREFILL not in times:
        return None
    tokens, batch = tokens_of(run.model, run.setup), run.setup.batch_size_per_device
    shape = cache_shape(run.model, model.graph.ops)
    layers = float((model.graph.ops.op_class[pass_rows(model.graph.ops)[PREFILL]] == OpClass.ATTENTION).sum())
    cache_bytes = shape.bytes_per_token * layers * batch * (tokens.prompt + tokens.new)
    return generation_figures(tokens, step.step_s, times[PREFILL], times.get(DECODE, 0.0), batch, cache_bytes)


def generation_figures(
    tokens: Tokens, step_s: Interval, prefill_s: float, decode_s: float, batch_size: float, cache_bytes: float
) -> Generation:
    """Figures of the writing of a batch of answers.

    Args:
        tokens: Tokens of an answer.
        step_s: The step, whose relative error its parts have [s].
        prefill_s: Passes over the prompts [s].
        decode_s: Passes over single tokens [s].
        batch_size: Answers.
        cache_bytes: Their keys and values [bytes].
    """
    relative = step_s.scaled(1 / step_s.value)
    first_s = relative.scaled(prefill_s)
    token_s = relative.scaled(decode_s / tokens.steps) if tokens.steps else None
    return Generation(
        prompt_tokens=tokens.prompt,
        new_tokens=tokens.new,
        time_to_first_token_s=first_s,
        time_per_token_s=token_s,
        new_tokens_per_s=(token_s or first_s).inverse(batch_size * tokens.alive),
        cache_bytes=cache_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Passes of one step."""

    request: ModelRequest
    setup: TrainingSetup
    post: PostTraining
    trace: _Trace
    tokens: Tokens | None

    @property
    def num_samples(self) -> int:
        """Sequences of a sample."""
        return 2 if self.post.algorithm in _PAIRS else 1

    @property
    def inference(self) -> TrainingSetup:
        """The setup of a pass without gradients: adapters and what saves memory in training have no part in it."""
        return replace(self.setup.for_inference(), keeps_gradients=False)

    def with_head(self) -> _Parts:
        """The same with a head of one value."""
        return replace(self, request=replace(self.request, num_classes=1))

    def training(self) -> Graph:
        """The forward and backward pass of the policy, with the update."""
        found = self.trace(self.request, self.setup)
        _check_reads_tokens(found)
        return with_samples(found, self.num_samples)

    def forward(self, name: str, *, times: int = 1, has_own_weights: bool = True) -> Pass:
        """A forward pass without gradients over the sequences of a sample, several times if wanted."""
        found = self.trace(self.request, self.inference)
        is_adapted = self.setup.saving.lora_rank is not None
        kept = (self.weights(found),) if has_own_weights and not is_adapted else ()
        found = with_samples(found, self.num_samples * times)
        return Pass(name=name, ops=found.ops, memory=found.memory, kept=kept)

    def weights(self, graph: Graph) -> Held:
        """Weights of a model of its own."""
        element_bytes = 2 if self.setup.precision.is_half and not self.setup.precision.is_autocast else 4
        return Held((graph.num_parameters * float(element_bytes), 0.0), AllocationKind.BUFFER)

    def step(self, *passes: Pass) -> Graph:
        """The whole step, with a note of what it consists of."""
        policy = self.training()
        sequences = "2 sequences" if self.num_samples == 2 else "1 sequence"
        tokens = (policy.tokens_per_sample or 0) // self.num_samples
        before = ", ".join(item.name for item in passes) or "none"
        note = (
            f"{self.post.algorithm}: a sample is {sequences} of {tokens:,} tokens; passes before that of the policy: "
            f"{before}"
        )
        joined = step_of_passes(policy, passes)
        return replace(
            joined,
            only_batch_size=joined.only_batch_size or self.only_batch_size,
            notes=(*joined.notes, note, *self._notes()),
        )

    def _notes(self) -> tuple[str, ...]:
        if self.post.algorithm is Algorithm.CONTRASTIVE:
            return (
                "similarities of the pairs of a batch are left out: 6 B^2 d FLOP of B pairs with d values",
            )
        if not self.post.algorithm.is_online:
            return ()
        return (f"{self.answers()}; generation and training take turns on the same devices",)

    def answers(self) -> str:
        """Lengths of the answers as a note."""
        assert self.tokens is not None
        if self.post.answer_lengths is None:
            return "answers are taken as equally long (--answer-lengths says otherwise)"
        leaves = (
            "those that are done leave the batch"
            if self.post.engine is Engine.VLLM
            else "all are computed until it is done"
        )
        laid = "; passes over whole answers have no padding" if self.post.packs_answers else ""
        return (
            f"answers have {self.tokens.mean:,.0f} tokens in the mean and the longest of a batch {self.tokens.new:,}: "
            f"{leaves}{laid}"
        )

    def writing(self) -> tuple[Pass, ...]:
        """The passes that write an answer: the prompt at once, then token by token."""
        assert self.tokens is not None
        tokens, one = self.tokens, self.one_token()
        is_fused = self.post.engine is Engine.VLLM
        shape = cache_shape(self.request, one.ops)
        if not is_fused:
            written_out = self.trace(replace(self.request, sequence_length=1), self.generating).ops
            shape = replace(shape, copied_bytes=_copied_bytes(written_out, shape.num_heads))
        context = tokens.mean_context if is_fused else tokens.prompt + tokens.new / 2
        alive = tokens.alive if is_fused else 1.0
        decode = decode_ops(
            one.ops, context, tokens.steps, shape, self.only_batch_size, self.post.engine, alive=alive
        )
        pairs = Held(
            (0.0, shape.bytes_per_token * num_attentions(one.ops) * (tokens.prompt + tokens.new)),
            AllocationKind.ACTIVATION,
        )
        own = is_fused and self.setup.phase is not Phase.GENERATE
        copy = (Held((2.0 * one.num_parameters, 0.0), AllocationKind.BUFFER),) if own else ()
        prefill = prefill_ops(self.prompt(tokens).ops, one.ops, self.post.engine)
        if not tokens.steps:
            return (Pass(name=PREFILL, ops=prefill, kept=copy, held=(pairs,)),)
        return Pass(name=PREFILL, ops=prefill, kept=copy), Pass(name=DECODE, ops=decode, held=(pairs,))

    def trained(self, name: str) -> Pass:
        """Forward and backward pass with the update of a model of its own."""
        found = self.training()
        states = Held(_state_bytes(found), AllocationKind.OPTIMIZER_STATE)
        return Pass(name=name, ops=found.ops, memory=found.memory, kept=(states,))

    def prompt(self, tokens: Tokens) -> Graph:
        """The pass over a prompt."""
        return self.trace(replace(self.request, sequence_length=tokens.prompt), self.generating)

    @property
    def generating(self) -> TrainingSetup:
        precision = _OTHER_PRECISIONS.get(self.inference.precision, self.inference.precision)
        saving = replace(self.inference.saving, fused_kernels=(), fp8_recipe=None)
        saving = replace(saving, lora_rank=None, lora_targets=(), lora_dropout=0.0)
        if saving.quantize is not None and self.setup.phase is not Phase.GENERATE:
            # Engines write with weights in 16 bits.
            saving = replace(saving, quantize=None, unquantized=None, keep_inputs=False)
        is_fused = self.inference.fused_attention or self.post.engine is Engine.VLLM
        return replace(self.inference, precision=precision, saving=saving, fused_attention=is_fused)

    def one_token(self) -> Graph:
        """The pass over a single token."""
        found = self.trace(replace(self.request, sequence_length=1), self.generating)
        _check_reads_tokens(found)
        found = replace(
            found, ops=_with_fused_attention(found.ops, keeps_launches=self.post.engine is not Engine.VLLM)
        )
        if not (found.ops.op_class == OpClass.ATTENTION).any():
            raise InvalidSetupError(
                "generation is predicted for models whose attention is recognised, and none was found in "
                f"{self.request.model}; ask for --phase inference"
            )
        return found

    @property
    def only_batch_size(self) -> int | None:
        """The batch size, where a token of each sample leaves experts without one; None if all have some."""
        if self.setup.phase is not Phase.GENERATE and not self.post.algorithm.is_online:
            return None
        batch = self.setup.batch_size_per_device
        if self.post.answer_lengths is not None:
            return batch  # the longest of more answers is longer
        return batch if leaves_experts_out(self.one_token().ops, batch) else None

    def generation(self) -> Graph:
        """A batch of answers of a model alone."""
        one, passes = self.one_token(), self.writing()
        assert self.tokens is not None
        nothing = replace(one, ops=taken_rows(one.ops, np.arange(0)), model_flops=(0.0, 0.0))
        tokens = self.tokens
        found = step_of_passes(nothing, passes)
        note = (
            f"a step writes {tokens.new:,} token{'s' if tokens.steps else ''} of each sample after a prompt of "
            f"{tokens.prompt:,}; tokens a second are those written"
            if self.post.answer_lengths is None
            else f"after a prompt of {tokens.prompt:,} tokens {self.answers()}; tokens a second are those written"
        )
        return replace(
            found,
            tokens_per_sample=round(tokens.mean),
            input_shape=(tokens.prompt,),
            only_batch_size=self.only_batch_size,
            notes=(*found.notes, note),
        )


def _check_reads_tokens(graph: Graph) -> None:
    if graph.tokens_per_sample is None:
        raise InvalidSetupError(
            f"post-training and generation need a language model, and {graph.model} reads no tokens; leave "
            "--algorithm out, or ask for --phase train or inference"
        )


def _step_of(post: PostTraining, parts: Any) -> Any:
    """The step of ``_Parts``, a graph, or of ``_Named``, its passes before that of the policy."""
    match post.algorithm:
        case Algorithm.ORPO:
            return parts.step()
        case Algorithm.REWARD | Algorithm.CONTRASTIVE:
            return parts.with_head().step()
        case Algorithm.DPO:
            return parts.step(parts.forward("reference"))
        case Algorithm.KTO:
            mismatched = parts.forward("mismatched answers", has_own_weights=False)
            return parts.step(mismatched, parts.forward("reference", times=2))
    written = (
        *parts.writing(),
        parts.forward("log-probabilities", has_own_weights=False),
        *((parts.forward("reference"),) if post.reference else ()),
    )
    if post.algorithm is Algorithm.GRPO:
        return parts.step(*written)
    headed = parts.with_head()
    # PPO: the value model is as large as the policy, and is trained as it is.
    values = headed.forward("reward"), headed.forward("value"), headed.trained("value training")
    return parts.step(*written, *values)


def _state_bytes(graph: Graph) -> tuple[float, float]:
    """State of the optimizer, which stays from step to step [bytes]."""
    constant, slope = graph.memory.size_bytes[graph.memory.kind == AllocationKind.OPTIMIZER_STATE].sum(axis=0)
    return float(constant), float(slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Keys and values of one layer.

    Attributes:
        num_heads: Heads that have keys of their own; None if each head of the queries has.
        key_size, value_size: Numbers of a key and of a value; 0 for a value that is a part of its key.
        copied_bytes: Traffic of copies of a token's keys and values that attention makes where it is written out.
    """

    num_heads: int
    key_size: int
    value_size: int
    copied_bytes: float = 0.0

    @property
    def bytes_per_token(self) -> float:
        """Two-byte numbers of a token."""
        return 2.0 * self.num_heads * (self.key_size + self.value_size)


def cache_shape(request: ModelRequest, ops: OpTable) -> CacheShape:
    """The shape of the cache, from the configuration of the model where it has one, else from its first attention."""
    config = _text_configuration(request.model)
    first = int(np.flatnonzero(ops.op_class == OpClass.ATTENTION)[0])
    heads, size = round(ops.gemm[first, 0, 1]), round(ops.gemm[first, 3, 0])
    latent = config.get("kv_lora_rank")
    if latent:  # multi-head latent attention: one latent and one rotary part serve all heads
        return CacheShape(num_heads=1, key_size=latent + config.get("qk_rope_head_dim", 64), value_size=0)
    return CacheShape(num_heads=config.get("num_key_value_heads") or heads, key_size=size, value_size=size)


def _num_positions(model: str) -> int:
    """Tokens for which a configuration has positions; no limit where none is known."""
    config = _text_configuration(model)
    return next(
        (value for key in POSITIONS if isinstance(value := config.get(key), int) and value > 0), sys.maxsize
    )


def _text_configuration(model: str) -> Mapping[str, Any]:
    """The configuration of a model, or of the language model inside of it; empty where none is known."""
    known, (prefix, _, rest) = find_architecture(model), model.partition(":")
    config: Mapping[str, Any] = {} if known is None else known.config
    if known is None and prefix == "hf":
        from forerun.tracing.models.hub import is_hub_name, kept_config_path

        path = kept_config_path(rest) if is_hub_name(rest) else Path(rest).expanduser()
        path = path / "config.json" if path.is_dir() else path
        with suppress(OSError, ValueError):  # the tracer has read it, or said what is wrong
            config = json.loads(path.read_text(encoding="utf-8"))
    found: Mapping[str, Any] = config.get("text_config") or config
    return found


def _products_of_attention(ops: OpTable) -> tuple[Any, Any]:
    """Rows of the products of queries with keys, and of scores with values, where a model writes attention out."""
    found = np.flatnonzero((ops.op_class == OpClass.BMM) & (ops.gemm[:, 0, 1] > 0) & ~expert_products(ops))
    modules, numbers = np.unique(ops.module[found], return_counts=True)
    # One product alone is that of rotary frequencies with places.
    found = found[np.isin(ops.module[found], modules[numbers == 2])]
    return found[0::2], found[1::2]


def _with_fused_attention(ops: OpTable, *, keeps_launches: bool = False) -> OpTable:
    """The operations with attention as one kernel where a model writes it out.

    Written out it is a product of queries with keys, what follows on the scores, and a product with values, all in one
    module. One kernel does their 2 B h Lq Lk (d + dv) FLOP and moves queries, keys, values and results once.

    Args:
        ops: Operations of a forward pass.
        keeps_launches: Whether the operations between stay, as one token launches them all.
    """
    scores, values = _products_of_attention(ops)
    if not len(scores):
        return ops
    # Only the first size, the number of products, grows with the batch.
    heads, queries, keys, size = (ops.gemm[scores, axis, int(axis == 0)] for axis in range(4))
    value_size = ops.gemm[values, 2, 0]
    read, written = (
        2.0 * heads * (queries * size + keys * (size + value_size)),
        2.0 * heads * queries * value_size,
    )
    new = {
        "op_class": OpClass.ATTENTION,
        "element_bytes": 2.0,
        "flops": 2.0 * heads * queries * keys * (size + value_size),
        "read_bytes": read,
        "write_bytes": written,
        "joined_bytes": read + written,
        "elements": (read + written) / 2,
        "width": keys,
    }
    columns = {name: getattr(ops, name).copy() for name in new}
    for name, value in new.items():
        columns[name][(scores, 1) if columns[name].ndim == 2 else scores] = value
    inside = np.zeros(len(ops), dtype=bool)
    for first, last in zip(scores, values, strict=True):
        inside[first + 1 : last + 1] = True
    kept = np.arange(len(ops)) if keeps_launches else np.flatnonzero(~inside)
    return taken_rows(replace(ops, **columns), kept)


def _copied_bytes(ops: OpTable, num_shared: int) -> float:
    """Traffic of a token's keys and values where attention is written out, beside one read of each [bytes].

    Heads that share a key get copies of it, which are written and read again; keys that are multiplied in fp32 are
    converted first (GPT-J).

    Args:
        ops: Operations of one token.
        num_shared: Heads that have keys of their own.
    """
    scores, values = _products_of_attention(ops)
    if not len(scores):
        return 0.0
    heads, size = ops.gemm[scores[0], 0, 1], ops.gemm[scores[0], 3, 0]
    value_size = ops.gemm[values[0], 2, 0]
    copies = 2 * 2.0 * heads * (size + value_size) if heads > num_shared else 0.0
    return float(copies + (8.0 * heads * size if ops.element_bytes[scores[0]] > 2 else 0.0))


def _end_of_blocks(ops: OpTable) -> int:
    """Row behind the last one of a numbered module, where the head begins."""
    numbered = [any(part.isdigit() for part in name.split(".")[1:]) for name in ops.module_names]
    inside = np.flatnonzero(np.asarray(numbered)[ops.module])
    return int(inside[-1]) + 1 if len(inside) else len(ops)


def num_attentions(ops: OpTable) -> float:
    """Attentions of a pass, one in each layer."""
    return float(ops.count[ops.op_class == OpClass.ATTENTION].sum())


def prefill_ops(ops: OpTable, of_token: OpTable, engine: Engine) -> OpTable:
    """Operations of the pass over a prompt, ``ops``: the head is that of one token, the last place alone."""
    blocks = taken_rows(ops, np.arange(_end_of_blocks(ops)))
    head = taken_rows(of_token, np.arange(_end_of_blocks(of_token), len(of_token)))
    found = joined_tables([blocks, head])
    return _fused(_with_fused_attention(found)) if engine is Engine.VLLM else found


def decode_ops(
    ops: OpTable,
    context: float,
    num_tokens: int,
    shape: CacheShape,
    batch_size: float | None,
    engine: Engine,
    *,
    alive: float = 1.0,
) -> OpTable:
    """Operations of ``num_tokens`` steps of one token each.

    Args:
        ops: Those of one token.
        context: Tokens that a written one sees in the mean.
        num_tokens: Steps.
        shape: Keys and values.
        batch_size: Samples; only experts with a token of one are read then.
        engine: Who launches them.
        alive: Share of the samples whose answers are not done yet, in the mean over the steps.
    """
    routed = ops if batch_size is None else _routed(ops, batch_size)
    found = _decoding(of_samples(routed, alive), context, num_tokens, shape)
    return _fused(found) if engine is Engine.VLLM else found


def leaves_experts_out(ops: OpTable, batch_size: float) -> bool:
    """True if a token of each sample leaves experts without one."""
    tokens_per_expert = ops.gemm[expert_products(ops), 1, 1] * batch_size
    return bool(len(tokens_per_expert)) and bool(tokens_per_expert.min() < _ALL_EXPERTS)


def _decoding(ops: OpTable, context: float, num_tokens: int, shape: CacheShape) -> OpTable:
    """Operations of ``num_tokens`` steps of one token each, whose attention reads a context of this mean length.

    Every size of attention is affine in the length of the context, so that the mean length gives the mean time of
    kernels that are bound by what they read. The queries of the heads that share a key are one tile.
    """
    rows = np.flatnonzero(ops.op_class == OpClass.ATTENTION)
    columns = {
        name: getattr(ops, name).copy()
        for name in ("flops", "read_bytes", "joined_bytes", "gemm", "elements", "law_size", "width")
    }
    heads = ops.gemm[rows, 0, 1]
    read = (shape.bytes_per_token + shape.copied_bytes) * context
    columns["flops"][rows, 1] = (
        2.0 * heads * context * (shape.key_size + (shape.value_size or shape.key_size))
    )
    columns["read_bytes"][rows, 1] += read
    columns["joined_bytes"][rows, 1] += read
    # Keys and values are kept in two bytes each.
    columns["elements"][rows, 1] += read / 2
    columns["gemm"][rows, 0, 1] = shape.num_heads
    columns["gemm"][rows, 1, 0] = np.maximum(heads / shape.num_heads, 1.0)
    columns["gemm"][rows, 2, 0] = ceil(context)
    columns["gemm"][rows, 3, 0] = shape.key_size
    columns["law_size"][rows] = ceil(context)
    columns["width"][rows] = ceil(context)
    products = np.isin(ops.op_class, (OpClass.LINEAR, OpClass.BMM))
    columns["law_size"][products] = _REPLAYED
    return replace(ops, **columns, count=ops.count * num_tokens)


def _routed(ops: OpTable, batch_size: float) -> OpTable:
    """Products of the experts that have a token: of E experts, k for each of B tokens, E (1 - (1 - k/E)^B).

    Tokens go to each with equal chance; weights of the others are not read.
    """
    rows = np.flatnonzero(expert_products(ops))
    num_experts = ops.gemm[rows, 0, 0]
    tokens_per_expert = ops.gemm[rows, 1, 1]
    share = 1.0 - (1.0 - np.minimum(tokens_per_expert, 1.0)) ** batch_size
    columns = {name: getattr(ops, name).copy() for name in ("gemm", "read_bytes", "joined_bytes")}
    columns["gemm"][rows, 0, 0] = num_experts * share
    columns["gemm"][rows, 1, 1] = tokens_per_expert / share
    columns["read_bytes"][rows, 0] *= share
    columns["joined_bytes"][rows, 0] *= share
    return replace(ops, **columns)


def _fused(ops: OpTable) -> OpTable:
    """The operations as an engine launches them: those that a compiler joins are one kernel."""
    count, flops, moved = joined_kernels(ops)
    rows = np.flatnonzero(count > 0)
    is_stream = ~np.isin(ops.op_class[rows], MATRIX_CLASSES)
    return taken_rows(
        ops,
        rows,
        flops=flops[rows],
        read_bytes=moved[rows],
        write_bytes=np.zeros((len(rows), 2)),
        joined_bytes=moved[rows],
        law_size=np.where(is_stream, np.maximum(ops.law_size[rows], _REPLAYED), ops.law_size[rows]),
    )
