"""Changes of settings inside a process of the user's script: each is recorded, none touches the script's files."""

from __future__ import annotations

import functools
import math
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from forerun.profiling.hooks.model_hooks import ModelHooks
from forerun.profiling.hooks.recording import Recording

__all__ = ["LOADER_KNOBS", "KnobPatches", "knob_patches"]

LOADER_KNOBS = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers")


def knob_patches(knobs: dict[str, Any], recording: Recording) -> KnobPatches:
    """Patches for these knobs; without knobs they change nothing."""
    return KnobPatches(knobs=dict(knobs), recording=recording)


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

    def loaders(self, module: Any) -> None:
        """Patch that replaces arguments of ``DataLoader``."""
        wanted = {name: self.knobs[name] for name in LOADER_KNOBS if name in self.knobs}
        batch_size = self.knobs.get("batch_size")
        if not wanted and batch_size is None and "cosine_epochs" not in self.knobs:
            return
        create = module.DataLoader.__init__

        @functools.wraps(create)
        def created(loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            names = (
                "batch_size",
                "shuffle",
                "sampler",
                "batch_sampler",
                "num_workers",
                "collate_fn",
                "pin_memory",
            )
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # Arguments after the seventh may be given by position as well; such a call is left alone.
            if len(args) <= len(names):
                given = self._loader_arguments(given, wanted, batch_size)
                create(loader, dataset, **given)
            else:
                self._tell("loader", "left alone: its arguments are given by position")
                create(loader, dataset, *args, **kwargs)
            if given.get("shuffle") or given.get("sampler") is not None:
                self._num_training_batches = len(loader)

        module.DataLoader.__init__ = created

    def optimizers(self, module: Any) -> None:
        """Patch that chooses the implementation of optimizers, accumulates gradients and follows a cosine."""
        _set_process_knobs(self.knobs, self._tell)
        implementation = self.knobs.get("optimizer_implementation")
        num_accumulated = int(self.knobs.get("accumulation", 1))
        if implementation is not None:
            create = module.Optimizer.__init__

            @functools.wraps(create)
            def created(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                create(optimizer, *args, **kwargs)
                self._choose_implementation(optimizer, implementation)

            module.Optimizer.__init__ = created
        if num_accumulated > 1:
            self._accumulate(module, num_accumulated)
        if "cosine_epochs" in self.knobs:
            module.register_optimizer_step_pre_hook(self._follow_cosine)

    def modules(self, module: Any) -> None:
        """Patch that changes the outermost modules that are trained."""
        ModelHooks(self.knobs, self._tell).patch(module)

    def images(self, module: Any) -> None:
        """Patch that decodes JPEGs at the smallest of libjpeg's scales (1/2, 1/4, 1/8) that keeps height and width."""
        size = int(self.knobs.get("jpeg_decode_size", 0))
        if not size:
            return
        read = module.open

        @functools.wraps(read)
        def opened(*args: Any, **kwargs: Any) -> Any:
            image = read(*args, **kwargs)
            if image.format == "JPEG":
                image.draft(None, (size, size))
            return image

        module.open = opened
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
        create = module.Optimizer.__init__

        @functools.wraps(create)
        def created(optimizer: Any, *args: Any, **kwargs: Any) -> None:
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

        module.Optimizer.__init__ = created
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
            base = group.setdefault("forerun_base_lr", group["lr"])
            group["lr"] = base * 0.5 * (1 + math.cos(math.pi * share))
        self._num_steps += 1
        self._tell("cosine_epochs", f"learning rate follows a cosine over {num_steps} steps")

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
