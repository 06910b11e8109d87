"""Changes of settings inside a process of the user's script: each is recorded, none touches the script's files."""

from __future__ import annotations

import inspect
import math
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from forerun.script.patching import surround
from forerun.script.profiling.messages import Recording

LOADER_KNOBS = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")


@dataclass(slots=True)
class KnobPatches:
    """Changes of loaders, images, optimizers and models.

    Attributes:
        knobs: Values by knob.
        recording: Recording that lists each applied hook.
    """

    knobs: dict[str, Any]
    recording: Recording
    _told: set[str] = field(default_factory=set)
    _num_training_batches: int | None = None
    _num_steps: int = 0
    _state: threading.local = field(default_factory=threading.local)
    _scale: LossScale | None = None

    def loaders(self, module: Any) -> None:
        """Patch that replaces arguments of ``DataLoader``."""
        wanted = {name: self.knobs[name] for name in LOADER_KNOBS if name in self.knobs}
        batch_size = self.knobs.get("batch_size")
        if not wanted and batch_size is None and "cosine_epochs" not in self.knobs:
            return

        @surround(module.DataLoader, "__init__")
        def created(create: Any, *args: Any, **kwargs: Any) -> None:
            (_, loader), *rest = inspect.signature(create).bind(*args, **kwargs).arguments.items()
            given = self._loader_arguments(dict(rest), wanted, batch_size)
            create(loader, **given)
            if given.get("shuffle") or given.get("sampler") is not None:
                self._num_training_batches = len(loader)

    def optimizers(self, module: Any) -> None:
        """Patch that chooses the implementation of optimizers, accumulates gradients and follows a cosine."""
        _set_process_knobs(self.knobs, self._tell)
        implementation = self.knobs.get("optimizer_implementation")
        num_accumulated = int(self.knobs.get("accumulation", 1))
        if implementation is not None:

            @surround(module.Optimizer, "__init__")
            def chosen(create: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
                create(optimizer, *args, **kwargs)
                self._choose_implementation(optimizer, implementation)

        if num_accumulated > 1:
            self._accumulate(module, num_accumulated)
        if "cosine_epochs" in self.knobs:
            module.register_optimizer_step_pre_hook(self._follow_cosine)

    def modules(self, module: Any) -> None:
        """Patch that changes the outermost modules that are trained, each once at its first call."""
        is_plain = all(self.knobs.get(name, "off") == "off" for name in ("amp", "compile"))
        if is_plain and not self.knobs.get("channels_last"):
            return

        @surround(module.Module, "__call__")
        def watched_call(call: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            # What has no parameter to train is no model, but a transform of images or a loss.
            is_inside = getattr(self._state, "is_inside", False)
            if is_inside or not any(parameter.requires_grad for parameter in model.parameters()):
                return call(model, *args, **kwargs)
            if not model.__dict__.get("_forerun_is_changed", False):
                model.__dict__["_forerun_is_changed"] = True
                self._change(model)
            self._state.is_inside = True
            try:
                return call(model, *args, **kwargs)
            finally:
                self._state.is_inside = False

    def images(self, module: Any) -> None:
        """Patch that decodes JPEGs at the smallest of libjpeg's scales (1/2, 1/4, 1/8) that keeps height and width."""
        size = int(self.knobs.get("jpeg_decode_size", 0))
        if not size:
            return

        @surround(module, "open")
        def opened(read: Any, *args: Any, **kwargs: Any) -> Any:
            image = read(*args, **kwargs)
            if image.format == "JPEG":
                image.draft(None, (size, size))
            return image

        self._tell("jpeg_decode_size", f"PIL.Image.open(...).draft(None, ({size}, {size})) for JPEGs")

    def _loader_arguments(
        self, given: dict[str, Any], wanted: dict[str, Any], batch_size: int | None
    ) -> dict[str, Any]:
        changed = {**given, **wanted}
        is_training = bool(given.get("shuffle")) or given.get("sampler") is not None
        if batch_size is not None and is_training and given.get("batch_sampler") is None:
            changed["batch_size"] = batch_size
            self._tell("batch_size", f"training DataLoader(batch_size={batch_size})")
        if not changed.get("num_workers"):
            # PyTorch refuses both without workers.
            changed.pop("prefetch_factor", None)
            changed["persistent_workers"] = False
        for name in wanted:
            if name in changed:
                self._tell(name, f"DataLoader({name}={changed[name]})")
        return changed

    def _choose_implementation(self, optimizer: Any, implementation: str) -> None:
        for group in optimizer.param_groups:
            if implementation not in group:
                self._tell(
                    "optimizer_implementation",
                    f"left alone: {type(optimizer).__name__} has no {implementation}",
                )
                return
            group["foreach"], group["fused"] = implementation == "foreach", implementation == "fused"
        self._tell("optimizer_implementation", f"{type(optimizer).__name__}({implementation}=True)")

    def _accumulate(self, module: Any, num_accumulated: int) -> None:
        """Makes only every n-th step, on the mean of n gradients."""

        @surround(module.Optimizer, "__init__")
        def created(create: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            create(optimizer, *args, **kwargs)
            step, clear, calls = type(optimizer).step, type(optimizer).zero_grad, [0]

            def accumulated_step(self: Any, *args: Any, **kwargs: Any) -> Any:
                calls[0] += 1
                if calls[0] % num_accumulated:
                    return None
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter.grad.div_(num_accumulated)
                return step(self, *args, **kwargs)

            def accumulated_clear(self: Any, *args: Any, **kwargs: Any) -> None:
                if not calls[0] % num_accumulated:
                    clear(self, *args, **kwargs)

            # Bound methods: learning rate schedules look for the function behind them.
            optimizer.step = accumulated_step.__get__(optimizer)
            optimizer.zero_grad = accumulated_clear.__get__(optimizer)

        self._tell("accumulation", f"an optimizer step every {num_accumulated} batches")

    def _follow_cosine(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Lr = base (1 + cos(pi step / steps)) / 2; the script's own schedule has priority."""
        if self._num_training_batches is None or "initial_lr" in optimizer.param_groups[0]:
            self._tell(
                "cosine_epochs",
                "left alone: the script has its own schedule, or the length of an epoch is not known",
            )
            return
        num_steps = self.knobs["cosine_epochs"] * self._num_training_batches
        share = min(1.0, self._num_steps / num_steps)
        for group in optimizer.param_groups:
            # Kept with the group, since the rate itself is overwritten from the first step on.
            base = group.setdefault("forerun_base_lr", group["lr"])
            group["lr"] = base * 0.5 * (1 + math.cos(math.pi * share))
        self._num_steps += 1
        self._tell("cosine_epochs", f"learning rate follows a cosine over {num_steps} steps")

    def _change(self, model: Any) -> None:
        torch = sys.modules["torch"]
        name, device = type(model).__name__, next(model.parameters()).device.type
        if self.knobs.get("channels_last"):
            model.to(memory_format=torch.channels_last)
            model.register_forward_pre_hook(_to_channels_last, with_kwargs=True)
            self._tell("channels_last", f"{name}.to(memory_format=torch.channels_last), and its images")
        if (amp := self.knobs.get("amp", "off")) != "off":
            self._autocast(torch, model, name, device, amp)
        if (mode := self.knobs.get("compile", "off")) != "off":
            model.compile(mode=None if mode == "default" else mode)
            self._tell("compile", f"{name}.compile(mode='{mode}')")

    def _autocast(self, torch: Any, model: Any, name: str, device: str, amp: str) -> None:
        if amp == "fp16" and device != "cuda":
            self._tell(
                "amp", f"left alone: fp16 with a scaled loss needs a CUDA device, the model is on {device}"
            )
            return
        dtype = torch.bfloat16 if amp == "bf16" else torch.float16

        # Only the forward pass runs under autocast, as PyTorch advises; the loss sees single precision.
        @surround(model, "forward")
        def autocast_forward(forward: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype=dtype):
                return _to_float(torch, forward(*args, **kwargs))

        if amp == "fp16" and self._scale is None:
            self._scale = LossScale(torch)
        scaled = ", loss scaled" if amp == "fp16" else ""
        self._tell("amp", f"{name} under torch.autocast('{device}', {amp}){scaled}")

    def _tell(self, knob: str, what: str) -> None:
        if f"{knob}{what}" not in self._told:
            self._told.add(f"{knob}{what}")
            self.recording.write("hook", knob=knob, what=what)


def _set_process_knobs(knobs: dict[str, Any], tell: Any) -> None:
    """Sets the threads of the processor's kernels and cuDNN's choice of algorithms."""
    if "num_threads" in knobs:
        # The libraries read this variable when they start, which is later.
        os.environ["OMP_NUM_THREADS"] = str(knobs["num_threads"])
        sys.modules["torch"].set_num_threads(int(knobs["num_threads"]))
        tell("num_threads", f"torch.set_num_threads({knobs['num_threads']})")
    if knobs.get("cudnn_benchmark") is not None:
        import torch.backends.cudnn as cudnn

        cudnn.benchmark = bool(knobs["cudnn_benchmark"])
        tell("cudnn_benchmark", f"torch.backends.cudnn.benchmark = {bool(knobs['cudnn_benchmark'])}")


class LossScale:
    """Scales the loss of mixed precision with fp16, for a script that does not scale its loss.

    As ``torch.amp.GradScaler``: the loss is multiplied before the backward pass, gradients are divided before they are
    clipped or used, a step with an overflow is left out and halves the scale; many steps without overflow double it.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._scale, self._growth_interval = 65536.0, 2000
        self._num_good = 0
        self._unscaled: set[int] = set()

        @surround(torch.Tensor, "backward")
        def scaled_backward(backward: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._unscaled.clear()
            return backward(loss * self._scale, *args, **kwargs)

        @surround(torch.nn.utils, "clip_grad_norm_")
        def unscaled_clip(clip: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
            listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._unscale(listed)
            return clip(listed, *args, **kwargs)

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


def _to_channels_last(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(_image(value) for value in args), {name: _image(value) for name, value in kwargs.items()}


def _image(value: Any) -> Any:
    torch = sys.modules["torch"]
    is_image = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.to(memory_format=torch.channels_last) if is_image else value


def _to_float(torch: Any, value: Any) -> Any:
    from torch.utils import _pytree  # it knows the outputs of Transformers' models as well

    half = (torch.bfloat16, torch.float16)
    return _pytree.tree_map_only(
        torch.Tensor, lambda part: part.float() if part.dtype in half else part, value
    )
