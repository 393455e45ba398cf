"""The network on a folded mesh equals the network on one device: values, gradients, router sums."""

import functools
import itertools
import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import jit, mesh_of, on_mesh, random_weights
from small_networks import any_choices
from tiers import full_but
from whole_network import loss_and_gradient

from moe import model
from moe.config import GatedDeltaNet, ModelConfig
from moe.execution import Execution
from moe.placement import in_chunks, in_layer_order, specs
from moe.router.balance import router_loss
from sharding.collectives import all_sum
from sharding.folding import Layout

# A distinct size for each axis, divisible where the layouts cut it.
MOE = ModelConfig(
    vocab_size=12,
    num_layers=1,
    d_model=10,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    num_experts=16,
    experts_per_token=3,
    d_expert=14,
)
CONFIGS = {
    "routed": MOE,
    # Columns of the head in chunks. A stage of a pipeline learns at run time whether its layer has
    # a window.
    "two": replace(
        MOE,
        num_layers=2,
        sliding_window=2,
        full_attention_layers=(1,),
        execution=Execution(vocab_chunk=5),
    ),
    # A vocabulary that tp does not divide is whole on each rank, which reads its part of the head.
    "four": replace(
        MOE, num_layers=4, vocab_size=11, sliding_window=3, full_attention_layers=(0, 3)
    ),
    # Of four chunks three are a layer shorter.
    "five": replace(
        MOE,
        num_layers=5,
        sliding_window=3,
        full_attention_layers=(0, 3),
        execution=Execution(remat="selective"),
    ),
    # Of two stages the last has a layer less, after a dense one.
    "scanned": replace(
        MOE,
        num_layers=4,
        num_dense_layers=1,
        dense_d_ff=20,
        sliding_window=3,
        full_attention_layers=(0, 3),
        execution=Execution(scan_layers=True, remat="full"),
    ),
    "dense": replace(
        MOE,
        num_layers=2,
        vocab_size=11,
        num_experts=0,
        d_ff=28,
        head="tied",
        execution=Execution(vocab_chunk=4),
    ),
    # One matrix, spread over tp, at both ends.
    "tied": replace(MOE, num_layers=2, head="tied", execution=Execution(vocab_chunk=4)),
    # What DeepSeek-V3 routes by; rows travel one by one.
    "sigmoid": replace(
        MOE,
        router_scores="sigmoid",
        num_expert_groups=4,
        expert_groups_per_token=3,
        routed_scaling=2.5,
        global_balance_coef=0.02,
        execution=Execution(dispatch="all_to_all"),
    ),
    # Tokens of a device in parts, of which some are larger.
    "chunks": replace(
        MOE, execution=Execution(expert_chunks=2, dispatch="all_to_all", remat="selective")
    ),
    "two_in_chunks": replace(
        MOE,
        num_layers=2,
        sliding_window=2,
        full_attention_layers=(1,),
        execution=Execution(expert_chunks=2),
    ),
    # Experts that are full drop the later tokens of the rows, wherever these are.
    "full": replace(MOE, capacity_factor=0.8, drop_policy="position", drop_scope="full_sequence"),
    # Tokens traded for heads, of which those of keys and values are sent twice: a rank of tp has
    # one, or two are for cp4.
    "traded": replace(MOE, num_kv_heads=2, execution=Execution(context="ulysses")),
    "traded full": replace(
        MOE,
        capacity_factor=0.8,
        drop_scope="full_sequence",
        execution=Execution(context="ulysses", dispatch="all_to_all", remat="selective"),
    ),
    # States in the place of keys in the first layer of each two, the heads of both over tp.
    "delta": replace(
        MOE,
        num_layers=2,
        num_experts=0,
        d_ff=12,
        delta=GatedDeltaNet((0,), 2, 4, key_head_dim=5, value_head_dim=6, conv_width=3),
        attention_gate=True,
    ),
    # A critic with a shared expert.
    "shared": replace(MOE, num_layers=2, d_ff=12, head="value"),
}
CONFIGS["delta two"] = replace(
    CONFIGS["delta"],
    num_layers=4,
    num_experts=16,
    delta=replace(CONFIGS["delta"].delta, layers=(0, 2)),
    execution=Execution(fsdp=True, remat="selective"),
)
# What is part of a larger layout has no case of its own: experts on the devices of dp, on those of
# tp and of cp, parts of experts on those of tp.
LAYOUTS = [
    # Every device has all experts.
    "tp2 cp2 dp2",
    # Parts of experts on the devices of cp, and of dp.
    "cp2 / etp2",
    "dp4 / ep2 etp2",
    # Sixteen devices.
    "tp2 cp2 dp4 / ep8 etp2",
    "tp4 cp2 dp2 / ep16",
]
# Two layers on each stage where a stage has two chunks of them, else one.
PIPELINES = ["pp2 dp2 cp2 tp2 / ep4 etp2", "pp2 vpp2 dp2 cp2 tp2 / ep8"]
# What the other configurations add is spread over tp (dense layers, the values' alignment, the
# tied head): a layout that has every axis is theirs, and one with experts inside tp.
CASES = [
    *(("routed", layout) for layout in LAYOUTS),
    *(("four" if "vpp" in layout else "two", layout) for layout in PIPELINES),
    ("five", "pp2 vpp2 dp2 / ep2"),
    ("scanned", "pp2 tp2"),
    ("dense", "tp2 dp4"),
    ("tied", "tp2 cp2 / ep2"),
    ("tied", "pp2 tp2"),
    ("shared", "pp2 tp2 dp2 / ep4"),
    ("sigmoid", "tp2 dp4 / ep2 etp2"),
    ("traded", "tp2 cp2 dp2 / ep8"),
    ("delta", "tp2"),
    ("delta two", "pp2 tp2 / ep2"),
    ("chunks", "tp2 dp4 / ep2 etp2"),
    ("two_in_chunks", "pp2 dp4 / ep4"),
]
# Who is dropped does not depend on cp and tp: `tests/moe/router/test_capacity.py` has it by itself.
FULL = [("full", "tp2 cp2 / ep4"), ("traded full", "cp4 / ep4")]
BATCH, TIME = 8, 5


