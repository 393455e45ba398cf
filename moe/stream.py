"""Tokens in the order the network runs them: one flat stream, whatever rows they came from.

Only two parts of the network know about sequences: attention, which reads earlier tokens, and the
load-balancing loss, which is taken per sequence. Both are functions of the stream. `rows` is the
plain stream; `shared_prompts` runs a prompt once for all the completions that share it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe.attention import Attend, causal, read_values
from moe.routing import sequence_share


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
    """

    tokens: Array
    positions: Array
    weight: Array
    attend_in_layer: Callable[[int | Array], Attend]
    share: Callable[[Array], Array]


def positions_of(valid: Bool[Array, "batch time"]) -> Int[Array, "batch time"]:
    """The place of each token among the valid ones of its row, from 0; padding gets 0 or more."""
    return jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)


def rows(tokens: Int[Array, "batch time"], valid: Bool[Array, "batch time"]) -> Stream:
    """Row after row, each its own sequence."""
    visible = causal(valid)

    def read(query, key, value):
        shape = (*valid.shape, -1, query.shape[-1])
        out = read_values(query.reshape(shape), key.reshape(shape), value.reshape(shape), visible)
        return out.reshape(query.shape)

    def share(counts: Float[Array, "token route"]) -> Float[Array, "token route"]:
        own = sequence_share(counts.reshape(*valid.shape, -1), valid)
        return jnp.repeat(own, valid.shape[1], axis=0)

    return Stream(
        tokens=tokens.reshape(-1),
        positions=positions_of(valid).reshape(-1),
        weight=valid.reshape(-1).astype(jnp.float32),
        attend_in_layer=lambda index: read,
        share=share,
    )


def shared_prompts(
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    prompt_length: int,
    copies: int,
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
    num_prompts, num_rows = tokens.shape[0] // copies, tokens.shape[0]
    response_length = tokens.shape[1] - prompt_length
    split = num_prompts * prompt_length
    prompt_visible = causal(valid[::copies, :prompt_length])
    positions = positions_of(valid)
    response_visible = causal(valid)[:, prompt_length:]

    def read(query, key, value):
        heads = (-1, query.shape[-1])

        def prompts(x):
            return x[:split].reshape(num_prompts, prompt_length, *heads)

        def responses(x):
            return x[split:].reshape(num_rows, response_length, *heads)

        def whole(x):
            return jnp.concatenate([jnp.repeat(prompts(x), copies, axis=0), responses(x)], axis=1)

        first = read_values(prompts(query), prompts(key), prompts(value), prompt_visible)
        then = read_values(responses(query), whole(key), whole(value), response_visible)
        return jnp.concatenate([x.reshape(-1, *query.shape[1:]) for x in (first, then)])

    def share(counts: Float[Array, "token route"]) -> Float[Array, "token route"]:
        of_prompts = counts[:split].reshape(num_prompts, prompt_length, -1)
        of_responses = counts[split:].reshape(num_rows, response_length, -1)
        whole = jnp.concatenate([jnp.repeat(of_prompts, copies, axis=0), of_responses], axis=1)
        own = sequence_share(whole, valid)
        mean = jnp.mean(own.reshape(num_prompts, copies, -1), axis=1)
        return jnp.concatenate(
            [jnp.repeat(mean, prompt_length, axis=0), jnp.repeat(own, response_length, axis=0)]
        )

    def laid_out(x: Array) -> Array:
        return jnp.concatenate(
            [x[::copies, :prompt_length].reshape(-1), x[:, prompt_length:].reshape(-1)]
        )

    weight = valid.astype(jnp.float32)
    weight = jnp.concatenate(
        [weight[:, :prompt_length] * copies, weight[:, prompt_length:]], axis=1
    )
    return Stream(
        tokens=laid_out(tokens),
        positions=laid_out(positions),
        weight=laid_out(weight),
        attend_in_layer=lambda index: read,
        share=share,
    )
