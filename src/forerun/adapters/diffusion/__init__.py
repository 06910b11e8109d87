"""Networks of diffusers, which make images and videos: ``diffusers:flux.1-dev``."""

from forerun.tracing.source import Source, later

__all__ = ["SOURCE"]

SOURCE = Source(build=later(f"{__name__}.step", "build_diffusion"), library="diffusers", is_trusted=False)
