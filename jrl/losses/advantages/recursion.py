"""Backward recursion of GAE and of discounted returns.

    delta_t = r_t + gamma_t V_{t+1} - V_t        A_t = delta_t + gamma_t lam_t A_{t+1}

over the unmasked tokens, in three implementations: a scan over tokens (the definition); blocks of
tokens, for any coefficients; and triangular matrix products, if ``gamma lam`` is a scalar.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from jrl.losses import settings
from jrl.losses.arrays import PerRow, PerToken, TokenMask, zero_masked, zero_per_row

Implementation = Literal["scan", "blocked"]

# On shorter rows both take about the same time, and a scan compiles faster.
SHORTEST_BLOCKED = 256
# Tokens per block: in the general form, and in the triangular form.
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
    """Sums A of discounted temporal-difference errors; 0 where the mask is false.

    Rewards and values there are ignored; `last_value` is the value of the state after the last
    unmasked token. `gamma` and `lam` have as many axes as `rewards` or none. The implementation is
    "scan", "blocked", or None, which chooses by length.
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
    """Backward scan over the unmasked tokens."""
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
    """Blocked implementation; equals `_by_token` up to rounding."""

    # As much as possible is computed inside the branches: their operands are materialised.
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
        # The next unmasked token is the next token; all tokens after a row's last one are masked.
        or_last = jnp.where(mask, values, last[..., None])
        return sums(_shift_left(or_last, last), holes=False)

    return jax.lax.cond(_has_holes(mask), with_holes, without_holes)


def _has_holes(mask: TokenMask) -> Bool[Array, ""]:
    """True if the unmasked tokens of any row form more than one run."""
    ends = mask & ~_shift_left(mask, jnp.zeros_like(mask[..., 0]))
    # Sums of uint8 (at most 255) over an axis other than the last: CPUs vectorise them.
    size = max(64, -(-mask.shape[-1] // 255))
    columns = jnp.sum(_blocks(ends, size, False), axis=-2, dtype=jnp.uint8)
    return jnp.any(jnp.sum(columns, axis=-1, dtype=jnp.int32) > 1)


def _shift_left(
    x: Shaped[Array, "*batch time"], last: Shaped[Array, "*batch"]
) -> Shaped[Array, "*batch time"]:
    """`x` shifted by one: the entry of the next token, and `last` for the last token."""
    return jnp.concatenate([x[..., 1:], last[..., None]], axis=-1)


def _recurrence(x: PerToken, decay: PerToken, last: PerRow) -> PerToken:
    """Linear recurrence ``y_t = x_t + decay_t y_{t+1}``, with `last` after the last token.

    A block is reduced to two numbers, its contribution and the product of its decays. A scan over
    blocks gives y at the first token of each. Then all tokens run the recurrence in parallel from
    the first token of the next block, in one step per token of a block. There are no divisions, so
    rounding is as in the plain recursion.
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

    # At first tokens x is the result and decay is 0, which ends the recurrence there.
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
    """``y_t = sum_k decay^k x_{t+k}``, with matrices of powers of a scalar decay.

    Within a block ``y = x P`` with ``P[k, t] = decay^(k - t)`` for ``k >= t``. The contribution of
    later blocks is the same sum over the results at their first tokens, with ``decay^block``.
    """
    time = x.shape[-1]
    x = _blocks(x, TRIANGLE, 0.0)
    # One matrix product: a batched one takes twice as long on XLA's CPU backend.
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
    """``base^n`` for ``n >= 0``, else 0; ``0^0`` is 1."""
    return zero_masked(base ** jnp.maximum(exponents, 0).astype(base.dtype), exponents >= 0)


def _blocks(
    x: Shaped[Array, "*batch time"], size: int, fill: float | bool
) -> Shaped[Array, "*batch blocks size"]:
    """Splits the tokens into blocks of `size`, the last one padded with `fill`."""
    missing = -x.shape[-1] % size
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, size)


def _join_blocks(x: Float[Array, "*batch blocks size"], time: int) -> PerToken:
    """Inverse of `_blocks`: joins the blocks and drops the padding."""
    return x.reshape(*x.shape[:-2], -1)[..., :time]
