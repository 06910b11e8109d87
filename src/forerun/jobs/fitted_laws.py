"""``forerun forecast law`` and ``scaling``: laws fitted to the log of one run, or to the ends of several."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError, RecordError, near_matches
from forerun.base.tables import csv_cells, own_table, read_rows
from forerun.jobs.forecast import hourly_price_usd
from forerun.jobs.forecasting.curve import Curve, Target, final_error, parse_target
from forerun.jobs.forecasting.curve_files import read_curve
from forerun.jobs.forecasting.laws import OptimusFit, fit_optimus
from forerun.jobs.forecasting.scaling_law import (
    FLOP_PER_TOKEN,
    FinishedRun,
    Frontier,
    ScalingLaw,
    TuningLaw,
    fit_scaling_law,
    fit_tuning_law,
)
from forerun.prediction.estimate import Interval
from forerun.question.job import COUNT_FACTORS

CURVE_LAWS = ("optimus",)
"""Laws whose coefficients can be fitted to one run."""

_FEWEST_POINTS = 4
_LOSSES = ("loss", "train_loss", "val_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFit(Answer):
    """A law fitted to the log of a run.

    Attributes:
        law: ``optimus``: loss(k) = 1 / (b0 k + b1) + b2.
        run: Name of the file.
        curve: The points; k counts their ``unit``.
        fit: Coefficients with standard errors.
        r2: 1 - squared error / squared deviation from the mean; None if all losses are equal.
        steps_per_epoch: Steps of an epoch, None where the file does not tell.
        target: The loss to reach, or None.
        reached_at: Steps (or epochs) until the law reaches it; infinite if it never does, None without a target.
    """

    law: str
    run: str
    curve: Curve
    fit: OptimusFit
    r2: float | None
    steps_per_epoch: float | None
    target: Target | None
    reached_at: float | None

    def json_fields(self) -> dict[str, Any]:
        """Coefficients, errors and the fitted points."""
        named = dict(zip(("b0", "b1", "b2"), self.fit.deviations, strict=True))
        k, real = self.curve.epochs.tolist(), self.curve.values.tolist()
        points = zip(k, real, self.fit.losses(self.curve.epochs).tolist(), strict=True)
        return {
            "law": self.law,
            "run": self.run,
            "metric": self.curve.metric,
            "unit": self.curve.unit,
            "n": len(self.curve),
            **{name: getattr(self.fit, name) for name in named},
            "errors": named,
            "rmse": self.fit.rmse,
            "r2": self.r2,
            "steps_per_epoch": self.steps_per_epoch,
            "target": None if self.target is None else str(self.target),
            "reached_at": self.reached_at,
            "points": [dict(zip(("k", "real", "fitted"), point, strict=True)) for point in points],
            "notes": self.curve.notes,
        }


def fit_curve(
    run: str | Path, law: str = "optimus", *, metric: str | None = None, target: str | None = None
) -> CurveFit:
    """Fits a law to a run, each row of the log being a point: no row is averaged, and steps are not epochs.

    Args:
        run: A log as ``forecast`` reads it; a CSV with ``epoch, step, loss, acc`` is that of Optimus.
        law: ``optimus``.
        metric: A loss; None takes ``loss``, ``train_loss`` or ``val_loss``, the first that is there.
        target: A loss to reach, such as ``loss<=0.5``.

    Raises:
        RecordError: The log cannot be read, has too few rows or no loss.
        InvalidSetupError: The law or the metric is not known, or the metric is no loss.
    """
    if law not in CURVE_LAWS:
        raise InvalidSetupError(
            f"unknown law '{law}'{near_matches(law, CURVE_LAWS)}; expected one of {', '.join(CURVE_LAWS)}"
        )
    wanted = None if target is None else parse_target(target)
    curve = _loss_curve(run, metric or (wanted.metric if wanted else None))
    is_number = np.isfinite(curve.values)
    steps, losses = curve.epochs[is_number], curve.values[is_number]
    if len(losses) < _FEWEST_POINTS:
        raise RecordError(
            f"{curve.name}: expected at least {_FEWEST_POINTS} rows with a {curve.metric} to fit three coefficients, "
            f"got {len(losses)}; log each step, such as with: forerun measure curve MODEL --steps-out FILE.csv"
        )
    if np.any(losses < 0):
        raise RecordError(f"{curve.name}: Optimus' law is of losses of at least 0, got {losses.min():g}")
    fit = fit_optimus(steps, losses)
    spread = float(np.sum((losses - losses.mean()) ** 2))
    return CurveFit(
        law=law,
        run=curve.name,
        curve=curve,
        fit=fit,
        r2=1 - len(losses) * fit.rmse**2 / spread if spread > 0 else None,
        steps_per_epoch=_steps_per_epoch(run, curve),
        target=wanted,
        reached_at=None if wanted is None else fit.steps_to(wanted.value),
    )


def _loss_curve(run: str | Path, metric: str | None) -> Curve:
    for name in _LOSSES if metric is None else (metric,):
        try:
            curve = read_curve(run, name, by_step=True)
        except InvalidSetupError:
            if name == (metric or _LOSSES[-1]):
                raise
            continue
        if curve.is_rising:
            raise InvalidSetupError(
                f"{curve.name}: Optimus' law is of a loss that falls, and '{curve.metric}' rises; name a loss with "
                "--metric"
            )
        return curve
    raise AssertionError


def _steps_per_epoch(run: str | Path, curve: Curve) -> float | None:
    """Steps of an epoch, from the same file read by epoch."""
    by_epoch = read_curve(run, curve.metric)
    if curve.unit != "step" or by_epoch.unit != "epoch" or by_epoch.steps is None:
        return None
    return float(curve.epochs[-1] / by_epoch.epochs[-1])


_UNDETERMINED = 100.0
"""Ends of an interval of sizes so many times apart say that the runs do not tell the best size."""

_FAR = 10.0
"""A size or a number of tokens this many times beyond those of the runs is called far."""

_BUDGET = re.compile(
    r"(?P<dollar>\$?)(?P<number>[\d.]+(?:e[+-]?\d+)?)\s*(?P<unit>flops?|gpuh|h|usd|\$|)", re.IGNORECASE
)
_USUAL_BUDGET_TIMES = 10.0
_SAMPLES_OF_A_PRICE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRate:
    """Useful work of a device: 6 N times the tokens a second that ``predict`` says of a model.

    Attributes:
        device: Name of the device.
        model: The model.
        num_devices: Devices that train together.
        flop_per_s: Of one device [FLOP/s].
        price_usd_per_hour: Of all devices, or None.
    """

    device: str
    model: str
    num_devices: int
    flop_per_s: Interval
    price_usd_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPrice(Answer):
    """Time and price of a training on some devices.

    Attributes:
        device, num_devices: The devices.
        device_hours: Hours of one device [h].
        time_s: Time of all of them together [s].
        cost_usd: Price, or None where none is known.
    """

    device: str
    num_devices: int
    device_hours: Interval
    time_s: Interval
    cost_usd: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedFrontier(Answer):
    """The best training for a budget or a target.

    Attributes:
        question: The budget or the target, as it was given.
        best: Its size, tokens, loss and work; None where no budget reaches the target.
        prices: Its time and price on each device.
    """

    question: str
    best: Frontier | None
    prices: tuple[TrainingPrice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingForecast(Answer):
    """A law of scaling and what follows from it.

    Attributes:
        runs: The runs, as they were given.
        law: The law, fitted to the best of each size.
        tuning: The law of learning rate and batch; None where the runs do not tell it.
        answers: The best training for each budget and target.
        rates: Of each device.
        notes: What a reader must know.
    """

    runs: tuple[FinishedRun, ...]
    law: ScalingLaw
    tuning: TuningLaw | None
    answers: tuple[PricedFrontier, ...]
    rates: tuple[DeviceRate, ...]
    notes: tuple[str, ...]

    def json_fields(self) -> dict[str, Any]:
        """The coefficients, and the answers with their intervals."""
        return {
            "num_runs": len(self.runs),
            "num_sizes": self.law.num_runs,
            "coefficients": self.law.coefficients(),
            "log_spread": self.law.log_spread,
            "answers": self.answers,
            "rates": self.rates,
            "notes": self.notes,
        }


_Above = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above zero")]
_FACTORS = {**COUNT_FACTORS, "g": 1e9}


def _count(value: Any) -> Any:
    """A count as text, such as 70M or 1.4B; what is none is left to the field's own check."""
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([kmbgt])", str(value).strip().lower())
    return float(found[1]) * _FACTORS[found[2]] if found else value


