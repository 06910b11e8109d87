"""Steps of several passes: graphs put one after another, with samples that are several of their own.

A pass is a graph without an update, such as the forward pass of a reference model. Its operations stand before those of
the step, under module names that begin with the name of the pass; what it allocates is freed at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.graph.graph import AllocationKind, Graph, MemoryEvent, MemoryStream, OpTable, Within, within_of
