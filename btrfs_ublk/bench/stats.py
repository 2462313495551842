"""Statistics of benchmarks: quantiles, medians, groups. Pure functions."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeVar

_Item = TypeVar("_Item")


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the least of the ordered values that ``share`` of them do not exceed.

    This is the nearest rank: always one of the values, never interpolated.
    """
    if not ordered or not 0 < share <= 1:
        raise ValueError(f"no quantile {share} of {len(ordered)} values")
    # The product may have a rounding error: 0.07 * 100 is more than 7.
    return ordered[math.ceil(round(share * len(ordered), 6)) - 1]


def grouped(
    items: Iterable[_Item], key: Callable[[_Item], object]
) -> dict[Any, list[_Item]]:
    """Group items with equal keys, in the order of each group's first item."""
    groups: dict[Any, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def median_of(results: Iterable[Mapping[str, Any]], name: str) -> float:
    """Return the median of one value of the results; NaN when none has it."""
    values = [result[name] for result in results if result.get(name) is not None]
    return float(median(values)) if values else math.nan


def bootstrap_interval(
    values: Sequence[float],
    baseline: Sequence[float] | None = None,
    *,
    paired: bool = False,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 1,
) -> tuple[float, float]:
    """Return an interval that covers the median, or its ratio to the median of a
    baseline, in a share ``confidence`` of all cases. (NaN, NaN) for fewer than two
    values of either.

    Its ends are percentiles of the medians of ``resamples`` samples, drawn with
    replacement. With ``paired``, values and baseline of one turn have the same index
    and are drawn together, so that what slowed both down has no effect. The seed makes
    it repeatable. NB: the interval is too narrow for a handful of values.
    """
    if not 0 < confidence < 1 or resamples < 1:
        raise ValueError(f"no interval of {confidence} from {resamples} samples")
    if paired and len(values) != len(baseline or ()):
        raise ValueError(f"{len(values)} values, {len(baseline or ())} of the baseline")
    if len(values) < 2 or (baseline is not None and len(baseline) < 2):
        return math.nan, math.nan
    chances = random.Random(seed)
    found = []
    for _ in range(resamples):
        drawn = chances.choices(range(len(values)), k=len(values))
        figure = median([values[index] for index in drawn])
        if baseline is not None:
            if not paired:
                drawn = chances.choices(range(len(baseline)), k=len(baseline))
            below = median([baseline[index] for index in drawn])
            figure = figure / below if below else math.inf
        found.append(figure)
    found.sort()
    beyond = (1 - confidence) / 2
    return quantile(found, beyond), quantile(found, 1 - beyond)


class Ratio(NamedTuple):
    """The ratio of medians, over the turns that both have, its 95 % interval, and the
    ratio of each turn. The interval is NaN when there are too few turns.
    """

    middle: float = math.nan
    low: float = math.nan
    high: float = math.nan
    turns: Sequence[float] = ()


def _value(result: Mapping[str, Any], figure: str) -> float:
    if figure == "per_core":
        return 1 / result["cpu_us"] if result.get("cpu_us") else 0.0
    return float(result.get(figure) or 0.0)


def ratio_of(
    results: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    figure: str,
) -> Ratio:
    """Return the ratio of one figure. Different runs share turn numbers."""
    below = {(x.get("run"), x.get("turn")): _value(x, figure) for x in baseline}
    both = [
        (_value(x, figure), below.get((x.get("run"), x.get("turn")), 0.0))
        for x in results
    ]
    both = [pair for pair in both if min(pair) > 0]
    if not both:
        return Ratio()
    values, bases = zip(*both)
    low, high = bootstrap_interval(values, bases, paired=True)
    turns = [value / base for value, base in both]
    return Ratio(median(values) / median(bases), low, high, turns)
