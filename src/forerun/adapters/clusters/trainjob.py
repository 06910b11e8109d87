"""Kubeflow Trainer: GPUs, memory and launch arguments of a TrainJob before it is admitted.

The recommender of KEP-3328 as a mutating webhook of ``forerun serve``: it answers ``POST /trainjob`` with an
AdmissionReview, or the changed TrainJob where only that was sent, as a controller would. A TrainJob opts in by the
annotation ``trainer.kubeflow.org/autoconf-plugin: forerun``. Its question stands in

- annotations ``forerun/NAME`` with the settings of ``forerun predict``, and ``forerun/model``, ``forerun/on`` (the
  devices of a node, ``8xh100-sxm``), ``forerun/within`` (``time<=24h``), ``forerun/max-nodes``;
- else the model that its initializer fetches (``hf://``), its arguments name or its runtime of torchtune is for, the
  product that its nodes are selected by, and arguments and environment of torchtune, Transformers and plain scripts.

Source: kubeflow/trainer, docs/proposals/3328-automatic-resource-configuration, and its API ``v1alpha1``.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import pairwise
from math import ceil
from typing import Any

import forerun
from forerun.adapters import words_of
from forerun.adapters.clusters.kubernetes import CLOUD_DEVICES, GPU, PRODUCT_LABELS
from forerun.base.errors import ForerunError, UsageError
from forerun.base.units import format_bytes
from forerun.jobs.scheduling.live import inside, prefixed_fields
from forerun.question.devices import find_device
from forerun.question.devices.cluster import joined_spec, split_spec
from forerun.question.model import find_architecture
from forerun.question.options import RunOptions
from forerun.question.post_training import Algorithm
from forerun.question.settings import declared
from forerun.surface.cli.submit import broken_limits

PLUGIN = "trainer.kubeflow.org/autoconf-plugin"
"""Annotation that names the recommender of a TrainJob."""

_OTHER_DEVICES = re.compile(r"/(?!gpu$).*(gpu|mig-|tpu|gaudi|neuron)|^(?!nvidia\.com/).*/gpu$")
_OWN = {"model", "on", "within", "max-nodes", "recommended"}
_TORCHTUNE: dict[str, str] = words_of("trainer")["torchtune"]
_RUNTIMES: dict[str, tuple[str, dict[str, str]]] = words_of("trainer")["runtimes"]
"""Models of the runtimes that come with the trainer, and what their configurations set besides ``_TORCHTUNE``.

