"""Arithmetic expressions in plain or LaTeX notation: parsed with exact values, and compared.

    sum     := product (("+" | "-") product)*
    product := power (("*" | "/" | nothing) power)*
    power   := atom ["^" power] {"%" | "!"}
    atom    := number | "π" | "(" sum ")" | "{" sum "}" | \\frac{sum}{sum} | \\sqrt[n]{sum}

Evaluation takes a bounded time: the bits of a value are bounded before it is computed.
"""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

from .notation import Token, canonical_number

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
    """A value or an exponent that is too large."""


@dataclass(frozen=True)
class Expression:
    """An expression.

    Attributes:
      value: exact; None if it is irrational.
      final: whether it is a number in final form, with nothing left to work out.
      written: text of a single number, without grouping; "" for any other expression.
      percent: whether it is a percentage; its value is then a hundredth of the number.
      kind: "number", "fraction" or "scientific" if final, else "".
    """

    value: Fraction | None
    final: bool = False
    written: str = ""
    percent: bool = False
    kind: str = ""

    @property
    def is_decimal(self) -> bool:
        """True if it is written with a point or an exponent, and may be a rounded number."""
        return "." in self.written or "e" in self.written

    @property
    def is_integer(self) -> bool:
        """True if it is a number that is written in digits alone."""
        return self.kind == "number" and "." not in self.written


def read_expression(tokens: Sequence[Token]) -> Expression:
    """Parses all of the tokens as one expression.

    Raises:
      NoExpression: if they are not one.
      TooLarge: if the value of a part is too large.
    """
    if len(tokens) > MAX_TOKENS:
        raise NoExpression(f"{len(tokens)} tokens are too long for an answer")
    reader = _Reader(tokens)
    expression = reader.sum(0)
    if reader.ahead is not None:
        raise NoExpression(f"it continues with {reader.ahead.text!r}")
    return expression


def _unevaluated(value: Fraction | None) -> Expression:
    """An expression that is not in final form, with a value of at most `MAX_BITS` bits."""
    if value is not None:
        bits = value.numerator.bit_length() + value.denominator.bit_length()
        if bits > MAX_BITS:
            raise TooLarge(f"a value has {bits} bits")
    return Expression(value)


_BEGIN_ATOM = ("π", "√", "(", "{", "\\frac", "\\sqrt")


