"""HAPO: its signal, what follows from it, and its loss."""

import functools
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from batches import MASK, batch, numpy_batch
from compiled import jitted, with_slope
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from policy_cases import assert_a_cut_sums_to_the_whole
from tiers import full_but

import jrl

NAMES = ("logprobs", "old_logprobs", "advantages", "mask")

H = np.array([0.02, 0.05, 0.10, 0.30, 0.60, 0.90, 1.20, 2.00])
ONES = np.ones(8)
SIGNAL = [-1, -0.776206, -0.606912, -0.338588, -0.169294, -0.070263, 0, 1]
RELEASED = [1, 0.776206, 0.606912, 0.338588, 0.169294, 0.070263, 0, 1]


def test_vector_hapo_1_signal():
    statistics = jitted.entropy_statistics(H, ONES)
    np.testing.assert_allclose(statistics.pivot, 0.182322, atol=1e-6)
    np.testing.assert_allclose(statistics.scale, 2.114959, atol=1e-6)
    h = [-1.935898, -1.502655, -1.17492, -0.655471, -0.327736, -0.136023, 0, 0.24153]
    np.testing.assert_allclose(jitted.standardized_entropy(H, ONES), h, atol=1e-6)
    np.testing.assert_allclose([statistics.h_max, statistics.h_min], [h[-1], h[0]], atol=1e-6)
    np.testing.assert_allclose(jitted.entropy_signal(H, ONES), SIGNAL, atol=1e-6)
    np.testing.assert_allclose(jitted.entropy_signal(H, ONES, sign="release"), RELEASED, atol=1e-6)


def test_vector_hapo_1_temperature():
    code = jitted.adaptive_temperature(jitted.entropy_signal(H, ONES))
    expected = [0.95, 0.96119, 0.969654, 0.983071, 0.991535, 0.996487, 1, 1.05]
    np.testing.assert_allclose(code, expected, atol=1e-6)
    h = jitted.standardized_entropy(H, ONES)
    paper = jitted.adaptive_temperature(h, strength=0.1, max_signal=None)
    expected = [0.80641, 0.849734, 0.882508, 0.934453, 0.967226, 0.986398, 1, 1.024153]
    np.testing.assert_allclose(paper, expected, atol=1e-6)


def test_vector_hapo_1_bounds():
    low, high = jitted.asymmetric_clip_bounds(jitted.entropy_signal(H, ONES))
    expected = [0.4, 0.355241, 0.321382, 0.267718, 0.233859, 0.214053, 0.2, 0.2]
    np.testing.assert_allclose(low, expected, atol=1e-6)
    np.testing.assert_allclose(high, [0.28] * 7 + [0.56], atol=1e-6)
    low, high = jitted.asymmetric_clip_bounds(jitted.entropy_signal(H, ONES, sign="release"))
    np.testing.assert_allclose(low, [0.2] * 8, atol=1e-6)
    expected = [0.56, 0.497338, 0.449935, 0.374805, 0.327402, 0.299674, 0.28, 0.56]
    np.testing.assert_allclose(high, expected, atol=1e-6)


def test_vector_hapo_2():
    ratio = np.array([1, 1.2, 0.95, 0.7, 1, 1.05, 1, 1.3])
    signal = jitted.entropy_signal(H, ONES)
    arrays = (np.log(ratio), 0 * ONES, ONES, ONES, signal)
    expected = [0, 1, 0.393088, 1, 0.830706, 0.929737, 1, 2]
    np.testing.assert_allclose(jitted.redistributed_advantages(*arrays), expected, atol=1e-6)
    low, high = jitted.asymmetric_clip_bounds(signal)
    adapted = jitted.redistributed_advantages(*arrays, clip_low=low, clip_high=high)
    np.testing.assert_allclose(adapted, expected, atol=1e-6)


def test_the_edges_of_the_zone_change_nothing():
    # A zone from 0.75 to 1.25, both exact; the logarithms are chosen so that exp meets them.
    ratio = np.exp(np.log(np.array([0.75, 1.25])))
    np.testing.assert_array_equal(ratio, [0.75, 1.25])
    two = np.ones(2)
    for signal in (0.5, -0.5):
        arrays = (np.log(ratio), 0 * two, two, two, signal * two)
        result = jitted.redistributed_advantages(*arrays, clip_low=0.5, clip_high=0.5)
        assert result.tolist() == [1, 1]


@pytest.mark.parametrize("clip_dual", full_but([None, 1.5, 10.0], 1.5))
def test_without_strength_it_is_ppo_exactly(clip_dual):
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


@pytest.mark.parametrize("clip_dual", [None, 1.5])
def test_oracle(clip_dual):
    b = numpy_batch(1)
    signal = oracles.entropy_signal(b["entropy"], MASK)
    arrays = [b[name] for name in NAMES] + [signal]
    losses, slopes, acts = oracles.hapo(*arrays, clip_dual=clip_dual)
    with jax.enable_x64(True):
        own = jitted.entropy_signal(b["entropy"], MASK)
        np.testing.assert_allclose(own, signal, rtol=1e-11, atol=1e-15)
        (loss, metrics), slope = with_slope(jrl.hapo_loss)(
            *(np.asarray(x) for x in arrays), clip_dual=clip_dual
        )
        tokens = MASK.sum()
        np.testing.assert_allclose(loss, losses.sum() / tokens, rtol=1e-11)
        np.testing.assert_allclose(slope, slopes / tokens, rtol=1e-11, atol=1e-15)
        assert (acts == "clip").any() and (acts == "").any()
        assert float(metrics["pg_clipfrac"].sum) == (acts == "clip").sum()
        assert float(metrics["pg_clipfrac_lower"].sum) == (acts == "dual").sum()


