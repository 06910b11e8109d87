"""Forecasts runs and schedules jobs on a shared cluster; its door for callbacks and measured curves is this module.

The names below are all that other satellites may use. They load with their first use, so that the door costs nothing.
"""

from __future__ import annotations

from forerun.base.doors import door

__all__, __getattr__ = door(__name__, __file__)