class _Reader:
    """Takes tokens from the left; a method for each rule of the grammar."""

    def __init__(self, tokens: Sequence[Token]):
        self._tokens, self._at = list(tokens), 0

    @property
    def ahead(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> Token:
        token = self.ahead
        if token is None:
            raise NoExpression("it ends too early")
        self._at += 1
        return token

    def _accept(self, *texts: str) -> str:
        """Takes the next token if it is one of these, and returns its text; else ""."""
        return self._take().text if self.ahead is not None and self.ahead.text in texts else ""

    def sum(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise NoExpression(f"more than {MAX_DEPTH} brackets are open at a time")
        expression = self.product(depth)
        while sign := self._accept("+", "-"):
            other = self.product(depth)
            expression = _add(expression, _negate(other) if sign == "-" else other)
        return expression

    def product(self, depth: int) -> Expression:
        negative, is_single = self._take_signs()
        expression = self.power(depth)
        while (ahead := self.ahead) is not None:
            if operator := self._accept("*", "/"):
                combine = _multiply if operator == "*" else _divide
                expression = combine(expression, self._signed_power(depth))
            elif ahead.kind in ("number", "vulgar") or ahead.text in _BEGIN_ATOM:
                expression = self._implicit_product(expression, ahead, depth)
            else:
                break
        expression = _negate(expression) if negative else expression
        return expression if is_single else replace(expression, final=False, kind="")

    def _take_signs(self) -> tuple[bool, bool]:
        """Reads the next signs: whether they make a number negative, whether one is the most."""
        negative, count = False, 0
        while sign := self._accept("+", "-"):
            negative, count = negative ^ (sign == "-"), count + 1
        return negative, count < 2

    def _signed_power(self, depth: int) -> Expression:
        negative, _ = self._take_signs()
        expression = self.power(depth)
        return _negate(expression) if negative else expression

    def _implicit_product(self, left: Expression, ahead: Token, depth: int) -> Expression:
        """A factor next to the one before it, as in 2π, or the fraction of a mixed number."""
        if ahead.kind == "number":
            # 2 1/2 is a mixed number; 2 3 is two numbers.
            if left.is_integer:
                numerator = self.power(depth)
                if self._accept("/"):
                    right = _divide(numerator, self.power(depth))
                    if right.kind == "fraction":
                        return _add_fraction(left, right)
            raise SideBySide("two numbers have no operator between them")
        right = self.power(depth)
        is_fraction = ahead.kind == "vulgar" or ahead.text == "\\frac"
        if left.is_integer and is_fraction and right.kind == "fraction":
            return _add_fraction(left, right)
        return _multiply(left, right)

    def power(self, depth: int) -> Expression:
        expression = self.atom(depth)
        if self._accept("^"):
            expression = _raise_to_power(expression, self._exponent(depth + 1))
        while mark := self._accept("%", "!"):
            value = expression.value
            if mark == "!":
                expression = _unevaluated(_factorial(value))
            else:
                value = None if value is None else value / 100
                expression = replace(expression, value=value, percent=True)
        return expression

    def _exponent(self, depth: int) -> Expression:
        if sign := self._accept("-", "+"):
            exponent = self._exponent(depth + 1)
            return _negate(exponent) if sign == "-" else exponent
        if depth > MAX_DEPTH:
            raise NoExpression("nested exponents")
        exponent = self.atom(depth)
        if self._accept("^"):
            return _raise_to_power(exponent, self._exponent(depth + 1))
        return exponent

    def atom(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise NoExpression(f"more than {MAX_DEPTH} commands are nested")
        token = self._take()
        if token.kind == "number":
            return _read_number(token.text)
        if token.kind == "vulgar":
            # ½, a single character, is 1, a fraction slash and 2.
            written = unicodedata.normalize("NFKC", token.text).replace("\u2044", "/")
            return Expression(Fraction(written), True, kind="fraction")
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
        if self._accept("["):
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
    value = Fraction(mantissa) * Fraction(10) ** int(exponent)
    return Expression(value, True, written, kind="scientific")


def _negate(expression: Expression) -> Expression:
    value = None if expression.value is None else -expression.value
    if value is not None and value > 0:
        return Expression(value)  # -(-42) is still to be worked out
    written = expression.written and f"-{expression.written}".removeprefix("--")
    return replace(expression, value=value, written=written)


def _add(left: Expression, right: Expression) -> Expression:
    if left.value is None or right.value is None:
        return Expression(None)
    return _unevaluated(left.value + right.value)


def _multiply(left: Expression, right: Expression) -> Expression:
    if left.value is None or right.value is None:
        return Expression(None)
    product = _unevaluated(left.value * right.value)
    mantissa = left.kind == "number" and 1 <= abs(left.value) < 10
    if mantissa and right.kind == "scientific" and right.written.startswith("1e"):
        written = left.written + right.written[1:]
        return replace(product, final=True, written=written, kind="scientific")
    return product


def _divide(left: Expression, right: Expression) -> Expression:
    if left.value is None or right.value is None:
        return Expression(None)
    if not right.value:
        raise NoExpression("a division by zero")
    value = left.value / right.value
    are_integers = all(each.is_integer and not each.percent for each in (left, right))
    lowest = are_integers and value.denominator == abs(right.value) != 1
    return replace(_unevaluated(value), final=lowest, kind="fraction" if lowest else "")


def _add_fraction(integer: Expression, fraction: Expression) -> Expression:
    assert integer.value is not None and fraction.value is not None
    final = 0 < fraction.value < 1
    return Expression(integer.value + fraction.value, final, kind="fraction" if final else "")


def _raise_to_power(base: Expression, exponent: Expression) -> Expression:
    if base.value is None or exponent.value is None:
        return Expression(None)
    power, value = exponent.value, base.value
    if power.denominator != 1:
        if power.denominator > 64 or abs(power.numerator) > 64:
            raise TooLarge("a fractional exponent that is too large")
        root = _exact_root(value, power.denominator)
        if root is None:
            return Expression(None)
        value, power = root, Fraction(power.numerator)
    if not value and power < 0:
        raise NoExpression("a division by zero")
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if value in (0, 1, -1):
        power = power % 2 if value == -1 else min(power, Fraction(1))
    elif abs(power) * bits > MAX_BITS:
        raise TooLarge("a power with too many digits")
    raised = value ** int(power)
    if base.written == "10" and exponent.written.lstrip("-").isdigit():
        return Expression(raised, True, f"1e{exponent.written}", kind="scientific")
    return Expression(raised)


def _factorial(value: Fraction | None) -> Fraction | None:
    if value is None or value.denominator != 1 or value < 0:
        raise NoExpression("a factorial of a number that is not a whole number")
    if value > MAX_FACTORIAL:
        raise TooLarge("a factorial with too many digits")
    return Fraction(math.factorial(int(value)))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The root; None if it is irrational."""
    if value < 0 and degree % 2 == 0:
        return None
    roots = [_integer_root(abs(term), degree) for term in (value.numerator, value.denominator)]
    if roots[0] is None or roots[1] is None:
        return None
    return Fraction(roots[0] if value >= 0 else -roots[0], roots[1])


def _integer_root(value: int, degree: int) -> int | None:
    """Integer root by Newton's method; None if the root is not an integer."""
    if value < 2:
        return value
    root = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * root + value // root ** (degree - 1)) // degree
        if better >= root:
            return root if root**degree == value else None
        root = better


SIGNIFICANT = 6
"""Minimum number of digits of a decimal that is accepted as a rounding of another number."""
EXACT_DIGITS = 15
"""Digits of a binary floating-point number; beyond them two results of one sum may differ."""


def same_number(reference: Expression, answer: Expression) -> bool:
    """True if two numbers are equal exactly, or if one is the rounding of the other.

    A decimal with `SIGNIFICANT` digits may be a rounding. If one has `EXACT_DIGITS` digits, the two
    may differ by floating-point rounding. The sign of a percentage may be left out: 12% is 12.
    """
    if _close(reference, answer):
        return True
    if reference.percent == answer.percent:
        return False
    # 12% is written for 0.12, and for 12.
    reference, answer = (
        replace(each, value=each.value * 100) if each.percent and each.value is not None else each
        for each in (reference, answer)
    )
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
    """Rounds to this number of significant digits."""
    context = Context(prec=digits, rounding=ROUND_HALF_EVEN, Emax=10**6, Emin=-(10**6))
    return Fraction(context.divide(Decimal(value.numerator), Decimal(value.denominator)))