@pytest.mark.slow
def test_gradients_by_finite_differences():
    with jax.enable_x64(True):
        b = batch(2, dtype=jnp.float64)
        signal = jitted.entropy_signal(b["entropy"], b["mask"])

        def loss(logprobs):
            arrays = (logprobs, *(b[name] for name in NAMES[1:]), signal)
            return jrl.hapo_loss(*arrays, clip_dual=1.5)[0]

        check_grads(jax.jit(loss), (b["logprobs"],), 1)


@pytest.mark.slow
def test_with_the_statistics_of_the_whole_a_cut_sums_to_it():
    def loss(b, statistics=None, **denominators):
        signal = jrl.entropy_signal(b["entropy"], b["mask"], statistics=statistics)
        return jrl.hapo_loss(*(b[name] for name in NAMES), signal, **denominators)

    def statistics(b):
        return {"statistics": jrl.entropy_statistics(b["entropy"], b["mask"])}

    assert_a_cut_sums_to_the_whole(loss, range(8), of_the_whole=statistics)


@pytest.mark.slow
def test_eight_devices_equal_one():
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
        whole = with_slope(jrl.hapo_loss)(*(b[n] for n in NAMES), signal)
        chex.assert_trees_all_close(cut, whole, rtol=1e-11, atol=1e-16)


@pytest.mark.slow
@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.2, 0.25, 0.5, 0.8, 0.95, 1.0])
def test_the_pivot_is_the_nearest_order_statistic(quantile):
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


def test_an_entropy_that_is_not_a_number_reaches_every_token():
    signal = jitted.entropy_signal(np.where(np.arange(8) == 3, np.nan, H), ONES)
    assert np.isnan(signal).all()
    zero = 0 * ONES
    result = jitted.redistributed_advantages(zero, zero, ONES, ONES, signal)
    assert np.isnan(result).all()


def test_statistics_of_another_batch_may_be_exceeded_and_the_temperature_is_not():
    statistics = jitted.entropy_statistics(H, ONES)
    signal = jitted.entropy_signal(np.array([1e-9, 50.0]), np.ones(2), statistics=statistics)
    assert signal[0] < -1 and signal[1] > 1
    temperature = jitted.adaptive_temperature(signal, base=2.0, strength=0.25)
    np.testing.assert_allclose(temperature, [1.5, 2.5])


def test_no_gradient_reaches_the_signal():
    b = batch(4)
    arrays = [b[name] for name in NAMES]

    def loss(entropy):
        signal = jrl.entropy_signal(entropy, b["mask"])
        return jrl.hapo_loss(*arrays, signal)[0] + jnp.sum(jrl.adaptive_temperature(signal))

    assert not np.any(jax.jit(jax.grad(loss))(b["entropy"]))

    def advantages(logprobs):
        return jnp.sum(jrl.redistributed_advantages(logprobs, *arrays[1:], b["entropy"]))

    assert not np.any(jax.jit(jax.grad(advantages))(b["logprobs"]))


def test_no_gradient_reaches_what_is_given_of_the_batch():
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
    given = ((of_statistics, statistics), (of_entropy, b["entropy"]), (of_signal, b["entropy"]))
    for function, x in given:
        value, slopes = jax.jit(jax.value_and_grad(function))(x)
        assert np.isfinite(value) and value != 0
        assert not any(np.any(slope) for slope in jax.tree.leaves(slopes))


def test_a_scale_of_1_is_a_scale():
    one, zero = np.ones(()), np.zeros(())
    statistics = jrl.EntropyStatistics(zero, one, one, -one)
    h = jitted.standardized_entropy(H, ONES, statistics=statistics)
    np.testing.assert_allclose(h, np.log(H), rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: jrl.entropy_statistics(x, x, quantile=1.5), "quantile=1.5 must be from 0 to 1"),
        (lambda x: jrl.adaptive_temperature(x, base=0), "base=0 is a temperature"),
        (lambda x: jrl.adaptive_temperature(x, strength=-1), "strength=-1 cannot be negative"),
        (lambda x: jrl.adaptive_temperature(x, strength=1), "reaches a temperature of 0"),
        (lambda x: jrl.asymmetric_clip_bounds(x, clip_low=-1), "clip_low=-1 is a distance"),
        (lambda x: jrl.asymmetric_clip_bounds(x, strength=-1), "strength=-1 cannot be negative"),
        (lambda x: jrl.hapo_loss(x, x, x, x, x, redistribution=2), "redistribution=2 must be"),
        (lambda x: jrl.hapo_loss(x, x, x, x, x, clip_strength=-1), "clip_strength=-1 cannot be"),
        (lambda x: jrl.hapo_loss(x, x, x, x, x, clip_dual=1), "clip_dual=1 must be above 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, ONES)


@pytest.mark.parametrize("signal", [1.0, -0.5])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_ratios_of_zero_and_infinity_are_finite(advantage, signal):
    logprobs = np.array([[-np.inf, -1.0, -500.0, -0.5, -1.0]])
    old = np.array([[-1.0, -np.inf, -1.0, -500.0, -1.0]])
    ones = np.ones_like(old)
    (loss, metrics), slope = with_slope(jrl.hapo_loss)(
        logprobs, old, advantage * ones, ones, signal * ones
    )
    chex.assert_tree_all_finite((loss, slope, [x.value() for x in metrics.values()]))
    assert not np.any(slope[:, :4])
