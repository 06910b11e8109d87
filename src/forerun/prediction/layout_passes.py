"""Steps of post-training over the devices of a layout: passes without gradients, and answers that engines write.

    step = writing + refit of weights + moves of states + passes without gradients + training of the policy

where one group of devices does all in turn. Where other devices write (``--generation-on``), they write the answers of
the next step meanwhile: step = max(writing, training) + refit. An engine is g devices with tensor parallelism that
answer B samples at a time. Each token takes

    t = kernels of one token of B samples, 1/g of weights and heads + 2 L (all-reduce of B hidden states) + B host

for L blocks, as often as the longest answer has tokens, while B mean / longest samples are written in the mean. The
host of an engine handles each written token with its log-probability, one after another. Where keys and values leave
no room for all B samples they are written in turns. A refit exports the weights tensor by tensor, each expert's apart:
every device gathers all of them in 16 bits and hands them to its engine. Where the same devices write and train, the
state of the optimizer goes to the host and comes back once a step.

Sources: vllm-project/vllm, ``vllm/config``: ``gpu_memory_utilization`` is 0.9; NVIDIA-NeMo/RL,
``nemo_rl/algorithms/grpo.py``: refit, generation, log-probabilities and training follow one another;
``nemo_rl/models/policy/megatron_policy_worker.py``: refit and moves. Moves of weights to the
host, the scoring of answers and the loading of data are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from forerun.base.errors import InvalidSetupError
from forerun.cost.communication.collectives import Collective, Group, group_of
from forerun.cost.communication.constants import LayoutTable
from forerun.cost.memory.peak import visible_memory_bytes
from forerun.cost.time.weights import CostModel
from forerun.graph.blocks import blocks_of
from forerun.graph.graph import OpTable, expert_products
from forerun.graph.shards import Shards, sharded_ops
from forerun.prediction.division import DividedStep
from forerun.prediction.estimate import BreakdownPart
from forerun.prediction.memory import memory_constants_of, worst_stage
from forerun.prediction.post_training import (
    CRITIC,
    DECODE,
    OWN_PASS,
    PREFILL,
    CacheShape,
    Tokens,
    cache_shape,
    decode_ops,
    generating_setup,
    generation_figures,
    leaves_experts_out,
    num_attentions,
    other_passes,
    prefill_ops,
    tokens_of,
)
from forerun.prediction.step import PreparedModel, predict_steps, prepare
from forerun.prediction.unit_step import forward_s, layout_step
from forerun.prediction.units import DividedModel
from forerun.question.post_training import AUTO_DEVICES, Algorithm, Engine
from forerun.question.run import Run

REFIT = "refit of weights"
MOVES = "moves of states to the host and back"
WAITING = "waiting for answers"
"""Part of a step in which devices that train have nothing to do."""
_MEMORY_SHARE = 0.9
_WEIGHT_BYTES = 2.0
_TOKEN_HOST_S = 0.12e-3
"""Host of an engine for one written token: 58 and 84 s of writing of Llama 3.1 8B on 8 and 70B on 64 H100, 795 and 398
tokens of 2,048 answers (NVIDIA-NeMo/RL issue 959), less the passes over them."""
_TENSOR_S = 0.51e-3
"""Export of a tensor to an engine: 9.7 s of Qwen3-30B-A3B (18,900 tensors) and 18.4 s of Qwen3-235B-A22B (36,700)
within NVLink (NVIDIA-NeMo/RL pull request 3294)."""
_MOVED_BYTES_PER_S = 2.6e9
"""Copy between a device and memory of the host that is not pinned: geometric mean of 1.9, 2.0, 2.6 and 4.9 GB/s, from
times of moving states in 12 bytes a parameter (NVIDIA-NeMo/RL pull requests 1404 and 3294, the two models)."""
_MOST_ENGINES = 1024
"""Engines that ``--generation-on auto`` compares at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing:
    prefill_s: float
    decode_s: float
    refit_s: float
    cache_bytes: float
    batch_size: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def whole_step(model: DividedModel, run: Run, weights: CostModel, table: LayoutTable) -> DividedStep:
    """The step of a run with a layout: that of ``layout_step``, with the passes of its algorithm before it.

    Args:
        model: The policy, with the graphs of the other passes beside it.
        run: The run.
        weights: The cost model.
        table: Constants of collectives.

    Raises:
        InvalidSetupError: The model cannot be divided so, by the layout or by an engine.
    """
    step = layout_step(model, run, weights, table)
    if run.setup.post.algorithm is Algorithm.SFT:
        return step
    critic = DividedModel.of(model.model.beside[CRITIC]) if CRITIC in model.model.beside else model
    before = [
        BreakdownPart(
            one.name,
            layout_step(critic, run, weights, table).step_s.value
            if one.is_trained
            else forward_s(critic if one.is_headed else model, run, weights, table, one.times),
        )
        for one in other_passes(run.setup)
    ]
    own = BreakdownPart(OWN_PASS, step.step_s.value)
    training_s = own.time_s + sum(part.time_s for part in before)
    if PREFILL not in model.model.beside:
        return _longer(step, before, (*before, own), training_s)
    number, writing = _writers(model, run, weights, table, training_s)
    answers = [BreakdownPart(PREFILL, writing.prefill_s), BreakdownPart(DECODE, writing.decode_s)]
    refit = BreakdownPart(REFIT, writing.refit_s)
    refit_parts = [refit]
    if number:
        waiting_s = max(0.0, writing.total_s - training_s)
        added = [refit, *before, BreakdownPart(WAITING, waiting_s)]
    else:
        refit_parts = [refit, BreakdownPart(MOVES, _moves_s(model, run))]
        added = [*answers, *refit_parts, *before]
    found = _longer(
        step,
        added,
        (*answers, *refit_parts, *before, own),
        own.time_s + sum(part.time_s for part in added),
    )
    tokens, times_s = _tokens(run, writing.batch_size), (writing.prefill_s, writing.decode_s)
    figures = generation_figures(tokens, found.step_s, *times_s, run.batch_size_global, writing.cache_bytes)
    return replace(found, generation=figures, num_writers=number)


