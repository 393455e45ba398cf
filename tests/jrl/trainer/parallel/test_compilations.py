"""A step compiles once: what it returns is laid out as what it was given."""

from dataclasses import replace
from functools import partial

import jax
import pytest
from small_runs import (
    small_batch,
    small_model,
    small_run,
    small_setup,
)

from jrl.rollout.collection.collect import collect
from jrl.trainer.learner.update import update
from moe import placement
from moe import weights as moe_weights
from moe.config import Model


def setup_on(layout):
    setup = small_setup(run=small_run(layout=layout))
    # Experts as wide as in no other test, so that nothing has been compiled for them.
    sizes = {"num_layers": setup.mesh.layout.pp, "d_expert": 26}
    return replace(setup, model=small_model(setup.tokenizer.vocab_size, **sizes))


def initial(setup):
    weights = moe_weights.initialise(setup.model, jax.random.key(0))
    return jax.device_put(weights, placement.shardings(Model(setup.model, setup.mesh)))


def compiled(name, caplog, step, *arguments):
    """What a step returns, and how often the function of this name was compiled for it."""
    caplog.clear()
    with jax.log_compiles():
        out = jax.block_until_ready(step(*arguments))
    messages = [record.getMessage() for record in caplog.records]
    return out, sum(message.startswith(f"Compiling jit({name})") for message in messages)


@pytest.mark.slow
def test_an_update_through_a_pipeline_compiles_once(caplog):
    setup = setup_on("pp2 tp2 dp2 / ep2 etp2")
    learner = setup.networks.policy.init(initial(setup))
    counts = []
    for _ in range(3):
        (learner, metrics), count = compiled(
            "update",
            caplog,
            update,
            setup.networks.policy.objective,
            setup.networks.policy.optimizer,
            2,
            learner,
            small_batch(setup, 8),
        )
        assert metrics.finite
        counts.append(count)
    assert counts == [1, 0, 0]
    assert int(learner.updates) == 3


@pytest.mark.slow
def test_generation_and_updates_compile_once(caplog):
    setup = setup_on("tp2 dp2 / ep4")
    learner = setup.networks.policy.init(initial(setup))
    sampler = setup.sampler()
    counts, updates = [], []
    for step in range(3):
        sampler.engine.load(learner.weights, step)
        collected = partial(collect, sampler, setup.recipe, setup.mesh, 4 * step)
        _, count = compiled("advance", caplog, collected)
        sampler.engine.release()
        counts.append(count)
        (learner, _), count = compiled(
            "update",
            caplog,
            update,
            setup.networks.policy.objective,
            setup.networks.policy.optimizer,
            2,
            learner,
            small_batch(setup, 8),
        )
        updates.append(count)
    assert counts == updates == [1, 0, 0]
