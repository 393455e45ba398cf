"""Phrases of a text that state numbers, and the selection of the stated one."""

from collections.abc import Sequence

from .notation import DASH, Token
from .units import read_unit

VERBS = {"is", "are", "be", "was", "were", "equals", "equal", "=", ":", "gives", "makes", "s"}
"""Words and signs that precede an answer."""
_OPERATIONS = {"plus": "+", "minus": "-", "times": "*", "over": "/", "multiplied": "*",
               "divided": "/"}  # fmt: skip
_BEFORE_BY = ("multiplied", "divided")
_POWERS = {"squared": "2", "cubed": "3"}


def signs_of_dashes(tokens: Sequence[Token], *, marked: bool) -> list[Token]:
    """Dashes that are minus signs, as signs: at the beginning of a value (–5), not of a range."""
    converted = list(tokens)
    for index, token in enumerate(tokens[:-1]):
        if token.text != DASH:
            continue
        before, after = tokens[index - 1] if index else None, tokens[index + 1]
        if after.kind not in ("number", "command", "vulgar", "constant", "currency", "word"):
            continue
        if after.kind == "word" and len(after.text) > 1:
            continue
        begins = before is None or before.kind in ("stop", "comma", "relation")
        begins = begins or before.text in "([{=:*/^" or before.text.lower() in VERBS
        is_attached = token.end == after.begin
        is_apart = before is None or before.end < token.begin
        is_word = before is not None and before.kind == "word"
        if (begins and (marked or is_attached)) or (is_word and is_attached and is_apart):
            converted[index] = token._replace(kind="math", text="-")
    return converted


def words_to_signs(tokens: Sequence[Token]) -> list[Token]:
    """Operations that are written as words between two numbers, as their signs."""
    converted: list[Token] = []
    index = 0
    while index < len(tokens):
        token, word = tokens[index], tokens[index].text.lower()
        step = 2 if word in _BEFORE_BY else 1
        follows = tokens[index + step] if index + step < len(tokens) else None
        number_follows = follows is not None and follows.kind == "number"
        operand_follows = follows is not None and (number_follows or follows.text == "(")
        before = converted[-1] if converted else None
        is_number = before is not None and (before.kind == "number" or before.text == ")")
        if (
            is_number
            and operand_follows
            and word in _OPERATIONS
            and (step == 1 or tokens[index + 1].text.lower() == "by")
        ):
            token = token._replace(kind="math", text=_OPERATIONS[word])
            index += step - 1
        elif word in ("minus", "negative") and number_follows:
            token = token._replace(kind="math", text="-")
        elif word == "x" and is_number and number_follows:
            token = token._replace(kind="math", text="*")
        elif is_number and (length := _percent_length(tokens, index)):
            index += length - 1
            token = Token("math", "%", token.begin, tokens[index].end)
        elif word in _POWERS and is_number:
            converted.append(Token("math", "^", token.begin, token.begin))
            token = token._replace(kind="number", text=_POWERS[word])
        elif _may_have_unit(before, token) and (unit := read_unit(tokens, index))[1]:
            index += unit[1] - 1
            token = Token("word", unit[0], token.begin, tokens[index].end)
        converted.append(token)
        index += 1
    return converted


def _percent_length(tokens: Sequence[Token], index: int) -> int:
    """Number of tokens of "percent" or "per cent" at an index; 0 if it is not there."""
    words = [token.text.lower() for token in tokens[index : index + 2]]
    return 1 if words[0] in ("percent", "pct") else 2 * (words == ["per", "cent"])


def _may_have_unit(before: Token | None, token: Token) -> bool:
    """True if a token may begin the unit of a number. A capital letter that is attached to one is a
    variable: 2N."""
    if before is None or (token.kind != "word" and token.text != "/"):
        return False
    if before.kind not in ("number", "vulgar", "constant") and before.text not in (")", "}"):
        return False
    return before.end < token.begin or not (len(token.text) == 1 and token.text in "AJKNVW")


Span = tuple[int, int]
"""Start and end of a phrase among the tokens."""
_MATH = ("number", "math", "command", "vulgar", "constant", "relation", "currency")
_JOINING = {"and": ",", "or": "or", "to": DASH, "through": DASH}


def phrases_of(tokens: Sequence[Token]) -> list[Span]:
    """Runs of tokens that state something together: numbers, signs, and what joins them."""
    spans: list[Span] = []
    begin: int | None = None
    for index, token in enumerate(tokens):
        if begin is not None and _is_aside(tokens, index):
            spans.append((begin, index))
            begin = index
        elif token.kind in _MATH or (begin is not None and _joins(tokens, index)):
            begin = index if begin is None else begin
        elif begin is not None:
            spans.append((begin, index))
            begin = None
    if begin is not None:
        spans.append((begin, len(tokens)))
    values = ("number", "vulgar", "constant")
    return [span for span in spans if any(t.kind in values for t in tokens[span[0] : span[1]])]


def _is_aside(tokens: Sequence[Token], index: int) -> bool:
    """True if a bracket opens a remark on the number before it: 42 (17 + 25)."""
    if index == 0 or tokens[index].text != "(":
        return False
    before = tokens[index - 1]
    is_value = before.kind in ("number", "word") or before.text in (")", "%")
    return is_value and before.end < tokens[index].begin


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
    if token.text == DASH:
        return DASH
    return _JOINING.get(token.text.lower(), "") if token.kind == "word" else ""


def _is_anchor(tokens: Sequence[Token], index: int) -> bool:
    """True if a word announces the answer: "answer", or "A:" at the beginning of a line."""
    word = tokens[index].text
    if word in ("A", "Ans", "ANS", "ans"):
        begins = index == 0 or tokens[index - 1].kind == "stop"
        return begins and index + 1 < len(tokens) and tokens[index + 1].text == ":"
    return word.lower() in ("answer", "answers")


def chosen_phrase(tokens: Sequence[Token], phrases: Sequence[Span]) -> int:
    """Index of the phrase with the answer: the first after the last "answer is", else the last."""
    anchors = [n for n, token in enumerate(tokens) if _is_anchor(tokens, n)]
    for anchor in reversed(anchors):
        stops = (n for n in range(anchor + 1, len(tokens)) if tokens[n].kind == "stop")
        end = next(stops, len(tokens))
        verbs = (n for n in range(anchor + 1, end) if tokens[n].text.lower() in VERBS)
        after = next(verbs, anchor)
        within = [n for n, (begin, _) in enumerate(phrases) if after <= begin < end]
        if within:
            return within[0]
        # "Final answer:" and the number on a line of its own.
        if end - after <= 2:
            below = [n for n, (begin, _) in enumerate(phrases) if begin >= end]
            if below and all(t.kind == "stop" for t in tokens[end : phrases[below[0]][0]]):
                return below[0]
    last = len(phrases) - 1
    # Remarks in brackets at the end are skipped in favour of the phrase before them.
    while last and _is_aside(tokens, phrases[last][0]):
        last -= 1
    return last
