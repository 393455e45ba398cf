"""What long rows take: nothing as large as queries times keys, and memory linear in tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec as P
from programs import array_sizes, most_bytes

from moe import model
from moe.config import Model, ModelConfig
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


def gradient_traced(pack, shape, config, mesh):
    """The program of a scalar and its gradient by all weights, traced."""

    network = Model(config, mesh)

    def local(weights, tokens):
        def loss(weights):
            x, _ = model.run(weights, pack(tokens), network)
            return jax.lax.psum(jnp.sum(vary(x.astype(jnp.float32), mesh.axes)), mesh.axes)

        return jax.value_and_grad(loss)(weights)

    spec = specs(network)
    step = jax.shard_map(local, mesh=mesh.mesh, in_specs=(spec, P()), out_specs=(P(), spec))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    return jax.jit(step).trace(shapes(config), tokens).jaxpr.jaxpr


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "context"), CASES)
def test_no_array_is_as_large_as_queries_times_keys(kind, layout, context):
    attention = None if context == "ring" else "blocked"
    config = replace(CONFIG, execution=Execution(context=context, attention=attention))
    mesh = fold_abstract(Layout.parse(layout))
    network = Model(config, mesh)
    pack = {
        "rows": lambda t: pack_rows(t, t > 0, network),
        "shared prompts": lambda t: pack_shared_prompts(t, t > 0, TIME // 4, 2, network),
        "packed": lambda t: pack_segments(t, t, 2 * TIME, network),
    }[kind]

    program = gradient_traced(pack, (2, TIME), config, mesh)
    # What is left is linear: a block of scores has 128 of the queries.
    assert max(array_sizes(program)) < TIME * TIME / 16


# Qwen3-30B-A3B, one of its layers.
QWEN3 = ModelConfig(
    vocab_size=512,
    num_layers=1,
    d_model=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    d_expert=768,
    query_key_norm="head",
    dtype="bfloat16",
)
WAYS = [
    ("selective", "gather", "all_gather"),
    ("projections", "ulysses", "all_to_all"),
    ("full", "ring", "all_to_all"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "context", "dispatch"), WAYS)
def test_a_layer_of_experts_takes_memory_linear_in_tokens(remat, context, dispatch):
    """Attention, norms and experts, both passes, on a device that has an eighth of 131,072 tokens:
    as the program is written, before a compiler fuses anything."""
    # With no platform the forms of all platforms are traced.
    mesh = fold_abstract(Layout.parse("cp8 / ep8"), "tpu")
    config = replace(
        QWEN3,
        execution=Execution(
            remat=remat,
            context=context,
            dispatch=dispatch,
            attention=None if context == "ring" else "blocked",
            buffer_factor=1.5,
        ),
    )

    def most(time):
        def pack(tokens):
            return pack_rows(tokens, tokens >= 0, Model(config, mesh))

        program = gradient_traced(pack, (1, time), config, mesh)
        (body,) = (e.params["jaxpr"] for e in program.eqns if e.primitive.name == "shard_map")
        return most_bytes(dce_jaxpr(body, [True] * len(body.outvars))[0])

    half, whole = most(2**16), most(2**17)
    assert whole <= 2 * half
    # Rows for any of 1.5 x 8 x 16,384 choices are 0.75 GiB, and gate and up of them in float32
    # 1.1: the rest are gradients of these, and what lies between.
    assert whole < 8 * 2**30
