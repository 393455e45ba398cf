"""Packed updates are the padded ones with less to compute."""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from largest import assert_trees_close_by_largest
from small_runs import (
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    small_batch,
    small_model,
    small_recipe,
    small_run,
    small_setup,
    windows_batch,
)
from three_updates import compiled_update, gradient_of, numbers_of, random_weights
from tiers import full_but

from jrl.losses import ExplainedVariance, Mean
from jrl.processes.agreement import to_devices
from jrl.recipes import Tppo
from jrl.recipes.base.batch import replicated
from jrl.rollout.packing import (
    bin_length,
    clear_idle_rows,
    counts_of,
    pack_rows,
    plan,
    round_up_size,
)
from jrl.trainer.learner.update import CriticObjective, PolicyObjective
from jrl.trainer.scoring import logprobs_of, packed_scores, values_of
from jrl.trainer.state import init_state
from jrl.trainer.step import mini_batches, targets_of, train_on_batch
from moe.execution import Execution
from sharding.folding import Layout, fold_abstract

TIME = PROMPT_LENGTH + RESPONSE_LENGTH
ALONE = fold_abstract(Layout.parse("dp1"))


@pytest.mark.parametrize("seed", range(20))
def test_every_row_has_a_place_of_its_own(seed):
    random = np.random.default_rng(seed)
    number, bins, time = 2 * int(random.integers(1, 20)), int(random.integers(1, 4)), 11
    tokens = random.integers(0, time + 1, number)
    counted = random.integers(0, tokens + 1)
    mesh = fold_abstract(Layout.parse("dp2 cp2 tp2"))
    packed = plan(tokens, counted, time, bins, mesh)
    again = plan(tokens, counted, time, bins, mesh)
    assert packed.sizes == again.sizes and packed.passes == again.passes
    assert (packed.rows == again.rows).all() and (packed.starts == again.starts).all()
    sizes = packed.sizes
    assert sizes.bins == bins and sizes.length == 12 and sizes.max_scored % 4 == 0
    filled = packed.starts >= 0
    assert sorted(packed.rows[filled]) == np.flatnonzero(tokens).tolist()
    slots = packed.slots(number)
    np.testing.assert_array_equal(packed.rows[slots][tokens > 0], np.flatnonzero(tokens))
    assert (packed.starts[slots[tokens == 0]] < 0).all()
    shape = 2, packed.num_micro_batches, -1
    rows, starts = packed.rows.reshape(shape), packed.starts.reshape(shape)
    assert (starts[:, packed.passes :] < 0).all()
    by_micro_batch = (x.reshape(-1, rows.shape[2]) for x in (rows, starts))
    for slots, begins in zip(*by_micro_batch, strict=True):
        inside = slots[begins >= 0]
        assert counted[inside].sum() <= sizes.max_scored
        taken = np.zeros(sizes.bins * sizes.length, int)
        for row, start in zip(inside, begins[begins >= 0], strict=True):
            assert start // sizes.length == (start + tokens[row] - 1) // sizes.length
            taken[start : start + tokens[row]] += 1
        assert taken.max() <= 1 and taken.sum() == tokens[inside].sum()


def test_rows_are_dealt_out_evenly():
    """The longest first, to the rank with the fewest tokens and the first bin with room; then bins,
    those with most that counts first."""
    tokens, counted = np.array([3, 9, 4, 0, 8, 2, 6, 1]), np.array([1, 2, 3, 0, 1, 1, 2, 1])
    packed = plan(tokens, counted, 10, 1, fold_abstract(Layout.parse("dp2")))
    assert packed.sizes == (1, 10, 4) and (packed.num_micro_batches, packed.passes) == (4, 2)
    rows, starts = packed.rows.reshape(2, 4, 4), packed.starts.reshape(2, 4, 4)
    empty = [-1] * 4
    assert starts[0].tolist() == [[0, 4, -1, -1], [0, 9, -1, -1], empty, empty]
    assert starts[1].tolist() == [[0, 8, -1, -1], [0, -1, -1, -1], empty, empty]
    assert rows[0, 0, :2].tolist() == [2, 0] and rows[0, 1, :2].tolist() == [1, 7]
    assert rows[1, 0, :2].tolist() == [4, 5] and rows[1, 1, 0] == 6


