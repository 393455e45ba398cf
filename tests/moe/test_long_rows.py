"""No array of a training or scoring program is as large as the queries of a row times its keys."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from programs import array_sizes

from moe import model
from moe.config import ModelConfig
from moe.execution import Execution
from moe.placement import specs
from moe.tokens.packing import pack_rows, pack_segments, pack_shared_prompts
from moe.weights import shapes
from sharding.collectives import vary
from sharding.folding import Layout, fold_abstract

TIME = 8192
CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=1,
    d_model=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    num_experts=0,
    d_ff=8,
    sliding_window=1000,
)


CASES = [
    ("packed", "dp1", None),
    ("rows", "cp2", "gather"),
    ("packed", "cp2", "ulysses"),
    ("shared prompts", "cp2", "ring"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "context"), CASES)
def test_no_array_is_as_large_as_queries_times_keys(kind, layout, context):
    attention = None if context == "ring" else "blocked"
    config = replace(CONFIG, execution=Execution(context=context, attention=attention))
    mesh = fold_abstract(Layout.parse(layout))
    pack = {
        "rows": lambda t: pack_rows(t, t > 0, mesh, config),
        "shared prompts": lambda t: pack_shared_prompts(t, t > 0, TIME // 4, 2, mesh, config),
        "packed": lambda t: pack_segments(t, t, 2 * TIME, mesh, config),
    }[kind]

    def local(weights, tokens):
        def loss(weights):
            x, _ = model.run(weights, pack(tokens), config, mesh)
            return jax.lax.psum(jnp.sum(vary(x, mesh.axes)), mesh.axes)

        return jax.value_and_grad(loss)(weights)

    spec = specs(config, mesh)
    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=(spec, P()), out_specs=(P(), spec))
    tokens = jax.ShapeDtypeStruct((2, TIME), jnp.int32)
    program = jax.jit(step).trace(shapes(config), tokens).jaxpr
    # What is left is linear: a block of scores has 128 of the queries.
    assert max(array_sizes(program.jaxpr)) < TIME * TIME / 16
