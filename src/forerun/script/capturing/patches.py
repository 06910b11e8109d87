"""Patches of PyTorch and Keras in a captured script: optimizers, backward passes, modules, compilation, loaders."""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable
from itertools import cycle, islice
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import BatchSampler, DataLoader, dataloader
from torch.utils.data._utils import fetch as fetchers

from forerun.script.capturing.pauses import Pauses
from forerun.script.capturing.steps import Steps, first_tensor
from forerun.script.patching import RefusedError, after_import, between, length_of, surround
from forerun.script.profiling.messages import CaptureSettings


def cover_torch(steps: Steps, flags: dict[str, Any], *, pretends: bool) -> None:
    """Reports optimizers, backward passes and modules to the steps, and takes compilation away.

    Args:
        steps: Receives the reports.
        flags: Receives what the patches notice.
        pretends: Whether the device is pretended.
    """
    _cover_optimizers(steps, flags, pretends)
    _cover_backward(steps)
    _cover_modules(steps)
    _cover_compilation(steps, flags)
    _cover_clipping(steps)
    after_import({"torch.utils.cpp_extension": _cover_extensions})
    supported = _foreach_utils._get_foreach_kernels_supported_devices()
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: [*supported, "meta", "cpu"]
    if pretends:
        _cover_scaler(steps, flags)


def _cover_optimizers(steps: Steps, flags: dict[str, Any], pretends: bool) -> None:
    @surround(optimizers.Optimizer, "__init__")
    def made(construct: Any, self: Any, params: Any, defaults: dict[str, Any]) -> None:
        if defaults.get("fused"):
            flags["fused"].add(id(self))
            defaults["fused"] = None
            # The multi-tensor update takes no rate in a tensor otherwise.
            if isinstance(defaults.get("lr"), torch.Tensor) and "capturable" in defaults:
                defaults["capturable"] = pretends
        if isinstance(defaults.get("lr"), torch.Tensor) and not defaults.get("capturable"):
            defaults["foreach"] = False
        if "foreach" in defaults and defaults["foreach"] is None and not defaults.get("differentiable"):
            defaults["foreach"] = True
        construct(self, params, defaults)
        steps.optimizer_made(self)

    def begins(optimizer: Any, args: Any, kwargs: Any) -> Any:
        steps.update_begins(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None
        steps.closure_begins()

        def watched(*a: Any, **k: Any) -> Any:
            steps.closure_begins()
            try:
                return closure(*a, **k)
            finally:
                steps.weights_change()

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    optimizers.register_optimizer_step_pre_hook(begins)
    optimizers.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: steps.update_ends(optimizer))

    after_import({
        "fastai.optimizer": lambda module: _told(module.Optimizer, "step", steps.update_begins, steps.update_ends)
    })  # fmt: skip


def _told(kind: Any, name: str, begins: Callable[[Any], None], ends: Callable[[Any], None]) -> None:
    """Reports the updates of optimizers that are none of PyTorch's."""
    between(
        kind,
        name,
        begins=lambda one, *args, **kwargs: begins(one),
        ends=lambda one, *args, **kwargs: ends(one),
    )


def _cover_backward(steps: Steps) -> None:
    between(
        torch.autograd,
        "backward",
        begins=lambda *args, **kwargs: steps.backward_begins(),
        ends=lambda *args, **kwargs: steps.backward_ends(),
    )

    @surround(torch.autograd, "grad")
    def gradients(differentiate: Any, *args: Any, **kwargs: Any) -> Any:
        if steps.optimizers or steps.in_backward:  # part of a loss, such as a gradient penalty
            steps.differentiates = True
            return differentiate(*args, **kwargs)
        steps.backward_begins()
        try:
            return differentiate(*args, **kwargs)
        finally:
            steps.backward_ends()


