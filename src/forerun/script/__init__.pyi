"""Public names of this package and the module of each; ``__init__.py`` loads them from here on first use."""

from forerun.script.callbacks.loop import CurveLog as CurveLog
