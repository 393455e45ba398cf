"""Checkpoints written by `transformers` give its logits here, on any mesh and step by step."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from largest import assert_trees_close_by_largest
from programs import mesh_of, on_mesh, with_room
from public_checkpoints import LATER, MESH, NAMES, QUICK, golden, loaded, mesh_for
from tiers import full_but

from moe import model
from moe.cache import StepTokens
from moe.config import Model
from moe.decoding import decode_step
from moe.execution import Execution
from moe.layers.depth import split_layer_groups
from moe.model import prefill
from moe.placement import specs
from moe.tokens import packing
from moe.weights import Transformer
from sharding.collectives import vary


@functools.cache
def logits_of(name, layout):
    (config, weights), mesh = loaded(name, layout), mesh_of(layout)
    network = Model(config, mesh)
    rows = P(mesh.dp)
    run = on_mesh(
        lambda w, t, v: model.next_token_logits(w, t, v, network)[0][None],
        mesh,
        (specs(network), rows, rows),
        P(tuple(a for a in mesh.axes if a not in mesh.dp + mesh.tp), mesh.dp + mesh.tp),
    )
    tokens, valid = (jnp.asarray(golden(name)[key]) for key in ("tokens", "valid"))
    return np.asarray(run(weights, tokens, valid)[0]).reshape(*valid.shape, -1)


@pytest.mark.parametrize(
    ("name", "layout"),
    full_but(
        [
            *((name, "dp1") for name in NAMES),
            *(
                (name, mesh_for(name))
                for name in ("mixtral", "deepseek_v3", "olmo3", "glm4_moe", "gpt_oss")
            ),
            ("qwen3_next", MESH),
        ],
        *((name, "dp1") for name in QUICK),
    ),
)
def test_logits_are_those_of_transformers(name, layout):
    valid, expected = golden(name)["valid"], golden(name)["logits"]
    assert np.std(expected[valid]) > 0.3  # else equality would say little
    # float32 through three layers, in another order of sums; norms after them enlarge it.
    atol = 2e-5 if name in LATER else 1e-5
    np.testing.assert_allclose(logits_of(name, layout)[valid], expected[valid], atol=atol)


@pytest.mark.parametrize("name", full_but(["smollm3", "gemma3"]))
def test_layers_that_differ_are_one_program(name, monkeypatch):
    """Which layer it is a scan learns while it runs, as a stage of a pipeline does."""
    config, weights = loaded(name)
    scanned = replace(config, execution=Execution(scan_layers=True))
    monkeypatch.setitem(globals(), "loaded", lambda *_: (scanned, weights))
    valid, expected = (golden(name)[key] for key in ("valid", "logits"))
    found = logits_of.__wrapped__(name, "dp1")
    np.testing.assert_allclose(found[valid], expected[valid], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "olmoe", "qwen2_moe", "deepseek_v3", *LATER])
def test_decoding_gives_the_logits_of_the_whole_sequence(name):
    prompt, layout = 8, mesh_for(name)
    (config, weights), mesh = loaded(name, layout), mesh_of(layout)

    network = Model(config, mesh)

    def local(weights, tokens, valid):
        weights = vary(weights, mesh.axes)
        tokens, valid = vary((tokens, valid), mesh.except_sequence)
        # The rows are padded on their left, and in the cache they begin in the first column.
        padding = jnp.sum(~valid, axis=1, dtype=jnp.int32)
        column = jnp.arange(prompt)[None] + padding[:, None]
        begins = jnp.take_along_axis(tokens, jnp.minimum(column, prompt - 1), axis=1)
        ran = prefill(weights, begins, prompt - padding, network)
        cache = with_room(ran.cache, tokens.shape[1] - prompt)
        layers = split_layer_groups(weights, config)

        def step(cache, column):
            token, live = (
                jax.lax.dynamic_index_in_dim(x, column, axis=1, keepdims=False)
                for x in (tokens, valid)
            )
            inputs = StepTokens(token, column - padding, live)
            logits, cache, _ = decode_step(layers, weights, cache, inputs, network)
            return cache, logits

        return jax.lax.scan(step, cache, jnp.arange(prompt, tokens.shape[1]))[1][None]

    rows = P(mesh.dp)
    others = tuple(axis for axis in mesh.axes if axis not in mesh.dp + mesh.tp)
    run = on_mesh(local, mesh, (specs(network), rows, rows), P(others, None, mesh.dp + mesh.tp))
    tokens, valid = (jnp.asarray(golden(name)[key]) for key in ("tokens", "valid"))
    steps = np.swapaxes(np.asarray(run(weights, tokens, valid))[0], 0, 1)
    assert steps.shape == golden(name)["logits"][:, prompt:].shape
    atol = 2e-5 if name in LATER else 1e-5
    np.testing.assert_allclose(steps, golden(name)["logits"][:, prompt:], atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "choices" in golden(name)])
def test_routing_is_that_of_transformers(name):
    (config, weights), mesh = loaded(name), mesh_of("dp1")
    network = Model(config, mesh)
    rows = P(mesh.dp)
    run = on_mesh(
        lambda w, t, v: model.routing_choices(w, t, v, network)[None],
        mesh,
        (specs(network), rows, rows),
        P(tuple(axis for axis in mesh.axes if axis not in mesh.dp), None, mesh.dp),
    )
    valid = golden(name)["valid"]
    choices = run(weights, jnp.asarray(golden(name)["tokens"]), jnp.asarray(valid))[0]
    found = np.sort(np.asarray(choices), axis=-1)
    np.testing.assert_array_equal(found[:, valid], golden(name)["choices"][:, valid])


@pytest.mark.parametrize(
    ("name", "window", "full"),
    [("mistral", 5, ()), ("qwen3", 3, (0,)), ("qwen2_moe", 4, (1,)), ("olmo3", 4, (1,))],
)
def test_windows_are_those_of_the_file(name, window, full):
    config, _ = loaded(name)
    assert (config.sliding_window, config.full_attention_layers) == (window, full)
    assert golden(name)["valid"].sum(axis=1).max() > window + 2


@pytest.mark.parametrize("name", full_but(["mistral", "qwen3", "qwen2_moe"], "qwen3"))
def test_a_window_changes_the_logits_beyond_it_alone(name, monkeypatch):
    valid, expected = (golden(name)[key] for key in ("valid", "logits"))
    config, weights = loaded(name)
    without = replace(config, sliding_window=None, full_attention_layers=())
    monkeypatch.setitem(globals(), "loaded", lambda *_: (without, weights))
    found = logits_of.__wrapped__(name, "dp1")
    within = valid & (np.cumsum(valid, axis=1) <= config.sliding_window)
    np.testing.assert_allclose(found[within], expected[within], atol=1e-5)
    assert np.abs(found - expected)[valid & ~within].max() > 0.1


@pytest.mark.slow
def test_gradients_reach_every_weight_alike_on_a_mesh():
    """The features of attention that training on a mesh could get wrong: latent vectors and norms
    of whole projections, whose gradients are sums over ``tp``."""
    for name in ("deepseek_v3", "olmoe"):
        one, many = (gradients(name, layout) for layout in ("dp1", "tp2 dp2 / ep4"))
        assert_trees_close_by_largest(many, one, rtol=2e-4, of_largest=5e-6)


def gradients(name, layout) -> Transformer[np.ndarray]:
    (config, weights), mesh = loaded(name, layout), mesh_of(layout)

    network = Model(config, mesh)

    def local(weights, tokens, valid):
        def loss(weights):
            logits, _ = model.next_token_logits(weights, tokens, valid, network)
            own = jax.nn.logsumexp(logits, axis=-1) ** 2
            per_token = packing.align_to_tokens(own, tokens.shape, network)
            counted = valid & jnp.roll(valid, 1, axis=1)
            total = jnp.sum(per_token, where=counted)
            return jax.lax.psum(vary(total, mesh.except_sequence), mesh.except_sequence)

        return jax.grad(loss)(weights)

    rows, spec = P(mesh.dp), specs(network)
    run = on_mesh(local, mesh, (spec, rows, rows), spec)
    return jax.device_get(
        run(weights, *(jnp.asarray(golden(name)[k]) for k in ("tokens", "valid")))
    )