Sources: kubeflow/trainer, manifests/base/runtimes/torchtune; torchtune, recipes/configs, ``MODEL_full.yaml``.
"""

_MODEL_OF_ONE_NODE = re.compile(r"torchtune-(?!llama3\.3-70b)(llama3\.2-)?")
"""Runtimes whose jobs the trainer admits on one node alone, with QLoRA of Llama 3.2 on one device alone.

Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torchtune.go, ``validateTorchTune``.
"""

_ARGUMENTS: dict[str, str] = words_of("trainer")["arguments"]
"""Arguments of torchtune, Transformers, TRL and plain scripts, and the settings that they are."""

_LAUNCHED: dict[str, str] = words_of("trainer")["launched"]
"""Arguments of torchrun and accelerate that follow from the size of a job."""

_DEVICES_PER_NODE = 8
_MAX_NODES = 4
_PROCESS_BYTES = 2**30
"""Main memory of a training process without its model [bytes]; PyTorch and Transformers alone hold about half of it."""

Predict = Callable[[dict[str, Any]], dict[str, Any]]


def trainjob(document: Mapping[str, Any], predict: Predict | None = None) -> dict[str, Any]:
    """The answer to an AdmissionReview with a TrainJob, or to a TrainJob.

    A review is always allowed: where nothing can be recommended, a warning says why and the job stays as it is.

    Args:
        document: The review or the job, as JSON.
        predict: Answers a question of ``forerun predict`` as its JSON; ``forerun.predict`` unless given.

    Raises:
        UsageError: It is neither, or nothing can be recommended for a TrainJob.
    """
    ask = predict or (lambda question: forerun.predict(**question).as_dict())
    if document.get("kind") != "AdmissionReview":
        return _recommended(document, ask)
    job = inside(document, "request", "object")
    answer: dict[str, Any] = {"uid": inside(document, "request", "uid") or "", "allowed": True}
    if isinstance(job, Mapping) and (inside(job, "metadata", "annotations") or {}).get(PLUGIN) == "forerun":
        try:
            found = _recommended(job, ask)
        except ForerunError as error:
            # A refusal here would keep the job out of the cluster: it may start as it was written.
            answer["warnings"] = [f"forerun: {error}"]
        else:
            changes = [
                {"op": "add", "path": "/metadata/annotations", "value": found["metadata"]["annotations"]},
                {"op": "add", "path": "/spec/trainer", "value": found["spec"]["trainer"]},
            ]
            answer["patchType"] = "JSONPatch"
            answer["patch"] = base64.b64encode(json.dumps(changes).encode()).decode()
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}


def _recommended(job: Mapping[str, Any], predict: Predict) -> dict[str, Any]:
    if job.get("kind") != "TrainJob" or not isinstance(job.get("spec"), Mapping):
        raise UsageError(
            f"expected a TrainJob with a spec or an AdmissionReview of one, got {job.get('kind')}"
        )
    for part in ("command", "args", "env"):
        given = inside(job, "spec", "trainer", part) or []
        if not isinstance(given, list) or any(isinstance(one, Mapping) != (part == "env") for one in given):
            raise UsageError(f"expected {part} of the trainer as a list, got {given!r:.60}; correct it")
    told = prefixed_fields(inside(job, "metadata", "annotations"))
    nodes_of, per_node, device = _offered(job, told)
    question = _settings(job, told) | {"model": _model(job, told)}
    # Nobody knows the link between the nodes unless it is told, and the trainer refuses sizes that torchtune lacks.
    of_one_node = _MODEL_OF_ONE_NODE.match(str(inside(job, "spec", "runtimeRef", "name")))
    nodes_of = nodes_of if "inter" in question and not of_one_node else 1
    per_node = 1 if of_one_node and of_one_node[1] and question.get("quantize") else per_node
    for nodes, devices in _sizes(nodes_of, per_node):
        asked = question | {"device": joined_spec(nodes, devices, device)}
        if nodes * devices > 1 and "strategy" not in asked:
            asked["strategy"] = "fsdp"
        found = predict(asked)
        # Memory first: a size that does not surely fit would end after it has waited for its devices.
        if found["fits"] == "yes" and not any(broken_limits(found, told.get("within", ""))):
            return _changed(job, found, nodes, devices)
    limits = f" and keeps {told['within']}" if told.get("within") else ""
    more = "" if of_one_node else ", or, for several nodes, forerun/inter: ethernet-25g"
    raise UsageError(
        f"no size up to {nodes_of} x {per_node} {device} surely fits {question['model']}{limits}; lower "
        f"forerun/batch_size, add forerun/recompute or forerun/lora{more}"
    )


def _sizes(max_nodes: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Nodes and devices of each: powers of two of one node, the whole node, then powers of two of whole nodes."""
    yield from ((1, n) for n in sorted({1 << k for k in range(per_node.bit_length())} | {per_node}))
    yield from ((1 << k, per_node) for k in range(1, max_nodes.bit_length()) if 1 << k <= max_nodes)


def _offered(job: Mapping[str, Any], told: Mapping[str, str]) -> tuple[int, int, str]:
    """Most nodes, devices of a node, and their kind."""
    asked = inside(job, "spec", "trainer", "resourcesPerNode") or {}
    for name in (name for part in asked.values() if isinstance(part, Mapping) for name in part):
        if _OTHER_DEVICES.search(name):
            raise UsageError(f"a job is sized in whole {GPU}, and this one asks for {name}")
    patches = [inside(job, "spec", part) for part in ("runtimePatches", "podTemplateOverrides")]
    text = told.get("on") or next((name for key in PRODUCT_LABELS for name in _all_of(patches, key)), "")
    if not text:
        raise UsageError(
            "expected the devices of the nodes, got none; annotate forerun/on: 8xh100-sxm, or select nodes by "
            f"{PRODUCT_LABELS[0]}"
        )
    nodes, per_node, kind = split_spec(text)
    per_node = _DEVICES_PER_NODE if kind == text else per_node
    most = told.get("max-nodes", str(max(nodes, _MAX_NODES)))
    if not most.isdigit() or not int(most):
        raise UsageError(f"forerun/max-nodes must be a whole number from 1, got '{most}'")
    return int(most), per_node, find_device(CLOUD_DEVICES.get(kind, kind)).name


