"""Losses and metrics in the text that training scripts print.

A line is read as pairs of a name and a number, or as one object of JSON or Python:

    step:125/1390 val_loss:5.9012 train_time:22981ms                    modded-nanogpt
    step 1000: train loss 4.1, val loss 4.2                             nanoGPT
    s:250 tel:6.1557                                                    llm.c (tel and trl: test and train loss)
    250 val 5.9650                                                      build-nanogpt
    iteration  100/ 5000 | lm loss: 2.3E+00 | learning rate: 1.5E-04    Megatron-LM
    step: 10  loss:  7.8  memory: 47.65GiB                              torchtitan
    Epoch: [3][100/5005]  Loss 1.2e+00 (1.3e+00)                        PyTorch's examples, then  * Acc@1 58.1
    {'loss': 2.5, 'learning_rate': 2e-05, 'epoch': 0.1}                 Trainer; fairseq behind 'date | train |'
     30%|###       | 300/1000 [01:00<02:20, loss=2.3]                   tqdm, whose total is the length in steps
    epoch  train_loss  valid_loss  time                        fastai: a header, and rows of its numbers
    Epoch(val) [1][625/625]  coco/bbox_mAP: 0.31                OpenMMLab
    Ep. 1 : Up. 100 : Sen. 7,000 : Cost 9.8                     Marian
    eta: 1 day, 2:10:00  iter: 19  total_loss: 1.2  time: 0.6           detectron2: the length is iter + eta / time
    Epoch GPU_mem box_loss; 1/25 0.7G 1.22; Class Images mAP50; all 15 0.8     YOLO: two headers and their rows
    E    #       LOSS NER  SCORE                                        spaCy: a header, and rows of its numbers
    | Epoch | Train loss | Val accuracy |; |---|---|---|; | **4** | 0.084 | 98.0% |        Markdown, also a model card
    [0]  validation_0-logloss:0.61  validation_1-logloss:0.65           XGBoost, whose first of two sets is for training
    | rollout/ | |; | ep_rew_mean | -159 |; | total_timesteps | 16384 |        Stable-Baselines3: a box is a row

One name is the place, a step or an epoch, with the length of the run behind it or in a line of settings
("train_iters ... 5000"). A line without a place belongs to the last one. Lines that begin with date and time say how
long the run has taken. Rows at step 0 say what an untrained model does, and are left out.
"""

from __future__ import annotations

import ast
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forerun.base.errors import RecordError
from forerun.base.tables import encoding_of
from forerun.jobs.forecasting.log_files import LogColumns, bytes_of, columns_of_rows

TEXT_SUFFIXES = (".log", ".txt", ".out")
MARKDOWN = ".md"
"""Read where a run is named, not where runs are looked for: most notes beside logs are none."""

