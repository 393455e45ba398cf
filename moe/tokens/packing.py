"""Sequence packing: one flat packed batch of tokens from rows, shared prompts or segments.

Only two parts of the network depend on sequences: core attention, which sees earlier tokens, and
the load-balancing loss, which is computed per sequence. Both are functions of the packed batch.
`pack_rows` has one sequence per row; `pack_shared_prompts` runs a prompt once for all completions
that share it (prefix sharing); `pack_segments` has multiple sequences per row. Each has a
`ZigzagLayout`, so that it can be sharded over ``cp`` and ``tp``, in the order that context-parallel
attention needs (`moe.attention.context_parallel.prefers_contiguous`).

The functions below them take outputs back to rows, aligned: from the position that computes a value
to the token that it is about. Their `model` is the one that ran the tokens, as the order of a
packed batch depends on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from moe.architecture.feed_forward import can_drop
from moe.attention.context_parallel import context_parallel_attention, prefers_contiguous
from moe.attention.latent import LatentCore
from moe.attention.layer import CoreAttention
from moe.attention.rotary import RotaryCache
from moe.config import Model
from moe.ops.mask import KeySource, SegmentMask, TokenIndices, Window
from moe.ops.zigzag import ZigzagLayout
from moe.tokens.sequences import Sequences, load_fraction
from sharding.collectives import gather_tokens, join_shards, local_shard
from sharding.folding import FoldedMesh


@runtime_checkable
class CoreAttentionOfLayer(Protocol):
    """(number of the layer, its window) -> its core attention."""

    def __call__(self, index: int | Array, window: Window = None) -> CoreAttention | LatentCore: ...


class PackedBatch(NamedTuple):
    """A flat batch of tokens.

    Attributes:
      tokens: ``[token]`` ids.
      positions: ``[token]`` position of each in its own sequence, from 0.
      multiplicity: ``[token]`` number of sequences that contain it, float32; 0 for padding.
      core_attention_of_layer: maps the index of a layer and its sliding window to its core
        attention; both are arrays in a pipeline stage.
      sequences: grouping of tokens for the load-balancing loss; None if nothing is trained.
      zigzag: layout of the rows in the batch.
      mask: segments of the tokens; None in a decode step.
      replay: ``[layer, token, k]`` recorded expert ids to be used again; None routes.
      record_choices: the router's statistics contain the expert ids.
      half_batches: the two halves of its rows, if they go through the layers separately
        (`Execution.two_batch_overlap`). `tokens` are then in their order: each device has its shard
        of the first and then its shard of the second;
        `moe.layers.two_batch_overlap.restore_row_order` reverses it.
      is_half_batch: this batch is one of the halves.
      rope: rotary cos/sin tables of the tokens; None computes them from `positions`.
    """

    tokens: Array
    positions: Array
    multiplicity: Array
    core_attention_of_layer: CoreAttentionOfLayer
    sequences: Sequences | None
    zigzag: ZigzagLayout
    mask: SegmentMask | None = None
    replay: Array | None = None
    record_choices: bool = False
    half_batches: tuple["PackedBatch", ...] = ()
    is_half_batch: bool = False
    rope: RotaryCache | None = None

    @property
    def streams(self) -> tuple["PackedBatch", ...]:
        """Batches that go through a layer separately: the halves, or this batch alone."""
        if not self.half_batches:
            return (self,)
        return tuple(
            half._replace(record_choices=self.record_choices) for half in self.half_batches
        )

    def for_layer(self, index: int | Array) -> "PackedBatch":
        """This batch with the `replay` ``[token, k]`` of one layer."""
        return self if self.replay is None else self._replace(replay=self.replay[index])


def positions_of(valid: Bool[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Position of each token among the valid ones of its row, from 0; padding gets 0 or more."""
    return jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)


def pack_rows(
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    model: Model,
    replay: Integer[Array, "layer batch time k"] | None = None,
) -> PackedBatch:
    """Row after row, each its own sequence.

    Args:
      tokens: ids.
      valid: false for padding.
      model: the model that runs the batch; the order of the tokens depends on how its attention
        crosses ``cp``.
    """
    zigzag, num_rows = zigzag_of_rows(tokens.shape, model), tokens.shape[0]
    positions, segments = positions_of(valid), valid.astype(jnp.int32)
    mask = _causal_mask(zigzag, [positions], [segments], SAME_ROWS, True)
    packed = PackedBatch(
        tokens=zigzag.flatten(tokens),
        positions=zigzag.flatten(positions),
        multiplicity=zigzag.flatten(valid.astype(jnp.float32)),
        core_attention_of_layer=_masked_attention(mask, model),
        sequences=Sequences(zigzag.flatten(_row_indices(tokens.shape)), num_rows, load_fraction),
        zigzag=zigzag,
        mask=mask,
        replay=_pack_replay(replay, lambda layer: zigzag.flatten(layer)),
    )

    def pack_half(rows: slice, model: Model) -> PackedBatch:
        return pack_rows(tokens[rows], valid[rows], model, _replay_of_rows(replay, rows))

    return _with_half_batches(packed, pack_half, num_rows, model)


