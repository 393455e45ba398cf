"""Clauses around the number that a text states: words that take it back, multiply it, or offer
another number."""

import re
from collections.abc import Iterator, Sequence

from .denials import (
    MAX_CLAUSE,
    announces_choice,
    is_bound_after,
    is_bound_before,
    is_correction,
    is_denied,
    is_judged_wrong,
    is_part_before,
    is_restart,
    is_retracted,
    is_separator,
    offers_another,
)
from .notation import Token
from .phrases import Span, is_unit, joiner

_SCALES = {"thousand": 10**3, "thousands": 10**3, "million": 10**6, "millions": 10**6,
           "billion": 10**9, "billions": 10**9, "trillion": 10**12, "trillions": 10**12,
           "hundred": 100, "hundreds": 100, "dozen": 12, "dozens": 12, "lakh": 10**5,
           "crore": 10**7, "gross": 144, "mln": 10**6, "bn": 10**9}  # fmt: skip
# A part, a base or another operation that multiplies or changes the number before it.
_CHANGED = re.compile(
    r"halves|thirds|(?:fif|six|seven|eigh|nin|ten|hundred|thousand)ths|point|factorial|choose"
    r"|mod|modulo|base|power|remainder|score"
)
_RELATING = {("of",), ("of", "the"), ("out", "of"), ("in",), ("remainder",), ("with", "remainder"),
             ("r",), ("rem",), ("point",)}  # fmt: skip
_RULING = {"rule", "rules", "ruled", "ruling", "cross", "crossed", "throw", "threw",
           "leave", "leaves", "strike", "count", "factor"}  # fmt: skip
_POSSIBLE = {"would", "could", "might"}
_UNLESS = {"if", "unless", "provided", "only", "were", "had"}
_IF_NOT = re.compile(r"(?:^| )if (?:\w+ )?(?:\w+ )?(?:not|\w+n't)(?: be)?$")
_PER = {"mille", "mil", "thousand", "million", "hundred"}
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMERALS = {word: number for number, word in enumerate(_ONES.split(" "))} | {
    word: 10 * number for number, word in enumerate(_TENS.split(" "), start=2)
}
# Of scripts that are written without blanks.
_DENIED_ATTACHED = re.compile(
    r".*(?:不是|并非|不等于|非|不|没|未|超过|大于|小于|至少|至多|最多|最少)"
)
_BOUND_ATTACHED = re.compile(r"(?:以上|以下|以内|多|余|万|亿|千|百|倍|不|是错|左右以)")
# Nouns behind an ordinal that name another number: the 42nd prime. The 42nd step is step 42.
_NUMBERED = re.compile(
    r"primes?|roots?|powers?|fibonacci|triangular|square|cube|odd|even|multiple|positive|natural"
    r"|integer|composite|perfect|palindrom\w+|derivative|percentile|numbers?|of"
)
MAX_AFTERTHOUGHT = 12
"""Maximum number of words behind a stop or a comma that are read as an afterthought."""


