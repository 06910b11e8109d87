"""Stand-ins for groups of processes, ``flex_attention`` and repeated passes in a captured script.

The script is rank 0 of a group whose collectives do nothing. ``flex_attention`` becomes fused attention over the share
of blocks that its mask lets through: the mask of a batch is a function of positions, which is asked for some rows of
queries, on the values that are known; the keys of a query are as many as the blocks that were found, whose rows are
whole. Functions of scores are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import multiprocessing.process
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from forerun.script.capturing.pretend import META, is_pretended
from forerun.script.capturing.steps import MOST_RECORDED, Steps, first_tensor, is_training
from forerun.script.patching import RefusedError, after_import, place_in_script, surround, tables
from forerun.script.profiling.messages import CaptureSettings


def _done(*args: Any, **kwargs: Any) -> SimpleNamespace:
    """The work of a collective that is over."""
    future: Any = torch.futures.Future()
    future.set_result([])
    return SimpleNamespace(wait=lambda *args: True, is_completed=lambda: True, get_future=lambda: future)


_Sizes = tuple[int, ...]


@dataclass(slots=True)
class _Passes:
    """Passes of one module whose inputs have one structure.

    Attributes:
        known: Sizes of the inputs and of the results of the last two, the newest last.
        result: Structure of the results, None if they hold more than tensors of the device and plain values.
        is_sure: Whether the sizes of the last result were foreseen.
        num_recorded: Passes in recorded steps.
        num_idle, num_backwards: Passes since the last backward pass, and the backward passes before them.
    """

    known: list[tuple[_Sizes, _Sizes]] = field(default_factory=list)
    result: tuple[Any, ...] | None = None
    is_sure: bool = False
    num_recorded: int = 0
    num_idle: int = 0
    num_backwards: int = 0

    def foreseen(self, asked: _Sizes) -> _Sizes | None:
        """Sizes of the results: those of equal inputs, or as they changed with inputs that change as they did last."""
        for given, found in reversed(self.known):
            if given == asked:
                return found
        if len(self.known) < 2:
            return None
        (first, early), (last, late) = self.known
        changes = [(new - old, other - new) for old, new, other in zip(first, last, asked, strict=True)]
        past, now = next(((a, b) for a, b in changes if a), (0, 0))
        # Multiplied out: sizes are whole numbers, and quotients would be rounded.
        if not past or any(b * past != a * now for a, b in changes):
            return None
        return tuple(new + (new - old) * now // past for old, new in zip(early, late, strict=True))


class Repeats:
    """Stands in for forward passes that repeat earlier ones, as those of a validation and of many micro-steps do.

    A pass of an outermost module in evaluation mode gives empty results where their sizes are foreseen, once those of
    the pass before were as foreseen: of equal inputs, or of inputs that grow as before, such as a text that is written
    token by token. In recorded steps, of which a few may be part, sixteen run whole. So do those whose inputs or
    results hold more than tensors of the device and plain values, such as caches of keys that are changed in place.

    With gradients it is a pass of a micro-step after the third and before the last of an update, which are equal, or
    one outside recorded steps after sixteen without a backward pass, as those of an agent that acts.

    Args:
        steps: Tells which passes are outermost, and whether a step is recorded.
        forget: Called with each tensor that is made, whose values are not known.
    """

    def __init__(self, steps: Steps, forget: Callable[[torch.Tensor], None]) -> None:
        self._steps, self._forget = steps, forget
        self._passes: dict[Any, _Passes] = {}

    def cover(self) -> None:
        """Surrounds the calls of modules."""

        @surround(nn.Module, "_call_impl")
        def called(run: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            steps = self._steps
            # Inner modules run with the outermost, recomputed ones with the backward pass.
            if steps.depth != 1 or steps.in_backward:
                return run(module, *args, **kwargs)
            if torch.is_grad_enabled():
                if module.training:
                    steps.trained_once.add(id(module))
                if module.training or id(module) not in steps.trained_once:
                    return self._repeated(run, module, args, kwargs, has_gradient=True)
            elif is_training(module):
                return run(module, *args, **kwargs)
            return self._repeated(run, module, args, kwargs)

    def _repeated(
        self, run: Any, module: nn.Module, args: Any, kwargs: Any, *, has_gradient: bool = False
    ) -> Any:
        form, asked = _shape_of((args, kwargs))
        if form is None:
            return run(module, *args, **kwargs)
        passes = self._passes.setdefault((id(module), has_gradient, *form), _Passes())
        is_recorded = self._steps.recorder.records_ops
        passes.num_recorded += is_recorded
        is_few = is_recorded and passes.num_recorded <= MOST_RECORDED
        is_micro_step = has_gradient and self._steps.repeats_micro_step()
        if has_gradient:
            is_acting = passes.num_backwards == self._steps.num_backwards and not is_recorded
            passes.num_idle = passes.num_idle + 1 if is_acting else 0
            passes.num_backwards = self._steps.num_backwards
            is_few = not is_micro_step and passes.num_idle <= MOST_RECORDED
        sizes = passes.foreseen(asked)
        if passes.is_sure and passes.result and sizes is not None and not is_few:
            passes.known = [*passes.known[-1:], (asked, sizes)]
            # Outside recorded steps nobody asks what memory they take.
            with contextlib.nullcontext() if is_recorded else _disable_current_modes():
                made = _empty(passes.result, sizes)
            for leaf in pytree.tree_leaves(made):
                if isinstance(leaf, torch.Tensor):
                    self._forget(leaf)
            if not has_gradient:
                return made
            if is_micro_step:
                self._steps.stands_in()
            return pytree.tree_map(_derived, made)
        result = run(module, *args, **kwargs)
        form, found = _shape_of(result)
        passes.is_sure = form is not None and form == passes.result and found == sizes
        if has_gradient and _keeps_results(module):
            passes.is_sure = False  # a loss may be taken of them
        # Sizes of another structure say nothing of the next pass.
        passes.known = [*passes.known[-1:], (asked, found)] if form == passes.result else [(asked, found)]
        passes.result = form
        return result


def _keeps_results(module: nn.Module) -> bool:
    """True if a module, or one in it, keeps results of its forward pass, such as a part of the loss."""
    return any(
        isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        for inner in module.modules()
        for name, value in vars(inner).items()
        if isinstance(value, (torch.Tensor, list, tuple, dict)) and name not in _OF_MODULES
        for leaf in pytree.tree_leaves(value)
    )


_OF_MODULES = ("_parameters", "_buffers", "_modules")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


def _shape_of(value: Any) -> tuple[tuple[Any, ...] | None, _Sizes]:
    """Hashable structure of inputs or results, None if they hold anything else; sizes, strides, whole numbers in it."""
    leaves, structure = pytree.tree_flatten(value)
    while of_own := {type(leaf) for leaf in leaves if dataclasses.is_dataclass(type(leaf))}:
        if not all(part.init for kind in of_own for part in dataclasses.fields(kind)):
            return None, ()
        for kind in of_own:  # such as one with the keys and values of the tokens so far
            pytree.register_dataclass(kind)
        leaves, structure = pytree.tree_flatten(value)
    found: list[Any] = []
    sizes: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if not is_pretended(leaf):
                return None, ()
            found.append((leaf.dim(), leaf.dtype))
            sizes += [*leaf.shape, *leaf.stride()]
        elif type(leaf) is int:  # such as the number of tokens so far
            found.append(int)
            sizes.append(leaf)
        elif isinstance(leaf, _PLAIN):
            found.append(leaf)
        else:
            return None, ()
    return (structure, tuple(found)), tuple(sizes)


def _derived(leaf: Any) -> Any:
    """A tensor that may enter a loss and be changed in place, as the results of a network may."""
    is_one = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.requires_grad_().clone() if is_one else leaf


def _empty(form: tuple[Any, ...], sizes: _Sizes) -> Any:
    """Empty tensors of the device and plain values in a structure."""
    structure, leaves = form
    left = iter(sizes)

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, tuple):
            return next(left) if leaf is int else leaf
        size, stride = (list(itertools.islice(left, leaf[0])) for _ in range(2))
        return torch.ops.aten.empty_strided.default(size, stride, dtype=leaf[1], device=META)

    return pytree.tree_unflatten([made(leaf) for leaf in leaves], structure)


class _Replicated(nn.Module):
    """Stands in the place of DistributedDataParallel and FSDP: runs the network, sends nothing."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    no_sync = join = register_comm_hook = summon_full_params = state_dict_type = staticmethod(
        lambda *args, **kwargs: contextlib.nullcontext()
    )


