"""Finds the steps of a training script by its optimizers, and records two of them.

A step ends when the optimizer that updates least often has updated; where another one updates in more rounds of the
same loop, each round is a step. The first step shows which optimizers there are; the second and third are recorded. A
script without an optimizer ends its steps where a forward pass follows a backward pass.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from forerun.graph.graph import AllocationKind, MemoryEvent, OpClass, StepPart
from forerun.script.capturing.script_recorder import ScriptRecorder
from forerun.tracing.recorder import RecordedRow

_IDLE_OPTIMIZER_STEPS = 6
_MOST_STEPS = 6
_EQUAL_PASSES = 3
MOST_RECORDED = 16
_DIFFERENT = 0.02
_HEAVY = (OpClass.CONV, OpClass.DEPTHWISE_CONV, OpClass.GROUPED_CONV, OpClass.LINEAR, OpClass.BMM, OpClass.ATTENTION,
          OpClass.RECURRENT)  # fmt: skip


@dataclass(slots=True)
class RecordedStep:
    """One recorded step of the script.

    Attributes:
        first_row: Position of its first row.
        first_event: Position of its first entry in the memory stream.
        last_row: Position behind its last row.
        backward_ends: Positions behind the rows of each backward pass.
        micro_events: Position in the memory stream at the end of each backward pass.
        update_ends: Positions behind the rows of each update, and in the memory stream.
        stood_in: Backward passes whose forward pass was stood in for, by their number.
        num_forwards: Forward passes of outermost modules with gradients.
        updates: Updates by optimizer, in the order of the optimizers.
        samples: Samples of each batch that was used, those before a backward pass first.
        loader_samples: Samples of each batch the loader gave.
        num_reads: Values that the host read.
        num_evaluations: Passes of the trained networks in evaluation mode, and of frozen ones.
        untrained: Networks without trained weights that ran, by their identity.
        collectives: Calls and bytes of each collective that the script called itself.
    """

    first_row: int = 0
    first_event: int = 0
    last_row: int = 0
    backward_ends: list[int] = field(default_factory=list)
    micro_events: list[int] = field(default_factory=list)
    update_ends: list[tuple[int, int]] = field(default_factory=list)
    stood_in: set[int] = field(default_factory=set)
    num_forwards: int = 0
    updates: dict[int, int] = field(default_factory=dict)
    samples: list[int] = field(default_factory=list)
    loader_samples: list[int] = field(default_factory=list)
    num_reads: int = 0
    num_evaluations: int = 0
    untrained: set[int] = field(default_factory=set)
    collectives: dict[str, list[int]] = field(default_factory=dict)


class Steps:
    """Follows the script from step to step.

    Args:
        recorder: Recorder of operations and memory.
        finish: Called once when enough steps are recorded.
        at_end_of_first: Called at the end of the first step; may replace the recorder.
    """

    def __init__(
        self, recorder: ScriptRecorder, finish: Callable[[], None], at_end_of_first: Callable[[], None]
    ) -> None:
        self.recorder = recorder
        self._finish, self._at_end_of_first = finish, at_end_of_first
        self.optimizers: dict[int, Any] = {}
        self.num_updates: dict[int, int] = {}
        self.keras_optimizers: dict[int, Any] = {}
        self.roots: dict[int, torch.nn.Module] = {}
        self.untrained: dict[int, torch.nn.Module] = {}
        self.names: dict[int, str] = {}
        self.recorded: list[RecordedStep] = []
        self.num_steps = 0
        self.last: int | None = None  # the optimizer whose update ends a step
        self.num_backwards = 0
        self.num_modules = 0
        self.has_recomputation = False
        self.clips = False
        self.input_shape: tuple[int, ...] = ()
        self.first_sizes: tuple[int, ...] = ()
        self.reads_tokens = False
        self.is_channels_last = False
        self.in_loader = False
        self.is_over = False
        self.evaluates: Callable[[], None] = lambda: None
        self.has_other_data: Callable[[], bool] = lambda: False
        self.ends: Callable[[int], None] = lambda key: None
        self.round_now: Callable[[], tuple[Any, ...]] = tuple
        self.goes_on: Callable[[], None] = lambda: None
        self.trained_once: set[int] = set()
        self.differentiates = False
        self._num_passes = 0
        self._most_passes: dict[int, int] = {}
        self._alone: float = 0
        self._rounds: dict[int, list[tuple[Any, ...]]] = {}
        self._order: list[int] = []
        self._num_fetched = 0
        self._num_before = 0
        self.depth = 0
        self.in_backward = False
        self._saw_backward = False
        self._now: RecordedStep | None = None
        self._left_out: RecordedStep | None = None  # with evaluations, which most likely few steps have

    # What the hooks report.

    def optimizer_made(self, optimizer: Any) -> None:
        """A script made an optimizer."""
        self.optimizers.setdefault(id(optimizer), optimizer)
        self.num_updates.setdefault(id(optimizer), 0)

    def update_begins(self, optimizer: Any) -> None:
        """An optimizer begins to change its weights."""
        # One that was unpickled or copied never passed its constructor.
        self.optimizer_made(optimizer)
        self.weights_change()

    def update_ends(self, optimizer: Any) -> None:
        """An optimizer has changed its weights."""
        self.closure_begins()
        key = id(optimizer)
        self.num_updates[key] += 1
        if not self.is_over:
            self._order.append(key)
        self._most_passes[key] = max(self._num_passes, self._most_passes.get(key, 0))
        self._num_passes = 0
        if self._now is not None:
            self._now.updates[key] = self._now.updates.get(key, 0) + 1
            self._now.update_ends.append((len(self.recorder.rows), len(self.recorder.events)))
        if (now := self.round_now()) not in (rounds := self._rounds.setdefault(key, []))[-1:]:
            rounds.append(now)
        if self._is_boundary(key):
            self.step_ends(key)
        elif not self.recorded and key != self.last:
            self.ends(key)  # it may turn out to end the steps

    def closure_begins(self) -> None:
        """An optimizer calls the script's closure for the loss."""
        self.recorder.in_optimizer = False
        self.recorder.default_kind = AllocationKind.ACTIVATION

    def weights_change(self) -> None:
        """An optimizer changes its weights now, or goes on after its closure."""
        if self._now is not None:
            # Only now all gradients exist; the recorder saw their blocks as results of any operation.
            self.recorder.set_kind(self.gradients(), AllocationKind.GRADIENT)
            self.recorder.mark(MemoryEvent.OPTIMIZER_BEGINS)
        self.recorder.in_optimizer = True
        self.recorder.default_kind = AllocationKind.TEMPORARY

    def backward_begins(self) -> None:
        """A backward pass begins."""
        self.in_backward = True
        self.recorder.default_kind = AllocationKind.TEMPORARY
        if self._now is not None and not self._now.backward_ends:
            self.recorder.mark(MemoryEvent.BACKWARD_BEGINS)
            # Passes before may be those of a rollout: the last one is that whose gradients are taken.
            self._now.samples = [*self._now.samples[-1:], *self._now.samples[:-1]]

    def backward_ends(self) -> None:
        """A backward pass is over."""
        self.in_backward = False
        self._saw_backward = True
        self.num_backwards += 1
        self._num_passes += 1
        self.recorder.default_kind = AllocationKind.ACTIVATION
        if self._now is not None:
            self._num_fetched = len(self._now.loader_samples)
            self._now.backward_ends.append(len(self.recorder.rows))
            self._now.micro_events.append(len(self.recorder.events))

    def module_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module begins its forward pass."""
        self.num_modules += 1
        if self.depth == 0 and not self.in_backward and not self.in_loader:
            if torch.is_grad_enabled():
                evaluates = not module.training and id(module) in self.trained_once
            else:
                evaluates = not is_training(module) or self.has_other_data()
            if evaluates and self._trains(module):
                self.evaluates()
                if self._now is not None:
                    self._now.num_evaluations += 1
                    if self._now.num_evaluations > MOST_RECORDED and not (self.recorded or self._left_out):
                        self._left_out, self.recorder.records_ops = self._now, False
                    if torch.is_grad_enabled():  # its batch was taken for one of a step
                        del self._now.loader_samples[self._num_fetched :]
            elif not self.is_over:
                self._root_begins(module, args, kwargs)
                # What is frozen and in evaluation mode is a teacher in all steps, or draws samples in few of them.
                is_frozen = not any(p.requires_grad for p in module.parameters())
                if self._now is not None and not module.training and is_frozen:
                    self._now.num_evaluations += 1
            if self._now is not None:
                trained = {id(p) for p in self.trained()}
                if not any(id(unwrapped(p)) in trained for p in module.parameters()):
                    self.untrained[id(module)] = module
                    self._now.untrained.add(id(module))
        elif self.in_backward:
            # Nothing but checkpointing runs a module's forward pass while gradients are computed.
            self.has_recomputation = True
        self.depth += 1
        self.recorder.enter_module(self.names.get(id(module), ""))

    def module_ends(self) -> None:
        """A module has ended its forward pass."""
        self.depth = max(0, self.depth - 1)
        # The first is the script itself; a module whose begin was not seen must not take it away.
        if len(self.recorder._modules) > 1:
            self.recorder.leave_module()

    def repeats_micro_step(self) -> bool:
        """True within a micro-step after the third and before the last of each update, however many those have."""
        if self.differentiates or self.is_over or self._num_passes < _EQUAL_PASSES:
            return False
        return all(self._num_passes < n - 1 or n <= _EQUAL_PASSES for n in self._most_passes.values())

    def stands_in(self) -> None:
        """A forward pass of a micro-step was stood in for."""
        if self._now is not None:
            self._now.stood_in.add(len(self._now.backward_ends))

    def batch_loaded(self, num_samples: int) -> None:
        """A loader gave a batch."""
        if self._now is not None:
            self._now.loader_samples.append(num_samples)

    def collective(self, name: str, size_bytes: int) -> None:
        """The script called a collective itself."""
        if self._now is not None:
            number = self._now.collectives.setdefault(name, [0, 0])
            number[0] += 1
            number[1] += size_bytes

    def keras_update_begins(self, optimizer: Any) -> None:
        """An optimizer of Keras begins; the step it belongs to is marked by its trainer."""
        self.keras_optimizers[id(optimizer)] = optimizer
        self.recorder.in_optimizer = True
        if self._now is not None:
            self.recorder.set_kind(self.gradients(), AllocationKind.GRADIENT)
            self.recorder.mark(MemoryEvent.OPTIMIZER_BEGINS)

    def keras_update_ends(self, optimizer: Any) -> None:
        """An optimizer of Keras has changed its weights."""
        self.recorder.in_optimizer = False
        if self._now is not None:
            self._now.updates[id(optimizer)] = self._now.updates.get(id(optimizer), 0) + 1

    # Steps.

    def _root_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        # A pass without gradients, or on the host, trains nothing; a network on a device may move its batch there.
        first = first_tensor((args, kwargs))
        tensors = itertools.chain([] if first is None else [first], module.parameters())
        on_device = map(self.recorder.is_traced, tensors)
        if not torch.is_grad_enabled() or (first is not None and not any(on_device)):
            return
        # A script that changes its weights by hand has no update to end a step: its next forward pass does.
        if not self.optimizers and not self.keras_optimizers and self._saw_backward:
            self.step_ends()
        if id(module) not in self.roots:
            self.roots[id(module)] = module
            prefix = f"{type(module).__name__}." if len(self.roots) > 1 else ""
            for name, inner in module.named_modules():
                # The first name stays: a module may stand in several networks.
                self.names.setdefault(id(inner), f"{prefix}{name}".rstrip("."))
        if first is not None and first.dim():
            if not self.first_sizes:
                self.reads_tokens = first.dim() == 2 and first.dtype in (torch.int64, torch.int32)
            is_one = first.dim() == 1 and is_sample(module, args, kwargs)
            shape = (1, *first.shape) if is_one else tuple(first.shape)
            graphs = getattr(args[0] if args else None, "num_graphs", None)  # joined to one, by their nodes
            shape = (graphs, *shape[1:]) if isinstance(graphs, int) else shape
            listed = _num_listed((*args, *kwargs.values()))
            shape = shape if listed is None else (listed, *first.shape)
            self.input_shape = self.input_shape or shape[1:]
            self.first_sizes = self.first_sizes or shape[:2]
            # Images of one channel are contiguous in both orders.
            if first.dim() == 4 and first.shape[1] > 1 and not first.is_contiguous():
                self.is_channels_last |= first.is_contiguous(memory_format=torch.channels_last)
            # A module without weights, such as a loss, may take them in another order.
            if self._now is not None and (not self._now.samples or any(True for _ in module.parameters())):
                self._now.samples.append(shape[0])
        if self._now is not None:
            self._now.num_forwards += 1

    def _trains(self, module: torch.nn.Module) -> bool:
        """True for a network whose weights are trained, and for a copy of it, such as that with averaged weights."""
        # A copy has weights of its own: its class alone tells what it is a copy of.
        if id(module) in self.roots or (
            self.is_over and any(type(module) is type(root) for root in self.roots.values())
        ):
            return True
        first = next((id(p) for p in module.parameters() if p.requires_grad), None)
        return first is not None and any(first == id(p) for p in self.trained())

    def _is_boundary(self, key: int) -> bool:
        waiting = [k for k, number in self.num_updates.items() if not number]
        most = max(self.num_updates.values())
        # An optimizer that was made may still be about to update for the first time; but not for ever.
        if waiting and most < _IDLE_OPTIMIZER_STEPS:
            return False
        if self.last is None:
            used = {k: n for k, n in self.num_updates.items() if n}
            fewest = min(used.values())
            # Among optimizers that update equally often, the one that came last ends the step.
            rarest = [k for k, n in used.items() if n == fewest]
            self.last = key if key in rarest else rarest[-1]
            self._alone = -1 if len(used) > 1 else -math.inf
            self.num_steps = self._num_before = self.num_updates[self.last] - (key == self.last)
        if not self.recorded and len(self.num_updates) > 1:
            self._follow_rounds(key)
        # An update that follows that of a step without one of the others is a regularization now and then.
        self._alone = self._alone + 1 if key == self.last else min(self._alone, -1)
        return key == self.last and (self._alone < 1 or self._alone >= _IDLE_OPTIMIZER_STEPS)

    def _follow_rounds(self, key: int) -> None:
        """Lets each round of a loop be a step if an optimizer updates in more of them than the one that ends a step.

        They share a round, and in one that is over only the other one updated, as a critic does before its actor.
        """
        now, ending = self._rounds[key][-1], self._rounds[self.last or key]
        for other, rounds in self._rounds.items():
            without = [one for one in rounds if one != now and one not in ending]
            if without and any(one in ending for one in rounds) and len(rounds) == self.num_updates[other]:
                self.last, self._alone, self._now = other, -math.inf, None
                self.num_steps = self._num_before = self.num_updates[other] - (key == other)
                return

    def step_ends(self, key: int = 0) -> None:
        """A step is over, by the update of an optimizer, or as a framework says whose optimizers are its own."""
        if self.is_over:
            self.goes_on()
            return
        self._saw_backward = False
        self.num_steps += 1
        self.ends(key)
        if self._now is not None:
            self._close()
        elif self.num_steps == self._num_before + 1:
            self._at_end_of_first()
        if len(self.recorded) >= 2 and (len(self.recorded) >= _MOST_STEPS or self._is_enough()):
            self.is_over = True
            self._finish()
            return
        self._open()

    def _open(self) -> None:
        # The stream begins with what is alive; what is recorded anew after steps were forgotten, too.
        if not self.recorded:
            gc.collect()
            gc.disable()  # blocks are freed by their last reference, not when the collector happens to run
            self.recorder.begin(self._static(), self.trained())
        self._num_fetched = 0
        self._now = RecordedStep(first_row=len(self.recorder.rows), first_event=len(self.recorder.events))
        self.recorder.num_reads = 0
        self.recorder.mark(MemoryEvent.FORWARD_BEGINS)

    def _close(self) -> None:
        assert self._now is not None
        self.recorder.mark(MemoryEvent.STEP_ENDS)
        self._now.last_row = len(self.recorder.rows)
        self._now.num_reads = self.recorder.num_reads
        if self._now is not self._left_out:
            self.recorded.append(self._now)
        self._now = None
        if self.recorded and self.num_steps - self._num_before <= _MOST_STEPS:
            self._leave_evaluations_out()

    def _leave_evaluations_out(self) -> None:
        """Forgets steps with more passes in evaluation mode than others, which few steps have."""
        *earlier, last = (step.num_evaluations for step in self.recorded)
        if earlier and last < earlier[-1]:
            del self.recorded[:-1]
        elif earlier and last > earlier[-1]:
            self.recorded.clear()  # those that are left follow one another

    def rows_of(self, step: RecordedStep) -> list[RecordedRow]:
        """The rows of a recorded step."""
        return self.recorder.rows[step.first_row : step.last_row]

    def flops_of(self, step: RecordedStep) -> float:
        """Work of a recorded step [FLOP]."""
        return sum(row.cost.flops * row.cost.count for row in self.rows_of(step))

    def _is_enough(self) -> bool:
        """True if all optimizers updated in recorded steps, and those did the same work, unlike texts of any length."""
        work = [self.flops_of(step) for step in self.recorded]
        used = {key for key, number in self.num_updates.items() if number}
        return used <= self.turns()[0] and max(work) - min(work) <= _DIFFERENT * max(work)

    def turns(self) -> tuple[set[int], int]:
        """Optimizers of the recorded steps, and steps after which their turns repeat: two if an actor waits for one."""
        distances = []
        for key in {*self._order}:
            before = itertools.accumulate(other == self.last for other in self._order)
            seen = [number for number, other in zip(before, self._order, strict=True) if other == key]
            distances.append(max((b - a for a, b in itertools.pairwise(seen)), default=1))
        return set().union(*(step.updates for step in self.recorded)), math.lcm(*distances)

    # Tensors.

    def parameters(self) -> list[torch.Tensor]:
        """The weights of all networks that were run with gradients, and of all optimizers, each once."""
        found: dict[int, torch.Tensor] = {}
        for module in self.roots.values():
            found.update({id(p): p for p in map(unwrapped, module.parameters())})
        found.update({id(p): p for p in self.trained()})
        return list(found.values())

    def trained(self) -> list[torch.Tensor]:
        """The weights that optimizers change; without optimizers, those that get gradients."""
        groups = [
            group
            for optimizer in self.optimizers.values()
            for group in getattr(optimizer, "param_groups", [])
        ]
        params = [p for group in groups for p in group["params"]]
        if not params:
            params = [p for module in self.roots.values() for p in module.parameters() if p.requires_grad]
        return list({id(p): p for p in map(unwrapped, params)}.values())

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that exist now."""
        return [p.grad for p in self.trained() if p.grad is not None]

    def states(self) -> list[torch.Tensor]:
        """The states of all optimizers."""
        found: list[torch.Tensor] = []
        for optimizer in self.optimizers.values():
            for state in getattr(optimizer, "state", {}).values():
                values = state.values() if isinstance(state, dict) else ()
                found += [value for value in values if isinstance(value, torch.Tensor)]
        for optimizer in self.keras_optimizers.values():
            values = [getattr(variable, "value", None) for variable in optimizer.variables]  # type: ignore[assignment]
            found += [value for value in values if isinstance(value, torch.Tensor)]
        return [tensor for tensor in found if self.recorder.is_traced(tensor) and tensor.dim()]

    def _static(self) -> list[tuple[torch.Tensor, AllocationKind]]:
        traced = self.recorder.is_traced
        found = [(b, AllocationKind.BUFFER) for m in self.roots.values() for b in m.buffers() if traced(b)]
        found += [(p, AllocationKind.WEIGHT) for p in self.parameters() if traced(p)]
        found += [(g, AllocationKind.GRADIENT) for g in self.gradients() if traced(g)]
        found += [(s, AllocationKind.OPTIMIZER_STATE) for s in self.states()]
        return found

    def micro_steps(self, step: RecordedStep, options: Sequence[Mapping[str, Any]] = ()) -> int:
        """Micro-steps of a step: backward passes before each update that do the same work on samples of their own.

        Passes are alike if they have the same heavy operations and weights, if each has a batch of the loader, or if an
        argument for accumulated gradients says their number: sequences of different lengths differ in their kernels.
        Where several optimizers update, each has as many micro-steps, of one or more passes.

        Args:
            step: The recorded step.
            options: Options of the script's parsers, ``name`` and ``value``.
        """
        if not step.backward_ends:
            return 1
        parts = parts_of(step)
        first, last = step.backward_ends[0], step.backward_ends[-1]
        if len(parts) == 1 and any(first <= row < last for row in self.recorder.weight_writes):
            return 1  # a second look at the same samples, such as that of sharpness-aware updates
        skipped = {step.backward_ends[number] for number in step.stood_in if number < len(step.backward_ends)}
        works = [
            [
                None if end in skipped else self._heavy(begin, end)
                for begin, end in itertools.pairwise([part.first_row, *part.backward_ends])
            ]
            for part in parts
        ]
        common = math.gcd(*map(len, works))
        said = {o["value"] for o in options if "accum" in o["name"].lower() and type(o["value"]) is int}
        # The largest number first: four equal passes are also two pairs of equal ones.
        for number in range(common, 1, -1):
            if common % number:
                continue
            are_alike = all(_repeats(work, number) for work in works)
            if are_alike or number in said or number == len(step.loader_samples):
                return number
        return 1

    def _heavy(self, begin: int, end: int) -> list[tuple[str, str]]:
        rows = self.recorder.rows[begin:end]
        return [
            (row.kernel_name, row.module_name)
            for row in rows
            if row.step_part == StepPart.FORWARD and row.cost.op_class in _HEAVY
        ]


