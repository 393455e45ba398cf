"""A stack of layers as one program: the values of the unrolled one, and as large however deep."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P
from largest import assert_trees_close_by_largest
from programs import jit, mesh_of, random_weights, with_room
from small_networks import DENSE_FIRST, ROUTED, any_choices, ragged_rows
from tiers import full_but
from whole_network import loss_and_gradient

from moe import model
from moe.architecture.attention import GatedDeltaNet
from moe.cache import StepTokens
from moe.config import Model
from moe.decoding import decode_step
from moe.execution import Execution
from moe.layers.depth import (
    MAX_UNROLLED,
    is_scanned,
    period_of_stack,
    run_layers,
    runs_of,
    split_layer_groups,
)
from moe.model import prefill
from moe.placement import in_chunks, in_layer_order, specs
from moe.tokens.packing import pack_rows
from moe.weights import shapes
from sharding.collectives import vary

# Two in a stack, after a dense one.
MOE = replace(DENSE_FIRST, num_layers=3)
# Two periods of two layers each: the second of a period looks back as far as there is something,
# or has attention.
WINDOWS = replace(ROUTED, num_layers=4, sliding_window=3, full_attention_layers=(1, 3))
DELTA = replace(ROUTED, num_layers=4, delta=GatedDeltaNet((0, 2), 2, 4, 5, 3, conv_width=3))
# Windows that come again after twelve layers.
LONG = replace(WINDOWS, num_layers=24, num_experts=0, d_ff=12)
LONG = replace(LONG, full_attention_layers=(0, 3, 7, 12, 15, 19))
BATCH, TIME = 8, 5


def batch(replayed, config=MOE):
    piece = ragged_rows(config, BATCH, TIME)
    return (*piece, any_choices(config, BATCH, TIME)) if replayed else piece


@functools.cache
def run(scanned, layout, replayed, network=MOE, **execution):
    mesh = mesh_of(layout)
    config = replace(network, execution=Execution(scan_layers=scanned, **execution))
    if "pp" in layout:
        # Two layers on each stage.
        config, replayed = replace(config, num_layers=5), False
    step = jit(loss_and_gradient(config, mesh))
    given = batch(replayed, config)
    out, grads = jax.device_get(step(in_chunks(random_weights(config, 0), mesh), given))
    return out, in_layer_order(grads, mesh)


CASES = [
    # Unrolled, as in `test_replayed_choices.py`.
    ("dp1", True, {"dispatch": "all_to_all"}),
    ("dp1", True, {"remat": "full", "experts": "blocks", "attention": "blocked"}),
    ("tp2 cp2 dp2 / ep4 etp2", True, {"dispatch": "all_to_all", "context": "ulysses"}),
    ("pp2 dp2 / ep2", False, {"remat": "selective"}),
    ("dp1", True, {"network": DELTA, "remat": "selective"}),
    ("dp1", True, {"network": WINDOWS, "attention": "blocked"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "replayed", "execution"), full_but(CASES, CASES[0]))
def test_a_scanned_stack_equals_the_unrolled_one(layout, replayed, execution):
    ((value, stats), grads), ((expected, expected_stats), expected_grads) = (
        run(scanned, layout, replayed, **execution) for scanned in (True, False)
    )
    # The same sums, which the compiler fuses with what is around them; float32.
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_array_equal(stats.load, expected_stats.load)
    chex.assert_trees_all_close(stats, expected_stats, rtol=2e-6)
    assert_trees_close_by_largest(grads, expected_grads, rtol=2e-5, of_largest=4e-6)
    assert all(float(np.max(np.abs(g))) > 0 for g in jax.tree.leaves(grads))


def equations(jaxpr):
    """Counts them, in the programs inside it too."""
    return len(jaxpr.eqns) + sum(
        equations(inner) for one in jaxpr.eqns for inner in jaxprs_in_params(one.params)
    )


def trained(config, layout):
    """Equations of loss and gradient, with choices that are replayed."""
    mesh, sized = mesh_of(layout), (BATCH, TIME)
    kinds = [
        (sized, jnp.int32),
        (sized, jnp.bool_),
        ((*sized, config.num_expert_layers, 3), jnp.uint8),
    ]
    piece = tuple(jax.ShapeDtypeStruct(shape, kind) for shape, kind in kinds)
    weights = jax.eval_shape(lambda weights: in_chunks(weights, mesh), shapes(config))
    return equations(jax.make_jaxpr(loss_and_gradient(config, mesh))(weights, piece).jaxpr)


def scored(config, layout):
    """Equations of a forward pass that records its choices."""
    mesh = mesh_of(layout)
    program = jax.shard_map(
        lambda weights, *given: model.routing_choices(weights, *given, Model(config, mesh)),
        mesh=mesh.mesh,
        in_specs=(specs(Model(config, mesh)), P(mesh.dp), P(mesh.dp)),
        out_specs=P(None, mesh.except_sequence),
    )
    return equations(jax.make_jaxpr(program)(shapes(config), *batch(False, config)).jaxpr)


def decoded(config, layout):
    """Equations of prompts and the step after them."""
    mesh = mesh_of(layout)

    def local(weights, tokens):
        weights = vary(weights, mesh.axes)
        tokens = vary(tokens, mesh.except_sequence)
        ends = vary(jnp.full(tokens.shape[0], TIME), mesh.except_sequence)
        cache = with_room(prefill(weights, tokens, ends, Model(config, mesh)).cache, 1)
        given = cache, StepTokens(tokens[:, 0], ends, ends > 0)
        return decode_step(
            split_layer_groups(weights, config), weights, *given, Model(config, mesh)
        )[0][None]

    program = jax.shard_map(
        local,
        mesh=mesh.mesh,
        in_specs=(specs(Model(config, mesh)), P(mesh.dp)),
        out_specs=P(mesh.axes),
    )
    return equations(jax.make_jaxpr(program)(shapes(config), batch(False)[0]).jaxpr)


PROGRAMS = [(scored, "tp2 dp2"), (decoded, "tp2 dp2"), (trained, "dp1"), (trained, "pp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "layout"), PROGRAMS)
def test_a_program_does_not_grow_with_depth(program, layout):
    def sized(layers, scanned):
        execution = Execution(remat="selective", scan_layers=scanned)
        layers = 1 + layers * mesh_of(layout).layout.pp
        return program(replace(MOE, num_layers=layers, execution=execution), layout)

    # None scans if there are more than a few.
    assert sized(MAX_UNROLLED + 1, None) == sized(48, None) < sized(3, False)


@pytest.mark.slow
@pytest.mark.parametrize("network", [WINDOWS, DELTA])
@pytest.mark.parametrize("program", [scored, decoded, trained])
def test_neither_does_one_of_layers_of_several_kinds(program, network):
    def sized(layers):
        delta, execution = network.delta, Execution(remat="selective")
        if delta is not None:
            delta = replace(delta, layers=tuple(range(0, layers, 2)))
        full = tuple(range(1, layers, 2)) if network.full_attention_layers else ()
        changed = {"delta": delta, "full_attention_layers": full, "execution": execution}
        return program(replace(network, num_layers=layers, **changed), "dp1")

    assert sized(MAX_UNROLLED + 2) == sized(48)


def test_the_gradient_of_an_unrolled_stack_is_put_together_once():
    def last(layers):
        def run_layer(number, like, layer, x):
            return x * layer.norm, None

        return jnp.sum(run_layers(run_layer, layers, jnp.ones(MOE.d_model), Execution())[0])

    written = str(jax.make_jaxpr(jax.grad(last))(shapes(MOE).layers))
    assert written.count("concatenate") == 1
    assert "pad" not in written and "add_any" not in written


def test_a_few_layers_are_unrolled_unless_a_flag_says_otherwise():
    assert not is_scanned(MAX_UNROLLED, Execution())
    assert is_scanned(MAX_UNROLLED + 1, Execution())
    assert is_scanned(2, Execution(scan_layers=True))
    assert not is_scanned(48, Execution(scan_layers=False))


def test_a_stack_has_the_period_of_its_kinds():
    assert period_of_stack(replace(WINDOWS, full_attention_layers=()), 4) == 1
    assert period_of_stack(WINDOWS, 4) == period_of_stack(DELTA, 4) == 2
    # In a pipeline the first layer is known at run time alone: windows are looked up.
    assert period_of_stack(WINDOWS, 4, first=None) == 1
    assert period_of_stack(DELTA, 4, first=None) == 2
    # No order: windows are looked up, and a layer with Gated DeltaNet is a program of its own.
    assert period_of_stack(replace(WINDOWS, full_attention_layers=(1, 2)), 4) == 1
    uneven = replace(DELTA.delta, layers=(0, 1))
    assert period_of_stack(replace(DELTA, delta=uneven), 4) == 4
    assert not is_scanned(48, Execution(scan_layers=True), period=48)
    # Both together: three layers with Gated DeltaNet and one with attention, every other of which
    # looks back.
    delta = replace(DELTA.delta, layers=tuple(layer for layer in range(16) if layer % 4 != 3))
    config = replace(DELTA, num_layers=16, delta=delta, sliding_window=3)
    config = replace(config, full_attention_layers=(3, 11))
    assert period_of_stack(config, 16) == 8
    assert period_of_stack(config, 16, first=None) == 4


def last_of(period, layers):
    return tuple(range(period - 1, layers, period))


def all_but_last_of(period, layers):
    return tuple(layer for layer in range(layers) if layer % period != period - 1)


@pytest.mark.parametrize(
    ("layers", "full", "of_delta", "period"),
    [
        (48, last_of(6, 48), (), 6),  # Gemma 3 12B
        (36, last_of(2, 36), (), 2),  # gpt-oss-120b
        (48, (), all_but_last_of(4, 48), 4),  # Qwen3-Next
        # As long as a stack that is unrolled, and one layer longer.
        (24, last_of(8, 24), (), 8),
        (27, last_of(9, 27), (), 1),
        # Of two layers with attention one has a window, and of three two.
        (24, (3, 11, 19), all_but_last_of(4, 24), 8),
        (24, (3, 15), all_but_last_of(4, 24), 4),
        # Gated DeltaNet has that period by itself.
        (24, (3, 15), (0, 12), 12),
    ],
)
def test_windows_lengthen_a_period_to_as_many_layers_as_are_unrolled(
    layers, full, of_delta, period
):
    delta = replace(DELTA.delta, layers=of_delta) if of_delta else None
    config = replace(ROUTED, num_layers=layers, delta=delta)
    if full:
        config = replace(config, sliding_window=3, full_attention_layers=full)
    assert period_of_stack(config, layers) == period


@pytest.mark.slow
def test_windows_that_come_again_late_are_looked_up_in_a_body_of_one_layer():
    weights, one = random_weights(LONG, 0), mesh_of("dp1")

    def hidden(scanned):
        config = replace(LONG, execution=Execution(scan_layers=scanned))

        def local(weights, tokens, valid):
            return model.hidden(vary(weights, one.axes), tokens, valid, Model(config, one))[0]

        given = specs(Model(config, one)), P(), P()
        program = jax.shard_map(local, mesh=one.mesh, in_specs=given, out_specs=P(one.axes))
        return jit(program)(weights, *batch(False, config))

    config = replace(LONG, execution=Execution())
    (part,) = split_layer_groups(weights, config)
    assert part.norm.shape == (24, LONG.d_model)
    assert runs_of((part,), config) == [(part,)]
    # The same sums, which the compiler fuses with what is around them; float32, 24 layers deep.
    np.testing.assert_allclose(hidden(True), hidden(False), rtol=2e-5, atol=2e-5)


def test_windows_of_a_scanned_stack_are_known_to_kernels():
    config, one = replace(WINDOWS, execution=Execution(scan_layers=True)), mesh_of("dp1")
    windows = []

    def local(weights, tokens, valid):
        packed = pack_rows(tokens, valid, Model(config, one))

        def of_layer(number, window=None):
            windows.append(window)
            return packed.core_attention_of_layer(number, window)

        watched = packed._replace(core_attention_of_layer=of_layer)
        return model.run(vary(weights, one.axes), watched, Model(config, one))[0]

    given = specs(Model(config, one)), P(), P()
    program = jax.shard_map(local, mesh=one.mesh, in_specs=given, out_specs=P(one.axes))
    jax.eval_shape(program, shapes(config), *batch(False, config))
    assert windows == [3, None]


@pytest.mark.parametrize("network", [WINDOWS, DELTA])
def test_parts_of_periods_run_together(network):
    config = replace(network, execution=Execution(scan_layers=True))
    weights = random_weights(config, 0)
    parts = split_layer_groups(weights, config)
    (run,) = runs_of(parts, config)
    assert run == parts
    assert [part.norm.shape[0] for part in parts] == [2, 2]
    in_turn = np.stack([part.norm for part in parts], axis=1).reshape(4, -1)
    np.testing.assert_array_equal(in_turn, weights.layers.norm)
    if network is DELTA:
        kinds = weights.layers.delta, weights.layers.attention
        for part, kind in zip(parts, kinds, strict=True):
            chex.assert_trees_all_equal(part.attention, kind)


@pytest.mark.parametrize(("scanned", "parts"), [(True, [1, 2]), (False, [0, 0, 0])])
def test_the_parts_of_a_network_are_layers_and_scanned_stacks(scanned, parts):
    config = replace(MOE, execution=Execution(scan_layers=scanned))
    weights = random_weights(config, 0)
    found = split_layer_groups(weights, config)
    assert [part.norm.shape[0] if part.norm.ndim > 1 else 0 for part in found] == parts
    assert weights.first_layers is not None
    by_layer = [part.norm.reshape(-1, config.d_model) for part in found]
    stacks = weights.first_layers.norm, weights.layers.norm
    np.testing.assert_array_equal(np.concatenate(by_layer), np.concatenate(stacks))
