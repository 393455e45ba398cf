"""Calculator tool: expressions are parsed, never evaluated as Python.

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := number | "-" factor | "(" expression ")"

Numbers are ASCII digits, spaces between symbols are skipped, and values are exact fractions.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from operator import add, mul, sub, truediv

from jrl.tasks.tools.tool import Tool

# Far beyond any answer, and small enough to be converted quickly.
MAX_LENGTH = 200
MAX_DEPTH = 20

_SYMBOL = re.compile(r" *([0-9]+|[-+*/()])")

_OPERATIONS = {"+": add, "-": sub, "*": mul, "/": truediv}
_NEGATE = "negate"


@dataclass(frozen=True)
class PostfixExpression:
    """An expression in postfix order: each number and operation follows its operands.

    Attributes:
      steps: numbers, the operations ``+ - * /`` of the two values before them, and "negate" of one.
    """

    steps: tuple[int | str, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers, in the order in which they are written."""
        return tuple(step for step in self.steps if isinstance(step, int))

    def value(self) -> Fraction:
        """The exact value.

        Raises:
          ZeroDivisionError: the expression divides by zero.
        """
        stack: list[Fraction] = []
        for step in self.steps:
            if isinstance(step, int):
                stack.append(Fraction(step))
            elif step == _NEGATE:
                stack.append(-stack.pop())
            else:
                right, left = stack.pop(), stack.pop()
                stack.append(_OPERATIONS[step](left, right))
        (value,) = stack
        return value


def parse(text: str) -> PostfixExpression:
    """Reads an arithmetic expression of at most 200 characters, with at most 20 parentheses and
    signs open at a time, by recursive descent.

    Raises:
      ValueError: the text is no expression, or a longer or deeper one.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"text has {len(text)} characters: an expression has at most {MAX_LENGTH}")
    reader = _Reader(_symbols(text))
    reader.expression(depth=0)
    if reader.ahead:
        raise ValueError(f"text={text!r} goes on after its expression with {reader.ahead!r}")
    return PostfixExpression(tuple(reader.steps))


def _symbols(text: str) -> list[str]:
    symbols, start, end = [], 0, len(text.rstrip(" "))
    while start < end:
        match = _SYMBOL.match(text, start)
        if match is None:
            raise ValueError(f"text={text!r} has no number or operation at position {start}")
        symbols.append(match[1])
        start = match.end()
    return symbols


class _Reader:
    """Recursive-descent parser that emits postfix steps; one method per rule of the grammar."""

    def __init__(self, symbols: list[str]):
        self.remaining = symbols[::-1]
        self.steps: list[int | str] = []

    @property
    def ahead(self) -> str:
        return self.remaining[-1] if self.remaining else ""

    def expression(self, depth: int) -> None:
        self._chain(("+", "-"), self.term, depth)

    def term(self, depth: int) -> None:
        self._chain(("*", "/"), self.factor, depth)

    def factor(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} parentheses and signs are open at a time")
        symbol = self.remaining.pop() if self.remaining else "the end"
        if symbol == "(":
            self.expression(depth + 1)
            if self.ahead != ")":
                raise ValueError(f"a parenthesis is open before {self.ahead or 'the end'!r}")
            self.remaining.pop()
        elif symbol == "-":
            self.factor(depth + 1)
            self.steps.append(_NEGATE)
        elif symbol.isdigit():
            self.steps.append(int(symbol))
        else:
            raise ValueError(f"a number is missing before {symbol!r}")

    def _chain(self, operations: tuple[str, str], part: Callable[[int], None], depth: int) -> None:
        """Parses operands joined by operations of one precedence, from left to right."""
        part(depth)
        while self.ahead in operations:
            operation = self.remaining.pop()
            part(depth)
            self.steps.append(operation)


MOST_DIGITS = 40
"""Maximum digits of a result's numerator and of its denominator; more are an error."""


def calculate(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    The value is an integer or a fraction, for example ``7/3``.

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