def is_sample(module: torch.nn.Module, *given: Any) -> bool:
    """True if a network is given vectors alone, the first as long as its first linear layer takes: no batch."""
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    if any(tensor.dim() != 1 for tensor in tensors):
        return False
    layer = next((inner for inner in module.modules() if isinstance(inner, torch.nn.Linear)), None)
    return layer is not None and tensors[0].shape[0] == layer.in_features


def _num_listed(given: Iterable[Any]) -> int | None:
    """Samples of a batch that is a list of dicts, one for each, as detectors take them; None for any other."""
    lists = (one for one in given if isinstance(one, (list, tuple)) and one)
    return next((len(one) for one in lists if all(isinstance(item, Mapping) for item in one)), None)


def is_training(module: torch.nn.Module) -> bool:
    """True unless a module is in evaluation mode, or all with weights in it are, as in a wrapper made to sample."""
    return module.training and any([i.training for i in module.modules() if i._parameters] or [True])


def _repeats(work: list[list[tuple[str, str]] | None], number: int) -> bool:
    """True if passes do the same ``number`` times, as far as they were not stood in for."""
    period = len(work) // number
    ways = [[one for one in work[first::period] if one is not None] for first in range(period)]
    return bool(work[0]) and all(one == way[0] for way in ways for one in way)


