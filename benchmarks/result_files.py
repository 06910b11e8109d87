"""Results of a benchmark as a small file, for the page of figures."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from forerun.question.devices import describe_host
from forerun.script.profiling.recorded import write_json


def write_results(path: Path | None, **found: Any) -> None:
    """Writes the result with the day and the machine; does nothing without a file."""
    if path is None:
        return
    host = describe_host()
    machine = {"processor": host.cpu.model, "num_usable_cores": host.num_usable_cores}
    write_json(path, {"date": datetime.date.today().isoformat(), "machine": machine, **found})
