"""Clip-Cov and KL-Cov: covariances, choices and losses."""

import functools
import itertools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import BATCH, MASK, batch
from compiled import compiled, jitted, with_slope
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from policy_cases import per_token

import jrl
from jrl.losses.policy.tokens import random_bits

NAMES = ("logprobs", "old_logprobs", "advantages", "mask")


@pytest.mark.parametrize(
    ("low", "high", "inside"), [(0.0, 1.5, True), (0.0, 1.0, False), (1.0, 1.5, False)]
)
def test_clip_cov_range_is_open_at_both_ends(low, high, inside):
    logprobs, advantages = np.array([-1.0, -3.0]), np.array([1.0, -1.0])
    assert jitted.covariances(logprobs, advantages, np.ones(2)).tolist() == [1, 1]
    arrays = (logprobs, logprobs, advantages, np.ones(2))
    surrogate = per_token(jrl.clip_cov_loss, *arrays, fraction=1, low=low, high=high)
    assert surrogate.tolist() == ([0, 0] if inside else [-1, 1])


@functools.partial(jax.jit, static_argnames=("fraction", "low"))
def _slope(seed, *arrays, fraction=2e-4, low=0.0):
    def loss(logprobs):
        # Bounds that never bind, so that a gradient of 0 is a choice.
        wide = {"clip_low": float("inf"), "clip_high": float("inf")}
        settings = {"key": jax.random.key(seed), "fraction": fraction, "low": low, "high": 9.0}
        return jnp.sum(per_token(jrl.clip_cov_loss, logprobs, *arrays[1:], **settings, **wide))

    return jax.grad(loss)(arrays[0])


def _chosen(arrays, seed, **settings):
    """Tokens in the range that have lost their gradient; an advantage of 0 has none anyway."""
    slope = _slope(seed, *arrays, **settings)
    return np.asarray((slope == 0) & (arrays[2] != 0) & arrays[3].astype(bool))


@pytest.mark.slow
def test_clip_cov_choice_depends_on_key_and_masked_tokens():
    b = batch(0)
    arrays = [b[name] for name in NAMES]
    choice = _chosen(arrays, 3, fraction=0.2)
    assert choice.sum() == int(0.2 * MASK.sum())
    np.testing.assert_array_equal(choice, _chosen(arrays, 3, fraction=0.2))
    others = [_chosen(arrays, seed, fraction=0.2) for seed in range(4, 9)]
    assert any((other != choice).any() for other in others)
    # Rows and columns of padding, NaN under the mask.
    padded = [jnp.pad(x, ((1, 2), (3, 1))) for x in arrays]
    hole = ~padded[3]
    padded = [np.where(hole, np.nan, x) for x in padded[:3]] + [padded[3]]
    again = _chosen(padded, 3, fraction=0.2)
    np.testing.assert_array_equal(again[1 : 1 + BATCH, 3:-1], choice)
    assert again.sum() == choice.sum()


@pytest.mark.slow
def test_kl_cov_counts_exactly():
    # 0.3 * 10 and 0.29 * 100 fall below 3 and 29 in floating point on some machines.
    draw = np.random.default_rng(0)
    for count, fraction, expected in ((10, 0.3, 3), (100, 0.29, 29), (100, 0.07, 7), (4, 0.1, 1)):
        x = np.asarray(draw.normal(size=count), np.float32)
        loss = jax.jit(functools.partial(jrl.kl_cov_loss, fraction=fraction))
        _, metrics = loss(x, x, x, np.ones(count))
        assert metrics["cov_frac"].sum == expected
    _, metrics = jax.jit(functools.partial(jrl.kl_cov_loss, fraction=0))(x, x, x, np.ones(4))
    assert metrics["cov_frac"].sum == 0


def test_covariances_have_no_gradient():
    b = batch(1)
    given = {name: b[name] for name in ("logprobs", "advantages")}

    def of_the_batch(given):
        return jnp.sum(b["values"] * jrl.covariances(**given, mask=b["mask"]))

    def of_statistics(statistics):
        result = jrl.covariances(**given, mask=b["mask"], statistics=statistics)
        return jnp.sum(b["values"] * result)

    statistics = jitted.covariance_statistics(**given, mask=b["mask"])
    for function, x in ((of_the_batch, given), (of_statistics, statistics)):
        slopes = jax.tree.leaves(jax.jit(jax.grad(function, allow_int=True))(x))
        assert not any(np.any(slope) for slope in slopes if slope.dtype == np.float32)


@pytest.mark.slow
def test_random_bits_are_indexed_by_masked_tokens():
    key, mask = jax.random.key(3), np.array([[0, 1, 0], [1, 0, 1]])
    bits = random_bits(key, jnp.asarray(mask, bool))
    expected = [jax.random.bits(jax.random.fold_in(key, rank)) for rank in range(3)]
    assert bits[mask == 1].tolist() == [int(x) for x in expected]


