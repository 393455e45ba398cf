"""Decoding steps of a deep network: one program for all layers, its caches written in place."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from policies import CONFIG, EOS, PAD, Asked, decode
from tiers import full_but

from jrl.rollout.decoding import mesh_backend
from jrl.rollout.decoding.mesh_backend import (
    Advanced,
    StepLimits,
    advance,
    layers_with_experts,
    unstack_policy,
)
from jrl.rollout.decoding.slots import Decoder, SamplerState, abstract_pool
from jrl.rollout.sampling import Sampling
from jrl.trainer.setup.memory import unstacked_bytes
from moe import decoding
from moe.config import Model
from moe.execution import Execution
from moe.kernels.choice import Devices
from moe.layers.depth import split_layer_groups
from moe.placement import shardings
from moe.weights import shapes
from sharding.folding import Layout, fold

COLUMNS = 512


def traced(layers, scanned):
    """The program of decoding steps, and the bytes of the cache that it is given."""
    execution = Execution(scan_layers=scanned)
    config = replace(CONFIG, num_layers=layers, execution=execution)
    mesh = fold(Layout(), jax.devices()[:1])
    decoder = Decoder(config, mesh, PAD, (EOS,), records_choices=True)
    pool = abstract_pool(decoder, 8, COLUMNS)
    policy = jax.eval_shape(lambda weights: unstack_policy(decoder, weights), shapes(config))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    draws = SamplerState(jax.ShapeDtypeStruct((2,), jnp.uint32), number)
    given = decoder, Sampling(), COLUMNS, policy, pool, draws, StepLimits(number, number)
    return advance.trace(*given), sum(x.size * 4 for x in jax.tree.leaves(pool.cache))


def equations(jaxpr):
    return len(jaxpr.eqns) + sum(
        equations(inner) for one in jaxpr.eqns for inner in jaxprs_in_params(one.params)
    )


@pytest.mark.slow
@pytest.mark.parametrize("reached", full_but([40, 1100], 40))
def test_advance_reads_the_whole_cache_by_the_kernel(reached, monkeypatch):
    """The engine's own program for rows of 40 and 1100 tokens, lowered for CUDA."""
    config = replace(CONFIG, num_experts=0, d_ff=8, head_dim=64, dtype="bfloat16")
    config = replace(config, execution=Execution(decode_attention="mosaic"))
    engine = Asked(config=config, columns=1128, slots=2, records_choices=False).engine()
    shown = []

    def lowered(*given):
        program = advance.jit_for(given[0].mesh)
        exported = jax.export.export(program, platforms=["cuda"])(*given)
        shown.append(exported.mlir_module())
        return given[4], Advanced(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    monkeypatch.setattr(mesh_backend, "advance", lowered)
    engine.submit(Asked().requests[:1], Sampling())
    pool, columns = engine.cache_size.fit(engine._rows_pool, reached, 0)
    engine.backend.decode(pool, columns, StepLimits(1, 0), *engine._sampler())
    assert engine.max_length == 1152 == columns
    assert shown[0].count("custom_call @mosaic_gpu_v2") == 1


@pytest.mark.slow
def test_the_program_does_not_grow_with_depth():
    few, many, unrolled = (
        equations(traced(layers, scanned)[0].jaxpr.jaxpr)
        for layers, scanned in ((9, None), (48, None), (3, False))
    )
    assert few == many < unrolled


@pytest.mark.slow
@pytest.mark.parametrize("scanned", full_but([True, False], True))
def test_the_cache_is_written_in_place(scanned):
    program, cache = traced(6, scanned)
    memory = program.lower().compile().memory_analysis()
    # The pool is given up, and no step holds more beside it than one layer's keys and values.
    assert memory.alias_size_in_bytes > cache
    assert memory.temp_size_in_bytes < cache / 2


PERIODIC = {"sliding_window": 4, "full_attention_layers": (1, 3)}
COPIED = {"scanned": (True, {}), "unrolled": (False, {}), "periods": (True, PERIODIC)}


@pytest.mark.parametrize("name", full_but(COPIED, "scanned"))
def test_only_weights_that_are_sliced_out_of_their_stack_are_copied(name):
    """A copy of all weights would be twice their memory while a policy samples or is served."""
    scanned, windows = COPIED[name]
    config = replace(CONFIG, num_layers=4, execution=Execution(scan_layers=scanned), **windows)
    mesh = fold(Layout(), jax.devices()[:1])
    model = Model(config, mesh)
    weights = jax.device_put(counting(config), shardings(model))
    policy = unstack_policy(Decoder(config, mesh, PAD, (EOS,)), weights)
    given = {id(leaf) for leaf in jax.tree.leaves(weights)}
    copies = [leaf for leaf in jax.tree.leaves(policy) if id(leaf) not in given]
    assert sum(leaf.nbytes for leaf in copies) == unstacked_bytes(model, is_stored=True)
    assert bool(copies) == (name != "scanned")
    chex.assert_trees_all_equal(policy.layers, split_layer_groups(weights, config))


@pytest.fixture
def on_gpu(monkeypatch):
    """Layers of decode steps as on a GPU with the kernel of experts."""
    monkeypatch.setattr(decoding, "devices_of", lambda mesh: Devices("gpu", 9.0))
    monkeypatch.setattr(decoding, "_reads_slices", lambda model: True)


def test_unstack_policy_on_gpu_copies_all_but_expert_matrices(on_gpu):
    config = replace(CONFIG, num_layers=9, num_dense_layers=1, dense_d_ff=8)
    mesh = fold(Layout(), jax.devices()[:1])
    model = Model(config, mesh)
    weights = jax.device_put(counting(config), shardings(model))
    policy = unstack_policy(Decoder(config, mesh, PAD, (EOS,)), weights)
    assert policy.experts.gate_up is weights.layers.experts.gate_up
    assert policy.experts.down is weights.layers.experts.down
    copied = sum(leaf.nbytes for leaf in jax.tree.leaves(policy.layers))
    assert copied == unstacked_bytes(model, is_stored=True)
    unrolled = replace(config, execution=Execution(scan_layers=False))
    expected = split_layer_groups(weights, unrolled)
    chex.assert_trees_all_equal(layers_with_experts(policy), expected)


def counting(config):
    """Weights that count up, so that each is another."""
    numbers = iter(range(1000))
    return jax.tree.map(
        lambda x: np.arange(x.size, dtype=np.float32).reshape(x.shape) + next(numbers),
        shapes(config),
    )


PATTERNS = {
    "experts": {"num_dense_layers": 1, "dense_d_ff": 8},
    "windows": {"sliding_window": 4, "full_attention_layers": tuple(range(1, 10, 2))},
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("experts", "tp2 dp2 / ep4"), ("windows", "dp1")])
def test_decode_on_gpu_equals_scanned_layers(name, layout, on_gpu):
    config = replace(CONFIG, num_layers=10, **PATTERNS[name])
    scanned = replace(config, execution=Execution(scan_layers=True))
    expected, found = (decode(Asked(layout=layout, config=one)) for one in (scanned, config))
    for key in ("tokens", "valid", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(found, key), getattr(expected, key))
    # The compiler fuses the same sums with what is around them; float32.
    np.testing.assert_allclose(found.behaviour_logprobs, expected.behaviour_logprobs, atol=1e-5)


DEEP = [("dp1", 1), ("tp2 dp2 / ep4", 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "layers"), DEEP)
def test_rows_are_those_of_the_unrolled_network(layout, layers):
    config = replace(CONFIG, num_layers=layers)
    scanned = replace(config, execution=Execution(scan_layers=True))
    expected, found = (decode(Asked(layout=layout, config=one)) for one in (config, scanned))
    for name in ("tokens", "valid", "mask", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    # The compiler fuses the same sums with what is around them; float32.
    np.testing.assert_allclose(found.behaviour_logprobs, expected.behaviour_logprobs, atol=1e-5)