_NUMBER = r"[-+]?(?:\d+(?:,\d{3})+(?![\d,])|\d+)?\.?\d*(?:[eE][-+]?\d+)?"
_PAIR = re.compile(
    rf"(?<![\w@/.+-])(?P<name>[A-Za-z@][\w@/.+()-]*(?: [A-Za-z(][\w@/.+()-]*){{0,5}})(?:\s*[:=][\s\[]*|\s[\s\[]*)"
    rf"(?P<value>(?=[-+]?\.?\d){_NUMBER}|nan\b|inf\b)(?:\s*/\s*(?P<total>\d+))?(?P<unit>ms\b)?"
)
_PLAIN = re.compile(r"(?P<step>\d+) (?P<name>val|train|hella) (?P<value>[-+.\deE]+|nan)\s*")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_STEPS, _EPOCHS = ("step", "s", "iter", "iteration", "it", "up", "num_updates"), ("epoch", "ep")
_METRIC = re.compile(
    r"loss|acc|_rew|reward|ppl|perplexity|bleu|top-?\d|f1|auc|map|iou|iu$|dice|score|hella|error|mse|mae|bpb|"
    r"rouge|mrr|hits|exact_match|correlation|precision|recall|^[wc]er$|^cost$|^(val|train|t[er]l)$"
)
_NO_METRIC = re.compile(r"scale|best|time|rate|runtime|per_second|num_|/s$")
_RATES = ("lr", "learning_rate", "train_lr")
_NAMES = {"tel": "val_loss", "trl": "train_loss", "val": "val_loss", "train": "train_loss", "eval": "hella"}
_VALIDATION = re.compile(
    r"^(val|eval|test)|[^a-z](val|valid|validation|eval|test)([^a-z]|$)|^\W*\*", re.IGNORECASE
)
_SPLIT_BEHIND = re.compile(r"^(\w+?)[/_](train|val|valid|validation|eval|test)$")
_PART = re.compile(r"(?=\[(?:train|val|valid|eval|test)\])", re.IGNORECASE)
_PLACE_FIRST = re.compile(r"\b(\d+)[ _]?(epoch) results")
_ROUND = re.compile(r"^\s*\[(\d+)\]\s+(?=[\w-]+:)")
_BOX = re.compile(r"(?:^\|[^|\n]*\|[^|\n]*\|[ \t]*$\n?)+", re.MULTILINE)
_YOLO_HEADER, _YOLO_ROW = (
    re.compile(r"^\s*(Epoch\s+GPU_mem|Class\s+Images)\s"),
    re.compile(r"^\s*((\d+)/(\d+)|all)\s"),
)
_YOLO_END = "epochs completed in"
_WORD, _CELL = re.compile(r"[A-Za-z_]\w*"), re.compile(r"[-+]?\.?\d[\d.e+-]*|nan", re.IGNORECASE)
# 98.0% or 3.06 with a tick, not 49 min
_MARKED_CELL = re.compile(rf"({_CELL.pattern})\s*(?:%|\W*$)", re.IGNORECASE)
# 0,129 or 4,5418 in a table: its commas are points, not those of 1,000
_COMMA, _DECIMAL = re.compile(r"(?<=\d),(?=\d)"), re.compile(r"\|\s*(0,\d+|\d+,(\d\d?|\d{4,}))\s*\|")
_LENGTHS = {
    "step": re.compile(
        r"\b(?:max_steps|max_iters?|MAX_ITER|train_iters|total[_ ]steps|total_iters|max_update|num_train_steps)"
        r"\W+(\d+)\b"
    ),
    "epoch": re.compile(
        r"\b(?:num_train_epochs|(?:max_|num_|total_)?epochs|max_epoch)['\"]?\s*[=:]\s*(\d+)\b"
    ),
}
_BAR = re.compile(r"^\s*\d+%\|[^|]*\|\s*(\d+)/(\d+) \[")
_ETA = re.compile(
    r"\beta: (?:(\d+) days?, )?(\d+):(\d\d):(\d\d)\s+iter: (\d+)\s.{0,600}?(?<!_)time: ([\d.]+)"
)
_CLOCK = re.compile(r"^\W*(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)")
_WHOLE = 0.02
_HEAD_CHARACTERS = 1_000_000
_FEWEST_LINES = 2


def is_text_log(file: Path) -> bool:
    """True if a text file has lines with a place and a metric."""
    if file.suffix not in TEXT_SUFFIXES:
        return False
    try:
        with file.open(encoding=encoding_of(file), errors="replace") as opened:
            head = opened.read(_HEAD_CHARACTERS)
    except OSError:
        return False
    return len(_Reading(head).rows) >= _FEWEST_LINES


def read_text_log(file: Path) -> LogColumns:
    """The metrics in the printed log of a script.

    Raises:
        RecordError: The file cannot be read, or has no such line.
    """
    found = _Reading(bytes_of(file).decode(encoding_of(file), errors="replace"))
    if not found.rows:
        raise RecordError(
            f"{file}: expected lines such as 'step 100/5000: val loss 4.2' or 'epoch 3 | val_acc: 0.9', "
            "got none; write the curve as a CSV with the columns step and val_loss"
        )
    columns = columns_of_rows(found.rows)
    if any(name.startswith("validation_1-") for name in columns):
        columns = {name.replace("validation_0-", "train_"): column for name, column in columns.items()}
    unit, lengths = "epoch" if "epoch" in columns else "step", found.guesses | found.lengths
    return LogColumns(columns=columns, planned_end=lengths.get(unit), planned_unit=unit)


