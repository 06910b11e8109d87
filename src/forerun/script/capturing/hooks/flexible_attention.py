"""``flex_attention`` of a captured script: fused attention over the share of blocks that its mask lets through.

The mask of a batch is a function of positions. It is asked for some rows of queries, on the values that are known; the
keys of a query are as many as the blocks that were found, whose rows are whole. Functions of scores are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from forerun.script.capturing.hooks.pretend import is_pretended

__all__ = ["FlexibleAttention"]

_BLOCK = 128
_SAMPLED_BLOCKS = 24
_MOST_VALUES = 1 << 18
_CAUSAL_SHARE = 0.5


class _Mask:
    """The mask of blocks that ``create_block_mask`` gives.

    Attributes:
        share: Share of the blocks with any value.
        shape: Batch, heads, queries and keys.
    """

    def __init__(self, share: float, shape: tuple[int, int, int, int]) -> None:
        self.share, self.shape = share, shape

    def to(self, *args: Any, **kwargs: Any) -> _Mask:
        return self

    def sparsity(self) -> float:
        return 100.0 * (1.0 - self.share)


class _Shortened(torch.autograd.Function):
    """The first keys or values; the kernel writes the gradients of all."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, number: int) -> torch.Tensor:
        ctx.shape = source.shape
        return source[..., :number, :]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        make = gradient.new_empty if is_pretended(gradient) else gradient.new_zeros
        return make(ctx.shape), None


class FlexibleAttention:
    """Replaces PyTorch's functions of flexible attention.

    Args:
        recorder: The recorder of the script; it leaves the making of masks out.
        known: Values of pretended tensors; None where the script computes.
        notes: Receives what was assumed.
    """

    def __init__(self, recorder: Any, known: Any, notes: list[str]) -> None:
        self._recorder, self._known, self._notes = recorder, known, notes

    def cover(self, module: Any) -> None:
        """Replaces the functions of ``torch.nn.attention.flex_attention``."""

        def flex_attention(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            score_mod: Any = None,
            block_mask: Any = None,
            scale: float | None = None,
            enable_gqa: bool = False,
            return_lse: bool = False,
            kernel_options: Any = None,
            *,
            return_aux: Any = None,
        ) -> Any:
            number = max(1, round(self._share(block_mask) * key.shape[-2]))
            if number < key.shape[-2]:
                key, value = _Shortened.apply(key, number), _Shortened.apply(value, number)
            found = functional.scaled_dot_product_attention(
                query, key, value, scale=scale, enable_gqa=enable_gqa
            )
            if not return_lse and return_aux is None:
                return found
            sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
            return found, (sums if return_aux is None else module.AuxOutput(lse=sums, max_scores=sums))

        def create_block_mask(
            mask_mod: Any,
            B: Any,
            H: Any,
            Q_LEN: int,
            KV_LEN: int,
            device: Any = None,
            *_: Any,
            **__: Any,
        ) -> _Mask:
            where = torch.device("cuda" if device is None and self._known is not None else device or "cpu")
            return _Mask(
                self._measured_share(mask_mod, Q_LEN, KV_LEN, where), (B or 1, H or 1, Q_LEN, KV_LEN)
            )

        module.flex_attention, module.create_block_mask = flex_attention, create_block_mask

    def _share(self, mask: Any) -> float:
        if mask is None:
            return 1.0
        if isinstance(mask, _Mask):
            return mask.share
        counts = [self._values(mask.kv_num_blocks)]
        if mask.full_kv_num_blocks is not None:
            counts.append(self._values(mask.full_kv_num_blocks))
        if any(count is None for count in counts):
            return self._assumed()
        blocks = sum(float(count.sum()) for count in counts if count is not None) / mask.kv_num_blocks.numel()
        return float(min(1.0, blocks * mask.BLOCK_SIZE[1] / mask.seq_lengths[1]))

    def _assumed(self) -> float:
        text = (
            "the block mask of flex_attention has values that are not known: half of its blocks were assumed"
        )
        if text not in self._notes:
            self._notes.append(text)
        return _CAUSAL_SHARE

    def _values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not is_pretended(tensor):
            return tensor
        found: torch.Tensor | None = self._known.of(tensor)
        return found

    def _measured_share(self, mask_mod: Any, queries: int, keys: int, device: torch.device) -> float:
        """Share of blocks of which the first, middle or last query sees a key."""
        was_paused, self._recorder.is_paused = self._recorder.is_paused, True
        blocks = -(-queries // _BLOCK)
        chosen = torch.linspace(0, blocks - 1, min(blocks, _SAMPLED_BLOCKS)).round().long().tolist()
        rows_at_once = max(1, _MOST_VALUES // keys)
        seen = 0.0
        try:
            nothing = torch.zeros((), dtype=torch.long, device=device)
            key = torch.arange(keys, device=device)
            for block in chosen:
                first, last = block * _BLOCK, min(queries, (block + 1) * _BLOCK) - 1
                any_key = torch.zeros(keys, dtype=torch.bool)
                rows = sorted({first, (first + last) // 2, last})
                for start in range(0, len(rows), rows_at_once):
                    query = torch.tensor(rows[start : start + rows_at_once], device=device)
                    values = self._values(mask_mod(nothing, nothing, query[:, None], key[None, :]))
                    if values is None:
                        return self._assumed()
                    any_key |= values.expand(len(query), keys).any(dim=0)
                seen += float(sum(part.any() for part in any_key.split(_BLOCK))) / -(-keys // _BLOCK)
        except Exception:  # a function of single positions, which takes no rows of them
            return self._assumed()
        finally:
            self._recorder.is_paused = was_paused
        return seen / len(chosen)
