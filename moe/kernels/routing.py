"""Fused router kernel after the logits: scores, top-k, gate weights and counts in one pass over
memory.

A program has 64 tokens and takes the maximum over their experts k times; XLA would sort every row
for a top-k this small. Up to 128 experts stay in registers all along.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from moe.kernels.choice import call_implementation
from moe.kernels.mosaic import Target, launch
from moe.remat import ROUTED
from sharding.collectives import match_varying

TOKENS = 64
"""Tokens of one program."""
MAX_EXPERTS = 256
"""Experts of a network, at most."""
MAX_EXPERTS_WITHOUT_SPILLS = 128
"""Experts of a network, at most, that all stay in registers; of more, a chunk is there."""
MAX_CHUNK = 64
"""Maximum number of experts in registers at a time, if not all fit."""


class Rule(NamedTuple):
    """Routing rule: how the experts of a token are selected.

    Attributes:
      k: number of experts per token.
      sigmoid: scores are ``sigmoid(logits)``; otherwise ``softmax(logits)``.
      after_topk: logits select, and the gate weights are the softmax of the selected logits.
      renormalise: the selected scores are divided by their sum.
      scaling: factor on the gate weights.
      groups: number of equal groups of neighbouring experts.
      open_groups: number of groups that a token may select experts from: those with the largest
        sums of their best ``k / open_groups`` scores, among equal ones the first.
    """

    k: int
    sigmoid: bool = False
    after_topk: bool = False
    renormalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    open_groups: int = 1


class RouterOutput(NamedTuple):
    """Output of a router.

    Attributes:
      experts: ``[token, k]`` ids of the experts with the largest scores, the largest first and
        among equal ones the first.
      probs: ``[token, k]`` their gate weights, float32.
      probabilities: ``[token, expert]`` scores that sum to 1, float32.
      counts: ``[expert]`` sum of the weights of the tokens that selected it; no gradient.
    """

    experts: Array
    probs: Array
    probabilities: Array
    counts: Array


def route(
    logits: Float[Array, "token expert"],
    bias: Float[Array, "expert"],
    weights: Float[Array, "token"],
    rule: Rule,
    *,
    implementation: str | None = None,
) -> RouterOutput:
    """Top-k routing: scores, the selection by ``score + bias``, gate weights and counts, in
    float32.

    The reference implementation of a whole router is `moe.router.routing.topk_routing`.

    Args:
      bias: added to each expert's score for the selection alone; it does not affect the gate
        weights, and has no gradient.
      weights: weight of each token in the counts; 0 for padding, which is routed as any other.
      implementation: "mosaic", "plain" or "interpreted", see `moe.kernels.choice`.

    Raises:
      ValueError: on another implementation, and where "mosaic" does not support the call: on other
        devices than CUDA's, for more than 256 experts, and for a number of them that is not a
        multiple of 8.
    """
    operands = match_varying(tuple(x.astype(jnp.float32) for x in (logits, bias, weights)))
    outputs: Any = _route(*operands, rule, implementation)
    return RouterOutput(*outputs)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _route(logits, bias, weights, rule, implementation):
    return call_implementation(
        implementation,
        partial(_plain, rule),
        partial(_kernel, rule),
        (logits, bias, weights),
        operation="route",
        obstacle=_obstacle(logits),
    )


def _forward(logits, bias, weights, rule, implementation):
    outputs: Any = _route(logits, bias, weights, rule, implementation)
    experts, probs, probabilities, counts = outputs
    # Named here, as the expert ids are a residual too. If a remat policy saves them, the backward
    # pass need not route again to repeat the dispatch. Probabilities are as wide as the logits, and
    # no gradient needs them.
    experts, probs, counts = (checkpoint_name(x, ROUTED) for x in (experts, probs, counts))
    return (experts, probs, probabilities, counts), (logits, experts)


def _backward(rule, implementation, residuals, gradients):
    # The selection is constant: the gradient of a softmax at given expert ids. XLA's is a few
    # elementwise operations, and no kernel of its own is worth it.
    logits, experts = residuals
    _, grad_probs, grad_probabilities, _ = gradients
    _, vjp_fn = jax.vjp(partial(_gate_weights_of, rule, experts), logits)
    return *vjp_fn((grad_probs, grad_probabilities)), None, None


_route.defvjp(_forward, _backward)


def supports_experts(num_experts: int, most: int = MAX_EXPERTS) -> bool:
    return num_experts % 8 == 0 and 8 <= num_experts <= most


def _obstacle(logits: Array) -> str | None:
    tokens, experts = logits.shape
    if tokens and supports_experts(experts):
        return None
    return (
        f"{tokens} tokens among {experts} experts (needs one token or more, and a multiple of 8 "
        f"experts up to {MAX_EXPERTS}); use None."
    )


def _log_scores(rule: Rule, logits: Array) -> Array:
    return jax.nn.log_sigmoid(logits) if rule.sigmoid else logits


def _gate_weights_of(rule: Rule, experts: Array, logits: Array) -> tuple[Array, Array]:
    """Gate weights of given expert ids, and the probabilities of all experts."""
    probabilities = jax.nn.softmax(_log_scores(rule, logits), axis=-1)
    if rule.after_topk or rule.renormalise:
        among = logits if rule.after_topk else _log_scores(rule, logits)
        probs = jax.nn.softmax(jnp.take_along_axis(among, experts, axis=-1), axis=-1)
    else:
        scores = jax.nn.sigmoid(logits) if rule.sigmoid else probabilities
        probs = jnp.take_along_axis(scores, experts, axis=-1)
    return probs * rule.scaling, probabilities


def _plain(rule: Rule, logits: Array, bias: Array, weights: Array) -> tuple[Any, ...]:
    if rule.after_topk:
        ranking = logits
    else:
        ranking = jax.nn.sigmoid(logits) if rule.sigmoid else jax.nn.softmax(logits, axis=-1)
    ranking = ranking + bias[None, :]
    if rule.groups > 1:
        by_group = ranking.reshape(ranking.shape[0], rule.groups, -1)
        group_scores = jnp.sum(lax.top_k(by_group, rule.k // rule.open_groups)[0], axis=-1)
        is_open = jax.nn.one_hot(lax.top_k(group_scores, rule.open_groups)[1], rule.groups).any(
            axis=1
        )
        ranking = jnp.where(is_open[:, :, None], by_group, -jnp.inf).reshape(ranking.shape)
    _, experts = lax.top_k(ranking, rule.k)
    is_selected = jax.nn.one_hot(experts, logits.shape[1], dtype=jnp.float32)
    counts = jnp.einsum("t,tke->e", weights, is_selected, precision=lax.Precision.HIGHEST)
    return experts, *_gate_weights_of(rule, experts, logits), counts


def _kernel(
    rule: Rule, logits: Array, bias: Array, weights: Array, *, interpreted: bool
) -> tuple[Any, ...]:
    tokens, experts = logits.shape
    blocks = -(-tokens // TOKENS)
    padded, missing = blocks * TOKENS, blocks * TOKENS - tokens
    ids_shape = (rule.k * padded,)
    outputs = [
        jax.ShapeDtypeStruct(ids_shape, jnp.int32),
        jax.ShapeDtypeStruct(ids_shape, jnp.float32),
        jax.ShapeDtypeStruct((padded, experts), jnp.float32),
        jax.ShapeDtypeStruct((blocks * experts,), jnp.float32),
    ]
    operands = [jnp.pad(logits, ((0, missing), (0, 0))), bias, jnp.pad(weights, (0, missing))]
    if experts > MAX_EXPERTS_WITHOUT_SPILLS:
        outputs.append(jax.ShapeDtypeStruct((padded, experts), jnp.float32))
    expert_ids, probs, probabilities, counts, *_ = launch(
        partial(_body, rule, padded, experts),
        blocks,
        outputs,
        operands,
        operation="route",
        interpreted=interpreted,
    )
    # [column, token] in the kernel, so that a warpgroup writes neighbouring elements together.
    expert_ids, probs = (array.reshape(rule.k, padded).T[:tokens] for array in (expert_ids, probs))
    return expert_ids, probs, probabilities[:tokens], counts.reshape(blocks, experts).sum(axis=0)


def _body(rule: Rule, padded: int, experts: int, target: Target, block: Any, *refs: Any) -> None:
    logits, bias, weights, expert_ids, probs, probabilities, counts, *scratch = refs
    width = _chunk_width(experts)
    token_slice = pl.ds(block * TOKENS, TOKENS)
    ranking = Ranking(target, experts, width, token_slice, *scratch)
    broadcast, full, reduce_rows = ranking.broadcast, ranking.full, ranking.reduce_rows

    # What is needed twice is read twice, the second time from the cache: registers hold one number
    # for each token and expert of a chunk, beside vectors of a number per token.
    def read_logits(first):
        return target.load(logits.at[token_slice, pl.ds(first, width)])

    def read_logs(first):
        """Logarithms of the scores but for a constant."""
        block_logits = read_logits(first)
        if not rule.sigmoid:
            return block_logits
        # log sigmoid(x) = min(x, 0) - log(1 + e^-|x|)
        below = jnp.minimum(block_logits, full(0))
        return below - jnp.log(1 + jnp.exp(-jnp.abs(block_logits)))

    def vector(value):
        return target.full((TOKENS,), value)

    def largest_log(first, most):
        return jnp.maximum(most, reduce_rows(jnp.max, read_logs(first)))

    most = ranking.over_chunks(largest_log, vector(-jnp.inf))

    def add_powers(first, total):
        return total + reduce_rows(jnp.sum, jnp.exp(read_logs(first) - broadcast(most)))

    total = ranking.over_chunks(add_powers, vector(0))

    def shares_of(first):
        return target.tiled(jnp.exp(read_logs(first) - broadcast(most)) / broadcast(total))

    def rank(first, carry):
        shares, columns = shares_of(first), pl.ds(first, width)
        target.store(probabilities.at[token_slice, columns], shares)
        # The bias selects and does not weigh: `ranking` is compared, `weighing` becomes the gate
        # weights.
        if rule.after_topk:
            scores = read_logits(first)
        else:
            scores = target.tiled(jnp.exp(read_logs(first))) if rule.sigmoid else shares
        ranking.write(first, scores + broadcast(target.load(bias.at[columns], 1), 1))
        return carry

    ranking.over_chunks(rank, 0)
    if rule.groups > 1:
        _close_groups(rule, ranking)
    # k passes; each first removes the expert that the one before it found.
    selected = []
    for index in range(rule.k):
        _, first = ranking.find_largest(excluded=selected[-1:], forever=True)
        target.store(expert_ids.at[pl.ds(index * padded + block * TOKENS, TOKENS)], first)
        selected.append(first)

    def read_weighing(first):
        if rule.after_topk:
            return read_logits(first)
        if rule.renormalise:
            return read_logs(first)
        return target.tiled(jnp.exp(read_logs(first))) if rule.sigmoid else shares_of(first)

    def weigh(first, sums):
        weighing = read_weighing(first)
        hits = (ranking.is_expert(first, expert) for expert in selected)
        return tuple(
            score + reduce_rows(jnp.sum, jnp.where(hit, weighing, full(0)))
            for score, hit in zip(sums, hits, strict=True)
        )

    selected_scores = ranking.over_chunks(weigh, (vector(0),) * rule.k)
    # A softmax over logarithms of scores is the scores over their sum, and does not underflow.
    if rule.after_topk or rule.renormalise:
        most = functools.reduce(jnp.maximum, selected_scores)
        selected_scores = [jnp.exp(score - most) for score in selected_scores]
        total = functools.reduce(jnp.add, selected_scores)
        selected_scores = [score / total for score in selected_scores]
    for index, score in enumerate(selected_scores):
        rank_slice = pl.ds(index * padded + block * TOKENS, TOKENS)
        target.store(probs.at[rank_slice], target.tiled(score * rule.scaling))

    token_weights = target.load(weights.at[token_slice], 0)

    def count(first, carry):
        weight, weighted = broadcast(token_weights), full(0)
        for expert in selected:
            weighted = jnp.where(ranking.is_expert(first, expert), weight, weighted)
        # Counts of this block alone; they are added up after the kernel, in order and without
        # atomics.
        target.store(
            counts.at[pl.ds(block * experts + first, width)],
            target.tiled(jnp.sum(weighted, axis=0), 1),
        )
        return carry

    ranking.over_chunks(count, 0)


def _chunk_width(experts: int) -> int:
    """Columns of a chunk: all if a thread has registers for them, otherwise a divisor."""
    if experts <= MAX_EXPERTS_WITHOUT_SPILLS:
        return experts
    return next(width for width in range(MAX_CHUNK, 0, -8) if experts % width == 0)


class Ranking:
    """Numbers by which experts are selected, ``[token, expert]``, of the tokens of a program.

    They are in registers. If these do not suffice, they are in memory, and a chunk of columns is in
    registers at a time.
    """

    def __init__(self, target: Target, experts: int, width: int, token_slice: Any, *scratch: Any):
        self.experts, self._target, self._width = experts, target, width
        self._token_slice, self._scratch = token_slice, scratch
        self._value: Any = None

    def over_chunks(
        self, step: Callable[[Any, Any], Any], carry: Any, start: int = 0, stop: int | None = None
    ) -> Any:
        """Runs ``carry = step(first column, carry)`` for each chunk with columns of a range."""
        if not self._scratch:
            return step(0, carry)
        stop = self.experts if stop is None else stop
        chunks = start // self._width, -(-stop // self._width)
        return lax.fori_loop(*chunks, lambda n, carry: step(n * self._width, carry), carry)

    def read(self, first: Any) -> Any:
        """The chunk from a column on."""
        if not self._scratch:
            return self._value
        return self._target.load(self._scratch[0].at[self._token_slice, pl.ds(first, self._width)])

    def write(self, first: Any, chunk: Any) -> None:
        """Sets the chunk from a column on."""
        if not self._scratch:
            self._value = chunk
            return
        columns = pl.ds(first, self._width)
        self._target.store(self._scratch[0].at[self._token_slice, columns], chunk)

    def find_largest(
        self,
        start: int = 0,
        stop: int | None = None,
        excluded: Sequence[Any] = (),
        *,
        forever: bool = False,
    ) -> tuple[Any, Any]:
        """The largest value of each row, and the column of its first occurrence.

        Args:
          start, stop: range of columns; None is all from `start` on.
          excluded: columns of each row that count as minus infinity.
          forever: they are so from here on.
        """
        stop = self.experts if stop is None else stop
        has_others = start > 0 or stop < self.experts

        def search(first, carry):
            chunk, (largest, column) = self.read(first), carry
            for expert in excluded:
                chunk = jnp.where(self.is_expert(first, expert), self.full(-jnp.inf), chunk)
            if excluded and forever:
                self.write(first, chunk)
            if has_others:
                within = self.in_range(first, start, stop) > 0
                chunk = jnp.where(within, chunk, self.full(-jnp.inf))
            # Among equal values the first column, as `lax.top_k` selects: an argmax in two
            # reductions.
            here = self.reduce_rows(jnp.max, chunk)
            beyond = self.full(self.experts, jnp.int32)
            at = jnp.where(chunk == self.broadcast(here), self._columns(first), beyond)
            at = self.reduce_rows(jnp.min, at)
            equal = jnp.where(here == largest, jnp.minimum(column, at), column)
            return jnp.maximum(largest, here), jnp.where(here > largest, at, equal)

        least = self._target.full((TOKENS,), -jnp.inf)
        none = self._target.full((TOKENS,), self.experts, jnp.int32)
        return self.over_chunks(search, (least, none), start, stop)

    def is_expert(self, first: Any, expert: Any) -> Any:
        """Mask of the column of an expert of each row, in the chunk from a column on."""
        return self._columns(0) == self.broadcast(expert - first)

    def in_range(self, first: Any, start: int, stop: int) -> Any:
        """1 in the columns of a range, else 0, in the chunk from a column on."""
        columns = self._columns(first)
        after = (columns >= start).astype(jnp.int32)
        return after * (columns < stop).astype(jnp.int32)

    def broadcast(self, vector: Any, dimension: int = 0) -> Any:
        """A number for each row of a chunk, or for each column, as a chunk."""
        return self._target.broadcast(vector, (TOKENS, self._width), dimension)

    def full(self, value: float | int, dtype: Any = jnp.float32) -> Any:
        return self._target.full((TOKENS, self._width), value, dtype)

    def reduce_rows(self, reduce: Callable[..., Any], chunk: Any) -> Any:
        return self._target.tiled(reduce(chunk, axis=1))

    def _columns(self, first: Any) -> Any:
        return self._target.iota((TOKENS, self._width), 1) + first


def _close_groups(rule: Rule, ranking: Ranking) -> None:
    """Sets the experts of groups that a token may not select from to minus infinity."""
    width = ranking.experts // rule.groups
    bounds = [(group * width, (group + 1) * width) for group in range(rule.groups)]
    # The score of a group is the sum of its best experts, found as the top-k itself is.
    scores = []
    for start, stop in bounds:
        best, excluded = [], []
        for _ in range(rule.k // rule.open_groups):
            largest, first = ranking.find_largest(start, stop, excluded=excluded)
            best.append(largest)
            excluded.append(first)
        scores.append(functools.reduce(jnp.add, best))
    for group, ((start, stop), score) in enumerate(zip(bounds, scores, strict=True)):
        # The rank of a group is the number of those before it, with a larger score or the same
        # score and a lower index. Comparing all pairs needs no sort; there are few groups.
        before = [
            (other >= score if index < group else other > score).astype(jnp.int32)
            for index, other in enumerate(scores)
            if index != group
        ]
        is_closed = (functools.reduce(jnp.add, before) >= rule.open_groups).astype(jnp.int32)

        def close(first, carry, is_closed=is_closed, start=start, stop=stop):
            closed = ranking.broadcast(is_closed) * ranking.in_range(first, start, stop)
            chunk = ranking.read(first)
            ranking.write(first, jnp.where(closed > 0, ranking.full(-jnp.inf), chunk))
            return carry

        ranking.over_chunks(close, 0, start, stop)
