"""Files of jobs: what is read, and one clear line for everything that cannot be meant."""

import json

import pytest

from forerun.base.errors import InvalidSetupError, RecordError, UsageError
from forerun.jobs.scheduling.jobs_file import check_entries, read_jobs

GOOD = {"name": "a", "points": "1:100 2:190", "batch_size": 32, "steps": 1000}


def one(**changed):
    return check_entries([{k: v for k, v in {**GOOD, **changed}.items() if v is not None}])[0]


def test_csv_and_yaml_say_the_same(tmp_path):
    csv, yaml = tmp_path / "jobs.csv", tmp_path / "jobs.yaml"
    csv.write_text(
        "name,points,batch_size,steps,arrival,deadline,elastic\n"
        "a,1:100 2:190,32,1000,30min,,no\nb,t4 1:100; v100 1:300,64,10,,2h,\n",
        encoding="utf-8",
    )
    yaml.write_text(
        "jobs:\n- {name: a, points: {1: 100, 2: 190}, batch_size: 32, steps: 1000, arrival: 1800, elastic: false}\n"
        "- {name: b, points: {t4: {1: 100}, v100: {1: 300}}, batch_size: 64, steps: 10, deadline: 7200}\n",
        encoding="utf-8",
    )
    assert read_jobs(csv) == read_jobs(yaml)
    first, second = read_jobs(csv)
    assert first.arrival == 1800.0
    assert second.points == {"t4": {1: 100.0}, "v100": {1: 300.0}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arrival": -1}, "'arrival': input should be greater than or equal to 0, got -1"),
        ({"arrival": "-1h"}, "'arrival': expected a duration such as 90, 90s, 15min, 2h or 1.5d, got '-1h'"),
        ({"batch_size": 0}, "'batch_size': input should be greater than or equal to 1"),
        ({"num_devices": 0}, "'num_devices': input should be greater than or equal to 1"),
        ({"batchsize": 2}, "unknown column 'batchsize'; did you mean batch_size"),
        ({"dependency": "afterok:a"}, "do not wait for each other: let 'arrival' be"),
        ({"steps_per_s": 5}, "write the speed as points"),
        ({"batch_size": None}, "expected a value for 'batch_size', got none"),
        ({"points": None}, "expected one of model, points and table for its speed"),
        ({"model": "torchvision:resnet18"}, "expected one of model, points and table for its speed"),
        ({"points": "fast"}, "expected speeds by number of devices such as '1:100 2:190'"),
        ({"points": "1:-5"}, "input should be greater than 0"),
        ({"points": "0:5"}, "'points': input should be greater than or equal to 1"),
        ({"points": {1: float("inf")}}, "'points': input should be a finite number"),
        ({"noise_scale": -1.0}, "'noise_scale': input should be greater than or equal to 0"),
        ({"steps": None}, "expected one of epochs, steps and samples for its work"),
        ({"steps": None, "epochs": 3}, "epochs need a dataset or its dataset_size"),
        ({"batch_size_max": 64}, "batch_size_max needs noise_scale"),
        ({"batch_size_max": 16, "noise_scale": 1}, "batch_size_max 16 must not be below batch_size 32"),
        ({"max_devices": 1, "num_devices": 2}, "max_devices 1 must not be below num_devices 2"),
        ({"target": 0.1}, "a target needs the curve so far and epochs"),
        (
            {"elastic": False, "num_devices": 2, "max_devices": 4},
            "elastic: false means 2 devices and no others",
        ),
        ({"preemptible": False, "min_run": "1h"}, "min_run says nothing of a job with preemptible: false"),
        ({"min_run": "-5m"}, "'min_run'"),
        ({"weight": 0}, "'weight': input should be greater than 0"),
        ({"steps": 0}, "'steps': input should be greater than 0"),
        ({"restart": -1}, "'restart': input should be greater than or equal to 0"),
        ({"arrival": "2h", "deadline": "1h"}, "the deadline at 3600 s must be after the arrival at 7200 s"),
    ],
)
def test_entries_that_cannot_be_meant(changed, message):
    with pytest.raises(InvalidSetupError, match=r"^jobs, job 1 \('a'\): ") as caught:
        one(**changed)
    assert message in str(caught.value)


