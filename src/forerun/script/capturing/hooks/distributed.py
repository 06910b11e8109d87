"""Data parallelism of a captured script: it is rank 0 of a group whose collectives do nothing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from forerun.script.capturing.hooks.steps import Steps, first_tensor
from forerun.script.patching import after_import
from forerun.script.profiling.hooks.messages import CaptureSettings

__all__ = ["Parallelism"]

_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast",
    "reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv",
    "broadcast_object_list", "gather_object", "scatter_object_list", "all_reduce_coalesced", "all_gather_coalesced",
)  # fmt: skip


class _Done:
    """The work of a collective that is over."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([])
        return future


class Replicated(nn.Module):
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

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        return None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Any:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @classmethod
    @contextlib.contextmanager
    def summon_full_params(cls, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return value


def _compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives a network the weights that it computes with: those that sharded layouts gather, in half precision."""
    module.to(dtype)
    module.register_forward_pre_hook(
        lambda _module, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype)), with_kwargs=True
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

        modules = (dist, dist.distributed_c10d)
        for module in modules:
            module.init_process_group = init_process_group
            module.barrier = module.monitored_barrier = lambda *args, **kwargs: _Done()
            module.all_gather_object = _gather_objects
            for name in _COLLECTIVES:
                if hasattr(module, name):
                    setattr(module, name, self._collective(name))
        self._cover_wrappers()
        torch.multiprocessing.spawn = self._spawn  # type: ignore[assignment, attr-defined]
        torch.multiprocessing.start_processes = self._spawn  # type: ignore[assignment, attr-defined]

    def _collective(self, name: str) -> Any:
        steps = self._steps

        def collective(*args: Any, **kwargs: Any) -> Any:
            tensor = first_tensor((args, kwargs))
            steps.collective(name, 0 if tensor is None else tensor.numel() * tensor.element_size())
            return _Done() if kwargs.get("async_op") or name.startswith(("isend", "irecv")) else None

        return collective

    def _cover_wrappers(self) -> None:
        parallel = self

        class DistributedDataParallel(Replicated):
            def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
                super().__init__(module)
                parallel.strategy = parallel.strategy or "ddp"
                parallel.bucket_mb = kwargs.get("bucket_cap_mb")

        class FullyShardedDataParallel(Replicated):
            def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
                super().__init__(module)
                parallel.shard(module, kwargs.get("mixed_precision"))

        nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[assignment, misc]
        nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel  # type: ignore[assignment, misc]
        nn.DataParallel = nn.parallel.DataParallel = DistributedDataParallel  # type: ignore[misc,assignment]

        def sharded(fsdp: Any) -> None:
            fsdp.FullyShardedDataParallel = FullyShardedDataParallel
            fsdp.fully_sharded_data_parallel.FullyShardedDataParallel = FullyShardedDataParallel

            def fully_shard(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
                parallel.shard(module, kwargs.get("mp_policy"))
                return module

            fsdp.fully_shard = fully_shard

        after_import({"torch.distributed.fsdp": sharded})

    def shard(self, module: nn.Module, precision: Any) -> None:
        """The script shards a network, with a policy of precision or None."""
        self.strategy = "fsdp"
        dtype = getattr(precision, "param_dtype", None)
        if dtype is not None:
            self.dtype = dtype
            _compute_in(module, dtype)

    def _spawn(self, function: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> None:
        """Runs the first of the processes that the script would start, here."""
        self._settings = replace(self._settings, world_size=max(nprocs, self._settings.world_size))
        function(0, *args)


def _gather_objects(objects: list[Any], own: Any, *args: Any, **kwargs: Any) -> None:
    objects[:] = [own] * len(objects)
