"""The blocks of a network: modules of one kind that follow each other, such as the layers of a transformer.

A trace of a few of many equal blocks says as much as that of all. PyTorch's own checkpoints stand around the blocks
whose activations are computed again in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from forerun.tracing.device_ops import eight_bit_product
from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.models.meta_build import FiniteNumbers, answered, answers_now
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


def of_all_blocks(graph: Graph, built: BuiltModel) -> Graph:
    """The graph of few of many equal blocks, each of which counts for those that were left out for it.

    Operations of a block are launched as often as there are such blocks. Memory stays that of the traced blocks;
    ``DividedModel`` repeats their units.

    Args:
        graph: The step of the blocks that were kept.
        built: What was traced.
    """
    units, copies = blocks_of(graph), Counter(built.all_blocks)
    counts = np.asarray([1, *(copies.get(name, 1) for name in units.names), 1])
    parameters = [
        (copies[name] - 1, module)
        for name in dict.fromkeys(built.all_blocks)
        for module in (built.module.get_submodule(name),)
    ]
    return replace(
        graph,
        blocks=_as_they_run(units.names, built.all_blocks),
        # The optimizer's unit is the last.
        ops=replace(graph.ops, count=graph.ops.count * counts[units.unit]),
        num_parameters=graph.num_parameters + sum(left * num_weights(module) for left, module in parameters),
        num_trainable_parameters=graph.num_trainable_parameters
        + sum(
            left * sum(p.numel() for p in module.parameters() if p.requires_grad)
            for left, module in parameters
        ),
    )


def _as_they_run(traced: Sequence[str], all_blocks: Sequence[str]) -> tuple[str, ...]:
    """All blocks in the order of traced ones: what was left out of a list comes before its next member."""
    lists: dict[str, list[str]] = {}
    for name in all_blocks:
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    done, found = Counter[str](), list[str]()
    for name in traced:
        members = lists.get(parent := name.rpartition(".")[0], ())
        if name in members:
            end = members.index(name) + 1
            found += members[done[parent] : end]
            done[parent] = end
        else:
            found.append(name)
    return tuple(found)


_PLAIN = (bool, int, float, str, type(None))
_INDICES = {"layer_idx", "layer_index", "layer_id", "block_idx", "idx"}


def keep_few_blocks(module: nn.Module) -> tuple[str, ...]:
    """Takes blocks out of a network that others stand for, in place.

    Blocks are equal if they are members of one list and their modules have equal descriptions, parameters and plain
    attributes, but for the number of the block. Of each list its first and last member stay, the first of each kind
    between them, and all that the network knows by their numbers, such as those with attention to whole images.

    Returns:
        For each block of the whole network the one that stands for it, itself or another; empty if all differ.
    """
    lists: dict[str, list[str]] = {}
    for name in block_names(module):
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    found = [name for parent, names in lists.items() for name in _kept_of(module, parent, names)]
    return tuple(found) if len(set(found)) < len(found) else ()


def _kept_of(module: nn.Module, parent: str, names: list[str]) -> list[str]:
    """For each block of a list the one that stands for it, after those that need not stay were taken out."""
    members, number = module.get_submodule(parent), len(names)
    if not isinstance(members, _LISTS) or len(members) != number:
        return names
    owner = module.get_submodule(parent.rpartition(".")[0])
    kinds = _kinds(module, owner, list(members))
    between = {kinds[index]: index for index in range(number - 2, 0, -1)}
    kept = sorted({0, *between.values(), number - 1})
    if len(kept) == number:
        return names
    blocks = [members[index] for index in kept]
    # From the end, since a list numbers anew what follows a member that is taken out.
    for index in range(number - 1, -1, -1):
        del members[index]
    members.extend(blocks)
    for place, part in ((place, part) for place, block in enumerate(blocks) for part in block.modules()):
        vars(part).update(dict.fromkeys(vars(part).keys() & _INDICES, place))
    for known in [vars(where) for where in (owner, getattr(owner, "config", None)) if where is not None]:
        for key, value in list(known.items()):
            if _are_numbers_of_blocks(key, value):
                known[key] = [kept.index(each) for each in value if each in kept]
            elif isinstance(value, list) and len(value) == number:  # a word for each block
                known[key] = [value[index] for index in kept]
            elif key.endswith("layers") and value == number:
                known[key] = len(kept)
    stands = (index if index in kept else between[kinds[index]] for index in range(number))
    return [f"{parent}.{kept.index(index)}" for index in stands]


def _kinds(module: nn.Module, owner: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[str, int | None]]:
    """Keys that are equal for equal blocks of a list: the description, and the number of those that are told by it."""
    numbered = {
        each for key, value in vars(owner).items() if _are_numbers_of_blocks(key, value) for each in value
    }
    if hasattr(owner, "_deepstack_process"):
        # The first blocks take what the encoder's numbered ones hand over.
        numbered |= {
            index
            for part in module.modules()
            for index in range(len(getattr(part, "deepstack_visual_indexes", ())))
        }
    return [
        (repr(_description(block)), index if index in numbered else None)
        for index, block in enumerate(blocks)
    ]


def _are_numbers_of_blocks(key: str, value: object) -> bool:
    return isinstance(value, list) and "index" in key and all(isinstance(each, int) for each in value)


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


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, eight_bit_product}
_KEPT = _PRODUCTS | {
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}
"""Operations whose results selective recomputation keeps: every second product, convolutions and attention.

As pytorch/torchtitan: torchtitan/distributed/activation_checkpoint.py; grouped products of experts, whose results are
largest, are computed again.
"""


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


def _policy() -> Callable[..., CheckpointPolicy]:
    """Policy of one block, which counts its products in the forward pass and in the repeated one."""
    numbers = Counter[bool]()

    def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if op in _PRODUCTS:
            numbers[context.is_recompute] += 1
        is_second = op in _PRODUCTS and numbers[context.is_recompute] % 2 == 0
        is_kept = op in _KEPT and not is_second
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def autocast_contexts(
    *, is_selective: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the forward pass and of the repeated one, which enters the autocast region again.

    Answers for libraries that ask for values hold in the repetition too, which runs after the forward pass took them
    back: an encoder of images would attend within each window by a call of its own.
    """
    again = (autocast_again(autocast_dtype_now()), answered(answers_now()), FiniteNumbers())
    if not is_selective:
        return nullcontext(), _all_of(*again)
    # Fused kernels write over results that are kept; no value here is wrong for it.
    first, second = create_selective_checkpoint_contexts(_policy(), allow_cache_entry_mutation=True)
    return first, _all_of(*again, second)


@contextmanager
def _all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
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