def batch():
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, min(c.vocab_size for c in CONFIGS.values()), (BATCH, TIME))
    length = np.arange(BATCH) % (TIME - 1) + 2
    valid = np.arange(TIME)[None, :] >= TIME - length[:, None]
    return tokens.astype(np.int32), valid


def run(config, layout, replayed=False):
    mesh, piece = mesh_of(layout), batch()
    if replayed and config.num_experts:
        piece = *piece, any_choices(config, BATCH, TIME)
    step = jit(loss_and_gradient(config, mesh))
    weights = in_chunks(random_weights(config, 0), mesh)
    out, grads = jax.device_get(step(weights, piece))
    stacked = config.num_layers - config.num_dense_layers
    return out, in_layer_order(grads, mesh, stacked)


@functools.cache
def on_one_device(config, replayed=False):
    return run(config, "dp1", replayed)


def without_execution(config):
    """What the network computes, by whatever means; many equal layers are compiled as one."""
    scans = config.num_layers > 2 and config.delta is None
    return replace(config, execution=Execution(scan_layers=scans))


def test_the_table_has_every_axis_and_every_pair():
    table = [Layout.parse(layout) for _, layout in CASES]
    assert {layout.num_devices for layout in table} >= {8, 16}
    names = ("tp", "cp", "dp", "pp", "ep", "etp")
    for pair in itertools.combinations_with_replacement(names, 2):
        assert any(all(getattr(layout, axis) > 1 for axis in pair) for layout in table), pair
    assert any(all(getattr(layout, axis) > 1 for axis in names) for layout in table)


# All axes at once; states.
QUICK = [("routed", "tp2 cp2 dp4 / ep8 etp2")]


