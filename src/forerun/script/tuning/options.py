"""Every setting of ``tune``, declared once, on the field that holds it, for Python and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from forerun.question.settings import setting

__all__ = ["ScenarioSettings", "TuneOptions", "TuneSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """The settings of one search."""

    budget: str = setting(
        "15min",
        help="Budget of the search: 2h, '40 trials', 10usd, or several separated by commas.",
        group="main",
        metavar="2h",
    )
    objective: str = setting(
        "speed",
        help="speed, time, time-to-target, accuracy or cost; several separated by commas give a front.",
        group="main",
        metavar="NAMES",
    )
    metric: str | None = setting(
        None,
        help="Figure that the script prints, as NAME=0.81, NAME: 81 % or in a table.",
        group="target",
        metavar="NAME",
    )
    target: float | None = setting(None, help="Value of the metric to reach.", group="target")
    study: Path = setting(
        Path("forerun-study"),
        help="Folder of the study; an existing one is resumed, or shared.",
        group="output",
        default="forerun-study",
        metavar="FOLDER",
    )
    trial_s: float = setting(
        8.0,
        help="Time of steps of a trial for speed.",
        group="limits",
        default="8s",
        metavar="8s",
        above=0,
        flag="trial-time",
    )
    timeout_s: float = setting(
        1800.0,
        help="Longest time of a trial.",
        group="limits",
        default="30min",
        metavar="30min",
        above=0,
        flag="timeout",
    )
    memory_limit_bytes: float | None = setting(
        None,
        help="Most memory of a trial.",
        group="limits",
        default="that of the machine or the device",
        metavar="4GB",
        above=0,
        flag="memory",
    )
    max_accuracy_loss: float = setting(
        0.01,
        help="Loss of the metric that is accepted for speed: a share, of the value itself for losses.",
        group="limits",
        low=0,
        flag="max-loss",
    )
    price_usd_per_hour: float | None = setting(
        None,
        help="Price of this machine, for the objective cost and a budget in money [US dollars per hour].",
        group="price",
        metavar="1.89/h",
        low=0,
        flag="price",
    )
    device_index: str | None = setting(
        None,
        help="Device of the trials, the only one that the script then sees: cpu or cuda:N.",
        group="device",
        default="the first GPU if there is one",
        metavar="cuda:0",
        flag="device",
    )
    num_sessions: int = setting(
        1,
        help="Sessions that search at once, each on a GPU of its own where there are several, or a node of --ray.",
        group="device",
        low=1,
        flag="workers",
    )
    ray_address: str | None = setting(
        None,
        help="Ray cluster that trials run on: auto or HOST:PORT; its nodes must know the paths.",
        group="device",
        metavar="auto",
        flag="ray",
    )
    sampler: str = setting(
        "tpe",
        help="Sampler of values: tpe or random.",
        group="main",
        metavar="NAME",
        choices=("tpe", "random"),
    )
    seed: int | None = setting(None, help="Seed of the sampler.", group="main", low=0)
    with_pruning: bool = setting(
        False,
        help="For the objective accuracy: end runs whose forecast cannot win.",
        group="main",
        flag="prune",
    )
    model: str | None = setting(
        None,
        help="What the script trains, as in predict, not of Keras; its predicted steps and memory choose the first "
        "trials, on a processor after forerun calibrate.",
        group="model",
        metavar="SPEC",
    )
    image_size: int | None = setting(
        None, help="Height and width of its images, where no argument tells [pixels].", group="model", low=1
    )
    input_shape: tuple[int, ...] | None = setting(
        None, help="Shape of one of its samples, instead.", group="model", metavar="3,224,224", low=1
    )
    sequence_length: int | None = setting(None, help="Tokens of one of its samples.", group="model", low=1)
    check: bool = setting(
        True, help="The best runs whole beside the script as it is.", group="main", default="yes"
    )
    with_priors: bool = setting(
        True, help="The first trials come from the cost model.", group="main", default="yes"
    )
    with_memory_law: bool = setting(
        True, help="Trials are rejected by their predicted memory.", group="main", default="yes"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSettings(TuneSettings):
    """The settings of the built-in task of the scenarios, beside those of its searches."""

    task: str = setting(
        "squeezenet",
        help="Built-in task of the scenarios: squeezenet, SqueezeNet 1.1.",
        group="scenario",
        metavar="NAME",
    )
    data: Path | None = setting(
        None,
        help="Images of the task: seg_train and seg_test, a folder per class in each.",
        group="scenario",
        metavar="FOLDER",
    )
    num_generated: int | None = setting(
        None,
        help="Training images of six classes to write into --data if it has none, and a sixth as many to test.",
        group="scenario",
        metavar="N",
        low=6,
        flag="generate",
    )
    weights: str = setting(
        "imagenet",
        help="Weights the task begins with: imagenet, which torchvision downloads, or none.",
        group="scenario",
        metavar="NAME",
    )
    epochs: int = setting(10, help="Epochs of the task.", group="scenario", low=1)


class TuneOptions(TypedDict, total=False):
    """Settings of a search by name, for type checkers; each is declared in ``TuneSettings``."""

    budget: str | None
    objective: str | None
    metric: str | None
    target: float | None
    study: Path | None
    trial_s: float | None
    timeout_s: float | None
    memory_limit_bytes: float | None
    max_accuracy_loss: float | None
    price_usd_per_hour: float | None
    device_index: str | None
    num_sessions: int | None
    ray_address: str | None
    sampler: str | None
    seed: int | None
    with_pruning: bool | None
    model: str | None
    image_size: int | None
    input_shape: Sequence[int] | None
    sequence_length: int | None
    check: bool | None
    with_priors: bool | None
    with_memory_law: bool | None
