"""Units after a number, by one name for all their spellings."""

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
