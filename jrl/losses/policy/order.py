"""Order statistics of a batch: the highest or lowest tokens, counted over the unmasked ones.

A share of the tokens, such as ``0.2 N``, is counted exactly: in floating point 0.2 * 15 may fall
below 3, and one token more or less would be chosen on some machines.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

# Up to this one, the remainders below are exact in int32 whatever the number of tokens.
LARGEST_DENOMINATOR = 40_000


def floor_fraction(
    fraction: int | float, total: Int[Array, ""]
) -> tuple[Int[Array, ""], Int[Array, ""], int]:
    """``fraction * total`` as a whole number, a remainder and the denominator of the remainder.

    The fraction, from 0 to 1, is read as the nearest ratio whose denominator is at most 40 000:
    0.2 is 1/5 and 2e-4 is 1/5000.
    """
    exact = Fraction(fraction).limit_denominator(LARGEST_DENOMINATOR)
    numerator, denominator = exact.numerator, exact.denominator
    # total = wholes * denominator + rest, so that no product leaves int32.
    wholes, rest = total // denominator, total % denominator
    product = rest * numerator
    return wholes * numerator + product // denominator, product % denominator, denominator


def ascending(
    x: Float[Array, "*batch time"], mask: Bool[Array, "*batch time"]
) -> Float[Array, "tokens"]:
    """All true `x` in increasing order, then infinity for the others."""
    return jnp.sort(jnp.where(mask, x, jnp.asarray(jnp.inf, x.dtype)).ravel())


def kth(ordered: Float[Array, "tokens"], index: Int[Array, ""]) -> Float[Array, ""]:
    """The element of `ordered` at `index`; 0 if the index is negative, as of an empty order."""
    if not ordered.size:
        return jnp.zeros((), ordered.dtype)
    return jnp.where(index < 0, jnp.zeros((), ordered.dtype), ordered[jnp.maximum(index, 0)])


def top_k_mask(
    k: Int[Array, ""], among: Bool[Array, "*batch time"], *keys: Array
) -> Bool[Array, "*batch time"]:
    """True on the `k` tokens of `among` that come first when ordered by increasing keys.

    The first key decides; ties go to the next one, and at last to the earlier token.
    """
    flat = among.ravel()
    order = jnp.lexsort((*(key.ravel() for key in reversed(keys)), ~flat))
    chosen = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=jnp.int32) < k)
    return (chosen & flat).reshape(among.shape)


def random_bits(key: Array, mask: Bool[Array, "*batch time"]) -> Array:
    """Random integers for the true tokens that depend on the key and on a token's rank alone.

    The rank is counted over true tokens, so padding and holes change no number.
    """
    rank = jnp.cumsum(mask.ravel(), dtype=jnp.int32) - 1
    bits = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i)))(rank)
    return bits.reshape(mask.shape)
