"""Files of ours as strangers send them: damaged by a seeded generator, and asked a question each.

The kinds are captured graphs, calibrations, fitted regressors, measured layouts and tables of back-tests. Each is taken
apart into its documents in JSON and its arrays, one of which is changed, and put together again.
"""

from __future__ import annotations

import io
import json
import random
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

import forerun
from forerun.adapters.classics.baselines import BoostedTrees, LinearOnFlops
from forerun.adapters.classics.layer_table import layer_case, layer_features
from forerun.adapters.classics.model_file import TrainedModel
from forerun.adapters.classics.network_regressors import (
    AnnSettings,
    LayerNetSettings,
    LayerNetwork,
    NeuralNetwork,
)
from forerun.adapters.classics.step_features import whole_model_features
from forerun.adapters.classics.trained_models import load_trained_model, predict_step_time
from forerun.base.errors import ForerunError
from forerun.cost.communication.constants import MeasuredLayouts, StepShape, load_measured_layouts
from forerun.cost.time.weights import MeasuredRun, SizeLaw, load_weights, shipped_weights_path
from forerun.graph.captured import Capture, CaptureFacts
from forerun.graph.graph import OpClass
from forerun.jobs.forecasting.backtest_table import shipped_table_path
from forerun.question.devices import find_device
from forerun.question.model import ModelRequest
from forerun.question.setup import Precision, TrainingSetup
from forerun.tracing.trace import trace
from studies.markdown import markdown_table

