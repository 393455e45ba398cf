"""Equality of numbers: exact, or of a decimal with the number that it is rounded from."""

from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

from .expression import Expression

SIGNIFICANT = 6
"""Digits that a decimal must show to stand for a number that it is rounded from."""
EXACT_DIGITS = 15
"""Digits that binary floating point holds: beyond them two results of one sum may differ."""


def same_number(gold: Expression, answer: Expression) -> bool:
    """True if two numbers are equal exactly, or if one is the rounding of the other.

    A decimal may be a rounding where it shows `SIGNIFICANT` digits. Where one shows `EXACT_DIGITS`
    digits, a difference of floating-point rounding is allowed. A percentage may be written with its
    sign or without.
    """
    assert gold.value is not None and answer.value is not None
    if gold.percent != answer.percent:
        hundredfold = gold if gold.percent else answer
        assert hundredfold.value is not None
        without = Expression(hundredfold.value * 100, True, hundredfold.written)
        pair = (without, answer) if gold.percent else (gold, without)
        return _close(*pair) or _close(gold, answer)
    return _close(gold, answer)


def _close(gold: Expression, answer: Expression) -> bool:
    assert gold.value is not None and answer.value is not None
    if gold.value == answer.value:
        return True
    decimals = [(each, significant_digits(each)) for each in (gold, answer) if each.is_decimal]
    if not decimals or gold.value * answer.value <= 0:
        return False
    coarse, digits = min(decimals, key=lambda each: each[1])
    other = answer if coarse is gold else gold
    assert coarse.value is not None and other.value is not None
    if digits >= SIGNIFICANT and rounded(other.value, digits) == coarse.value:
        return True
    most = max(digits for _, digits in decimals)
    difference = abs(gold.value - answer.value)
    return most >= EXACT_DIGITS and difference * 10 ** (EXACT_DIGITS - 1) <= abs(gold.value)


def significant_digits(decimal: Expression) -> int:
    """Number of digits that a decimal shows, without leading zeros."""
    mantissa = decimal.written.lstrip("-").partition("e")[0]
    return len(mantissa.replace(".", "").lstrip("0"))


def rounded(value: Fraction, digits: int) -> Fraction:
    """The nearest number with so many significant digits."""
    context = Context(prec=digits, rounding=ROUND_HALF_EVEN, Emax=10**6, Emin=-(10**6))
    return Fraction(context.divide(Decimal(value.numerator), Decimal(value.denominator)))