def _longer(
    step: DividedStep, added: Sequence[BreakdownPart], passes: Sequence[BreakdownPart], whole_s: float
) -> DividedStep:
    """The step with further parts, whose error is taken for that of the policy's pass."""
    factor = whole_s / step.step_s.value
    parts = sorted((*step.parts, *added), key=lambda part: -part.time_s)
    idle_s = sum(part.time_s for part in added if part.name in (REFIT, MOVES, WAITING))
    return replace(
        step,
        step_s=step.step_s.scaled(factor),
        parts=tuple(part for part in parts if part.time_s > 0),
        passes=tuple(passes),
        compute_s=step.compute_s + sum(part.time_s for part in added) - idle_s,
        busy_share=step.busy_share * max(0.0, whole_s - idle_s) / whole_s,
    )


def _moves_s(model: DividedModel, run: Run) -> float:
    """State of the optimizer with its master weights, of the stage that needs most, to the host and back [s]."""
    worst = worst_stage(model, run, memory_constants_of(run.cluster.device, run))
    state = sum(part.size_bytes for part in worst.parts if part.name == "optimizer state")
    ratio = model.memory(run.shards, run.setup.batch_size_per_device).state_ratio
    wide = run.wide_factor
    masters = state / ratio * wide / run.wide_state_factor if ratio and wide > 1 else 0.0
    return 2 * (state + masters) / _MOVED_BYTES_PER_S


def _num_tensors(model: DividedModel, token: OpTable) -> float:
    """Tensors of a checkpoint, which has two matrices of each expert and one of each that joins its parts."""
    rows = expert_products(token)
    experts = 1.5 * float((token.gemm[rows, 0, 0] * token.count[rows]).sum())
    return float(model.memory(Shards(), 1).num_gradients.sum()) + experts


