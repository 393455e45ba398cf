"""Equality of numbers: exact, or of a decimal with the number that it is rounded from."""

from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

from .expression import Expression

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