@pytest.mark.parametrize(("name", "layout"), full_but([*CASES, *FULL], *QUICK))
def test_equals_one_device(name, layout):
    (value, stats), grads = run(CONFIGS[name], layout)
    (expected, expected_stats), expected_grads = on_one_device(without_execution(CONFIGS[name]))
    # float32 sums of a few hundred terms in another order: a few units in the sixth digit.
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    # An element near zero is a difference of terms as large as its neighbours, with their error.
    # Where keys are short their lengths, by which they are divided, have larger ones.
    error = 2e-6 if CONFIGS[name].delta is None else 2e-5
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=error * np.max(np.abs(b))),
        grads,
        expected_grads,
    )
    if stats is not None:
        if "cp" in layout:  # which pads rows to a length that it can cut
            assert stats.padded > expected_stats.padded
            stats = replace(stats, padded=expected_stats.padded, places=expected_stats.places)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), stats, expected_stats
        )
        np.testing.assert_array_equal(stats.load, expected_stats.load)
        assert (float(stats.dropped) > 0) == (CONFIGS[name].capacity_factor is not None)
        sent = CONFIGS[name].num_expert_layers * 3 * int(batch()[1].sum())
        assert float(stats.load.sum()) == sent
    assert all(float(np.max(np.abs(g))) > 0 for g in jax.tree.leaves(grads))


# Tokens that are gathered, alone: nothing is rounded on the way that is not on one device.
# Elsewhere sums of some experts or parts of a product are, to 8 bits, before they are added up over
# the axis.
EXACT_IN_HALF = [("routed", "dp4 / ep4")]
HALF = [
    *EXACT_IN_HALF,
    ("chunks", "dp4 / ep4"),
    ("routed", "cp2"),
    ("traded", "cp4 / ep4"),
    ("routed", "dp2 / etp2"),
    ("dense", "tp2"),
    ("dense", "pp2"),
]


def within(tolerance):
    """Whether the difference of two arrays is that much of the second, or less."""
    return lambda a, b: np.testing.assert_array_less(
        np.linalg.norm(a - b), tolerance * np.linalg.norm(b)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), HALF)
def test_equals_one_device_in_half_precision(name, layout):
    config = replace(CONFIGS[name], dtype="bfloat16")
    (value, stats), grads = run(config, layout)
    (expected, expected_stats), expected_grads = on_one_device(without_execution(config))
    exact = (name, layout) in EXACT_IN_HALF
    # Exact, or the mean over tokens of what some roundings to 8 bits do to a hidden state.
    np.testing.assert_allclose(value, expected, rtol=2e-6 if exact else 2**-8)
    if stats is not None:
        np.testing.assert_array_equal(stats.load, expected_stats.load)

    # Some fifty roundings to 8 bits one after the other, of 2^-9 each, in no order.
    jax.tree.map(within(2**-5), grads, expected_grads)
    if exact:
        # These are summed in float32: experts' matrices, routers, and all of the residual stream.
        for part in ("embedding", "norm", "head"):
            within(1e-6)(getattr(grads, part), getattr(expected_grads, part))
        own, other = grads.layers, expected_grads.layers
        jax.tree.map(within(1e-6), (own.experts, own.norm), (other.experts, other.norm))


# Further from one device than the bound of the others, as one device is from float32: held by that.
FAR_FROM_FLOAT32 = "delta", "delta two", "shared"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_whole_table_in_half_precision(name, layout):
    """Choices are given: where two experts are all but equal, roundings decide between them."""
    config = replace(CONFIGS[name], dtype="bfloat16")
    (value, stats), grads = run(config, layout, replayed=True)
    one = on_one_device(without_execution(config), replayed=True)
    (expected, expected_stats), expected_grads = one
    np.testing.assert_allclose(value, expected, rtol=2**-8)
    if name in FAR_FROM_FLOAT32:
        # One device rounds once where a mesh rounds each part.
        _, precise = on_one_device(without_execution(CONFIGS[name]), replayed=True)
        jax.tree.map(
            lambda a, b, exact: np.testing.assert_array_less(
                np.linalg.norm(a - b), 3 * np.linalg.norm(b - exact)
            ),
            grads,
            expected_grads,
            precise,
        )
    else:
        jax.tree.map(within(2**-5), grads, expected_grads)
    if stats is not None:
        np.testing.assert_array_equal(stats.load, expected_stats.load)
        np.testing.assert_array_equal(stats.replayed, expected_stats.replayed)


