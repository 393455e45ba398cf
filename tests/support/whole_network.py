"""A loss of the whole network and its gradient on any mesh, a pipeline or not.

The work of `jrl.trainer.learner.update` but for its objective and its optimizer.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from moe import model, stages
from moe.config import Model
from moe.head import logprobs_and_entropy, value_of
from moe.placement import specs
from moe.router.balance import router_loss
from moe.tokens import packing
from moe.tokens.packing import pack_rows, pack_shared_prompts
from sharding.collectives import all_sum, vary, varying


def loss_and_gradient(config, mesh):
    """(weights, (tokens, valid)) -> ((loss, router's sums), gradient), on global arrays.

    A third array of the piece are choices of experts to replay, ``[batch, time, layer, k]``.
    The weights are stored as `moe.placement.in_chunks` does. Through a pipeline, the rows of each
    device go in two micro-batches.
    """
    spec = specs(Model(config, mesh))
    local = at_once if mesh.layout.pp == 1 else through_stages
    return jax.shard_map(
        lambda weights, piece: local(weights, piece, config, mesh),
        mesh=mesh.mesh,
        in_specs=(spec, P(mesh.dp)),
        out_specs=((P(), P()), spec),
    )


def token_loss(weights, x, piece, num_tokens, config, mesh):
    """The part of the loss that the tokens of `piece` have, from the last hidden states."""
    network = Model(config, mesh)
    tokens, valid = piece[:2]
    if config.head == "value":
        after = jnp.square(value_of(weights, x, config) - 1.0)
    else:
        following = packing.next_tokens(tokens, network)
        logprobs, entropy = logprobs_and_entropy(weights, x, following, network)
        after = 0.1 * entropy - logprobs
    per_token = packing.align_to_tokens(after, tokens.shape, network)
    # The first token of a row has none before it, and what padding attends to is not defined.
    counted = valid & jnp.pad(valid, ((0, 0), (1, 0)))[:, :-1]
    return jnp.sum(per_token, where=counted) / num_tokens.astype(jnp.float32)


def before_responses(weights, tokens, valid, prompt_length, num_samples, config, mesh):
    """The state that each response token is predicted from, and the router's sums: prompts run once
    for the rows that share them."""
    network = Model(config, mesh)
    packed = pack_shared_prompts(tokens, valid, prompt_length, num_samples, network)
    x, stats = model.run(weights, packed, network)
    states = packing.response_states(x, tokens.shape, prompt_length, num_samples, network)
    return states, stats


def replay_of(piece):
    """Choices of experts as the network takes them, None without."""
    return jnp.moveaxis(piece[2], 2, 0) if len(piece) == 3 else None


def loss(weights, piece, config, mesh):
    """A scalar that every weight reaches: sums over tokens, plus the router's losses."""
    network = Model(config, mesh)
    num_tokens = all_sum(jnp.sum(piece[1].astype(jnp.int32)), mesh.dp)
    x, stats = model.hidden(weights, *piece[:2], network, replay_of(piece))
    own = token_loss(weights, x, piece, num_tokens, config, mesh)
    total = all_sum(own + router_loss(stats, network, num_tokens), mesh.except_sequence)
    return total, None if stats is None else all_sum(stats, mesh.axes)


def at_once(weights, piece, config, mesh):
    """The loss, the router's sums and the gradient, of a device that holds all layers."""
    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(weights, piece, config, mesh)
    return (value, stats), grads


def through_stages(weights, piece, config, mesh):
    """The same through a pipeline, the rows of each device in two micro-batches."""
    network = Model(config, mesh)
    num_tokens = all_sum(jnp.sum(piece[1].astype(jnp.int32)), mesh.dp)
    pieces = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), piece)
    ends = stages.Ends(
        lambda piece: pack_rows(*piece[:2], network, replay_of(piece)),
        lambda weights, x, piece: (token_loss(weights, x, piece, num_tokens, config, mesh), {}),
        num_tokens,
    )
    value, grads, _, stats = stages.gradients(
        vary(weights, mesh.axes), vary(pieces, mesh.except_sequence), ends, network
    )
    grads = jax.tree.map(
        lambda grad, weight: jax.lax.psum(grad, tuple(sorted(varying(grad) - varying(weight)))),
        grads,
        weights,
    )
    # The stages hold the same sums, which count once.
    others = tuple(axis for axis in mesh.axes if axis not in mesh.pp)
    return (all_sum(value, mesh.except_sequence), all_sum(stats, others)), grads
