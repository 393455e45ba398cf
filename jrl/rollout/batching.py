"""Batches of trajectories on the mesh: their sharding, construction and selection of rows."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jrl.processes.agreement import to_devices
from jrl.recipes.base.batch import Batch
from jrl.rollout.decoding.requests import Trajectory
from jrl.rollout.decoding.slots import TokenRows
from sharding.folding import FoldedMesh
from sharding.sharded_jit import jit_onto


def over_rows(mesh: FoldedMesh) -> NamedSharding:
    """Sharding of arrays with a row per sequence, over dp."""
    return NamedSharding(mesh.mesh, PartitionSpec(mesh.dp))


def replicated(mesh: FoldedMesh) -> NamedSharding:
    """Sharding of arrays that are replicated on every device."""
    return NamedSharding(mesh.mesh, PartitionSpec())


def take_rows(batch: Batch[Array], rows: np.ndarray, mesh: FoldedMesh) -> Batch[Array]:
    """Selects rows of a batch in one compiled function; no data moves through the host.

    Args:
      rows: their indices.
    """
    indices = to_devices(rows.astype(np.int32), replicated(mesh))
    return _compiled_take(over_rows(mesh))(batch, indices)


@cache
def _compiled_take(sharding: NamedSharding) -> Callable[[Any, Array], Any]:
    def take(batch: Any, rows: Array) -> Any:
        return jax.tree.map(lambda array: jnp.take(array, rows, axis=0), batch)

    return jit_onto(take, sharding)


def batch_of(
    trajectories: Sequence[Trajectory],
    counts: np.ndarray,
    mesh: FoldedMesh,
    prompt_length: int,
    response_length: int,
) -> Batch[Array]:
    """Batch of the trajectories as rows, in their order, made by one compiled function; no tokens
    move through the host.

    Args:
      counts: ``[trajectories]`` bool, rows in the loss; the mask of the others is all false.
      mesh: of training, over the devices that decoded or more.
      prompt_length: positions that prompts are padded to, on their left.
      response_length: positions of the responses after them.
    """
    buffers = list({id(t.buffer): t.buffer for t in trajectories if t.buffer is not None}.values())
    offsets = dict(zip(map(id, buffers), np.cumsum([0, *map(len, buffers)]), strict=False))
    rows = [offsets[id(t.buffer)] + t.row for t in trajectories]
    row_fields = {
        "rows": np.array(rows, np.int32),
        "prompts": np.array([len(t.request.tokens) for t in trajectories], np.int32),
        "truncated": np.array([t.finish == "length" for t in trajectories], bool),
        "finished": np.array([t.finish != "window" for t in trajectories], bool),
        "counts": np.asarray(counts, bool),
    }
    windows = any(t.request.window is not None for t in trajectories)
    # Without an explicit sharding XLA would choose one, which JAX then looks for on the mesh that
    # decoded, where it need not exist.
    fields_on_mesh = to_devices(row_fields, replicated(mesh))
    decoder = buffers[0].decoder
    layout = _Layout(
        prompt_length, response_length, decoder.pad_id, decoder.config.num_experts, windows
    )
    make_batch = _compiled_batch(over_rows(mesh), layout)
    return make_batch(
        tuple(_replicate_rows(mesh, buffer.rows) for buffer in buffers), fields_on_mesh
    )


def _replicate_rows(mesh: FoldedMesh, rows: TokenRows[Array]) -> TokenRows[Array]:
    """Copies rows from a subset of the devices of `mesh` to all of them."""
    sharding = replicated(mesh)
    if rows.lengths.sharding.device_set == sharding.device_set:
        return rows
    return jax.device_put(rows, sharding)


def batch_from_host(
    trajectories: Sequence[Trajectory],
    counts: np.ndarray,
    mesh: FoldedMesh,
    prompt_length: int,
    response_length: int,
    pad_id: int,
    no_expert: int,
) -> Batch[Array]:
    """Batch of trajectories that are stored on the host, bitwise identical to `batch_of`.

    Of conversations the mask is that of the policy's tokens; where turns before the last have
    rewards, they are on the last token of each.

    Args:
      pad_id: id of padding.
      no_expert: expert id of tokens without recorded experts.
    """
    shape = len(trajectories), prompt_length + response_length
    choices = trajectories[0].sampled.choices
    if choices is not None:
        choices = np.full((*shape, *choices.shape[1:]), no_expert, choices.dtype)
    tokens = np.full(shape, pad_id, np.int32)
    valid, mask = np.zeros(shape, bool), np.zeros(shape, bool)
    behaviour_logprobs, old_logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    turn_rewards = np.zeros(shape, np.float32)
    for row, trajectory in enumerate(trajectories):
        request, sampled = trajectory.request, trajectory.sampled
        begin, end = prompt_length - len(request.tokens), prompt_length + len(sampled.tokens)
        tokens[row, begin:end], valid[row, begin:end] = request.ids, True
        mask[row, prompt_length:end] = counts[row]
        if (conversation := request.conversation) is not None:
            mask[row, prompt_length:end] &= conversation.policy_mask(len(sampled.tokens))
            for position, reward in conversation.rewards_before_end:
                turn_rewards[row, prompt_length + position] = reward
        behaviour_logprobs[row, prompt_length:end] = sampled.behaviour_logprobs
        old_logprobs[row, prompt_length:end] = sampled.old_logprobs
        if choices is not None:
            choices[row, begin:end] = sampled.choices
    batch = Batch(
        tokens=tokens,
        valid=valid,
        mask=mask,
        behaviour_logprobs=behaviour_logprobs,
        old_logprobs=old_logprobs,
        truncated=np.array([t.finish == "length" for t in trajectories]),
        choices=choices,
        turn_rewards=turn_rewards if turn_rewards.any() else None,
    )
    return to_devices(batch, over_rows(mesh))


class _Layout(NamedTuple):
    """Static sizes of a batch, and the padding values of its arrays."""

    prompt_length: int
    response_length: int
    pad_id: int
    no_expert: int
    windows: bool


@cache
def _compiled_batch(
    sharding: NamedSharding, layout: _Layout
) -> Callable[[tuple[TokenRows[Array], ...], dict[str, Array]], Batch[Array]]:
    def make_batch(
        buffers: tuple[TokenRows[Array], ...], row_fields: dict[str, Array]
    ) -> Batch[Array]:
        rows = jax.tree.map(
            lambda *arrays: jnp.take(jnp.concatenate(arrays), row_fields["rows"], axis=0),
            *buffers,
        )
        return _as_batch(rows, row_fields, layout)

    return jit_onto(make_batch, sharding)


def _as_batch(
    rows: TokenRows[Array], row_fields: dict[str, Array], layout: _Layout
) -> Batch[Array]:
    """Converts left-aligned rows to a batch, in which all responses start at the same position."""
    prompts, lengths = row_fields["prompts"][:, None], rows.lengths[:, None]
    # Position of each token of the batch in its row; negative before the prompt.
    in_batch = jnp.arange(layout.prompt_length + layout.response_length)[None]
    in_row = in_batch - (layout.prompt_length - prompts)
    valid = (in_row >= 0) & (in_row < lengths)
    sampled = valid & (in_row >= rows.starts[:, None])
    positions = jnp.clip(in_row, 0, rows.tokens.shape[1] - 1)

    def align(x: Array, where: Array, otherwise: float | int) -> Array:
        index = positions.reshape(*positions.shape, *[1] * (x.ndim - 2))
        where = where.reshape(index.shape)
        return jnp.where(
            where, jnp.take_along_axis(x, index, axis=1), jnp.asarray(otherwise, x.dtype)
        )

    choices = rows.choices
    return Batch(
        tokens=align(rows.tokens, valid, layout.pad_id),
        valid=valid,
        mask=sampled & row_fields["counts"][:, None],
        behaviour_logprobs=align(rows.behaviour_logprobs, sampled, 0.0),
        old_logprobs=align(rows.old_logprobs, sampled, 0.0),
        truncated=row_fields["truncated"],
        finished=row_fields["finished"] if layout.windows else None,
        choices=None if choices is None else align(choices, valid, layout.no_expert),
    )
