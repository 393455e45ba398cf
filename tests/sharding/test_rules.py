"""Named axes of a weight become mesh axes, and no mesh axis holds two of them."""

import pytest
from jax.sharding import PartitionSpec as P

from sharding.folding import Layout, fold_abstract
from sharding.folding.mesh import partition_spec, weight_rules

RULES = {"head": ("a", "b"), "d_ff": ("a",), "expert": ("c",), "whole": ()}


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ("head", P(("a", "b"))),
        ("layer d_model head head_dim", P(None, None, ("a", "b"), None)),
        ("expert d_model d_ff", P(("c",), None, ("a",))),
        ("whole d_model", P(None, None)),
        ("", P()),
    ],
)
def test_rules_cover_each_axis(axes, spec):
    assert partition_spec(axes, RULES) == spec


@pytest.mark.parametrize("axes", ["head d_ff", "d_ff layer head"])
def test_a_mesh_axis_holds_one_axis_of_a_weight(axes):
    first, *_, last = axes.split()
    message = (
        f"rules map both '{first}' and '{last}' of weight '{axes}' to mesh axis 'a'; "
        "a mesh axis can shard only one of them"
    )
    with pytest.raises(ValueError, match=message):
        partition_spec(axes, RULES)


def test_rules_of_a_folded_mesh():
    mesh = fold_abstract(Layout.parse("tp2 dp4 / ep4"))
    rules = weight_rules(mesh)
    assert mesh.size(rules["head"]) == mesh.size(rules["kv_head"]) == mesh.size(rules["d_ff"]) == 2
    assert rules["expert"] == mesh.ep
    assert mesh.size(rules["expert"]) == 4
    # The router's outputs stay whole where the experts are spread.
    assert "route" not in rules
    assert partition_spec("layer d_model route", rules) == P(mesh.pp, None, None)
    # tp is folded into ep, so a weight cannot be spread over both.
    with pytest.raises(ValueError, match="a mesh axis can shard only one"):
        partition_spec("expert d_model d_ff", rules)
