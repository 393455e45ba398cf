"""Token sampling from logits: temperature, top-k, top-p, greedy, and the log-probabilities.

Two distributions are distinguished throughout. The *policy* is the softmax of the logits over the
base temperature, every token included: the losses differentiate it. The distribution *sampled from*
has the temperature of its row, which may follow the policy's entropy, and then top-k and top-p are
applied. Where the temperature is constant and no token is removed, the two are bitwise identical.

A rollout samples all rows with one static `Sampling`, whose constants the compiler folds. Requests
to a server each have parameters of their own, arrays in `RowSampling`, so that requests of any kind
share one compiled function; the policy of every row is then the softmax at temperature 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Integer

from jrl.losses import EntropyStatistics, entropy_from_logits
from jrl.recipes.base.temperature import AdaptiveTemperature
from jrl.rollout.adjustments import (
    Adjustments,
    Constraint,
    RowAdjustments,
    apply_top_k_and_min_p,
    stack_adjustments,
)

Leaf = TypeVar("Leaf")

LEAST_TOP_P = 2.0**-126
"""Least top_p. Smaller values are subnormal in float32, may flush to 0 and would leave no token."""
LEAST_TEMPERATURE = 1e-30
"""Least temperature above 0. Dividing logits by smaller ones may overflow in float32."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Args:
      temperature: divides the logits; 0 is greedy (argmax).
      top_k: keeps only this many of the most probable tokens, and ties with the last of them; None
        keeps all.
      top_p: keeps the smallest set of most probable tokens whose total probability reaches this, in
        (0, 1]; None keeps all. Ties with the last one stay. Applied after `top_k`, to the tokens
        that it keeps.
      adaptive: rule by which the temperature of a row follows the policy's entropy, with base
        `temperature`; None is constant. Greedy decoding ignores it.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    adaptive: AdaptiveTemperature | None = None

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} is negative: use 0 for greedy.")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature} is less than {LEAST_TEMPERATURE:g}, and logits "
                "divided by it overflow in float32: use 0 for greedy."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} keeps no token: use 1 or more, or None for all.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1], or be None for all tokens.")
        if self.top_p is not None and self.top_p < LEAST_TOP_P:
            raise ValueError(
                f"top_p={self.top_p} leaves no token in float32: use temperature=0, or top_k=1."
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def policy_temperature(self) -> float:
        """Temperature that divides the logits of the policy. Greedy decoding has no temperature;
        its policy is the one at temperature 1."""
        return 1.0 if self.greedy else self.temperature

    @property
    def truncates(self) -> bool:
        """True if tokens with probability above 0 under the policy may have probability 0 in the
        distribution sampled from."""
        return self.greedy or self.top_k is not None or self.top_p is not None

    @property
    def recomputable(self) -> bool:
        """True if the logits of a token determine the distribution that it is sampled from: not if
        its temperature follows statistics of other tokens."""
        return self.adaptive is None


GREEDY = Sampling(temperature=0.0)


def compiled_sampling(sampling: Sampling | None) -> Sampling:
    """Static parameters of compiled functions that sample; None has parameters for each row."""
    # Greedy decoding shares the functions of `Sampling()`: it differs in an argument only
    # (`SamplerState.greedy`). Functions of per-request parameters have no other static ones.
    return Sampling() if sampling is None or sampling.greedy else sampling


@struct.dataclass
class RowSampling(Generic[Leaf]):
    """Sampling parameters of each row.

    Attributes:
      temperatures: ``[row]`` divisors of the logits; 0 is greedy.
      top_ps: ``[row]`` probability in (0, 1]: the smallest set of most probable tokens with this
        total probability is kept, and ties with the last of them.
      seeds: ``[row, 2]`` words, the low one first.
      needs_top_tokens: ``[row]`` true if the top-k tokens of each position are recorded.
      adjustments: adjustments of the logits; None if no row has any, which is another compiled
        function.
    """

    temperatures: Leaf
    top_ps: Leaf
    seeds: Leaf
    needs_top_tokens: Leaf
    adjustments: RowAdjustments[Leaf] | None = None


class RequestSampling(NamedTuple):
    """Sampling parameters of one request.

    Attributes:
      temperature, top_p, needs_top_tokens: as in `RowSampling`.
      seed: integer in 0..2**64 - 1.
      adjustments: adjustments of the logits; None changes none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    needs_top_tokens: bool = False
    adjustments: Adjustments | None = None

    @property
    def constraint(self) -> Constraint | None:
        """Tokens that are allowed; None allows all."""
        return None if self.adjustments is None else self.adjustments.constraint


IDLE_SAMPLING = RequestSampling(temperature=0.0)
"""Sampling parameters of a row that has no request: no noise is generated for it."""


def stack_sampling(
    requests: Mapping[int, RequestSampling | None], rows: int, vocab_size: int
) -> RowSampling[np.ndarray]:
    """Sampling parameters of rows, an entry for each, so that requests of any kind share one
    compiled function; those with adjustments another one.

    Args:
      requests: parameters by row, `IDLE_SAMPLING` for the others.
      rows: their number.
    """
    adjustments = {row: each.adjustments for row, each in requests.items() if each is not None}
    parameters = [requests.get(row) or IDLE_SAMPLING for row in range(rows)]
    return RowSampling(
        temperatures=np.array([each.temperature for each in parameters], np.float32),
        top_ps=np.array([each.top_p for each in parameters], np.float32),
        # In two words, the low one first: JAX has no 64-bit integers by default.
        seeds=np.array([each.seed for each in parameters], "<u8").view("<u4").reshape(rows, 2),
        needs_top_tokens=np.array([each.needs_top_tokens for each in parameters]),
        adjustments=stack_adjustments(adjustments, rows, vocab_size),
    )


def policy_logits(
    logits: Float[Array, "row vocab"], sampling: Sampling
) -> Float[Array, "row vocab"]:
    """Logits of the policy at the base temperature, every token included."""
    return logits / sampling.policy_temperature


def row_temperatures(
    logits: Float[Array, "row vocab"],
    sampling: Sampling,
    adaptive: AdaptiveTemperature,
    entropy: EntropyStatistics[Array],
) -> Float[Array, "row"]:
    """Adaptive temperature of each row, from the entropy of the policy's distribution over its
    token and the statistics of the step before."""
    of_rows = entropy_from_logits(policy_logits(logits, sampling))
    everywhere = jnp.ones_like(of_rows, bool)
    return adaptive.token_temperatures(of_rows, everywhere, entropy, sampling.temperature)


def sampler_logits(
    logits: Float[Array, "row vocab"],
    sampling: Sampling,
    entropy: EntropyStatistics[Array] | None = None,
) -> Float[Array, "row vocab"]:
    """Logits of the distribution that tokens are sampled from: -inf for removed tokens.

    Args:
      entropy: see `sample_tokens`.

    References:
      Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019 (top-p).
      https://arxiv.org/abs/1904.09751
    """
    if sampling.greedy:
        best = jnp.argmax(logits, axis=-1)
        return jnp.where(jnp.arange(logits.shape[-1])[None] == best[:, None], 0.0, -jnp.inf)
    if sampling.adaptive is None or entropy is None:
        logits = policy_logits(logits, sampling)
    else:
        logits = logits / row_temperatures(logits, sampling, sampling.adaptive, entropy)[:, None]
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        lowest = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = _apply_top_p(logits, sampling.top_p)
    return logits


def _apply_top_p(
    logits: Float[Array, "row vocab"], top_p: float | Float[Array, "row 1"]
) -> Float[Array, "row vocab"]:
    """Sets the logits of tokens outside of the top-p to -inf."""
    ordered = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The token that reaches top_p stays, so the most probable one always does; top_p = 1 keeps all,
    # even if rounding leaves the sum below 1.
    within = (before < top_p) | (top_p >= 1)
    lowest = jnp.min(jnp.where(within, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)


def logprobs_of(
    logits: Float[Array, "row vocab"], tokens: Int[Array, "row"]
) -> Float[Array, "row"]:
    """Log-probabilities of tokens, ``log softmax(logits)[token]``, in nats."""
    selected = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return selected - jax.nn.logsumexp(logits, axis=-1)


def row_keys(key: Array, *ids: Integer[Array, "row"]) -> Array:
    """RNG key of each row's next token, from ids that depend on neither slot, step nor device."""
    return jax.vmap(lambda *of_row: reduce(jax.random.fold_in, of_row, key))(*ids)


def sample_tokens(
    logits: Float[Array, "row vocab"],
    sampling: Sampling,
    keys: Array,
    entropy: EntropyStatistics[Array] | None = None,
    greedy: Bool[Array, ""] | None = None,
) -> tuple[Int[Array, "row"], Float[Array, "row"], Float[Array, "row"]]:
    """Samples one token per row, each with its own RNG key, so that the result does not depend on
    the device or slot of a row.

    Args:
      entropy: statistics of the step before, by which a temperature that is `Sampling.adaptive`
        follows the entropy of each row. None samples at the base temperature, and so do
        `EntropyStatistics.neutral`, which need no other compiled function than any statistics.
      greedy: true to sample as `GREEDY` does, in the compiled function of `Sampling()`; None is as
        `sampling` says.

    Returns:
      The tokens, their log-probabilities in the distribution sampled from (at the temperature of
      the row, after top-k and top-p), and in the full policy at the base temperature.
    """
    narrowed = sampler_logits(logits, sampling, entropy)
    noise = _noise(keys, logits)
    if greedy is not None:
        noise = jnp.where(greedy, 0.0, noise)
    tokens = argmax_token(narrowed + noise)
    behaviour = logprobs_of(narrowed, tokens)
    if greedy is not None:
        behaviour = jnp.where(greedy, 0.0, behaviour)
    return tokens, behaviour, logprobs_of(policy_logits(logits, sampling), tokens)


def sample_rows(
    logits: Float[Array, "row vocab"],
    rows: RowSampling[Array],
    keys: Array,
    adjusted: Float[Array, "row vocab"] | None = None,
) -> tuple[Int[Array, "row"], Float[Array, "row"], Float[Array, "row"]]:
    """Samples one token per row, each with its own parameters and RNG key.

    Args:
      adjusted: the logits after `jrl.rollout.adjustments.adjust_logits`; None if rows have no
        adjustments.

    Returns:
      The tokens, their log-probabilities in the distribution sampled from (0 if it is greedy),
      and in the policy at temperature 1.
    """
    greedy, policy = rows.temperatures == 0, logits
    logits = policy if adjusted is None else adjusted

    def sample() -> tuple[Array, Array]:
        scaled = logits / jnp.where(greedy, 1.0, rows.temperatures)[:, None]
        if rows.adjustments is not None:
            scaled = _narrow(scaled, rows.adjustments, greedy)
        any_top_p = jnp.any((rows.top_ps < 1) & ~greedy)
        narrowed = jax.lax.cond(
            any_top_p, lambda: _apply_top_p(scaled, rows.top_ps[:, None]), lambda: scaled
        )
        tokens = argmax_token(narrowed + _noise(keys, logits))
        return tokens, logprobs_of(narrowed, tokens)

    best = argmax_token(logits)
    # If every row is greedy, no noise is generated.
    tokens, behaviour = jax.lax.cond(
        jnp.all(greedy), lambda: (best, jnp.zeros_like(logits[:, 0])), sample
    )
    tokens = jnp.where(greedy, best, tokens)
    return tokens, jnp.where(greedy, 0.0, behaviour), logprobs_of(policy, tokens)


def _narrow(
    scaled: Float[Array, "row vocab"],
    adjustments: RowAdjustments[Array],
    greedy: Bool[Array, "row"],
) -> Float[Array, "row vocab"]:
    """Logits after top-k and min-p of rows that have them and are sampled."""
    narrowed = ((adjustments.top_ks > 0) | (adjustments.min_ps > 0)) & ~greedy
    return jax.lax.cond(
        jnp.any(narrowed),
        lambda: jnp.where(narrowed[:, None], apply_top_k_and_min_p(scaled, adjustments), scaled),
        lambda: scaled,
    )


def _noise(keys: Array, logits: Float[Array, "row vocab"]) -> Float[Array, "row vocab"]:
    """Gumbel noise: the argmax of logits plus this is a sample of their softmax."""
    return jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], logits.dtype))(keys)


def argmax_token(logits: Float[Array, "row vocab"]) -> Int[Array, "row"]:
    """Argmax over the vocabulary, the first of equal maxima, as `jnp.argmax`."""
    return jax.lax.platform_dependent(logits, cpu=_argmax_in_two, default=_argmax_in_one)


def _argmax_in_one(logits: Array) -> Array:
    # One pass: an accelerator makes the noise in the same kernel and writes it nowhere.
    return jax.lax.argmax(logits, logits.ndim - 1, jnp.int32)


def _argmax_in_two(logits: Array) -> Array:
    # Two plain reductions take a CPU a third of the time of argmax's one over pairs.
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits >= largest, ids[None], ids[-1]), axis=-1)