def pack_segments(
    tokens: Int[Array, "batch time"],
    segments: Int[Array, "batch time"],
    num_segments: int,
    model: Model,
    replay: Integer[Array, "layer batch time k"] | None = None,
    positions: Int[Array, "batch time"] | None = None,
) -> PackedBatch:
    """Several sequences in each row, which never attend to each other.

    The same values, gradients and router sums as those sequences in rows of their own. What is
    computed after the last token of a sequence speaks about no token: a loss leaves out the first
    token of each.

    Args:
      tokens: ids.
      segments: index of the sequence of the batch that each token belongs to, from 1 to
        `num_segments`; 0 is padding. The tokens of a sequence are in one row and in order, at any
        positions.
      num_segments: sequences, at most.
      positions: position of each token in its sequence, from 0; None counts them.
    """
    zigzag = zigzag_of_rows(tokens.shape, model)
    valid = segments > 0
    token_positions = _positions_in_segments(segments) if positions is None else positions
    mask = _causal_mask(zigzag, [token_positions], [segments], SAME_ROWS, False)
    packed = PackedBatch(
        tokens=zigzag.flatten(tokens),
        positions=zigzag.flatten(token_positions),
        multiplicity=zigzag.flatten(valid.astype(jnp.float32)),
        core_attention_of_layer=_masked_attention(mask, model),
        # Padding, 0, is a sequence that sends nothing.
        sequences=Sequences(zigzag.flatten(segments), num_segments + 1, load_fraction),
        zigzag=zigzag,
        mask=mask,
        replay=_pack_replay(replay, lambda layer: zigzag.flatten(layer)),
    )

    def pack_half(rows: slice, model: Model) -> PackedBatch:
        return pack_segments(
            tokens[rows],
            segments[rows],
            num_segments,
            model,
            replay=_replay_of_rows(replay, rows),
            positions=None if positions is None else positions[rows],
        )

    return _with_half_batches(packed, pack_half, tokens.shape[0], model)


def pack_shared_prompts(
    tokens: Int[Array, "batch time"],
    valid: Bool[Array, "batch time"],
    prompt_length: int,
    num_samples: int,
    model: Model,
    replay: Integer[Array, "layer batch time k"] | None = None,
) -> PackedBatch:
    """All prompts, each once, and then all responses.

    What a prompt's tokens compute is the same for each of its completions. With n samples per
    prompt a batch takes ``prompt_length (n - 1) / n`` fewer tokens per row this way, with the same
    values and gradients.

    Args:
      tokens: rows of prompt and response; each run of `num_samples` rows has the same prompt.
      valid: what is not padding.
      prompt_length: columns of the prompt.
    """
    num_rows, time = tokens.shape
    num_prompts, response_length = num_rows // num_samples, time - prompt_length
    zigzag = zigzag_of_prompts(tokens.shape, prompt_length, num_samples, model)

    def split(x: Array) -> tuple[Array, Array]:
        return x[::num_samples, :prompt_length], x[:, prompt_length:]

    def fractions(sent: Float[Array, "segment route"]) -> Float[Array, "segment route"]:
        prompts, responses = sent[:num_prompts], sent[num_prompts:]
        sequence_fractions = load_fraction(jnp.repeat(prompts, num_samples, axis=0) + responses)
        # A prompt is in `num_samples` sequences: with its multiplicity, a mean is their sum.
        mean = jnp.mean(sequence_fractions.reshape(num_prompts, num_samples, -1), axis=1)
        return jnp.concatenate([mean, sequence_fractions])

    # Segments are the prompts, then the responses.
    segments = (
        _row_indices((num_prompts, prompt_length)),
        num_prompts + _row_indices((num_rows, response_length)),
    )
    positions, multiplicity = split(positions_of(valid)), valid.astype(jnp.float32)
    prompt_multiplicity, response_multiplicity = split(multiplicity)
    sources = (KeySource(0, 1),), (KeySource(0, num_samples), KeySource(1, 1))
    mask = _causal_mask(zigzag, positions, split(valid.astype(jnp.int32)), sources, True)
    packed = PackedBatch(
        tokens=zigzag.flatten(*split(tokens)),
        positions=zigzag.flatten(*positions),
        multiplicity=zigzag.flatten(prompt_multiplicity * num_samples, response_multiplicity),
        core_attention_of_layer=_masked_attention(mask, model),
        sequences=Sequences(zigzag.flatten(*segments), num_prompts + num_rows, fractions),
        zigzag=zigzag,
        mask=mask,
        replay=_pack_replay(replay, lambda layer: zigzag.flatten(*split(layer))),
    )

    def pack_half(prompts: slice, model: Model) -> PackedBatch:
        rows = slice(prompts.start * num_samples, prompts.stop * num_samples)
        return pack_shared_prompts(
            tokens[rows],
            valid[rows],
            prompt_length,
            num_samples,
            model,
            _replay_of_rows(replay, rows),
        )

    return _with_half_batches(packed, pack_half, num_prompts, model)


