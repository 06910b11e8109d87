"""``forerun scale``: answers, JSON, plots, one line for an error."""

import json

import pytest
from command_line import invoke

MODEL = "cnn:depth=2,base_filters=32"
DEVICES = (MODEL, "--on", "1x8xv100-sxm2-16gb", "--devices", "1,2,4,8")
SERVERS = (MODEL, "--on", "t4", "--inter", "ethernet-10g", "--workers", "1:4", "--servers", "1,2")
OPTIMUS = ("resnet50", "--coefficients", "optimus", "--asynchronous", "--workers", "1:32", "--servers", "2,4")
POINTS = "num_devices,num_nodes,batch_size_per_device,step_time_s\n" + "".join(
    f"{n},{max(1, n // 4)},{b},{0.02 + 0.001 * b + (0 if n == 1 else 0.01 + 0.05 * (n > 4))}\n"
    for n in (1, 2, 4, 8)
    for b in (16, 64)
)


def answer(*words):
    result = invoke("scale", *words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_json_of_devices_has_the_promised_names():
    found = answer(*DEVICES, "--dataset", "cifar10", "--epochs", "3", "--price", "2/h")
    assert [p["num_devices"] for p in found["points"]] == [1, 2, 4, 8]
    for point in found["points"]:
        assert set(point["step_time_s"]) == set(point["throughput_samples_per_s"]) == {"value", "low", "high"}
        assert 0 < point["efficiency"] <= 1
        assert point["cost_usd_per_epoch"] > 0
    assert found["stops_paying_at"] == {"weak": None} or found["stops_paying_at"]["weak"] in (2, 4, 8)


def test_json_of_servers_has_the_promised_names():
    points = answer(*SERVERS)["points"]
    assert [(p["num_workers"], p["num_servers"]) for p in points[:2]] == [(1, 1), (2, 1)]
    assert all({"step_time_s", "throughput_samples_per_s", "efficiency"} <= set(p) for p in points)


def test_json_of_a_fit(tmp_path):
    (tmp_path / "points.csv").write_text(POINTS)
    found = answer("--fit", str(tmp_path / "points.csv"), "--devices", "1:16", "--speed-model", "ring")
    assert [p["num_devices"] for p in found["points"]] == list(range(1, 17))
    assert found["model"] == "ring"
    assert found["errors"]["ring"] < 0.5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (DEVICES, "weak scaling: batch size 32 on every device"),
        ((*DEVICES, "--scaling", "strong"), "strong scaling: global batch size 32"),
        (SERVERS, "Fastest:"),
        (
            (*OPTIMUS, "--batch-size", "128", "--dataset", "cifar10", "--epochs", "28"),
            "10,948 steps in 28 epochs",
        ),
        (("--propose", "5", "--workers", "1:8", "--servers", "1:4"), "measure next:"),
    ],
)
def test_pages(words, expected):
    result = invoke("scale", *words)
    assert result.exit_code == 0, result.stderr
    assert expected in result.stdout


