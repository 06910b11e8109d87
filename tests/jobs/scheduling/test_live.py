"""Documents and the columns in them."""

import pytest

from forerun.base.errors import RecordError
from forerun.jobs.scheduling.live import LiveNode, largest_first, parse_document, prefixed_fields


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "squeue is empty: expected a JSON document"),
        ('{"jobs": [{"job_id": 1, "na', "no whole JSON document: it ends after 27 characters, in the middle"),
        ('{"jobs": [', "it ends after 10 characters, in the middle"),
        ("slurm_load_jobs error: timeout", "no whole JSON document: Expecting value"),
    ],
)
def test_a_document_that_is_cut_off_is_one_clear_line(text, message):
    with pytest.raises(RecordError, match=message) as caught:
        parse_document(text, "squeue")
    assert "\n" not in str(caught.value)


def test_columns_among_annotations_have_a_prefix():
    found = prefixed_fields(
        {"forerun/model": "resnet50", "forerun.steps": 9, "forerunner": "x", "a/model": "y"}
    )
    assert found == {"model": "resnet50", "steps": "9"}


def test_nodes_by_kind_and_size():
    nodes = [
        LiveNode(name=n, device=d, num_devices=k)
        for n, d, k in (("a", "t4", 2), ("b", "l4", 1), ("c", "t4", 4))
    ]
    assert [node.name for node in largest_first(nodes)] == ["c", "a", "b"]
