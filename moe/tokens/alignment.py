"""Alignment of outputs: from the position that computes a value to the token that it is about.

The `config` is that of the network which ran the tokens: the order of a packed batch depends on it.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from moe.config import ModelConfig
from moe.ops.zigzag import ZigzagLayout
from moe.tokens.packing import zigzag_of_prompts, zigzag_of_rows
from sharding.collectives import gather_tokens, join_shards, local_shard
from sharding.folding import FoldedMesh


def response_states(
    x: Float[Array, "local d_model"],
    shape: tuple[int, ...],
    prompt_length: int,
    num_samples: int,
    mesh: FoldedMesh,
    config: ModelConfig,
) -> Float[Array, "before d_model"]:
    """Of the states of a `pack_shared_prompts` batch, the one each response token was predicted
    from, in the order of `response_tokens`.

    Args:
      shape: ``[batch, time]`` of the rows.
    """
    zigzag = zigzag_of_prompts(shape, prompt_length, num_samples, mesh, config)
    prompts, responses = zigzag.split(gather_tokens(x, mesh.tp))
    # The first response token was predicted from the prompt's last, which one rank holds.
    rank, column = zigzag.locate(0, prompt_length - 1)
    last = gather_tokens(prompts[None, :, column], mesh.cp)[rank]
    before = _shift_columns(responses, jnp.repeat(last, num_samples, axis=0), zigzag, mesh)
    return local_shard(before.reshape(-1, x.shape[-1]), mesh.tp)


def _shift_columns(
    x: Float[Array, "row local d_model"],
    first: Float[Array, "row d_model"],
    zigzag: ZigzagLayout,
    mesh: FoldedMesh,
) -> Float[Array, "row local d_model"]:
    """This ``cp`` rank's part of rows in which each column holds what the one before it held.

    Only the ends of the chunks travel: ``2 rows x d_model`` elements to every other rank.

    Args:
      x: this rank's part of the rows.
      first: what the first column gets, the same on every rank.
      zigzag: the layout of the batch that the rows are of.
    """
    chunks = zigzag.chunks_per_rank
    # One column per chunk: the layout of the chunks' ends among themselves.
    ends = replace(zigzag, sections=((x.shape[0], zigzag.ranks * chunks),))
    x = x.reshape(x.shape[0], chunks, -1, x.shape[-1])
    (last,) = ends.restore(gather_tokens(ends.join(x[:, :, -1]), mesh.cp))
    before = jnp.concatenate([first[:, None], last[:, :-1]], axis=1)
    (before,) = ends.split(local_shard(ends.flatten(before), mesh.cp))
    shifted = jnp.concatenate([before[:, :, None], x[:, :, :-1]], axis=2)
    return shifted.reshape(x.shape[0], -1, x.shape[-1])


def align_to_tokens(
    after: Float[Array, "local"], shape: tuple[int, ...], mesh: FoldedMesh, config: ModelConfig
) -> Float[Array, "batch time"]:
    """Moves values computed *after* each position to the token that they are about.

    The value computed at position ``t - 1`` is about token ``t``; the first token gets 0.
    """
    (rows,) = zigzag_of_rows(shape, mesh, config).restore(join_shards(after, mesh.sequence))
    return jnp.concatenate([jnp.zeros_like(rows[:, :1]), rows[:, :-1]], axis=1)


def next_tokens(
    tokens: Int[Array, "batch time"], mesh: FoldedMesh, config: ModelConfig
) -> Int[Array, "local"]:
    """The token that follows each position, this rank's shard; the last position wraps to the
    first."""
    following = zigzag_of_rows(tokens.shape, mesh, config).flatten(jnp.roll(tokens, -1, axis=1))
    return local_shard(following, mesh.sequence)


def response_tokens(
    tokens: Int[Array, "batch time"], prompt_length: int, mesh: FoldedMesh, config: ModelConfig
) -> Int[Array, "local"]:
    """The tokens after the prompts, this rank's shard of them."""
    responses = tokens[:, prompt_length:]
    zigzag = zigzag_of_rows(responses.shape, mesh, config)
    return local_shard(zigzag.flatten(responses), mesh.sequence)


def expand_responses(
    before: Float[Array, "local"],
    shape: tuple[int, ...],
    prompt_length: int,
    mesh: FoldedMesh,
    config: ModelConfig,
) -> Float[Array, "batch time"]:
    """Numbers about the `response_tokens`, put in their columns; prompts get 0."""
    zigzag = zigzag_of_rows((shape[0], shape[1] - prompt_length), mesh, config)
    (response,) = zigzag.restore(join_shards(before, mesh.sequence))
    return jnp.pad(response, ((0, 0), (prompt_length, 0)))


def unpack_shared_prompts(
    x: Shaped[Array, "token *rest"],
    shape: tuple[int, ...],
    prompt_length: int,
    num_samples: int,
    mesh: FoldedMesh,
    config: ModelConfig,
) -> Shaped[Array, "batch time *rest"]:
    """Unpacks an array per token of a `pack_shared_prompts` batch, all of its shards, to the rows
    of the tokens; the values of a prompt are repeated in each of its rows.

    Args:
      shape: ``[batch, time]`` of the rows.
    """
    zigzag = zigzag_of_prompts(shape, prompt_length, num_samples, mesh, config)
    prompts, responses = zigzag.restore(x)
    return jnp.concatenate([jnp.repeat(prompts, num_samples, axis=0), responses], axis=1)