_Count = Annotated[_Above, BeforeValidator(_count)]


class _RunRow(BaseModel):
    """A run: its size, its tokens or its work, and its loss, its perplexity or the file of its curve."""

    parameters: _Count
    tokens: _Count | None = None
    flop: _Above | None = None
    loss: _Above | None = None
    perplexity: _Above | None = None
    learning_rate: _Above | None = None
    batch_size: _Above | None = None
    run: str | None = None


_CHECKED = r"(?:^|[/._ -])(?:val|valid|validation|eval|test)"
_WRITTEN: dict[str, str] = own_table(__file__, "tables.toml")["runs"]
"""Spellings of a column in tables of runs, behind the last slash or dot, in lower case."""

_INSTEAD_OF = {"flop": "tokens", "perplexity": "loss"}


_UNIT = re.compile(r"\s*[(\[_]\s*([kmbgt])(?:illions?|rillions?)?\s*[)\]]?$")
"""Unit of a column, behind its name: params (M), tokens_b."""


def _alike(header: Sequence[str], field: str) -> list[str]:
    plain = {name: _UNIT.sub("", re.split(r"[/.]", name.lower())[-1]) for name in header}
    return [name for name in header if re.fullmatch(_WRITTEN[field], plain[name])]


def _columns(header: Sequence[str], file: str) -> dict[str, str]:
    """Column of each field: by its own name, else by one of its spellings, that of a validation before others.

    Raises:
        RecordError: Several columns are equally near.
    """
    found: dict[str, str] = {name: name for name in header if name in _RunRow.model_fields}
    for field in _WRITTEN:
        alike = _alike(header, field)
        near = [n for n in alike if re.search(_CHECKED, n.lower())] or alike
        if field in found or not near or _INSTEAD_OF.get(field) in found:
            continue
        if len(near) > 1 and field in ("parameters", "tokens", "loss"):
            raise RecordError(
                f"{file}: {', '.join(near)} may each be the {field}; name one of them '{field}'"
            )
        found[field] = near[0]
    lacking = [
        f for f, other in (("parameters", "parameters"), ("tokens", "flop")) if not {f, other} & {*found}
    ]
    if lacking:
        raise RecordError(
            f"{file}: expected the columns parameters, tokens (or flop) and loss (or perplexity, or run), got "
            f"{', '.join(header)}; rename that of the {lacking[0]}"
        )
    return found


