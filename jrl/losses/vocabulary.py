"""Sums over the vocabulary, optionally in chunks.

With chunks, the forward pass allocates no second array of the size of the logits ``[..., vocab]``.
Derivatives are in closed form: they are elementwise in the logits for a fixed log-normaliser, so
the only array of that size in the backward pass is the gradient of the logits.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, SupportsIndex, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Shaped

from jrl.losses import settings
from jrl.losses.arrays import PerRow, as_floats, as_mask, zero_masked

Total = TypeVar("Total")
Logits: TypeAlias = Float[Array, "*batch vocab"]
RowMask: TypeAlias = Bool[Array, "*batch"]
# Partial sums over some entries: the maximum logit m, and the sums of exp(z - m) and of
# (z - m) exp(z - m).
Part: TypeAlias = tuple[Array, Array, Array]


def checked_chunk_size(chunk_size: SupportsIndex | None) -> int | None:
    """The setting `chunk_size` as an int, checked; None stays None."""
    if chunk_size is None:
        return None
    rule = "must be at least 1; None is off."
    return settings.integer("chunk_size", chunk_size, rule, at_least=1)


def rows_of_logits(
    logits: Float[ArrayLike, "*batch vocab"], mask: Shaped[ArrayLike, "*batch"] | None
) -> tuple[Logits, RowMask]:
    """The logits as an array, and a boolean mask of their rows; None masks none."""
    logits = jnp.asarray(logits)
    if mask is None:
        return logits, jnp.ones(logits.shape[:-1], bool)
    if jnp.shape(mask) != logits.shape[:-1]:
        raise ValueError(
            f"mask has shape {jnp.shape(mask)} and must have that of logits {logits.shape} without "
            "the vocabulary."
        )
    return logits, as_mask(mask)


class Normaliser(NamedTuple):
    """Log-normaliser of logits in two terms: ``log p = (z - shift) - log_sum``.

    Their sum would be rounded at the magnitude of the logits. The shift is the maximum logit,
    treated as a constant, which changes no derivative of a log-probability.
    """

    shift: PerRow
    log_sum: PerRow

    def logprobs(self, logits: Logits) -> tuple[Logits, Bool[Array, "*batch vocab"]]:
        """Log-probabilities, with 0 in place of -inf, and the mask of the logits above -inf."""
        possible = logits != -jnp.inf
        # Made finite before the arithmetic: 0 * -inf is a NaN in the value and in the derivative.
        logits = jnp.where(possible, logits, self.shift[..., None])
        logprobs = logits - self.shift[..., None] - self.log_sum[..., None]
        return zero_masked(logprobs, possible), possible


def chunk_of(logits: Logits, mask: RowMask, first: Array, size: int) -> Float[Array, "*batch size"]:
    """Chunk of the logits in the working precision, 0 in masked rows."""
    # The barrier keeps the conversion inside the loop: XLA for CPUs converts half precision before
    # it slices, would hoist that out of the loop and store all logits in float32.
    logits, first = jax.lax.optimization_barrier((logits, first))
    piece = jax.lax.dynamic_slice_in_dim(logits, first, size, axis=-1)
    (piece,) = as_floats(piece)
    return zero_masked(piece, jnp.broadcast_to(mask[..., None], piece.shape))


def along(x: Shaped[Array, "size"], like: Shaped[Array, "*batch size"]) -> Shaped[Array, "..."]:
    """Reshapes a vector for broadcasting along the last axis of `like`."""
    return x.reshape((1,) * (like.ndim - 1) + x.shape)


def over_chunks(
    start: Callable[[Array, Array], Total],
    merge: Callable[[Total, Total], Total],
    vocab: int,
    chunk_size: int | None,
) -> Total:
    """Reduces ``start(first, counts)`` over the chunks of the vocabulary with `merge`.

    `first` is the first entry of a chunk. `counts` masks the entries that no earlier chunk had: the
    last chunk is moved back to end with the vocabulary. The loop starts from the result of the
    first chunk, so that its carry has the type of its body's result, under `jax.shard_map` too.
    """
    size = vocab if chunk_size is None else min(chunk_size, vocab)
    everything = jnp.ones(size, bool)
    total = start(jnp.zeros((), jnp.int32), everything)

    def body(chunk: Array, total: Total) -> Total:
        wanted = chunk * size
        first = jnp.minimum(wanted, vocab - size)
        return merge(total, start(first, first + jnp.arange(size, dtype=jnp.int32) >= wanted))

    num_chunks = -(-vocab // size)
    return total if num_chunks == 1 else jax.lax.fori_loop(1, num_chunks, body, total)


def statistics(chunk_size: int | None, logits: Logits, mask: RowMask) -> tuple[Normaliser, PerRow]:
    """The normaliser and the entropy in one pass (online softmax)."""

    def start(first: Array, counts: Array) -> Part:
        piece = chunk_of(logits, mask, first, counts.size)
        piece = jnp.where(along(counts, piece), piece, -jnp.inf)
        largest = jnp.max(piece, axis=-1)
        possible = piece != -jnp.inf
        relative = zero_masked(piece - largest[..., None], possible)
        weights = zero_masked(jnp.exp(relative), possible)
        return largest, jnp.sum(weights, axis=-1), jnp.sum(weights * relative, axis=-1)

    def rescale(part: Part, largest: Array) -> tuple[Array, Array]:
        """Rescales the sums of a part to another maximum."""
        maximum, total, moment = part
        empty = maximum == -jnp.inf
        down = jnp.where(empty, 0, maximum - largest)
        factor = jnp.where(empty, 0, jnp.exp(down))
        return factor * total, factor * (moment + total * down)

    def merge(left: Part, right: Part) -> Part:
        largest = jnp.maximum(left[0], right[0])
        (total, moment), (more, further) = rescale(left, largest), rescale(right, largest)
        return largest, total + more, moment + further

    largest, total, moment = over_chunks(start, merge, logits.shape[-1], chunk_size)
    log_sum = jnp.log(total)
    return Normaliser(largest, log_sum), log_sum - moment / total


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def log_normaliser(chunk_size: int | None, logits: Logits, mask: RowMask) -> Normaliser:
    return statistics(chunk_size, logits, mask)[0]


@log_normaliser.defjvp
def _log_normaliser_jvp(chunk_size, primals, tangents):
    logits, mask = primals
    normaliser = log_normaliser(chunk_size, logits, mask)

    def slope(logits: Array, normaliser: Normaliser) -> Array:
        logprobs, possible = normaliser.logprobs(logits)
        return zero_masked(jnp.exp(logprobs), possible)

    change = contracted(slope, tangents[0], mask, logits, normaliser)
    return normaliser, Normaliser(jnp.zeros_like(normaliser.shift), change)


def contracted(
    slope: Callable[..., Array], tangent: Logits, mask: RowMask, logits: Logits, *constants: object
) -> PerRow:
    """``sum_v slope_v tangent_v``, with the slope recomputed in the backward pass.

    Otherwise the slope, of the size of the logits, would be stored from forward to backward pass.
    """

    def contract(tangent: Array, logits: Array, *constants: object) -> Array:
        rows = jnp.broadcast_to(mask[..., None], logits.shape)
        logits, _ = as_floats(logits, tangent)
        weights = zero_masked(slope(zero_masked(logits, rows), *constants), rows)
        return jnp.sum(weights * zero_masked(tangent.astype(weights.dtype), rows), axis=-1)

    # The barriers of prevent_cse would keep XLA from fusing the slope with adjacent operations.
    return jax.checkpoint(contract, prevent_cse=False)(tangent, logits, *constants)
