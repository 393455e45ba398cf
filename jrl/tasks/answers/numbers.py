"""Parser of the number that an answer states, if it states one, and of the form of the number.

In running text the stated number is the first after the last "answer is" (or "answer:"), else
the last one. It must be the only one: "41 or 42", a list, an interval or "more than 42" states no
number. A chain of equations states its last side, and the others must not contradict it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .clauses import Clauses
from .expression import Expression, NoExpression, SideBySide, TooLarge, read_expression, same_number
from .notation import DASH, Token, canonical_number, plain_notation, tokens_of
from .phrases import (
    VERBS,
    Span,
    chosen_phrase,
    is_unit,
    joiner,
    phrases_of,
    same_unit,
    signs_of_dashes,
    unit_of,
    without_contrasts,
    words_to_signs,
)

MAX_LENGTH = 1_000
"""Number of characters of running text that are parsed, from its end."""
MAX_MARKED_LENGTH = 2_000
NUMBER, MULTIPLE, RELATION, OPAQUE, NOTHING = "number", "several", "relation", "opaque", "nothing"

_VARIABLE = re.compile(r"[A-Za-z]_?\d*")
_LEADING_WORDS = {*VERBS, "so", "thus", "therefore", "hence", "answer", "get", "have", "that"}
_LEADING = {"in", "by", "on", "after", "from", "since", "at", "with", "if", "of", "for", "step"}
# Letters that are more often a unit or a word than a variable if a blank precedes them.
_NO_VARIABLE = {"a", "I", "A", "s", "m", "g", "h", "l", "L", "K", "C", "F", "N", "J", "W", "V"}

_ATTACHED_UNITS = "mghslL"
"""Letters that are a unit rather than a variable on a number, as in 5m."""

_NO_NUMBER = Expression(None)


@dataclass(frozen=True)
class Statement:
    """Statement of a text: a number with its unit and variable, or the reason why it states none.

    Attributes:
      kind: `NUMBER`; `MULTIPLE` numbers, so none is the answer; a `RELATION`, such as a bound;
        `OPAQUE`, something with a number that is none (`2x`, `\\log 8`); or `NOTHING`.
      expression: the number; its value is None if there is none.
      unit: the unit before or after it, as named by `unit_of`; "" if none is known.
      label: the variable that has this value, x in x = 42; "" if there is none.
      digits: the number as text, without grouping: 1234 for 1,234.
      is_only_number: whether no other number is in the text.
      scale: number that is named after it and multiplies it: a million, a dozen.
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
    tokens = tokens_of(plain_notation(text, marked=marked))
    # Dollar signs delimit formulas as well, and never separate two numbers.
    tokens = [token for token in tokens if token.text != "$"]
    tokens = words_to_signs(signs_of_dashes(tokens, marked=marked))
    phrases = without_contrasts(tokens, phrases_of(tokens))
    if not phrases:
        return Statement(NOTHING)
    return _read(tokens, phrases, chosen_phrase(tokens, phrases), exclaims)