def _cover_modules(steps: Steps) -> None:
    between(
        nn.Module,
        "_call_impl",
        begins=lambda module, /, *args, **kwargs: steps.module_begins(module, args, kwargs),
        ends=lambda *args, **kwargs: steps.module_ends(),
    )

    def called(call: Any, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if steps.depth or first_tensor((args, kwargs)) is None:
            return call(module, *args, **kwargs)
        steps.module_begins(module, args, kwargs)
        try:
            return call(module, *args, **kwargs)
        finally:
            steps.module_ends()

    def defined(kind: type[nn.Module], **options: Any) -> None:
        super(nn.Module, kind).__init_subclass__(**options)
        # A network that defines its call itself, as a Gaussian process does.
        if "__call__" in kind.__dict__:
            surround(kind, "__call__")(called)

    nn.Module.__init_subclass__ = classmethod(defined)  # type: ignore[assignment, arg-type]


def _cover_compilation(steps: Steps, flags: dict[str, Any]) -> None:
    """Counts what is compiled once it runs a network: libraries compile functions for themselves."""

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compiled, **options)
        if options.get("disable"):
            return model
        if isinstance(model, nn.Module):
            # Another name of the same network: the script may go on to run the one that is not compiled.
            found = object.__new__(type(model))
            object.__setattr__(found, "__dict__", model.__dict__)
            flags["compiled"][id(found)] = found
            return found
        if not isinstance(model, FunctionType):
            return model

        @functools.wraps(model)
        def called(*args: Any, **kwargs: Any) -> Any:
            before = steps.num_modules
            result = model(*args, **kwargs)
            flags["compile"] |= steps.num_modules > before
            return result

        return called

    network: Any = nn.Module
    jit: Any = torch.jit
    torch.compile = compiled
    network.compile = lambda module, *args, **kwargs: (
        flags["compiled"].setdefault(id(module), module) and None
    )
    jit.script = jit.trace = lambda function=None, *args, **kwargs: function

    def without_graphs(module: Any) -> None:  # which a log draws from a trace
        module.SummaryWriter.add_graph = lambda *args, **kwargs: None

    after_import(dict.fromkeys(("torch.utils.tensorboard.writer", "tensorboardX.writer"), without_graphs))


def _cover_clipping(steps: Steps) -> None:
    def clip(run: Any, *args: Any, **kwargs: Any) -> Any:
        steps.clips = True
        was, steps.recorder.in_optimizer = steps.recorder.in_optimizer, True
        try:
            return run(*args, **kwargs)
        finally:
            steps.recorder.in_optimizer = was

    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        if hasattr(nn.utils, name):
            surround(nn.utils, name)(clip)
            setattr(nn.utils.clip_grad, name, getattr(nn.utils, name))


