"""Formulas, sets, intervals and irrational numbers, parsed and compared by math-verify.

Only a worker process imports it, after it has replaced sympy's parser by one of its own
(`jrl.tasks.workers.worker`).
"""

import functools
import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import sympy
from math_verify import parse, verify
from sympy.core.function import AppliedUndef, Function

from .expression import (
    SIGNIFICANT,
    Expression,
    NoExpression,
    TooLarge,
    read_expression,
    round_to_digits,
    significant_digits,
)
from .forms import flatten, is_too_large
from .forms import has_form as _has_form
from .notation import plain_notation, tokens_of

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
MAX_LENGTH = 1_000
"""Maximum length of a formula in characters; longer ones are not parsed."""
TOLERANCE = 1e-9
"""Tolerance for irrational numbers, relative to the reference answer; `DECIMAL_TOLERANCE` is that
for decimals, half a unit of their sixth digit."""
DECIMAL_TOLERANCE = 5e-6
DIGITS = 40
MAX_SYMBOLS, MAX_OPERATIONS, MIN_COMPARED = 3, 40, 3

_LATEX = ("$", "\\boxed", "\\(", "\\[")
# Letters in a row that are no product of two variables, and neither name a command nor are in its
# braces (\text{cm}, \end{matrix}).
_WORD = re.compile(
    r"[A-Za-z]{3,}|(?<![A-Za-z])(?:or|is|it|in|of|to|so|we|no|my|an|as|at|be|by|he|if|me|on|up|us|do|go"
    r"|cm|km|kg|mm|ml|ft|hr)(?![A-Za-z])",
    re.IGNORECASE,
)
_COMMAND = re.compile(r"\\[A-Za-z]+(\{[A-Za-z ]*\})?")
_EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?![\w.])")
_SPELLED = (
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\d+|\([^()]*\))"), r"\\sqrt{\1}"),
    (re.compile(r"π"), r"\\pi "),
    (re.compile(r"\\varnothing(?![A-Za-z])|∅"), r"\\emptyset "),
    (re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*(?:and|or)\s*\}"), ", "),
    (re.compile(r"(?:^|(?<=[=({\[,:;+*/^]))\s*[\u2013\u2012—\u2212](?=\s*[\w\\(.])"), "-"),
    (re.compile(r"\u2212"), "-"),
    (re.compile(r",?\s+and\s+"), ", "),
    (re.compile(r"(?<=\d)\s+or\s+(?=[A-Za-z]\s*=)"), ", "),
)
_LAST_VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?=[\s.,;$]*$|\s*\\[)\]]\s*$)")
_INLINE = re.compile(r"(\$|\\\()([^$\n]{1,300}?)(\$|\\\))")
# Punctuation at the end; a "!" on an operand is a factorial.
_STOPS = re.compile(r"(?:[.,;:?]|(?<![\w)}\]])!)+$")
_LEFT_TO_DO = (sympy.Integral, sympy.Derivative, sympy.Limit, sympy.Sum, sympy.Product)


def is_formula(text: str) -> bool:
    """True if a text is a formula alone, without words."""
    return bool(text) and "\n" not in text and not _WORD.search(_COMMAND.sub(" ", text))


@functools.lru_cache(maxsize=256)
def read(text: str) -> tuple[Any, ...]:
    """Parsed values of an answer by math-verify: of one formula if the text is one, else of the
    text. Empty if nothing is found, if the text is longer than `MAX_LENGTH`, or if its numbers are
    too large to work out."""
    if len(text) > MAX_LENGTH or is_too_large(text):
        return ()
    tidy = _with_last_variable(_EXPONENT.sub(r"\1 \\cdot 10^{\2}", text.strip()))
    for pattern, instead in _SPELLED:
        tidy = pattern.sub(instead, tidy)
    forms = [tidy]
    if is_formula(tidy) and not any(mark in tidy for mark in _LATEX):
        bare_text = _STOPS.sub("", tidy.strip()).strip("*_` ")
        forms = [f"\\boxed{{{bare_text}}}", *forms]
    for form in forms:
        # math-verify's time limits need signals; the calling process has a limit of its own.
        parsed = parse(
            form,
            fallback_mode="no_fallback",
            parsing_timeout=None,  # pyright: ignore[reportArgumentType]
            raise_on_error=True,
        )
        if parsed:
            return tuple(parsed)
    return ()