class Parallelism:
    """Use of ``torch.distributed`` by the script.

    Attributes:
        strategy: ddp or fsdp, empty if nothing wraps a network.
        world_size: Processes of the group that the script made; 1 without one.
        bucket_mb: Capacity of a gradient bucket, if the script sets one [MiB].
        dtype: Precision in which sharded networks compute, if the script sets one.
    """

    def __init__(self, settings: CaptureSettings, steps: Steps) -> None:
        self._settings, self._steps = settings, steps
        self.strategy = ""
        self.world_size = 1
        self.bucket_mb: float | None = None
        self.dtype: torch.dtype | None = None

    def cover(self) -> None:
        """Replaces groups, collectives and wrappers."""
        dist: Any = torch.distributed
        if not dist.is_available():
            return
        start = dist.init_process_group

        @functools.wraps(start)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            asked = kwargs.get("world_size", -1)
            size = max(asked if asked and asked > 0 else 1, self._settings.world_size)
            self.world_size = size
            start(backend="fake", rank=0, world_size=size, store=FakeStore())

        def gather_objects(objects: list[Any], own: Any, *args: Any, **kwargs: Any) -> None:
            objects[:] = [own] * len(objects)

        modules = (dist, dist.distributed_c10d, dist.device_mesh)
        for module in modules:
            module.init_process_group = init_process_group
            module.barrier = module.monitored_barrier = _done
            module.all_gather_object = gather_objects
            for name in tables()["collectives"]["names"]:
                if hasattr(module, name):
                    setattr(module, name, self._collective(name))
        self._cover_wrappers()
        surround(multiprocessing.process.BaseProcess, "start")(_started)
        surround(torch.Tensor, "share_memory_")(
            lambda share, tensor: tensor if is_pretended(tensor) else share(tensor)
        )
        torch.multiprocessing.spawn = self._spawn  # type: ignore[assignment, attr-defined]
        torch.multiprocessing.start_processes = self._spawn  # type: ignore[assignment, attr-defined]

    def _collective(self, name: str) -> Any:
        steps = self._steps

        def collective(*args: Any, **kwargs: Any) -> Any:
            tensor = first_tensor((args, kwargs))
            steps.collective(name, 0 if tensor is None else tensor.numel() * tensor.element_size())
            return _done() if kwargs.get("async_op") or name.startswith(("isend", "irecv")) else None

        return collective

    def _cover_wrappers(self) -> None:
        parallel = self

        class DistributedDataParallel(_Replicated):
            def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
                super().__init__(module)
                parallel.strategy = parallel.strategy or "ddp"
                parallel.bucket_mb = kwargs.get("bucket_cap_mb")

        class FullyShardedDataParallel(_Replicated):
            def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
                super().__init__(module)
                parallel.shard(module, kwargs.get("mixed_precision"))

        nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[assignment, misc]
        nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[assignment, misc]
        alone: Any = type("DataParallel", (DistributedDataParallel,), {})  # MMEngine registers both names
        nn.DataParallel = nn.parallel.DataParallel = alone  # type: ignore[misc]

        def sharded(fsdp: Any) -> None:
            fsdp.FullyShardedDataParallel = FullyShardedDataParallel
            fsdp.fully_sharded_data_parallel.FullyShardedDataParallel = FullyShardedDataParallel
            idle = {name: _done for name in vars(fsdp.FSDPModule) if name[0] != "_"}
            whole: Any = {
                **idle,
                "__new__": lambda kind, *args, **kwargs: object.__new__(kind),
                "_apply": lambda module, *args, **kwargs: nn.Module._apply(module, *args, **kwargs),
            }

            def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
                for one in module if isinstance(module, (list, tuple)) else [module]:
                    parallel.shard(one, kwargs.get("mp_policy"))
                    if not isinstance(one, fsdp.FSDPModule):
                        kind = type(one)
                        one.__class__ = type(kind.__name__, (fsdp.FSDPModule, kind), whole)
                # A shard looks like one of a distributed tensor, and is whole.
                tensor: Any = torch.Tensor
                tensor.placements = (torch.distributed.tensor.Shard(0),)
                tensor.full_tensor = tensor.to_local = lambda shard, *args, **kwargs: shard
                return module

            fsdp.fully_shard = fully_shard

        after_import({"torch.distributed.fsdp": sharded})

    def shard(self, module: nn.Module, precision: Any) -> None:
        """The script shards a network, which computes with weights in the precision of a policy, or with its own."""
        self.strategy = "fsdp"
        dtype = getattr(precision, "param_dtype", None)
        if dtype is None:
            return
        self.dtype = dtype

        def gather(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            module.to(dtype)  # until its first pass a script may ask for the weights it made
            return pytree.tree_map(
                lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
                (args, kwargs),
            )

        module.register_forward_pre_hook(gather, with_kwargs=True)

    def _spawn(self, function: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> None:
        """Runs the first of the processes that the script would start, here."""
        self._settings = replace(self._settings, world_size=max(nprocs, self._settings.world_size))
        function(0, *args)


def _started(start: Any, process: Any, *args: Any, **kwargs: Any) -> Any:
    """Starts a process, unless it is given a network to train."""
    given = [*process._args, *process._kwargs.values()]
    if any(isinstance(value, nn.Module) for value in given):
        raise RefusedError(
            f"it gives its network to a process that it starts itself ({place_in_script()}), whose steps are not seen; "
            "name the command of one process, or call what that process runs in the script itself"
        )
    return start(process, *args, **kwargs)


# The block size that ``create_block_mask`` takes by default.
_BLOCK = 128
_SAMPLED_BLOCKS = 24
_MOST_VALUES = 1 << 18
# Where the values of a mask are not known, it is taken for a causal one.
_CAUSAL_SHARE = 0.5


class _Mask:
    """The mask of blocks that ``create_block_mask`` gives.

    Attributes:
        shape: Batch, heads, queries and keys.
    """

    def __init__(self, measured: Callable[[], float], shape: tuple[int, int, int, int]) -> None:
        self._measured, self.shape = measured, shape

    @functools.cached_property
    def share(self) -> float:
        """Share of the blocks with any value."""
        return self._measured()

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

    def __init__(self, recorder: Any, known: Any, notes: dict[str, None]) -> None:
        self._recorder, self._known, self._notes = recorder, known, notes

    def cover(self, module: Any) -> None:
        """Replaces the functions of ``torch.nn.attention.flex_attention``."""
        signature = inspect.signature(module.flex_attention)

        def flex_attention(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            query, key, value = (given[name] for name in ("query", "key", "value"))
            options = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
            number = max(1, round(self._share(given.get("block_mask")) * key.shape[-2]))
            if number < key.shape[-2]:
                key, value = _Shortened.apply(key, number), _Shortened.apply(value, number)
            found = functional.scaled_dot_product_attention(query, key, value, **options)
            return_aux = given.get("return_aux")
            if not given.get("return_lse") and return_aux is None:
                return found
            sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
            return found, (sums if return_aux is None else module.AuxOutput(lse=sums, max_scores=sums))

        def create_block_mask(
            mask_mod: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, device: Any = None, *_: Any, **__: Any
        ) -> _Mask:
            where = torch.device("cuda" if device is None and self._known is not None else device or "cpu")
            measured = functools.partial(self._measured_share, mask_mod, Q_LEN, KV_LEN, where)
            return _Mask(measured, (B or 1, H or 1, Q_LEN, KV_LEN))

        module.flex_attention, module.create_block_mask = flex_attention, create_block_mask

    def _share(self, mask: Any) -> float:
        if mask is None:
            return 1.0
        if isinstance(mask, _Mask):  # outside recorded steps nobody asks what it costs
            return mask.share if self._recorder.records_ops else _CAUSAL_SHARE
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
        self._notes.setdefault(text)
        return _CAUSAL_SHARE

    def _values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return self._known.of(tensor) if is_pretended(tensor) else tensor

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
