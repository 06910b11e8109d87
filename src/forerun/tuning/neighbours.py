"""Search for configurations that have not been tried, the nearest first."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Any

from forerun.tuning.space import Parameter, Space

__all__ = ["configuration_key", "num_configurations", "untried_neighbour"]

_MOST_CONFIGURATIONS = 100_000


def configuration_key(values: Mapping[str, Any]) -> str:
    """Text that identifies values, whatever their order."""
    return json.dumps(dict(values), sort_keys=True, default=str)


def num_configurations(space: Space) -> int | None:
    """Number of configurations in a space; None if a range has infinitely many values."""
    counts = [len(_choices(p)) for p in space.parameters if p.scale_with is None]
    return prod(counts) if all(counts) else None


def untried_neighbour(
    space: Space, values: Mapping[str, Any], tried: Collection[str], seed: int
) -> dict[str, Any] | None:
    """An untried configuration, one parameter away if such a one is left.

    Args:
        space: All parameters; a range of fractions has no neighbours.
        values: Configuration whose neighbours are searched.
        tried: ``configuration_key`` of each tried configuration.
        seed: Seed of the order among neighbours at one distance.

    Returns:
        Values of the configuration; None if all have been tried, or there are too many to search.
    """
    parameters = {p.name: _choices(p) for p in space.parameters if p.scale_with is None}
    order = random.Random(seed)
    near = list(_one_away(parameters, values))
    order.shuffle(near)
    found = next((other for other in near if configuration_key(other) not in tried), None)
    count = num_configurations(space)
    if found is not None or count is None or count > _MOST_CONFIGURATIONS:
        return found
    names, every = list(parameters), list(itertools.product(*parameters.values()))
    order.shuffle(every)
    rows = (dict(zip(names, row, strict=True)) for row in every)
    return next((row for row in rows if configuration_key(row) not in tried), None)


def _choices(parameter: Parameter) -> list[Any]:
    if parameter.values:
        return list(parameter.values)
    if parameter.is_whole and parameter.high - parameter.low < _MOST_CONFIGURATIONS:
        return list(range(int(parameter.low), int(parameter.high) + 1))
    return []


def _one_away(parameters: Mapping[str, list[Any]], values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name, choices in parameters.items():
        for choice in choices:
            if choice != values[name]:
                yield {**values, name: choice}
