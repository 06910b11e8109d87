"""Networks of the families that read text, in plain PyTorch.

Importing this module registers them in ``families.FAMILIES``. Parameter counts that the sources print are in the
tests.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from forerun.errors import InvalidSetupError
from forerun.tracing.models.families import FamilyKey, family

__all__ = ["Decoder"]

_MOST_TOKENS = 1024
_HEAD_WIDTH = 64


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each after a layer norm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of the shape of its input (batch, tokens, width)."""
        batch, tokens, width = x.shape
        heads = self.queries_keys_values(self.norm1(x)).view(batch, tokens, 3, -1, _HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, tokens, width))
        hidden = functional.gelu(self.widen(self.norm2(x)), approximate="tanh")
        out: torch.Tensor = x + self.narrow(hidden)
        return out


class Decoder(nn.Module):
    """GPT-2 without dropout: learned positions, norms before the layers, one table for tokens and head.

    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners, section 2.3 and table 2.

    Args:
        depth: Number of blocks.
        width: Width of a token, a multiple of 64; heads are 64 wide.
        vocabulary: Number of different tokens.
    """

    def __init__(self, depth: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(_MOST_TOKENS, width)
        self.blocks = nn.Sequential(*(_Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, tokens, vocabulary) of tokens (batch, tokens)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


@family(
    "gpt",
    input_shape=(512,),
    depth=FamilyKey(default=12, meaning="blocks of attention and perceptron", high=200),
    width=FamilyKey(default=768, meaning="width of a token", low=64, high=65_536, step=64),
    vocabulary=FamilyKey(default=50_257, meaning="tokens there are", low=2, high=10_000_000),
)
def _gpt(shape: tuple[int, ...], *, depth: int, width: int, vocabulary: int) -> nn.Module:
    if shape[0] > _MOST_TOKENS:
        raise InvalidSetupError(f"gpt reads up to {_MOST_TOKENS} tokens, got a sequence length of {shape[0]}")
    return Decoder(depth, width, vocabulary)