def _with_last_variable(text: str) -> str:
    """A formula of variables with its last one in braces: math-verify removes a last letter that
    names a unit, such as h in \\pi r^2 h."""
    if not is_formula(text):
        return _INLINE.sub(
            lambda each: (
                each[1] + _with_last_variable(each[2]) + each[3] if is_formula(each[2]) else each[0]
            ),
            text,
        )
    last = _LAST_VARIABLE.search(text)
    if last is None or not re.search("[A-Za-z]", _COMMAND.sub(" ", text[: last.start()])):
        return text
    return f"{text[: last.start()]}{{{last[0]}}}{text[last.end() :]}"


def are_equal(reference: Sequence[Any], answer: Sequence[Any]) -> bool:
    """True if two readings are equal; irrational and small numbers by relative error."""
    references, answers = list(reference), list(answer)
    if not verify(references, answers, timeout_seconds=None, raise_on_error=True):
        return _same_where_real(references[0], answers[0])
    return _relatively_close(references[0], answers[0])


def is_rounded(answer: Expression, reference: Sequence[Any]) -> bool:
    """True if a decimal is the rounding of an irrational reference answer."""
    value = _right_side(reference[0])
    digits = significant_digits(answer)
    if not answer.is_decimal or answer.value is None or not SIGNIFICANT <= digits <= DIGITS // 2:
        return False
    if not isinstance(value, sympy.Expr) or not value.is_number or not value.is_real:
        return False
    exact = Fraction(str(sympy.N(value, DIGITS)))
    return round_to_digits(exact, digits) == answer.value


def _same_where_real(reference: Any, answer: Any) -> bool:
    """True if two formulas have the same value wherever both are real: sqrt(1/n) and 1/sqrt(n).
    They are compared at sample points."""
    if not all(
        isinstance(x, sympy.Expr) and x.has(sympy.Pow) and sympy.count_ops(x) <= MAX_OPERATIONS
        for x in (reference, answer)
    ):
        return False
    symbols = sorted(reference.free_symbols, key=str)
    if not 0 < len(symbols) <= MAX_SYMBOLS or reference.free_symbols != answer.free_symbols:
        return False
    compared = 0
    for signs in ((1, 1, 1), (-1, -1, -1), (1, -1, 1)):
        for shift in range(1, 4):
            substitutions = {
                s: sign * sympy.Rational(7 * shift + 5 * n, 3 + n)
                for n, (s, sign) in enumerate(zip(symbols, signs, strict=False))
            }
            values = [sympy.N(x.subs(substitutions), DIGITS) for x in (reference, answer)]
            if not all(value.is_real and value.is_finite for value in values):
                continue
            if abs(values[0] - values[1]) > TOLERANCE * abs(values[0]):
                return False
            compared += 1
    return compared >= MIN_COMPARED


def _relatively_close(reference: Any, answer: Any) -> bool:
    """Compares numbers by relative error, as math-verify compares a fixed number of decimals."""
    reference, answer = _right_side(reference), _right_side(answer)
    if reference == answer:
        return True  # infinities have no difference
    elements = _elements(reference), _elements(answer)
    if all(elements) and len(elements[0]) == len(elements[1]):
        return all(_relatively_close(*pair) for pair in zip(*elements, strict=True))
    if not all(
        # A percentage is an unevaluated expression.
        isinstance(x, sympy.Expr) and x.is_number and not x.has(sympy.UnevaluatedExpr)
        for x in (reference, answer)
    ):
        return True
    difference = sympy.Abs(sympy.N(reference - answer, DIGITS))
    size = sympy.Abs(sympy.N(reference, DIGITS))
    decimal = any(x.has(sympy.Float) for x in (reference, answer))
    bound = (DECIMAL_TOLERANCE if decimal else TOLERANCE) * size
    # A comparison that sympy cannot decide is no equality.
    return (difference <= bound) == True  # noqa: E712


def _right_side(value: Any) -> Any:
    if isinstance(value, sympy.Eq) and isinstance(value.lhs, sympy.Symbol):
        return value.rhs
    return value


