"""Parsers meet bytes and structures that nobody would write: an answer or one of our own errors, nothing else."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.base.errors import ForerunError
from forerun.base.units import parse_amount, parse_duration_s
from forerun.evidence.records.measurement import read_document
from forerun.evidence.records.reading import import_measurements
from forerun.graph.file import read_graph
from forerun.jobs.forecasting.curve_files import read_curve
from forerun.jobs.scheduling import job as shared
from forerun.jobs.scheduling.jobs_file import check_entries
from forerun.question.devices.cluster import parse_cluster
from forerun.question.devices.rows import parse_devices
from forerun.surface.report.document import read_answer

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
few = settings(max_examples=60)


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl"])
@few
@given(data=st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
def test_files_of_curves(tmp_path_factory, suffix, data):
    path = tmp_path_factory.getbasetemp() / f"curve{suffix}"
    path.write_bytes(data)
    with contextlib.suppress(ForerunError):
        read_curve(path)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@few
@given(data=st.binary(max_size=300))
def test_files_of_measurements(tmp_path_factory, suffix, data):
    path = tmp_path_factory.getbasetemp() / f"table{suffix}"
    path.write_bytes(data)
    with contextlib.suppress(ForerunError):
        list(import_measurements(path))


@few
@given(data=st.binary(max_size=300))
def test_graphs(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "graph.npz"
    path.write_bytes(data)
    assert read_graph(path) is None


@few
@given(
    text=st.text(max_size=60)
    | st.from_regex(r"-?\d{0,20} ?[x*×] ?-?\d{0,20}[x*×]?[a-z0-9-]{0,9}", fullmatch=True)
)
def test_words_of_clusters_and_amounts(text):
    for parse in (parse_cluster, shared.parse_cluster):
        with contextlib.suppress(ForerunError):
            parse(text)
    with contextlib.suppress(ValueError):
        parse_duration_s(text)
    with contextlib.suppress(ForerunError, ValueError):
        parse_amount(text, "time")


@few
@given(value=json_values)
def test_structures(value):
    with contextlib.suppress(ForerunError):
        read_answer(json.dumps(value))
    document = value if isinstance(value, dict) else {"schema_version": 2, "kind": value}
    with contextlib.suppress(ForerunError):
        read_document(document, "fuzz")
    with contextlib.suppress(ForerunError):
        parse_devices(document, "fuzz")
    with contextlib.suppress(ForerunError):
        check_entries([document])
