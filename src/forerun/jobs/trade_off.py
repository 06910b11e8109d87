"""``forerun forecast trade-off``: accuracy against time over configurations, and their Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from forerun.base.answers import Answer, fields_of
from forerun.base.tables import read_rows
from forerun.jobs.forecast import forecast
from forerun.jobs.forecasting.curve import Target, parse_target
from forerun.jobs.forecasting.forecast_answer import ranked
from forerun.prediction.estimate import Interval

__all__ = [
    "TradeOff",
    "TradeOffPoint",
    "pareto_front",
    "trade_off",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOffPoint:
    """One configuration.

    Attributes:
        name: What it is called.
        device: Where it runs.
        epoch_time_s: Predicted time of an epoch [s].
        epochs_to_target: At probability one half; infinite if not by the end, or without a target.
        time_to_target_s: At probabilities 0.1, 0.5 and 0.9 [s].
        final_value: Value at the end.
        end_time_s: Time of the whole run [s].
        cost_usd: Price of the whole run, or None.
        is_rising: Whether a larger value is better.
    """

    name: str
    device: str
    epoch_time_s: Interval
    epochs_to_target: float
    time_to_target_s: tuple[float, float, float]
    final_value: Interval
    end_time_s: Interval
    cost_usd: float | None
    is_rising: bool


def pareto_front(points: Sequence[TradeOffPoint]) -> list[bool]:
    """True if each point is beaten by no other in both end time and final value."""

    def beats(a: TradeOffPoint, b: TradeOffPoint) -> bool:
        sign = 1.0 if a.is_rising else -1.0
        faster = b.end_time_s.value - a.end_time_s.value
        better = sign * (a.final_value.value - b.final_value.value)
        return faster >= 0 and better >= 0 and (faster > 0 or better > 0)

    return [not any(beats(other, point) for other in points) for point in points]


_Text = Annotated[str, Field(min_length=1, description="a name")]
_Above = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above zero")]


class _Configuration(BaseModel):
    """A row of the table; ``run`` is a curve, by its path from the table."""

    name: _Text
    run: _Text
    model: _Text
    device: _Text
    batch_size: Annotated[int, Field(ge=1, description="a whole number above zero")] | None = None
    precision: str | None = None
    optimizer: str | None = None
    dataset: str | None = None
    epochs: _Above | None = None
    schedule: str | None = None
    price: _Above | None = None

    def setup(self) -> dict[str, Any]:
        """The settings that were given, for the prediction."""
        return self.model_dump(include={"batch_size", "precision", "optimizer", "dataset"}, exclude_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff(Answer):
    """Comparison of configurations.

    Attributes:
        target: The target, or None.
        points: The configurations.
        is_on_front: Whether each point is on the Pareto front of time against the final value.
    """

    target: Target | None
    points: tuple[TradeOffPoint, ...]
    is_on_front: tuple[bool, ...]

    def json_fields(self) -> dict[str, Any]:
        """The target in words, and the configurations."""
        rows = []
        for point, is_on_front in zip(self.points, self.is_on_front, strict=True):
            row = {**fields_of(point), "time_to_target_s": ranked(point.time_to_target_s)}
            del row["is_rising"]
            rows.append({**row, "is_on_pareto_front": is_on_front})
        return {"target": None if self.target is None else str(self.target), "configurations": rows}


def trade_off(
    table: str | Path, *, target: str | Target | None = None, metric: str | None = None
) -> TradeOff:
    """Predicted time of an epoch times forecast epochs for each configuration of a table.

    Args:
        table: A CSV with the columns name, run (a curve, by its path from the table), model and device, and
            optionally batch_size, precision, dataset, epochs, schedule, optimizer and price.
        target: Target to reach, such as ``accuracy>=0.92``.
        metric: Name of the metric without a target.

    Raises:
        RecordError: The table cannot be read or lacks columns.
    """
    wanted = parse_target(target) if isinstance(target, str) else target
    rows = read_rows(Path(table), _Configuration)
    points = [_point(row, Path(table).parent, wanted, metric) for _, row in rows]
    return TradeOff(target=wanted, points=tuple(points), is_on_front=tuple(pareto_front(points)))


def _point(row: _Configuration, folder: Path, target: Target | None, metric: str | None) -> TradeOffPoint:
    answer = forecast(
        folder / row.run,
        target=target,
        metric=metric,
        schedule=row.schedule,
        epochs=row.epochs,
        model=row.model,
        devices=[row.device],
        price_usd_per_hour=row.price,
        **row.setup(),
    )
    time = answer.times[0]
    found = answer.curve_forecast
    per_hour = time.clock.price_usd_per_hour
    return TradeOffPoint(
        name=row.name,
        device=time.clock.device,
        epoch_time_s=time.clock.epoch_time_s,
        epochs_to_target=found.epochs_to_target[1],
        time_to_target_s=time.total_s,
        final_value=answer.final_value,
        end_time_s=time.end_s,
        cost_usd=None if per_hour is None else per_hour * time.end_s.value / 3600,
        is_rising=found.curve.is_rising,
    )
