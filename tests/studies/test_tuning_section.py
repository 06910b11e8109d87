"""Tables of profiled and tuned scripts from the files that the benchmarks write."""

import json

import pytest

from forerun.base.errors import RecordError
from studies.own.records import tuning_results_folder, tuning_section

MACHINE = {"date": "2026-01-02", "machine": {"processor": "made", "num_usable_cores": 2.0}}
RUN = {"step_time_s": 0.1, "wall_s": 50.0, "cpu_utilisation": 1.5, "peak_memory_bytes": 2**29}
BEFORE_AFTER = {
    **MACHINE,
    "budget": "4min",
    "epochs": "2",
    "num_images": 1800,
    "image_size": [640, 480],
    "num_trials": 12,
    "ended_by": "240 s",
    "metric": "val_acc",
    "values": {"batch_size": 32, "num_workers": 1},
    "speedup": 3.0,
    "is_script_unchanged": True,
    "script_sha256": "0123456789abcdef0123",
    "before": {**RUN, "rate_samples_per_s": 50.0, "metric": 0.5},
    "after": {**RUN, "rate_samples_per_s": 150.0, "metric": 0.51},
}


def pair(profiled_s, wait_s):
    return {
        "alone_low_s": 0.1,
        "alone_median_s": 0.2,
        "profiled_low_s": profiled_s,
        "profiled_median_s": 2 * profiled_s,
        "wait_s": wait_s,
        "wait_by_hand_s": 0.05,
        "phases_s": 10.0,
        "wall_s": 10.1,
        "parts_s": 0.2,
        "step_s": 0.2,
    }


def write(folder, name, found):
    (folder / name).write_text(json.dumps(found))


def test_without_results_there_is_no_section(tmp_path):
    assert tuning_section(tmp_path) == ""


def test_a_table_stands_for_each_file_that_is_there(tmp_path):
    write(tmp_path, "before_after.json", BEFORE_AFTER)
    section = tuning_section(tmp_path)
    assert "| images/s in steps | 50.0 | 150.0 |" in section
    assert "| val_acc after 2 epochs | 0.5000 | 0.5100 |" in section
    assert "**3.00 times**" in section
    assert "file is unchanged" in section
    assert "instrumented by hand" not in section
    changed = {**BEFORE_AFTER, "is_script_unchanged": False}
    write(tmp_path, "before_after.json", changed)
    assert "**has changed**" in tuning_section(tmp_path)


def test_what_profiling_adds_is_a_paired_ratio_and_differences_are_the_largest(tmp_path):
    idle = {"idle_pairs": [{**pair(0.1, 0.05), "alone_median_s": 1e-3, "profiled_median_s": 1.04e-3}]}
    pairs = [pair(0.102, 0.051), pair(0.102, 0.048)]
    write(tmp_path, "profile_overhead.json", {**MACHINE, **idle, "pairs": pairs})
    section = tuning_section(tmp_path)
    assert (
        "| added to a step, tenth percentile of each run | 3 % | +2.0 % (95 %: +2.0 to +2.0 %) |" in section
    )
    assert "| wait for the loader against that by hand | 10 % | 3.00 %, at most 4.00 % |" in section
    assert "next to nothing, median | - | 40 µs |" in section
    assert "| phases against the wall time | 3 % | 0.99 %, at most 0.99 % |" in section
    write(tmp_path, "profile_overhead.json", {**MACHINE, **idle, "pairs": pairs[:1]})
    assert "| 3 % | +2.0 % |" in tuning_section(tmp_path)


def test_studies_under_a_limit_and_searches_stand_side_by_side(tmp_path):
    study = {
        "num_run": 40,
        "num_rejected": 9,
        "best_rate_samples_per_s": 99.6,
        "median_predicted_over_used": 1.1,
    }
    studies = [{**study, "name": "with prediction", "num_out_of_memory": 0}]
    write(tmp_path, "memory_limit.json", {**MACHINE, "limit_bytes": 1.5e9, "studies": studies})
    searches = {"TPE": {"mean": [0.5, 0.75], "worst": [0.25, 0.5]}}
    found = {
        **MACHINE,
        "num_configurations": 96,
        "num_seeds": 5,
        "checkpoints": [5, 15],
        "searches": searches,
    }
    write(tmp_path, "first_trials.json", found)
    section = tuning_section(tmp_path)
    assert "Limit 1,500 MB" in section
    assert "| with prediction | 40 | 0 | 9 | 100 | 1.10 |" in section
    assert "| TPE | 50.0 % (worst 25.0 %) | 75.0 % (worst 50.0 %) |" in section


def test_damaged_results_are_refused(tmp_path):
    (tmp_path / "before_after.json").write_text("{")
    with pytest.raises(RecordError, match="write it anew"):
        tuning_section(tmp_path)


def test_the_results_of_the_package_can_be_shown():
    names = {path.name for path in tuning_results_folder().glob("*.json")}
    assert bool(tuning_section()) == bool(names)