class _Reading:
    """Rows of a text, and lengths of the run by their unit: those that it names, and those that bars and times tell."""

    def __init__(self, text: str) -> None:
        self.rows: list[dict[str, Any]] = []
        self.lengths: dict[str, float] = {}
        self.guesses: dict[str, float] = {}
        self._place: dict[str, float] = {}
        self._bar = (0.0, 0.0)
        self._comma = "." if _DECIMAL.search(text) else ""
        self._header: list[str] = []
        self._yolo: list[str] = []
        self._first = 1
        self._from_zero = False
        for line in _BOX.sub(_line_of_box, _COLOURS.sub("", text)).splitlines():
            self._read(line)

    def _read(self, line: str) -> None:
        for unit, pattern in _LENGTHS.items():
            if match := pattern.search(line):
                self.lengths.setdefault(unit, float(match[1]))
        if (bar := _BAR.match(line)) and float(bar[2]) >= self._bar[1]:  # those of evaluations are shorter
            self._bar = float(bar[1]), float(bar[2])
            self.guesses["step"] = self._bar[1]
        if eta := _ETA.search(line):
            days, hours, minutes, seconds, step, time_s = (float(part or 0) for part in eta.groups())
            left_s = ((24 * days + hours) * 60 + minutes) * 60 + seconds
            self.guesses["step"] = float(f"{step + 1 + left_s / max(time_s, 1e-9):.3g}")
        place: dict[str, float] = {}
        found: dict[str, float] = {}
        if clock := _CLOCK.match(line):
            found["elapsed_s"] = _seconds(clock[1])
        if first := _PLACE_FIRST.search(line):
            place[first[2]] = float(first[1])
        if boosted := _ROUND.match(line):
            self._from_zero = self._from_zero or boosted[1] == "0"
            place["step"] = float(boosted[1]) + self._from_zero
        for part in _PART.split(line):  # ESPnet has both sets in a line: [train] loss=..., [valid] loss=...
            numbers = self._numbers(part)
            # Keras has both sets in a line, and names those of validation.
            says_which = any(words.lower().startswith(("val_", "test ")) for words, _ in numbers)
            of_validation = bool(_VALIDATION.search(part)) and not says_which
            for words, value in numbers:
                name = re.sub(r"\(.*?\)|(?: no| num| number)?\.?$", "", words.strip().lower())
                name = name.removesuffix(" value").removesuffix(" is").replace(" ", "_")
                if unit := _unit(name):
                    place[unit] = value
                elif name in _RATES:
                    found["lr"] = value
                elif name == "train_time_ms":
                    found["elapsed_s"] = value / 1000
                elif name == "time/time_elapsed":
                    found["elapsed_s"] = value
                elif _METRIC.search(name) and not _NO_METRIC.search(name):
                    name = _SPLIT_BEHIND.sub(r"\2_\1", _NAMES.get(name, name))  # loss/val is val_loss
                    name = re.sub("^test", "val", name)
                    is_named = name.startswith(("val", "eval", "train", "hella"))
                    found[name if is_named or not of_validation else f"val_{name}"] = value
        if bar and not place:
            place["step"] = self._bar[0]
        elif self._bar[0] and "step" not in place and place.get("epoch"):
            end = place["epoch"] * self._bar[1] / self._bar[0]
            self.guesses["epoch"] = round(end) if abs(end - round(end)) < _WHOLE * end else end
        self._place = place or self._place
        has_metric = any(name not in ("lr", "elapsed_s") for name in found)
        if has_metric and self._place and self._place.get("step") != 0:
            self.rows.append({**self._place, **found})

    def _numbers(self, line: str) -> list[tuple[str, float]]:
        if plain := _PLAIN.fullmatch(line):
            return [("step", float(plain["step"])), (plain["name"], float(plain["value"]))]
        if "{" in line:
            return _object_of(line)
        if _YOLO_HEADER.match(line) or _YOLO_END in line:
            self._yolo = [] if _YOLO_END in line else re.findall(r"[\w-]+", line.replace("Box(P", "P"))[1:]
        elif self._yolo and (row := _YOLO_ROW.match(line)):
            return self._of_yolo(row)
        if line.lstrip().startswith("|"):
            line = _COMMA.sub(self._comma, line)
            return self._of_table([cell.strip(" \t*`") for cell in line.strip().strip("|").split("|")])
        cells = line.split()
        if cells[:2] == ["E", "#"]:
            self._header = ["e", "step", *re.split(r"\s{2,}", line.strip())[2:]]
        elif len(cells) > 1 and all(map(_WORD.fullmatch, cells)):
            self._header = cells if _unit(cells[0].lower()) else []
        elif self._header and len(cells) == len(self._header) and _CELL.fullmatch(cells[0]):
            return [(n, float(c)) for n, c in zip(self._header, cells, strict=True) if _CELL.fullmatch(c)]
        return self._pairs(line)

    def _of_table(self, cells: list[str]) -> list[tuple[str, float]]:
        """Numbers of a row of a table in Markdown whose header has a place, and whose rows begin with a number."""
        if _unit(cells[0].lower()) or {"epoch", "step"} & {cell.lower() for cell in cells}:
            self._header = cells
        found = [(name, _MARKED_CELL.match(c)) for name, c in zip(self._header, cells, strict=False)]
        is_row = len(cells) == len(self._header) and (found[0][1] is not None or cells[0] == "No log")
        return [(name, float(cell[1])) for name, cell in found if cell] if is_row else []

    def _of_yolo(self, row: re.Match[str]) -> list[tuple[str, float]]:
        """Losses of an epoch by the header above, or metrics of all classes, which belong to the last epoch."""
        cells = zip(self._yolo, row.string[row.end() :].replace(":", " ").split(), strict=False)
        found = [(name, float(cell)) for name, cell in cells if _CELL.fullmatch(cell)]
        if row[1] == "all":
            return [(f"metrics/{name}", value) for name, value in found]
        self._first = min(self._first, int(row[2]))
        self.lengths["epoch"] = float(row[3]) + (self._first == 0)  # v5 counts from 0
        return [("epoch", float(row[2])), *((f"train/{name}", value) for name, value in found)]

    def _pairs(self, line: str) -> list[tuple[str, float]]:
        found = []
        for match in _PAIR.finditer(line):
            name = f"{match['name']}_ms" if match["unit"] else match["name"]
            found.append((name, float(match["value"].replace(",", ""))))
            if match["total"] and (unit := _unit(name.lower())):
                self.lengths[unit] = float(match["total"])
        return found


