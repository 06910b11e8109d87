"""Captured graphs as strangers send them: damaged by a seeded generator, each asked for a prediction."""

from __future__ import annotations

import io
import json
import random
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import forerun
from forerun.base.errors import ForerunError
from forerun.graph.captured import Capture, CaptureFacts
from forerun.question.model import ModelRequest
from forerun.question.setup import Precision, TrainingSetup
from forerun.tracing.trace import trace

__all__ = ["JudgedFile", "damage_table", "damaged_file", "judge_file", "sound_capture"]

LONGEST_S = 2.0
_STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, float("nan"), float("inf"), "x", "", [], {}, [[1]], 2**70, "a" * 5000, ["b", 1],
)  # fmt: skip
_WILD = (np.nan, np.inf, -np.inf, -1.0, -2.0, 1e300, 2.0**62, 1e9, 0.5, 1e18)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedFile:
    """One damaged file: what was done to it, what came of it ("refused", "answered" or a fault), and the words."""

    damage: str
    outcome: str
    words: str = ""


def sound_capture(path: Path) -> Path:
    """Writes a capture that answers, of a small network."""
    graph = trace(
        ModelRequest(model="cnn:depth=2,base_filters=8"),
        TrainingSetup(precision=Precision.AMP, optimizer="adamw"),
        use_cache=False,
    )
    facts = CaptureFacts(
        command=("python", "train.py"), way="pretended", models=(), optimizers=(), num_micro_steps=2, batch_size=8,
        precision="amp", layout="nchw", compile=False, optimizer="adamw", optimizer_implementation="foreach",
        recomputes=False, clips=True, averages=False, num_reads=1, world_size=1, strategy="", bucket_mb=None,
        loader=None, dataset_size=1000, epochs=2.0, max_steps=None, not_captured=("a",), torch_version="2.9.0",
        steps_per_epoch=62,
    )  # fmt: skip
    return Capture(graph=graph, facts=facts).save(path)


def damaged_file(sound: bytes, seed: int) -> tuple[str, bytes]:
    """A damaged file and what was done, the same for the same seed."""
    dice = random.Random(seed)
    how = dice.choice(
        (_flipped, _cut, _one_value, _one_value, _one_value, _other_column, _other_column, _header, _facts)
    )
    return how(sound, dice)


def _flipped(sound: bytes, dice: random.Random) -> tuple[str, bytes]:
    found = bytearray(sound)
    for _ in range(dice.choice((1, 1, 8))):
        found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
    return "flipped bits", bytes(found)


def _cut(sound: bytes, dice: random.Random) -> tuple[str, bytes]:
    return "cut off", sound[: dice.randrange(len(sound))]


def _with_arrays(sound: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(sound)) as archive:
        facts, graph = archive.read("capture.json"), archive.read("graph.npz")
    with np.load(io.BytesIO(graph)) as kept:
        arrays = {name: kept[name] for name in kept.files}
    change(arrays)
    packed: Any = io.BytesIO()
    np.savez(packed, **arrays)
    return _packed(facts, packed.getvalue())


def _packed(facts: bytes, graph: bytes) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("capture.json", facts)
        archive.writestr("graph.npz", graph)
    return whole.getvalue()


def _column(arrays: Mapping[str, Any], dice: random.Random) -> str:
    return dice.choice(sorted(name for name in arrays if name != "header"))


def _one_value(sound: bytes, dice: random.Random) -> tuple[str, bytes]:
    def change(arrays: dict[str, Any]) -> None:
        name = _column(arrays, dice)
        flat = arrays[name].reshape(-1)
        wild = dice.choice(_WILD)
        if flat.size:
            whole = int(np.clip(np.nan_to_num(wild), -(2.0**62), 2.0**62))
            flat[dice.randrange(flat.size)] = whole if flat.dtype.kind == "i" else wild

    return "one value", _with_arrays(sound, change)


def _other_column(sound: bytes, dice: random.Random) -> tuple[str, bytes]:
    def change(arrays: dict[str, Any]) -> None:
        name, other = _column(arrays, dice), _column(arrays, dice)
        value = arrays[name]
        arrays[name] = dice.choice(
            (
                lambda: value[: max(0, len(value) - 1)],
                lambda: value[..., None],
                lambda: value.astype(dice.choice(("float32", "int8", "complex128", "U8", "bool"))),
                lambda: arrays[other],
                lambda: np.full_like(value, dice.choice((0, -1, 7, 2**40))),
                lambda: value[::-1],
                lambda: np.zeros(0),
            )
        )()
        if dice.random() < 0.1:
            arrays.pop(name)
        if dice.random() < 0.05:
            arrays["ops.unknown"] = value

    return "another column", _with_arrays(sound, change)


def _strangely(document: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    name = dice.choice(sorted(document))
    if dice.random() < 0.15:
        return {key: value for key, value in document.items() if key != name}
    return {**document, name: dice.choice(_STRANGE)}


def _header(sound: bytes, dice: random.Random) -> tuple[str, bytes]:
    def change(arrays: dict[str, Any]) -> None:
        header = _strangely(json.loads(arrays["header"].tobytes()), dice)
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)

    return "the header", _with_arrays(sound, change)


def _facts(sound: bytes, dice: random.Random) -> tuple[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(sound)) as archive:
        document, graph = json.loads(archive.read("capture.json")), archive.read("graph.npz")
    document["facts"] = _strangely(document["facts"], dice)
    document = _strangely(document, dice) if dice.random() < 0.1 else document
    return "the facts", _packed(json.dumps(document).encode(), graph)


def judge_file(path: Path, damage: str) -> JudgedFile:
    """Asks for a prediction of a file."""
    begin_s = time.process_time()
    try:
        found = forerun.predict(f"capture:{path}", device="t4", use_cache=False)
        json.dumps(found.as_dict(), allow_nan=False)
        outcome, words = "answered", ""
    except ForerunError as error:
        words = str(error)
        outcome = "refused" if len(words.splitlines()) == 1 and len(words) < 600 else "refused in many words"
    except Exception as error:  # anything else would be an internal error to a user
        outcome, words = "internal error", f"{type(error).__name__}: {error}"
    if time.process_time() - begin_s > LONGEST_S:
        outcome = "slow"
    return JudgedFile(damage=damage, outcome=outcome, words=words)


def damage_table(folder: Path, number: int, seed: int = 0) -> tuple[list[str], list[JudgedFile]]:
    """A table of what became of a number of damaged files, and those with a fault.

    Args:
        folder: Where they are written, one at a time.
        number: Files.
        seed: Seed of the first; the others follow.
    """
    sound = sound_capture(folder / "sound.forerun").read_bytes()
    path = folder / "damaged.forerun"
    judged = []
    for index in range(number):
        damage, content = damaged_file(sound, seed + index)
        path.write_bytes(content)
        judged.append(judge_file(path, damage))
    counts = Counter((item.damage, item.outcome) for item in judged)
    outcomes = sorted({outcome for _, outcome in counts})
    lines = [f"| damage | files | {' | '.join(outcomes)} |", "|---" * (2 + len(outcomes)) + "|"]
    for damage in sorted({item.damage for item in judged}):
        row = [counts[damage, outcome] for outcome in outcomes]
        lines.append(f"| {damage} | {sum(row)} | {' | '.join(map(str, row))} |")
    return lines, [item for item in judged if item.outcome not in ("refused", "answered")]
