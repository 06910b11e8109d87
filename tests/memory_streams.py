"""Hand-made memory streams for the tests of the memory model."""

from __future__ import annotations

import numpy as np

from forerun.cost.memory.stream import repeating_step
from forerun.graph.graph import AllocationKind, Graph, MemoryEvent, MemoryStream, OpTable

MIB = 1024**2


class StreamBuilder:
    """Writes a stream entry by entry; sizes are (constant, slope) in bytes."""

    def __init__(self):
        self._entries = []
        self._num_blocks = 0

    def allocate(self, constant, slope=0, kind=AllocationKind.ACTIVATION):
        block = self._num_blocks
        self._num_blocks += 1
        self._entries.append((MemoryEvent.ALLOCATE, block, constant, slope, kind))
        return block

    def free(self, *blocks):
        self._entries.extend((MemoryEvent.FREE, block, 0, 0, -1) for block in blocks)

    def mark(self, event, constant=0, slope=0):
        self._entries.append((event, -1, constant, slope, -1))

    def build(self):
        table = np.array(self._entries, dtype=np.float64).reshape(-1, 5)
        return MemoryStream(
            event=table[:, 0].astype(np.int64),
            block=table[:, 1].astype(np.int64),
            size_bytes=table[:, 2:4].copy(),
            kind=table[:, 4].astype(np.int64),
        )


def training_stream(
    weights=(4 * MIB, 6 * MIB), activations=(MIB, 2 * MIB), *, gradients_kept=False, momentum=False
):
    """Two steps of a chain of layers; activations are bytes per sample.

    With ``gradients_kept`` the gradients of the first step stay and the second accumulates into them;
    otherwise the old ones are freed before the second forward and made anew.
    """
    builder = StreamBuilder()
    for weight in weights:
        builder.allocate(weight, kind=AllocationKind.WEIGHT)
    builder.allocate(0, 1000, AllocationKind.INPUT)
    gradients = []
    for step in range(2):
        builder.mark(MemoryEvent.FORWARD_BEGINS)
        if not gradients_kept:
            builder.free(*gradients)
            gradients = []
        kept = []
        for activation in activations:
            builder.mark(MemoryEvent.CONV_WORKSPACE, 0, 2 * activation)
            kept.append(builder.allocate(0, activation))
        builder.mark(MemoryEvent.BACKWARD_BEGINS)
        for weight in reversed(weights):
            gradient = builder.allocate(weight, kind=AllocationKind.GRADIENT)
            if gradients_kept and step == 1:
                builder.free(gradient)
            else:
                gradients.append(gradient)
            if kept:
                builder.free(kept.pop())
        builder.free(*kept)
        builder.mark(MemoryEvent.OPTIMIZER_BEGINS)
        if momentum and step == 0:
            for weight in weights:
                builder.allocate(weight, kind=AllocationKind.OPTIMIZER_STATE)
        builder.mark(MemoryEvent.STEP_ENDS)
    return builder.build()


def graph_of(stream, *, only_batch_size=None, num_parameters=1):
    """A graph without operations around a stream."""
    none, pairs = np.zeros(0), np.zeros((0, 2))
    ints = np.zeros(0, dtype=np.int64)
    columns = {
        name: none for name in OpTable.__dataclass_fields__ if not name.endswith("_names")
    } | {
        "op_class": ints, "step_part": ints, "kernel": ints, "module": ints,
        "flops": pairs, "read_bytes": pairs, "write_bytes": pairs, "elements": pairs,
        "joined": ints, "joined_bytes": pairs, "gemm": np.zeros((0, 4, 2)), "kernel_names": (), "module_names": (),
    }  # fmt: skip
    return Graph(
        model="hand-made",
        input_shape=(1000,),
        num_parameters=num_parameters,
        num_trainable_parameters=num_parameters,
        ops=OpTable(**columns),
        memory=stream,
        only_batch_size=only_batch_size,
    )


def steady_state_events(stream: MemoryStream, num_steps: int) -> MemoryStream:
    """The stream with its second step repeated until there are ``num_steps`` steps.

    Repeated allocations get identities above all others; a free of a block of the step before frees the block
    which that step allocated in the same place.

    Args:
        stream: Two traced steps.
        num_steps: Steps in the result, at least 2.
    """
    step = repeating_step(stream)
    end = int(np.flatnonzero(stream.event == MemoryEvent.STEP_ENDS)[1]) + 1
    entries = np.concatenate([np.arange(end), *[step.entries] * (num_steps - 2)])
    stride = int(stream.block.max(initial=-1)) + 1
    block = [stream.block[:end]]
    for repetition in range(1, num_steps - 1):
        # Repetition 0 is the traced second step, whose blocks keep their identity.
        made_in = repetition - step.frees_previous.astype(np.int64)
        block.append(np.where(step.block < 0, -1, step.block + stride * made_in))
    return MemoryStream(
        event=stream.event[entries],
        block=np.concatenate(block),
        size_bytes=stream.size_bytes[entries],
        kind=stream.kind[entries],
    )
