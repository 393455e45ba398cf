"""What logits say exactly: of a token, how undecided they are, how far they are from others.

What is computed from logits ``[..., vocab]`` goes through the vocabulary in chunks if asked to, so
that nothing else of that size is made on the way to the result. Derivatives are written down in
closed form: they are elementwise in the logits once the log-normaliser is known, so the backward
pass makes the cotangent of the logits and nothing else of that size either.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, SupportsIndex, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Integer, Shaped

from jrl.losses import settings
from jrl.losses.arrays import as_floats, as_mask, check_shapes, zero_masked

KLDirection = Literal["policy||reference", "reference||policy"]

Total = TypeVar("Total")


def logprobs_from_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    tokens: Integer[ArrayLike, "*batch"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    chunk_size: SupportsIndex | None = None,
) -> Float[Array, "*batch"]:
    """Log-probabilities of given tokens, from the logits of the positions that predict them.

    ``z_token - log sum_v exp(z_v)``. Nothing is shifted: ``logits[b, t]`` must be what the model
    says before it sees ``tokens[b, t]``.

    Args:
      logits: unnormalised log-probabilities of every token of the vocabulary. -inf is an impossible
        token, which gets no gradient.
      tokens: the tokens asked about, in ``0..vocab - 1``.
      mask: true where the result is wanted. If given, it is 0 elsewhere, whatever `tokens` holds,
        and what lies there reaches no gradient; None computes it everywhere.
      chunk_size: go through the vocabulary this many entries at a time, so that in half precision
        only a chunk is ever raised to float32. The result is the same up to rounding. None takes
        all of it at once.

    Returns:
      Log-probabilities in nats, with their gradients; -inf for an impossible token.

    Raises:
      ValueError: if `chunk_size` is not positive, or shapes do not agree.

    Examples:
      >>> import jax.numpy as jnp
      >>> logits = jnp.array([[0.0, 0.0, -jnp.inf], [1.0, 1.0, 1.0]])
      >>> logprobs_from_logits(logits, jnp.array([0, 2]), chunk_size=2).round(4).tolist()
      [-0.6930999755859375, -1.0986000299453735]
    """
    chunk_size = _chunk_size(chunk_size)
    logits, mask = _rows_of_logits(logits, mask)
    check_shapes(tokens=tokens, rows_of_logits=mask)
    return _token_logprobs(chunk_size, logits, jnp.asarray(tokens), mask)


def entropy_from_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    chunk_size: SupportsIndex | None = None,
) -> Float[Array, "*batch"]:
    """Exact entropy of the distributions whose logits lie along the last axis.

    ``H = -sum_v p_v log p_v`` with ``p = softmax(logits)``. A logit of -inf is an entry of
    probability 0, which adds nothing to the value or the gradient.

    Args:
      logits: unnormalised log-probabilities of every token of the vocabulary.
      mask: true where the entropy is wanted. If given, it is 0 elsewhere, and what lies there
        reaches no gradient; None computes it everywhere.
      chunk_size: go through the vocabulary this many entries at a time, so that no second array of
        the size of `logits` is made; any positive number, whether or not it divides the vocabulary.
        The result is the same up to rounding. None takes all of it at once.

    Returns:
      The entropy in nats, between 0 and ``log(vocab)``, with its gradient.

    Raises:
      ValueError: if `chunk_size` is not positive, or shapes do not agree.

    Examples:
      >>> import jax.numpy as jnp
      >>> entropy_from_logits(jnp.array([[0.0, 0.0, -jnp.inf], [9.0, -jnp.inf, -jnp.inf]])).tolist()
      [0.6931471824645996, 0.0]
    """
    chunk_size = _chunk_size(chunk_size)
    logits, mask = _rows_of_logits(logits, mask)
    return _entropy(chunk_size, logits, mask)


def kl_from_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    ref_logits: Float[ArrayLike, "*batch vocab"],
    mask: Shaped[ArrayLike, "*batch"] | None = None,
    *,
    direction: KLDirection = "policy||reference",
    chunk_size: SupportsIndex | None = None,
) -> Float[Array, "*batch"]:
    """Exact KL divergence between two policies at each position, summed over the vocabulary.

    With ``p = softmax(logits)`` and ``q = softmax(ref_logits)``:

    | direction | value | its gradient by ``logits[v]`` |
    |---|---|---|
    | ``policy||reference`` | ``sum_v p_v log p_v/q_v`` | ``p_v (log p_v/q_v - KL)`` |
    | ``reference||policy`` | ``sum_v q_v log q_v/p_v`` | ``p_v - q_v`` |

    The first is the mean over tokens sampled from the policy of the estimators k1 and k3 of
    `kl_estimate`. It is summed as ``sum_v (q_v - p_v + p_v log p_v/q_v)``, of which no term is
    negative, so that the result is not either, and near 0 it keeps its digits.

    Args:
      logits: of the policy, for every token of the vocabulary. -inf is a token of probability 0.
      ref_logits: of the reference; no gradient.
      mask: true where the divergence is wanted. If given, it is 0 elsewhere, and what lies there
        reaches no gradient; None computes it everywhere.
      direction: which of the two.
      chunk_size: go through the vocabulary this many entries at a time, so that no further array of
        the size of `logits` is made; any positive number, whether or not it divides the vocabulary.
        The result is the same up to rounding. None takes all of it at once.

    Returns:
      The divergence in nats, with its gradient; infinite where the first policy allows a token that
      the second does not.

    Raises:
      ValueError: if `direction` is unknown, `chunk_size` is not positive, or shapes do not agree.

    References:
      Schulman, "Approximating KL divergence", 2020. http://joschu.net/blog/kl-approx.html

    Examples:
      >>> import jax.numpy as jnp
      >>> even, certain = jnp.zeros(2), jnp.array([0.0, -jnp.inf])
      >>> float(kl_from_logits(certain, even).round(4))
      0.6930999755859375
      >>> float(kl_from_logits(certain, even, direction="reference||policy"))
      inf
    """
    if direction not in get_args(KLDirection):
        choices = ", ".join(get_args(KLDirection))
        raise ValueError(f"direction={direction!r} is unknown: choose one of {choices}.")
    check_shapes(logits=logits, ref_logits=ref_logits)
    chunk_size = _chunk_size(chunk_size)
    logits, mask = _rows_of_logits(logits, mask)
    ref_logits = jax.lax.stop_gradient(jnp.asarray(ref_logits))
    if jnp.float64 in (logits.dtype, ref_logits.dtype):
        logits, ref_logits = as_floats(logits, ref_logits)
    return _divergence((chunk_size, direction), logits, ref_logits, mask)


def _chunk_size(chunk_size: SupportsIndex | None) -> int | None:
    """The setting as a whole number."""
    if chunk_size is None:
        return None
    return settings.whole("chunk_size", chunk_size, "must be at least 1; None is off.", at_least=1)


def _rows_of_logits(
    logits: Float[ArrayLike, "*batch vocab"],
    mask: Shaped[ArrayLike, "*batch"] | None,
) -> tuple[Float[Array, "*batch vocab"], Bool[Array, "*batch"]]:
    """The logits as they are, and a mask that says which rows of them count."""
    logits = jnp.asarray(logits)
    if mask is None:
        return logits, jnp.ones(logits.shape[:-1], bool)
    if jnp.shape(mask) != logits.shape[:-1]:
        raise ValueError(
            f"mask has shape {jnp.shape(mask)} and must have that of logits {logits.shape} without "
            "the vocabulary."
        )
    return logits, as_mask(mask)


class _Normaliser(NamedTuple):
    """What turns logits into log-probabilities: ``log p = (z - shift) - log_sum``.

    Kept apart because ``shift + log_sum`` would be rounded to the size of the logits. The shift,
    the greatest logit, counts as a constant, which changes no derivative of a log-probability.
    """

    shift: Float[Array, "*batch"]
    log_sum: Float[Array, "*batch"]

    def logprobs(
        self, logits: Float[Array, "*batch vocab"]
    ) -> tuple[Float[Array, "*batch vocab"], Bool[Array, "*batch vocab"]]:
        """Log-probabilities, 0 in place of -inf, and where they are not that."""
        possible = logits != -jnp.inf
        # Made finite before the arithmetic: 0 * -inf is a NaN in the value and in the derivative.
        logits = jnp.where(possible, logits, self.shift[..., None])
        return zero_masked(
            logits - self.shift[..., None] - self.log_sum[..., None], possible
        ), possible


def _chunk(
    logits: Float[Array, "*batch vocab"], mask: Bool[Array, "*batch"], first: Array, size: int
) -> Float[Array, "*batch size"]:
    """A piece of the logits in the working precision, 0 in rows that do not count."""
    # Tied to the place in the loop: XLA for CPUs raises half precision before it slices, and would
    # otherwise move that out of the loop and hold everything in float32.
    logits, first = jax.lax.optimization_barrier((logits, first))
    piece = jax.lax.dynamic_slice_in_dim(logits, first, size, axis=-1)
    (piece,) = as_floats(piece)
    return zero_masked(piece, jnp.broadcast_to(mask[..., None], piece.shape))


def _along(x: Shaped[Array, "size"], like: Shaped[Array, "*batch size"]) -> Shaped[Array, "..."]:
    """One number per entry, with as many axes as `like` has."""
    return x.reshape((1,) * (like.ndim - 1) + x.shape)


def _over_chunks(
    start: Callable[[Array, Array], Total],
    merge: Callable[[Total, Total], Total],
    vocab: int,
    chunk_size: int | None,
) -> Total:
    """Folds ``start(first, counts)`` over the vocabulary by `merge`.

    `first` is where a chunk begins, and `counts` tells which of its entries are new: the last one
    is moved back to end with the vocabulary. The first chunk begins the sum, so that the loop
    carries what its body makes, under `jax.shard_map` too.
    """
    size = vocab if chunk_size is None else min(chunk_size, vocab)
    everything = jnp.ones(size, bool)
    total = start(jnp.zeros((), jnp.int32), everything)

    def body(number: Array, total: Total) -> Total:
        wanted = number * size
        first = jnp.minimum(wanted, vocab - size)
        return merge(total, start(first, first + jnp.arange(size, dtype=jnp.int32) >= wanted))

    number = -(-vocab // size)
    return total if number == 1 else jax.lax.fori_loop(1, number, body, total)


def _statistics(
    chunk_size: int | None, logits: Float[Array, "*batch vocab"], mask: Bool[Array, "*batch"]
) -> tuple[_Normaliser, Float[Array, "*batch"]]:
    """The normaliser and the entropy in one pass, with a running maximum."""

    def start(first: Array, counts: Array) -> tuple[Array, Array, Array]:
        piece = _chunk(logits, mask, first, counts.size)
        piece = jnp.where(_along(counts, piece), piece, jnp.asarray(-jnp.inf, piece.dtype))
        largest = jnp.max(piece, axis=-1)
        possible = piece != -jnp.inf
        relative = zero_masked(piece - largest[..., None], possible)
        weights = zero_masked(jnp.exp(relative), possible)
        return largest, jnp.sum(weights, axis=-1), jnp.sum(weights * relative, axis=-1)

    def moved(part: tuple[Array, Array, Array], largest: Array) -> tuple[Array, Array]:
        """The sums of a part, relative to another maximum."""
        own, total, moment = part
        empty = own == -jnp.inf
        down = jnp.where(empty, jnp.zeros_like(own), own - largest)
        factor = jnp.where(empty, jnp.zeros_like(own), jnp.exp(down))
        return factor * total, factor * (moment + total * down)

    def merge(
        one: tuple[Array, Array, Array], other: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        largest = jnp.maximum(one[0], other[0])
        (total, moment), (more, further) = moved(one, largest), moved(other, largest)
        return largest, total + more, moment + further

    largest, total, moment = _over_chunks(start, merge, logits.shape[-1], chunk_size)
    log_sum = jnp.log(total)
    return _Normaliser(largest, log_sum), log_sum - moment / total


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _normaliser(
    chunk_size: int | None, logits: Float[Array, "*batch vocab"], mask: Bool[Array, "*batch"]
) -> _Normaliser:
    return _statistics(chunk_size, logits, mask)[0]


@_normaliser.defjvp
def _normaliser_jvp(chunk_size, primals, tangents):
    logits, mask = primals
    normaliser = _normaliser(chunk_size, logits, mask)

    def slope(logits: Array, normaliser: _Normaliser) -> Array:
        logprobs, possible = normaliser.logprobs(logits)
        return zero_masked(jnp.exp(logprobs), possible)

    change = _contract(slope, tangents[0], mask, logits, normaliser)
    return normaliser, _Normaliser(jnp.zeros_like(normaliser.shift), change)


def _contract(
    slope: Callable[..., Array],
    tangent: Float[Array, "*batch vocab"],
    mask: Bool[Array, "*batch"],
    logits: Float[Array, "*batch vocab"],
    *constants: object,
) -> Float[Array, "*batch"]:
    """``sum_v slope_v tangent_v``, where the backward pass works the slope out when it needs it.

    Otherwise the slope, as large as the logits, would be kept from the forward pass until then.
    """

    def contract(tangent: Array, logits: Array, *constants: object) -> Array:
        rows = jnp.broadcast_to(mask[..., None], logits.shape)
        logits, _ = as_floats(logits, tangent)
        weights = zero_masked(slope(zero_masked(logits, rows), *constants), rows)
        return jnp.sum(weights * zero_masked(tangent.astype(weights.dtype), rows), axis=-1)

    # What the barriers of prevent_cse would prevent is that the slope joins the arithmetic around.
    return jax.checkpoint(contract, prevent_cse=False)(tangent, logits, *constants)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _token_logprobs(
    chunk_size: int | None,
    logits: Float[Array, "*batch vocab"],
    tokens: Integer[Array, "*batch"],
    mask: Bool[Array, "*batch"],
) -> Float[Array, "*batch"]:
    shift, log_sum = _normaliser(chunk_size, logits, mask)
    (chosen,) = as_floats(jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0])
    return zero_masked(chosen - shift - log_sum, mask)


@_token_logprobs.defjvp
def _token_logprobs_jvp(chunk_size, primals, tangents):
    logits, tokens, mask = primals
    normaliser = _normaliser(chunk_size, logits, mask)

    def slope(logits: Array, normaliser: _Normaliser) -> Array:
        logprobs, possible = normaliser.logprobs(logits)
        entries = jnp.arange(logits.shape[-1], dtype=tokens.dtype)
        chosen = _along(entries, logits) == tokens[..., None]
        return zero_masked(chosen.astype(logits.dtype) - jnp.exp(logprobs), possible)

    change = _contract(slope, tangents[0], mask, logits, normaliser)
    return _token_logprobs(chunk_size, logits, tokens, mask), change


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _entropy(
    chunk_size: int | None, logits: Float[Array, "*batch vocab"], mask: Bool[Array, "*batch"]
) -> Float[Array, "*batch"]:
    return zero_masked(_statistics(chunk_size, logits, mask)[1], mask)


@_entropy.defjvp
def _entropy_jvp(chunk_size, primals, tangents):
    logits, mask = primals
    entropy = _entropy(chunk_size, logits, mask)
    normaliser = _normaliser(chunk_size, logits, mask)

    def slope(logits: Array, normaliser: _Normaliser, entropy: Array) -> Array:
        logprobs, possible = normaliser.logprobs(logits)
        return zero_masked(-jnp.exp(logprobs) * (logprobs + entropy[..., None]), possible)

    return entropy, _contract(slope, tangents[0], mask, logits, normaliser, entropy)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _divergence(
    settings: tuple[int | None, KLDirection],
    logits: Float[Array, "*batch vocab"],
    ref_logits: Float[Array, "*batch vocab"],
    mask: Bool[Array, "*batch"],
) -> Float[Array, "*batch"]:
    chunk_size, direction = settings
    first, second = (
        (logits, ref_logits) if direction == "policy||reference" else (ref_logits, logits)
    )
    of_first = _normaliser(chunk_size, first, mask)
    of_second = _normaliser(chunk_size, second, mask)

    def start(begin: Array, counts: Array) -> Array:
        one, other = (_chunk(x, mask, begin, counts.size) for x in (first, second))
        terms = _terms(one, other, of_first, of_second)
        return jnp.sum(jnp.where(_along(counts, terms), terms, jnp.zeros_like(terms)), axis=-1)

    # Rows that do not count are 0 in both, and so is their divergence.
    return _over_chunks(start, jnp.add, logits.shape[-1], chunk_size)


def _terms(
    first: Float[Array, "*batch vocab"],
    second: Float[Array, "*batch vocab"],
    of_first: _Normaliser,
    of_second: _Normaliser,
) -> Float[Array, "*batch vocab"]:
    """``q - p + p log(p / q)`` for each entry, with p the first distribution and q the second."""
    (log_p, p_possible), (log_q, q_possible) = (
        of_first.logprobs(first),
        of_second.logprobs(second),
    )
    p, q = jnp.exp(log_p), zero_masked(jnp.exp(log_q), q_possible)
    difference = log_p - log_q
    # Where p and q are close q - p has no digits left; where p is far below q expm1 overflows.
    close = p * (jnp.expm1(-difference) + difference)
    terms = jnp.where(difference > -1, close, q - p + p * difference)
    terms = jnp.where(p_possible, terms, q)
    impossible = p_possible & ~q_possible & (p > 0)
    return jnp.where(impossible, jnp.full_like(terms, jnp.inf), terms)


@_divergence.defjvp
def _divergence_jvp(settings, primals, tangents):
    logits, ref_logits, mask = primals
    chunk_size, direction = settings
    divergence = _divergence(settings, logits, ref_logits, mask)
    normaliser = _normaliser(chunk_size, logits, mask)
    of_reference = _normaliser(chunk_size, ref_logits, mask)

    def slope(
        logits: Array,
        ref_logits: Array,
        normaliser: _Normaliser,
        of_reference: _Normaliser,
        divergence: Array,
    ) -> Array:
        logits, ref_logits = as_floats(logits, ref_logits)
        log_p, possible = normaliser.logprobs(logits)
        log_q, q_possible = of_reference.logprobs(ref_logits)
        p, q = jnp.exp(log_p), zero_masked(jnp.exp(log_q), q_possible)
        if direction == "reference||policy":
            return zero_masked(p - q, possible)
        return zero_masked(p * (log_p - log_q - divergence[..., None]), possible)

    change = _contract(
        slope, tangents[0], mask, logits, ref_logits, normaliser, of_reference, divergence
    )
    return divergence, change
