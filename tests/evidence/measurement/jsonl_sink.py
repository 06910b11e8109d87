"""A store of measurements as lines of JSON, enough to test who writes what when."""

from __future__ import annotations

import json
import os
from pathlib import Path


class JsonlSink:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.marked: dict[str, str] = {}

    def lines(self) -> list[dict]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def add(self, measurement) -> bool:
        if measurement.key in self.done_keys([measurement.key]):
            return False
        line = {
            "key": measurement.key,
            "kind": str(measurement.kind),
            "outcome": str(measurement.outcome),
            "reason": measurement.reason,
            "parameters": measurement.parameters,
            "results": measurement.results,
            "num_repetitions": len(measurement.repetitions_s),
            "host": measurement.circumstances.host,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return True

    def done_keys(self, keys) -> set[str]:
        return {line["key"] for line in self.lines() if line["outcome"] == "done"} & set(keys)

    def mark_unstable(self, keys, reason: str) -> None:
        self.marked.update(dict.fromkeys(keys, reason))
