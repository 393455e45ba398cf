"""Hedges and retractions: words between two candidates, before them and behind an answer.

"41 or 42", "maybe 41, maybe 42" and "either of 41 and 42" state no answer, and "42. Ignore that."
takes its answer back. Numbers, words, formulas and marked answers are all read with these rules.
"""

import re
from collections.abc import Iterable

_SEPARATORS = frozenset({",", "and", ";", "or", "?", "to", "'"})
MAX_WORDS = 14
"""Maximum number of words between two candidates, or behind an answer, that are read."""
_OFFER = re.compile(
    r"^(?:, )?&$|(?:^|\s)(?:or(?! (?:more|less|fewer|so)\b)|and also|xor|oder|vs|versus"
    r"|alternative(?:ly)?|maybe|perhaps|possibly|potentially|otherwise|else|unless|and/or"
    r"|[|[~\u2026%]"
    r"|\?+(?! no\b)|failing|fallback|backup|toss-up|equally|under another"
    r"|also (?:possible|works?)|as well as"
    r"|if (?:\S+ ){0,2}(?:not|odd|even|that|this|so)"
    r"|(?:another|second|other|alternative|next|possible|one)"
    r" (?:answers?|guess|possibilit\w+|options?|candidates?|choice|value|way|method|case|reading)"
    r"|another(?= (?:gives|says|yields)|$)|(?:might|may|could)(?: \S+)? be"
    r"|(?:is|are)(?: \S+)? (?:possible|likely|plausible)|so (?:is|does)"
    r"|(?:the|some|and|while|for|,) others?|, some|in the other|for some"
    r"|guess(?: \d)?(?= :|$)|(?:option|answer|candidate|choice) \d(?= :|$)"
    r"|first (?:case|reading|guess)|i (?:mean|meant)|should be)(?=\s|$)"
)
_LEAD = re.compile(
    r"(?:^|\s)(?:either|one of|any of|among|between|range|anywhere|possibilit\w+|possible|options"
    r"|candidates|guess(?:es)?|choose|pick|torn|unsure|sure|decide|tell|depend\w*|toss-up|maybe"
    r"|perhaps|possibly|both|two|answers|is it|could it be)(?=\s|$)"
)
_RETRACTION = re.compile(
    r"(?:^|\s)(?:made (?:a |an |some )?(?:mistake|error)|do(?:n't| not) think so|perhaps not"
    r"|(?:scratch|strike|ignore|forget|disregard) (?:that|this)|never mind|i was wrong|sike"
    r"|take (?:that|this|it) back|(?:just )?kidding|oops|my bad|contradict\w*|should be|actually no"
    r"|(?:that|this|it) (?:can't|cannot|can not|couldn't) be|wait no|no wrong|falsely|no longer"
    r"|if it were|(?:that|this|it) (?:is|was) (?:wrong|incorrect)|\[ wrong)(?=\s|$)|^but no$|^\?\?+"
)
# Items of a list, or values on lines of their own: no line is the answer rather than another.
MAX_LIST = 300
"""Characters at the end of a text in which lists are looked for."""
_ITEM = r"[ \t]*(?:[-*\u2022]|\(?\d[.)]|(?:#### )?or\b|####)[ \t]+[^\s=]+(?: [^\s=]+){0,2}[ \t]*"
_LIST = re.compile(rf"(?:^|\n){_ITEM}\n{_ITEM}(?:\s*$|[.\s])")


def offers_another(between: Iterable[str]) -> bool:
    """True if the words between two candidates offer one instead of the other: "or maybe"."""
    words = list(between)
    return 0 < len(words) <= MAX_WORDS and bool(_OFFER.search(" ".join(words)))


def is_separator(between: Iterable[str]) -> bool:
    """True if the words between two candidates only separate them: ",", "and"."""
    return _SEPARATORS.issuperset(between)


def announces_several(before: Iterable[str]) -> bool:
    """True if the words before the first of two candidates announce a choice: "either"."""
    return bool(_LEAD.search(" ".join(before)))


def is_taken_back(behind: Iterable[str]) -> bool:
    """True if the words behind an answer take it back: "Ignore that.", "I made a mistake."."""
    return bool(_RETRACTION.search(" ".join(list(behind)[:MAX_WORDS])))


_WORDS = re.compile(r"[^\W_][\w'\u2019]*(?:[-/][^\W\d_]\w*)*|[:,;?&|/%~\u2026]")
_FORMULA = re.compile(r"\$[^$\n]+\$|\\\(.+?\\\)|\\\[.+?\\\]|(?<!\S)\S*(?:[\\^=+]|\(-?\d)\S*")
_NEAR = 5
"""Words beside a word or a formula among which another candidate is offered."""


def words_of(text: str) -> list[str]:
    """The words and marks of a text in lower case."""
    return _WORDS.findall(text.lower().replace("\u2019", "'"))


def is_hedged(before: str, behind: str) -> bool:
    """True if the texts before and behind a candidate offer another one, or take it back."""
    ahead = words_of(re.split(r"[.!]\s|\n\s*\n", before)[-1])
    follows = words_of(behind)
    commas = [n for n, word in enumerate(ahead[:-1]) if word in ",;:"]
    near = ahead[max(commas[-1] if commas else 0, len(ahead) - _NEAR) :]
    if offers_another(near) and len(ahead) > 1:
        return True
    if offers_another(follows[:_NEAR]) or is_taken_back(follows):
        return True
    return follows[:1] in ([","], ["and"], [";"], ["?"], ["/"]) and announces_several(ahead)


def is_list(text: str) -> bool:
    """True if a text is a list of short items, none of which is its answer."""
    return bool(_LIST.search(text[-MAX_LIST:]))


def is_hedged_formula(text: str) -> bool:
    """True if the last formula of a text is offered beside another one."""
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return False
    last = formulas[-1]
    if is_taken_back(words_of(text[last.end() :])):
        return True
    if len(formulas) == 1:
        return False
    before = formulas[-2]
    gap = words_of(text[before.end() : last.start()])
    lead = words_of(re.split(r"[.!]\s|\n", text[: before.start()])[-1])
    is_short = is_separator(gap)
    behind = words_of(text[last.end() :])[:_NEAR]
    return offers_another(gap) or ((is_short or offers_another(behind)) and announces_several(lead))
