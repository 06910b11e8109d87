"""Patches of PyTorch and Keras in a captured script: optimizers, backward passes, modules, compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils

from forerun.script.capturing.hooks.steps import Steps
from forerun.script.patching import (
    after_import,
    around_backward,
    around_making_optimizers,
    around_updates,
    surround,
)

__all__ = ["RefusedError", "cover_keras", "cover_torch"]


class RefusedError(RuntimeError):
    """The script does something that cannot be captured."""


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
    _cover_compilation(flags)
    _cover_clipping(steps)
    _cover_extensions()
    supported = _foreach_utils._get_foreach_kernels_supported_devices()
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: [*supported, "meta", "cpu"]
    if pretends:
        _cover_scaler(steps, flags)


def _cover_optimizers(steps: Steps, flags: dict[str, Any], pretends: bool) -> None:
    @around_making_optimizers(optimizers)
    def made(construct: Any, self: Any, params: Any, defaults: dict[str, Any]) -> None:
        if defaults.get("fused"):
            flags["fused"].add(id(self))
            defaults["fused"] = None
            if isinstance(defaults.get("lr"), torch.Tensor) and "capturable" in defaults:
                defaults["capturable"] = (
                    pretends  # the multi-tensor update takes no rate in a tensor otherwise
                )
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
                steps.closure_ends()

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    around_updates(
        optimizers, begins=begins, ends=lambda optimizer, args, kwargs: steps.update_ends(optimizer)
    )


def _cover_backward(steps: Steps) -> None:
    @around_backward(torch.autograd)
    def backward(run: Any, *args: Any, **kwargs: Any) -> None:
        steps.backward_begins()
        try:
            run(*args, **kwargs)
        finally:
            steps.backward_ends()

    @surround(torch.autograd, "grad")
    def gradients(differentiate: Any, *args: Any, **kwargs: Any) -> Any:
        if steps.optimizers or steps.in_backward:  # part of a loss, such as a gradient penalty
            return differentiate(*args, **kwargs)
        steps.backward_begins()
        try:
            return differentiate(*args, **kwargs)
        finally:
            steps.backward_ends()


def _cover_modules(steps: Steps) -> None:
    @surround(nn.Module, "_call_impl")
    def call(run: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        steps.module_begins(self, args, kwargs)
        try:
            return run(self, *args, **kwargs)
        finally:
            steps.module_ends()


def _cover_compilation(flags: dict[str, Any]) -> None:
    def compiled(model: Any = None, **options: Any) -> Any:
        if not options.get("disable"):
            flags["compile"] = True
        return (lambda function: function) if model is None else model

    def compile_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        flags["compile"] = True

    torch.compile = compiled
    nn.Module.compile = compile_module  # type: ignore[method-assign]

    def scripted(obj: Any = None, *args: Any, **kwargs: Any) -> Any:
        return obj

    torch.jit.script = scripted
    torch.jit.trace = lambda function, *args, **kwargs: function


def _cover_clipping(steps: Steps) -> None:
    for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"):
        original = getattr(nn.utils, name, None)
        if original is None:
            continue

        @functools.wraps(original)
        def clip(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            steps.clips = True
            was, steps.recorder.in_optimizer = steps.recorder.in_optimizer, True
            try:
                return _original(*args, **kwargs)
            finally:
                steps.recorder.in_optimizer = was

        setattr(nn.utils, name, clip)
        setattr(nn.utils.clip_grad, name, clip)


def _cover_extensions() -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RefusedError(
            "it compiles a custom C++ or CUDA extension, whose work is not known without the device"
        )

    def extension(module: Any) -> None:
        module.load = module.load_inline = refuse

    after_import({"torch.utils.cpp_extension": extension})


def _cover_scaler(steps: Steps, flags: dict[str, Any]) -> None:
    """A gradient scaler reads whether gradients overflowed, unless a fused optimizer does; here they never do."""
    scaler: Any = torch.amp.GradScaler

    @surround(scaler, "step")
    def step(run: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer._step_supports_amp_scaling = (
            False  # the update runs as multi-tensor kernels, whatever it is
        )
        return run(self, optimizer, *args, **kwargs)

    def update(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if id(optimizer) not in flags["fused"]:
            steps.recorder.note_read(4)
        return optimizer.step(*args, **kwargs)

    scaler._maybe_opt_step = update


def cover_keras(steps: Steps) -> dict[str, Callable[[Any], None]]:
    """Patches of Keras on its PyTorch backend, by the module that they wait for."""

    def trainer(module: Any) -> None:
        @surround(module.TorchTrainer, "train_step")
        def train_step(train: Any, self: Any, data: Any) -> Any:
            steps.module_begins(self, (data,), {})
            try:
                return train(self, data)
            finally:
                steps.module_ends()
                steps.step_marked()

    def optimizer(module: Any) -> None:
        @surround(module.BaseOptimizer, "apply")
        def applied(apply: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            steps.keras_update_begins(self)
            try:
                return apply(self, *args, **kwargs)
            finally:
                steps.keras_update_ends(self)

    return {"keras.src.backend.torch.trainer": trainer, "keras.src.optimizers.base_optimizer": optimizer}
