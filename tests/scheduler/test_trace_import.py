"""Philly-like traces and their holes."""

import pytest

from forerun.errors import RecordError
from forerun.scheduler.trace_import import read_trace

GOOD = "job,submit_time,num_gpus,duration\nb,2017-10-09 07:02:00,8,66\na,2017-10-09 07:01:00,1,10.5\n"


def trace(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return read_trace(path)


def test_rows_become_jobs_from_the_first_submission_on(tmp_path):
    first, second = trace(tmp_path, GOOD)
    assert (first.name, first.arrival_s, first.num_devices, first.duration_s) == ("a", 0.0, 1, 10.5)
    assert (second.name, second.arrival_s, second.num_devices) == ("b", 60.0, 8)


def test_seconds_and_other_names_do_as_well(tmp_path):
    found = trace(tmp_path, "Timestamp,GPUs,run_time\n100,1,5\n160,2,6\n")
    assert [(j.name, j.arrival_s) for j in found] == [("job-1", 0.0), ("job-2", 60.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD.replace(",66", ","),
            r"column 'duration', row 1: expected a number, got an empty cell \(1 such",
        ),
        (
            GOOD.replace("2017-10-09 07:01:00", ""),
            "column 'submit_time', row 2: expected a date or seconds, got an empty",
        ),
        (GOOD.replace(",8,", ",0,"), "column 'num_gpus', row 1: expected at least one device, got '0'"),
        (GOOD.replace(",8,", ",1.5,"), "expected a whole number of devices, got '1.5'"),
        (GOOD.replace("10.5", "-1"), "row 2: expected a duration above zero seconds, got '-1'"),
        (
            GOOD.replace("a,2017", "b,2017"),
            "column 'job', row 2: expected a name that no other job has, got 'b'",
        ),
        (GOOD.replace("num_gpus", "cards"), "expected a column for num devices, one of num_gpus, n_gpus"),
        ("job,submit_time,num_gpus,duration\n", "expected at least one row"),
    ],
)
def test_a_trace_with_holes_is_refused_with_its_row(tmp_path, text, message):
    with pytest.raises(RecordError, match=message):
        trace(tmp_path, text)


def test_no_such_file(tmp_path):
    with pytest.raises(RecordError, match="there is no such file"):
        read_trace(tmp_path / "none.csv")
