"""Constants of layouts: rates of collectives, and the price of doing them beside computation; and their file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from forerun.communication.measured_layouts import MeasuredLayouts
from forerun.errors import CostModelError

__all__ = ["LayoutConstants", "LayoutTable", "layout_table_path", "load_layout_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConstants:
    """Physical constants, each fitted on the measurements that the table names.

    Attributes:
        start_s: Time of a collective of no data between two devices, beside its hops [s].
        hop_s: Further time of each further device of a node [s].
        half_rate_bytes: Bytes across each link at which half of the full rate is reached [bytes].
        intra_share: Rate of large messages over the usable rate of the link, by collective.
        inter_share: The same between nodes.
        network_hops: Latencies of the network that a collective pays per further node.
        slowdown: Time that a second of hidden communication adds to the computation beside it.
        launch_s: Time in which the host launches one collective of tensor or context parallelism, with the framework's
            own work around it [s].
        stage_s: Time of handing over a micro-step between two stages, beside the transfer [s].
    """

    start_s: float = 5e-6
    hop_s: float = 1e-6
    half_rate_bytes: float = 4e6
    intra_share: Mapping[str, float] = field(default_factory=dict)
    inter_share: float = 1.0
    network_hops: float = 2.0
    slowdown: float = 0.1
    launch_s: float = 0.0
    stage_s: float = 0.0

    def intra_share_of(self, kind: str) -> float:
        """Rate of large messages of a collective inside a node over the usable rate of the link."""
        return self.intra_share.get(str(kind), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """The constants with their origin.

    Attributes:
        constants: The constants.
        log_spread: Standard deviation of the logarithm of predicted over measured steps of several devices, on
            sources that were left out of the fit.
        provenance: Tables, rows and date.
        measured: Steps that were measured on the user's cluster, None without.
    """

    constants: LayoutConstants
    log_spread: float
    provenance: Mapping[str, Any]
    measured: MeasuredLayouts | None = None

    def to_json(self) -> str:
        """The text of the file."""
        whole = {
            "constants": asdict(self.constants),
            "log_spread": self.log_spread,
            "provenance": dict(self.provenance),
        }
        return json.dumps(whole, indent=1, sort_keys=True) + "\n"


def layout_table_path() -> Path:
    """Path of the fitted constants."""
    return Path(__file__).parent / "weights" / "layout_constants.json"


@cache
def load_layout_table(path: Path | None = None) -> LayoutTable:
    """The fitted constants.

    Raises:
        CostModelError: The file is missing or damaged.
    """
    file = path or layout_table_path()
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        constants = LayoutConstants(**raw["constants"])
        numbers = [value for value in asdict(constants).values() if not isinstance(value, dict)]
        numbers += [*constants.intra_share.values(), float(raw["log_spread"])]
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("a constant is not a finite number of zero or more")
        return LayoutTable(
            constants=constants, log_spread=float(raw["log_spread"]), provenance=dict(raw["provenance"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CostModelError(
            f"expected the constants of layouts in {file.name}, but {error}; fit them again"
        ) from error