@pytest.mark.slow
def test_covariance_losses_on_policy_and_with_fraction_zero():
    b = batch(3)
    rest = (b["advantages"], b["mask"])

    def reinforce(logprobs):
        return jrl.aggregate(-b["advantages"] * logprobs, b["mask"])

    expected = jax.jit(jax.grad(reinforce))(b["logprobs"])
    on_policy = (b["logprobs"], b["logprobs"], *rest)
    slope, _ = compiled(jax.grad(jrl.kl_cov_loss, has_aux=True))(*on_policy, fraction=1)
    np.testing.assert_allclose(slope, expected, rtol=1e-6)
    arrays = (b["logprobs"], b["old_logprobs"], *rest)
    wide = {"clip_low": float("inf"), "clip_high": float("inf")}
    ppo = jitted.ppo_loss(*arrays, **wide)[0]
    np.testing.assert_allclose(jitted.kl_cov_loss(*arrays, fraction=0)[0], ppo, rtol=1e-6)
    ppo = jitted.ppo_loss(*arrays, clip_low=1, clip_high=1)[0]
    np.testing.assert_allclose(jitted.clip_cov_loss(*arrays, fraction=0)[0], ppo, rtol=1e-6)


@pytest.mark.slow
def test_covariance_losses_of_pieces_add_up():
    b = batch(4)
    statistics = jitted.covariance_statistics(b["logprobs"], b["advantages"], b["mask"])
    whole_covariances = jitted.covariances(b["logprobs"], b["advantages"], b["mask"])
    chosen = whole_covariances > np.sort(np.asarray(whole_covariances).ravel())[-4]

    def step(piece, function, **settings):
        @jax.jit
        def run(*arrays, chosen):
            loss = functools.partial(function, chosen=chosen, **settings)
            return jax.value_and_grad(loss, has_aux=True)(*arrays)

        return jax.device_get(run(*(b[name][piece] for name in NAMES), chosen=chosen[piece]))

    for function in (jrl.clip_cov_loss, jrl.kl_cov_loss):
        full = step(slice(None), function)
        assert full[0][1]["cov_frac"].sum == 3
        pieces = [slice(i, j) for i, j in itertools.pairwise([0, 2, 3, BATCH])]
        parts = [step(piece, function, num_tokens=int(MASK.sum())) for piece in pieces]
        summed = functools.reduce(
            lambda x, y: jax.tree.map(operator.add, x, y), [part[0] for part in parts]
        )
        chex.assert_trees_all_close(summed, full[0], rtol=5e-6, atol=2e-6)
        joined = np.concatenate([part[1] for part in parts])
        np.testing.assert_allclose(joined, full[1], rtol=5e-6, atol=2e-6)
    parts = [
        jitted.covariance_statistics(*(b[n][piece] for n in ("logprobs", "advantages", "mask")))
        for piece in pieces
    ]
    summed = functools.reduce(operator.add, parts)
    np.testing.assert_allclose(summed.advantages.value(), statistics.advantages.value(), rtol=1e-6)
    piece = jitted.covariances(
        b["logprobs"][1:2], b["advantages"][1:2], b["mask"][1:2], statistics=summed
    )
    np.testing.assert_allclose(piece, whole_covariances[1:2], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_covariances_on_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mask = np.arange(6) < np.random.default_rng(0).integers(0, 7, (16, 1))
    mask[:2] = False
    with jax.enable_x64(True):
        b = batch(5, mask, jnp.float64)
        arrays = tuple(b[name] for name in NAMES)

        def local(logprobs, old, advantages, mask):
            own = jrl.covariance_statistics(logprobs, advantages, mask)
            statistics = jax.lax.psum(own, "data")
            covariances = jrl.covariances(logprobs, advantages, mask, statistics=statistics)
            chosen = covariances > 0.5
            tokens = jax.lax.psum(jnp.sum(mask), "data")
            settings = {"chosen": chosen, "num_tokens": tokens}
            (part, _), slope = jax.value_and_grad(jrl.kl_cov_loss, has_aux=True)(
                logprobs, old, advantages, mask, **settings
            )
            # The devices choose for themselves, too, by the tokens that they have.
            other = per_token(
                jrl.clip_cov_loss,
                logprobs,
                old,
                advantages,
                mask,
                key=jax.random.key(0),
                fraction=0.5,
            )
            return covariances, jax.lax.psum(part, "data"), slope, other

        rows = P("data")
        cut = jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 4, out_specs=(rows, P(), rows, rows))
        )(*arrays)
        covariances = jitted.covariances(arrays[0], arrays[2], arrays[3])
        (loss, _), slope = with_slope(jrl.kl_cov_loss)(*arrays, chosen=covariances > 0.5)
        chex.assert_trees_all_close(cut[:3], (covariances, loss, slope), rtol=1e-11, atol=1e-15)
