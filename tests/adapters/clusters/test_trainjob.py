"""TrainJobs of Kubeflow Trainer, in the form of its examples, and the sizes that they get."""

import base64
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from fastapi.testclient import TestClient

from forerun.adapters.clusters.trainjob import PLUGIN, trainjob
from forerun.base.errors import UsageError
from forerun.prediction.models import trace_model
from forerun.surface.web.app import make_app, make_server

MANIFEST = Path(__file__).parents[3] / "docs" / "how-to" / "trainjob-recommender.yaml"

# As kubeflow/trainer, examples/yaml/advanced/02-kueue-integration.yaml: a script of its own, suspended for Kueue.
OF_KUEUE = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: queued
  namespace: team
  labels: {kueue.x-k8s.io/queue-name: gpus}
  annotations: {trainer.kubeflow.org/autoconf-plugin: forerun, forerun/model: "cnn:depth=2", forerun/on: 8xt4}
spec:
  suspend: true
  runtimeRef: {apiGroup: trainer.kubeflow.org, kind: ClusterTrainingRuntime, name: torch-distributed}
  trainer:
    numNodes: 3
    image: registry.example.org/train:1
    command: [torchrun, --nnodes=3, --nproc_per_node, "4", train.py, --batch-size=64]
    resourcesPerNode:
      requests: {cpu: "2", memory: 4Gi}
      limits: {cpu: "4", memory: 8Gi}
"""

# As examples/yaml/02-runtime-patches.yaml and the runtime torchtune/llama3_2_1B: its question is what it has anyway.
OF_TORCHTUNE = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tune, annotations: {trainer.kubeflow.org/autoconf-plugin: forerun}}
spec:
  runtimeRef: {apiGroup: trainer.kubeflow.org, kind: ClusterTrainingRuntime, name: torchtune-llama3.2-1b}
  initializer:
    dataset: {storageUri: "hf://tatsu-lab/alpaca"}
    model: {storageUri: "hf://meta-llama/Llama-3.2-1B-Instruct"}
  trainer:
    args: [dtype=bf16, batch_size=4, epochs=1, dataset.packed=True, dataset.max_seq_len=2048, optimizer=adamw]
  runtimePatches:
    - manager: example.org/platform
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template: {spec: {template: {spec: {nodeSelector: {nvidia.com/gpu.product: NVIDIA-A100-SXM4-80GB}}}}}
"""


def asked_of(fits):
    """Answers of a predictor, and the questions that it was asked."""
    questions = []

    def predict(question):
        questions.append(question)
        return {
            "fits": fits(question["device"]),
            "device": "t4",
            "precision": "fp32",
            "num_parameters": 2**28,
            "peak_memory_bytes": {"value": 9e9, "low": 8e9, "high": 1e10},
            "device_memory_bytes": 16e9,
            "step_time_s": {"value": 0.5, "low": 0.4, "high": 0.6},
            "job_time_s": {"value": 7200.0, "low": 3600.0, "high": 9000.0},
        }

    return predict, questions


def changed(text, **annotations):
    job = yaml.safe_load(text)
    job["metadata"]["annotations"] |= {
        f"forerun/{name.replace('_', '-')}": v for name, v in annotations.items()
    }
    return job


