"""Numbers in answers: the one that a text states, if it states one, and in which form.

In running text the number that counts is the first after the last "answer is" (or "answer:"), else
the last one. It must stand alone: "41 or 42", a list, an interval or "more than 42" states no
number. A chain of equations states its last side, and the others must not contradict it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

from .expression import Expression, NoExpression, SideBySide, TooLarge, read_expression
from .markup import DASH, plain
from .tokens import Token, canonical, tokens_of
from .units import unit_of

LONGEST = 2_000
"""Characters of running text that are looked at: its last ones."""
LONGEST_MARKED = 4_000
SIGNIFICANT = 6
"""Digits that a decimal must show to stand for a number that it is rounded from."""
EXACT_DIGITS = 15
"""Digits that binary floating point holds: beyond them two results of one sum may differ."""

NUMBER, SEVERAL, RELATION, OPAQUE, NOTHING = "number", "several", "relation", "opaque", "nothing"

_VERBS = {"is", "are", "be", "was", "were", "equals", "equal", "=", ":", "gives", "makes", "s"}
_SIDES_BEFORE = {*_VERBS, "so", "thus", "therefore", "hence", "answer", "get", "have", "that"}
_COMPARING = {"more", "less", "fewer", "greater", "larger", "smaller", "higher", "lower", "bigger"}
_BOUNDS = {"least", "most", "between", "exceeding", "below", "above"}
_DENYING = {"not", "isn't", "isnt", "never", "cannot", "aren't", "wasn't"}
_AFTER = {*_COMPARING, "above", "below", "under", "over", "up", "upwards"}
_PERHAPS = {"maybe", "perhaps", "possibly", "else", "even", "it's", "it", "is", "also", "the",
            "answer", "could", "be", "may", "might", "rather", "about"}  # fmt: skip
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_LEADING = {"in", "by", "on", "after", "from", "since", "at", "with", "if", "of", "for", "step"}
_OPERATIONS = {"plus": "+", "minus": "-", "times": "*", "over": "/", "multiplied": "*",
               "divided": "/"}  # fmt: skip
_FOLLOWED_BY = {"multiplied": "by", "divided": "by"}
_POWERS = {"squared": "2", "cubed": "3"}
# Letters that are more often a unit or a word than a variable, where a blank stands before them.
_NO_VARIABLE = {"a", "I", "A", "s", "m", "g", "h", "l", "L", "K", "C", "F", "N", "J", "W", "V"}


@dataclass(frozen=True)
class Stated:
    """What a text states.

    Attributes:
      kind: `NUMBER`; `SEVERAL` numbers of which none counts; a `RELATION`, such as a bound;
        `OPAQUE`, something with a number that is none (`2x`, `\\log 8`); or `NOTHING`.
      expression: the number.
      unit: after or before it, as `unit_of` names it; "" where there is none that is known.
      label: the variable that it is said of, "" where there is none.
      digits: the number as text, without what groups its digits.
      alone: whether no other number is in the text.
      scale: the word of a power of a thousand that follows, as a number.
    """

    kind: str
    expression: Expression | None = None
    unit: str = ""
    label: str = ""
    digits: str = ""
    alone: bool = False
    scale: int = 1

    @property
    def value(self) -> Fraction | None:
        """The number, with the thousands or millions that follow it."""
        assert self.expression is not None
        return None if self.expression.value is None else self.expression.value * self.scale


def stated(text: str, *, marked: bool = False, exclaims: bool = True) -> Stated:
    """Reads an answer.

    Args:
      marked: whether it is known to be the answer, and no running text.
      exclaims: whether a "!" at its end is one of joy; else it is a factorial.
    """
    text = text[-(LONGEST_MARKED if marked else LONGEST) :]
    tokens = _words_to_signs(_without_delimiters(tokens_of(plain(text))))
    phrases = _phrases(tokens)
    if not phrases:
        return Stated(NOTHING)
    return _read(tokens, phrases, _chosen(tokens, phrases), exclaims)


def same_statement(gold: Stated, answer: Stated) -> bool:
    """Whether two texts state one number, of one unit and one variable where both name theirs."""
    if gold.kind != NUMBER or answer.kind != NUMBER or None in (gold.value, answer.value):
        return False
    for one, other in ((gold.unit, answer.unit), (gold.label, answer.label)):
        if one and other and one != other:
            return False
    assert gold.expression is not None and answer.expression is not None
    if gold.scale == answer.scale:
        return same_number(gold.expression, answer.expression)
    return gold.value == answer.value


def same_number(gold: Expression, answer: Expression) -> bool:
    """Whether two numbers are one: exactly, or one the rounding of the other.

    A decimal stands for what it is rounded from where it shows `SIGNIFICANT` digits. A percentage
    may be said with its sign or without.
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
    decimals = [(each, _digits(each)) for each in (gold, answer) if each.is_decimal]
    if not decimals or gold.value * answer.value <= 0:
        return False
    coarse, digits = min(decimals, key=lambda each: each[1])
    other = answer if coarse is gold else gold
    assert coarse.value is not None and other.value is not None
    if digits >= SIGNIFICANT and _rounded(other.value, digits) == coarse.value:
        return True
    most = max(digits for _, digits in decimals)
    difference = abs(gold.value - answer.value)
    return most >= EXACT_DIGITS and difference * 10 ** (EXACT_DIGITS - 1) <= abs(gold.value)


