"""For Keras scripts: ``from forerun.keras import StepTimer``. Nothing else of forerun imports this module."""

from __future__ import annotations

from forerun.script.callbacks.step_timer import StepTimer

__all__ = ["StepTimer"]
