"""``forerun forecast`` and ``forerun measure curve``: what is printed where, and what is refused."""

import json
import math

import numpy as np
import pytest
from command_line import invoke

import optimus_networks

TARGET = ("--target", "accuracy>=0.92")
LENGTH = ("--epochs", "100")


def made_run(path, num=30, noise=0.003, floor=0.04, seed=0, first=0):
    epochs = np.arange(1.0, num + 1)
    values = 1 - floor - 0.6 * epochs**-0.7 + np.random.default_rng(seed).normal(0, noise, num)
    rows = [f"{int(e)},{100 * int(e)},{v:.5f},{60 * e:.1f}" for e, v in zip(epochs, values, strict=True)]
    path.write_text("\n".join(["epoch,step,accuracy,elapsed_s", *rows[first:]]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def run_file(tmp_path):
    return made_run(tmp_path / "run.csv")


def asked(*words):
    done = invoke("forecast", *map(str, words), "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def refused(*words, status=2):
    done = invoke("forecast", *map(str, words))
    assert done.exit_code == status, done.output
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_forecast_prints_one_json_object(run_file):
    told = asked(run_file, *TARGET, *LENGTH)
    final = told["final_value"]
    assert final["low"] <= final["low_80"] <= final["value"] <= final["high_80"] <= final["high"]
    assert told["progress"] == pytest.approx(0.3)
    times = told["epochs_to_target"]
    assert 30 < times["p10"] <= times["p50"]
    assert told["steps_to_target"]["p50"] == pytest.approx(100 * times["p50"])
    assert told["time_to_target_s"]["p50"] == pytest.approx(60 * times["p50"])
    assert told["cost_to_target_usd"] is None
    assert sum(row["weight"] for row in told["forecasters"]) == pytest.approx(1)
    assert len(told["points"]) == 70
    assert told["outcome"] is None


def yolo_results(folder, num=40, end=100):
    epochs = np.arange(1, num + 1)
    values = 0.55 - 0.5 * epochs**-0.6
    rates = 0.01 * (1 - 0.99 * epochs / end)
    rows = [f"{e},{30 * e},1.2,{v:.5f},{r:.7f}" for e, v, r in zip(epochs, values, rates, strict=True)]
    header = "  epoch,   time,  val/box_loss,  metrics/mAP50-95(B),  lr/pg0"
    (folder / "results.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return folder


def test_rates_in_the_file_are_a_schedule(tmp_path):
    told = asked(yolo_results(tmp_path), "--schedule", "logged", *LENGTH)
    assert told["metric"] == "metrics/mAP50-95(B)"
    assert told["tier"] == "schedule"
    assert any("a straight line to 1% of the peak" in note for note in told["notes"])
    assert told == asked(tmp_path, "--schedule", "logged:lr/pg0", *LENGTH)
    assert "no column 'rate'" in refused(tmp_path, "--schedule", "logged:rate", *LENGTH)
    assert "give --epochs" in refused(tmp_path, "--schedule", "logged")


def test_finished_runs_with_logged_rates_are_tested_with_their_schedule(tmp_path):
    for job in ("one", "two", "three"):
        (tmp_path / job).mkdir()
        yolo_results(tmp_path / job, num=60 + 10 * len(job), end=100)
    told = asked("backtest", tmp_path, "--schedule", "logged")
    assert told["num_runs"] == 3
    assert set(told["mixture_errors"]) == {"schedule", "curve alone"}
    assert set(told["width_90"]["schedule"]) == {"0.1", "0.2", "0.3", "0.5", "0.7", "0.85"}
    assert set(asked("backtest", tmp_path)["mixture_errors"]) == {"curve alone"}


def test_rates_that_are_not_in_the_file_are_no_schedule(run_file):
    assert "needs a column of learning rates" in refused(run_file, "--schedule", "logged", *LENGTH)


def test_a_target_that_no_run_can_reach_is_refused(run_file):
    assert "cannot be reached" in refused(run_file, "--target", "acc>=2", *LENGTH)


def test_a_page_names_target_clock_and_advice(run_file):
    done = invoke("forecast", str(run_file), *TARGET, *LENGTH)
    assert done.exit_code == 0, done.stderr
    for words in ("target 0.92 by the end", "epochs to the target", "as logged", "Go on", "curve alone"):
        assert words in done.stdout


def test_schedule_and_history_are_used(run_file, tmp_path):
    assert asked(run_file, "--schedule", "cosine:epochs=100")["tier"] == "schedule"
    folder = tmp_path / "history"
    folder.mkdir()
    for seed in (1, 2):
        made_run(folder / f"{seed}.csv", 100, seed=seed)
    told = asked(run_file, *TARGET, "--history", folder)
    assert told["tier"] == "history"
    assert told["end_epoch"] == 100


def test_a_run_is_not_its_own_history(tmp_path):
    folder = tmp_path / "history"
    folder.mkdir()
    made_run(folder / "other.csv", 100, seed=1)
    alone = asked(made_run(tmp_path / "run.csv", 100), "--cut", "0.3", "--history", folder)
    inside = asked(made_run(folder / "run.csv", 100), "--cut", "0.3", "--history", folder)
    assert alone["points"] == inside["points"]


def test_a_finished_run_cut_early_stands_beside_what_came(tmp_path):
    path = made_run(tmp_path / "whole.csv", 100)
    plot = tmp_path / "plot.png"
    told = asked(path, *TARGET, "--cut", "0.3", "--plot", plot)
    came = told["outcome"]
    assert told["last_epoch"] == 30
    assert told["end_epoch"] == 100
    assert len(came["points"]) == 70
    assert came["final_value"] == pytest.approx(0.936, abs=0.01)
    assert came["is_inside_90"] == (
        told["final_value"]["low"] <= came["final_value"] <= told["final_value"]["high"]
    )
    assert 30 < came["reached_epoch"] < 100
    assert plot.stat().st_size > 10_000
    page = invoke("forecast", str(path), *TARGET, "--cut", "0.3").stdout
    assert "accuracy as it came" in page
    assert "target as it came" in page


def test_what_comes_after_the_cut_is_not_seen(tmp_path):
    one, other = (made_run(tmp_path / f"{n}.csv", 100) for n in (1, 2))
    rows = other.read_text().splitlines()
    other.write_text("\n".join([*rows[:31], *[row.replace("0.9", "0.5") for row in rows[31:]]]) + "\n")
    before, after = (asked(path, "--cut", "0.3") for path in (one, other))
    assert before["points"] == after["points"]
    assert before["outcome"]["final_value"] != after["outcome"]["final_value"]


def test_the_device_changes_the_clock_and_not_the_steps(run_file):
    question = (run_file, *TARGET, *LENGTH, "--model", "cifar-resnet:8", "--dataset", "cifar10")
    fast, slow = (asked(*question, "--on", name) for name in ("a100-sxm4-40gb", "t4"))
    for name in ("final_value", "epochs_to_target", "steps_to_target", "points", "probability_of_target"):
        assert fast[name] == slow[name]
    assert fast["on"][0]["epoch_time_s"]["value"] < slow["on"][0]["epoch_time_s"]["value"]
    both = asked(*question, "--on", "a100-sxm4-40gb", "--on", "t4", "--price", "2/h")
    assert [entry["source"] for entry in both["on"]] == ["predicted", "predicted", "logged"]
    clock = both["on"][0]
    assert clock["cost_to_target_usd"]["p50"] == pytest.approx(clock["time_to_target_s"]["p50"] / 1800)


def test_a_target_reached_already_and_one_out_of_reach(run_file):
    told = asked(run_file, "--target", "accuracy>=0.7", *LENGTH)
    assert told["reached_epoch"] is not None
    assert told["probability_of_target"] == 1
    assert told["advice"]["stop"] is True
    assert (
        "reached at epoch" in invoke("forecast", str(run_file), "--target", "accuracy>=0.7", *LENGTH).stdout
    )
    told = asked(run_file, "--target", "accuracy>=0.9999", "--epochs", "40")
    assert told["epochs_to_target"] == dict.fromkeys(("p10", "p50", "p90"))
    assert told["time_to_target_s"]["p90"] is None
    assert told["advice"]["stop"] is True
    page = invoke("forecast", str(run_file), "--target", "accuracy>=0.9999", "--epochs", "40").stdout
    assert "not by the end" in page


BAD_FILES = {
    "": "expected a header and rows",
    "name\na\nb\n": "at least two columns",
    "epoch,accuracy\n1,0.5\n2,much\n": "row 3, got 'much'",
    "epoch,accuracy\n3,0.5\n2,0.6\n1,0.7\n": "rise from row to row",
    "epoch,accuracy\n1,nan\n2,nan\n3,nan\n4,nan\n": "NaN",
    "epoch,accuracy\n1,0.1\n2,0.2\n3,0.3\n": "at least 4 points",
    "epoch,accuracy\n" + "".join(f"{e},0.5\n" for e in range(1, 9)): "does not move",
}


@pytest.mark.parametrize(("text", "words"), BAD_FILES.items(), ids=list(BAD_FILES.values()))
def test_a_file_that_cannot_be_forecast(tmp_path, text, words):
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    assert words in refused(path, status=1)


def test_questions_that_must_be_changed(run_file, tmp_path):
    assert "no metric 'bleu'" in refused(run_file, "--target", "bleu>=30")
    assert "unknown schedule 'cosin" in refused(run_file, "--schedule", "cosin:epochs=90")
    assert "compare a metric with a number" in refused(run_file, "--target", "accuracy")
    assert "whole length with --epochs" in refused(run_file, "--epochs", "10")
    assert "missing argument" in refused()
    assert "no such option: --save" in refused(run_file, "--save", tmp_path / "x.json")
    assert "no such option: --json" in refused("watch", run_file, "--json")
    assert "share of the run between 0 and 1" in refused(run_file, "--cut", "1.5")
    assert "both the model and the device" in refused(run_file, "--model", "cifar-resnet:8")
    assert "needs its dataset" in refused(run_file, "--model", "cifar-resnet:8", "--on", "t4")
    assert "a plot must end in" in refused(run_file, "--plot", tmp_path / "plot.txt")
    assert "above zero" in refused("watch", run_file, "--every-s", "0")
    assert "cannot be read" in refused(tmp_path / "none.csv", status=1)


def test_a_changing_rate_is_continued_where_it_follows_a_shape(tmp_path):
    def run_of(name, rates):
        rows = [f"{e},{1 - 0.5 * e**-0.7:.4f},{rate:.8f}" for e, rate in enumerate(rates, start=1)]
        (tmp_path / name).write_text("\n".join(["epoch,accuracy,lr", *rows]), encoding="utf-8")
        return tmp_path / name

    falling = run_of("falling.csv", [0.05 * (1 + math.cos(math.pi * e / 60)) for e in range(20)])
    told = asked(falling)
    assert (told["tier"], told["end_epoch"]) == ("schedule", 60)
    assert asked(falling, "--schedule", "unknown")["tier"] == "curve alone"
    assert asked(run_of("odd.csv", [0.1 * 0.95**e for e in range(20)]))["tier"] == "curve alone"


def test_watching_ends_with_the_target_and_with_silence(tmp_path, run_file):
    done = invoke("forecast", "watch", str(run_file), "--target", "accuracy>=0.7", "--every-s", "0.01")
    assert done.exit_code == 0
    assert done.stdout.count("reached at epoch") >= 1
    short = made_run(tmp_path / "short.csv", 2)
    quick = ("--every-s", "0.01", "--patience-s", "0.03")
    done = invoke("forecast", "watch", str(short), *TARGET, *quick)
    assert done.exit_code == 0
    assert "not yet: " in done.stderr
    assert "no new row" in done.stderr


@pytest.fixture
def stored_runs(tmp_path):
    for job in range(3):
        folder = tmp_path / "stored" / f"job-{job}"
        folder.mkdir(parents=True)
        for seed in range(3):
            made_run(folder / f"{seed}.csv", 40, floor=0.03 + 0.03 * job, seed=10 * job + seed)
    return tmp_path / "stored"


def test_a_back_test_prints_errors_and_coverage_and_its_figures_can_be_used(stored_runs, run_file, tmp_path):
    figures = tmp_path / "figures.json"
    plot = tmp_path / "errors.png"
    told = asked("backtest", stored_runs, "--save", figures, "--plot", plot)
    assert plot.stat().st_size > 10_000
    assert told["num_runs"] == 9
    assert told["num_jobs"] == 3
    assert told["errors"]["siblings"]["0.3"] < told["errors"]["best so far"]["0.3"]
    assert 0 <= told["coverage_90"]["history"]["0.3"] <= 1
    page = invoke("forecast", "backtest", str(stored_runs)).stdout
    assert "Coverage of 90 % intervals" in page
    found = asked(run_file, *LENGTH, "--backtest", figures)
    assert found["calibration"]["is_calibrated"] is False
    assert any("uncalibrated" in note for note in found["notes"])


def test_folders_and_figures_that_are_none(tmp_path, run_file):
    (tmp_path / "empty").mkdir()
    assert "which is none" in refused("backtest", tmp_path / "none", status=1)
    assert "holds no CSV" in refused("backtest", tmp_path / "empty", status=1)
    assert "back-test figures" in refused(run_file, "--backtest", run_file, status=1)


def test_configurations_are_compared_by_time_and_value(tmp_path):
    for name, floor in (("small", 0.08), ("large", 0.03)):
        made_run(tmp_path / f"{name}.csv", floor=floor)
    table = tmp_path / "table.csv"
    table.write_text(
        "name,run,model,device,dataset,epochs,price\n"
        "small,small.csv,cifar-resnet:8,t4,cifar10,100,1\n"
        "large,large.csv,cifar-resnet:20,t4,cifar10,100,1\n"
        "slow,small.csv,cifar-resnet:20,t4,cifar10,100,1\n"
    )
    plot = tmp_path / "front.png"
    rows = asked("trade-off", table, *TARGET, "--plot", plot)["configurations"]
    assert [row["is_on_pareto_front"] for row in rows] == [True, True, False]
    assert rows[0]["end_time_s"]["value"] == pytest.approx(100 * rows[0]["epoch_time_s"]["value"])
    assert rows[0]["cost_usd"] == pytest.approx(rows[0]["end_time_s"]["value"] / 3600)
    assert plot.stat().st_size > 10_000
    assert "beats those with a star" in invoke("forecast", "trade-off", str(table)).stdout
    table.write_text("name,run\nx,y\n")
    assert "'model' must be a name, got None; add it" in refused("trade-off", table, status=1)


def test_batch_sizes_follow_the_law(tmp_path):
    table = tmp_path / "batches.csv"
    table.write_text("batch_size,steps\n" + "".join(f"{b},{1000 * (1 + 512 / b)}\n" for b in (64, 128, 256)))
    told = asked("batches", table, "--batch-size", "4096", "--dataset-size", "50000")
    assert told["critical_batch_size"] == pytest.approx(512, rel=1e-3)
    points = {row["batch_size"]: row for row in told["points"]}
    assert points[4096]["steps"] == pytest.approx(1125, rel=1e-3)
    assert points[4096]["epochs"] == pytest.approx(1125 * 4096 / 50000, rel=1e-3)
    assert points[64]["measured_steps"] == pytest.approx(9000)
    assert "twice the least steps" in invoke("forecast", "batches", str(table)).stdout
    table.write_text("batch_size,epochs\n64,10\n128,11\n")
    assert "'epochs' and --dataset-size" in refused("batches", table, status=1)
    table.write_text("batch_size,steps\n64,100\n")
    assert "two" in refused("batches", table)
    table.write_text("batch_size,steps\n64,many\n128,2\n")
    assert "got 'many'" in refused("batches", table, status=1)
    table.write_text("size,steps\n64,1\n")
    assert "expected the column 'batch_size'" in refused("batches", table, status=1)


NETWORKS = (
    "network,device,depth,parameters,b0\na,x,10,1e5,0.5\na,y,10,1e5,0.6\nb,x,20,4e5,1.0\nc,y,30,9e5,1.6\n"
)


def test_a_network_never_trained_does_not_depend_on_the_device(tmp_path):
    table = tmp_path / "networks.csv"
    table.write_text(NETWORKS + "new,x,25,6e5,\n")
    told = asked("networks", table, "--metric", "b0")
    assert told["features"] == ["depth", "parameters"]
    (row,) = told["networks"]
    assert 1.0 < row["value"] < 1.6
    assert row["low"] <= row["value"] <= row["high"]
    table.write_text(NETWORKS.replace(",x,", ",z,") + "new,y,25,6e5,\n")
    assert asked("networks", table, "--metric", "b0") == told
    assert "the device takes no part" in invoke("forecast", "networks", str(table), "--metric", "b0").stdout
    assert "expected" in refused("networks", tmp_path, status=1)
    table.write_text(NETWORKS + "d,x,40,16e5,2.0\n")
    rows = asked("networks", table, "--metric", "b0")["networks"]
    assert [row["network"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[1]["actual"] == 1.0
    assert rows[1]["error"] == pytest.approx(abs(rows[1]["value"] - 1.0))


def test_the_printed_table_of_the_earlier_study_is_taken_as_it_is(tmp_path):
    table, plot = tmp_path / "table.csv", tmp_path / "curve.png"
    table.write_text(optimus_networks.NETWORKS)
    told = asked("networks", table, "--leave-out", "50", "--plot", plot)
    (row,) = told["networks"]
    assert (row["network"], told["features"], told["value"]) == (
        "depth 50",
        ["depth"],
        "epochs_to_92_accuracy",
    )
    assert (row["actual"], told["unit"]) == (pytest.approx(31.67, abs=0.01), "steps")
    others = {other["name"]: other for other in row["others"]}
    assert set(others) == {"b0_per_step", "b1", "b2"}
    assert others["b2"]["error"] is None
    assert others["b2"]["error_in_loss"] < 1e-3
    # The run of 35 epochs in steps, as b0 counts them: the loss falls from 1.8 to 0.27.
    first, last = row["curve"][0], row["curve"][-1]
    assert (first["k"], last["k"]) == (391, 35 * 391)
    assert (first["actual"], last["actual"]) == (pytest.approx(1.80, abs=0.01), pytest.approx(0.27, abs=0.01))
    assert np.mean([point["error"] for point in row["curve"]]) < 0.25
    assert plot.stat().st_size > 10_000
    page = invoke("forecast", "networks", str(table), "--leave-out", "50").stdout
    assert "Loss of depth 50 after k steps" in page
    assert "no network '51'" in refused("networks", table, "--leave-out", "51")


def test_the_unit_of_b0_is_the_tables_or_is_asked_for(tmp_path):
    table, by_epoch = tmp_path / "table.csv", tmp_path / "epochs.csv"
    table.write_text(optimus_networks.NETWORKS.replace("b0_per_step", "b0"))
    assert "b0_per_step or b0_per_epoch" in refused("networks", table, "--leave-out", "50", status=1)
    by_step = asked("networks", table, "--leave-out", "50", "--unit", "steps")["networks"][0]["curve"]
    rows = [line.split(",") for line in optimus_networks.NETWORKS.splitlines()[1:]]
    by_epoch.write_text(
        "depth,b0_per_epoch,b1,b2,epochs\n"
        + "".join(f"{r[0]},{float(r[2]) * 391},{r[3]},{r[4]},{r[5]}\n" for r in rows)
    )
    told = asked("networks", by_epoch, "--leave-out", "50")
    curve = told["networks"][0]["curve"]
    assert (told["unit"], [p["k"] * 391 for p in curve]) == ("epochs", [p["k"] for p in by_step])
    assert [p["actual"] for p in curve] == pytest.approx([p["actual"] for p in by_step])
    assert "leave it out" in refused("networks", by_epoch, "--unit", "steps", status=1)
    assert "steps or epochs" in refused("networks", table, "--unit", "hours")
    table.write_text(optimus_networks.NETWORKS.replace("steps_per_epoch", "other"))
    assert "'steps_per_epoch', or 'batch_size' and 'dataset_size'" in refused(
        "networks", table, "--unit", "steps", status=1
    )


def test_depth_alone_cannot_tell_networks_whose_neighbours_are_both_above(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("depth,epochs\n20,58\n32,51\n44,44\n56,37\n50,32\n")
    page = invoke("forecast", "networks", str(table), "--leave-out", "50").stdout
    assert "lies outside of its neighbours depth 44 (44) and" in " ".join(page.split())


def test_the_law_of_optimus_is_fitted_to_the_rows_of_a_step_log(tmp_path):
    log, plot = tmp_path / "log.csv", tmp_path / "fit.png"
    rng, steps = np.random.default_rng(0), np.arange(500)
    losses = 1 / (0.0065 * (steps + 1) + 0.6) + 0.53 + 0.02 * rng.normal(size=500)
    rows = [
        f"{step // 100},{step % 100},{loss},{1 - loss / 3}" for step, loss in zip(steps, losses, strict=True)
    ]
    log.write_text("\n".join(["epoch,step,loss,acc", *rows]))
    told = asked("law", log, "--target", "loss<=0.8", "--plot", plot)
    assert (told["n"], told["unit"], told["metric"]) == (500, "step", "loss")
    for name, truth in (("b0", 0.0065), ("b1", 0.6), ("b2", 0.53)):
        assert abs(told[name] - truth) < 3 * told["errors"][name]
    assert told["steps_per_epoch"] == 100
    assert told["reached_at"] == pytest.approx((1 / (0.8 - told["b2"]) - told["b1"]) / told["b0"])
    assert plot.stat().st_size > 10_000
    assert "b0 per epoch" in invoke("forecast", "law", str(log)).stdout
    log.write_text("\n".join(["epoch,loss", "1,2.0"]))
    assert "expected at least 4 rows with a loss" in refused("law", log, status=1)
    assert "unknown law 'pow'" in refused("law", log, "--law", "pow")
    log.write_text("\n".join(["epoch,acc", "1,0.2", "2,0.3"]))
    assert "no metric" in refused("law", log)


def test_a_network_is_trained_for_its_curve_and_the_curve_is_forecast(tmp_path):
    out = tmp_path / "digits.csv"
    words = (
        "measure",
        "curve",
        "cifar-resnet:8",
        "--dataset",
        "digits",
        "--num-images",
        "64",
        "--image-size",
        "8",
    )
    options = ("--epochs", "4", "--batch-size", "32", "--learning-rate", "0.05", "--out", str(out))
    done = invoke(*words, *options, "--gradient-noise", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["num_steps"] == 8
    assert told["gradient_noise"]["num_steps"] == 8
    assert "epoch 4/4" in done.stderr
    assert (
        out.read_text().splitlines()[0]
        == "epoch,step,loss,accuracy,val_loss,val_accuracy,learning_rate,elapsed_s"
    )
    told = asked(out, "--metric", "loss", "--schedule", "cosine:epochs=4")
    assert told["points"] == []
    done = invoke(*words, *options, "--target", "bleu>=2")
    assert done.exit_code == 2
    assert "got a target of 'bleu'" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch-size", "0"), "batch size must be above zero"),
        (("--optimizer", "lion"), "sgd or adam"),
        (("--dataset", "mnst"), "did you mean mnist"),
        (("--dataset", "mnist", "--image-size", "32"), "mnist has images of 28 pixels"),
        (("--schedule", "cosin"), "unknown schedule"),
    ],
)
def test_trainings_that_are_none(tmp_path, options, words):
    dataset = () if "--dataset" in options else ("--dataset", "digits")
    out = (*dataset, "--epochs", "1", "--out", str(tmp_path / "c.csv"))
    done = invoke("measure", "curve", "cifar-resnet:8", *out, *options)
    assert done.exit_code == 2
    assert words in done.stderr
    assert not (tmp_path / "c.csv").exists()
