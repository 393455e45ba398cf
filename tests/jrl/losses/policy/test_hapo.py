"""HAPO: its signal, what follows from it, and its loss."""

import functools
import itertools
import operator
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from batches import BATCH, MASK, batch, numpy_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jrl

few = settings(max_examples=8, deadline=None, derandomize=True, database=None)
NAMES = ("logprobs", "old_logprobs", "advantages", "mask")

H = jnp.array([0.02, 0.05, 0.10, 0.30, 0.60, 0.90, 1.20, 2.00])
ONES = jnp.ones(8)
SIGNAL = [-1, -0.776206, -0.606912, -0.338588, -0.169294, -0.070263, 0, 1]
RELEASED = [1, 0.776206, 0.606912, 0.338588, 0.169294, 0.070263, 0, 1]


def test_vector_hapo_1_signal():
    statistics = jrl.entropy_statistics(H, ONES)
    np.testing.assert_allclose(statistics.pivot, 0.182322, atol=1e-6)
    np.testing.assert_allclose(statistics.scale, 2.114959, atol=1e-6)
    h = [-1.935898, -1.502655, -1.17492, -0.655471, -0.327736, -0.136023, 0, 0.24153]
    np.testing.assert_allclose(jrl.standardized_entropy(H, ONES), h, atol=1e-6)
    np.testing.assert_allclose([statistics.h_max, statistics.h_min], [h[-1], h[0]], atol=1e-6)
    np.testing.assert_allclose(jrl.entropy_signal(H, ONES), SIGNAL, atol=1e-6)
    np.testing.assert_allclose(jrl.entropy_signal(H, ONES, sign="release"), RELEASED, atol=1e-6)


def test_vector_hapo_1_temperature():
    code = jrl.adaptive_temperature(jrl.entropy_signal(H, ONES))
    expected = [0.95, 0.96119, 0.969654, 0.983071, 0.991535, 0.996487, 1, 1.05]
    np.testing.assert_allclose(code, expected, atol=1e-6)
    h = jrl.standardized_entropy(H, ONES)
    paper = jrl.adaptive_temperature(h, strength=0.1, max_signal=None)
    expected = [0.80641, 0.849734, 0.882508, 0.934453, 0.967226, 0.986398, 1, 1.024153]
    np.testing.assert_allclose(paper, expected, atol=1e-6)


def test_vector_hapo_1_bounds():
    low, high = jrl.asymmetric_clip_bounds(jrl.entropy_signal(H, ONES))
    expected = [0.4, 0.355241, 0.321382, 0.267718, 0.233859, 0.214053, 0.2, 0.2]
    np.testing.assert_allclose(low, expected, atol=1e-6)
    np.testing.assert_allclose(high, [0.28] * 7 + [0.56], atol=1e-6)
    low, high = jrl.asymmetric_clip_bounds(jrl.entropy_signal(H, ONES, sign="release"))
    np.testing.assert_allclose(low, [0.2] * 8, atol=1e-6)
    expected = [0.56, 0.497338, 0.449935, 0.374805, 0.327402, 0.299674, 0.28, 0.56]
    np.testing.assert_allclose(high, expected, atol=1e-6)


def test_vector_hapo_2():
    ratio = jnp.array([1, 1.2, 0.95, 0.7, 1, 1.05, 1, 1.3])
    signal = jrl.entropy_signal(H, ONES)
    arrays = (jnp.log(ratio), 0 * ONES, ONES, ONES, signal)
    expected = [0, 1, 0.393088, 1, 0.830706, 0.929737, 1, 2]
    np.testing.assert_allclose(jrl.redistributed_advantages(*arrays), expected, atol=1e-6)
    low, high = jrl.asymmetric_clip_bounds(signal)
    adapted = jrl.redistributed_advantages(*arrays, clip_low=low, clip_high=high)
    np.testing.assert_allclose(adapted, expected, atol=1e-6)


def test_the_edges_of_the_zone_change_nothing():
    # A zone from 0.75 to 1.25, both exact; the logarithms are chosen so that exp meets them.
    ratio = jnp.exp(jnp.log(jnp.array([0.75, 1.25])))
    np.testing.assert_array_equal(ratio, [0.75, 1.25])
    two = jnp.ones(2)
    for signal in (0.5, -0.5):
        arrays = (jnp.log(ratio), 0 * two, two, two, signal * two)
        result = jrl.redistributed_advantages(*arrays, clip_low=0.5, clip_high=0.5)
        assert result.tolist() == [1, 1]