def parts_of(step: RecordedStep) -> list[RecordedStep]:
    """The pieces of a step: backward passes before an update, and that update.

    An update that no pass goes before belongs to the earlier piece.
    """
    begins = [(step.first_row, step.first_event)]
    for (row, event), after in zip(
        step.update_ends, [*step.update_ends[1:], (step.last_row, 0)], strict=False
    ):
        if any(row < end <= after[0] for end in step.backward_ends):
            begins.append((row, event))
    found = []
    for (row, event), (last, _) in itertools.pairwise([*begins, (step.last_row, 0)]):
        inside = [i for i, end in enumerate(step.backward_ends) if row < end <= last]
        found.append(
            RecordedStep(
                first_row=row,
                last_row=last,
                first_event=event,
                backward_ends=[step.backward_ends[i] for i in inside],
                micro_events=[step.micro_events[i] for i in inside],
            )
        )
    return found


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor within those that transformations of functions, such as ``torch.func.grad``, put around it."""
    functions: Any = torch._C._functorch
    while functions.is_functorch_wrapped_tensor(tensor):
        tensor = functions.get_unwrapped(tensor)
    return tensor


def first_tensor(value: Any, depth: int = 0) -> torch.Tensor | None:
    """The first tensor in nested lists, tuples, dicts and mappings."""
    if isinstance(value, torch.Tensor):
        return value
    # Structures may hold themselves.
    if depth > 4:
        return None
    if hasattr(value, "values") and callable(value.values):
        found = value.values()
        value = list(found) if isinstance(found, Iterable) else None
    if isinstance(value, (list, tuple)):
        for item in value:
            if (found := first_tensor(item, depth + 1)) is not None:
                return found
    return None
