"""The cost model that a run is predicted with: a calibration of its device, or the shipped weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forerun.communication.layout_constants import LayoutTable, load_layout_table
from forerun.communication.measured_layouts import is_layouts_file, load_measured_layouts
from forerun.optime.correction_files import calibration_path, find_calibration, load_calibration
from forerun.optime.weights import DEFAULT_STACK, CostModel, load_weights, shipped_weights_path
from forerun.run.run import HERE, Run

__all__ = ["cost_model_of", "layout_table_of", "other_calibration_note"]


def cost_model_of(run: Run) -> CostModel:
    """The calibration that the run names, or that of this machine for ``here``, or else the shipped weights.

    A calibration is taken for models of the framework it was made with only.

    Raises:
        UsageError: The named file is none of this device and framework.
        CostModelError: A file is damaged, or was made for other features than this version computes.
    """
    named = run.software.calibration
    if is_layouts_file(named):
        return load_weights(shipped_weights_path())
    if named is not None and named != HERE:
        return load_calibration(Path(named), run.cluster.device, run.stack)
    own = find_calibration(run.cluster.device, run.stack) if named == HERE else None
    return own or load_weights(shipped_weights_path())


def layout_table_of(run: Run) -> LayoutTable:
    """The constants of several devices, with the measured layouts that the run names as its calibration.

    Raises:
        CostModelError: The file is damaged, or of another device.
    """
    named, table = run.software.calibration, load_layout_table()
    if named is None or not is_layouts_file(named):
        return table
    return replace(table, measured=load_measured_layouts(Path(named), run.cluster.device.name))


def other_calibration_note(run: Run, weights: CostModel) -> tuple[str, ...]:
    """A note where this machine was calibrated, but with another framework."""
    stack, other = run.stack, "keras" if run.stack == DEFAULT_STACK else DEFAULT_STACK
    if run.software.calibration != HERE or weights.calibrated_device is not None:
        return ()
    if not calibration_path(run.cluster.device, other).exists():
        return ()
    return (
        f"this machine has a calibration of {other}, which says little of {stack}: it was not used; make one with: "
        f"forerun calibrate --framework {stack}",
    )