def _all_of(item: Any, key: str) -> Iterator[str]:
    """Values of a key anywhere inside a document, and the first of those that a node affinity wants of it."""
    if isinstance(item, Mapping):
        if item.get("key") == key and item.get("operator") == "In":
            yield from item.get("values", [])[:1]
        for name, value in item.items():
            if name == key and isinstance(value, str):
                yield value
            yield from _all_of(value, key)
    elif isinstance(item, list):
        for value in item:
            yield from _all_of(value, key)


def _model(job: Mapping[str, Any], told: Mapping[str, str]) -> str:
    if told.get("model"):
        return told["model"]
    uri = str(inside(job, "spec", "initializer", "model", "storageUri") or "")
    runtime = str(inside(job, "spec", "runtimeRef", "name") or "")
    argued = next((value for name, value in _words(job) if name in ("model_name_or_path", "model_name")), "")
    named = (
        uri.removeprefix("hf://")
        if uri.startswith("hf://")
        else argued or _RUNTIMES.get(runtime, ("", {}))[0]
    )
    # A model tuned to follow instructions has the layers of the one it was made from.
    for name in (named, re.sub(r"-(Instruct|Chat|it)\b.*$", "", named)):
        if name and find_architecture(name) is not None:
            return name
    raise UsageError(
        f"expected a model that forerun knows, got {named or 'none'}; annotate forerun/model, such as "
        "meta-llama/Llama-3.2-1B or torchvision:resnet50"
    )


def _settings(job: Mapping[str, Any], told: Mapping[str, str]) -> dict[str, Any]:
    """Settings of the run: those of its arguments, then those of its annotations."""
    known = declared(RunOptions)
    runtime = str(inside(job, "spec", "runtimeRef", "name") or "")
    given: dict[str, str] = {**_TORCHTUNE, **_RUNTIMES[runtime][1]} if runtime in _RUNTIMES else {}
    # Runtimes are called by their trainer, such as grpo-distributed.
    algorithm = runtime.partition("-")[0]
    if algorithm in list(Algorithm):
        given["algorithm"] = algorithm
    words = dict(_words(job))
    if (prompt := words.get("max_prompt_length", "")).isdigit():
        answer = words.get("max_completion_length", "")
        given["sequence_length"] = str(int(prompt) + (int(answer) if answer.isdigit() else 256))
    for name, value in words.items():
        # Torchtune says whose setting it is: tokenizer.max_seq_len.
        setting = _ARGUMENTS.get(name.rpartition(".")[2])
        if setting is not None and re.fullmatch(r"[\w.]+", value):
            given[setting] = value.lower()
        elif name in ("bf16", "fp16") and value.lower() in ("", "true"):
            given["precision"] = "amp-bf16" if name == "bf16" else "amp"
        elif name == "model.quantize_base" and value.lower() == "true":
            given["quantize"] = "nf4"
        elif name in ("gradient_checkpointing", "enable_activation_checkpointing"):
            given["recompute"] = "full" if value.lower() in ("", "true") else "none"
    # Epochs of samples that nobody counted say no length of the job; its size needs none.
    if not {"dataset", "dataset_size", "dataset-size"} & told.keys():
        given.pop("epochs", None)
    # Last, since an annotation is written for forerun and an argument for the trainer.
    given |= {name.replace("-", "_"): value for name, value in told.items() if name not in _OWN}
    found = {}
    for name, text in given.items():
        if name not in known or name in ("num_devices", "num_nodes"):
            raise UsageError(f"forerun/{name} is no setting of forerun predict; see forerun predict --help")
        found[name] = _value(name, known[name].kind, text)
    return found


