"""Distinct kernels stand for all launches: no work, traffic or launch is lost."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from forerun.cost.time.rows import MATRIX_CLASSES, distinct_ops
from forerun.graph.graph import OpClass, at_batch
from op_models import MODELS, graph_named, ops_named


@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("name", MODELS)
def test_totals_are_kept_at_every_batch_size(name, precision):
    graph, ops = graph_named(name, precision), ops_named(name, precision)
    assert len(ops) < len(graph.ops)
    assert ops.count.sum() == graph.ops.count.sum()
    for batch_size in (1, 32, 1000):
        assert at_batch(ops.flops, batch_size) @ ops.count == pytest.approx(graph.total_flops(batch_size))
        assert at_batch(ops.moved_bytes, batch_size) @ ops.count == pytest.approx(
            graph.total_bytes(batch_size)
        )


@pytest.mark.parametrize("name", MODELS)
def test_every_row_belongs_to_a_group_of_its_own_kind(name):
    rows, ops = graph_named(name).ops, ops_named(name)
    group = ops.group_of_row
    np.testing.assert_array_equal(ops.op_class[group], rows.op_class)
    np.testing.assert_array_equal(ops.step_part[group], rows.step_part)
    np.testing.assert_array_equal(ops.attributes[group, 7], rows.element_bytes)
    np.testing.assert_allclose(np.bincount(group, weights=rows.count), ops.count)


@pytest.mark.parametrize("name", MODELS)
def test_products_are_grouped_only_with_their_equals(name):
    rows, ops = graph_named(name).ops, ops_named(name)
    exact = np.isin(rows.op_class, MATRIX_CLASSES)
    group = ops.group_of_row[exact]
    np.testing.assert_allclose(ops.gemm[group], rows.gemm[exact])
    np.testing.assert_allclose(ops.flops[group], rows.flops[exact])
    np.testing.assert_allclose(ops.attributes[group, 1], rows.stride[exact])


def test_the_order_of_the_rows_does_not_matter():
    rows = graph_named("mobilenet").ops
    order = np.random.default_rng(0).permutation(len(rows))
    arrays = {
        field.name: getattr(rows, field.name)[order]
        for field in fields(rows)
        if isinstance(getattr(rows, field.name), np.ndarray)
    }
    shuffled, plain = distinct_ops(replace(rows, **arrays)), distinct_ops(rows)
    np.testing.assert_array_equal(plain.group_of_row[order], shuffled.group_of_row)
    for name in ("count", "flops", "gemm", "op_class", "attributes"):
        np.testing.assert_allclose(getattr(plain, name), getattr(shuffled, name))


def test_small_fixed_kernels_share_a_row():
    rows = graph_named("resnet18", "amp").ops
    casts = (rows.op_class == OpClass.CAST) & (rows.elements[:, 1] == 0)
    groups = distinct_ops(rows).group_of_row[casts]
    assert casts.sum() > 15
    assert len(set(groups.tolist())) <= 8  # by part, direction and size of an element


def test_no_rows_make_no_kernels():
    rows = graph_named("cnn").ops
    arrays = {
        field.name: getattr(rows, field.name)[:0]
        for field in fields(rows)
        if isinstance(getattr(rows, field.name), np.ndarray)
    }
    assert len(distinct_ops(replace(rows, **arrays))) == 0
