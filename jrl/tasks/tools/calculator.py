"""A calculator: expressions are parsed, never evaluated as a program."""

from jrl.tasks.builtin.expression import parse
from jrl.tasks.tools.tool import Tool

MOST_DIGITS = 40
"""Digits of a result's numerator and denominator at most: what is longer is an error."""


def calculate(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    The value is an integer or a fraction such as ``7/3``.

    Args:
      expression: Numbers, + - * / and parentheses, as in (3+4)*5.

    Raises:
      ValueError: for what is no expression, has no value, or one that is too long.
    """
    try:
        value = parse(expression.strip()).value()
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    if max(abs(value.numerator), value.denominator) >= 10**MOST_DIGITS:
        raise ValueError(f"the result has more than {MOST_DIGITS} digits")
    return str(value)


CALCULATOR = Tool.of(calculate, name="calc")