def test_the_smallest_size_that_surely_fits_with_its_launch_arguments_and_memory():
    predict, questions = asked_of(lambda device: "yes" if device == "4xt4" else "likely")
    found = trainjob(changed(OF_KUEUE), predict)
    assert [q["device"] for q in questions] == ["t4", "2xt4", "4xt4"]
    assert questions[0] == {"model": "cnn:depth=2", "device": "t4", "batch_size": 64}
    assert questions[-1]["strategy"] == "fsdp"
    trainer = found["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (1, 4)
    assert trainer["command"] == [
        "torchrun",
        "--nnodes=1",
        "--nproc_per_node",
        "4",
        "train.py",
        "--batch-size=64",
    ]
    # What its owner asked for stays; the devices are added.
    assert trainer["resourcesPerNode"]["requests"] == {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": 4}
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 4
    assert found["spec"]["suspend"] is True
    assert found["metadata"]["annotations"]["forerun/recommended"].startswith("4xt4: ")
    del trainer["resourcesPerNode"]
    # Four processes with the weights twice, 2 GiB, and a GiB of their own.
    assert trainjob(found, predict)["spec"]["trainer"]["resourcesPerNode"]["requests"]["memory"] == "12Gi"


def test_a_job_with_the_words_of_its_runtime_needs_none_of_its_own():
    predict, questions = asked_of(lambda device: "yes")
    job = changed(OF_KUEUE)
    for part in ("command", "args"):
        job["spec"]["trainer"].pop(part, None)
    assert trainjob(job, predict)["spec"]["trainer"]["numProcPerNode"] == 1
    assert questions == [{"model": "cnn:depth=2", "device": "t4"}]


def test_whole_nodes_follow_a_full_node_and_a_limit_of_time_counts():
    predict, questions = asked_of(lambda device: "yes")
    slow = changed(OF_KUEUE, within="time<=2h", max_nodes="2", inter="ethernet-25g")
    with pytest.raises(
        UsageError, match=r"no size up to 2 x 8 t4 surely fits cnn:depth=2 and keeps time<=2h"
    ):
        trainjob(
            slow | {}, lambda q: predict(q) | {"job_time_s": {"value": 8000.0, "low": 1.0, "high": 9000.0}}
        )
    assert [q["device"] for q in questions] == ["t4", "2xt4", "4xt4", "8xt4", "2x8xt4"]


def test_a_job_of_torchtune_says_its_model_product_and_arguments_itself():
    predict, questions = asked_of(lambda device: "yes")
    trainjob(changed(OF_TORCHTUNE), predict)
    assert questions == [
        {
            "model": "meta-llama/Llama-3.2-1B-Instruct",
            "device": "a100-sxm4-80gb",
            "batch_size": 4,
            "precision": "bf16",
            "optimizer": "adamw",
            "sequence_length": 2048,
            # Of the configuration that its runtime starts, llama3_2/1B_full.
            "accumulation": 4,
        }
    ]


def test_sizes_of_torchtune_are_those_that_the_trainer_admits():
    predict, questions = asked_of(lambda device: "likely")
    job = changed(OF_TORCHTUNE, inter="ethernet-25g")
    with pytest.raises(UsageError, match=r"no size up to 1 x 8 a100.* or forerun/lora$"):
        trainjob(job, predict)
    job["spec"]["trainer"]["args"] += ["model.quantize_base=True", "model.lora_attn_modules=[q_proj]"]
    questions.clear()
    with pytest.raises(UsageError, match="no size up to 1 x 1 a100"):
        trainjob(job, predict)
    assert [question["device"] for question in questions] == ["a100-sxm4-80gb"]


def review(job):
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "7d0", "operation": "CREATE", "object": job},
    }


def test_a_review_is_answered_with_a_patch_or_a_warning_and_always_allowed():
    predict, _ = asked_of(lambda device: "yes")
    found = trainjob(review(changed(OF_KUEUE)), predict)["response"]
    assert (found["uid"], found["allowed"], found["patchType"]) == ("7d0", True, "JSONPatch")
    patch = {one["path"]: one["value"] for one in json.loads(base64.b64decode(found["patch"]))}
    assert patch["/spec/trainer"]["numProcPerNode"] == 1
    assert patch["/metadata/annotations"][PLUGIN] == "forerun"
    lost = trainjob(review(changed(OF_KUEUE, model="nobody/knows", on="t4")), _refusing)["response"]
    assert (lost["allowed"], "patch" in lost) == (True, False)
    assert lost["warnings"] == ["forerun: no such model"]
    for other in ({"metadata": {"annotations": {PLUGIN: "someone-else"}}}, {"metadata": {}}):
        assert trainjob(review(changed(OF_KUEUE) | other), predict)["response"] == {
            "uid": "7d0",
            "allowed": True,
        }