def _cover_extensions(module: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        why = "it compiles a custom C++ or CUDA extension, whose work is not known without the device"
        raise RefusedError(why)

    module.load = module.load_inline = refuse


def _cover_scaler(steps: Steps, flags: dict[str, Any]) -> None:
    """A gradient scaler reads whether gradients overflowed, unless a fused optimizer does; here they never do."""

    @surround(torch.amp.GradScaler, "step")
    def step(run: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # The update runs as multi-tensor kernels, whatever it is.
        optimizer._step_supports_amp_scaling = False
        return run(self, optimizer, *args, **kwargs)

    @surround(torch.amp.GradScaler, "_maybe_opt_step")
    def update(_: Any, self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if id(optimizer) not in flags["fused"]:
            steps.recorder.note_read(4)
        return optimizer.step(*args, **kwargs)


def cover_keras(steps: Steps, pauses: Pauses, tell: Callable[..., None]) -> dict[str, Callable[[Any], None]]:
    """Patches of Keras on its PyTorch backend, by the module that they wait for.

    Args:
        steps: Receives the steps.
        pauses: Receives how often it validates and saves.
        tell: Called with the length of the job.
    """

    def trainer(module: Any) -> None:
        signature = inspect.signature(module.TorchTrainer.fit)

        @surround(module.TorchTrainer, "fit")
        def fitted(fit: Any, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            tell(num_epochs=given.get("epochs", 1), steps_per_epoch=given.get("steps_per_epoch"))
            data, share = given.get("validation_data"), given.get("validation_split") or 0.0
            of = given.get("x") if data is None else data[0] if isinstance(data, (list, tuple)) else None
            size = length_of(of) if hasattr(of, "shape") else None
            samples = size if data is not None or size is None else round(size * share)
            savers = [c for c in given.get("callbacks") or () if "Checkpoint" in type(c).__name__]
            pauses.told(
                validation=("epochs", given.get("validation_freq") or 1, samples)
                if data is not None or share
                else None,
                checkpoints=("epochs", 1, None) if savers else None,
            )
            return fit(*args, **kwargs)

        @surround(module.TorchTrainer, "_symbolic_build")
        def built(build: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
            try:
                build(trainer, *args, **kwargs)
            except (RuntimeError, ValueError):  # Keras on TensorFlow does without this build
                if type(trainer).train_step is module.TorchTrainer.train_step:
                    raise

        @surround(module.TorchTrainer, "make_train_function")
        def made(make: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
            before = trainer.train_function
            make(trainer, *args, **kwargs)
            if trainer.train_function is not before:  # around the user's own ``train_step`` too
                trainer.train_function = functools.partial(step, trainer, trainer.train_function)

        def step(trainer: Any, run: Any, data: Any) -> Any:
            steps.module_begins(trainer, (data,), {})
            try:
                return run(data)
            finally:
                steps.module_ends()
                steps.step_ends()

    def optimizer(module: Any) -> None:
        _told(module.BaseOptimizer, "apply", steps.keras_update_begins, steps.keras_update_ends)

    def callbacks(module: Any) -> None:
        @surround(module.CallbackList, "_on_begin")
        def begun(begin: Any, callbacks: Any) -> None:
            # The pretended device is that of this thread alone.
            callbacks._async_train = callbacks._async_test = callbacks._async_predict = False
            begin(callbacks)

    return {
        "keras.src.backend.torch.trainer": trainer,
        "keras.src.optimizers.base_optimizer": optimizer,
        "keras.src.callbacks.callback_list": callbacks,
    }


def cover_ignite(steps: Steps, pauses: Pauses, seen: Callable[..., None]) -> dict[str, Callable[[Any], None]]:
    """Patch of Ignite, whose engines fill an epoch from a new iterator: they are told to end it.

    Where handlers of an epoch's start or end update weights, as after an episode, an epoch has so many steps.
    """

    def engine(module: Any) -> None:
        @surround(module.Engine, "_fire_event")
        def fired(fire: Any, engine: Any, event: Any, *args: Any, **kwargs: Any) -> Any:
            if pauses.is_after and event == module.Events.ITERATION_COMPLETED:
                engine.terminate_epoch()
                pauses.epoch_ended()
                pauses.epoch_began()
            before = steps.num_steps
            found = fire(engine, event, *args, **kwargs)
            is_of_epoch = event in (module.Events.EPOCH_STARTED, module.Events.EPOCH_COMPLETED)
            if is_of_epoch and before < steps.num_steps:
                seen(num_epochs=engine.state.max_epochs, steps_per_epoch=steps.num_steps - before)
            return found

        @surround(module.Engine, "_handler_wrapper")
        def filtered(wrap: Any, engine: Any, handler: Any, event: Any, chosen: Any) -> Any:
            every = inspect.getclosurevars(chosen).nonlocals.get("every")
            unit = {"iteration": "steps", "epoch": "epochs"}.get(module.State.event_to_attr.get(event))
            if every is None or unit is None:
                return wrap(engine, handler, event, chosen)

            @functools.wraps(handler)
            def told(*args: Any, **kwargs: Any) -> Any:
                pauses.interval = unit, every
                try:
                    return handler(*args, **kwargs)
                finally:
                    pauses.interval = None

            # What comes every so many rounds comes at once when the steps are recorded, and tells what it is.
            return wrap(engine, told, event, lambda *given: pauses.is_after or chosen(*given))

    return {"ignite.engine.engine": engine}


_MEASURED_S = 0.6
_MEASURED_BATCHES = 20
_FEW_ITEMS = 8
_COSTLY_S = 0.3
"""Time of a batch of samples from which on a few of them, if they have one form, are taken for all [s]."""
_MOST_COUNTED = 1 << 20
_MOST_PASSES = 100
"""Passes over its data that one pass of a loader may make; more stand for no end."""


class Loaders:
    """Follows the loaders of the script.

    Args:
        settings: Settings of the capture.
        steps: Receives the batches.
        pauses: Learns when the next epoch begins.
    """

    def __init__(self, settings: CaptureSettings, steps: Steps, pauses: Pauses) -> None:
        self._settings, self._steps, self._pauses = settings, steps, pauses
        self._workers: dict[int, int] = {}
        self.last: Any = None
        self.last_iterator: Any = None
        self.evaluated: Any = None
        self.num_samples = 0
        self._before: tuple[Any, Any, int] | None = None
        self._is_cut = self._measures = False

    def cover(self) -> None:
        """Wraps PyTorch's loaders."""
        self._cover_construction()
        surround(fetchers._MapDatasetFetcher, "fetch")(self._fetched)
        self._cover_batches()

    def _cover_construction(self) -> None:
        signature = inspect.signature(DataLoader.__init__)
        workers = self._workers
        before, after = self._settings.batch_from, self._settings.batch_to

        @surround(DataLoader, "__init__")
        def made(construct: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(loader, *args, **kwargs).arguments
            asked = int(given.get("num_workers") or 0)
            given.update(
                num_workers=0, pin_memory=False, prefetch_factor=None, persistent_workers=False, timeout=0,
                multiprocessing_context=None,
            )  # fmt: skip
            if before is not None and given.get("batch_size", 1) == before:
                given["batch_size"] = after
            extra = given.pop("kwargs", {})
            given.pop("self", None)
            construct(loader, **given, **extra)
            workers[id(loader)] = asked

        @surround(BatchSampler, "__init__")
        def sampled(sample: Any, batches: Any, /, *args: Any, **kwargs: Any) -> None:
            sample(batches, *args, **kwargs)
            if before is not None and batches.batch_size == before:
                batches.batch_size = after

    def _cover_batches(self) -> None:
        steps = self._steps

        @surround(dataloader._BaseDataLoaderIter, "__init__")
        def begun(begin: Any, iterator: Any, loader: Any) -> None:
            begin(iterator, loader)
            iterator._forerun_loader = loader
            if self.last is not None and loader.dataset is self.last.dataset and torch.is_grad_enabled():
                self._pauses.epoch_began()

        @surround(dataloader._BaseDataLoaderIter, "_next_index")
        def drawn(draw: Any, iterator: Any) -> Any:
            index = draw(iterator)
            # The rows of a batch need not be its samples: pairs, graphs and packed sequences have more or fewer.
            iterator._forerun_samples = len(index) if isinstance(index, (list, tuple)) else 0
            return index

        # Iterators share this method; loaders have many an ``__iter__`` of their own.
        @surround(dataloader._BaseDataLoaderIter, "__next__")
        def fetched(fetch: Any, iterator: Any) -> Any:
            recorder = steps.recorder
            if self._pauses.is_after:
                self._end_early(iterator)
            self.evaluated = iterator._forerun_loader
            was_paused, recorder.is_paused = recorder.is_paused, not recorder.pretends
            steps.in_loader = True
            try:
                batch = fetch(iterator)
            finally:
                recorder.is_paused, steps.in_loader = was_paused, False
            is_of_steps = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            self._before = None
            if is_of_steps and not steps.is_over:
                self._before = self.last, self.last_iterator, self.num_samples
                self.last, self.last_iterator = iterator._forerun_loader, iterator
                self.num_samples = getattr(iterator, "_forerun_samples", 0) or _samples_of(batch)
                steps.batch_loaded(self.num_samples)
            return batch

    def _fetched(self, fetch: Any, fetcher: Any, index: Any) -> Any:
        """A batch of which only the first samples are made where all would take long: the others repeat them."""
        few = index[:_FEW_ITEMS] if fetcher.auto_collation and isinstance(index, list) else []
        if not few or len(few) == len(index):
            return fetch(fetcher, index)
        data, begin_s = fetcher.dataset, time.thread_time()
        several = getattr(data, "__getitems__", None) or (lambda places: [data[place] for place in places])
        items = several(few)
        if not isinstance(items, list) or len(items) != len(few):
            return fetch(fetcher, index)
        spent_s = (time.thread_time() - begin_s) * len(index) / len(few)
        if self._measures and self._is_cut:
            return fetcher.collate_fn(items)
        form = _form_of(items[0])
        self._is_cut = spent_s > _COSTLY_S and form is not None and all(_form_of(i) == form for i in items)
        rest = index[_FEW_ITEMS:]
        more = map(copy.deepcopy, islice(cycle(items), len(rest))) if self._is_cut else several(rest)
        return fetcher.collate_fn([*items, *more])

    def _end_early(self, iterator: Any) -> None:
        """Once the steps are known, the epoch has no more of them, and all other loaders give one batch."""
        if getattr(iterator._forerun_loader, "iterator", None) is iterator:
            return  # one that is meant not to end
        if iterator is not self.last_iterator and not getattr(iterator, "_forerun_gave", False):
            iterator._forerun_gave = True
            return
        if iterator._forerun_loader.dataset is getattr(self.last, "dataset", None):
            self._pauses.epoch_ended()
        raise StopIteration

    def give_back(self) -> None:
        """The last batch was that of an evaluation: the loader before it feeds the steps."""
        if self._before is not None and self.evaluated is self.last:
            (self.last, self.last_iterator, self.num_samples), self._before = self._before, None

    def evaluates(self) -> bool:
        """True if another loader than that of the steps gave the last batch."""
        return self.evaluated not in (None, self.last)

    def facts(self) -> dict[str, Any]:
        """Workers, dataset and cost of a sample of the loader that fed the last step; empty without a loader."""
        if self.last is None:
            return {}
        loader = self.last
        num_batches, size = length_of(loader), length_of(getattr(loader, "dataset", None))
        if size is not None and size < self.num_samples:
            size = None  # that of a sample, as Keras says it of a single array
        if num_batches is None and size and hasattr(loader.dataset, "__getitem__"):
            # Its sampler has no length, but an end.
            indices = islice(loader._index_sampler, min(_MOST_COUNTED, _MOST_PASSES * size) + 1)
            num_batches = sum(1 for _ in indices)
        if num_batches and size and num_batches * self.num_samples > _MOST_PASSES * size:
            num_batches = None  # a sampler that is meant not to end
        return {
            "num_workers": self._workers.get(id(loader), 0),
            "num_batches": num_batches,
            "dataset_size": size,
            "sample_cost_s": self._measured_cost_s() if self._settings.is_first else None,
        }

    def _measured_cost_s(self) -> float | None:
        """Time of this machine's processor for a sample: decoding, augmenting and collating, one process [s]."""
        spent_s, samples = 0.0, 0
        fetch: Any = type(self.last_iterator)._next_data
        end_s = time.monotonic() + _MEASURED_S
        self._measures = True
        for index in range(_MEASURED_BATCHES):
            begin_s = time.thread_time()
            try:
                with _disable_current_modes():
                    batch = fetch(self.last_iterator)
            except Exception:  # the loader ends, or its code needs the pretended device
                break
            if index or time.monotonic() > end_s:  # the first fetch fills caches
                spent_s += time.thread_time() - begin_s
                samples += _samples_of(batch)
            if time.monotonic() > end_s:
                break
        self._measures = False
        return spent_s / samples if samples else None


_OF_HOST = (torch.Tensor, np.ndarray, np.generic, str, bytes, int, float, type(None))


def _form_of(item: Any) -> Any:
    """Structure, shapes and lengths of a sample; None if it holds more than arrays, texts and numbers of the host."""
    leaves, structure = pytree.tree_flatten(item)
    of_device = (getattr(leaf, "is_cuda", False) or getattr(leaf, "requires_grad", False) for leaf in leaves)
    if any(of_device) or not all(isinstance(leaf, _OF_HOST) for leaf in leaves):
        return None
    sizes = [len(x) if isinstance(x, (str, bytes)) else getattr(x, "shape", ()) for x in leaves]
    return structure, [*map(type, leaves)], sizes


def _samples_of(batch: Any) -> int:
    first = first_tensor(batch)
    return int(first.shape[0]) if first is not None and first.dim() else 0