def _digits(decimal: Expression) -> int:
    mantissa = decimal.written.lstrip("-").partition("e")[0]
    return len(mantissa.replace(".", "").lstrip("0"))


def _rounded(value: Fraction, digits: int) -> Fraction:
    context = Context(prec=digits, rounding=ROUND_HALF_EVEN, Emax=10**6, Emin=-(10**6))
    return Fraction(context.divide(Decimal(value.numerator), Decimal(value.denominator)))


def _without_delimiters(tokens: Sequence[Token]) -> list[Token]:
    """Signs of money delimit formulas as well: none of them parts two numbers."""
    return [token for token in tokens if token.text not in ("$", "'")]


def _words_to_signs(tokens: list[Token]) -> list[Token]:
    """Operations that are written as words between two numbers, as their signs."""
    found: list[Token] = []
    at = 0
    while at < len(tokens):
        token, word = tokens[at], tokens[at].text.lower()
        step = 2 if word in _FOLLOWED_BY else 1
        follows = tokens[at + step] if at + step < len(tokens) else None
        before = found[-1] if found else None
        is_number = before is not None and (before.kind == "number" or before.text == ")")
        if token.kind == "word" and is_number and word in _OPERATIONS:
            by = _FOLLOWED_BY.get(word)
            said = by is None or (tokens[at + 1 : at + 2] and tokens[at + 1].text.lower() == by)
            if said and follows is not None and (follows.kind == "number" or follows.text == "("):
                found.append(Token("math", _OPERATIONS[word], token.begin, token.end))
                at += step
                continue
        if word == "x" and is_number and follows is not None and follows.kind == "number":
            found.append(Token("math", "*", token.begin, token.end))
        elif token.kind == "word" and is_number and word in _POWERS:
            found.append(Token("math", "^", token.begin, token.begin))
            found.append(Token("number", _POWERS[word], token.begin, token.end))
        elif is_number and token.kind == "word" and unit_of(word):
            found.append(token)
            at += _exponent_length(tokens, at + 1)  # m^2 is a unit as well
        elif word == "percent" and is_number:
            found.append(Token("math", "%", token.begin, token.end))
        else:
            found.append(token)
        at += 1
    return found


def _exponent_length(tokens: Sequence[Token], at: int) -> int:
    """How many tokens an exponent takes that begins there."""
    texts = [token.text for token in tokens[at : at + 4]]
    if texts[:1] != ["^"]:
        return 0
    return 4 if texts[1:2] == ["{"] and texts[3:] == ["}"] else 2


Span = tuple[int, int]
_VARIABLE = re.compile(r"[A-Za-z]_?\d*")
_MATH = ("number", "math", "command", "vulgar", "constant", "relation", "currency")
_JOINING = {"and": ",", "or": "or", "to": DASH, "through": DASH}