@pytest.mark.parametrize("words", [DEVICES, SERVERS, OPTIMUS])
def test_plots(words, tmp_path):
    path = tmp_path / "plot.png"
    result = invoke("scale", *words, "--plot", str(path), "--json")
    assert result.exit_code == 0, result.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
    json.loads(result.stdout)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((MODEL, "--on", "t4", "--devices", "0,2"), "devices must be whole numbers from 1"),
        ((MODEL, "--on", "t4", "--devices", "-2"), "got '-2'"),
        ((MODEL, "--on", "t4", "--devices", "4:1"), "got '4:1'"),
        ((MODEL, "--on", "t4", "--devices", "3", "--nodes", "2"), "cannot be spread evenly over 2 nodes"),
        ((MODEL, "--on", "t4", "--intra", "nvlnk"), "expected a link of the catalogue"),
        ((MODEL, "--on", "2x4xt4", "--devices", "8"), "name it with --inter"),
        ((MODEL,), "missing option '--on'"),
        ((), "missing option '--on'"),
        ((*OPTIMUS, "--price", "2/h"), "cannot be used for workers and servers"),
        ((*DEVICES, "--plot", "figure.xyz"), "xyz"),
    ],
)
def test_one_line_for_an_error_and_exit_code_2(words, message):
    result = invoke("scale", *words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_file_that_is_not_there_is_a_failure():
    result = invoke("scale", "--fit", "no-such.csv")
    assert result.exit_code == 1
    assert "no-such.csv" in result.stderr
    assert "check the path" in result.stderr


def test_points_with_a_negative_time_are_named(tmp_path):
    (tmp_path / "points.csv").write_text("num_devices,batch_size_per_device,step_time_s\n1,8,0.1\n2,8,-0.1\n")
    result = invoke("scale", "--fit", str(tmp_path / "points.csv"))
    assert result.exit_code == 2
    assert "line 3: a step time must be above zero" in result.stderr


def test_a_table_without_a_batch_size_is_asked_for_one(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text("num_devices,step_time_s\n1,0.1\n2,0.11\n4,0.12\n8,0.13\n")
    result = invoke("scale", "--fit", str(path))
    assert result.exit_code == 2
    assert "line 2: expected the batch size of one device, got none" in result.stderr
    (point, *_) = answer("--fit", str(path), "--devices", "1", "--batch-size", "64")["points"]
    assert point["batch_size_per_device"] == 64
    assert point["throughput_samples_per_s"]["value"] == pytest.approx(64 / 0.1, rel=0.15)


def test_the_batch_size_is_the_table_s_own(tmp_path):
    (tmp_path / "points.csv").write_text(POINTS.replace(",16,", ",64,"))
    found = answer("--fit", str(tmp_path / "points.csv"), "--devices", "1,2")
    assert {point["batch_size_per_device"] for point in found["points"]} == {64}


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        ("GPUs,Images/sec,Speedup", ("1,640,1.0x", "2,1163,1.8x", "4,2133,3.3x", "8,3938,6.2x")),
        ("Workers,Global Batch Size,iteration time (s)", ("1,64,.1", "2,128,.11", "4,256,.12", "8,512,.13")),
        (
            "# of GPUs,Batch size / GPU,samples/s,Weak scaling",
            ("1,64,640,1.0", "2,64,1163,1.8", "4,64,2133,3.3", "8,64,3938,6.2"),
        ),
    ],
)
def test_columns_are_read_by_the_names_that_others_give_them(tmp_path, header, rows):
    path = tmp_path / "points.csv"
    path.write_text("\n".join([header, *rows, ""]))
    (point, *_) = answer("--fit", str(path), "--devices", "1", "--batch-size", "64")["points"]
    assert point["throughput_samples_per_s"]["value"] == pytest.approx(640, rel=0.15)


def test_a_second_column_of_one_meaning_and_an_unclear_one_are_refused(tmp_path):
    path = tmp_path / "points.csv"
    for header, unclear in (
        ("num_devices,gpus,step_time_s", "gpus"),
        ("gpus,batch_size,step_time_s", "batch_size"),
    ):
        path.write_text(f"{header}\n1,8,0.1\n2,8,0.1\n")
        result = invoke("scale", "--fit", str(path), "--batch-size", "64")
        assert result.exit_code != 0
        assert f"unknown column '{unclear}'" in result.stderr


def test_predict_takes_a_cluster_and_draws_one_device_only(tmp_path):
    words = ("predict", MODEL, "--on", "2x8xa100-sxm4-80gb", "--inter", "8xinfiniband-hdr")
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["num_devices"] == 16
    assert sum(part["time_s"] for part in found["breakdown"]) == pytest.approx(found["step_time_s"]["value"])
    refused = invoke(*words, "--plot", str(tmp_path / "plot.png"))
    assert refused.exit_code == 2
    assert "forerun scale with --plot" in refused.stderr
