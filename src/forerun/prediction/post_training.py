"""Steps of post-training and generation, composed of traced passes of the same model.

=========  ==================================================================================================
algorithm  passes before the forward and backward pass of the policy
=========  ==================================================================================================
``dpo``    the reference over both answers of a pair
``orpo``   none; a sample is a pair
``kto``    the policy over a mismatched answer, the reference over both
``reward`` none; a sample is a pair, the head has one value
``grpo``   the answer is written; log-probabilities of the policy and of the reference
``ppo``    the same, the reward model, the value model, and the training of the value model
=========  ==================================================================================================

Sources: huggingface/trl, ``trl/trainer/``: ``dpo_trainer.py``, ``orpo_trainer.py``, ``kto_trainer.py``,
``reward_trainer.py``, ``ppo_trainer.py``; NVIDIA-NeMo/RL, ``nemo_rl/algorithms/grpo.py``. A reference that shares the
frozen weights of adapters is the model without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.errors import InvalidSetupError
from forerun.cost.time.rows import MATRIX_CLASSES, joined_kernels
from forerun.graph.graph import AllocationKind, Graph, OpClass, OpTable
from forerun.graph.passes import Held, Pass, pass_rows, step_of_passes, with_samples
from forerun.prediction.estimate import BreakdownPart, Generation
from forerun.prediction.step import PreparedModel, StepPrediction
from forerun.question.model import ModelRequest, find_architecture
from forerun.question.post_training import Algorithm, Engine, PostTraining
from forerun.question.run import Run
from forerun.question.saving import Offload
from forerun.question.setup import Phase, Precision, TrainingSetup
