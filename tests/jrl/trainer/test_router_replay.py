"""Router replay: what is recorded, which passes replay it, and what that changes."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from largest import assert_trees_close_by_largest
from small_runs import (
    PROMPT_LENGTH,
    fresh_state,
    fresh_weights,
    one_step,
    small_batch,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)
from three_updates import FAST_COMPILE, compiled_update, gradient_of, numbers_of, random_weights

from jrl.recipes import GroupRelative
from jrl.recipes.base.batch import over_rows
from jrl.report.metrics import check_defined, without_timings
from jrl.trainer import step as stepping
from jrl.trainer.learner.update import statistics_of
from jrl.trainer.scoring import logprobs_and_choices_of, logprobs_of
from moe import model
from moe.config import Model
from moe.execution import Execution
from moe.placement import specs
from sharding.folding import Layout

ROWS, EXPERTS, CHOSEN = 8, 4, 2
NONE = EXPERTS
"""What stands for no choice."""


def layers_of(layout):
    """As many as the layout has chunks of them, and at least two."""
    parsed = Layout.parse(layout)
    return max(2, parsed.pp * parsed.vpp)


def setup_on(layout, router_replay: Any = "R3", layers=2, **changes):
    """Groups of two completions that share their prompt. On one device the layers are one program,
    and elsewhere one after the other."""
    recipe = small_recipe(router_replay=router_replay, mini_batch=8, micro_batch=8, **changes)
    setup = small_setup(recipe, small_run(layout=layout))
    execution = Execution(scan_layers=layout == "dp1")
    sizes = {"num_layers": layers, "execution": execution}
    return replace(setup, model=small_model(setup.tokenizer.vocab_size, **sizes))


def compiled(function, objective, *given):
    return function.lower(objective, *given).compile(FAST_COMPILE)(*given)


@cache
def recorded_on(layout, layers=2):
    """Log-probabilities and choices, as a pass that records gives them."""
    setup = setup_on(layout, layers=layers)
    batch, objective = small_batch(setup, ROWS), setup.networks.policy.objective
    assert objective.layout.group_size == 2
    given = random_weights(setup, setup.model), batch.tokens, batch.valid
    return jax.device_get(compiled(logprobs_and_choices_of, objective, *given))


@cache
def of_plain_rows(layers=2):
    """The choices of the network, each row by itself."""
    setup = setup_on("dp1", layers=layers)
    mesh, batch = setup.mesh, small_batch(setup, ROWS)
    step = jax.jit(
        jax.shard_map(
            lambda *given: model.routing_choices(*given, Model(setup.model, mesh))[None],
            mesh=mesh.mesh,
            in_specs=(specs(Model(setup.model, mesh)), P(), P()),
            out_specs=P(mesh.except_sequence),
        ),
        compiler_options=FAST_COMPILE,
    )
    chosen = step(random_weights(setup, setup.model), batch.tokens, batch.valid)[0]
    return np.moveaxis(np.asarray(chosen), 0, 2)


LAYOUTS = ["dp1", "tp2 dp2 / ep2 etp2", "tp2 cp2 dp2 / ep4", "pp2 vpp2 dp2 tp2"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_pass_records_are_the_choices_of_the_network(layout):
    """Prompts that are run once stand in each of their rows."""
    layers = layers_of(layout)
    _, choices = recorded_on(layout, layers)
    assert choices.dtype == np.uint8
    np.testing.assert_array_equal(choices, of_plain_rows(layers))
    valid = np.asarray(small_batch(setup_on("dp1"), ROWS).valid)
    assert np.all((choices < NONE) == valid[:, :, None, None])


@cache
def program(layout, num_micro=1, layers=2, router_replay: Any = "R3"):
    """The setup, and its compiled update."""
    setup = setup_on(layout, router_replay, layers)
    policy, batch = setup.networks.policy, small_batch(setup, ROWS)
    learner = policy.init(random_weights(setup, setup.model))
    batch = with_choices(setup, batch, of_plain_rows(layers))
    given = (policy.objective, policy.optimizer, num_micro, learner, batch)
    return setup, compiled_update(*given)


def with_choices(setup, batch, choices):
    placed = jax.device_put(choices.astype(np.uint8), over_rows(setup.mesh))
    return batch.replace(choices=placed)


def updated(choices, *of_program, **also):
    """The learner and the metrics after one update with these choices on record."""
    setup, step = program(*of_program, **also)
    learner = setup.networks.policy.init(random_weights(setup, setup.model))
    batch = with_choices(setup, small_batch(setup, ROWS), choices)
    return jax.device_get(step(learner, batch))


def free_update():
    return updated(of_plain_rows(), "dp1", router_replay=None)


def others(choices):
    """The next expert in place of each that is on record."""
    return np.where(choices < NONE, (choices + 1) % EXPERTS, NONE)


@pytest.mark.slow
def test_before_anything_moves_a_replay_changes_nothing():
    """Bit for bit: the same choices with the same scores are the same network."""
    learner, metrics = updated(of_plain_rows(), "dp1")
    expected, of_free = free_update()
    chex.assert_trees_all_equal(learner, expected)
    valid = np.asarray(small_batch(setup_on("dp1"), ROWS).valid)
    first = metrics.metrics.pop("sampling/routing_agreement")
    agreement = metrics.metrics.pop("moe/replay_agreement")
    assert first.metric == agreement and float(agreement.value()) == 1
    assert float(agreement.count) == valid.sum() * 2
    chex.assert_trees_all_equal(metrics, of_free)


@pytest.mark.slow
def test_agreement_is_the_share_that_is_left():
    """One of two experts is another at every second response token of the last layer, and some
    tokens have no record: these are not counted."""
    choices, batch = of_plain_rows(), small_batch(setup_on("dp1"), ROWS)
    valid = np.asarray(batch.valid)
    changed, none = (np.zeros_like(valid) for _ in range(2))
    changed[:, PROMPT_LENGTH::2] = valid[:, PROMPT_LENGTH::2]
    none[:, -1] = valid[:, -1]
    none[0, PROMPT_LENGTH] = valid[0, PROMPT_LENGTH]
    changed &= ~none
    assert changed.any() and none.any()
    # The last layer: what it changes meets no router any more.
    record, last = choices.copy(), choices[:, :, -1].copy()
    free = np.argmax(~np.any(last[..., None] == np.arange(EXPERTS), axis=2), axis=-1)
    last[..., 0] = np.where(changed, free, last[..., 0])
    record[:, :, -1] = last[..., ::-1]  # in another order
    record[none] = NONE
    metrics = updated(record, "dp1")[1].metrics
    count = (valid & ~none).sum() * 2
    expected = 1 - changed.sum() / CHOSEN / count
    assert float(metrics["moe/replay_agreement"].count) == count
    for name in ("moe/replay_agreement", "sampling/routing_agreement"):
        assert float(metrics[name].value()) == pytest.approx(expected, rel=1e-6)
    check_defined(["moe/replay_agreement", "sampling/routing_agreement"])


# Micro-batches as each layout has them.
CASES = [
    ("tp2 dp2 / ep2 etp2", 2),
    ("cp2 dp2 / ep4", 1),
    ("pp2 vpp2 tp2 / ep2", 4),
]


@pytest.mark.slow
def test_other_choices_are_used_and_the_routers_learn():
    learner, metrics = updated(others(of_plain_rows()), "dp1")
    free, of_free = free_update()
    mesh = setup_on("dp1").mesh
    assert abs(float(metrics.loss - of_free.loss)) > 1e-4
    router, own = (gradient_of(x, mesh).layers.experts.router for x in (learner, free))
    assert np.all(np.max(np.abs(router), axis=(1, 2)) > 0)
    assert np.max(np.abs(router - own)) > 0.5 * np.max(np.abs(own))
    # Each expert got what its neighbour has on record.
    by_layer = np.moveaxis(others(of_plain_rows()), 2, 0)
    expected = [np.bincount(layer[layer < NONE].ravel(), minlength=EXPERTS) for layer in by_layer]
    np.testing.assert_array_equal(metrics.load.counts, np.stack(expected))
    assert float(metrics.metrics["moe/replay_agreement"].value()) < 0.7


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "num_micro"), CASES)
def test_updates_with_other_choices_equal_those_of_one_device(layout, num_micro):
    layers = layers_of(layout)
    record, mesh = others(of_plain_rows(layers)), setup_on(layout).mesh
    learner, metrics = updated(record, layout, num_micro, layers)
    alone, of_one = updated(record, "dp1", 1, layers)
    # float32 sums of a few hundred terms in another order.
    assert_trees_close_by_largest(
        gradient_of(learner, mesh),
        gradient_of(alone, setup_on("dp1").mesh),
        rtol=2e-4,
        of_largest=4e-6,
    )
    metrics, of_one = numbers_of(metrics), numbers_of(of_one)
    assert metrics.keys() == of_one.keys()
    for name in metrics.keys() - {"moe/padded_fraction"}:
        chex.assert_trees_all_close(metrics[name], of_one[name], rtol=2e-5, atol=2e-6)


@dataclass(frozen=True)
class Averaging(GroupRelative):
    """A recipe that must know the mean log-probability of a mini-batch."""

    uses_statistics: ClassVar[bool] = True

    def statistics(self, logprobs, entropy, batch):
        return jnp.sum(jnp.where(batch.mask, logprobs, 0.0))


@pytest.mark.slow
def test_every_pass_of_the_policy_replays():
    """Log-probabilities, and what a recipe must know of the whole mini-batch."""
    recipe = Averaging(prompts=4, group_size=2, mini_batch=8, router_replay="R2")
    setup = replace(setup_on("dp1"), recipe=recipe)
    batch, record = small_batch(setup, ROWS), of_plain_rows()
    objective, weights = setup.networks.policy.objective, random_weights(setup, setup.model)
    given = with_choices(setup, batch, record), with_choices(setup, batch, others(record))
    rows, mask = (weights, batch.tokens, batch.valid), np.asarray(batch.mask)
    program = logprobs_of.lower(objective, *rows, given[0].choices).compile(FAST_COMPILE)
    same, other = (np.asarray(program(*rows, rows_of.choices)[0]) for rows_of in given)
    plain, _ = recorded_on("dp1")
    np.testing.assert_array_equal(same, plain)
    assert np.abs(plain - other)[mask].max() > 1e-2
    total = compiled(statistics_of, objective, weights, given[1])
    np.testing.assert_allclose(total, other[mask].sum(), rtol=1e-5)
    assert abs(float(total) - plain[mask].sum()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("router_replay", ["R2", "R3"])
def test_a_step_with_what_the_policy_would_choose_is_a_plain_step(router_replay, monkeypatch):
    """From the rollout to the first update, of a critic's recipe, bit for bit."""
    found = []
    for kind in (None, router_replay):
        run = small_run(warm_start_steps=0)
        sizes = {"mini_batch": 8, "micro_batch": 4, "kl_coef": 0.1}
        recipe = small_recipe("ppo", old_logprobs="recompute", router_replay=kind, **sizes)
        setup = small_setup(recipe, run)
        state = fresh_state(setup, fresh_weights(setup))
        if kind == "R3":
            monkeypatch.setattr(stepping, "collect", recording(setup, state))
        state, done = one_step(setup, state)
        check_defined(done.metrics)
        found.append((jax.device_get(state), without_timings(done.metrics)))
    (plain, expected), (replayed, metrics) = found
    chex.assert_trees_all_equal(replayed.policy, plain.policy)
    chex.assert_trees_all_equal(replayed.critic, plain.critic)
    assert metrics.pop("moe/replay_agreement") == 1
    if router_replay == "R3":
        assert metrics.pop("sampling/routing_agreement") == 1
    assert metrics == expected


