"""Threefry, JAX's default random number generator, unrolled: the same bits, faster on a CPU.

On a CPU JAX runs the rounds of the cipher in a loop, which XLA does not fuse: with a large
vocabulary the noise of a token takes several times as long. Here the twenty rounds are plain
operations on arrays.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Integer, UInt32

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = np.uint32(0x1BD11BDA)


def keys_of(data: UInt32[Array, "... words"]) -> Array:
    """Wraps key data of `jax.random.key_data` as keys that generate the same bits.

    Args:
      data: data of a key of any of JAX's generators. Keys of the default one, which have two words,
        use this implementation.
    """
    if data.shape[-1] != 2 or not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.random.wrap_key_data(data)
    return jax.random.wrap_key_data(data, impl=UNROLLED)


def threefry(
    key: tuple[Array, Array], high: Integer[Array, "..."], low: UInt32[Array, "..."]
) -> tuple[Array, Array]:
    """Threefry-2x32 with twenty rounds: two words of output for two words of input.

    References:
      Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
    """
    schedule = *key, key[0] ^ key[1] ^ PARITY
    high, low = high + schedule[0], low + schedule[1]
    for group in range(5):
        for by in ROTATIONS[group % 2]:
            high = high + low
            low = high ^ ((low << np.uint32(by)) | (low >> np.uint32(32 - by)))
        high = high + schedule[(group + 1) % 3]
        low = low + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return high, low


def _bits_of_counts(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> tuple[Array, Array]:
    # Fewer than 2**32: the high words are 0.
    counts = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return threefry((key[0], key[1]), jnp.zeros_like(counts), counts)


def _seed(seed: Integer[Array, ""]) -> UInt32[Array, "2"]:
    low = seed.astype(jnp.uint32)
    return jnp.stack([jnp.zeros_like(low), low])


def _fold_in(key: UInt32[Array, "2"], data: Integer[Array, ""] | int) -> UInt32[Array, "2"]:
    return jnp.stack(threefry((key[0], key[1]), *_seed(jnp.asarray(data))))


def _split(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> UInt32[Array, "... 2"]:
    return jnp.stack(_bits_of_counts(key, shape), axis=-1)


def _random_bits(key: UInt32[Array, "2"], width: int, shape: tuple[int, ...]) -> Array:
    high, low = _bits_of_counts(key, shape)
    return (high ^ low).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])


UNROLLED = define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry2x32 written out",
    tag="fry",
)
