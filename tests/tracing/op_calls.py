"""Calls of single operations, as a recording hands them to the rules."""

from forerun.tracing.calls import Call, TensorInfo
from forerun.tracing.op_rules import cost_rows


def dense(*shape, size=4, is_floating=True):
    return TensorInfo.dense(*shape, element_bytes=size, is_floating=is_floating)


def only_row(name, args, *outputs, **options):
    rows = cost_rows(Call(name, tuple(args), tuple(outputs), **options))
    assert len(rows) == 1
    return rows[0]
