"""Divides the time of a process into steps, from the events of its loaders, optimizers, backward passes and models."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from forerun.script.patching import surround

_MOST_DEPTH = 4


class StepListener:
    """Hears what the hooks see for the first time; every method does nothing unless it is overridden."""

    def loader_seen(self, number: int, loader: Any) -> None:
        """A loader is used for the first time."""

    def is_of_interest(self, optimizer: Any) -> bool:
        """True if the steps of an optimizer count."""
        return True

    def optimizer_seen(self, optimizer: Any, tensor: Any = None) -> None:
        """An optimizer makes its first step; None, with the loss, at a first backward pass without any."""

    def batch_seen(self, batch: Any) -> None:
        """The first batch of a loader, or the first input of a model without a loader, is known."""

    def mark_wait(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds each wait for a loader."""
        return contextlib.nullcontext()


class StepHooks:
    """Wraps PyTorch's loader, optimizer, backward pass and, without a loader, the outermost model that is trained.

    Args:
        clock: Clock that is told of each event.
        listener: Receiver of what is seen for the first time.
    """

    def __init__(self, clock: StepClock, listener: StepListener) -> None:
        self._clock, self._listener = clock, listener
        self._pid = os.getpid()
        self._loaders: dict[int, int] = {}
        self._optimizers: dict[int, int] = {}
        self._is_waiting = False
        self._has_optimizer = False
        self._has_batch = False
        self._has_backward = False
        self._looks_for_model = True

    def patches(self) -> dict[str, Any]:
        """Patch by name of the module that it is for."""
        return {
            "torch.utils.data.dataloader": self.loaders,
            "torch.optim.optimizer": self.optimizers,
            "torch.autograd": self.backward,
        }

    def loaders(self, module: Any) -> None:
        """Patch that wraps the requests to loaders, and the making of iterators.

        Iterators are wrapped where loaders make them, because many loaders have an ``__iter__`` of their own.
        """

        # Iterators share this method; loaders have many an ``__iter__`` of their own.
        @surround(module._BaseDataLoaderIter, "__next__")
        def timed_request(request: Any, iterator: Any) -> Any:
            if os.getpid() != self._pid:
                return request(iterator)
            self._clock.request(time.monotonic())
            try:
                with self._waiting():
                    batch = request(iterator)
            except StopIteration:
                self._clock.close(time.monotonic())
                raise
            number = self._loaders.get(getattr(iterator, "_forerun_loader", 0), -1)
            self._see_batch(batch)
            self._clock.receive(number, num_samples_of(batch))
            return batch

        @surround(module.DataLoader, "_get_iterator")
        def timed_make(make: Any, loader: Any) -> Any:
            if os.getpid() != self._pid:
                return make(loader)
            self._clock.start_loader(time.monotonic())
            with self._waiting():
                iterator = make(loader)
            if id(loader) not in self._loaders:
                self._loaders[id(loader)] = len(self._loaders)
                self._listener.loader_seen(self._loaders[id(loader)], loader)
            with contextlib.suppress(AttributeError):
                iterator._forerun_loader = id(loader)
            return iterator

        # Persistent workers keep their iterator, which begins a later epoch here and not in ``_get_iterator``.
        @surround(module._MultiProcessingDataLoaderIter, "_reset")
        def timed_again(again: Any, iterator: Any, loader: Any, first_iter: bool = False) -> None:
            if first_iter or os.getpid() != self._pid:
                again(iterator, loader, first_iter)
                return
            self._clock.start_loader(time.monotonic())
            with self._waiting():
                again(iterator, loader, first_iter)

    def optimizers(self, module: Any) -> None:
        """Patch that counts the steps of all optimizers."""

        @surround(module.Optimizer, "__init__")
        def created(create: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._has_optimizer = True
            create(optimizer, *args, **kwargs)

        module.register_optimizer_step_post_hook(self._updated)

    def backward(self, module: Any) -> None:
        """Patch that counts backward passes, the steps of a script that makes no optimizer of PyTorch."""

        # ``Tensor.backward`` looks the function up here.
        @surround(module, "backward")
        def counted(run: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
            run(tensors, *args, **kwargs)
            if self._has_optimizer or os.getpid() != self._pid:
                return
            if not self._has_backward:
                self._has_backward = True
                loss = tensors[0] if isinstance(tensors, (tuple, list)) else tensors
                self._listener.optimizer_seen(None, loss)
            self._stepped(self._clock.update(time.monotonic(), 0))

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        # A loader may be started by the request to another one.
        if self._is_waiting:
            yield
            return
        self._is_waiting = True
        begin_s = time.monotonic()
        try:
            with self._listener.mark_wait():
                yield
        finally:
            self._is_waiting = False
            self._clock.wait(begin_s, time.monotonic())

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._has_optimizer = True
        if os.getpid() == self._pid and self._listener.is_of_interest(optimizer):
            if id(optimizer) not in self._optimizers:
                self._optimizers[id(optimizer)] = len(self._optimizers)
                self._listener.optimizer_seen(optimizer)
            self._stepped(self._clock.update(time.monotonic(), self._optimizers[id(optimizer)]))

    def _stepped(self, is_without_loader: bool) -> None:
        """Counts the samples of a script without a loader in the input of the outermost model that it trains."""
        if not is_without_loader or not self._looks_for_model:
            return
        self._looks_for_model = False
        torch = sys.modules["torch"]
        kind = torch.nn.Module
        call = kind.__call__

        @functools.wraps(call)
        def first_call(model: Any, *args: Any, **kwargs: Any) -> Any:
            is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
            if is_trained and not torch.compiler.is_compiling():
                kind.__call__ = call
                model.register_forward_pre_hook(self._model_called, with_kwargs=True)
            return call(model, *args, **kwargs)

        kind.__call__ = first_call

    def _model_called(self, model: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid:
            return
        inputs = (*args, *kwargs.values())
        is_training = sys.modules["torch"].is_grad_enabled()
        if is_training:
            self._see_batch(inputs)
        self._clock.call_model(time.monotonic(), num_samples_of(inputs), is_training=is_training)

    def _see_batch(self, batch: Any) -> None:
        if not self._has_batch:
            self._has_batch = True
            self._listener.batch_seen(batch)


def num_samples_of(batch: Any) -> int:
    """Samples of a batch: the length of the first tensor found in it; 0 without a tensor."""
    return next((shape[0] for shape in tensor_shapes(batch) if shape and shape[0]), 0)


def tensor_shapes(batch: Any, depth: int = 0) -> Iterator[list[int]]:
    """Shapes of the tensors of a batch, one by one: of a long list only the first may be wanted."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        yield [int(length) for length in shape]
    elif depth < _MOST_DEPTH:
        parts = batch if isinstance(batch, (list, tuple)) else ()
        for part in batch.values() if hasattr(batch, "values") else parts:
            yield from tensor_shapes(part, depth + 1)


@dataclass(slots=True, kw_only=True)
class LoaderSpan:
    """A stretch of time between two requests to a loader.

    Attributes:
        begin_s: Begin of the stretch, monotonic clock [s].
        end_s: End of the stretch [s].
        wait_s: Time that the script waited for a loader [s].
        num_samples: Number of samples that the loaders gave.
        num_batches: Number of batches that the loaders gave.
        num_updates: Number of optimizer steps; 0 for a stretch that is not a training step (validation, saving, start).
        loader: Number of the loader that gave the last batch; -1 without one.
        starts_epoch: True if a loader started in the stretch.
        is_traced: True if the stretch lies in the traced window.
        saving_s: Time of saving checkpoints in the stretch [s].
        collecting_s: Time of collecting garbage [s].
        memory_bytes: Memory of the process's own at the end, without files that it has mapped; 0 if not known [bytes].
        device_bytes: Memory of its tensors on a GPU [bytes].
    """

    begin_s: float
    end_s: float = 0.0
    wait_s: float = 0.0
    num_samples: int = 0
    num_batches: int = 0
    num_updates: int = 0
    loader: int = -1
    starts_epoch: bool = False
    is_traced: bool = False
    saving_s: float = 0.0
    collecting_s: float = 0.0
    memory_bytes: int = 0
    device_bytes: int = 0


class StepClock:
    """Cuts the time of a process into training steps and the rest.

    A step lasts from one request to a loader to the next request after an optimizer step, so gradient accumulation
    and several optimizers make one step. Without a loader it lasts from one step of the first optimizer to its next.
    Time without any optimizer step before a loader ends or another begins is not training; without a loader, neither is
    the time up to the first model call with gradients that follows calls without. In a process that makes no optimizer
    a backward pass takes the place of an optimizer step.
    """

    def __init__(self, on_step: Callable[[LoaderSpan], None], on_rest: Callable[[LoaderSpan], None]) -> None:
        self._on_step = on_step
        self._on_rest = on_rest
        self._open: LoaderSpan | None = None
        self._first_optimizer: int | None = None
        self._is_evaluating = False
        self._updated_s = 0.0

    def start_loader(self, now_s: float) -> None:
        """A loader's iteration is about to start."""
        self.close(now_s)
        self._opened(now_s).starts_epoch = True

    def request(self, now_s: float) -> None:
        """A batch is requested."""
        if self._open is not None and self._open.num_updates:
            self.close(now_s)
        self._opened(now_s)

    def wait(self, begin_s: float, end_s: float) -> None:
        """The script waited for a loader."""
        self._opened(begin_s).wait_s += end_s - begin_s

    def receive(self, loader: int, num_samples: int) -> None:
        """A batch has come."""
        if self._open is not None:
            self._open.num_batches += 1
            self._open.num_samples += num_samples
            self._open.loader = loader

    def update(self, now_s: float, optimizer: int) -> bool:
        """An optimizer, or in a process without one a backward pass, has made a step; True if it has no loader."""
        if self._first_optimizer is None:
            self._first_optimizer = optimizer
        self._updated_s = now_s
        interval = self._opened(now_s)
        interval.num_updates += 1
        if not interval.num_batches and optimizer == self._first_optimizer:
            self.close(now_s)
        return not interval.num_batches

    def call_model(self, now_s: float, num_samples: int, *, is_training: bool) -> None:
        """A model is called; where no loader gives batches, its input has the samples."""
        interval = self._opened(now_s)
        if interval.num_batches:
            return
        if not is_training:
            self._is_evaluating = True
            return
        if self._is_evaluating and not interval.num_updates:
            self.close(now_s)
        self._is_evaluating = False
        self._opened(now_s).num_samples += num_samples

    def skip(self, now_s: float) -> None:
        """Leaves out the time since the last event, which the hooks took: the open interval begins anew."""
        if self._open is not None:
            self._open.begin_s = now_s
            self._open.saving_s = self._open.collecting_s = 0.0

    def hold(self, name: str, took_s: float) -> None:
        """Something held the script up: ``saving_s`` or ``collecting_s`` of the open stretch grows."""
        if self._open is not None:
            setattr(self._open, name, getattr(self._open, name) + took_s)

    def finish(self, now_s: float) -> None:
        """The process ends; what follows its last update, such as an error or a last evaluation, is no step."""
        if self._open is not None and self._open.num_updates:
            self._open.saving_s = self._open.collecting_s = 0.0
            self.close(self._updated_s)
        self.close(now_s)

    def _opened(self, now_s: float) -> LoaderSpan:
        if self._open is None:
            self._open = LoaderSpan(begin_s=now_s)
        return self._open

    def close(self, now_s: float) -> None:
        """A loader has no more batches."""
        interval = self._open
        if interval is None:
            return
        self._open = LoaderSpan(begin_s=now_s)
        interval.end_s = now_s
        # The first update without a loader only marks the begin of the second step.
        if interval.num_updates and interval.end_s > interval.begin_s:
            self._on_step(interval)
        elif interval.end_s > interval.begin_s:
            self._on_rest(interval)
