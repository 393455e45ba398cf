"""One token at a time with a cache gives what the whole sequence at once gives."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh, random_weights
from tiers import full_but

from moe import model
from moe.config import ModelConfig
from moe.decoding import Cache, decode_step, extend, prefill
from moe.placement import specs
from sharding.collectives import vary
from sharding.folding import Layout, fold_abstract

CONFIG = ModelConfig(
    vocab_size=11,
    num_layers=2,
    d_model=10,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=8,
    experts_per_token=3,
    d_expert=14,
)
PROMPTS, COPIES, PROMPT, RESPONSE = 2, 2, 4, 3
ROWS = PROMPTS * COPIES


def batch():
    """Rows of two prompts, one of them padded, and the lengths at which the rows end."""
    draw = np.random.default_rng(3)
    tokens = draw.integers(0, CONFIG.vocab_size, (ROWS, PROMPT + RESPONSE))
    tokens[:, :PROMPT] = np.repeat(tokens[::COPIES, :PROMPT], COPIES, axis=0)
    valid = np.ones(tokens.shape, bool)
    valid[COPIES:, :2] = False
    # The second row ends after one token of its response.
    valid[1, PROMPT + 1 :] = False
    return jnp.asarray(tokens), jnp.asarray(valid)


def stepwise(config, mesh):
    """Logits ``[step, row, vocab]`` after each token of the response, from the cache."""

    def local(weights, tokens, valid):
        weights = vary(weights, mesh.axes)
        tokens, valid = vary((tokens, valid), mesh.except_sequence)
        prompts = tokens[::COPIES, :PROMPT], valid[::COPIES, :PROMPT]
        _, cache = prefill(weights, *prompts, config, mesh)
        cache = extend(cache, RESPONSE, COPIES)
        layers = tuple(model.layer_of(weights, index) for index in range(config.num_layers))

        def step(cache, column):
            logits, cache = decode_step(
                layers,
                weights,
                cache,
                jax.lax.dynamic_index_in_dim(tokens, column, axis=1, keepdims=False),
                column,
                jax.lax.dynamic_index_in_dim(valid, column, axis=1, keepdims=False),
                config,
                mesh,
            )
            return cache, logits

        return jax.lax.scan(step, cache, jnp.arange(PROMPT, PROMPT + RESPONSE))[1]

    rows = P(mesh.dp)
    logits = tuple(axis for axis in mesh.axes if axis not in mesh.dp + mesh.tp)
    return on_mesh(
        lambda *given: local(*given)[None],
        mesh,
        (specs(config, mesh), rows, rows),
        P(logits, None, mesh.dp + mesh.tp),
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    full_but(
        [("routed", "dp1"), ("routed", "tp2 dp2 / ep2 etp2"), ("dense", "tp2")],
        ("routed", "tp2 dp2 / ep2 etp2"),
        ("dense", "tp2"),
    ),
)
def test_steps_equal_the_whole_sequence(kind, layout):
    config = CONFIG if kind == "routed" else replace(CONFIG, num_experts=0, d_ff=12, head="tied")
    one, weights = mesh_of("dp1"), random_weights(config, 0)
    tokens, valid = batch()
    whole = on_mesh(
        lambda w, t, v: model.next_token_logits(w, t, v, config, one)[0],
        one,
        (specs(config, one), P(), P()),
        P(one.axes),
    )(weights, tokens, valid).reshape(ROWS, PROMPT + RESPONSE, -1)
    steps = np.asarray(stepwise(config, mesh_of(layout))(weights, tokens, valid))[0]
    assert steps.shape == (RESPONSE, ROWS, CONFIG.vocab_size)
    for step in range(RESPONSE):
        going = np.asarray(valid[:, PROMPT + step])
        # float32: the same sums, in blocks of other sizes.
        np.testing.assert_allclose(
            steps[step][going], whole[:, PROMPT + step][going], atol=1e-5, err_msg=f"step {step}"
        )
        assert np.all(np.isfinite(steps[step]))


def test_prefill_equals_the_forward_pass_and_keeps_every_column():
    mesh, weights = mesh_of("dp1"), random_weights(CONFIG, 0)
    tokens, valid = (x[::COPIES, :PROMPT] for x in batch())

    def local(weights, tokens, valid):
        x, cache = prefill(weights, tokens, valid, CONFIG, mesh)
        expected, _ = model.hidden(weights, tokens, valid, CONFIG, mesh)
        sizes = [buffer.size for buffer in (*cache.keys, *cache.values)]
        assert sizes == [PROMPTS * PROMPT * 4 * 6] * 4
        return x, expected, cache.valid

    x, expected, kept = on_mesh(local, mesh, (specs(CONFIG, mesh), P(), P()), P(mesh.axes))(
        weights, tokens, valid
    )
    np.testing.assert_allclose(x, expected, rtol=1e-6)
    np.testing.assert_array_equal(kept, valid)


def test_extend_repeats_rows_and_makes_room():
    draw = np.random.default_rng(0)
    keys, values = (jnp.asarray(draw.normal(size=(2, 3, 5, 7))) for _ in range(2))
    cache = Cache((keys,), (values,), jnp.asarray(draw.random((2, 5)) < 0.5))
    longer = jit(lambda cache: extend(cache, 4, 3))(cache)
    order = [0, 0, 0, 1, 1, 1]
    for before, after in ((keys, longer.keys[0]), (values, longer.values[0])):
        assert after.shape == (6, 3, 9, 7)
        np.testing.assert_array_equal(after[:, :, :5], before[np.array(order)])
        np.testing.assert_array_equal(after[:, :, 5:], 0)
    assert longer.valid.shape == (6, 9)
    np.testing.assert_array_equal(longer.valid[:, :5], cache.valid[np.array(order)])
    assert not longer.valid[:, 5:].any()


def test_a_cache_holds_whole_rows():
    mesh = fold_abstract(Layout(cp=2))
    tokens, valid = (x[::COPIES, :PROMPT] for x in batch())
    with pytest.raises(ValueError, match=r"decoding runs without context parallelism; cp must be"):
        prefill(random_weights(CONFIG, 0), tokens, valid, CONFIG, mesh)
