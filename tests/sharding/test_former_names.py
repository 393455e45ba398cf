"""Renamed modules, attributes and keywords work for one release, with a warning."""

import importlib

import pytest

from sharding import Layout
from sharding.former_names import former_keywords, former_members, former_names


def test_a_former_name_of_a_module_is_the_present_one_with_a_warning():
    serve = former_names("sharding", Grid=Layout)
    with pytest.warns(DeprecationWarning, match=r"sharding.Grid is now sharding\..*\.Layout"):
        assert serve("Grid") is Layout
    with pytest.raises(AttributeError, match="module 'sharding' has no attribute 'Grille'"):
        serve("Grille")


@pytest.mark.parametrize(
    ("module", "name", "present"),
    [
        ("hardware", "Hardware", "costs.hardware.Hardware"),
        ("hardware", "parse", "costs.hardware.parse"),
        ("models.sizes", "ModelSizes", "planner.models.ModelSizes"),
        ("models.presets", "PRESETS", "planner.models.PRESETS"),
    ],
)
def test_a_former_module_has_the_names_of_the_present_one_with_a_warning(module, name, present):
    former = importlib.import_module(f"sharding.planner.{module}")
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now sharding.{present};"):
        result = getattr(former, name)
    holder, _, attribute = present.rpartition(".")
    assert result is getattr(importlib.import_module(f"sharding.{holder}"), attribute)
    with pytest.raises(AttributeError, match="no attribute 'Grille'"):
        _ = former.Grille


def test_names_of_a_former_module_can_be_imported():
    statement = "from sharding.planner.models.sizes import ModelSizes"
    with pytest.warns(DeprecationWarning, match="is now") as caught:
        exec(statement, {})
    # Checked annotations put a function of theirs around the one that warns.
    (warning,) = caught
    assert warning.filename == "<string>" or warning.filename.endswith("jaxtyping/_decorator.py")


class Folder:
    __getattr__ = former_members(go_back="rewind")

    def rewind(self, step):
        return step


def test_a_former_member_is_the_present_one_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"Folder.go_back is now Folder.rewind"):
        assert Folder().go_back(3) == 3
    with pytest.raises(AttributeError, match="'Folder' object has no attribute 'go_on'"):
        Folder().go_on(3)


def test_a_former_keyword_is_the_present_one_with_a_warning():
    @former_keywords(number="count")
    def repeated(text, count=1):
        return count * text

    assert repeated("a", count=2) == repeated("a", 2) == "aa"
    with pytest.warns(DeprecationWarning, match=r"repeated\(number=\) is now repeated\(count=\)"):
        assert repeated("a", number=3) == "aaa"
