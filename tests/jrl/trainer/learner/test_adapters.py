"""Runs whose adapters learn: what they hold, sample with, keep and go on from."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from small_runs import (
    begin_or_go_on,
    fresh_weights,
    metrics_of,
    small_batch,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)

from jrl.runs.checkpoints import Checkpoints
from jrl.runs.folder import RunFolder
from jrl.trainer.evaluation.saved_policy import load_model
from jrl.trainer.learner.learner import split
from jrl.trainer.learner.update import update
from jrl.trainer.setup.network import network_of
from jrl.trainer.state import abstract, frozen_weights, init_adapters, init_state
from moe import weights as moe_weights
from moe.adapters import has_adapters, merge_adapters, without_adapters
from moe.config import Model


def lora_setup(recipe="ppo", changes=None, **settings):
    run = small_run(lora_rank=2, **settings)
    setup = small_setup(small_recipe(recipe, **(changes or {})), run)
    return replace(setup, model=network_of(setup.model, run))


def begun(setup):
    plain = replace(setup, model=setup.model.without_adapters())
    adapters = init_adapters(Model(setup.model, setup.mesh), setup.randomness.key("adapters"))
    key = setup.randomness.key("critic")
    return init_state(setup.networks, fresh_weights(plain), key, adapters=adapters)


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def trained_bytes(setup):
    return 4 * moe_weights.num_trained_parameters(setup.model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_have_moments_and_nobody_has_a_second_copy_of_the_rest(dtype):
    setup = lora_setup(changes={"kl_coef": 0.1}, dtype=dtype)
    state = begun(setup)
    policy, critic = state.policy, state.critic
    assert policy.masters is None and "reference" not in state.networks
    counters = 4 * 3  # of Adam's steps, and of the schedule
    learned = trained_bytes(setup)
    assert bytes_of(policy.opt_state) - 2 * learned <= counters
    of_critic = 4 * moe_weights.num_trained_parameters(setup.model.as_critic())
    assert bytes_of(critic.opt_state) - 2 * of_critic <= counters
    assert of_critic == learned + 4 * setup.model.d_model
    # The reference and the critic's trunk are the very arrays of the policy.
    reference = frozen_weights(setup.networks, state, "reference")
    assert setup.networks.frozen["reference"].config == setup.model.without_adapters()
    own = without_adapters(policy.weights)
    assert all(
        a is b for a, b in zip(jax.tree.leaves(reference), jax.tree.leaves(own), strict=True)
    )
    trunk = replace(without_adapters(critic.weights), head=own.head)
    assert all(a is b for a, b in zip(jax.tree.leaves(trunk), jax.tree.leaves(own), strict=True))
    matrices = own.layers.experts.gate_up, own.layers.attention.query
    assert {leaf.dtype for leaf in matrices} == {np.dtype(jax.numpy.dtype(dtype))}
    like = jax.tree.leaves_with_path(abstract(setup.networks))
    for (name, real), (other, asked) in zip(jax.tree.leaves_with_path(state), like, strict=True):
        assert name == other and real.shape == asked.shape and real.dtype == asked.dtype
        assert real.sharding.is_equivalent_to(asked.sharding, real.ndim), name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of an actor and a critic with a KL term, and its path."""
    setup = lora_setup(changes={"kl_coef": 0.1}, steps=2, checkpoint_every=1)
    path = tmp_path_factory.mktemp("adapters") / "run"
    begin_or_go_on(setup, path)
    return setup, path


@pytest.mark.slow
def test_a_run_learns_adapters_alone_and_goes_on_bit_for_bit(run, tmp_path):
    setup, path = run
    checkpoints = Checkpoints(path / "checkpoints", 3)
    assert checkpoints.steps() == [1, 2]
    names = set(checkpoints._find(2)[1]["tree"])
    assert not any(name.endswith(("/base", "embedding", "router")) for name in names)
    assert {"policy/weights/layers/experts/gate_up/a", "critic/weights/head"} <= names
    # Another folder stops after a step and goes on; its checkpoints and lines are the same.
    other = tmp_path / "run"
    begin_or_go_on(replace(setup, run=replace(setup.run, steps=1)), other)
    begin_or_go_on(setup, other)
    assert metrics_of(other)[:1] == metrics_of(path)[:1]
    found, step = load_model(RunFolder.read(other), Model(setup.model, setup.mesh))
    expected, _ = load_model(RunFolder.read(path), Model(setup.model, setup.mesh))
    assert step == 2
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    b = expected.layers.attention.query.b
    assert np.any(np.asarray(b) != 0)
    # What another run begins from has them merged.
    merged, _ = load_model(RunFolder.read(path), Model(setup.model, setup.mesh), masters=True)
    assert not has_adapters(merged)
    twin = merge_adapters(expected, moe_weights.table(setup.model))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), merged, twin)


@pytest.mark.slow
def test_the_sampler_has_the_probabilities_of_the_trainer(run):
    _, path = run
    lines = metrics_of(path)
    # Merged and beside each other: sums of a few dozen products, in another order.
    assert all(float(line["sampling/k3_kl"]) < 1e-6 for line in lines if "sampling/k3_kl" in line)
    assert float(lines[1]["actor/kl_loss"]) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, None])
def test_no_product_of_an_update_is_the_gradient_of_a_frozen_matrix(rank):
    run = small_run(lora_rank=rank)
    setup = small_setup(small_recipe("grpo"), run)
    # No two axes have one size, and none is the number of tokens of the batch, 32.
    sizes = {"d_model": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "d_ff": 44}
    model = small_model(98, num_layers=2, num_experts=0, d_expert=0, **sizes)
    model = replace(model, execution=replace(model.execution, vocab_chunk=36, scan_layers=True))
    setup = replace(setup, model=network_of(model, run))
    policy, frozen = setup.networks.policy, None
    if rank is None:
        learner = policy.init(fresh_weights(setup))
    else:
        learner = begun(setup).policy
        trained, frozen = split(learner.weights, setup.model)
        learner = replace(learner, weights=trained)
    rows = policy.objective, policy.optimizer, 1, learner, small_batch(setup), None, None, frozen
    program = update.lower(*rows)
    products = re.findall(r"f32\[([\d,]+)\]\S* dot\(", program.compile().as_text())
    shapes = {tuple(map(int, shape.split(","))) for shape in products}
    # Of the feed-forward layer and of the chunk of the tied embedding's columns.
    gradients = {(20, 44), (44, 20), (20, 88), (88, 20), (20, 36), (36, 20)}
    assert shapes, "the program's products have another name"
    assert bool(shapes & gradients) == (rank is None)
