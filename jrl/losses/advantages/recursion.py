"""The backward recursion behind every estimator that discounts along a response.

    delta_t = r_t + gamma_t V_{t+1} - V_t        A_t = delta_t + gamma_t lam_t A_{t+1}

over the true tokens, three times: token by token, which is the definition; in blocks for any
coefficients; and, where ``gamma lam`` is one number, as products with a triangular matrix.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from jrl.losses import settings
from jrl.losses.arrays import PerRow, PerToken, TokenMask, zero_masked, zero_per_row

Implementation = Literal["scan", "blocked"]

# On shorter rows the two take about the same time, and a scan compiles sooner.
SHORTEST_BLOCKED = 256
# Tokens in a block: of the general form, and of the triangular matrix.
BLOCK, TRIANGLE = 8, 32


def discounted_errors(
    rewards: PerToken,
    values: PerToken,
    mask: TokenMask,
    gamma: Float[Array, "..."],
    lam: Float[Array, "..."],
    last_value: PerRow,
    implementation: str | None = None,
) -> PerToken:
    """The sums A of discounted temporal-difference errors; 0 under a false mask.

    Rewards and values under it are not read; `last_value` is of the state after the last true
    token. `gamma` and `lam` have as many axes as `rewards` or none. The implementation is "scan",
    "blocked", or None for what suits the length.
    """
    if implementation is None:
        implementation = "blocked" if mask.shape[-1] >= SHORTEST_BLOCKED else "scan"
    settings.choice("implementation", implementation, Implementation)
    if not mask.size:
        return jnp.zeros_like(values)
    run = _by_token if implementation == "scan" else _in_blocks
    return run(rewards, values, mask, gamma, lam, last_value)


def _by_token(
    rewards: PerToken, values: PerToken, mask: TokenMask, gamma: Array, lam: Array, last: PerRow
) -> PerToken:
    """From last token to first, past whatever the mask leaves out."""
    rewards, values = zero_masked(rewards, mask), zero_masked(values, mask)

    def step(following, token):
        advantage, value = following
        reward, value_here, counts, discount, decay = token
        error = reward + discount * value - value_here
        here = (error + discount * decay * advantage, value_here)
        following = jax.tree.map(lambda new, old: jnp.where(counts, new, old), here, following)
        return following, following[0]

    gamma, lam = (jnp.broadcast_to(x, values.shape) for x in (gamma, lam))
    by_time = [jnp.moveaxis(x, -1, 0) for x in (rewards, values, mask, gamma, lam)]
    nothing = zero_per_row(rewards + values)
    start = (nothing, nothing + last)
    _, advantages = jax.lax.scan(step, start, tuple(by_time), reverse=True)
    return zero_masked(jnp.moveaxis(advantages, 0, -1), mask)


def _in_blocks(
    rewards: PerToken, values: PerToken, mask: TokenMask, gamma: Array, lam: Array, last: PerRow
) -> PerToken:
    """The same as `_by_token` up to rounding."""

    # All that can be is worked out inside the branches: what enters them is made in full.
    def sums(following: PerToken, holes: bool) -> PerToken:
        decay = gamma * lam
        errors = zero_masked(rewards + gamma * following - values, mask)
        if decay.size == 1 and not holes:
            return zero_masked(_triangular(errors, jnp.reshape(decay, ())), mask)
        decays = jnp.where(mask, decay, 1)
        return zero_masked(_recurrence(errors, decays, jnp.zeros_like(last)), mask)

    def with_holes() -> PerToken:
        skipped = (~mask).astype(values.dtype)
        first_here_or_later = _recurrence(zero_masked(values, mask), skipped, last)
        return sums(_shift_left(first_here_or_later, last), holes=True)

    def without_holes() -> PerToken:
        # The next true token is the next token, and behind the last one of a row all are false.
        or_last = jnp.where(mask, values, last[..., None])
        return sums(_shift_left(or_last, last), holes=False)

    return jax.lax.cond(_has_holes(mask), with_holes, without_holes)


def _has_holes(mask: TokenMask) -> Bool[Array, ""]:
    """True if the unmasked tokens of any row form more than one run."""
    ends = mask & ~_shift_left(mask, jnp.zeros_like(mask[..., 0]))
    # Bytes over an axis that is not the last one: a CPU adds many at once. A byte holds 255.
    size = max(64, -(-mask.shape[-1] // 255))
    columns = jnp.sum(_blocks(ends, size, False), axis=-2, dtype=jnp.uint8)
    return jnp.any(jnp.sum(columns, axis=-1, dtype=jnp.int32) > 1)


def _shift_left(
    x: Shaped[Array, "*batch time"], last: Shaped[Array, "*batch"]
) -> Shaped[Array, "*batch time"]:
    """`x` shifted by one: the entry of the next token, and `last` for the last token."""
    return jnp.concatenate([x[..., 1:], last[..., None]], axis=-1)


def _recurrence(x: PerToken, decay: PerToken, last: PerRow) -> PerToken:
    """``y_t = x_t + decay_t y_{t+1}``, with `last` after the last one.

    A block is summed up in two numbers, its own contribution and the product of its decays; a scan
    over the blocks gives the result at the first token of each. From there every token runs by
    itself to the first one of the next block, all at once in as many steps as a block has. No
    number is divided by, so the rounding is that of the plain recursion.
    """
    time = x.shape[-1]
    x, decay = _blocks(x, BLOCK, 0.0), _blocks(decay, BLOCK, 1.0)
    contribution, product = x[..., -1], decay[..., -1]
    for t in reversed(range(BLOCK - 1)):
        contribution = x[..., t] + decay[..., t] * contribution
        product = decay[..., t] * product

    def block(behind, of_block):
        contribution, product = of_block
        first = contribution + product * behind
        return first, first

    by_block = jnp.moveaxis(contribution, -1, 0), jnp.moveaxis(product, -1, 0)
    _, firsts = jax.lax.scan(block, last, by_block, reverse=True)

    # A first token is its result and hands on nothing of what is behind it, so a run ends there.
    is_first = jnp.arange(BLOCK, dtype=jnp.int32) == 0
    x = jnp.where(is_first, jnp.moveaxis(firsts, 0, -1)[..., None], x)
    decay = jnp.where(is_first, jnp.zeros_like(decay), decay)
    padded = x.shape[-2] * BLOCK
    x, decay = _join_blocks(x, padded), _join_blocks(decay, padded)
    behind = jnp.zeros_like(x[..., :BLOCK])
    x = jnp.concatenate([x, behind.at[..., 0].set(last)], axis=-1)
    decay = jnp.concatenate([decay, behind], axis=-1)
    y = x[..., BLOCK - 1 : -1]
    for ahead in reversed(range(BLOCK - 1)):
        y = x[..., ahead : ahead + padded] + decay[..., ahead : ahead + padded] * y
    return y[..., :time]


def _triangular(x: PerToken, decay: Float[Array, ""]) -> PerToken:
    """``y_t = sum_k decay^k x_{t+k}`` by the powers of one number.

    Within a block ``y = x P`` with ``P[k, t] = decay^(k - t)`` for k at or after t; what the blocks
    behind contribute is the same sum over the blocks' first results, with ``decay^block``.
    """
    time = x.shape[-1]
    x = _blocks(x, TRIANGLE, 0.0)
    # One product of two matrices: XLA's CPU back end takes twice as long over a stack of them.
    flat = x.reshape(-1, TRIANGLE)
    at = jnp.arange(TRIANGLE, dtype=jnp.int32)
    block = jnp.arange(x.shape[-2], dtype=jnp.int32)
    within = _powers(decay, at[:, None] - at[None, :])
    y = jnp.matmul(flat, within, precision=jax.lax.Precision.HIGHEST).reshape(x.shape)
    blocks = _powers(decay**TRIANGLE, block[:, None] - block[None, :] - 1)
    behind = jnp.matmul(y[..., 0], blocks, precision=jax.lax.Precision.HIGHEST)
    reach = decay ** (TRIANGLE - at).astype(x.dtype)
    return _join_blocks(y + behind[..., None] * jnp.broadcast_to(reach, x.shape), time)


def _powers(base: Float[Array, ""], exponents: Int[Array, "rows columns"]) -> Array:
    """``base^n``, and 0 for a negative n. ``0^0`` is 1."""
    return zero_masked(base ** jnp.maximum(exponents, 0).astype(base.dtype), exponents >= 0)


def _blocks(
    x: Shaped[Array, "*batch time"], size: int, fill: float | bool
) -> Shaped[Array, "*batch blocks size"]:
    """The tokens in blocks of one size, the last filled up."""
    missing = -x.shape[-1] % size
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, size)


def _join_blocks(x: Float[Array, "*batch blocks size"], time: int) -> PerToken:
    """`_blocks` undone."""
    return x.reshape(*x.shape[:-2], -1)[..., :time]
