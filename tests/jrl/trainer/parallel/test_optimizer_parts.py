"""The optimizer works on parts: less memory, one sum of the gradients, the same steps."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from small_runs import (
    fresh_state,
    fresh_weights,
    small_batch,
    small_model,
    small_recipe,
    small_run,
    small_setup,
)

from jrl.runs.checkpoints import Checkpoints
from jrl.trainer.learner.update import update
from jrl.trainer.state import abstract, restore, save
from sharding import zero

FAST_COMPILE: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
ROWS = 16

LAYOUTS = ["dp8", "dp4 tp2 / ep4 etp1"]


@functools.cache
def setup_on(layout):
    """All widths divide by eight; the smallest weight has more elements than any metric."""
    setup = small_setup(
        small_recipe("grpo", prompts=8, mini_batch=ROWS, micro_batch=ROWS), small_run(layout=layout)
    )
    sizes = {"d_model": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 6, "num_experts": 8}
    return replace(setup, model=small_model(setup.tokenizer.vocab_size, **sizes))


@functools.cache
def compiled(layout):
    setup = setup_on(layout)
    weights = fresh_weights(setup)
    learner = setup.networks.policy.init(weights)
    given = setup.networks.policy.objective, setup.networks.policy.optimizer, 1
    return update.lower(*given, learner, small_batch(setup, ROWS)).compile(FAST_COMPILE), learner


def alone(collective):
    """Whether a device meets nobody else, as groups are written by older and newer XLA."""
    if re.search(r"replica_groups=(?:\{\{\d+\}|\[\d+,1\])", collective):
        return True
    by_axes = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", collective)
    if by_axes is None:
        return False
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", by_axes[1]))
    return all(sizes[name] == "1" for name in re.findall(r"\w+", by_axes[2]))


def results(text, collective):
    """The number of elements of each array that the compiled program gets from other devices."""
    found = re.findall(rf"= (.*?) {collective}(?:-start)?\((.*)", text)
    arrays = [
        shape
        for given, rest in found
        if not alone(rest)
        for shape in re.findall(r"\w+\[([\d,]*)\]", given)
    ]
    return [math.prod(int(n) for n in shape.split(",") if n) for shape in arrays]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_summed_once_into_parts(layout):
    program, learner = compiled(layout)
    text, mesh = program.as_text(), setup_on(layout).mesh
    leaves = jax.tree.leaves(learner.weights)
    held = [leaf.addressable_shards[0].data.size for leaf in leaves]
    # All-reduces are left to losses, metrics, norms and tokens.
    assert results(text, "all-reduce")
    assert not set(results(text, "all-reduce")) & set(held)
    # What a device holds of a weight, over as many as hold the same: 2 for an expert's.
    copies = [mesh.size(zero.replica_axes(leaf.sharding.spec, mesh)) for leaf in leaves]
    assert set(copies) == ({8} if layout == "dp8" else {8, 4, 2})
    scattered = Counter(results(text, "reduce-scatter"))
    parts = Counter(size // number for size, number in zip(held, copies, strict=True))
    assert parts <= scattered


def moments(learner):
    leaves = jax.tree.leaves(learner.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    return next(leaf for leaf in leaves if hasattr(leaf, "mu"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_holds_its_part_before_and_after_a_step(layout):
    program, learner = compiled(layout)
    like = jax.tree.map(lambda leaf: leaf.sharding, learner)
    whole = sum(leaf.size for leaf in jax.tree.leaves(learner.weights))
    first, _ = program(learner, small_batch(setup_on(layout), ROWS))
    for state in (moments(first).mu, moments(first).nu):
        # Every weight divides, experts and their copies included: a device holds an eighth.
        own = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state))
        assert own * 8 == whole
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), first, like)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_parts_are_saved_and_read_elsewhere(tmp_path):
    def state_on(layout):
        setup = setup_on(layout)
        return setup, fresh_state(setup, fresh_weights(setup))

    (setup, state), (other, _) = state_on("dp4 tp2 / ep4 etp1"), state_on("dp2")
    draw = np.random.default_rng(0)
    policy = state.policy
    noise = jax.tree.map(
        lambda x: jax.device_put(draw.normal(size=x.shape).astype(x.dtype), x.sharding),
        policy.opt_state,
    )
    state = replace(state, policy=replace(policy, opt_state=noise))
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, setup.networks, state)
    for reader in (setup, other):
        back, like = restore(checkpoints, reader.networks, 0), abstract(reader.networks)
        same = jax.tree.map(lambda x, y: x.sharding == y.sharding, back, like)
        assert all(jax.tree.leaves(same))
        chex.assert_trees_all_equal(back, state)
