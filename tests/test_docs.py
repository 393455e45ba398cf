"""The documentation has a place for every public function. (.ci/run builds the site.)"""

import re
import typing
from pathlib import Path

import pytest

import jrl

ROOT = Path(__file__).parents[1]
PAGES = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))


def documented():
    """Public names but the sets of strings, which are explained where they are taken."""
    things = {name: getattr(jrl, name) for name in jrl.__all__}
    return [name for name, thing in things.items() if typing.get_origin(thing) is None]


@pytest.mark.parametrize("name", documented())
def test_every_public_name_has_its_place(name):
    places = re.findall(rf"(?m)^::: jrl\.losses\.{name}$", PAGES)
    assert len(places) == 1 or name == "conventions"


def test_every_call_on_the_pages_exists():
    for call in re.findall(r"\bjrl\.(\w+)\(", PAGES):
        assert call in jrl.__all__, call