def same_statement(reference: Statement, answer: Statement) -> bool:
    """True if two texts state the same number, and their units and variables do not differ."""
    if reference.value is None or answer.value is None:
        return False
    if not same_unit(reference.unit, answer.unit):
        return False
    if reference.unit and answer.expression.percent:
        return False
    if reference.label and answer.label and reference.label != answer.label:
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
    if any(token.kind == "relation" or token.text == "±" for token in tokens[begin:end]):
        return Statement(RELATION)
    clauses = Clauses(tokens, phrases, chosen_index, begin, end)
    if _has_unknown_mark(tokens, begin, end, exclaims) or clauses.take_it_back():
        return Statement(RELATION)
    spans = _split_numbers(tokens, begin, end)
    is_led = begin > 0 and tokens[begin - 1].text.lower() in _LEADING
    is_led = is_led and not (begin > 1 and tokens[begin - 2].text.lower() == "one")  # one of 41, 42
    if is_led and len(spans) > 1 and tokens[spans[-1][0] - 1].kind == "comma":
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
    offered = [_read_chain(tokens[b:e], check=False) for b, e in clauses.alternatives()]
    words = [Expression(Fraction(number)) for number in clauses.numerals_offered()]
    if any(
        None in (each.value, first.value) or not same_number(first.expression, each)
        for each in (*words, *(each.expression for each in offered))
    ):
        return Statement(MULTIPLE)
    return Statement(
        NUMBER,
        first.expression,
        unit=_unit(tokens, begin, end),
        label=label,
        digits=first.digits,
        is_only_number=len(phrases) == 1,
        scale=clauses.scale(),
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
    """Removes unmatched brackets at either end, and punctuation: a colon, a dash before a word."""
    while end - begin > 1:
        first, last = tokens[begin], tokens[end - 1]
        inside = tokens[begin:end]
        if last.text in (":", *"[({") or (last.text == "!" and exclaims):
            end -= 1
        elif last.text in ("-", DASH, "/", "*") and not _operand_follows(tokens, end):
            # 18-year-old, 18/day, 18 * 3 kg
            end -= 1
        elif first.text in (":", ")", "}", "]", DASH) or _is_separator(tokens, begin):
            begin += 1
        elif last.text in ")]}" and _depth(inside) < 0:
            end -= 1
        elif first.text in "([{" and _depth(inside) > 0:
            begin += 1
        else:
            break
    return begin, end


def _operand_follows(tokens: Sequence[Token], end: int) -> bool:
    """True if nothing or a variable follows an operator: 2 - i, and not 18 - a good number."""
    if end >= len(tokens):
        return True
    if tokens[end].text in ("a", "I", "A") and end + 1 < len(tokens):
        return tokens[end + 1].kind != "word"
    return _is_variable(tokens[end])


_RESULTS = {"answer", "result", "solution", "total", "sum", "answers", "value"}


def _is_separator(tokens: Sequence[Token], index: int) -> bool:
    """True if a minus is a dash between a word and its value: "Answer - 42"."""
    if tokens[index].text != "-" or index == 0 or index + 1 >= len(tokens):
        return False
    before, dash, after = tokens[index - 1 : index + 2]
    return before.text.lower() in _RESULTS and before.end < dash.begin and dash.end < after.begin


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
        if near and _VARIABLE.fullmatch(word) and word[0] not in _ATTACHED_UNITS:
            return True
        if not near and len(word) == 1 and word < "\u3000" and word not in _NO_VARIABLE:
            return True
    if end < len(tokens) and tokens[end - 1].text in ("-", "/", "*") and _is_variable(tokens[end]):
        return True
    before = tokens[begin - 1]
    if begin == 0 or labelled or before.kind != "word":
        return tokens[begin].text in ("*", "/", "^")
    near, first = before.end == tokens[begin].begin, tokens[begin].text
    if first in ("^", "*", "/", "+", "-", "("):
        return (_is_variable(before) and before.text not in ("a", "I")) or (near and first in "(^")
    return False


def _has_unknown_mark(tokens: Sequence[Token], begin: int, end: int, exclaims: bool) -> bool:
    """True if an unknown mark or letters adjoin the number, as in 42‰, |-42|, ∛42 and non-42."""
    first, last = tokens[begin], tokens[end - 1]
    if last.text in ("^", "*", "/", "-", DASH, "_") or first.text in ("!", "_"):
        return True
    before = tokens[begin - 1] if begin else None
    after = tokens[end] if end < len(tokens) else None
    if before is not None and before.end == first.begin:
        if before.kind == "other" and before.text not in _QUOTES:
            return True
        if (
            before.text == "|"
            or before.text.endswith("_")
            or (before.kind == "word" and first.text == "-")
        ):
            return True
    if before is not None and first.text == "-" and before.kind == "word":
        # "Profit - 42" does not say whether it is negative.
        word = before.text.lower()
        between = first.end < tokens[begin + 1].begin and before.end < first.begin
        if between and word not in _LEADING_WORDS and word not in _LEADING:
            return True
    if after is None or after.begin != last.end:
        return False
    if after.kind == "other":
        return after.text not in _QUOTES or (
            after.text == "'" and (before is None or before.text != "'")
        )
    if after.kind == "word":
        is_unit_or_ordinal = is_unit(after.text) or after.text.lower() in _ORDINALS
        return not is_unit_or_ordinal and bool(_SHORT_LETTERS.fullmatch(after.text))
    dots = len(after.text) > 1 and after.text.startswith("..")
    return after.text == "|" or (dots and "." in last.text) or (after.text == "!" and not exclaims)


_QUOTES = frozenset("'.?«»„\u201a。\uff0c、\uff1b\uff1a\uff1f\uff01\uff09\uff08】【」「►→⇒✓✅")
_SHORT_LETTERS = re.compile(r"[A-Za-z]{1,3}\d*|[^\W\d_A-Za-z]*[\u2080-\u209c\u2070-\u207f].*")
_ORDINALS = {"st", "nd", "rd", "th", "s"}


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
    """Statement of a chain of equations; `check` compares the other sides with the last."""
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


def _unit(tokens: Sequence[Token], begin: int, end: int) -> str:
    """The unit of a phrase: of a currency at it, or of the word behind or before it."""
    signs = [t.text for t in tokens[begin:end] if t.kind == "currency"]
    if signs:
        return unit_of(signs[0])
    before = tokens[begin - 1].text if begin else ""
    if before == "Rs" or (len(before) == 3 and before.isupper() and unit_of(before)):
        return unit_of(before)
    after = tokens[end] if end < len(tokens) else None
    return after.text if after is not None and after.kind == "word" and is_unit(after.text) else ""