def forecast_scaling(
    runs: str | Path,
    *,
    budgets: Sequence[str] = (),
    target: str | Target | None = None,
    model: Any = None,
    devices: Sequence[str] = (),
    price_usd_per_hour: float | None = None,
    seed: int = 0,
    **setup: Any,
) -> ScalingForecast:
    """The best size and tokens for a budget, and the least work that reaches a loss.

    Args:
        runs: A CSV of finished runs with the columns parameters, tokens (or flop) and loss (or perplexity, or run: the
            file of a curve, from the table), and optionally learning_rate and batch_size, also as ``n_params`` or
            ``eval/loss``; or a folder of such tables.
        budgets: Work such as ``1e21flop``, or hours of a device such as ``500gpuh``; ten times the largest run where
            neither a budget nor a target is given.
        target: Such as ``loss<=2.3``.
        model: A model of the kind, whose rate of useful work the others are taken to have.
        devices: Where it might be trained.
        price_usd_per_hour: Price of one device.
        seed: Of the draws behind the intervals.
        setup: Further arguments of ``predict``, such as ``batch_size`` and ``sequence_length``.

    Raises:
        RecordError: A table cannot be read, or a row has no loss.
        InvalidSetupError: Too few runs, or a budget or target that cannot be read.
        FailureError: The model cannot be predicted.
    """
    if (model is None) != (not devices):
        raise InvalidSetupError("times on a device need both the model and the device; give --model and --on")
    found, read_as = _runs(Path(runs))
    law, tuning = fit_scaling_law(found, seed=seed), fit_tuning_law(found, seed=seed)
    rates = tuple(_rate(model, device, price_usd_per_hour, setup) for device in devices)
    wanted = parse_target(target) if isinstance(target, str) else target
    if not budgets and wanted is None:
        budgets = (f"{_USUAL_BUDGET_TIMES * max(run.flop for run in found):.3g}flop",)
    answers = [_priced(text, law.at_budget(_flop(text, rates)), rates, tuning) for text in budgets]
    if wanted is not None:
        if wanted.is_rising:
            raise InvalidSetupError(f"a law of scaling is of a loss, which falls; got the target '{wanted}'")
        answers.append(_priced(str(wanted), law.at_target(wanted.value), rates, tuning))
    notes = (*read_as, *_notes(found, law, tuning, answers, rates))
    return ScalingForecast(
        runs=found, law=law, tuning=tuning, answers=tuple(answers), rates=rates, notes=notes
    )


