"""Bounds on the numbers of a formula, as sympy computes powers and factorials at any cost."""

from collections.abc import Sequence

from .expression import MAX_FACTORIAL, NoExpression, TooLarge, read_expression
from .notation import Token, plain_notation, tokens_of

MAX_EXPONENT = 10_000
MAX_GROUP_EXPONENT = 300
"""Maximum exponent of a bracket, which may be a polynomial to multiply out."""
_MARKS = ("^", "**", "!", "binom", "choose", "²", "³")
_OPENING = {"{": "}", "(": ")", "[": "]"}


def is_too_large(text: str) -> bool:
    """True if an exponent, a factorial or a binomial of a formula is too large to work out."""
    if not any(mark in text for mark in _MARKS):
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
