"""Collectives are read off traced and compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from observed_collectives import Observed, hlo_collectives, jaxpr_collectives

from sharding.folding import Layout, fold_abstract

HLO = """\
ENTRY %main () -> f32[7] {
  %x = bf16[2,6]{1,0} parameter(0)
  %y = f32[3,10]{1,0} parameter(1)
  %z = s32[4]{0} parameter(2)
  %w = f32[4]{0} parameter(3)
  %v = f32[7]{0} parameter(4)
  %u = f32[2,3]{1,0} parameter(5)
  %a = bf16[8,6]{1,0} all-gather(bf16[2,6]{1,0} %x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, use_global_device_ids=true
  %b = f32[3,5]{1,0} reduce-scatter(%y), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={1}, to_apply=%sum
  %c = (s32[4]{0}, f32[4]{0}) all-reduce(s32[4]{0} %z, f32[4]{0} %w), channel_id=3, replica_groups={{0,2},{1,3}}, to_apply=%sum
  %d = f32[7]{0} collective-permute(%v), channel_id=4, source_target_pairs={{0,1},{1,0}}
  %f = f32[8,3]{1,0} all-gather(%u), channel_id=5, replica_groups=mesh['pp'=1,'dp'=2,'cp'=2,'tp'=2] {'dp','tp'}, dimensions={0}, use_global_device_ids=true
  ROOT %e = f32[7]{0} add(%all-reduce.3, %v)
}
"""  # noqa: E501


def test_a_compiled_program():
    found = list(hlo_collectives(HLO))
    assert found == [
        Observed("all_gather", ((0, 1, 2, 3), (4, 5, 6, 7)), "bfloat16", (2, 6)),
        Observed("reduce_scatter", ((0, 2), (1, 3)), "float32", (3, 10)),
        Observed("all_reduce", ((0, 2), (1, 3)), "int32", (4,)),
        Observed("all_reduce", ((0, 2), (1, 3)), "float32", (4,)),
        Observed("permute", ((0, 1), (1, 0)), "float32", (7,)),
        Observed("all_gather", ((0, 1, 4, 5), (2, 3, 6, 7)), "float32", (2, 3)),
    ]
    assert [one.bytes for one in found] == [24, 120, 16, 16, 28, 24]


def traced(local):
    mesh = fold_abstract(Layout.parse("dp2"))
    whole = jax.shard_map(
        lambda x: local(x, mesh.dp), mesh=mesh.mesh, in_specs=(P(mesh.dp),), out_specs=P(mesh.dp)
    )
    jaxpr = jax.make_jaxpr(whole)(jax.ShapeDtypeStruct((6,), jnp.bfloat16)).jaxpr
    return list(jaxpr_collectives(jaxpr)), mesh.dp


def test_a_traced_loop_counts_as_often_as_it_runs():
    def local(x, axes):
        def body(x, _):
            return lax.ppermute(x, axes, [(0, 1), (1, 0)]), None

        return lax.scan(body, x, None, length=5)[0]

    found, axes = traced(local)
    assert found == [Observed("permute", axes, "bfloat16", (3,), times=5)]
    assert found[0].bytes == 3 * 2 * 5


def test_a_branch_is_known_as_one():
    def local(x, axes):
        return lax.cond(
            jnp.max(lax.pmax(x, axes)) > 0,
            lambda x: lax.all_to_all(jnp.stack([x, x]), axes, 0, 0).sum(0),
            lambda x: x,
            x,
        )

    found, _ = traced(local)
    assert [(one.kind, one.in_branch) for one in found] == [
        ("all_reduce", False),
        ("all_to_all", True),
    ]


def test_a_loop_without_a_length_is_refused():
    def local(x, axes):
        return lax.while_loop(
            lambda x: jnp.max(lax.pmax(x, axes)) > 0, lambda x: lax.ppermute(x, axes, [(0, 1)]), x
        )

    with pytest.raises(ValueError, match="while loop"):
        traced(local)
