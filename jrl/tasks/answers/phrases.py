"""Phrases of a text that state numbers, their units, and the selection of the stated one.

Units are compared by name and are not converted: "km/h", "km per hour" and "kph" are one unit,
"m" and "cm" two. A word that is no known unit is what the number counts, such as "pens". A unit is
a text of its names and powers, for example "h^-1*km".
"""

import itertools
import re
from collections.abc import Sequence

from .notation import DASH, Token

_SPELLINGS = """
m: metre metres meter meters; cm: centimetre centimetres centimeter centimeters
mm: millimetre millimetres millimeter millimeters
km: kilometre kilometres kilometer kilometers kms; dm: decimetre decimetres decimeter decimeters
µm: μm um micrometre micrometres micrometer micrometers micron microns
nm: nanometre nanometres nanometer nanometers; inch: in inches; foot: ft feet; mile: miles mi
yard: yards yd yds; acre: acres; hectare: hectares ha; g: gram grams gms
kg: kilogram kilograms kilo kilos kgs; mg: milligram milligrams; tonne: tonnes; ton: tons
pound: pounds; lb: lbs; ounce: oz ounces; stone: stones; l: L litre litres liter liters
ml: mL millilitre millilitres milliliter milliliters
cl: cL centilitre centilitres centiliter centiliters; gallon: gallons gal; quart: quarts qt
pint: pints pt; cup: cups; tablespoon: tablespoons tbsp; teaspoon: teaspoons tsp
s: sec secs second seconds; ms: millisecond milliseconds; min: mins minute minutes
h: hr hrs hour hours; day: days; week: weeks wk; month: months; year: years yr yrs
decade: decades; century: centuries; degree: degrees deg; celsius: Celsius centigrade
fahrenheit: Fahrenheit; K: kelvin Kelvin; radian: radians rad; N: newton newtons; J: joule joules
kJ: kilojoule kilojoules; cal: calorie calories; kcal: kilocalorie kilocalories; W: watt watts
kW: kilowatt kilowatts; MW: megawatt megawatts; kWh: kilowatt-hour kilowatt-hours; V: volt volts
A: amp amps ampere amperes; Ω: ohm ohms; Hz: hertz; kHz: kilohertz; MHz: megahertz; GHz: gigahertz
Pa: pascal pascals; kPa: kilopascal kilopascals; mol: mole moles; knot: knots; bit: bits
byte: bytes; KB: kilobyte kilobytes; MB: megabyte megabytes; GB: gigabyte gigabytes
TB: terabyte terabytes; dollar: dollars USD US$ \uff04 buck bucks; cent: cents ¢
euro: euros EUR €; sterling: £ GBP quid; pence: penny pennies; yen: ¥ JPY; yuan: CNY RMB
rupee: rupees ₹ INR Rs; won: ₩ KRW; rouble: ₽ RUB ruble rubles roubles; franc: francs CHF
peso: pesos MXN; mph: MPH; kph: kmh kmph
"""
_NAMES = {
    spelling: name
    for unit in re.split(r"[;\n]", _SPELLINGS.strip())
    for name, _, rest in [unit.strip().partition(":")]
    for spelling in (name, *rest.split())
}
_COMPOUND = {"mph": {"mile": 1, "h": -1}, "kph": {"km": 1, "h": -1}}
_UNIT_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_BEFORE, _BEHIND = ("square", "sq", "cubic", "cu"), ("squared", "cubed")
_MONEY = frozenset(
    {"dollar", "cent", "euro", "sterling", "pence", "yen", "yuan", "rupee", "won", "rouble"}
    | {"franc", "peso"}
)
_RATED = frozenset({"m", "km", "mile", "foot", "knot", "l", "gallon"})
_TEMPERATURES = {"C": "celsius", "F": "fahrenheit"}
_MEANINGS = {"pound": ("pound", "lb", "sterling")}
_SUFFIXED = re.compile(r"([A-Za-zµμ]+?)([23])")
MAX_UNIT_TOKENS = 12


def unit_of(word: str) -> str:
    """The name of the unit that a word denotes; "" if it is not a known unit."""
    return _NAMES.get(word) or (_NAMES.get(word.lower(), "") if len(word) > 1 else "")


def is_unit(text: str) -> bool:
    """True if a text is a unit as `read_unit` gives it, or a word that denotes one."""
    names = (part.partition("^")[0] for part in text.split("*"))
    return all(map(unit_of, names))


def same_unit(left: str, right: str) -> bool:
    """True if two units are the same, or if one of them is empty."""
    if not left or not right or left == right:
        return True
    return not _readings(left).isdisjoint(_readings(right))


def _readings(unit: str) -> set[str]:
    """The units that a text may name: pounds are of mass or of money."""
    parts = [part.partition("^") for part in unit.split("*")]
    choices = [_MEANINGS.get(name, (name,)) for name, _, _ in parts]
    return {
        "*".join(
            sorted(name + mark + power for name, (_, mark, power) in zip(names, parts, strict=True))
        )
        for names in itertools.product(*choices)
    }


def read_unit(tokens: Sequence[Token], begin: int) -> tuple[str, int]:
    """The unit that starts at an index, and its number of tokens; "" and 0 if none does."""
    powers: dict[str, int] = {}
    index, stop = begin, min(len(tokens), begin + MAX_UNIT_TOKENS)
    while index < stop:
        step = _read_factor(tokens[index:stop], powers)
        if not step:
            break
        index += step
    if not _MONEY.isdisjoint(powers):
        powers = dict.fromkeys(powers.keys() & _MONEY, 1)  # money per day is money
    unit = "*".join(sorted(n if p == 1 else f"{n}^{p}" for n, p in powers.items() if p))
    return unit, index - begin if unit else 0