class Clauses:
    """The words around a phrase that states a number.

    Args:
      tokens: of the text.
      phrases: all phrases with numbers.
      chosen: index of the phrase.
      begin, end: of its number, among the tokens.
    """

    def __init__(
        self, tokens: Sequence[Token], phrases: Sequence[Span], chosen: int, begin: int, end: int
    ):
        self._tokens, self._begin, self._end = tokens, begin, end
        self._previous = phrases[chosen - 1] if chosen else None
        self._next = phrases[chosen + 1] if chosen + 1 < len(phrases) else None
        self._before, self._follows_number = self._read_before()
        self._after, self._stop = self._read_after()

    def take_it_back(self) -> bool:
        """True if the text does not state the number: it denies it, bounds it, or names a part of
        it."""
        before, after = self._before, self._after
        if is_bound_before(before) or is_part_before(before):
            return True
        if self._follows_number and tuple(before) in _RELATING:
            return True  # 3 of 42
        if before[-1:] == ["point"] and (
            self._follows_number or _numeral(before[-2:-1]) is not None
        ):
            return True  # zero point 42
        if before[-1:] == ["times"] and _numeral(before[-2:-1]) is not None:
            return True  # three times 42
        if before[-2:] == ["plus", "or"] or before[-1:] in (["scale"], ["hundred"]):
            return True
        if before and (before[-1] in _SCALES or _DENIED_ATTACHED.fullmatch(before[-1])):
            return True
        if is_denied(before, answer_follows_number=self._follows_number):
            return True
        if after[:1] == ["out"] and not _RULING.isdisjoint(before):
            return True  # We can rule 42 out
        behind = [token.text.lower() for token in self._tokens[self._stop : self._stop + 2]]
        if after and after[0] in _POSSIBLE and not _UNLESS.isdisjoint((*after, *behind)):
            return True  # 42 would be right if it were possible
        number_follows = self._next is not None and self._stop == self._next[0]
        if self._is_changed() or is_bound_after(after, number_follows=number_follows):
            return True
        counted = 1 if after and is_unit(after[0]) else 0
        return is_judged_wrong(after[counted:], is_bare=True) or self._has_afterthought()

    def _is_changed(self) -> bool:
        """True if the words behind the number change it by more than a known scale: 42 mod 5."""
        after = self._after[:3]
        if not after:
            return False
        if _CHANGED.fullmatch(after[0]) or _BOUND_ATTACHED.match(after[0]):
            return True
        if after[0] == "per" and after[1:2] and after[1] in _PER:
            return True
        if after[0] in ("plus", "minus") and _numeral(after[1:2]) is not None:
            return True  # 42 plus one
        if after[0] in ("st", "nd", "rd", "th") and len(after) > 1:
            return bool(_NUMBERED.fullmatch(after[1]))
        return "base" in after or "power" in after

    def _has_afterthought(self) -> bool:
        """True if the part of the text behind the clause takes the number back."""
        tokens, begin = self._tokens, self._stop
        while begin < len(tokens) and tokens[begin].kind in ("comma", "stop", "other", "math"):
            if tokens[begin].kind == "math" and tokens[begin].text not in "()[]-:\u2013!":
                return False
            begin += 1
        words: list[str] = []
        for token in tokens[begin : begin + MAX_AFTERTHOUGHT]:
            if token.kind == "comma" and words:
                begin += 1
            elif token.kind not in ("word", "relation"):
                break
            else:
                words.append(token.text.lower())
        end = begin + len(words)
        follows = end < len(tokens) and tokens[end].kind in ("number", "command", "currency")
        if begin == self._stop or not words or follows:
            return False
        if words[0] in ("at", "or", "and", "give", "tops", "max") and is_bound_after(words[:3]):
            return True
        return is_retracted(words)

    def alternatives(self) -> Iterator[Span]:
        """Phrases that are offered instead of the number: "41 apples or maybe 42"."""
        begin, end, previous, following = self._begin, self._end, self._previous, self._next
        if following is not None:
            kinds = ("number", "vulgar", "constant", "command")
            values = (n for n in range(*following) if self._tokens[n].kind in kinds)
            gap = self._words(end, next(values, following[0]))
            tail = self._words(following[1], following[1] + 5)
            is_tail = len(gap) < 4 and offers_another(tail)
            if self._is_choice(begin, gap) or is_tail or self._is_corrected():
                yield following
        if previous is None:
            return
        start = _label_start(self._tokens, begin) if self._tokens[begin].text == "=" else begin
        gap = self._words(previous[1], start)
        is_tail = len(gap) < 4 and offers_another(self._words(end, end + 5))
        if (
            self._is_choice(previous[0], gap)
            or is_tail
            or _same_label(self._tokens, previous, begin)
        ):
            yield previous
        before = " ".join(self._words(max(0, previous[0] - 5), previous[0]))
        if _IF_NOT.search(before) and (not gap or gap[0] in ("then", ",")):
            yield previous  # If not 41 then 42

    def _words(self, begin: int, end: int) -> list[str]:
        return [token.text.lower() for token in self._tokens[begin:end] if token.text not in "$*_"]

    def _is_choice(self, begin: int, gap: Sequence[str]) -> bool:
        """True if the words between two numbers, or before the first one, offer both."""
        if offers_another(gap):
            return True
        first = begin
        while first and self._tokens[first - 1].kind != "stop" and begin - first < MAX_CLAUSE:
            first -= 1
        between = (word for word in gap if not is_unit(word))
        return is_separator(between) and announces_choice(self._words(first, begin))

    def _is_corrected(self) -> bool:
        """True if the next number corrects this one: "The answer is 41. No, it's 42"."""
        assert self._next is not None
        gap = self._tokens[self._stop : self._next[0]]
        words = [token.text.lower() for token in gap if token.kind == "word"]
        return len(words) <= MAX_AFTERTHOUGHT and bool(gap) and is_correction(words)

    def numerals_offered(self) -> Iterator[int]:
        """Numbers in words that are offered instead: "42 or forty-three"."""
        before, after = self._before, self._after
        if after[:1] == ["or"] and (number := _numeral(after[1:3])) is not None:
            yield number
        if before[-1:] == ["or"] and (number := _numeral(before[-2:-1])) is not None:
            yield number

    def scale(self) -> int:
        """The number that words behind the number multiply it by: a million, a dozen."""
        scale = 1
        for word in self._after:
            if word not in _SCALES:
                break
            scale *= _SCALES[word]
        return scale

    def _read_before(self) -> tuple[list[str], bool]:
        """The words of the clause before the number, and whether another number precedes them."""
        words: list[str] = []
        first = 0 if self._previous is None else self._previous[1]
        for index in range(self._begin - 1, max(-1, self._begin - 1 - MAX_CLAUSE), -1):
            token = self._tokens[index]
            if index < first:
                return words[::-1], True
            word = token.text.lower()
            after = words[-1] if words else ""
            before = self._tokens[index - 1].text.lower() if index else ""
            if token.kind in ("stop", "comma") or is_restart(before, word, after):
                break
            words.append(word)
        return words[::-1], self._previous is not None and first == self._begin - len(words)

    def _read_after(self) -> tuple[list[str], int]:
        """The words of the clause behind the number, and the index at which it ends."""
        words: list[str] = []
        limit = len(self._tokens) if self._next is None else self._next[0]
        index = self._end
        while index < min(limit, self._end + MAX_CLAUSE):
            token = self._tokens[index]
            if token.kind in ("stop", "comma") or token.text in "()[]":
                break
            if token.text not in ("$", "-", "}", "{"):
                words.append(token.text.lower())
            index += 1
        return words, index


