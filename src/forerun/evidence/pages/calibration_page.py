"""The page of a calibration: its measurements, and the error on models left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_duration_s
from forerun.surface.report.tables import table

if TYPE_CHECKING:
    from forerun.evidence.calibrate import Calibration, LeftOutModel

__all__ = ["calibration_page"]


def calibration_page(found: Calibration) -> RenderableType:
    """The page."""
    is_layouts = found.method == "layouts"
    lines: list[RenderableType] = [
        Text(f"{found.device}, {found.framework}", style="bold"),
        Text(
            f"{found.num_layers} layers and {found.num_models} models in "
            f"{format_duration_s(found.duration_s)}; {_METHODS[found.method]}"
        ),
    ]
    if found.models:
        lines += [Text(""), _models_table(found.models), Text("")]
        lines.append(
            Text(
                f"mean error on models left out: {found.mape_before:.0%} before, {found.mape_after:.0%} after "
                + ("(each predicted from the others)" if is_layouts else _UNSEEN)
            )
        )
    if found.step_cost_s:
        lines.append(
            Text(f"a step of fit takes {format_duration_s(found.step_cost_s)} beside its operations")
        )
    lines += [Text(note) for note in found.notes]
    use = f"give it as --calibration {found.file}" if is_layouts else "predict --on here uses it"
    lines.append(Text(f"written to {found.file}; {use}"))
    lines.append(Text(f"measurements in {found.records}"))
    return Group(*lines)


_UNSEEN = "(each predicted by a calibration that had not seen its family)"
_METHODS = {
    "refined": "the networks of the cost model were refined on them",
    "offset": "offsets of the cost model were fitted to them",
    "layouts": "steps of like shape are corrected as they were measured",
}


def _models_table(models: tuple[LeftOutModel, ...]) -> Table:
    made = table(("model", "batch", "measured", "noise", "before", "after"), left=("model",))
    for model in models:
        measured_s = model.measured_s
        made.add_row(
            Text(model.model),
            str(model.batch_size),
            format_duration_s(measured_s),
            f"± {model.relative_noise:.1%}",
            f"{model.before_s / measured_s - 1:+.0%}",
            f"{model.after_s / measured_s - 1:+.0%}",
        )
    return made