def test_how_many_passes_there_are_is_no_shape():
    """From a row to all of them at full length: the same program."""
    shapes = set()
    for number in range(9):
        tokens = np.where(np.arange(8) < number, TIME, 0)
        packed = plan(tokens, np.minimum(tokens, 4), TIME, 2, ALONE)
        assert packed.passes == max(-(-number // 2), 1)
        if number:
            shapes.add((packed.rows.shape, packed.num_micro_batches, packed.sizes))
    assert shapes == {((32,), 4, (2, TIME, 8))}


def test_sizes_are_rounded_up_to_few():
    found = [
        round_up_size(number) for number in (0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 17, 24, 25, 97)
    ]
    assert found == [1, 1, 2, 3, 4, 6, 6, 8, 12, 12, 16, 24, 24, 32, 128]


@pytest.mark.parametrize(
    ("layout", "length"), [("dp1", 11), ("tp2", 12), ("cp2", 12), ("cp2 tp2", 12), ("cp2 tp3", 12)]
)
def test_the_ranks_of_a_sequence_share_a_bin(layout, length):
    assert bin_length(11, fold_abstract(Layout.parse(layout))) == length


def setup_on(layout, recipe="tppo", **sizes):
    setup = small_setup(small_recipe(recipe), small_run(layout=layout))
    # Large enough that a router loss that is not the same shows in every gradient.
    losses = {"load_balance_coef": 0.5, "router_z_coef": 0.1}
    return replace(setup, model=small_model(setup.tokenizer.vocab_size, **losses, **sizes))


def learned_from(setup, network):
    """What a network learns from: the rows, and its objective on rows that share no prompt."""
    batch = windows_batch(setup)
    targets = targets_of(setup.recipe, batch)
    batch = batch.replace(
        mask=targets.mask,
        critic_mask=targets.critic_mask,
        advantages=targets.advantages,
        returns=targets.returns,
    )
    counts = counts_of(batch)
    if network == "critic":
        batch = batch.replace(mask=batch.critic_mask)
    return clear_idle_rows(batch), counts.for_network(network, np.arange(8), idle=False)


@functools.cache
def one_update(network, layout, bins, packed, context=None):
    setup = setup_on(layout, execution=Execution(context=context))
    mesh = setup.mesh
    rows, of_rows = learned_from(setup, network)
    of = setup.networks.critic if network == "critic" else setup.networks.policy
    learner = of.init(random_weights(setup, of.config))
    objective: PolicyObjective | CriticObjective = of.objective
    laid, num_micro, passes = None, 1, None
    if packed:
        laid = plan(*of_rows, TIME, bins, mesh)
        rows = pack_rows(rows, laid, mesh)
        objective, num_micro = replace(objective, packed=laid.sizes), laid.num_micro_batches
        passes = to_devices(np.int32(laid.passes), replicated(mesh))
    given = learner, rows, None, passes
    step = compiled_update(objective, of.optimizer, num_micro, *given)
    learner, metrics = step(*given)
    return gradient_of(learner, mesh), jax.device_get(metrics), laid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "layout", "bins", "context"),
    full_but(
        [
            ("actor", "dp1", 2, None),
            ("actor", "tp2 dp2 / ep4", 2, None),
            ("critic", "cp2 dp2 / ep2", 1, "gather"),
            ("actor", "cp4 / ep4", 1, "ulysses"),
            ("actor", "cp2 tp2", 3, "ring"),
        ],
        ("actor", "dp1", 2, None),
    ),
)
def test_packed_updates_are_padded_ones(network, layout, bins, context):
    """Loss, gradients and metrics, router sums included, of the rows as they stand on one
    device."""
    gradient, metrics, laid = one_update(network, layout, bins, True, context)
    expected, same, _ = one_update(network, "dp1", 1, False)
    # A rank that has half the rows may need as many passes as there are micro-batches.
    assert laid.passes < laid.num_micro_batches + ("dp2" in layout)
    # float32 sums of a few hundred terms in another order; an element near zero is a difference of
    # terms as large as its neighbours, with their error.
    assert_trees_close_by_largest(gradient, expected, rtol=2e-4, of_largest=4e-6)
    assert all(float(np.max(np.abs(leaf))) > 0 for leaf in jax.tree.leaves(gradient))
    np.testing.assert_array_equal(metrics.load.counts, same.load.counts)
    metrics, same = numbers_of(metrics), numbers_of(same)
    assert metrics.keys() == same.keys()
    for name in metrics.keys() - {"moe/padded_fraction"}:
        if isinstance(same[name], Mean | ExplainedVariance):
            assert metrics[name].count == same[name].count, name
        one, other = (m.value() for m in (metrics[name], same[name]))
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6, err_msg=name)
    if network == "actor" and "dp2" not in layout:  # bins that two ranks do not fill are padding
        padded = (float(m["moe/padded_fraction"].value()) for m in (metrics, same))
        assert next(padded) < next(padded)


def trained(packs, batch_of=windows_batch, recipe="tppo", **settings):
    """A step's updates, from the same state on the same batch."""
    setup = setup_on("dp1", recipe)
    setup = replace(setup, recipe=small_recipe(recipe, **settings))
    setup = replace(setup, run=replace(setup.run, packing=packs))
    networks = setup.networks
    assert networks.packs is packs
    critic_key = setup.randomness.key("critic")
    state = init_state(networks, random_weights(setup, setup.model), critic_key)
    batch = batch_of(setup)
    if setup.recipe.uses_critic:
        targets = targets_of(setup.recipe, batch)
        batch = batch.replace(
            mask=targets.mask,
            critic_mask=targets.critic_mask,
            advantages=targets.advantages,
            returns=targets.returns,
        )
    before = jax.device_get(state)
    state, history, nonfinite, _ = train_on_batch(networks, state, batch, setup.randomness)
    assert not nonfinite
    return before, jax.device_get(state), history