def _refusing(question):
    raise UsageError("no such model")


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        ({"on": ""}, "expected the devices of the nodes, got none"),
        ({"model": ""}, "expected a model that forerun knows, got none; annotate forerun/model"),
        ({"max_nodes": "many"}, "forerun/max-nodes must be a whole number"),
        ({"batch_size": "large"}, "forerun/batch_size must be a number, got 'large'"),
        ({"batchsize": "4"}, "forerun/batchsize is no setting of forerun predict"),
        ({"on": "8xh1000"}, "expected a device of the catalogue.* got 'h1000'"),
    ],
)
def test_what_cannot_be_meant(annotations, message):
    with pytest.raises(UsageError, match=message):
        trainjob(changed(OF_KUEUE, **annotations), asked_of(lambda device: "yes")[0])


def test_no_trainjob_is_refused():
    with pytest.raises(UsageError, match=r"expected a TrainJob with a spec .* got Job"):
        trainjob({"kind": "Job"})
    job = changed(OF_KUEUE)
    for part in ({"command": "python x.py"}, {"args": [{}]}, {"env": {"A": "b"}}):
        with pytest.raises(UsageError, match=f"expected {next(iter(part))} of the trainer as a list, got "):
            trainjob(job | {"spec": job["spec"] | {"trainer": job["spec"]["trainer"] | part}})


def test_steps_of_several_passes_and_recomputation_are_those_of_the_arguments():
    predict, questions = asked_of(lambda device: "yes")
    job = changed(OF_KUEUE)
    words = ["--gradient_accumulation_steps=8", "--gradient-checkpointing", "--max_length=512"]
    trainjob(job | {"spec": job["spec"] | {"trainer": job["spec"]["trainer"] | {"args": words}}}, predict)
    told = {"accumulation": 8, "recompute": "full", "sequence_length": 512}
    assert questions == [{"model": "cnn:depth=2", "device": "t4", "batch_size": 64, **told}]


def test_the_server_sizes_a_job_within_five_seconds(monkeypatch):
    # A busy machine may take longer by the clock; what is asserted is time of a processor.
    monkeypatch.setattr("forerun.surface.web.app._ADMISSION_S", 600.0)
    with TestClient(make_app(), base_url="http://localhost") as client:
        job = changed(OF_KUEUE)
        client.post("/trainjob", json=job)  # loads what every later question uses
        begin_s = time.process_time()
        answer = client.post("/trainjob", json=review(job))
        assert time.process_time() - begin_s < 5
        assert answer.status_code == 200
        assert answer.json()["response"]["patchType"] == "JSONPatch"
        refused = client.post("/trainjob", json=changed(OF_KUEUE, model="train.py:net"))
        assert (refused.status_code, "code" in refused.json()["error"]) == (400, True), refused.json()
        # A model whose trace takes longer is answered in time as well, and the trace goes on.
        monkeypatch.setattr("forerun.surface.web.app._ADMISSION_S", 0.0)
        late = client.post("/trainjob", json=review(changed(OF_KUEUE, batch_size="3"))).json()["response"]
        assert late["warnings"] == ["forerun: cnn:depth=2 is being traced; create the job again in a minute"]


def test_a_warm_server_has_its_libraries_before_it_listens(monkeypatch):
    calls = []
    monkeypatch.setattr("forerun.surface.web.load.Tracer.call", lambda self, *asked: calls.append(asked))
    with TestClient(make_app(is_warm=True), base_url="http://localhost"):
        assert [asked[0] for asked in calls] == [trace_model]


