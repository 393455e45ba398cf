"""Units of numbers: as words, as signs, and compound ones with powers.

Units are compared by name and are not converted: "km/h", "km per hour" and "kph" are one unit,
"m" and "cm" two. A word that is no known unit is what the number counts, such as "pens". A unit is
a text of its names and powers, for example "h^-1*km".
"""

import itertools
import re
from collections.abc import Sequence

from .notation import Token

_SPELLINGS = """
m: metre metres meter meters
cm: centimetre centimetres centimeter centimeters
mm: millimetre millimetres millimeter millimeters
km: kilometre kilometres kilometer kilometers kms
dm: decimetre decimetres decimeter decimeters
µm: μm um micrometre micrometres micrometer micrometers micron microns
nm: nanometre nanometres nanometer nanometers
inch: in inches
foot: ft feet
mile: miles mi
yard: yards yd yds
acre: acres
hectare: hectares ha
g: gram grams gms
kg: kilogram kilograms kilo kilos kgs
mg: milligram milligrams
tonne: tonnes
ton: tons
pound: pounds
lb: lbs
ounce: oz ounces
stone: stones
l: L litre litres liter liters
ml: mL millilitre millilitres milliliter milliliters
cl: cL centilitre centilitres centiliter centiliters
gallon: gallons gal
quart: quarts qt
pint: pints pt
cup: cups
tablespoon: tablespoons tbsp
teaspoon: teaspoons tsp
s: sec secs second seconds
ms: millisecond milliseconds
min: mins minute minutes
h: hr hrs hour hours
day: days
week: weeks wk
month: months
year: years yr yrs
decade: decades
century: centuries
degree: degrees deg
celsius: Celsius centigrade
fahrenheit: Fahrenheit
K: kelvin Kelvin
radian: radians rad
N: newton newtons
J: joule joules
kJ: kilojoule kilojoules
cal: calorie calories
kcal: kilocalorie kilocalories
W: watt watts
kW: kilowatt kilowatts
MW: megawatt megawatts
kWh: kilowatt-hour kilowatt-hours
V: volt volts
A: amp amps ampere amperes
Ω: ohm ohms
Hz: hertz
kHz: kilohertz
MHz: megahertz
GHz: gigahertz
Pa: pascal pascals
kPa: kilopascal kilopascals
mol: mole moles
knot: knots
bit: bits
byte: bytes
KB: kilobyte kilobytes
MB: megabyte megabytes
GB: gigabyte gigabytes
TB: terabyte terabytes
dollar: dollars USD US$ \uff04 buck bucks
cent: cents ¢
euro: euros EUR €
sterling: £ GBP quid
pence: penny pennies
yen: ¥ JPY
yuan: CNY RMB
rupee: rupees ₹ INR Rs
won: ₩ KRW
rouble: ₽ RUB ruble rubles roubles
franc: francs CHF
peso: pesos MXN
mph: MPH
kph: kmh kmph
"""
_NAMES = {
    spelling: name
    for line in _SPELLINGS.strip().splitlines()
    for name, _, rest in [line.partition(":")]
    for spelling in (name, *rest.split())
}
_COMPOUND = {"mph": {"mile": 1, "h": -1}, "kph": {"km": 1, "h": -1}}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_BEFORE, _BEHIND = ("square", "sq", "cubic", "cu"), ("squared", "cubed")
_MONEY = frozenset(
    [
        "dollar",
        "cent",
        "euro",
        "sterling",
        "pence",
        "yen",
        "yuan",
        "rupee",
        "won",
        "rouble",
        "franc",
        "peso",
    ]
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
        power = _POWERS[texts[index].lower()]
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
        power, index = _POWERS[follows.lower()], index + 1
    elif exponent := _EXPONENT.match("".join(texts[index : index + 5])):
        power = int(exponent[1] or exponent[2])
        index += len(re.findall(r"-|\d+|[{}^]", exponent[0]))
    for part, times in _COMPOUND.get(name, {name: 1}).items():
        powers[part] = powers.get(part, 0) + sign * power * times
    return index


_EXPONENT = re.compile(r"\^(?:\{(-?\d)\}|(-?\d)(?!\d))")