def _with_half_batches(
    packed: PackedBatch,
    pack_half: Callable[[slice, Model], PackedBatch],
    num_units: int,
    model: Model,
) -> PackedBatch:
    """A packed batch with the halves of its rows, where the network's execution asks for them and
    there is more than one row, or prompt with its responses, and the devices of a sequence can
    share the tokens of each half; the first has one more where their number is odd.

    Args:
      pack_half: (which of the rows or prompts, the network) -> these alone.
      num_units: how many of them there are.
    """
    config = model.config
    if not config.execution.two_batch_overlap or num_units < 2:
        return packed
    if can_drop(config):
        raise ValueError(
            f"two_batch_overlap with capacity_factor={config.capacity_factor} would drop other "
            "tokens: an expert's capacity is for those of both halves. Leave out one of them."
        )
    execution = replace(config.execution, two_batch_overlap=False)
    without_overlap = replace(model, config=replace(config, execution=execution))
    middle = -(-num_units // 2)
    half_batches = tuple(
        pack_half(rows, without_overlap)._replace(is_half_batch=True)
        for rows in (slice(0, middle), slice(middle, num_units))
    )
    ranks = model.mesh.size(model.mesh.sequence)
    # An update is refused before it comes here (`jrl.trainer.setup.network.check_overlaps`); what
    # is scored or shown has as many rows as there are.
    if any(half_batch.tokens.shape[0] % ranks for half_batch in half_batches):
        return packed
    by_rank = jnp.concatenate(
        [half_batch.tokens.reshape(ranks, -1) for half_batch in half_batches], axis=1
    )
    return packed._replace(tokens=by_rank.reshape(-1), half_batches=half_batches)


def _replay_of_rows(
    replay: Integer[Array, "layer batch time k"] | None, rows: slice
) -> Integer[Array, "layer rows time k"] | None:
    return None if replay is None else replay[:, rows]


def zigzag_of_rows(shape: tuple[int, ...], model: Model) -> ZigzagLayout:
    """The layout of ``[batch, time]`` rows: of `pack_rows` and `pack_segments`."""
    return _layout(((shape[0], shape[1]),), model)


def zigzag_of_prompts(
    shape: tuple[int, ...], prompt_length: int, num_samples: int, model: Model
) -> ZigzagLayout:
    """The layout of `pack_shared_prompts` of ``[batch, time]`` rows.

    Raises:
      ValueError: for rows that are no whole groups.
    """
    if shape[0] % num_samples:
        raise ValueError(
            f"a micro-batch has {shape[0]} rows on each device, which is no multiple of the "
            f"num_samples={num_samples} rows that share a prompt: use a multiple of {num_samples} "
            "rows (fewer micro-batches, or a smaller dp), or num_samples=1."
        )
    prompts = shape[0] // num_samples, prompt_length
    return _layout((prompts, (shape[0], shape[1] - prompt_length)), model)


def _layout(sections: tuple[tuple[int, int], ...], model: Model) -> ZigzagLayout:
    return ZigzagLayout(sections, model.mesh.size(model.mesh.cp), prefers_contiguous(model))


SAME_ROWS = ((KeySource(0, 1),),)
"""One section, whose queries attend to the same rows."""


def _row_indices(shape: tuple[int, ...]) -> Int[Array, "row column"]:
    """Index of its row at every token."""
    return jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.int32)[:, None], (shape[0], shape[1]))


def _positions_in_segments(segments: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
    """Position of each token in its segment: the number of earlier tokens of it in the row."""
    time = segments.shape[1]
    # In the order of segments, and of columns within them: a position is the distance to the first.
    order = jnp.argsort(segments, axis=1, stable=True)
    ids = jnp.take_along_axis(segments, order, axis=1)
    column = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32)[None], ids.shape)
    is_first = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = lax.cummax(jnp.where(is_first, column, 0), axis=1)
    row = jnp.arange(segments.shape[0])[:, None]
    return jnp.zeros_like(column).at[row, order].set(column - first)