def _phrases(tokens: Sequence[Token]) -> list[Span]:
    """Runs of tokens that state something together: numbers, signs, and what joins them."""
    spans: list[Span] = []
    begin: int | None = None
    for at in range(len(tokens) + 1):
        token = tokens[at] if at < len(tokens) else None
        if begin is not None and token is not None and _is_aside(tokens, at):
            spans.append((begin, at))
            begin = at
            continue
        joins = token is not None and begin is not None and _joins(tokens, at)
        if token is not None and (token.kind in _MATH or joins):
            begin = at if begin is None else begin
        elif begin is not None:
            spans.append((begin, at))
            begin = None
    values = ("number", "vulgar", "constant")
    return [span for span in spans if any(t.kind in values for t in tokens[span[0] : span[1]])]


def _is_aside(tokens: Sequence[Token], at: int) -> bool:
    """Whether a bracket opens a remark on the number before it: 42 (17 + 25)."""
    before = tokens[at - 1] if at else None
    return (
        tokens[at].text == "("
        and before is not None
        and before.end < tokens[at].begin
        and (before.kind in ("number", "word") or before.text in (")", "%"))
    )


def _joins(tokens: Sequence[Token], at: int) -> bool:
    """Whether a comma or a word stands between two parts of one statement."""
    if tokens[at].kind != "comma" and tokens[at].text.lower() not in _JOINING:
        return False
    after = at + 1
    while after < len(tokens) and _joiner(tokens[after]):
        after += 1
    return after < len(tokens) and tokens[after].kind in _MATH and tokens[after].text not in ")}]:"


def _joiner(token: Token) -> str:
    if token.kind == "comma":
        return ","
    if token.text in (DASH, "±"):
        return DASH
    return _JOINING.get(token.text.lower(), "") if token.kind == "word" else ""


def _chosen(tokens: Sequence[Token], phrases: Sequence[Span]) -> int:
    """The phrase that counts: the first after the last "answer is", else the last."""
    anchors = [
        at for at, token in enumerate(tokens) if token.kind == "word"
        and token.text.lower() in ("answer", "answers")
    ]  # fmt: skip
    for anchor in reversed(anchors):
        end = anchor + 1
        while end < len(tokens) and tokens[end].kind != "stop":
            end += 1
        verb = next(
            (at for at in range(anchor + 1, end) if tokens[at].text.lower() in _VERBS), None
        )
        after = anchor if verb is None else verb
        within = [n for n, (begin, _) in enumerate(phrases) if after <= begin < end]
        if within:
            return within[0]
        # "Final answer:" and the number on a line of its own.
        if end - after <= 2:
            below = [n for n, (begin, _) in enumerate(phrases) if begin >= end]
            if below and all(t.kind == "stop" for t in tokens[end : phrases[below[0]][0]]):
                return below[0]
    last = len(phrases) - 1
    # What a remark in brackets says does not count beside what it is a remark on.
    while last and _is_aside(tokens, phrases[last][0]):
        last -= 1
    return last


def _read(tokens: Sequence[Token], phrases: Sequence[Span], chosen: int, exclaims: bool) -> Stated:
    begin, end = phrases[chosen]
    if end - begin > 1 and tokens[end - 1].text == "+":
        return Stated(RELATION)  # 42 and more
    begin, end = _trimmed(tokens, begin, end, exclaims)
    begin = _after_function(tokens, begin, end)
    label, labelled = _label(tokens, begin, end)
    if _is_opaque(tokens, begin, end, labelled):
        return Stated(OPAQUE)
    if _is_bound(tokens, begin, end):
        return Stated(RELATION)
    parts = _parts(tokens, begin, end)
    if len(parts) > 1 and begin and tokens[begin - 1].text.lower() in _LEADING:
        parts = parts[-1:]  # In 2024, 42 people came.
    attached = begin > 0 and tokens[begin - 1].kind == "word" and not labelled and (
        tokens[begin - 1].text.lower() not in _SIDES_BEFORE
    )  # fmt: skip
    read = [_chain(tokens[b:e], check=not attached) for b, e in parts]
    if None in read or not read:
        return Stated(OPAQUE if read else NOTHING)
    said = [each for each in read if each is not None]
    if any(each.kind != NUMBER for each in said):
        return next(each for each in said if each.kind != NUMBER)
    first = said[0]
    assert first.expression is not None
    for other in said[1:]:
        assert other.expression is not None
        if first.expression.value is None or first.expression.value != other.expression.value:
            return Stated(SEVERAL)
    others = [phrase for number, phrase in enumerate(phrases) if number != chosen]
    if _has_alternative(tokens, begin, end, others, first.expression):
        return Stated(SEVERAL)
    return Stated(
        NUMBER,
        first.expression,
        unit=_unit(tokens, begin, end),
        label=label,
        digits=first.digits,
        alone=not others,
        scale=_scale(tokens, end),
    )