@pytest.mark.parametrize("clip_dual", [None, 1.5, 10.0])
def test_without_strength_it_is_ppo_exactly(clip_dual):
    b = batch(0)
    signal = jrl.entropy_signal(b["entropy"], b["mask"])

    @jax.jit
    def both(logprobs):
        arrays = (logprobs, *(b[name] for name in NAMES[1:]))
        bounds = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": clip_dual}
        off = {"clip_strength": 0.0, "redistribution": 0.0}
        hapo = jax.value_and_grad(jrl.hapo_loss, has_aux=True)(*arrays, signal, **bounds, **off)
        return hapo, jax.value_and_grad(jrl.ppo_loss, has_aux=True)(*arrays, **bounds)

    ((loss, metrics), slope), ((expected, ppo), ppo_slope) = both(b["logprobs"])
    assert metrics.pop("redistributed").sum == 0
    jax.tree.map(np.testing.assert_array_equal, (loss, metrics, slope), (expected, ppo, ppo_slope))


@pytest.mark.parametrize("clip_dual", [None, 1.5])
def test_oracle(clip_dual):
    b = numpy_batch(1)
    signal = oracles.entropy_signal(b["entropy"], MASK)
    arrays = [b[name] for name in NAMES] + [signal]
    losses, slopes, acts = oracles.hapo(*arrays, clip_dual=clip_dual)
    with jax.enable_x64(True):
        own = jrl.entropy_signal(jnp.asarray(b["entropy"]), jnp.asarray(MASK))
        np.testing.assert_allclose(own, signal, rtol=1e-11, atol=1e-15)
        (loss, metrics), slope = jax.value_and_grad(jrl.hapo_loss, has_aux=True)(
            *(jnp.asarray(x) for x in arrays), clip_dual=clip_dual
        )
        tokens = MASK.sum()
        np.testing.assert_allclose(loss, losses.sum() / tokens, rtol=1e-11)
        np.testing.assert_allclose(slope, slopes / tokens, rtol=1e-11, atol=1e-15)
        assert (acts == "clip").any() and (acts == "").any()
        assert float(metrics["pg_clipfrac"].sum) == (acts == "clip").sum()
        assert float(metrics["pg_clipfrac_lower"].sum) == (acts == "dual").sum()


def test_gradients_by_finite_differences():
    with jax.enable_x64(True):
        b = batch(2, dtype=jnp.float64)
        signal = jrl.entropy_signal(b["entropy"], b["mask"])

        def loss(logprobs):
            arrays = (logprobs, *(b[name] for name in NAMES[1:]), signal)
            return jrl.hapo_loss(*arrays, clip_dual=1.5)[0]

        check_grads(loss, (b["logprobs"],), 1)


@pytest.mark.slow
@given(st.integers(0, 2**31), st.sets(st.integers(1, BATCH - 1)))
@few
def test_with_the_statistics_of_the_whole_any_cut_sums_to_it(seed, cuts):
    b = batch(seed)
    edges = [0, *sorted(cuts), BATCH]
    statistics = jrl.entropy_statistics(b["entropy"], b["mask"])

    def loss(piece, logprobs, **rest):
        signal = jrl.entropy_signal(
            b["entropy"][piece], b["mask"][piece], statistics=rest.pop("statistics", None)
        )
        arrays = (b[name][piece] for name in NAMES[1:])
        return jrl.hapo_loss(logprobs[piece], *arrays, signal, **rest)

    step = jax.value_and_grad(loss, argnums=1, has_aux=True)
    whole = step(slice(None), b["logprobs"])
    parts = [
        step(slice(i, j), b["logprobs"], statistics=statistics, num_tokens=int(MASK.sum()))
        for i, j in itertools.pairwise(edges)
    ]
    summed = functools.reduce(lambda x, y: jax.tree.map(operator.add, x, y), parts)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=5e-6, atol=2e-6), summed, whole)


