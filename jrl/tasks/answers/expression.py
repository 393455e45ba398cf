"""Arithmetic expressions as people and LaTeX write them: parsed with exact values, and compared.

    sum     := product (("+" | "-") product)*
    product := power (("*" | "/" | nothing) power)*
    power   := atom ["^" power] {"%" | "!"}
    atom    := number | "π" | "(" sum ")" | "{" sum "}" | \\frac{sum}{sum} | \\sqrt[n]{sum}

Evaluation takes a bounded time: the bits of a value are bounded before it is computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

from .notation import Token, canonical_number, parse_vulgar_fraction

MAX_BITS = 40_000
MAX_NUMBER_DIGITS = 1_000
MAX_TOKENS = 400
MAX_DEPTH = 30
MAX_FACTORIAL = 3_000


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
    if len(tokens) > MAX_TOKENS:
        raise NoExpression(f"{len(tokens)} tokens are too long for an answer")
    reader = _Reader(tokens)
    expression = reader.sum(0)
    if reader.ahead is not None:
        raise NoExpression(f"it continues with {reader.ahead.text!r}")
    return expression


def _unevaluated(value: Fraction | None) -> Expression:
    return Expression(_check_size(value), final=False)


def _check_size(value: Fraction | None) -> Fraction | None:
    if value is not None:
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        if bits > MAX_BITS:
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
        token = self.ahead
        if token is None:
            raise NoExpression("it ends too early")
        self._at += 1
        return token

    def sum(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise NoExpression(f"more than {MAX_DEPTH} brackets are open at a time")
        expression = self.product(depth)
        while self._next_is("+", "-"):
            minus = self._take().text == "-"
            other = self.product(depth)
            values = expression.value, other.value
            value = None if None in values else expression.value + (-1) ** minus * other.value  # pyright: ignore
            expression = _unevaluated(value)
        return expression

    def product(self, depth: int) -> Expression:
        negative = self._take_signs()
        expression = self.power(depth)
        while self.ahead is not None:
            if self._next_is("*"):
                self._take()
                expression = _multiply(expression, self._signed_power(depth))
            elif self._next_is("/"):
                self._take()
                expression = _divide(expression, self._signed_power(depth))
            elif self._begins_atom():
                expression = self._implicit_product(expression, depth)
            else:
                break
        return _negate(expression) if negative else expression

    def _take_signs(self) -> bool:
        """True if the signs that come next make a number negative."""
        negative = False
        while self._next_is("+", "-"):
            negative ^= self._take().text == "-"
        return negative

    def _signed_power(self, depth: int) -> Expression:
        negative = self._take_signs()
        expression = self.power(depth)
        return _negate(expression) if negative else expression

    def _begins_atom(self) -> bool:
        ahead = self.ahead
        assert ahead is not None
        return ahead.kind in ("number", "vulgar") or ahead.text in ("π", "√", "(", "{", "\\frac",
                                                                      "\\sqrt")  # fmt: skip

    def _implicit_product(self, left: Expression, depth: int) -> Expression:
        """A factor without a sign, or the fraction of a mixed number."""
        ahead = self.ahead
        assert ahead is not None
        is_integer = left.kind == "number" and left.value is not None and "." not in left.written
        if ahead.kind == "number":
            # 2 1/2 is a mixed number; 2 3 is two numbers.
            if not is_integer:
                raise SideBySide("two numbers have no operator between them")
            numerator = self.power(depth)
            if not self._next_is("/"):
                raise SideBySide("two numbers have no operator between them")
            self._take()
            right = _divide(numerator, self.power(depth))
            if right.kind != "fraction":
                raise SideBySide("two numbers have no operator between them")
            return _add_fraction(left, right)
        right = self.power(depth)
        is_fraction = ahead.kind == "vulgar" or ahead.text == "\\frac"
        if is_integer and is_fraction and right.kind == "fraction" and right.value is not None:
            return _add_fraction(left, right)
        return _multiply(left, right)

    def power(self, depth: int) -> Expression:
        expression = self.atom(depth)
        if self._next_is("^"):
            self._take()
            expression = _raise_to_power(expression, self._exponent(depth + 1))
        while self._next_is("%", "!"):
            if self._take().text == "%":
                value = None if expression.value is None else expression.value / 100
                expression = Expression(
                    value, expression.final, expression.written, True, expression.kind
                )
            else:
                expression = _unevaluated(_factorial(expression.value))
        return expression

    def _exponent(self, depth: int) -> Expression:
        if self._next_is("-", "+"):
            negative = self._take().text == "-"
            exponent = self._exponent(depth + 1)
            return _negate(exponent) if negative else exponent
        if depth > MAX_DEPTH:
            raise NoExpression("nested exponents")
        exponent = self.atom(depth)
        if self._next_is("^"):
            self._take()
            return _raise_to_power(exponent, self._exponent(depth + 1))
        return exponent

    def atom(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise NoExpression(f"more than {MAX_DEPTH} commands are nested")
        token = self._take()
        if token.kind == "number":
            return _read_number(token.text)
        if token.kind == "vulgar":
            numerator, denominator = parse_vulgar_fraction(token.text) or (0, 1)
            return Expression(Fraction(numerator, denominator), True, kind="fraction")
        if token.text == "π":
            return Expression(None, final=True)
        if token.text in ("(", "{"):
            expression = self.sum(depth + 1)
            if self._take().text != {"(": ")", "{": "}"}[token.text]:
                raise NoExpression("a bracket is open")
            return expression
        if token.text == "\\frac":
            return _divide(self._argument(depth), self._argument(depth))
        if token.text in ("\\sqrt", "√"):
            return self._root(depth)
        raise NoExpression(f"{token.text!r} is not a number")

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
            written_degree = self._take().text
            if (
                not written_degree.isdigit()
                or not 2 <= int(written_degree[:3]) <= 64
                or self._take().text != "]"
            ):
                raise NoExpression("a root with an empty degree")
            degree = int(written_degree)
        radicand = self._argument(depth)
        return _unevaluated(None if radicand.value is None else _exact_root(radicand.value, degree))


def _read_number(text: str) -> Expression:
    if sum(map(str.isdigit, text)) > MAX_NUMBER_DIGITS:
        raise TooLarge("a number with thousands of digits")
    written = canonical_number(text)
    mantissa, mark, exponent = written.partition("e")
    if not mark:
        return Expression(Fraction(written), True, written, kind="number")
    if abs(int(exponent)) > MAX_NUMBER_DIGITS:
        raise TooLarge("an exponent of thousands")
    return Expression(Fraction(mantissa) * Fraction(10) ** int(exponent), True, written,
                      kind="scientific")  # fmt: skip


def _negate(expression: Expression) -> Expression:
    value = None if expression.value is None else -expression.value
    written = expression.written and (
        expression.written[1:] if expression.written.startswith("-") else f"-{expression.written}"
    )
    return Expression(value, expression.final, written, expression.percent, expression.kind)


def _multiply(left: Expression, right: Expression) -> Expression:
    if left.value is None or right.value is None:
        return Expression(None, final=False)
    value = _check_size(left.value * right.value)
    mantissa = left.kind == "number" and 1 <= abs(left.value) < 10
    if mantissa and right.kind == "scientific" and right.written.startswith("1e"):
        return Expression(value, True, left.written + right.written[1:], kind="scientific")
    return Expression(value, final=False)


def _divide(left: Expression, right: Expression) -> Expression:
    if left.value is None or right.value is None:
        return Expression(None, final=False)
    if not right.value:
        raise NoExpression("a division by zero")
    value = _check_size(left.value / right.value)
    are_integers = all(
        operand.kind == "number" and operand.value is not None and operand.value.denominator == 1
        and "." not in operand.written and not operand.percent
        for operand in (left, right)
    )  # fmt: skip
    lowest = are_integers and value is not None and value.denominator == abs(right.value) != 1
    return Expression(value, final=lowest, kind="fraction" if lowest else "")


def _add_fraction(integer: Expression, fraction: Expression) -> Expression:
    assert integer.value is not None and fraction.value is not None
    final = integer.final and fraction.final and 0 < fraction.value < 1
    return Expression(integer.value + fraction.value, final, kind="fraction" if final else "")


def _raise_to_power(base: Expression, exponent: Expression) -> Expression:
    if base.value is None or exponent.value is None:
        return Expression(None, final=False)
    power, value = exponent.value, base.value
    if power.denominator != 1:
        if power.denominator > 64 or abs(power.numerator) > 64:
            raise TooLarge("a fractional exponent that is too large")
        root = _exact_root(value, power.denominator)
        if root is None:
            return Expression(None, final=False)
        value, power = root, Fraction(power.numerator)
    if not value and power < 0:
        raise NoExpression("a division by zero")
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if value not in (0, 1, -1) and abs(power) * bits > MAX_BITS:
        raise TooLarge("a power with too many digits")
    if value in (0, 1, -1):
        power = power % 2 if value == -1 else min(power, Fraction(1))
    raised = value ** int(power)
    if base.written == "10" and exponent.written.lstrip("-").isdigit():
        return Expression(raised, True, f"1e{exponent.written}", kind="scientific")
    return Expression(raised, final=False)


def _factorial(value: Fraction | None) -> Fraction | None:
    if value is None or value.denominator != 1 or value < 0:
        raise NoExpression("a factorial of a number that is not a whole number")
    if value > MAX_FACTORIAL:
        raise TooLarge("a factorial with too many digits")
    return Fraction(math.factorial(int(value)))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The root where it is rational."""
    if value < 0 and degree % 2 == 0:
        return None
    roots = [_integer_root(abs(term), degree) for term in (value.numerator, value.denominator)]
    if roots[0] is None or roots[1] is None:
        return None
    return Fraction(roots[0] if value >= 0 else -roots[0], roots[1])


