"""Renamed attributes of modules are served for one release, with a warning."""

import pytest

from sharding import Layout
from sharding.former_names import former_names


def test_a_former_name_is_the_present_one_with_a_warning():
    serve = former_names("sharding", Grid=Layout)
    with pytest.warns(DeprecationWarning, match=r"sharding.Grid is now sharding\..*\.Layout"):
        assert serve("Grid") is Layout


def test_any_other_name_is_none_of_the_module():
    with pytest.raises(AttributeError, match="module 'sharding' has no attribute 'Grille'"):
        former_names("sharding", Grid=Layout)("Grille")
