"""Networks of diffusers, which make images and videos: ``diffusers:flux.1-dev``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from forerun.tracing.source import Source, later

__all__ = ["SOURCE"]


def _like(name: str) -> list[str]:
    """Networks by what people call them: ``stabilityai/stable-diffusion-xl-base-1.0`` is sdxl."""
    text = Path(__file__).with_name("networks.toml").read_text(encoding="utf-8")
    word = name.lower().replace(" ", "-").rpartition("/")[2]
    networks = tomllib.loads(text)["networks"].items()
    return [own for own, entry in networks if re.search(entry["names"], word)]


SOURCE = Source(
    build=later(f"{__name__}.step", "build_diffusion"), library="diffusers", is_trusted=False, like=_like
)