def _integer_root(value: int, degree: int) -> int | None:
    """Newton's method in whole numbers."""
    if value < 2:
        return value
    root = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * root + value // root ** (degree - 1)) // degree
        if better >= root:
            return root if root**degree == value else None
        root = better


SIGNIFICANT = 6
"""Digits that a decimal must show to stand for a number that it is rounded from."""
EXACT_DIGITS = 15
"""Digits that binary floating point holds: beyond them two results of one sum may differ."""


def same_number(reference: Expression, answer: Expression) -> bool:
    """True if two numbers are equal exactly, or if one is the rounding of the other.

    A decimal may be a rounding where it shows `SIGNIFICANT` digits. Where one shows `EXACT_DIGITS`
    digits, a difference of floating-point rounding is allowed. A percentage may be written with its
    sign or without.
    """
    assert reference.value is not None and answer.value is not None
    if reference.percent != answer.percent:
        hundredfold = reference if reference.percent else answer
        assert hundredfold.value is not None
        as_percent = Expression(hundredfold.value * 100, True, hundredfold.written)
        pair = (as_percent, answer) if reference.percent else (reference, as_percent)
        return _close(*pair) or _close(reference, answer)
    return _close(reference, answer)


def _close(reference: Expression, answer: Expression) -> bool:
    assert reference.value is not None and answer.value is not None
    if reference.value == answer.value:
        return True
    decimals = [(each, significant_digits(each)) for each in (reference, answer) if each.is_decimal]
    if not decimals or reference.value * answer.value <= 0:
        return False
    coarse, digits = min(decimals, key=lambda each: each[1])
    other = answer if coarse is reference else reference
    assert coarse.value is not None and other.value is not None
    if digits >= SIGNIFICANT and round_to_digits(other.value, digits) == coarse.value:
        return True
    max_digits = max(digits for _, digits in decimals)
    difference = abs(reference.value - answer.value)
    return max_digits >= EXACT_DIGITS and difference * 10 ** (EXACT_DIGITS - 1) <= abs(
        reference.value
    )


def significant_digits(decimal: Expression) -> int:
    """Number of digits that a decimal shows, without leading zeros."""
    mantissa = decimal.written.lstrip("-").partition("e")[0]
    return len(mantissa.replace(".", "").lstrip("0"))


def round_to_digits(value: Fraction, digits: int) -> Fraction:
    """The nearest number with so many significant digits."""
    context = Context(prec=digits, rounding=ROUND_HALF_EVEN, Emax=10**6, Emin=-(10**6))
    return Fraction(context.divide(Decimal(value.numerator), Decimal(value.denominator)))