def _value(name: str, kind: type, text: str) -> Any:
    if kind is bool:
        return text.lower() == "true"
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        raise UsageError(f"forerun/{name} must be a number, got '{text}'") from None


def _words(job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values of the environment, and among command and arguments: ``name=value``, ``--name value``."""
    trainer = inside(job, "spec", "trainer") or {}
    for one in trainer.get("env") or []:
        yield str(one.get("name", "")).lower(), str(one.get("value") or "")
    texts = [str(word) for word in [*(trainer.get("command") or []), *(trainer.get("args") or [])]]
    # The line of a shell holds all words of its command.
    words = [word for text in texts for word in (_SPACE.split(text) if _is_line(text) else [text])]
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if equals:
            yield name.lstrip("-").replace("-", "_"), value
        elif name.startswith("-"):
            yield name.lstrip("-").replace("-", "_"), "" if following.startswith("-") else following


_SPACE = re.compile(r"[\s\\]+")
_LAUNCH = re.compile(rf"(--({'|'.join(_LAUNCHED)})(?:=|\s+))([^\s$]\S*)")


def _is_line(text: str) -> bool:
    """True for a line of a shell that launches, not for a program or a value with spaces in it."""
    return bool(re.search(r"(^|[\s/])(torchrun|accelerate|deepspeed|tune|python3?)\s", text))


def _changed(job: Mapping[str, Any], found: Mapping[str, Any], nodes: int, devices: int) -> dict[str, Any]:
    """The TrainJob with its size, memory and launch arguments, and the reason as an annotation."""
    changed: dict[str, Any] = deepcopy(dict(job))
    trainer = changed["spec"].setdefault("trainer", {})
    trainer |= {"numNodes": nodes, "numProcPerNode": devices}
    resources = trainer.setdefault("resourcesPerNode", {})
    for part in ("requests", "limits"):
        resources.setdefault(part, {})[GPU] = devices
    if "memory" not in resources["requests"] and "memory" not in resources["limits"]:
        # Each process reads the weights into memory beside the model that takes them.
        weights = 4 * found["num_parameters"] * (0.5 if found["precision"] in ("bf16", "fp16") else 1.0)
        resources["requests"]["memory"] = f"{ceil(devices * (2 * weights + _PROCESS_BYTES) / 2**30)}Gi"
    sizes = {"devices": devices, "nodes": nodes, "all": nodes * devices}
    for part in ("command", "args"):
        if trainer.get(part):
            trainer[part] = _relaunched([str(word) for word in trainer[part]], sizes)
    peak, step = found["peak_memory_bytes"], found["step_time_s"]
    time = f"step {step['value']:.3g} s"
    if job_s := found.get("job_time_s"):
        time = f"job {job_s['low'] / 3600:.1f} to {job_s['high'] / 3600:.1f} h"
    metadata = changed.setdefault("metadata", {})
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        "forerun/recommended": (
            f"{joined_spec(nodes, devices, found['device'])}: {format_bytes(peak['value'])} (at most "
            f"{format_bytes(peak['high'])}) of {format_bytes(found['device_memory_bytes'])} a device, {time}"
        ),
    }
    return changed


def _relaunched(words: list[str], sizes: Mapping[str, int]) -> list[str]:
    """The same words with the numbers of nodes and processes that torchrun or accelerate is told."""
    changed = list(words)
    for i, word in enumerate(words):
        if _is_line(word):
            # What follows a variable of the trainer is right by itself.
            changed[i] = _LAUNCH.sub(lambda found: f"{found[1]}{sizes[_LAUNCHED[found[2]]]}", word)
            continue
        name, equals, value = word.partition("=")
        of = _LAUNCHED.get(name.lstrip("-")) if name.startswith("-") else None
        if of is not None and equals:
            changed[i] = word if value.startswith("$") else f"{name}={sizes[of]}"
        elif of is not None and i + 1 < len(words) and not words[i + 1].startswith("$"):
            changed[i + 1] = str(sizes[of])
    return changed
