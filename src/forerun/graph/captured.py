"""A captured training step on disk: the graph and what is known of the script it came from."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.answers import from_plain
from forerun.base.errors import TraceError, UsageError
from forerun.base.kept import whole_file
from forerun.base.received import DAMAGE, LARGEST_FILE_BYTES, in_a_line, read_member

if TYPE_CHECKING:
    from forerun.graph.graph import Graph

CAPTURE_FORMAT_VERSION = 1

_FACTS, _GRAPH = "capture.json", "graph.npz"
_NEEDED = (
    "batch_size",
    "num_micro_steps",
    "world_size",
    "precision",
    "layout",
    "optimizer",
    "optimizer_implementation",
)
_SETTINGS = ("batch_size", "precision", "convolution_precision", "layout", "compile", "optimizer",
             "optimizer_implementation", "dataset_size")  # fmt: skip
"""Facts that are settings of a run under their own names."""
_LARGEST_FACTS_BYTES = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPart:
    """A network or an optimizer of a captured script.

    Attributes:
        name: Name of its class.
        num_parameters: Weights it holds or changes.
        num_uses: Forward passes, or updates, of a step.
    """

    name: str
    num_parameters: int
    num_uses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLoader:
    """The data loader of a captured script.

    Attributes:
        num_workers: Worker processes the script asks for.
        sample_cost_s: Time of one core of the capturing machine for a sample; None where it could not be measured [s].
    """

    num_workers: int
    sample_cost_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPause:
    """A pause between the steps of a script: validation, or a checkpoint.

    Attributes:
        unit: ``steps`` or ``epochs`` that it is counted in, or ``job`` for once at the end.
        every: Number of those after which it happens.
        num_samples: Samples of a validation, if they are known.
    """

    unit: str
    every: int = 1
    num_samples: int | None = None

    @property
    def words(self) -> str:
        """Its frequency in words, such as "every 500 steps"."""
        if self.unit == "job":
            return "at the end"
        return f"every {self.unit[:-1]}" if self.every == 1 else f"every {self.every:,} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFacts:
    """Facts of a captured script.

    Attributes:
        command: Words of the command.
        way: ``pretended`` (a CUDA device on the meta device) or ``recorded`` (on the processor).
        models: Networks that were run with gradients.
        optimizers: Optimizers, in the order they were made.
        num_micro_steps: Micro-steps of one step.
        batch_size: Samples of one micro-step.
        precision, layout, compile, optimizer, optimizer_implementation: As in a training setup.
        convolution_precision: Arithmetic of convolutions in fp32, if it is not that of ``precision``.
        validation, checkpoints: How often the script validates and saves; None for never, as far as it is seen.
        recomputes: Whether activations are computed again in the backward pass.
        clips: Whether gradients are clipped.
        averages: Whether a moving average of the weights is kept.
        num_reads: Values the host reads in a step, for each of which it waits for the device.
        world_size: Processes of the script's group.
        strategy: Wrapper that shares the work, ``ddp`` or ``fsdp``; empty without one.
        bucket_mb: Capacity of a gradient bucket, if the script sets one [MiB].
        loader: The data loader; None without one.
        dataset_size: Samples of one epoch; None if not known.
        epochs: Epochs of the job; None if not known.
        max_steps: Steps of the job, if they are not those of its epochs.
        not_captured: What the step of the script does or needs beyond the graph, in words.
        torch_version: PyTorch that ran the script.
        steps_per_epoch: Steps of an epoch; None if not known.
        job_notes: Sources of the job's length that disagree, in words.
    """

    command: tuple[str, ...]
    way: str
    models: tuple[CapturedPart, ...]
    optimizers: tuple[CapturedPart, ...]
    num_micro_steps: int
    batch_size: int
    precision: str
    layout: str
    compile: bool
    optimizer: str
    optimizer_implementation: str
    recomputes: bool
    clips: bool
    averages: bool
    num_reads: int
    world_size: int
    strategy: str
    bucket_mb: float | None
    loader: CapturedLoader | None
    dataset_size: int | None
    epochs: float | None
    max_steps: int | None
    not_captured: tuple[str, ...]
    torch_version: str
    steps_per_epoch: int | None = None
    job_notes: tuple[str, ...] = ()
    convolution_precision: str | None = None
    validation: CapturedPause | None = None
    checkpoints: CapturedPause | None = None

    @property
    def samples_per_step(self) -> int:
        """Samples of one step of one device."""
        return self.batch_size * self.num_micro_steps

    def settings(self) -> dict[str, Any]:
        """The settings of a run that the script decides, under the names of ``RunOptions``."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _SETTINGS}
        epochs = self.max_steps / whole if (whole := self.steps_per_epoch) and self.max_steps else self.epochs
        found |= {"accumulation": self.num_micro_steps, "epochs": epochs if self.dataset_size else None}
        if self.dataset_size and self.epochs and (samples := self._validation_samples_per_epoch()):
            found["validation_size"] = samples
        if self.loader is not None and self.loader.sample_cost_s is not None:
            found["loader_ms"] = self.loader.sample_cost_s * 1e3
            found["loader_workers"] = self.loader.num_workers
        return {name: value for name, value in found.items() if value is not None}

    def _validation_samples_per_epoch(self) -> int:
        """Samples that are validated in an epoch, in the mean; 0 where that is not known."""
        pause = self.validation
        if pause is None or not pause.num_samples or pause.unit == "job":
            return 0
        units = self.steps_per_epoch or 0 if pause.unit == "steps" else 1
        return round(pause.num_samples * units / pause.every)

    def sharing_settings(self) -> dict[str, Any]:
        """The settings of several devices that the script decides."""
        found = {"strategy": self.strategy or None, "bucket_mb": self.bucket_mb}
        return {name: value for name, value in found.items() if value is not None}

    def notes(self) -> tuple[str, ...]:
        """Sentences on the parts of the script that were captured, and on those that were not."""
        how = "on a pretended GPU" if self.way == "pretended" else "on the processor"
        models = " and ".join(f"{part.name} ({_count(part.num_parameters)} weights)" for part in self.models)
        updates = ", ".join(
            part.name if part.num_uses == 1 else f"{part.name} ({part.num_uses} updates)"
            for part in self.optimizers
        )
        samples = f"{self.batch_size} samples a step"
        if self.num_micro_steps > 1:
            samples = f"{self.samples_per_step} samples a step in {self.num_micro_steps} micro-steps"
        plural = "s" * (self.num_reads != 1)
        words = {
            "recomputed activations": self.recomputes,
            "clipped gradients": self.clips,
            "a moving average of the weights": self.averages,
            "torch.compile": self.compile,
            f"{self.num_reads} value{plural} read by the host, which waits for the device": self.num_reads,
        }
        extras = [text for text, applies in words.items() if applies]
        formats = self.precision
        if self.convolution_precision:
            formats += f", convolutions {self.convolution_precision}"
        what = f"{models or 'no module'}; {updates or 'weights changed by hand'}; {samples}; {formats}"
        found = [f"captured {how}: {what}" + (f"; with {', '.join(extras)}" if extras else "")]
        if (loader := self.loader) is not None and loader.sample_cost_s is not None:
            took = (
                f"loading a sample took one core of the capturing machine {loader.sample_cost_s * 1e3:.3g} ms"
            )
            waits = "the script has no workers, so the device waits for every batch"
            if loader.num_workers:
                waits = f"with the script's {loader.num_workers} workers a step takes the longer of device and loader"
            found.append(f"{took}; {waits}")
        if self.validation is not None:
            on = f" on {self.validation.num_samples:,} samples" if self.validation.num_samples else ""
            found.append(f"the script validates {self.validation.words}{on}")
        if self.checkpoints is not None:
            found.append(
                f"the script saves a checkpoint {self.checkpoints.words}, whose time is not in the job's"
            )
        if self.max_steps is not None:
            found.append(f"the job is counted in steps: {self.max_steps:,}")
        return (*found, *self.job_notes, *(f"not captured: {text}" for text in self.not_captured))


