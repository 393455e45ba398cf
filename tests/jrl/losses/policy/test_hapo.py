"""HAPO: its signal, what follows from it, and its loss."""

import functools
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch
from compiled import jitted, with_slope
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from policy_cases import assert_a_cut_sums_to_the_whole
from tiers import full_but

import jrl

NAMES = ("logprobs", "old_logprobs", "advantages", "mask")

H = np.array([0.02, 0.05, 0.10, 0.30, 0.60, 0.90, 1.20, 2.00])
ONES = np.ones(8)


def test_redistributed_advantages_at_the_edges_of_the_zone():
    # A zone from 0.75 to 1.25, both exact; the logarithms are chosen so that exp meets them.
    ratio = np.exp(np.log(np.array([0.75, 1.25])))
    np.testing.assert_array_equal(ratio, [0.75, 1.25])
    two = np.ones(2)
    for signal in (0.5, -0.5):
        arrays = (np.log(ratio), 0 * two, two, two, signal * two)
        result = jitted.redistributed_advantages(*arrays, clip_low=0.5, clip_high=0.5)
        assert result.tolist() == [1, 1]


@pytest.mark.parametrize("clip_dual", full_but([None, 1.5, 10.0], 1.5))
def test_hapo_without_strength_is_ppo(clip_dual):
    b = batch(0)
    signal = jitted.entropy_signal(b["entropy"], b["mask"])

    @jax.jit
    def both(logprobs):
        arrays = (logprobs, *(b[name] for name in NAMES[1:]))
        bounds = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": clip_dual}
        off = {"clip_strength": 0.0, "redistribution": 0.0}
        hapo = jax.value_and_grad(jrl.hapo_loss, has_aux=True)(*arrays, signal, **bounds, **off)
        return hapo, jax.value_and_grad(jrl.ppo_loss, has_aux=True)(*arrays, **bounds)

    ((loss, metrics), slope), ((expected, ppo), ppo_slope) = both(b["logprobs"])
    assert metrics.pop("redistributed").sum == 0
    chex.assert_trees_all_equal((loss, metrics, slope), (expected, ppo, ppo_slope))


@pytest.mark.slow
def test_hapo_of_pieces_adds_up():
    def loss(b, statistics=None, **denominators):
        signal = jrl.entropy_signal(b["entropy"], b["mask"], statistics=statistics)
        return jrl.hapo_loss(*(b[name] for name in NAMES), signal, **denominators)

    def statistics(b):
        return {"statistics": jrl.entropy_statistics(b["entropy"], b["mask"])}

    assert_a_cut_sums_to_the_whole(loss, range(8), of_the_whole=statistics)


@pytest.mark.slow
def test_hapo_on_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mask = np.arange(6) < np.random.default_rng(0).integers(0, 7, (16, 1))
    mask[:2] = False
    with jax.enable_x64(True):
        every = batch(3, mask, jnp.float64)
        b = {name: every[name] for name in (*NAMES, "entropy")}
        statistics = jitted.entropy_statistics(b["entropy"], b["mask"])
        tokens = np.sum(b["mask"])

        def local(b, statistics, tokens):
            def loss(logprobs):
                signal = jrl.entropy_signal(b["entropy"], b["mask"], statistics=statistics)
                rest = (b[name] for name in NAMES[1:])
                return jrl.hapo_loss(logprobs, *rest, signal, num_tokens=tokens)

            (part, metrics), slope = jax.value_and_grad(loss, has_aux=True)(b["logprobs"])
            return jax.lax.psum((part, metrics), "data"), slope

        cut = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(P("data"), P(), P()),
                out_specs=(P(), P("data")),
            )
        )(b, statistics, tokens)
        signal = jitted.entropy_signal(b["entropy"], b["mask"])
        full = with_slope(jrl.hapo_loss)(*(b[n] for n in NAMES), signal)
        chex.assert_trees_all_close(cut, full, rtol=1e-11, atol=1e-16)


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.2, 0.25, 0.5, 0.8, 0.95, 1.0])
def test_entropy_pivot_is_the_nearest_order_statistic(quantile):
    # All in one shape, of which 1 to 40 are true. Python rounds a half to the even number too.
    entropy = np.random.default_rng(0).permutation(40) + 1.0
    counts = np.arange(1, 41)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def pivots_of(entropy, mask):
        return jrl.entropy_statistics(entropy, mask, quantile=quantile).pivot

    pivots = pivots_of(entropy, np.arange(40) < counts[:, None])
    share = Fraction(quantile).limit_denominator(100)
    expected = [np.sort(entropy[:count])[round(share * (int(count) - 1))] for count in counts]
    np.testing.assert_allclose(pivots, np.log(expected), rtol=1e-6)


def test_entropy_signal_spreads_nan():
    signal = jitted.entropy_signal(np.where(np.arange(8) == 3, np.nan, H), ONES)
    assert np.isnan(signal).all()
    zero = 0 * ONES
    result = jitted.redistributed_advantages(zero, zero, ONES, ONES, signal)
    assert np.isnan(result).all()


def test_entropy_signal_may_exceed_statistics_of_another_batch():
    statistics = jitted.entropy_statistics(H, ONES)
    signal = jitted.entropy_signal(np.array([1e-9, 50.0]), np.ones(2), statistics=statistics)
    assert signal[0] < -1 and signal[1] > 1
    temperature = jitted.adaptive_temperature(signal, base=2.0, strength=0.25)
    np.testing.assert_allclose(temperature, [1.5, 2.5])


def test_entropy_signal_has_no_gradient():
    b = batch(4)
    arrays = [b[name] for name in NAMES]

    def loss(entropy):
        signal = jrl.entropy_signal(entropy, b["mask"])
        return jrl.hapo_loss(*arrays, signal)[0] + jnp.sum(jrl.adaptive_temperature(signal))

    assert not np.any(jax.jit(jax.grad(loss))(b["entropy"]))

    def advantages(logprobs):
        return jnp.sum(jrl.redistributed_advantages(logprobs, *arrays[1:], b["entropy"]))

    assert not np.any(jax.jit(jax.grad(advantages))(b["logprobs"]))


def test_hapo_statistics_have_no_gradient():
    b = batch(4)
    arrays = [b[name] for name in NAMES]

    def of_statistics(statistics):
        signal = jrl.entropy_signal(b["entropy"], b["mask"], statistics=statistics)
        return jnp.sum(signal * b["values"], where=b["mask"])

    def of_entropy(entropy):
        statistics = jrl.entropy_statistics(entropy, b["mask"])
        return sum(jax.tree.leaves(statistics))

    def of_signal(signal):
        low, high = jrl.asymmetric_clip_bounds(signal)
        advantages = jrl.redistributed_advantages(*arrays, signal)
        return jnp.sum(low + 2 * high + 3 * advantages + 4 * jrl.adaptive_temperature(signal))

    statistics = jitted.entropy_statistics(b["entropy"], b["mask"])
    inputs = ((of_statistics, statistics), (of_entropy, b["entropy"]), (of_signal, b["entropy"]))
    for function, x in inputs:
        value, slopes = jax.jit(jax.value_and_grad(function))(x)
        assert np.isfinite(value) and value != 0
        assert not any(np.any(slope) for slope in jax.tree.leaves(slopes))


def test_standardized_entropy_with_scale_one():
    one, zero = np.ones(()), np.zeros(())
    statistics = jrl.EntropyStatistics(zero, one, one, -one)
    h = jitted.standardized_entropy(H, ONES, statistics=statistics)
    np.testing.assert_allclose(h, np.log(H), rtol=1e-6)