@pytest.mark.slow
def test_eight_devices_equal_one():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    mask = np.arange(6) < np.random.default_rng(0).integers(0, 7, (16, 1))
    mask[:2] = False
    with jax.enable_x64(True):
        every = batch(3, mask, jnp.float64)
        b = {name: every[name] for name in (*NAMES, "entropy")}
        statistics = jrl.entropy_statistics(b["entropy"], b["mask"])
        tokens = jnp.sum(b["mask"])

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
        signal = jrl.entropy_signal(b["entropy"], b["mask"])
        whole = jax.value_and_grad(jrl.hapo_loss, has_aux=True)(*(b[n] for n in NAMES), signal)
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-11, atol=1e-16), cut, whole
        )


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.2, 0.25, 0.5, 0.8, 0.95, 1.0])
def test_the_pivot_is_the_nearest_order_statistic(quantile):
    # All in one shape, of which 1 to 40 are true. Python rounds a half to the even number too.
    entropy = np.random.default_rng(0).permutation(40) + 1.0
    counts = np.arange(1, 41)
    pivots = jax.vmap(
        lambda count: (
            jrl.entropy_statistics(
                jnp.asarray(entropy), jnp.arange(40) < count, quantile=quantile
            ).pivot
        )
    )(jnp.asarray(counts))
    share = Fraction(quantile).limit_denominator(100)
    expected = [np.sort(entropy[:count])[round(share * (int(count) - 1))] for count in counts]
    np.testing.assert_allclose(pivots, np.log(expected), rtol=1e-6)


def test_an_entropy_that_is_not_a_number_reaches_every_token():
    signal = jrl.entropy_signal(H.at[3].set(jnp.nan), ONES)
    assert np.isnan(signal).all()
    zero = 0 * ONES
    result = jrl.redistributed_advantages(zero, zero, ONES, ONES, signal)
    assert np.isnan(result).all()


def test_statistics_of_another_batch_may_be_exceeded_and_the_temperature_is_not():
    statistics = jrl.entropy_statistics(H, ONES)
    signal = jrl.entropy_signal(jnp.array([1e-9, 50.0]), jnp.ones(2), statistics=statistics)
    assert signal[0] < -1 and signal[1] > 1
    temperature = jrl.adaptive_temperature(signal, base=2.0, strength=0.25)
    np.testing.assert_allclose(temperature, [1.5, 2.5])


def test_no_gradient_reaches_the_signal():
    b = batch(4)
    arrays = [b[name] for name in NAMES]

    def loss(entropy):
        signal = jrl.entropy_signal(entropy, b["mask"])
        return jrl.hapo_loss(*arrays, signal)[0] + jnp.sum(jrl.adaptive_temperature(signal))

    assert not np.any(jax.grad(loss)(b["entropy"]))

    def advantages(logprobs):
        return jnp.sum(jrl.redistributed_advantages(logprobs, *arrays[1:], b["entropy"]))

    assert not np.any(jax.grad(advantages)(b["logprobs"]))


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

    statistics = jrl.entropy_statistics(b["entropy"], b["mask"])
    given = ((of_statistics, statistics), (of_entropy, b["entropy"]), (of_signal, b["entropy"]))
    for function, x in given:
        assert np.isfinite(function(x)) and function(x) != 0
        assert not any(np.any(slope) for slope in jax.tree.leaves(jax.grad(function)(x)))


def test_a_scale_of_1_is_a_scale():
    one, zero = jnp.ones(()), jnp.zeros(())
    statistics = jrl.EntropyStatistics(zero, one, one, -one)
    h = jrl.standardized_entropy(H, ONES, statistics=statistics)
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
        call(ONES)


@pytest.mark.parametrize("signal", [1.0, -0.5])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_ratios_of_zero_and_infinity_are_finite(advantage, signal):
    logprobs = jnp.array([[-jnp.inf, -1.0, -500.0, -0.5, -1.0]])
    old = jnp.array([[-1.0, -jnp.inf, -1.0, -500.0, -1.0]])
    ones = jnp.ones_like(old)
    (loss, metrics), slope = jax.value_and_grad(jrl.hapo_loss, has_aux=True)(
        logprobs, old, advantage * ones, ones, signal * ones
    )
    assert np.isfinite(loss) and np.isfinite(slope).all()
    assert not np.any(slope[:, :4])
    assert all(np.isfinite(metric.value()) for metric in metrics.values())
