"""Questions and answers over HTTP: the JSON of the command line, limits, refusals and error bodies."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import pytest
from fastapi.testclient import TestClient

import forerun
from forerun.base.errors import FailureError, UsageError
from forerun.surface.web.answers import Answers
from forerun.surface.web.app import make_app
from forerun.surface.web.guard import MAX_BODY_BYTES
from forerun.surface.web.load import BusyError, ClientLimit, Lane, Tracer
from forerun.surface.web.questions import check_device_name, check_links, check_model_name
from forerun.surface.web.reach import MOST_CAPTURE_BYTES
from studies.scripts.diagnose import write_trace

MODEL = "cnn:depth=2,base_filters=32"
CAPTURE = Path(__file__).parents[2] / "kept_files" / "2026-11" / "capture.forerun"
PREDICT = {"model": MODEL, "device": "t4"}
JOB = {"name": "a", "points": "1:100 2:190", "batch_size": 64, "steps": 9000}
PLAN = {"models": ["cnn:depth=2..3,base_filters=32"], "devices": ["t4", "l4"], "batch_sizes": [64, 128]}


@pytest.fixture(scope="module")
def client():
    with TestClient(
        make_app(limit_s=60.0), base_url="http://localhost", raise_server_exceptions=False
    ) as found:
        yield found


def ask(client, path, body, **changes):
    return client.post(path, json={**body, **changes})


def refused(response, status, words):
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert words in response.json()["error"]
    assert "Traceback" not in response.text
    assert "\n" not in response.json()["error"]


def test_predict_answers_what_the_package_answers(client):
    options = {
        "batch_size": 64,
        "precision": "amp",
        "dataset": "cifar10",
        "epochs": 3,
        "price_usd_per_hour": 0.5,
    }
    answer = ask(client, "/predict", PREDICT, **options)
    assert answer.status_code == 200, answer.text
    assert answer.json() == forerun.predict(MODEL, device="t4", **options).as_dict()


def test_several_devices_are_answered_as_the_package_answers_them(client):
    options = {"batch_size": 64, "dataset": "cifar10", "price_usd_per_hour": 0.5, "num_devices": 4}
    answer = ask(client, "/predict", PREDICT, **options)
    assert answer.status_code == 200, answer.text
    own = forerun.predict(MODEL, device="t4", **options)
    assert answer.json() == own.as_dict()
    assert answer.json()["num_devices"] == 4
    whole = ask(client, "/predict", PREDICT, **{**options, "device": "1x4xt4", "num_devices": None})
    assert whole.json()["step_time_s"] == answer.json()["step_time_s"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_devices": [1, 2, 8]},
        {
            "num_devices": [2, 4],
            "scaling": "both",
            "batch_size": 64,
            "strategy": "fsdp",
            "dataset": "cifar10",
        },
        {
            "device": "2x4xv100-sxm2-16gb",
            "inter": "ethernet-10g",
            "num_devices": [8],
            "sync_batch_norm": True,
        },
    ],
)
def test_scale_answers_what_the_package_answers(client, options):
    question = {**PREDICT, **options}
    answer = ask(client, "/scale", question)
    assert answer.status_code == 200, answer.text
    model = question.pop("model")
    assert answer.json() == forerun.scale(model, **question).as_dict()


def test_plan_answers_what_the_package_answers(client):
    answer = ask(client, "/plan", PLAN, dataset="cifar10", within=["cost<=1"], batch_sizes=None)
    assert answer.status_code == 200, answer.text
    own = forerun.plan(PLAN["models"], devices="t4,l4", dataset="cifar10", within="cost<=1", max_rejected=50)
    assert answer.json() == own.as_dict()


def test_forecasts_and_schedules_answer_what_the_package_answers(client, tmp_path):
    log = {"epoch": [*range(1, 9)], "val_accuracy": [0.31, 0.42, 0.5, 0.55, 0.58, 0.61, None, 0.64]}
    sibling = [0.3, 0.44, 0.53, 0.58, 0.61, 0.63, 0.65, 0.66, 0.67, 0.68]
    body = {"run": log, "target": "val_accuracy>=0.67", "epochs": 20, "schedule": "cosine"}
    for options in ({}, {"history": [sibling]}, {"model": MODEL, "devices": ["t4"], "dataset": "cifar10"}):
        answer = ask(client, "/forecast", body, **options)
        assert answer.status_code == 200, answer.text
        assert answer.json() == forerun.forecast(**body, **options).as_dict()
    file = tmp_path / "run"
    file.write_text(
        "\n".join(f"{a},{'' if b is None else b}" for a, b in [tuple(log), *zip(*log.values(), strict=True)])
    )
    own = forerun.forecast(file, **{name: value for name, value in body.items() if name != "run"})
    assert own.as_dict() == ask(client, "/forecast", body).json()
    jobs = [
        {"name": "a", "points": "1:100 2:190", "batch_size": 64, "steps": 9000, "script": "python train.py"},
        {"name": "b", "model": MODEL, "batch_size": 64, "dataset": "cifar10", "epochs": 3, "num_devices": 2},
    ]
    question = {
        "jobs": jobs,
        "cluster": "2x4xt4",
        "policies": ["foresight", "fifo"],
        "fair": 5,
        "round_s": 120,
    }
    answer = ask(client, "/schedule", {**question, "inter": "ethernet-25g"})
    assert answer.status_code == 200, answer.text
    own = json.loads(json.dumps(forerun.schedule(**question, inter="ethernet-25g").as_dict()))
    found = answer.json()
    for policy in found["policies"] + own["policies"]:
        del policy["metrics"]["scheduler_ms"]  # measured
    assert found == own


@pytest.mark.parametrize(
    ("path", "changes", "status", "words"),
    [
        ("/forecast", {"run": "/etc/passwd"}, 422, "run"),
        ("/forecast", {"run": [0.3, "x"]}, 422, "run"),
        ("/forecast", {"run": [0.3, 0.4]}, 422, "points"),
        (
            "/forecast",
            {"run": {"epoch": [1, 2], "loss": [1.0]}},
            400,
            "columns of one length, got epoch 2, loss 1",
        ),
        ("/forecast", {"history": ["/etc"]}, 422, "history"),
        ("/forecast", {"backtest_file": "x"}, 422, "unknown setting 'backtest_file'"),
        ("/forecast", {"batch_size": 8}, 400, "--batch-size: expected a model"),
        ("/forecast", {"model": "train.py:net", "devices": ["t4"]}, 400, "does not run"),
        ("/forecast", {"model": MODEL, "devices": ["here"]}, 400, "see /hardware"),
        ("/schedule", {"jobs": []}, 422, "jobs"),
        ("/schedule", {"jobs": [{**JOB, "table": "/etc/passwd"}]}, 400, "over HTTP none is read"),
        ("/schedule", {"jobs": [{**JOB, "model": "train.py:net"}]}, 400, "does not run"),
        ("/schedule", {"jobs": [{**JOB, "bach_size": 3}]}, 400, "unknown column 'bach_size'"),
        ("/schedule", {"cluster": "1x1xa.toml+2x4xt4"}, 400, "see /hardware"),
        ("/schedule", {"cluster": "4"}, 400, "a cluster must be"),
        ("/schedule", {"policies": ["best"]}, 400, "best"),
        ("/schedule", {"fair": 0.5}, 422, "fair"),
        ("/schedule", {"inter": "../link"}, 400, "expected a link of the catalogue"),
    ],
)
def test_a_wrong_forecast_or_schedule_is_told_what_was_wrong(client, path, changes, status, words):
    whole = (
        {"run": [0.3, 0.4, 0.5, 0.55, 0.57]} if path == "/forecast" else {"jobs": [JOB], "cluster": "2x4xt4"}
    )
    refused(ask(client, path, whole, **changes), status, words)


def test_a_plan_takes_the_precision_of_its_model(client):
    """That of a language model is bf16, not those of networks of images."""
    options = {"batch_sizes": [1], "sequence_length": 128, "dataset_size": 1000}
    answer = ask(client, "/plan", {"models": ["gpt2"], "devices": ["rtx-4090"], **options})
    assert answer.status_code == 200, answer.text
    own = forerun.plan("gpt2", devices="rtx-4090", max_rejected=50, **options)
    assert {each["precision"] for each in own.as_dict()["candidates"]} == {"bf16"}
    assert answer.json() == own.as_dict()


def test_the_lists_have_the_catalogue_the_families_and_the_datasets(client):
    devices = {device["name"] for device in client.get("/hardware").json()["devices"]}
    assert {"t4", "a100-sxm4-40gb", "cpu"} <= devices
    models = client.get("/models").json()
    assert "cnn" in {family["name"] for family in models["families"]}
    assert "torchvision:resnet50" in models["torchvision"]
    assert "cifar10" in {dataset["name"] for dataset in client.get("/datasets").json()["datasets"]}
    rates = {one["code"]: one for one in client.get("/currencies").json()["currencies"]}
    assert (rates["USD"]["usd"], rates["EUR"]["sign"]) == (1.0, "€")
    assert 0.5 < rates["EUR"]["usd"] < 2.0


@pytest.mark.parametrize(
    "model",
    [
        "train.py:make_model",
        "/etc/passwd.py:x",
        "hf:config.json",
        "onnx:model.onnx",
        "keras:model.keras",
        "keras:model.h5",
        "../models/net.py:make",
        "C:\\net.py:make",
    ],
)
def test_no_file_and_no_code_is_loaded_through_http(client, model):
    words = "is code, which this server does not run" if ".py:" in model else "names a file"
    refused(ask(client, "/predict", PREDICT, model=model), 400, words)
    refused(ask(client, "/plan", PLAN, models=[model]), 400, words)


def test_a_bare_name_is_that_of_a_library_as_on_the_command_line(client):
    asked, full = ({**PREDICT, "model": name} for name in ("efficientnet_b0", "torchvision:efficientnet_b0"))
    answers = [ask(client, "/predict", each).json()["step_time_s"] for each in (asked, full)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "device",
    ["mine.toml", "/etc/mine.TOML", "../x", "here", "1xhere", "2x1xHERE", "here x 2", "1×here", "cpu;rm"],
)
def test_no_device_of_a_file_or_of_this_machine_is_answered(client, device):
    status = ask(client, "/predict", PREDICT, device=device)
    assert status.status_code == 400
    assert "see /hardware" in status.json()["error"]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"device": "t44"}, 400, "t4"),
        ({"model": "cnn:depht=2"}, 400, "depth"),
        ({"model": "torchvision:resnet5"}, 400, "resnet50"),
        ({"model": "cnn:depth=5000"}, 400, "sizes above 4096 are not answered over HTTP"),
        ({"batch_size": 0}, 422, "batch_size"),
        ({"batch_size": 10**9}, 422, "batch_size"),
        ({"batch_size": "32"}, 422, "batch_size"),
        ({"batch_size": 2.5}, 422, "batch_size"),
        ({"precision": "fp12"}, 422, "precision"),
        ({"price_usd_per_hour": -1}, 422, "price_usd_per_hour"),
        ({"colour": "red"}, 422, "colour"),
        ({"dataset": "cifar10", "dataset_size": 5}, 400, "not both"),
        ({"dataset": "cifar"}, 400, "cifar10"),
        ({"optimizer": "sdg"}, 400, "sgd"),
        ({"image_size": 3}, 400, "give a larger image size"),
    ],
)
def test_a_wrong_question_is_told_what_was_wrong(client, changes, status, words):
    refused(ask(client, "/predict", PREDICT, **changes), status, words)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"within": ["time<=2"]}, 400, "the unit is missing"),
        ({"within": ["cost>=3", "cost<=2"]}, 400, "contradict"),
        ({"batch_sizes": []}, 422, "batch_sizes"),
        ({"devices": []}, 422, "devices"),
        ({"precisions": ["fp8"]}, 400, "NVIDIA T4 has no fp8"),
        ({"precisions": ["fp12"]}, 422, "expected 'fp32', 'tf32', "),
        ({"models": ["cnn:depth=1..60..1,base_filters=8..4096"]}, 400, "at most 64 combinations"),
        ({"batch_sizes": list(range(1, 1025)), "devices": ["t4"] * 24}, 400, "at most 20,000 candidates"),
        ({"price_usd_per_hour": {"t4": -1}}, 422, "price_usd_per_hour"),
        ({"co2_g_per_kwh": -1}, 422, "co2_g_per_kwh"),
        ({"prices_file": "/etc/passwd"}, 422, "prices_file"),
    ],
)
def test_a_wrong_plan_is_told_what_was_wrong(client, changes, status, words):
    refused(ask(client, "/plan", PLAN, **changes), status, words)


def test_a_budget_that_nobody_meets_is_an_answer(client):
    answer = ask(client, "/plan", PLAN, within=["time<=1ms"])
    assert answer.status_code == 200
    assert answer.json()["nearest_miss"]["broken"][0]["limit"] == "time<=1ms"


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"num_devices": []}, 422, "num_devices"),
        ({"num_devices": [0]}, 422, "num_devices"),
        ({"num_devices": [5000]}, 422, "num_devices"),
        ({"num_devices": 4}, 422, "num_devices"),
        ({"num_devices": list(range(1, 100))}, 422, "num_devices"),
        ({"num_devices": [3], "num_nodes": 2}, 400, "cannot be spread evenly over 2 nodes"),
        ({"num_devices": [1, 3], "scaling": "strong"}, 400, "cannot be shared by 3 devices"),
        ({"num_devices": [2], "device": "mi350x"}, 400, "link"),
        ({"num_devices": [8], "num_nodes": 2}, 400, "link"),
        ({"intra": "/etc/link.toml"}, 400, "expected a link of the catalogue"),
        ({"inter": "../link"}, 400, "expected a link of the catalogue"),
        ({"inter": "infiniband-hrd"}, 400, "infiniband-hdr"),
        ({"device": "99999999x99999999xt4"}, 400, "at most 100,000"),
        ({"bucket_mb": 0}, 422, "bucket_mb"),
        ({"all_reduce": "butterfly"}, 422, "all_reduce"),
        ({"phase": "inference"}, 400, "in training only"),
    ],
)
def test_a_wrong_question_of_several_devices_is_told_what_was_wrong(client, changes, status, words):
    refused(ask(client, "/scale", PREDICT, **changes), status, words)


def test_what_several_devices_cannot_do_is_said(client):
    refused(ask(client, "/predict", PREDICT, num_devices=2, phase="inference"), 400, "in training only")
    refused(ask(client, "/predict", PREDICT, num_devices=2, device="mi350x"), 400, "link")
    refused(ask(client, "/plan", PLAN, devices=["t4x1000000"]), 400, "at most 100,000")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"text"', '{"model": NaN}', "\x00"])
def test_what_is_no_question_is_refused(client, text):
    answer = client.post("/predict", content=text, headers={"content-type": "application/json"})
    refused(answer, 422, "")


def test_a_body_that_is_too_large_is_refused_before_it_is_read_whole(client):
    body = json.dumps({**PREDICT, "model": "x" * MAX_BODY_BYTES})
    answer = client.post("/predict", content=body, headers={"content-type": "application/json"})
    refused(answer, 413, "at most 65,536 bytes")


def test_other_paths_and_methods_are_refused_in_the_same_form(client):
    refused(client.get("/nothing"), 404, "Not Found")
    refused(client.get("/predict"), 405, "Method Not Allowed")
    refused(client.get("/static/../app.py"), 404, "Not Found")
    refused(client.get("/static/%2e%2e/app.py"), 404, "Not Found")


def test_the_page_may_load_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "://" not in page.text


def test_a_file_that_the_browser_has_is_not_sent_again(client):
    first = client.get("/static/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = client.get("/static/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_cheap_questions_are_answered_while_every_thread_is_busy():
    """What the event loop answers needs no thread: here none is left, and each computes."""
    app = make_app(limit_s=60.0)

    async def asked():
        released = threading.Event()
        limiter = anyio.to_thread.current_default_thread_limiter()
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as page,
            anyio.create_task_group() as group,
        ):
            for _ in range(int(limiter.total_tokens)):
                group.start_soon(anyio.to_thread.run_sync, released.wait)
            try:
                with anyio.fail_after(20):
                    paths = ("/", "/static/main.js", "/hardware", "/datasets", "/healthz", "/metrics")
                    return [(await page.get(path)).status_code for path in paths]
            finally:
                released.set()

    assert anyio.run(asked) == [200] * 6


def test_an_answer_that_other_programs_delay_is_waited_for_and_one_that_only_waits_is_not(monkeypatch):
    app_module = sys.modules[make_app.__module__]
    tracer = Tracer(1.0)

    async def waited(share, *, is_traced=False):
        """The answer of work of 0.7 s where the limit is 0.2 s, if this process has a share of a processor."""
        monkeypatch.setattr(app_module.time, "process_time", lambda: share * time.monotonic())
        desk = app_module._Desk(Answers(tracer), tracer, 0.1, None)
        work = desk.traced(time.sleep, 0.7) if is_traced else desk.in_time(asyncio.sleep(0.7))
        try:
            return await work
        finally:
            desk.close()

    asyncio.run(waited(0.2))
    asyncio.run(waited(0.0, is_traced=True))
    for share in (1.0, 0.0):
        with pytest.raises(TimeoutError):
            asyncio.run(waited(share))


def test_the_document_describes_every_question(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        "/predict",
        "/scale",
        "/plan",
        "/diagnose",
        "/forecast",
        "/schedule",
        "/captures",
        "/traces",
        "/trainjob",
        "/configs",
        "/hardware",
        "/models",
        "/datasets",
        "/currencies",
    }
    for path in paths.keys() - {"/hardware", "/models", "/datasets", "/currencies"}:
        assert {"200", "400", "408", "413", "422"} <= set(paths[path]["post"]["responses"])


def sent(client, content, kind="application/octet-stream", path="/captures"):
    return client.post(path, content=content, headers={"content-type": kind})


def test_a_capture_that_is_sent_answers_as_the_file_does(client):
    answer = sent(client, CAPTURE.read_bytes())
    assert answer.status_code == 200, answer.text
    name, settings = answer.json()["model"], answer.json()["settings"]
    assert answer.json()["title"] == "python train.py"
    assert (settings["batch_size"], settings["precision"], settings["accumulation"]) == (8, "amp", 2)
    own = forerun.predict(f"capture:{CAPTURE}", device="l4").as_dict()
    found = ask(client, "/predict", {"model": name, "device": "l4"})
    assert found.json() == {**own, "run": {**own["run"], "model": name}}
    bodies = {
        "/plan": {"models": [name], "devices": ["l4", "2xt4"], "batch_sizes": [8, 16], "precisions": ["amp"]},
        "/scale": {"model": name, "device": "l4", "num_devices": [1, 2]},
    }
    for path, body in bodies.items():
        found = client.post(path, json=body)
        assert found.status_code == 200, found.text
        assert name in found.text
        assert "forerun-of-" not in found.text  # the folder of this server
    refused(
        ask(client, "/predict", {"model": name, "device": "l4"}, optimizer="sgd"), 400, "keeps its optimizer"
    )


def test_what_is_no_capture_is_refused_and_not_kept(client):
    whole = CAPTURE.read_bytes()
    damaged = {b"": "no file of forerun capture", whole[:3000]: "no file of forerun capture"}
    damaged[whole[:5000] + b"zz" + whole[5002:]] = "is damaged"
    for content, words in damaged.items():
        answer = sent(client, content)
        refused(answer, 400, words)
        name = re.search(r"capture:[0-9a-f]{16}", answer.text)[0]
        refused(ask(client, "/predict", {"model": name, "device": "l4"}), 400, "send the file once more")
    refused(sent(client, b"0" * (MOST_CAPTURE_BYTES + 1)), 413, f"{MOST_CAPTURE_BYTES:,} bytes")
    # A form of another site can send plain text to this server, but no bytes.
    refused(sent(client, whole, "text/plain"), 415, "application/octet-stream")


def test_a_trace_that_is_sent_is_judged_alone_and_beside_a_prediction(client, tmp_path):
    content = write_trace(tmp_path, "NCCL over TCP", "gpt", 1)[0].read_bytes()
    answer = sent(client, content, path="/traces")
    assert answer.status_code == 200, answer.text
    alone, name = answer.json()["diagnosis"], answer.json()["trace"]
    assert (alone["source"], alone["predicted"]) == ("trace", None)
    assert alone["causes"][0]["cause"] == "slow or wrong link between devices"
    beside = ask(client, "/diagnose", {"model": "mnist-cnn", "device": "l4", "trace": [name]})
    assert beside.status_code == 200, beside.text
    assert beside.json()["predicted"] is not None
    assert beside.json()["measured"] == alone["measured"]


def test_what_is_no_trace_is_refused_and_not_kept(client):
    for content, words in {
        b"": "got",
        b'{"traceEvents": [{"ph"': "cut off or damaged",
        b"\x1f\x8b": "got",
    }.items():
        answer = sent(client, content, path="/traces")
        refused(answer, 400, words)
        assert "forerun-of-" not in answer.text  # the folder of this server
        name = re.search(r"trace:[0-9a-f]{16}", answer.text)[0]
        question = {"model": "mnist-cnn", "device": "l4", "trace": [name]}
        refused(ask(client, "/diagnose", question), 400, "send the file once more")
    too_large = sent(client, b"0" * (MOST_CAPTURE_BYTES + 1), path="/traces")
    refused(too_large, 413, f"{MOST_CAPTURE_BYTES:,} bytes")
    refused(sent(client, b"[]", "text/plain", path="/traces"), 415, "application/octet-stream")
    elsewhere = {"model": "mnist-cnn", "device": "l4", "trace": ["/etc/passwd"]}
    assert ask(client, "/diagnose", elsewhere).status_code == 422


@pytest.mark.parametrize("sharing", [{"strategy": "fsdp"}, {"parallel": "tp=2"}])
def test_a_layout_is_traced_by_a_child_before_it_is_answered(sharing):
    tracer = Tracer()
    answers = Answers(tracer)
    run = {"model": "gpt:depth=2", "precision": "bf16", "sequence_length": 128, **sharing}
    questions = {
        "predict": {**run, "device": "8xa100-sxm4-80gb"},
        "scale": {**run, "device": "a100-sxm4-80gb", "num_devices": [2, 4]},
        "plan": {
            **{name: run[name] for name in run if name not in ("model", "precision")},
            "models": ["gpt:depth=2"], "devices": ["8xa100-sxm4-80gb"], "batch_sizes": [2], "precisions": ["bf16"],
            "dataset_size": 1000,
        },
    }  # fmt: skip
    try:
        for kind, arguments in questions.items():
            for trace in answers.missing(kind, arguments):
                answers.trace(trace)
            assert answers.missing(kind, arguments) == []
            assert json.loads(answers.make(kind, arguments))
    finally:
        tracer.close()


def test_names_that_are_fine_are_left_alone():
    for name in (
        " timm:vit_base_patch16_224.augreg_in1k ",
        "cifar-resnet:56",
        "cnn",
        "gpt:depth=2|4",
        "keras:ResNet50",
        "keras:cnn:depth=3,base_filters=32",
        "keras:resnet50-v1.5",
    ):
        assert check_model_name(name) == name.strip()
    assert check_device_name("NVIDIA A100-SXM4-40GB") == "NVIDIA A100-SXM4-40GB"
    links = {"intra": " NVLink 3", "inter": "8xinfiniband-hdr"}
    check_links(links)
    assert links == {"intra": "NVLink 3", "inter": "8xinfiniband-hdr"}
    with pytest.raises(UsageError, match="sizes above 512"):
        check_model_name("cifar-resnet:4000")
    with pytest.raises(UsageError, match="sizes above 4096"):
        check_model_name("keras:mlp:width=5000")


def test_a_trace_that_takes_too_long_is_ended_and_the_next_one_answered():
    tracer = Tracer(limit_s=5.0)
    try:
        assert tracer.call(abs, -3) == 3  # the child is up
        tracer._limit_s = 0.3
        with pytest.raises(UsageError, match=r"the model took longer than 0\.3 s"):
            tracer.call(time.sleep, 30)
        tracer._limit_s = 20.0
        assert tracer.call(abs, -4) == 4
    finally:
        tracer.close()


def test_what_a_library_raises_in_the_child_comes_back_as_a_failure():
    tracer = Tracer(limit_s=20.0)
    try:
        with pytest.raises(FailureError, match="ValueError: invalid literal"):
            tracer.call(int, "x")
        with pytest.raises(FailureError, match="the process that traces models ended"):
            tracer.call(exit_at_once)
        with pytest.raises(FailureError, match="too little free memory to trace"):
            tracer.call(bytearray, 2**50)
        assert tracer.call(abs, -1) == 1
    finally:
        tracer.close()


def exit_at_once():
    import os

    os._exit(3)


def test_requests_for_other_names_are_refused(client):
    refused(
        client.get("/hardware", headers={"Host": "evil.example:8777"}),
        421,
        "does not answer for 'evil.example'",
    )
    for host in ("127.0.0.1:8777", "[::1]:8777", "LOCALHOST"):
        assert client.get("/healthz", headers={"Host": host}).json()["status"] == "ok"


def test_the_figures_count_what_was_asked(client):
    client.get("/datasets")
    text = client.get("/metrics").text
    assert 'forerun_requests_total{path="/datasets",status="200"}' in text
    assert "forerun_traces 0.0" in text
    assert "evil" not in text


def test_more_traces_than_may_wait_are_refused():
    async def asked():
        lane = Lane("traced", 1, 0)
        slow = asyncio.create_task(lane.run(time.sleep, 0.2))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match="too many questions wait to be traced") as caught:
            await lane.run(abs, -2)
        await slow
        await asyncio.sleep(0.05)
        return caught.value.status, await lane.run(abs, -3)

    assert asyncio.run(asked()) == (503, 3)


def test_the_first_list_of_models_is_made_once_however_many_wait_for_it(monkeypatch):
    made = []
    monkeypatch.setattr(Answers, "knows_models", property(lambda self: bool(made)))
    monkeypatch.setattr(Answers, "models", lambda self: {"asked": made.append(time.sleep(0.2))})

    async def asked():
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as pages:
            return await asyncio.gather(*(pages.get("/models") for _ in range(30)))

    assert {answer.status_code for answer in asyncio.run(asked())} == {200}
    assert len(made) == 2  # by a child, and read from what it left


def test_one_client_does_not_take_every_place():
    limit = ClientLimit(1)
    with limit.question("one"), limit.question("two"):
        with pytest.raises(BusyError, match="wait for one of them") as caught, limit.question("one"):
            pass
        assert caught.value.status == 429
    with limit.question("one"):
        pass