def _tokens(run: Run, num_samples: float) -> Tokens:
    """Tokens of the samples that an engine answers together; it waits for the longest of them."""
    return tokens_of(run.model, replace(run.setup, batch_size_per_device=max(1, round(num_samples))))


def _writers(
    model: DividedModel, run: Run, weights: CostModel, table: LayoutTable, training_s: float
) -> tuple[int, _Writing]:
    """Devices that write besides those that train, and their writing; 0 where the same do both.

    ``auto`` takes the number with the least device time for a step, (train + write) max(writing, training).
    """
    asked = run.setup.post.generation_on
    own = run.cluster.num_devices
    engine = _Engine.of(model, run, weights, table)
    if asked is None:
        return 0, engine.writing(own)
    if asked != AUTO_DEVICES:
        return int(asked), engine.writing(int(asked))
    tried: list[tuple[float, int, _Writing]] = []
    number = engine.num_devices
    while number <= max(own, engine.num_devices) * 4 and len(tried) < _MOST_ENGINES:
        found = engine.writing(number)
        step_s = max(found.total_s, training_s) + found.refit_s
        tried.append(((own + number) * step_s, number, found))
        # Steps grow with the number: each is a prediction, and far out one engine more changes little.
        number += engine.num_devices * max(1, number // (8 * engine.num_devices))
    _, number, found = min(tried, key=lambda one: one[0])
    return number, found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """A group of devices that writes answers.

    Attributes:
        run: The run.
        prompt, token: Passes over a prompt and over one token on each device.
        shape: Keys and values of one layer on each device.
        num_devices: Devices of the engine.
        num_blocks: Blocks with two all-reduces each.
        hidden_bytes: Hidden state of a token.
        num_tensors: Tensors of a checkpoint.
        group: Its devices.
        weight_bytes: Weights of each device.
        layers: Layers with keys and values.
        weights: The cost model.
        table: Constants of collectives.
    """

    run: Run
    prompt: PreparedModel
    token: PreparedModel
    shape: CacheShape
    num_devices: int
    num_blocks: int
    hidden_bytes: float
    num_tensors: float
    group: Group
    weight_bytes: float
    layers: float
    weights: CostModel
    table: LayoutTable

    @classmethod
    def of(cls, model: DividedModel, run: Run, weights: CostModel, table: LayoutTable) -> _Engine:
        """The engine of a run, which divides the model as tensor parallelism does.

        Raises:
            InvalidSetupError: It cannot be divided so.
        """
        beside = model.model.beside
        number = run.setup.post.generation_tensor or _fewest(model, run)
        traced, heads = model.traced, model.traced.num_heads
        if number > 1 and (not traced.can_be_divided or (heads and heads % number)):
            raise InvalidSetupError(
                f"an engine of {number} devices does not divide the {heads or 0} heads of "
                f"{model.model.graph.model}; give another --generation-tensor"
            )
        shards = Shards(tensor=number, sequence_parallel=False)
        token = beside[DECODE].graph
        shape = cache_shape(run.model, token.ops)
        return cls(
            run=run,
            prompt=_divided(beside[PREFILL], shards),
            token=_divided(beside[DECODE], shards),
            shape=replace(shape, num_heads=max(1, shape.num_heads // number)),
            num_devices=number,
            num_blocks=len(model.blocks.names),
            hidden_bytes=_WEIGHT_BYTES * model.blocks.hidden_size,
            num_tensors=_num_tensors(model, token.ops),
            group=group_of(run.cluster, number, 1, table.constants),
            weight_bytes=_WEIGHT_BYTES * token.num_parameters / number,
            layers=num_attentions(token.ops),
            weights=weights,
            table=table,
        )

    def writing(self, num_devices: int) -> _Writing:
        """All answers of a step on so many devices, which are a number of engines.

        Raises:
            InvalidSetupError: They are not, or the weights leave no room for one answer.
        """
        engines, rest = divmod(num_devices, self.num_devices)
        if rest or not engines:
            raise InvalidSetupError(
                f"{num_devices} devices cannot be divided into engines of {self.num_devices}; give a "
                "--generation-tensor that divides them"
            )
        samples = self.run.batch_size_global / engines
        tokens = _tokens(self.run, samples)
        of_sample = self.shape.bytes_per_token * self.layers * (tokens.prompt + tokens.mean)
        room = _MEMORY_SHARE * visible_memory_bytes(self.run.cluster.device) - self.weight_bytes
        most = floor(room / of_sample) if of_sample else samples
        if most < 1:
            raise InvalidSetupError(
                f"an engine of {self.num_devices} devices has no room for one answer beside its weights of "
                f"{self.weight_bytes / 2**30:.1f} GiB on each; give a larger --generation-tensor"
            )
        rounds = ceil(samples / most)
        batch = max(1.0, samples / rounds)
        tokens = _tokens(self.run, batch)
        # Shorter answers leave the batch before the longest one ends.
        alive = max(1.0, batch * tokens.alive)
        sparse = alive if leaves_experts_out(self.token.graph.ops, alive) else None
        engine = self.run.setup.post.engine
        decode = decode_ops(
            self.token.graph.ops, tokens.mean_context, tokens.steps, self.shape, sparse, engine
        )
        prompts = prefill_ops(self.prompt.graph.ops, self.token.graph.ops, engine)
        decode_s = 0.0
        if tokens.steps:
            decode_s = self._seconds(self.token, decode, alive) + tokens.steps * self._sums_s(alive)
            decode_s += batch * (tokens.mean - 1) * (_TOKEN_HOST_S if engine is Engine.VLLM else 0.0)
        prefill_s = self._seconds(self.prompt, prompts, batch) + self._sums_s(batch * tokens.prompt)
        return _Writing(
            prefill_s=rounds * prefill_s,
            decode_s=rounds * decode_s,
            refit_s=self._refit_s(),
            cache_bytes=batch * of_sample,
            batch_size=batch,
        )

    def _seconds(self, model: PreparedModel, ops: OpTable, batch: float) -> float:
        setup = replace(
            generating_setup(self.run.model, self.run.setup), batch_size_per_device=max(1, round(batch))
        )
        prepared = replace(prepare(replace(model.graph, ops=ops)), is_whole=False)
        version = self.run.software.torch_version
        (found,) = predict_steps(prepared, self.run.cluster.device, [setup], self.weights, version)
        return found.step_s.value * batch / max(1, round(batch))

    def _sums_s(self, num_tokens: float) -> float:
        if self.num_devices == 1:
            return 0.0
        return 2 * self.num_blocks * self.group.time_s(Collective.ALL_REDUCE, num_tokens * self.hidden_bytes)

    def _refit_s(self) -> float:
        """All weights on every device, tensor by tensor [s]."""
        of_all = group_of(self.run.cluster, self.run.cluster.num_devices, 1, self.table.constants)
        gathered = of_all.time_s(Collective.ALL_GATHER, self.weight_bytes * self.num_devices)
        return gathered + self.num_tensors * _TENSOR_S


def _divided(model: PreparedModel, shards: Shards) -> PreparedModel:
    ops = sharded_ops(model.graph, blocks_of(model.graph), shards)
    return replace(model, graph=replace(model.graph, ops=ops))


def _fewest(model: DividedModel, run: Run) -> int:
    """The fewest devices, a power of two that divides those of the run, with half of their memory free."""
    half = 0.5 * visible_memory_bytes(run.cluster.device)
    whole = _WEIGHT_BYTES * model.model.graph.num_parameters
    number = 1
    while whole / number > half and run.cluster.num_devices % (2 * number) == 0:
        number *= 2
    return number
