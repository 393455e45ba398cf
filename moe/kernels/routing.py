"""Fused router kernel after the logits: scores, top-k, gate weights and counts in one pass over
memory.

A program has 64 tokens and all experts in registers and takes the maximum k times; XLA would sort
every row for a top-k this small.
"""

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
"""Experts of a network, at most: more would not stay in registers."""
MAX_EXPERTS_WITHOUT_SPILLS = 128
"""Experts of a network, at most, of which all stay in registers."""


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
      logits: router logits.
      bias: added to each expert's score for the selection alone; it does not affect the gate
        weights, and has no gradient.
      weights: weight of each token in the counts; 0 for padding, which is routed as any other.
      rule: the routing rule.
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
    # The selection is constant, so the gradient is that of a softmax at given expert ids: XLA's is
    # a few elementwise operations, and no kernel of its own is worth it.
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
    expert_ids, probs, probabilities, counts = launch(
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


def _body(
    rule: Rule,
    padded: int,
    experts: int,
    target: Target,
    block,
    logits,
    bias,
    weights,
    expert_ids,
    probs,
    probabilities,
    counts,
):
    shape = (TOKENS, experts)

    def broadcast(vector, dimension=0):
        return target.tiled(lax.broadcast_in_dim(vector, shape, (dimension,)))

    def full(value, dtype=jnp.float32):
        return target.tiled(jnp.full(shape, value, dtype))

    def reduce_rows(reduce, matrix):
        return target.tiled(reduce(matrix, axis=1))

    # One matrix, [token, expert], is in registers at a time, beside vectors of a number per token.
    # What is needed twice is read twice, the second time from the cache.
    token_slice = pl.ds(block * TOKENS, TOKENS)

    def read_logits():
        return target.load(logits.at[token_slice])

    def read_logs():
        """Logarithms of the scores but for a constant."""
        block_logits = read_logits()
        if not rule.sigmoid:
            return block_logits
        # log sigmoid(x) = min(x, 0) - log(1 + e^-|x|)
        below = jnp.minimum(block_logits, full(0))
        return below - jnp.log(1 + jnp.exp(-jnp.abs(block_logits)))

    logs = read_logs()
    most = reduce_rows(jnp.max, logs)
    powers = jnp.exp(logs - broadcast(most))
    total = reduce_rows(jnp.sum, powers)
    shares = target.tiled(powers / broadcast(total))
    target.store(probabilities.at[token_slice], shares)
    # The bias selects and does not weigh: `ranking` is compared, `weighing` becomes the gate
    # weights.
    if rule.after_topk:
        ranking = read_logits()
    else:
        ranking = target.tiled(jnp.exp(read_logs())) if rule.sigmoid else shares
    ranking = ranking + broadcast(target.load(bias, 1), 1)
    column = target.tiled(lax.broadcasted_iota(jnp.int32, shape, 1))

    def find_largest(ranking):
        """The largest value of each row, and the column of its first occurrence."""
        # Among equal values the first column, as `lax.top_k` selects: an argmax in two reductions.
        largest = reduce_rows(jnp.max, ranking)
        equal = ranking == broadcast(largest)
        first = reduce_rows(jnp.min, jnp.where(equal, column, full(experts, jnp.int32)))
        return largest, first

    if rule.groups > 1:
        ranking = _mask_closed_groups(rule, experts, target, ranking, column, find_largest)
    # k passes over registers; each removes the expert that it found.
    selected = []
    for rank in range(rule.k):
        _, first = find_largest(ranking)
        target.store(expert_ids.at[pl.ds(rank * padded + block * TOKENS, TOKENS)], first)
        selected.append(first)
        ranking = jnp.where(column == broadcast(first), full(-jnp.inf), ranking)

    if rule.after_topk:
        weighing = read_logits()
    elif rule.renormalise:
        weighing = read_logs()
    elif rule.sigmoid:
        weighing = target.tiled(jnp.exp(read_logs()))
    else:
        weighing = target.tiled(jnp.exp(read_logs() - broadcast(most)) / broadcast(total))
    selected_scores = [
        reduce_rows(jnp.sum, jnp.where(column == broadcast(first), weighing, full(0)))
        for first in selected
    ]
    # A softmax over logarithms of scores is the scores over their sum, and does not underflow.
    if rule.after_topk or rule.renormalise:
        most = selected_scores[0]
        for score in selected_scores[1:]:
            most = jnp.maximum(most, score)
        selected_scores = [jnp.exp(score - most) for score in selected_scores]
        total = sum(selected_scores[1:], selected_scores[0])
        selected_scores = [score / total for score in selected_scores]
    for rank, score in enumerate(selected_scores):
        rank_slice = pl.ds(rank * padded + block * TOKENS, TOKENS)
        target.store(probs.at[rank_slice], target.tiled(score * rule.scaling))

    # Counts of this block alone; they are added up after the kernel, in order and without atomics.
    weight, weighted = broadcast(target.load(weights.at[token_slice], 0)), full(0)
    for first in selected:
        weighted = jnp.where(column == broadcast(first), weight, weighted)
    target.store(
        counts.at[pl.ds(block * experts, experts)],
        target.tiled(jnp.sum(weighted, axis=0), 1),
    )


def _mask_closed_groups(rule: Rule, experts: int, target: Target, ranking, column, find_largest):
    """`ranking`, with -inf for the experts of groups that a token may not select from."""
    width = experts // rule.groups
    minus_infinity = target.tiled(jnp.full(ranking.shape, -jnp.inf, jnp.float32))

    def broadcast(vector):
        return target.tiled(lax.broadcast_in_dim(vector, ranking.shape, (0,)))

    def mask_group(group):
        after = (column >= group * width).astype(jnp.int32)
        return after * (column < (group + 1) * width).astype(jnp.int32)

    # The score of a group is the sum of its best experts, found as the top-k itself is.
    scores = []
    for group in range(rule.groups):
        within, best = jnp.where(mask_group(group) > 0, ranking, minus_infinity), []
        for _ in range(rule.k // rule.open_groups):
            largest, first = find_largest(within)
            best.append(largest)
            within = jnp.where(column == broadcast(first), minus_infinity, within)
        scores.append(sum(best[1:], best[0]))
    for group, score in enumerate(scores):
        # The rank of a group is the number of those before it, with a larger score or the same
        # score and a lower index. Comparing all pairs needs no sort; there are few groups.
        before = [
            (other >= score if index < group else other > score).astype(jnp.int32)
            for index, other in enumerate(scores)
            if index != group
        ]
        is_closed = (sum(before[1:], before[0]) >= rule.open_groups).astype(jnp.int32)
        in_closed_group = mask_group(group) * broadcast(is_closed)
        ranking = jnp.where(in_closed_group > 0, minus_infinity, ranking)
    return ranking
