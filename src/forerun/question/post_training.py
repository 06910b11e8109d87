"""Post-training and generation: the algorithm of a step, and the tokens that a step writes itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

from forerun.question.settings import setting
