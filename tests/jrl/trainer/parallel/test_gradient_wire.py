"""Gradients sent in bfloat16: updates differ by what one rounding of each device's sum makes."""

import functools
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from small_runs import small_batch, small_model, small_recipe, small_run, small_setup
from three_updates import FAST_COMPILE, random_weights, three_updates

from jrl.recipes.base.optimizer import Optimizer
from jrl.trainer.learner import update as of_update
from moe import placement
from moe.config import Model
from moe.execution import Execution
from sharding import zero

ROWS = 8


@functools.cache
def setup_on(layout, wire="bfloat16", fsdp=False):
    run = small_run(layout=layout, gradient_wire=wire)
    setup = small_setup(small_recipe(), run)
    execution = Execution(remat="full" if fsdp else "none", fsdp=fsdp)
    vocab = setup.tokenizer.vocab_size
    return replace(setup, model=small_model(vocab, num_layers=2, execution=execution))


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def sent(setup, num_micro):
    """Shapes of what is sent in bfloat16, and the number of reduce-scatters."""
    network = setup.networks.policy
    learner = network.init(random_weights(setup, setup.model))
    given = network.objective, network.optimizer, num_micro, learner, small_batch(setup, ROWS)
    program = list(equations(of_update.update.trace(*given).jaxpr.jaxpr))
    exchanged = [e.invars[0].aval for e in program if e.primitive.name == "all_to_all"]
    names = [e.primitive.name for e in program]
    narrow = [x for x in exchanged if x.dtype == "bfloat16"]
    return sum(x.size for x in narrow), len(narrow), names.count("reduce_scatter")


@pytest.mark.slow
def test_each_gradient_is_sent_once_in_bfloat16():
    """Of two micro-batches, which are summed in float32 on each device."""
    setup = setup_on("dp4")
    cuts = jax.tree.leaves(placement.shard_dims(Model(setup.model, setup.mesh)))
    leaves = jax.tree.leaves(random_weights(setup, setup.model))
    elements = sum(x.size for x, cut in zip(leaves, cuts, strict=True) if cut.atoms)
    number = sum(bool(cut.atoms) for cut in cuts)
    assert number >= 8 and sent(setup, 2) == (elements, number, 0)
    assert sent(setup_on("dp4", "float32"), 2) == (0, 0, number)


@pytest.mark.slow
def test_gradients_of_shards_are_sent_in_bfloat16_for_each_micro_batch():
    """Inside the pass of one, as layers are, two programs; the rest once."""
    setup = setup_on("dp4", fsdp=True)
    cuts = placement.shard_dims(Model(setup.model, setup.mesh))
    of_a_layer, of_all = (
        sum(bool(cut.atoms) for cut in jax.tree.leaves(some)) for some in (cuts.layers, cuts)
    )
    _, number, scatters = sent(setup, 2)
    assert of_a_layer >= 8 and scatters == 0
    assert number == of_all + of_a_layer


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"gradient_wire='float16' .* use float32 or bfloat16\."):
        Optimizer(0.1, gradient_wire="float16")


LAYOUTS = ["dp2 / ep2", "dp2 cp2 tp2 / ep4", "pp2 dp2"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_an_update_are_within_the_bound(layout, monkeypatch):
    """Compared with the same pass sent in float32, and with the sum of what is sent in bfloat16,
    each as if it were positive."""
    setup = setup_on(layout)

    def in_both(reduction, gradient):
        cut, plain, sizes = (
            reduction.sharded_dim,
            replace(reduction.sharded_dim, compressed=()),
            gradient,
        )
        for stage in cut.stages:
            if stage == cut.compressed:
                sizes = jnp.abs(sizes)
            dim = gradient.ndim + cut.dim
            sizes = jax.lax.psum_scatter(sizes, stage, scatter_dimension=dim, tiled=True)
        # If nothing is compressed there is nothing to allow for.
        sizes = sizes if cut.compressed else jnp.zeros_like(sizes)
        given = reduction.mesh, reduction.spec
        found, expected = (zero.reduce_scatter(*given, of, gradient) for of in (cut, plain))
        return found, expected, zero.reduce_scatter(*given, plain, sizes, is_sharded=True)

    monkeypatch.setattr(zero.Reduction, "__call__", in_both)
    network = setup.networks.policy
    weights, batch = random_weights(setup, setup.model), small_batch(setup, ROWS)
    # No weights that stay fixed, and all micro-batches run.
    fixed = passes = None
    given = weights, fixed, batch, of_update.count(batch), passes
    program = jax.jit(
        partial(of_update._gradients, network.objective, "bfloat16", 1),
        compiler_options=FAST_COMPILE,
    )
    _, gradients, _ = program(*given)
    triples = jax.tree.leaves(gradients, is_leaf=lambda x: isinstance(x, tuple))
    assert len(triples) == len(jax.tree.leaves(weights))
    errors = []
    for found, expected, sizes in jax.device_get(triples):
        error = np.abs(found - expected)
        # The rounding of the float32 sums is far within it.
        assert np.all(error <= 2.0**-8 * sizes)
        errors.append(np.max(error))
    assert np.sum(np.array(errors) > 0) >= 8


@functools.cache
def updates_of(layout, wire, fsdp):
    return three_updates(setup_on(layout, wire, fsdp), ROWS, 1)


@pytest.mark.slow
def test_three_updates_go_the_same_way():
    found, expected = (updates_of("dp4", wire, fsdp=True) for wire in ("bfloat16", "float32"))
    # The first forward pass comes before anything is sent.
    assert found.history[0].loss == expected.history[0].loss
    changed = jax.tree.map(
        lambda a, b: float(np.max(np.abs(a - b))), found.gradient, expected.gradient
    )
    assert sum(error > 0 for error in jax.tree.leaves(changed)) >= 8
    for metrics, same in zip(found.history, expected.history, strict=True):
        # 2^-8 for terms of one sign, and little more if they do not cancel out.
        np.testing.assert_allclose(metrics.grad_norm, same.grad_norm, rtol=2.0**-7)
        assert metrics.finite
    again = three_updates(setup_on("dp4", "bfloat16", fsdp=True), ROWS, 1)
    chex.assert_trees_all_equal(again, found)
