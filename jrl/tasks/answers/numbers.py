"""Parser of the number that an answer states, if it states one, and of the form of the number.

In running text the stated number is the first after the last "answer is" (or "answer:"), else
the last one. It must be the only one: "41 or 42", a list, an interval or "more than 42" states no
number. A chain of equations states its last side, and the others must not contradict it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .expression import Expression, NoExpression, SideBySide, TooLarge, read_expression, same_number
from .notation import DASH, Token, canonical_number, plain_notation, tokens_of
from .phrases import VERBS, Span, chosen_phrase, joiner, phrases_of, unit_of, words_to_signs

MAX_LENGTH = 1_000
"""Number of characters of running text that are parsed, from its end."""
MAX_MARKED_LENGTH = 2_000
NUMBER, MULTIPLE, RELATION, OPAQUE, NOTHING = "number", "several", "relation", "opaque", "nothing"

_VARIABLE = re.compile(r"[A-Za-z]_?\d*")
_LEADING_WORDS = {*VERBS, "so", "thus", "therefore", "hence", "answer", "get", "have", "that"}
_COMPARING = {"more", "less", "fewer", "greater", "larger", "smaller", "higher", "lower", "bigger"}
_BOUNDS = {"least", "most", "between", "exceeding", "below", "above"}
_DENYING = {"not", "isn't", "isnt", "never", "cannot", "aren't", "wasn't"}
_AFTER = {*_COMPARING, "above", "below", "under", "over", "up", "upwards"}
_FRACTION_WORDS = {"half", "third", "quarter", "fifth", "tenth"}
_PERHAPS = {"maybe", "perhaps", "possibly", "else", "even", "it's", "it", "is", "also", "the",
            "answer", "could", "be", "may", "might", "rather", "about"}  # fmt: skip
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_LEADING = {"in", "by", "on", "after", "from", "since", "at", "with", "if", "of", "for", "step"}
# Letters that are more often a unit or a word than a variable if a blank precedes them.
_NO_VARIABLE = {"a", "I", "A", "s", "m", "g", "h", "l", "L", "K", "C", "F", "N", "J", "W", "V"}

_NO_NUMBER = Expression(None)


@dataclass(frozen=True)
class Statement:
    """Statement of a text: a number with its unit and variable, or the reason why it states none.

    Attributes:
      kind: `NUMBER`; `MULTIPLE` numbers, so none is the answer; a `RELATION`, such as a bound;
        `OPAQUE`, something with a number that is none (`2x`, `\\log 8`); or `NOTHING`.
      expression: the number; without a value where there is none.
      unit: the unit before or after it, as named by `unit_of`; "" without a known one.
      label: the variable that has this value; "" without one.
      digits: the number as text, without what groups its digits.
      is_only_number: whether no other number is in the text.
      scale: power of a thousand that is named after it ("million"), as a number.
    """

    kind: str
    expression: Expression = _NO_NUMBER
    unit: str = ""
    label: str = ""
    digits: str = ""
    is_only_number: bool = False
    scale: int = 1

    @property
    def value(self) -> Fraction | None:
        """The number, multiplied by `scale`; None if it is irrational, or if there is none."""
        return None if self.expression.value is None else self.expression.value * self.scale

    @property
    def is_final(self) -> bool:
        """True if it is a number with nothing left to work out."""
        return self.expression.final


def read_statement(text: str, *, marked: bool = False, exclaims: bool = True) -> Statement:
    """Parses the number that an answer states.

    Args:
      marked: whether the text is marked as the answer; otherwise it is running text.
      exclaims: whether a "!" at its end is punctuation; otherwise it is a factorial.
    """
    text = text[-(MAX_MARKED_LENGTH if marked else MAX_LENGTH) :]
    tokens = tokens_of(plain_notation(text))
    # Dollar signs delimit formulas as well, and never separate two numbers.
    tokens = words_to_signs([token for token in tokens if token.text not in ("$", "'")])
    phrases = phrases_of(tokens)
    if not phrases:
        return Statement(NOTHING)
    return _read(tokens, phrases, chosen_phrase(tokens, phrases), exclaims)


def same_statement(reference: Statement, answer: Statement) -> bool:
    """True if two texts state the same number, and their units and variables do not differ."""
    if reference.value is None or answer.value is None:
        return False
    named = ((reference.unit, answer.unit), (reference.label, answer.label))
    if any(left and right and left != right for left, right in named):
        return False
    if reference.scale == answer.scale:
        return same_number(reference.expression, answer.expression)
    return reference.value == answer.value


def _read(
    tokens: Sequence[Token], phrases: Sequence[Span], chosen_index: int, exclaims: bool
) -> Statement:
    begin, end = phrases[chosen_index]
    if end - begin > 1 and tokens[end - 1].text == "+":
        return Statement(RELATION)  # 42 and more
    begin, end = _trim(tokens, begin, end, exclaims)
    begin = _after_function(tokens, begin, end)
    label, labelled = _label(tokens, begin, end)
    if _is_opaque(tokens, begin, end, labelled):
        return Statement(OPAQUE)
    if _is_bound(tokens, begin, end):
        return Statement(RELATION)
    spans = _split_numbers(tokens, begin, end)
    if len(spans) > 1 and begin and tokens[begin - 1].text.lower() in _LEADING:
        spans = spans[-1:]  # In 2024, 42 people came.
    attached = begin > 0 and tokens[begin - 1].kind == "word" and not labelled and (
        tokens[begin - 1].text.lower() not in _LEADING_WORDS
    )  # fmt: skip
    statements = [_read_chain(tokens[b:e], check=not attached) for b, e in spans]
    kinds = [each.kind for each in statements]
    if not kinds or OPAQUE in kinds:
        return Statement(OPAQUE if kinds else NOTHING)
    if set(kinds) != {NUMBER}:
        return next(each for each in statements if each.kind != NUMBER)
    first, *repeated = statements
    if any(first.value is None or first.value != each.value for each in repeated):
        return Statement(MULTIPLE)
    others = [phrase for index, phrase in enumerate(phrases) if index != chosen_index]
    if _has_alternative(tokens, begin, end, others, first.expression):
        return Statement(MULTIPLE)
    return Statement(
        NUMBER,
        first.expression,
        unit=_unit(tokens, begin, end),
        label=label,
        digits=first.digits,
        is_only_number=not others,
        scale=_SCALES.get(tokens[end].text.lower(), 1) if end < len(tokens) else 1,
    )


def _after_function(tokens: Sequence[Token], begin: int, end: int) -> int:
    """Start of the value in f(2) = 42 or \\log 8 = 3: the equals sign; else `begin`."""
    equal = [index for index in range(begin, end) if tokens[index].text == "="]
    if not equal:
        return begin
    if begin and tokens[begin].text == "(" and tokens[begin - 1].end == tokens[begin].begin:
        return equal[0] if tokens[begin - 1].kind == "word" else begin
    unknown = [index for index in range(begin, end) if _is_unknown(tokens[index])]
    return equal[-1] if unknown and unknown[-1] < equal[-1] else begin


def _is_unknown(token: Token) -> bool:
    """True if a token belongs to a function that is not parsed here."""
    return token.text == "_" or (token.kind == "command" and token.text not in ("\\frac", "\\sqrt"))


def _trim(tokens: Sequence[Token], begin: int, end: int, exclaims: bool) -> Span:
    """Removes unmatched brackets at either end, and signs without an operand."""
    while end - begin > 1:
        first, last = tokens[begin], tokens[end - 1]
        inside = tokens[begin:end]
        if last.text in ("+", "-", "*", "/", DASH, ":", "^") or (last.text == "!" and exclaims):
            end -= 1
        elif first.text in (":", "!", ")", "}", "]", DASH):
            begin += 1
        elif last.text in "([{" or (last.text in ")]}" and _depth(inside) < 0):
            end -= 1
        elif first.text in "([{" and _depth(inside) > 0:
            begin += 1
        else:
            break
    return begin, end


def _depth(tokens: Sequence[Token]) -> int:
    return sum((t.text in "([{") - (t.text in ")]}") for t in tokens)


def _label(tokens: Sequence[Token], begin: int, end: int) -> tuple[str, bool]:
    """The variable on the other side of an equation, and whether there is a label of any kind."""
    if tokens[end - 1].text == "=" and end < len(tokens) and _is_variable(tokens[end]):
        return tokens[end].text, True  # 5 = x
    if begin == 0 or tokens[begin].text != "=" or tokens[begin - 1].kind != "word":
        return "", begin > 0 and tokens[begin].text == "="
    word = tokens[begin - 1].text
    return (word if len(word) == 1 else ""), True


def _is_variable(token: Token) -> bool:
    return token.kind == "word" and len(token.text) == 1


def _is_opaque(tokens: Sequence[Token], begin: int, end: int, labelled: bool) -> bool:
    """True if a variable, a function or an unknown command belongs to the phrase."""
    if any(map(_is_unknown, tokens[begin:end])):
        return True
    if end < len(tokens) and tokens[end].kind == "word" and tokens[end - 1].text != "=":
        near, word = tokens[end].begin == tokens[end - 1].end, tokens[end].text
        if near and _VARIABLE.fullmatch(word) and not unit_of(word.rstrip("0123456789")):
            return True
        if not near and len(word) == 1 and word not in _NO_VARIABLE:
            return True
    before = tokens[begin - 1]
    if begin == 0 or labelled or before.kind != "word":
        return tokens[begin].text in ("*", "/", "^")
    near, first = before.end == tokens[begin].begin, tokens[begin].text
    if first in ("^", "*", "/", "+", "-", "("):
        return (_is_variable(before) and before.text not in ("a", "I")) or (near and first in "(^")
    return False


def _is_bound(tokens: Sequence[Token], begin: int, end: int) -> bool:
    """True if the number is only a bound, is negated, or is continued by a fraction in words."""
    if any(t.kind == "relation" for t in tokens[begin:end]):
        return True
    words = [t.text.lower() for t in tokens[max(0, begin - 3) : begin]]
    if words and (words[-1] in _BOUNDS or words[-1] in _DENYING):
        return True
    if len(words) > 1 and words[-1] == "than" and words[-2] in _COMPARING:
        return True
    if words[-2:] == ["up", "to"]:
        return True
    after = [t.text.lower() for t in tokens[end : end + 3]]
    if after[:2] in (["and", "a"], ["and", "one"]) and after[-1] in _FRACTION_WORDS:
        return True  # 42 and a half
    return len(after) > 1 and after[0] in ("or", "and") and after[1] in _AFTER


def _split_numbers(tokens: Sequence[Token], begin: int, end: int) -> list[Span]:
    """Splits a phrase at the separators of numbers, and removes the brackets around it."""
    if _is_bracketed(tokens[begin:end]):
        return _split_numbers(tokens, begin + 1, end - 1)
    spans, start = [], begin
    for index in range(begin, end):
        token = tokens[index]
        if joiner(token) or token.text == ":":
            if index > start:
                spans.append((start, index))
            start = index + 1
    if end > start:
        spans.append((start, end))
    return spans


def _is_bracketed(tokens: Sequence[Token]) -> bool:
    """True if the last token closes the first bracket."""
    if len(tokens) < 3 or tokens[0].text not in "([{" or tokens[-1].text not in ")]}":
        return False
    return all(_depth(tokens[:index]) > 0 for index in range(1, len(tokens)))


def _read_chain(tokens: Sequence[Token], *, check: bool) -> Statement:
    """Statement of a chain of equations; with `check` the other sides must have the value of the
    last."""
    segments: list[list[Token]] = [[]]
    for token in tokens:
        if token.text == "=":
            segments.append([])
        elif token.kind != "currency":
            segments[-1].append(token)
    filled_segments = [segment for segment in segments if segment]
    if not filled_segments:
        return Statement(OPAQUE)
    read: list[tuple[Expression, Sequence[Token]]] = []
    for segment in filled_segments:
        try:
            read.append((read_expression(segment), segment))
        except TooLarge:
            return Statement(RELATION)  # too large to be an answer
        except NoExpression as error:
            if segment is filled_segments[-1]:
                return Statement(MULTIPLE if isinstance(error, SideBySide) else OPAQUE)
    last, shown = read[-1]
    if not segments[-1] and len(filled_segments[-1]) > 1:
        # "17 + 25 =" only repeats the question.
        last = Expression(last.value, False)
    if check and any(_contradicts(last, other) for other, _ in read):
        return Statement(MULTIPLE)
    if not last.final and segments[-1]:
        # "42 = 17 + 25" states 42 as well.
        equal = (
            (other, segment)
            for other, segment in read
            if other.final and None not in (other.value, last.value) and same_number(last, other)
        )
        last, shown = next(equal, (last, shown))
    return Statement(NUMBER, last, digits=_as_text(shown))


def _contradicts(last: Expression, other: Expression) -> bool:
    """True if a side in final form differs from the last by more than 1 %: a sum that was worked
    out wrongly is not in final form, and a rounded number is within the 1 %."""
    if not other.final or other.value is None or last.value is None:
        return False
    return abs(other.value - last.value) * 100 > abs(last.value)


def _as_text(tokens: Sequence[Token]) -> str:
    return "".join(canonical_number(t.text) if t.kind == "number" else t.text for t in tokens)


def _has_alternative(
    tokens: Sequence[Token], begin: int, end: int, others: Sequence[Span], value: Expression
) -> bool:
    """True if another number is stated as an alternative: "41 apples or maybe 42"."""
    before = begin - 1
    labelled = tokens[begin].text == "=" and before >= 0 and _is_variable(tokens[before])
    before -= labelled
    while before >= 0 and tokens[before].text.lower() in _PERHAPS:
        before -= 1
    previous = [span for span in others if span[1] <= begin][-1:]
    is_offered = before >= 0 and tokens[before].text.lower() == "or"
    if labelled and previous:
        is_offered |= _same_label(tokens, previous[0], begin)
    offered = previous if is_offered else []
    after = [span for span in others if span[0] >= end][:1]
    if after:
        between = tokens[end : after[0][1]][:4]
        stops = any(t.kind == "stop" for t in tokens[end : after[0][0]])
        if not stops and any(t.text.lower() == "or" for t in between):
            offered += after
    alternatives = [_read_chain(tokens[b:e], check=False) for b, e in offered]
    return any(
        None in (each.value, value.value) or not same_number(value, each.expression)
        for each in alternatives
    )


def _same_label(tokens: Sequence[Token], previous: Span, begin: int) -> bool:
    """True if one variable gets two values, as in x = 41, x = 42."""
    start, stop = previous
    if not start or tokens[start].text != "=" or tokens[start - 1].text != tokens[begin - 1].text:
        return False
    multiplied = start > 1 and tokens[start - 2].kind in ("number", "math")
    between = tokens[stop : begin - 1]
    return not multiplied and all(map(joiner, between))


def _unit(tokens: Sequence[Token], begin: int, end: int) -> str:
    units = [t.text for t in tokens[begin:end] if t.kind == "currency"]
    units += [t.text for t in tokens[end : end + 1] if t.kind == "word"]
    return unit_of(units[0]) if units else ""
