"""Forms of formulas: whether an answer is worked out as its reference answer is.

Equal formulas differ in form: (x-1)(x+1) is factored and x^2-1 multiplied out, 1/(sqrt(2)-1) has a
root to remove and sqrt(2)+1 none. The reference answer shows the required form:

* With variables the answer has the form of the reference: as many factors in front of and beside
  brackets, as many fractions in sums, as many uses of each function, and no fraction that can be
  reduced.
* Without variables it has no more than the reference: of roots in denominators, of roots in roots,
  of functions, of brackets to multiply out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
from sympy.core.function import AppliedUndef, Function

from .expression import MAX_FACTORIAL, NoExpression, TooLarge, read_expression
from .notation import Token, plain_notation, tokens_of

MAX_REDUCED = 60
"""Maximum number of operations of a fraction that is tested for common factors."""
_RECIPROCALS = {"sec": "cos", "csc": "sin"}


@dataclass
class Form:
    """Counts that tell forms apart.

    Attributes:
      factors: of products with a bracket that holds variables.
      fractions: terms of sums that have a variable in a denominator.
      functions: uses of each function of variables.
      reducible: fractions whose numerator and denominator have a common factor.
      roots_below: roots and imaginary units in the denominators of numbers.
      nested_roots: roots in roots of numbers.
      values: functions of numbers, such as ln 2.
      brackets: of numbers, to multiply out.
    """

    factors: int = 0
    fractions: int = 0
    functions: Counter = field(default_factory=Counter)
    reducible: int = 0
    roots_below: int = 0
    nested_roots: int = 0
    values: int = 0
    brackets: int = 0


def has_form(reference: Any, answer: Any) -> bool:
    """True if an answer that equals the reference is in its form."""
    asked, answered = form_of(reference), form_of(answer)
    if answered.reducible > asked.reducible:
        return False
    if (answered.factors, answered.fractions) != (asked.factors, asked.fractions):
        return False
    if answered.functions != asked.functions:
        return False
    counts = ("roots_below", "nested_roots", "values", "brackets")
    return all(getattr(answered, count) <= getattr(asked, count) for count in counts)


def form_of(value: Any) -> Form:
    """The form of a formula, a set, a tuple, an interval, a matrix or an equation."""
    form = Form()
    _add(value, form)
    return form


def _add(value: Any, form: Form) -> None:
    if isinstance(value, sympy.MatrixBase):
        for element in value.flat():
            _add(element, form)
        return
    if not isinstance(value, sympy.Basic):
        return
    if isinstance(value, sympy.Expr) and not value.free_symbols - {_I}:
        _add_number(value, form)
        return
    if isinstance(value, sympy.Add):
        form.fractions += sum(map(_has_variable_below, flatten(value, sympy.Add)))
    elif isinstance(value, sympy.Mul) or (isinstance(value, sympy.Pow) and value.exp.is_Integer):
        _add_product(value, form)
    if isinstance(value, Function) and not isinstance(value, AppliedUndef):
        name = type(value).__name__
        form.functions[_RECIPROCALS.get(name, name)] += 1
    elif isinstance(value, sympy.Pow) and value.exp.free_symbols:
        form.functions["power"] += 1
    for part in value.args:
        _add(part, form)


def flatten(value: Any, kind: type) -> list[Any]:
    """The terms of nested sums, or the factors of nested products."""
    operands, pending = [], [value]
    while pending:
        node = pending.pop()
        if isinstance(node, kind):
            pending += node.args
        else:
            operands.append(node)
    return operands


def _factors(value: Any, sign: int = 1) -> list[tuple[Any, int]]:
    """The factors of a product, each with the power of 1 or -1 (below the line) that it has."""
    if isinstance(value, sympy.Mul):
        return [each for factor in value.args for each in _factors(factor, sign)]
    if isinstance(value, sympy.Pow) and value.exp.is_Integer:
        times = -sign if value.exp < 0 else sign
        return min(abs(int(value.exp)), 50) * _factors(value.base, times)
    if isinstance(value, sympy.Rational) and value.q != 1:
        return [(sympy.Integer(value.p), sign), (sympy.Integer(value.q), -sign)]
    return [(value, sign)]


def _has_variable_below(term: Any) -> bool:
    return any(sign < 0 and factor.free_symbols for factor, sign in _factors(term))


def _add_product(value: Any, form: Form) -> None:
    """Counts the factors above and below the line if one of them is a bracket."""
    factors = _factors(value)
    for side in (1, -1):
        # A number below the line is no factor: (x+1)/2 is as worked out as x/2 + 1/2.
        remaining = [
            factor
            for factor, sign in factors
            if sign == side and factor not in (1, -1) and not (side < 0 and factor.is_number)
        ]
        is_bracket = [
            isinstance(factor, sympy.Add) and bool(factor.free_symbols) for factor in remaining
        ]
        if any(is_bracket) and len(remaining) > 1:
            form.factors += len(remaining)
    above, below = (
        sympy.Mul(*(factor for factor, sign in factors if sign == side)) for side in (1, -1)
    )
    form.reducible += _has_fraction_below(value)
    if below.is_Integer and abs(below) > 1 and isinstance(above, sympy.Add):
        form.reducible += sympy.gcd(above.primitive()[0], below) not in (0, 1)
    if below.free_symbols and sympy.count_ops(above) + sympy.count_ops(below) <= MAX_REDUCED:
        form.reducible += _has_common_factor(above, below)


def _has_fraction_below(value: Any) -> bool:
    """True if a denominator holds a fraction of its own: 1/(x/3)."""
    below = (part.base for part in value.atoms(sympy.Pow) if part.exp.is_negative)
    return any(
        factor.is_Rational and (sign < 0 or factor.q != 1)
        for base in below
        if base.free_symbols
        for factor, sign in _factors(base)
    )


def _has_common_factor(above: Any, below: Any) -> bool:
    symbols = above.free_symbols | below.free_symbols
    if not (above.is_polynomial(*symbols) and below.is_polynomial(*symbols)):
        return any(isinstance(part, sympy.Pow) and part.exp == -1 for part in above.args)
    return bool(sympy.gcd(above, below).free_symbols)


def _add_number(value: Any, form: Form) -> None:
    """Counts the operations left to work out in a number."""
    if isinstance(value, Function) and not isinstance(value, sympy.exp):
        form.values += 1
    if isinstance(value, sympy.Mul):
        _add_numeric_product(value, form)
    elif isinstance(value, sympy.Pow):
        if value.exp.is_Integer and isinstance(value.base, sympy.Add) and value.exp != 1:
            exponent = int(value.exp)
            form.brackets += exponent > 1
            form.roots_below += exponent < 0 and _is_surd(value.base)
        elif value.exp.is_negative and _is_surd(value.base if value.exp == -1 else value):
            form.roots_below += 1
        elif value.exp.is_Rational and not value.exp.is_Integer and _is_surd(value.base):
            form.nested_roots += 1
    for part in value.args:
        _add_number(part, form)


def _add_numeric_product(value: Any, form: Form) -> None:
    factors = [(factor, sign) for factor, sign in _factors(value) if factor not in (1, -1)]
    sums = [factor for factor, sign in factors if isinstance(factor, sympy.Add) and sign > 0]
    others = [factor for factor, sign in factors if not isinstance(factor, sympy.Add) and sign > 0]
    form.brackets += max(0, len(sums) - 1) + bool(sums and any(map(_is_surd, others)))


_I = sympy.Symbol("i", real=False)


def _is_surd(value: Any) -> bool:
    """True if a number holds a root or the imaginary unit."""
    return value.has(sympy.I, _I) or any(
        isinstance(part, sympy.Pow) and part.exp.is_Rational and not part.exp.is_Integer
        for part in sympy.preorder_traversal(value)
    )


MAX_EXPONENT = 10_000
MAX_GROUP_EXPONENT = 300
"""Maximum exponent of a bracket, which may be a polynomial to multiply out."""
_MARKERS = ("^", "**", "!", "binom", "choose", "²", "³")
_OPENING = {"{": "}", "(": ")", "[": "]"}


def is_too_large(text: str) -> bool:
    """True if an exponent, a factorial or a binomial of a formula is too large to work out."""
    if not any(mark in text for mark in _MARKERS):
        return False
    tokens = [token for token in tokens_of(plain_notation(text)) if token.text != "$"]
    for index, token in enumerate(tokens):
        if token.text == "^":
            is_group = index > 0 and tokens[index - 1].text in (")", "]")
            limit = MAX_GROUP_EXPONENT if is_group else MAX_EXPONENT
            if _exceeds(_group(tokens, index + 1), limit):
                return True
        elif token.text == "!" and _exceeds(_group_before(tokens, index), MAX_FACTORIAL):
            return True
        elif token.text in ("\\binom", "\\dbinom", "\\tbinom"):
            upper = _group(tokens, index + 1)
            if _exceeds(upper, MAX_FACTORIAL):
                return True
        elif token.text == "\\choose" and _exceeds(
            tokens[max(0, index - 1) : index], MAX_FACTORIAL
        ):
            return True
    return False


def _exceeds(tokens: Sequence[Token], limit: int) -> bool:
    try:
        value = read_expression(tokens).value
    except TooLarge:
        return True
    except NoExpression:
        return False
    return value is not None and abs(value) > limit


def _group(tokens: Sequence[Token], begin: int) -> Sequence[Token]:
    """The tokens of the argument at an index: in brackets, or a token and its exponent."""
    if begin >= len(tokens):
        return ()
    end = begin + (tokens[begin].text in ("-", "+"))
    if end < len(tokens) and (closing := _OPENING.get(tokens[end].text)):
        opening, depth = tokens[end].text, 0
        for index in range(end, len(tokens)):
            depth += (tokens[index].text == opening) - (tokens[index].text == closing)
            if not depth:
                return tokens[begin : index + 1]
        return tokens[begin:]
    if end + 2 < len(tokens) and tokens[end + 1].text == "^":
        return tokens[begin : end + 3]  # 9^9^9
    return tokens[begin : end + 1]


def _group_before(tokens: Sequence[Token], end: int) -> Sequence[Token]:
    """The tokens of the operand before an index."""
    if not end or tokens[end - 1].text not in (")", "}"):
        return tokens[max(0, end - 1) : end]
    depth = 0
    for index in range(end - 1, -1, -1):
        depth += (tokens[index].text in ")}") - (tokens[index].text in "({")
        if not depth:
            return tokens[index:end]
    return tokens[:end]