def _causal_mask(
    zigzag: ZigzagLayout,
    positions: Sequence[Array],
    segments: Sequence[Array],
    sources: tuple[tuple[KeySource, ...], ...],
    single: bool,
) -> SegmentMask:
    """Mask that shows earlier columns of the same segment; a section's columns follow the columns
    of the section before."""
    columns, start = [], 0
    for num_rows, length in zigzag.sections:
        column = start + jnp.arange(length, dtype=jnp.int32)
        columns.append(jnp.broadcast_to(column[None], (num_rows, length)))
        start += length
    mask_ids = TokenIndices(*(zigzag.flatten(*x) for x in (columns, positions, segments)))
    return SegmentMask(zigzag, mask_ids, sources, single)


def _masked_attention(mask: SegmentMask, model: Model) -> CoreAttentionOfLayer:
    """Every layer attends to what the mask shows."""
    execution, mesh = model.config.execution, model.mesh

    def core_attention_of_layer(index: int | Array, window: Window = None) -> CoreAttention:
        def core_attention(
            query: Array,
            key: Array,
            value: Array,
            scale: float | None = None,
            sinks: Array | None = None,
        ) -> Array:
            return context_parallel_attention(
                query, key, value, mask._replace(window=window), execution, mesh, scale, sinks
            )

        return core_attention

    return core_attention_of_layer


def _pack_replay(
    replay: Integer[Array, "layer batch time k"] | None, flatten: Callable[[Array], Array]
) -> Integer[Array, "layer token k"] | None:
    """Recorded choices in the order of the packed batch."""
    return None if replay is None else jax.vmap(flatten)(replay)


def response_states(
    x: Float[Array, "local d_model"],
    shape: tuple[int, ...],
    prompt_length: int,
    num_samples: int,
    model: Model,
) -> Float[Array, "before d_model"]:
    """Of the states of a `pack_shared_prompts` batch, the one each response token was predicted
    from, in the order of `response_tokens`.

    Args:
      shape: ``[batch, time]`` shape of the rows.
    """
    mesh = model.mesh
    zigzag = zigzag_of_prompts(shape, prompt_length, num_samples, model)
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
    after: Float[Array, "local"], shape: tuple[int, ...], model: Model
) -> Float[Array, "batch time"]:
    """Moves values computed *after* each position to the token that they are about.

    The value computed at position ``t - 1`` is about token ``t``; the first token gets 0.
    """
    (rows,) = zigzag_of_rows(shape, model).restore(join_shards(after, model.mesh.sequence))
    return jnp.concatenate([jnp.zeros_like(rows[:, :1]), rows[:, :-1]], axis=1)


def next_tokens(tokens: Int[Array, "batch time"], model: Model) -> Int[Array, "local"]:
    """The token that follows each position, this rank's shard; the last position wraps to the
    first."""
    following = zigzag_of_rows(tokens.shape, model).flatten(jnp.roll(tokens, -1, axis=1))
    return local_shard(following, model.mesh.sequence)


def response_tokens(
    tokens: Int[Array, "batch time"], prompt_length: int, model: Model
) -> Int[Array, "local"]:
    """The tokens after the prompts, this rank's shard of them."""
    responses = tokens[:, prompt_length:]
    zigzag = zigzag_of_rows(responses.shape, model)
    return local_shard(zigzag.flatten(responses), model.mesh.sequence)


def expand_responses(
    before: Float[Array, "local"], shape: tuple[int, ...], prompt_length: int, model: Model
) -> Float[Array, "batch time"]:
    """Numbers about the `response_tokens`, put in their columns; prompts get 0."""
    zigzag = zigzag_of_rows((shape[0], shape[1] - prompt_length), model)
    (response,) = zigzag.restore(join_shards(before, model.mesh.sequence))
    return jnp.pad(response, ((0, 0), (prompt_length, 0)))


def unpack_shared_prompts(
    x: Shaped[Array, "token *rest"],
    shape: tuple[int, ...],
    prompt_length: int,
    num_samples: int,
    model: Model,
) -> Shaped[Array, "batch time *rest"]:
    """Unpacks an array per token of a `pack_shared_prompts` batch, all of its shards, to the rows
    of the tokens; the values of a prompt are repeated in each of its rows.

    Args:
      shape: ``[batch, time]`` shape of the rows.
    """
    zigzag = zigzag_of_prompts(shape, prompt_length, num_samples, model)
    prompts, responses = zigzag.restore(x)
    return jnp.concatenate([jnp.repeat(prompts, num_samples, axis=0), responses], axis=1)
