"""Every setting of ``tune``, declared once for Python and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypedDict

from forerun.question.settings import Setting

__all__ = ["ScenarioOptions", "TuneOptions", "TuneSettings"]


class TuneOptions(TypedDict, total=False):
    """Settings of a search."""

    budget: Annotated[
        str | None,
        Setting(
            help="Budget of the search: 2h, '40 trials', 10usd, or several separated by commas.",
            group="main",
            default="15min",
            metavar="2h",
        ),
    ]
    objective: Annotated[
        str | None,
        Setting(
            help="speed, time, time-to-target, accuracy or cost; several separated by commas give a front.",
            group="main",
            default="speed",
            metavar="NAMES",
        ),
    ]
    metric: Annotated[
        str | None,
        Setting(
            help="Figure that the script prints, as NAME=0.81, NAME: 81 % or in a table.",
            group="target",
            metavar="NAME",
        ),
    ]
    target: Annotated[float | None, Setting(help="Value of the metric to reach.", group="target")]
    study: Annotated[
        Path | None,
        Setting(
            help="Folder of the study; an existing one is resumed, or shared.",
            group="output",
            default="forerun-study",
            metavar="FOLDER",
        ),
    ]
    trial_s: Annotated[
        float | None,
        Setting(
            help="Time of steps of a trial for speed.",
            group="limits",
            default="8s",
            metavar="8s",
            above=0,
            flag="trial-time",
        ),
    ]
    timeout_s: Annotated[
        float | None,
        Setting(
            help="Longest time of a trial.",
            group="limits",
            default="30min",
            metavar="30min",
            above=0,
            flag="timeout",
        ),
    ]
    memory_limit_bytes: Annotated[
        float | None,
        Setting(
            help="Most memory of a trial.",
            group="limits",
            default="that of the machine or the device",
            metavar="4GB",
            above=0,
            flag="memory",
        ),
    ]
    max_accuracy_loss: Annotated[
        float | None,
        Setting(
            help="Loss of the metric that is accepted for speed: a share, of the value itself for losses.",
            group="limits",
            default="0.01",
            low=0,
            flag="max-loss",
        ),
    ]
    price_usd_per_hour: Annotated[
        float | None,
        Setting(
            help="Price of this machine, for the objective cost and a budget in money [US dollars per hour].",
            group="price",
            metavar="1.89/h",
            low=0,
            flag="price",
        ),
    ]
    device_index: Annotated[
        str | None,
        Setting(
            help="Device of the trials, the only one that the script then sees: cpu or cuda:N.",
            group="device",
            default="the first GPU if there is one",
            metavar="cuda:0",
            flag="device",
        ),
    ]
    num_sessions: Annotated[
        int | None,
        Setting(
            help="Sessions that search at once, each on a GPU of its own where there are several, or a node of --ray.",
            group="device",
            default="1",
            low=1,
            flag="workers",
        ),
    ]
    ray_address: Annotated[
        str | None,
        Setting(
            help="Ray cluster that trials run on: auto or HOST:PORT; its nodes must know the paths.",
            group="device",
            metavar="auto",
            flag="ray",
        ),
    ]
    sampler: Annotated[
        str | None,
        Setting(
            help="Sampler of values: tpe or random.",
            group="main",
            default="tpe",
            metavar="NAME",
            choices=("tpe", "random"),
        ),
    ]
    seed: Annotated[int | None, Setting(help="Seed of the sampler.", group="main", low=0)]
    with_pruning: Annotated[
        bool | None,
        Setting(
            help="For the objective accuracy: end runs whose forecast cannot win.", group="main", flag="prune"
        ),
    ]
    model: Annotated[
        str | None,
        Setting(
            help="What the script trains, as in predict, not of Keras; its predicted steps and memory choose the first "
            "trials, on a processor after forerun calibrate.",
            group="model",
            metavar="SPEC",
        ),
    ]
    image_size: Annotated[
        int | None,
        Setting(
            help="Height and width of its images, where no argument tells [pixels].", group="model", low=1
        ),
    ]
    input_shape: Annotated[
        Sequence[int] | None,
        Setting(help="Shape of one of its samples, instead.", group="model", metavar="3,224,224", low=1),
    ]
    sequence_length: Annotated[
        int | None, Setting(help="Tokens of one of its samples.", group="model", low=1)
    ]
    check: Annotated[
        bool | None,
        Setting(help="The best runs whole beside the script as it is.", group="main", default="yes"),
    ]
    with_priors: Annotated[
        bool | None,
        Setting(help="The first trials come from the cost model.", group="main", default="yes"),
    ]
    with_memory_law: Annotated[
        bool | None,
        Setting(help="Trials are rejected by their predicted memory.", group="main", default="yes"),
    ]


class ScenarioOptions(TypedDict, total=False):
    """Settings of the built-in task of the scenarios."""

    task: Annotated[
        str | None,
        Setting(
            help="Built-in task of the scenarios: squeezenet, SqueezeNet 1.1.",
            group="scenario",
            default="squeezenet",
            metavar="NAME",
        ),
    ]
    data: Annotated[
        Path | None,
        Setting(
            help="Images of the task: seg_train and seg_test, a folder per class in each.",
            group="scenario",
            metavar="FOLDER",
        ),
    ]
    num_generated: Annotated[
        int | None,
        Setting(
            help="Training images of six classes to write into --data if it has none, and a sixth as many to test.",
            group="scenario",
            metavar="N",
            low=6,
            flag="generate",
        ),
    ]
    weights: Annotated[
        str | None,
        Setting(
            help="Weights the task begins with: imagenet, which torchvision downloads, or none.",
            group="scenario",
            default="imagenet",
            metavar="NAME",
        ),
    ]
    epochs: Annotated[int | None, Setting(help="Epochs of the task.", group="scenario", default="10", low=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """The settings of one search; names and meaning are those of ``TuneOptions``."""

    budget: str = "15min"
    objective: str = "speed"
    metric: str | None = None
    target: float | None = None
    study: Path = Path("forerun-study")
    trial_s: float = 8.0
    timeout_s: float = 1800.0
    memory_limit_bytes: float | None = None
    max_accuracy_loss: float = 0.01
    price_usd_per_hour: float | None = None
    device_index: str | None = None
    num_sessions: int = 1
    ray_address: str | None = None
    sampler: str = "tpe"
    seed: int | None = None
    with_pruning: bool = False
    model: str | None = None
    image_size: int | None = None
    input_shape: tuple[int, ...] | None = None
    sequence_length: int | None = None
    check: bool = True
    with_priors: bool = True
    with_memory_law: bool = True
