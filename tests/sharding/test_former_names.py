"""Renamed attributes and keywords work for one release, with a warning."""

import pytest

from sharding import Layout
from sharding.former_names import former_keywords, former_members, former_names


def test_a_former_name_of_a_module_is_the_present_one_with_a_warning():
    serve = former_names("sharding", Grid=Layout)
    with pytest.warns(DeprecationWarning, match=r"sharding.Grid is now sharding\..*\.Layout"):
        assert serve("Grid") is Layout
    with pytest.raises(AttributeError, match="module 'sharding' has no attribute 'Grille'"):
        serve("Grille")


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