def test_no_jobs_and_names_that_occur_twice(tmp_path):
    with pytest.raises(InvalidSetupError, match="expected at least one job, got none"):
        check_entries([])
    with pytest.raises(InvalidSetupError, match="two jobs are called 'a'; give each a name of its own"):
        check_entries([GOOD, GOOD])
    empty = tmp_path / "jobs.csv"
    empty.write_text("name,points\n", encoding="utf-8")
    with pytest.raises(InvalidSetupError, match=r"jobs\.csv: expected at least one job, got none"):
        read_jobs(empty)


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("none.csv", None, UsageError, "expected a file of jobs at"),
        ("jobs.txt", "a", UsageError, r"ends in \.csv, \.yaml, \.json or \.trace .* got 'jobs.txt'"),
        (
            "jobs.csv",
            "name,time,application,num_replicas,batch_size\na,9.6,bert,4,320\n",
            InvalidSetupError,
            "'application'; Pollux and Sia leave its speed and work",
        ),
        (
            "jobs.trace",
            "",
            UsageError,
            "expected one file such as Gavel's simulation_throughputs.json beside it",
        ),
        ("jobs.yaml", "a: [", InvalidSetupError, "jobs.yaml is no YAML"),
        ("jobs.yaml", "jobs: 3", InvalidSetupError, "expected a list of jobs"),
        ("jobs.yaml", "", InvalidSetupError, "expected at least one job"),
        ("jobs.csv", "name,steps\na,1,2\n", RecordError, "line 2: more cells than columns"),
        ("jobs.csv", "name,table,batch_size,steps\na,t.csv,1,1\n", InvalidSetupError, "expected a file at"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, error, message):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        read_jobs(tmp_path / name)


def test_settings_of_a_run_stand_beside_a_model():
    row = {"name": "a", "model": "cnn:depth=1", "batch_size": 32, "steps": 10}
    (entry,) = check_entries(
        [{**row, "compile": True, "layout": "nhwc", "strategy": "fsdp", "torch_version": "2.4"}]
    )
    options = entry.run_options()
    assert (options["compile"], options["layout"], options["strategy"]) == (True, "nhwc", "fsdp")
    assert options["precision"] == "fp32"
    for wrong, word in (
        ({"layout": "nhcw"}, "layout"),
        ({"bucket_mb": 0}, "bucket_mb"),
        ({"phase": "inference"}, "phase"),
    ):
        with pytest.raises(InvalidSetupError, match=word):
            check_entries([{**row, **wrong}])


def test_jobs_of_known_duration_under_other_names_and_as_json(tmp_path):
    file = tmp_path / "jobs.json"
    file.write_text('[{"job": "a", "gpus": 2, "duration": "2h", "submit_time": 60}]')
    (job,) = read_jobs(file)
    assert (job.name, job.num_devices, job.arrival, job.samples) == ("a", 2, 60.0, 7200.0)
    assert (job.points, job.elastic) == ({"": {2: 1.0}}, False)
    file.write_text('[{"name": "a", "duration": "2h", "steps": 5}]')
    with pytest.raises(InvalidSetupError, match="duration stands alone, got steps beside it"):
        read_jobs(file)


def test_a_trace_of_gavel_runs_at_the_speeds_beside_it(tmp_path):
    # The forms of 2019, 2020 and the artifact, by the readers of stanford-futuredata/gavel.
    kind, command = "ResNet-50 (batch size 64)", "cd w && python3 main.py -b 64"
    lines = [
        f"{kind}\t{command}\t-n\t7931\t25\t2",
        f"{kind}\t{command}\t-n\t1\t7931\t25.0\t2",
        f"{kind}\t{command}\t-n\t1\t7931\t2\t3\t-1.0\t25",
        f"{kind}\t{command}\tw\t-n\t1\t7931\t2\t3\t-1.000000\t25",
        f"{kind}\t{command}\tw\t-n\t1\t7931\t2\tstatic\t3\t-1.000000\t25",
        f"{kind}\t{command}\t-n\t1\t7931\t25.0\t0",
    ]
    file, speeds = tmp_path / "a.trace", tmp_path / "simulation_throughputs.json"
    file.write_text("\n".join(lines))
    speeds.write_text(
        json.dumps({"v100": {f"('{kind}', 2)": {"null": 5.0}}, "k80": {f"('{kind}', 2)": {"null": 0}}})
    )
    jobs = read_jobs(file)
    assert [job.name for job in jobs] == [f"job-{n}" for n in range(1, 6)]
    assert {(job.num_devices, job.arrival, job.steps, job.batch_size, job.script) for job in jobs} == {
        (2, 25.0, 7931.0, 128, "python3 main.py -b 64")
    }
    assert all(job.points == {"v100": {2: 640.0}} and not job.elastic for job in jobs)
    assert [job.weight for job in jobs] == [1, 1, 3, 3, 3]
    for line, message in (
        (lines[2].replace("-1.0", "1.2"), "line 1: its SLO of 1.2 counts from a duration"),
        (lines[2].replace("64)", "32)"), r"has no speed of \('ResNet-50 \(batch size 32\)', 2\); add it"),
        ("a\tb", "expected job type, command, steps, workers and arrival"),
    ):
        file.write_text(line)
        with pytest.raises(InvalidSetupError, match=message):
            read_jobs(file)