def _numeral(words: Sequence[str]) -> int | None:
    """The number that a word names, up to ninety-nine; None of any other word."""
    parts = words[0].split("-") if words else [""]
    numbers = [_NUMERALS.get(part) for part in parts]
    if None in numbers or not 1 <= len(parts) <= 2:
        return None
    return sum(number for number in numbers if number is not None)


_LABEL = re.compile(r"([A-Za-z])(?:_\w*)?")


def _label_start(tokens: Sequence[Token], equals: int) -> int:
    """Index of the variable before an equals sign: x, x_1 or x_{1}; of the sign if it has none."""
    index = equals - 1
    if index > 2 and tokens[index].text == "}" and tokens[index - 2].text == "{":
        index -= 3
    is_label = index >= 0 and tokens[index].kind == "word" and _LABEL.fullmatch(tokens[index].text)
    return index if is_label else equals


def _same_label(tokens: Sequence[Token], previous: Span, begin: int) -> bool:
    """True if one variable gets two values, as in x = 41, x = 42 and x_1 = 41, x_2 = 42."""
    start, stop = previous
    equals = [n for n in range(start, stop) if tokens[n].text == "="]
    if not equals:
        return False
    starts = _label_start(tokens, equals[0]), _label_start(tokens, begin)
    labels = [_LABEL.match(tokens[index].text) for index in starts]
    if None in labels or len({label[1] for label in labels if label}) > 1:
        return False
    first = starts[0] - 1
    multiplied = first >= 0 and tokens[first].kind in ("number", "math")
    return not multiplied and all(map(joiner, tokens[stop : starts[1]]))
