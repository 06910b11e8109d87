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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.errors import InvalidSetupError
from forerun.cost.time.rows import MATRIX_CLASSES, joined_kernels
from forerun.graph.blocks import expert_products
from forerun.graph.graph import AllocationKind, Graph, OpClass, OpTable
from forerun.graph.passes import Held, Pass, pass_rows, step_of_passes, with_samples
from forerun.prediction.estimate import BreakdownPart, Generation
from forerun.prediction.step import PreparedModel, StepPrediction
from forerun.question.model import ModelRequest, find_architecture
from forerun.question.post_training import Algorithm, Engine, PostTraining
from forerun.question.run import Run
from forerun.question.saving import Offload
from forerun.question.setup import Phase, Precision, TrainingSetup

PREFILL = "prefill"
DECODE = "decode"
CRITIC = "critic"
OWN_PASS = "forward, backward and update"
_PAIRS = (Algorithm.DPO, Algorithm.ORPO, Algorithm.REWARD)
_DEFAULT_TOKENS = 2048
_OF_ONE_DEVICE = ("algorithm", "new_tokens", "engine")
_ONLINE_NOTES = (
    "moves of states to the host and back, the scoring of answers and the loading of data are not counted",
)
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
    """Tokens of a sample: its prompt, and what is written."""

    prompt: int
    new: int


def tokens_of(request: ModelRequest, setup: TrainingSetup) -> Tokens:
    """The prompt and the written tokens of a sample.

    Raises:
        InvalidSetupError: Nothing is left for the prompt.
    """
    total = request.sequence_length or _DEFAULT_TOKENS
    new = setup.post.new_tokens or total // 2
    if not 1 <= new < total:
        raise InvalidSetupError(
            f"{new:,} new tokens leave no prompt in a sequence of {total:,}; give a --sequence-length above "
            f"{new:,}, which counts the prompt and the answer, or fewer --new-tokens"
        )
    return Tokens(prompt=total - new, new=new)


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
            "--longest-tokens, --generation-tensor and --generation-on are those of devices that divide a model; give "
            "--parallel, such as dp=8, or --strategy fsdp"
        )
    trace = cache(trace)  # passes of one shape are one trace, also of models that are kept nowhere
    if setup.generates and request.sequence_length is None:
        _check_reads_tokens(
            trace(request, replace(setup, phase=Phase.INFERENCE, post=PostTraining(), optimizer="none"))
        )
        request = replace(request, sequence_length=_DEFAULT_TOKENS)
    parts = _Parts(request, replace(setup, post=PostTraining()), setup.post, trace)
    if setup.phase is Phase.GENERATE:
        return parts.generation()
    found: Graph = _STEPS[setup.post.algorithm](parts)
    return found


def divided_step(
    request: ModelRequest, setup: TrainingSetup, trace: _Trace
) -> tuple[Graph, dict[str, Graph]]:
    """The training step of a run whose devices divide it, and the graphs of its other passes by their names.

    Raises:
        InvalidSetupError: The model writes no tokens, or has no head with one value.
        UsageError, FailureError: It cannot be built or traced.
    """
    parts = _Parts(request, replace(setup, post=PostTraining()), setup.post, trace)
    is_headed = setup.post.algorithm is Algorithm.REWARD
    found, beside = (parts.with_head() if is_headed else parts).training(), {}
    if setup.post.algorithm is Algorithm.PPO:
        beside[CRITIC] = parts.with_head().training()
    if setup.post.algorithm.is_online:
        tokens = tokens_of(request, setup)
        beside |= {PREFILL: parts.prompt(tokens), DECODE: parts.one_token()}
    return replace(found, notes=(*found.notes, *_ONLINE_NOTES * setup.post.algorithm.is_online)), beside


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
    found: tuple[OtherPass, ...] = _STEPS[setup.post.algorithm](_Named())
    return found


