"""Phrases of a text that state numbers, their units, and the selection of the stated one."""

from collections.abc import Sequence

from .notation import DASH, Token

_SPELLINGS = """
m: metre metres meter meters
cm: centimetre centimetres centimeter centimeters
mm: millimetre millimetres millimeter millimeters
km: kilometre kilometres kilometer kilometers
inch: in inches
foot: ft feet
mile: miles mi
yard: yards yd
g: gram grams
kg: kilogram kilograms kilo kilos
mg: milligram milligrams
pound: lb lbs
ounce: oz ounces
l: L litre litres liter liters
ml: mL millilitre millilitres milliliter milliliters
s: sec secs second seconds
min: mins minute minutes
h: hr hrs hour hours
day: days
week: weeks
month: months
year: years yr yrs
degree: degrees
radian: radians rad
dollar: dollars USD
cent: cents ¢
euro: euros EUR €
pounds: £ GBP
yen: ¥ JPY
rupee: rupees ₹ INR
"""
_NAMES = {
    spelling: name
    for line in _SPELLINGS.strip().splitlines()
    for name, _, rest in [line.partition(":")]
    for spelling in (name, *rest.split())
}


def unit_of(word: str) -> str:
    """The name of a unit, "" of a word that is none of those that are known."""
    return _NAMES.get(word) or _NAMES.get(word.lower(), "")


VERBS = {"is", "are", "be", "was", "were", "equals", "equal", "=", ":", "gives", "makes", "s"}
"""Words and signs after which an answer is said."""
_OPERATIONS = {"plus": "+", "minus": "-", "times": "*", "over": "/", "multiplied": "*",
               "divided": "/"}  # fmt: skip
_FOLLOWED_BY = {"multiplied": "by", "divided": "by"}
_POWERS = {"squared": "2", "cubed": "3"}


def without_delimiters(tokens: Sequence[Token]) -> list[Token]:
    """Signs of money delimit formulas as well: none of them parts two numbers."""
    return [token for token in tokens if token.text not in ("$", "'")]


def words_to_signs(tokens: list[Token]) -> list[Token]:
    """Operations that are written as words between two numbers, as their signs."""
    converted: list[Token] = []
    index = 0
    while index < len(tokens):
        token, word = tokens[index], tokens[index].text.lower()
        step = 2 if word in _FOLLOWED_BY else 1
        follows = tokens[index + step] if index + step < len(tokens) else None
        before = converted[-1] if converted else None
        is_number = before is not None and (before.kind == "number" or before.text == ")")
        if token.kind == "word" and is_number and word in _OPERATIONS:
            by = _FOLLOWED_BY.get(word)
            is_complete = by is None or (
                tokens[index + 1 : index + 2] and tokens[index + 1].text.lower() == by
            )
            if (
                is_complete
                and follows is not None
                and (follows.kind == "number" or follows.text == "(")
            ):
                converted.append(Token("math", _OPERATIONS[word], token.begin, token.end))
                index += step
                continue
        if word in ("minus", "negative") and follows is not None and follows.kind == "number":
            converted.append(Token("math", "-", token.begin, token.end))
        elif word == "x" and is_number and follows is not None and follows.kind == "number":
            converted.append(Token("math", "*", token.begin, token.end))
        elif token.kind == "word" and is_number and word in _POWERS:
            converted.append(Token("math", "^", token.begin, token.begin))
            converted.append(Token("number", _POWERS[word], token.begin, token.end))
        elif is_number and token.kind == "word" and unit_of(word):
            converted.append(token)
            index += _exponent_length(tokens, index + 1)  # m^2 is a unit as well
        elif word == "percent" and is_number:
            converted.append(Token("math", "%", token.begin, token.end))
        else:
            converted.append(token)
        index += 1
    return converted


def _exponent_length(tokens: Sequence[Token], index: int) -> int:
    """Number of tokens of the exponent that starts at the index; 0 if none does."""
    texts = [token.text for token in tokens[index : index + 4]]
    if texts[:1] != ["^"]:
        return 0
    return 4 if texts[1:2] == ["{"] and texts[3:] == ["}"] else 2


Span = tuple[int, int]
"""Start and end of a phrase among the tokens."""
_MATH = ("number", "math", "command", "vulgar", "constant", "relation", "currency")
_JOINING = {"and": ",", "or": "or", "to": DASH, "through": DASH}


def phrases_of(tokens: Sequence[Token]) -> list[Span]:
    """Runs of tokens that state something together: numbers, signs, and what joins them."""
    spans: list[Span] = []
    begin: int | None = None
    for index in range(len(tokens) + 1):
        token = tokens[index] if index < len(tokens) else None
        if begin is not None and token is not None and _is_aside(tokens, index):
            spans.append((begin, index))
            begin = index
            continue
        joins = token is not None and begin is not None and _joins(tokens, index)
        if token is not None and (token.kind in _MATH or joins):
            begin = index if begin is None else begin
        elif begin is not None:
            spans.append((begin, index))
            begin = None
    values = ("number", "vulgar", "constant")
    return [span for span in spans if any(t.kind in values for t in tokens[span[0] : span[1]])]


def _is_aside(tokens: Sequence[Token], index: int) -> bool:
    """True if a bracket opens a remark on the number before it: 42 (17 + 25)."""
    before = tokens[index - 1] if index else None
    return (
        tokens[index].text == "("
        and before is not None
        and before.end < tokens[index].begin
        and (before.kind in ("number", "word") or before.text in (")", "%"))
    )


def _joins(tokens: Sequence[Token], index: int) -> bool:
    """True if a comma or a word joins two parts of one statement."""
    if tokens[index].kind != "comma" and tokens[index].text.lower() not in _JOINING:
        return False
    after = index + 1
    while after < len(tokens) and joiner(tokens[after]):
        after += 1
    return after < len(tokens) and tokens[after].kind in _MATH and tokens[after].text not in ")}]:"


def joiner(token: Token) -> str:
    if token.kind == "comma":
        return ","
    if token.text in (DASH, "±"):
        return DASH
    return _JOINING.get(token.text.lower(), "") if token.kind == "word" else ""


def chosen_phrase(tokens: Sequence[Token], phrases: Sequence[Span]) -> int:
    """The phrase that counts: the first after the last "answer is", else the last."""
    anchors = [
        index for index, token in enumerate(tokens) if token.kind == "word"
        and token.text.lower() in ("answer", "answers")
    ]  # fmt: skip
    for anchor in reversed(anchors):
        end = anchor + 1
        while end < len(tokens) and tokens[end].kind != "stop":
            end += 1
        verb = next(
            (index for index in range(anchor + 1, end) if tokens[index].text.lower() in VERBS), None
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