def _runs(place: Path) -> tuple[tuple[FinishedRun, ...], tuple[str, ...]]:
    """The runs of a table, or of all tables of a folder that have such columns, and what their columns were read as."""
    tables = [place]
    if place.is_dir():
        headers = {file: _header(file) for file in sorted(place.rglob("*.csv"))}
        tables = [
            file
            for file, header in headers.items()
            if _alike(header, "parameters") and (_alike(header, "tokens") or _alike(header, "flop"))
        ]
    if not tables:
        raise RecordError(f"{place}: expected a CSV with the columns parameters, tokens and loss, got none")
    found: list[FinishedRun] = []
    read_as: dict[str, None] = {}
    for table in tables:
        columns = _columns(_header(table), table.name)
        found += _runs_of_table(table, columns)
        if renamed := [f"{field} from {name}" for field, name in columns.items() if field != name]:
            read_as[f"{table.name}: {', '.join(renamed)}"] = None
    return tuple(found), tuple(read_as)


def _header(path: Path) -> list[str]:
    return list(dict.fromkeys(name for cells in csv_cells(path).values() for name in cells))


def _runs_of_table(path: Path, columns: Mapping[str, str]) -> list[FinishedRun]:
    found = []
    for number, row in read_rows(path, _RunRow, columns):
        loss, tokens = row.loss, row.tokens
        if loss is None and row.perplexity is not None:
            loss = float(np.log(row.perplexity))
        if loss is None and row.run is not None:
            curve = read_curve(path.parent / row.run)
            if curve.is_rising:
                raise RecordError(
                    f"{curve.name}: expected the curve of a loss, got {curve.metric}, which rises"
                )
            loss = final_error(curve.values)
        size = row.parameters * _factor(columns["parameters"])
        if tokens is None and row.flop is not None:
            tokens = row.flop / (FLOP_PER_TOKEN * size)
        elif tokens is not None:
            tokens *= _factor(columns["tokens"])
        settings = {"learning_rate": row.learning_rate, "batch_size": row.batch_size}
        if loss is None or tokens is None:
            wanted = "a loss, or the run's curve" if loss is None else "tokens, or the run's flop"
            raise RecordError(f"{path.name}, line {number}: expected {wanted}, got neither")
        found.append(FinishedRun(parameters=size, tokens=tokens, loss=loss, **settings))
    return found


def _factor(column: str) -> float:
    """Factor of the numbers of a column, by its name."""
    unit = _UNIT.search(column.lower())
    return _FACTORS[unit[1]] if unit else 1.0


def _rate(model: Any, device: str, price: float | None, setup: Mapping[str, Any]) -> DeviceRate:
    """Useful work of a device by ``predict``, with its price."""
    from forerun.search.predict import predict

    # The samples of an epoch are of no account to its rate; with them the answer has a price.
    estimate = predict(
        model, device=device, price_usd_per_hour=price, dataset_size=_SAMPLES_OF_A_PRICE, **setup
    )
    if estimate.tokens_per_s_per_device is None:
        raise InvalidSetupError(
            f"{estimate.model} reads no tokens, and a law of scaling is of language models; give one with --model"
        )
    return DeviceRate(
        device=estimate.device,
        model=str(estimate.model),
        num_devices=estimate.num_devices,
        flop_per_s=estimate.tokens_per_s_per_device.scaled(FLOP_PER_TOKEN * estimate.num_parameters),
        price_usd_per_hour=hourly_price_usd(estimate),
    )


