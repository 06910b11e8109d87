"""Activations computed again in the backward pass, by PyTorch's own checkpoints around the blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forerun.base.errors import InvalidSetupError
from forerun.question.saving import recomputed_blocks
from forerun.tracing.cuda_semantics import autocast_again, autocast_dtype_now
from forerun.tracing.saving.device_ops import eight_bit_product

__all__ = ["autocast_contexts", "recompute_blocks"]

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    eight_bit_product,
}
"""Operations whose results selective recomputation keeps: products, convolutions and attention, which take longest."""

if hasattr(torch.ops.aten, "_grouped_mm"):  # from PyTorch 2.8
    _KEPT.add(torch.ops.aten._grouped_mm.default)


def recompute_blocks(module: nn.Module, blocks: tuple[str, ...], recompute: str, name: str) -> None:
    """Puts checkpoints around blocks, in place.

    Args:
        module: The model.
        blocks: Names of its blocks.
        recompute: See ``Saving``.
        name: Name of the model, for messages.

    Raises:
        InvalidSetupError: The model has no blocks.
    """
    distance = recomputed_blocks(recompute)
    if not distance:
        return
    if not blocks:
        raise InvalidSetupError(
            f"{name} has no repeated blocks to compute again: expected a list of modules of one class; leave "
            "--recompute out"
        )
    for block_name in blocks[::distance]:
        block = module.get_submodule(block_name)
        block.forward = _checkpointed(block.forward, is_selective=recompute == "selective")


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def autocast_contexts(
    *, is_selective: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the forward pass and of the repeated one, which enters the autocast region again."""
    again = autocast_again(autocast_dtype_now())
    if not is_selective:
        return nullcontext(), again
    # Fused kernels write over results that are kept; no value here is wrong for it.
    first, second = create_selective_checkpoint_contexts(_policy, allow_cache_entry_mutation=True)
    return first, _both(again, second)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _checkpointed(forward: Callable[..., Any], *, is_selective: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(autocast_contexts, is_selective=is_selective),
            **kwargs,
        )

    return run
