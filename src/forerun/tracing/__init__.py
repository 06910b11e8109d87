"""Tracing: the operation graph of one training step of a model, without running it on a device.

Importing this package loads no framework; ``trace`` does, unless the graph is in the cache.
"""

from forerun.question.model import ModelRequest
from forerun.tracing.trace import trace

__all__ = ["ModelRequest", "trace"]
