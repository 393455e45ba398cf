"""Parser of arithmetic expressions as people and LaTeX write them, with exact values.

    sum     := product (("+" | "-") product)*
    product := power (("*" | "/" | nothing) power)*
    power   := atom ["^" power] {"%" | "!"}
    atom    := number | "π" | "(" sum ")" | "{" sum "}" | \\frac{sum}{sum} | \\sqrt[n]{sum}

Evaluation takes a bounded time: the bits of a value are bounded before it is computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .markup import vulgar
from .tokens import Token, canonical

MOST_BITS = 40_000
MOST_DIGITS = 1_000
MOST_TOKENS = 400
MOST_DEPTH = 30
MOST_FACTORIAL = 3_000


class NoExpression(ValueError):
    """Tokens that are no arithmetic expression."""


class SideBySide(NoExpression):
    """Adjacent numbers, with nothing that joins them."""


class TooLarge(ValueError):
    """A value with more bits than anybody asks for."""


@dataclass(frozen=True)
class Expression:
    """An expression.

    Attributes:
      value: exact; None where it is irrational.
      final: whether it is a number in final form, with nothing left to work out.
      written: the digits it shows, "" but for a single number: its text without grouping.
      percent: whether it is a number of percent, whose value is that of a hundredth part.
      kind: "number", "fraction", "scientific" where final, else "".
    """

    value: Fraction | None
    final: bool
    written: str = ""
    percent: bool = False
    kind: str = ""

    @property
    def is_decimal(self) -> bool:
        """True if it is written with a point or an exponent, and may be a rounded number."""
        return "." in self.written or "e" in self.written


def read_expression(tokens: Sequence[Token]) -> Expression:
    """The expression that all of the tokens make.

    Raises:
      NoExpression: where they make none.
      TooLarge: where a part has a value beyond all bounds.
    """
    if len(tokens) > MOST_TOKENS:
        raise NoExpression(f"{len(tokens)} tokens are no answer")
    reader = _Reader(tokens)
    found = reader.sum(0)
    if reader.ahead is not None:
        raise NoExpression(f"it goes on with {reader.ahead.text!r}")
    return found


def _unfinished(value: Fraction | None) -> Expression:
    return Expression(_bounded(value), final=False)


def _bounded(value: Fraction | None) -> Fraction | None:
    if value is not None:
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        if bits > MOST_BITS:
            raise TooLarge(f"a value has {bits} bits")
    return value


class _Reader:
    """Takes tokens from the left; a method for each rule of the grammar."""

    def __init__(self, tokens: Sequence[Token]):
        self._tokens, self._at = list(tokens), 0

    @property
    def ahead(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next_is(self, *texts: str) -> bool:
        return self.ahead is not None and self.ahead.text in texts

    def _take(self) -> Token:
        found = self.ahead
        if found is None:
            raise NoExpression("it ends too early")
        self._at += 1
        return found

    def sum(self, depth: int) -> Expression:
        if depth > MOST_DEPTH:
            raise NoExpression(f"more than {MOST_DEPTH} brackets are open at a time")
        found = self.product(depth)
        while self._next_is("+", "-"):
            minus = self._take().text == "-"
            other = self.product(depth)
            values = found.value, other.value
            value = None if None in values else found.value + (-1) ** minus * other.value  # pyright: ignore
            found = _unfinished(value)
        return found

    def product(self, depth: int) -> Expression:
        negative = False
        while self._next_is("+", "-"):
            negative ^= self._take().text == "-"
        found = self.power(depth)
        while self.ahead is not None:
            if self._next_is("*"):
                self._take()
                found = _times(found, self._signed(depth))
            elif self._next_is("/"):
                self._take()
                found = _over(found, self._signed(depth))
            elif self._begins_atom():
                found = self._beside(found, depth)
            else:
                break
        return _negated(found) if negative else found

    def _signed(self, depth: int) -> Expression:
        negative = False
        while self._next_is("+", "-"):
            negative ^= self._take().text == "-"
        found = self.power(depth)
        return _negated(found) if negative else found

    def _begins_atom(self) -> bool:
        ahead = self.ahead
        assert ahead is not None
        return ahead.kind in ("number", "vulgar") or ahead.text in ("π", "√", "(", "{", "\\frac",
                                                                      "\\sqrt")  # fmt: skip

    def _beside(self, found: Expression, depth: int) -> Expression:
        """A factor without a sign, or the fraction of a mixed number."""
        ahead = self.ahead
        assert ahead is not None
        whole = found.kind == "number" and found.value is not None and "." not in found.written
        if ahead.kind == "number":
            # 2 1/2 is a mixed number; 2 3 is two numbers.
            if not whole:
                raise SideBySide("two numbers stand beside each other")
            numerator = self.power(depth)
            if not self._next_is("/"):
                raise SideBySide("two numbers stand beside each other")
            self._take()
            part = _over(numerator, self.power(depth))
            if part.kind != "fraction":
                raise SideBySide("two numbers stand beside each other")
            return _mixed(found, part)
        part = self.power(depth)
        is_fraction = ahead.kind == "vulgar" or ahead.text == "\\frac"
        if whole and is_fraction and part.kind == "fraction" and part.value is not None:
            return _mixed(found, part)
        return _times(found, part)

    def power(self, depth: int) -> Expression:
        found = self.atom(depth)
        if self._next_is("^"):
            self._take()
            found = _raised(found, self._exponent(depth + 1))
        while self._next_is("%", "!"):
            if self._take().text == "%":
                value = None if found.value is None else found.value / 100
                found = Expression(value, found.final, found.written, True, found.kind)
            else:
                found = _unfinished(_factorial(found.value))
        return found

    def _exponent(self, depth: int) -> Expression:
        if self._next_is("-", "+"):
            negative = self._take().text == "-"
            found = self._exponent(depth + 1)
            return _negated(found) if negative else found
        if depth > MOST_DEPTH:
            raise NoExpression("a tower of exponents")
        found = self.atom(depth)
        if self._next_is("^"):
            self._take()
            return _raised(found, self._exponent(depth + 1))
        return found

    def atom(self, depth: int) -> Expression:
        if depth > MOST_DEPTH:
            raise NoExpression(f"more than {MOST_DEPTH} commands stand in each other")
        token = self._take()
        if token.kind == "number":
            return _number(token.text)
        if token.kind == "vulgar":
            numerator, denominator = vulgar(token.text) or (0, 1)
            return Expression(Fraction(numerator, denominator), True, kind="fraction")
        if token.text == "π":
            return Expression(None, final=True)
        if token.text in ("(", "{"):
            found = self.sum(depth + 1)
            if self._take().text != {"(": ")", "{": "}"}[token.text]:
                raise NoExpression("a bracket is open")
            return found
        if token.text == "\\frac":
            return _over(self._argument(depth), self._argument(depth))
        if token.text in ("\\sqrt", "√"):
            return self._root(depth)
        raise NoExpression(f"{token.text!r} is no number")

    def _argument(self, depth: int) -> Expression:
        """Argument of a command: in braces, or a single digit."""
        ahead = self.ahead
        if ahead is not None and ahead.kind == "number" and len(ahead.text) > 1:
            # \frac12 is a half.
            if not ahead.text.isdigit():
                raise NoExpression("an argument without braces")
            first, rest = ahead.text[0], ahead.text[1:]
            self._tokens[self._at : self._at + 1] = [
                Token("number", first, ahead.begin, ahead.begin + 1),
                Token("number", rest, ahead.begin + 1, ahead.end),
            ]
        return self.atom(depth + 1)

    def _root(self, depth: int) -> Expression:
        degree = 2
        if self._next_is("["):
            self._take()
            given = self._take().text
            if not given.isdigit() or not 2 <= int(given[:3]) <= 64 or self._take().text != "]":
                raise NoExpression("a root of no degree")
            degree = int(given)
        found = self._argument(depth)
        return _unfinished(None if found.value is None else _exact_root(found.value, degree))


def _number(text: str) -> Expression:
    if sum(map(str.isdigit, text)) > MOST_DIGITS:
        raise TooLarge("a number with thousands of digits")
    written = canonical(text)
    mantissa, mark, exponent = written.partition("e")
    if not mark:
        return Expression(Fraction(written), True, written, kind="number")
    if abs(int(exponent)) > MOST_DIGITS:
        raise TooLarge("an exponent of thousands")
    return Expression(Fraction(mantissa) * Fraction(10) ** int(exponent), True, written,
                      kind="scientific")  # fmt: skip


def _negated(found: Expression) -> Expression:
    value = None if found.value is None else -found.value
    written = found.written and (
        found.written[1:] if found.written.startswith("-") else f"-{found.written}"
    )
    return Expression(value, found.final, written, found.percent, found.kind)


def _times(left: Expression, right: Expression) -> Expression:
    if left.value is None or right.value is None:
        return Expression(None, final=False)
    value = _bounded(left.value * right.value)
    mantissa = left.kind == "number" and 1 <= abs(left.value) < 10
    if mantissa and right.kind == "scientific" and right.written.startswith("1e"):
        return Expression(value, True, left.written + right.written[1:], kind="scientific")
    return Expression(value, final=False)


def _over(left: Expression, right: Expression) -> Expression:
    if left.value is None or right.value is None:
        return Expression(None, final=False)
    if not right.value:
        raise NoExpression("a division by nothing")
    value = _bounded(left.value / right.value)
    whole = all(
        part.kind == "number" and part.value is not None and part.value.denominator == 1
        and "." not in part.written and not part.percent
        for part in (left, right)
    )  # fmt: skip
    lowest = whole and value is not None and value.denominator == abs(right.value) != 1
    return Expression(value, final=lowest, kind="fraction" if lowest else "")


def _mixed(whole: Expression, part: Expression) -> Expression:
    assert whole.value is not None and part.value is not None
    final = whole.final and part.final and 0 < part.value < 1
    return Expression(whole.value + part.value, final, kind="fraction" if final else "")


def _raised(base: Expression, exponent: Expression) -> Expression:
    if base.value is None or exponent.value is None:
        return Expression(None, final=False)
    power, value = exponent.value, base.value
    if power.denominator != 1:
        if power.denominator > 64 or abs(power.numerator) > 64:
            raise TooLarge("a broken power")
        root = _exact_root(value, power.denominator)
        if root is None:
            return Expression(None, final=False)
        value, power = root, Fraction(power.numerator)
    if not value and power < 0:
        raise NoExpression("a division by nothing")
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if value not in (0, 1, -1) and abs(power) * bits > MOST_BITS:
        raise TooLarge("a power with too many digits")
    if value in (0, 1, -1):
        power = power % 2 if value == -1 else min(power, Fraction(1))
    raised = value ** int(power)
    if base.written == "10" and exponent.written.lstrip("-").isdigit():
        return Expression(raised, True, f"1e{exponent.written}", kind="scientific")
    return Expression(raised, final=False)


def _factorial(value: Fraction | None) -> Fraction | None:
    if value is None or value.denominator != 1 or value < 0:
        raise NoExpression("a factorial of no whole number")
    if value > MOST_FACTORIAL:
        raise TooLarge("a factorial with too many digits")
    return Fraction(math.factorial(int(value)))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The root where it is rational."""
    if value < 0 and degree % 2 == 0:
        return None
    parts = [_whole_root(abs(part), degree) for part in (value.numerator, value.denominator)]
    if parts[0] is None or parts[1] is None:
        return None
    return Fraction(parts[0] if value >= 0 else -parts[0], parts[1])


def _whole_root(value: int, degree: int) -> int | None:
    """Newton's method in whole numbers."""
    if value < 2:
        return value
    root = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * root + value // root ** (degree - 1)) // degree
        if better >= root:
            return root if root**degree == value else None
        root = better