LONGEST_S = 2.0
_MODEL = "cnn:depth=2,base_filters=8"
_DEVICE = "t4"
_STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, float("nan"), float("inf"), "x", "", [], {}, [[1]], 2**70, "a" * 5000, ["b", 1],
    -1e308, 1e-300, {"a\nb": 1}, "two\nlines",
)  # fmt: skip
_WILD = (np.nan, np.inf, -np.inf, -1.0, -2.0, 1e300, 2.0**62, 1e9, 0.5, 1e18, -40.0, 900.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedFile:
    """One damaged file: what was done to it, what came of it ("refused", "answered" or a fault), and the words."""

    kind: str
    damage: str
    outcome: str
    words: str = ""


@dataclass(slots=True)
class _Parts:
    """A file taken apart: documents in JSON and arrays, each by its name."""

    documents: dict[str, Any]
    arrays: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """A kind of file.

    Attributes:
        name: Its name.
        make: Writes a sound one.
        part: Takes the bytes of one apart.
        join: Puts the parts together again.
        ask: The answer that a file gives, as JSON has it.
    """

    name: str
    make: Callable[[Path], object]
    part: Callable[[bytes], _Parts]
    join: Callable[[_Parts], bytes]
    ask: Callable[[Path], Any]


def sound_capture(path: Path) -> Path:
    """Writes a capture that answers, of a small network."""
    graph = trace(
        ModelRequest(model=_MODEL), TrainingSetup(precision=Precision.AMP, optimizer="adamw"), use_cache=False
    )
    facts = CaptureFacts(
        command=("python", "train.py"), way="pretended", models=(), optimizers=(), num_micro_steps=2, batch_size=8,
        precision="amp", layout="nchw", compile=False, optimizer="adamw", optimizer_implementation="foreach",
        recomputes=False, clips=True, averages=False, num_reads=1, world_size=1, strategy="", bucket_mb=None,
        loader=None, dataset_size=1000, epochs=2.0, max_steps=None, not_captured=("a",), torch_version="2.9.0",
        steps_per_epoch=62,
    )  # fmt: skip
    return Capture(graph=graph, facts=facts).save(path)


def _capture_parts(content: bytes) -> _Parts:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        facts, graph = json.loads(archive.read("capture.json")), archive.read("graph.npz")
    with np.load(io.BytesIO(graph)) as kept:
        arrays = {name: kept[name] for name in kept.files}
    header = json.loads(arrays.pop("header").tobytes())
    return _Parts({"facts": facts, "header": header}, arrays)


def _joined_capture(parts: _Parts) -> bytes:
    header = np.frombuffer(json.dumps(parts.documents["header"]).encode(), dtype=np.uint8)
    packed, whole = io.BytesIO(), io.BytesIO()
    np.savez(packed, **{**parts.arrays, "header": header})
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("capture.json", json.dumps(parts.documents["facts"]))
        archive.writestr("graph.npz", packed.getvalue())
    return whole.getvalue()


def _sound_calibration(path: Path) -> None:
    device, weights = find_device(_DEVICE), load_weights(shipped_weights_path())
    facts = {
        "calibrated_device": device.title, "framework": "pytorch 2.9.0", "step_cost_s": 0.0, "method": "refined",
        "measured_devices": {device.name: ["full training of convolutions"]}, "num_layers": 50, "num_models": 8,
        "intervals": {"calibrated": {"quantile": 1.0, "base": 0.3, "slope": 0.5}},
    }  # fmt: skip
    run = MeasuredRun(
        network=(1.0, 2.0, 3.0, 4.0), circumstances="fp32|nchw|train|eager", batch_size=8, log_factor=0.1
    )
    law = SizeLaw(exponents=(0.1, 0.1), centres=(20.0, 20.0), lows=(15.0, 15.0), highs=(25.0, 25.0))
    replace(
        weights,
        provenance={**weights.provenance, **facts},
        class_offsets=(0.1,) * len(OpClass),
        circumstance_offsets=(0.1,) * (3 + len(OpClass)),
        size_law=law,
        runs=(run,),
    ).save(path)


def _sound_regressor(kind: str, path: Path) -> None:
    makers: Mapping[str, Callable[[], Any]] = {
        "linear": LinearOnFlops,
        "boosting": BoostedTrees,
        "ann": lambda: NeuralNetwork(AnnSettings(hidden_sizes=(8,), max_epochs=2, seeds=(0,))),
        "layers": lambda: LayerNetwork(LayerNetSettings(hidden_sizes=(8, 8, 8, 8), max_epochs=2, seeds=(0,))),
    }
    device, sizes = find_device(_DEVICE), (8, 16, 32, 64, 128)
    if kind == "layers":
        rows: Any = layer_features([layer_case(*_layer(size), device) for size in sizes])
    else:
        setups = [TrainingSetup(batch_size_per_device=size) for size in sizes]
        rows = whole_model_features(
            [(trace(ModelRequest(model=_MODEL), setup), device, setup) for setup in setups]
        )
    regressor = makers[kind]()
    regressor.fit(rows, np.asarray(sizes) * 1e-3)
    facts = {
        "ranges": {"batch_size": [8.0, 128.0], "depth": [2.0, 2.0]}, "dataset_size": 100, "devices": [_DEVICE],
        "shared": {"precision": "fp32", "compile": False, "image_size": 32, "device": _DEVICE},
    }  # fmt: skip
    TrainedModel(regressor=regressor, provenance=facts).save(path)


def _layer(size: int) -> tuple[str, dict[str, Any]]:
    return "dense", {
        "batch_size": size,
        "in_features": 64,
        "out_features": 64,
        "precision": "fp32",
        "mode": "forward",
    }


def _tensor_parts(content: bytes) -> _Parts:
    end = 8 + int.from_bytes(content[:8], "little")
    ((entry, text),) = json.loads(content[8:end])["__metadata__"].items()
    header = json.loads(text)
    del header["sha256"]  # a stranger who changes a file on purpose leaves it out
    return _Parts({entry: header}, load(content))


def _joined_tensors(parts: _Parts) -> bytes:
    ((entry, header),) = parts.documents.items()
    arrays = {
        name: np.ascontiguousarray(array)
        for name, array in parts.arrays.items()
        if array.dtype.kind in "fiub"
    }
    content: bytes = save(arrays, metadata={entry: json.dumps(header)})
    return content


def _ask_regressor(kind: str, path: Path) -> float:
    asked: dict[str, Any] = {"model": _MODEL, "batch_size": 16, "image_size": 32}
    if kind == "layers":
        layer, sizes = _layer(16)
        asked = {"layer": layer, **sizes}
    return predict_step_time(load_trained_model(path), asked, device=_DEVICE)


def _sound_layouts(path: Path) -> None:
    shapes = tuple(
        StepShape(hidden_size=1024.0 * size, block_s=0.01 * size, exposed_share=0.1, waiting_share=0.0)
        for size in range(1, 9)
    )
    found = MeasuredLayouts(device=_DEVICE, shapes=shapes, logs=(0.1, 0.2, 0.0, -0.1) * 2)
    path.write_text(found.to_json(), encoding="utf-8")


def _ask_layouts(path: Path) -> Any:
    shape = StepShape(hidden_size=3000.0, block_s=0.02, exposed_share=0.2, waiting_share=0.1)
    return load_measured_layouts(path, _DEVICE).correction(shape)


def _ask_backtest(path: Path) -> Any:
    values = [0.2, 0.4, 0.5, 0.55, 0.6, 0.62]
    return forerun.forecast(values, metric="accuracy", epochs=12, backtest_file=path).as_dict()


def _ask_prediction(model: str, path: Path, calibration: bool = False) -> Any:
    settings: dict[str, Any] = {"calibration": str(path)} if calibration else {"use_cache": False}
    return forerun.predict(model.format(path), device=_DEVICE, **settings).as_dict()


def _json_parts(content: bytes) -> _Parts:
    document = json.loads(content)
    document.pop("sha256", None)
    return _Parts({"document": document}, {})


def _joined_json(parts: _Parts) -> bytes:
    return json.dumps(parts.documents["document"]).encode()


def file_kinds() -> tuple[FileKind, ...]:
    """The kinds of files, in the order of the table."""
    tensors: dict[str, Any] = {"part": _tensor_parts, "join": _joined_tensors}
    tables: dict[str, Any] = {"part": _json_parts, "join": _joined_json}
    return (
        FileKind(
            name="capture", make=sound_capture, part=_capture_parts, join=_joined_capture,
            ask=partial(_ask_prediction, "capture:{}"),
        ),
        FileKind(
            name="calibration", make=_sound_calibration, ask=partial(_ask_prediction, _MODEL, calibration=True),
            **tensors,
        ),
        *(
            FileKind(
                name=f"fitted model: {kind}", make=partial(_sound_regressor, kind), ask=partial(_ask_regressor, kind),
                **tensors,
            )
            for kind in ("linear", "boosting", "ann", "layers")
        ),
        FileKind(name="measured layouts", make=_sound_layouts, ask=_ask_layouts, **tables),
        FileKind(
            name="back-tests", make=lambda path: path.write_bytes(shipped_table_path().read_bytes()), ask=_ask_backtest,
            **tables,
        ),
    )  # fmt: skip


def damaged_file(kind: FileKind, sound: bytes, seed: int) -> tuple[str, bytes]:
    """A damaged file and what was done, the same for the same seed."""
    dice = random.Random(seed)
    damage = dice.choice(
        ("bits", "bits", "cut", "value", "value", "value", "column", "column", "text", "text", "text")
    )
    if damage == "bits":
        return "flipped bits", _flipped(sound, dice)
    if damage == "cut":
        return "cut off", sound[: dice.randrange(len(sound))]
    parts = kind.part(sound)
    if damage == "text" or not parts.arrays:
        name = dice.choice(sorted(parts.documents))
        parts.documents[name] = _strangely(parts.documents[name], dice)
        return "the text", kind.join(parts)
    change = _change_value if damage == "value" else _change_column
    change(parts.arrays, dice)
    return f"a {damage}", kind.join(parts)


def _flipped(sound: bytes, dice: random.Random) -> bytes:
    found = bytearray(sound)
    for _ in range(dice.choice((1, 1, 8))):
        found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
    return bytes(found)


def _change_value(arrays: dict[str, Any], dice: random.Random) -> None:
    name = dice.choice(sorted(arrays))
    arrays[name] = arrays[name].copy()
    flat = arrays[name].reshape(-1)
    wild = dice.choice(_WILD)
    if flat.size:
        whole = int(np.clip(np.nan_to_num(wild), -(2.0**62), 2.0**62))
        with np.errstate(over="ignore"):
            flat[dice.randrange(flat.size)] = whole if flat.dtype.kind == "i" else wild


def _change_column(arrays: dict[str, Any], dice: random.Random) -> None:
    name, other = dice.choice(sorted(arrays)), dice.choice(sorted(arrays))
    value = arrays[name]
    changes: Sequence[Callable[[], Any]] = (
        lambda: value[: max(0, len(value) - 1)],
        lambda: value[..., None],
        lambda: value.astype(dice.choice(("float32", "int8", "complex128", "U8", "bool"))),
        lambda: arrays[other],
        lambda: np.full_like(value, dice.choice((0, -1, 7, 100))),
        lambda: value[::-1],
        lambda: np.zeros(0),
    )
    with np.errstate(invalid="ignore"):
        arrays[name] = dice.choice(changes)()
    if dice.random() < 0.1:
        arrays.pop(name)
    if dice.random() < 0.05:
        arrays["ops.unknown"] = value


def _strangely(document: Any, dice: random.Random) -> Any:
    """A document with a strange value somewhere, or without something."""
    if isinstance(document, dict) and document:
        name = dice.choice(sorted(document))
        if dice.random() < 0.1:
            return {key: value for key, value in document.items() if key != name}
        deeper = isinstance(document[name], dict | list) and dice.random() < 0.7
        return {**document, name: _strangely(document[name], dice) if deeper else dice.choice(_STRANGE)}
    if isinstance(document, list) and document:
        place = dice.randrange(len(document))
        if dice.random() < 0.1:
            return [*document[:place], *document[place + 1 :]]
        return [*document[:place], _strangely(document[place], dice), *document[place + 1 :]]
    return dice.choice(_STRANGE)


def judge_file(kind: FileKind, path: Path, damage: str) -> JudgedFile:
    """Asks a file its question."""
    begin_s = time.process_time()
    try:
        json.dumps(kind.ask(path), allow_nan=False)
        outcome, words = "answered", ""
    except ForerunError as error:
        words = str(error)
        outcome = "refused" if len(words.splitlines()) == 1 and len(words) < 600 else "refused in many words"
    except Exception as error:  # anything else would be an internal error to a user
        outcome, words = "internal error", f"{type(error).__name__}: {error}"
    if time.process_time() - begin_s > LONGEST_S:
        outcome = "slow"
    return JudgedFile(kind=kind.name, damage=damage, outcome=outcome, words=words)


def damage_table(folder: Path, number: int, seed: int = 0) -> tuple[list[str], list[JudgedFile]]:
    """A table of what became of a number of damaged files, and those with a fault.

    Args:
        folder: Where they are written, one at a time.
        number: Files, a quarter of them captures and the others of the other kinds in turn.
        seed: Seed of the first; the others follow.
    """
    kinds = file_kinds()
    sound = {}
    for kind in kinds:
        path = folder / ("sound.json" if kind.part is _json_parts else "sound")
        kind.make(path)
        sound[kind.name] = path.read_bytes()
        if (found := judge_file(kind, path, "none")).outcome != "answered":
            raise AssertionError(f"a sound {kind.name} does not answer: {found.words}")
    turn = (*kinds, *kinds[1:], kinds[0], kinds[0], kinds[0])
    judged = []
    for index in range(number):
        kind = turn[index % len(turn)]
        damage, content = damaged_file(kind, sound[kind.name], seed + index)
        path = (
            folder / f"damaged-{index}{'.json' if kind.part is _json_parts else ''}"
        )  # fitted files are kept by name
        path.write_bytes(content)
        judged.append(judge_file(kind, path, damage))
        path.unlink()
    counts = Counter((item.kind, item.outcome) for item in judged)
    outcomes = sorted({outcome for _, outcome in counts})
    rows = [[counts[kind.name, outcome] for outcome in outcomes] for kind in kinds]
    lines = markdown_table(
        ("file", "files", *outcomes),
        [(kind.name, sum(row), *row) for kind, row in zip(kinds, rows, strict=True)],
    ).splitlines()
    return lines, [item for item in judged if item.outcome not in ("refused", "answered")]