def test_the_api_server_is_answered_over_https(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    made += ["-addext", "subjectAltName=DNS:localhost", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(made, check=True, capture_output=True, timeout=300)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = make_server(make_app(), debug=False, tls=(certificate, key))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            address = f"https://localhost:{listener.getsockname()[1]}/trainjob"
            body = json.dumps(review({"metadata": {}})).encode()
            asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
            trusted = ssl.create_default_context(cafile=certificate)
            with urllib.request.urlopen(asked, timeout=300, context=trusted) as answer:
                assert json.load(answer)["response"] == {"uid": "7d0", "allowed": True}
        finally:
            server.should_exit = True
            thread.join(timeout=300)
    with pytest.raises(UsageError, match=r"--tls .*give files of a certificate and its key"):
        make_server(make_app(), debug=False, tls=(tmp_path / "none", key))


def test_the_manifest_reaches_the_route_within_its_time():
    parts = {part["kind"]: part for part in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}
    (webhook,) = parts["MutatingWebhookConfiguration"]["webhooks"]
    service, (container,) = (
        webhook["clientConfig"]["service"],
        parts["Deployment"]["spec"]["template"]["spec"]["containers"],
    )
    assert (service["path"], webhook["timeoutSeconds"], webhook["failurePolicy"]) == (
        "/trainjob",
        5,
        "Ignore",
    )
    assert f"{service['name']}.{service['namespace']}.svc" in container["args"]
    assert (
        parts["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"] == 8777
    )


def first_question(job):
    """The first question about a TrainJob, and the job as it comes back where one device is enough."""
    asked = []
    changed = trainjob(
        job, lambda question: asked.append(question) or {**ANSWER, "device": question["device"]}
    )
    return asked[0], changed["spec"]["trainer"]


ANSWER = {
    "fits": "yes", "num_parameters": 10**9, "precision": "bf16", "device_memory_bytes": 8e10,
    "peak_memory_bytes": {"value": 1e10, "high": 2e10}, "step_time_s": {"value": 1.0},
}  # fmt: skip


def test_the_environment_and_the_line_of_a_shell_are_read_and_sized():
    # Fields of kubeflow/trainer's examples of TRL: the trainer is called by its runtime, its settings are variables.
    env = {
        "MAX_PROMPT_LENGTH": 512,
        "MAX_COMPLETION_LENGTH": 256,
        "PER_DEVICE_TRAIN_BATCH_SIZE": 2,
        "NUM_TRAIN_EPOCHS": 1,
    }
    trainer = {"env": [{"name": name, "value": str(value)} for name, value in env.items()]}
    job = {
        "kind": "TrainJob",
        "metadata": {"annotations": {"forerun/on": "h100-sxm"}},
        "spec": {
            "runtimeRef": {"name": "grpo-distributed"},
            "initializer": {"model": {"storageUri": "hf://Qwen/Qwen2.5-0.5B-Instruct"}},
            "trainer": trainer,
        },
    }
    asked, _ = first_question(job)
    assert asked == {
        "model": "Qwen/Qwen2.5-0.5B-Instruct", "device": "h100-sxm", "algorithm": "grpo", "sequence_length": 768,
        "new_tokens": 256, "batch_size": 2,
    }  # fmt: skip
    line = "pip install trl\ntorchrun \\\n --nnodes=10 --nproc_per_node 8 --node-rank=$RANK sft.py --model_name gpt2"
    job["spec"] |= {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"command": ["bash", "-c", line]}}
    del job["spec"]["initializer"]
    asked, changed = first_question(job)
    assert asked["model"] == "gpt2"
    assert changed["command"][2] == line.replace("=10", "=1").replace("node 8", "node 1")
    job["spec"]["trainer"] = {
        "args": ["--nnodes=$(PET_NNODES)", "--nproc_per_node", "${N}", "--model_name=gpt2"]
    }
    assert first_question(job)[1]["args"] == job["spec"]["trainer"]["args"]


def test_devices_are_those_that_the_pods_select_and_of_no_other_maker():
    job = {"kind": "TrainJob", "metadata": {}, "spec": {"runtimeRef": {"name": "torchtune-llama3.2-1b"}}}
    wanted = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-L40S"]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
    places = {
        "l40s": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}},
        "h100-sxm": {"nodeSelector": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}},
    }
    for device, spec in places.items():
        asked, _ = first_question({**job, "spec": {**job["spec"], "podTemplateOverrides": [{"spec": spec}]}})
        assert asked["device"] == device
    # The API server refuses a request above the job's own limit.
    job["metadata"]["annotations"] = {"forerun/on": "l4"}
    job["spec"]["trainer"] = {"resourcesPerNode": {"limits": {"memory": "8Gi"}}}
    assert first_question(job)[1]["resourcesPerNode"]["requests"] == {"nvidia.com/gpu": 1}
    for name in ("amd.com/gpu", "nvidia.com/mig-1g.5gb", "google.com/tpu", "nvidia.com/gpumem"):
        job["spec"]["trainer"] = {"resourcesPerNode": {"limits": {name: 1}}}
        with pytest.raises(UsageError, match=f"whole nvidia.com/gpu, and this one asks for {name}"):
            trainjob(job)
