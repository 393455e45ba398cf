"""Lookup of metrics by name: those that are defined, and those that measure time."""

import difflib
from collections.abc import Collection, Iterable, Mapping

from jrl.report.metric import MetricDefinition
from jrl.report.metric_table import TABLE

EXACT = {metric.name: metric for metric in TABLE if not metric.name.endswith("/*")}
FAMILIES = {metric.name.removesuffix("*"): metric for metric in TABLE if metric.name.endswith("/*")}
TIMINGS = ("timing_s/", "perf/", "timing_per_token_ms/", "faults/")


def describe(name: str) -> MetricDefinition | None:
    """Return the row of the table that defines `name`, that of a family included, or None."""
    if name in EXACT:
        return EXACT[name]
    return next(
        (line for start, line in FAMILIES.items() if name.startswith(start) and name != start), None
    )


def check_defined(names: Iterable[str], recipe_metrics: Collection[str] = ()) -> None:
    """Refuse metrics that neither the table nor the recipe defines.

    Args:
      names: the names to be logged; a dict of metrics serves.
      recipe_metrics: those that the recipe defines (`jrl.recipes.Recipe.metrics`).

    Raises:
      ValueError: for every undefined name, with the nearest defined one.
    """
    unknown = [name for name in names if describe(name) is None and name not in recipe_metrics]
    if not unknown:
        return
    hints = []
    for name in unknown:
        near = difflib.get_close_matches(name, EXACT, n=1)
        hints.append(f'"{name}"' + (f' (did you mean "{near[0]}"?)' if near else ""))
    raise ValueError(
        f"metrics without a definition: {', '.join(hints)}; add a row to TABLE in "
        "jrl/report/metric_table.py, or to `metrics` of your recipe"
    )


def is_timing(name: str) -> bool:
    """Return whether `name` measures time: these alone may differ between runs of one seed."""
    return name.startswith(TIMINGS)


def without_timings(metrics: Mapping[str, float | int]) -> dict[str, float | int]:
    """Return the metrics that two runs of one seed share exactly."""
    return {name: value for name, value in metrics.items() if not is_timing(name)}
