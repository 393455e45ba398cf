"""Prompts run once for the rows that share them give what whole rows give: the plain twin."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, random_weights
from whole_network import before_responses

from moe import model
from moe.config import Model, ModelConfig
from moe.execution import Execution
from moe.head import logits_of
from moe.placement import specs
from moe.router.balance import router_loss
from moe.tokens.packing import (
    expand_responses,
    pack_rows,
    pack_shared_prompts,
    response_tokens,
)
from sharding.collectives import all_sum, gather_tokens, local_shard

PROMPT, RESPONSE, ROWS = 6, 5, 8
CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=8,
    experts_per_token=3,
    d_expert=14,
    d_ff=12,
    # Large enough that a router loss that is not the same shows in every gradient.
    load_balance_coef=0.5,
    router_z_coef=0.1,
)


def batch(copies):
    """Prompts of one to six tokens padded on the left, responses of one to five on the right."""
    tokens = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (ROWS, PROMPT + RESPONSE))
    prompts = np.repeat(tokens[::copies, :PROMPT], copies, axis=0)
    lengths = np.repeat(np.arange(ROWS // copies) * 5 % PROMPT + 1, copies)
    responses = np.arange(ROWS) * 3 % RESPONSE + 1
    column = np.arange(PROMPT + RESPONSE)[None, :]
    valid = (column >= PROMPT - lengths[:, None]) & (column < PROMPT + responses[:, None])
    return np.concatenate([prompts, tokens[:, PROMPT:]], axis=1).astype(np.int32), valid


def fast(weights, tokens, valid, copies, config, mesh):
    return before_responses(weights, tokens, valid, PROMPT, copies, config, mesh)


def plain(weights, tokens, valid, copies, config, mesh):
    """`hidden` on whole rows; the state before a response token is that after the one before it."""
    x, stats = model.hidden(weights, tokens, valid, Model(config, mesh))
    x = gather_tokens(x, mesh.tp).reshape(*tokens.shape, -1)
    before = x[:, PROMPT - 1 : -1].reshape(-1, x.shape[-1])
    return local_shard(before, mesh.tp), stats


def loss(weights, tokens, valid, path, copies, config, mesh):
    """A scalar that every weight reaches: a sum over response tokens and the router's losses."""
    network = Model(config, mesh)
    before, stats = path(weights, tokens, valid, copies, config, mesh)
    logits = logits_of(weights, before, network)
    targets = response_tokens(tokens, PROMPT, network)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]
    logprobs = expand_responses(chosen, tokens.shape, PROMPT, network)
    logprobs = jnp.where(valid & (jnp.arange(PROMPT + RESPONSE) >= PROMPT)[None, :], logprobs, 0.0)
    num_tokens = all_sum(jnp.sum(valid.astype(jnp.int32)), mesh.dp)
    own = -jnp.sum(logprobs) / (ROWS * RESPONSE) + router_loss(stats, network, num_tokens)
    return all_sum(own, mesh.except_sequence), (logprobs, all_sum(stats, mesh.axes))


@functools.cache
def compiled(path, copies, layout, with_gradients, context):
    mesh = mesh_of(layout)
    spec, config = specs(Model(CONFIG, mesh)), replace(CONFIG, execution=Execution(context=context))

    def local(weights, tokens, valid):
        given, grads = (weights, tokens, valid, path, copies, config, mesh), None
        if with_gradients:
            (total, (logprobs, stats)), grads = jax.value_and_grad(loss, has_aux=True)(*given)
        else:
            total, (logprobs, stats) = loss(*given)
        # Typed as varying over size-1 axes that it does not use; a maximum over them is itself.
        others = tuple(axis for axis in mesh.except_sequence if axis not in mesh.dp)
        return total, jax.lax.pmax(logprobs, others), stats, grads

    step = jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(spec, P(mesh.dp), P(mesh.dp)),
        out_specs=(P(), P(mesh.dp), P(), spec if with_gradients else None),
    )
    return jit(step)