def test_micro_batches_of_a_batch_add_up():
    """Router losses and sums of micro-batches, with the token count of the whole, add up to it."""
    mesh = mesh_of("tp2 dp2 / ep4")
    tokens, valid = batch()
    num_tokens = np.sum(valid, dtype=np.int32)

    def local(weights, tokens, valid):
        _, stats = model.hidden(weights, tokens, valid, MOE, mesh)
        router = router_loss(stats, MOE, mesh, jnp.asarray(num_tokens))
        return all_sum(router, mesh.except_sequence), all_sum(stats, mesh.axes)

    by_row = P(mesh.dp)
    step = on_mesh(local, mesh, (specs(MOE, mesh), by_row, by_row), (P(), P()))
    weights = random_weights(MOE, 0)
    whole, whole_stats = jax.device_get(step(weights, tokens, valid))
    # The micro-batches are the short rows and the long ones, so that they differ in tokens.
    order = np.argsort(valid.sum(axis=1), kind="stable")
    micro_batches = [order[:4], order[4:]]
    assert len({int(valid[micro_batch].sum()) for micro_batch in micro_batches}) == 2
    parts, part_stats = zip(
        *(jax.device_get(step(weights, tokens[p], valid[p])) for p in micro_batches), strict=True
    )
    np.testing.assert_allclose(sum(map(float, parts)), whole, rtol=2e-6)
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(a + b, c, rtol=1e-5),
        *part_stats,
        whole_stats,
    )
    np.testing.assert_array_equal(part_stats[0].load + part_stats[1].load, whole_stats.load)


COLLECTIVE = r" (all-gather|reduce-scatter|all-to-all|all-reduce|collective-permute)(?:-start)?\("


CLAIMS = [
    # The embedding scatters what its rows gave; attention gathers and scatters once over tp; the
    # router sums its counts; tokens, ids and probs go to the experts and sums come back.
    (
        "routed",
        "all_to_all",
        "tp2 dp4 / ep8",
        {"all-gather": 1, "all-reduce": 1, "reduce-scatter": 2, "all-to-all": 4},
    ),
    # Over etp tokens, ids and probs are gathered and sums scattered.
    (
        "routed",
        "all_to_all",
        "tp2 dp4 / ep4 etp2",
        {"all-gather": 4, "all-reduce": 1, "reduce-scatter": 3, "all-to-all": 4},
    ),
    # Over cp attention gathers keys and values; the counts of a sequence come from both axes.
    (
        "routed",
        "all_to_all",
        "tp2 cp2 dp2 / ep4",
        {"all-gather": 3, "all-reduce": 1, "reduce-scatter": 2, "all-to-all": 4},
    ),
    # Tokens, ids and weights are gathered, sums scattered.
    (
        "routed",
        "all_gather",
        "tp2 dp4 / ep8",
        {"all-gather": 4, "all-reduce": 1, "reduce-scatter": 3},
    ),
    # The shared expert gathers and scatters as attention does.
    (
        "shared",
        "all_to_all",
        "tp2 dp4 / ep8",
        {"all-gather": 2, "all-reduce": 1, "reduce-scatter": 3, "all-to-all": 4},
    ),
    # Of 11 tokens each rank has the whole embedding.
    ("dense", None, "tp2 dp4 / ep8", {"all-gather": 2, "reduce-scatter": 2}),
]


@pytest.mark.parametrize(("name", "dispatch", "layout", "expected"), full_but(CLAIMS, CLAIMS[5]))
def test_collectives_of_one_layer_are_those_claimed(name, dispatch, layout, expected):
    config = replace(CONFIGS[name], num_layers=1, execution=Execution(dispatch=dispatch))
    mesh = mesh_of(layout)
    by_row = P(mesh.dp)

    def local(weights, tokens, valid):
        x, stats = model.hidden(weights, tokens, valid, config, mesh)
        # What a device counts is a scalar; laid end to end it needs a dimension.
        return x, jax.tree.map(jnp.atleast_1d, stats)

    step = on_mesh(local, mesh, (specs(config, mesh), by_row, by_row), P(mesh.axes))
    text = step.lower(random_weights(config, 0), *batch()).compile().as_text()
    assert Counter(re.findall(COLLECTIVE, text)) == expected
