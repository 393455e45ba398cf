"""The generator that is written out draws JAX's bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.rollout.threefry import keys_of


def both(function, number=7):
    """What the function draws with a key of JAX's and with the same key written out."""
    key = jax.random.key(number)
    return function(key), function(keys_of(jax.random.key_data(key)))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32])
def test_bits_are_those_of_jax(dtype):
    wanted, found = both(partial(jax.random.bits, shape=(3, 5), dtype=dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, wanted)


def test_a_token_s_noise_is_that_of_jax():
    """As decoding makes it: a key for each row, of three numbers."""

    @jax.jit
    def noise(key):
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.array([0, 1, 2**31 - 1]))
        keys = jax.vmap(jax.random.fold_in)(keys, jnp.array([5, -1, 0]))
        return jax.vmap(lambda key: jax.random.gumbel(key, (11,)))(keys)

    wanted, found = both(noise)
    np.testing.assert_array_equal(found, wanted)
    assert len(np.unique(found)) == found.size


def test_splits_and_seeds_are_those_of_jax():
    wanted, found = both(lambda key: jax.random.key_data(jax.random.split(key, (2, 3))))
    np.testing.assert_array_equal(found, wanted)
    impl = jax.random.key_impl(keys_of(jnp.zeros(2, jnp.uint32)))
    for seed in (0, 3, 2**31 - 1):
        own = jax.random.key_data(jax.random.key(seed, impl=impl))
        np.testing.assert_array_equal(own, jax.random.key_data(jax.random.key(seed)))


def test_keys_of_another_generator_stay_what_they_are():
    key = jax.random.key(3, impl="rbg")
    with jax.default_prng_impl("rbg"):
        again = keys_of(jax.random.key_data(key))
    assert jax.random.key_impl(again) == "rbg"
