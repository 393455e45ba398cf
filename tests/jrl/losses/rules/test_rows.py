"""Arguments with one entry per row: their shapes, and rows without tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import jitted
from every_call import OF_RESPONSES, arguments, call

import jrl

ROWS, TIME = 4, 3
# Two prompts with three responses each; the third response of the first has no token.
MASK = np.array([[1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0], [0, 1, 1], [1, 1, 1]])
GROUPS = np.array([3, 3, 3, 8, 8, 8])
REWARDS = np.array([5.0, 0.0, 0.0, 1.0, 0.25, -1.0])
PRESENT = np.array([0, 1, 3, 4, 5])


@pytest.mark.slow
@pytest.mark.parametrize(
    "estimator",
    [
        jrl.token_level_group_average,
        functools.partial(jrl.token_level_group_average, fallback=1.5),
        jrl.reinforce_plus_plus_baseline_advantages,
    ],
    ids=["token_level_group_average", "with fallback", "reinforce_plus_plus_baseline"],
)
def test_empty_rows_reach_no_other_row(estimator):
    estimator = jax.jit(estimator)
    expected = estimator(REWARDS[PRESENT], GROUPS[PRESENT], MASK[PRESENT])
    assert np.any(expected[:2])
    for value in (7.0, -100.0, np.nan, np.inf):
        result = estimator(np.where(np.arange(6) == 2, value, REWARDS), GROUPS, MASK)
        np.testing.assert_array_equal(result[2], 0)
        # Sums of float32 in another order.
        np.testing.assert_allclose(result[PRESENT], expected, rtol=1e-6, atol=1e-6)


def test_empty_rows_with_a_fallback_that_acts():
    # Without it the test above would not see what stands behind it.
    arrays = REWARDS, GROUPS, MASK
    plain, fallen = (jitted.token_level_group_average(*arrays, fallback=x) for x in (None, 1.5))
    assert np.any(plain[0] != fallen[0])


@pytest.mark.parametrize("value", [7.0, jnp.nan])
def test_opo_ignores_responses_of_length_zero(value):
    lengths = MASK.sum(-1)
    opo = jax.jit(jrl.opo_advantages)
    result = opo(np.where(np.arange(6) == 2, value, REWARDS), GROUPS, lengths)
    expected = opo(REWARDS[PRESENT], GROUPS[PRESENT], lengths[PRESENT])
    np.testing.assert_allclose(result[PRESENT], expected, rtol=1e-6, atol=1e-6)


PER_RESPONSE = [
    *((name, argument) for name in sorted(OF_RESPONSES) for argument in ("rewards", "groups")),
    ("opo_advantages", "lengths"),
    ("gdpo_advantages", "groups"),
    ("informative_groups", "scores"),
    ("informative_groups", "groups"),
    ("optimal_token_baseline", "groups"),
    ("diagnostics.group_degeneracy", "correct"),
]


@pytest.mark.parametrize(("name", "argument"), PER_RESPONSE)
def test_row_arguments_refuse_one_number_per_token(name, argument):
    inputs = arguments(name, ROWS, TIME)
    # All that are one per response, as of a caller who thinks in tokens.
    wide = np.ones((1, TIME))
    wrong = {a: np.asarray(x)[:, None] * wide for a, x in inputs.items() if x.shape == (ROWS,)}
    for changes in (wrong, {argument: wrong[argument]}):
        message = r"must be \[batch\], one number per response: "
        with pytest.raises(ValueError, match=message) as error:
            call(name, ROWS, TIME, **changes)
        assert f"has shape ({ROWS}, {TIME})" in str(error.value)
        assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{argument} has shape")


@pytest.mark.parametrize("name", sorted(OF_RESPONSES))
def test_rewards_refuse_a_scalar(name):
    with pytest.raises(ValueError, match=r"rewards has shape \(\).*give rewards\[None\]"):
        call(name, ROWS, TIME, rewards=jnp.float32(1))


@pytest.mark.parametrize(
    ("name", "argument", "of"),
    [
        ("positive_example_loss", "correct", "mask"),
        ("overlong_filter", "truncated", "mask"),
        ("remax_advantages", "greedy_rewards", "rewards"),
        ("token_level_group_average", "mask", "mask"),
        ("reinforce_plus_plus_baseline_advantages", "mask", "mask"),
    ],
)
def test_row_arguments_need_one_entry_per_row(name, argument, of):
    for shape in ((ROWS, TIME), (ROWS, 1), (1,), (), (TIME,)):
        if argument == "mask" and shape[:1] == (ROWS,):
            continue  # Those are masks.
        message = rf"must have one entry for each row of {of} \("
        with pytest.raises(ValueError, match=message) as error:
            call(name, ROWS, TIME, **{argument: jnp.ones(shape)})
        assert "\n" not in str(error.value)


def test_gdpo_rewards_are_columns():
    with pytest.raises(ValueError, match=r"rewards has shape \(4,\).*\[batch, component\]"):
        call("gdpo_advantages", ROWS, TIME, rewards=jnp.ones(ROWS))
    with pytest.raises(ValueError, match=r"groups has shape \(3,\).*each row of rewards \(4, 2\)"):
        call("gdpo_advantages", ROWS, TIME, groups=jnp.zeros(3, int))