def _flop(text: str, rates: Sequence[DeviceRate]) -> float:
    """A budget in FLOP; hours count on the only device."""
    match = _BUDGET.fullmatch(text.strip().replace(",", ""))
    unit = "" if match is None else (match["unit"] or match["dollar"]).lower()
    if match is None or not unit:
        raise InvalidSetupError(
            f"expected a budget such as 1e21flop, 500gpuh or 10000usd, got '{text}'; name the number and its unit"
        )
    number = float(match["number"])
    if number <= 0:
        raise InvalidSetupError(f"expected a budget above zero, got '{text}'")
    if unit.startswith("flop"):
        return number
    if len(rates) != 1:
        raise InvalidSetupError(
            f"hours and prices are of one device, got the budget '{text}' and {len(rates)} devices; give one with "
            "--on and --model, or the budget in FLOP"
        )
    if unit in ("usd", "$"):
        if rates[0].price_usd_per_hour is None:
            raise InvalidSetupError(f"no price of {rates[0].device} is known for '{text}'; give --price")
        number *= rates[0].num_devices / rates[0].price_usd_per_hour
    return number * 3600 * rates[0].flop_per_s.value


def _priced(
    question: str, best: Frontier | None, rates: Sequence[DeviceRate], tuning: TuningLaw | None
) -> PricedFrontier:
    if best is None:
        return PricedFrontier(question=question, best=None, prices=())
    if tuning is not None:
        rate, batch = tuning.best(best.parameters.value, best.tokens.value)
        best = replace(best, learning_rate=rate, batch_size=batch)
    return PricedFrontier(question=question, best=best, prices=tuple(_price(best, rate) for rate in rates))


def _price(best: Frontier, rate: DeviceRate) -> TrainingPrice:
    """Time of the work on a device; the interval joins that of the work and that of the rate at their worst."""
    work, speed = best.flop, rate.flop_per_s
    device_s = Interval(work.value / speed.value, work.low / speed.high, work.high / speed.low)
    time_s = device_s.scaled(1 / rate.num_devices)
    per_hour = rate.price_usd_per_hour
    return TrainingPrice(
        device=rate.device,
        num_devices=rate.num_devices,
        device_hours=device_s.scaled(1 / 3600),
        time_s=time_s,
        cost_usd=None if per_hour is None else time_s.scaled(per_hour / 3600),
    )


def _notes(
    runs: Sequence[FinishedRun],
    law: ScalingLaw,
    tuning: TuningLaw | None,
    answers: Sequence[PricedFrontier],
    rates: Sequence[DeviceRate],
) -> list[str]:
    notes = []
    if len(runs) > law.num_runs:
        notes.append(f"of {len(runs)} runs the best of each of {law.num_runs} sizes counts: tuned runs")
    if tuning is not None:
        notes.append(
            f"learning rate and batch at that size: by {tuning.num_runs} runs of {tuning.num_sizes} sizes; the batch "
            "is in the unit of the table"
        )
    elif any(run.learning_rate is not None for run in runs):
        notes.append(
            "no best learning rate and batch: a size needs three runs or more on both sides of its best rate and batch"
        )
    for found in answers:
        if found.best is None:
            notes.append(f"{found.question} lies below what the law says that any budget reaches")
            continue
        if found.best.parameters.high > _UNDETERMINED * found.best.parameters.low:
            notes.append(
                f"{found.question}: the runs do not tell how to divide work between parameters and tokens, as those of "
                "one number of tokens a parameter never do; the loss is that of the size named"
            )
        sizes = found.best.parameters.value / max(run.parameters for run in runs)
        tokens = found.best.tokens.value / max(run.tokens for run in runs)
        if max(sizes, tokens) > _FAR:
            notes.append(
                f"{found.question}: {sizes:.2g} times the parameters and {tokens:.2g} times the tokens of the largest "
                "runs: the law is far from what it was fitted to"
            )
    if rates:
        notes.append(f"time: other sizes are assumed to reach the rate of useful work of {rates[0].model}")
    notes.append("work is 6 N D; parameters must be counted for the answer as they were for the runs")
    return notes
