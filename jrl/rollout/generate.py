"""Batched decoding: prompts in, completions and their log-probabilities out, in one jit.

Prompts are left-padded to one width, so all responses start in the same column. Each prompt is run
once and its cache repeated for the completions of its group.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from jrl.losses import EntropyStatistics
from jrl.recipes.base.batch import Batch
from jrl.rollout.sampling import Sampling, draw
from moe.config import ModelConfig
from moe.decoding import Cache, decode_step, extend, prefill
from moe.head import logits_of
from moe.model import layer_of
from moe.placement import specs
from moe.weights import Transformer
from sharding.collectives import all_sum, join_shards, own_shard, vary
from sharding.folding import FoldedMesh


class Decoder(NamedTuple):
    """What decoding needs to know at compile time.

    Args:
      config: the policy network.
      mesh: where it lives.
      prompt_length: tokens of a padded prompt.
      response_length: the limit of a response, in tokens, end-of-sequence included.
      num_samples: completions per prompt.
      pad_id: fills what is not a token.
      stop_ids: each of them ends a response, of which it is the last token.
      sampling: how tokens are drawn.
    """

    config: ModelConfig
    mesh: FoldedMesh
    prompt_length: int
    response_length: int
    num_samples: int
    pad_id: int
    stop_ids: tuple[int, ...]
    sampling: Sampling


class _Loop(NamedTuple):
    """The carry of the decoding loop; `step` counts response tokens written."""

    step: Array
    num_live: Array
    live: Array
    token: Array
    cache: Cache
    written: tuple[Array, Array, Array, Array]


@partial(jax.jit, static_argnums=0)
def generate(
    decoder: Decoder,
    weights: Transformer[Array],
    prompts: Int[Array, "prompts prompt_length"],
    valid: Bool[Array, "prompts prompt_length"],
    key: Array,
    entropy: EntropyStatistics[Array] | None = None,
) -> Batch[Array]:
    """Samples `decoder.num_samples` completions of every prompt, those of one prompt in a row.

    A row's tokens depend on its own prompt, its place in the batch and `key` only: not on the mesh.
    What comes back are the columns of a batch that sampling knows: `tokens`, `valid`, `mask`,
    `behaviour_logprobs`, `old_logprobs` (of the whole policy at the base temperature; the two
    differ only under top-k, top-p and a temperature that adapts) and `truncated`.

    Args:
      prompts: left-padded token ids.
      valid: which of them are not padding.
      key: randomness of this batch.
      entropy: for a temperature that adapts, see `jrl.rollout.sampling.draw`.

    Raises:
      ValueError: when prompts or rows do not divide over the devices.
    """
    mesh = decoder.mesh
    _check_divides(decoder, prompts.shape[0])
    batch = PartitionSpec(mesh.dp)
    rows = jnp.arange(prompts.shape[0] * decoder.num_samples)
    local = jax.shard_map(
        partial(_generate_local, decoder),
        mesh=mesh.mesh,
        in_specs=(
            *(specs(decoder.config, mesh), batch, batch, batch),
            *(PartitionSpec(), PartitionSpec()),
        ),
        out_specs=batch,
    )
    return local(weights, prompts, valid, rows, key, entropy)


def _check_divides(decoder: Decoder, num_prompts: int) -> None:
    mesh = decoder.mesh
    if mesh.layout.pp > 1:
        raise ValueError(
            f"layout {mesh.layout} cannot decode: every device needs all layers, so pp must be 1; "
            "decode on a layout of its own."
        )
    dp, tp = mesh.size(mesh.dp), mesh.size(mesh.tp)
    rows = num_prompts * decoder.num_samples
    if num_prompts % dp or (num_prompts // dp * decoder.num_samples) % tp:
        raise ValueError(
            f"{num_prompts} prompts x {decoder.num_samples} completions = {rows} rows cannot be "
            f"decoded on layout {mesh.layout}: prompts must divide by dp={dp}, rows per rank by "
            f"tp={tp}."
        )


def _generate_local(
    decoder: Decoder,
    weights: Transformer[Array],
    prompts: Array,
    valid: Array,
    rows: Array,
    key: Array,
    entropy: EntropyStatistics[Array] | None,
) -> Batch[Array]:
    config, mesh = decoder.config, decoder.mesh
    weights, entropy = vary((weights, entropy), mesh.axes)
    prompts, valid, rows = vary((prompts, valid, rows), mesh.except_sequence)
    layers = tuple(layer_of(weights, index) for index in range(config.num_layers))
    # A key per row, by its number in the whole batch: the layout has no say in what is drawn.
    row_keys = jax.vmap(partial(jax.random.fold_in, key))(own_shard(rows, mesh.sequence))

    def pick(logits, step):
        """One token per row and its log-probabilities, the same on every ``tp`` rank."""
        keys = jax.vmap(lambda row_key: jax.random.fold_in(row_key, step))(row_keys)
        drawn = draw(logits, decoder.sampling, keys, entropy)
        return tuple(join_shards(x, mesh.sequence) for x in drawn)

    def record(loop: _Loop, picked) -> _Loop:
        """Writes what was picked for the rows still going, and sees which of them end."""
        token, behaviour_logprob, old_logprob = picked
        # Rows that have ended go through the network too, as padding that no one attends to.
        token = jnp.where(loop.live, token, decoder.pad_id)
        columns = (
            token,
            loop.live,
            jnp.where(loop.live, behaviour_logprob, 0.0),
            jnp.where(loop.live, old_logprob, 0.0),
        )
        written = tuple(
            jax.lax.dynamic_update_slice(into, column[:, None], (0, loop.step))
            for into, column in zip(loop.written, columns, strict=True)
        )
        # The token that ends a response is part of it, and of the mask: it was sampled.
        live = loop.live
        for stop in decoder.stop_ids:
            live = live & (token != stop)
        return loop._replace(
            step=loop.step + 1, num_live=count(live), live=live, token=token, written=written
        )

    def count(live):
        return all_sum(jnp.sum(live.astype(jnp.int32)), mesh.except_sequence)

    def advance(loop: _Loop) -> _Loop:
        column = decoder.prompt_length + loop.step - 1
        logits, cache = decode_step(
            layers, weights, loop.cache, loop.token, column, loop.live, config, mesh
        )
        return record(loop._replace(cache=cache), pick(logits, loop.step))

    # The prompt of a group runs once; its cache is repeated for the samples.
    hidden, cache = prefill(weights, prompts, valid, config, mesh)
    after_prompt = _last_of_each(hidden, prompts.shape, mesh)
    after_prompt = own_shard(jnp.repeat(after_prompt, decoder.num_samples, axis=0), mesh.sequence)
    logits = logits_of(weights, after_prompt, config, mesh)

    shape = (rows.shape[0], decoder.response_length)
    empty = vary(
        (
            jnp.full(shape, decoder.pad_id, prompts.dtype),
            jnp.zeros(shape, bool),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros(shape, jnp.float32),
        ),
        mesh.except_sequence,
    )
    live = vary(jnp.ones(rows.shape, bool), mesh.except_sequence)
    loop = _Loop(
        step=jnp.zeros((), jnp.int32),
        num_live=count(live),
        live=live,
        token=vary(jnp.full(rows.shape, decoder.pad_id, prompts.dtype), mesh.except_sequence),
        # The last token is never appended, so it needs no room.
        cache=extend(cache, decoder.response_length - 1, decoder.num_samples),
        written=empty,
    )
    # The first token comes from the prompt's own logits, every other from a step of the network.
    loop = record(loop, pick(logits, loop.step))
    loop = jax.lax.while_loop(
        lambda loop: (loop.step < decoder.response_length) & (loop.num_live > 0), advance, loop
    )

    response, mask, behaviour_logprobs, old_logprobs = loop.written
    prompts, valid = (jnp.repeat(x, decoder.num_samples, axis=0) for x in (prompts, valid))
    nothing = jnp.zeros(prompts.shape, jnp.float32)
    batch = Batch(
        tokens=jnp.concatenate([prompts, response], axis=1),
        valid=jnp.concatenate([valid, mask], axis=1),
        mask=jnp.concatenate([jnp.zeros_like(valid), mask], axis=1),
        behaviour_logprobs=jnp.concatenate([nothing, behaviour_logprobs], axis=1),
        old_logprobs=jnp.concatenate([nothing, old_logprobs], axis=1),
        truncated=loop.live,
    )
    # Size-1 axes that attention does not use still mark the arrays as varying.
    return mark_replicated(batch, mesh)


def mark_replicated(tree, mesh: FoldedMesh):
    """`tree` typed as varying over ``dp`` only: a maximum over the other axes, whose ranks
    agree."""
    others = tuple(axis for axis in mesh.except_sequence if axis not in mesh.dp)
    return jax.tree.map(
        lambda x: (
            jax.lax.pmax(x.astype(jnp.int8), others).astype(bool)
            if x.dtype == bool
            else jax.lax.pmax(x, others)
        ),
        tree,
    )


def _last_of_each(hidden: Array, shape: tuple[int, ...], mesh: FoldedMesh) -> Array:
    """The hidden state after the last prompt token of each row, on every ``tp`` rank."""
    return join_shards(hidden, mesh.sequence).reshape(*shape, -1)[:, -1]
