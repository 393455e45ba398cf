"""The backward recursion behind every estimator that discounts along a response."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float


def discounted_errors(
    rewards: Float[Array, "*batch time"],
    values: Float[Array, "*batch time"],
    mask: Bool[Array, "*batch time"],
    gamma: Float[Array, "*batch time"],
    lam: Float[Array, "*batch time"],
    last_value: Float[Array, "*batch"],
) -> Float[Array, "*batch time"]:
    """The recursion of `gae`, from last token to first; under a false mask, what was carried."""

    def step(following, token):
        advantage, value = following
        reward, value_here, counts, discount, decay = token
        error = reward + discount * value - value_here
        here = (error + discount * decay * advantage, value_here)
        following = jax.tree.map(lambda new, old: jnp.where(counts, new, old), here, following)
        return following, following[0]

    by_time = [jnp.moveaxis(x, -1, 0) for x in (rewards, values, mask, gamma, lam)]
    # Made from the rows so that, under `jax.shard_map`, the carry varies over the devices they do.
    nothing = jnp.zeros_like((rewards + values)[..., 0])
    start = (nothing, nothing + last_value)
    _, advantages = jax.lax.scan(step, start, tuple(by_time), reverse=True)
    return jnp.moveaxis(advantages, 0, -1)
