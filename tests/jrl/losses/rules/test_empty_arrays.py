"""Arrays of size 0: no row, or rows that have no column."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import jitted
from every_call import arguments, call, functions, values
from policy_cases import per_token
from tiers import full_but

import jrl

# What is not about tokens or rows: its result does not vanish with them.
OF_NUMBERS = {"adaptive_kl_coefficient", "adaptive_entropy_coefficient"}
# What reads lengths or outcomes of rows, which may be there with no column.
OF_LENGTHS = {
    "effective_length",
    "pass_at_k",
    "diagnostics.guard_rate",
    "diagnostics.group_degeneracy",
}


# By token, by row, of a group, a number, a loss of tokens and one of a batch.
QUICK = ("gae", "effective_length", "grpo_advantages", "masked_mean", "ppo_loss", "clip_cov_loss")


@pytest.mark.parametrize("name", full_but(functions(), *QUICK))
def test_empty_arrays_give_empty_or_zero_results(name):
    sizes = ((0, 3), (2, 0))
    result = jax.jit(lambda: [values(call(name, *size)) for size in sizes])()
    chex.assert_tree_all_finite(result)
    for (rows, _), numbers in zip(sizes, result, strict=True):
        for number in numbers:
            if name not in OF_NUMBERS and not (rows and name in OF_LENGTHS):
                assert not np.any(number)


@pytest.mark.parametrize("name", [name for name in functions() if name.endswith("_loss")])
def test_empty_arrays_give_empty_gradients(name):
    arrays = arguments(name, 0, 3)
    carrier = "values" if name == "value_loss" else "logprobs"
    slope = jax.jit(jax.grad(lambda x: call(name, 0, 3, **{carrier: x})[0]))(arrays[carrier])
    assert slope.shape == (0, 3)


@pytest.mark.parametrize(
    "estimate",
    [
        lambda x: jrl.grpo_advantages(x[:, 0], jnp.zeros(0, int), scale="batch"),
        lambda x: jrl.gae(x, x, x, implementation="blocked")[0],
        lambda x: jrl.divergence_rejection_mask(x, x, x, over="max", bound=1.0),
        lambda x: jrl.mismatch_weights(x, x, x, level="geometric"),
        lambda x: per_token(jrl.kl_cov_loss, x, x, x, x, fraction=1),
        lambda x: per_token(jrl.clip_cov_loss, x, x, x, x, key=jax.random.key(0)),
        lambda x: jrl.pass_at_k_exact_advantages(x[:, 0], jnp.zeros(0, int), k=2),
    ],
)
def test_empty_arrays_with_other_settings(estimate):
    assert jax.jit(estimate)(jnp.ones((0, 3))).size == 0


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_aggregate_of_empty_arrays_is_zero(mode):
    for shape in ((0, 3), (2, 0)):
        nothing = np.ones(shape, np.float32)
        assert jitted.aggregate(nothing, nothing, mode=mode, max_length=4) == 0
