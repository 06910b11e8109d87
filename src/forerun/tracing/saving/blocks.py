"""The blocks of a network: modules of one kind that follow each other, such as the layers of a transformer.

A trace of three of many equal blocks says as much as that of all. PyTorch's own checkpoints stand around the blocks
whose activations are computed again in the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forerun.base.errors import InvalidSetupError
from forerun.graph.blocks import blocks_of
from forerun.graph.graph import Graph
from forerun.question.saving import recomputed_blocks
from forerun.tracing.cuda_semantics import autocast_again, autocast_dtype_now
from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.saving.device_ops import eight_bit_product, grouped_eight_bit_product
from forerun.tracing.saving.quantized import num_weights

_LISTS = (nn.ModuleList, nn.Sequential)


def block_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the blocks in the order of their definition, those inside of blocks left out.

    A block is a member of a list of modules in which another member has the same class, and has modules of its own.
    """
    found: list[str] = []
    _walk(module, "", found)
    return tuple(found)


def _walk(module: nn.Module, name: str, found: list[str]) -> None:
    children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    kinds = [type(child) for _, child in children]
    for key, child in children:
        repeats = isinstance(module, _LISTS) and kinds.count(type(child)) > 1
        if repeats and not isinstance(child, _LISTS) and any(True for _ in child.children()):
            found.append(key)
        else:
            _walk(child, key, found)


NUM_TRACED_BLOCKS = 3
"""First, middle and last block: the middle one stands for all that are left out."""


def of_all_blocks(graph: Graph, built: BuiltModel, names: Sequence[str]) -> Graph:
    """The graph of three of many equal blocks, whose middle one counts for all that were left out.

    Operations of the middle block are launched as often as there are such blocks. Memory stays that of three blocks;
    ``DividedModel`` repeats its middle unit.

    Args:
        graph: The step of the first, a middle and the last block.
        built: What was traced.
        names: All blocks.
    """
    middle = built.module.get_submodule(block_names(built.module)[1])
    trainable = sum(p.numel() for p in middle.parameters() if p.requires_grad)
    counts = np.where(blocks_of(graph).unit == 2, 1 + built.num_left_out, 1)  # unit 0 is the input
    return replace(
        graph,
        blocks=tuple(names),
        ops=replace(graph.ops, count=graph.ops.count * counts),
        num_parameters=graph.num_parameters + built.num_left_out * num_weights(middle),
        num_trainable_parameters=graph.num_trainable_parameters + built.num_left_out * trainable,
    )


_PLAIN = (bool, int, float, str, type(None))
_INDICES = ("layer_idx", "layer_index", "layer_id", "block_idx", "idx")


def keep_few_blocks(module: nn.Module) -> bool:
    """Takes all but three blocks out of a network, in place, and says so; leaves it as it is if they differ.

    Blocks are equal if they are members of one list and their modules have equal descriptions, parameters and plain
    attributes, but for the number of the block.
    """
    names = block_names(module)
    parents = {name.rpartition(".")[0] for name in names}
    if len(names) <= NUM_TRACED_BLOCKS or len(parents) != 1:
        return False
    members = module.get_submodule(parents.pop())
    blocks = [module.get_submodule(name) for name in names]
    if not isinstance(members, (nn.ModuleList, nn.Sequential)) or len(members) != len(blocks):
        return False
    first = _description(blocks[0])
    if any(_description(block) != first for block in itertools.islice(blocks, 1, None)):
        return False
    kept = (blocks[0], blocks[1], blocks[-1])
    # From the end, since a list numbers anew what follows a member that is taken out.
    for index in range(len(blocks) - 1, -1, -1):
        del members[index]
    members.extend(kept)
    return True


def _description(block: nn.Module) -> list[Any]:
    found: list[Any] = [repr(block)]
    for name, parameter in block.named_parameters():
        found.append((name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad))
    for name, module in block.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, _PLAIN) and key not in _INDICES
        }
        found.append((name, sorted(plain.items(), key=lambda item: item[0])))
    return found


_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    eight_bit_product,
    grouped_eight_bit_product,
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