def _count(number: int) -> str:
    return f"{number / 1e6:,.4g} million" if number >= 1e6 else f"{number:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A captured step: its graph and what is known of its script."""

    graph: Graph
    facts: CaptureFacts

    def save(self, path: str | Path) -> Path:
        """Writes the capture to a file, which answers later without the script.

        Raises:
            OSError: The folder cannot be written.
        """
        from forerun.graph.file import graph_bytes

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        header = {"format_version": CAPTURE_FORMAT_VERSION, "facts": asdict(self.facts)}
        with whole_file(target) as partial, zipfile.ZipFile(partial, "w") as archive:
            archive.writestr(_FACTS, json.dumps(header, indent=1))
            archive.writestr(_GRAPH, graph_bytes(replace(self.graph, model=self.name)))
        return target

    @property
    def name(self) -> str:
        """The command in one line, as the name of the model in answers."""
        text = " ".join(self.facts.command)
        return text if len(text) <= 80 else text[:77] + "..."


def read_capture_facts(path: Path) -> CaptureFacts:
    """Facts of the script behind a file; the graph is not read.

    Raises:
        UsageError: There is no such file, it is no capture, or one of another version.
    """
    try:
        header = json.loads(read_member(path, _FACTS, _LARGEST_FACTS_BYTES))
        version = header["format_version"]
    except FileNotFoundError:
        raise UsageError(
            f"expected a captured graph, but there is no file '{path}'; make one with: "
            f"forerun capture --out {path} -- python train.py"
        ) from None
    except DAMAGE as error:
        raise UsageError(
            f"expected a captured graph in '{path}', but it is no file of forerun capture; capture the script again"
        ) from error
    if version != CAPTURE_FORMAT_VERSION:
        found = in_a_line(version)[:20]
        raise UsageError(
            f"'{path}' has version {found} of captured graphs, this forerun reads {CAPTURE_FORMAT_VERSION}; "
            "capture the script again"
        )
    try:
        facts: CaptureFacts = from_plain(CaptureFacts, header["facts"])
        for name in _NEEDED:
            if not getattr(facts, name):
                raise ValueError(f"{name} is empty or zero")
    except (KeyError, ValueError) as error:
        raise _damaged(path, error) from error
    return facts


def _damaged(path: Path, error: Exception) -> UsageError:
    return UsageError(f"the captured graph '{path}' is damaged: {in_a_line(error)}; capture the script again")


def read_capture(path: Path) -> Capture:
    """A capture from a file.

    Raises:
        UsageError: As in ``read_capture_facts``, or the graph is damaged or of another version.
    """
    from forerun.graph.file import (
        check_stream,
        parse_graph,  # loads NumPy, which a question does without
    )

    facts = read_capture_facts(path)
    try:
        graph = parse_graph(io.BytesIO(read_member(path, _GRAPH, LARGEST_FILE_BYTES)))
        check_stream(graph.memory)
    except (*DAMAGE, TraceError) as error:
        raise _damaged(path, error) from error
    return Capture(graph=graph, facts=facts)
