"""Kernels of a step that a compiler joins, and the traffic that is left of each.

Inductor, the compiler behind ``torch.compile``, writes one kernel for a chain of operations that work on elements or
reduce rows: what the chain hands on inside stays in registers. Products, convolutions and attention stay the
library's kernels, so a chain ends at them. The rules here, on the recorded data flow:

- an operation joins the producer of what it reads, and others that read the same, if no library kernel lies on a path
  between them (both have the same number of library kernels before them on the longest path);
- a reduction over more than 4,096 elements, a batch norm of a training step and a window (pooling, resizing) need their
  input whole: they join what follows, not what comes before;
- a joined kernel reads what comes from outside once and writes what somebody outside reads.

What inductor recomputes instead of keeping for the backward pass, the limits of its kernels' sizes, and layouts it
changes are left out.

Source: Ansel et al. 2024, "PyTorch 2", section 4.3, https://doi.org/10.1145/3620665.3640366
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.graph.graph import OpClass

POINTWISE = frozenset({
    OpClass.ACTIVATION, OpClass.ADD, OpClass.BATCH_NORM, OpClass.CAST, OpClass.COPY, OpClass.DROPOUT,
    OpClass.ELEMENTWISE, OpClass.EMBEDDING, OpClass.LAYER_NORM, OpClass.MUL, OpClass.REDUCE, OpClass.SOFTMAX,
})  # fmt: skip
_WINDOWS = frozenset({OpClass.AVG_POOL, OpClass.GROUP_NORM, OpClass.MAX_POOL})
_LARGEST_ROW = 4096


class Access(NamedTuple):
    """A tensor that an operation reads or writes: its block, how often that had been written, where, and how much."""

    block: int
    version: int
    offset: int
    num_bytes: float


@dataclass(frozen=True, slots=True)
class DataFlow:
    """Data that one recorded row reads and writes.

    Attributes:
        op_class: Class of the kernel.
        read_bytes, write_bytes: Its traffic by its cost rule [bytes].
        reads, writes: The tensors; empty for a further row of the same call.
        normalises_batch: Whether it is a batch norm that computes the statistics of its batch, or the gradient of one.
        is_eager: Whether it stands outside of what is compiled.
    """

    op_class: OpClass
    read_bytes: float
    write_bytes: float
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    normalises_batch: bool = False
    is_eager: bool = False

    @property
    def is_joined(self) -> bool:
        """True if a compiler writes the kernel itself."""
        return (
            not self.is_eager
            and bool(self.writes)
            and (self.op_class in POINTWISE or self.op_class in _WINDOWS)
        )

    @property
    def needs_whole_input(self) -> bool:
        """True if its input must lie in memory before it runs."""
        if self.normalises_batch or self.op_class in _WINDOWS:
            return True
        return self.op_class is OpClass.REDUCE and self.read_bytes > _LARGEST_ROW * self.write_bytes


def joined_kernels(rows: Sequence[DataFlow]) -> tuple[list[int], list[float]]:
    """Kernel of each row under a compiler, by the number of its first row, and the row's part of its traffic [bytes].

    Args:
        rows: Recorded rows in launch order.
    """
    parents = list(range(len(rows)))

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row

    level_of_value: dict[tuple[int, int], int] = {}
    levels = [0] * len(rows)
    last_user: dict[tuple[tuple[int, int], int], int] = {}
    for number, row in enumerate(rows):
        values = {access[:2] for access in row.reads}
        # A tensor written in place is read as well: its other elements stay.
        values |= {(access.block, access.version - 1) for access in row.writes if access.version}
        level = max((level_of_value.get(value, 0) for value in values), default=0)
        waits = row.needs_whole_input and any((value, level) in last_user for value in values)
        if not row.is_joined or waits:
            level += 1
        levels[number] = level
        if row.is_joined:
            keys = [(value, level) for value in values]
            keys += [(access[:2], level) for access in row.writes]
            for key in keys:
                if not (row.needs_whole_input and key[0] in values) and key in last_user:
                    first, second = sorted((root(last_user[key]), root(number)))
                    parents[second] = first
                last_user[key] = number
        for access in row.writes:
            level_of_value[access[:2]] = level
    kernels = [root(number) for number in range(len(rows))]
    return kernels, _kept_bytes(rows, kernels)


def _kept_bytes(rows: Sequence[DataFlow], kernels: Sequence[int]) -> list[float]:
    """Each row's part of what its kernel reads from outside and writes for others [bytes]."""
    writer: dict[tuple[int, int], int] = {}
    readers: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for row, kernel in zip(rows, kernels, strict=True):
        for access in row.reads:
            readers[access[:2]].add(kernel)
        for access in row.writes:
            writer[access[:2]] = kernel
    kept = []
    seen: set[tuple[int, Access]] = set()
    for row, kernel in zip(rows, kernels, strict=True):
        if not row.is_joined:
            kept.append(row.read_bytes + row.write_bytes)
            continue
        total = 0.0
        touched = sum(access.num_bytes for access in row.reads)
        share = min(1.0, row.read_bytes / touched) if touched else 0.0  # an embedding gathers some rows only
        for access in row.reads:
            if writer.get(access[:2]) != kernel and (kernel, access) not in seen:
                seen.add((kernel, access))
                total += share * access.num_bytes
        for access in row.writes:
            users = readers[access[:2]]
            if not users or users != {kernel}:
                total += access.num_bytes
        kept.append(total)
    return kept
