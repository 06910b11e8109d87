"""Language models as the measured frameworks run them: normalisation, activation and attention are one kernel each.

Megatron-LM, nanotron and llm-foundry fuse the root mean square norm and the gated activation into one kernel; a layer
norm without bias and SiLU times its gate stand for them here. Traces are kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from forerun.base.kept import cache_folder
from forerun.graph.file import GRAPH_FORMAT_VERSION, read_graph, write_graph
from forerun.prediction.step import prepare
from forerun.prediction.units import DividedModel
from forerun.question.setup import TrainingSetup
from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.saving.blocks import block_names, of_all_blocks
from forerun.tracing.saving.prepare import with_saving
from forerun.tracing.trace import TRACE_VERSION, trace_built


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a decoder.

    Attributes:
        layers: Blocks.
        hidden: Width of a token.
        heads: Heads of attention.
        kv_heads: Heads of keys and values.
        feed_forward: Width of the perceptron.
        vocabulary: Tokens there are.
        tokens: Tokens of a sample.
        gated: Whether the perceptron has a gate (Llama), or not (GPT).
        tied: Whether head and embedding share their weight.
        attention: "fused" for one kernel, "written" for two products, a softmax and a dropout as Megatron-LM ran them
            before fused attention, "again" for these computed again in the backward pass (its selective
            recomputation).
        fused_gate: Whether gate and product are one kernel that keeps its input alone, and attention reads shared heads
            of keys and values as they are, as in Transformer Engine.
        dropout: Share of the embedding and of both results of a block that is left out.
        logit_copies: Copies of the logits in fp32 that the cross entropy of Megatron-LM works on: one in place, two if
            a compiler joined it; None for PyTorch's own.
        fused_loss: Whether the cross entropy reads the logits as they are, in one kernel, without copies in fp32.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    tokens: int
    gated: bool = False
    tied: bool = True
    attention: str = "fused"
    fused_loss: bool = False
    fused_gate: bool = False
    dropout: float = 0.0
    logit_copies: int | None = None


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # Scale, mask and softmax are one kernel there.
    shares = torch.softmax(query @ key.transpose(-1, -2), -1)
    return functional.dropout(shares, 0.1) @ value


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.width = sizes.hidden // sizes.heads
        bias = not sizes.gated
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * self.width, bias=bias)
        self.out = nn.Linear(sizes.heads * self.width, sizes.hidden, bias=bias)
        self.rotates = sizes.gated
        self.reads_shared = sizes.fused_gate
        self.kind = sizes.attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        sizes = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width]
        parts = [
            part.view(batch, tokens, -1, self.width).transpose(1, 2) for part in self.qkv(x).split(sizes, -1)
        ]
        if self.rotates:  # rotary positions are one kernel on queries and one on keys
            parts[:2] = [part * 1.0 for part in parts[:2]]
        if self.kv_heads != self.heads and self.reads_shared:
            shared = torch.ops.aten._scaled_dot_product_flash_attention.default
            return self._joined(shared(*parts, 0.0, True, False)[0])
        if self.kv_heads != self.heads:
            parts[1:] = [part.repeat_interleave(self.heads // self.kv_heads, 1) for part in parts[1:]]
        query, key, value = parts
        if self.kind == "fused":
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        elif self.kind == "again":
            found = checkpoint(_attend, query, key, value, use_reentrant=False)
        else:
            found = _attend(query, key, value)
        return self._joined(found)

    def _joined(self, heads: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return result


class _FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gated = sizes.gated
        self.is_fused = sizes.fused_gate
        wide = sizes.feed_forward * (2 if sizes.gated else 1)
        self.up = nn.Linear(sizes.hidden, wide, bias=not sizes.gated)
        self.down = nn.Linear(sizes.feed_forward, sizes.hidden, bias=not sizes.gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        if self.gated and self.is_fused:
            wide = functional.glu(wide)  # SiLU times its gate moves as much
        elif self.gated:
            gate, value = wide.chunk(2, -1)
            wide = functional.silu(gate) * value
        else:
            wide = functional.gelu(wide)
        result: torch.Tensor = self.down(wide)
        return result


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        bias = not sizes.gated
        self.norm1, self.norm2 = (nn.LayerNorm(sizes.hidden, bias=bias) for _ in range(2))
        self.attention, self.feed_forward = _Attention(sizes), _FeedForward(sizes)
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: torch.Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return result


class _Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = None if sizes.gated else nn.Embedding(sizes.tokens, sizes.hidden)
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden, bias=not sizes.gated)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


class _InPlaceLoss(torch.autograd.Function):
    """Cross entropy of Megatron-LM: an fp32 copy of the logits becomes the shares and then the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, copies: int) -> torch.Tensor:
        held = [logits.float()]
        held += [held[0] * 1.0 for _ in range(copies - 1)]
        shares = held[-1]
        shares.exp_()
        total = shares.sum(-1)
        shares.div_(total.unsqueeze(-1))
        ctx.save_for_backward(shares)
        ctx.dtype = logits.dtype
        return total.log().mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (shares,) = ctx.saved_tensors
        return shares.mul_(gradient).to(ctx.dtype), None


def language_model(sizes: Sizes) -> nn.Module:
    """The decoder on the meta device."""
    with torch.device("meta"):
        return _Decoder(sizes)


_MOST_BLOCKS = 3


@cache
def traced_model(sizes: Sizes, setup: TrainingSetup, most_blocks: int = _MOST_BLOCKS) -> DividedModel:
    """The step of a language model, for any batch size of the setup; of more blocks three stand for all."""
    setup = replace(setup, batch_size_per_device=1)
    number, sizes = sizes.layers, replace(sizes, layers=min(most_blocks, sizes.layers))
    key = json.dumps(
        [number, asdict(sizes), asdict(setup), GRAPH_FORMAT_VERSION, TRACE_VERSION, torch.__version__],
        sort_keys=True,
    )
    path = cache_folder() / "layout-study-5" / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.npz"
    graph = read_graph(path)
    if graph is None:
        built = _built(sizes)
        names = block_names(built.module)
        if left := number - sizes.layers:
            built = replace(built, all_blocks=(names[0], *(1 + left) * names[1:2], *names[2:]))
        built = with_saving(built, setup)
        graph = trace_built(built, setup)
        graph = of_all_blocks(graph, built) if built.all_blocks else graph
        write_graph(graph, path)
    return DividedModel.of(prepare(graph))


def _built(sizes: Sizes) -> BuiltModel:
    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        if sizes.logit_copies is not None:
            in_place: torch.Tensor = _InPlaceLoss.apply(output, sizes.logit_copies)
            return in_place  # targets, which are small, are left out
        target = batch["labels"]  # type: ignore[index]
        logits = output if sizes.fused_loss else output.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    def make_batch(batch_size: int) -> dict[str, object]:
        def numbers() -> torch.Tensor:
            return torch.zeros((batch_size, sizes.tokens), dtype=torch.long, device="meta")

        return {"args": (numbers(),), "labels": numbers()}

    return BuiltModel(
        name=f"decoder of {sizes.layers} x {sizes.hidden}",
        module=language_model(sizes),
        input_shape=(sizes.tokens,),
        make_batch=make_batch,
        loss=loss,
        tokens_per_sample=sizes.tokens,
    )
