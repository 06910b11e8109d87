"""Running clusters: Slurm, Kubernetes, Ray, and the formats of their schedulers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
"""Words of other projects, by the names of their tables."""
