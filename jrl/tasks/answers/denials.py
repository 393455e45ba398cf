"""Words around an answer that take it back: denials, conditions, bounds, multiples, and hedges.

A part of a sentence reaches from its answer to the next stop, comma or number. In "It can't be 42",
"42 is wrong", "42 at most" and "half of 42" the sentence does not state 42.

A hedge offers another candidate: "41 or 42", "maybe 41, maybe 42", "either of 41 and 42". Numbers,
words, formulas and marked answers are read with the same rules.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NOT = re.compile(
    r"(?:no|not|never|neither|nor|cannot|hardly|scarcely|nowhere|without|except|excepting"
    r"|excluding|excludes?|besides|unlike|unless|isnt|arent|wasnt|dont|doesnt|didnt|cant|couldnt"
    r"|wont|wouldnt|shouldnt|mustnt|aint|barely|nobody|lacks?|forget|\w*n't)"
)
_NOT_PAIRS = {
    *(("other", "than"), ("rather", "than"), ("instead", "of"), ("opposed", "to"), ("far", "from")),
    *(("different", "from"), ("different", "than"), ("differs", "from"), ("differ", "from")),
    *(("anything", "but"), ("everything", "but"), ("all", "but"), ("nothing", "like")),
    *(("fails", "to"), ("failed", "to"), ("rules", "out"), ("rule", "out"), ("ruled", "out")),
    *(("unequal", "to"), ("no", "longer")),
    *(("refuse", "to"), ("refuses", "to"), ("apart", "from"), ("aside", "from")),
}
# A denial of these reaches through the verb of the answer: "I do not think that it is 42".
_OPINION = _words(
    """
    think thinks thought believe believes say says saying claim claims suppose mean agree
    accept agreed sure certain true right correct possible case likely convinced know see
    clear way chance means doubt clearly buy expect evidence
    """
)
_DOUBT = _words(
    """
    doubt doubts doubtful doubted unlikely disagree deny denies denied reject rejects rejected
    refute refutes disprove disproves impossible withdraw withdraws
    retract retracts tempted tempting
    """
)
_WRONG = _words(
    """
    wrong incorrect false mistake mistaken mistakenly wrongly error trap erroneous invalid
    bogus incorrectly falsely
    """
)
_WRONG_NOUNS = _words(
    """
    answer answers result value guess number solution total option choice conclusion claim to
    that said says
    """
)
_CONDITION = frozenset({"if", "whether", "suppose", "supposing", "assume", "assuming", "unless"})
# Two denials that cancel each other.
_CANCELLED = re.compile(
    r"\b(?:no|without(?: a| any)?|beyond(?: a| any)?) doubt\b"
    r"|\b(?:cannot|not|\w*n't)(?: be)? anything (?:but|except|other than)\b"
    r"|\b(?:not|isn't|wasn't) (?:hard|difficult) to \w+\b"
)
# Subjects that deny the verb of their clause: "No one gets 42", "No student has 42".
_NO_SUBJECT = _words("nobody none nothing neither")
_NO_DENIAL = _words("it the that this they we i he she you there its matter problem yes thanks")
# They deny only the next word or phrase: "without tax she pays 42".
_ADJACENT = _words("no without except excepting excluding exclude excludes besides unlike")
# Verbs of a clause of its own: "Those who do not play are 42".
_FINITE = _words(
    """
    is are was were equals = : gives makes leaves left totals remains remain costs has needs
    takes that's it's there's there're becomes comes means yields gets
    """
)
_RESTART = _words(
    """
    so thus therefore hence but then because since while consequently however instead actually
    """
)
# Of an answer as a subject: "42 people are wrong" counts them.
_COPULA = re.compile(
    r"(?:is|was|be|been|seems|looks|sounds|appears|would|could|can|will|might|may|must|should|does"
    r"|isnt|wasnt|cant|doesnt|wont|cannot|(?!aren|weren|don|haven|didn)\w*n't|s|'s)"
)
_JUDGED_WRONG = _words(
    """
    wrong incorrect false mistake mistaken mistakenly wrongly error erroneous invalid bogus trap
    impossible unlikely absurd nonsense excluded eliminated
    ruled rejected refuted disproved inconsistent
    contradictory untrue doubtful unacceptable
    """
)
_JUDGED_RIGHT = _words(
    """
    right correct true it answer answers solution possible valid accepted acceptable so that
    enough what
    """
)
_FAILS = frozenset({"fails", "failed", "violates", "contradicts", "fail"})
_WORKS = _words(
    """
    work works fit fits satisfy satisfies hold holds count counts equal equals make solve
    solves match matches add check be been it right correct true possible
    """
)
_EXCESS = frozenset({"large", "small", "big", "high", "low", "much", "many", "few", "little"})
_ELSEWHERE = r" (?:to(?! be\b)|that|only|otherwise|in general|for (?!this|the |our |these))"
_RIGHT_OR_WRONG = "|".join(_JUDGED_WRONG | _JUDGED_RIGHT - _words("answer answers solution it"))
_MAY_FAIL = "|".join(
    {*(_WORKS - _words("be been equal equals make add")), *_JUDGED_RIGHT, "make sense", "add up"}
)
# Judgements on something else than the answer before them: "is wrong to divide", "is not so hard",
# "cannot be negative", "is not a coincidence".
_JUDGES_ELSE = re.compile(
    rf"(?:^| )(?:(?:{_RIGHT_OR_WRONG}|work|hold|fit|too \w+){_ELSEWHERE}"
    r"|(?:so|that) (?:hard|easy|simple|bad|large|small|much|many|high|low|few|long)\b"
    r"|(?:no|not|never|cannot|\w*n't) "
    r"(?:(?:be|been|seem|look|to|the|my|our|an?|even|quite|really|at|all|\w+ly) )*+"
    rf"(?!(?:\w+ )?(?:answers?|solution)\b|(?:{_MAY_FAIL})(?![-\w]))\w)"
)
_AFTERTHOUGHT = _words(
    """
    which that this it but and oh wait sorry actually hmm no well the answer result one
    though i they we
    """
)

_MORE_LESS = _words(
    """
    more less fewer greater larger smaller higher lower bigger better older younger
    """
)
_BOUNDS = _words(
    """
    least most between exceeding below above over under beyond beneath past exceed exceeds
    exceeded underneath upwards nearly almost within nearing approaching maximally minimally <
    > <= >= != near until
    """
)
# Prepositions that place something beside a number. Behind those that are not here (of, to, for,
# in, at, by, on, with, after, from, into), a sentence may state its number.
_RELATING = _words(
    """
    before against behind beside alongside amid among amongst atop despite following preceding
    concerning considering regarding outside opposite pending throughout till toward towards
    versus vs through across along during
    """
)
_BOUND_PAIRS = {
    *(("up", "to"), ("excess", "of"), ("short", "of"), ("shy", "of"), ("upwards", "of")),
    *(("upward", "of"), ("close", "to"), ("closer", "to"), ("nearer", "to"), ("north", "of")),
    *(("south", "of"), ("limited", "to"), ("capped", "at"), ("starting", "at")),
    *(("starting", "from"), ("bounded", "by"), ("above", "by"), ("below", "by")),
    ("out", "of"),
}
_ADDING = _words(
    """
    add adds adding added sum sums summing total totals totaling count counts comes came goes
    works worked
    """
)
_AMOUNTS = _words("many much few little high low large small big far long")
_AFTER_BOUND = _words(
    """
    more less fewer greater larger smaller higher lower bigger above below over under beyond
    up upwards upward another other others something anything else maybe possibly perhaps not
    even better worse older younger
    """
)
_BOUND_PAIRS_AFTER = {
    *(("at", limit) for limit in ("most", "least", "best", "worst", "minimum", "maximum")),
    *(("and", limit) for limit in ("counting", "more", "up", "above", "over", "upwards", "upward")),
}
_LIMIT_WORDS = _words(
    """
    max maximum min minimum tops onwards onward upwards upward plus minus ish something odd fold
    """
)

_PARTS = re.compile(
    r"(?:half|halve|halves|third|thirds|quarters?|fourths?|(?:fif|six|seven|eigh|nin|ten|twelf|"
    r"twentie|hundred|thousand)ths?|percent|percentage|per|fraction|portion|part|parts"
    r"|multiple|multiples|factor|factors|divisor|divisors|reciprocal|inverse|opposite|negative"
    r"|negation|complement|power|powers|log|logarithm|factorial|double|triple|quadruple|treble"
    r"|square|squares|cube|cubes|root|roots|digits?|dozens?|hundreds?|thousands?|millions?|billions?"
    r"|remainder|quotient|square-root|one-half|one-third|two-thirds|one-quarter|three-quarters)"
)
_TIMES = _words(
    """
    half twice thrice double doubled triple tripled quadruple halve halved treble negative
    minus root cube square ln log lg sin cos tan exp third tenth sqrt cbrt mod modulo squared
    cubed
    """
)
_ARTICLES = frozenset({"the", "a", "an", "that", "these", "those", "all", "number", "value"})

MAX_CLAUSE = 24
"""Maximum number of words before or after an answer that are looked at."""


def is_denied(before: Sequence[str], *, answer_follows_number: bool = False) -> bool:
    """True if the words before an answer deny it, or make it a condition.

    Args:
      before: the words and signs of its clause before it, in lower case.
      answer_follows_number: whether the clause starts at another number.
    """
    before = _CANCELLED.sub(" ", " ".join(before)).split()
    if _has_denied_subject(before):
        return True
    for index, word in enumerate(before):
        rest = before[index + 1 :]
        restates = word in _WRONG and not _FINITE.isdisjoint(rest[1:])
        if rest[:1] == [":"] and (word == "no" or restates):
            continue  # That is wrong: the answer is 42.
        if word in _DOUBT:
            return True
        if word in _WRONG and (not rest or rest[0] in _FINITE or rest[0] in _WRONG_NOUNS):
            return True
        is_pair = bool(rest) and (word, rest[0]) in _NOT_PAIRS
        if is_pair and index and before[index - 1] in ("none", "no"):
            continue  # none other than 42
        if word in _CONDITION and not answer_follows_number and index < 4:
            return True
        if not is_pair and not _NOT.fullmatch(word):
            continue
        rest = rest[1:] if is_pair else rest
        is_separate = any(each not in _ARTICLES | {"for"} for each in rest)
        if word in _ADJACENT and is_separate and _OPINION.isdisjoint(rest[:2]):
            continue
        if rest[:1] == ["only"] or (rest[:1] and rest[0] in ("more", "less", "fewer")):
            continue  # not only 42; bounds have a rule of their own
        if any(each in _OPINION for each in rest) or not any(each in _FINITE for each in rest):
            return True
    return False


def _has_denied_subject(clause: Sequence[str]) -> bool:
    """True if a clause begins with a subject that denies its only verb."""
    subject, rest = clause[:1], clause[1:]
    num_verbs = sum(word in _FINITE for word in rest)
    if subject == ["no"]:
        return len(rest) > 1 and rest[0] not in _NO_DENIAL and ":" not in rest and num_verbs <= 1
    is_other = rest[:2] == ["other", "than"]
    return bool(subject) and subject[0] in _NO_SUBJECT and num_verbs == 1 and not is_other


def is_bound_before(before: Sequence[str]) -> bool:
    """True if the words before an answer make it a bound: more than, over, up to."""
    words = _without_articles(before)
    if not words:
        return False
    if words[-1] in _BOUNDS or words[-1] in _RELATING:
        return True
    if len(words) < 2:
        return False
    pair = words[-2], words[-1]
    if len(words) > 2 and words[-3:] in (["or", "equal", "to"], ["or", "equals", "to"]):
        return True
    if len(words) > 2 and (words[-3], words[-1]) == ("as", "as") and words[-2] in _AMOUNTS:
        return True
    if pair == ("up", "to") and len(words) > 2 and words[-3] in _ADDING:
        return False
    return pair in _BOUND_PAIRS or (pair[1] == "than" and pair[0] in _MORE_LESS)


def is_part_before(before: Sequence[str]) -> bool:
    """True if the words before an answer name a part or a multiple of it: half of, twice."""
    words = _without_articles(before)
    if not words:
        return False
    if words[-1] in _TIMES:
        return True
    return (
        len(words) > 1 and words[-1] in ("of", "from", "as") and bool(_PARTS.fullmatch(words[-2]))
    )


def _without_articles(words: Sequence[str]) -> list[str]:
    rest = list(words)
    while rest and rest[-1] in _ARTICLES:
        rest.pop()
    return rest


def is_bound_after(after: Sequence[str], *, number_follows: bool = False) -> bool:
    """True if the words after an answer make it a bound: at most, or more, and up."""
    # 42 and a half
    if len(after) > 2 and after[0] == "and" and _PARTS.fullmatch(after[2]):
        return True
    for index, (word, following) in enumerate(pairwise((*after, ""))):
        is_last = index + 2 >= len(after)
        of_next_number = number_follows and is_last
        if not following:
            return word in _LIMIT_WORDS and index < 3
        if (word, following) == ("give", "or"):
            return True
        if (word, following) in _BOUND_PAIRS_AFTER and not of_next_number:
            return True
        if word == "or" and following in _AFTER_BOUND:
            return not of_next_number
    return False


def is_judged_wrong(after: Sequence[str], *, is_bare: bool = True) -> bool:
    """True if the words after an answer call it wrong.

    Args:
      after: the words of its clause after it, in lower case.
      is_bare: whether the first of them follows the answer itself, not a counted noun.
    """
    words = list(after)
    while words and words[0] in (":", "-"):
        words.pop(0)
    if not words:
        return False
    if words[0] in _FAILS and is_bare:
        return True
    if words[0] == "not" and len(words) == 1:
        return True
    verb = next((n for n, word in enumerate(words[:4]) if _COPULA.fullmatch(word)), None)
    if verb is None:
        return words[0] in _WRONG and len(words) == 1
    predicate = words[verb:]
    if any(word in _JUDGED_WRONG for word in predicate) or (
        predicate[1:2] in (["out"], ["off"]) and predicate[2:] in ([], ["of", "the", "question"])
    ):
        return not any(_NOT.fullmatch(word) for word in predicate)
    if any(word == "too" and following in _EXCESS for word, following in pairwise(predicate)):
        return True
    negated = next((n for n, word in enumerate(predicate) if _NOT.fullmatch(word)), None)
    if negated is None:
        return False
    rest = predicate[negated + 1 :]
    if not rest or any(word in _JUDGED_RIGHT for word in rest):
        return True
    return verb == 0 and is_bare and any(word in _WORKS for word in rest[:3])


def is_verdict(word: str) -> bool:
    """True if a word begins a verdict on the answer before it: is, seems, wrong."""
    return word in _WRONG or bool(_COPULA.fullmatch(word))


def is_retracted(words: Sequence[str]) -> bool:
    """True if the words that follow an answer behind a stop or a comma take it back: "No.",
    "that is wrong", "which is not it"."""
    sentence = " ".join(words).replace("they are", "they is").replace("has to be", "must be")
    rest = sentence.replace("'s", " 's").split()
    words = tuple(rest)
    if is_withdrawn(words):
        return True
    is_denial = bool(rest) and rest[0] in _words("no nope not wrong incorrect false never")
    if is_denial and (len(rest) == 1 or rest[1] in _words("really wait sorry at answer no that")):
        return True
    if rest[:2] in (["or", "not"], ["or", "maybe"], ["maybe", "not"]):
        return True
    while rest and rest[0] in _AFTERTHOUGHT:
        rest.pop(0)
    if len(rest) == len(words) and not _COPULA.fullmatch(rest[0] if rest else ""):
        return False
    if not rest or not _COPULA.fullmatch(rest[0]):
        return bool(rest) and len(rest) == 1 and rest[0] in _WRONG
    return is_judged_wrong(rest) and not _JUDGES_ELSE.search(" ".join(rest))


_CORRECTED = re.compile(
    r"(?:(?:no|wait|oops|hmm|but|and|oh) )*(?:actually|correction|on second thought|make that"
    r"|make it|oops(?! is)|wait(?! for\b| until\b)|sorry(?! for\b)|never mind(?! the| that| how)"
    r"|no(?! (?:other|further|more|need|mistakes?|errors?|surprise|wonder)\b)|i mean|i meant"
    r"|or rather|rather"
    r"|i made an? (?:mistake|error))\b"
)


def is_correction(words: Sequence[str]) -> bool:
    """True if the words behind a stop announce another answer: "Actually", "No, it's"."""
    return bool(_CORRECTED.match(" ".join(words)))


def is_restart(before: str, word: str, after: str) -> bool:
    """True if a word starts a clause that the words before it do not deny: so, but, then.

    Args:
      before, after: the words beside it; "anything but" and "instead of" deny what follows.
    """
    if word not in _RESTART:
        return False
    if word == "but":
        return before not in ("anything", "everything", "nothing", "all", "any")
    return word != "instead" or after != "of"


def last_clause(words: Sequence[str]) -> Sequence[str]:
    """The words behind the last one that starts a clause."""
    padded = ["", *words, ""]
    starts = (n for n in range(len(words), 0, -1) if is_restart(*padded[n - 1 : n + 2]))
    return words[next(starts, 0) :]


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
    r"|first (?:case|reading|guess)|i (?:mean|meant)|(?:it|that|this|answer) should be)(?=\s|$)"
)
# The sentence behind an answer offers another one, and does not merely go on: "Or is it 41?".
_NEXT_OFFER = re.compile(
    r"(?:or|maybe|perhaps|possibly)(?: \S+){1,4}$|alternatively ,? ?(?:it|the answer)\b"
    r"|(?:it|that) (?:could|might|may) (?:also )?be (?!\w+ed\b|written)|(?:if|so) (?:not|is) \S+$"
    r"|(?:another|second|alternative) (?:answer|guess|candidate)"
)
_LEAD = re.compile(
    r"(?:^|\s)(?:either|one of|any of|among|between|range|anywhere|possibilit\w+|possible|options"
    r"|candidates|guess(?:es)?|choose|pick|torn|unsure|sure|decide|tell|depend\w*|toss-up|maybe"
    r"|perhaps|possibly|both|two|answers|is it|could it be)(?=\s|$)"
)
_RETRACTION = re.compile(
    r"(?:^|\s)(?:do(?:n't| not) think so|perhaps not|(?<!not )(?<!n't )(?<!never )"
    r"(?:made (?:an? |some )?(?:mistake|error)"
    r"|(?:scratch|strike|ignore|forget|disregard) (?:that|this))"
    r"|never mind(?! the| that| how)|i was wrong|sike|take (?:that|this|it) back|(?:just )?kidding"
    r"|oops(?! is)|my bad|(?:that|this|it|which) contradicts|actually no|wait no|no wrong|falsely"
    r"|(?:that|this|it) (?:can't|cannot|can not|couldn't) be"
    rf"(?:$| (?:right|correct|true|so(?! \w)|it)\b(?!{_ELSEWHERE}))"
    rf"|(?:that|this|it) (?:is|was) (?:wrong|incorrect)(?!{_ELSEWHERE})|\[ wrong)(?=\s|$)"
    r"|^but no$|^\?\?+|^no longer\b"
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


def announces_choice(before: Iterable[str]) -> bool:
    """True if the words before the first of two candidates announce a choice: "either"."""
    return bool(_LEAD.search(" ".join(before)))


def is_withdrawn(behind: Iterable[str]) -> bool:
    """True if the words behind an answer take it back: "Ignore that.", "I made a mistake."."""
    return bool(_RETRACTION.search(" ".join(list(behind)[:MAX_WORDS])))


_WORDS = re.compile(r"[^\W_][\w'\u2019]*(?:[-/][^\W\d_]\w*)*|[:,;?&|/%~\u2026]")
_FORMULA = re.compile(r"\$[^$\n]+\$|\\\(.+?\\\)|\\\[.+?\\\]|(?<!\S)\S*(?:[\\^=+]|\(-?\d)\S*")
_NEAR = 5
"""Words beside a word or a formula among which another candidate is offered."""


def words_of(text: str) -> list[str]:
    """The words and marks of a text in lower case."""
    return _WORDS.findall(text.lower().replace("\u2019", "'"))


def is_offered_behind(behind: str, near: int = _NEAR) -> bool:
    """True if the text behind a candidate offers another one: within `near` words of its sentence,
    or at the start of the next."""
    sentence, *later = re.split(r"[.!](?:\s+|$)|\n+", behind, maxsplit=1)
    if offers_another(words_of(sentence)[:near]):
        return True
    following = re.split(r"[.!](?:\s+|$)|\n+", later[0].lstrip(), maxsplit=1)[0] if later else ""
    return bool(_NEXT_OFFER.match(" ".join(words_of(following))))


def is_hedged(before: str, behind: str) -> bool:
    """True if the texts before and behind a candidate offer another one, or take it back."""
    ahead = words_of(re.split(r"[.!]\s|\n\s*\n", before)[-1])
    follows = words_of(behind)
    commas = [n for n, word in enumerate(ahead[:-1]) if word in ",;:"]
    near = ahead[max(commas[-1] if commas else 0, len(ahead) - _NEAR) :]
    if offers_another(near) and len(ahead) > 1:
        return True
    if is_offered_behind(behind) or is_withdrawn(follows):
        return True
    return follows[:1] in ([","], ["and"], [";"], ["?"], ["/"]) and announces_choice(ahead)


def is_list(text: str) -> bool:
    """True if a text is a list of short items, none of which is its answer."""
    return bool(_LIST.search(text[-MAX_LIST:]))


def is_hedged_formula(text: str) -> bool:
    """True if the last formula of a text is offered beside another one."""
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return False
    last = formulas[-1]
    if is_withdrawn(words_of(text[last.end() :])):
        return True
    if len(formulas) == 1:
        return False
    before = formulas[-2]
    gap = words_of(text[before.end() : last.start()])
    lead = words_of(re.split(r"[.!]\s|\n", text[: before.start()])[-1])
    is_short = is_separator(gap)
    is_offered = is_offered_behind(text[last.end() :])
    return offers_another(gap) or ((is_short or is_offered) and announces_choice(lead))
