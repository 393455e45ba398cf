"""The smallest crossing that fails as a large one does."""

import copy
from collections.abc import Callable, Iterator

from campaign.drawing import Crossing

HALVED = ("prompts", "num_layers", "num_experts", "prompt_length", "response_length")
"""Sizes that may be less than they are and more than their defaults, beside those of a layout."""


def shrunk(
    crossing: Crossing, fails: Callable[[Crossing], bool], most: int = 60
) -> tuple[Crossing, int]:
    """The crossing with as much turned back as fails all the same, and how many were tried.

    One thing at a time, until nothing more can be turned back.

    Args:
      fails: whether a crossing fails in the same way.
      most: crossings that are tried.
    """
    tried, seen = 0, [crossing]
    while True:
        for smaller in _smaller(crossing):
            if smaller in seen:
                continue
            if tried == most:
                return crossing, tried
            tried += 1
            seen.append(smaller)
            if fails(smaller):
                crossing = smaller
                break
        else:
            return crossing, tried


def _smaller(crossing: Crossing) -> Iterator[Crossing]:
    """With less each: whole sections first, then one thing."""
    for name, value in crossing.items():
        if value:
            yield {**crossing, name: {} if isinstance(value, dict) else None}
    for section, name in _places(crossing):
        for value in _halves(section, name, crossing[section][name]):
            smaller = copy.deepcopy(crossing)
            if value is None:
                del smaller[section][name]
            else:
                smaller[section][name] = value
            yield smaller
    # What splits a rollout is one thing in several fields.
    of_rollout = [x for x in crossing.get("run", {}) if x.startswith(("rollout_", "max_staleness"))]
    if len(of_rollout) > 1:
        smaller = copy.deepcopy(crossing)
        for name in of_rollout:
            del smaller["run"][name]
        yield smaller
    # Axes that must go together: those of the experts with the devices that they are on.
    layout = crossing.get("layout", {})
    for one in layout:
        for other in layout:
            if one < other:
                smaller = copy.deepcopy(crossing)
                for axis in (one, other):
                    _halve(smaller["layout"], axis)
                yield smaller


def _places(crossing: Crossing) -> list[tuple[str, str]]:
    return [
        (section, name)
        for section in ("run", "recipe", "layout", "model")
        for name in crossing.get(section, {})
    ]


def _halves(section: str, name: str, value: object) -> Iterator[object]:
    """Smaller values of a setting; None is its default."""
    if section == "layout":
        yield value // 2 if isinstance(value, int) and value > 2 else None
        return
    yield None
    if name in HALVED and isinstance(value, int) and value > 1:
        yield value // 2
        if name == "num_layers":
            yield value - 1


def _halve(layout: dict[str, int], axis: str) -> None:
    layout[axis] //= 2
    if layout[axis] == 1:
        del layout[axis]
