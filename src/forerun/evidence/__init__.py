"""Measures, keeps records, calibrates, fits and evaluates; imports the core, and the core never imports it.

Its names are all that other rooms may use.
"""

from __future__ import annotations

from forerun.base.doors import door

__all__, __getattr__ = door(__name__, __file__)
