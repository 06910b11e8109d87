"""Every setting of a plan, declared once: those that its candidates share, and those of the plan itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from forerun.question.options import CommonOptions
from forerun.question.settings import Setting

DEFAULT_BATCH_SIZES = "8:1024"

_Words = str | Sequence[str] | None
_axis = partial(Setting, group="axes")
_limit = partial(Setting, group="limits")
_price = partial(Setting, group="price")
_target = partial(Setting, group="target", is_local=True)
_output = partial(Setting, group="output")


class PlanOptions(CommonOptions, total=False):
    """The settings of a plan besides its models and devices; a setting that is None or left out has its default."""

    batch_sizes: Annotated[
        str | Sequence[int] | None,
        _axis(
            "Batch sizes of one device to try: 32:1024 doubles, 32:1024:32 adds 32 each time, 48,96 is a list.",
            default=DEFAULT_BATCH_SIZES,
            metavar="SIZES",
            flag="batch-size",
        ),
    ]
    precisions: Annotated[
        _Words,
        _axis(
            "Precisions to try, separated by commas.",
            default="fp32,amp; bf16 of a catalogued language model",
            metavar="NAMES",
            flag="precision",
        ),
    ]
    layouts: Annotated[
        _Words,
        _axis(
            "Memory orders of images to try, separated by commas: nchw, nhwc.",
            default="the framework's own",
            metavar="NAMES",
            flag="layout",
        ),
    ]
    image_sizes: Annotated[
        str | Sequence[int] | None,
        _axis(
            "Heights and widths of images to try [pixels], written like batch sizes.",
            default="the model's own",
            metavar="SIZES",
            flag="image-size",
        ),
    ]
    search: Annotated[
        _Words,
        _axis(
            "Settings to compare in all their usual values as well, separated by commas: precision, layout, "
            "compile, recompute, strategy, or all.",
            metavar="NAMES",
        ),
    ]

    within: Annotated[
        _Words,
        _limit(
            "Limits such as 'time<=2h, cost<=20, memory<=24GB'; also on epoch, step, energy, co2, "
            "throughput and accuracy.",
            metavar="LIMITS",
            is_repeated=True,
        ),
    ]
    minimize: Annotated[
        str | None, _limit("Goal: time, cost, energy or co2.", default="time", metavar="NAME")
    ]
    accuracies: Annotated[
        Mapping[str, float] | None,
        _limit(
            "Known accuracy of each model: a table with the columns model,accuracy.",
            metavar="FILE.csv",
            is_local=True,
        ),
    ]
    co2_g_per_kwh: Annotated[
        float | None,
        _limit(
            "Carbon intensity of the grid [g/kWh].",
            words="carbon intensity [g/kWh]",
            low=0,
            high=10_000,
            flag="co2",
        ),
    ]
    power_limit_w: Annotated[
        float | None,
        _limit(
            "Power limit set on every device [W].",
            words="power limit [W]",
            above=0,
            high=10_000,
            flag="power-limit",
        ),
    ]

    price_usd_per_hour: Annotated[
        float | Mapping[str, float] | None,
        _price(
            "Price of one device [US dollars per hour], or t4=0.35/h,l4=0.80/h, instead of the table.",
            metavar="1.89/h",
            flag="price",
        ),
    ]
    price_kinds: Annotated[
        _Words,
        _price(
            "Ways of paying: on-demand, spot, reserved-1y, reserved-3y.",
            default="on-demand",
            metavar="NAMES",
            flag="price-kind",
        ),
    ]
    providers: Annotated[
        _Words,
        _price(
            "Providers: aws, google, azure, lambda, runpod.", default="all", metavar="NAMES", flag="provider"
        ),
    ]
    prices_file: Annotated[
        str | Path | None,
        _price(
            "Your own prices, and the hardware that you own.",
            metavar="FILE.toml",
            flag="prices",
            is_local=True,
        ),
    ]

    target: Annotated[
        str | None,
        _target(
            "Target that ends the training, such as 'accuracy>=0.92'; it needs a curve or a history.",
            metavar="METRIC>=VALUE",
        ),
    ]
    curve: Annotated[
        str | Path | Any | None,
        _target(
            "Curve of the run so far, as in 'forerun forecast', or a table with the columns model,run.",
            metavar="RUN",
        ),
    ]
    curve_batch_size: Annotated[
        int | None,
        _target("Batch size of the run in --curve, if its file does not say it.", low=1),
    ]
    schedule: Annotated[
        str | Any | None,
        _target(
            "Learning-rate schedule of the run in --curve, as in 'forerun forecast'.",
            metavar="WORDS",
        ),
    ]
    history: Annotated[
        str | Path | None,
        _target("Folder of finished runs of the same job; it may replace the curve.", metavar="DIR"),
    ]
    batches: Annotated[
        str | Path | None,
        _target(
            "Table of steps or epochs to the target at several batch sizes, as in 'forerun forecast'.",
            metavar="FILE.csv",
        ),
    ]
    critical_batch_size: Annotated[
        float | None,
        _target(
            "Batch size that doubles the epochs; it may replace the table in --batches.",
            above=0,
        ),
    ]

    num_points: Annotated[
        int | None,
        _output(
            "Number of candidates to list.",
            words="number of candidates",
            default="12",
            low=1,
            high=10_000,
            http_high=50,
            flag="points",
        ),
    ]
    max_rejected: Annotated[
        int | None,
        _output(
            "Number of rejected candidates to list with their reasons, nearest misses first.",
            words="number of rejected candidates",
            default="1000",
            low=0,
            high=1_000_000,
            http_high=1000,
            flag="rejected",
        ),
    ]
    exact: Annotated[
        bool | None,
        _output(
            "Evaluate the listed candidates once more, exactly as predict does; --no-exact "
            "leaves memory some per cent off.",
            default="yes",
        ),
    ]
