"""Precision, memory order and compilation of the outermost modules that are trained."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["MODEL_KNOBS", "ModelHooks"]

MODEL_KNOBS = ("amp", "channels_last", "compile")


class ModelHooks:
    """Finds the models of a script at their first call and changes them once."""

    def __init__(self, knobs: dict[str, Any], tell: Callable[[str, str], None]) -> None:
        self._amp = knobs.get("amp", "off")
        self._channels_last = bool(knobs.get("channels_last", False))
        self._compile = knobs.get("compile", "off")
        self._tell = tell
        self._state = threading.local()
        self._scale: LossScale | None = None

    def patch(self, module: Any) -> None:
        """Wraps ``Module.__call__`` to find the outermost modules, if there is anything to change."""
        if self._amp == "off" and not self._channels_last and self._compile == "off":
            return
        call = module.Module.__call__

        @functools.wraps(call)
        def watched_call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._state, "is_inside", False):
                return call(model, *args, **kwargs)
            if not _is_trained(model):  # no model, but a transform of images or a loss
                return call(model, *args, **kwargs)
            if not model.__dict__.get("_forerun_is_changed", False):
                model.__dict__["_forerun_is_changed"] = True
                self._change(model)
            self._state.is_inside = True
            try:
                return call(model, *args, **kwargs)
            finally:
                self._state.is_inside = False

        module.Module.__call__ = watched_call

    def _change(self, model: Any) -> None:
        torch = sys.modules["torch"]
        name, device = type(model).__name__, next(model.parameters()).device.type
        if self._channels_last:
            model.to(memory_format=torch.channels_last)
            model.register_forward_pre_hook(_to_channels_last, with_kwargs=True)
            self._tell("channels_last", f"{name}.to(memory_format=torch.channels_last), and its images")
        if self._amp != "off":
            self._autocast(torch, model, name, device)
        if self._compile != "off":
            model.compile(mode=None if self._compile == "default" else self._compile)
            self._tell("compile", f"{name}.compile(mode='{self._compile}')")

    def _autocast(self, torch: Any, model: Any, name: str, device: str) -> None:
        if self._amp == "fp16" and device != "cuda":
            self._tell(
                "amp", f"left alone: fp16 with a scaled loss needs a CUDA device, the model is on {device}"
            )
            return
        dtype = torch.bfloat16 if self._amp == "bf16" else torch.float16
        forward = model.forward

        # Only the forward pass runs under autocast, as PyTorch advises; the loss sees single precision.
        @functools.wraps(forward)
        def autocast_forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                return _to_float(torch, forward(*args, **kwargs))

        model.forward = autocast_forward
        if self._amp == "fp16" and self._scale is None:
            self._scale = LossScale(torch)
        scaled = ", loss scaled" if self._amp == "fp16" else ""
        self._tell("amp", f"{name} under torch.autocast('{device}', {self._amp}){scaled}")


class LossScale:
    """Scales the loss of mixed precision with fp16, for a script that does not scale its loss.

    As ``torch.amp.GradScaler``: the loss is multiplied before the backward pass, gradients are divided before they are
    clipped or used, a step with an overflow is left out and halves the scale; many steps without overflow double it.
    """

    def __init__(self, torch: Any, scale: float = 65536.0, growth_interval: int = 2000) -> None:
        self._torch = torch
        self._scale, self._growth_interval = scale, growth_interval
        self._num_good = 0
        self._unscaled: set[int] = set()
        backward = torch.Tensor.backward
        clip = torch.nn.utils.clip_grad_norm_

        @functools.wraps(backward)
        def scaled_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._unscaled.clear()
            return backward(loss * self._scale, *args, **kwargs)

        @functools.wraps(clip)
        def unscaled_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._unscale(listed)
            return clip(listed, *args, **kwargs)

        torch.Tensor.backward = scaled_backward
        torch.nn.utils.clip_grad_norm_ = unscaled_clip
        torch.optim.optimizer.register_optimizer_step_pre_hook(self._before_step)

    def _unscale(self, parameters: list[Any]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in self._unscaled:
                self._unscaled.add(id(parameter))
                parameter.grad.div_(self._scale)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._unscale(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return
        norms = self._torch._foreach_norm(gradients, float("inf"))
        if bool(self._torch.isfinite(self._torch.stack(norms)).all()):
            self._num_good += 1
            if self._num_good % self._growth_interval == 0:
                self._scale *= 2
            return
        for parameter in parameters:
            parameter.grad = None  # optimizers leave parameters without a gradient as they are
        self._scale, self._num_good = self._scale / 2, 0


def _is_trained(model: Any) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _to_channels_last(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(_image(value) for value in args), {name: _image(value) for name, value in kwargs.items()}


def _image(value: Any) -> Any:
    torch = sys.modules["torch"]
    is_image = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.to(memory_format=torch.channels_last) if is_image else value


def _to_float(torch: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_to_float(torch, part) for part in value)
    if isinstance(value, list):
        return [_to_float(torch, part) for part in value]
    if isinstance(value, dict):
        for name in list(value):
            value[name] = _to_float(torch, value[name])  # keeps the type of the model's output
    return value