def generating_setup(request: ModelRequest, setup: TrainingSetup) -> TrainingSetup:
    """The setup in which an engine writes the answers of a step."""

    def none(request: ModelRequest, setup: TrainingSetup) -> Graph:
        raise AssertionError("a setup needs no trace")

    return _Parts(request, replace(setup, post=PostTraining()), setup.post, none).generating


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
    if DECODE not in times:
        return None
    tokens, batch = tokens_of(run.model, run.setup), run.setup.batch_size_per_device
    share = {name: step.step_s.scaled(time_s / step.step_s.value) for name, time_s in times.items()}
    shape = cache_shape(run.model, model.graph.ops)
    layers = float((model.graph.ops.op_class[pass_rows(model.graph.ops)[DECODE]] == OpClass.ATTENTION).sum())
    writing = share[DECODE].scaled(1 / tokens.new)
    return Generation(
        prompt_tokens=tokens.prompt,
        new_tokens=tokens.new,
        time_to_first_token_s=share[PREFILL],
        time_per_token_s=writing,
        new_tokens_per_s=writing.inverse(batch),
        cache_bytes=shape.bytes_per_token * layers * batch * (tokens.prompt + tokens.new),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Passes of one step."""

    request: ModelRequest
    setup: TrainingSetup
    post: PostTraining
    trace: _Trace

    @property
    def num_samples(self) -> int:
        """Sequences of a sample."""
        return 2 if self.post.algorithm in _PAIRS else 1

    @property
    def inference(self) -> TrainingSetup:
        """The setup of a pass without gradients: adapters and what saves memory in training have no part in it."""
        saving = replace(self.setup.saving, recompute="none", offload=Offload.NONE, master_weights=None)
        return replace(
            self.setup, phase=Phase.INFERENCE, optimizer="none", saving=saving, keeps_gradients=False
        )

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
        if not self.post.algorithm.is_online:
            return ()
        return (
            "answers are taken as equally long: a batch lasts as long as its longest; generation and training "
            "take turns on the same devices",
        )

    def writing(self) -> tuple[Pass, Pass]:
        """The passes that write an answer: the prompt at once, then token by token."""
        tokens = tokens_of(self.request, replace(self.setup, post=self.post))
        one = self.one_token()
        is_fused = self.post.engine is Engine.VLLM
        shape = cache_shape(self.request, one.ops)
        mean_context = tokens.prompt + (tokens.new + 1) / 2
        decode = decode_ops(one.ops, mean_context, tokens.new, shape, self.only_batch_size, self.post.engine)
        pairs = Held(
            (0.0, shape.bytes_per_token * num_attentions(one.ops) * (tokens.prompt + tokens.new)),
            AllocationKind.ACTIVATION,
        )
        own = is_fused and self.setup.phase is not Phase.GENERATE
        copy = (Held((2.0 * one.num_parameters, 0.0), AllocationKind.BUFFER),) if own else ()
        return (
            Pass(name=PREFILL, ops=prefill_ops(self.prompt(tokens).ops, self.post.engine), kept=copy),
            Pass(name=DECODE, ops=decode, held=(pairs,)),
        )

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
        saving = replace(self.inference.saving, lora_rank=None, fused_kernels=(), fp8_recipe=None)
        if saving.quantize is not None and self.setup.phase is not Phase.GENERATE:
            saving = replace(saving, quantize=None, unquantized=None)  # engines write with weights in 16 bits
        return replace(self.inference, precision=precision, saving=saving)

    def one_token(self) -> Graph:
        """The pass over a single token."""
        found = self.trace(replace(self.request, sequence_length=1), self.generating)
        _check_reads_tokens(found)
        if not (found.ops.op_class == OpClass.ATTENTION).any():
            raise InvalidSetupError(
                f"{self.request.model} has no fused attention here, and generation is known of models with it; ask for "
                "--phase inference"
            )
        return found

    @property
    def only_batch_size(self) -> int | None:
        """The batch size, where a token of each sample leaves experts without one; None if all have some."""
        if self.setup.phase is not Phase.GENERATE and not self.post.algorithm.is_online:
            return None
        batch = self.setup.batch_size_per_device
        return batch if leaves_experts_out(self.one_token().ops, batch) else None

    def generation(self) -> Graph:
        """A batch of answers of a model alone."""
        one, passes = self.one_token(), self.writing()
        nothing = replace(one, ops=_rows(one.ops, np.arange(0)), model_flops=(0.0, 0.0))
        tokens = tokens_of(self.request, replace(self.setup, post=self.post))
        found = step_of_passes(nothing, passes)
        note = (
            f"a step writes {tokens.new:,} tokens of each sample after a prompt of {tokens.prompt:,}; tokens a second "
            "are those written"
        )
        return replace(
            found,
            tokens_per_sample=tokens.new,
            input_shape=(tokens.prompt,),
            only_batch_size=self.only_batch_size,
            notes=(*found.notes, note),
        )


def _check_reads_tokens(graph: Graph) -> None:
    if graph.tokens_per_sample is None:
        raise InvalidSetupError(
            f"post-training and generation are those of language models, and {graph.model} reads no tokens; leave "
            "--algorithm out, or ask for --phase train or inference"
        )


def _dpo(parts: Any) -> Any:
    return parts.step(parts.forward("reference"))


def _kto(parts: Any) -> Any:
    return parts.step(
        parts.forward("mismatched answers", has_own_weights=False), parts.forward("reference", times=2)
    )


def _reward(parts: Any) -> Any:
    return parts.with_head().step()


def _grpo(parts: Any) -> Any:
    return parts.step(
        *parts.writing(),
        parts.forward("log-probabilities", has_own_weights=False),
        parts.forward("reference"),
    )


def _ppo(parts: Any) -> Any:
    """The value model is as large as the policy, and is trained as it is."""
    headed = parts.with_head()
    return parts.step(
        *parts.writing(),
        parts.forward("log-probabilities", has_own_weights=False),
        parts.forward("reference"),
        headed.forward("reward"),
        headed.forward("value"),
        headed.trained("value training"),
    )


def _state_bytes(graph: Graph) -> tuple[float, float]:
    """State of the optimizer, which stays from step to step [bytes]."""
    constant, slope = graph.memory.size_bytes[graph.memory.kind == AllocationKind.OPTIMIZER_STATE].sum(axis=0)
    return float(constant), float(slope)


_STEPS: Mapping[Algorithm, Callable[[Any], Any]] = {
    Algorithm.DPO: _dpo,
    Algorithm.ORPO: lambda parts: parts.step(),
    Algorithm.KTO: _kto,
    Algorithm.REWARD: _reward,
    Algorithm.GRPO: _grpo,
    Algorithm.PPO: _ppo,
}
"""Steps of ``_Parts``, which are graphs, or of ``_Named``, which are lists of passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Keys and values of one layer.

    Attributes:
        num_heads: Heads that have keys of their own; None if each head of the queries has.
        key_size, value_size: Numbers of a key and of a value; 0 for a value that is a part of its key.
    """

    num_heads: int
    key_size: int
    value_size: int

    @property
    def bytes_per_token(self) -> float:
        """Two-byte numbers of a token."""
        return 2.0 * self.num_heads * (self.key_size + self.value_size)


def cache_shape(request: ModelRequest, ops: OpTable) -> CacheShape:
    """The shape of the cache, from the configuration of the model where it has one, else from its first attention."""
    config = _configuration(request.model)
    first = int(np.flatnonzero(ops.op_class == OpClass.ATTENTION)[0])
    heads, size = round(ops.gemm[first, 0, 1]), round(ops.gemm[first, 3, 0])
    latent = config.get("kv_lora_rank")
    if latent:  # multi-head latent attention: one latent and one rotary part serve all heads
        return CacheShape(num_heads=1, key_size=latent + config.get("qk_rope_head_dim", 64), value_size=0)
    return CacheShape(num_heads=config.get("num_key_value_heads") or heads, key_size=size, value_size=size)


def _configuration(model: str) -> Mapping[str, Any]:
    known = find_architecture(model)
    if known is not None:
        return known.config
    prefix, _, rest = model.partition(":")
    if prefix != "hf":
        return {}
    from forerun.tracing.models.hub import is_hub_name, kept_config_path

    path = kept_config_path(rest) if is_hub_name(rest) else Path(rest).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # the tracer has read it, or said what is wrong
    return found


def _rows(ops: OpTable, rows: Any, **columns: Any) -> OpTable:
    taken = {
        column.name: getattr(ops, column.name)[rows]
        for column in fields(OpTable)
        if not column.name.endswith("_names")
    }
    return replace(ops, **{**taken, **columns})


def _end_of_blocks(ops: OpTable) -> int:
    """Row behind the last one of a numbered module, where the head begins."""
    numbered = [any(part.isdigit() for part in name.split(".")[1:]) for name in ops.module_names]
    inside = np.flatnonzero(np.asarray(numbered)[ops.module])
    return int(inside[-1]) + 1 if len(inside) else len(ops)


def num_attentions(ops: OpTable) -> float:
    """Attentions of a pass, one in each layer."""
    return float(ops.count[ops.op_class == OpClass.ATTENTION].sum())


def prefill_ops(ops: OpTable, engine: Engine) -> OpTable:
    """Operations of the pass over a prompt: the first token needs the head for the last place alone."""
    found = _rows(ops, np.arange(_end_of_blocks(ops)))
    return _fused(found) if engine is Engine.VLLM else found


def decode_ops(
    ops: OpTable, context: float, num_tokens: int, shape: CacheShape, batch_size: float | None, engine: Engine
) -> OpTable:
    """Operations of ``num_tokens`` steps of one token each; with a batch size, only experts with a token are read."""
    found = _decoding(ops if batch_size is None else _routed(ops, batch_size), context, num_tokens, shape)
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
    read = shape.bytes_per_token * context
    columns["flops"][rows, 1] = (
        2.0 * heads * context * (shape.key_size + (shape.value_size or shape.key_size))
    )
    columns["read_bytes"][rows, 1] += read
    columns["joined_bytes"][rows, 1] += read
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
    return _rows(
        ops,
        rows,
        flops=flops[rows],
        read_bytes=moved[rows],
        write_bytes=np.zeros((len(rows), 2)),
        joined_bytes=moved[rows],
        law_size=np.where(is_stream, np.maximum(ops.law_size[rows], _REPLAYED), ops.law_size[rows]),
    )
