"""The page after a session: one line per measurement, then what was done."""

from dataclasses import replace

from rich.console import Console

from forerun.evidence.measure import MeasurementRun
from forerun.evidence.measurement.session import SessionReport
from forerun.evidence.pages.measurement_page import measurement_page
from forerun.evidence.records.measurement import JobKind, Outcome, Summary
from made_measurements import measurement

STEP = measurement(
    kind=JobKind.TRAINING,
    subject="cnn:depth=2",
    parameters={
        "batch_size": 32,
        "precision": "fp32",
        "layout": "nhwc",
        "optimizer": "adam",
        "compile": True,
    },
    summary=Summary(median_s=0.012, low_s=0.0108, high_s=0.0132, is_stable=True),
    results={"epoch_time_s": 18.8, "val_accuracy_1": 0.31, "val_accuracy_2": 0.52},
)
FAILED = replace(
    STEP,
    outcome=Outcome.OUT_OF_MEMORY,
    reason="tried to take 80 GiB",
    summary=None,
    results={},
    parameters={"batch_size": 4096},
)
SHAKY = replace(STEP, summary=replace(STEP.summary, is_stable=False, reason="the anchor changed by +14.0%"))
LAYER = replace(
    STEP, kind=JobKind.LAYER, parameters={"batch_size": 2, "kernel": 3, "mode": "forward"}, results={}
)


def page(*rows, **changed):
    outcomes = {Outcome.DONE: 2, Outcome.OUT_OF_MEMORY: 1}
    report = SessionReport(**({"outcomes": outcomes, "num_skipped": 4} | changed))
    console = Console(width=200)
    with console.capture() as caught:
        console.print(
            measurement_page(MeasurementRun(report=report, measurements=rows, records="here.sqlite"))
        )
    return caught.get()


def line_with(text, shown):
    return next(line for line in shown.splitlines() if text in line)


def test_a_finished_training_shows_step_epoch_and_the_last_accuracy():
    line = line_with("cnn:depth=2", page(STEP))
    for part in (
        "batch size 32, nhwc, adam, compiled",
        "12.0 ms",
        "±10 %",
        "18.8 s",
        "52.0 %",
    ):
        assert part in line


def test_what_did_not_end_well_says_why():
    assert "out-of-memory: tried to take 80 GiB" in page(FAILED)
    assert "unstable: the anchor changed by +14.0%" in page(SHAKY)


def test_the_end_counts_what_was_done():
    shown = page(STEP, num_unstable=3, num_lost=1)
    assert "This session: 2 done, 1 out-of-memory; 4 were in the records already." in shown
    assert "3 are marked unstable" in shown
    assert "1 were lost with their node" in shown
    assert "Records: here.sqlite" in shown
    assert "nothing new" in page(outcomes={})


def test_layers_show_their_sizes_and_long_lists_are_cut():
    assert "batch size 2, kernel 3, mode forward" in page(LAYER)
    assert "... and 40 more" in page(*[STEP] * 100)
