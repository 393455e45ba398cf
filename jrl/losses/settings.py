"""Validation of scalar settings (hyperparameters).

A setting may be a Python, numpy or jax number. A concrete one is checked and converted to a Python
number, which takes the dtype of the arrays it is combined with. A traced one is returned unchanged
and unchecked, as its value is not available.
"""

import operator
from typing import Any, SupportsIndex, TypeAlias, get_args

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jrl.losses.arrays import Number, Scalar

# A validated setting: a Python number, or an array if traced.
Checked: TypeAlias = int | float | Array
# One distance for both directions, or two as (down, up).
Sides: TypeAlias = Number | tuple[Number, Number] | list[Number] | Float[ArrayLike, "2"]


def number(
    name: str,
    x: Number,
    rule: str = "must be a number, not NaN.",
    *,
    at_least: int | float | None = None,
    above: int | float | None = None,
    at_most: int | float | None = None,
) -> Checked:
    """Validates a scalar setting `x`; traced values are not checked. None disables a limit.

    Raises:
      ValueError: if `x` is not a number, has axes, is NaN, or is out of range (``name=x rule``).
    """
    x = _scalar(name, x)
    if isinstance(x, Tracer):
        return x
    allowed = (
        x == x
        and (at_least is None or x >= at_least)
        and (above is None or x > above)
        and (at_most is None or x <= at_most)
    )
    if not allowed:
        raise ValueError(f"{name}={x} {rule}")
    return x


def optional(
    name: str, x: Number | None, rule: str, **limits: int | float | None
) -> Checked | None:
    """Validates a setting as `number` does; None ("off") stays None."""
    return None if x is None else number(name, x, rule, **limits)


def discount(name: str, x: Scalar | Shaped[ArrayLike, "..."]) -> Any:
    """Validates a discount or lambda: a scalar in [0, 1], or an array, which is not checked."""
    if not is_array(x):
        raise ValueError(f"{name}={x!r} must be a number, or an array of numbers.")
    if not jnp.ndim(x):
        rule = "must lie in [0, 1]: beyond it far tokens would count for more than near ones."
        number(name, x, rule, at_least=0, at_most=1)
    return x


def distance(name: str, x: Number, off: str = "float('inf') is off") -> Checked:
    """Validates a distance: 0 or more."""
    return number(name, x, f"is a distance and cannot be negative; {off}.", at_least=0)


def optional_distance(name: str, x: Number | None) -> Checked | None:
    """Validates a distance; None ("off") stays None."""
    return None if x is None else distance(name, x, "None is off")


def epsilon(name: str, x: Number) -> Checked:
    """Validates an epsilon that is added to a divisor: 0 or more."""
    return number(name, x, "is added to a divisor and cannot be negative; 0 is off.", at_least=0)


def distance_pair(name: str, x: Sides, off: str = "float('inf') is off") -> tuple[Checked, Checked]:
    """Validates two distances (down, up), or one for both directions."""
    distances: Any = x
    shape = (len(distances),) if type(x) in (tuple, list) else ()
    if is_array(x):
        shape = jnp.shape(distances)
    if not shape:
        both = distance(name, distances, off)
        return both, both
    if shape != (2,):
        raise ValueError(
            f"{name} has shape {shape} and must be one distance, or two as (down, up)."
        )
    return distance(name, distances[0], off), distance(name, distances[1], off)


def span(low: Number, high: Number, why: str, *, equal: bool = False) -> tuple[Checked, Checked]:
    """Validates a range: `low` below `high`, or at most `high` if `equal`."""
    low, high = number("low", low), number("high", high)
    if isinstance(low, Array) or isinstance(high, Array):
        return low, high
    if low > high or (low == high and not equal):
        relation = "must not be above" if equal else "must be below"
        raise ValueError(f"low={low} {relation} high={high}: {why}")
    return low, high


def count(name: str, x: Scalar | None, of: str) -> Checked | None:
    """Validates a count over the whole batch; None (the caller counts its arrays) stays None."""
    rule = f"counts the {of} of the whole batch, one number of 0 or more."
    return optional(name, x, rule, at_least=0)


def integer(name: str, x: SupportsIndex, rule: str, *, at_least: int) -> int:
    """Validates an integer that shapes the compiled function, so that it must not be traced."""
    setting: Any = x
    value = static(name, setting, rule, at_least=at_least)
    if value % 1:
        raise ValueError(f"{name}={value} must be a whole number.")
    return int(value)


def static(name: str, x: Number, rule: str, **limits: int | float | None) -> int | float:
    """Validates a setting that shapes the compiled function, so that it must not be traced."""
    x = number(name, x, rule, **limits)
    if isinstance(x, Array):
        raise ValueError(
            f"{name} is traced, but must be static, as it decides what is compiled: give a "
            "number, or name it in jax.jit(static_argnames=...)."
        )
    return x


def choice(name: str, x: str, among: Any, what: str = "one of them") -> None:
    """Checks that `x` is one of the strings of the `Literal` `among`.

    With more than two of them, the message says that `x` is "not `what`".
    """
    names = get_args(among)
    if x not in names:
        two = f"neither {names[0]!r} nor {names[-1]!r}."
        more = f"not {what}: choose one of {', '.join(names)}."
        raise ValueError(f"{name}={x!r} is {two if len(names) == 2 else more}")


def check_scalar(name: str, x: Scalar) -> None:
    """Checks that `x`, a computed value and not a setting, is a scalar."""
    if jnp.ndim(x):
        raise ValueError(f"{name} has shape {jnp.shape(x)} and must be one number.")


def is_array(x: Any) -> bool:
    """True if `x` is a Python, numpy or jax number or array."""
    return isinstance(x, get_args(ArrayLike))


def _scalar(name: str, x: Any) -> Checked:
    """Converts a number to a Python number; a traced one is returned unchanged."""
    if type(x) in (bool, int, float):
        return x
    if not is_array(x) or jnp.iscomplexobj(x):
        raise ValueError(f"{name}={x!r} must be a number.")
    check_scalar(name, x)
    if isinstance(x, Tracer):
        return x
    try:
        return operator.index(x)
    except TypeError:
        return float(x)
