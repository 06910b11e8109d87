"""The result of a capture: the graph of the recorded steps and the facts, as files in the scratch folder."""

from __future__ import annotations

import ast
import functools
import gc
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from forerun.base.kept import write_whole
from forerun.graph.captured import CapturedLoader, CapturedPart, CaptureFacts
from forerun.graph.file import write_graph
from forerun.graph.graph import AllocationKind, Graph, MemoryEvent, OpClass, StepPart
from forerun.script.capturing.job import Job, Progress, job_of, named_length
from forerun.script.capturing.pauses import SAVES
from forerun.script.capturing.source import called_name, frames_around, parsed
from forerun.script.capturing.steps import RecordedStep, Steps, first_tensor, parts_of, unwrapped
from forerun.script.patching import is_of_script
from forerun.tracing.recorder import RecordedEvent, RecordedRow
from forerun.tracing.step import RawTrace, name_short_lived
from forerun.tracing.step_graph import memory_stream, op_table, product_flops

if TYPE_CHECKING:
    from forerun.script.capturing.start import Session

RESULT_FILE = "result.json"
GRAPH_FILE = "graph.npz"

_AVERAGE = re.compile(
    r"^(Model)?(EMA|Ema)(?![a-z])|^AveragedModel$|^ExponentialMovingAverage|^WeightAveraging$"
)
_AVERAGED, _ANY = re.compile(r"(^|_)ema(_|$)"), re.compile("")
_ENDLESS = 10**9
"""Samples that stand for a stream."""
_HALF = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_AUTOCAST = {torch.float16: "amp", torch.bfloat16: "amp-bf16"}


def write_result(session: Session, frame: FrameType) -> Job:
    """Writes graph and facts into the folder of a capture; returns the length of the job.

    Args:
        session: The capture, with its recorded steps and the facts that patches noticed.
        frame: Frame of the script's update, from which its loops are read.
    """
    folder, steps, flags = Path(session.settings.folder), session.steps, session.flags
    chosen, pair = _chosen(steps)
    num_micro_steps = steps.micro_steps(chosen, flags["options"])
    named = [(name, tuple(p.shape)) for name, p in _named_parameters(steps)]
    rows, place = _rows(steps, chosen, num_micro_steps)
    if mean := _mean_rows(steps) if num_micro_steps == 1 else []:
        rows, place, chosen = mean, (lambda row: row - steps.recorded[0].first_row), pair[1]
    events, names = _events(steps, pair, num_micro_steps, place if chosen is pair[1] else None)
    batch_size = _batch_size(steps, chosen, num_micro_steps, flags["options"], frame)
    raw = RawTrace(batch_size, rows, events, frozenset(steps.recorder.unsupported))
    parameters, trained = steps.parameters(), steps.trained()
    operations = op_table(raw, named)
    # Of a model whose first input is a table of whole numbers, (samples, tokens) or turned.
    has_tokens = steps.reads_tokens and batch_size in steps.first_sizes
    graph = Graph(
        model="",
        input_shape=steps.input_shape,
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable_parameters=sum(p.numel() for p in trained),
        ops=operations,
        memory=memory_stream(raw),
        only_batch_size=batch_size,
        parameter_names=names,
        uses_layer_norm=bool((operations.op_class == OpClass.LAYER_NORM).any()),
        unsupported_ops=tuple(sorted(raw.unsupported)),
        tokens_per_sample=prod(steps.first_sizes) // batch_size if has_tokens else None,
        model_flops=product_flops(raw, recomputed=False),
        recomputed_flops=product_flops(raw, recomputed=True),
        versions=(("torch", torch.__version__.partition("+")[0]),),
    )
    write_graph(graph, folder / GRAPH_FILE)
    loader = session.loaders.facts()
    # A trainer that begins with single micro-steps says how many follow; the graph has one of them in either case.
    num_micro_steps = max(num_micro_steps, flags.get("job", {}).get("num_micro_steps", 1))
    job = job_of(frame, _progress(steps, loader, flags, num_micro_steps), session.counters)
    facts = _facts(session, chosen, loader, job, batch_size, num_micro_steps, frame)
    guesses = session.pretence.guesses if session.pretence is not None else {}
    notes = _notes(steps, chosen, guesses, flags, is_mean=bool(mean))
    document = {
        "facts": asdict(facts) | {"not_captured": [*facts.not_captured, *notes]},
        "options": flags["options"],
        "configurator": flags["configurator"],
    }
    write_whole(folder / RESULT_FILE, json.dumps(document).encode())
    return job