# Adam divides a gradient by its size, and with it what rounding made of one near zero.
AFTER_TWO_STEPS = {"rtol": 1e-3, "atol": 1e-4}


@pytest.mark.slow
def test_a_step_is_the_same_step():
    _, packed, history = trained(True)
    before, padded, expected = trained(False)
    chex.assert_trees_all_close(packed.policy.weights, padded.policy.weights, **AFTER_TWO_STEPS)
    chex.assert_trees_all_close(packed.critic.weights, padded.critic.weights, **AFTER_TWO_STEPS)
    assert not np.array_equal(before.policy.weights.embedding, packed.policy.weights.embedding)
    assert not np.array_equal(before.critic.weights.embedding, packed.critic.weights.embedding)
    for entry, same in zip(history, expected, strict=True):
        for network in ("actor", "critic"):
            np.testing.assert_allclose(entry[network].loss, same[network].loss, rtol=1e-3)


@pytest.mark.slow
def test_every_recipe_can_be_packed():
    """Rows that count for nothing count for the routers as they do unpacked."""

    def batch_of(setup):
        return small_batch(setup, 8)

    _, packed, _ = trained(True, batch_of, "grpo")
    _, padded, _ = trained(False, batch_of, "grpo")
    chex.assert_trees_all_close(packed.policy.weights, padded.policy.weights, **AFTER_TWO_STEPS)


def test_rows_of_windows_are_shuffled_alone():
    """512 rows; the completions of a prompt need not stay together."""
    found = mini_batches(Tppo(), np.random.default_rng(3))
    expected = np.random.default_rng(3).permutation(np.arange(512).reshape(512, 1))
    np.testing.assert_array_equal(found, expected.reshape(4, 128))


@pytest.mark.slow
@pytest.mark.parametrize("packs", [True, False])
def test_a_step_in_which_no_response_finishes(packs):
    """The critic stays as it is to the last bit, momentum included; the policy learns."""

    def unfinished(setup):
        batch = windows_batch(setup)
        nothing = jnp.zeros_like(batch.finished)
        return batch.replace(finished=nothing, correct=nothing, rewards=batch.rewards * 0)

    before, after, history = trained(packs, unfinished, ignore_last=0)
    same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), before.critic, after.critic)
    assert all(jax.tree.leaves(same))
    assert int(after.critic.updates) == 0 and int(after.policy.updates) == 2
    for entry in history:
        assert entry["critic"].empty and entry["critic"].finite
        assert not entry["actor"].empty


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "top_k"),
    [("dp1", None), ("dp2 tp2 / ep4", 3), ("cp2 dp2", None), ("cp4 / ep4", None)],
)
def test_packed_scores_are_padded_ones(layout, top_k):
    """Under the mask; all others are 0."""
    # Padded rows and packed ones, each in the order that heads traded for tokens ask for.
    context = "ulysses" if "cp4" in layout else None
    setup = setup_on(layout, execution=Execution(context=context))
    setup = replace(setup, recipe=small_recipe("tppo", top_k=top_k))
    batch, networks = windows_batch(setup), setup.networks
    batch = batch.replace(mask=batch.mask & batch.finished[:, None])
    policy, critic = networks.policy.objective, networks.critic.objective
    given, mask = (batch.tokens, batch.valid), np.asarray(batch.mask)
    weights = random_weights(setup, setup.model)
    found = packed_scores(policy, weights, batch, bins=1)
    for one, other in zip(found, logprobs_of(policy, weights, *given), strict=True):
        # float32; what top-k cuts away is minus infinity in both.
        np.testing.assert_allclose(
            np.asarray(one)[mask], np.asarray(other)[mask], rtol=2e-5, atol=2e-5
        )
        assert not np.asarray(one)[~mask].any()
    weights = random_weights(setup, critic.config)
    found = np.asarray(*packed_scores(critic, weights, batch, bins=2))
    expected = np.asarray(values_of(critic, weights, *given))
    np.testing.assert_allclose(found[mask], expected[mask], rtol=2e-5, atol=2e-5)
    assert not found[~mask].any() and expected[mask].std() > 0.01


@pytest.mark.parametrize(
    ("recipe", "packing", "packs"),
    [("tppo", None, True), ("tppo", False, False), ("vapo", None, False), ("vapo", True, True)],
)
def test_who_packs(recipe, packing, packs):
    setup = small_setup(small_recipe(recipe), small_run(packing=packing))
    assert setup.networks.packs is packs
    assert setup.geometry.prompt_layout.group_size == (1 if recipe == "tppo" else 2)
