"""Networks of diffusers, which make images and videos: ``diffusers:flux.1-dev``."""

from __future__ import annotations

import re

from forerun.base.tables import own_table
from forerun.tracing.source import Source, later

__all__ = ["SOURCE"]


def _like(name: str) -> list[str]:
    """Networks by what people call them: ``stabilityai/stable-diffusion-xl-base-1.0`` is sdxl."""
    word = name.lower().replace(" ", "-").rpartition("/")[2]
    networks = own_table(__file__, "networks.toml")["networks"].items()
    return [own for own, entry in networks if re.search(entry["names"], word)]


SOURCE = Source(
    build=later(f"{__name__}.step", "build_diffusion"), library="diffusers", is_trusted=False, like=_like
)