def _elements(value: Any) -> list[Any]:
    if isinstance(value, sympy.Interval):
        return [value.start, value.end]
    if isinstance(value, sympy.FiniteSet):
        try:
            return sorted(value.args, key=lambda x: float(sympy.N(x)))
        except TypeError:
            return []
    if isinstance(value, sympy.Tuple):
        return list(value.args)
    if isinstance(value, sympy.MatrixBase):
        return list(value.flat())
    return []


def is_final(text: str, reading: Sequence[Any]) -> bool:
    """True if an answer has nothing left to work out.

    Args:
      text: of the answer: math-verify evaluates quotients of integers while it parses.
      reading: result of `read` for it.
    """
    inside = plain_notation(text).strip().strip("$ ")
    for segment in re.split(r"[,;]|=|\bor\b|\band\b", inside):
        tokens = [t for t in tokens_of(segment.strip("()[]{} ")) if t.text != "$"]
        try:
            expression = read_expression(tokens)
        except (NoExpression, TooLarge):
            continue
        if expression.value is not None and not expression.final:
            return False
    return all(map(_is_final, reading))


def has_form(reference: Sequence[Any], answer: Sequence[Any]) -> bool:
    """True if an answer has the form of the reference answer that it equals."""
    left, right = reference[0], answer[0]
    if isinstance(left, sympy.Eq) != isinstance(right, sympy.Eq):
        left, right = _right_side(left), _right_side(right)
    return _has_form(left, right)


def _is_final(value: Any) -> bool:
    if isinstance(value, sympy.MatrixBase):
        return all(map(_is_final, value.flat()))
    if not isinstance(value, sympy.Basic):
        return True
    if isinstance(value, sympy.Add):
        return _sum_is_final(value)
    if isinstance(value, sympy.Mul):
        return _product_is_final(value)
    if isinstance(value, sympy.Pow):
        return _power_is_final(value)
    if isinstance(value, _LEFT_TO_DO):
        return False
    if isinstance(value, Function) and not isinstance(value, AppliedUndef) and value.is_number:
        worked_out = value.func(*value.args)
        return isinstance(worked_out, value.func) and all(map(_is_final, value.args))
    return all(map(_is_final, value.args))


def _sum_is_final(value: Any) -> bool:
    terms = flatten(value, sympy.Add)
    if sympy.S.Zero in terms:
        return False
    # Terms that are equal without their rational factors can be added.
    kinds = {
        tuple(sorted(sympy.srepr(x) for x in flatten(term, sympy.Mul) if not _is_rational(x)))
        for term in terms
    }
    return len(kinds) == len(terms) and all(map(_is_final, terms))


def _product_is_final(value: Any) -> bool:
    factors = [factor for factor in flatten(value, sympy.Mul) if factor != -1]
    above, below, others = [], [], []
    for factor in factors:
        if isinstance(factor, sympy.Rational):
            above += [abs(factor.p)] if factor.p not in (1, -1) or factor.q == 1 else []
            below += [factor.q] if factor.q != 1 else []
        elif isinstance(factor, sympy.Pow) and factor.exp == -1 and factor.base.is_Integer:
            below.append(abs(int(factor.base)))
        elif not isinstance(factor, sympy.UnevaluatedExpr):
            others.append(factor)
    if len(above) > 1 or len(below) > 1:
        return False
    if below and (below[0] == 1 or (above and math.gcd(above[0], below[0]) > 1)):
        return False
    bases = [sympy.srepr(x.base if isinstance(x, sympy.Pow) else x) for x in others]
    powers = [x for x in others if isinstance(x, sympy.Pow)]
    surds = [x for x in powers if x.is_number and x.exp == sympy.S.Half]
    return len(surds) <= 1 and len(set(bases)) == len(bases) and all(map(_is_final, others))


def _power_is_final(value: Any) -> bool:
    base, exponent = value.base, value.exp
    if exponent == -1:
        return _is_final(base)
    if base.is_Rational and exponent.is_Rational:
        if exponent.is_Integer:
            return base == 10
        return sympy.Pow(base, exponent) == value
    return _is_final(base) and _is_final(exponent)


def _is_rational(value: Any) -> bool:
    if isinstance(value, sympy.Rational):
        return True
    return isinstance(value, sympy.Pow) and value.exp == -1 and _is_rational(value.base)
