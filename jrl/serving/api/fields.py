"""Values of arguments: checks of their types and ranges."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jrl.serving.api.errors import invalid_argument
from jrl.tasks.data.fields import short

MAX_TOKENS = 2**31 - 1
"""Limit of a completion's tokens, as counts are 32-bit integers."""
MAX_STOPS = 4


def is_value(*values: Any) -> Callable[[Any], bool]:
    """Predicate that is true for these values, of the same type."""
    return lambda argument: any(
        argument == value and type(argument) is type(value) for value in values
    )


def stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(isinstance(text, str) and text for text in stops) or len(stops) > MAX_STOPS:
        raise invalid_argument(
            "stop",
            f"stop={short(stop)} must be a text that is not empty, or a list of {MAX_STOPS} at "
            "most.",
        )
    return tuple(stops)


def boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise invalid_argument(name, f"{name}={short(value)} must be true or false.")
    return bool(value)


def integer(body: Mapping[str, Any], name: str, minimum: int, maximum: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not minimum <= value <= (
        MAX_TOKENS if maximum is None else maximum
    ):
        span = f"from {minimum} to {MAX_TOKENS}" if maximum is None else f"in {minimum}..{maximum}"
        raise invalid_argument(name, f"{name}={short(value)} must be a whole number {span}.")
    return value


def number(body: Mapping[str, Any], name: str, minimum: float, maximum: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if (
        type(value) not in (int, float)
        or not minimum <= value <= maximum
        or not math.isfinite(value)
    ):
        raise invalid_argument(
            name, f"{name}={short(value)} must be a number in {minimum:g}..{maximum:g}."
        )
    return float(value)