def _read_factor(tokens: Sequence[Token], powers: dict[str, int]) -> int:
    """Adds the next factor of a unit, and returns its number of tokens; 0 if it is none."""
    texts = [token.text for token in tokens]
    index, sign, power = 0, 1, 1
    if texts[0] in ("/", "per") or (
        texts[0] in ("a", "an") and unit_of(texts[1] if len(texts) > 1 else "") in ("h", "s", "min")
        and not _RATED.isdisjoint(powers)
    ):  # fmt: skip
        index, sign = 1, -1
    elif powers and texts[0] in ("*", "-"):
        index = 1
    if texts[index : index + 1] and texts[index].lower() in _BEFORE:
        power = _UNIT_POWERS[texts[index].lower()]
        index += 2 if texts[index + 1 : index + 2] == ["."] else 1
    word = texts[index] if index < len(texts) else ""
    name, suffix = unit_of(word), _SUFFIXED.fullmatch(word)
    if not name and suffix is not None:
        name, power = unit_of(suffix[1]), int(suffix[2])
    is_preposition = (
        word == "in"
        and tokens[index + 1 : index + 2]
        and tokens[index + 1].kind in ("word", "number")
    )
    if not name or is_preposition:
        return 0
    index += 1
    follows = texts[index] if index < len(texts) else ""
    if name == "degree" and (scale := _TEMPERATURES.get(follows) or unit_of(follows)) in (
        "celsius",
        "fahrenheit",
    ):
        name, index = scale, index + 1
    elif follows.lower() in _BEHIND:
        power, index = _UNIT_POWERS[follows.lower()], index + 1
    elif exponent := _EXPONENT.match("".join(texts[index : index + 5])):
        power = int(exponent[1] or exponent[2])
        index += len(re.findall(r"-|\d+|[{}^]", exponent[0]))
    for part, times in _COMPOUND.get(name, {name: 1}).items():
        powers[part] = powers.get(part, 0) + sign * power * times
    return index


_EXPONENT = re.compile(r"\^(?:\{(-?\d)\}|(-?\d)(?!\d))")


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
        if before is not None:
            begins = begins or before.text in "([{=:*/^" or before.text.lower() in VERBS
        is_attached = token.end == after.begin
        is_separate = before is None or before.end < token.begin
        is_word = before is not None and before.kind == "word"
        if (begins and (marked or is_attached)) or (is_word and is_attached and is_separate):
            converted[index] = token._replace(kind="math", text="-")
    return converted


def words_to_signs(tokens: Sequence[Token]) -> list[Token]:
    """Operations that are written as words between two numbers, as their signs."""
    converted: list[Token] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        if token.kind != "word" and token.text != "/":
            converted.append(token)
            index += 1
            continue
        word = token.text.lower()
        before = converted[-1] if converted else None
        if not _is_value(before) and word not in ("minus", "negative"):
            converted.append(token)
            index += 1
            continue
        step = 2 if word in _BEFORE_BY else 1
        follows = tokens[index + step] if index + step < len(tokens) else None
        number_follows = follows is not None and follows.kind == "number"
        operand_follows = follows is not None and (number_follows or follows.text == "(")
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


def _is_value(token: Token | None) -> bool:
    """True if a token may end a number."""
    return token is not None and (
        token.kind in ("number", "vulgar", "constant") or token.text in (")", "}")
    )


def _may_have_unit(before: Token | None, token: Token) -> bool:
    """True if a token may begin the unit of a number. A capital letter that is attached to one is a
    variable: 2N."""
    if before is None or not _is_value(before):
        return False
    return before.end < token.begin or not (len(token.text) == 1 and token.text in "AJKNVW")


Span = tuple[int, int]
"""Start and end of a phrase among the tokens."""
_MATH = ("number", "math", "command", "vulgar", "constant", "relation", "currency")
_JOINING = {"and": ",", "or": "or", "to": DASH, "through": DASH}


def phrases_of(tokens: Sequence[Token]) -> list[Span]:
    """Runs of tokens of one statement: numbers, signs, and words that join them."""
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


_CONTRASTS = (["not"], ["and", "not"], ["rather", "than"], ["instead", "of"])


def without_contrasts(tokens: Sequence[Token], phrases: Sequence[Span]) -> list[Span]:
    """The phrases without the ones that the phrase before them is told from: 42, not 41."""
    remaining = list(phrases[:1])
    for before, phrase in itertools.pairwise(phrases):
        gap = tokens[before[1] : phrase[0]]
        words = [token.text.lower() for token in gap if token.text not in (",", "(")]
        begins_with_bracket = tokens[phrase[0]].text == "("
        if words not in _CONTRASTS or begins_with_bracket:
            remaining.append(phrase)
    return remaining


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
    words = (n for n in range(len(tokens) - 1, -1, -1) if tokens[n].kind == "word")
    for anchor in (n for n in words if _is_anchor(tokens, n)):
        stops = (n for n in range(anchor + 1, len(tokens)) if tokens[n].kind == "stop")
        end = next(stops, len(tokens))
        verbs = (n for n in range(anchor + 1, end) if tokens[n].text.lower() in VERBS)
        after = next(verbs, anchor)
        within = [n for n, (begin, _) in enumerate(phrases) if after <= begin < end]
        if within:
            first = within[0]
            word = tokens[phrases[first][0] - 1].text.lower()
            if (word == "not" or word.endswith("n't")) and first + 1 < len(phrases):
                break  # The answer is not 41. It is 42.
            return first
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