def _after_function(tokens: Sequence[Token], begin: int, end: int) -> int:
    """Where f(2) = 42 or \\log 8 = 3 begins to say what is equal to the value of a function."""
    equal = [at for at in range(begin, end) if tokens[at].text == "="]
    if not equal:
        return begin
    if begin and tokens[begin].text == "(" and tokens[begin - 1].end == tokens[begin].begin:
        return equal[0] if tokens[begin - 1].kind == "word" else begin
    unknown = [at for at in range(begin, end) if _is_unknown(tokens[at])]
    return equal[-1] if unknown and unknown[-1] < equal[-1] else begin


def _is_unknown(token: Token) -> bool:
    """Whether a token is of functions that are not read here."""
    return token.text == "_" or (token.kind == "command" and token.text not in ("\\frac", "\\sqrt"))


def _trimmed(tokens: Sequence[Token], begin: int, end: int, exclaims: bool) -> Span:
    """Without brackets that close or open elsewhere, and without signs that lead nowhere."""
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
    """Whether a variable, a function or an unknown command belongs to the phrase."""
    if any(map(_is_unknown, tokens[begin:end])):
        return True
    if end < len(tokens) and tokens[end].kind == "word" and tokens[end - 1].text != "=":
        near, word = tokens[end].begin == tokens[end - 1].end, tokens[end].text
        if near and _VARIABLE.fullmatch(word) and not unit_of(word.rstrip("0123456789")):
            return True
        if not near and len(word) == 1 and word not in _NO_VARIABLE:
            return True
    if begin == 0 or labelled:
        return tokens[begin].text in ("*", "/", "^")
    before = tokens[begin - 1]
    if before.kind != "word":
        return tokens[begin].text in ("*", "/", "^")
    near, first = before.end == tokens[begin].begin, tokens[begin].text
    if first in ("^", "*", "/", "+", "-", "("):
        return (_is_variable(before) and before.text not in ("a", "I")) or (near and first in "(^")
    return False


def _is_bound(tokens: Sequence[Token], begin: int, end: int) -> bool:
    """Whether the number is only a bound, or is denied."""
    if any(t.kind == "relation" for t in tokens[begin:end]):
        return True
    words = [t.text.lower() for t in tokens[max(0, begin - 3) : begin]]
    if words and (words[-1] in _BOUNDS or words[-1] in _DENYING):
        return True
    if len(words) > 1 and words[-1] == "than" and words[-2] in _COMPARING:
        return True
    if words[-2:] == ["up", "to"]:
        return True
    after = [t.text.lower() for t in tokens[end : end + 2]]
    return len(after) == 2 and after[0] in ("or", "and") and after[1] in _AFTER


def _parts(tokens: Sequence[Token], begin: int, end: int) -> list[Span]:
    """The phrase parted at what joins numbers, and without the brackets around it."""
    if _is_bracketed(tokens[begin:end]):
        return _parts(tokens, begin + 1, end - 1)
    parts, start = [], begin
    for at in range(begin, end):
        token = tokens[at]
        if _joiner(token) or token.text == ":":
            if at > start:
                parts.append((start, at))
            start = at + 1
    if end > start:
        parts.append((start, end))
    return parts


def _is_bracketed(tokens: Sequence[Token]) -> bool:
    """Whether the first bracket is closed by the last token."""
    if len(tokens) < 3 or tokens[0].text not in "([{" or tokens[-1].text not in ")]}":
        return False
    return all(_depth(tokens[:at]) > 0 for at in range(1, len(tokens)))


