"""What a layer of a published shape keeps for its backward pass, traced on absent devices."""

import functools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import full_but

from moe import model
from moe.config import ModelConfig
from moe.execution import Execution
from moe.placement import specs
from moe.weights import shapes
from sharding.collectives import all_sum
from sharding.folding import Layout, fold_abstract

MIB = 2**20
# Qwen3-235B-A22B, its layers alone; 8,192 tokens on eight devices.
QWEN3 = {
    "vocab_size": 512,
    "d_model": 4096,
    "num_heads": 64,
    "num_kv_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "experts_per_token": 8,
    "d_expert": 1536,
    "query_key_norm": "head",
    "dtype": "bfloat16",
}
LAYOUT, TOKENS = "dp8 / ep8", (8, 1024)


@functools.cache
def kept(num_layers, execution):
    """Shapes and dtypes of what one device keeps."""
    config = ModelConfig(num_layers=num_layers, execution=execution, **QWEN3)
    mesh, found = fold_abstract(Layout.parse(LAYOUT)), []

    def local(weights, tokens):
        def loss(weights):
            x, _ = model.hidden(weights, tokens, jnp.ones(tokens.shape, bool), config, mesh)
            return jnp.sum(x.astype(jnp.float32))

        value, pull = jax.vjp(loss, weights)
        found.append(Counter((x.shape, x.dtype) for x in jax.tree.leaves(pull)))
        return all_sum(value, mesh.axes)

    spec = specs(config, mesh)
    on_devices = jax.shard_map(local, mesh=mesh.mesh, in_specs=(spec, P(mesh.dp)), out_specs=P())
    jax.eval_shape(on_devices, shapes(config), jax.ShapeDtypeStruct(TOKENS, jnp.int32))
    return found[-1]


def mib_per_layer(**execution):
    """What a second layer adds, the weights that it uses left out."""
    given = Execution(**execution)
    of_layer = kept(2, given) - kept(1, given)
    config, mesh = ModelConfig(num_layers=1, **QWEN3), fold_abstract(Layout.parse(LAYOUT))
    held = {
        NamedSharding(mesh.mesh, spec).shard_shape(weight.shape)[1:]
        for weight, spec in zip(
            jax.tree.leaves(shapes(config)), jax.tree.leaves(specs(config, mesh)), strict=True
        )
    }
    return sum(
        math.prod(shape) * dtype.itemsize * number / MIB
        for (shape, dtype), number in of_layer.items()
        if shape not in held
    )


@pytest.mark.parametrize("dispatch", full_but(["all_gather", "all_to_all"], "all_gather"))
def test_no_second_product_and_no_tokens_of_others_are_kept(dispatch):
    """Room for any routing: 65,536 rows, of which the first product alone is kept, 384 MiB, beside
    36 MiB of attention's products and the residual stream."""
    assert mib_per_layer(remat="selective", dispatch=dispatch) < 384 + 40


@pytest.mark.parametrize("dispatch", full_but(["all_gather", "all_to_all", "ragged"], "ragged"))
def test_a_layer_with_a_budget_keeps_less_than_120_mib(dispatch):
    """1.5 times the 8,192 rows of even routing: 72 MiB of their first products."""
    found = mib_per_layer(remat="selective", dispatch=dispatch, buffer_factor=1.5)
    assert 72 + 30 < found < 120


def test_full_keeps_the_tokens_that_came_to_the_experts():
    """64 MiB of all devices' tokens, by a name that a gather with a gradient of its own shows:
    nothing is sent twice."""
    of_layer = kept(2, Execution(remat="full")) - kept(1, Execution(remat="full"))
    assert of_layer[(8192, 4096), jnp.dtype(jnp.bfloat16)] == 1
    assert 72 < mib_per_layer(remat="full") < 80


@pytest.mark.slow
def test_without_rematerialisation_no_joined_matrices_are_kept():
    """768 MiB of a layer are gate and up side by side in float32, beside those that are stored."""
    assert not [
        shape for shape, _ in kept(2, Execution()) if shape[-1:] == (3072,) and len(shape) == 3
    ]