def close_job(folder: Path, num_steps: int) -> None:
    """Writes the length of a job whose steps were counted after the result was written."""
    document = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    facts = document["facts"]
    samples = facts["batch_size"] * facts["num_micro_steps"] * facts["world_size"]
    size = facts["dataset_size"] or num_steps * samples
    facts |= {"max_steps": num_steps, "dataset_size": size, "epochs": num_steps / -(-size // samples)}
    write_whole(folder / RESULT_FILE, json.dumps(document).encode())


def _chosen(steps: Steps) -> tuple[RecordedStep, tuple[RecordedStep, RecordedStep]]:
    """The step whose work is nearest to the mean, and two successive ones of which the second has the most.

    Steps of as many samples as most are chosen: neither the last one of an epoch, nor one that looks at other data.
    """
    recorded = steps.recorded
    work = [steps.flops_of(step) for step in recorded]
    samples = [sum(step.loader_samples) for step in recorded]
    usual = max(samples, key=lambda number: (samples.count(number), number))
    whole = [i for i, number in enumerate(samples) if number == usual]
    mean = sum(work[i] for i in whole) / len(whole)
    # Of equal ones the last, farthest from the warm-up of a script; so below.
    chosen = min(whole, key=lambda i: (abs(work[i] - mean), -i))
    largest = max(range(1, len(recorded)), key=lambda i: (work[i], -i))
    return recorded[chosen], (recorded[largest - 1], recorded[largest])


def _named_parameters(steps: Steps) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for module in steps.roots.values():
        prefix = steps.names.get(id(module), "")
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found.append((f"{prefix}.{name}" if prefix else name, unwrapped(parameter)))
    return found


def _rows(
    steps: Steps, step: RecordedStep, num_micro_steps: int
) -> tuple[list[RecordedRow], Callable[[int], int]]:
    """The rows of a step, those of its last micro-step only if there are several, and the place of a row among them.

    A row of an earlier micro-step has the place of the one as far from the end of the last micro-step.
    """
    rows = steps.recorder.rows
    if num_micro_steps == 1:
        return rows[step.first_row : step.last_row], lambda row: row - step.first_row
    kept: list[RecordedRow] = []
    places: list[int] = []
    for piece in parts_of(step):
        ends = piece.backward_ends[:: -(len(piece.backward_ends) // num_micro_steps)][::-1]
        head = _leading(rows[piece.first_row : ends[0]])
        # What the first micro-step does beyond the last (zeroing gradients) happens once a step, and is the
        # optimizer's.
        usual = len(_leading(rows[ends[-2] : ends[-1]]))
        kept += [replace(r, step_part=StepPart.OPTIMIZER) for r in head[: max(0, len(head) - usual)]]
        first = len(kept)
        for row in range(piece.first_row, ends[-2]):
            to_end = next(end for end in ends if end >= row) - row
            places.append(first + max(0, ends[-1] - ends[-2] - to_end))
        places += range(first, first + piece.last_row - ends[-2])
        kept += rows[ends[-2] : piece.last_row]
    places.append(len(kept))
    return kept, lambda row: places[row - step.first_row]


def _mean_rows(steps: Steps) -> list[RecordedRow]:
    """The rows of all recorded steps, each with its part in a mean step, if the optimizers take turns; else none."""
    used, period = steps.turns()
    takes_turns = any(step.updates.keys() != used for step in steps.recorded)
    number = min(period, len(steps.recorded)) if takes_turns else 0
    return [
        replace(row, cost=replace(row.cost, count=row.cost.count / number))
        for step in steps.recorded[:number]
        for row in steps.rows_of(step)
    ]


def _leading(rows: list[RecordedRow]) -> list[RecordedRow]:
    """The rows before the first that belongs to a module."""
    first = next((index for index, row in enumerate(rows) if row.module_name), len(rows))
    return rows[:first]


def _events(
    steps: Steps,
    pair: tuple[RecordedStep, RecordedStep],
    num_micro_steps: int,
    place: Callable[[int], int] | None,
) -> tuple[list[RecordedEvent], tuple[str, ...]]:
    """The memory stream of two steps, see ``stream_of_steps``, and the names of its weights, in order."""
    begin = pair[0].first_event
    pieces = [piece for step in pair for piece in parts_of(step)] if num_micro_steps > 1 else []
    spans = [
        (piece.first_event, piece.micro_events[-1 - len(piece.micro_events) // num_micro_steps])
        for piece in pieces
    ]
    stream, weights = stream_of_steps(steps.recorder.events, begin, spans, place)
    # Reversed, so that of the names of a shared weight the first one stays, as in a traced graph.
    named = {steps.recorder.block_of(p): name for name, p in reversed(_named_parameters(steps))}
    return stream, tuple(named.get(block, "") for block in weights)


def stream_of_steps(
    events: Sequence[RecordedEvent],
    begin: int,
    earlier: Sequence[tuple[int, int]] = (),
    place: Callable[[int], int] | None = None,
) -> tuple[list[RecordedEvent], list[int]]:
    """The memory stream of two steps in a row, as the trace of a model would have it, and the blocks of its weights.

    What reads a graph relies on four things, and each has its function here:

    1. What is alive before stands first, once, and then there are two whole steps (``_alive_and_steps``): the replay
       of the allocator repeats the second one.
    2. The first step is a script's first: it frees nothing that it has not made (``_without_inherited``). The replay
       would free a block that the repeated step never makes again.
    3. Gradients are made in the steps, also where the script keeps them from step to step (``_with_gradients``): the
       buckets of data parallelism have them in the order of their allocation in a backward pass.
    4. A block is called a gradient only if it lives at the end, and only the second step, which is a usual one, knows
       its operations (``_numbered``): units of a layout find their own memory by the operation that makes it.

    Args:
        events: The recorder's whole stream.
        begin: Position of the first event of the first step.
        earlier: Spans of micro-steps before the last one of each step, as positions in the stream.
        place: Place of a recorded row among the rows of the graph; None if they are rows of another step.
    """
    static, body = _alive_and_steps(events, begin, earlier)
    static, body = _without_inherited(static, body)
    static, body = _with_gradients(static, body)
    weights = [event.block for event in static if event.kind == AllocationKind.WEIGHT]
    return _numbered(static, body, place), weights


def _alive_and_steps(
    events: Sequence[RecordedEvent], begin: int, earlier: Sequence[tuple[int, int]]
) -> tuple[list[RecordedEvent], list[RecordedEvent]]:
    """Allocations that live when the first of two steps begins, and the events of both steps."""
    alive: dict[int, RecordedEvent] = {}
    for event in events[:begin]:
        if event.event is MemoryEvent.ALLOCATE:
            alive[event.block] = event
        elif event.event is MemoryEvent.FREE:
            alive.pop(event.block, None)
    ends = [i for i, e in enumerate(events) if e.event is MemoryEvent.STEP_ENDS and i >= begin][:2]
    body = list(events[begin : ends[1] + 1])
    return list(alive.values()), _without_earlier(body, [(a - begin, b - begin) for a, b in earlier])


def _without_inherited(
    static: list[RecordedEvent], body: list[RecordedEvent]
) -> tuple[list[RecordedEvent], list[RecordedEvent]]:
    """Leaves out blocks of a step before, such as its loss, that the first step frees: a first step has none."""
    end = _end_of_first(body)
    alive = {event.block for event in static}
    inherited = {e.block for e in body[:end] if e.event is MemoryEvent.FREE} & alive
    return (
        [event for event in static if event.block not in inherited],
        [event for event in body if event.block not in inherited],
    )


def _with_gradients(
    static: list[RecordedEvent], body: list[RecordedEvent]
) -> tuple[list[RecordedEvent], list[RecordedEvent]]:
    """Shows gradients that stay from step to step where the first backward pass would make them.

    A gradient that is freed before that place cannot be made there: then all of them stay as they are.
    """
    # A script that sets its gradients to None makes them in each step already.
    if any(e.event is MemoryEvent.ALLOCATE and e.kind == AllocationKind.GRADIENT for e in body):
        return static, body
    kept = [event for event in static if event.kind == AllocationKind.GRADIENT]
    others = [event for event in static if event.kind != AllocationKind.GRADIENT]
    at = next((i for i, e in enumerate(body) if e.event is MemoryEvent.BACKWARD_BEGINS), 0) + 1
    freed_before = {e.block for e in body[:at] if e.event is MemoryEvent.FREE}
    if any(event.block in freed_before for event in kept):
        return [*others, *kept], body
    # A backward pass makes the gradients of the last layers first.
    return others, [*body[:at], *reversed(kept), *body[at:]]


def _numbered(
    static: list[RecordedEvent], body: list[RecordedEvent], place: Callable[[int], int] | None
) -> list[RecordedEvent]:
    """The stream with blocks counted from zero, kinds as a trace gives them, and operations in the second step."""
    kinds: dict[int, AllocationKind] = {}
    name_short_lived(body, kinds)
    freed = {event.block for event in body if event.event is MemoryEvent.FREE}
    numbers: dict[int, int] = {}
    result = []
    second = _end_of_first(body) + len(static) + 1
    for index, event in enumerate([*static, *body]):
        # Events without a block, such as the end of a step, have a negative number.
        block = numbers.setdefault(event.block, len(numbers)) if event.block >= 0 else -1
        kind = kinds.get(event.block, event.kind) if event.event is MemoryEvent.ALLOCATE else event.kind
        # Only activations get a name by their life; what the recorder knows otherwise is right.
        if event.kind not in (AllocationKind.ACTIVATION, -1):
            kind = event.kind
        if kind == AllocationKind.GRADIENT and event.block in freed:
            kind = AllocationKind.TEMPORARY
        row = place(event.row) if place is not None and index >= second and event.row >= 0 else -1
        result.append(RecordedEvent(event.event, block, event.size_bytes, int(kind), row))
    return result


def _end_of_first(body: list[RecordedEvent]) -> int:
    return next(i for i, e in enumerate(body) if e.event is MemoryEvent.STEP_ENDS)


def _without_earlier(body: list[RecordedEvent], spans: list[tuple[int, int]]) -> list[RecordedEvent]:
    """Drops blocks that live and die within micro-steps before the last, whose memory is not less."""
    dropped: set[int] = set()
    for begin, end in spans:
        inside: dict[int, int] = {}
        for index in range(begin, end):
            event = body[index]
            if event.event is MemoryEvent.ALLOCATE:
                inside[event.block] = index
            elif event.event is MemoryEvent.FREE and event.block in inside:
                dropped |= {index, inside[event.block]}
            # The workspaces of the last micro-step are as large.
            elif event.event is MemoryEvent.CONV_WORKSPACE:
                dropped.add(index)
    return [event for index, event in enumerate(body) if index not in dropped]


def _batch_size(
    steps: Steps, step: RecordedStep, num_micro_steps: int, options: list[dict[str, Any]], frame: FrameType
) -> int:
    if step.loader_samples:
        every = [number for each in steps.recorded for number in each.loader_samples]
        fetches, own = round(len(every) / len(steps.recorded)), step.loader_samples[0]
        if 0 < fetches < num_micro_steps:  # a batch that the script splits
            return max(1, own * fetches // num_micro_steps)
        if num_micro_steps < fetches == max(step.updates.values(), default=0):
            return own * fetches  # each for an update of its own
        if fetches <= num_micro_steps or step.samples == [] or own in step.samples:
            return max(1, own)
    if step.samples:
        asked = [o["value"] for o in options if "batch" in o["name"].lower() or "batch size" in o["help"]]
        named = None if asked else named_length(frame, ("batch_size",))
        known = asked if named is None else [round(named.value)]
        # Sequences may come step by step, (steps, batch): that says which axis is that of samples.
        if step.samples[0] not in known and len(steps.first_sizes) > 1 and steps.first_sizes[1] in known:
            return steps.first_sizes[1]
        whole = [
            n for n in asked if isinstance(n, int) and 1 < n < step.samples[0] and not step.samples[0] % n
        ]
        if step.samples[0] not in asked and len(set(whole)) == 1:
            return whole[0]  # samples of several rows each, such as the points along a ray
        return max(1, step.samples[0])
    return max(1, step.loader_samples[0] if step.loader_samples else 1)


def _facts(
    session: Session,
    step: RecordedStep,
    loader: dict[str, Any],
    job: Job,
    batch_size: int,
    num_micro_steps: int,
    frame: FrameType,
) -> CaptureFacts:
    steps, parallel, flags = session.steps, session.parallel, session.flags
    every = [*steps.optimizers.values(), *steps.keras_optimizers.values()]
    # A critic may update in each step and its actor in few of them.
    used = [(o, max(each.updates.get(id(o), 0) for each in steps.recorded)) for o in every]
    samples_global = batch_size * num_micro_steps * parallel.world_size
    dataset_size = _dataset_size(loader, job.steps_per_epoch, samples_global)
    epochs = job.epochs
    held = {key: frozenset(map(id, root.parameters())) for key, root in steps.roots.items()}
    whole = {
        weights: key for key, weights in held.items() if not any(weights < other for other in held.values())
    }
    precision = _precision(steps, flags, parallel.dtype)
    if job.max_steps is not None and job.steps_per_epoch is None:
        dataset_size = dataset_size or job.max_steps * samples_global
        epochs = job.max_steps / -(-dataset_size // samples_global)
    return CaptureFacts(
        command=(),
        way="pretended" if steps.recorder.pretends else "recorded",
        models=tuple(
            _model(module, steps, step)
            for key, module in steps.roots.items()
            if held[key] and whole.get(held[key]) == key  # not a part of another, or one behind a wrapper
        ),
        optimizers=tuple(_optimizer(optimizer, number) for optimizer, number in used if number),
        num_micro_steps=num_micro_steps,
        batch_size=batch_size,
        precision=precision,
        convolution_precision=_convolution_precision(precision),
        layout="nhwc" if steps.is_channels_last else "nchw",
        compile=flags["compile"]
        or any(id(module) in flags["compiled"] for root in steps.roots.values() for module in root.modules()),
        optimizer="+".join(dict.fromkeys(type(o).__name__.lower() for o, n in used if n)) or "none",
        optimizer_implementation=_implementation([o for o, n in used if n], flags),
        recomputes=steps.has_recomputation,
        clips=steps.clips,
        averages=steps.recorder.averages(_targets(steps, frame))
        or any(map(_averages_weights, gc.get_objects())),
        num_reads=step.num_reads,
        world_size=parallel.world_size,
        strategy=parallel.strategy if parallel.world_size > 1 or parallel.strategy == "fsdp" else "",
        bucket_mb=parallel.bucket_mb,
        loader=(
            CapturedLoader(num_workers=loader["num_workers"], sample_cost_s=loader["sample_cost_s"])
            if loader
            else None
        ),
        dataset_size=dataset_size,
        epochs=epochs,
        max_steps=job.max_steps,
        steps_per_epoch=job.steps_per_epoch,
        job_notes=job.notes,
        not_captured=(),
        torch_version=torch.__version__,
    )


def _targets(steps: Steps, frame: FrameType) -> list[torch.Tensor]:
    """Weights of networks that only give the steps their targets: in each step they run, and nothing saves them.

    Parts of a network that is trained, such as a momentum encoder, are kept with it.
    """
    trained = {id(p) for p in steps.trained()}
    every = set.intersection(*(step.untrained for step in steps.recorded))
    given = [module for key, module in steps.untrained.items() if key in every]
    frames = frames_around(frame)
    return [
        unwrapped(p)
        for module in given
        if not any(_keeps(inner, {id(p) for p in module.parameters()}, trained) for inner in frames)
        for p in module.parameters()
    ]


def _keeps(frame: FrameType, weights: set[int], trained: set[int]) -> bool:
    """True if a frame has a network with some weights that is trained too, or its file saves it by its name."""
    known = {**frame.f_globals, **getattr(frame.f_locals.get("self"), "__dict__", {}), **frame.f_locals}
    held = {n: {id(p) for p in v.parameters()} for n, v in known.items() if isinstance(v, torch.nn.Module)}
    names = {name for name, own in held.items() if own & weights}
    if any(held[name] & trained for name in names):
        return True
    tree = parsed(frame.f_code.co_filename)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree else []
    saved: list[ast.expr] = [a for call in calls if SAVES.search(called_name(call.func)) for a in call.args]
    saved += [
        c.func.value for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "state_dict"
    ]
    return any(called_name(node) in names for node in saved)


def _averages_weights(thing: Any) -> bool:
    """True for an object that holds weights, if its class or its attribute is named after moving averages."""
    kind: Any = type(thing)
    named = _names_averages(kind)
    if named is None:
        return False
    held = [
        inner
        for name, value in vars(thing).items()
        if named.search(name)
        for inner in (value if isinstance(value, list) else [value])
    ]
    if named is _AVERAGED:
        return any(
            isinstance(inner, torch.nn.Module)
            or (isinstance(inner, dict) and first_tensor(inner) is not None)
            for inner in held
        )
    return isinstance(thing, torch.nn.Module) or any(
        isinstance(inner, (torch.nn.Module, torch.Tensor, dict)) for inner in held
    )


@functools.cache
def _names_averages(kind: Any) -> re.Pattern[str] | None:
    """The attributes of a class that may hold averaged weights, None for none; most objects are of few classes."""
    if any(_AVERAGE.search(base.__name__) for base in kind.__mro__[:-1]):
        return _ANY
    module = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _AVERAGED if module and is_of_script(module) and "__dict__" in dir(kind) else None


def _progress(steps: Steps, loader: dict[str, Any], flags: dict[str, Any], num_micro_steps: int) -> Progress:
    fetches = [len(step.loader_samples) for step in steps.recorded]
    accelerate: Any = sys.modules.get("accelerate.state")
    return Progress(
        num_steps=steps.num_steps,
        num_micro_steps=num_micro_steps,
        num_fetches=round(sum(fetches) / len(fetches)),
        num_batches=loader.get("num_batches"),
        num_samples=loader.get("dataset_size"),
        trainer=flags.get("job"),
        # Accelerate updates at the end of an epoch whatever is left.
        keeps_last=accelerate is not None and bool(accelerate.GradientState._shared_state),
    )


def _dataset_size(loader: dict[str, Any], steps_per_epoch: int | None, samples_global: int) -> int | None:
    """Samples of an epoch: those of the data set, if as many steps take them; else those of the steps.

    They differ where a last batch is dropped, samples are taken several times, or a sampler takes its own number.
    """
    whole = loader.get("dataset_size")
    if steps_per_epoch is None:
        return int(whole) if whole and whole < _ENDLESS else None
    if whole and -(-whole // samples_global) == steps_per_epoch:
        return int(whole)
    return steps_per_epoch * samples_global


def _model(module: torch.nn.Module, steps: Steps, step: RecordedStep) -> CapturedPart:
    inner: Any = module
    while type(inner).__name__.startswith(("DistributedData", "FullyShard")) and hasattr(inner, "module"):
        inner = inner.module
    number = sum(p.numel() for p in inner.parameters())
    uses = step.num_forwards if len(steps.roots) == 1 else 1
    return CapturedPart(name=type(inner).__name__, num_parameters=number, num_uses=uses)


def _optimizer(optimizer: Any, number: int) -> CapturedPart:
    groups = getattr(optimizer, "param_groups", [])
    weights = sum(p.numel() for group in groups for p in group["params"])
    if not groups:  # an optimizer of Keras
        weights = sum(v.value.numel() for v in getattr(optimizer, "_trainable_variables", []))
    return CapturedPart(name=type(optimizer).__name__, num_parameters=weights, num_uses=number)


def _precision(steps: Steps, flags: dict[str, Any], sharded: torch.dtype | None) -> str:
    # Autocast decides the arithmetic, whatever the weights are kept in.
    for dtype in flags["autocast"]:
        if dtype in _AUTOCAST:
            return _AUTOCAST[dtype]
    if sharded in _AUTOCAST:
        return _AUTOCAST[sharded]
    bytes_by_dtype: dict[torch.dtype, int] = {}
    for parameter in steps.parameters():
        bytes_by_dtype[parameter.dtype] = bytes_by_dtype.get(parameter.dtype, 0) + parameter.numel()
    if not bytes_by_dtype:
        return "fp32"
    most = max(bytes_by_dtype, key=lambda dtype: bytes_by_dtype[dtype])
    if most in _HALF:
        return _HALF[most]
    return "tf32" if _allows_tf32(torch.backends.cuda.matmul) else "fp32"


def _allows_tf32(*switches: Any) -> bool:
    """True if PyTorch may take TF32, by its switches since 2.9, the narrowest first, else by the flag of all releases.

    The flag raises where a script has set switches that it cannot tell.
    """
    for switch in switches:
        if (found := getattr(switch, "fp32_precision", "none")) != "none":
            return bool(found == "tf32")
    try:
        return bool(switches[-1].allow_tf32)
    except RuntimeError:
        return False


def _convolution_precision(precision: str) -> str | None:
    """Arithmetic of convolutions in fp32 on a device with TF32; None in half precision and where all is in TF32."""
    cudnn: Any = torch.backends.cudnn
    found = "tf32" if _allows_tf32(getattr(cudnn, "conv", None), cudnn) else "fp32"
    return None if precision not in ("fp32", "tf32") or found == precision == "tf32" else found


def _implementation(optimizers: list[Any], flags: dict[str, Any]) -> str:
    if optimizers and all(id(o) in flags["fused"] for o in optimizers):
        return "fused"
    loops = [g.get("foreach") is False for o in optimizers for g in getattr(o, "param_groups", [])]
    return "for-loop" if loops and all(loops) else "foreach"


def _notes(
    steps: Steps, step: RecordedStep, guesses: dict[str, int], flags: dict[str, Any], *, is_mean: bool
) -> list[str]:
    notes = []
    if len(steps.recorded) > 2:
        work = [steps.flops_of(each) * 1e-9 for each in steps.recorded]
        notes.append(
            f"steps differ, {len(work)} had {min(work):,.3g} to {max(work):,.3g} GFLOP: the time is "
            f"{'their mean' if is_mean else 'that of the one nearest to their mean'}, the memory that of the largest"
        )
    if guesses:
        where = ", ".join(list(guesses)[:3])
        notes.append(
            f"decisions on values that are not known without computing ({where}): clean values were assumed"
        )
    if step.collectives:
        calls = ", ".join(
            f"{number} {name} of {size / 1e6:,.3g} MB" for name, (number, size) in step.collectives.items()
        )
        notes.append(f"collectives that the script calls itself cost nothing here: {calls} a step")
    notes += flags["notes"]
    return notes