def _line_of_box(box: re.Match[str]) -> str:
    """A box of Stable-Baselines3 as one line; any other table of two columns as it is."""
    if "total_timesteps" not in box[0]:
        return box[0]
    group, found = "", []
    for row in box[0].splitlines():
        name, value = (cell.strip() for cell in row.split("|")[1:3])
        group = name if name.endswith("/") else group
        found.append(f"{'step' if name == 'total_timesteps' else group + name}: {value}")
    return ", ".join(found) + "\n"


def _seconds(clock: str) -> float:
    """Seconds of a line's time since 1970; NaN for digits that are no date."""
    try:
        return datetime.fromisoformat(clock).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return float("nan")


def _unit(name: str) -> str:
    """Unit of a name that is a place; "" for others, as "total_steps"."""
    words = re.split(r"[ _/]", name)
    if name.endswith("num_updates") or (words[-1] in _STEPS and not {"total", "warmup", "per"} & set(words)):
        return "step"
    return "epoch" if words[-1] in _EPOCHS and words[0] not in ("max", "total", "num") else ""


def _object_of(line: str) -> list[tuple[str, float]]:
    """Numbers of the object in a line, also those that are written as text."""
    text = line[line.find("{") : line.rfind("}") + 1]
    try:
        try:
            found = json.loads(text)
        except ValueError:
            # Many scripts print a Python dictionary, whose single quotes are not JSON.
            found = ast.literal_eval(text)
        items = list(found.items())
    except (ValueError, SyntaxError, AttributeError, MemoryError, RecursionError):
        return []
    pairs = []
    for name, value in items:
        try:
            pairs.append((str(name), float(value)))
        except (TypeError, ValueError):
            continue
    return pairs