def _chain(tokens: Sequence[Token], *, check: bool) -> Stated | None:
    """What a chain of equations states, None where its last side is no number.

    Args:
      check: whether the other sides must have the value of the last.
    """
    sides: list[list[Token]] = [[]]
    for token in tokens:
        if token.text == "=":
            sides.append([])
        elif token.kind != "currency":
            sides[-1].append(token)
    said = [side for side in sides if side]
    if not said:
        return None
    read: list[tuple[Expression, Sequence[Token]]] = []
    for side in said:
        try:
            read.append((read_expression(side), side))
        except TooLarge:
            return Stated(RELATION)  # nobody's answer, and worked out by nobody
        except NoExpression as error:
            if side is said[-1]:
                return Stated(SEVERAL) if isinstance(error, SideBySide) else None
    last, shown = read[-1]
    if not sides[-1] and len(said[-1]) > 1:
        # 17 + 25 = is the question again.
        last = Expression(last.value, False)
    equal = [
        (other, side)
        for other, side in read
        if None not in (other.value, last.value) and same_number(last, other)
    ]
    if check and any(_contradicts(last, other) for other, _ in read):
        return Stated(SEVERAL)
    if not last.final and sides[-1]:
        # 42 = 17 + 25 says 42 as well.
        last, shown = next(((o, side) for o, side in equal if o.final), (last, shown))
    return Stated(NUMBER, last, digits=_as_text(shown))


def _contradicts(last: Expression, other: Expression) -> bool:
    """Whether a side is another number; a sum that was worked out wrongly, or rounded, is none."""
    if not other.final or other.value is None or last.value is None:
        return False
    return abs(other.value - last.value) * 100 > abs(last.value)


def _as_text(tokens: Sequence[Token]) -> str:
    return "".join(canonical(t.text) if t.kind == "number" else t.text for t in tokens)


def _has_alternative(
    tokens: Sequence[Token], begin: int, end: int, others: Sequence[Span], value: Expression
) -> bool:
    """Whether another number is offered beside it: "41 apples or maybe 42"."""
    before = begin - 1
    labelled = tokens[begin].text == "=" and before >= 0 and _is_variable(tokens[before])
    before -= labelled
    while before >= 0 and tokens[before].text.lower() in _PERHAPS:
        before -= 1
    offered: list[Span] = []
    previous = [span for span in others if span[1] <= begin][-1:]
    is_offered = before >= 0 and tokens[before].text.lower() == "or"
    if labelled and previous:
        is_offered |= _same_label(tokens, previous[0], begin)
    offered += previous if is_offered else []
    after = [span for span in others if span[0] >= end][:1]
    if after:
        between = tokens[end : after[0][1]][:4]
        stops = any(t.kind == "stop" for t in tokens[end : after[0][0]])
        if not stops and any(t.text.lower() == "or" for t in between):
            offered += after
    for b, e in offered:
        other = _chain(tokens[b:e], check=False)
        same = (
            other is not None
            and other.expression is not None
            and None not in (other.expression.value, value.value)
            and same_number(value, other.expression)
        )
        if not same:
            return True
    return False


def _same_label(tokens: Sequence[Token], previous: Span, begin: int) -> bool:
    """Whether x = 41, x = 42 gives one variable two values."""
    start, stop = previous
    if not start or tokens[start].text != "=" or tokens[start - 1].text != tokens[begin - 1].text:
        return False
    multiplied = start > 1 and tokens[start - 2].kind in ("number", "math")
    between = tokens[stop : begin - 1]
    return not multiplied and all(map(_joiner, between))


def _unit(tokens: Sequence[Token], begin: int, end: int) -> str:
    money = [unit_of(t.text) for t in tokens[begin:end] if t.kind == "currency"]
    if money:
        return money[0]
    if end < len(tokens) and tokens[end].kind == "word":
        return unit_of(tokens[end].text)
    return ""


def _scale(tokens: Sequence[Token], end: int) -> int:
    word = tokens[end].text.lower() if end < len(tokens) else ""
    return _SCALES.get(word, 1)
