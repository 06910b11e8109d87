"""Data loaders of a captured script: one process, other batch sizes where asked, and the cost of a sample."""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import BatchSampler, DataLoader, dataloader

from forerun.script.capturing.hooks.steps import Steps, first_tensor
from forerun.script.patching import around_batches, around_making_loaders, surround
from forerun.script.profiling.hooks.messages import CaptureSettings

__all__ = ["Loaders"]

_MEASURED_S = 0.6
_MEASURED_BATCHES = 20
_MOST_PASSES = 100
"""Passes over its data that one pass of a loader may make; more stand for no end."""


class Loaders:
    """Follows the loaders of the script.

    Args:
        settings: Settings of the capture.
        steps: Receives the batches.
    """

    def __init__(self, settings: CaptureSettings, steps: Steps) -> None:
        self._settings, self._steps = settings, steps
        self._workers: dict[int, int] = {}
        self.last: Any = None
        self.last_iterator: Any = None
        self.num_samples = 0

    def cover(self) -> None:
        """Wraps PyTorch's loaders."""
        self._cover_construction()
        self._cover_batches()

    def _cover_construction(self) -> None:
        signature = inspect.signature(DataLoader.__init__)
        workers = self._workers
        before, after = self._settings.batch_from, self._settings.batch_to

        @around_making_loaders(dataloader)
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
        def sampled(sample: Any, sampler: Any, *args: Any, **kwargs: Any) -> None:
            sample(sampler, *args, **kwargs)
            if before is not None and sampler.batch_size == before:
                sampler.batch_size = after

    def _cover_batches(self) -> None:
        steps = self._steps

        @surround(dataloader._BaseDataLoaderIter, "__init__")
        def begun(begin: Any, iterator: Any, loader: Any) -> None:
            begin(iterator, loader)
            iterator._forerun_loader = loader

        @surround(dataloader._BaseDataLoaderIter, "_next_index")
        def drawn(draw: Any, iterator: Any) -> Any:
            index = draw(iterator)
            # The rows of a batch need not be its samples: pairs, graphs and packed sequences have more or fewer.
            iterator._forerun_samples = len(index) if isinstance(index, (list, tuple)) else 0
            return index

        @around_batches(dataloader)
        def fetched(fetch: Any, iterator: Any) -> Any:
            recorder = steps.recorder
            was_paused, recorder.is_paused = recorder.is_paused, not recorder.pretends
            steps.in_loader = True
            try:
                batch = fetch(iterator)
            finally:
                recorder.is_paused, steps.in_loader = was_paused, False
            if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                self.last, self.last_iterator = iterator._forerun_loader, iterator
                self.num_samples = getattr(iterator, "_forerun_samples", 0) or _samples_of(batch)
                steps.batch_loaded(self.num_samples)
            return batch

    def facts(self) -> dict[str, Any]:
        """Workers, dataset and cost of a sample of the loader that fed the last step; empty without a loader."""
        if self.last is None:
            return {}
        loader = self.last
        num_batches, size = _length(loader), _length(getattr(loader, "dataset", None))
        if num_batches and size and num_batches * self.num_samples > _MOST_PASSES * size:
            num_batches = None  # a sampler that is meant not to end
        return {
            "num_workers": self._workers.get(id(loader), 0),
            "num_batches": num_batches,
            "batch_samples": self.num_samples,
            "dataset_size": size,
            "sample_cost_s": self._measured_cost_s(),
        }

    def _measured_cost_s(self) -> float | None:
        """Time of this machine's processor for a sample: decoding, augmenting and collating, one process [s]."""
        spent_s, samples = 0.0, 0
        fetch: Any = type(self.last_iterator)._next_data
        end_s = time.monotonic() + _MEASURED_S
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
        return spent_s / samples if samples else None


def _samples_of(batch: Any) -> int:
    first = first_tensor(batch)
    return int(first.shape[0]) if first is not None and first.dim() else 0


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError, ValueError):
        return None
