"""Tokens in the order the network runs them: one flat stream, whatever rows they came from.

Only two parts of the network know about sequences: attention, which reads earlier tokens, and the
load-balancing loss, which is taken per sequence. Both are functions of the stream. `rows` is the
plain stream; `shared_prompts` runs a prompt once for all the completions that share it; `packed`
has several sequences in a row. Each is laid out by an `Order`, so that it can be cut over ``cp``
and ``tp``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe.attention.context_parallel.choice import attend_across
from moe.attention.context_parallel.mask import Reading
from moe.attention.layer import Attend
from moe.execution import Execution
from moe.router.statistics import sequence_share
from moe.tokens.zigzag import Order
from sharding.folding import FoldedMesh


class Stream(NamedTuple):
    """A flat stream of tokens.

    Attributes:
      tokens: ``[token]`` ids.
      positions: ``[token]`` place of each in its own sequence, from 0.
      weight: ``[token]`` in how many sequences it stands, float32; 0 for padding.
      attend_in_layer: from the number of a layer to how it reads values; a stage of a pipeline
        knows the number at run time only.
      share: from assignments ``[token, route]`` to the share that each expert has in the token's
        sequence (the mean over sequences where it stands in several).
      order: where the tokens of rows stand in it.
      replay: ``[layer, token, k]`` experts chosen before, to be used again; None chooses.
      record: whether the router's statistics hold the choices.
    """

    tokens: Array
    positions: Array
    weight: Array
    attend_in_layer: Callable[[int | Array], Attend]
    share: Callable[[Array], Array]
    order: Order
    replay: Array | None = None
    record: bool = False

    def of_layer(self, index: int | Array) -> "Stream":
        """This stream with `replay` ``[token, k]`` that of one layer."""
        return self if self.replay is None else self._replace(replay=self.replay[index])


def positions_of(valid: Bool[Array, "batch time"]) -> Int[Array, "batch time"]:
    """The place of each token among the valid ones of its row, from 0; padding gets 0 or more."""
    return jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)


def rows(
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    mesh: FoldedMesh,
    execution: Execution | None = None,
    replay: Int[Array, "layer batch time k"] | None = None,
) -> Stream:
    """Row after row, each its own sequence."""
    order = order_of_rows(tokens.shape, mesh)

    def share(counts: Float[Array, "token route"]) -> Float[Array, "token route"]:
        own = sequence_share(order.restore(counts)[0], valid)
        return order.flatten(jnp.repeat(own[:, None], valid.shape[1], axis=1))

    return Stream(
        tokens=order.flatten(tokens),
        positions=order.flatten(positions_of(valid)),
        weight=order.flatten(valid.astype(jnp.float32)),
        attend_in_layer=_causal(order, [valid.astype(jnp.int32)], lambda x: x, mesh, execution),
        share=share,
        order=order,
        replay=_replayed(replay, lambda layer: order.flatten(layer)),
    )


def packed(
    tokens: Int[Array, "batch time"],
    segments: Int[Array, "batch time"],
    mesh: FoldedMesh,
    execution: Execution | None = None,
) -> Stream:
    """Several sequences in each row, which never read each other.

    The same values, gradients and router sums as those sequences in rows of their own. What is
    computed after the last token of a sequence speaks about no token: a loss leaves out the first
    token of each.

    Args:
      tokens: ids.
      segments: which sequence of its row each token belongs to, from 1 to ``time``; 0 is padding.
        The tokens of a sequence are in order; where they stand in the row does not matter.
    """
    order, time = order_of_rows(tokens.shape, mesh), tokens.shape[1]
    valid, same = segments > 0, segments[:, :, None] == segments[:, None, :]
    earlier = jnp.arange(time)[:, None] > jnp.arange(time)[None, :]
    positions = jnp.sum(same & earlier[None], axis=-1, dtype=jnp.int32)
    row = jnp.arange(tokens.shape[0])[:, None]

    def share(counts: Float[Array, "token route"]) -> Float[Array, "token route"]:
        (by_row,) = order.restore(counts)
        sent = jnp.zeros((by_row.shape[0], time + 1, by_row.shape[2]), by_row.dtype)
        sent = sent.at[row, segments].add(by_row)[row, segments]
        total = jnp.maximum(jnp.sum(sent, axis=-1, keepdims=True), 1.0)
        return order.flatten(jnp.where(valid[..., None], sent / total, 0.0))

    return Stream(
        tokens=order.flatten(tokens),
        positions=order.flatten(positions),
        weight=order.flatten(valid.astype(jnp.float32)),
        attend_in_layer=_causal(order, [segments], lambda x: x, mesh, execution),
        share=share,
        order=order,
    )


def shared_prompts(
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    prompt_length: int,
    copies: int,
    mesh: FoldedMesh,
    execution: Execution | None = None,
    replay: Int[Array, "layer batch time k"] | None = None,
) -> Stream:
    """All prompts, each once, and then all responses.

    What a prompt's tokens compute is the same for each of its completions. A batch with ``copies``
    completions per prompt takes ``prompt_length (copies - 1) / copies`` fewer tokens per row this
    way, with the same values and gradients.

    Args:
      tokens: rows of prompt and response; each run of `copies` rows has the same prompt.
      valid: what is not padding.
      prompt_length: columns of the prompt.
    """
    num_rows, time = tokens.shape
    num_prompts, response_length = num_rows // copies, time - prompt_length
    order = order_of_prompts(tokens.shape, prompt_length, copies, mesh)

    def cut(x: Array) -> tuple[Array, Array]:
        return x[::copies, :prompt_length], x[:, prompt_length:]

    def whole(x: tuple[Array, ...]) -> Array:
        return jnp.concatenate([jnp.repeat(x[0], copies, axis=0), x[1]], axis=1)

    def share(counts: Float[Array, "token route"]) -> Float[Array, "token route"]:
        own = sequence_share(whole(order.restore(counts)), valid)
        mean = jnp.mean(own.reshape(num_prompts, copies, -1), axis=1)
        return order.flatten(
            jnp.repeat(mean[:, None], prompt_length, axis=1),
            jnp.repeat(own[:, None], response_length, axis=1),
        )

    weight = valid.astype(jnp.float32)
    of_prompts, of_responses = cut(weight)
    return Stream(
        tokens=order.flatten(*cut(tokens)),
        positions=order.flatten(*cut(positions_of(valid))),
        weight=order.flatten(of_prompts * copies, of_responses),
        attend_in_layer=_causal(
            order,
            cut(valid.astype(jnp.int32)),
            lambda x: (x[0], whole(x)),
            mesh,
            execution,
        ),
        share=share,
        order=order,
        replay=_replayed(replay, lambda layer: order.flatten(*cut(layer))),
    )


def order_of_rows(shape: tuple[int, ...], mesh: FoldedMesh) -> Order:
    """The order of ``[batch, time]`` rows: of the streams `rows` and `packed`."""
    return Order(((shape[0], shape[1]),), mesh.size(mesh.cp))


def order_of_prompts(
    shape: tuple[int, ...], prompt_length: int, copies: int, mesh: FoldedMesh
) -> Order:
    """The order of the stream of `shared_prompts` of ``[batch, time]`` rows."""
    prompts = shape[0] // copies, prompt_length
    return Order((prompts, (shape[0], shape[1] - prompt_length)), mesh.size(mesh.cp))


def _causal(
    order: Order,
    segments: Sequence[Array],
    sources: Callable[[tuple[Array, ...]], tuple[Array, ...]],
    mesh: FoldedMesh,
    execution: Execution | None,
) -> Callable[[int | Array], Attend]:
    """Every layer reads earlier columns of the own segment; a section's columns follow those of the
    section before."""
    columns, start = [], 0
    for num_rows, length in order.sections:
        column = start + jnp.arange(length, dtype=jnp.int32)
        columns.append(jnp.broadcast_to(column[None], (num_rows, length)))
        start += length
    reading = Reading(order, order.flatten(*columns), order.flatten(*segments), sources)
    chosen = Execution() if execution is None else execution

    def attend(query: Array, key: Array, value: Array, scale: float | None = None) -> Array:
        return attend_across(query, key, value, reading, chosen, mesh, scale)

    return lambda index: attend


def _replayed(
    replay: Int[Array, "layer batch time k"] | None, lay_out: Callable[[Array], Array]
) -> Int[Array, "layer token k"] | None:
    """Recorded choices in the order of the stream."""
    return None if replay is None else jnp.stack([lay_out(layer) for layer in replay])
