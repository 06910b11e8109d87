"""``forerun layouts`` and ``forerun advise``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.question.options import LayoutOptions, RunOptions
from forerun.surface.cli.options import ModelArgument, OnDevice
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.search.advise import AdvicePlan
    from forerun.search.layouts import LayoutPlan

__all__ = ["advise", "layouts"]


@dataclass(frozen=True)
class _Layouts:
    """The layouts, and the framework whose file alone is wanted."""

    plan: LayoutPlan
    framework: str | None

    def as_dict(self) -> dict[str, Any]:
        """The layouts as plain data."""
        return self.plan.as_dict()


def _page(found: _Layouts) -> Any:
    if found.framework:
        return found.plan.files[found.framework].removesuffix("\n")
    from forerun.surface.report.layouts_page import layouts_page

    return layouts_page(found.plan)


@verb("Find the best way to divide a model among devices.", options=LayoutOptions, page=_page, traces=True)
def layouts(model: ModelArgument, on: OnDevice, settings: dict[str, Any], use_cache: bool) -> _Layouts:
    """Find the best way to divide MODEL among the devices of a cluster."""
    import forerun

    plan = forerun.layouts(model, device=on, use_cache=use_cache, **settings)
    return _Layouts(plan, settings.get("write"))


@verb(
    "Name the changes that help a run most.",
    options=RunOptions,
    page="forerun.surface.report.layouts_page:advice_page",
    traces=True,
)
def advise(model: ModelArgument, on: OnDevice, settings: dict[str, Any], use_cache: bool) -> AdvicePlan:
    """Name the three changes that help training MODEL on DEVICE most, with their gain and memory."""
    import forerun

    return forerun.advise(model, device=on, use_cache=use_cache, **settings)
