"""Columns of a graph: each says which part of it a device of a layout has."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import pytest

from forerun.graph import graph
from forerun.graph.graph import MemoryStream, OpTable, Share, divided_of
from forerun.graph.shards import _DIVIDE


@pytest.mark.parametrize("table", [OpTable, MemoryStream])
def test_every_column_declares_how_devices_divide_it(table):
    for column in fields(table):
        declared = divided_of(column)
        assert declared.pipeline in (Share.ROWS, Share.WHOLE)


def test_a_column_without_a_declaration_is_an_error():
    @dataclass(frozen=True)
    class Table:
        flops: float = field()

    with pytest.raises(TypeError, match="expected the column flops to declare its part"):
        graph._declared(Table)


def test_every_share_of_operations_has_a_rule():
    declared = [divided_of(column) for column in fields(OpTable)]
    shares = {share for d in declared for share in (d.tensor, d.context, d.expert)} - {Share.WHOLE}
    assert shares == set(_DIVIDE)