def recording(setup, state):
    """`collect` of a sampler that records what it chose, all but for the last token of a row."""
    drawn = stepping.collect

    def collect(*arguments):
        collected = drawn(*arguments)
        batch = collected.batch
        objective = setup.networks.policy.objective
        given = state.policy.weights, batch.tokens, batch.valid
        _, choices = logprobs_and_choices_of(objective, *given)
        last = batch.valid & ~jnp.pad(batch.valid, ((0, 0), (0, 1)))[:, 1:]
        choices = jnp.where(last[:, :, None, None], jnp.asarray(NONE, choices.dtype), choices)
        return replace(collected, batch=replace(batch, choices=choices))

    return collect


@pytest.mark.slow
def test_choices_that_were_never_the_policys_are_told(monkeypatch):
    """A sampler whose record is of other experts: the agreement is below one from the start, and
    the trainer's log-probabilities are no longer those that the sampler gave."""
    setup = small_setup(small_recipe(router_replay="R3"), small_run(warm_start_steps=0))
    state = fresh_state(setup, fresh_weights(setup))
    drawn = recording(setup, state)

    def collect(*arguments):
        collected = drawn(*arguments)
        wrong = jnp.asarray(others(np.asarray(collected.batch.choices)))
        return replace(collected, batch=replace(collected.batch, choices=wrong))

    monkeypatch.setattr(stepping, "collect", collect)
    _, done = one_step(setup, state)
    assert done.metrics["sampling/routing_agreement"] < 0.8
    assert done.metrics["moe/replay_agreement"] < 0.8
    assert done.metrics["sampling/sampling_logp_difference/max"] > 1e-3
    assert done.metrics["sampling/k3_kl"] > 0