def run(path, copies, layout, rows, with_gradients=True, context=None):
    """Loss, log-probabilities, router sums and gradients, of rows that share prompts so many
    times."""
    step = compiled(path, copies, layout, with_gradients, context)
    return jax.device_get(step(random_weights(CONFIG, 0), *batch(rows)))


def assert_same_forward(found, expected, copies):
    (total, logprobs, stats), (plain_total, plain_logprobs, plain_stats) = found, expected
    # float32 sums of a few hundred terms in another order: a few units in the sixth digit.
    np.testing.assert_allclose(total, plain_total, rtol=2e-6)
    np.testing.assert_allclose(logprobs, plain_logprobs, rtol=2e-5, atol=2e-6)
    # Whole numbers in float32, so exact: each prompt counts once for every row that it begins.
    np.testing.assert_array_equal(stats.load, plain_stats.load)
    np.testing.assert_array_equal(stats.tokens, plain_stats.tokens)
    np.testing.assert_array_equal(stats.tokens, CONFIG.num_layers * batch(copies)[1].sum())
    for name in ("balance", "z", "entropy"):
        np.testing.assert_allclose(getattr(stats, name), getattr(plain_stats, name), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["gather", "ulysses"])
def test_forward_equals_whole_rows(context):
    found = run(fast, 4, "cp4 dp2 / ep2", 4, with_gradients=False, context=context)[:3]
    assert_same_forward(found, run(plain, 1, "dp1", 4, with_gradients=False)[:3], 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "copies", "context"),
    [
        ("dp1", 4, None),
        ("tp2 dp2 / ep4", 2, None),
        ("cp2 tp2", 2, "ulysses"),
        ("cp4 dp2 / ep2", 4, None),
    ],
)
def test_equals_whole_rows(layout, copies, context):
    *found, grads = run(fast, copies, layout, copies, context=context)
    *expected, expected_grads = run(plain, 1, "dp1", copies)
    assert_same_forward(found, expected, copies)
    # float32 sums of a few hundred terms in another order: a few units in the sixth digit.
    chex.assert_trees_all_close(grads, expected_grads, rtol=2e-4, atol=2e-6)
    assert all(np.abs(gradient).max() > 0 for gradient in jax.tree.leaves(grads))


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_shared_prompts_hold_tokens_of_rows(copies):
    tokens, valid = batch(copies)
    model = Model(CONFIG, mesh_of("dp1"))

    @jit
    def both(tokens, valid):
        packed = (
            pack_shared_prompts(tokens, valid, PROMPT, copies, model),
            pack_rows(tokens, valid, model),
        )
        names = ("tokens", "positions", "multiplicity")
        return [{name: getattr(one, name) for name in names} for one in packed]

    packed, whole = jax.device_get(both(tokens, valid))
    split = ROWS // copies * PROMPT
    assert packed["tokens"].shape == (split + ROWS * RESPONSE,)
    assert packed["multiplicity"].sum() == whole["multiplicity"].sum()
    for part in ("tokens", "positions"):
        flat, by_row = packed[part], whole[part].reshape(ROWS, -1)
        np.testing.assert_array_equal(flat[:split], by_row[::copies, :PROMPT].reshape(-1))
        np.testing.assert_array_equal(flat[split:], by_row[:, PROMPT:].reshape(-1))
    # The first response token comes after its own prompt, however much padding there is.
    lengths = valid[:, :PROMPT].sum(axis=1)
    np.testing.assert_array_equal(packed["positions"][split::RESPONSE], lengths)


@pytest.mark.parametrize("rows", [1, 3])
def test_groups_that_are_cut_apart_are_refused(rows):
    valid, tokens = jnp.ones((rows, 7), bool), jnp.ones((rows, 7), jnp.int32)
    with pytest.raises(ValueError, match=f"{rows} rows on each device.*num_samples=2"):
        pack_shared_prompts(tokens, valid, 4, 2, Model(CONFIG, mesh_of("dp1")))
